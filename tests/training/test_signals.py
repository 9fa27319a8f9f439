"""What ends a training that does not come back to Python."""

import signal
import subprocess
import sys
import time

import pytest

from mlcn_jax.training import loop

COMPUTES = """
import hashlib
from mlcn_jax.training.loop import _StopSignals
with _StopSignals():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as a compiler: minutes without a line of Python
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_what_is_deep_in_a_library(number):
    process = subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # until it is in there
        process.send_signal(number)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
    finally:
        process.kill()


def test_handlers_are_as_before_at_the_end():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with loop._StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1

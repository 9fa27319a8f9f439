"""What SIGTERM and Ctrl-C do to trainings and searches, also while they are deep in a library."""

import contextlib
import logging
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from mlcn_jax.search import run
from mlcn_jax.training import stop_signals
from mlcn_jax.training.stop_signals import SignalWatch, StopSignals

COMPUTES = """
import hashlib, logging, signal, sys
from mlcn_jax.training.stop_signals import SignalWatch
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
with SignalWatch([signal.SIGTERM, signal.SIGINT]):
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
        assert "stopping" in process.stdout.readline()
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
    finally:
        process.kill()


@contextlib.contextmanager
def training():
    with StopSignals():
        yield


@contextlib.contextmanager
def search():
    with contextlib.suppress(run.Stopped), run._stoppable(mock.Mock()):
        yield


@pytest.mark.parametrize("command", [training, search])
def test_trainings_and_searches_say_so_at_the_first_signal_and_end_at_the_second(command, monkeypatch, caplog):
    """The second one arrives where Python does not come to handle either: both handlers are postponed here."""
    caplog.set_level(logging.INFO)
    ended = mock.Mock()
    monkeypatch.setattr(stop_signals.os, "_exit", ended)
    monkeypatch.setattr(stop_signals, "_CLEANUP_SECONDS", 0.0)
    with command():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM: stopping" in caplog.text)
        ended.assert_not_called()
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: ended.called)
    ended.assert_called_once_with(128 + signal.SIGINT)


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_handlers_are_as_before_at_the_end():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_the_process_sends_itself_again_is_not_the_second(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    ended = mock.Mock()
    monkeypatch.setattr(stop_signals.os, "_exit", ended)
    monkeypatch.setattr(stop_signals, "_CLEANUP_SECONDS", 0.0)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with SignalWatch([signal.SIGTERM]) as watch:
            signal.raise_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in caplog.text)
            watch.ignored = 1
            signal.raise_signal(signal.SIGTERM)
            wait_until(lambda: watch.ignored == 0)
            ended.assert_not_called()
    finally:
        signal.signal(signal.SIGTERM, before)

"""The server before it serves: addresses in use, options that make no sense, and packages that are missing."""

import os
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import uvicorn
from conftest import REPOSITORY

from mlcn_jax.errors import InputError
from mlcn_jax.serving import server as server_lib
from mlcn_jax.serving.http_service import Limits
from mlcn_jax.serving.server import bind, main


def run_serve(*options):
    done = subprocess.run(
        [sys.executable, "-m", "mlcn_jax.serve", *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_an_address_in_use_gives_one_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, message = run_serve(str(tmp_path), f"--port={taken.getsockname()[1]}")
    assert code == 2
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1, port \d+ \(.*in use\).*--port\n", message)


def test_an_address_that_was_taken_after_it_was_bound_is_an_error_too():
    """Both can bind it while neither listens; uvloop does not tell that listening failed."""
    first = bind("127.0.0.1", 0)
    second = bind(*first.getsockname())
    first.listen()
    service = SimpleNamespace(limits=Limits(2, 8, 1000, 4, 9, timeout_seconds=5))
    with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1, port \d+ \(.*in use"):
        server_lib.serve(service, second, "serving")
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--max_batch=48", "power of two"),
        ("--max_batch=256", "power of two"),
        ("--port=70000", "0 to 65535"),
        ("--max_body_mib=0", "above 0"),
        ("--timeout_seconds=nan", "above 0"),
        ("--timeout_seconds=1e308", "at most 2,147,483,648"),
        ("--deadline_seconds=-1", "0 or more"),
        ("--workers=0", "1 or more"),
        ("--max_images=300", "max_queue=256"),
        ("--host=no.such.host.invalid", "cannot listen"),
        ("--port=0", "folder does not exist"),
    ],
)
def test_options_that_make_no_sense_are_named(monkeypatch, option, said):
    monkeypatch.setattr(sys, "argv", ["serve", "folder", option])
    with pytest.raises(InputError, match=said):
        main()


@pytest.mark.parametrize(
    ("number", "at_start", "ends"),
    [
        (signal.SIGTERM, signal.SIG_DFL, True),
        (signal.SIGHUP, signal.SIG_DFL, True),
        (signal.SIGHUP, signal.SIG_IGN, False),  # as nohup sets it
    ],
)
def test_a_signal_just_before_the_server_runs_ends_it(monkeypatch, number, at_start, ends):
    ended = []

    def run(server, sockets):
        signal.raise_signal(number)
        ended.append(server.should_exit)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(server_lib, "_complete", lambda service, config: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.signal(number, at_start)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server_lib.serve(SimpleNamespace(limits=Limits(1, 1, 1, 1, 1, 1.0)), listener, "")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [ends]


def test_the_metrics_of_another_server_are_left_alone(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/of/another/server")
    with pytest.raises(InputError, match="1 or more"):
        main(["folder", "--workers=0"])
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve", "folder"])
    monkeypatch.setattr(server_lib, "_PACKAGES", ("uvicorn", "no_such_package"))
    with pytest.raises(InputError, match=r"needs no_such_package: pip install 'mlcn_jax\[serve\]'"):
        main()


def test_an_address_that_others_can_reach_is_warned_of(caplog, monkeypatch):
    monkeypatch.setattr("mlcn_jax.serving.server._log.propagate", True)
    bind("localhost", 0).close()
    assert not caplog.records
    bind("0.0.0.0", 0).close()
    assert "other machines" in caplog.text

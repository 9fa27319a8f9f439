"""The supervisor of several serving processes: what it does with one that is stuck, replaced or ended."""

import re
import signal
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import prometheus_client.multiprocess
import pytest
from uvicorn.supervisors import multiprocess

from mlcn_jax.serving import workers


class Process:
    """A process that is ready at once, and lives until it is killed or has `ended`."""

    def __init__(self, config, sockets):
        made.append(self)
        self.pid, self.exitcode, self.calls, self.has_ended = len(made), None, [], False
        self.process = SimpleNamespace(join=self.note_join, exitcode=None)

    def note(self, *call):
        self.calls.append(call)

    def is_alive(self, timeout):
        self.note("is_alive", timeout)
        return not self.has_ended

    def wait_until_ready(self, timeout, should_exit):
        self.note("wait_until_ready", timeout)
        return not should_exit.is_set()

    def start(self):
        self.note("start")

    def terminate(self):
        self.note("terminate")

    def kill(self):
        self.note("kill")

    def note_join(self, timeout=None):
        self.note("join", timeout)

    def join(self):
        assert self.calls[-1] == ("kill",), "waits without limit"


made: list[Process] = []


@pytest.fixture
def supervisor(monkeypatch):
    """A supervisor of two processes that have started, and the processes whose metrics were dropped."""
    before = {number: signal.getsignal(number) for number in multiprocess.SIGNALS}
    monkeypatch.setattr(multiprocess, "Process", Process)
    made.clear()
    dropped: list[int] = []
    monkeypatch.setattr(prometheus_client.multiprocess, "mark_process_dead", dropped.append)
    found = workers._Workers(workers._Config("", workers=2, timeout_graceful_shutdown=7), [])
    found.message, found.dropped = "serving", dropped
    found.init_processes()
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def look(supervisor):
    supervisor.handle_signals()
    supervisor.keep_subprocess_alive()


def test_a_process_has_minutes_to_start_but_seconds_to_say_that_it_lives(supervisor):
    look(supervisor)
    supervisor.signal_queue.append(signal.SIGHUP)
    look(supervisor)
    calls = [call for process in made for call in process.calls]
    assert {seconds for name, *seconds in calls if name == "wait_until_ready" for seconds in seconds} == {300}
    assert {seconds for name, *seconds in calls if name == "is_alive" for seconds in seconds} == {10}


def test_metrics_of_processes_that_ended_or_were_replaced_are_dropped(supervisor):
    look(supervisor)
    made[0].has_ended = True
    look(supervisor)
    assert supervisor.dropped == [1]
    supervisor.signal_queue.append(signal.SIGHUP)
    look(supervisor)
    assert [process.pid for process in supervisor.processes] == [4, 5]
    assert sorted(supervisor.dropped) == [1, 2, 3]


def test_the_end_is_asked_for_at_once_and_waits_for_no_stuck_process(supervisor):
    signal.raise_signal(signal.SIGTERM)
    assert supervisor.should_exit.is_set()
    supervisor.join_all()
    for process in made:
        (_, patience), *rest = process.calls[-3:]
        assert 0 < patience <= 67
        assert rest == [("kill",), ("join", None)]
    assert not supervisor.has_failed


def test_a_restart_waits_for_no_stuck_process(supervisor):
    old = list(made)
    supervisor.signal_queue.append(signal.SIGHUP)
    look(supervisor)
    for process in old:
        (told,), (_, patience), *rest = process.calls[-4:]
        assert told == "terminate"
        assert 60 < patience <= 67
        assert rest == [("kill",), ("join", None)]
    assert [process.pid for process in supervisor.processes] == [3, 4]


def test_no_connection_waits_for_processes_that_accept_no_more(supervisor):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        supervisor.sockets = [listener]
        supervisor.init_processes()
        supervisor.join_all()
        assert listener.fileno() == -1


@pytest.mark.parametrize(
    ("given", "threads"), [({}, 2), ({"PJRT_NPROC": "5"}, 5), ({"PJRT_NPROC": "0"}, 1), ({"PJRT_NPROC": "x"}, 7)]
)
def test_processes_share_the_cores(monkeypatch, given, threads):
    seen = []
    monkeypatch.setattr(workers.os, "environ", dict(given))
    monkeypatch.setattr(workers.host, "num_cores", lambda: 7)
    monkeypatch.setattr(workers.signal, "signal", lambda *args: None)
    monkeypatch.setattr(workers._Workers, "run", lambda self: seen.append(workers.host.num_threads()))
    workers.run(lambda config: None, Mock(), 3, "ready")
    assert seen == [threads]


def test_the_end_waits_as_long_as_a_process_with_a_slow_model_does(supervisor, monkeypatch):
    monkeypatch.setattr(workers, "_end_with_parent", lambda: None)
    config = workers._Config("", workers=2, timeout_graceful_shutdown=7)
    config.patience = supervisor.config.patience  # which the process inherits
    slow = {"app": lambda scope, receive, send: None, "timeout_graceful_shutdown": 300}
    config.complete = lambda config: vars(config).update(slow)
    config.load()
    supervisor.join_all()
    assert 300 < next(call[1] for call in made[0].calls if call[0] == "join") <= 360


def test_only_the_process_that_did_not_start_is_told_of(supervisor, capsys, monkeypatch):
    capsys.readouterr()
    made.clear()
    supervisor.processes.clear()
    supervisor.does_listen = False
    monkeypatch.setattr(Process, "wait_until_ready", lambda self, *_: self.pid == 1)
    supervisor.init_processes()
    assert len(made) == 2
    assert capsys.readouterr().err.count("error: a process was not ready") == 1


def test_a_signal_while_processes_start_is_no_failure_to_start(supervisor):
    supervisor.processes.clear()
    signal.raise_signal(signal.SIGINT)
    supervisor.init_processes()
    assert not supervisor.has_failed


@pytest.mark.parametrize("listens", [True, False])
def test_it_serves_only_if_the_processes_could_listen(supervisor, capsys, listens):
    capsys.readouterr()
    with socket.socket() as listener:
        if listens:
            listener.listen()
        supervisor.sockets = [listener]
        supervisor.init_processes()
    assert (supervisor.does_listen, supervisor.has_failed) == (listens, not listens)
    assert capsys.readouterr().out == ("serving\n" if listens else "")


def test_a_process_leaves_sighup_to_its_supervisor(monkeypatch):
    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(workers, "_end_with_parent", lambda: None)
    config = workers._Config("", workers=2)
    config.complete = lambda config: setattr(config, "app", lambda scope, receive, send: None)
    try:
        config.load()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("code", "told"), [(-9, "ended by signal 9"), (None, "within 300 seconds"), (2, "^$")])
def test_a_process_that_did_not_start_is_told_of_unless_it_has_told_why(code, told):
    assert re.search(told, workers._problem(SimpleNamespace(process=SimpleNamespace(exitcode=code))))

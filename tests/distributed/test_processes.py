"""Runs of two processes: equal to one, stopped together, ended when one is lost, and refused where they do not fit."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from mlcn_jax.config import RunConfig
from mlcn_jax.distributed import processes
from mlcn_jax.errors import InputError
from mlcn_jax.training.trained import load_trained
from tests.conftest import REPOSITORY, TINY

TWO = {"parallel.processes": 2, "parallel.lane": 2}


def start(workdir, changes):
    flags = [f"--config.{name}={value}" for name, value in {**TINY, **changes}.items()]
    command = [sys.executable, "main.py", "--config=configs/default.py", f"--workdir={workdir}", *flags]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=env, **pipes)


def run(workdir, changes):
    process = start(workdir, changes)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_checkpoint(workdir, step):
    deadline = time.monotonic() + 100
    while not (workdir / "checkpoints" / str(step)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def child_of(process, number):
    """The process id of one of a run's processes."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                arguments = file.read().split("\0")
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == process.pid and f"--config.parallel.process={number}" in arguments:
            return pid
    raise AssertionError(f"process {number} is not there")


def assert_same(one, other):
    for a, b in zip(*(jax.tree.leaves(load_trained(w).params) for w in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_processes_are_stopped_lost_and_resumed_and_end_as_one_does(tmp_path):
    code, _, err = run(tmp_path / "one", {})
    assert code == 0, err
    two = tmp_path / "two"
    process = start(two, {**TWO, "parallel.plan": "stacks", "train.num_steps": 0})
    wait_for_checkpoint(two, 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert len(re.findall(r"stopped by SIGTERM after step \d+ of 560; run the same command again", err)) == 1
    stopped = load_trained(two).step

    process = start(two, {**TWO, "parallel.data": 2, "parallel.lane": 1, "train.num_steps": 0})
    wait_for_checkpoint(two, stopped // 5 * 5 + 5)
    os.kill(child_of(process, 1), signal.SIGKILL)
    killed = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert time.monotonic() - killed < 60
    assert "error: process 1 of 2 was lost (killed by SIGKILL)\nrun the same command again" in err

    for plan in ("stacks", "mesh"):
        fresh = {**TWO, "parallel.plan": plan}
        code, _, err = run(tmp_path / plan, fresh)
        assert code == 0, err
        assert_same(tmp_path / "one", tmp_path / plan)
    summary = json.loads((tmp_path / "mesh" / "summary.json").read_text())
    assert summary["num_devices"] == 2
    code, out, err = run(tmp_path / "mesh", fresh)
    assert code == 0
    assert "is finished: 20 steps" in err
    assert out.count("test accuracy") == 1
    assert "Gloo" not in out + err


def test_what_libraries_print_is_dropped_and_what_python_prints_is_not(tmp_path, monkeypatch):
    """gloo reports its connections from C++, past Python's `sys.stdout`."""
    before = os.dup(1)
    try:
        with open(tmp_path / "out", "w") as file:
            os.dup2(file.fileno(), 1)
        monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115
        print("before")
        processes.drop_native_output()
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.")
        os.write(2, b"an error of the library")
        print("after")
        sys.stdout.close()
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert (tmp_path / "out").read_text() == "before\nafter\n"


@pytest.mark.long
def test_a_process_that_does_not_come_or_differs_is_named(tmp_path, monkeypatch):
    coordinator = f"127.0.0.1:{processes.free_port()}"
    address = {"parallel.coordinator": coordinator, "parallel.processes": 2, "parallel.lane": 2}
    alone = RunConfig().replace({**address, "parallel.process": 0, "parallel.timeout_seconds": 1}).parallel
    with pytest.raises(InputError, match=rf"process 1 of 2 did not join at {coordinator}, within .*_seconds=1$"):
        processes.join(alone, {})
    first = start(tmp_path / "0", {**address, "parallel.process": 0})
    code, _, err = run(tmp_path / "1", {**address, "parallel.process": 1, "train.seed": 7})
    assert code == 2
    assert "process 1 has a different configuration" in err
    assert "train.seed: 0 there, 7 here" in err
    assert "process 1 has a different configuration" in first.communicate(timeout=60)[1]
    assert first.returncode == 2
    monkeypatch.setenv("MLCN_JAX_WATCHED", "1")  # without a process that watches each
    stacks = {**address, "parallel.plan": "stacks"}
    first = start(tmp_path / "0", {**stacks, "parallel.process": 0})
    code, _, err = run(tmp_path / "1", {**stacks, "parallel.process": 1, "parallel.profile": "nowhere.json"})
    assert code == 2
    assert "error: process 1: nowhere.json cannot be read" in err
    assert "error: process 1: nowhere.json cannot be read" in first.communicate(timeout=60)[1]
    assert first.returncode == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\xfe\x00", "something other than process 0 answers"),
        (b"HTTP/1.1 400 Bad Request", "something other than process 0 answers"),
        (b"process 2 of 3 did not join", "process 2 of 3 did not join"),
        (b"", "process 0 did not answer at .*, where something closes connections"),
    ],
)
def test_what_is_not_process_0_is_told_apart(answer, said):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection = other.accept()[0]
                    with connection:
                        connection.recv(16)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        changes = {"parallel.coordinator": f"127.0.0.1:{port}", "parallel.processes": 3, "parallel.timeout_seconds": 1}
        settings = RunConfig().replace(changes).parallel
        with pytest.raises(InputError, match=said):
            processes._roll_call(dataclasses.replace(settings, process=1))
        other.shutdown(socket.SHUT_RDWR)
        thread.join()


def settings_at(coordinator, process, **changes):
    changes = {"processes": 2, "timeout_seconds": 10, "coordinator": coordinator, "process": process} | changes
    return RunConfig().replace({f"parallel.{name}": value for name, value in changes.items()}).parallel


def test_process_0_that_still_waits_for_another_has_been_found():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        problem = processes._report("127.0.0.1", port, settings_at(f"127.0.0.1:{port}", 1), time.monotonic() + 0.2)
        assert problem == f"process 0 answered at 127.0.0.1:{port}, but not all others joined"


@pytest.mark.parametrize(("listens", "found"), [("192.0.2.1", "127.0.0.1"), ("[::1]", "[::1]")])
def test_process_0_is_found_wherever_its_machine_is_reached(listens, found):
    """Its own name may stand for another address than elsewhere, and addresses may be translated on the way."""
    port = processes.free_port()
    first = threading.Thread(target=processes._roll_call, args=(settings_at(f"{listens}:{port}", 0),))
    first.start()
    processes._roll_call(settings_at(f"{found}:{port}", 1))
    first.join()


def connected(port, number):
    """A connection as of a process that joins, once process 0 listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    connection.sendall(str(number).encode())
    return connection


def join_and_leave(port, number):
    with connected(port, number):
        time.sleep(0.1)


def three_that_join(port):
    """Threads of three processes that join, none of them started, and the numbers of those that have joined."""
    ended = []

    def join(number):
        processes._roll_call(settings_at(f"127.0.0.1:{port}", number, processes=3))
        ended.append(number)

    return [threading.Thread(target=join, args=(number,), daemon=True) for number in range(3)], ended


def test_a_process_that_has_left_is_waited_for_again():
    threads, ended = three_that_join(port := processes.free_port())
    threads[0].start()
    join_and_leave(port, 2)
    threads[1].start()
    threads[1].join(0.5)
    assert ended == []
    threads[2].start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [0, 1, 2]


def test_a_process_whose_number_another_one_takes_is_told_so():
    threads, ended = three_that_join(port := processes.free_port())
    threads[0].start()
    with connected(port, 1) as first:
        threads[1].start()
        assert first.recv(1024).endswith(b"took its place: give each process its own parallel.process")
    threads[2].start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [0, 1, 2]


def test_a_process_that_has_left_is_named():
    port = processes.free_port()
    leaving = threading.Thread(target=join_and_leave, args=(port, 1))
    leaving.start()
    with pytest.raises(InputError, match="process 1, 2 of 3 did not join"):
        processes._roll_call(settings_at(f"127.0.0.1:{port}", 0, processes=3, timeout_seconds=1))
    leaving.join()


def test_a_second_signal_ends_a_run_with_its_own_code(capsys):
    children = {0: type("Killed", (), {"poll": lambda self: -signal.SIGKILL})()}
    settings = RunConfig().parallel
    assert processes._wait(children, settings, [signal.SIGINT, signal.SIGINT]) == 130
    assert capsys.readouterr().err == ""
    assert processes._wait(children, settings, [signal.SIGINT]) == 75
    assert "process 0 of 1 was lost (killed by SIGKILL)" in capsys.readouterr().err


def test_a_signal_while_processes_start_is_no_loss(capsys):
    """They end by it until they have a handler for it."""
    children = {n: type("Ended", (), {"poll": lambda self: -signal.SIGTERM})() for n in range(2)}
    settings = RunConfig().replace(TWO).parallel
    assert processes._wait(children, settings, [signal.SIGINT]) == 75
    told = "stopped by SIGINT while processes started; run the same command again\n"
    assert capsys.readouterr().err == told
    assert processes._wait(children, settings, []) == 75
    assert "process 0 of 2 was lost (killed by SIGTERM)" in capsys.readouterr().err


def test_a_signal_before_all_processes_have_started_reaches_them_all(monkeypatch):
    started = []

    class Process:
        """Stands for a process; a signal arrives while the first one starts."""

        returncode = 75

        def __init__(self, *args, **options):
            self.signals = []
            if not started:
                os.kill(os.getpid(), signal.SIGTERM)
            started.append(self)

        def send_signal(self, number):
            self.signals.append(number)

        def poll(self):
            return self.returncode

        wait, kill = poll, poll

    monkeypatch.setattr(processes.subprocess, "Popen", Process)
    assert processes.watch(RunConfig().replace(TWO).parallel) == 75
    assert [process.signals for process in started] == [[signal.SIGTERM], [signal.SIGTERM]]


def test_a_coordinator_that_is_no_address_is_refused():
    with pytest.raises(InputError, match=r"parallel\.process=1 needs parallel\.coordinator=HOST:PORT"):
        processes.watch(RunConfig().replace({**TWO, "parallel.process": 1}).parallel)
    nowhere = RunConfig().replace({**TWO, "parallel.process": 0, "parallel.coordinator": "nowhere"})
    with pytest.raises(InputError, match="'nowhere'; it must be HOST:PORT"):
        processes.join(nowhere.parallel, {})
    with pytest.raises(InputError, match=r"parallel\.coordinator is '127\.0\.0\.1:0'; .* with a port from 1 to 65535"):
        processes.join(dataclasses.replace(nowhere.parallel, coordinator="127.0.0.1:0"), {})


def test_without_a_launcher_it_is_said_which_there_are(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)  # as in a new process
    monkeypatch.setattr(processes, "drop_native_output", lambda: None)
    with pytest.raises(InputError, match=r"processes is 0, but .* Slurm's srun or the mpirun of Open MPI 4, or give"):
        processes.join(RunConfig().replace({"parallel.processes": 0}).parallel, {})


@pytest.mark.parametrize("first", [True, False])
def test_what_process_0_cannot_read_stops_all(monkeypatch, first):
    def read():
        assert first, "the others do not read"
        raise InputError("no permission")

    def gather(mine):
        assert mine == ({"error": "no permission"} if first else {"value": None})
        return [{"error": "no permission"}, {"value": None}]

    monkeypatch.setattr(processes, "is_first", lambda: first)
    monkeypatch.setattr(processes, "gather", gather)
    with pytest.raises(InputError, match="process 0: no permission"):
        processes.in_first(read)


@pytest.mark.long
def test_what_no_process_can_start_is_said_once(tmp_path):
    code, _, err = run(tmp_path, {**TWO, "parallel.lane": 1})
    assert code == 2
    assert err.count("the 2 processes have 2 devices in all") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is not told that its parent has ended")
def test_a_process_that_cannot_stop_now_ends_with_its_parent():
    """As one that compiles, which a signal to stop would have to wait for."""
    child = "import signal, sys, time; from mlcn_jax.distributed import processes; signal.signal(signal.SIGTERM, "
    child += "signal.SIG_IGN); processes.end_with(int(sys.argv[1])); print('ready', flush=True); time.sleep(100)"
    code = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); "
    parent = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(100)", child], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        started = time.monotonic()
        assert parent.stdout.read() == ""  # which ends once the child has ended, too
        assert time.monotonic() - started < 10

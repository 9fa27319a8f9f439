"""Runs of several processes, on one or more machines: they are started, joined, watched and ended together.

Process 0 reads and writes the workdir; the others compute. jax cannot continue if one of its processes is lost, so that
ends the run; running the command again resumes from the newest checkpoint.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.errors import InputError, Stopped, differences
from mlcn_jax.launch import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED
from mlcn_jax.settings import ParallelSettings

_WATCHED = "MLCN_JAX_WATCHED"  # set for processes started by `watch`
_MAY_DIFFER = ("parallel.process", "parallel.profile", "data.dir", "data.cache_dir")  # between the processes of a run
_GRACE_SECONDS = 2.0  # for processes that fail for the same reason as the first
_POLL_SECONDS = 0.1
_LONGEST_SECONDS = 1e6  # that a socket can wait
_REPLACED = "took its place: give each process its own parallel.process"
_JOINED = "joined"  # the answer of process 0 once all processes have joined


def is_watched() -> bool:
    """Whether this process was started by `watch`."""
    return _WATCHED in os.environ


def watch(settings: ParallelSettings) -> int:
    """Starts this command again once for each process that runs on this machine, and returns their exit code.

    If `settings.process` is -1, these are all processes, each on its share of the cores. SIGTERM and Ctrl-C are passed
    on: all processes then save and stop together. If one is lost, the others are ended, within seconds on this machine
    and within `settings.timeout_seconds` on others.

    Raises:
      InputError: a single process is to be started, but there is no coordinator address.
    """
    starts_one = settings.process >= 0
    if starts_one and not settings.coordinator:
        raise InputError(
            f"parallel.process={settings.process} needs parallel.coordinator=HOST:PORT, an address of process 0's "
            "machine that all can reach; without parallel.process, all processes start on this machine"
        )
    numbers = [settings.process] if starts_one else list(range(settings.processes))
    coordinator = settings.coordinator or f"127.0.0.1:{free_port()}"
    children: dict[int, subprocess.Popen] = {}
    said = {number: tempfile.TemporaryFile() for number in numbers[1:]}  # noqa: SIM115
    signals_seen = []

    def pass_on(number, frame):
        del frame
        signals_seen.append(number)
        send()

    def send():
        for child in children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM if len(signals_seen) == 1 else signal.SIGKILL)

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        for place, number in enumerate(numbers):
            flags = [f"--config.parallel.process={number}", f"--config.parallel.coordinator={coordinator}"]
            children[number] = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:], *flags],
                env={**os.environ, _WATCHED: "1"},
                stdout=None if number == numbers[0] else subprocess.DEVNULL,
                stderr=said.get(number),
                start_new_session=True,
                preexec_fn=_child_setup(place, len(numbers)),
            )
        if signals_seen:  # before all were there
            send()
        return _wait(children, settings, signals_seen)
    finally:
        for child in children.values():
            child.kill()
        for number, child in children.items():
            code = child.wait()
            if number in said and code not in (0, -signal.SIGKILL, children[numbers[0]].returncode):
                said[number].seek(0)
                print(f"process {number}: {said[number].read().decode(errors='replace')}", file=sys.stderr)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: dict[int, subprocess.Popen], settings: ParallelSettings, signals_seen: Sequence[int]) -> int:
    """The run's exit code: once a process fails, the others get a moment to end on their own and say why.

    If one was asked to stop, so were all, and process 0 still has a checkpoint to write: they get more time. A second
    signal ends all at once, and the exit code is that signal's.
    """
    failed_at = None
    while None in (codes := {number: child.poll() for number, child in children.items()}).values():
        failures = [code for code in codes.values() if code]
        if failures:
            failed_at = failed_at or time.monotonic()
            stopping = set(failures) == {EXIT_STOPPED}
            if time.monotonic() - failed_at > (settings.timeout_seconds if stopping else _GRACE_SECONDS):
                break
        time.sleep(_POLL_SECONDS)
    if len(signals_seen) > 1:
        return 128 + signals_seen[1]
    failed = {number: code for number, code in codes.items() if code}
    lost = {number: code for number, code in failed.items() if code not in (EXIT_INPUT, EXIT_FAILED, EXIT_STOPPED)}
    if not lost:
        return next(iter(failed.values()), 0)
    if signals_seen and {*lost.values()} == {-signal.SIGTERM}:  # as they do that have no handler yet
        name = signal.Signals(signals_seen[0]).name
        print(f"stopped by {name} while processes started; run the same command again", file=sys.stderr)
        return EXIT_STOPPED
    for number, code in lost.items():
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        print(f"error: process {number} of {settings.processes} was lost ({how})", file=sys.stderr)
    print("run the same command again: it resumes from the newest checkpoint", file=sys.stderr)
    return EXIT_STOPPED


def end_with(parent: int) -> None:
    """Makes this process be killed when its parent ends (Linux only); raises Stopped if the parent already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: SIGTERM would wait for a compilation to end
        if os.getppid() != parent:
            raise Stopped("the command that started this one has ended")


def _child_setup(place: int, count: int) -> Callable[[], None]:
    def setup() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the watcher
            cores = sorted(os.sched_getaffinity(0))
            if 1 < count <= len(cores):
                os.sched_setaffinity(0, cores[place * len(cores) // count : (place + 1) * len(cores) // count])

    return setup


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def host_and_port(name: str, address: str, least: int = 1) -> tuple[str, int]:
    """The parts of HOST:PORT, which a setting or flag gave; raises InputError, naming it, for anything else.

    The host is without the brackets that an IPv6 address must have; the port is at least `least`.
    """
    found = re.fullmatch(r"(\[[^][/]+\]|[^][:/]+):(\d{1,5})", address)
    if not found or not least <= int(found[2]) <= 65535:
        raise InputError(
            f"{name} is {address!r}; it must be HOST:PORT, such as 192.0.2.1:29600 or [2001:db8::1]:29600, with a port "
            f"from {least} to 65535"
        )
    return found[1].strip("[]"), int(found[2])


def join(settings: ParallelSettings, values: Mapping[str, Any]) -> None:
    """Makes this process part of a run of several; if `processes` is 0, the cluster's environment decides.

    Args:
      settings: how many processes there are, which one this is, and the coordinator's address.
      values: the run's configuration by full field names; it must be the same in all processes.

    Raises:
      InputError: a process does not join within `timeout_seconds`, or has a different configuration; or no cluster is
        found.
    """
    import jax

    from_cluster = settings.processes == 0
    if not from_cluster:
        _roll_call(settings)
    drop_native_output()
    try:
        jax.distributed.initialize(
            coordinator_address=None if from_cluster else settings.coordinator,
            num_processes=None if from_cluster else settings.processes,
            process_id=None if from_cluster else settings.process,
            initialization_timeout=settings.timeout_seconds,
            heartbeat_timeout_seconds=settings.timeout_seconds,
        )
    except ValueError as error:
        if not from_cluster:
            raise
        raise InputError(
            "parallel.processes is 0, but this process was not started by a launcher that jax knows "
            f"({str(error).rstrip('.')}): start it with Slurm's srun or the mpirun of Open MPI 4, or give each process "
            "parallel.processes, parallel.process and parallel.coordinator=HOST:PORT"
        ) from error
    before = _threads()
    if jax.default_backend() == "cpu":
        _make_collectives_yield(_threads() - before)
    _check_same_config(values)


def drop_native_output() -> None:
    """Discards what C++ libraries print to standard output from here on; Python's own output is unaffected.

    gloo reports every connection there, also of groups of devices that first communicate during training. Its errors
    are not lost: they are raised as exceptions or written to standard error.
    """
    sys.stdout.flush()
    native = 1
    sys.stdout = open(os.dup(native), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, native)
    os.close(nowhere)


def _roll_call(settings: ParallelSettings) -> None:
    """Waits until all processes have joined; jax itself would abort without saying which one is missing.

    Process 0 listens on the coordinator's port, before jax does and on all interfaces as jax does, and answers the
    others once all have joined or time is up.

    Raises:
      InputError: some did not join; the message names them.
    """
    host, port = host_and_port("parallel.coordinator", settings.coordinator)
    deadline = time.monotonic() + min(settings.timeout_seconds, _LONGEST_SECONDS)
    problem = _hear_all(port, settings, deadline) if settings.process == 0 else _report(host, port, settings, deadline)
    if problem.endswith(_REPLACED):
        raise InputError(problem)
    if problem:
        raise InputError(f"{problem}, within parallel.timeout_seconds={settings.timeout_seconds}")


def _hear_all(port: int, settings: ParallelSettings, deadline: float) -> str:
    here: list[tuple[int, socket.socket]] = []
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise InputError(
            f"process 0 cannot listen on port {port} of parallel.coordinator={settings.coordinator} "
            f"({error.strerror or error}): give a free port of this machine, on which process 0 runs"
        ) from error
    with contextlib.ExitStack() as open_until_answered, server:
        while missing := set(range(1, settings.processes)) - {number for number, _ in here}:
            if time.monotonic() >= deadline:
                break
            server.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(TimeoutError, ValueError, ConnectionError):
                connection = open_until_answered.enter_context(server.accept()[0])
                connection.settimeout(1.0)
                number = int(connection.recv(16))
                for before in [other for known, other in here if known == number]:  # dead, or started with that number
                    with contextlib.suppress(OSError):
                        told = f"process {number} of {settings.processes} was started again, and that one {_REPLACED}"
                        before.sendall(told.encode())
                here = [(known, other) for known, other in here if known != number] + [(number, connection)]
            here = [(number, connection) for number, connection in here if not _has_left(connection)]
        server.close()  # before jax listens there
        names = ", ".join(map(str, sorted(missing)))
        problem = f"process {names} of {settings.processes} did not join at {settings.coordinator}" if missing else ""
        for _, connection in here:
            with contextlib.suppress(OSError):
                connection.sendall((problem or _JOINED).encode())
    return problem


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection, as a process does that gives up before all have joined."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(host: str, port: int, settings: ParallelSettings, deadline: float) -> str:
    address = settings.coordinator
    problem = f"process 0 was not found at {address}"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0) as connection:
            problem = (
                f"process 0 did not answer at {address}, where something closes connections (another program that has "
                "this port, or process 0 as it ended)"
            )
            connection.sendall(str(settings.process).encode())
            connection.settimeout(max(0.01, deadline + 1 - time.monotonic()))
            try:
                answer = connection.recv(1024).decode(errors="replace")
            except TimeoutError:
                return f"process 0 answered at {address}, but not all others joined"
            if answer == _JOINED:
                return ""
            if answer and not answer.startswith("process "):
                return f"something other than process 0 answers at {address}: give parallel.coordinator a free port"
            if answer:
                return answer
        time.sleep(_POLL_SECONDS)
    return problem


def _make_collectives_yield(threads: set[int]) -> None:
    """Lets gloo's thread run only while nothing else needs its core.

    While a message that this process has not yet asked for is pending, that thread busy-waits and so starves the very
    computation that would ask for it: a collective takes up to 30 times as long. Only Linux has this scheduling class.
    """
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:  # the thread may not yet have reached the call that identifies it
        for thread in threads:
            with contextlib.suppress(OSError):
                if "epoll" in Path(f"/proc/self/task/{thread}/wchan").read_text():
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                    return
        time.sleep(0.01)


def _threads() -> set[int]:
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


def _check_same_config(values: Mapping[str, Any]) -> None:
    mine = {name: value for name, value in values.items() if name not in _MAY_DIFFER}
    first = in_first(lambda: mine)
    rows = differences(first, mine, here="here")
    differ = gather(bool(rows))
    if any(differ):
        who = ", ".join(str(i) for i, is_other in enumerate(differ) if is_other)
        head = f"process {who} has a different configuration from process 0: give all processes the same"
        raise InputError("\n".join([head, *rows]))


def is_first() -> bool:
    """Whether this process reads and writes the workdir."""
    import jax

    return jax.process_index() == 0


def arrays_from_first(tree: Any) -> Any:
    """Process 0's arrays in every process; the others pass arrays of the same shapes and dtypes."""
    import jax
    from jax.experimental import multihost_utils

    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(jax.device_get(tree))


def gather(value: Any) -> list[Any]:
    """All-gathers `value`, which must be JSON-serializable: every process gets those of all, in order."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [json.loads(json.dumps(value))]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(mine.size))).reshape(-1)
    rows = np.asarray(multihost_utils.process_allgather(np.resize(mine, max(sizes))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def everywhere(function: Callable[[], Any]) -> list[Any]:
    """Calls a function in every process, and returns all results in each; they must be JSON-serializable.

    Raises:
      InputError: the function raised it in at least one process; all raise it, so that none is left waiting.
    """
    try:
        mine = {"value": function()}
    except InputError as error:
        mine = {"error": str(error)}
    parts = gather(mine)
    failed = [i for i, part in enumerate(parts) if "error" in part]
    if len(parts) == 1 and failed:
        raise InputError(parts[0]["error"])
    if failed:
        raise InputError("\n".join(f"process {i}: {parts[i]['error']}" for i in failed))
    return [part["value"] for part in parts]


def in_first(function: Callable[[], Any]) -> Any:
    """Calls a function in process 0 only, and returns its result, which must be JSON-serializable, in every process.

    Raises:
      InputError: the function raised it; all processes raise it, so that none is left waiting.
    """
    return everywhere(lambda: function() if is_first() else None)[0]


def meet(where: str) -> None:
    """A barrier: waits until every process has arrived, where nothing else synchronises them."""
    import jax
    from jax.experimental import multihost_utils

    with jax.transfer_guard("allow"):
        multihost_utils.sync_global_devices(where)


def asked_to_stop(step: int) -> bool:
    """Whether all processes must stop after this step because one of them got SIGTERM; checked at every step."""
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)

"""Several processes that serve one model at one address, for machines on which one Python process is the bottleneck.

The processes accept connections on one socket, which stays open while they are replaced, so a restart (SIGHUP) loses no
request. Built on uvicorn's supervisor.
"""

import errno
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import prometheus_client.multiprocess
import uvicorn
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from mlcn_jax import host

_READY_SECONDS = 300  # time for a process to load its model and compile its programs
_LAST_SECONDS = 60  # time for a process to end, besides its own patience
_ANSWER_SECONDS = 10  # time for a process to say that it lives; one that does not is replaced


class _Config(uvicorn.Config):
    """The settings of a process; `complete`, called in that process, loads the model and adds the application."""

    complete: Callable[["_Config"], None]

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.patience = multiprocessing.get_context("spawn").Value("d", 0.0)  # seconds, of the latest process

    def load(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the supervisor, which replaces this process
        threading.Thread(target=_end_with_parent, daemon=True).start()
        self.complete(self)
        self.patience.value = float(self.timeout_graceful_shutdown or 0)
        super().load()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _problem(process: Process) -> str:
    """Why a process is not ready, if it has not told so itself."""
    code = process.process.exitcode
    if code is None:
        return f"a process was not ready to serve within {_READY_SECONDS} seconds: give fewer --workers"
    if code < 0:
        return f"a process was ended by signal {-code} while it started (9 may mean that memory ran out)"
    return ""


class _Workers(Multiprocess):
    """uvicorn's supervisor; starts one process before the others, and drops the metrics of those that ended."""

    config: _Config
    message: str
    has_failed = False  # whether a process could not start, or not listen
    is_ready = does_listen = False
    _late: Process | None = None  # the first that was not ready

    def __init__(self, config: _Config, sockets: list[socket.socket]):
        super().__init__(config, sockets)
        config.timeout_worker_healthcheck = _ANSWER_SECONDS
        self._counted: set[int | None] = set()  # processes that may have metrics
        for number in (signal.SIGTERM, signal.SIGINT):  # at once: uvicorn's own handlers wait for the next look around
            signal.signal(number, lambda *_: self.should_exit.set())

    def init_processes(self) -> None:
        wanted, self.processes_num = self.processes_num, 1
        super().init_processes()  # if one cannot start, none can
        is_ready = self._are_ready()
        while is_ready and len(self.processes) < wanted:
            self.handle_ttin()  # one more
        self.is_ready = is_ready and self._are_ready()
        if self.is_ready:
            self.does_listen = all(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for one in self.sockets)
        if self.does_listen:
            print(self.message, flush=True)
        else:
            self.has_failed = not self.should_exit.is_set()
            if self.has_failed and self._late is not None and (problem := _problem(self._late)):
                print(f"error: {problem}", file=sys.stderr)
            self.should_exit.set()

    def _are_ready(self) -> bool:
        late = (one for one in self.processes if not one.wait_until_ready(_READY_SECONDS, self.should_exit))
        self._late = next(late, None)
        return self._late is None

    def restart_all(self) -> None:
        self.config.timeout_worker_healthcheck = _READY_SECONDS  # uvicorn waits as long for new processes
        for process in self.processes:
            process.join = functools.partial(self._end, process)  # type: ignore[method-assign]  # its own has no limit
        super().restart_all()
        self.config.timeout_worker_healthcheck = _ANSWER_SECONDS

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        now = {process.pid for process in self.processes}
        for pid in self._counted - now:
            prometheus_client.multiprocess.mark_process_dead(pid)
        self._counted = now

    def join_all(self) -> None:
        if self.does_listen:
            for listener in self.sockets:  # or connections would wait here for processes that accept no more
                listener.close()
        last = self._last_moment()
        for process in self.processes:
            self._end(process, last)

    def _last_moment(self) -> float:
        """When a process that is told to end now must have ended."""
        patience = max(float(self.config.timeout_graceful_shutdown or 0), self.config.patience.value)
        return time.monotonic() + patience + _LAST_SECONDS

    def _end(self, process: Process, last: float | None = None) -> None:
        """Waits for a process that was told to end, and kills it if it is stuck."""
        last = self._last_moment() if last is None else last
        process.process.join(max(0.0, last - time.monotonic()))
        process.kill()
        process.process.join()


def run(
    complete: Callable[[uvicorn.Config], None], listener: socket.socket, workers: int, message: str, **settings: Any
) -> bool:
    """Serves with `workers` processes until a signal arrives; SIGHUP replaces each by a new one, once that is ready.

    Args:
      complete: called in each process with uvicorn's settings, of which it sets `app` and `http`; must be picklable.
      listener: a bound socket.
      workers: number of processes, which share the cores: each computes with as many threads as that leaves it.
      message: printed once all are ready.
      settings: further settings of uvicorn.

    Returns:
      Whether all could start; a process that could not has printed the reason.

    Raises:
      OSError: the address is in use.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(1, host.num_cores() // workers)))  # see `host.num_threads`
    config = _Config("", workers=workers, **settings)
    config.complete = complete
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read by prometheus_client
        supervisor = _Workers(config, [listener])
        supervisor.message = message
        supervisor.run()
    if supervisor.is_ready and not supervisor.does_listen:  # uvloop does not tell that listening failed
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return not supervisor.has_failed

"""Several processes that serve one model at one address, for machines on which one Python process is the bottleneck.

The processes accept connections on one socket, which stays open while they are replaced, so a restart (SIGHUP) loses no
request. Built on uvicorn's supervisor.
"""

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import prometheus_client.multiprocess
import uvicorn
from uvicorn.supervisors import Multiprocess

_READY_SECONDS = 300  # time for a process to load its model and compile its programs


class _Config(uvicorn.Config):
    """The settings of a process; `complete`, called in that process, loads the model and adds the application."""

    complete: Callable[["_Config"], None]

    def load(self) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        self.complete(self)
        super().load()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Workers(Multiprocess):
    """uvicorn's supervisor; starts one process before the others, and drops the metrics of those that ended."""

    message: str
    is_ready: bool

    def init_processes(self) -> None:
        wanted, self.processes_num = self.processes_num, 1
        super().init_processes()  # if one cannot start, none can
        self.is_ready = self._are_ready()
        while self.is_ready and len(self.processes) < wanted:
            self.handle_ttin()  # one more
        self.is_ready = self.is_ready and self._are_ready()
        if self.is_ready:
            print(self.message, flush=True)
        else:
            self.should_exit.set()

    def _are_ready(self) -> bool:
        return all(process.wait_until_ready(_READY_SECONDS, self.should_exit) for process in self.processes)

    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            prometheus_client.multiprocess.mark_process_dead(pid)


def run(
    complete: Callable[[uvicorn.Config], None], listener: socket.socket, workers: int, message: str, **settings: Any
) -> bool:
    """Serves with `workers` processes until a signal arrives; SIGHUP replaces each by a new one, once that is ready.

    Args:
      complete: called in each process with uvicorn's settings, of which it sets `app` and `http`; must be picklable.
      listener: a bound socket.
      workers: number of processes.
      message: printed once all are ready.
      settings: further settings of uvicorn.

    Returns:
      Whether all could start; a process that could not has printed the reason.
    """
    config = _Config("", workers=workers, timeout_worker_healthcheck=_READY_SECONDS, **settings)
    config.complete = complete
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read by prometheus_client
        supervisor = _Workers(config, [listener])
        supervisor.message = message
        supervisor.run()
    return supervisor.is_ready

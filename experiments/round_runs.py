"""The processes of a run in rounds, on this machine: the coordinator, and two workers that each have a link to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import REPOSITORY
from experiments.tiers_relay import Link, Relay
from mlcn_jax.distributed.processes import free_port
from mlcn_jax.errors import InputError

WORKERS = 2
SLOW = Link(delay_ms=50, rate_mbit=10)
POLL_SECONDS = 0.1
_LOG_END = 2000  # characters shown when a process failed


class Run:
    """The processes of a run in rounds, each with its link."""

    def __init__(self, changes: dict[str, Any], folder: Path, link: Link):
        self._folder, self._port = folder, free_port()
        self._flags = [f"--config={REPOSITORY / 'configs' / 'default.py'}"]
        self._flags += [f"--config.{name}={value}" for name, value in changes.items()]
        self._relays = [Relay(("127.0.0.1", self._port), Link(link.delay_ms, link.rate_mbit)) for _ in range(WORKERS)]
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores, *([cores[i % len(cores)]] for i in range(WORKERS))]
        self.processes = [self.start(i) for i in range(WORKERS + 1)]

    def start(self, i: int) -> subprocess.Popen:
        """Starts the coordinator (0) or a worker, in the place of one that ended."""
        own = ["--serve", f"127.0.0.1:{self._port}", "--workdir", str(self._folder)]
        if i:
            own = ["--coordinator", f"127.0.0.1:{self._relays[i - 1].port}", "--worker", str(i - 1)]
            own += ["--workdir", str(self._folder / f"worker{i - 1}")]
        log = (self._folder.parent / f"{self._folder.name}.log").open("a")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlcn_jax", "rounds", *self._flags, *own],
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "MLCN_JAX_PARENT": str(os.getpid()),  # they end with this script
                    "JAX_COMPILATION_CACHE_DIR": str(programs_of(self._folder)),
                },
                stdout=log,
                stderr=log,
            )
        os.sched_setaffinity(process.pid, self._cores[i])
        return process

    def kill(self, i: int) -> None:
        """Kills a process."""
        self.processes[i].send_signal(signal.SIGKILL)
        self.processes[i].wait()

    def start_again(self, i: int) -> None:
        """Starts a process that was killed."""
        self.processes[i] = self.start(i)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds or the coordinator has ended."""
        while self.is_running() and not condition():
            time.sleep(POLL_SECONDS)

    @property
    def bytes_moved(self) -> int:
        """Bytes that went over all links so far, in both directions."""
        return sum(relay.sent + relay.received for relay in self._relays)

    def is_running(self) -> bool:
        """Whether the coordinator is at work.

        Raises:
          InputError: a worker failed, for which the coordinator would wait forever; all processes were ended.
        """
        if self.processes[0].poll() is not None:
            return False
        for i, process in enumerate(self.processes[1:]):
            if code := process.poll():
                self._stop()
                raise InputError(f"worker {i} ended by itself with code {code}:\n{log_of(self._folder)[-_LOG_END:]}")
        return True

    def end(self) -> None:
        """Waits for the coordinator, then ends the rest; raises InputError if it or a worker failed."""
        while self.is_running():
            time.sleep(POLL_SECONDS)
        self._stop()
        if code := self.processes[0].returncode:
            raise InputError(f"the coordinator ended with code {code}:\n{log_of(self._folder)[-_LOG_END:]}")

    def _stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        for relay in self._relays:
            relay.close()


def programs_of(folder: Path) -> Path:
    """Where the run in a folder caches its compiled programs: it uses those of no other run."""
    return folder.with_name(f"{folder.name}.programs")


def log_of(folder: Path) -> str:
    """What all processes of the run in a folder have logged."""
    return folder.with_name(f"{folder.name}.log").read_text()


def judged(measured: float | None, most: float) -> dict[str, Any]:
    """A target, and whether it was reached; what was never measured has missed it."""
    good = measured is not None and measured <= most
    return {"measured": measured, "at_most": most, "verdict": "reached" if good else "missed"}


def show(verdicts: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints targets of `judged`, a line each."""
    for what, target in verdicts.items():
        value = "never" if target["measured"] is None else f"{target['measured']:.3g}"
        print(f"{what}: {value}, at most {target['at_most']:g}: {target['verdict']}")

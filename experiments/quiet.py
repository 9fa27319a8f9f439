"""Whether a machine is quiet enough to time something on it."""

import contextlib
import heapq
import logging
import os
import time
from pathlib import Path

from mlcn_jax import host
from mlcn_jax.errors import InputError

_MOST_BUSY = 0.2  # cores that other work may use while something is measured
_LOOKS = 3  # of a second each: processes that have just worked are soon idle
_PATIENCE_SECONDS = 600.0  # how long a measurement waits for other work to end
_log = logging.getLogger("mlcn_jax")


def busy_cores(must_be_quiet: bool = True, patience_seconds: float | None = None) -> float | None:
    """Cores that other work keeps busy; None where that is not known. Without `must_be_quiet` many give a warning.

    Args:
      must_be_quiet: whether these may be only few.
      patience_seconds: how long to wait for that; by default ten minutes.

    Raises:
      InputError: these are so many that nothing can be timed.
    """
    patience = _PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    end, waits = time.monotonic() + patience, False
    while True:
        for _ in range(_LOOKS if must_be_quiet else 1):
            busy = host.busy_cores()
            if busy is None or busy <= _MOST_BUSY:
                return busy
        told = f"other work keeps {busy:.2f} cores busy, more than {_MOST_BUSY:g} ({busiest()})"
        if not must_be_quiet:
            _log.warning("%s: times are longer than they should be", told)
            return busy
        if time.monotonic() >= end:
            raise InputError(f"{told}: end it, then run the same command again, which goes on where it stopped")
        if not waits:
            _log.warning("%s: waiting for it to end", told)
        waits = True


def busiest(seconds: float = 1.0, root: Path = Path("/proc")) -> str:
    """The processes that use most of this machine's time, as text."""

    def used() -> dict[str, float]:
        found = {}
        for path in root.glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                name, _, fields = path.read_text().partition("(")[2].rpartition(")")
                ticks = sum(map(int, fields.split()[11:13]))
                found[f"process {path.parent.name}, {name}"] = ticks / os.sysconf("SC_CLK_TCK")
        return found

    before, started = used(), time.monotonic()
    time.sleep(seconds)
    now, taken = used(), time.monotonic() - started
    cores = {name: (spent - before.get(name, spent)) / taken for name, spent in now.items()}
    most = [name for name in heapq.nlargest(3, cores, key=cores.__getitem__) if cores[name] > _MOST_BUSY / 4]
    return "; ".join(f"{name}: {cores[name]:.2f}" for name in most) or "no process that is seen here"

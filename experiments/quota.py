"""Quotas: a part of a core for a process, by cgroups (version 1 or 2)."""

import contextlib
import math
import os
import signal
import time
from pathlib import Path

from mlcn_jax.errors import InputError

_PERIOD_MICROSECONDS = 10_000  # or longer, where a share of it would be less than the next
_LEAST_MICROSECONDS = 2_000  # of a period; kernels refuse less than 1,000
_GROUP = "mlcn_tiers_"  # before the script's process id
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class Quota:
    """A cgroup that gives its processes a number of cores; others can be made inside it.

    Args:
      folder: of the group, which is made.
      cores: so many, or a part of one.
      period: in microseconds, in which that is given once; longer for parts too small for it.

    Raises:
      InputError: cgroups cannot be written to.
    """

    def __init__(self, folder: Path, cores: float, period: int = _PERIOD_MICROSECONDS):
        self.folder = folder
        period = max(period, math.ceil(_LEAST_MICROSECONDS / cores))
        quota = int(cores * period)
        try:
            if (folder.parent / "cgroup.subtree_control").exists():  # version 2
                (folder.parent / "cgroup.subtree_control").write_text("+cpu")
            folder.mkdir()
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_period_us").write_text(str(period))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (folder / "cpu.max").write_text(f"{quota} {period}")
        except OSError as error:
            raise InputError(f"{folder} cannot be made ({error}): it takes a cgroup to write to, and root") from error

    @classmethod
    def top(cls, cores: float) -> "Quota":
        """The quota of a whole bed."""
        end_left_over(cls.root())
        return cls(cls.root() / f"{_GROUP}{os.getpid()}", cores)

    @classmethod
    def of(cls, name: str, cores: float) -> "Quota":
        """The quota of one process that is not a node of a bed."""
        return cls(cls.root() / f"{_GROUP}{os.getpid()}_{name}", cores)

    @staticmethod
    def root() -> Path:
        """Where groups are made."""
        return _V1 if (_V1 / "tasks").exists() else _V2

    def inside(self, name: str, cores: float) -> "Quota":
        """A quota of one process."""
        return Quota(self.folder / name, cores)

    def add(self, pid: int) -> None:
        """Puts a process in it, with all its threads."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def held_back(self) -> float:
        """Seconds that the kernel has kept its processes waiting so far, because the quota was used up."""
        for line in (self.folder / "cpu.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("throttled_time", "throttled_usec"):  # in nanoseconds, version 1; version 2
                return int(value) * (1e-9 if name == "throttled_time" else 1e-6)
        return 0.0

    def waited(self) -> float:
        """Seconds for which the first threads of its processes were ready to run but did not so far, all together.

        The quota may be why, or other processes.
        """
        found = 0
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended
                found += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        return found / 1e9

    def remove(self) -> None:
        """Removes it, once its processes have ended."""
        _remove(self.folder)


def end_left_over(root: Path) -> None:
    """Ends the processes of beds whose script is no more, in groups of `root`, and removes the groups."""
    for folder in root.glob(f"{_GROUP}*"):
        script = folder.name.removeprefix(_GROUP).partition("_")[0]
        if not script.isdigit() or Path(f"/proc/{script}").exists():
            continue
        for group in (*(path for path in folder.iterdir() if path.is_dir()), folder):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _remove(group)


def _remove(folder: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)

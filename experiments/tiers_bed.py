"""A test bed of tiers on one machine: nodes as processes with quotas of cores, behind links that are shaped.

The kernel gives each process its share of time by cgroups (version 1 or 2), all nodes together at most `CORES`; where
cgroups cannot be written to, there is no bed. Links are relays (`experiments.tiers_relay`).
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlcn_jax.errors import InputError

CORES = 1.5  # of all nodes together
_PERIOD_MICROSECONDS = 10_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_START_SECONDS = 300.0


class Quota:
    """A cgroup that gives its processes a number of cores; others can be made inside it."""

    def __init__(self, folder: Path, cores: float):
        self.folder = folder
        try:
            folder.mkdir()
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (folder / "cpu.cfs_quota_us").write_text(str(int(cores * _PERIOD_MICROSECONDS)))
            else:
                (folder / "cpu.max").write_text(f"{int(cores * _PERIOD_MICROSECONDS)} {_PERIOD_MICROSECONDS}")
        except OSError as error:
            raise InputError(f"{folder} cannot be made ({error}): the test bed needs a cgroup to write to") from error

    @classmethod
    def top(cls, cores: float) -> "Quota":
        """The quota of a whole bed."""
        return cls(cls.root() / f"mlcn_tiers_{os.getpid()}", cores)

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

    def remove(self) -> None:
        """Removes it, once its processes have ended."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """One node: the folder of its tier, its cores, and its link's delay (each way) and rate."""

    artifact: Path
    cores: float
    delay_ms: float = 0.0
    rate_mbit: float = 0.0


class RunningNode:
    """A node's process, with its relay's."""

    def __init__(self, plan: NodePlan, quota: Quota, max_images: int, options: Sequence[str] = ()):
        self.plan = plan
        batch = 1 << (max_images - 1).bit_length()
        command = [*_python("mlcn_jax"), "tiers", "node", str(plan.artifact), "--port=0", *options]
        command += [f"--max_batch={batch}", f"--max_images={max_images}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._quota = quota
        self._relay: subprocess.Popen | None = None
        self.url = self.address = ""

    def ready(self) -> None:
        """Waits until it listens, then gives it its quota and its link."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[0-9.]+:(\d+)", line)
        if not found:
            raise InputError(f"a node did not start: {line}{self.process.stdout.read()}")
        self.address = f"127.0.0.1:{found[1]}"
        self._quota.add(self.process.pid)
        command = [*_python("experiments.tiers_relay"), f"--to={self.address}"]
        command += [f"--delay_ms={self.plan.delay_ms}", f"--rate_mbit={self.plan.rate_mbit}"]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        self.url = f"http://127.0.0.1:{json.loads(self._relay.stdout.readline())['port']}"

    def link(self, **changes: float | str) -> dict[str, int]:
        """Changes the link (`tiers_relay.Relay.change`); returns the bytes that went over it so far."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(changes) + "\n")
        self._relay.stdin.flush()
        return json.loads(self._relay.stdout.readline())

    def signal(self, number: int) -> None:
        """Sends the node a signal, such as SIGSTOP, SIGCONT or SIGKILL."""
        self.process.send_signal(number)

    def core_seconds(self) -> float:
        """Core seconds that the node has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Ends the node and its relay."""
        for process in (self._relay, self.process):
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        self._quota.remove()


@contextlib.contextmanager
def limited(pid: int, name: str, cores: float) -> Iterator[None]:
    """Gives a process that is not a node of a bed a number of cores."""
    quota = Quota(Quota.root() / f"mlcn_tiers_{os.getpid()}_{name}", cores)
    quota.add(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        quota.remove()


@contextlib.contextmanager
def bed(
    plans: Sequence[NodePlan], max_images: int, cores: float = CORES, options: Sequence[str] = ()
) -> Iterator[list[RunningNode]]:
    """Starts nodes, two at a time, and ends them; yields a `RunningNode` for each plan.

    Raises:
      InputError: cgroups cannot be written to, or a node does not start.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # or nodes would go on without the script
    top = Quota.top(cores)
    nodes: list[RunningNode] = []
    try:
        for i, plan in enumerate(plans):
            nodes.append(RunningNode(plan, top.inside(f"node{i}", plan.cores), max_images, options))
            if i:
                nodes[i - 1].ready()
        nodes[-1].ready()
        yield nodes
    finally:
        for node in nodes:
            node.end()
        top.remove()


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]

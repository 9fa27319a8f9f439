"""A test bed of tiers on one machine: nodes as processes with quotas of cores, behind links that are shaped.

The kernel gives each process its share of time by cgroups (version 1 or 2), all nodes together at most `CORES`; where
cgroups cannot be written to, there is no bed. Links are relays (`experiments.tiers_relay` says why not netem). What is
left of a bed whose script was killed is ended when the next one starts.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.quota import Quota
from mlcn_jax.errors import InputError

CORES = 1.5  # of all nodes together
_IDLE_CORES = 0.03  # that all nodes of a bed use when none computes; one that does uses its quota


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """One node: the folder of its tier, its cores, and its link's delay (each way) and rate."""

    artifact: Path
    cores: float
    delay_ms: float = 0.0
    rate_mbit: float = 0.0


ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}  # of all devices of a bed


def start_server(*arguments: str) -> subprocess.Popen:
    """A command of this package that serves, as a process; what it logs appears in the log of the script."""
    command, environment = [*_python("mlcn_jax"), *arguments, "--port=0"], {**os.environ, **ENVIRONMENT}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def url_of(server: subprocess.Popen) -> str:
    """Waits until a server says at which URL it listens, the first that it prints.

    Raises:
      InputError: it ended before.
    """
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"https?://[0-9.]+:\d+", line)
    if not found:
        raise InputError(f"{shlex.join(server.args)} did not start, as said above: {line}")
    return found[0]


def start_relay(to: str, delay_ms: float, rate_mbit: float = 0.0) -> tuple[subprocess.Popen, int]:
    """A relay to an address as a process of its own, and its port."""
    command = [*_python("experiments.tiers_relay"), f"--to={to}", f"--delay_ms={delay_ms}", f"--rate_mbit={rate_mbit}"]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert relay.stdout is not None
    return relay, json.loads(relay.stdout.readline())["port"]


class RunningNode:
    """A node's process, with its relay's; `options` are further arguments of `tiers node`."""

    def __init__(self, plan: NodePlan, quota: Quota, max_images: int, options: Sequence[str] = ()):
        self.plan, self._quota, self._options = plan, quota, tuple(options)
        batch = 1 << (max_images - 1).bit_length()
        self._command = ["tiers", "node", str(plan.artifact), f"--max_batch={batch}", f"--max_images={max_images}"]
        self.process = start_server(*self._command, *self._options)
        self._others: list[subprocess.Popen] = []
        self._relay: subprocess.Popen | None = None
        self.url = self.address = ""

    def ready(self) -> None:
        """Waits until it listens, then gives it its quota and its link: nothing is measured while a bed starts."""
        scheme, _, self.address = url_of(self.process).partition("://")
        self._quota.add(self.process.pid)
        self._relay, port = start_relay(self.address, self.plan.delay_ms, self.plan.rate_mbit)
        self.url = f"{scheme}://127.0.0.1:{port}"

    def start_again(self) -> None:
        """Kills the node's process, if it still runs, and starts another, which has the quota from its start on."""
        self.process.kill()
        self.process.wait()
        self.process = start_server(*self._command, *self._options)
        self._quota.add(self.process.pid)

    def come_back(self) -> None:
        """Waits until a process that was started again listens, and leads the link to it."""
        self.address = url_of(self.process).partition("://")[2]
        self.link(to=self.address)

    def start_beside(self, options: Sequence[str]) -> str:
        """Starts a process with other options beside the node's, in its quota; returns its address."""
        self._others.append(start_server(*self._command, *options))
        address = url_of(self._others[-1]).partition("://")[2]
        self._quota.add(self._others[-1].pid)
        return address

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
        for process in (self._relay, self.process, *self._others):
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        self._quota.remove()


@contextlib.contextmanager
def limited(pid: int, name: str, cores: float, on_one_core: bool = False) -> Iterator[Quota]:
    """Gives a process that is not a node of a bed a number of cores, and ends it at the end; yields its quota.

    `on_one_core` makes them a part of one core: the kernel hands a quota out to cores in slices, which may be all of a
    small one, so that threads on another core wait though some of it is left.
    """
    _end_when_asked()
    quota = Quota.of(name, cores)
    try:
        quota.add(pid)
        if on_one_core:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {min(os.sched_getaffinity(0))})
        yield quota
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
    _end_when_asked()
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


def until_idle(nodes: Sequence[RunningNode], seconds: float = 120.0) -> None:
    """Waits until nodes have worked off what they had.

    Raises:
      InputError: they are still busy after so many seconds, so that what is measured next would wait for them.
    """
    until, before = time.monotonic() + seconds, -math.inf
    while time.monotonic() < until:
        used = sum(node.core_seconds() for node in nodes)
        if used - before < _IDLE_CORES:
            return
        before = used
        time.sleep(1.0)
    raise InputError(f"nodes are still busy after {seconds:g} seconds: measure on a quiet machine, or fewer --tasks")


def _end_when_asked() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # or nodes would go on without the script


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]

"""Latency and bandwidth between devices, measured; between the processes of a run at its start, and kept."""

import contextlib
import dataclasses
import logging
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlcn_jax.distributed import processes
from mlcn_jax.errors import Damaged, InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.placement.simulate import Cluster, Link

_log = logging.getLogger(__name__)
_FEW_BYTES, _MOST_BYTES = 2**12, 2**24
_GROWTH = 4  # of message sizes, until a message takes this many times as long as the smallest one
_SECONDS, _TURNS = 0.5, (3, 50)  # of each message
_CLEARED_BYTES = 2**27  # half of them on each of two devices: more than the caches of a core hold
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def measure(pair: Sequence[jax.Device]) -> Link:
    """The link between two devices, from gathers of a small and a large message, half of each from either device.

    As in a training step, the arrays are not in a cache. Medians are used: steps do not get the fastest gather.

    If the devices belong to two processes, both must call it.

    Raises:
      InputError: many bytes took no longer than few.
    """
    mesh = Mesh(np.array(pair), ("device",))
    whole, halves = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("device"))
    gather = jax.jit(lambda x: x, out_shardings=whole)

    def spread(values: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(values.shape, halves, values.__getitem__)

    pages = spread(np.zeros(_CLEARED_BYTES // 4, np.float32))
    clear = jax.jit(lambda x: x + 1)
    signal = spread(np.zeros(2, np.float32))

    def turn(x: jax.Array) -> float:
        clear(pages).block_until_ready()
        gather(signal).block_until_ready()  # both start at once
        started = time.perf_counter()
        gather(x).block_until_ready()
        return time.perf_counter() - started

    def slower(seconds: float) -> float:
        """The larger of the two processes' values, so that both take the same turns."""
        both = gather(spread(np.full(2, seconds, np.float32)))
        return float(np.max(jax.device_get(both.addressable_data(0))))

    def typical(num_bytes: int) -> float:
        x = spread(np.zeros(num_bytes // 4, np.float32))
        turn(x)  # compiles, and connects the two
        turns = min(max(round(_SECONDS / slower(turn(x))), _TURNS[0]), _TURNS[1])
        return slower(statistics.median(turn(x) for _ in range(turns)))

    few, many = _FEW_BYTES, _GROWTH * _FEW_BYTES
    fast, slow = typical(few), typical(many)
    while many < _MOST_BYTES and slow < _GROWTH * fast:
        many *= _GROWTH
        slow = typical(many)
    if slow <= fast:
        raise InputError("the link could not be measured: many bytes took no longer than few; try a less busy machine")
    bytes_per_second = (many - few) / 2 / (slow - fast)
    return Link(max(0.0, fast - few / 2 / bytes_per_second), bytes_per_second)


def between_processes(devices: Sequence[jax.Device], within: Link, kept: Path | None = None) -> Cluster | None:
    """The devices of a run with the links between its processes; None in one process. Every process must call it.

    Each process is a host of the cluster; its link is the one measured to process 0, and that of process 0 the best of
    them.

    Args:
      devices: of all processes.
      within: the link between devices of one process.
      kept: a file of process 0 with earlier measurements between these machines, to which new ones are written; None
        stores nothing.
    """
    if jax.process_count() == 1:
        return None
    machines = processes.everywhere(_machine)
    stored = processes.in_first(lambda: _stored(kept, machines))
    if stored is None:
        _log.info("measuring the links between %d processes", len(machines))
        first = {device.process_index: device for device in reversed(devices)}
        stored = [_measure_with_first(first, other) for other in range(1, len(machines))]
        if kept is not None and processes.is_first():
            write_json(kept, {"machines": machines, "links": stored})
    links = [Link(**one) for one in stored]
    best = Link(min(link.latency_seconds for link in links), max(link.bytes_per_second for link in links))
    hosts = [device.process_index for device in devices]
    return Cluster(hosts, within, dict(enumerate([best, *links])), [machines[host] for host in hosts])


def about(cluster: Cluster) -> dict[str, dict[str, float]]:
    """The links of processes to process 0, for the summary of a run."""
    others = sorted(set(cluster.hosts) - {0})
    return {f"process {host}": dataclasses.asdict(cluster.outward(host)) for host in others}


def _measure_with_first(first: dict[int, jax.Device], other: int) -> dict[str, float]:
    """The link between process 0 and another one, in every process."""

    def mine() -> dict[str, float] | None:
        if jax.process_index() not in (0, other):
            return None
        return dataclasses.asdict(measure([first[0], first[other]]))

    return processes.everywhere(mine)[0]


def _machine() -> str:
    """An identifier that is the same for all processes on a machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def _stored(path: Path | None, machines: list[str]) -> list[dict[str, float]] | None:
    if path is None or not path.exists():
        return None
    with contextlib.suppress(Damaged):
        stored: Any = read_json(path)
        try:
            if stored["machines"] != machines or len(stored["links"]) != len(machines) - 1:
                return None
            return [dataclasses.asdict(Link(**one)) for one in stored["links"]]
        except (InputError, KeyError, TypeError):
            pass
    _log.warning("%s cannot be used: measuring again", path)
    return None

"""How fast devices without a profile train the lanes of a run, measured for some seconds at its start.

Only where devices differ: in kind, in the number of cores, or, among processes, in the time of a tiny network.

Source: the tiny network is the idea of do Rosario 2021 (thesis), chapter 5; here it only says whether devices differ,
and lanes of the model itself are timed then.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlcn_jax import host
from mlcn_jax.distributed import processes
from mlcn_jax.errors import Damaged
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn import lanes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost
from mlcn_jax.placement.problem import Problem

_log = logging.getLogger(__name__)
_ALIKE = 1.25  # devices whose tiny networks differ by less count as equally fast
_TINY_SECONDS = 0.1
_LANE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Measured steps of some lanes.

    Attributes:
      devices: what each device is.
      batch_size: images per step.
      seconds: for each device, the seconds of a step of each measured lane.
    """

    devices: tuple[str, ...]
    batch_size: int
    seconds: tuple[dict[str, float], ...]

    def about(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """The measurements by the devices' names, for the summary of the run."""
        return {f"{name}, {kind}": row for name, kind, row in zip(names, self.devices, self.seconds, strict=True)}

    def problem(self, spec: ModelSpec, names: Sequence[str]) -> Problem:
        """The seconds of each lane on each device, interpolated by FLOPs on logarithmic axes."""
        costs = [cost.cost_of(spec, kind) for kind in spec.lane_specs]
        flops = {str(one.spec): math.log(one.step_flops(self.batch_size)) for one in costs}
        table = []
        for one in costs:
            row = []
            for measured in self.seconds:
                known = sorted((flops[lane], math.log(taken)) for lane, taken in measured.items())
                sizes, seconds = zip(*known, strict=True)
                nearest = float(np.interp(flops[str(one.spec)], sizes, seconds))
                row.append(math.exp(nearest))
            table.append(row)
        kinds = [f"lane {i} ({kind})" for i, kind in enumerate(spec.lane_specs)]
        return Problem(table, lane_names=kinds, device_names=names)


def speeds_of(
    spec: ModelSpec, batch_size: int, devices: Sequence[jax.Device], kept: Path | None = None
) -> Speeds | None:
    """The speeds of devices that differ; None if they are alike. Every process of the run must call it.

    Args:
      spec, batch_size: those of the run.
      devices: of all processes.
      kept: a file of process 0, from which earlier measurements of these devices are taken and in which new ones are
        kept, also that devices are alike; None keeps nothing.
    """
    kinds = _kinds(devices)
    if len(set(kinds)) == 1 and jax.process_count() == 1:
        return None
    lanes_of = _lanes_to_time(spec, batch_size)
    asked: dict[str, Any] = {"devices": kinds, "batch_size": batch_size, "lanes": [str(lane) for lane in lanes_of]}
    asked["model"] = spec.digest
    # Looked up before anything is timed: near the threshold, another measurement could decide otherwise.
    stored = processes.in_first(lambda: _stored(kept, asked))
    if stored is None:
        differ = len(set(kinds)) > 1 or _speeds_differ(devices)
        stored = _timed(spec, batch_size, devices, kinds, lanes_of) if differ else []
        if kept is not None and processes.is_first():
            write_json(kept, {**asked, "seconds": stored})
    return Speeds(tuple(kinds), batch_size, tuple(stored)) if stored else None


def _timed(
    spec: ModelSpec,
    batch_size: int,
    devices: Sequence[jax.Device],
    kinds: Sequence[str],
    lanes_of: Sequence[lanes.LaneSpec],
) -> list[dict[str, float]]:
    """The seconds of a step of each lane on each device; a process times one device of each kind."""
    _log.info("devices differ and have no profile: timing %s on each", " and ".join(map(str, lanes_of)))
    mine: dict[str, dict[str, float]] = {}
    by_device: dict[int, dict[str, float]] = {}
    for d, device in enumerate(devices):
        if _is_here(device):
            mine[kinds[d]] = mine.get(kinds[d]) or {
                str(lane): _seconds(lane, spec, batch_size, device) for lane in lanes_of
            }
            by_device[d] = mine[kinds[d]]
    return _of_each(devices, by_device)


def _kinds(devices: Sequence[jax.Device]) -> list[str]:
    return _of_each(devices, {d: _kind(device) for d, device in enumerate(devices) if _is_here(device)})


def _of_each(devices: Sequence[jax.Device], mine: dict[int, Any]) -> list[Any]:
    """What each process says of its devices, in the order of all of them."""
    parts = processes.everywhere(lambda: {str(d): value for d, value in mine.items()})
    found = {int(d): value for part in parts for d, value in part.items()}
    return [found[d] for d in range(len(devices))]


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def _kind(device: jax.Device) -> str:
    name = host.name_of(device)
    return f"{name}, {host.num_cores()} cores" if device.platform == "cpu" else name


def _speeds_differ(devices: Sequence[jax.Device]) -> bool:
    """Whether the tiny network takes unequally long in the processes of a run."""
    seconds = processes.everywhere(lambda: _tiny_seconds(next(d for d in devices if _is_here(d))))
    return max(seconds) > _ALIKE * min(seconds)


def _tiny_seconds(device: jax.Device) -> float:
    """The mean seconds of a product of 64 by 512 with 512 by 512 numbers, over a tenth of a second."""
    with jax.default_device(device):
        rows, kernel = jnp.ones((64, 512)), jnp.ones((512, 512))
        product = jax.jit(lambda rows, kernel: rows @ kernel).lower(rows, kernel).compile()
    return mean_seconds(lambda: product(rows, kernel), _TINY_SECONDS)


def _lanes_to_time(spec: ModelSpec, batch_size: int) -> list[lanes.LaneSpec]:
    """The lanes with the least and the most FLOPs."""

    def flops(lane: lanes.LaneSpec) -> int:
        return cost.cost_of(spec, lane).step_flops(batch_size)

    ranked = sorted(set(spec.lane_specs), key=lambda lane: (flops(lane), str(lane)))
    return list(dict.fromkeys((ranked[0], ranked[-1])))


def _seconds(lane: lanes.LaneSpec, spec: ModelSpec, batch_size: int, device: jax.Device) -> float:
    group, optimizer = lanes.LaneGroup(lane, 1), optax.adam(1e-3)
    images = np.zeros((batch_size, *spec.image_shape), np.float32)
    columns = np.zeros((batch_size, spec.num_classes, 1), spec.dtype)
    with jax.default_device(device):
        params = jax.jit(lambda key, x: lanes.init_group(key, group, 0, spec.lane_settings, x))(
            jax.random.key(0), images[:1]
        )
        state = (params, optimizer.init(params))
        step = cost.make_lane_step(group, spec.lane_settings, optimizer)
        options = spec.compiler_options(device.platform)
        compiled = jax.jit(step, compiler_options=options).lower(state, images, columns).compile()
        given = jax.device_put((state, images, columns), device)
    return mean_seconds(lambda: compiled(*given), _LANE_SECONDS)


def mean_seconds(call: Any, at_least: float) -> float:
    """Seconds of a call: the mean of calls that take `at_least` so many seconds together, after one that is not timed.

    The mean, not the minimum: a device shared with other jobs will be just as slow during the run.
    """
    jax.block_until_ready(call())
    count, started = 0, time.perf_counter()
    while not count or time.perf_counter() - started < at_least:
        jax.block_until_ready(call())
        count += 1
    return (time.perf_counter() - started) / count


def _stored(path: Path | None, asked: dict[str, Any]) -> list[dict[str, float]] | None:
    """Stored measurements of this request: seconds for each device, [] if all are alike; None if nothing is stored."""
    if path is None or not path.exists():
        return None
    with contextlib.suppress(Damaged):
        stored = read_json(path)
        try:
            if any(stored[name] != value for name, value in asked.items()):
                return None
            return [{lane: float(row[lane]) for lane in asked["lanes"]} for row in stored["seconds"]]
        except (KeyError, TypeError, ValueError):
            pass
    _log.warning("%s cannot be used: measuring again", path)
    return None

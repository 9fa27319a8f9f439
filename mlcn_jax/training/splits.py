"""Every split of a model over devices, and how long its step takes according to the devices' profiles."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.distributed import traffic
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.placement.interval import Interval, around
from mlcn_jax.placement.problem import NoRoom, Placement, Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible split, and the prediction for it. `placement` is that of stacks, None for a mesh."""

    data: int
    lane: int
    placement: Placement | None
    step: simulate.StepTime


def candidates(
    spec: ModelSpec, batch_size: int, profiles: Sequence[DeviceProfile], partitioner: str, num_processes: int
) -> list[Candidate]:
    """Every split possible on the devices, given by their profiles; several processes must use all devices."""
    found = []
    for count in range(1, len(profiles) + 1) if num_processes == 1 else [len(profiles)]:
        # CPU devices of one process share its cores.
        shared = float(count) if num_processes == 1 and profiles[0].platform == "cpu" else 1.0
        used, slowness = profiles[:count], [shared] * count
        for data in (n for n in range(1, count + 1) if count % n == 0):
            lane = count // data
            with contextlib.suppress(InputError):
                mesh_lib.check_split(spec, batch_size, data, lane)
                if not all(has_room(spec, batch_size // data, lane, profile) for profile in used):
                    continue
                found.append(Candidate(data, lane, None, predict_mesh(spec, batch_size, data, lane, used, slowness)))
        problem = placement_problem(spec, batch_size, used, [str(d) for d in range(count)], slowness)
        with contextlib.suppress(NoRoom):
            placement = partition.partition(partitioner, problem)
            if num_processes == 1 or len(set(placement.device_of)) == count:
                exchange = "direct" if num_processes == 1 else "ring"
                step = predict_stacks(spec, batch_size, placement, used, slowness, exchange)
                found.append(Candidate(1, count, placement, step))
    if not found:
        raise InputError(
            f"neither batch nor lanes can be split over {len(profiles)} devices so that each has a part and memory for "
            "it: use fewer processes, another batch size or more lanes"
        )
    return found


def predict_mesh(
    spec: ModelSpec,
    batch_size: int,
    data: int,
    lane: int,
    profiles: Sequence[DeviceProfile],
    slowness: Sequence[float],
    cluster: simulate.Cluster | None = None,
) -> simulate.StepTime:
    """Predicts a step on a mesh of devices given by their profiles, each slower than its profile by a factor.

    No part of a split is predicted to be faster, for its work, than the whole on one device, and devices on one machine
    slow each other down as the profiles say. Without a cluster, all devices are on one machine.
    """
    share = batch_size // data
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    num_lanes = len(spec.lane_specs)
    whole = batch_size * num_lanes
    cluster = cluster or _cluster(profiles)
    slower = _slower(profiles, slowness, cluster, range(data * lane))
    num_gathers = 1 + sum(size % lane == 0 for size in (*spec.decoder, math.prod(spec.image_shape)))
    return simulate.simulate_mesh(
        data,
        lane,
        cluster,
        lane_seconds=[s * p.stack_seconds(lanes, share, whole) for p, s in zip(profiles, slower, strict=True)],
        head_seconds=[s * p.head_seconds(num_lanes, share) / lane for p, s in zip(profiles, slower, strict=True)],
        forward_share=profiles[0].forward_share,
        exchanged=traffic.exchanged_bytes(spec, batch_size, data, lane),
        num_collectives={"all-gather": num_gathers, "reduce-scatter": num_gathers},
    )


def predict_stacks(
    spec: ModelSpec,
    batch_size: int,
    placement: Placement,
    profiles: Sequence[DeviceProfile],
    slowness: Sequence[float],
    exchange: str,
    cluster: simulate.Cluster | None = None,
) -> simulate.StepTime:
    """As `predict_mesh`, of lanes in stacks; `exchange` is `direct` in one process and `ring` among several."""
    num_lanes = len(placement.device_of)
    kinds = spec.lane_specs
    cluster = cluster or _cluster(profiles)
    slower = _slower(profiles, slowness, cluster, placement.device_of)
    seconds = []
    for d, (profile, factor) in enumerate(zip(profiles, slower, strict=True)):
        lanes = [_lane_cost(spec, kind) for kind, device in zip(kinds, placement.device_of, strict=True) if device == d]
        seconds.append(factor * profile.stack_seconds(lanes, batch_size, batch_size * num_lanes) if lanes else 0.0)
    return simulate.simulate_stacks(
        dataclasses.replace(placement, seconds=tuple(seconds)),
        cluster,
        column_bytes=4 * batch_size * spec.num_classes,
        head_seconds=slowness[0] * profiles[0].head_seconds(num_lanes, batch_size),
        forward_share=profiles[0].forward_share,
        exchange=exchange,
    )


def interval(
    seconds: float,
    spec: ModelSpec,
    profiles: Sequence[DeviceProfile],
    *,
    placement: Placement | None = None,
    cluster: simulate.Cluster | None = None,
) -> Interval | None:
    """The interval around a prediction for stacks, or for a mesh where there is no placement."""
    costs = {kind: _lane_cost(spec, kind) for kind in set(spec.lane_specs)}
    lanes_of = [
        [
            (kind, profile.lane_seconds(costs[kind], max(profile.batch_sizes)))
            for place, kind in enumerate(spec.lane_specs)
            if placement is None or placement.device_of[place] == d  # on a mesh, all devices have the same mix
        ]
        for d, profile in enumerate(profiles)
    ]
    hosts = (cluster or _cluster(profiles)).hosts
    return around(seconds, profiles, lanes_of, sharing=max(collections.Counter(hosts).values()))


def _slower(
    profiles: Sequence[DeviceProfile], slowness: Sequence[float], cluster: simulate.Cluster, busy: Iterable[int]
) -> list[float]:
    """How much slower each device is than its profile, with all the busy ones at work."""
    on_host = collections.Counter(cluster.hosts[d] for d in set(busy))
    return [
        factor * profile.slowdown(max(1, on_host[host]))
        for profile, factor, host in zip(profiles, slowness, cluster.hosts, strict=True)
    ]


def placement_problem(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile | None],
    device_names: Sequence[str],
    slowness: Sequence[float] = (),
) -> Problem:
    """The cost of each lane on each device by the devices' profiles; without profiles, FLOPs, equal on all devices.

    The head's work is not included: while one device does it, the others wait.
    """
    kinds = spec.lane_specs
    costs = [_lane_cost(spec, kind) for kind in kinds]
    names = [f"lane {i} ({kind})" for i, kind in enumerate(kinds)]
    known = [profile for profile in profiles if profile is not None]
    if not known:
        flops = [float(lane.step_flops(batch_size)) for lane in costs]
        table = uniform_seconds(flops, [1.0] * len(profiles))
        return Problem(table, lane_names=names, device_names=device_names)
    factors = slowness or [1.0] * len(known)
    return Problem(
        [[f * p.lane_seconds(lane, batch_size) for p, f in zip(known, factors, strict=True)] for lane in costs],
        [max(profile.lane_bytes(lane, batch_size) for profile in known) for lane in costs],
        [profile.memory_bytes for profile in known],
        lane_names=names,
        device_names=device_names,
    )


def has_room(spec: ModelSpec, batch_size: int, lane: int, profile: DeviceProfile) -> bool:
    """Whether a device can hold its part of the lanes; they run in turn, so they share the largest's work space."""
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    largest = max(lanes, key=lambda one: profile.lane_bytes(one, batch_size))
    others = sum(one.state_bytes for one in lanes) - largest.state_bytes
    return profile.lane_bytes(largest, batch_size) + others <= profile.memory_bytes


def _lane_cost(spec: ModelSpec, lane: LaneSpec) -> cost.LaneCost:
    return cost.lane_cost(lane, spec.lane_settings, spec.image_shape)


def _cluster(profiles: Sequence[DeviceProfile]) -> simulate.Cluster:
    """The devices as a cluster, with the slowest of their links between all."""
    links = [simulate.Link(**profile.link) for profile in profiles if profile.link]
    slowest = simulate.Link(
        max((link.latency_seconds for link in links), default=0.0),
        min((link.bytes_per_second for link in links), default=float("inf")),
    )
    return simulate.Cluster([0] * len(profiles), slowest, slowest)

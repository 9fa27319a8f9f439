"""Every split of a model over devices, and how long its step takes according to the devices' profiles."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.distributed import traffic
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LANE_KINDS
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.placement.interval import Interval, around
from mlcn_jax.placement.problem import Placement, Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training.accumulate import check_parts

ROUND_STEPS = 50  # of a local round, in predictions


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible split, and the prediction for it. `placement` is that of stacks, None for a mesh.

    With data=1 and lane=1, each process computes the whole model on its own.
    """

    data: int
    lane: int
    placement: Placement | None
    step: simulate.StepTime


@dataclasses.dataclass(frozen=True)
class Messages:
    """The settings that determine how much a split sends, and how often.

    Attributes:
      dtype: `parallel.exchange_dtype`.
      clips: whether the gradient's norm is clipped.
      parts: `train.accumulation_steps`, in each of which a mesh exchanges columns.
    """

    dtype: str = "float32"
    clips: bool = False
    parts: int = 1


def candidates(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile],
    partitioners: Sequence[str],
    num_processes: int,
    cluster: simulate.Cluster | None = None,
    messages: Messages = Messages(),
) -> list[Candidate]:
    """Every split possible on the devices, given by their profiles; several processes must use all devices.

    Args:
      spec, batch_size: the model, and images per training step.
      profiles: the profile of each device of the run.
      partitioners: partitioners to try for stacks.
      num_processes: number of processes of the run.
      cluster: the links between the processes, if they were measured; else those of the profiles.
      messages: how columns and gradients are sent.

    Raises:
      InputError: there is none, or the batch cannot be computed in the parts of `messages`.
    """
    check_parts(spec, batch_size, 1, messages.parts)
    found, stacked = [], can_stack(spec, messages)
    if num_processes > 1 and all(has_room(spec, batch_size, 1, profile, messages.parts) for profile in profiles):
        found.append(Candidate(1, 1, None, predict_alone(spec, batch_size, profiles, cluster)))
    for count in range(1, len(profiles) + 1) if num_processes == 1 else [len(profiles)]:
        # CPU devices of one process share its cores and its memory.
        shared = count if num_processes == 1 and profiles[0].platform == "cpu" else 1
        used = [dataclasses.replace(one, memory_bytes=one.memory_bytes // shared) for one in profiles[:count]]
        slowness = [float(shared)] * count
        for data in (n for n in range(1, count + 1) if count % n == 0):
            lane = count // data
            with contextlib.suppress(InputError):
                mesh_lib.check_split(spec, batch_size, data, lane)
                check_parts(spec, batch_size, data, messages.parts)
                if not all(has_room(spec, batch_size // data, lane, profile, messages.parts) for profile in used):
                    continue
                step = predict_mesh(spec, batch_size, data, lane, used, slowness, cluster, messages)
                found.append(Candidate(data, lane, None, step))
        problem = placement_problem(spec, batch_size, used, [str(d) for d in range(count)], slowness)
        for placement in placements(problem, partitioners) if stacked else ():
            if num_processes == 1 or len(set(placement.device_of)) == count:
                exchange = "direct" if num_processes == 1 else "ring"
                step = predict_stacks(spec, batch_size, placement, used, slowness, exchange, cluster, messages)
                found.append(Candidate(1, count, placement, step))
    if not found:
        raise InputError(
            f"neither batch nor lanes can be split over {len(profiles)} devices so that each has a part and memory for "
            "it: use fewer processes, another batch size or more lanes; or less memory, with more "
            "train.accumulation_steps, or with model.remat=full and a split of your own (parallel.plan=mesh)"
        )
    return found


def can_stack(spec: ModelSpec, messages: Messages) -> bool:
    """Whether `StacksRunner` takes such a run."""
    return messages.parts == 1 and not spec.couples_lanes


def placements(problem: Problem, partitioners: Sequence[str]) -> list[Placement]:
    """The placements of some partitioners, each once; those that find none, or lack OR-Tools, are left out."""
    found: dict[tuple[int, ...], Placement] = {}
    for name in partitioners:
        with contextlib.suppress(InputError):
            placement = partition.partition(name, problem)
            found.setdefault(placement.device_of, placement)
    return list(found.values())


def predict_alone(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile],
    cluster: simulate.Cluster | None = None,
    whole_batch: int = 0,
) -> simulate.StepTime:
    """The slowest device's step if each computes all lanes, all at once and without a message.

    `batch_size` may be the share of a `whole_batch`, for which no device is predicted to gain from smaller stacks.
    """
    slower = _slower(profiles, [1.0] * len(profiles), cluster or _cluster(profiles), range(len(profiles)))
    steps = [
        predict_mesh(spec, batch_size, 1, 1, [p], [s], whole_batch=whole_batch)
        for p, s in zip(profiles, slower, strict=True)
    ]
    return max(steps, key=lambda step: step.total_seconds)


def predict_rounds(
    spec: ModelSpec, batch_size: int, profiles: Sequence[DeviceProfile], cluster: simulate.Cluster, parts: int = 1
) -> float | None:
    """Seconds of a step in local rounds of `ROUND_STEPS`; None if the batch cannot be divided among the devices.

    Each device computes all lanes from its part of the batch. After a round, each sends a byte for each parameter to
    the host of the first, all at once over the links of their hosts, and as many come back.
    """
    try:
        mesh_lib.check_split(spec, batch_size, len(profiles), 1)
        share = batch_size // len(profiles)
        check_parts(spec, share, 1, parts)
    except InputError:
        return None
    if not all(has_room(spec, share, 1, profile, parts) for profile in profiles):
        return None
    first = cluster.hosts[0]
    away = collections.Counter(host for host in cluster.hosts if host != first)
    sharing = {**away, first: away.total()}
    num_bytes = cost.estimated_parameters(spec)
    longest = max((cluster.link(first, host, sharing).seconds(num_bytes) for host in away), default=0.0)
    step = predict_alone(spec, share, profiles, cluster, batch_size)
    return step.total_seconds + 2 * longest / ROUND_STEPS


def predict_apart(
    spec: ModelSpec, batch_size: int, profiles: Sequence[DeviceProfile], cluster: simulate.Cluster, parts: int = 1
) -> float | None:
    """Seconds in which all lanes take a step if each is trained alone; None if they do not fit the memory."""
    slower = _slower(profiles, [1.0] * len(profiles), cluster, range(len(profiles)))
    problem = placement_problem(spec, batch_size, profiles, [str(d) for d in range(len(profiles))], slower)
    costs = [cost.cost_of(spec, kind) for kind in spec.lane_specs]
    fits = [[needed_bytes(spec, [lane], batch_size, p, parts) <= p.memory_bytes for p in profiles] for lane in costs]
    heads = [factor * profile.head_seconds(1, batch_size) for profile, factor in zip(profiles, slower, strict=True)]
    table = [[lane + head for lane, head in zip(row, heads, strict=True)] for row in problem.seconds]
    never = 1e3 * sum(map(sum, table))
    table = [
        [seconds if fit else never for seconds, fit in zip(row, own, strict=True)]
        for row, own in zip(table, fits, strict=True)
    ]
    found = placements(Problem(table), ["greedy"])  # without memory: a device trains one lane at a time
    return found[0].makespan_seconds if found[0].makespan_seconds < never else None


def predict_mesh(
    spec: ModelSpec,
    batch_size: int,
    data: int,
    lane: int,
    profiles: Sequence[DeviceProfile],
    slowness: Sequence[float],
    cluster: simulate.Cluster | None = None,
    messages: Messages = Messages(),
    whole_batch: int = 0,
) -> simulate.StepTime:
    """Predicts a step on a mesh of devices given by their profiles, each slower than its profile by a factor.

    No part of a split is predicted to be faster, for its work, than the whole on one device, unless its share of the
    batch takes faster convolution algorithms; devices on one machine slow each other down as the profiles say. Without
    a cluster, all devices are on one machine. `whole_batch` is given where `batch_size` is only a share of it.
    """
    share = batch_size // data
    lanes = _lane_costs(spec, lane)
    num_lanes = len(spec.lane_specs)
    whole = (whole_batch or batch_size) * num_lanes
    cluster = cluster or _cluster(profiles)
    slower = _slower(profiles, slowness, cluster, range(data * lane))
    return simulate.simulate_mesh(
        data,
        lane,
        cluster,
        lane_seconds=[s * p.model_seconds(lanes, share, whole) for p, s in zip(profiles, slower, strict=True)],
        head_seconds=[s * p.head_seconds(num_lanes, share) / lane for p, s in zip(profiles, slower, strict=True)],
        forward_share=profiles[0].forward_share,
        exchanged=traffic.exchanged_bytes(spec, batch_size, data, lane, messages.dtype),
        num_collectives=traffic.exchanged_messages(spec, data, lane, messages.parts, messages.dtype),
    )


def predict_stacks(
    spec: ModelSpec,
    batch_size: int,
    placement: Placement,
    profiles: Sequence[DeviceProfile],
    slowness: Sequence[float],
    exchange: str,
    cluster: simulate.Cluster | None = None,
    messages: Messages = Messages(),
) -> simulate.StepTime:
    """As `predict_mesh`, of lanes in stacks; `exchange` is `direct` in one process and `ring` among several."""
    num_lanes = len(placement.device_of)
    kinds = spec.lane_specs
    cluster = cluster or _cluster(profiles)
    slower = _slower(profiles, slowness, cluster, placement.device_of)
    seconds = []
    for d, (profile, factor) in enumerate(zip(profiles, slower, strict=True)):
        lanes = [
            cost.cost_of(spec, kind) for kind, device in zip(kinds, placement.device_of, strict=True) if device == d
        ]
        seconds.append(factor * profile.model_seconds(lanes, batch_size, batch_size * num_lanes) if lanes else 0.0)
    return simulate.simulate_stacks(
        dataclasses.replace(placement, seconds=tuple(seconds)),
        cluster,
        column_bytes=batch_size * spec.num_classes * column_value_bytes(spec, messages.dtype),
        head_seconds=slowness[0] * profiles[0].head_seconds(num_lanes, batch_size),
        forward_share=profiles[0].forward_share,
        total_bytes=4 if messages.clips else 0,
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
    costs = {kind: cost.cost_of(spec, kind) for kind in set(spec.lane_specs)}
    lanes_of = [
        [
            (kind, profile.lane_seconds(costs[kind], max(profile.batch_sizes)))
            for place, kind in enumerate(spec.lane_specs)
            if placement is None or placement.device_of[place] == d  # on a mesh, all devices have the same mix
        ]
        for d, profile in enumerate(profiles)
    ]
    machines = (cluster or _cluster(profiles)).machines
    return around(seconds, profiles, lanes_of, sharing=max(collections.Counter(machines).values()))


def _slower(
    profiles: Sequence[DeviceProfile], slowness: Sequence[float], cluster: simulate.Cluster, busy: Iterable[int]
) -> list[float]:
    """How much slower each device is than its profile, with all the busy ones at work."""
    on_machine = collections.Counter(cluster.machines[d] for d in set(busy))
    return [
        factor * profile.slowdown(max(1, on_machine[machine]))
        for profile, factor, machine in zip(profiles, slowness, cluster.machines, strict=True)
    ]


def placement_problem(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile | None],
    device_names: Sequence[str],
    slowness: Sequence[float] = (),
) -> Problem:
    """The cost of each lane on each device by the devices' profiles; without profiles, FLOPs, equal on all devices.

    The head's work is not included: while the first device does it, the others wait. Its memory is set aside there.
    """
    kinds = spec.lane_specs
    costs = [cost.cost_of(spec, kind) for kind in kinds]
    names = [f"lane {i} ({kind})" for i, kind in enumerate(kinds)]
    known = [profile for profile in profiles if profile is not None]
    if not known:
        flops = [float(lane.step_flops(batch_size)) for lane in costs]
        table = uniform_seconds(flops, [1.0] * len(profiles))
        return Problem(table, lane_names=names, device_names=device_names)
    factors = slowness or [1.0] * len(known)
    return Problem(
        [[f * p.model_seconds([lane], batch_size) for p, f in zip(known, factors, strict=True)] for lane in costs],
        [max(profile.lane_bytes(lane, batch_size) for profile in known) for lane in costs],
        [max(0.0, known[0].memory_bytes - cost.head_bytes(spec, batch_size)), *(p.memory_bytes for p in known[1:])],
        lane_names=names,
        device_names=device_names,
    )


def has_room(spec: ModelSpec, batch_size: int, lane: int, profile: DeviceProfile, parts: int = 1) -> bool:
    """Whether a device of a mesh can hold its part of the lanes, and the decoder (`needed_bytes`)."""
    needed = needed_bytes(spec, _lane_costs(spec, lane), batch_size, profile, parts)
    return needed <= profile.memory_bytes


def needed_bytes(
    spec: ModelSpec, lanes: Sequence[cost.LaneCost], batch_size: int, profile: DeviceProfile, parts: int
) -> float:
    """Memory of a step of some lanes of a model, and of its decoder, on one device: what it takes, or more.

    Lanes with losses of their own run in turn, so only one of them holds activations; all others hold theirs until the
    joint loss goes back. With several parts of its `batch_size` images a device holds the activations of one, and the
    sum of their gradients. The decoder is that of `spec`, or smaller: lanes may be trained apart.
    """
    size = batch_size // parts
    in_turn = [one for one in lanes if LANE_KINDS[one.spec.kind].classifies and not spec.couples_lanes]
    held = sum(profile.lane_bytes(one, size) for one in lanes if one not in in_turn)
    held += sum(one.state_bytes + one.gradient_bytes for one in in_turn)
    held += max((profile.lane_bytes(one, size) - one.state_bytes - one.gradient_bytes for one in in_turn), default=0.0)
    sums = sum(one.gradient_bytes for one in lanes) if parts > 1 else 0
    return held + sums + cost.head_bytes(spec, size)


def _lane_costs(spec: ModelSpec, lane: int) -> list[cost.LaneCost]:
    """Costs of the lanes of one of `lane` devices among which each group is divided."""
    return [cost.cost_of(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]


def column_value_bytes(spec: ModelSpec, exchange_dtype: str) -> int:
    """Bytes of a number in the messages of stacks."""
    return 4 if spec.classifies_alone.any() else min(jnp.dtype(exchange_dtype).itemsize, spec.dtype.itemsize)


def slowest_link(profiles: Sequence[DeviceProfile]) -> simulate.Link:
    """The longest latency and the lowest bandwidth of the profiles' links; a link that costs nothing without any."""
    links = [simulate.Link(**profile.link) for profile in profiles if profile.link]
    return simulate.Link(
        max((link.latency_seconds for link in links), default=0.0),
        min((link.bytes_per_second for link in links), default=float("inf")),
    )


def _cluster(profiles: Sequence[DeviceProfile]) -> simulate.Cluster:
    """The devices as a cluster, with the slowest of their links between all."""
    slowest = slowest_link(profiles)
    return simulate.Cluster([0] * len(profiles), slowest, slowest)

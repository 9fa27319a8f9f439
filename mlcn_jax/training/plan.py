"""Which device computes what in a run: a mesh, or stacks of lanes that a partitioner places, given or found."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from mlcn_jax.config import ParallelSettings, RunConfig
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.distributed import processes, traffic
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.model import ModelSpec
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.placement.problem import NoRoom, Placement, Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.stacks_runner import Stack, StacksRunner, make_stacks, spec_of

_log = logging.getLogger(__name__)
_MEASURE = f"{program()} profile"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh, None for one device; or, where there is a head, stacks. `about` tells of it, ready for JSON."""

    mesh: Mesh | None = None
    stacks: tuple[Stack, ...] = ()
    head: jax.Device | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A split that could be used, and what is predicted for it. `placement` is that of stacks, None for a mesh."""

    data: int
    lane: int
    placement: Placement | None
    step: simulate.StepTime


def make_plan(settings: ParallelSettings, spec: ModelSpec, batch_size: int) -> Plan:
    """The plan that `parallel.plan` names.

    Raises:
      InputError: there are too few devices, model or batch do not fit them, or a device profile is missing or wrong.
    """
    if settings.plan == "mesh":
        return _mesh_plan(spec, batch_size, settings.data, settings.lane)
    if not spec.lane_groups:
        raise InputError(f"CapsNet has no lanes for parallel.plan={settings.plan}: use mesh, with parallel.data")
    if settings.plan == "stacks":
        devices = mesh_lib.take_devices(1, settings.lane, _present(settings))
        profiles = _profiles(settings, devices)
        names = [f"{device.device_kind} {device.id}" for device in devices]
        problem = placement_problem(spec, batch_size, profiles, names)
        placement = _in_first(lambda: dataclasses.asdict(partition.partition(settings.partitioner, problem)))
        return _stacks_plan(spec, devices, Placement(**placement), names)
    devices = jax.devices()
    known = [profile for profile in _profiles(settings, devices) if profile is not None]
    if not known:
        raise InputError(f"parallel.plan=auto needs parallel.profile: measure the devices with {_MEASURE}")

    def choose() -> dict[str, Any]:
        found = candidates(spec, batch_size, known, settings.partitioner, jax.process_count())
        fastest = min(found, key=lambda candidate: candidate.step.total_seconds)
        return {**dataclasses.asdict(fastest), "seconds": fastest.step.total_seconds}

    fastest = _in_first(choose)
    data, lane, placement = (fastest[name] for name in ("data", "lane", "placement"))
    name = f"stacks over {lane} devices" if placement else f"data={data}, lane={lane}"
    _log.info("parallel.plan=auto: %s, %.1f ms a step predicted", name, 1000 * fastest["seconds"])
    if placement is None:
        return _mesh_plan(spec, batch_size, data, lane)
    names = [f"{device.device_kind} {device.id}" for device in devices]
    return _stacks_plan(spec, devices[:lane], Placement(**placement), names)


def make_runner(
    plan: Plan, config: RunConfig, spec: ModelSpec, optimizer: optax.GradientTransformation
) -> MeshRunner | StacksRunner:
    """What runs training steps by that plan."""
    step: dict[str, Any] = {
        "reconstruction_weight": config.train.reconstruction_weight,
        "seed": config.train.seed,
        "max_shift": config.data.max_shift,
        "flip": config.data.flip,
    }
    if plan.head is None:
        return MeshRunner(spec, optimizer, plan.mesh, **step)
    return StacksRunner(spec, optimizer, plan.stacks, plan.head, clip_norm=config.train.clip_norm, **step)


def candidates(
    spec: ModelSpec, batch_size: int, profiles: Sequence[DeviceProfile], partitioner: str, num_processes: int
) -> list[Candidate]:
    """Every split that the devices, given by their profiles, allow; several processes must use all of them."""
    found = []
    for count in range(1, len(profiles) + 1) if num_processes == 1 else [len(profiles)]:
        # CPU devices of one process share its cores.
        shared = float(count) if num_processes == 1 and profiles[0].platform == "cpu" else 1.0
        used, slowness = profiles[:count], [shared] * count
        for data in (n for n in range(1, count + 1) if count % n == 0):
            lane = count // data
            with contextlib.suppress(InputError):
                mesh_lib.check_split(spec, batch_size, data, lane)
                if not all(_has_room(spec, batch_size // data, lane, profile) for profile in used):
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
            f"neither batch nor lanes can be spread over {len(profiles)} devices so that each has a share and room for "
            "it: take fewer processes, another batch size or more lanes"
        )
    return found


def predict_mesh(
    spec: ModelSpec,
    batch_size: int,
    data: int,
    lane: int,
    profiles: Sequence[DeviceProfile],
    slowness: Sequence[float],
) -> simulate.StepTime:
    """A step on a mesh of devices given by their profiles, each so many times slower than its profile says."""
    share = batch_size // data
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    num_lanes = sum(group.count for group in spec.lane_groups)
    num_gathers = 1 + sum(size % lane == 0 for size in (*spec.decoder, math.prod(spec.image_shape)))
    return simulate.simulate_mesh(
        data,
        lane,
        _cluster(profiles),
        lane_seconds=[s * p.stack_seconds(lanes, share) for p, s in zip(profiles, slowness, strict=True)],
        head_seconds=[s * p.head_seconds(num_lanes, share) / lane for p, s in zip(profiles, slowness, strict=True)],
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
) -> simulate.StepTime:
    """A step of lanes in stacks; `exchange` is `direct` in one process and `ring` among several."""
    num_lanes = len(placement.device_of)
    kinds = [group.spec for group in spec.lane_groups for _ in range(group.count)]
    seconds = []
    for d, (profile, factor) in enumerate(zip(profiles, slowness, strict=True)):
        lanes = [_lane_cost(spec, kind) for kind, device in zip(kinds, placement.device_of, strict=True) if device == d]
        seconds.append(factor * profile.stack_seconds(lanes, batch_size))
    return simulate.simulate_stacks(
        dataclasses.replace(placement, seconds=tuple(seconds)),
        _cluster(profiles),
        column_bytes=4 * batch_size * spec.num_classes,
        head_seconds=slowness[0] * profiles[0].head_seconds(num_lanes, batch_size),
        forward_share=profiles[0].forward_share,
        exchange=exchange,
    )


def placement_problem(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile | None],
    device_names: Sequence[str],
    slowness: Sequence[float] = (),
) -> Problem:
    """What each lane takes on each device, by the devices' profiles; without, in FLOPs, which are equal on all.

    The head's work is not in it: while one device does it, the others wait.
    """
    kinds = [group.spec for group in spec.lane_groups for _ in range(group.count)]
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


def _has_room(spec: ModelSpec, batch_size: int, lane: int, profile: DeviceProfile) -> bool:
    """Whether a device can hold its share of the lanes; they run in turn, so the work space is that of the largest."""
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    largest = max(lanes, key=lambda one: profile.lane_bytes(one, batch_size))
    others = sum(one.state_bytes for one in lanes) - largest.state_bytes
    return profile.lane_bytes(largest, batch_size) + others <= profile.memory_bytes


def _in_first(function: Callable[[], Any]) -> Any:
    """What a function returns in process 0, in every process: each might find another answer, by its own clock."""
    return processes.everywhere(lambda: function() if processes.is_first() else None)[0]


def _lane_cost(spec: ModelSpec, lane: LaneSpec) -> cost.LaneCost:
    return cost.lane_cost(lane, spec.lane_settings, spec.image_shape)


def _cluster(profiles: Sequence[DeviceProfile]) -> simulate.Cluster:
    """Devices with the slowest of their links between all."""
    links = [simulate.Link(**profile.link) for profile in profiles if profile.link]
    slowest = simulate.Link(
        max((link.latency_seconds for link in links), default=0.0),
        min((link.bytes_per_second for link in links), default=float("inf")),
    )
    return simulate.Cluster([0] * len(profiles), slowest, slowest)


def _mesh_plan(spec: ModelSpec, batch_size: int, data: int, lane: int) -> Plan:
    mesh_lib.check_split(spec, batch_size, data, lane)
    return Plan(mesh_lib.make_mesh(data, lane), about={"plan": "mesh", "data": data, "lane": lane})


def _stacks_plan(spec: ModelSpec, devices: Sequence[jax.Device], placement: Placement, names: Sequence[str]) -> Plan:
    idle = [names[d] for d in range(len(devices)) if d not in placement.device_of]
    if idle and jax.process_count() > 1:
        raise InputError(
            f"{placement.partitioner} gives no lane to {', '.join(idle)}: take fewer processes, more lanes or another "
            "partitioner"
        )
    stacks = make_stacks(devices, placement.device_of)
    lanes = {names[devices.index(stack.device)]: spec_of(spec, stack.lanes).lanes for stack in stacks}
    about = {"plan": "stacks", "partitioner": placement.partitioner, "imbalance": placement.imbalance, "lanes": lanes}
    return Plan(stacks=stacks, head=devices[0], about=about)


def _present(settings: ParallelSettings) -> list[jax.Device]:
    if not settings.platforms:
        return jax.devices()
    devices: list[jax.Device] = []
    for platform in dict.fromkeys(name.strip() for name in settings.platforms.split(",") if name.strip()):
        try:
            devices += jax.devices(platform)
        except RuntimeError as error:
            raise InputError(
                f"parallel.platforms={settings.platforms}: jax finds no {platform!r} here, it uses "
                f"{jax.default_backend()}; is JAX_PLATFORMS set?"
            ) from error
    return devices


def _profiles(settings: ParallelSettings, devices: Sequence[jax.Device]) -> list[DeviceProfile | None]:
    """The profile of each device, which every process gives for its own; None for all where there are none."""

    def read() -> dict[str, Any]:
        given = [DeviceProfile.load(Path(name.strip())) for name in settings.profile.split(",") if name.strip()]
        mine = [d for d, device in enumerate(devices) if device.process_index == jax.process_index()]
        return {str(d): _profile_of(given, devices[d]).to_dict() for d in mine if given}

    found = {int(d): DeviceProfile.from_dict(one) for part in processes.everywhere(read) for d, one in part.items()}
    missing = [f"{device.device_kind} {device.id}" for d, device in enumerate(devices) if d not in found]
    if missing and (found or len({device.device_kind for device in devices}) > 1):
        raise InputError(
            f"{', '.join(missing)} without a device profile: devices that differ are balanced by profiles, one for "
            f"each kind. Measure with {_MEASURE} and give --config.parallel.profile=FILE,FILE (each process its own)"
        )
    return [found.get(d) for d in range(len(devices))]


def _profile_of(profiles: Sequence[DeviceProfile], device: jax.Device) -> DeviceProfile:
    same_platform = [profile for profile in profiles if profile.platform == device.platform]
    if not same_platform:
        given = ", ".join(profile.platform for profile in profiles)
        raise InputError(
            f"parallel.profile has profiles for {given} and none for {device.platform}: measure one with {_MEASURE}"
        )
    for profile in same_platform[:-1]:
        with contextlib.suppress(InputError):
            profile.check_is_of(device)
            return profile
    same_platform[-1].check_is_of(device)
    return same_platform[-1]

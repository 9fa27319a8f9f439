"""The plan of a run: which device computes what, on a mesh or as stacks of lanes placed by a partitioner."""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.distributed import processes, traffic
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn import tracing
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.model import encode, init_params
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.placement.problem import NoRoom, Placement, Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.runner import Runner
from mlcn_jax.training.stack_programs import Stack, make_stacks
from mlcn_jax.training.stacks_runner import StacksRunner

_log = logging.getLogger(__name__)
_MEASURE = f"{program()} profile"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh (None for one device), or stacks if there is a head. `about` describes it, ready for JSON."""

    mesh: Mesh | None = None
    stacks: tuple[Stack, ...] = ()
    head: jax.Device | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible split, and the prediction for it. `placement` is that of stacks, None for a mesh."""

    data: int
    lane: int
    placement: Placement | None
    step: simulate.StepTime


def make_plan(
    spec: ModelSpec,
    batch_size: int,
    *,
    kind: str = "mesh",
    data: int = 1,
    lane: int = 1,
    partitioner: str = "greedy",
    profile_files: Sequence[Path] = (),
    platforms: Sequence[str] = (),
) -> Plan:
    """A plan for the devices of this process, or of all processes of the run.

    Args:
      spec, batch_size: the model, and images per training step.
      kind: `mesh`, `stacks`, or `auto` for the fastest split according to the device profiles.
      data: devices over which each batch is split, for a mesh.
      lane: devices over which the lanes are split, for mesh and stacks.
      partitioner: one of `partition.PARTITIONERS`, for stacks.
      profile_files: device profiles, one for each kind of device.
      platforms: kinds of devices to use for stacks in one process, such as gpu and cpu; if empty, JAX's default.

    Raises:
      InputError: there are too few devices, model or batch do not fit them, or a device profile is missing or invalid.
    """
    if kind == "mesh":
        return _mesh_plan(spec, batch_size, data, lane)
    if not spec.lane_groups:
        raise InputError(f"CapsNet has no lanes for parallel.plan={kind}: use mesh, with parallel.data")
    if kind == "stacks":
        devices = mesh_lib.take_devices(1, lane, _present(platforms))
        profiles = _profiles(profile_files, devices)
        names = [f"{device.device_kind} {device.id}" for device in devices]
        problem = placement_problem(spec, batch_size, profiles, names)
        placement = _in_first(lambda: dataclasses.asdict(partition.partition(partitioner, problem)))
        return _stacks_plan(spec, devices, Placement(**placement), names)
    devices = jax.devices()
    known = [profile for profile in _profiles(profile_files, devices) if profile is not None]
    if not known:
        raise InputError(f"parallel.plan=auto needs parallel.profile: measure the devices with {_MEASURE}")

    def choose() -> dict[str, Any]:
        found = candidates(spec, batch_size, known, partitioner, jax.process_count())
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
    plan: Plan,
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float = 0.0,
    **step_options: Any,
) -> Runner:
    """The runner that executes training steps according to a plan.

    Args:
      plan, spec, optimizer: those of the run.
      clip_norm: the optimizer's, 0 for none; stacks clip by the norm over all devices.
      step_options: keyword arguments of `step.make_train_step`.
    """
    if plan.head is None:
        return MeshRunner(spec, optimizer, plan.mesh, **step_options)
    return StacksRunner(spec, optimizer, plan.stacks, plan.head, clip_norm=clip_norm, **step_options)


def algorithms_of(plan: Plan, spec: ModelSpec, batch_size: int, known: Mapping[str, str]) -> dict[str, str]:
    """The convolution algorithms of a run, fixed before anything is traced to run (`tracing.resolve`).

    Args:
      plan, spec, batch_size: those of the run.
      known: algorithms stored in a checkpoint, which are kept.
    """
    found = dict(known)
    shares = plan.mesh.shape[mesh_lib.DATA_AXIS] if plan.mesh is not None else 1
    pixels = jax.ShapeDtypeStruct((batch_size // shares, *spec.image_shape), jnp.float32)
    encoder = jax.eval_shape(lambda key: init_params(spec, key)["encoder"], jax.random.key(0))
    devices = [stack.device for stack in plan.stacks] or jax.local_devices()[:1]
    for device in {device.platform: device for device in devices}.values():
        with jax.default_device(device):
            found = tracing.resolve(functools.partial(encode, spec), encoder, pixels, known=found)
    return found


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
) -> simulate.StepTime:
    """Predicts a step on a mesh of devices given by their profiles, each slower than its profile by a factor."""
    share = batch_size // data
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    num_lanes = len(spec.lane_specs)
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
    """Predicts a step of lanes in stacks; `exchange` is `direct` in one process and `ring` among several."""
    num_lanes = len(placement.device_of)
    kinds = spec.lane_specs
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


def _has_room(spec: ModelSpec, batch_size: int, lane: int, profile: DeviceProfile) -> bool:
    """Whether a device can hold its part of the lanes; they run in turn, so they share the largest's work space."""
    lanes = [_lane_cost(spec, group.spec) for group in spec.lane_groups for _ in range(group.count // lane)]
    largest = max(lanes, key=lambda one: profile.lane_bytes(one, batch_size))
    others = sum(one.state_bytes for one in lanes) - largest.state_bytes
    return profile.lane_bytes(largest, batch_size) + others <= profile.memory_bytes


def _in_first(function: Callable[[], Any]) -> Any:
    """What a function returns in process 0, in every process: timing could give each a different answer."""
    return processes.everywhere(lambda: function() if processes.is_first() else None)[0]


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


def _mesh_plan(spec: ModelSpec, batch_size: int, data: int, lane: int) -> Plan:
    mesh_lib.check_split(spec, batch_size, data, lane)
    return Plan(mesh_lib.make_mesh(data, lane), about={"plan": "mesh", "data": data, "lane": lane})


def _stacks_plan(spec: ModelSpec, devices: Sequence[jax.Device], placement: Placement, names: Sequence[str]) -> Plan:
    idle = [names[d] for d in range(len(devices)) if d not in placement.device_of]
    if idle and jax.process_count() > 1:
        raise InputError(
            f"{placement.partitioner} places no lane on {', '.join(idle)}: use fewer processes, more lanes or another "
            "partitioner"
        )
    stacks = make_stacks(devices, placement.device_of)
    lanes = {names[devices.index(stack.device)]: spec_of(spec, stack.lanes).lanes for stack in stacks}
    about = {"plan": "stacks", "partitioner": placement.partitioner, "imbalance": placement.imbalance, "lanes": lanes}
    return Plan(stacks=stacks, head=devices[0], about=about)


def _present(platforms: Sequence[str]) -> list[jax.Device]:
    if not platforms:
        return jax.devices()
    devices: list[jax.Device] = []
    for platform in dict.fromkeys(platforms):
        try:
            devices += jax.devices(platform)
        except RuntimeError as error:
            raise InputError(
                f"parallel.platforms={','.join(platforms)}: jax finds no {platform!r} here; it uses "
                f"{jax.default_backend()}; is JAX_PLATFORMS set?"
            ) from error
    return devices


def _profiles(files: Sequence[Path], devices: Sequence[jax.Device]) -> list[DeviceProfile | None]:
    """The profile of each device, which each process gives for its own; None for all if there are none."""

    def read() -> dict[str, Any]:
        given = [DeviceProfile.load(file) for file in files]
        mine = [d for d, device in enumerate(devices) if device.process_index == jax.process_index()]
        return {str(d): _profile_of(given, devices[d]).to_dict() for d in mine if given}

    found = {int(d): DeviceProfile.from_dict(one) for part in processes.everywhere(read) for d, one in part.items()}
    missing = [f"{device.device_kind} {device.id}" for d, device in enumerate(devices) if d not in found]
    if missing and (found or len({device.device_kind for device in devices}) > 1):
        raise InputError(
            f"{', '.join(missing)} without a device profile: balancing different devices needs profiles, one for "
            f"each kind. Measure with {_MEASURE} and give --config.parallel.profile=FILE,FILE (each process its own)"
        )
    return [found.get(d) for d in range(len(devices))]


def _profile_of(profiles: Sequence[DeviceProfile], device: jax.Device) -> DeviceProfile:
    same_platform = [profile for profile in profiles if profile.platform == device.platform]
    if not same_platform:
        given = ", ".join(profile.platform for profile in profiles)
        raise InputError(
            f"parallel.profile has profiles for {given}, but none for {device.platform}: measure one with {_MEASURE}"
        )
    for profile in same_platform[:-1]:
        with contextlib.suppress(InputError):
            profile.check_is_of(device)
            return profile
    same_platform[-1].check_is_of(device)
    return same_platform[-1]

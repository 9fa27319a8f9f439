"""The plan of a run: which device computes what, on a mesh or as stacks of lanes placed by a partitioner."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mlcn_jax.distributed import links, processes
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.errors import Damaged, InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn import tracing
from mlcn_jax.nn.model import encode, param_shapes
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.placement import partition
from mlcn_jax.placement.problem import Placement
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.simulate import Cluster
from mlcn_jax.training.apart import couplings_of_losses
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.runner import Runner
from mlcn_jax.training.speeds import speeds_of
from mlcn_jax.training.splits import (
    ROUND_STEPS,
    Messages,
    candidates,
    interval,
    placement_problem,
    predict_apart,
    predict_rounds,
    slowest_link,
)
from mlcn_jax.training.stack_programs import Stack, make_stacks
from mlcn_jax.training.stacks_runner import StacksRunner

_log = logging.getLogger(__name__)
_MEASURE = f"{program()} profile"
_SPEEDS, _LINKS, _CHOICE = "device_speeds.json", "links.json", "plan.json"
TRIED = [name for name in partition.PARTITIONERS if name != "random"]  # under `auto`


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh (None for one device), or stacks if there is a head.

    Attributes:
      about: describes it, ready for JSON.
      in_each_process: whether each of several processes computes the whole by itself.
    """

    mesh: Mesh | None = None
    stacks: tuple[Stack, ...] = ()
    head: jax.Device | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    in_each_process: bool = False


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
    kept: Path | None = None,
    exchange_dtype: str = "float32",
    clip_norm: float = 0.0,
    accumulation_steps: int = 1,
    rounds: bool = True,
) -> Plan:
    """A plan for the devices of this process, or of all processes of the run.

    Args:
      spec, batch_size: the model, and images per training step.
      kind: `mesh`, `stacks`, or `auto` for the fastest split according to the device profiles and, among processes,
        the links between them, which are measured.
      data: devices over which each batch is split, for a mesh.
      lane: devices over which the lanes are split, for mesh and stacks.
      partitioner: one of `partition.PARTITIONERS`, for stacks.
      profile_files: device profiles, one for each kind of device.
      platforms: kinds of devices to use for stacks in one process, such as gpu and cpu; if empty, JAX's default.
      kept: a folder that keeps the measurements of devices that differ and have no profile (`speeds.speeds_of`), of
        links (`links.between_processes`), and what `auto` chose, so that a resumed run has the same plan.
      exchange_dtype, clip_norm, accumulation_steps: those of the run, which decide what is sent.
      rounds: whether the run could be trained in local rounds instead, which `auto` may recommend.

    Raises:
      InputError: there are too few devices, model or batch do not fit them, or a device profile is missing or invalid.
    """
    if kind == "mesh":
        return _with_speeds(_mesh_plan(spec, batch_size, data, lane), spec, batch_size, kept)
    if not spec.lane_groups:
        raise InputError(f"CapsNet has no lanes for parallel.plan={kind}: use mesh, with parallel.data")
    if kind == "stacks":
        devices = mesh_lib.take_devices(1, lane, _present(platforms))
        if unused := [name for name in dict.fromkeys(platforms) if not set(jax.devices(name)) & set(devices)]:
            raise InputError(
                f"parallel.platforms={','.join(platforms)} with parallel.lane={lane} takes {len(devices)} devices, and "
                f"none is a {' or a '.join(unused)}: name that first, or raise parallel.lane"
            )
        profiles = _profiles(profile_files, devices)
        names = [f"{device.device_kind} {device.id}" for device in devices]
        speeds = speeds_of(spec, batch_size, devices, kept and kept / _SPEEDS) if None in profiles else None
        problem = speeds.problem(spec, names) if speeds else placement_problem(spec, batch_size, profiles, names)
        placement = processes.in_first(lambda: dataclasses.asdict(partition.partition(partitioner, problem)))
        found = _stacks_plan(spec, devices, Placement(**placement), names)
        if speeds is None:
            return found
        return dataclasses.replace(found, about={**found.about, "measured_seconds": speeds.about(names)})
    if spec.remat != "none":
        raise InputError(
            f"model.remat is {spec.remat}, but device profiles predict time and memory of steps that keep all "
            "activations: give parallel.plan=mesh with parallel.data and parallel.lane, or model.remat=none"
        )
    devices = jax.devices()
    known = [profile for profile in _profiles(profile_files, devices) if profile is not None]
    if not known:
        raise InputError(f"parallel.plan=auto needs parallel.profile: measure the devices with {_MEASURE}")

    cluster = links.between_processes(devices, slowest_link(known), kept and kept / _LINKS)
    messages = Messages(exchange_dtype, clip_norm > 0, accumulation_steps)
    asked = {
        "lanes": spec.lanes,
        "model": spec.digest,
        "batch_size": batch_size,
        "profiles": [_digest(profile) for profile in known],
        "links": links.about(cluster) if cluster else {},
        "processes": [device.process_index for device in devices],
        "messages": dataclasses.asdict(messages),
        "rounds": rounds,
    }

    def choose() -> dict[str, Any]:
        if kept and (before := _chosen_before(kept / _CHOICE, asked)):
            return before
        found = candidates(spec, batch_size, known, TRIED, jax.process_count(), cluster, messages)
        fastest = min(found, key=lambda candidate: candidate.step.total_seconds)
        seconds = fastest.step.total_seconds
        used = known if cluster else known[: fastest.data * fastest.lane]  # processes all take part
        sure = interval(seconds, spec, used, placement=fastest.placement, cluster=cluster)
        ends = [1000 * sure.low_seconds, 1000 * sure.high_seconds] if sure else None
        given = (clip_norm, seconds, rounds, accumulation_steps)
        other = faster_otherwise(spec, batch_size, known, cluster, *given) if cluster else {}
        choice = {**dataclasses.asdict(fastest), "seconds": seconds, "ends": ends, "other": other}
        if kept:
            write_json(kept / _CHOICE, {"asked": asked, "choice": choice})
        return choice

    fastest = processes.in_first(choose)  # timing could give each a different answer
    data, lane, placement = (fastest[name] for name in ("data", "lane", "placement"))
    name = f"stacks over {lane} devices ({placement['partitioner']})" if placement else f"data={data}, lane={lane}"
    alone = cluster is not None and data * lane == 1
    name = "each process by itself" if alone else name
    sure = " (90 % within {:.1f} to {:.1f})".format(*fastest["ends"]) if fastest["ends"] else ""
    other = ", ".join(f"{what}, {1000 * seconds:.1f} ms" for what, seconds in fastest["other"].items())
    other = other and f"; faster, but trained in another way: {other}"
    _log.info("parallel.plan=auto: %s, %.1f ms a step predicted%s%s", name, 1000 * fastest["seconds"], sure, other)
    names = [f"{device.device_kind} {device.id}" for device in devices]
    if alone:
        found = Plan(about={"plan": "mesh", "data": 1, "lane": 1, "in each process": True}, in_each_process=True)
    elif placement is None:
        found = _mesh_plan(spec, batch_size, data, lane)
    else:
        found = _stacks_plan(spec, devices[:lane], Placement(**placement), names)
    if cluster is None:
        return found
    return dataclasses.replace(found, about={**found.about, "measured_links": links.about(cluster)})


def _digest(profile: DeviceProfile) -> str:
    return hashlib.sha256(json.dumps(profile.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def _chosen_before(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What `auto` chose when it was asked the same, if that was kept, however fast the links were then."""
    try:
        stored = read_json(path) if path.exists() else {}
        before = {**stored.get("asked", {}), "links": asked["links"]}
        return stored["choice"] if before == asked else None
    except (Damaged, KeyError, AttributeError, TypeError):
        _log.warning("%s cannot be used: choosing again", path)
        return None


def faster_otherwise(
    spec: ModelSpec,
    batch_size: int,
    profiles: Sequence[DeviceProfile],
    cluster: Cluster,
    clip_norm: float,
    seconds: float,
    rounds: bool = True,
    parts: int = 1,
) -> dict[str, float]:
    """Ways to train that take less than `seconds` per step, each with its seconds, but give other results than a split.

    Local rounds if `rounds` says that they are possible, and lanes trained apart if nothing couples their losses; both
    compute a batch in as many `parts` as the run.
    """
    in_rounds = f"rounds of {ROUND_STEPS} steps (train.rounds.steps, {program()} rounds)"
    apart = f"lanes apart (train.lanes_apart, {program()} work --pool=FOLDER)"
    found = {in_rounds: predict_rounds(spec, batch_size, profiles, cluster, parts) if rounds else None}
    if not any(coupled for coupled, _, _ in couplings_of_losses(spec, clip_norm)):
        found[apart] = predict_apart(spec, batch_size, profiles, cluster, parts)
    return {what: taken for what, taken in found.items() if taken is not None and taken < seconds}


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


def algorithms_of(
    plan: Plan, spec: ModelSpec, batch_size: int, known: Mapping[str, str], size: int = 0
) -> dict[str, str]:
    """The convolution algorithms of a run, fixed before anything is traced to run (`tracing.resolve`).

    Args:
      plan, spec, batch_size: those of the run.
      known: algorithms stored in a checkpoint, which are kept.
      size: height and width of the images, where steps see them resized (`train.image_sizes`); 0 for their own.
    """
    found = dict(known)
    height, width, channels = spec.image_shape
    shares = plan.mesh.shape[mesh_lib.DATA_AXIS] if plan.mesh is not None else 1
    pixels = jax.ShapeDtypeStruct((batch_size // shares, size or height, size or width, channels), jnp.float32)
    encoder = param_shapes(spec)["encoder"]
    devices = [stack.device for stack in plan.stacks] or jax.local_devices()[:1]
    for device in {device.platform: device for device in devices}.values():
        with jax.default_device(device):
            found = tracing.resolve(functools.partial(encode, spec), encoder, pixels, known=found)
    return found


def _mesh_plan(spec: ModelSpec, batch_size: int, data: int, lane: int) -> Plan:
    mesh_lib.check_split(spec, batch_size, data, lane)
    return Plan(mesh_lib.make_mesh(data, lane), about={"plan": "mesh", "data": data, "lane": lane})


def _with_speeds(found: Plan, spec: ModelSpec, batch_size: int, kept: Path | None) -> Plan:
    """A mesh gives all devices an equal share: if they differ in kind or speed, this is measured and reported."""
    if found.mesh is None or not spec.lane_groups:
        return found
    devices = list(found.mesh.devices.flat)
    speeds = speeds_of(spec, batch_size, devices, kept and kept / _SPEEDS)
    if speeds is None:
        return found
    measured = speeds.about([f"{device.device_kind} {device.id}" for device in devices])
    _log.warning(
        "devices differ, and a mesh gives each an equal share: parallel.plan=stacks balances the load (seconds "
        "of a lane's step: %s)",
        measured,
    )
    return dataclasses.replace(found, about={**found.about, "measured_seconds": measured})


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
    if missing and found:
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

"""What a device is and gives: its name, versions and memory, and its profile, from which costs of lanes are predicted.

`python -m experiments.profile_device` measures a profile.
"""

import ctypes
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import resource
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mlcn_jax.config import write_json
from mlcn_jax.errors import InputError

if TYPE_CHECKING:
    from mlcn_jax.cost import LaneCost, Layer

PROFILE_VERSION = 1
_MEMORY_MARGIN = 1.02  # over what the fitted lanes need: lanes between them were up to 1 % above the fit
_STRAIGHTNESS = 0.03  # of seconds per FLOP over the size of a layer, against relative errors of the fit
_CROWDINGS = tuple(i / 100 for i in range(21))
_MEASURE = "measure one there with python -m experiments.profile_device"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict:
    """Device and versions, to stand beside every measured figure."""
    device = jax.local_devices()[0]
    return {
        "device": name_of(device),
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "cpu_count": num_cores(),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in _PACKAGES},
        },
    }


def name_of(device: jax.Device) -> str:
    """Which hardware it is, such as `NVIDIA H200` or a CPU's model."""
    return _cpu_model() if device.platform == "cpu" else device.device_kind


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """What one device gives, measured, and what it takes for lanes, predicted from their `cost.LaneCost`.

    Attributes:
      device, platform, cpu_count: as in `environment`; what it holds for.
      jax_version: of the compiler whose programs were measured.
      image_shape, num_classes, lane_routing, compute_dtype: of the lanes that were measured; what it holds for.
      batch_sizes: that were measured.
      tiny_seconds: of a training step of the tiny network (`slowness`).
      memory_bytes: that programs may use.
      layer_seconds: for each `Layer.speed_class`, pairs of the logarithm (base 2) of a layer's number of parameters and
        of the seconds of a training step for each of its forward FLOPs; between them they change linearly.
      step_seconds, parameter_seconds: of each lane's step, and for each of its parameters, besides.
      crowding: all these grow with this power of the number of images that a stack holds, batch size times lanes, since
        what is saved for the backward pass leaves the caches.
      lane_bytes_of: memory of a lane's training step for one of each of `LaneCost.memory_features`.
      head_seconds_of: seconds of loss, decoder and its update for one of each of `head_features`.
      forward_share: part of a lane's training step that is its forward pass.
      link: `latency_seconds` and `bytes_per_second` of a message to a second device of this kind on the same machine,
        as a collective sends it; None where there is none.
      points: the measured lanes, for people.

    Source: the speed factor is that of do Rosario 2021 (thesis), chapter 5; the fits are ours.
    """

    device: str
    platform: str
    cpu_count: int
    jax_version: str
    image_shape: tuple[int, int, int]
    num_classes: int
    lane_routing: str
    compute_dtype: str
    batch_sizes: tuple[int, ...]
    tiny_seconds: float
    memory_bytes: int
    layer_seconds: Mapping[str, Sequence[tuple[float, float]]]
    step_seconds: float
    parameter_seconds: float
    crowding: float
    lane_bytes_of: Mapping[str, float]
    head_seconds_of: Mapping[str, float]
    forward_share: float
    link: Mapping[str, float] | None
    points: Sequence[Mapping[str, Any]]

    def slowness(self, fastest: "DeviceProfile") -> float:
        """How much slower than another device, by the tiny network (`cost.published_seconds`)."""
        return self.tiny_seconds / fastest.tiny_seconds

    def lane_seconds(self, cost: "LaneCost", batch_size: int) -> float:
        """Seconds of a training step of one lane, alone.

        A lane that is wider or narrower than all that were measured is taken to be as fast per FLOP as the nearest.

        Raises:
          InputError: the profile was measured with lanes of another kind, images or classes.
        """
        return self.stack_seconds([cost], batch_size)

    def stack_seconds(self, costs: Sequence["LaneCost"], batch_size: int) -> float:
        """Seconds of a training step of some lanes that one program computes; raises as `lane_seconds`."""
        total = 0.0
        for cost in costs:
            self._check_covers(cost, self.layer_seconds, {layer.speed_class for layer in cost.layers})
            total += self.step_seconds + self.parameter_seconds * cost.parameters
            for layer in cost.layers:
                sizes, seconds = zip(*self.layer_seconds[layer.speed_class], strict=True)
                total += batch_size * layer.flops * float(np.interp(_log_size(layer), sizes, seconds))
        return total * (len(costs) * batch_size) ** self.crowding

    def lane_bytes(self, cost: "LaneCost", batch_size: int) -> float:
        """Memory of a training step of one lane: the compiled program's peak, or a little more.

        Lanes of one program share work space, so together they need less than the sum. Batches smaller than all that
        were measured count as the smallest that was.

        Raises:
          InputError: as `lane_seconds`.
        """
        features = cost.memory_features(max(batch_size, min(self.batch_sizes)))
        self._check_covers(cost, self.lane_bytes_of, features)
        return sum(self.lane_bytes_of[name] * size for name, size in features.items())

    def head_seconds(self, num_lanes: int, batch_size: int) -> float:
        """Seconds of loss, decoder and its update, from class capsules to their gradients."""
        features = head_features(num_lanes, batch_size)
        return sum(self.head_seconds_of[name] * size for name, size in features.items())

    def check_is_of(self, device: jax.Device) -> None:
        """Raises InputError for a device of this process that is another than the profile was measured on."""
        here: dict[str, Any] = {"device": name_of(device), "platform": device.platform}
        if device.platform == "cpu":
            here["cpu_count"] = num_cores()
        rows = [
            f"  {field}: {getattr(self, field)!r} in the profile, {here[field]!r} here"
            for field in here
            if getattr(self, field) != here[field]
        ]
        if rows:
            raise InputError(
                "the device profile was measured on another device:\n"
                + "\n".join(rows)
                + "\nmeasure one here with python -m experiments.profile_device (--cores=N for a process of N cores)"
            )

    def _check_covers(self, cost: "LaneCost", known: Collection[str], needed: Iterable[str]) -> None:
        """Raises InputError where such lanes were not measured."""
        rows = [
            f"  {field}: {measured!r} in the profile, {given!r} for {cost.spec}"
            for field, measured, given in (
                ("image_shape", self.image_shape, cost.image_shape),
                ("num_classes", self.num_classes, cost.settings.num_classes),
                ("lane_routing", self.lane_routing, cost.settings.lane_routing),
                ("compute_dtype", self.compute_dtype, np.dtype(cost.settings.dtype).name),
            )
            if measured != given
        ]
        rows += [f"  {name}: not in the profile, but in {cost.spec}" for name in needed if name not in known]
        if rows:
            raise InputError(
                "the device profile was measured with other lanes:\n"
                + "\n".join(rows)
                + "\nmeasure one with these by python -m experiments.profile_device (--data, --lane_routing, "
                + "--compute_dtype)"
            )

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {"version": PROFILE_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> "DeviceProfile":
        """Reads what `to_dict` gives.

        Raises:
          InputError: it is of another format, or damaged.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise InputError(f"this is no device profile: {_MEASURE}")
        values = dict(values)
        version = values.pop("version")
        if version != PROFILE_VERSION:
            raise InputError(
                f"this is a device profile of format {version}, and format {PROFILE_VERSION} is expected: {_MEASURE}"
            )
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        for name in sorted(set(fields) ^ set(values)):
            what = "is missing" if name in fields else "is no field"
            raise InputError(f"the device profile is damaged, {name} {what}: {_MEASURE}")
        for name, value in values.items():
            try:
                values[name] = _as_type(value, fields[name])
            except (TypeError, ValueError) as error:
                raise InputError(f"the device profile is damaged, {name}: {error}: {_MEASURE}") from error
        return cls(**values)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> "DeviceProfile":
        """Reads what `save` wrote; raises InputError, naming the file, where it is missing or cannot be used."""
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): {_MEASURE}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}): {_MEASURE}") from error


def _as_type(value: Any, expected: Any) -> Any:
    """A value read from JSON as one of that type; TypeError where it is not. Numbers must be finite and 0 or more."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any or (value is None and type(None) in args):
        return value
    if origin is types.UnionType:
        return _as_type(value, args[0])
    if origin in (tuple, Sequence) and isinstance(value, list) and value:
        of = args if origin is tuple and Ellipsis not in args else [args[0]] * len(value)
        items = [_as_type(item, item_type) for item, item_type in zip(value, of, strict=True)]
        return tuple(items) if origin is tuple else items
    if origin is Mapping and isinstance(value, dict):
        return {name: _as_type(item, args[1]) for name, item in value.items()}
    if expected is str and isinstance(value, str):
        return value
    if expected in (int, float) and type(value) in (int, expected) and 0 <= value < math.inf:
        return value
    raise TypeError(f"{value!r} is not {expected}")


def head_features(num_lanes: int, batch_size: int) -> dict[str, float]:
    """Sizes to which seconds of loss and decoder are fitted."""
    return {"step": 1, "lanes": num_lanes, "images": batch_size, "images times lanes": batch_size * num_lanes}


def fit_lane_seconds(
    stacks: Sequence[Sequence["LaneCost"]], batch_sizes: Sequence[int], seconds: Sequence[float]
) -> dict[str, Any]:
    """The fields of a profile from which `DeviceProfile.stack_seconds` comes nearest to what was measured.

    All but `crowding`, of which some are tried, by nonnegative least squares of the relative errors. Seconds per FLOP
    are pulled towards a straight line over the logarithm of a layer's size where few measurements tell.

    Args:
      stacks: the lanes of each measured program.
      batch_sizes, seconds: of each.
    """
    from scipy import optimize

    layers = [[layer for cost in costs for layer in cost.layers] for costs in stacks]
    sizes: dict[str, list[float]] = {}
    for layer in itertools.chain.from_iterable(layers):
        sizes.setdefault(layer.speed_class, []).append(_log_size(layer))
    knots = {name: np.arange(math.floor(min(of)), math.ceil(max(of)) + 1) for name, of in sizes.items()}
    places = dict(zip(knots, itertools.accumulate((len(of) for of in knots.values()), initial=0), strict=False))
    num_knots = sum(len(of) for of in knots.values())

    table = np.zeros((len(stacks), num_knots + 2))
    for row, costs, own, batch_size in zip(table, stacks, layers, batch_sizes, strict=True):
        for layer in own:
            near = np.maximum(0.0, 1.0 - np.abs(knots[layer.speed_class] - _log_size(layer)))
            row[places[layer.speed_class] :][: len(near)] += batch_size * layer.flops * near
        row[-2:] = len(costs), sum(cost.parameters for cost in costs)
    relative = table / np.asarray(seconds)[:, None]
    units = np.full(num_knots + 2, relative[:, :num_knots].sum(axis=1).mean())  # 1 is the mean speed
    units[-2:] = relative[:, -2:].max(axis=0)
    inner = [place for name, first in places.items() for place in range(first, first + len(knots[name]) - 2)]
    bends = _STRAIGHTNESS * np.diff(np.eye(num_knots + 2), n=2, axis=0)[inner]
    images = np.array([len(costs) * batch_size for costs, batch_size in zip(stacks, batch_sizes, strict=True)])
    targets = np.concatenate([np.ones(len(stacks)), np.zeros(len(bends))])

    def fit(crowding: float) -> tuple[np.ndarray, float]:
        slower = (images / images.min()) ** crowding
        return optimize.nnls(np.vstack([relative / units * slower[:, None], bends]), targets)

    crowding = min(_CROWDINGS, key=lambda power: fit(power)[1])
    found = fit(crowding)[0] / units / images.min() ** crowding
    return {
        "layer_seconds": {
            name: [(float(size), float(x)) for size, x in zip(of, found[places[name] :], strict=False)]
            for name, of in knots.items()
        },
        "step_seconds": float(found[-2]),
        "parameter_seconds": float(found[-1]),
        "crowding": crowding,
    }


def _log_size(layer: "Layer") -> float:
    return math.log2(max(layer.kernel, 1))


def fit_seconds(features: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds for one of each feature, 0 or more, with the least sum of squared relative errors."""
    from scipy import optimize

    names, sizes, largest = _table(features)
    solution, _ = optimize.nnls(sizes / np.asarray(seconds)[:, None], np.ones(len(sizes)))
    return dict(zip(names, (solution / largest).tolist(), strict=True))


def fit_bytes(features: Sequence[Mapping[str, float]], num_bytes: Sequence[float]) -> dict[str, float]:
    """Bytes for one of each feature, 0 or more, never under those given, and above all others by a small margin.

    Of all such fits the one with the least sum of relative excesses, found by linear programming.
    """
    from scipy import optimize

    names, sizes, largest = _table(features)
    relative = sizes / np.asarray(num_bytes)[:, None]
    found = optimize.linprog(relative.sum(axis=0), A_ub=-relative, b_ub=-np.ones(len(relative)), bounds=(0, None))
    if found.x is None:
        raise ArithmeticError(f"no fit of the memory was found: {found.message}")
    return dict(zip(names, (_MEMORY_MARGIN * found.x / largest).tolist(), strict=True))


def _table(features: Sequence[Mapping[str, float]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of the features, a row of their sizes for each point, scaled to 1, and by what they were divided."""
    names = sorted({name for row in features for name in row})
    sizes = np.array([[row.get(name, 0.0) for name in names] for row in features], float)
    largest = np.maximum(sizes.max(axis=0), 1.0)
    return names, sizes / largest, largest


def usable_memory_bytes() -> int:
    """Memory for programs: of the accelerator, or the share of the machine's that belongs to this process's cores."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return _machine_memory_bytes() * num_cores() // (os.cpu_count() or 1)


def _machine_memory_bytes() -> int:
    """Physical memory, or less where the container that this process runs in has a limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return memory


def peak_memory_bytes() -> int:
    """Most memory held so far: of the accelerator where it counts it, of this process otherwise."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def return_unused_memory() -> None:
    """Gives memory that the C library holds but does not use back to the system, where the library can.

    Compiling a training step takes hundreds of MiB that nothing needs afterwards.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


def keep_compiled_programs(least_seconds: float = 1.0) -> Path | None:
    """Keeps programs that took so long to compile in a folder between runs, where that is safe; returns the folder.

    A program compiled for one CPU can crash on another, so the folder's name holds a digest of this CPU's
    features; where they cannot be read (other systems than Linux), programs for the CPU are not kept.
    `JAX_COMPILATION_CACHE_DIR`, where set, is left to decide.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    features = _cpu_features()
    if jax.default_backend() == "cpu" and not features:
        return None
    digest = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
    root = Path(os.environ.get("MLCN_JAX_CACHE", Path.home() / ".cache" / "mlcn_jax"))
    folder = root / f"compiled-{digest}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _cpu_features() -> str:
    return _cpuinfo("flags") or _cpuinfo("Features")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")

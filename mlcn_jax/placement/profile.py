"""What a device is and gives: its name, versions and memory, and its profile, from which costs of lanes are predicted.

The command `profile` measures a profile.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json

if TYPE_CHECKING:
    from mlcn_jax.placement.cost import LaneCost, Layer
from mlcn_jax.host import name_of, num_cores
from mlcn_jax.launch import program

PROFILE_VERSION = 1
_MEASURE = f"measure one there with {program()} profile"


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
                total += batch_size * layer.flops * float(np.interp(log_size(layer), sizes, seconds))
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
                + f"\nmeasure one here with {program()} profile (--cores=N for a process of N cores)"
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
                + f"\nmeasure one with these by {program()} profile (--data, --lane_routing, "
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


def log_size(layer: "Layer") -> float:
    return math.log2(max(layer.kernel, 1))

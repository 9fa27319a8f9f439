"""A device's profile: its name, versions, memory and measurements, from which costs of lanes are predicted.

The command `profile` measures it.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import msgspec
import numpy as np

from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import write_json

if TYPE_CHECKING:
    from mlcn_jax.placement.cost import LaneCost, Layer
from mlcn_jax.host import name_of, num_cores
from mlcn_jax.launch import program

MEASURED_KINDS = ("mlcn1", "mlcn2", "resnet")  # of lanes in a profile
FORM_BATCH = 50  # images in a step of which the forms of lanes are timed in training
PROFILE_VERSION = 2  # a profile of format 1 lacks the fields that have a default, and is read with them
TILES = "tiles by winograd"  # the memory feature of its work space (`LaneCost.memory_features`); old profiles lack it
# Numbers in a profile must be finite, and 0 or more.
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
FormName = Annotated[str, msgspec.Meta(pattern=r"^(train|infer) (float32|bfloat16|int8) \S+$")]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_SOME = msgspec.Meta(min_length=1)
_NEEDED = {  # in fields that are mappings
    "link": ("latency_seconds", "bytes_per_second"),
    "sharing": ("devices", "slowdown", "spread"),
    "peak": ("flops_per_second", "bytes_per_second"),
}
_MEASURE = f"measure one on that device with {program()} profile"


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Measurements of one device, and predictions for lanes from their `cost.LaneCost`.

    Attributes:
      device, platform, cpu_count: as in `environment`; the profile is valid for these.
      jax_version: version of jax when it was measured.
      image_shape, num_classes, lane_routing, compute_dtype: of the measured lanes; the profile is valid for these.
      batch_sizes: the measured batch sizes.
      tiny_seconds: time of a training step of the tiny network.
      memory_bytes: memory that programs may use.
      layer_seconds: for each `Layer.speed_class`, pairs of the logarithm (base 2) of a layer's number of parameters and
        of the seconds of a training step for each of its forward FLOPs; interpolated linearly in between. A layer in a
        form that was not measured (`LaneCost.forms`) counts as in one that was; so in `lane_bytes_of`.
      step_seconds, parameter_seconds: additional time per step of a lane, and per parameter of it.
      crowding: all these grow with this power of the number of images in a stack (batch size times lanes), as values
        saved for the backward pass no longer fit the caches.
      lane_bytes_of: bytes of a lane's training step per unit of each of `LaneCost.memory_features`.
      head_seconds_of: seconds of loss, decoder and its update per unit of each of `head_features`.
      forward_share: fraction of a lane's training step spent in the forward pass.
      link: `latency_seconds` and `bytes_per_second` of a message, sent by a collective, to a second device of this
        kind on the same machine; None if there is none.
      points: the measured lanes, for reference.
      value_seconds: for each `Layer.family`, additional time of a training step for each value that its layers compute.
      crowded_images: smallest and largest number of images in a measured stack; `crowding` stays constant beyond them.
      whole_ratio: how many times as long lanes take in a whole training step of a model as in programs of their own.
      residuals: logarithms of measured over predicted seconds, of lanes (`lane`) and of groups of them (`stack`) that
        were left out of the fit (`fit.residuals`), and of whole training steps (`whole`).
      sharing: `devices` of this kind that compute at once on one machine take `slowdown` times as long as one alone,
        with a standard deviation of the logarithm of `spread`; None if they share nothing, or were not measured.
      form_seconds: for each form of a lane, such as `train bfloat16 native` or `infer int8 onnxruntime`, the seconds
        for an image of each measured lane (`forms.form_problem`); empty if none was measured.
      form_bytes: for each of these forms in training, the peak memory of a step of `FORM_BATCH` images of each lane.
      peak: the highest `flops_per_second` of a matrix product and `bytes_per_second` read and written; None if they
        were not measured.

    Source: the speed factor is that of do Rosario 2021 (thesis), chapter 5; the fits are ours.
    """

    device: str
    platform: str
    cpu_count: Count
    jax_version: str
    image_shape: tuple[Count, Count, Count]
    num_classes: Count
    lane_routing: str
    compute_dtype: str
    batch_sizes: Annotated[tuple[Count, ...], _SOME]
    tiny_seconds: Amount
    memory_bytes: Count
    layer_seconds: Mapping[str, Annotated[Sequence[tuple[Amount, Amount]], _SOME]]
    step_seconds: Amount
    parameter_seconds: Amount
    crowding: Amount
    lane_bytes_of: Mapping[str, Amount]
    head_seconds_of: Mapping[str, Amount]
    forward_share: Amount
    link: Mapping[str, Amount] | None
    points: Annotated[Sequence[Mapping[str, Any]], _SOME]
    value_seconds: Mapping[str, Amount] = dataclasses.field(default_factory=dict)
    crowded_images: tuple[Count, Count] | None = None
    whole_ratio: Amount = 1.0
    residuals: Mapping[str, Sequence[Finite]] = dataclasses.field(default_factory=dict)
    sharing: Mapping[str, Amount] | None = None
    peak: Mapping[str, Amount] | None = None
    form_seconds: Mapping[FormName, Mapping[str, Amount]] = dataclasses.field(default_factory=dict)
    form_bytes: Mapping[FormName, Mapping[str, Amount]] = dataclasses.field(default_factory=dict)

    def lane_seconds(self, cost: "LaneCost", batch_size: int) -> float:
        """Seconds of a training step of a single lane in a program of its own.

        A lane wider or narrower than all measured ones is assumed to be as fast per FLOP as the nearest of them.

        Raises:
          InputError: the profile was measured with lanes of another kind, images or classes.
        """
        return self.stack_seconds([cost], batch_size)

    def model_seconds(self, costs: Sequence["LaneCost"], batch_size: int, images: int = 0) -> float:
        """Seconds of lanes in a whole training step, without the head; arguments and errors as for `stack_seconds`."""
        return self.whole_ratio * self.stack_seconds(costs, batch_size, images)

    def stack_seconds(self, costs: Sequence["LaneCost"], batch_size: int, images: int = 0) -> float:
        """Seconds of a training step of several lanes in one program; raises as `lane_seconds`.

        Args:
          costs: the lanes.
          batch_size: images per step.
          images: the images in the stack, for `crowding`; 0 for `batch_size` times lanes. For a part of a split, those
            of the whole, so that no split gains from smaller stacks.
        """
        total = 0.0
        for cost in costs:
            forms = cost.forms(self.platform, batch_size)
            names = [layer.speed_class(form) for layer, form in zip(cost.layers, forms, strict=True)]
            total += self.step_seconds + self.parameter_seconds * cost.parameters
            for layer, name in zip(cost.layers, self._covered(cost, self.layer_seconds, names), strict=True):
                sizes, seconds = zip(*self.layer_seconds[name], strict=True)
                total += batch_size * layer.flops * float(np.interp(log_size(layer), sizes, seconds))
                total += batch_size * layer.outputs * self.value_seconds.get(layer.family, 0.0)
        images = images or len(costs) * batch_size
        if self.crowded_images:
            images = min(max(images, self.crowded_images[0]), self.crowded_images[1])
        return total * images**self.crowding

    def slowdown(self, devices: int) -> float:
        """How many times longer a step takes while this number of devices of one machine compute at once.

        Proportional to the number of other devices up to the measured number, and constant beyond it.
        """
        if not self.sharing or self.sharing["devices"] <= 1:
            return 1.0
        others = min(devices - 1, self.sharing["devices"] - 1) / (self.sharing["devices"] - 1)
        return 1 + others * max(0.0, self.sharing["slowdown"] - 1)

    def lane_bytes(self, cost: "LaneCost", batch_size: int) -> float:
        """Memory of a training step of one lane: the compiled program's peak, or a little more.

        Lanes of one program share work space, so together they need less than the sum. Batches smaller than all
        measured ones count as the smallest measured one.

        Raises:
          InputError: as for `lane_seconds`.
        """
        features = cost.memory_features(self.platform, max(batch_size, min(self.batch_sizes)))
        if TILES not in self.lane_bytes_of:
            features.pop(TILES, None)
        names = self._covered(cost, self.lane_bytes_of, features)
        return sum(self.lane_bytes_of[name] * size for name, size in zip(names, features.values(), strict=True))

    def head_seconds(self, num_lanes: int, batch_size: int) -> float:
        """Seconds of loss, decoder and its update, from class capsules to their gradients."""
        features = head_features(num_lanes, batch_size)
        return sum(self.head_seconds_of[name] * size for name, size in features.items())

    def check_is_of(self, device: jax.Device) -> None:
        """Raises InputError if a device of this process is not the kind the profile was measured on."""
        here: dict[str, Any] = {"device": name_of(device), "platform": device.platform}
        if device.platform == "cpu":
            here["cpu_count"] = num_cores()
        if rows := differences(
            {field: getattr(self, field) for field in here}, here, there="in the profile", here="here"
        ):
            raise InputError(
                "the device profile was measured on another device:\n"
                + "\n".join(rows)
                + f"\nmeasure one here with {program()} profile (--cores=N for a process of N cores)"
            )

    def _covered(self, cost: "LaneCost", known: Collection[str], needed: Iterable[str]) -> list[str]:
        """What is needed as it is known; in a form that was not measured, as the first that was.

        Raises InputError if such lanes were not measured.
        """
        given = {
            "image_shape": cost.image_shape,
            "num_classes": cost.settings.num_classes,
            "lane_routing": cost.settings.lane_routing,
            "compute_dtype": np.dtype(cost.settings.dtype).name,
        }
        measured = {field: getattr(self, field) for field in given}
        rows = differences(measured, given, there="in the profile", here=f"for {cost.spec}")
        found = [name if name in known else _other_form(name, known) for name in needed]
        rows += [f"  {name}: not in the profile, but in {cost.spec}" for name in found if name not in known]
        if rows and cost.spec.kind not in MEASURED_KINDS:
            raise InputError(
                f"device profiles have no lanes of kind {cost.spec.kind}, only {', '.join(MEASURED_KINDS)}: leave the "
                "profile out (parallel.plan=stacks then places lanes by what it times itself), or use other lanes"
            )
        if rows:
            raise InputError(
                "the device profile was measured with other lanes:\n"
                + "\n".join(rows)
                + f"\nmeasure one with these, using {program()} profile (--data, --lane_routing, "
                + "--compute_dtype)"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {"version": PROFILE_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> "DeviceProfile":
        """Reads the output of `to_dict`.

        Raises:
          InputError: it has another format, or is damaged.
        """
        if not isinstance(values, dict) or "version" not in values:
            raise InputError(f"this is not a device profile: {_MEASURE}")
        values = dict(values)
        version = values.pop("version")
        if version not in (1, PROFILE_VERSION):
            raise InputError(
                f"this device profile has format {version}, but format {PROFILE_VERSION} is expected: {_MEASURE}"
            )
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        added = {"form_seconds", "form_bytes", "whole_ratio"}
        if version == 1:
            added |= {"value_seconds", "crowded_images", "residuals", "sharing", "peak"}
        for name in sorted((set(fields) ^ set(values)) - added):
            what = "is missing" if name in fields else "is not a field"
            raise InputError(f"the device profile is damaged, {name} {what}: {_MEASURE}")
        for name, value in values.items():
            try:
                values[name] = msgspec.convert(value, fields[name])
            except msgspec.ValidationError as error:
                shown = "" if isinstance(value, (dict, list)) else f"{value!r}: "
                raise InputError(f"the device profile is damaged, {name}: {shown}{error}: {_MEASURE}") from error
        for name, needed in {**_NEEDED, "head_seconds_of": tuple(head_features(0, 0))}.items():
            held = values.get(name)
            for key in needed if held is not None else ():
                if key not in held or (key.endswith("per_second") and not held[key]):
                    raise InputError(f"the device profile is damaged, {name}: {key} is missing or 0: {_MEASURE}")
        return cls(**values)

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> "DeviceProfile":
        """Reads the output of `save`; raises InputError, naming the file, if it is missing or cannot be used."""
        try:
            return cls.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): {_MEASURE}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}): {_MEASURE}") from error


def _other_form(name: str, known: Iterable[str]) -> str:
    """The first known name that differs only in the form of the layer (`LaneCost.forms`); the name if there is none."""
    plain = name.partition(" by ")[0]
    return next((other for other in known if other.partition(" by ")[0] == plain), name)


def head_features(num_lanes: int, batch_size: int) -> dict[str, float]:
    """Features for fitting the seconds of loss and decoder."""
    return {"step": 1, "lanes": num_lanes, "images": batch_size, "images times lanes": batch_size * num_lanes}


def log_size(layer: "Layer") -> float:
    return math.log2(max(layer.kernel, 1))

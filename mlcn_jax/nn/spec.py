"""`ModelSpec`: everything that determines what a model computes."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LANE_KINDS, LANE_ROUTINGS, PUBLISHED_KINDS, LaneGroup, LaneSettings, LaneSpec
from mlcn_jax.nn.remat import REMATS

MODELS = ("mlcn", "capsnet")
MARGIN_LOSSES = ("joint", "per_lane", "per_lane_sum")
COMPUTE_DTYPES = ("float32", "bfloat16")
DECODER_GRADIENTS = ("auto", "all", "none")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Everything that determines what a model computes.

    Attributes:
      name: `mlcn` or `capsnet`.
      image_shape: height, width, channels.
      num_classes: number of classes K.
      lanes: for `mlcn`, KIND:wWIDTHdDEPTH*COUNT separated by commas, such as mlcn1:w2d1*2,mlcn2:w4d3; empty for
        `capsnet`.
      num_routing_iters: iterations of dynamic routing.
      lane_routing: in a lane, `published` (to one capsule of K dimensions) or `per_class` (to K of one dimension).
      prior_bias: whether routing logits have a trainable initial value.
      decoder: sizes of the decoder's hidden layers.
      lane_dropout: probability that a lane is left out of the classification loss in a training step.
      margin_loss: `joint` (on the lengths from all lanes, as published), `per_lane` (on each lane alone, the mean) or
        `per_lane_sum` (likewise, the sum, so that a lane's gradient does not depend on the number of lanes).
      signed_pixels: whether the encoder takes pixels in [-1, 1] instead of [0, 1]; images and reconstructions are in
        [0, 1] in either case.
      label_smoothing: share of the target that is spread evenly over all classes, for `resnet` lanes.
      ensemble_weight: share of the ensemble's cross-entropy in the loss of `resnet` lanes; above 0, their gradients
        depend on one another.
      decoder_gradient: lanes that the reconstruction trains: `auto` (all but `resnet` lanes), `all` or `none`.
      norm_group: images that are normalised together in training, in lanes with batch normalisation.
      compute_dtype: dtype of convolutions and matrix products; norms, softmax and losses stay float32.
      conv: convolution algorithm: `auto`, `native`, `im2col`, `fourier`, `winograd` or `kn2row`.
      remat: activations of lanes that share a loss in training: `none` keeps those of all lanes until the backward
        pass; `full` recomputes lanes there, but for what their convolutions give, and holds those of a quarter of a
        group's lanes (of one lane that normalises); `offload` does the same, but keeps results of convolutions and
        matrix products in host memory instead (not on a CPU). The result is the same, up to rounding.
      lane_weights: weight of each lane's square in the lengths of the class capsules, in the order of their columns;
        empty for 1 each. They are used wherever lengths are read, never in a loss.
      lane_seeds: a seed for each lane, in the order of the columns, which determines its initial values and the
        draws of `data.augment_lanes`; if empty, they depend on train.seed and on the lane's place in the model.

    Raises:
      InputError: a value is out of range, unknown, or inconsistent with the others.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    lanes: str = ""
    num_routing_iters: int = LaneSettings.num_routing_iters
    lane_routing: str = LaneSettings.lane_routing
    prior_bias: bool = LaneSettings.prior_bias
    decoder: tuple[int, ...] = (512, 1024)
    lane_dropout: float = 0.0
    margin_loss: str = "joint"
    signed_pixels: bool = LaneSettings.signed_pixels
    label_smoothing: float = 0.0
    ensemble_weight: float = 0.0
    decoder_gradient: str = "auto"
    norm_group: int = LaneSettings.norm_group
    compute_dtype: str = "float32"
    conv: str = LaneSettings.conv_algorithm
    remat: str = "none"
    lane_weights: tuple[float, ...] = ()
    lane_seeds: tuple[int, ...] = ()

    def __post_init__(self):
        for field in ("image_shape", "decoder", "lane_weights", "lane_seeds"):
            value = getattr(self, field)
            if isinstance(value, (list, tuple, np.ndarray)):  # as what can be hashed, and written as JSON
                plain = (one.item() if isinstance(one, np.generic) else one for one in value)
                object.__setattr__(self, field, tuple(plain))
        if isinstance(self.num_classes, np.integer):
            object.__setattr__(self, "num_classes", int(self.num_classes))
        shape = self.image_shape
        if not (isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(n, int) and n > 0 for n in shape)):
            raise InputError(f"image_shape is {shape!r}; it must be height, width and channels, such as (28, 28, 1)")
        for field, known in (
            ("name", MODELS),
            ("lane_routing", LANE_ROUTINGS),
            ("margin_loss", MARGIN_LOSSES),
            ("decoder_gradient", DECODER_GRADIENTS),
            ("compute_dtype", COMPUTE_DTYPES),
            ("conv", ("auto", *conv.ALGORITHMS)),
            ("remat", REMATS),
        ):
            value = getattr(self, field)
            if value not in known:
                raise InputError(f"model.{field} is {value!r}; it must be one of {', '.join(known)}")
        kinds = [group.spec.kind for group in self.lane_groups] or ["mlcn1"]  # CapsNet has the convolutions of mlcn1
        height, width, _ = self.image_shape
        neediest = max(kinds, key=lambda kind: LANE_KINDS[kind].min_size)
        least = LANE_KINDS[neediest].min_size
        if min(height, width) < least:
            raise InputError(
                f"images of {height}x{width} pixels are too small for {neediest if self.lanes else 'CapsNet'}: its "
                f"layers need at least {least}x{least}; for a folder of images set a larger --config.data.image_size"
            )
        if self.num_classes < 2:
            raise InputError(f"a classifier needs at least 2 classes, got {self.num_classes}")
        if self.num_routing_iters < 1:
            raise InputError(f"model.num_routing_iters is {self.num_routing_iters}; it must be 1 or more")
        if not 0.0 <= self.lane_dropout < 1.0:
            raise InputError(f"model.lane_dropout is {self.lane_dropout}; it must be in [0, 1)")
        for field in ("label_smoothing", "ensemble_weight"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise InputError(f"model.{field} is {getattr(self, field)}; it must be in [0, 1)")
        if self.norm_group < 1:
            raise InputError(f"model.norm_group is {self.norm_group}; it must be 1 image or more")
        if not self.decoder or min(self.decoder) < 1:
            raise InputError(f"model.decoder is {self.decoder}; it needs one or more sizes of 1 or more")
        self._check_each_lanes()
        if self.name == "mlcn":
            per_lane = self.margin_loss != "joint"
            if self.lane_dropout and (per_lane or self.classifies_alone.any()):
                reason = f"model.margin_loss={self.margin_loss}" if per_lane else f"lanes {self.lanes}"
                raise InputError(
                    f"model.lane_dropout is {self.lane_dropout} with {reason}, where a lane learns to classify "
                    "without the others: leave model.lane_dropout at 0, or use published lanes with margin_loss=joint"
                )
        elif self.lanes or self.lane_dropout or self.margin_loss != "joint":
            raise InputError(
                "CapsNet has no lanes: leave model.lanes empty, model.lane_dropout at 0 and model.margin_loss joint"
            )

    def _check_each_lanes(self) -> None:
        weights, seeds, count = self.lane_weights, self.lane_seeds, len(self.lane_specs)
        for field, values in (("lane_weights", weights), ("lane_seeds", seeds)):
            if values and len(values) != count:
                raise InputError(
                    f"model.{field} has {len(values)} values for {count} lanes: give one for each, or none at all"
                )
        if not all(0 <= seed < 2**32 for seed in seeds):
            raise InputError(f"model.lane_seeds is {seeds}; seeds must be 0 or more, and below 2**32")
        if weights and (not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights)):
            raise InputError(
                f"model.lane_weights is {weights}; weights must be finite and 0 or more, and at least one above 0"
            )

    @property
    def lane_groups(self) -> tuple[LaneGroup, ...]:
        """The lanes, grouped; empty for CapsNet."""
        return parse_lanes(self.lanes) if self.name == "mlcn" else ()

    @property
    def lane_specs(self) -> tuple[LaneSpec, ...]:
        """The lanes one by one, in the order of the columns of the class capsules; empty for CapsNet."""
        return tuple(group.spec for group in self.lane_groups for _ in range(group.count))

    def compiler_options(self, platform: str, batch: int | None = None) -> dict[str, str]:
        """Options for `jax.jit` with which the model's programs are fastest (`conv.compiler_options`).

        Args:
          platform: that the program will run on, such as `cpu`.
          batch: the least number of images that it will compute, if that may be less than a batch in training.
        """
        spectra = any(group.spec.kind in PUBLISHED_KINDS for group in self.lane_groups)
        few = batch is not None and batch < conv.FOURIER_MIN_BATCH
        return conv.compiler_options(platform, (spectra or self.compute_dtype == "bfloat16") and not few)

    @property
    def classifies_alone(self) -> np.ndarray:
        """Whether each lane returns log-probabilities and learns from them alone, bool [lanes]."""
        return np.array([LANE_KINDS[lane.kind].classifies for lane in self.lane_specs], bool)

    @property
    def couples_lanes(self) -> bool:
        """Whether there are lanes that classify alone and learn from the joined columns as well."""
        coupled = self.ensemble_weight > 0 or self.decoder_gradient == "all"
        return coupled and bool(self.classifies_alone.any())

    @property
    def normalises(self) -> bool:
        """Whether there are lanes that normalise by batch statistics."""
        return any(group.kind.normalises for group in self.lane_groups)

    @property
    def certain_length(self) -> float:
        """Length of a class capsule that means probability 1: sqrt(L) if each of L lanes classifies alone.

        With weights, L is their sum. Lanes trained on their joint length count as one, with their mean weight.
        """
        if not self.lane_specs:
            return 1.0
        weights, alone = self.weights, self.classifies_alone
        parts = [weights[alone].sum()]
        if not alone.all():
            parts.append(weights[~alone].sum() if self.margin_loss != "joint" else weights[~alone].mean())
        return math.sqrt(sum(parts))

    @property
    def weights(self) -> np.ndarray:
        """Weight of each lane's square in the lengths of the class capsules, float64 [lanes]."""
        return np.array(self.lane_weights or [1.0] * len(self.lane_specs))

    @property
    def probability_power(self) -> int:
        """Power of `length / certain_length` that is a class's probability.

        1, as published, or 2 where lanes return probabilities, because a squared length is then their sum.
        """
        return 2 if self.classifies_alone.any() else 1

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell models apart, but for `remat`, which may change on resume."""
        fields = dataclasses.asdict(dataclasses.replace(self, remat="none"))
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.compute_dtype)

    @property
    def lane_settings(self) -> LaneSettings:
        return LaneSettings(
            num_classes=self.num_classes,
            lane_routing=self.lane_routing,
            num_routing_iters=self.num_routing_iters,
            prior_bias=self.prior_bias,
            signed_pixels=self.signed_pixels,
            dtype=self.dtype,
            conv_algorithm=self.conv,
            norm_group=self.norm_group,
        )


def rows_of(spec: ModelSpec, lanes: Sequence[int]) -> dict[str, np.ndarray]:
    """Rows of some lanes on the first axis of their groups' stacked parameters, by group name.

    Args:
      spec: the full model.
      lanes: indices of lanes in it, ascending.
    """
    rows, first = {}, 0
    for group in spec.lane_groups:
        own = np.array([lane - first for lane in lanes if first <= lane < first + group.count], np.int32)
        if own.size:
            rows[group.name] = own
        first += group.count
    return rows


def spec_of(spec: ModelSpec, lanes: Sequence[int]) -> ModelSpec:
    """The model with only some of the lanes of another; arguments as for `rows_of`.

    Lanes keep their seeds and weights; if these weights are all 0, they count equally.

    Raises:
      InputError: there are no lanes.
    """
    if not lanes:
        raise InputError("a model needs at least one lane: keep 1 or more")
    rows = rows_of(spec, lanes)
    groups = [LaneGroup(group.spec, rows[group.name].size) for group in spec.lane_groups if group.name in rows]
    weights = tuple(spec.lane_weights[lane] for lane in lanes) if spec.lane_weights else ()
    return dataclasses.replace(
        spec,
        lanes=",".join(map(str, groups)),
        lane_weights=weights if any(weights) else (),
        lane_seeds=tuple(spec.lane_seeds[lane] for lane in lanes) if spec.lane_seeds else (),
    )

"""Lanes: their definition, how a list of them is written, and groups of equal ones that run under vmap.

A lane is a pure function from images to one number per class. Lanes share no parameters and no
activations: a group of equal lanes is `jax.vmap` of one lane over stacked parameters.
"""

import dataclasses
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules, conv

PRIMARY_DIM = 8
LANE_ROUTINGS = ("published", "per_class")
_MOST = {"width": 1_000, "depth": 100, "count": 10_000}  # more is most likely a typo, and would take hours
_glorot = nn.initializers.glorot_uniform()


@dataclasses.dataclass(frozen=True)
class LaneSpec:
    """Defines one lane: `kind` is a key of `LANE_KINDS`, which gives `width` and `depth` (>= 1) their meaning.

    Cost grows linearly with depth and about quadratically with width.
    """

    kind: str
    width: int
    depth: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:w{self.width}d{self.depth}"


@dataclasses.dataclass(frozen=True)
class LaneGroup:
    """`count` equal lanes, run as one vmapped function."""

    spec: LaneSpec
    count: int

    def __str__(self) -> str:
        return f"{self.spec}*{self.count}"

    @property
    def name(self) -> str:
        """Key of the group's stacked parameters, such as `mlcn1_w4d1`."""
        return str(self.spec).replace(":", "_")


def parse_lanes(text: str) -> tuple[LaneGroup, ...]:
    """Reads a list of lanes such as `"mlcn1:w4*8"` or `"mlcn1:w2d1*2, mlcn2:w4d3"`.

    Each entry is `KIND:wWIDTH[dDEPTH][*COUNT]`; depth and count default to 1. Equal lanes are merged
    into one group, at the position of the first of them.

    Raises:
      InputError: the text is not such a list (the message points at the position), or a number in it is too large.

    >>> [str(group) for group in parse_lanes("mlcn1:w4*2, mlcn2:w1d3, mlcn1:w4")]
    ['mlcn1:w4d1*3', 'mlcn2:w1d3*1']
    """
    counts: dict[LaneSpec, int] = {}
    start = 0
    for entry in text.split(","):
        spec, count = _parse_entry(text, entry, start)
        counts[spec] = counts.get(spec, 0) + count
        start += len(entry) + 1
    if sum(counts.values()) > _MOST["count"]:
        raise InputError(f"model.lanes has {sum(counts.values()):,} lanes; at most {_MOST['count']:,} are allowed")
    return tuple(LaneGroup(spec, count) for spec, count in counts.items())


def _parse_entry(text: str, entry: str, start: int) -> tuple[LaneSpec, int]:
    position = len(entry) - len(entry.lstrip())
    entry = entry.rstrip()

    def take(pattern: str, expected: str) -> str:
        nonlocal position
        match = re.compile(pattern).match(entry, position)
        if match is None:
            pointer = " " * (start + position) + "^"
            raise InputError(
                f"model.lanes: expected {expected} at character {start + position + 1}\n"
                f"  {text}\n  {pointer}\n"
                "a list of lanes looks like mlcn1:w4*8 or mlcn1:w2d1*2,mlcn2:w4d3 (KIND:wWIDTHdDEPTH*COUNT)"
            )
        position = match.end()
        return match.group()

    def number(what: str) -> int:
        digits = take("[1-9][0-9]*", f"a {what} of 1 or more")
        if len(digits) > 9 or int(digits) > _MOST[what]:
            raise InputError(
                f"model.lanes: a {what} of {digits[:9]}{'...' * (len(digits) > 9)} is above {_MOST[what]:,}"
            )
        return int(digits)

    known = sorted(LANE_KINDS, key=len, reverse=True)
    kind = take("(?:" + "|".join(known) + ")(?![A-Za-z0-9_])", "a lane kind (" + ", ".join(LANE_KINDS) + ")")
    take(":", "':'")
    take("w", "'w' and a width")
    width = number("width")
    depth = count = 1
    if entry[position : position + 1] == "d":
        take("d", "'d'")
        depth = number("depth")
    if entry[position : position + 1] == "*":
        take(r"\*", "'*'")
        count = number("count")
    take("$", "'d' and a depth, '*' and a count, ',' or the end")
    return LaneSpec(kind, width, depth), count


@dataclasses.dataclass(frozen=True)
class LaneSettings:
    """Settings shared by all lanes of a model.

    Attributes:
      num_classes: classes K; a lane returns K numbers per image.
      lane_routing: `published`, one output capsule of K dimensions, or `per_class`, K capsules of one dimension.
      num_routing_iters: routing iterations; has no effect under `published`.
      prior_bias: whether routing logits have a trainable initial value; no effect under `published` but on size.
      signed_pixels: whether the first convolution takes pixels in [-1, 1] (`first_input`).
      dtype: dtype of the convolutions and matrix products.
      conv_algorithm: a key of `conv.ALGORITHMS`, or `auto`.
    """

    num_classes: int
    lane_routing: str = "published"
    num_routing_iters: int = 3
    prior_bias: bool = True
    signed_pixels: bool = False
    dtype: DTypeLike = jnp.float32
    conv_algorithm: str = "auto"


class ConvParams(nn.Module):
    """Kernel and bias of a convolution, initialized Glorot-uniform and zero, as in Keras."""

    shape: tuple[int, int, int, int]
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "kh kw cin cout"], Float[Array, " cout"]]:
        kernel = self.param("kernel", _glorot, self.shape)
        bias = self.param("bias", nn.initializers.zeros, self.shape[-1:])
        return kernel.astype(self.dtype), bias.astype(self.dtype)


class JointConvParams(nn.Module):
    """Kernel and bias of a 1x1 separable convolution and the 9x9 one after it, joined into one 9x9 convolution.

    There is no activation between the two, so their composition is one convolution that reads the image's few channels
    instead of the `middle` features: the same function of the same parameters for less work.
    """

    channels: int
    middle: int
    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "9 9 cin cout"], Float[Array, " cout"]]:
        depthwise = self.param("depthwise", nn.initializers.ones, (self.channels,))
        pointwise = self.param("pointwise", _glorot, (self.channels, self.middle))
        pointwise_bias = self.param("pointwise_bias", nn.initializers.zeros, (self.middle,))
        kernel = self.param("kernel", _glorot, (9, 9, self.middle, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        joint_kernel = jnp.einsum("cm,hwmo->hwco", depthwise[:, None] * pointwise, kernel)
        joint_bias = bias + jnp.einsum("m,hwmo->o", pointwise_bias, kernel)
        return joint_kernel.astype(self.dtype), joint_bias.astype(self.dtype)


def _mlcn1(images: Array, spec: LaneSpec, settings: LaneSettings) -> Array:
    """mlcn1 of width w: 9x9 convolution to 16w filters, relu, 9x9 convolution with stride 2 to 16w filters.

    Filters by width 1, 2, 4: first 16, 32, 64; last 16, 32, 64, which are 2w capsules of 8 dimensions per position.
    Primary capsules: 72w on 28x28 pixels, 128w on 32x32.

    Source: do Rosario 2021 (thesis; accuracy in table 4.1); do Rosario et al. 2019, section III.
    """
    shape = (9, 9, images.shape[-1], 16 * spec.width)
    return _primary_features(images, ConvParams(shape, settings.dtype, name="conv1")(), spec, settings)


def _mlcn2(images: Array, spec: LaneSpec, settings: LaneSettings) -> Array:
    """mlcn2 of width w: separable 1x1 convolution to 4w filters, 9x9 to 8w, relu, 9x9 with stride 2 to 16w filters.

    Filters by width 1, 2, 4: first 4, 8, 16; second 8, 16, 32; last 16, 32, 64. The thesis gives 8w filters for the
    last one and 72w primary capsules on 28x28 pixels, which contradict each other: here the number of capsules is kept.
    The separable convolution has no activation (`JointConvParams`).

    Source: do Rosario 2021 (thesis; accuracy in table 4.1).
    """
    first = JointConvParams(images.shape[-1], 4 * spec.width, 8 * spec.width, settings.dtype, name="conv1")
    return _primary_features(images, first(), spec, settings)


def _primary_features(
    images: Array, first: tuple[Array, Array], spec: LaneSpec, settings: LaneSettings
) -> Float[Array, "batch h w filters"]:
    """The first convolution, the 3x3 ones that depth adds, and the one that gives 2 * width capsules per position."""
    features = first[0].shape[-1]
    shape = (9, 9, features, 2 * spec.width * PRIMARY_DIM)
    primary = ConvParams(shape, settings.dtype, name="primary")()
    algorithm = settings.conv_algorithm
    if spec.depth == 1:
        return conv.lane_convs(images, *first, *primary, algorithm=algorithm)
    x = nn.relu(conv.conv2d(images, first[0], algorithm=algorithm) + first[1][None, None, None])
    for i in range(1, spec.depth):
        kernel, bias = ConvParams((3, 3, features, features), settings.dtype, name=f"deep{i}")()
        x = nn.relu(conv.conv2d(x, kernel, padding="SAME", algorithm=algorithm) + bias[None, None, None])
    return conv.conv2d(x, primary[0], stride=2, algorithm=algorithm) + primary[1][None, None, None]


# A lane kind turns [batch, height, width, channels] images into [batch, h, w, n * PRIMARY_DIM] features, which become
# the lane's primary capsules. It is one function (images, spec, settings) that declares its parameters as Linen
# modules, and one line here.
LANE_KINDS: dict[str, Callable[[Array, LaneSpec, LaneSettings], Array]] = {"mlcn1": _mlcn1, "mlcn2": _mlcn2}


def first_input(
    images: Float[Array, "batch h w channels"], signed: bool, dtype: DTypeLike
) -> Float[Array, "batch h w channels"]:
    """The first convolution's input in `dtype`: pixels in [0, 1] as published, or in [-1, 1] (ours) if `signed`."""
    return (2.0 * images - 1.0 if signed else images).astype(dtype)


def primary_capsules(
    features: Float[Array, "batch h w filters"], capsule_dim: int = PRIMARY_DIM
) -> Float[Array, "batch capsules dim"]:
    """Splits the filters at each position into capsules and squashes them (Sabour et al. 2017, section 4)."""
    return capsules.squash(features.reshape(features.shape[0], -1, capsule_dim))


class Lane(nn.Module):
    """One lane: maps images to one number per class, as a pure function of its parameters.

    Call `Lane(spec, settings).init(key, images)["params"]` and `.apply({"params": params}, images)`: images are pixels
    in [0, 1], the result is [batch, classes] in (-1, 1), of dtype `settings.dtype`.

    Raises:
      InputError: the images are too small, or `settings.conv_algorithm` cannot do a shape.

    Source: do Rosario et al. 2019, section III; `per_class` routing is this project's.
    """

    spec: LaneSpec
    settings: LaneSettings

    @nn.compact
    def __call__(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes"]:
        s = self.settings
        u = primary_capsules(LANE_KINDS[self.spec.kind](first_input(images, s.signed_pixels, s.dtype), self.spec, s))
        num_primary = u.shape[1]
        weights = self.param("capsule_weights", _glorot, (num_primary, PRIMARY_DIM, s.num_classes))
        weights = weights.astype(s.dtype)
        num_output = s.num_classes if s.lane_routing == "per_class" else 1
        prior_bias = None
        if s.prior_bias:
            prior_bias = self.param("prior_bias", nn.initializers.zeros, (num_primary, num_output))

        if s.lane_routing == "published":
            return capsules.single_capsule(u, weights)
        per_class = weights.transpose(0, 2, 1)[..., None]
        return capsules.dynamic_routing(u, per_class, s.num_routing_iters, prior_bias)[..., 0]


def init_group(
    key: Array, group: LaneGroup, first_lane: int, settings: LaneSettings, images: Array
) -> dict[str, Array]:
    """Parameters of a group, each array with a leading axis of one entry per lane.

    A lane's initial values depend on `key` and on its index in the model (`first_lane` plus its index in the
    group), not on the size of the group.

    Args:
      key: of the entire model.
      group, settings: the lanes.
      first_lane: index in the model of the group's first lane.
      images: an array of the images' shape and dtype, [batch, height, width, channels]; its values do not matter.
    """
    lane = Lane(group.spec, settings)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(first_lane + jnp.arange(group.count))
    return jax.vmap(lambda k: lane.init(k, images)["params"])(keys)


def apply_group(
    params: dict[str, Array], group: LaneGroup, settings: LaneSettings, images: Float[Array, "batch h w c"]
) -> Float[Array, "batch classes lanes"]:
    """Outputs of a group's lanes: one function, vmapped over the leading axis of `params`.

    Args:
      params: parameters of the group, each array [lanes, ...], as returned by `init_group`.
      group: the lanes.
      settings: the model's settings.
      images: pixels in [0, 1].

    Returns:
      Entry [b, k, l] is the output of lane l for class k and image b, in (-1, 1), of dtype `settings.dtype`.

    Source: do Rosario et al. 2019, section III: lane l gives dimension l of every class capsule.
    """
    lane = Lane(group.spec, settings)

    def column(lane_params: dict) -> Array:
        return lane.apply({"params": lane_params}, images)  # type: ignore[return-value]

    return jax.vmap(column, out_axes=-1)(params)

"""Lanes: their kinds, and groups of equal ones.

A lane is a pure function from images to one number per class. Lanes share no parameters and no
activations: a group of equal lanes is `jax.vmap` of one lane over stacked parameters, or, for kinds that normalise, one
lane after the other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mlcn_jax.nn import capsules, conv, resnet, tracing
from mlcn_jax.nn.cut_points import CutPoint, cut_point, name_of
from mlcn_jax.nn.remat import held
from mlcn_jax.nn.schedule import after, gradient_once

PRIMARY_DIM = 8
LANE_ROUTINGS = ("published", "per_class")
_MIN_SIZE = 17  # a 9x9 convolution leaves 9 pixels, a second one with stride 2 leaves 1
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
    """`count` equal lanes, whose parameters are stacked."""

    spec: LaneSpec
    count: int

    def __str__(self) -> str:
        return f"{self.spec}*{self.count}"

    @property
    def kind(self) -> "LaneKind":
        """What these lanes compute."""
        return LANE_KINDS[self.spec.kind]

    @property
    def name(self) -> str:
        """Key of the group's stacked parameters, such as `mlcn1_w4d1`."""
        return str(self.spec).replace(":", "_")


@dataclasses.dataclass(frozen=True)
class LaneSettings:
    """Settings shared by all lanes of a model.

    Attributes:
      num_classes: classes K; a lane returns K numbers per image.
      lane_routing: `published`, one output capsule of K dimensions, or `per_class`, K capsules of one dimension.
      num_routing_iters: routing iterations; has no effect under `published`.
      prior_bias: whether routing logits have a trainable initial value; under `published`, it affects only the size.
      signed_pixels: whether the first convolution takes pixels in [-1, 1] (`first_input`).
      dtype: dtype of the convolutions and matrix products.
      conv_algorithm: a key of `conv.ALGORITHMS`, or `auto`.
      norm_group: images that are normalised together in training, in the kinds that normalise.
      folded: whether statistics are folded into the parameters (`resnet.fold`).
    """

    num_classes: int
    lane_routing: str = "published"
    num_routing_iters: int = 3
    prior_bias: bool = True
    signed_pixels: bool = False
    dtype: DTypeLike = jnp.float32
    conv_algorithm: str = "auto"
    norm_group: int = 125
    folded: bool = False


class ConvParams(nn.Module):
    """Kernel and bias of a convolution, initialized Glorot-uniform and zero, as in Keras."""

    shape: tuple[int, int, int, int]
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "kh kw cin cout"], Float[Array, " cout"]]:
        kernel = self.param("kernel", _glorot, self.shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.shape[-1:], jnp.float32)
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
        depthwise = self.param("depthwise", nn.initializers.ones, (self.channels,), jnp.float32)
        pointwise = self.param("pointwise", _glorot, (self.channels, self.middle), jnp.float32)
        pointwise_bias = self.param("pointwise_bias", nn.initializers.zeros, (self.middle,), jnp.float32)
        kernel = self.param("kernel", _glorot, (9, 9, self.middle, self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
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
    return _primary_features(images, ConvParams(shape, settings.dtype, name="conv1"), spec, settings)


def _mlcn2(images: Array, spec: LaneSpec, settings: LaneSettings) -> Array:
    """mlcn2 of width w: separable 1x1 convolution to 4w filters, 9x9 to 8w, relu, 9x9 with stride 2 to 16w filters.

    Filters by width 1, 2, 4: first 4, 8, 16; second 8, 16, 32; last 16, 32, 64. The thesis gives 8w filters for the
    last one and 72w primary capsules on 28x28 pixels, which contradict each other: here the number of capsules is kept.
    The separable convolution has no activation (`JointConvParams`).

    Source: do Rosario 2021 (thesis; accuracy in table 4.1).
    """
    first = JointConvParams(images.shape[-1], 4 * spec.width, 8 * spec.width, settings.dtype, name="conv1")
    return _primary_features(images, first, spec, settings)


def _primary_features(
    images: Array, first: ConvParams | JointConvParams, spec: LaneSpec, settings: LaneSettings
) -> Float[Array, "batch h w filters"]:
    """The first convolution, the 3x3 ones that depth adds, and the one that gives 2 * width capsules per position."""
    features = first.features if isinstance(first, JointConvParams) else first.shape[-1]
    shape = (9, 9, features, 2 * spec.width * PRIMARY_DIM)
    primary = ConvParams(shape, settings.dtype, name="primary")()
    algorithm = settings.conv_algorithm
    cut = CutPoint(name=name_of("conv1"))
    if spec.depth == 1 and not cut.is_used:
        return conv.lane_convs(images, *first(), *primary, algorithm=algorithm)
    if cut.is_given:
        x = cut.given()
    else:
        kernel, bias = first()
        x = cut(nn.relu(conv.conv2d(images, kernel, algorithm=algorithm) + bias[None, None, None]))
    for i in range(1, spec.depth):
        kernel, bias = ConvParams((3, 3, features, features), settings.dtype, name=f"deep{i}")()
        x = nn.relu(conv.conv2d(x, kernel, padding="SAME", algorithm=algorithm) + bias[None, None, None])
    return conv.conv2d(x, primary[0], stride=2, algorithm=algorithm) + primary[1][None, None, None]


def _resnet(images: Array, spec: LaneSpec, settings: LaneSettings) -> Array:
    """resnet of width w and depth d: three stages of d 3x3 convolutions to 16w, 48w and 64w filters, a linear head.

    Returns the log-probability of each class (`nn.resnet`).
    """
    features = _resnet_caps(images, spec, settings)
    return resnet.LogProbabilities(settings.num_classes, settings.dtype, name="head")(features)


def _resnet_caps(images: Array, spec: LaneSpec, settings: LaneSettings) -> Array:
    """resnet_caps: the features of a `resnet` lane as 8w primary capsules of 8 dimensions per position.

    Source: this project, to compare a capsule head with a linear one.
    """
    s = settings
    trunk = resnet.Trunk(spec.width, spec.depth, s.norm_group, s.folded, s.dtype, s.conv_algorithm, name="trunk")
    return trunk(images)


@dataclasses.dataclass(frozen=True)
class LaneKind:
    """What a lane of this kind computes.

    Attributes:
      compute: turns images [batch, height, width, channels], the lane's spec and the settings into features
        [batch, h, w, n * capsule_dim], which become the lane's primary capsules; if the kind `classifies`, into
        log-probabilities [batch, classes]. It declares its parameters as Linen modules.
      min_size: minimum height and width of the images, in pixels.
      classifies: whether a lane returns its log-probabilities itself, and learns from them alone.
      normalises: whether it has statistics of normalisation, which `calibrate_group` collects.
      capsule_dim: dimensions of a primary capsule.
    """

    compute: Callable[[Array, LaneSpec, LaneSettings], Array]
    min_size: int
    classifies: bool = False
    normalises: bool = False
    capsule_dim: int = PRIMARY_DIM


# A new kind is one function and one line here.
LANE_KINDS: dict[str, LaneKind] = {
    "mlcn1": LaneKind(_mlcn1, _MIN_SIZE),
    "mlcn2": LaneKind(_mlcn2, _MIN_SIZE),
    "resnet": LaneKind(_resnet, resnet.MIN_SIZE, classifies=True, normalises=True),
    "resnet_caps": LaneKind(_resnet_caps, resnet.MIN_SIZE, normalises=True),
}
PUBLISHED_KINDS = ("mlcn1", "mlcn2")


def first_input(
    images: Float[Array, "batch h w channels"], signed: bool, dtype: DTypeLike
) -> Float[Array, "batch h w channels"]:
    """The first convolution's input in `dtype`: pixels in [0, 1] as published, or in [-1, 1] (ours) if `signed`."""
    return (2.0 * images - 1.0 if signed else images).astype(dtype)


def primary_capsules(
    features: Float[Array, "batch h w filters"], capsule_dim: int = PRIMARY_DIM
) -> Float[Array, "batch capsules dim"]:
    """Splits the filters at each position into capsules and squashes them (Sabour et al. 2017, section 4)."""
    return capsules.squash(gradient_once(features.reshape(features.shape[0], -1, capsule_dim)))


class Lane(nn.Module):
    """One lane: maps images to one number per class, as a pure function of its parameters.

    Call `Lane(spec, settings).init(key, images)["params"]` and `.apply({"params": params}, images)`: images are pixels
    in [0, 1], the result is [batch, classes] in (-1, 1), of dtype `settings.dtype`; for a kind that classifies,
    float32 log-probabilities. A kind that normalises takes the images' own statistics, or those of a collection
    `statistics` beside the parameters.

    Raises:
      InputError: the images are too small, or `settings.conv_algorithm` cannot do a shape.

    Source: do Rosario et al. 2019, section III; `per_class` routing is this project's.
    """

    spec: LaneSpec
    settings: LaneSettings

    @nn.compact
    def __call__(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes"]:
        s = self.settings
        kind = LANE_KINDS[self.spec.kind]

        def compute() -> Array:
            dtype = jnp.float32 if kind.normalises else s.dtype  # whitened pixels must not be rounded
            return held(kind.compute(first_input(images, s.signed_pixels, dtype), self.spec, s))

        if kind.classifies:
            return compute()
        u = cut_point("capsules", lambda: primary_capsules(compute(), kind.capsule_dim))()
        weights = self.param("capsule_weights", _glorot, (*u.shape[1:], s.num_classes), jnp.float32).astype(s.dtype)
        num_output = s.num_classes if s.lane_routing == "per_class" else 1
        prior_bias = None
        if s.prior_bias:
            prior_bias = self.param("prior_bias", nn.initializers.zeros, (u.shape[1], num_output), jnp.float32)

        if s.lane_routing == "published":
            return capsules.single_capsule(u, weights)
        per_class = weights.transpose(0, 2, 1)[..., None]
        return capsules.dynamic_routing(u, per_class, s.num_routing_iters, prior_bias)[..., 0]


def init_group(
    key: Array,
    group: LaneGroup,
    first_lane: int,
    settings: LaneSettings,
    images: Array,
    seeds: Sequence[int] = (),
) -> dict[str, Array]:
    """Parameters of a group, each array with a leading axis of one entry per lane.

    A lane's initial values depend on its seed alone or, if there are no `seeds`, on `key` and on its index in the model
    (`first_lane` plus its index in the group), not on the size of the group.

    Args:
      key: random key of the entire model.
      group, first_lane, settings: the lanes, the index in the model of the first one, and the model's settings.
      images: an array of the images' shape and dtype, [batch, height, width, channels]; its values do not matter.
      seeds: one seed per lane, in [0, 2**32).

    Raises:
      InputError: as for `Lane`.

    Source: Glorot and Bengio 2010 for the kernels of published kinds (the depthwise one of mlcn2 is 1); see
    `nn.resnet` for those of residual ones.
    """
    lane = Lane(group.spec, settings)
    if seeds:
        keys = jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32))
    else:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(first_lane + jnp.arange(group.count))
    return jax.vmap(lambda k: lane.init(k, images)["params"])(keys)


def apply_group(
    params: dict[str, Array], group: LaneGroup, settings: LaneSettings, images: Float[Array, "batch h w c"]
) -> Float[Array, "batch classes lanes"]:
    """Outputs of a group's lanes: one function, vmapped over the leading axis of `params`.

    Args:
      params: parameters of the group, each array [lanes, ...], as returned by `init_group`, with statistics
        (`calibration.with_statistics`; then images are normalised with them), or folded (`resnet.fold`).
      group, settings: the lanes and the model's settings.
      images: pixels in [0, 1].

    Returns:
      Entry [b, k, l] is the output of lane l for class k and image b, as for `Lane`.

    Raises:
      InputError: as for `Lane`.

    Source: do Rosario et al. 2019, section III: lane l gives dimension l of every class capsule.
    """

    def column(lane_params: dict, images: Array) -> Array:
        return apply_lane(lane_params, group.spec, settings, images)

    if not group.kind.normalises:
        return jax.vmap(column, in_axes=(0, None), out_axes=-1)(params, images)
    return jnp.stack(lanes_one_by_one(column, params, images, group.count), axis=-1)


def apply_lane(
    params: dict[str, Any], spec: LaneSpec, settings: LaneSettings, images: Float[Array, "batch h w c"]
) -> Float[Array, "batch classes"]:
    """`Lane.apply` with parameters that may hold statistics, or have them folded in.

    Args:
      params: parameters of one lane, as for `apply_group` but without the leading axis.
      spec, settings, images: the lane, the model's settings, and pixels in [0, 1].

    Raises:
      InputError: as for `Lane`, which also describes the result and gives the source.
    """
    own = {name: value for name, value in params.items() if name not in (resnet.STATISTICS, resnet.FOLDED)}
    variables = {"params": own} | {name: params[name] for name in (resnet.STATISTICS,) if name in params}
    settings = dataclasses.replace(settings, folded=resnet.FOLDED in params)
    return Lane(spec, settings).apply(variables, images)  # type: ignore[return-value]


def in_one_loop() -> bool:
    """Whether equal lanes are one loop, and not one copy of their program each.

    Accelerators need minutes to compile the copies; on a CPU, lanes in a loop round otherwise than a lane alone.
    """
    return tracing.platform() not in ("cpu", "onnx")


def lanes_one_by_one(function: Callable[[dict, Array], Any], params: dict, images: Array, count: int) -> list[Any]:
    """Applies `function` to one lane after another, so that the lanes' work space does not add up.

    On a CPU the images of a lane are made to depend on all results of the previous lane, which keeps the compiler from
    starting it earlier. (Parameters that depend on something are compiled into other loops, which round otherwise than
    those of one lane.)
    Accelerators run the lanes in a loop (`in_one_loop`). With `tracing.Target.inference`, lanes do not wait for
    each other.

    Args:
      function: from one lane's parameters and the images to a tree of arrays; its errors are passed on.
      params: stacked parameters, each array [lanes, ...].
      images: what all lanes see.
      count: number of lanes.

    Source: this project.
    """
    if count > 1 and in_one_loop():
        stacked = lax.map(lambda lane_params: function(lane_params, images), params)
        return [jax.tree.map(lambda array, i=i: array[i], stacked) for i in range(count)]
    results: list[Any] = []
    for i in range(count):
        if results and not tracing.current().inference:
            images = after(results[-1], images)
        results.append(function(jax.tree.map(lambda array, i=i: array[i], params), images))
    return results


def calibrate_group(
    params: dict[str, Array], group: LaneGroup, settings: LaneSettings, images: Float[Array, "batch h w c"]
) -> dict[str, Array]:
    """The `means` and `variances` of every normalisation, arrays [lanes, groups, channels] in a tree.

    Args:
      params: parameters of a group whose kind normalises, without statistics.
      group, settings: the lanes.
      images: pixels in [0, 1], whole groups of `settings.norm_group` images.

    Raises:
      InputError: as for `Lane`, or the batch is not a whole number of groups.

    Source: Wu and Johnson 2021, arXiv 2105.07576, "precise" batch normalisation.
    """
    lane = Lane(group.spec, settings)

    def collect(lane_params: dict, images: Array) -> dict:
        return lane.apply({"params": lane_params}, images, mutable=[resnet.STATISTICS])[1][resnet.STATISTICS]

    parts = lanes_one_by_one(collect, params, images, group.count)
    return jax.tree.map(lambda *lanes: jnp.stack(lanes), *parts)

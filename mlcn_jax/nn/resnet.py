"""The residual lane: a small modern convolutional network that classifies alone and returns log-probabilities.

A whitened 2x2 convolution, three stages of 3x3 convolutions, each pooled after its first one, and a linear head. The
normalisation has no running averages: in training, each group of `group_size` images is normalised with its own
statistics, so that whole groups can be on any device; for evaluation, `calibrate` collects the statistics of a fixed
set of training images under fixed parameters.

Source: Jordan 2024, arXiv 2404.00498, for the layers and their initial values, but for GELU in its tanh form, random
filters that start with length 1 instead of about 0.58, and an epsilon of 1e-5 instead of 1e-12; Wu and Johnson 2021,
arXiv 2105.07576, for statistics collected after training. As lanes of capsules: this project.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv, conv_winograd, tracing
from mlcn_jax.nn.cut_points import cut_point
from mlcn_jax.nn.schedule import in_parts

STAGES = (16, 48, 64)  # filters of each stage for width 1
MIN_SIZE = 9  # three poolings leave one pixel
STATISTICS = "statistics"  # the collection of the normalisation's means and variances
FOLDED = "folded"  # marks parameters of `fold`
FROZEN = "whitening"  # the layer whose kernel is not trained
_EPSILON = 1e-5
_PART_BYTES = 2**21  # of a map before pooling, of as many images as are convolved at a time
_PART_IMAGES = 8  # at least
_LOGIT_SCALE = 1 / 9
_PATCH = 2
_WHITENED_AT_ONCE = 100  # images
_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class GhostBatchNorm(nn.Module):
    """Batch normalisation over groups of images, or with calibrated statistics; a bias and no scale.

    Called with a collection `statistics` that has a `mean` and a `variance`, it uses them. Called with that collection
    mutable, it stores the `means` and `variances` of the groups there.
    """

    group_size: int
    folded: bool

    @nn.compact
    def __call__(self, x: Float[Array, "batch h w c"]) -> Float[Array, "batch h w c"]:
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)[None, None, None]
        if self.folded:
            return x + bias.astype(x.dtype)
        values = x.astype(jnp.float32)
        if self.has_variable(STATISTICS, "mean"):
            total: dict[str, Array] = {name: self.get_variable(STATISTICS, name) for name in ("mean", "variance")}
            mean, variance = (total[name][None, None, None] for name in ("mean", "variance"))
            return ((values - mean) * lax.rsqrt(variance + _EPSILON) + bias).astype(x.dtype)
        values = values.reshape(num_groups(x.shape[0], self.group_size), -1, x.shape[-1])
        if self.is_mutable_collection(STATISTICS) and not self.is_initializing():
            mean, variance = _moments(values)
            self.put_variable(STATISTICS, "means", mean[:, 0])
            self.put_variable(STATISTICS, "variances", variance[:, 0])
        return _standardised(values, bias[0]).reshape(x.shape).astype(x.dtype)


def _moments(values: Float[Array, "groups n c"]) -> tuple[Float[Array, "groups 1 c"], Float[Array, "groups 1 c"]]:
    mean = jnp.mean(values, axis=1, keepdims=True)
    return mean, jnp.mean(jnp.square(values - mean), axis=1, keepdims=True)


@jax.custom_vjp
def _standardised(values: Float[Array, "groups n c"], bias: Float[Array, "1 1 c"]) -> Float[Array, "groups n c"]:
    """Every channel of a group with mean 0 and variance 1, plus a bias; its gradient takes fewer passes than JAX's own.

    Source: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3, for the gradient.
    """
    return _standardised_fwd(values, bias)[0]


def _standardised_fwd(values, bias):
    mean, variance = _moments(values)
    scale = lax.rsqrt(variance + _EPSILON)
    normal = (values - mean) * scale
    return normal + bias, (normal, scale)


def _standardised_bwd(saved, g):
    normal, scale = saved
    total, along = jnp.sum(g, axis=1, keepdims=True), jnp.mean(g * normal, axis=1, keepdims=True)
    return scale * (g - total / g.shape[1] - normal * along), jnp.sum(total, axis=0, keepdims=True)


_standardised.defvjp(_standardised_fwd, _standardised_bwd)


class Trunk(nn.Module):
    """The convolutions of a residual lane: images [batch, h, w, c] to features [batch, h', w', 64 * width].

    The residual connection of a stage leads from its first convolution around the others, from depth 3 on.
    """

    width: int
    depth: int
    group_size: int
    folded: bool
    dtype: DTypeLike
    algorithm: str

    @nn.compact
    def __call__(self, images: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 features"]:
        def stem() -> Array:
            # In float32: the kernel magnifies what images hardly vary in, and with it what rounding changes.
            kernel, bias = (value.astype(jnp.float32) for value in Whitening(images.shape[-1], name=FROZEN)())
            algorithm = "auto" if self._algorithm == "winograd" else self._algorithm
            white = conv.conv2d(images, kernel, algorithm=algorithm) + bias[None, None, None]
            return nn.gelu(white.astype(self.dtype))

        x = cut_point("stem", stem)
        for stage, filters in enumerate(STAGES, start=1):
            x = cut_point(f"stage{stage}", functools.partial(self._stage, x, stage, filters * self.width))
        return x()

    def _stage(self, before: Callable[[], Array], stage: int, filters: int) -> Array:
        x = self._layer(before(), filters, f"conv{stage}_1", pooled=True)
        x = shortcut = nn.gelu(x)
        for i in range(2, self.depth + 1):
            x = self._layer(x, filters, f"conv{stage}_{i}")
            if i == self.depth > 2:
                x = x + shortcut
            x = nn.gelu(x)
        return x

    def _layer(self, x: Array, filters: int, name: str, pooled: bool = False) -> Array:
        kernel = self.param(name, _identity_start, (3, 3, x.shape[-1], filters)).astype(self.dtype)
        if pooled:
            x = convolve_and_pool(self._algorithm, x, kernel)
        else:
            x = conv.conv2d(x, kernel, padding="SAME", algorithm=self._algorithm)
        return GhostBatchNorm(self.group_size, self.folded, name=f"norm{name[4:]}")(x)

    @property
    def _algorithm(self) -> str:
        if self.algorithm == "auto" and tracing.platform() != "cpu":
            return "native"  # lanes run one by one, so that no convolution is a grouped one
        return self.algorithm


def convolve_and_pool(
    algorithm: str, x: Float[Array, "batch h w cin"], kernel: Float[Array, "3 3 cin cout"]
) -> Float[Array, "batch h2 w2 cout"]:
    """A convolution by an algorithm of `conv.conv2d`, and the largest of each 2x2 of its values."""
    if tracing.platform() != "cpu":
        return _pool(conv.conv2d(x, kernel, padding=even(x.shape), algorithm=algorithm))
    if algorithm == "auto":  # as for the whole batch
        algorithm = conv.chosen(x.shape, kernel.shape, 1, even(x.shape))
    return _convolve_and_pool(algorithm, x, kernel)


def even(shape: tuple[int, ...]) -> conv_winograd.Pads:
    """The padding with which a 3x3 convolution of x leaves out the odd last row and column that pooling leaves out."""
    return (1, 1 - shape[1] % 2), (1, 1 - shape[2] % 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve_and_pool(
    algorithm: str, x: Float[Array, "batch h w cin"], kernel: Float[Array, "3 3 cin cout"]
) -> Float[Array, "batch h2 w2 cout"]:
    """A convolution and the pooling after it.

    Where gradients are wanted, it computes a few images at a time, whose maps before pooling, the largest of a lane,
    fit a cache. The backward pass needs only which of each four values was the largest; of equal ones the first gets
    the gradient.
    """
    return _largest(conv.conv2d(x, kernel, padding=even(x.shape), algorithm=algorithm))[0]


def _convolve_and_pool_fwd(algorithm, x, kernel):
    convolve = conv.convolution(kernel, even(x.shape), algorithm, x)
    pooled, which = in_parts(lambda x: (_largest(convolve(x)), ()), _parts(algorithm, x.shape, kernel), x)[0]
    return pooled, (x, kernel, which)


def _convolve_and_pool_bwd(algorithm, saved, g):
    x, kernel, which = saved
    gradients, finish = conv.gradients(kernel, even(x.shape), algorithm, g)

    def part(x, which, g):
        return gradients(x, _spread(g, which))

    dx, total = in_parts(part, _parts(algorithm, x.shape, kernel), x, which, g)
    return dx, finish(total)


_convolve_and_pool.defvjp(_convolve_and_pool_fwd, _convolve_and_pool_bwd)


def _parts(algorithm: str, shape: tuple[int, ...], kernel: Array) -> int:
    """In how many equal parts a batch is convolved: not of too few images, of which XLA's gradients are slow."""
    if algorithm == "winograd":
        return conv_winograd.parts_of(shape, kernel.shape[-1], even(shape))
    batch, height, width, _ = shape
    most = _PART_BYTES // (height * width * kernel.shape[-1] * kernel.dtype.itemsize)
    sizes = [size for size in range(min(_PART_IMAGES, batch), batch + 1) if batch % size == 0]
    return batch // max((size for size in sizes if size <= most), default=sizes[0])


@jax.named_scope("pooling")
def _largest(x: Float[Array, "batch h w c"]) -> tuple[Array, Array]:
    """The largest of each 2x2 values, and which of them, from 0 to 3 row by row, is the first of the largest."""
    squares = _squares(x)
    top, low = ((squares[:, :, i, :, 0], squares[:, :, i, :, 1]) for i in (0, 1))
    largest = jnp.maximum(*top), jnp.maximum(*low)
    second, fourth = ((right > left).astype(jnp.uint8) for left, right in (top, low))
    which = jnp.where(largest[0] >= largest[1], second, 2 + fourth)
    return jnp.maximum(*largest), which


class Whitening(nn.Module):
    """Kernel and bias of the first convolution: 8 filters a channel, whose kernel `whiten` sets and nothing trains.

    Until then they are the pixels of the 2x2 patch and their negatives.
    """

    channels: int

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "2 2 c filters"], Float[Array, " filters"]]:
        patch = _PATCH * _PATCH * self.channels

        def pixels(key: Array, shape: tuple[int, ...]) -> Array:
            del key
            half = jnp.eye(patch, dtype=jnp.float32)
            return jnp.concatenate([half, -half], axis=1).reshape(shape)

        kernel = self.param("kernel", pixels, (_PATCH, _PATCH, self.channels, 2 * patch))
        return lax.stop_gradient(kernel), self.param("bias", nn.initializers.zeros, (2 * patch,), jnp.float32)


class LogProbabilities(nn.Module):
    """The head: largest value of each feature, linear layer without bias, log softmax in float32."""

    num_classes: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, features: Float[Array, "batch h w features"]) -> Float[Array, "batch classes"]:
        x = jnp.max(features, axis=(1, 2))
        kernel = self.param("kernel", _uniform, (x.shape[-1], self.num_classes), jnp.float32)
        logits = jnp.matmul(x, kernel.astype(self.dtype), preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(_LOGIT_SCALE * logits.astype(jnp.float32))


def last_map(height: int, width: int) -> int:
    """The pixels that the last stage leaves of an image."""
    return ((height - 1) // 8) * ((width - 1) // 8)


def num_groups(batch_size: int, group_size: int) -> int:
    """Groups of `group_size` images in a batch; a smaller batch is one group.

    Raises:
      InputError: the groups do not divide the batch.
    """
    if batch_size > group_size and batch_size % group_size:
        raise InputError(
            f"batches of {batch_size} images per device cannot be split into groups of model.norm_group={group_size} "
            "for normalisation: use a batch that is a multiple of it, or another norm_group"
        )
    return max(1, batch_size // group_size)


def whitening(
    images: UInt8[np.ndarray, "n h w c"] | Float[np.ndarray, "n h w c"],
    epsilon: float = 3e-5,
    seen: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Kernel [2, 2, c, 8c] and bias [8c] that whiten the images' 2x2 patches, followed by their negatives.

    The principal components of the patches, each scaled to variance 1, computed in float64 with fixed signs: the same
    images always give the same bits on one machine.

    Args:
      images: training images.
      epsilon: added to the variances, in squared pixel values.
      seen: turns some of them into what the lane sees.

    Source: Jordan 2024, arXiv 2404.00498, section 3.2.
    """
    count, height, width, channels = images.shape
    count *= (height - 1) * (width - 1)
    mean = sum(patches.sum(axis=0) for patches in _patches(images, seen)) / count
    covariance = sum((patches - mean).T @ (patches - mean) for patches in _patches(images, seen)) / count
    variances, components = np.linalg.eigh(covariance)
    variances, components = variances[::-1], components[:, ::-1]
    largest = components[np.argmax(np.abs(components), axis=0), np.arange(len(variances))]
    components = components * np.sign(largest) / np.sqrt(np.maximum(variances, 0) + epsilon)
    kernel = np.concatenate([components, -components], axis=1)
    return (
        kernel.reshape(_PATCH, _PATCH, channels, -1).astype(np.float32),
        (-mean @ kernel).astype(np.float32),
    )


def _patches(images: np.ndarray, seen: Callable[[np.ndarray], np.ndarray]) -> Iterator[Float[np.ndarray, "n patch"]]:
    """All 2x2 patches of the images as `seen`, in float64, some images at a time: all would take gigabytes."""
    for start in range(0, len(images), _WHITENED_AT_ONCE):
        some = np.asarray(seen(images[start : start + _WHITENED_AT_ONCE]), np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(some, (_PATCH, _PATCH), axis=(1, 2))
        yield np.moveaxis(windows, 3, 5).reshape(-1, _PATCH * _PATCH * some.shape[3])


def whiten(params: dict, kernel: np.ndarray, bias: np.ndarray) -> dict:
    """Parameters of a group of lanes, [lanes, ...], with the first convolution that `whitening` gives."""
    count = params["trunk"][FROZEN]["kernel"].shape[0]
    first = {"kernel": jnp.stack([kernel] * count), "bias": jnp.stack([bias] * count)}
    return {**params, "trunk": {**params["trunk"], FROZEN: first}}


def join_statistics(parts: Sequence[dict]) -> dict:
    """The statistics for evaluation from the groups' `means` and `variances`, arrays [lanes, groups, channels].

    The variance is the mean variance within groups plus the variance of the groups' means.
    """

    def join(*norms: dict) -> dict:
        if "means" not in norms[0]:
            return {name: join(*(norm[name] for norm in norms)) for name in norms[0]}
        means = jnp.concatenate([norm["means"] for norm in norms], axis=1)
        variances = jnp.concatenate([norm["variances"] for norm in norms], axis=1)
        return {"mean": means.mean(axis=1), "variance": variances.mean(axis=1) + means.var(axis=1)}

    return join(*parts)


def fold(params: dict) -> dict:
    """Calibrated parameters of lanes, [lanes, ...], with the statistics folded into kernels and biases.

    Pooling takes maxima, so it may follow the scaling, which is positive. The parameters must not be traced: NumPy,
    whose square roots are correctly rounded, gives the same bits on all machines, and models are told apart by them.
    """
    trunk, statistics = dict(params["trunk"]), params[STATISTICS]["trunk"]
    for name in [name for name in trunk if name.startswith("norm")]:
        kernel = "conv" + name[4:]
        mean, variance = (np.asarray(statistics[name][of]) for of in ("mean", "variance"))
        scale = 1 / np.sqrt(variance + np.float32(_EPSILON))
        trunk[kernel] = jnp.asarray(np.asarray(trunk[kernel]) * scale[:, None, None, None])
        trunk[name] = {"bias": jnp.asarray(np.asarray(trunk[name]["bias"]) - mean * scale)}
    rest = {name: value for name, value in params.items() if name != STATISTICS}
    return {**rest, "trunk": trunk, FOLDED: jnp.ones(len(rest["trunk"][FROZEN]["bias"]), bool)}


def _pool(x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 w2 c"]:
    """The largest of each 2x2 values, away from a CPU, where `_largest` is faster."""
    return jnp.max(_squares(x), axis=(2, 4))


def _squares(x: Float[Array, "batch h w c"]) -> Float[Array, "batch h2 2 w2 2 c"]:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


@jax.named_scope("pooling")
def _spread(g: Float[Array, "batch h2 w2 c"], which: Array) -> Float[Array, "batch h w c"]:
    """The gradient before the pooling of `_largest`: each value where the largest was, and zeros."""
    place = jnp.arange(4, dtype=which.dtype).reshape(1, 1, 2, 1, 2, 1)
    squares = jnp.where(which[:, :, None, :, None] == place, g[:, :, None, :, None], 0)
    return squares.reshape(len(g), 2 * g.shape[1], 2 * g.shape[2], -1)


def _identity_start(key: Array, shape: tuple[int, int, int, int]) -> Array:
    """The first filters repeat their input channel, the others are random; each of norm 1."""
    same = min(shape[2:])
    channel = jnp.arange(same)
    identity = jnp.zeros(shape, jnp.float32).at[1, 1, channel, channel].set(1.0)
    repeats = (jnp.arange(shape[3]) < same)[None, None, None]
    kernel = jnp.where(repeats, identity, _uniform(key, shape, jnp.float32))
    return kernel / jnp.sqrt(jnp.sum(jnp.square(kernel), axis=(0, 1, 2), keepdims=True))

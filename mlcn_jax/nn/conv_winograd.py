"""Winograd's F(4x4, 3x3): a 3x3 convolution with stride 1 in a quarter of the multiplications.

Every 4x4 tile of the result is computed from 36 products instead of 144: windows of the images and kernels are
transformed, multiplied channel by channel, and what results is transformed back. In float32 whatever the dtype of the
images; rounding errors are about ten times those of a plain convolution (benchmarks/results/conv_algorithms_cpu.json).

Every function is written for one lane; the caller vmaps.

Source: Lavin and Gray 2016, arXiv 1509.09308, section 4.3, for the matrices; the gradients follow from them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlcn_jax.nn import tracing
from mlcn_jax.nn.conv_spectral import lanes_in_turn, matmul
from mlcn_jax.nn.schedule import after, in_parts

TILE, _TAPS = 4, 3  # rows and columns of a result and of kernels
_WINDOW = TILE + _TAPS - 1  # of an image, from which a tile of the result is computed
_IMAGES = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_KERNELS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_KERNEL_TRANSFORM = np.kron(_KERNELS, _KERNELS).astype(np.float32)  # [36, 9], of rows and columns
_RESULTS = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
_PART_BYTES = 24 * 2**20  # of transformed images and products, of as many images as are convolved at a time

Pads = tuple[tuple[int, int], tuple[int, int]]


def can_do(kernel_shape: tuple[int, ...], stride: int) -> bool:
    """Whether the kernel is 3x3, and the stride 1."""
    return kernel_shape[:2] == (_TAPS, _TAPS) and stride == 1


def num_tiles(outputs: Sequence[int]) -> int:
    """Tiles of a result with so many rows and columns."""
    return math.prod(_tiles(outputs))


def parts_of(x_shape: tuple[int, ...], filters: int, pads: Pads) -> int:
    """In how many equal parts a batch is convolved; one if its size is not known when the program is traced."""
    batch, _, _, channels = x_shape
    if not isinstance(batch, int):
        return 1
    most = max(1, _PART_BYTES // (4 * _WINDOW**2 * num_tiles(_outputs(x_shape, pads)) * (channels + filters)))
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    small, large = max(n for n in sizes if n <= most), min((n for n in sizes if n >= most), default=batch)
    return batch // (small if 4 * small >= most else large)  # each part adds to the kernel's gradient


def held_values(x_shape: tuple[int, ...], filters: int, pads: Pads) -> int:
    """Transformed images and products of one part of a batch, in values: all that are held at a time."""
    images = x_shape[0] // parts_of(x_shape, filters, pads)
    return images * _WINDOW**2 * num_tiles(_outputs(x_shape, pads)) * (x_shape[-1] + filters)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
    """`conv.conv2d` for shapes that it can do, with padding in pixels."""
    del stride

    def one_lane(x, kernel):
        one = convolution(kernel, pads, x)
        return in_parts(lambda x: (one(x), ()), parts_of(x.shape, kernel.shape[-1], pads), x)[0]

    return lanes_in_turn(one_lane)(x, kernel)


def _conv2d_fwd(x, kernel, stride, pads):
    return conv2d(x, kernel, stride, pads), (x, kernel)


def _conv2d_bwd(stride, pads, saved, g):
    def one_lane(x, kernel, g):
        one, finish = gradients(kernel, pads, g)
        dx, total = in_parts(one, parts_of(x.shape, kernel.shape[-1], pads), x, g)
        return dx, finish(total)

    return lanes_in_turn(one_lane)(*saved, g)


conv2d.defvjp(_conv2d_fwd, _conv2d_bwd)


def convolution(kernel: Array, pads: Pads, batch: Array) -> Callable[[Array], Array]:
    """The convolution with a kernel [3, 3, channels, filters] as a function of images.

    The kernel is transformed once, when the batch is there: XLA would transform those of all lanes before the first.
    One that is compiled into the program is transformed then.
    """
    transformed = _of_kernel(kernel if tracing.current().constant_weights else after(batch, kernel))

    def convolve(x):
        images = _of_images(x, [low for low, _ in pads], outputs := _outputs(x.shape, pads))
        return _results(matmul(images, transformed), x.shape[0], outputs).astype(x.dtype)

    return convolve


def gradients(
    kernel: Array, pads: Pads, batch: Array
) -> tuple[Callable[[Array, Array], tuple[Array, Array]], Callable]:
    """The gradients of `convolution`; the batch is that of the result's gradients.

    Returns:
      A function of images and the gradient of their convolution, which returns the gradient of the images and that of
      the transformed kernel, to be added up over parts; and a function that makes that sum the gradient of the kernel.
    """
    turned = _of_kernel(after(batch, kernel)[::-1, ::-1])

    def one(x, g):
        of_g = _of_images(g, [_TAPS - 1 - low for low, _ in pads], x.shape[1:3])
        products = lax.dot_general(of_g, turned, (((2,), (2,)), ((0,), (0,))))
        dx = _results(products, x.shape[0], x.shape[1:3]).astype(x.dtype)
        images = _of_images(x, [low for low, _ in pads], g.shape[1:3])
        return dx, lax.dot_general(images, _of_results_gradient(g), (((1,), (1,)), ((0,), (0,))))

    def finish(total):
        rows = total.reshape(_WINDOW**2, -1)
        return jnp.matmul(_KERNEL_TRANSFORM.T, rows).reshape(kernel.shape).astype(kernel.dtype)

    return one, finish


def _of_kernel(kernel):
    """[3, 3, channels, filters] -> [36, channels, filters]."""
    rows = kernel.astype(jnp.float32).reshape(_TAPS**2, -1)
    return jnp.matmul(_KERNEL_TRANSFORM, rows).reshape(-1, *kernel.shape[2:])


def _of_images(x, lows, outputs):
    """[batch, h, w, channels], padded by `lows` in front, -> [36, batch * tiles, channels]."""
    _, *sizes, channels = x.shape
    tiles = _tiles(outputs)
    ends = [TILE * n + _TAPS - 1 - size - low for n, size, low in zip(tiles, sizes, lows, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (lows[0], ends[0], 0), (lows[1], ends[1], 0), (0, 0, 0)])
    rows, columns = (TILE * (n - 1) + 1 for n in tiles)
    x = x.astype(jnp.float32)
    # columns first: XLA takes four times as long to compile rows of whole images
    x = _sums(_IMAGES, [x[:, :, j : j + columns : TILE] for j in range(_WINDOW)])
    x = _sums(_IMAGES, [x[:, :, i : i + rows : TILE] for i in range(_WINDOW)])
    return x.reshape(_WINDOW**2, -1, channels)


def _results(products, batch, outputs):
    """[36, batch * tiles, filters] -> [batch, *outputs, filters]."""
    tiles = _tiles(outputs)
    y = products.reshape(_WINDOW, _WINDOW, batch, *tiles, -1)
    y = _sums(_RESULTS, list(_sums(_RESULTS, list(y), axis=3)), axis=4)
    return y.reshape(batch, *(TILE * n for n in tiles), -1)[:, : outputs[0], : outputs[1]]


def _of_results_gradient(g):
    """The gradient of `_results`: [batch, h, w, filters] -> [36, batch * tiles, filters]."""
    batch, *outputs, filters = g.shape
    tiles = _tiles(outputs)
    ends = [TILE * n - size for n, size in zip(tiles, outputs, strict=True)]
    g = jnp.pad(g.astype(jnp.float32), ((0, 0), (0, ends[0]), (0, ends[1]), (0, 0)))
    g = g.reshape(batch, tiles[0], TILE, tiles[1], TILE, filters)
    transform = tuple(zip(*_RESULTS, strict=True))
    g = _sums(transform, [g[:, :, :, :, j] for j in range(TILE)])  # [6, batch, tiles, 4, tiles, filters]
    return _sums(transform, [g[:, :, :, i] for i in range(TILE)]).reshape(_WINDOW**2, -1, filters)


def _sums(matrix: Sequence[Sequence[float]], parts: Sequence[Array], axis: int = 0) -> Array:
    """Sums of parts with the weights of each row, stacked; no time goes to zeros.

    The barrier keeps XLA from computing both passes of a transform at once, the first one many times over.
    """
    zero = jnp.zeros((), jnp.float32)
    sums = [sum((w * part for w, part in zip(row, parts, strict=True) if w), zero) for row in matrix]
    return lax.optimization_barrier(jnp.stack(sums, axis))


def _tiles(outputs):
    return tuple(-(-size // TILE) for size in outputs)


def _outputs(x_shape, pads):
    return tuple(size + sum(pad) - _TAPS + 1 for size, pad in zip(x_shape[1:3], pads, strict=True))

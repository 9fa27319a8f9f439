"""Convolution as products of spectra, in the form y = C ((A x) . (B k)) with constant matrices A, B and C.

A convolution with stride s is a sum of s * s convolutions with stride 1 over the phases of the input (every
s-th row and column). Over n = outputs + taps - 1 points, circular correlation of a phase gives exactly the
wanted outputs, and the discrete Fourier transform turns it into one independent product per frequency. Written
with real numbers, the transforms are products with constant matrices and a complex product is three real
ones, so that everything is a matrix product: the dot above stands for one over channels and phases, for each
row of A x. On 20x20 pixels, a 9x9 kernel with stride 2 takes 4.9 times fewer multiplications than directly.

Maps are [points, batch, phases * channels], so no array is transposed between one product and the next.
"""

import math
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mlcn_jax.nn import schedule, tracing

_MAX_POINTS = 1024  # over both axes: B and C are dense in them
# A kernel's spectrum is computed again in the backward pass if it is small, which is fast as it fits a cache, and many
# lanes have one each; and if it is so large that it would be most of what a step holds. With fewer images than taps it
# is held: to compute it would take as long as their products.
_SMALL_BYTES, _LARGE_BYTES = 4 * 2**20, 192 * 2**20
_TRANSPOSED_FEATURES = 512  # widest first map, all phases together, for which transposing its windows saves time


class Span(NamedTuple):
    """Sizes along one axis, within one phase: points = outputs + taps - 1."""

    points: int
    taps: int
    outputs: int


def spans_of(outputs, kernel_shape, stride):
    """The spans of both image axes."""
    taps = [-(-k // stride) for k in kernel_shape[:2]]
    return tuple(Span(o + t - 1, t, o) for o, t in zip(outputs, taps, strict=True))


def can_do(outputs, kernel_shape, stride):
    """Whether the transforms for this shape have a reasonable size."""
    first, second = spans_of(outputs, kernel_shape, stride)
    return first.points * second.points <= _MAX_POINTS


def spectrum_size(outputs, kernel_shape, stride):
    """Number of values of the transformed kernel: three for every two points, for the products of complex numbers."""
    first, second = spans_of(outputs, kernel_shape, stride)
    return 3 * first.points * second.points // 2 * stride**2 * math.prod(kernel_shape[2:])


def holds_spectrum(num_bytes):
    """Whether the spectrum of a kernel is held for the backward pass, if there are at least as many images as taps."""
    return _SMALL_BYTES < num_bytes <= _LARGE_BYTES


def conv2d(x, kernel, stride, pads):
    """As `conv.conv2d`, for pads ((top, bottom), (left, right))."""
    sizes = [n + sum(pad) for n, pad in zip(x.shape[1:3], pads, strict=True)]
    outputs = [(n - k) // stride + 1 for n, k in zip(sizes, kernel.shape[:2], strict=True)]
    spans = spans_of(outputs, kernel.shape, stride)
    x = crop_or_pad(x, pads, [stride * span.points for span in spans])
    return _to_image(spans, _correlate(spans, _phases(spans, x), _kernel_phases(spans, stride, kernel)))


def relu_then_correlate(spans, windows, kernel1, bias1, kernel2):
    """A convolution given as the windows of its outputs, bias, relu, and a second convolution with stride 2.

    The first one is computed for all four phases of its outputs at once, as a convolution with stride 2 whose
    kernel is one pixel larger: 1.2 times the products of a 9x9 kernel, but a third of the windows to copy, and
    the result is in the layout that the second one reads.

    Args:
      spans: those of the second convolution.
      windows: [batch, points, points, (taps + 1) * (taps + 1) * channels], for each 2x2 pixels between the two.
      kernel1: [taps, taps, channels, features]; bias1: [features].
      kernel2: [taps, taps, features, channels out].

    Returns:
      [batch, outputs, outputs, channels out].
    """
    phases = [jnp.pad(kernel1, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0))) for i in range(2) for j in range(2)]
    kernel1 = jnp.concatenate(phases, axis=-1).reshape(windows.shape[-1], -1)
    rows = windows.transpose(1, 2, 0, 3).reshape(-1, windows.shape[-1])
    y = _relu_then_correlate(spans, rows, kernel1, jnp.tile(bias1, 4), _kernel_phases(spans, 2, kernel2))
    return _to_image(spans, y)


def crop_or_pad(x, pads, sizes):
    """x [batch, h, w, c] with `pads` zeros before each image axis, then cut or filled up to `sizes`."""
    edges = [(lo, size - lo - n, 0) for (lo, _), size, n in zip(pads, sizes, x.shape[1:3], strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def matmul(a, b):
    """a @ b, added up in float32, of the type of a."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def lanes_in_turn(one_lane):
    """Makes `jax.vmap` call a function lane by lane on a CPU, unrolled, so that a lane's arrays fit the cache."""
    function = custom_vmap(one_lane)

    @function.def_vmap
    def _(size, batched, *args):
        batched = tuple(batched)
        if tracing.platform() == "cpu":
            lanes = [jax.tree.map(lambda a, b, i=i: a[i] if b else a, args, batched) for i in range(size)]
            out = jax.tree.map(lambda *parts: jnp.stack(parts), *[function(*lane) for lane in lanes])
        else:
            out = jax.vmap(one_lane, jax.tree.map(lambda b: 0 if b else None, batched))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return function


def _transposed_matmul(a, b):
    """a^T @ b over the last two axes, as `matmul`."""
    batch = tuple(range(a.ndim - 2))
    dimensions = ((a.ndim - 2,), (a.ndim - 2,)), (batch, batch)
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32).astype(a.dtype)


# --- layouts --------------------------------------------------------------------------------------


def _phases(spans, x):
    """[batch, stride * points, stride * points, c] -> [points * points, batch, stride * stride * c]."""
    n1, n2 = (span.points for span in spans)
    batch, height, width, channels = x.shape
    x = x.reshape(batch, n1, height // n1, n2, width // n2, channels).transpose(1, 3, 0, 2, 4, 5)
    return x.reshape(n1 * n2, batch, -1)


def _kernel_phases(spans, stride, kernel):
    """[k, k, c, cout] -> [taps * taps, stride * stride * c, cout], with zeros for missing taps."""
    t1, t2 = (span.taps for span in spans)
    kh, kw, channels, cout = kernel.shape
    kernel = jnp.pad(kernel, ((0, stride * t1 - kh), (0, stride * t2 - kw), (0, 0), (0, 0)))
    kernel = kernel.reshape(t1, stride, t2, stride, channels, cout).transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(t1 * t2, -1, cout)


def _to_image(spans, y):
    """[outputs * outputs, batch, c] -> [batch, outputs, outputs, c]."""
    return y.reshape(*(span.outputs for span in spans), *y.shape[1:]).transpose(2, 0, 1, 3)


# --- transforms -----------------------------------------------------------------------------------


@lru_cache
def _matrices(spans):
    """The constant matrices A1, A2, B and C, float64, for real maps, whose spectra have conjugate pairs.

    A = A2 A1 works one axis at a time. A1 [2 m, n1] takes real and imaginary part of m frequencies u of the
    first axis; those of u = 0 and u = n1 / 2, both real, share one entry. A2 [m, 3 n2, 2 n2] transforms the
    second axis. B is [3 m n2, taps * taps] and C [outputs * outputs, 3 m n2]. Three rows serve one complex
    product (Gauss): (a + ib)(c + id) = (p - r) + i (p + q) with p = c (a + b), q = a (d - c), r = b (c + d).
    Rows that are left over are zero.
    """
    (n1, t1, o1), (n2, t2, o2) = spans
    blocks = (n1 + 1) // 2
    a1 = np.zeros((blocks, 2, n1))
    a2, b, c = (np.zeros((blocks, 3 * n2, size)) for size in (2 * n2, t1 * t2, o1 * o2))

    def wave(u, v, size1, size2):
        return np.exp(2j * np.pi * np.add.outer(u * np.arange(size1) / n1, v * np.arange(size2) / n2)).ravel()

    for m in range(blocks):
        rows = []
        for part, u in enumerate([m] if m else [0, n1 // 2][: 2 - n1 % 2]):
            first_axis = wave(u, 0, n1, 1).conj()
            a1[m, part] = first_axis.real
            if m:
                a1[m, 1] = first_axis.imag
            for v in range(n2 if m else n2 // 2 + 1):
                x = np.zeros((2, n2), complex)
                x[part] = wave(0, v, 1, n2).conj()
                if m:
                    x[1] = 1j * x[0]
                x, k, y = x.ravel(), wave(u, v, t1, t2), wave(u, v, o1, o2) / (n1 * n2)
                if not m and 2 * v % n2 == 0:  # its own conjugate
                    rows.append((x.real, k.real, y.real))
                else:
                    rows.append((x.real + x.imag, k.real, 2 * (y.real - y.imag)))
                    rows.append((x.real, k.imag - k.real, -2 * y.imag))
                    rows.append((x.imag, k.real + k.imag, -2 * y.real))
        for row, entries in enumerate(rows):
            a2[m, row], b[m, row], c[m, row] = entries
    return a1.reshape(2 * blocks, n1), a2, b.reshape(-1, t1 * t2), c.reshape(-1, o1 * o2).T


def _constants(spans, dtype):
    return tuple(jnp.asarray(matrix, dtype) for matrix in _matrices(spans))


def _apply(matrix, x):
    """A matrix times the first axis of x."""
    return matmul(matrix, x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


def _correlate_fwd(spans, x, kernel):
    a1, a2, b, c = _constants(spans, x.dtype)
    blocks, _, inputs = a2.shape
    x_spectrum = matmul(a1, x.reshape(a1.shape[1], -1)).reshape(blocks, inputs, -1)
    x_spectrum = matmul(a2, x_spectrum).reshape(-1, *x.shape[1:])
    kernel_spectrum = _apply(b, kernel)
    y = _apply(c, matmul(x_spectrum, kernel_spectrum))
    few = isinstance(x.shape[1], int) and x.shape[1] < len(kernel)  # a symbolic batch has no backward pass
    return y, (x_spectrum, kernel_spectrum if few or holds_spectrum(_bytes(kernel_spectrum)) else kernel)


def _bytes(array):
    return array.size * array.dtype.itemsize


def _correlate_bwd(spans, saved, g):
    x_spectrum, kernel_spectrum = saved  # or the kernel
    a1, a2, b, c = _constants(spans, g.dtype)
    blocks, outputs, _ = a2.shape
    if len(kernel_spectrum) != len(x_spectrum):
        kernel_spectrum = _apply(schedule.after(g, b), kernel_spectrum)
    g_spectrum = _apply(c.T, g)
    dx = matmul(g_spectrum, kernel_spectrum.transpose(0, 2, 1))
    dx = matmul(a2.transpose(0, 2, 1), dx.reshape(blocks, outputs, -1))
    dx = matmul(a1.T, dx.reshape(a1.shape[0], -1)).reshape(-1, *x_spectrum.shape[1:])
    if _bytes(kernel_spectrum) > _LARGE_BYTES:
        g = schedule.after(dx, g)  # holds one such spectrum at a time
    # The spectrum of g once more, images last: on a CPU, XLA's products over the second axis of both are slower.
    dkernel = _apply(b.T, matmul(_apply(c.T, g.transpose(0, 2, 1)), x_spectrum))
    return dx, dkernel.transpose(0, 2, 1)


def _signs(h):
    """Which of h [n, ...] are positive, in the bits of bytes [n / gcd(n, 8), ...].

    They are packed by `lax.reduce`, which XLA computes right away, so that h need not be kept.
    """
    bits = math.gcd(len(h), 8)
    parts = h.reshape(bits, len(h) // bits, *h.shape[1:])
    positive = (parts > 0).astype(jnp.uint8) << _shifts(bits, parts.ndim)
    return lax.reduce(positive, np.uint8(0), lax.bitwise_or, (0,))


def _where_positive(signs, values):
    """The values [n, ...] where `_signs` says positive, and zeros."""
    parts = values.reshape(len(values) // len(signs), *signs.shape)
    positive = (signs[None] >> _shifts(len(parts), parts.ndim)) & 1
    return jnp.where(positive != 0, parts, 0).reshape(values.shape)


def _shifts(bits, ndim):
    return jnp.arange(bits, dtype=jnp.uint8).reshape(bits, *[1] * (ndim - 1))


def _relu_then_correlate_fwd(spans, rows, kernel1, bias1, kernel2):
    # relu(z + bias) without a constant operand, which would keep XLA from computing it with the product
    h = jnp.maximum(matmul(rows, kernel1), -bias1[None]) + bias1[None]
    points = spans[0].points * spans[1].points
    h = h.reshape(points, -1, h.shape[-1])
    y, spectra = _correlate_fwd(spans, h, kernel2)
    return y, (rows, kernel1, _signs(h), spectra)


def _relu_then_correlate_bwd(spans, saved, g):
    rows, kernel1, signs, spectra = saved
    dh, dkernel2 = _correlate_bwd(spans, spectra, g)
    dh = _where_positive(signs, dh).reshape(len(rows), -1)
    return matmul(dh, kernel1.T), *_products_of_rows(rows, dh), dkernel2


def _products_of_rows(rows, dh):
    """rows^T @ dh, and the sum of dh over its rows."""
    if dh.shape[1] > _TRANSPOSED_FEATURES:
        ones = jnp.ones((1, len(dh)), dh.dtype)  # XLA's sum over rows is slow on a CPU
        return _transposed_matmul(rows, dh), matmul(ones, dh)[0]
    # All lanes that see the same images share the columns. The row of ones keeps XLA from undoing the transposition.
    columns = jnp.concatenate([rows.T, jnp.ones((1, len(rows)), rows.dtype)])
    products = matmul(columns, dh)
    return products[:-1], products[-1]


# --- gradients ------------------------------------------------------------------------------------


def _with_gradient(forward, backward):
    """A function of (spans, *arrays) with the given forward and backward passes, each written for one lane."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(spans, *args):
        return run(forward, spans, *args)[0]

    def run(one_pass, spans, *args):
        return lanes_in_turn(partial(one_pass, spans))(*args)

    function.defvjp(partial(run, forward), partial(run, backward))
    return function


# (spans, x [points, batch, c], kernel [taps, c, cout]) -> [outputs, batch, cout]
_correlate = _with_gradient(_correlate_fwd, _correlate_bwd)
# (spans, rows [points * batch, window], kernel1 [window, c], bias1 [c], kernel2) -> likewise
_relu_then_correlate = _with_gradient(_relu_then_correlate_fwd, _relu_then_correlate_bwd)

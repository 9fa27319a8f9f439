"""Convolutions as matrix products, so that many lanes on one device stay fast.

XLA turns a convolution that is vmapped over its kernels into a grouped convolution, which is slow on
every backend, and on a CPU its strided input gradient is slow even for one lane. The two other forms
here are matrix products only, forward and backward:

* `im2col` copies the window under every output pixel into a row and multiplies once: best where a
  window is small, as for the first convolution of a lane, which reads the image;
* `fourier` multiplies spectra. A convolution with stride s is a sum of s*s convolutions with stride 1
  over the phases of the input (every s-th row and column). A circular correlation over n = outputs +
  taps - 1 points gives exactly the wanted outputs of a phase, and the discrete Fourier transform turns
  it into one independent product a frequency. The transforms are products with constant matrices and
  each complex product is three real ones (Gauss), so all that is left is y = C ((A x) . (B k)), where
  the dot is a product over channels for each row of A. A 9x9 kernel with stride 2 on 20x20 pixels takes
  4.9 times fewer multiplications than the direct sum.

Every function works on one lane; the caller vmaps. On a CPU the lanes of a vmapped call run in turn, so
that their arrays fit the cache; elsewhere they are a batch dimension of the same products.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mlcn_jax.errors import InputError

_MAX_POINTS = 1024  # of a two-dimensional transform, whose matrices are dense


def conv2d(x, kernel, *, stride=1, padding="VALID", algorithm="auto"):
    """Two-dimensional cross-correlation, differentiable in both arguments.

    Args:
      x: [batch, height, width, channels in].
      kernel: [kernel height, kernel width, channels in, channels out], of the type of x.
      stride: step between output pixels, on both axes.
      padding: "VALID" or "SAME" (as in TensorFlow: an odd row or column is added at the end).
      algorithm: a key of `ALGORITHMS`, or "auto" for the one that `choose` names.

    Returns:
      [batch, output height, output width, channels out], of the type of x; products add up in float32.

    Raises:
      InputError: the algorithm is unknown or cannot do this shape, the padding is unknown, or the kernel
        is larger than the image.
    """
    spans = _spans(x.shape, kernel.shape, stride, padding)
    able = [name for name in ALGORITHMS if name != "fourier" or _num_points(spans) <= _MAX_POINTS]
    if algorithm == "auto":
        algorithm = choose(jax.default_backend(), x.shape, kernel.shape, stride, padding)
    if algorithm not in able:
        raise InputError(
            f"algorithm {algorithm!r} cannot convolve x {x.shape} with kernel {kernel.shape}, "
            f"stride {stride}, padding {padding}: use {', '.join(able)} or auto"
        )
    pads = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), padding)
    return ALGORITHMS[algorithm](x, kernel, stride, pads)


def choose(backend: str, x_shape, kernel_shape, stride: int, padding: str) -> str:
    """The algorithm that measured fastest for such shapes: a fixed rule, so runs can be repeated exactly."""
    kh, kw, cin, _ = kernel_shape
    if kh * kw * cin <= 288:
        return "im2col"
    points = _num_points(_spans(x_shape, kernel_shape, stride, padding))
    return "fourier" if backend == "cpu" and kh * kw >= 25 and points <= 256 else "native"


@lru_cache
def compiler_options(backend: str) -> dict:
    """Options for `jax.jit(compiler_options=...)` that speed these products up; {} where there are none.

    XLA's CPU backend hands matrix products to the library YNN, which runs batches of small ones on a single
    thread; the code that it replaces uses them all.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": ""} if backend == "cpu" else {}
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except Exception:  # jaxlib versions raise different types for an unknown option
        return {}
    return options


def lane_convs(x, kernel1, bias1, kernel2, bias2):
    """A lane in one: conv2d, bias, relu, conv2d with stride 2, bias; no padding.

    The same as two calls of `conv2d`, but on a CPU the map between them is born in the layout of the
    Fourier products and stays in it, forward and backward.

    Args:
      x: [batch, height, width, channels].
      kernel1: [k, k, channels, features]; bias1: [features].
      kernel2: [k, k, features, channels out]; bias2: [channels out].

    Returns:
      [batch, output height, output width, channels out].

    Raises:
      InputError: a kernel is larger than what it reads.
    """
    sizes = [1 + n - k for n, k in zip(x.shape[1:3], kernel1.shape[:2], strict=True)]
    spans = _spans((0, *sizes), kernel2.shape, 2, "VALID")
    if jax.default_backend() != "cpu" or _num_points(spans) > _MAX_POINTS:
        h = jax.nn.relu(conv2d(x, kernel1) + bias1[None, None, None])
        return conv2d(h, kernel2, stride=2) + bias2[None, None, None]
    sizes = [2 * n for n, _, _ in spans]
    x = _crop_or_pad(x, ((0, 0), (0, 0)), [n + k - 1 for n, k in zip(sizes, kernel1.shape[:2], strict=True)])
    windows = _windows(kernel1.shape[:2], 1, x)
    rows = _phases(windows, spans, 2).reshape(-1, windows.shape[-1])
    kernel1 = kernel1.reshape(-1, bias1.size)
    y = _lane_products(spans, x.shape[0], rows, kernel1, bias1, _kernel_phases(kernel2, spans, 2))
    return _image(y, spans) + bias2[None, None, None]


def _spans(x_shape, kernel_shape, stride, padding):
    """For each axis: outputs, taps of a phase of the kernel, and points, so that circular = linear."""
    if padding not in ("VALID", "SAME"):
        raise InputError(f"padding {padding!r} is unknown: use VALID or SAME")
    spans = []
    for size, taps in zip(x_shape[1:3], kernel_shape[:2], strict=True):
        outputs = -(-size // stride) if padding == "SAME" else (size - taps) // stride + 1
        if outputs < 1:
            raise InputError(f"a kernel of {kernel_shape[:2]} is larger than the image of {x_shape[1:3]}")
        phase_taps = -(-taps // stride)
        spans.append((outputs + phase_taps - 1, phase_taps, outputs))
    return tuple(spans)


def _num_points(spans):
    return spans[0][0] * spans[1][0]


def _crop_or_pad(x, pads, sizes):
    """x [batch, h, w, c] with `pads` before each image axis, and cut or filled up to `sizes` after it."""
    edges = [(lo, size - lo - n, 0) for (lo, _), size, n in zip(pads, sizes, x.shape[1:3], strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


# --- native and im2col ----------------------------------------------------------------------------


def _native(x, kernel, stride, pads):
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _im2col(x, kernel, stride, pads):
    kh, kw, cin, cout = kernel.shape
    x = _crop_or_pad(x, pads, [n + lo + hi for n, (lo, hi) in zip(x.shape[1:3], pads, strict=True)])
    return _matmul(_windows((kh, kw), stride, x), kernel.reshape(kh * kw * cin, cout))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _windows(taps, stride, x):
    """x [batch, h, w, c] -> [batch, outputs, outputs, taps * taps * c]: what each output sees."""
    batch, _, width, cin = x.shape
    (kh, kw), (oh, ow) = taps, _num_windows(taps, stride, x.shape)
    i, j, p, q, c = np.ogrid[:oh, :ow, :kh, :kw, :cin]
    index = (((stride * i + p) * width + stride * j + q) * cin + c).reshape(oh, ow, -1)
    return x.reshape(batch, -1).at[:, index].get(mode="promise_in_bounds", unique_indices=True)


def _windows_fwd(taps, stride, x):
    return _windows(taps, stride, x), x.shape


def _windows_bwd(taps, stride, shape, g):
    """Adds up what went to the same pixel, by columns and then by rows (a scatter would be slow)."""
    batch, height, width, cin = shape
    oh, ow = _num_windows(taps, stride, shape)
    g = g.reshape(batch, oh, ow, *taps, cin)
    g = _overlap_add(jnp.moveaxis(g, 4, 0), 2, stride, width)
    return (_overlap_add(jnp.moveaxis(g, 3, 0), 1, stride, height),)


def _overlap_add(parts, axis, stride, size):
    """The sum of parts[p], stretched along an axis by the stride and moved by p, in an array of that size."""
    total = jnp.zeros((), parts.dtype)
    for p, part in enumerate(parts):
        pads = [(0, 0, 0)] * part.ndim
        pads[axis] = (p, size - p - stride * (part.shape[axis] - 1) - 1, stride - 1)
        total += lax.pad(part, jnp.zeros((), part.dtype), pads)
    return total


def _num_windows(taps, stride, shape):
    return [(n - k) // stride + 1 for n, k in zip(shape[1:3], taps, strict=True)]


_windows.defvjp(_windows_fwd, _windows_bwd)


# --- fourier --------------------------------------------------------------------------------------


def _fourier(x, kernel, stride, pads):
    outputs = [
        (n + lo + hi - k) // stride + 1 for n, k, (lo, hi) in zip(x.shape[1:3], kernel.shape[:2], pads, strict=True)
    ]
    spans = tuple((o - (-k // stride) - 1, -(-k // stride), o) for o, k in zip(outputs, kernel.shape[:2], strict=True))
    x = _crop_or_pad(x, pads, [stride * n for n, _, _ in spans])
    return _image(_spectral(spans, _phases(x, spans, stride), _kernel_phases(kernel, spans, stride)), spans)


ALGORITHMS: dict[str, Callable] = {"native": _native, "im2col": _im2col, "fourier": _fourier}


def _phases(x, spans, stride):
    """[batch, stride * n, stride * n, c] -> [n * n, batch, stride * stride * c]."""
    batch, c = x.shape[0], x.shape[-1]
    (n1, *_), (n2, *_) = spans
    x = x.reshape(batch, n1, stride, n2, stride, c).transpose(1, 3, 0, 2, 4, 5)
    return x.reshape(n1 * n2, batch, stride * stride * c)


def _kernel_phases(kernel, spans, stride):
    """[k, k, c, cout] -> [taps * taps, stride * stride * c, cout], with zeros for taps that are not there."""
    kh, kw, cin, cout = kernel.shape
    (_, t1, _), (_, t2, _) = spans
    kernel = jnp.pad(kernel, ((0, stride * t1 - kh), (0, stride * t2 - kw), (0, 0), (0, 0)))
    kernel = kernel.reshape(t1, stride, t2, stride, cin, cout).transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(t1 * t2, stride * stride * cin, cout)


def _image(y, spans):
    """[outputs * outputs, batch, c] -> [batch, outputs, outputs, c]."""
    (_, _, o1), (_, _, o2) = spans
    return y.reshape(o1, o2, *y.shape[1:]).transpose(2, 0, 1, 3)


@lru_cache
def _transforms(spans):
    """The constant matrices A [P, points], B [P, taps], C [outputs, P] of the Fourier form, float64.

    The spectrum of a real map has conjugate pairs; each row of A, B and column of C is one real product for
    a frequency that is its own conjugate, or one of the three (Gauss) for a pair:
    (a + ib)(c + id) = (k1 - k3) + i (k1 + k2) with k1 = c (a + b), k2 = a (d - c), k3 = b (c + d).
    """
    n1, n2 = (n for n, _, _ in spans)

    def angles(u, v, part):
        i, j = np.indices([span[part] for span in spans]).reshape(2, -1)
        return 2 * np.pi * (u * i / n1 + v * j / n2)

    a_rows, b_rows, c_columns = [], [], []
    for u, v in np.ndindex(n1, n2):
        mirror = (-u % n1, -v % n2)
        if mirror < (u, v):
            continue
        cos, sin = np.cos(angles(u, v, 0)), np.sin(angles(u, v, 0))
        kcos, ksin = np.cos(angles(u, v, 1)), np.sin(angles(u, v, 1))
        ycos, ysin = np.cos(angles(u, v, 2)) / (n1 * n2), np.sin(angles(u, v, 2)) / (n1 * n2)
        if mirror == (u, v):
            a_rows, b_rows, c_columns = [*a_rows, cos], [*b_rows, kcos], [*c_columns, ycos]
        else:
            a_rows += [cos - sin, cos, -sin]
            b_rows += [kcos, ksin - kcos, kcos + ksin]
            c_columns += [2 * (ycos - ysin), -2 * ysin, -2 * ycos]
    return np.stack(a_rows), np.stack(b_rows), np.stack(c_columns, axis=1)


def _matmul(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def _transform(matrix, x):
    """Applies a constant matrix to the first axis of x."""
    matrix = jnp.asarray(matrix, x.dtype)
    return _matmul(matrix, x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


def _spectral_fwd(spans, x, kernel):
    a, b, c = _transforms(spans)
    x, kernel = _transform(a, x), _transform(b, kernel)
    return _transform(c, _matmul(x, kernel)), (x, kernel)


def _spectral_bwd(spans, saved, g):
    a, b, c = _transforms(spans)
    x, kernel = saved
    g = _transform(c.T, g)
    dx = _matmul(g, kernel.transpose(0, 2, 1))
    # [cout, batch] x [batch, c], transposed afterwards, runs at twice the rate of the other order on a CPU
    dkernel = _matmul(g.transpose(0, 2, 1), x).transpose(0, 2, 1)
    return _transform(a.T, dx), _transform(b.T, dkernel)


def _lanes_in_turn(function):
    """On a CPU `jax.vmap(function)` becomes a loop over the lanes, unrolled, with the same results."""
    function = custom_vmap(function)

    @function.def_vmap
    def _(size, batched, *args):
        if jax.default_backend() != "cpu":
            in_axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
            out = jax.vmap(function.fun, in_axes)(*args)
        else:
            lane = lambda i: jax.tree.map(lambda a, b: a[i] if b else a, args, tuple(batched))  # noqa: E731
            out = jax.tree.map(lambda *lanes: jnp.stack(lanes), *[function(*lane(i)) for i in range(size)])
        return out, jax.tree.map(lambda _: True, out)

    return function


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spectral(spans, x, kernel):
    """x [points, batch, c], kernel [taps, c, cout] -> [outputs, batch, cout]: a circular correlation."""
    return _lanes_in_turn(partial(_spectral_fwd, spans))(x, kernel)[0]


_spectral.defvjp(
    lambda spans, *args: _lanes_in_turn(partial(_spectral_fwd, spans))(*args),
    lambda spans, *args: _lanes_in_turn(partial(_spectral_bwd, spans))(*args),
)


def _lane_fwd(spans, batch, rows, kernel1, bias1, kernel2):
    h = jax.nn.relu(_matmul(rows, kernel1) + bias1[None])
    y, saved = _spectral_fwd(spans, h.reshape(_num_points(spans), batch, -1), kernel2)
    return y, (rows, kernel1, h, *saved)


def _lane_bwd(spans, batch, saved, g):
    rows, kernel1, h, *saved = saved
    dh, dkernel2 = _spectral_bwd(spans, saved, g)
    dh = jnp.where(h > 0, dh.reshape(h.shape), 0)
    return _matmul(dh, kernel1.T), _matmul(rows.T, dh), dh.sum(axis=0), dkernel2


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lane_products(spans, batch, rows, kernel1, bias1, kernel2):
    """rows [points * batch * phases, window], kernel2 [taps, phases * c1, c2] -> [outputs, batch, c2]."""
    return _lanes_in_turn(partial(_lane_fwd, spans, batch))(rows, kernel1, bias1, kernel2)[0]


_lane_products.defvjp(
    lambda spans, batch, *args: _lanes_in_turn(partial(_lane_fwd, spans, batch))(*args),
    lambda spans, batch, *args: _lanes_in_turn(partial(_lane_bwd, spans, batch))(*args),
)

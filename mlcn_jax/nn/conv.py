"""Convolutions in forms that stay fast with many lanes on one device.

XLA turns a convolution that is vmapped over its kernels into a grouped convolution, which is slow on every
backend, and on a CPU its strided input gradient is slow even for one lane. There are five forms:

* `native` is XLA's own convolution; on a CPU it runs lane by lane, with a faster input gradient. Best on a CPU for
  small kernels between many channels, and for few images.
* `im2col` copies what each output pixel sees into a row and multiplies once. Best where those rows are short, as in
  the first convolution of a lane, which reads the image.
* `fourier` multiplies spectra (`conv_spectral`). Best for large kernels between many channels.
* `winograd` multiplies transformed tiles (`conv_winograd`); for 3x3 kernels with stride 1. Best between many channels,
  for so many images that the transform of the kernel costs little.
* `kn2row` adds up one product for each tap of the kernel (`conv_kn2row`); with stride 1. Best for few pixels in
  all or in each image: it copies neither images nor kernels, and leaves out what taps see of the padding.

Every function is written for one lane; the caller vmaps.

Source: Chellapilla, Puri, Simard 2006 for im2col; Mathieu, Henaff, LeCun 2013 for products of spectra; Lavin and Gray
2016 for Winograd's products; Vasudevan, Anderson, Gregg 2017, arXiv 1704.04428, for kn2row.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mlcn_jax.errors import InputError, is_lack_of_memory
from mlcn_jax.nn import conv_kn2row, conv_spectral, conv_winograd, tracing

# Limits of `choose` on a CPU, from benchmarks/conv_algorithms.py on 2 cores, with AVX-512 and without.
FOURIER_MIN_BATCH = 8  # below, transforming the kernel costs more than the rest
_FOURIER_MIN_BATCH_FORWARD = 32  # in a forward pass alone, where the kernel varies: one transform serves one product
_MOST_FOLDED = 45_000_000  # values of a constant; XLA computes larger ones anew in each call
_FOURIER_MIN_TAPS = 25
_FEW_CHANNELS = 8  # below, XLA's convolutions are slow
_WINOGRAD_MIN_ROWS = 48 * 1024  # tiles of the batch times channels: with fewer, the kernel's transform costs too much
_WINOGRAD_MIN_ROWS_CONSTANT = 4 * 1024  # where the kernel is a constant, transformed when the program is compiled
_WINOGRAD_MIN_CHANNELS = 32  # and filters
_WINOGRAD_MIN_CHANNELS_SPARSE = 96  # where a quarter of the tiles or more is cut off
_WINOGRAD_MIN_CHANNELS_CONSTANT = 64  # for a kernel that is a constant
_KN2ROW_MIN_CHANNELS = 128  # and filters, for a kernel that is a constant
_KN2ROW_MAX_PIXELS, _KN2ROW_MAX_PIXELS_OF_IMAGE = 49, 9  # of all results, or of each
_IM2COL_MAX_ENTRIES = 2**28  # the copied windows take 1 GiB in float32
_LAYOUT = ("NHWC", "HWIO", "NHWC")


Padding = str | tuple[tuple[int, int], tuple[int, int]]


def conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: Padding = "VALID", algorithm: str = "auto") -> Array:
    """Two-dimensional cross-correlation, differentiable in both arguments.

    Args:
      x: [batch, height, width, channels in].
      kernel: [kernel height, kernel width, channels in, channels out], of the same dtype as x.
      stride: step between output pixels in pixels of x, on both axes.
      padding: "VALID", "SAME" (as in TensorFlow: an odd row or column is added at the end), or the rows and columns of
        zeros to add, ((top, bottom), (left, right)).
      algorithm: a key of `ALGORITHMS`, or "auto" for the one that `choose` returns.

    Returns:
      [batch, output height, output width, channels out], of the dtype of x; sums are accumulated in float32.

    Raises:
      InputError: the algorithm is unknown or does not support this shape, the padding is unknown, or the kernel
        is larger than the image.
    """
    outputs = _num_outputs(x.shape, kernel.shape, stride, padding)
    if algorithm == "auto":
        algorithm = chosen(x.shape, kernel.shape, stride, padding)
    if algorithm not in (able := _able(outputs, kernel.shape, stride)):
        raise InputError(
            f"algorithm {algorithm!r} cannot convolve x {x.shape} with kernel {kernel.shape}, "
            f"stride {stride}, padding {padding}: use {', '.join(able)} or auto"
        )
    return ALGORITHMS[algorithm](x, kernel, stride, _pads(x.shape, kernel.shape, stride, padding))


def convolution(kernel: Array, pads: conv_winograd.Pads, algorithm: str, batch: Array) -> Callable[[Array], Array]:
    """`conv2d` with stride 1 as a function of parts of a batch: what the kernel alone gives is computed once."""
    if algorithm == "winograd":
        return conv_winograd.convolution(kernel, pads, batch)
    return partial(conv2d, kernel=kernel, padding=pads, algorithm=algorithm)


def gradients(
    kernel: Array, pads: conv_winograd.Pads, algorithm: str, batch: Array
) -> tuple[Callable[[Array, Array], tuple[Array, Array]], Callable[[Array], Array]]:
    """The gradients of `convolution`; the batch is that of the result's gradients.

    Returns:
      A function of x and the gradient of the result that returns the gradient of x and a float32 array to be added up
      over the parts, and a function that makes that sum the gradient of the kernel.
    """
    if algorithm == "winograd":
        return conv_winograd.gradients(kernel, pads, batch)

    def one(x: Array, g: Array) -> tuple[Array, Array]:
        dx, dkernel = jax.vjp(partial(conv2d, padding=pads, algorithm=algorithm), x, kernel)[1](g)
        return dx, dkernel.astype(jnp.float32)

    return one, lambda total: total.astype(kernel.dtype)


def choose(
    backend: str,
    x_shape: tuple[int, ...],
    kernel_shape: tuple[int, ...],
    stride: int,
    padding: Padding,
    constant_kernel: bool = False,
    forward_only: bool = False,
) -> str:
    """The algorithm for a shape: a fixed rule based on measurements, so that runs are reproducible.

    Only the rule for CPUs was measured (`benchmarks/conv_algorithms.py`); elsewhere matrix products are preferred to
    grouped convolutions without timing them.

    Args:
      backend: platform that the program will run on, such as `cpu`.
      x_shape, kernel_shape, stride, padding: as for `conv2d`.
      constant_kernel: whether the kernel is compiled into the program, and nothing is differentiated.
      forward_only: whether nothing is differentiated.

    Returns:
      A key of `ALGORITHMS`.

    Raises:
      InputError: the padding is unknown, or the kernel is larger than the image.
    """
    outputs = _num_outputs(x_shape, kernel_shape, stride, padding)
    batch, taps, channels = x_shape[0], math.prod(kernel_shape[:2]), kernel_shape[2]
    if backend == "cpu" and channels >= _FEW_CHANNELS:
        if conv_winograd.can_do(kernel_shape, stride):
            least, pixels = min(kernel_shape[2:]), math.prod(outputs)
            few = batch * pixels <= _KN2ROW_MAX_PIXELS or pixels <= _KN2ROW_MAX_PIXELS_OF_IMAGE
            if constant_kernel and few and least >= _KN2ROW_MIN_CHANNELS:
                return "kn2row"
            return "winograd" if _worth_tiles(batch, outputs, least, constant_kernel) else "native"
        size = conv_spectral.spectrum_size(outputs, kernel_shape, stride)
        varies = forward_only and not (constant_kernel and size <= _MOST_FOLDED)
        least = _FOURIER_MIN_BATCH_FORWARD if varies else FOURIER_MIN_BATCH
        large = batch >= least and taps >= _FOURIER_MIN_TAPS
        return "fourier" if large and conv_spectral.can_do(outputs, kernel_shape, stride) else "native"
    entries = batch * math.prod(outputs) * taps * channels
    return "im2col" if entries <= _IM2COL_MAX_ENTRIES else "native"


def training_form(
    backend: str, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], stride: int, padding: Padding, itemsize: int
) -> str:
    """What `choose` returns, of a convolution with its gradients; `fourier held` if the kernel's spectrum is held.

    Arguments as for `choose`, and the bytes of a value. Time and memory change abruptly where it does.
    """
    algorithm = choose(backend, x_shape, kernel_shape, stride, padding)
    if algorithm == "fourier":
        size = conv_spectral.spectrum_size(_num_outputs(x_shape, kernel_shape, stride, padding), kernel_shape, stride)
        return "fourier held" if conv_spectral.holds_spectrum(itemsize * size) else algorithm
    return algorithm


def _worth_tiles(batch: int, outputs: tuple[int, ...], channels: int, constant_kernel: bool) -> bool:
    """Whether `winograd` is faster than `native` on a CPU, for the smaller number of channels and filters."""
    tiles = conv_winograd.num_tiles(outputs)
    rows = batch * tiles * channels
    if constant_kernel:
        return channels >= _WINOGRAD_MIN_CHANNELS_CONSTANT and rows >= _WINOGRAD_MIN_ROWS_CONSTANT
    sparse = math.prod(outputs) < 0.75 * conv_winograd.TILE**2 * tiles
    least = _WINOGRAD_MIN_CHANNELS_SPARSE if sparse else _WINOGRAD_MIN_CHANNELS
    return channels >= least and rows >= _WINOGRAD_MIN_ROWS


def key_of(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], stride: int, padding: Padding) -> str:
    """The key of a convolution, on the platform it is traced for, in a table of algorithms (`tracing.Target`)."""
    sizes = ("x".join(map(str, shape)) for shape in (x_shape, kernel_shape))
    return " ".join((tracing.platform(), *sizes, f"stride {stride}", str(padding)))


def chosen(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], stride: int, padding: Padding) -> str:
    """What `conv2d` takes for "auto": from the table of the program that is traced, or by `choose`."""
    target = tracing.current()
    if target.batch:
        x_shape = (target.batch, *x_shape[1:])
    shape = (x_shape, kernel_shape, stride, padding)
    uses = target.constant_weights, target.inference
    return target.algorithm(key_of(*shape), lambda: choose(tracing.platform(), *shape, *uses))


def lane_convs(
    x: Array, kernel1: Array, bias1: Array, kernel2: Array, bias2: Array, *, algorithm: str = "auto"
) -> Array:
    """A lane's two convolutions: conv2d, bias, relu, conv2d with stride 2, bias; no padding.

    Equal to two calls of `conv2d`. If "auto" selects `fourier` for the second, the feature map between the two is
    computed in the layout of the spectral products and stays in it, forward and backward.

    Args:
      x: [batch, height, width, channels].
      kernel1: [k, k, channels, features]; bias1: [features].
      kernel2: [k, k, features, channels out]; bias2: [channels out].
      algorithm: algorithm of both, as for `conv2d`.

    Returns:
      [batch, output height, output width, channels out], of the dtype of x.

    Raises:
      InputError: as for `conv2d`.

    Source: do Rosario et al. 2019, section III, for the layers; the shared layout is this project's.
    """
    size = _num_outputs(x.shape, kernel1.shape, 1, "VALID")
    middle = (x.shape[0], *size, bias1.size)
    if algorithm != "auto" or chosen(middle, kernel2.shape, 2, "VALID") != "fourier":
        h = jax.nn.relu(conv2d(x, kernel1, algorithm=algorithm) + bias1[None, None, None])
        return conv2d(h, kernel2, stride=2, algorithm=algorithm) + bias2[None, None, None]
    spans = conv_spectral.spans_of(_num_outputs(middle, kernel2.shape, 2, "VALID"), kernel2.shape, 2)
    taps = kernel1.shape[:2]
    x = conv_spectral.crop_or_pad(x, ((0, 0), (0, 0)), [2 * s.points + k - 1 for s, k in zip(spans, taps, strict=True)])
    windows = _windows(tuple(k + 1 for k in taps), 2, x)
    y = conv_spectral.relu_then_correlate(spans, windows, kernel1, bias1, kernel2)
    return y + bias2[None, None, None]


def compiled_once(function: Callable, static_argnums: int | tuple[int, ...] = ()) -> Callable:
    """`jax.jit` for a function that runs once, such as initialization: on a CPU it is compiled with few optimizations.

    Such a program spends most of its time on compilation, and few optimizations cut that to a fifth. Results are the
    same where nothing is summed, as in drawing random numbers.

    Args:
      function: a pure function of arrays and of the arguments in `static_argnums`.
      static_argnums: positions of static arguments, as for `jax.jit`.

    Returns:
      The jitted function. It is compiled for the platform of `tracing.platform()` at this call, and raises what
      `function` raises when it is traced.

    Source: this project.
    """
    return _compiled_once(function, static_argnums, tracing.platform())


@lru_cache
def _compiled_once(function, static_argnums, platform):
    options = {"xla_backend_optimization_level": 1} if platform == "cpu" else {}
    return jax.jit(function, static_argnums=static_argnums, compiler_options=options)


@lru_cache
def compiler_options(backend: str, chains: bool) -> dict[str, str]:
    """Options for `jax.jit(compiler_options=...)` that speed up these products; {} if there are none.

    On CPUs, XLA's YNN library can compute a chain of products, biases and relus at once, instead of one by one with
    intermediate results in memory. Products that are not in such chains are faster without it.

    Args:
      backend: platform that the program will run on, such as `cpu`.
      chains: whether most products are in chains, as in `lane_convs` with spectra (`ModelSpec.compiler_options`).
    """
    if backend != "cpu":
        return {}
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT" if chains else ""}
    try:
        with jax.default_device(jax.devices(backend)[0]):
            jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except Exception as error:  # jaxlib versions raise different types for an option that they do not know
        if is_lack_of_memory(error):
            raise
        return {}
    return options


def _num_outputs(x_shape, kernel_shape, stride, padding):
    if isinstance(padding, str) and padding not in ("VALID", "SAME"):
        raise InputError(f"padding {padding!r} is unknown: use VALID or SAME")
    sizes, taps = x_shape[1:3], kernel_shape[:2]
    if padding == "SAME":
        return tuple(-(-n // stride) for n in sizes)
    if not isinstance(padding, str):
        sizes = tuple(n + sum(own) for n, own in zip(sizes, padding, strict=True))
    if any(k > n for n, k in zip(sizes, taps, strict=True)):
        raise InputError(f"a kernel of {tuple(taps)} is larger than the image of {tuple(sizes)}")
    return tuple((n - k) // stride + 1 for n, k in zip(sizes, taps, strict=True))


def _pads(x_shape, kernel_shape, stride, padding):
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x_shape[1:3], kernel_shape[:2], (stride, stride), padding)
    return tuple((low, high) for low, high in padding)


def _native(x, kernel, stride, pads):
    convolve = _cpu_convolve if tracing.platform() == "cpu" else _convolve
    return convolve(stride, tuple(pads), x, kernel)


def _convolve(stride, pads, x, kernel):
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=_LAYOUT)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cpu_convolve(stride, pads, x, kernel):
    """XLA's convolution, one lane after another, with an input gradient 50 times faster on a CPU than XLA's own.

    All convolutions of the gradients have the layout of `_convolve`: XLA gives those of other layouts to a routine that
    is 25 times slower where they are in a loop.
    """
    return conv_spectral.lanes_in_turn(partial(_convolve, stride, pads))(x, kernel)


def _cpu_convolve_fwd(stride, pads, x, kernel):
    return _cpu_convolve(stride, pads, x, kernel), (x, kernel)


def _cpu_convolve_bwd(stride, pads, saved, g):
    def one_lane(x, kernel, g):
        taps = kernel.shape[:2]
        dkernel = _kernel_gradient(stride, pads, taps, x, g)
        if stride == 1:
            pads_of_g = [(k - 1 - lo, k - 1 - hi) for k, (lo, hi) in zip(taps, pads, strict=True)]
            return _convolve(1, pads_of_g, g, kernel[::-1, ::-1].transpose(0, 1, 3, 2)), dkernel
        (top, bottom), (left, right) = pads
        rows = []
        for row in kernel:
            seen = conv_spectral.matmul(g, row.reshape(-1, row.shape[-1]).T).reshape(*g.shape[:3], *row.shape[:2])
            rows.append(_overlap_add(jnp.moveaxis(seen, 3, 0), 2, stride, left + x.shape[2] + right))
        dx = _overlap_add(rows, 1, stride, top + x.shape[1] + bottom)
        return dx[:, top : top + x.shape[1], left : left + x.shape[2]], dkernel

    return conv_spectral.lanes_in_turn(one_lane)(*saved, g)


def _kernel_gradient(stride, pads, taps, x, g):
    """The gradient with respect to the kernel: x is correlated with g, and images take the place of channels."""
    ends = [
        (lo, k + stride * (outputs - 1) - size - lo)
        for k, (lo, _), size, outputs in zip(taps, pads, x.shape[1:3], g.shape[1:3], strict=True)
    ]
    x, g = x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3)
    gradient = lax.conv_general_dilated(x, g, (1, 1), ends, rhs_dilation=(stride, stride), dimension_numbers=_LAYOUT)
    return gradient.transpose(1, 2, 0, 3)


_cpu_convolve.defvjp(_cpu_convolve_fwd, _cpu_convolve_bwd)


def _im2col(x, kernel, stride, pads):
    x = conv_spectral.crop_or_pad(x, pads, [n + sum(pad) for n, pad in zip(x.shape[1:3], pads, strict=True)])
    windows = _windows(kernel.shape[:2], stride, x)
    return conv_spectral.matmul(windows, kernel.reshape(-1, kernel.shape[-1]))


ALGORITHMS: dict[str, Callable[..., Array]] = {
    "native": _native,
    "im2col": _im2col,
    "fourier": conv_spectral.conv2d,
    "winograd": conv_winograd.conv2d,
    "kn2row": conv_kn2row.conv2d,
}


def _able(outputs: tuple[int, ...], kernel_shape: tuple[int, ...], stride: int) -> list[str]:
    """The algorithms for a kernel and the rows and columns of its result."""
    limited = {
        "fourier": conv_spectral.can_do(outputs, kernel_shape, stride),
        "winograd": conv_winograd.can_do(kernel_shape, stride),
        "kn2row": stride == 1,
    }
    return [name for name in ALGORITHMS if limited.get(name, True)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _windows(taps, stride, x):
    """x [batch, h, w, c] -> [batch, outputs, outputs, taps * taps * c]: the window of each output pixel."""
    batch, _, width, channels = x.shape
    oh, ow = _num_outputs(x.shape, taps, stride, "VALID")
    i, j, p, q, c = np.ogrid[:oh, :ow, : taps[0], : taps[1], :channels]
    index = (((stride * i + p) * width + stride * j + q) * channels + c).reshape(oh, ow, -1)
    return x.reshape(batch, -1).at[:, index].get(mode="promise_in_bounds")


def _windows_fwd(taps, stride, x):
    return _windows(taps, stride, x), x.shape


def _windows_bwd(taps, stride, shape, g):
    """Sums the contributions to each pixel, by columns and then by rows (a scatter would be slow)."""
    _, height, width, channels = shape
    g = g.reshape(*g.shape[:3], *taps, channels)
    g = _overlap_add(jnp.moveaxis(g, 4, 0), 2, stride, width)
    return (_overlap_add(jnp.moveaxis(g, 3, 0), 1, stride, height),)


def _overlap_add(parts, axis, stride, size):
    """The sum of parts[p], spread along an axis by the stride and shifted by p, in an array of the given size."""
    total = zero = jnp.zeros((), jnp.float32)  # in which many parts are added, whatever their dtype
    for p, part in enumerate(parts):
        pads = [(0, 0, 0)] * part.ndim
        pads[axis] = (p, size - p - stride * (part.shape[axis] - 1) - 1, stride - 1)
        total += lax.pad(part.astype(jnp.float32), zero, pads)
    return total.astype(parts[0].dtype)


_windows.defvjp(_windows_fwd, _windows_bwd)

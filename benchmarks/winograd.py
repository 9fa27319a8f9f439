"""Winograd's F(4x4, 3x3) for the 3x3 convolutions of residual lanes, against XLA's convolution.

    python -m benchmarks.winograd

One lane's convolutions of a training step's shapes, with 100 and 500 images, those before pooling also as they run:
without the odd row and column, and on a CPU a part of the images at a time. In interleaved rounds: XLA's convolution,
Winograd as one program, and as three (the transform of the images, 36 products, the transform back), which shows where
its time goes; and the first two with the gradients of images and kernels, which JAX derives from Winograd.
The float32 error is relative to the largest value of a convolution in float64. It is not among `conv.ALGORITHMS`: see
docs/results/speed.md. Writes `benchmarks/results/winograd_<backend>.json` after each case; what is there of this
machine is kept, and not measured again.

Source: Lavin and Gray 2016, arXiv 1509.09308, section 4.3, for the matrices.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from benchmarks import peers
from benchmarks.conv_algorithms import as_pooled
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv, resnet

_TILE, _TAPS = 4, 3
_WINDOW = _TILE + _TAPS - 1
_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_KERNEL = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))


def combined(matrix: Sequence[Sequence[float]], parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Sums of parts with the weights of each row; no time goes to zeros."""
    return [sum((w * part for w, part in zip(row, parts, strict=True) if w), jnp.zeros(())) for row in matrix]


def transformed(x: jax.Array, outputs: int) -> jax.Array:
    """Images [batch, size, size, channels], padded, as [36, tiles, channels] for a result of `outputs` rows."""
    batch, size, _, channels = x.shape
    tiles = -(-outputs // _TILE)
    x = jnp.pad(x, ((0, 0), *[(1, _TILE * tiles + 1 - size)] * 2, (0, 0)))
    last = _TILE * (tiles - 1) + 1
    rows = combined(_INPUT, [x[:, i : i + last : _TILE] for i in range(_WINDOW)])
    both = [one for row in rows for one in combined(_INPUT, [row[:, :, i : i + last : _TILE] for i in range(_WINDOW)])]
    return jnp.stack(both).reshape(_WINDOW**2, batch * tiles**2, channels)


def products(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """36 products of images and kernels, both transformed."""
    return lax.dot_general(images, kernel, (((2,), (1,)), ((0,), (0,))))


def back(values: jax.Array, batch: int, outputs: int) -> jax.Array:
    """The convolution [batch, outputs, outputs, filters] from its 36 products."""
    tiles, filters = -(-outputs // _TILE), values.shape[-1]
    rows = combined(_OUTPUT, list(values.reshape(_WINDOW, _WINDOW, batch, tiles, tiles, filters)))
    both = jnp.stack([jnp.stack(combined(_OUTPUT, list(row)), axis=3) for row in rows], axis=2)
    return both.reshape(batch, _TILE * tiles, _TILE * tiles, filters)[:, :outputs, :outputs]


def transformed_kernel(kernel: jax.Array) -> jax.Array:
    """Kernels [3, 3, channels, filters] as [36, channels, filters]."""
    matrix = np.array(_KERNEL, np.float32)
    return jnp.einsum("ip,jq,pqco->ijco", matrix, matrix, kernel).reshape(_WINDOW**2, *kernel.shape[2:])


def winograd(x: jax.Array, kernel: jax.Array, outputs: int) -> jax.Array:
    """The first `outputs` rows and columns of a 3x3 convolution of x [batch, size, size, channels], padded by one."""
    return back(products(transformed(x, outputs), transformed_kernel(kernel)), x.shape[0], outputs)


def native(x: jax.Array, kernel: jax.Array, outputs: int) -> jax.Array:
    """The same by XLA, with the gradients that lanes use."""
    after = 1 + outputs - x.shape[1]
    return conv.conv2d(x, kernel, padding=((1, after), (1, after)), algorithm="native")


def shapes(width: int) -> list[tuple[int, int, int]]:
    """Size, channels and filters of the 3x3 convolutions of a residual lane of depth 2 on 32x32 images."""
    first, second, third = (width * filters for filters in resnet.STAGES)
    return [(31, 24, first), (15, first, first), (15, first, second), (7, second, second), (7, second, third)]


def listed(widths: Sequence[int], batches: Sequence[int]) -> dict[str, tuple[int, int, int, int, int]]:
    """By title: images at a time, size, channels, filters and rows of the result of every convolution."""
    found = {}
    for width, batch in itertools.product(widths, batches):
        for size, channels, filters in shapes(width):
            title = f"w{width}, {size}x{size}x{channels} to {filters}"
            found[f"{title}, batch {batch}"] = batch, size, channels, filters, size
            if filters != channels:  # the first of a stage, which is pooled
                part, (rows, _) = as_pooled(batch, size, channels, filters, "float32")
                found[f"{title}, pooled, batch {part} of {batch}"] = part, size, channels, filters, size + sum(rows) - 2
    return found


def error(x: jax.Array, kernel: jax.Array, outputs: int, function: Callable) -> float:
    """The largest error relative to the largest value of the convolution in float64."""
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = np.asarray(kernel, np.float64)
    exact = sum(padded[:, i : i + outputs, j : j + outputs] @ taps[i, j] for i in range(_TAPS) for j in range(_TAPS))
    return float(np.max(np.abs(np.asarray(function(x, kernel)) - exact)) / np.max(np.abs(exact)))


def measure(batch: int, size: int, channels: int, filters: int, outputs: int, rounds: int) -> dict:
    """Median milliseconds of each program, and the errors."""
    both = {function.__name__: functools.partial(function, outputs=outputs) for function in (native, winograd)}
    jit = functools.partial(jax.jit, compiler_options=conv.compiler_options(jax.default_backend()))  # as in training
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (batch, size, size, channels))
    kernel = jax.random.normal(keys[1], (_TAPS, _TAPS, channels, filters)) / np.sqrt(_TAPS**2 * channels)
    weight = jax.random.normal(keys[2], (batch, outputs, outputs, filters))  # of each result in a sum, for gradients

    def with_gradients(function: Callable) -> Callable:
        return jit(jax.grad(lambda x, kernel: jnp.sum(function(x, kernel) * weight), argnums=(0, 1)))

    transform = jit(functools.partial(transformed, outputs=outputs))
    images, weights = transform(x), jit(transformed_kernel)(kernel)
    calls = {
        **{name: (jit(function), (x, kernel)) for name, function in both.items()},
        "images transformed": (transform, (x,)),
        "products": (jit(products), (images, weights)),
        "transformed back": (jit(back, static_argnums=(1, 2)), (products(images, weights), batch, outputs)),
        **{f"{name} with gradients": (with_gradients(function), (x, kernel)) for name, function in both.items()},
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, (function, arguments) in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            taken[name].append(1000 * (time.perf_counter() - started))
    few = x[:4]
    return {
        "milliseconds": {name: statistics.median(values[1:]) for name, values in taken.items()},
        "error": {name: error(few, kernel, outputs, calls[name][0]) for name in both},
    }


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 20, "Interleaved rounds.", lower_bound=1, flag_values=values)
    flags.DEFINE_list("batches", ["100", "500"], "images", flag_values=values)
    flags.DEFINE_list("widths", ["2", "3", "4", "8"], "widths of lanes", flag_values=values)
    peers.define_out(values, "winograd_BACKEND")


def main(values: flags.FlagValues) -> None:
    results = peers.results_so_far(values, {"rounds": values.rounds}, "cases")
    cases = listed(list(map(int, values.widths)), list(map(int, values.batches)))
    for title, case in cases.items():
        with peers.kept(values, results, "cases", title) as missing:
            if missing:
                results["cases"][title] = measure(*case, values.rounds)
                print(title, results["cases"][title], flush=True)


if __name__ == "__main__":
    launch_script(define, main)

"""Winograd's F(4x4, 3x3) for the 3x3 convolutions of residual lanes, against XLA's convolution.

    python -m benchmarks.winograd

One lane's convolutions of a training step's shapes, with 100 and 500 images, in interleaved rounds: XLA's convolution,
Winograd as one program, and as three (the transform of the images, 36 products, the transform back), which shows where
its time goes; and the first two with the gradients of images and kernels, which JAX derives from them.
The float32 error is relative to the largest value of a convolution in float64. It is not among `conv.ALGORITHMS`: see
docs/results/speed.md. Writes `benchmarks/results/winograd_<backend>.json`.

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
from mlcn_jax import host
from mlcn_jax.files import write_json
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


def transformed(x: jax.Array) -> jax.Array:
    """Images [batch, size, size, channels], padded by one pixel, as [36, tiles, channels]."""
    batch, size, _, channels = x.shape
    tiles = -(-size // _TILE)
    x = jnp.pad(x, ((0, 0), *[(1, _TILE * tiles + 1 - size)] * 2, (0, 0)))
    last = _TILE * (tiles - 1) + 1
    rows = combined(_INPUT, [x[:, i : i + last : _TILE] for i in range(_WINDOW)])
    both = [one for row in rows for one in combined(_INPUT, [row[:, :, i : i + last : _TILE] for i in range(_WINDOW)])]
    return jnp.stack(both).reshape(_WINDOW**2, batch * tiles**2, channels)


def products(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """36 products of images and kernels, both transformed."""
    return lax.dot_general(images, kernel, (((2,), (1,)), ((0,), (0,))))


def back(values: jax.Array, batch: int, size: int) -> jax.Array:
    """The convolution [batch, size, size, filters] from its 36 products."""
    tiles, filters = -(-size // _TILE), values.shape[-1]
    rows = combined(_OUTPUT, list(values.reshape(_WINDOW, _WINDOW, batch, tiles, tiles, filters)))
    both = jnp.stack([jnp.stack(combined(_OUTPUT, list(row)), axis=3) for row in rows], axis=2)
    return both.reshape(batch, _TILE * tiles, _TILE * tiles, filters)[:, :size, :size]


def transformed_kernel(kernel: jax.Array) -> jax.Array:
    """Kernels [3, 3, channels, filters] as [36, channels, filters]."""
    matrix = np.array(_KERNEL, np.float32)
    return jnp.einsum("ip,jq,pqco->ijco", matrix, matrix, kernel).reshape(_WINDOW**2, *kernel.shape[2:])


def winograd(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A 3x3 convolution of x [batch, size, size, channels] that keeps the size."""
    return back(products(transformed(x), transformed_kernel(kernel)), x.shape[0], x.shape[1])


def native(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same by XLA."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def shapes(width: int) -> list[tuple[int, int, int]]:
    """Size, channels and filters of the 3x3 convolutions of a residual lane of depth 2 on 32x32 images."""
    first, second, third = (width * filters for filters in resnet.STAGES)
    return [(31, 24, first), (15, first, first), (15, first, second), (7, second, second), (7, second, third)]


def error(x: jax.Array, kernel: jax.Array, function: Callable) -> float:
    """The largest error relative to the largest value of the convolution in float64."""
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    size, taps = x.shape[1], np.asarray(kernel, np.float64)
    exact = sum(padded[:, i : i + size, j : j + size] @ taps[i, j] for i in range(_TAPS) for j in range(_TAPS))
    return float(np.max(np.abs(np.asarray(function(x, kernel)) - exact)) / np.max(np.abs(exact)))


def measure(batch: int, size: int, channels: int, filters: int, rounds: int) -> dict:
    """Median milliseconds of each program, and the errors."""
    jit = functools.partial(jax.jit, compiler_options=conv.compiler_options(jax.default_backend()))  # as in training
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (batch, size, size, channels))
    kernel = jax.random.normal(keys[1], (_TAPS, _TAPS, channels, filters)) / np.sqrt(_TAPS**2 * channels)
    weight = jax.random.normal(keys[2], (batch, size, size, filters))  # of each result in the sum that has gradients

    def with_gradients(function: Callable) -> Callable:
        return jit(jax.grad(lambda x, kernel: jnp.sum(function(x, kernel) * weight), argnums=(0, 1)))

    images, weights = jit(transformed)(x), jit(transformed_kernel)(kernel)
    calls = {
        "native": (jit(native), (x, kernel)),
        "winograd": (jit(winograd), (x, kernel)),
        "images transformed": (jit(transformed), (x,)),
        "products": (jit(products), (images, weights)),
        "transformed back": (jit(back, static_argnums=(1, 2)), (products(images, weights), batch, size)),
        "native with gradients": (with_gradients(native), (x, kernel)),
        "winograd with gradients": (with_gradients(winograd), (x, kernel)),
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
        "error": {name: error(few, kernel, calls[name][0]) for name in ("native", "winograd")},
    }


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 20, "Interleaved rounds.", lower_bound=1, flag_values=values)
    flags.DEFINE_list("batches", ["100", "500"], "images", flag_values=values)
    flags.DEFINE_list("widths", ["2", "3", "4", "8"], "widths of lanes", flag_values=values)
    peers.define_out(values, "winograd")


def main(values: flags.FlagValues) -> None:
    results = {"rounds": values.rounds, **host.environment(), "cases": {}}
    for width, batch in itertools.product(map(int, values.widths), map(int, values.batches)):
        for size, channels, filters in shapes(width):
            name = f"w{width}, {size}x{size}x{channels} to {filters}, batch {batch}"
            results["cases"][name] = measure(batch, size, channels, filters, values.rounds)
            print(name, results["cases"][name], flush=True)
            write_json(peers.out_file(values, "winograd"), results)


if __name__ == "__main__":
    launch_script(define, main)

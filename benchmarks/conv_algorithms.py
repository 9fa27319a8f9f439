"""Every convolution algorithm on the shapes of lanes: what `conv.choose` was made from.

    python -m benchmarks.conv_algorithms
    python -m benchmarks.conv_algorithms --cases=pooled --out=benchmarks/results/conv_pooled_cpu.json
    python -m benchmarks.conv_algorithms --cases=export --out=benchmarks/results/conv_exports_cpu.json

Four lanes vmapped over their kernels, and one residual lane by itself, as each is computed; forward alone and with both
gradients (of the first convolution: the kernel's alone, since images need none; that of residual lanes is not trained,
so only its forward time counts), in interleaved rounds on the backend at hand. The first convolution of a residual
lane's stage is also timed together with its pooling ("pooled"), as training runs it: without the odd row and column,
and on a CPU a part of the batch at a time. In exports kernels are constants, transformed when the program is compiled,
and nothing is differentiated. Of 3x3 convolutions of 8 images also the largest error, relative to the largest value of
the convolution in float64. Writes `benchmarks/results/conv_algorithms_<backend>.json` after each case; what is there of
this machine is kept, and not measured again.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import networks, peers
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv, resnet, tracing

CASES = {  # lanes, image size, channels in, kernel size, filters, stride, padding
    "resnet stem, 32x32x3": (1, 32, 3, 2, 24, 1, "VALID"),
    "first, 28x28x1": (4, 28, 1, 9, 64, 1, "VALID"),
    "first, 32x32x3": (4, 32, 3, 9, 64, 1, "VALID"),
    "primary, 20x20x64": (4, 20, 64, 9, 64, 2, "VALID"),
    "primary, 24x24x64": (4, 24, 64, 9, 64, 2, "VALID"),
    "primary, 24x24x32": (4, 24, 32, 9, 32, 2, "VALID"),
    "depth, 20x20x64": (4, 20, 64, 3, 64, 1, "SAME"),
    "resnet w2, 31x31x24": (1, 31, 24, 3, 32, 1, "SAME"),
    "resnet w2, 15x15x32": (1, 15, 32, 3, 96, 1, "SAME"),
    "resnet w2, 7x7x96": (1, 7, 96, 3, 128, 1, "SAME"),
    "resnet w4, 15x15x64": (1, 15, 64, 3, 192, 1, "SAME"),
    "resnet w4, 7x7x192": (1, 7, 192, 3, 256, 1, "SAME"),
    "resnet w8, 15x15x128": (1, 15, 128, 3, 384, 1, "SAME"),
    "resnet w8, 7x7x384": (1, 7, 384, 3, 512, 1, "SAME"),
    "resnet w2, 3x3x128": (1, 3, 128, 3, 128, 1, "SAME"),
    "resnet w4, 3x3x256": (1, 3, 256, 3, 256, 1, "SAME"),
    "resnet w8, 3x3x512": (1, 3, 512, 3, 512, 1, "SAME"),
}
POOLED = {  # image size, channels in, filters
    "resnet w2, 31x31x24": (31, 24, 32),
    "resnet w3, 31x31x24": (31, 24, 48),
    "resnet w4, 31x31x24": (31, 24, 64),
    "resnet w8, 31x31x24": (31, 24, 128),
    "resnet w2, 15x15x32": (15, 32, 96),
    "resnet w3, 15x15x48": (15, 48, 144),
    "resnet w4, 15x15x64": (15, 64, 192),
    "resnet w8, 15x15x128": (15, 128, 384),
    "resnet w2, 7x7x96": (7, 96, 128),
    "resnet w3, 7x7x144": (7, 144, 192),
    "resnet w4, 7x7x192": (7, 192, 256),
    "resnet w8, 7x7x384": (7, 384, 512),
}
_OF_STAGES = ("native", "winograd")  # what is chosen for them
_BATCHES = (1, 8, 100)
_TURN_SECONDS = 0.05  # of each algorithm in a round, at least one call
_RESNET_BATCHES = (*_BATCHES, networks.RESNET_BATCH)
_EXPORT_BATCHES = (1, 8, 32)  # for which exports have programs


def listed() -> dict[str, tuple[tuple, int, bool, bool]]:
    """By title: a case as in `CASES`, its images, and whether pooling follows, or it is in an export."""
    found = {}
    for name, case in CASES.items():
        residual = name.startswith("resnet")
        for batch in _RESNET_BATCHES if residual else _BATCHES:
            found[f"{name}, batch {batch}"] = case, batch, False, False
        for batch in _EXPORT_BATCHES if residual and case[-1] == "SAME" else ():
            found[f"export, {name}, batch {batch}"] = case, batch, False, True
    for name, (size, channels, filters) in POOLED.items():
        batch = networks.RESNET_BATCH
        case = 1, size, channels, 3, filters, 1, resnet.even((batch, size, size, channels))
        found[f"pooled, {name}, batch {batch}"] = case, batch, True, False
    return found


def compile_case(case, batch: int, algorithm: str, gradients: bool, pooled: bool, constant: bool, dtype: str):
    """The compiled function and its arguments; raises InputError where the algorithm cannot do the shape."""
    lanes, size, channels, taps, filters, stride, padding = case
    first = channels < 8
    x_key, kernel_key = jax.random.split(jax.random.key(0))
    x = jax.random.normal(x_key, (*(() if first else (lanes,)), batch, size, size, channels), dtype)
    kernels = jax.random.normal(kernel_key, (lanes, taps, taps, channels, filters), dtype)

    def forward(x, kernels):
        if pooled:
            return resnet.convolve_and_pool(algorithm, x[0], kernels[0])
        one = functools.partial(conv.conv2d, stride=stride, padding=padding, algorithm=algorithm)
        return jax.vmap(one, in_axes=(None if first else 0, 0))(x, kernels)

    def loss(x, kernels):
        return jnp.sum(jnp.square(forward(x, kernels).astype(jnp.float32)))

    options = conv.compiler_options(jax.default_backend(), chains=taps != 3)  # as in training
    if constant:
        with tracing.using(tracing.Target(constant_weights=True)):
            return jax.jit(lambda x: forward(x, kernels), compiler_options=options).lower(x).compile(), (x,)
    function = jax.grad(loss, argnums=1 if first else (0, 1)) if gradients else forward
    return jax.jit(function, compiler_options=options).lower(x, kernels).compile(), (x, kernels)


def error(x: np.ndarray, kernel: np.ndarray, y: jax.Array) -> float:
    """The largest error of y, a 3x3 convolution of x padded by one, relative to the largest value in float64."""
    padded, taps = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0))), kernel.astype(np.float64)
    height, width = x.shape[1:3]
    exact = sum(padded[:, i : i + height, j : j + width] @ taps[i, j] for i in range(3) for j in range(3))
    return float(np.max(np.abs(np.asarray(y) - exact)) / np.max(np.abs(exact)))


def errors(case) -> dict[str, float]:
    """`error` of the algorithms that can be chosen for the case's convolution."""
    _, size, channels, _, filters, _, padding = case
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, size, size, channels)).astype(np.float32)
    kernel = (rng.normal(size=(3, 3, channels, filters)) / np.sqrt(9 * channels)).astype(np.float32)
    found = {}
    for name in ("native", "winograd", "kn2row"):
        convolve = functools.partial(conv.conv2d, padding=padding, algorithm=name)
        found[name] = error(x, kernel, jax.jit(convolve)(x, kernel))
    return found


def measure(
    case, batch: int, gradients: bool, pooled: bool, constant: bool, values: flags.FlagValues
) -> dict[str, float]:
    """Median milliseconds by algorithm, of calls in a row after one that is not timed."""
    programs = {}
    for name in _OF_STAGES if pooled else conv.ALGORITHMS:
        try:
            programs[name] = compile_case(case, batch, name, gradients, pooled, constant, values.dtype)
        except InputError:
            continue
    milliseconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(values.rounds):
        for name, (program, arguments) in programs.items():
            jax.block_until_ready(program(*arguments))  # its arguments, and the code, are in the caches again
            started, calls = time.perf_counter(), 0
            while not calls or time.perf_counter() - started < _TURN_SECONDS:
                jax.block_until_ready(program(*arguments))
                calls += 1
            milliseconds[name].append(1000 * (time.perf_counter() - started) / calls)
    return {name: statistics.median(taken) for name, taken in milliseconds.items()}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "type of the arrays", flag_values=values)
    known = "; ".join(["pooled", "export", *CASES])
    flags.DEFINE_list("cases", [], f"beginnings of cases; empty for all: {known}", flag_values=values)
    peers.define_out(values, "conv_algorithms_BACKEND")


def main(values: flags.FlagValues) -> None:
    backend = jax.default_backend()
    results = peers.results_so_far(values, {"rounds": values.rounds, "dtype": values.dtype}, "cases")
    for title, (case, batch, pooled, constant) in listed().items():
        if values.cases and not title.startswith(tuple(values.cases)):
            continue
        lanes, size, channels, taps, filters, stride, padding = case
        shapes = (batch, size, size, channels), (taps, taps, channels, filters)
        with peers.kept(values, results, "cases", title) as missing:
            if missing:
                residual = "resnet" in title and backend != "cpu"  # as in `resnet.Trunk`
                chosen = "native" if residual else conv.choose(backend, *shapes, stride, padding, constant)
                results["cases"][title] = {
                    "lanes": lanes,
                    "chosen": chosen,
                    "forward_milliseconds": measure(case, batch, False, pooled, constant, values),
                    "with_gradients_milliseconds": {}
                    if constant
                    else measure(case, batch, True, pooled, constant, values),
                }
                if taps == 3 and padding == "SAME" and batch == 8 and not constant:
                    results["cases"][title]["errors"] = errors(case)
                print(f"{title}: {results['cases'][title]}", flush=True)


if __name__ == "__main__":
    launch_script(define, main)

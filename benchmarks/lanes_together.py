"""Thin lanes of one group computed together, against one after the other as they are on a CPU.

    python -m benchmarks.lanes_together

`conv_spectral.lanes_in_turn` computes the convolutions of lanes one by one, so that a lane's arrays fit the cache. Here
several lanes, or all, are computed as one batched program: in training steps of the thinnest published lanes, and in
the 3x3 convolutions of eight residual lanes of width 2 with their gradients, which are then a grouped convolution
(`native`) or a batched product of copied windows (`im2col`). In interleaved rounds on the backend at hand. Writes
`benchmarks/results/lanes_together.json` after each case; what is there of this machine is kept, and not measured again.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.custom_batching import custom_vmap

from benchmarks import peers
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv, conv_spectral
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

STEPS = {"mlcn1:w2*32": (1, 2, 4, 8, 32), "mlcn2:w2*32": (1, 2, 4, 8, 32)}  # lanes, and how many of them at once
CONVOLUTIONS = {"31x31x24 to 32": (31, 24, 32), "15x15x32 to 96": (15, 32, 96), "7x7x96 to 128": (7, 96, 128)}
_LANES, _WAYS = 8, {"native": (1, 2, 8), "im2col": (8,)}  # of the convolutions: lanes at once, by algorithm
_BATCH = 100


def some_at_once(count: int) -> Callable[[Callable], Callable]:
    """`conv_spectral.lanes_in_turn` with `count` lanes at once."""

    def of(one_lane: Callable) -> Callable:
        function = custom_vmap(one_lane)

        @function.def_vmap
        def _(size: int, batched: Sequence, *args: Any) -> tuple[Any, Any]:
            axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
            parts = [
                jax.vmap(one_lane, axes)(
                    *jax.tree.map(lambda a, b, i=i: a[i : i + count] if b else a, args, tuple(batched))
                )
                for i in range(0, size, count)
            ]
            out = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
            return out, jax.tree.map(lambda _: True, out)

        return function

    return of


def compiled(count: int, make: Callable[[], Any]) -> Any:
    """What `make` compiles with `count` lanes at once."""
    jax.clear_caches()  # or what was traced with another number would be used
    with mock.patch.object(conv_spectral, "lanes_in_turn", some_at_once(count)):
        return make()


def steps(lanes: str, counts: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """A training step by lanes at once, each with a state of its own."""
    spec = ModelSpec("mlcn", (32, 32, 3), 10, lanes=lanes)
    images = np.random.default_rng(0).integers(0, 256, (_BATCH, 32, 32, 3), np.uint8)
    batch = (images, np.arange(_BATCH, dtype=np.int32) % 10)
    optimizer = optimizer_of(TrainSettings(), steps_per_epoch=100)
    params = jax.device_get(init_params(spec, jax.random.key(0)))

    def one(count: int) -> Callable[[], Any]:
        state = TrainState.create(jax.device_put(params), optimizer)
        step = make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0)
        program, _ = compiled(count, lambda: compile_step(spec, step, state, batch))
        return peers.stepping(program, state, batch)

    return {f"{count} at once": one(count) for count in counts}


def convolutions(size: int, channels: int, filters: int) -> dict[str, Callable[[], Any]]:
    """A convolution of all lanes with both gradients, by algorithm and lanes at once."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (_LANES, _BATCH, size, size, channels))
    kernels = jax.random.normal(keys[1], (_LANES, 3, 3, channels, filters))

    def one(algorithm: str, count: int) -> Callable[[], Any]:
        convolve = jax.vmap(functools.partial(conv.conv2d, padding="SAME", algorithm=algorithm))
        function = jax.grad(lambda x, kernels: jnp.sum(jnp.square(convolve(x, kernels))), argnums=(0, 1))
        options = conv.compiler_options(jax.default_backend(), chains=False)
        lower = jax.jit(function, compiler_options=options).lower
        return functools.partial(compiled(count, lambda: lower(x, kernels).compile()), x, kernels)

    return {f"{name}, {count} at once": one(name, count) for name, counts in _WAYS.items() for count in counts}


def measure(make: Callable[[], dict[str, Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each program that `make` compiles."""
    return {name: 1000 * statistics.median(seconds) for name, seconds in peers.in_turns(make(), rounds).items()}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_list("cases", [], "beginnings of cases; empty for all", flag_values=values)
    peers.define_out(values, "lanes_together")


def main(values: flags.FlagValues) -> None:
    results = peers.results_so_far(values, {"rounds": values.rounds, "batch": _BATCH}, "cases")
    cases = {lanes: functools.partial(steps, lanes, counts) for lanes, counts in STEPS.items()}
    cases |= {
        f"{_LANES} convolutions, {name}": functools.partial(convolutions, *shape)
        for name, shape in CONVOLUTIONS.items()
    }
    for title, make in cases.items():
        if values.cases and not title.startswith(tuple(values.cases)):
            continue
        with peers.kept(values, results, "cases", title) as missing:
            if missing:
                results["cases"][title] = measure(make, values.rounds)
                print(title, results["cases"][title], flush=True)


if __name__ == "__main__":
    launch_script(define, main)

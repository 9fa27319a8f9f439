"""Normalisation and activation of residual lanes as one function, against the two after each other.

    python -m benchmarks.normalisation

Groups of images are normalised, a bias is added, and gelu follows: value and gradients, of one lane's maps in a
training step of 500 images, in interleaved rounds on the backend at hand. `jax` has JAX's own gradients of both;
`lanes` is what lanes do, the normalisation's gradient written out and JAX's of gelu; `fused` has one gradient for both,
which holds only the normalised values and computes gelu's derivative again from these. Writes
`benchmarks/results/normalisation.json` after each case; what is there of this machine is kept, and not measured again.

Source: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3, for the gradient.
"""

import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from absl import flags
from jax import Array, lax

from benchmarks import networks, peers
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import conv, resnet
from mlcn_jax.nn.lanes import LaneSettings

_GROUP = LaneSettings.norm_group  # images
_SIZES = (15, 7, 3)  # of the maps of each stage, on 32x32 images


def plain(values: Array, bias: Array) -> Array:
    """Normalisation, bias and gelu of values [groups, n, c], with bias [1, 1, c] and JAX's own gradients."""
    mean, variance = resnet._moments(values)
    return jax.nn.gelu((values - mean) * lax.rsqrt(variance + resnet._EPSILON) + bias)


def apart(values: Array, bias: Array) -> Array:
    """The same as lanes do it."""
    return jax.nn.gelu(resnet._standardised(values, bias))


@jax.custom_vjp
def fused(values: Array, bias: Array) -> Array:
    """The same with one gradient."""
    return _fused_fwd(values, bias)[0]


def _fused_fwd(values, bias):
    mean, variance = resnet._moments(values)
    scale = lax.rsqrt(variance + resnet._EPSILON)
    normal = (values - mean) * scale
    return jax.nn.gelu(normal + bias), (normal, scale, bias)


def _fused_bwd(saved, g):
    normal, scale, bias = saved
    g = jax.vjp(jax.nn.gelu, normal + bias)[1](g)[0]
    total, along = jnp.sum(g, axis=1, keepdims=True), jnp.mean(g * normal, axis=1, keepdims=True)
    return scale * (g - total / g.shape[1] - normal * along), jnp.sum(total, axis=0, keepdims=True)


fused.defvjp(_fused_fwd, _fused_bwd)
FORMS = {"jax": plain, "lanes": apart, "fused": fused}


def program(form: Callable, values: Array, bias: Array, weight: Array) -> Callable:
    """The compiled value and gradients of a sum of the results, each with a weight."""

    def total(values: Array, bias: Array, weight: Array) -> Array:
        return jnp.sum(form(values, bias) * weight)

    jit = partial(jax.jit, compiler_options=conv.compiler_options(jax.default_backend(), chains=False))
    return jit(jax.value_and_grad(total, argnums=(0, 1))).lower(values, bias, weight).compile()


def measure(size: int, channels: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of each form."""
    groups = networks.RESNET_BATCH // _GROUP
    keys = jax.random.split(jax.random.key(0), 3)
    values, weight = (jax.random.normal(key, (groups, _GROUP * size**2, channels)) for key in keys[:2])
    bias = jax.random.normal(keys[2], (1, 1, channels))
    given = values, bias, weight
    programs = {name: partial(program(form, *given), *given) for name, form in FORMS.items()}
    return {name: 1000 * statistics.median(some) for name, some in peers.in_turns(programs, rounds).items()}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_list("widths", ["2", "4", "8"], "widths of lanes", flag_values=values)
    peers.define_out(values, "normalisation")


def main(values: flags.FlagValues) -> None:
    results = peers.results_so_far(values, {"rounds": values.rounds, "batch": networks.RESNET_BATCH}, "cases")
    for width in map(int, values.widths):
        for size, filters in zip(_SIZES, resnet.STAGES, strict=True):
            title = f"w{width}, {size}x{size}x{width * filters}"
            with peers.kept(values, results, "cases", title) as missing:
                if missing:
                    results["cases"][title] = measure(size, width * filters, values.rounds)
                    print(title, results["cases"][title], flush=True)


if __name__ == "__main__":
    launch_script(define, main)

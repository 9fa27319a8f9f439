"""Dynamic routing in three forms: milliseconds and memory of value and gradients.

    python -m benchmarks.routing

Compares `capsules.dynamic_routing` with the procedure as printed (`plain`) and with the form that never builds
`u_hat`, in interleaved rounds, for CapsNet's class capsules and for a lane routed per class. Writes
`benchmarks/results/routing.json`.
"""

import functools
import json
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import peers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import capsules, conv

ROUNDS = 15

# (batch, primary capsules, classes, primary dimensions, class dimensions)
CASES = {
    "CapsNet 28x28x1": (100, 1152, 10, 8, 16),
    "CapsNet 32x32x3": (100, 2048, 10, 8, 16),
    "mlcn1 w4 lane, 32x32x3, per_class": (100, 512, 10, 8, 1),
}


def plain(u, weights, num_routing_iters):
    """Sabour et al. 2017, procedure 1, with every u_hat kept."""
    u_hat = jnp.einsum("bid,ijdm->bijm", u, weights)
    b = jnp.zeros(u_hat.shape[:3])
    for i in range(num_routing_iters):
        v = capsules.squash(jnp.einsum("bij,bijm->bjm", jax.nn.softmax(b, axis=-1), u_hat))
        if i + 1 < num_routing_iters:
            b = b + jnp.einsum("bjm,bijm->bij", v, u_hat)
    return v


def without_u_hat(u, weights, num_routing_iters):
    """The first iteration as one product, then `s_j = sum_i (c_ij u_i) W_ij` and agreement `u_i . (W_ij v_j)`."""
    num_in, num_out, in_dim, out_dim = weights.shape
    batch = u.shape[0]
    by_class = weights.transpose(1, 0, 2, 3).reshape(num_out, num_in * in_dim, out_dim)
    s = jnp.einsum("bx,jxm->jbm", u.reshape(batch, -1), by_class) / num_out
    b = jnp.zeros((num_out, batch, num_in))
    for _ in range(num_routing_iters - 1):
        back = jnp.einsum("jbm,jxm->jbx", capsules.squash(s), by_class)
        b = b + jnp.sum(back.reshape(num_out, batch, num_in, in_dim) * u[None], axis=-1)
        weighted = jax.nn.softmax(b, axis=0)[..., None] * u[None]
        s = jnp.einsum("jbx,jxm->jbm", weighted.reshape(num_out, batch, -1), by_class)
    return capsules.squash(s).transpose(1, 0, 2)


FORMS = {"ours": capsules.dynamic_routing, "plain": plain, "without_u_hat": without_u_hat}


def compile_form(form, u, weights):
    def total(u, weights):
        return jnp.sum(jnp.square(form(u, weights, 3)))

    options = conv.compiler_options(jax.default_backend(), chains=True)
    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), compiler_options=options)
    return step.lower(u, weights).compile()


def measure(case):
    batch, num_in, num_out, in_dim, out_dim = case
    u_key, weights_key = jax.random.split(jax.random.key(0))
    u = capsules.squash(jax.random.normal(u_key, (batch, num_in, in_dim)))
    weights = 0.1 * jax.random.normal(weights_key, (num_in, num_out, in_dim, out_dim))
    steps = {name: compile_form(form, u, weights) for name, form in FORMS.items()}
    for form in FORMS.values():
        assert jnp.allclose(form(u, weights, 3), plain(u, weights, 3), atol=1e-5)
    seconds = peers.in_turns({name: functools.partial(step, u, weights) for name, step in steps.items()}, ROUNDS)
    result = {}
    for name, step in steps.items():
        result[name] = {
            "median_milliseconds": 1000 * statistics.median(seconds[name]),
            "min_milliseconds": 1000 * min(seconds[name]),
            "temporary_mebibytes": step.memory_analysis().temp_size_in_bytes / 2**20,
        }
    for name in ("plain", "without_u_hat"):
        pairs = zip(seconds[name], seconds["ours"], strict=True)
        result[f"{name}_over_ours_median"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return result


def define(values: flags.FlagValues) -> None:
    """There are none."""


def main(values: flags.FlagValues) -> None:
    results = {"rounds": ROUNDS, "what": "value and gradients of 3 iterations", **peers.environment()}
    results["cases"] = {name: measure(case) for name, case in CASES.items()}
    write_json(peers.RESULTS / "routing.json", results)
    print(json.dumps(results["cases"], indent=2))


if __name__ == "__main__":
    launch_script(define, main)

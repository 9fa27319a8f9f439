import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.nn import schedule, tracing


def gradients_of_parts(join):
    """The gradients of a function of four arrays, which are stacked; that of the stack takes a few products."""

    def loss(*parts):
        return jnp.sum(join(jnp.stack(parts)) ** 4)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))


def test_a_gradient_is_computed_once_for_all_that_read_it(rng):
    parts = [jnp.array(rng.normal(size=(8, 128)), jnp.float32) for _ in range(4)]
    plain, once = gradients_of_parts(lambda x: x), gradients_of_parts(schedule.gradient_once)
    for expected, actual in zip(plain(*parts), once(*parts), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    products = [f.lower(*parts).compile().as_text().count(" multiply(") for f in (plain, once)]
    assert products[0] == 4 * products[1]


def test_a_gradient_is_held_on_a_cpu_only():
    def primitives(platform):
        with tracing.using(tracing.Target(platform=platform)):
            traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(schedule.gradient_once(x))))(jnp.ones(3))
        return {str(equation.primitive) for equation in traced.eqns}

    assert "while" in primitives("cpu")
    assert "while" not in primitives("gpu")

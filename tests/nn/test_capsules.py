import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlcn_jax.nn import capsules, tracing


def slow_squash(s):
    """Sabour et al. 2017, eq. 1, as printed, in float64."""
    s = np.asarray(s, np.float64)
    squared = np.sum(s**2, axis=-1, keepdims=True)
    return squared / (1 + squared) * s / np.sqrt(squared)


def slow_routing(u, weights, num_iters, prior=None):
    """Sabour et al. 2017, procedure 1, one image and one pair of capsules at a time, in float64."""
    u, weights = np.asarray(u, np.float64), np.asarray(weights, np.float64)
    num_in, num_out, _, out_dim = weights.shape
    result = []
    for image in u:
        b = np.zeros((num_in, num_out)) if prior is None else np.array(prior, np.float64)
        for _ in range(num_iters):
            c = np.exp(b - b.max(axis=1, keepdims=True))
            c /= c.sum(axis=1, keepdims=True)
            s = np.zeros((num_out, out_dim))
            for i in range(num_in):
                for j in range(num_out):
                    s[j] += c[i, j] * (image[i] @ weights[i, j])
            v = slow_squash(s)
            for i in range(num_in):
                for j in range(num_out):
                    b[i, j] += (image[i] @ weights[i, j]) @ v[j]
        result.append(v)
    return np.stack(result)


def test_squash_is_the_published_formula(rng):
    s = rng.normal(size=(5, 3, 8)).astype(np.float32) * 3
    np.testing.assert_allclose(capsules.squash(s), slow_squash(s), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1.0, 1e15])
def test_squash_and_its_gradient_are_finite(scale):
    s = scale * jnp.ones((2, 4))
    value, gradient = jax.value_and_grad(lambda s: jnp.sum(capsules.squash(s)))(s)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert np.all(capsules.lengths(capsules.squash(s)) <= 1.0)


def test_lengths_have_gradient_zero_at_zero():
    v = jnp.zeros((2, 3, 4)).at[0, 0].set(jnp.array([3.0, 0.0, 4.0, 0.0]))
    gradient = jax.grad(lambda v: jnp.sum(capsules.lengths(v)))(v)
    np.testing.assert_allclose(capsules.lengths(v)[0, 0], 5.0)
    np.testing.assert_allclose(gradient[0, 0], [0.6, 0.0, 0.8, 0.0], rtol=1e-6)
    assert not np.any(gradient[1])


def test_onnx_gets_the_same_values_without_what_gradients_need(rng):
    s = rng.normal(size=(5, 3, 8)).astype(np.float32)
    s[0] = 0
    wanted = capsules.squash(s), capsules.lengths(s)
    with tracing.using(tracing.Target(platform="onnx")):
        traced = jax.make_jaxpr(lambda s: (capsules.squash(s), capsules.lengths(s)))(s)
        found = capsules.squash(s), capsules.lengths(s)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert not {"gt", "select_n"} & {str(equation.primitive) for equation in traced.eqns}


@pytest.mark.parametrize("out_dim", [1, 4, 16], ids=lambda d: f"out_dim{d}")
@pytest.mark.parametrize("num_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("with_prior", [False, True])
def test_routing_equals_the_slow_one(rng, out_dim, num_iters, with_prior):
    u = rng.normal(size=(3, 7, 4)).astype(np.float32)
    weights = rng.normal(size=(7, 5, 4, out_dim)).astype(np.float32)
    prior = rng.normal(size=(7, 5)).astype(np.float32) if with_prior else None
    v = capsules.dynamic_routing(jnp.array(u), jnp.array(weights), num_iters, prior)
    np.testing.assert_allclose(v, slow_routing(u, weights, num_iters, prior), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("num_in", "out_dim"), [(6, 2), (16, 6), (7, 1)])
def test_routing_gradients_equal_those_of_the_plain_form(rng, num_in, out_dim, platform):
    """The identities that save memory change no gradient: compare with routing that keeps every u_hat."""
    u = jnp.array(rng.normal(size=(2, num_in, 4)), jnp.float32)
    weights = jnp.array(rng.normal(size=(num_in, 3, 4, out_dim)), jnp.float32)
    prior = jnp.array(rng.normal(size=(num_in, 3)), jnp.float32)

    def plain(u, weights, prior):
        u_hat = jnp.einsum("bid,ijdm->bijm", u, weights)
        b = jnp.broadcast_to(prior, (u.shape[0], *prior.shape))
        for _ in range(3):
            v = capsules.squash(jnp.einsum("bij,bijm->bjm", jax.nn.softmax(b, axis=-1), u_hat))
            b = b + jnp.einsum("bijm,bjm->bij", u_hat, v)
        return v

    def total(routing):
        return lambda *args: jnp.sum(jnp.sin(3 * routing(*args)))

    def gradients(routing):
        return jax.jit(jax.grad(total(routing), argnums=(0, 1, 2)))(u, weights, prior)

    with tracing.using(tracing.Target(platform=platform)):
        ours, theirs = gradients(lambda u, w, p: capsules.dynamic_routing(u, w, 3, p)), gradients(plain)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_routing_to_a_single_capsule_ignores_iterations_and_prior(rng):
    """Why `published` lane routing is one matrix product: coupling over one output capsule is always 1."""
    u = jnp.array(rng.normal(size=(2, 9, 8)), jnp.float32)
    weights = jnp.array(rng.normal(size=(9, 8, 10)), jnp.float32)
    prior = jnp.array(rng.normal(size=(9, 1)), jnp.float32)
    routed = capsules.dynamic_routing(u, weights[:, None], 3, prior)[:, 0]
    np.testing.assert_allclose(capsules.single_capsule(u, weights), routed, rtol=1e-5, atol=1e-7)


def test_bfloat16_keeps_norms_in_float32(rng):
    v = jnp.array(rng.normal(size=(1, 1, 4096)), jnp.bfloat16)
    exact = np.linalg.norm(np.asarray(v, np.float64))
    assert capsules.lengths(v).dtype == jnp.float32
    np.testing.assert_allclose(capsules.lengths(v)[0, 0], exact, rtol=1e-5)
    assert capsules.squash(v).dtype == jnp.bfloat16


def test_masking_keeps_one_class():
    v = jnp.arange(24.0).reshape(2, 3, 4) + 1
    masked = capsules.mask_classes(v, jnp.array([2, 0]))
    np.testing.assert_array_equal(masked[0, 2], v[0, 2])
    np.testing.assert_array_equal(masked[1, 0], v[1, 0])
    assert np.count_nonzero(masked) == 8

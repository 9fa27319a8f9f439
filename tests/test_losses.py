import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax import losses


def test_margin_loss_by_hand():
    class_lengths = jnp.array([[0.5, 0.3, 0.05], [0.95, 0.1, 0.0]])
    labels = jnp.array([0, 1])
    # image 0: (0.9 - 0.5)^2 + 0.5 (0.3 - 0.1)^2;  image 1: (0.9 - 0.1)^2 + 0.5 (0.95 - 0.1)^2
    expected = [0.16 + 0.5 * 0.04, 0.64 + 0.5 * 0.7225]
    np.testing.assert_allclose(losses.margin_loss(class_lengths, labels), expected, rtol=1e-6)


def test_margin_loss_is_zero_inside_the_margins():
    class_lengths = jnp.array([[0.92, 0.09]])
    value, gradient = jax.value_and_grad(lambda v: losses.margin_loss(v, jnp.array([0]))[0])(class_lengths)
    assert value == 0
    assert not np.any(gradient)


def test_losses_are_float32_for_bfloat16_inputs():
    half = jnp.full((2, 3), 0.5, jnp.bfloat16)
    assert losses.margin_loss(half, jnp.array([0, 1])).dtype == jnp.float32
    pixels = jnp.zeros((2, 4, 4, 1), jnp.bfloat16)
    assert losses.reconstruction_loss(pixels, pixels).dtype == jnp.float32


def test_reconstruction_weight_is_that_of_the_paper(rng):
    """0.392 times the mean over 28x28 pixels is 0.0005 times their sum (Sabour et al. 2017)."""
    a, b = rng.uniform(size=(2, 5, 28, 28, 1)).astype(np.float32)
    summed = 0.0005 * np.sum((a - b) ** 2, axis=(1, 2, 3))
    np.testing.assert_allclose(0.392 * losses.reconstruction_loss(a, b), summed, rtol=1e-5)

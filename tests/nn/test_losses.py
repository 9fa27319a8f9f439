import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlcn_jax.nn import capsules, losses


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


def test_lane_margin_loss_is_the_mean_over_lanes_that_classify_alone(rng):
    v = rng.uniform(-0.7, 0.7, (4, 3, 2)).astype(np.float32)
    labels = rng.integers(0, 3, 4)
    expected = np.zeros(4)
    for image, lane, k in np.ndindex(4, 2, 3):
        length = abs(v[image, k, lane])
        short, long = max(0, 0.9 - length) ** 2, 0.5 * max(0, length - 0.1) ** 2
        expected[image] += (short if k == labels[image] else long) / 2
    np.testing.assert_allclose(losses.lane_margin_loss(v, labels).mean(axis=0), expected, rtol=1e-5)


def test_lanes_that_agree_have_the_margin_loss_of_any_of_them(rng):
    column, labels = rng.uniform(-0.7, 0.7, (4, 3, 1)).astype(np.float32), rng.integers(0, 3, 4)
    for count in (1, 5):
        v = np.repeat(column, count, axis=2) * rng.choice([-1, 1], count).astype(np.float32)
        joint = losses.margin_loss(capsules.lengths(v) / np.sqrt(count), labels)
        np.testing.assert_allclose(losses.lane_margin_loss(v, labels).mean(axis=0), joint, rtol=1e-5)


def test_a_lane_that_says_little_is_not_pushed_to_zero_by_the_others():
    """The class is 0: a loud lane is wrong about class 1, of which the quiet one says next to nothing."""
    v, labels = jnp.array([[[0.5, 0.01], [0.8, 0.01]]]), jnp.array([0])
    push = jax.grad(lambda v: losses.lane_margin_loss(v, labels).mean(axis=0)[0])(v)
    joint = jax.grad(lambda v: losses.margin_loss(capsules.lengths(v), labels)[0])(v)
    assert joint[0, 1, 1] > 0
    assert push[0, 1, 1] == 0
    alone = jax.grad(lambda v: losses.lane_margin_loss(v.at[:, :, 0].set(0.3), labels).mean(axis=0)[0])(v)
    np.testing.assert_array_equal(alone[..., 1], push[..., 1])


def test_losses_are_float32_for_bfloat16_inputs():
    half = jnp.full((2, 3), 0.5, jnp.bfloat16)
    assert losses.margin_loss(half, jnp.array([0, 1])).dtype == jnp.float32
    assert losses.lane_margin_loss(half[..., None], jnp.array([0, 1])).dtype == jnp.float32
    pixels = jnp.zeros((2, 4, 4, 1), jnp.bfloat16)
    assert losses.reconstruction_loss(pixels, pixels).dtype == jnp.float32


def test_reconstruction_weight_is_that_of_the_paper(rng):
    """0.392 times the mean over 28x28 pixels is 0.0005 times their sum (Sabour et al. 2017)."""
    a, b = rng.uniform(size=(2, 5, 28, 28, 1)).astype(np.float32)
    summed = 0.0005 * np.sum((a - b) ** 2, axis=(1, 2, 3))
    np.testing.assert_allclose(0.392 * losses.reconstruction_loss(a, b), summed, rtol=1e-5)


def test_margin_loss_of_probabilities_is_the_expected_loss():
    lengths = jnp.array([[0.2, 0.7, 0.5]])
    p = jnp.array([[0.1, 0.6, 0.3]])
    expected = sum(p[0, k] * losses.margin_loss(lengths, jnp.array([k])) for k in range(3))
    np.testing.assert_allclose(losses.margin_loss(lengths, p), expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_divergence_is_zero_and_flat_where_student_and_teacher_agree(temperature):
    soft = jnp.array([[0.1, 0.6, 0.3]])
    value, gradient = jax.value_and_grad(lambda x: losses.soft_divergence(x, soft, temperature).sum())(jnp.log(soft))
    np.testing.assert_allclose(value, 0, atol=1e-5)
    np.testing.assert_allclose(gradient, 0, atol=1e-5)
    assert losses.soft_divergence(jnp.log(soft[:, ::-1]), soft, temperature) > 0.05


def test_soft_divergence_at_temperature_one_is_the_cross_entropy_less_the_entropy():
    soft, log_p = jnp.array([[1.0, 0.0, 0.0]]), jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    np.testing.assert_allclose(losses.soft_divergence(log_p, soft, 1.0), np.log(2), rtol=1e-5)

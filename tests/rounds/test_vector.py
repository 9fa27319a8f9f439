"""Changes as bytes: what goes in comes out, and what 8 bits leave out is not lost."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcn_jax.rounds.vector import BLOCK, compress, decode, encode, from_vector, num_bytes, to_vector


def test_a_tree_comes_back_with_its_shapes_and_types(rng):
    tree = {"a": [rng.normal(size=(2, 3)).astype(np.float32), np.array([True, False])], "b": np.float32(4)}
    back = from_vector(to_vector(tree), tree)
    assert back["a"][1].dtype == bool
    np.testing.assert_array_equal(back["a"][0], tree["a"][0])
    np.testing.assert_array_equal(back["a"][1], tree["a"][1])
    assert back["b"].shape == ()


@settings(deadline=None)
@given(st.integers(1, 3 * BLOCK), st.floats(1e-30, 1e30), st.integers(0, 2**31))
def test_8_bits_are_off_by_at_most_half_a_step_of_the_largest_in_the_block(size, scale, seed):
    values = (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)
    content = encode(values, 8)
    assert len(content) == num_bytes(size, 8)
    found = decode(content, size, 8)
    for start in range(0, size, BLOCK):
        block = values[start : start + BLOCK]
        error = np.abs(found[start : start + BLOCK].astype(np.float64) - block)
        assert error.max() <= np.abs(block).max() / 127 * 0.501 + 1e-40


def test_values_too_small_for_an_exact_scale_keep_their_signs():
    values = np.array([190, -190, 3], np.float32) * np.float32(2.0**-149)
    found = decode(encode(values, 8), 3, 8)
    np.testing.assert_array_equal(np.sign(found), [1, -1, 1])
    assert np.abs(found).max() <= np.abs(values).max()


@pytest.mark.parametrize("bits", [8, 32])
def test_a_sum_that_is_too_large_is_told(bits):
    huge = np.full(300, 3e38, np.float32)
    with pytest.raises(ValueError, match="values that are not finite"):
        compress(huge, huge, bits)


def test_32_bits_are_exact(rng):
    values = rng.normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(decode(encode(values, 32), 1000, 32), values)


def test_zeros_stay_zeros():
    np.testing.assert_array_equal(decode(encode(np.zeros(300, np.float32), 8), 300, 8), np.zeros(300))


def test_what_is_left_out_is_sent_later(rng):
    """The sums of what was to be sent and of what came differ by the residual alone."""
    sent, came, residual = np.zeros(1000), np.zeros(1000), np.zeros(1000, np.float32)
    for _ in range(50):
        values = rng.normal(size=1000).astype(np.float32) * np.logspace(-4, 0, 1000, dtype=np.float32)
        content, residual = compress(values, residual, 8)
        sent, came = sent + values, came + decode(content, 1000, 8)
    np.testing.assert_allclose(came + residual, sent, atol=1e-5)
    plain = np.abs(residual).max()
    assert plain < 0.05


@pytest.mark.parametrize(
    ("content", "bits", "message"),
    [
        (b"1234", 32, "4 bytes, where 2 values in 32 bits take 8"),
        (np.array([1, np.nan], "<f4").tobytes(), 32, "values that are not finite"),
        (np.array([np.inf], "<f4").tobytes() + b"\1\2", 8, "values that are not finite"),
        (b"12345678", 8, "8 bytes, where 2 values in 8 bits take 6"),
    ],
)
def test_damaged_bytes_are_refused(content, bits, message):
    with pytest.raises(ValueError, match=message):
        decode(content, 2, bits)


def test_vectors_take_jax_arrays():
    np.testing.assert_array_equal(to_vector({"x": jnp.arange(3.0)}), [0, 1, 2])

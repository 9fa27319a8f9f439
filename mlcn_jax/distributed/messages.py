"""One message instead of several: columns, or their gradients, and some numbers beside them, as 32-bit words.

Words are moved and added to zeros, never computed with, so that every value arrives bit by bit on any backend. Columns
may be sent in bfloat16, two to a word; the numbers are always float32.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

_WORD_BYTES = 4


def num_words(shape: Sequence[int], dtype: str, num_numbers: int) -> int:
    """Words of a message with an array of this shape, sent in `dtype`, and so many numbers."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // _WORD_BYTES) + num_numbers


def struct(shape: Sequence[int], dtype: str, num_numbers: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a message."""
    return jax.ShapeDtypeStruct((1, num_words(shape, dtype, num_numbers)), jnp.uint32)


def pack(values: Array, numbers: Float[Array, " numbers"], dtype: str) -> UInt32[Array, "1 words"]:
    """A message with an array, sent in `dtype` (float32 or bfloat16), and some numbers."""
    flat = values.ravel().astype(dtype)
    per_word = _WORD_BYTES // flat.dtype.itemsize
    if per_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    words = [lax.bitcast_convert_type(part, jnp.uint32) for part in (flat, numbers)]
    return jnp.concatenate(words)[None]


def unpack(message: UInt32[Array, "*one words"], shape: Sequence[int], dtype: str) -> tuple[Array, Array]:
    """The array of this shape, in the `dtype` in which it was sent, and the numbers of a message."""
    words = message.ravel()
    count = num_words(shape, dtype, 0)
    values = lax.bitcast_convert_type(words[:count], jnp.dtype(dtype)).ravel()
    return values[: math.prod(shape)].reshape(shape), lax.bitcast_convert_type(words[count:], jnp.float32)

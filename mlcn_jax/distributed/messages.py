"""One message instead of several: columns, or their gradients, along with some float32 numbers, as 32-bit words.

Words are moved, and added to zeros, but never computed with: every value arrives bit-exact on any backend.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from mlcn_jax.nn.words import from_words, num_words, to_words

_NUMBERS = "float32"


def struct(shape: Sequence[int], dtype: str, num_numbers: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a message with an array of this shape, sent in `dtype`, and `num_numbers` numbers."""
    return jax.ShapeDtypeStruct((1, num_words(math.prod(shape), dtype) + num_numbers), jnp.uint32)


def pack(values: Array, numbers: Float[Array, " numbers"], dtype: str) -> UInt32[Array, "1 words"]:
    """A message with an array, sent in `dtype`, and some numbers."""
    return jnp.concatenate([to_words(values, dtype), to_words(numbers, _NUMBERS)])[None]


def unpack(message: UInt32[Array, "*one words"], shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    """The array of this shape, in the `dtype` in which it was sent, and the numbers of a message."""
    words = message.ravel()
    count = num_words(math.prod(shape), dtype)
    return from_words(words[:count], shape, dtype), from_words(words[count:], (words.size - count,), _NUMBERS)

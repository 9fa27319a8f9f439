"""Values sent between devices as 32-bit words, in bfloat16 two to a word, and collectives that send them this way.

XLA converts bfloat16 to float32 around a collective on a CPU, so nothing is saved there; it does not convert words.
Sums are computed in float32, from values that are rounded once before and once after.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

WORD_BYTES = 4


def num_words(size: int, dtype: str) -> int:
    """The number of words that `size` values take in `dtype`."""
    return -(-size * jnp.dtype(dtype).itemsize // WORD_BYTES)


def to_words(values: Array, dtype: str) -> UInt32[Array, " words"]:
    """All values of an array, in `dtype` (float32 or bfloat16)."""
    flat = values.ravel().astype(dtype)
    per_word = WORD_BYTES // flat.dtype.itemsize
    if per_word > 1:
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, jnp.uint32)


def from_words(words: UInt32[Array, " words"], shape: tuple[int, ...], dtype: str) -> Array:
    """The array of this shape that `to_words` was called with, in `dtype`."""
    flat = lax.bitcast_convert_type(words, jnp.dtype(dtype)).ravel()
    return flat[: math.prod(shape)].reshape(shape)


def all_gather(x: Array, axis_name: str, dtype: str, *, axis: int, tiled: bool = False) -> Array:
    """`lax.all_gather`; if a `dtype` is given, values are sent in it, and so are the gradients on their way back."""
    if not dtype:
        return lax.all_gather(x, axis_name, axis=axis, tiled=tiled)

    @jax.custom_vjp
    def gather(x):
        words = lax.all_gather(to_words(x, dtype), axis_name)
        return jax.vmap(partial(from_words, shape=x.shape, dtype=dtype))(words).astype(x.dtype)

    def backward(_, gradients):
        return (_sum_of_rows(gradients, axis_name, dtype),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    parts = gather(x)
    return jnp.concatenate(list(parts), axis=axis) if tiled else jnp.moveaxis(parts, 0, axis)


def psum(x: Array, axis_names: tuple[str, ...], dtype: str) -> Array:
    """`lax.psum` of a vector, sent in `dtype`: each device sums a part, then all parts are gathered."""
    devices = math.prod(lax.axis_size(name) for name in axis_names)
    rows = jnp.pad(x, (0, -x.size % devices)).reshape(devices, -1)
    mine = _sum_of_rows(rows, axis_names, dtype)
    words = lax.all_gather(to_words(mine, dtype), axis_names, to="invarying")
    whole = jax.vmap(partial(from_words, shape=mine.shape, dtype=dtype))(words)
    return whole.ravel()[: x.size].astype(x.dtype)


def _sum_of_rows(rows: Array, axis_names: Any, dtype: str) -> Array:
    """Row d on device d, summed over the devices."""
    words = jax.vmap(partial(to_words, dtype=dtype))(rows)
    received = lax.all_to_all(words, axis_names, split_axis=0, concat_axis=0, tiled=True)
    each = jax.vmap(partial(from_words, shape=rows.shape[1:], dtype=dtype))(received)
    return jnp.sum(each.astype(jnp.float32), axis=0).astype(rows.dtype)

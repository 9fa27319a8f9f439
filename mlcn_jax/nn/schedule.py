"""The order in which a program computes, where XLA's own takes more memory or time: something after something else, a
gradient once for all that read it, and a batch a part at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mlcn_jax.nn import tracing

_NO_RESULT = 0x7FA5A5A5  # bits of a signalling NaN, which no operation gives


def after(results: Any, array: Array) -> Array:
    """The array, from which a program can compute nothing before it has the results, a tree of arrays.

    (`lax.optimization_barrier` does not: XLA removes it before it schedules a program's operations.)
    """
    probe = sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in jax.tree.leaves(results))
    done = lax.bitcast_convert_type(probe, jnp.uint32) != _NO_RESULT  # always, which the compiler cannot know
    return jnp.where(done, array, jnp.full_like(array, jnp.nan))


@jax.custom_vjp
def gradient_once(x: Array) -> Array:
    """x, whose gradient is held in memory on a CPU, where XLA would compute it again for everything that reads it."""
    return x


def _gradient_once_bwd(_, g: Array) -> tuple[Array]:
    if tracing.platform() != "cpu":
        return (g,)

    def no_result(g):  # never, which the compiler cannot know
        return lax.bitcast_convert_type(g.reshape(-1)[0].astype(jnp.float32), jnp.uint32) == _NO_RESULT

    return (lax.while_loop(no_result, jnp.negative, g),)


gradient_once.defvjp(lambda x: (x, None), _gradient_once_bwd)


def in_parts(function: Callable[..., tuple[Any, Any]], parts: int, *arrays: Array) -> tuple[Any, Any]:
    """Calls a function on equal parts of a batch, one after another, so that what a part needs fits a cache.

    Args:
      function: of parts of the arrays; it returns results for each image, [images, ...], and values that are added up
        over the parts, each as a tree of arrays.
      parts: number of parts, which divides the batch.
      arrays: each [batch, ...].

    Returns:
      The results of all images, and the sums.
    """
    if parts == 1:
        return function(*arrays)
    split = [array.reshape(parts, -1, *array.shape[1:]) for array in arrays]

    def part(i, found):
        rows, sums = function(*(array[i] for array in split))
        filled = jax.tree.map(lambda whole, own: lax.dynamic_update_index_in_dim(whole, own, i, 0), found[0], rows)
        return filled, jax.tree.map(jnp.add, found[1], sums)

    # Made of a value of the batch: XLA would allocate constant arrays of all lanes before the first lane starts.
    zero = after(arrays[0], jnp.zeros(()))

    def zeros(like: jax.ShapeDtypeStruct, *parts: int) -> Array:
        value = zero.astype(like.dtype) + tracing.zeros(like.update(shape=(), sharding=None))
        return jnp.broadcast_to(value, (*parts, *like.shape))

    rows, sums = jax.eval_shape(function, *(array[0] for array in split))
    start = jax.tree.map(lambda like: zeros(like, parts), rows), jax.tree.map(zeros, sums)
    rows, sums = lax.fori_loop(0, parts, part, start)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows), sums

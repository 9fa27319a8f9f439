"""Capsules as pure functions: squash, dynamic routing, lengths and masking.

Symbols follow Sabour et al. 2017: `u` primary capsules, `u_hat` prediction vectors, `b` routing logits,
`c` coupling coefficients, `s` total input, `v` class capsules. Norms and softmax are computed in float32
whatever the type of the inputs.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mlcn_jax.nn import tracing

_TERMS = 8  # products that are added up at once on a CPU


def squash(s: Float[Array, "*shape dim"]) -> Float[Array, "*shape dim"]:
    """Shrinks each vector to a length in [0, 1), keeping its direction.

    `v = |s|^2 / (1 + |s|^2) * s / |s|`, written as `s * |s| / (1 + |s|^2)`, which avoids dividing by a
    length; value and gradient are exactly zero at s = 0.

    Args:
      s: vectors along the last axis.

    Returns:
      Vectors of the same shape and dtype.

    Source: Sabour et al. 2017, eq. 1.

    >>> round(float(lengths(squash(jnp.array([3.0, 4.0])))), 4)  # 25 / 26
    0.9615
    """
    s32 = s.astype(jnp.float32)
    squared = jnp.sum(jnp.square(s32), axis=-1, keepdims=True)
    return (s32 * (_sqrt(squared) / (1.0 + squared))).astype(s.dtype)


def lengths(v: Float[Array, "*shape dim"], weights: Float[np.ndarray, " dim"] | None = None) -> Float[Array, "*shape"]:
    """Euclidean length of each capsule in float32, with gradient zero (not NaN) at v = 0.

    For class capsules these are the class probabilities (Sabour et al. 2017, section 3). With `weights` w, the length
    is `sqrt(sum_d w_d v_d^2)`.
    """
    squares = jnp.square(v.astype(jnp.float32))
    if weights is not None:
        squares *= jnp.asarray(weights, jnp.float32).reshape((1,) * (v.ndim - 1) + (-1,))
    return _sqrt(jnp.sum(squares, axis=-1))


def _sqrt(x: Array) -> Array:
    """Square root whose gradient at 0 is 0; the inner `where` keeps inf out of the backward pass."""
    if tracing.platform() == "onnx":  # nothing is trained there, and an image's time is that of many small operations
        return jnp.sqrt(x)
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def mask_classes(
    v: Float[Array, "batch classes dim"], classes: Int[Array, " batch"]
) -> Float[Array, "batch classes dim"]:
    """Zeroes every capsule except that of the given class (Sabour et al. 2017, section 4.1)."""
    keep = jax.nn.one_hot(classes, v.shape[1], dtype=v.dtype)
    return v * keep[:, :, None]


def dynamic_routing(
    u: Float[Array, "batch in_capsules in_dim"],
    weights: Float[Array, "in_capsules out_capsules in_dim out_dim"],
    num_routing_iters: int,
    prior_bias: Float[Array, "in_capsules out_capsules"] | None = None,
) -> Float[Array, "batch out_capsules out_dim"]:
    """Routes primary capsules to output capsules by agreement.

    Each iteration computes `c = softmax_j(b)`, `s_j = sum_i c_ij u_hat_ji`, `v_j = squash(s_j)` and
    `b_ij += u_hat_ji . v_j`, with `u_hat_ji = u_i W_ij`. Gradients flow through every iteration.

    The first coupling is the same for the entire batch, so the first `s` is one matrix product. `u_hat` is computed
    once, in the layout of a batched product over input capsules, so that nothing is transposed; doing
    without it (`u_hat_ji . v_j = u_i . (W_ij v_j)`) was slower and took more memory (`benchmarks/routing.py`).

    Args:
      u: primary capsules.
      weights: one transformation matrix for each pair of input and output capsule.
      num_routing_iters: number of routing iterations, at least 1; 3 in the paper.
      prior_bias: initial value of `b`, shared by the batch; None means zeros.

    Returns:
      Class capsules `v`, in the dtype of `u`.

    Source: Sabour et al. 2017, eq. 2, 3 and procedure 1.
    """
    batch, num_in, in_dim = u.shape
    _, num_out, _, out_dim = weights.shape

    def flat(w):
        return w.transpose(0, 2, 1, 3).reshape(num_in, in_dim, num_out * out_dim)

    b = jnp.zeros((num_in, num_out)) if prior_bias is None else prior_bias.astype(jnp.float32)
    coupled = flat(weights * jax.nn.softmax(b, axis=-1)[:, :, None, None].astype(weights.dtype))
    s = jnp.dot(u.reshape(batch, -1), coupled.reshape(num_in * in_dim, -1), preferred_element_type=jnp.float32)
    s = s.reshape(batch, num_out, out_dim)
    u_hat = jnp.einsum("bid,idx->ibx", u, flat(weights)).reshape(num_in, batch, num_out, out_dim)
    b = b[:, None]  # [in_capsules, batch, out_capsules] from now on
    for _ in range(num_routing_iters - 1):
        b = b + _agreement(u_hat, squash(s).astype(u.dtype))
        c = jax.nn.softmax(b, axis=-1).astype(u.dtype)
        s = _total(u_hat, c)
    return squash(s).astype(u.dtype)


@jax.custom_vjp
def _agreement(u_hat, v):
    """`u_hat_ji . v_j`, float32 [in_capsules, batch, classes]; u_hat [..., dim], v [batch, classes, dim]."""
    return jnp.sum(u_hat * v[None], axis=-1, dtype=jnp.float32)


@jax.custom_vjp
def _total(u_hat, c):
    """`sum_i c_ij u_hat_ji`, float32 [batch, classes, dim]; c [in_capsules, batch, classes]."""
    if tracing.platform() != "cpu":
        return jnp.sum(c[..., None] * u_hat, axis=0, dtype=jnp.float32)
    # For a sum over so many, XLA would write all products to memory first: here only sums of eight.
    terms = zip(*(jnp.split(a, math.gcd(len(a), _TERMS)) for a in (c, u_hat)), strict=True)
    return jnp.sum(sum((c[..., None] * u_hat).astype(jnp.float32) for c, u_hat in terms), axis=0)


# Each computes the gradient of the other.


def _agreement_bwd(saved, g):
    u_hat, v = saved
    g = g.astype(u_hat.dtype)
    return g[..., None] * v[None], _total(u_hat, g).astype(v.dtype)


def _total_bwd(saved, g):
    u_hat, c = saved
    g = g.astype(u_hat.dtype)
    return c[..., None] * g[None], _agreement(u_hat, g).astype(c.dtype)


_agreement.defvjp(lambda u_hat, v: (_agreement(u_hat, v), (u_hat, v)), _agreement_bwd)
_total.defvjp(lambda u_hat, c: (_total(u_hat, c), (u_hat, c)), _total_bwd)


def single_capsule(
    u: Float[Array, "batch in_capsules in_dim"], weights: Float[Array, "in_capsules in_dim out_dim"]
) -> Float[Array, "batch out_dim"]:
    """Routes primary capsules to one output capsule.

    A softmax over a single output capsule is always 1, so routing by agreement, whatever the number of
    iterations or the prior bias, comes down to `squash(sum_i u_i W_i)`: one matrix product. This is what a
    lane computes as published (do Rosario et al. 2019).

    Returns:
      The output capsule, in the dtype of `u`.
    """
    batch, num_in, in_dim = u.shape
    flat = weights.reshape(num_in * in_dim, -1)
    s = jnp.dot(u.reshape(batch, -1), flat, preferred_element_type=jnp.float32)
    return squash(s).astype(u.dtype)

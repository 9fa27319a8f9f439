"""A model's parameters as one vector, and its changes in 8 bits with error feedback."""

import hashlib
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

BLOCK = 256  # values that share a scale
_LARGEST = 127  # largest code

Vector = Float32[np.ndarray, " n"]


def to_vector(params: Any) -> Vector:
    """All values of a tree of arrays, in the order of its leaves."""
    return np.concatenate([np.asarray(leaf).astype(np.float32).ravel() for leaf in jax.tree.leaves(params)])


def digest(vector: Vector, round_: int) -> str:
    """16 hexadecimal digits that identify a round by its number and by the parameters that it begins with."""
    return hashlib.sha256(str(round_).encode() + b" " + vector.astype("<f4").tobytes()).hexdigest()[:16]


def from_vector(vector: Vector, like: Any) -> Any:
    """The tree of arrays that a vector represents, with the shapes and dtypes of `like`."""
    leaves, tree = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = np.split(vector, ends[:-1])
    return jax.tree.unflatten(
        tree, [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    )


def encode(values: Vector, bits: int) -> bytes:
    """Values as bytes: in 32 bits exactly, or in 8 bits with a scale for each `BLOCK` of them.

    Source: Dettmers et al. 2022, arXiv 2110.02861, section 2.1, for scales by block; codes here are evenly spaced.
    """
    if bits == 32:
        return values.astype("<f4").tobytes()
    blocks = _blocks(values)
    scales = np.max(np.abs(blocks), axis=1, initial=0).astype(np.float32) / np.float32(_LARGEST)
    codes = np.rint(blocks / np.where(scales > 0, scales, 1)[:, None])
    codes = np.clip(codes, -_LARGEST, _LARGEST).astype(np.int8)  # a scale of few bits may be much too small
    return scales.astype("<f4").tobytes() + codes.ravel()[: values.size].tobytes()


def num_bytes(size: int, bits: int) -> int:
    """How many bytes `encode` returns for `size` values."""
    return 4 * size if bits == 32 else 4 * -(-size // BLOCK) + size


def decode(content: bytes, size: int, bits: int) -> Vector:
    """The values encoded by `encode`, up to rounding.

    Raises:
      ValueError: there are more or fewer than `size` values, or they are not finite.
    """
    if len(content) != num_bytes(size, bits):
        raise ValueError(f"{len(content):,} bytes, where {size:,} values in {bits} bits take {num_bytes(size, bits):,}")
    if bits == 32:
        values = np.frombuffer(content, "<f4").astype(np.float32)
    else:
        codes = np.frombuffer(content, np.int8, size, len(content) - size).astype(np.float32)
        scales = np.frombuffer(content, "<f4", -(-size // BLOCK)).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite raise below
            values = (_blocks(codes) * scales[:, None]).ravel()[:size]
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite")
    return values


def compress(values: Vector, residual: Vector, bits: int) -> tuple[bytes, Vector]:
    """Encodes values plus the residual of earlier ones; returns the bytes and the quantisation error (next residual).

    Raises:
      ValueError: the sum is too large for a finite number.

    Source: Seide et al. 2014 (1-bit SGD), section 2, for error feedback.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite raises in decode
        total = values + residual
        content = encode(total, bits)
    return content, total - decode(content, total.size, bits)


def _blocks(values: np.ndarray) -> np.ndarray:
    """Rows of `BLOCK` values; the last is padded with zeros."""
    return np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)

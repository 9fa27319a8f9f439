"""What each lane encodes: the effect on reconstructions and lengths of changing class capsules lane by lane.

A lane is one dimension of every class capsule. CapsNet's 16 dimensions are treated the same way.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import padded_batches, to_pixels
from mlcn_jax.nn.model import class_lengths, encode, param_shapes, reconstruct
from mlcn_jax.nn.spec import ModelSpec

OFFSETS = tuple(i / 20 for i in range(-5, 6))  # thesis, figure 4.3
_BATCH_SIZE = 50


def column_names(spec: ModelSpec) -> list[str]:
    """The name of each entry of a class capsule: `lane 3 (mlcn1:w4d1)`, for CapsNet `dimension 3`."""
    kinds = spec.lane_specs
    if kinds:
        return [f"lane {i} ({kind})" for i, kind in enumerate(kinds)]
    dim = param_shapes(spec)["encoder"]["capsule_weights"].shape[-1]
    return [f"dimension {i}" for i in range(dim)]


@functools.partial(jax.jit, static_argnums=0)
def look(
    spec: ModelSpec, encoder: dict, images: UInt8[Array, "batch h w channels"]
) -> tuple[Float[Array, "batch classes dim"], Int[Array, " batch"]]:
    """Class capsules in float32 and the predicted class (the longest capsule)."""
    v = encode(spec, encoder, to_pixels(images)).astype(jnp.float32)
    return v, jnp.argmax(class_lengths(spec, v), axis=-1)


def alter(
    v: Float[Array, "batch classes dim"],
    classes: Int[Array, " batch"],
    added: Float[Array, " dim"],
    kept: Float[Array, " dim"],
) -> Float[Array, "batch classes dim"]:
    """Adds `added` to the capsule of each image's given class, then zeroes the columns where `kept` is 0."""
    own = jax.nn.one_hot(classes, v.shape[1], dtype=v.dtype)[:, :, None]
    return (v + own * added[None, None, :]) * kept[None, None, :]


@functools.partial(jax.jit, static_argnums=0)
def respond(
    spec: ModelSpec,
    decoder: dict,
    v: Float[Array, "batch classes dim"],
    classes: Int[Array, " batch"],
    added: Float[Array, " dim"],
    kept: Float[Array, " dim"],
) -> tuple[Float[Array, "batch classes"], Float[Array, "batch h w channels"]]:
    """Class lengths, and reconstructions from the given classes, after applying `alter`."""
    altered = alter(v, classes, added, kept)
    return class_lengths(spec, altered), reconstruct(spec, decoder, altered, classes).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def perturb(
    spec: ModelSpec,
    decoder: dict,
    v: Float[Array, "batch classes dim"],
    classes: Int[Array, " batch"],
    offsets: Float[Array, " offsets"],
) -> Float[Array, "dim offsets batch h w channels"]:
    """Reconstructions with each offset added to one lane's entry of the given class, one lane at a time.

    Source: do Rosario 2021 (thesis), figure 4.3, after Sabour et al. 2017, figure 4.
    """
    return lax.map(lambda unit: _reconstruct_along(spec, decoder, v, classes, offsets, unit), jnp.eye(v.shape[-1]))


def _reconstruct_along(spec, decoder, v, classes, offsets, unit) -> Float[Array, "offsets batch h w channels"]:
    return jax.vmap(lambda offset: respond(spec, decoder, v, classes, offset * unit, jnp.ones_like(unit))[1])(offsets)


# What is measured for each lane: means over images of absolute changes compared with the unchanged model.
MEASURES = {
    "pixel_change_per_unit": (
        "mean over images, offsets and pixels (0 to 1) of the change of the reconstruction, over the absolute offset "
        "that is added to the lane's entry of the predicted class"
    ),
    "length_change_per_unit": "mean over images and offsets of the change of the predicted class's length, likewise",
    "pixel_change_without": (
        "mean over images and pixels of the change of the reconstruction from the predicted class when the lane's "
        "column is zeroed"
    ),
    "length_change_without": (
        "mean over images and classes of the change of the class's length when the lane's column is zeroed"
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def _sums(spec: ModelSpec, decoder: dict, v: Array, classes: Array, offsets: Array, mask: Array) -> dict[str, Array]:
    """`MEASURES` of each lane, summed over the images that `mask` keeps; one lane at a time, to limit memory."""
    nothing, everything = jnp.zeros(v.shape[-1]), jnp.ones(v.shape[-1])
    lengths, pixels = respond(spec, decoder, v, classes, nothing, everything)
    own_length = jnp.take_along_axis(lengths, classes[:, None], axis=1)[:, 0]
    size = jnp.abs(offsets)[:, None]

    def total(change: Float[Array, " batch"]) -> Array:
        return jnp.sum(change * mask)

    def of_lane(unit: Float[Array, " dim"]) -> dict[str, Array]:
        def moved(offset: Array) -> tuple[Array, Array]:
            new_lengths, new_pixels = respond(spec, decoder, v, classes, offset * unit, everything)
            new_length = jnp.take_along_axis(new_lengths, classes[:, None], axis=1)[:, 0]
            return jnp.mean(jnp.abs(new_pixels - pixels), axis=(1, 2, 3)), jnp.abs(new_length - own_length)

        pixel_change, length_change = jax.vmap(moved)(offsets)
        without_lengths, without_pixels = respond(spec, decoder, v, classes, nothing, everything - unit)
        return {
            "pixel_change_per_unit": total(jnp.mean(pixel_change / size, axis=0)),
            "length_change_per_unit": total(jnp.mean(length_change / size, axis=0)),
            "pixel_change_without": total(jnp.mean(jnp.abs(without_pixels - pixels), axis=(1, 2, 3))),
            "length_change_without": total(jnp.mean(jnp.abs(without_lengths - lengths), axis=1)),
        }

    return lax.map(of_lane, jnp.eye(v.shape[-1]))


def rank(
    spec: ModelSpec, params: dict, images: UInt8[np.ndarray, "n h w channels"], offsets: Sequence[float] = OFFSETS
) -> list[dict[str, Any]]:
    """All lanes with their `MEASURES`, sorted by how much they change the reconstruction, most first.

    Args:
      images: the images to average over.
      offsets: the offsets to add; 0 is skipped.

    Returns:
      For each lane its number `index`, its `name` and the measures. Ties keep the order of the lanes.
    """
    steps = jnp.asarray([offset for offset in offsets if offset], jnp.float32)
    split = datasets.Split(images, np.zeros(len(images), np.int32))
    sums = {name: np.zeros(()) for name in MEASURES}
    for batch, _, mask in padded_batches(split, _BATCH_SIZE):
        v, classes = look(spec, params["encoder"], batch)
        found = jax.device_get(_sums(spec, params["decoder"], v, classes, steps, mask))
        sums = {name: sums[name] + found[name].astype(np.float64) for name in MEASURES}
    rows: list[dict[str, Any]] = [
        {"index": i, "name": name, **{measure: float(sums[measure][i] / len(images)) for measure in MEASURES}}
        for i, name in enumerate(column_names(spec))
    ]
    return sorted(rows, key=lambda row: -row["pixel_change_per_unit"])


def first_correct(spec: ModelSpec, params: dict, split: datasets.Split) -> list[int]:
    """The first image of each class that is classified correctly; classes without one are left out."""
    found: dict[int, int] = {}
    batches = padded_batches(split, _BATCH_SIZE)
    for start, (images, labels, mask) in zip(itertools.count(step=_BATCH_SIZE), batches, strict=False):
        predicted = np.asarray(look(spec, params["encoder"], images)[1])
        for i in np.flatnonzero((predicted == labels) & (mask > 0)):
            found.setdefault(int(labels[i]), start + int(i))
        if len(found) == spec.num_classes:
            break
    return [found[label] for label in sorted(found)]

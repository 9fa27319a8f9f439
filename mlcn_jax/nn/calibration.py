"""What lanes with batch normalisation take from training images: their whitening, and the statistics for evaluation.

Parameters in training have no statistics. Those that are evaluated, stored and exported hold them in each group, so
that whatever reads lanes finds them there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from mlcn_jax.errors import InputError
from mlcn_jax.nn import resnet
from mlcn_jax.nn.lanes import LaneGroup, calibrate_group, first_input
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.spec import ModelSpec


def trained_shapes(spec: ModelSpec) -> dict:
    """Shapes and dtypes of parameters with the statistics of `calibrate`, without computing any."""

    def statistics(encoder: dict, images: Array) -> dict:
        return join_statistics([group_statistics(spec, encoder, images)])

    params, images = param_shapes(spec), jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    return with_statistics(params, jax.eval_shape(statistics, params["encoder"], images))


def group_statistics(
    spec: ModelSpec, encoder: dict, images: Float[Array, "batch h w channels"], shares: int = 1
) -> dict:
    """`lanes.calibrate_group` of every group of lanes that normalises, by the group's name.

    `encoder` holds one of `shares` equal parts of each group's lanes.
    """
    return {
        group.name: calibrate_group(
            encoder[group.name], LaneGroup(group.spec, group.count // shares), spec.lane_settings, images
        )
        for group in spec.lane_groups
        if group.kind.normalises
    }


def join_statistics(parts: Sequence[dict]) -> dict:
    """The statistics for evaluation, by group, from the `group_statistics` of some batches of images."""
    return {name: resnet.join_statistics([part[name] for part in parts]) for name in parts[0]}


def calibrate(spec: ModelSpec, params: dict, images: Sequence[Float[Array, "batch h w channels"]]) -> dict:
    """Parameters for evaluation, with the statistics by which lanes normalise; unchanged if no lane does.

    Args:
      spec: the model.
      params: parameters without statistics.
      images: batches of training images, pixels in [0, 1], each of whole groups of `spec.norm_group`.

    Raises:
      InputError: lanes normalise, but there are no images.

    Source: Wu and Johnson 2021, arXiv 2105.07576, "precise" batch normalisation.
    """
    if not spec.normalises:
        return params
    if not len(images):
        raise InputError("images is empty: give one or more batches of training images")
    parts = [group_statistics(spec, params["encoder"], batch) for batch in images]
    return with_statistics(params, join_statistics(parts))


def with_statistics(params: dict, statistics: dict) -> dict:
    """Parameters with the statistics of some groups of lanes added to each group's parameters."""
    encoder = dict(params["encoder"])
    for name, values in statistics.items():
        encoder[name] = {**encoder[name], resnet.STATISTICS: values}
    return {**params, "encoder": encoder}


def without_statistics(params: dict) -> dict:
    """Parameters to train: those of `with_statistics` without the statistics."""

    def own(group: Any) -> Any:
        return {k: v for k, v in group.items() if k != resnet.STATISTICS} if isinstance(group, dict) else group

    return {**params, "encoder": {name: own(group) for name, group in params["encoder"].items()}}


def fold_statistics(spec: ModelSpec, params: dict) -> dict:
    """Calibrated parameters with the statistics folded into kernels and biases: the same function for less work.

    Raises:
      InputError: a group of lanes has no statistics.
    """
    encoder = dict(params["encoder"])
    for group in spec.lane_groups:
        if group.kind.normalises:
            if resnet.STATISTICS not in encoder[group.name]:
                raise InputError(
                    f"{group.name} has no statistics for evaluation: calibrate the model on training images first "
                    "(mlcn_jax.calibrate); trained workdirs have them"
                )
            encoder[group.name] = resnet.fold(encoder[group.name])
    return {**params, "encoder": encoder}


def whiten(
    spec: ModelSpec, params: dict, images: UInt8[np.ndarray, "n h w channels"] | Float[np.ndarray, "n h w channels"]
) -> dict:
    """Parameters with the first convolution of residual lanes set from training images (`resnet.whitening`).

    The images are uint8, or pixels in [0, 1].
    """

    def seen(some: np.ndarray) -> Any:
        pixels: Any = some / np.float32(255) if some.dtype == np.uint8 else np.asarray(some, np.float32)
        return first_input(pixels, spec.signed_pixels, np.float32)

    encoder, groups = dict(params["encoder"]), [group for group in spec.lane_groups if group.kind.normalises]
    if groups:
        first = resnet.whitening(images, seen=seen)
        encoder |= {group.name: resnet.whiten(encoder[group.name], *first) for group in groups}
    return {**params, "encoder": encoder}

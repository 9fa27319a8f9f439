"""What a configuration builds, before anything is computed."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.config import RunConfig
from mlcn_jax.nn import lanes
from mlcn_jax.nn.model import ModelSpec, apply_model, count_parameters, init_params
from mlcn_jax.placement.cost import (
    decoder_widths,
    lane_cost,
    matmul_flops,
    published_memory_bytes,
    published_seconds,
)


def describe(config: RunConfig) -> dict[str, Any]:
    """What a configuration builds: lanes, input shape, parameters, FLOPs of a forward pass per image, costs of a lane.

    FLOPs are those of the plain (native) convolution, whatever algorithm runs. The dataset is not read, except
    a folder of images, whose classes must be counted. Of equal lanes one is counted, so that many take no longer.
    """
    image_shape, num_classes = config.data.shape()
    spec = config.model_spec(image_shape, num_classes)
    batch_size = config.train.batch_size
    groups = spec.lane_groups

    def costs_of(lane: lanes.LaneSpec) -> dict[str, float]:
        cost = lane_cost(lane, spec.lane_settings, image_shape)
        return {
            "parameters": cost.parameters,
            "step_flops": cost.step_flops(batch_size),
            "step_bytes": cost.step_bytes(batch_size),
            "held_bytes": cost.held_bytes(batch_size),
            "published_relative_seconds": published_seconds(lane, 1.0),
            "published_memory_bytes": published_memory_bytes(lane),
        }

    costs = {str(group.spec): costs_of(group.spec) for group in groups}
    if groups:
        layers = list(itertools.pairwise(decoder_widths(spec)))
        decoder = sum((before + 1) * after for before, after in layers)
        per_lane = [int(costs[str(group.spec)]["parameters"]) for group in groups for _ in range(group.count)]
        total = sum(per_lane) + decoder
        flops = sum(group.count * _lane_flops(spec, group.spec) for group in groups)
        flops += sum(2 * before * after for before, after in layers)
    else:
        counts = count_parameters(spec)
        total, decoder, per_lane = counts["total"], counts["decoder"], counts["per_lane"]  # type: ignore[assignment]
        flops = _flops_of_all(spec)
    return {
        "model": spec.name,
        "input_shape": list(image_shape),
        "num_classes": num_classes,
        "lanes": [str(group.spec) for group in groups for _ in range(group.count)],
        "lane_costs": costs,
        "parameters": total,
        "parameters_per_lane": per_lane,
        "parameters_decoder": decoder,
        "forward_flops_per_image": flops,
    }


def _lane_flops(spec: ModelSpec, lane_spec: lanes.LaneSpec) -> int:
    """FLOPs of one lane's forward pass of one image."""
    lane = lanes.Lane(lane_spec, dataclasses.replace(spec.lane_settings, conv_algorithm="native"))
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    params = jax.eval_shape(lane.init, jax.random.key(0), image)
    return matmul_flops(lane.apply, params, image)


def _flops_of_all(spec: ModelSpec) -> int:
    """FLOPs of a model's forward pass of one image, from the traced whole."""
    plain = dataclasses.replace(spec, conv="native")
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    return matmul_flops(lambda p, x: apply_model(plain, p, x), params, image)

"""Describes what a configuration builds, without computing it."""

import logging
from typing import Any

from mlcn_jax.analysis.describe_work import scaling
from mlcn_jax.config import RunConfig
from mlcn_jax.nn import lanes
from mlcn_jax.nn.model import count_parameters
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.simulate import Link
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.session import check_settings

_log = logging.getLogger(__name__)


def describe(
    config: RunConfig, link: Link | None = None, profile: DeviceProfile | None = None, most_devices: int = 64
) -> dict[str, Any]:
    """What a configuration builds, and how far its training step can scale.

    Lanes, input shape, parameters, forward FLOPs per image, cost of each lane; work, depth and bounds by part
    (`describe_work.scaling`). FLOPs are those of plain (native) convolutions, whatever algorithm is used; `work` is
    that of the algorithms that a run uses on this machine, of a step with images of full size and without a teacher.
    The dataset is not read, except for a folder of images, whose classes must be counted.

    Args:
      config: the configuration.
      link, profile, most_devices: as for `describe_work.scaling`.

    Raises:
      InputError: the model cannot be trained with these settings.
    """
    image_shape, num_classes = config.data.shape()
    spec = config.model_spec(image_shape, num_classes)
    batch_size = config.train.batch_size
    check_settings(config, spec)
    check_parts(spec, batch_size, 1, config.train.accumulation_steps)
    if config.train.teacher:
        _log.warning("the work of train.teacher, which classifies each batch before the step, is not counted")
    if any(size for _, size in config.train.sizes()):
        _log.warning("train.image_sizes: the work is that of steps with images of full size")

    def costs_of(lane: lanes.LaneSpec) -> dict[str, float]:
        one = cost.cost_of(spec, lane)
        return {
            "parameters": one.parameters,
            "step_flops": one.step_flops(batch_size),
            "step_bytes": one.step_bytes(batch_size),
            "held_bytes": one.held_bytes(batch_size),
            "published_relative_seconds": cost.published_cost(lane),
            "published_memory_bytes": cost.published_memory_bytes(lane),
        }

    counts = count_parameters(spec)
    return {
        "model": spec.name,
        "input_shape": list(image_shape),
        "num_classes": num_classes,
        "lanes": [str(lane) for lane in spec.lane_specs],
        "lane_costs": {str(group.spec): costs_of(group.spec) for group in spec.lane_groups},
        "parameters": counts["total"],
        "parameters_per_lane": counts["per_lane"],
        "parameters_decoder": counts["decoder"],
        "forward_flops_per_image": cost.forward_flops(spec),
        "scaling": scaling(config, spec, link, profile, most_devices),
    }

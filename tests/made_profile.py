"""A device profile fitted to made-up seconds."""

import numpy as np

from mlcn_jax import host
from mlcn_jax.nn import lanes
from mlcn_jax.placement import cost, fit, profile

SETTINGS, SHAPE = lanes.LaneSettings(10), (28, 28, 1)
BATCH_SIZES = (50, 100)


def lane(kind="mlcn1", width=2, depth=2, settings=SETTINGS, shape=SHAPE):
    return cost.lane_cost(lanes.LaneSpec(kind, width, depth), settings, shape)


def planted_seconds(costs, batch_size, crowding):
    """As of a device on which larger layers are faster per FLOP, by class."""
    seconds = 0.0
    for one in costs:
        seconds += 1e-5 + 2e-10 * one.parameters
        for layer, form in zip(one.layers, one.forms("cpu", batch_size), strict=True):
            slowness = 1e-11 * len(layer.speed_class(form)) * (1 - 0.03 * np.log2(layer.kernel))
            seconds += slowness * batch_size * layer.flops
            seconds += 1e-9 * batch_size * layer.outputs * bool(layer.family)
    return seconds * (len(costs) * batch_size) ** crowding


def make_profile(kind="mlcn1"):
    """A profile of this device to whose lanes seconds were given by `planted_seconds`."""
    sizes = ((1, 1), (3, 1), (5, 1), (1, 2), (3, 2), (5, 2), (2, 3), (4, 3), (1, 5), (3, 5), (5, 4))
    stacks = [[lane(kind, *size)] for size in sizes for _ in BATCH_SIZES] + [[lane(kind, 2, 1)] * 4]
    batch_sizes = [BATCH_SIZES[i % 2] for i in range(len(stacks))]
    seconds = [planted_seconds(*stack, crowding=0.07) for stack in zip(stacks, batch_sizes, strict=True)]
    here = host.environment()
    return profile.DeviceProfile(
        device=here["device"],
        platform=here["platform"],
        cpu_count=here["cpu_count"],
        jax_version="0",
        image_shape=SHAPE,
        num_classes=10,
        lane_routing="published",
        compute_dtype="float32",
        batch_sizes=BATCH_SIZES,
        tiny_seconds=0.002,
        memory_bytes=2**30,
        **fit.fit_lane_seconds(stacks, batch_sizes, seconds, "cpu"),
        lane_bytes_of=fit.fit_bytes([lane(kind, depth=d).memory_features("cpu", 50) for d in (1, 2)], [1000.0, 2000.0]),
        head_seconds_of=profile.head_features(0, 0) | {"step": 0.5, "images": 0.25},
        forward_share=0.3,
        link=None,
        points=[{"lanes": "mlcn1:w1d1*1", "seconds": 0.1}],
    )

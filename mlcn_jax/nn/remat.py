"""Lanes in a scan whose backward pass recomputes some at a time, so that the activations of only these are held."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import Offloadable, Recompute, checkpoint_name
from jaxtyping import Array

from mlcn_jax.nn import tracing

_HOST = "pinned_host"  # JAX's name of the host's memory that a device reads and writes itself


def _products_to_host(primitive: Any, *args: Any, **params: Any) -> Any:
    """Results of convolutions and matrix products are kept in host memory; the rest is recomputed."""
    if jax.checkpoint_policies.dots_saveable(primitive, *args, **params):
        return Offloadable(src="device", dst=_HOST)
    return Recompute


_FEATURES = "features"
# What a lane keeps between its forward and its backward pass. `offload` has not been run on an accelerator yet.
OFFLOAD = "offload"
POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.save_only_these_names(_FEATURES),
    OFFLOAD: _products_to_host,
}
REMATS = ("none", *POLICIES)


def has_host_memory(device: jax.Device) -> bool:
    """Whether a device has a memory of its own and can reach its host's beside it; a CPU is its own host."""
    return device.platform != "cpu" and any(memory.kind == _HOST for memory in device.addressable_memories())


def held(features: Array) -> Array:
    """Marks what a lane's convolutions give, which is small and slow to compute: `full` holds it."""
    return features if tracing.platform() == "onnx" else checkpoint_name(features, _FEATURES)  # ONNX has no such mark


def scan_lanes(function: Callable[..., Any], lanes: tuple, remat: str, at_once: int = 1) -> Any:
    """`function` of so many lanes at once in turn, its results stacked along a first axis.

    In the backward pass lanes are recomputed right before their gradient, except with `none`. The scan keeps the
    compiler from moving either computation to where it would hold the activations of more lanes.

    Args:
      function: of one lane's part of each of `lanes`.
      lanes: trees of arrays [lanes, ...].
      remat: a key of `POLICIES`, or `none`.
      at_once: lanes that are computed as one function, whose activations are held together.

    Source: Chen et al. 2016, arXiv 1604.06174; over lanes instead of layers: this project.
    """
    again = function
    if remat != "none":
        again = jax.checkpoint(function, policy=POLICIES[remat], prevent_cse=False)
    return lax.map(lambda one: again(*one), lanes, batch_size=at_once if at_once > 1 else None)

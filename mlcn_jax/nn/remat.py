"""Lanes in a scan whose backward pass computes each lane again, so that the activations of only one are held."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

# What a lane keeps between its forward and its backward pass.
POLICIES: dict[str, Callable[..., Any]] = {"full": jax.checkpoint_policies.nothing_saveable}
REMATS = ("none", *POLICIES)


def scan_lanes(function: Callable[..., Any], lanes: tuple, remat: str) -> Any:
    """`function` of each lane in turn, its results stacked along a first axis.

    In the backward pass a lane is computed again, right before its gradient. The scan keeps the compiler from moving
    either computation to where it would hold the activations of several lanes.

    Args:
      function: of one lane's part of each of `lanes`.
      lanes: trees of arrays [lanes, ...].
      remat: a key of `POLICIES`.

    Source: Chen et al. 2016, arXiv 1604.06174; over lanes instead of layers: this project.
    """
    again = jax.checkpoint(function, policy=POLICIES[remat], prevent_cse=False)
    return lax.map(lambda one: again(*one), lanes)

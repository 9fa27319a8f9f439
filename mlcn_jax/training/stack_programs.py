"""Stacks of lanes: compiling their programs, what these save for the backward pass, and the delayed gradient norm."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mlcn_jax.nn.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Stack:
    """The lanes of one device, by their indices in the model, ascending."""

    device: jax.Device
    lanes: tuple[int, ...]


def make_stacks(devices: Sequence[jax.Device], device_of: Sequence[int]) -> tuple[Stack, ...]:
    """A stack for each device that has lanes, given the device of each lane."""
    lanes = [tuple(i for i, d in enumerate(device_of) if d == place) for place in range(len(devices))]
    return tuple(Stack(device, own) for device, own in zip(devices, lanes, strict=True) if own)


def group_of(path: tuple) -> str:
    """The lane group that an array of a state belongs to; empty if it belongs to none."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return names[names.index("encoder") + 1] if "encoder" in names else ""


@flax.struct.dataclass
class LaneByLane:
    """An array of a group of lanes, split into one per lane."""

    lanes: list[Array]


def save(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether a result is saved for `backward`: all but constants and image windows, which are faster to recompute."""
    del args, params
    return primitive.name not in ("broadcast_in_dim", "gather", "custom_vjp_call")


def lower(spec: ModelSpec, device: jax.Device, function: Callable, donated: tuple[int, ...], *args):
    with jax.default_device(device):
        options = spec.compiler_options(device.platform)
        return jax.jit(function, donate_argnums=donated, compiler_options=options).lower(*args)


def whole(x: Any) -> Array:
    return jnp.stack(x.lanes) if isinstance(x, LaneByLane) else x


class GradientNorm:
    """The norm of a step's gradient, read as an array; its square arrives with the messages of the next step.

    If it is read before that, it is sent separately; then all processes of a run must read it.

    Args:
      send: returns the square [1, 1], summed over all devices.
    """

    def __init__(self, send: Callable[[], Array]):
        self._send: Callable[[], Array] | None = send
        self._square: Array | None = None

    def arrived(self, square: Array) -> None:
        """Takes the square, which has arrived."""
        self._square, self._send = square, None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        if self._send is not None:
            self.arrived(self._send())
        return np.asarray(np.sqrt(jax.device_get(self._square).reshape(())), dtype)

    def __float__(self) -> float:
        return float(np.asarray(self))

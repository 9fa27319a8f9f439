"""The target of a traced program: the platform that will run it, the algorithm of each convolution, and its messages.

The target is part of the key of JAX's caches (`jax.make_user_context`): a function that is jitted under one target is
traced again under another, so that what it computes never depends on earlier traces.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Target:
    """The target for which programs are traced.

    Attributes:
      platform: such as `cpu`, `gpu` or `onnx`; if empty, that of JAX's default device.
      batch: batch size for which algorithms are chosen, whatever the traced one is; 0 takes the traced one.
      algorithms: pairs of a convolution (`conv.key_of`) and its algorithm; for others, `conv.choose` decides.
      inference: whether batches are small and nothing is differentiated: a CPU then computes several residual lanes at
        a time, which takes the memory of all.
      constant_weights: whether weights are compiled into the program, and what they alone give is computed then.
      exchange_dtype: dtype in which arrays are gathered and gradients scattered over devices; if empty, their own.
    """

    platform: str = ""
    batch: int = 0
    algorithms: tuple[tuple[str, str], ...] = ()
    inference: bool = False
    constant_weights: bool = False
    exchange_dtype: str = ""
    _record: "_Record | None" = dataclasses.field(default=None, repr=False)

    def algorithm(self, key: str, choose: Callable[[], str]) -> str:
        """The algorithm of a convolution: the one given, else what `choose` returns."""
        name = dict(self.algorithms).get(key) or choose()
        if self._record is not None:
            self._record.found[key] = name
        return name


@dataclasses.dataclass(eq=False)
class _Record:
    """Algorithms of a trace. Each record is a separate key in JAX's caches, so that nothing is missed."""

    found: dict[str, str] = dataclasses.field(default_factory=dict)


_target = jax.make_user_context(Target())


def current() -> Target:
    """The target of the program being traced."""
    return _target.value


def using(target: Target) -> contextlib.AbstractContextManager[None]:
    """Context in which programs are traced for `target`."""
    return _target(target)


def platform() -> str:
    """The platform that the program being traced will run on."""
    if current().platform:
        return current().platform
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device if isinstance(device, str) else device.platform if device else jax.default_backend()


def resolve(function: Callable, *args: Any, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The algorithm of every convolution in `function(*args)`, found before it is traced to run.

    Args:
      function: traced but not run.
      args: arrays, or `jax.ShapeDtypeStruct` objects.
      known: algorithms already fixed, such as those stored in a checkpoint.

    Returns:
      `known` and the missing ones, for `Target.algorithms` (via `as_pairs`).
    """
    record = _Record()
    with using(dataclasses.replace(current(), algorithms=as_pairs(known or {}), _record=record)):
        jax.eval_shape(lambda *args: function(*args), *args)
    return {**(known or {}), **record.found}


def as_pairs(algorithms: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A table of algorithms as `Target` holds it."""
    return tuple(sorted(algorithms.items()))


def zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros that vary over the same mesh axes as the values they are added to."""
    zeros = jnp.zeros(like.shape, like.dtype)
    over = like.manual_axis_type
    varying = tuple(over.varying) if over else ()
    return lax.pcast(zeros, varying, to="varying") if varying else zeros

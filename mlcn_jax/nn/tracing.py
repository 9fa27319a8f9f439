"""What a program is traced for: the platform that will run it, and the algorithm that each convolution takes there.

The target is part of the key of JAX's caches (`jax.make_user_context`): a function that is jitted under one target is
traced again under another, so that what it computes never depends on what was traced before.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """What programs are traced for.

    Attributes:
      platform: such as `cpu`, `gpu` or `onnx`; empty for that of JAX's default device.
      batch: images for which algorithms are chosen where the batch is traced as a symbol; 0 takes the traced batch.
      algorithms: pairs of a convolution (`conv.key_of`) and its algorithm; others take what `conv.choose` names.
    """

    platform: str = ""
    batch: int = 0
    algorithms: tuple[tuple[str, str], ...] = ()
    _record: "_Record | None" = dataclasses.field(default=None, repr=False)

    def algorithm(self, key: str, choose: Callable[[], str]) -> str:
        """The algorithm of a convolution: the one given, else what `choose` returns."""
        name = dict(self.algorithms).get(key) or choose()
        if self._record is not None:
            self._record.found[key] = name
        return name


@dataclasses.dataclass(eq=False)
class _Record:
    """Algorithms of a trace. Each record is a key of its own in JAX's caches, so that nothing is missed."""

    found: dict[str, str] = dataclasses.field(default_factory=dict)


_target = jax.make_user_context(Target())


def current() -> Target:
    """The target of the program that is being traced."""
    return _target.value


def using(target: Target) -> contextlib.AbstractContextManager[None]:
    """While active, programs are traced for `target`."""
    return _target(target)


def platform() -> str:
    """The platform that the program which is being traced will run on."""
    if current().platform:
        return current().platform
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return device.platform if isinstance(device, jax.Device) else jax.default_backend()


def resolve(function: Callable, *args: Any, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """The algorithm of every convolution in `function(*args)`, found before it is traced to run.

    Args:
      function: is traced and not computed.
      args: arrays, or `jax.ShapeDtypeStruct`s.
      known: algorithms that are settled, such as those which a checkpoint keeps.

    Returns:
      `known` and what it lacked, for `Target.algorithms` (`as_pairs`).
    """
    record = _Record()
    with using(dataclasses.replace(current(), algorithms=as_pairs(known or {}), _record=record)):
        jax.eval_shape(lambda *args: function(*args), *args)
    return {**(known or {}), **record.found}


def as_pairs(algorithms: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A table of algorithms as `Target` holds it."""
    return tuple(sorted(algorithms.items()))

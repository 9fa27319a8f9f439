"""Cut points: named intermediate values at which a lane can be split between two devices, to be read or given.

`Lane.apply(..., mutable=[CUTS])` returns them. `Lane.apply({"params": ..., CUTS: {...}}, ...)` starts from one, and
needs no parameters of what comes before it. Otherwise a cut point does nothing: the program is the same.
"""

from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
from jax import Array

CUTS = "cuts"
_VALUE = "value"


class CutPoint(nn.Module):
    """A value that can be read or given."""

    @property
    def is_given(self) -> bool:
        """Whether this call starts from the value."""
        return self.has_variable(CUTS, _VALUE)

    @property
    def is_used(self) -> bool:
        """Whether the value is read or given in this call."""
        return self.is_given or (self.is_mutable_collection(CUTS) and not self.is_initializing())

    def given(self) -> Array:
        """The value that was given."""
        return self.get_variable(CUTS, _VALUE)

    def __call__(self, value: Array) -> Array:
        if self.is_used:
            self.put_variable(CUTS, _VALUE, value)
        return value


def cut_point(name: str, compute: Callable[[], Array]) -> Callable[[], Array]:
    """Wraps `compute` to make its result a cut point, in a compact method; a given value replaces the computation."""

    def value() -> Array:
        point = CutPoint(name=name_of(name))
        return point.given() if point.is_given else point(compute())

    return value


def name_of(cut: str) -> str:
    """Name of the module of a cut point, which no layer has."""
    return f"cut_{cut}"


def giving(path: Sequence[str], value: Array) -> dict:
    """The collection `CUTS` with a value given: `path` names the modules that hold the cut point, then the cut."""
    tree: dict = {name_of(path[-1]): {_VALUE: value}}
    for module in reversed(path[:-1]):
        tree = {module: tree}
    return tree


def read(collection: Mapping, path: Sequence[str]) -> Array:
    """The value of a cut point from `CUTS`, as `Lane.apply` returned it; `path` as for `giving`."""
    for module in path[:-1]:
        collection = collection[module]
    return collection[name_of(path[-1])][_VALUE]

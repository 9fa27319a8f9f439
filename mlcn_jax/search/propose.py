"""Chooses the mix of a model: the first of several candidates whose lanes no other model has."""

import itertools
import random
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from mlcn_jax.search.space import Mix, Space

REDRAWS = 100  # candidates to try after the first before a model repeats another


class Proposal(NamedTuple):
    """A mix for a model, how it was found, its lanes as text, and how many candidates before it were already taken."""

    mix: Mix
    origin: str
    lanes: str
    redraws: int


def generator(seed: int, index: int) -> random.Random:
    """The random generator of one model."""
    return random.Random(f"{seed} {index}")


def drawn(space: Space, rng: random.Random, weights: Sequence[float] = ()) -> Iterator[tuple[Mix, str]]:
    """An endless sequence of random mixes, each with its origin `draw`."""
    return ((space.draw(rng, weights=weights), "draw") for _ in itertools.count())


def first_new(candidates: Iterator[tuple[Mix, str]], taken: Container[str], space: Space) -> Proposal:
    """The first candidate whose lanes are not in `taken`; the very first one if the next `REDRAWS` are taken too."""
    some = (Proposal(*next(candidates), "", i) for i in range(1 + REDRAWS))
    named = (one._replace(lanes=space.text(one.mix)) for one in some)
    first = next(named)
    return next((one for one in itertools.chain([first], named) if one.lanes not in taken), first)


class Plan:
    """The random mixes of all models of a search.

    Each model draws candidates with its own random generator and takes the first whose lanes no model with a smaller
    index has. So its mix depends only on the seed and its index, not on which worker asks or which models have ended.
    """

    def __init__(self, seed: int, space: Space):
        self._seed, self._space = seed, space
        self._proposals: list[Proposal] = []
        self._first_with: dict[str, int] = {}  # lanes to the smallest index that has them

    def of(self, index: int) -> tuple[Proposal, int | None]:
        """The mix of a model and, if it had to repeat one, the index of the first model with the same lanes."""
        for i in range(len(self._proposals), index + 1):
            found = first_new(drawn(self._space, generator(self._seed, i)), self._first_with, self._space)
            self._proposals.append(found)
            self._first_with.setdefault(found.lanes, i)
        found = self._proposals[index]
        first = self._first_with[found.lanes]
        return found, first if first != index else None

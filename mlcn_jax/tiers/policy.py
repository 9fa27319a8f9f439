"""The policy of a split model: which lanes each tier has, what their sum means, and when an answer is final.

The squared length of a class capsule is a sum over lanes, so what tiers return adds up. An answer's margin is the
largest sum minus the second largest, divided by the weight of the lanes heard: from 0 to 1. The answer is final if its
margin reaches the threshold for the tiers that have answered, or if all have. Needs only numpy and msgspec.
"""

import hashlib
import itertools
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Bool, Float, Int

from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json

FORMAT = 1
FILE = "policy.json"
MAX_TIERS = 6  # each subset of them has a threshold


class Tier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tier: its name, the indices of its lanes in the model, their total weight, and their FLOPs per image."""

    name: str
    lanes: tuple[int, ...]
    weight: float
    flops: int


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the answer of some tiers is final, and what that does on the validation images.

    Attributes:
      margin: smallest margin at which it is final; None if it never is.
      settled: share of all images whose answer would be final.
      loss: accuracy lost, as a share of all images, by taking these answers instead of the whole model's for images
        that come so far (`thresholds`).
      loss_bound: upper end of the paired one-sided confidence interval of `loss` (`upper_bound`), which is wider than
        95 % where a request can pass several thresholds: all of their bounds hold in 95 of 100 cases.
    """

    margin: float | None
    settled: float
    loss: float
    loss_bound: float


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model is split and how the parts are joined; the content of `policy.json`.

    Attributes:
      format: version of the file's format.
      model: SHA-256 of the whole model's parameters, with the weights of its lanes.
      class_names: names of the classes, in the order of the numbers that tiers return.
      cut: what leaves the first tier (`cuts.NAMES`).
      tiers: the tiers, from the nearest to the farthest; the first is the gateway's own.
      power: a probability is the root mean square over lanes to this power: 1, or 2 if lanes return probabilities.
      groups: names of coarse classes, with the indices of their classes; empty if there are none.
      tolerance: accuracy that all thresholds together may cost.
      validation_images: number of images that the thresholds were chosen on.
      thresholds: by the names of the tiers that have answered, in their order, joined with `+`.
    """

    format: int
    model: str
    class_names: tuple[str, ...]
    cut: str
    tiers: tuple[Tier, ...]
    power: int
    groups: dict[str, tuple[int, ...]]
    tolerance: float
    validation_images: int
    thresholds: dict[str, Threshold]

    @property
    def digest(self) -> str:
        """First 32 hexadecimal digits of the policy's SHA-256, on which a gateway and its nodes must agree."""
        content = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tiers."""
        return tuple(tier.name for tier in self.tiers)

    def tier(self, name: str) -> Tier:
        """The tier with this name."""
        return self.tiers[self.names.index(name)]

    def weight(self, heard: Collection[str]) -> float:
        """Sum of the weights of the lanes of some tiers."""
        return sum(tier.weight for tier in self.tiers if tier.name in heard)

    def lanes(self, heard: Collection[str]) -> list[int]:
        """The lanes of some tiers, ascending."""
        return sorted(lane for tier in self.tiers if tier.name in heard for lane in tier.lanes)

    def probabilities(self, sums: Float[np.ndarray, "n classes"], heard: Collection[str]) -> np.ndarray:
        """Probability of each class from the sums of the tiers heard, as `artifact.Classifier.probabilities`."""
        squares = np.clip(sums / max(self.weight(heard), 1e-30), 0, 1)
        return squares if self.power == 2 else np.sqrt(squares)

    def group(self, sums: Float[np.ndarray, " classes"], heard: Collection[str]) -> tuple[str, float]:
        """The longest group of classes, and its probability: its squared length is the sum of those of its classes."""
        squares = {name: sums[list(members)].sum() for name, members in self.groups.items()}
        longest = max(squares, key=lambda name: squares[name])  # several may have probability 1
        return longest, float(self.probabilities(squares[longest][None, None], heard)[0, 0])

    def is_final(self, sums: Float[np.ndarray, "n classes"], heard: Collection[str]) -> Bool[np.ndarray, " n"]:
        """Whether each answer is final."""
        if len(heard) == len(self.tiers):
            return np.ones(len(sums), bool)
        threshold = self.thresholds[key(self.names, heard)].margin
        if threshold is None:
            return np.zeros(len(sums), bool)
        return margins(sums, self.weight(heard)) >= threshold

    def to_dict(self) -> dict[str, Any]:
        """The policy as JSON, which `read` reads."""
        return msgspec.to_builtins(self)

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """Reads a file; raises InputError if it cannot be used."""
        try:
            policy = msgspec.convert(read_json(path), cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{path} is not a policy of this version ({error}): split the model again") from error
        if policy.format != FORMAT:
            raise InputError(f"{path} has format {policy.format}, not {FORMAT}: split the model again")
        check_lanes(path, [tier.lanes for tier in policy.tiers], policy.names)
        grouped = sorted(member for members in policy.groups.values() for member in members)
        if grouped and grouped != list(range(len(policy.class_names))):
            raise InputError(f"{path} has groups that do not contain each class once: split the model again")
        if set(policy.thresholds) != {"+".join(heard) for heard in subsets(policy.names)}:
            raise InputError(f"{path} does not have a threshold for each subset of the tiers: split the model again")
        return policy


def key(names: Sequence[str], heard: Collection[str]) -> str:
    """The key of a subset of tiers in `Policy.thresholds`."""
    return "+".join(name for name in names if name in heard)


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Each subset of tiers except the empty and the whole set, in their order."""
    return [heard for size in range(1, len(names)) for heard in itertools.combinations(names, size)]


def margins(sums: Float[np.ndarray, "n classes"], weight: float) -> Float[np.ndarray, " n"]:
    """The largest sum minus the second largest, divided by the weight of the lanes: from 0 to 1."""
    two = np.sort(sums, axis=1)[:, -2:]
    return (two[:, 1] - two[:, 0]) / max(weight, 1e-30)


def check_lanes(source: Any, lanes: Sequence[Sequence[int]], names: Sequence[str], count: int | None = None) -> None:
    """Raises InputError unless each lane belongs to exactly one tier, and names are valid and distinct."""
    found = sorted(lane for each in lanes for lane in each)
    count = count if count is not None else len(found)
    wrong = [
        f"{name} are {', '.join(map(str, which))}"
        for name, which in (
            ("tiers without lanes", [name for name, each in zip(names, lanes, strict=True) if not each]),
            ("lanes that no tier has", sorted(set(range(count)) - set(found))),
            ("lanes given twice", sorted({lane for lane in found if found.count(lane) > 1})),
            ("lanes that the model does not have", sorted(set(found) - set(range(count)))),
            ("names given twice", sorted({name for name in names if list(names).count(name) > 1})),
            ("names with characters other than a-z, 0-9, - or _", [name for name in names if not _plain(name)]),
        )
        if which
    ]
    if not 2 <= len(names) <= MAX_TIERS:
        wrong.append(f"there are {len(names)} tiers; there must be 2 to {MAX_TIERS}")
    if wrong:
        raise InputError(f"{source}: {'; '.join(wrong)}: give each of the lanes 0 to {count - 1} to exactly one tier")


def _plain(name: str) -> bool:
    return bool(name) and all(c.isascii() and (c.islower() or c.isdigit() or c in "-_") for c in name)


def thresholds(
    names: Sequence[str],
    parts: Mapping[str, Float[np.ndarray, "n classes"]],
    weights: Mapping[str, float],
    labels: Int[np.ndarray, " n"],
    tolerance: float,
) -> dict[str, Threshold]:
    """The threshold of each subset of tiers except the whole set, from validation images.

    Each threshold may lose `tolerance` divided by the number of tiers minus one, because a request passes at most that
    many thresholds, and all bounds of such a sequence hold together. What a threshold loses is counted for every image
    that may reach it, and what it gains only for those that reach it whichever tiers answer first.

    Args:
      names: names of the tiers, in order.
      parts: what each tier's lanes add to the squared lengths.
      weights: of each tier, the sum of its lanes' weights.
      labels: classes of the images.
      tolerance: accuracy that may be lost, as a fraction.
    """
    whole = np.argmax(sum(parts[name] for name in names), axis=1) == labels
    found, passed = {}, len(names) - 1
    settled: dict[tuple[str, ...], np.ndarray] = {}
    for heard in subsets(names):  # smaller ones first
        sums = np.sum([parts[name] for name in heard], axis=0)
        margin = margins(sums, sum(weights[name] for name in heard))
        lost = whole.astype(int) - (np.argmax(sums, axis=1) == labels)
        before = [mask for fewer, mask in settled.items() if set(fewer) < set(heard)]
        first = settled.get((names[0],)) if before and names[0] in heard else None  # which has always answered
        can_reach = np.ones(len(labels), bool) if first is None else ~first
        must_reach = ~np.any([np.zeros(len(labels), bool), *before], axis=0)
        lost = np.where(lost > 0, lost * can_reach, lost * must_reach)
        own = found[key(names, heard)] = threshold(margin, lost, tolerance / passed, passed)
        settled[heard] = np.zeros(len(labels), bool) if own.margin is None else margin >= own.margin
    return found


def upper_bound(mean: Any, variance: Any, count: int, bounds: int = 1) -> Any:
    """Upper end of the one-sided 95 % confidence interval of the mean of `count` paired differences: 1, 0 or -1 each.

    It also holds for few differences: without any, one bound is 2.7 / count, not 0 as in the normal approximation.

    Args:
      mean, variance: of the differences; numbers, or arrays of them.
      bounds: that are to hold together in 95 of 100 cases.

    Source: Wilson 1927; Bonferroni 1936 for several bounds.
    """
    z = statistics.NormalDist().inv_cdf(1 - 0.05 / bounds)
    half = z**2 / (2 * count)
    return mean + half + np.sqrt(z**2 * variance / count + half**2)


def threshold(
    margin: Float[np.ndarray, " n"], lost: Int[np.ndarray, " n"], tolerance: float, bounds: int = 1
) -> Threshold:
    """The smallest margin at which the upper 95 % bound of the accuracy lost stays within `tolerance`.

    Margins are tried from the largest down to the first whose bound is above, so trying many of them does not widen the
    bound (`upper_bound`).

    Args:
      margin: margin of each answer.
      lost: 1 if only the whole model is right, -1 if only these tiers are, otherwise 0.
      tolerance: accuracy that may be lost, as a fraction.
      bounds: as for `upper_bound`.

    Source: Maurer et al. 1995 for tests in an order that is fixed beforehand.
    """
    order = np.argsort(-margin, kind="stable")
    count = len(margin)
    mean = np.cumsum(lost[order]) / count
    variance = np.maximum(np.cumsum(np.square(lost[order])) / count - mean**2, 0)
    bound = upper_bound(mean, variance, count, bounds)
    ends = np.flatnonzero(np.append(margin[order][1:], -1) < margin[order])  # the last of those with equal margins
    over = np.flatnonzero(bound[ends] > tolerance)
    ends = ends[: over[0]] if over.size else ends
    if not ends.size:
        return Threshold(None, 0.0, 0.0, 0.0)
    last = ends[-1]
    return Threshold(
        float(margin[order][last]), float((last + 1) / count), float(mean[last]), max(0.0, float(bound[last]))
    )

"""Assigns lanes to tiers: as given in `tiers.json`, or by the accuracy that lanes add and the limits of a tier."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Float, Int

from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import cost_of
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.tiers.policy import check_lanes


class TierWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of a tier in `tiers.json`.

    Attributes:
      name: name of the tier.
      lanes: indices of its lanes in the model. If it is not given, one of the next two limits them, but for the last
        tier, which takes what is left.
      flops_share: its lanes have at most this share of the model's FLOPs.
      profile: file of a device profile (`mlcn_jax profile`), on whose device its lanes take at most `max_ms`.
      max_ms: milliseconds for one image; needs `profile`.
    """

    name: str
    lanes: list[int] | None = None
    flops_share: float | None = None
    profile: str | None = None
    max_ms: float | None = None


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `tiers.json`.

    Attributes:
      tiers: the tiers, from the nearest to the farthest.
      groups: names of coarse classes, each with the names of its classes.
      tolerance: accuracy, as a fraction, that may be lost by answering before the last tier.
    """

    tiers: list[TierWish]
    groups: dict[str, list[str]] = {}
    tolerance: float = 0.005


def read_wishes(path: Path, class_names: Sequence[str]) -> Wishes:
    """Reads `tiers.json`; raises InputError if it cannot be used for a model with these classes."""
    try:
        wishes = msgspec.json.decode(path.read_bytes(), type=Wishes)
    except OSError as error:
        raise InputError(
            f"--tiers={path} cannot be read ({error.strerror}): give a file that names the tiers"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: {error}: the file must hold a list of tiers, each with a name and, except for the last, with "
            'lanes, flops_share, or profile and max_ms; groups and tolerance are optional (see "Tiers" in the docs)'
        ) from error
    if not 0 <= wishes.tolerance < 1:
        raise InputError(f"{path}: tolerance is {wishes.tolerance}; it must be in [0, 1), such as 0.005")
    grouped = [name for members in wishes.groups.values() for name in members]
    if wishes.groups and sorted(grouped) != sorted(class_names):
        raise InputError(
            f"{path}: groups must contain each class of the model once; the model has {', '.join(class_names)}, and "
            f"the groups {', '.join(grouped)}"
        )
    return wishes


def check_given(path: Path, wishes: Wishes, count: int) -> None:
    """Raises InputError unless names and given lanes of tiers are valid, and enough of `count` lanes are left."""
    given = [lane for tier in wishes.tiers for lane in tier.lanes or ()]
    free = [lane for lane in range(count) if lane not in given]
    others = [tier.name for tier in wishes.tiers if tier.lanes is None]
    lanes = [
        free[others.index(tier.name) :: len(others)] if tier.lanes is None else tier.lanes for tier in wishes.tiers
    ]
    check_lanes(path, lanes, [tier.name for tier in wishes.tiers], count)


def place(
    path: Path,
    wishes: Wishes,
    spec: ModelSpec,
    squares: Float[np.ndarray, "n classes lanes"],
    labels: Int[np.ndarray, " n"],
) -> list[list[int]]:
    """The lanes of each tier, ascending.

    A tier whose lanes are not given takes lanes one by one while they fit, help, and leave one for each later tier
    without given lanes. Each is the lane with which those chosen so far, including those of nearer tiers, classify the
    most validation images correctly; among equals, the one with the fewest FLOPs.

    Args:
      path: file name of `tiers.json`, for messages.
      wishes: its content.
      spec: the model.
      squares: weighted squared outputs of its lanes for validation images.
      labels: classes of these images.

    Raises:
      InputError: lanes are missing, repeated or not in the model, or no lane fits a tier.
    """
    flops = lane_flops(spec)
    given = {lane for tier in wishes.tiers for lane in tier.lanes or ()}
    free = [lane for lane in range(len(spec.lane_specs)) if lane not in given]
    placed: list[list[int]] = []
    for i, tier in enumerate(wishes.tiers):
        limits = [name for name in ("flops_share", "profile", "max_ms") if getattr(tier, name) is not None]
        if limits and (tier.lanes is not None or i == len(wishes.tiers) - 1):
            has = "is the last, which takes what is left" if tier.lanes is None else "is given its lanes"
            raise InputError(f"{path}: tier {tier.name} {has}: leave out its {' and '.join(limits)}")
        if tier.lanes is not None:
            placed.append(list(tier.lanes))
        elif i == len(wishes.tiers) - 1:
            placed.append(free)
        else:
            nearer = [lane for lanes in placed for lane in lanes]
            nearer = [lane for lane in nearer if 0 <= lane < len(flops)]
            most = len(free) - sum(later.lanes is None for later in wishes.tiers[i + 1 :])
            own = _chosen(_limit(path, tier, spec, flops), most, free, nearer, flops, squares, labels)
            if most > 0 and not own:
                limit = " and ".join(limits)
                raise InputError(
                    f"{path}: not even the smallest lane fits {limit} of tier {tier.name}: raise it, or name its lanes"
                )
            placed.append(own)
            free = [lane for lane in free if lane not in own]
    check_lanes(path, placed, [tier.name for tier in wishes.tiers], len(spec.lane_specs))
    return [sorted(lanes) for lanes in placed]


def lane_flops(spec: ModelSpec) -> list[int]:
    """FLOPs of each lane's forward pass of one image."""
    costs = [cost_of(spec, lane) for lane in spec.lane_specs]
    return [cost.forward_flops_per_image for cost in costs]


def _limit(path: Path, tier: TierWish, spec: ModelSpec, flops: Sequence[int]) -> Callable[[Sequence[int]], bool]:
    """A function that says whether a tier can have some lanes."""
    share, profile, most = tier.flops_share, tier.profile, tier.max_ms
    if share is not None and profile is None and most is None:
        if not 0 < share < 1:
            raise InputError(f"{path}: flops_share of {tier.name} is {share}; it must be between 0 and 1")
        most_flops = share * sum(flops) * (1 + 1e-9)  # what fits exactly fits, whatever is rounded
        return lambda lanes: sum(flops[lane] for lane in lanes) <= most_flops
    if share is None and profile is not None and most is not None:
        device = DeviceProfile.load(path.parent / profile)
        milliseconds = []
        for lane in spec.lane_specs:
            cost = cost_of(spec, lane)
            forward = cost.forward_flops_per_image / cost.step_flops(1)  # profiles are of training steps
            milliseconds.append(1e3 * forward * device.lane_seconds(cost, 1))
        return lambda lanes: sum(milliseconds[lane] for lane in lanes) <= most
    raise InputError(f"{path}: give tier {tier.name} either lanes, or flops_share, or profile and max_ms")


def _chosen(
    fits: Callable[[Sequence[int]], bool],
    most: int,
    free: Sequence[int],
    nearer: Sequence[int],
    flops: Sequence[int],
    squares: np.ndarray,
    labels: np.ndarray,
) -> list[int]:
    """At least one lane that fits, if there is any, and at most `most`."""
    own: list[int] = []
    reached = 0.0

    def accuracy(lanes: Sequence[int]) -> float:
        return float(np.mean(np.argmax(squares[..., [*nearer, *lanes]].sum(axis=-1), axis=1) == labels))

    while len(own) < most:
        able = [lane for lane in free if lane not in own and fits([*own, lane])]
        worth = {lane: (accuracy([*own, lane]), -flops[lane]) for lane in able}
        best = max(able, key=lambda lane: worth[lane], default=None)
        if best is None or (own and worth[best][0] <= reached):
            break
        own.append(best)
        reached = worth[best][0]
    return own

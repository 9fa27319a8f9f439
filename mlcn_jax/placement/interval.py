"""The uncertainty of a prediction: an interval from the residuals of the device profiles."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mlcn_jax.placement.profile import DeviceProfile

LEVEL = 0.9


@dataclasses.dataclass(frozen=True)
class Interval:
    """Seconds between which a measurement lies with probability `level`."""

    low_seconds: float
    high_seconds: float
    level: float = LEVEL

    def holds(self, seconds: float) -> bool:
        """Whether a measurement is inside."""
        return self.low_seconds <= seconds <= self.high_seconds


def around(
    seconds: float,
    profiles: Sequence[DeviceProfile],
    lanes_of: Sequence[Sequence[tuple[Any, float]]],
    sharing: int = 1,
) -> Interval | None:
    """The interval around predicted seconds of a step; None if a profile was measured before residuals were kept.

    The logarithm of measured over predicted is taken as normal around 0. Its variance is that of the residuals of lanes
    alone, where errors of equal lanes are the same and those of different lanes independent, so that these partly
    cancel. Several lanes add what the residuals of whole steps (of lanes together, where none were measured) have in
    excess, and devices that share a machine the variance of that. The least certain profile determines it.

    Args:
      seconds: the prediction.
      profiles: of each device.
      lanes_of: for each device, what each of its lanes is, and its seconds, in any unit.
      sharing: the largest number of devices on one machine.
    """
    found = [_spread(profile, lanes, sharing) for profile, lanes in zip(profiles, lanes_of, strict=True) if lanes]
    if not found or any(one is None for one in found):
        return None
    from scipy import stats  # takes long

    spread, count = max(one for one in found if one is not None)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count)) * spread
    return Interval(seconds * math.exp(-reach), seconds * math.exp(reach))


def _spread(profile: DeviceProfile, lanes: Sequence[tuple[Any, float]], sharing: int) -> tuple[float, int] | None:
    """The standard deviation of the logarithm of measured over predicted, and the residuals it rests on."""
    alone, together, whole = (_mean_square(profile.residuals.get(name, ())) for name in ("lane", "stack", "whole"))
    together = together if whole is None else whole
    if alone is None:
        return None
    seconds: dict[Any, float] = {}
    for lane, own in lanes:
        seconds[lane] = seconds.get(lane, 0.0) + own
    square = alone * sum(own**2 for own in seconds.values()) / sum(seconds.values()) ** 2
    if together is not None and len(lanes) > 1:
        square += max(0.0, together - alone)
    if sharing > 1 and profile.sharing:
        square += profile.sharing["spread"] ** 2
    return math.sqrt(square), len(profile.residuals["lane"])


def _mean_square(residuals: Sequence[float]) -> float | None:
    return sum(r * r for r in residuals) / len(residuals) if residuals else None

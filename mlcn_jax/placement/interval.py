"""How sure a prediction is: an interval from the residuals of the device profiles."""

import dataclasses
import math
from collections.abc import Sequence

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
    seconds: float, profiles: Sequence[DeviceProfile], lanes_of: Sequence[int], sharing: int = 1, level: float = LEVEL
) -> Interval | None:
    """The interval around predicted seconds of a step; None if a profile was measured before residuals were kept.

    The logarithm of measured over predicted is taken as normal around 0, with the mean square of the residuals of lanes
    alone, or of groups of lanes where a device has several, plus that of devices that share a machine. The device whose
    profile is least sure counts.

    Args:
      seconds: the prediction.
      profiles: of each device.
      lanes_of: number of lanes on each device.
      sharing: the largest number of devices on one machine.
      level: probability that a measurement lies inside.
    """
    found = [_spread(profile, lanes, sharing) for profile, lanes in zip(profiles, lanes_of, strict=True) if lanes]
    if not found or any(one is None for one in found):
        return None
    spread, count = max(one for one in found if one is not None)
    reach = _student(level, count) * spread
    return Interval(seconds * math.exp(-reach), seconds * math.exp(reach), level)


def _spread(profile: DeviceProfile, lanes: int, sharing: int) -> tuple[float, int] | None:
    """The standard deviation of the logarithm of measured over predicted, and the residuals it rests on."""
    group = profile.residuals.get("stack" if lanes > 1 else "lane", ())
    if not group:
        return None
    square = sum(r * r for r in group) / len(group)
    if sharing > 1 and profile.sharing:
        square += profile.sharing["spread"] ** 2
    return math.sqrt(square), len(group)


def _student(level: float, count: int) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + level) / 2, count))

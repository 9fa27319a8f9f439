"""Devices as buckets with limits on memory and work, and the text that describes them."""

import bisect
import dataclasses
import functools
import itertools
import math
import random
import re
from collections.abc import Sequence

from mlcn_jax.errors import InputError

_ROUNDING = 1 + 1e-9  # the same sum in another order differs by less
FORM = "such as 'memory=12GiB flops=0.5x*8' or 'profile=gpu.json seconds=0.05, profile=cpu.json seconds=0.05'"
_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZES |= {f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", 1)}
_SIZES |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A device to be filled with lanes.

    Attributes:
      name: shown to users.
      unit: what the loads are measured in: `flops` or `seconds` of a training step, or `cost`, which has no unit.
      limit: the largest total load, in `unit`.
      memory_bytes: memory that all lanes on the device may take together.
      loads, lane_bytes: load (in `unit`) and memory of each lane of the menu.
      crowding: the load of n lanes is the sum of their loads times n to this power (`DeviceProfile.crowding`).
      crowded_lanes: the numbers of lanes beyond which that factor stays constant (`DeviceProfile.crowded_images`).
    """

    name: str
    unit: str
    limit: float
    memory_bytes: float
    loads: tuple[float, ...]
    lane_bytes: tuple[float, ...]
    crowding: float = 0.0
    crowded_lanes: tuple[float, float] = (1.0, math.inf)

    def load(self, lanes: Sequence[int]) -> float:
        """The load of these lanes together, in `unit`."""
        return math.fsum(self.loads[lane] for lane in lanes) * self._slower(len(lanes))

    def _slower(self, count: int) -> float:
        """How many times longer each of so many lanes takes than it would alone."""
        low, high = self.crowded_lanes
        alone, together = (min(max(n, low), high) for n in (1, count))
        return (together / alone) ** self.crowding

    def fits(self, lanes: Sequence[int]) -> bool:
        """Whether there is room for these lanes together."""
        in_memory = sum(self.lane_bytes[lane] for lane in lanes) <= self.memory_bytes
        return in_memory and self.load(lanes) <= self.limit * _ROUNDING

    def fill(self, lanes: Sequence[int]) -> float:
        """How full the device is in its scarcer resource; 1 is full."""
        if not lanes:
            return 0.0
        memory = sum(self.lane_bytes[lane] for lane in lanes) / self.memory_bytes
        return max(self.load(lanes) / self.limit, memory)

    def room(self, lanes: Sequence[int]) -> tuple[float, float]:
        """What `draw` needs to know about the lanes already placed: the sum of their loads, and the bytes left."""
        free = self.memory_bytes - sum(self.lane_bytes[lane] for lane in lanes)
        return sum(self.loads[lane] for lane in lanes), free

    def draw(
        self, count: int, load: float, free: float, rng: random.Random, weights: Sequence[float] = ()
    ) -> int | None:
        """A random lane that fits next to `count` others, given their `room` (load, free); None if no lane fits."""
        loads, order, most_bytes = self._by_load
        largest = self.limit * _ROUNDING / self._slower(count + 1) - load
        end = bisect.bisect_right(loads, largest)
        if end and most_bytes[end - 1] > free:
            fitting = [lane for lane in order[:end] if self.lane_bytes[lane] <= free]
        elif weights:
            fitting = order[:end]
        else:
            return order[int(rng.random() * end)] if end else None
        if not fitting:
            return None
        if weights:
            return rng.choices(fitting, [weights[lane] for lane in fitting])[0]
        return fitting[int(rng.random() * len(fitting))]

    @functools.cached_property
    def _by_load(self) -> tuple[list[float], list[int], list[float]]:
        """Loads in ascending order, their lanes, and at each position the most memory of any lane up to there."""
        order = sorted(range(len(self.loads)), key=self.loads.__getitem__)
        most = itertools.accumulate((self.lane_bytes[lane] for lane in order), max)
        return [self.loads[lane] for lane in order], order, list(most)


def parse_device(text: str) -> tuple[dict[str, str], int]:
    """The `NAME=VALUE` words of one device, as a dictionary, and how many such devices there are.

    Raises:
      InputError: the text does not have that form.
    """
    words, star, count = text.strip().partition("*")
    pairs = [word.partition("=") for word in words.split()]
    values = {name: value for name, _, value in pairs}
    known = {"memory", "flops"} if "profile" not in values else {"memory", "profile", "seconds"}
    good = len(values) == len(pairs) and all(value for _, _, value in pairs) and set(values) <= known
    good = good and (("flops" in values) if "profile" not in values else ("seconds" in values))
    if not good or (star and not re.fullmatch(r"\s*\d{1,18}\s*", count)):
        raise InputError(
            f"search.devices: {text.strip()!r} does not describe a device: give flops=, or profile= and seconds=, and "
            f"optionally memory= and *COUNT, {FORM}"
        )
    return values, int(count) if star else 1


def read_number(text: str, name: str, baseline: float) -> float:
    """The number that `text` gives for `name` (memory, flops or seconds) in bytes, FLOPs or seconds.

    Args:
      text: a number and its unit, such as 12GiB, 0.5x or 20ms.
      name: `memory`, `flops` or `seconds`.
      baseline: FLOPs that the unit `x` stands for.

    Raises:
      InputError: it is not a number above 0 with a unit that `name` can have.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)([KMGT]i?B?|x|s|ms)?", text)
    number, unit = float(match[1]) if match else 0.0, (match[2] or "") if match else ""
    factors = {"memory": _SIZES, "flops": {**_SIZES, "x": baseline}, "seconds": {"": 1.0, "s": 1.0, "ms": 1e-3}}[name]
    if not number or unit not in factors:
        units = ", ".join(filter(None, factors))
        raise InputError(
            f"search.devices: {name}={text!r} must be a number above 0, alone or with one of the units {units}"
        )
    return number * factors[unit]


def amount(value: float, unit: str) -> str:
    """A number of FLOPs, seconds or bytes as text with a unit, or a published cost as a number with its formula."""
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB" if math.isfinite(value) else "any memory"
    if unit == "cost":
        return f"a cost (width^2 * depth) of {value:,g}"
    return f"{1000 * value:,.2f} ms" if unit == "seconds" else f"{value / 1e9:,.3f} GFLOP"

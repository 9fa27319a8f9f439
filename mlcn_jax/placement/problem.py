"""The input and output of a partitioner, and a lower bound for every placement."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mlcn_jax.errors import InputError

UNLIMITED = float("inf")
_MAX_MULTIPLE = 32  # of the smallest lane's cost, when looking for a unit of which all costs are multiples


class NoRoom(InputError):
    """The lanes do not fit into the devices' memory."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Lanes to place.

    Attributes:
      seconds: `seconds[i][d]`, the time of lane i on device d. A device runs its lanes one after another.
      memory_bytes: memory of each lane; if empty, memory is ignored.
      limit_bytes: memory of each device; if empty, there is no limit.
      base_seconds: each device's work in addition to its lanes, such as the decoder; if empty, none.
      lane_names, device_names: names for messages; if empty, numbers.

    Raises:
      InputError: lengths are inconsistent, a number is out of range, or there is no device or no lane.
    """

    seconds: Sequence[Sequence[float]]
    memory_bytes: Sequence[float] = ()
    limit_bytes: Sequence[float] = ()
    base_seconds: Sequence[float] = ()
    lane_names: Sequence[str] = ()
    device_names: Sequence[str] = ()

    def __post_init__(self):
        if not self.seconds or not self.seconds[0]:
            raise InputError("nothing to place: give at least one lane and one device")
        lanes, devices = len(self.seconds), len(self.seconds[0])
        for field, size, empty in (
            ("memory_bytes", lanes, [0.0] * lanes),
            ("limit_bytes", devices, [UNLIMITED] * devices),
            ("base_seconds", devices, [0.0] * devices),
            ("lane_names", lanes, [f"lane {i}" for i in range(lanes)]),
            ("device_names", devices, [f"device {d}" for d in range(devices)]),
        ):
            values = tuple(getattr(self, field)) or tuple(empty)
            if len(values) != size:
                raise InputError(f"{field} has {len(values)} entries for {lanes} lanes on {devices} devices")
            object.__setattr__(self, field, values)
        if any(len(row) != devices for row in self.seconds):
            raise InputError(f"every lane needs its seconds on all {devices} devices")
        for field, finite in (("memory_bytes", True), ("limit_bytes", False), ("base_seconds", True)):
            for value in getattr(self, field):
                if not value >= 0 or (finite and math.isinf(value)):
                    told = "finite and 0 or more" if finite else "0 or more"
                    raise InputError(f"{field} holds {value}: numbers must be {told}")
        if not all(0 < value < math.inf for row in self.seconds for value in row):
            raise InputError("every lane's seconds must be above 0 on every device, and finite")

    @property
    def num_devices(self) -> int:
        return len(self.seconds[0])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The device of each lane, and the resulting times.

    Attributes:
      partitioner: the partitioner that placed them.
      device_of: the device of each lane.
      seconds: each device's time for its lanes and its base.
      memory_bytes: memory of each device's lanes.
      lower_bound_seconds: no placement has a shorter makespan.
      optimal: whether this makespan is proven to be the shortest.
    """

    partitioner: str
    device_of: tuple[int, ...]
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    lower_bound_seconds: float
    optimal: bool = False

    @property
    def makespan_seconds(self) -> float:
        """When the last device finishes."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """How much longer the last device takes than the mean: 0 if all finish together."""
        return self.makespan_seconds / (sum(self.seconds) / len(self.seconds)) - 1


def uniform_seconds(costs: Sequence[float], slowness: Sequence[float]) -> list[list[float]]:
    """Seconds of lanes on devices that differ by one factor: `costs[i] * slowness[d]`."""
    return [[cost * factor for factor in slowness] for cost in costs]


def lower_bound_seconds(problem: Problem) -> float:
    """A makespan that no placement can beat.

    The larger of two bounds: the longest lane on its fastest device, after that device's base, and the time in
    which the devices together could do all the work if lanes were divisible: with weights y, sum(y) = 1,
    no makespan is below sum_d y_d base_d + sum_i min_d y_d seconds_id; y is taken in proportion to the devices' speeds.
    """
    columns = list(zip(*problem.seconds, strict=True))
    speeds = [1 / sum(column) for column in columns]
    y = [speed / sum(speeds) for speed in speeds]
    shared = sum(w * base for w, base in zip(y, problem.base_seconds, strict=True))
    shared += sum(min(w * s for w, s in zip(y, row, strict=True)) for row in problem.seconds)
    longest = max(min(b + s for b, s in zip(problem.base_seconds, row, strict=True)) for row in problem.seconds)
    bound = max(shared, longest, *problem.base_seconds)
    integers = integer_costs(problem)
    return _whole_units_bound(problem, *integers, bound) if integers else bound


def integer_costs(problem: Problem) -> tuple[list[int], list[float]] | None:
    """Integer costs and a factor per device whose products are exactly the seconds; None if there are none."""
    factors = [value / problem.seconds[0][0] for value in problem.seconds[0]]
    costs = [row[0] for row in problem.seconds]
    for multiple in range(1, _MAX_MULTIPLE + 1):
        unit = min(costs) / multiple
        whole = [round(cost / unit) for cost in costs]
        near = (
            math.isclose(n * unit * factor, value, rel_tol=1e-9)
            for n, row in zip(whole, problem.seconds, strict=True)
            for factor, value in zip(factors, row, strict=True)
        )
        if all(near):
            return whole, [factor * unit for factor in factors]
    return None


def _whole_units_bound(problem: Problem, costs: list[int], factors: list[float], low: float) -> float:
    """The shortest time in which the devices together complete all units of cost, each unit undivided."""

    def units(seconds: float) -> int:
        return sum(
            max(0, math.floor((seconds - base) / factor * (1 + 1e-12)))
            for base, factor in zip(problem.base_seconds, factors, strict=True)
        )

    high = low + sum(costs) * min(factors)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if units(middle) >= sum(costs) else (middle, high)
    return high


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def or_tools(
    without: str = "the partitioner exact needs OR-Tools (pip install 'mlcn_jax[exact]'); greedy works without it",
) -> Any:
    """OR-Tools' module `cp_model`; raises InputError with the message `without` if it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError(without) from error
    return cp_model

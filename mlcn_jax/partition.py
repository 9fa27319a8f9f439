"""Lanes to devices: which device computes which lane, so that all finish together. Pure Python.

A lane's time on a device stands in a table `seconds[lane][device]`, so devices may differ by one factor
(`uniform_seconds`) or each have costs of its own, as a CPU and a GPU do. A heuristic is one function and one line in
`_HEURISTICS`.
"""

import dataclasses
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence

from mlcn_jax.errors import InputError

_UNLIMITED = float("inf")
_MAX_MULTIPLE = 32  # of the smallest lane's cost in units, where costs are whole numbers of a unit


class NoRoom(InputError):
    """The lanes do not fit the devices' memory."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Lanes to place.

    Attributes:
      seconds: `seconds[i][d]`, what lane i takes on device d. A device runs its lanes one after the other.
      memory_bytes: what each lane holds; empty counts no memory.
      limit_bytes: what each device can hold; empty sets no limit.
      base_seconds: work that each device has besides its lanes, such as the decoder's; empty is none.
      lane_names, device_names: for messages; empty numbers them.

    Raises:
      InputError: lengths do not fit together, a number is negative, there is no device or no lane.
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
            ("limit_bytes", devices, [_UNLIMITED] * devices),
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
        for field in ("memory_bytes", "limit_bytes", "base_seconds"):
            if not min(getattr(self, field)) >= 0:
                raise InputError(f"{field} holds {min(getattr(self, field))}: numbers must be 0 or more")
        if not all(value > 0 for row in self.seconds for value in row):
            raise InputError("every lane's seconds must be above 0 on every device")

    @property
    def num_devices(self) -> int:
        return len(self.seconds[0])


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each lane runs, and what follows from it.

    Attributes:
      partitioner: who placed them.
      device_of: the device of each lane.
      seconds: what each device takes for its lanes and its base.
      memory_bytes: what the lanes of each device hold.
      lower_bound_seconds: no placement has a shorter makespan.
      optimal: whether it is proved that no placement has a shorter makespan.
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
        """How much longer the last device takes than the mean of all: 0 when all finish together."""
        return self.makespan_seconds / (sum(self.seconds) / len(self.seconds)) - 1

    def to_dict(self) -> dict:
        """All of it, ready for JSON."""
        more = {"makespan_seconds": self.makespan_seconds, "imbalance": self.imbalance}
        return {**dataclasses.asdict(self), **more}


def uniform_seconds(costs: Sequence[float], slowness: Sequence[float]) -> list[list[float]]:
    """Seconds of lanes on devices that differ by one factor: `costs[i] * slowness[d]`."""
    return [[cost * factor for factor in slowness] for cost in costs]


def partition(name: str, problem: Problem, *, seed: int = 0, time_limit_seconds: float = 2.0) -> Placement:
    """Places every lane on one device.

    Args:
      name: one of `PARTITIONERS`.
      problem: the lanes and devices.
      seed: of `random`.
      time_limit_seconds: after which `exact` returns the best that it has.

    Raises:
      InputError: the name is unknown; NoRoom: the lanes do not fit, and the message names the lane or the device.
    """
    if name not in PARTITIONERS:
        raise InputError(f"partitioner {name!r} is unknown: use one of {', '.join(PARTITIONERS)}")
    for i, needed in enumerate(problem.memory_bytes):
        if needed > max(problem.limit_bytes):
            device = max(range(problem.num_devices), key=problem.limit_bytes.__getitem__)
            raise NoRoom(
                f"{problem.lane_names[i]} needs {_mib(needed)}, more than any device holds (most: "
                f"{problem.device_names[device]}, {_mib(problem.limit_bytes[device])}): make it narrower or "
                "shallower, take a smaller batch or a larger device"
            )
    if sum(problem.memory_bytes) > sum(problem.limit_bytes):
        raise NoRoom(
            f"the lanes need {_mib(sum(problem.memory_bytes))} together, the devices hold "
            f"{_mib(sum(problem.limit_bytes))}: take fewer lanes, a smaller batch or more devices"
        )
    bound, optimal = lower_bound_seconds(problem), False
    if name == "exact":
        device_of, proved, optimal = _exact(problem, time_limit_seconds)
        bound = max(bound, proved)
    else:
        device_of = _HEURISTICS[name](problem, random.Random(seed))
    seconds, memory = list(problem.base_seconds), [0.0] * problem.num_devices
    for i, device in enumerate(device_of):
        seconds[device] += problem.seconds[i][device]
        memory[device] += problem.memory_bytes[i]
    optimal = optimal or max(seconds) <= bound * (1 + 1e-9)
    return Placement(name, tuple(device_of), tuple(seconds), tuple(memory), bound, optimal)


def lower_bound_seconds(problem: Problem) -> float:
    """A makespan that no placement can beat.

    The larger of the longest lane on the device that runs it fastest, after that device's base, and the time in which
    the devices together could do all the work if lanes could be cut: with weights y, sum(y) = 1, no makespan is below
    sum_d y_d base_d + sum_i min_d y_d seconds_id; y is taken in proportion to the devices' speeds.
    """
    columns = list(zip(*problem.seconds, strict=True))
    speeds = [1 / sum(column) for column in columns]
    y = [speed / sum(speeds) for speed in speeds]
    shared = sum(w * base for w, base in zip(y, problem.base_seconds, strict=True))
    shared += sum(min(w * s for w, s in zip(y, row, strict=True)) for row in problem.seconds)
    longest = max(min(b + s for b, s in zip(problem.base_seconds, row, strict=True)) for row in problem.seconds)
    bound = max(shared, longest, *problem.base_seconds)
    integers = _integer_costs(problem)
    return _whole_units_bound(problem, *integers, bound) if integers else bound


def _integer_costs(problem: Problem) -> tuple[list[int], list[float]] | None:
    """Whole numbers and a factor for each device whose products are all the seconds; None where there are none."""
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
    """The shortest time in which the devices together complete as many whole units of cost as there are."""

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


class _Filling:
    """Devices as they fill up."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self.seconds = list(problem.base_seconds)
        self.free_bytes = list(problem.limit_bytes)
        self.device_of = [-1] * len(problem.seconds)

    def fitting(self, lane: int) -> list[int]:
        """Devices with room for a lane; raises InputError where there is none."""
        needed = self._problem.memory_bytes[lane]
        devices = [d for d, free in enumerate(self.free_bytes) if needed <= free]
        if not devices:
            most = max(range(len(self.free_bytes)), key=self.free_bytes.__getitem__)
            raise NoRoom(
                f"no device has room left for {self._problem.lane_names[lane]}, which needs {_mib(needed)} (most is "
                f"free on {self._problem.device_names[most]}: {_mib(self.free_bytes[most])}): try the partitioner "
                "exact, which finds a placement if there is one, or take fewer lanes or a smaller batch"
            )
        return devices

    def place(self, lane: int, device: int) -> None:
        self.device_of[lane] = device
        self.seconds[device] += self._problem.seconds[lane][device]
        self.free_bytes[device] -= self._problem.memory_bytes[lane]


def _largest_first(problem: Problem) -> list[int]:
    return sorted(range(len(problem.seconds)), key=lambda i: -sum(problem.seconds[i]))


def _random(problem: Problem, rng: random.Random) -> list[int]:
    """Each lane, in the order given, to a device drawn among those with room."""
    filling = _Filling(problem)
    for lane in range(len(problem.seconds)):
        filling.place(lane, rng.choice(filling.fitting(lane)))
    return filling.device_of


def _round_robin(problem: Problem, rng: random.Random) -> list[int]:
    """Lane i to device i modulo their number, or the next one with room."""
    del rng
    filling = _Filling(problem)
    for lane in range(len(problem.seconds)):
        devices = filling.fitting(lane)
        filling.place(lane, min(devices, key=lambda d: (d - lane) % problem.num_devices))
    return filling.device_of


def _greedy_published(problem: Problem, rng: random.Random) -> list[int]:
    """Largest lane first, to the device least loaded so far (do Rosario 2021, thesis, chapter 5)."""
    del rng
    filling = _Filling(problem)
    for lane in _largest_first(problem):
        filling.place(lane, min(filling.fitting(lane), key=filling.seconds.__getitem__))
    return filling.device_of


def _greedy(problem: Problem, rng: random.Random) -> list[int]:
    """Largest lane first, to the device that would finish first.

    At most 4/3 - 1/(3m) times the best makespan on m equal devices (Graham 1969) and 1.58 times on devices that differ
    by a factor (Kovacs 2010), without memory limits and base.
    """
    del rng
    filling = _Filling(problem)
    for lane in _largest_first(problem):
        finish = [done + more for done, more in zip(filling.seconds, problem.seconds[lane], strict=True)]
        filling.place(lane, min(filling.fitting(lane), key=finish.__getitem__))
    return filling.device_of


def _karmarkar_karp(problem: Problem, rng: random.Random) -> list[int]:
    """Largest differencing (Karmarkar and Karp 1982) over equal bins.

    At most 4/3 - 1/(3m) times the best makespan on m equal devices (Michiels et al. 2003). A device that is n times as
    fast as the slowest counts as n bins, rounded, as long as there are lanes for them; without a proven bound then.
    Base and memory are looked at only when bins are given to devices.
    """
    del rng
    columns = list(zip(*problem.seconds, strict=True))
    speeds = [max(map(sum, columns)) / sum(column) for column in columns]
    owners = list(range(problem.num_devices))
    spare = len(problem.seconds) - len(owners)
    extra = sorted((n / s, d) for d, s in enumerate(speeds) for n in range(2, round(s) + 1))
    owners += [d for _, d in extra[: max(0, spare)]]
    order = itertools.count()  # so that equal differences keep the order given
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for lane, row in enumerate(problem.seconds):
        bins: list[tuple[float, list[int]]] = [(sum(row), [lane])] + [(0.0, [])] * (len(owners) - 1)
        heapq.heappush(heap, (-(bins[0][0] - bins[-1][0]), next(order), bins))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda bin: -bin[0])
        heapq.heappush(heap, (-(merged[0][0] - merged[-1][0]), next(order), merged))
    filling, free = _Filling(problem), list(owners)
    for _, bin_lanes in heap[0][2]:

        def finish(device: int, lanes: list[int] = bin_lanes) -> float:
            return filling.seconds[device] + sum(problem.seconds[i][device] for i in lanes)

        device = min(free, key=finish)
        free.remove(device)
        for lane in bin_lanes:
            fitting = filling.fitting(lane)
            filling.place(lane, device if device in fitting else min(fitting, key=filling.seconds.__getitem__))
    return filling.device_of


def _exact(problem: Problem, time_limit_seconds: float) -> tuple[list[int], float, bool]:
    """Devices, a proved lower bound and whether they are optimal, by integer programming (OR-Tools CP-SAT).

    Where seconds are whole costs times a factor for each device, as by the thesis's formula, makespans can only take
    certain values: they are tried from the lower bound up, and the first that can be reached is the shortest. Other
    seconds are rounded to a millionth of the slowest placement, and "optimal" holds to that.
    """
    deadline = time.monotonic() + time_limit_seconds
    try:
        start = _greedy(problem, random.Random(0))
    except NoRoom:  # it found none where this may
        start = []
    integers = _integer_costs(problem)
    if integers and start:
        return _exact_in_whole_units(problem, *integers, start, deadline)
    unit = (sum(map(max, problem.seconds)) + max(problem.base_seconds)) / 10**6
    slack = (len(problem.seconds) + 1) / 2  # more than rounding adds
    program = _Program(problem, start)
    least = math.floor(lower_bound_seconds(problem) / unit - slack)
    longest = program.model.new_int_var(least, 2 * 10**6, "")
    for d in range(problem.num_devices):
        load = program.load(d, [round(row[d] / unit) for row in problem.seconds])
        program.model.add(load + round(problem.base_seconds[d] / unit) <= longest)
    program.model.minimize(longest)
    device_of, status, bound = program.solve(deadline)
    if status == "infeasible":
        largest = max(range(len(problem.seconds)), key=problem.memory_bytes.__getitem__)
        raise NoRoom(
            f"the lanes do not fit: {_mib(sum(problem.memory_bytes))} in pieces of up to "
            f"{_mib(problem.memory_bytes[largest])} ({problem.lane_names[largest]}) cannot be laid out over "
            + ", ".join(f"{n} ({_mib(b)})" for n, b in zip(problem.device_names, problem.limit_bytes, strict=True))
            + ": take fewer or smaller lanes, a smaller batch or more devices"
        )
    if status == "unknown" and not start:
        raise NoRoom(f"no placement was found in {time_limit_seconds} s: give more time, fewer lanes or more memory")
    return device_of or start, (bound - slack) * unit, status == "optimal"


def _exact_in_whole_units(
    problem: Problem, costs: list[int], factors: list[float], start: list[int], deadline: float
) -> tuple[list[int], float, bool]:
    loads = list(problem.base_seconds)
    for lane, device in enumerate(start):
        loads[device] += problem.seconds[lane][device]
    tolerance = 1 + 1e-9
    least = lower_bound_seconds(problem)
    ends = set()
    for base, factor in zip(problem.base_seconds, factors, strict=True):
        first, last = (
            math.ceil((least / tolerance - base) / factor),
            math.ceil((max(loads) / tolerance - base) / factor),
        )
        ends |= {base + n * factor for n in range(max(0, first), max(0, last))}
    for end in sorted(ends):
        program = _Program(problem, start)
        for d, (base, factor) in enumerate(zip(problem.base_seconds, factors, strict=True)):
            program.model.add(program.load(d, costs) <= max(0, math.floor((end * tolerance - base) / factor)))
        device_of, status, _ = program.solve(deadline)
        if status == "optimal":
            return device_of, end, True
        if status == "unknown":
            return start, end, False
    return start, max(loads), True


class _Program:
    """Which device gets how many of each kind of equal lanes, as an integer program without its objective."""

    def __init__(self, problem: Problem, start: list[int]):
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise InputError(
                "the partitioner exact needs OR-Tools (pip install ortools); greedy needs nothing"
            ) from error
        self._cp, self._problem, self.model = cp_model, problem, cp_model.CpModel()
        kinds: dict[tuple, list[int]] = {}  # equal lanes are interchangeable
        for lane, row in enumerate(problem.seconds):
            kinds.setdefault((tuple(row), problem.memory_bytes[lane]), []).append(lane)
        self._kinds = list(kinds.values())
        devices = range(problem.num_devices)
        self._counts = [[self.model.new_int_var(0, len(lanes), "") for _ in devices] for lanes in self._kinds]
        for variables, lanes in zip(self._counts, self._kinds, strict=True):
            self.model.add(sum(variables) == len(lanes))
            for d in devices:
                if start:
                    self.model.add_hint(variables[d], sum(start[lane] == d for lane in lanes))
        for d in devices:
            if problem.limit_bytes[d] < _UNLIMITED:
                self.model.add(self.load(d, [round(b) for b in problem.memory_bytes]) <= int(problem.limit_bytes[d]))
        for d, e in itertools.pairwise(devices):  # equal devices are interchangeable too
            same_lanes = all(row[d] == row[e] for row in problem.seconds)
            same_rest = all(x[d] == x[e] for x in (problem.limit_bytes, problem.base_seconds))
            if same_lanes and same_rest:
                self.model.add(self._counts[0][d] >= self._counts[0][e])

    def load(self, device: int, costs: Sequence[int]):
        """What a device's lanes cost together, as an expression."""
        return sum(row[device] * costs[lanes[0]] for row, lanes in zip(self._counts, self._kinds, strict=True))

    def solve(self, deadline: float) -> tuple[list[int], str, float]:
        """Devices (none where none were found), `optimal`, `feasible`, `infeasible` or `unknown`, and the bound."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, deadline - time.monotonic())
        status = solver.solve(self.model)
        names = {self._cp.OPTIMAL: "optimal", self._cp.FEASIBLE: "feasible", self._cp.INFEASIBLE: "infeasible"}
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return [], names.get(status, "unknown"), 0.0
        device_of = [-1] * len(self._problem.seconds)
        for variables, lanes in zip(self._counts, self._kinds, strict=True):
            counts = [solver.value(variable) for variable in variables]
            places = itertools.chain.from_iterable([d] * n for d, n in enumerate(counts))
            for lane, d in zip(lanes, places, strict=True):
                device_of[lane] = d
        return device_of, names[status], solver.best_objective_bound


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


_HEURISTICS: dict[str, Callable[[Problem, random.Random], list[int]]] = {
    "random": _random,
    "round_robin": _round_robin,
    "greedy_published": _greedy_published,
    "greedy": _greedy,
    "karmarkar_karp": _karmarkar_karp,
}
PARTITIONERS = (*_HEURISTICS, "exact")

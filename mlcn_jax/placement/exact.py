"""Optimal placements by OR-Tools."""

import itertools
import math
import random
import time
from collections.abc import Sequence

from mlcn_jax.placement.heuristics import greedy
from mlcn_jax.placement.problem import UNLIMITED, NoRoom, Problem, integer_costs, lower_bound_seconds, mib, or_tools

_TOLERANCE = 1 + 1e-9
_MOST_ENDS = 200  # of a device, tried one by one


def solve_exactly(problem: Problem, time_limit_seconds: float) -> tuple[list[int], float, bool]:
    """Devices, a proven lower bound and whether they are optimal, by integer programming (OR-Tools CP-SAT).

    If seconds are integer costs times a factor for each device, as in the thesis's formula, makespans can only take
    certain values: unless these are many, they are tried from the lower bound up, and the first feasible one is the
    shortest. Other seconds are rounded to a millionth of the makespan of `greedy`, or of another placement, and
    "optimal" holds up to that.
    """
    deadline = time.monotonic() + time_limit_seconds
    try:
        start = greedy(problem, random.Random(0))
    except NoRoom:  # greedy fails where this may succeed
        start = []
    integers = integer_costs(problem)
    if integers and start and (ends := _ends(problem, integers[1], start)) is not None:
        return _exact_in_whole_units(problem, *integers, ends, start, deadline)
    most = _makespan(problem, start) if start else sum(map(max, problem.seconds)) + max(problem.base_seconds)
    device_of, bound, status = _exact_in_millionths(problem, most, start, deadline)
    while status == "optimal" and (found := _makespan(problem, device_of)) < most / 100:
        most = found  # a lane that is slow, or cannot run, on one device must not hide what others differ by
        device_of, bound, status = _exact_in_millionths(problem, most, device_of, deadline)
    if status == "infeasible" and not device_of:
        largest = max(range(len(problem.seconds)), key=problem.memory_bytes.__getitem__)
        raise NoRoom(
            f"the lanes do not fit: {mib(sum(problem.memory_bytes))} in pieces of up to "
            f"{mib(problem.memory_bytes[largest])} ({problem.lane_names[largest]}) cannot be placed on "
            + ", ".join(f"{n} ({mib(b)})" for n, b in zip(problem.device_names, problem.limit_bytes, strict=True))
            + ": use fewer or smaller lanes, a smaller batch or more devices"
        )
    if not device_of:
        raise NoRoom(f"no placement was found in {time_limit_seconds} s: allow more time, or use fewer lanes")
    return device_of, bound, status == "optimal"


def _exact_in_millionths(
    problem: Problem, most: float, start: list[int], deadline: float
) -> tuple[list[int], float, str]:
    """The better of the start and what the program finds, a bound and the status: seconds in millionths of `most`.

    No device may take longer than that, up to rounding.
    """
    unit, ceiling = most / 10**6, 10**6 + len(problem.seconds) + 1
    slack = (len(problem.seconds) + 1) / 2  # at least the rounding error
    program = _Program(problem, start)
    longest = program.model.new_int_var(math.floor(lower_bound_seconds(problem) / unit - slack), ceiling, "")
    for d in range(problem.num_devices):
        load = program.load(d, [round(min(row[d] / unit, 2 * ceiling)) for row in problem.seconds])
        program.model.add(load + round(problem.base_seconds[d] / unit) <= longest)
    program.model.minimize(longest)
    device_of, status, bound = program.solve(deadline)
    placed = [one for one in (device_of, start) if one]
    best = min(placed, key=lambda one: _makespan(problem, one), default=[])
    return best, (bound - slack) * unit, status


def _ends(problem: Problem, factors: Sequence[float], start: Sequence[int]) -> list[float] | None:
    """The makespans below that of `start` at which a device can end, ascending; None if they are too many to try."""
    least, most, ends = lower_bound_seconds(problem), _makespan(problem, start), set()
    for base, factor in zip(problem.base_seconds, factors, strict=True):
        first, last = (max(0, math.ceil((end / _TOLERANCE - base) / factor)) for end in (least, most))
        if last - first > _MOST_ENDS:
            return None
        ends |= {base + n * factor for n in range(first, last)}
    return sorted(ends)


def _makespan(problem: Problem, device_of: Sequence[int]) -> float:
    loads = list(problem.base_seconds)
    for lane, device in enumerate(device_of):
        loads[device] += problem.seconds[lane][device]
    return max(loads)


def _exact_in_whole_units(
    problem: Problem,
    costs: list[int],
    factors: list[float],
    ends: Sequence[float],
    start: list[int],
    deadline: float,
) -> tuple[list[int], float, bool]:
    for end in ends:
        program = _Program(problem, start)
        for d, (base, factor) in enumerate(zip(problem.base_seconds, factors, strict=True)):
            program.model.add(program.load(d, costs) <= max(0, math.floor((end * _TOLERANCE - base) / factor)))
        device_of, status, _ = program.solve(deadline)
        if status == "optimal":
            return device_of, end, True
        if status == "unknown":
            return start, end, False
    return start, _makespan(problem, start), True


class _Program:
    """The number of lanes of each kind on each device, as an integer program without an objective."""

    def __init__(self, problem: Problem, start: list[int]):
        cp_model = or_tools()
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
            if problem.limit_bytes[d] < UNLIMITED:
                self.model.add(
                    self.load(d, [math.ceil(b) for b in problem.memory_bytes]) <= int(problem.limit_bytes[d])
                )
        for d, e in itertools.pairwise(devices):  # equal devices are interchangeable too
            same_lanes = all(row[d] == row[e] for row in problem.seconds)
            same_rest = all(x[d] == x[e] for x in (problem.limit_bytes, problem.base_seconds))
            if same_lanes and same_rest:
                self.model.add(self._counts[0][d] >= self._counts[0][e])

    def load(self, device: int, costs: Sequence[int]):
        """The total cost of a device's lanes, as an expression."""
        return sum(row[device] * costs[lanes[0]] for row, lanes in zip(self._counts, self._kinds, strict=True))

    def solve(self, deadline: float) -> tuple[list[int], str, float]:
        """Devices (empty if none were found), `optimal`, `feasible`, `infeasible` or `unknown`, and the bound."""
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

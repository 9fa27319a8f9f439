"""The cheapest machines: which to rent, and which lane trains where, so that all is done by a deadline.

`apart` solves the case of lanes that train without each other as an integer program; `front` compares ways.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from mlcn_jax.placement.problem import or_tools

_log = logging.getLogger(__name__)
_UNITS = 10**6  # into which the longest possible time is divided
_PRICES = 10**9  # at most, into which the highest price is divided
_LARGEST = 2**61  # of the solver's sums
_ALIKE = 1 - 1e-9  # costs that differ by less are equal
_HOUR = 3600


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of machine that may be rented.

    Attributes:
      price: per hour.
      startup_seconds: from requesting it to the first step.
      minimum_seconds: minimum billed time.
      available: how many may be rented, together with all others of its pool.
      lane_seconds: expected time in which it trains each lane alone, by kind of lane; infinite if it does not fit.
      pool: kinds of machine with the same pool share what is available; if empty, this one shares nothing.
    """

    price: float
    startup_seconds: float
    minimum_seconds: float
    available: int
    lane_seconds: tuple[float, ...] = ()
    pool: str = ""

    def cost(self, seconds: float) -> float:
        """Price of renting it for this time."""
        return self.price / _HOUR * max(self.minimum_seconds, seconds)


@dataclasses.dataclass(frozen=True)
class Apart:
    """Machines and the lanes that each trains, one after another.

    Attributes:
      rented: pairs of the number of a kind of machine and the count of each kind of lane.
      seconds: when the last machine is done.
      cost: of all.
    """

    rented: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: float
    cost: float


def apart(
    machines: Sequence[Machine],
    counts: Sequence[int],
    most_machines: int,
    deadline_seconds: float = math.inf,
    time_limit_seconds: float = 2.0,
    *,
    fastest: bool = False,
) -> Apart | None:
    """The cheapest way to train all lanes apart by a deadline (OR-Tools CP-SAT); None if there is none.

    Of equally cheap ways it is the fastest; with `fastest`, of equally fast ones the cheapest. Times are rounded up to
    a millionth of the longest that can be of use.

    Args:
      machines: kinds of machines.
      counts: number of lanes of each kind.
      most_machines: maximum number of machines to rent.
      deadline_seconds: time by which all lanes must be trained.
      time_limit_seconds: time after which the best found so far is returned, with a warning; as much again may go to
        the choice among equals.
      fastest: whether to return the fastest way instead of the cheapest.

    Raises:
      InputError: OR-Tools is not installed.
    """
    cp_model = or_tools("this needs OR-Tools: pip install 'mlcn_jax[exact]'")
    longest = min(deadline_seconds, _longest(machines, counts, deadline_seconds, fastest)) or 1.0  # no lane fits any
    unit = longest / _UNITS
    dearest = max((machine.price for machine in machines), default=0.0) or 1.0
    end = 2 * _UNITS  # more than all of it, rounded up
    if deadline_seconds < math.inf:
        end = min(end, math.floor(deadline_seconds / unit))
    model = cp_model.CpModel()
    slots, loads, spent, taken_by = [], [], [], []
    most_paid = max(2 * _UNITS, *(math.ceil(machine.minimum_seconds / unit) for machine in machines), 0)
    most_slots = max(1, sum(min(machine.available, most_machines, sum(counts)) for machine in machines))
    prices = min(_PRICES, _LARGEST // (most_paid * most_slots))  # so that the cost of all machines fits 64 bits
    pools = _pools(machines)
    in_pool: dict[str | int, list[Any]] = {}
    for number, machine in enumerate(machines):
        before = None
        for _ in range(min(machine.available, most_machines, sum(counts))):
            used = model.new_bool_var("")
            held = [
                model.new_int_var(0, count if seconds <= end * unit else 0, "")
                for count, seconds in zip(counts, machine.lane_seconds, strict=True)
            ]
            model.add(sum(held) >= used)
            for lanes, count in zip(held, counts, strict=True):
                model.add(lanes <= count * used)
            needed = [math.ceil(s / unit) if s <= end * unit else 0 for s in machine.lane_seconds]
            taken = sum(n * h for n, h in zip(needed, held, strict=True))
            taken += math.ceil(machine.startup_seconds / unit) * used
            least = math.ceil(machine.minimum_seconds / unit)
            paid = model.new_int_var(0, max(2 * _UNITS, least), "")
            model.add(taken <= end)
            model.add(paid >= taken)
            model.add(paid >= least * used)
            if before is not None:
                model.add_implication(used, before)  # alike machines are rented in order
            before = used
            slots.append((number, used, held))
            loads.append(used)
            in_pool.setdefault(pools[number], []).append(used)
            taken_by.append(taken)
            spent.append(round(prices * machine.price / dearest) * paid)
    for kind, count in enumerate(counts):
        model.add(sum(held[kind] for _, _, held in slots) == count)
    model.add(sum(loads) <= most_machines)
    for pool, machine in zip(pools, machines, strict=True):
        if len(in_pool.get(pool, ())) > machine.available:
            model.add(sum(in_pool[pool]) <= machine.available)
    last = model.new_int_var(0, end, "")
    for taken in taken_by:
        model.add(last >= taken)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_seconds
    found = None
    for goal in (last, sum(spent)) if fastest else (sum(spent), last):
        model.minimize(goal)
        status = solver.solve(model)
        assert status != cp_model.MODEL_INVALID, "which is not to be taken for a lack of time"
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            rented = tuple((n, tuple(solver.value(x) for x in held)) for n, used, held in slots if solver.value(used))
            found = priced(machines, rented)
        if status != cp_model.OPTIMAL:
            break
        model.add(goal <= solver.value(goal))
    if status not in (cp_model.OPTIMAL, cp_model.INFEASIBLE):
        _log.warning(
            "machines for lanes trained apart: not solved within %g s; a better choice may exist", time_limit_seconds
        )
    return found


def _longest(machines: Sequence[Machine], counts: Sequence[int], deadline_seconds: float, fastest: bool) -> float:
    """The most seconds for which a machine of a cheapest, or fastest, way can be needed or billed.

    All lanes on a single machine are a way, so that none that costs, or takes, more is of use.
    """
    alone = [
        priced([machine], [(0, tuple(counts))])
        for machine in machines
        if all(s < math.inf for s, n in zip(machine.lane_seconds, counts, strict=True) if n)
    ]
    alone = [way for way in alone if way.seconds <= deadline_seconds]
    soonest = min((way.seconds for way in alone), default=math.inf)
    cheapest = min((way.cost for way in alone), default=math.inf)

    def needed(machine: Machine) -> float:
        lanes = sum(n * s for n, s in zip(counts, machine.lane_seconds, strict=True) if s < math.inf)
        affordable = soonest if fastest else cheapest * _HOUR / machine.price if machine.price else math.inf
        return max(machine.minimum_seconds, min(machine.startup_seconds + lanes, affordable))

    return max(map(needed, machines), default=0.0)


def priced(machines: Sequence[Machine], rented: Sequence[tuple[int, tuple[int, ...]]]) -> Apart:
    """Time and cost of machines and their lanes."""
    seconds = [
        machines[n].startup_seconds + sum(k * s for k, s in zip(held, machines[n].lane_seconds, strict=True) if k)
        for n, held in rented
    ]
    cost = sum(machines[n].cost(s) for (n, _), s in zip(rented, seconds, strict=True))
    return Apart(tuple(rented), max(seconds), cost)


class Priced(Protocol):
    """Anything with a time and a cost."""

    @property
    def seconds(self) -> float: ...

    @property
    def cost(self) -> float: ...


P = TypeVar("P", bound=Priced)


def front(ways: Iterable[P]) -> list[P]:
    """The Pareto-optimal ways in time and cost, fastest first; of equally cheap ones, the fastest."""
    kept: list[P] = []
    for way in sorted(ways, key=lambda way: (way.seconds, way.cost)):
        if not kept or way.cost < kept[-1].cost * _ALIKE:
            kept.append(way)
    return kept


def sets(machines: Sequence[Machine], most_machines: int, numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of up to `most_machines` machines of some kinds, which `numbers` gives."""
    pools = _pools(machines)
    for size in range(1, most_machines + 1):
        for chosen in itertools.combinations_with_replacement(numbers, size):
            taken = [pools[n] for n in chosen]
            if all(taken.count(pools[n]) <= machines[n].available for n in chosen):
                yield chosen


def _pools(machines: Sequence[Machine]) -> list[str | int]:
    """The pool of each machine: its own, if it shares nothing."""
    return [machine.pool or number for number, machine in enumerate(machines)]


def undominated(machines: Sequence[Machine], alike: Callable[[int, int], bool], most_machines: int) -> list[int]:
    """Numbers of the machines that can be part of a cheapest way.

    One is left out if others are as fast, cost no more and are together available in sufficient number.

    Args:
      machines: all of them.
      alike: whether the first machine can do what the second does, at least as fast; called with their numbers.
      most_machines: maximum number of machines to rent.
    """
    kept: list[int] = []
    pools = _pools(machines)
    for n in sorted(range(len(machines)), key=lambda n: (machines[n].price, machines[n].minimum_seconds)):
        mine = machines[n]
        better = {
            pools[k]: machines[k].available
            for k in kept
            if machines[k].minimum_seconds <= mine.minimum_seconds
            and machines[k].startup_seconds <= mine.startup_seconds
            and alike(k, n)
        }
        if pools[n] not in better and sum(better.values()) < most_machines:
            kept.append(n)
    return kept

"""Fast partitioners: random, round robin, two greedy rules, and Karmarkar-Karp."""

import heapq
import itertools
import random
from collections.abc import Callable

from mlcn_jax.placement.problem import NoRoom, Problem, mib


class _Filling:
    """The load of devices while lanes are being placed."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self.seconds = list(problem.base_seconds)
        self.free_bytes = list(problem.limit_bytes)
        self.device_of = [-1] * len(problem.seconds)

    def fitting(self, lane: int) -> list[int]:
        """Devices with room for a lane; raises NoRoom if there are none."""
        needed = self._problem.memory_bytes[lane]
        devices = [d for d, free in enumerate(self.free_bytes) if needed <= free]
        if not devices:
            most = max(range(len(self.free_bytes)), key=self.free_bytes.__getitem__)
            raise NoRoom(
                f"no device has room left for {self._problem.lane_names[lane]}, which needs {mib(needed)} (most free: "
                f"{self._problem.device_names[most]}: {mib(self.free_bytes[most])}): try the partitioner "
                "exact, which finds a placement if there is one, or use fewer lanes or a smaller batch"
            )
        return devices

    def place(self, lane: int, device: int) -> None:
        self.device_of[lane] = device
        self.seconds[device] += self._problem.seconds[lane][device]
        self.free_bytes[device] -= self._problem.memory_bytes[lane]


def _largest_first(problem: Problem) -> list[int]:
    return sorted(range(len(problem.seconds)), key=lambda i: -sum(problem.seconds[i]))


def _random(problem: Problem, rng: random.Random) -> list[int]:
    """Each lane, in the given order, to a random device with room."""
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
    """Largest lane first, to the device with the least load so far; of several, to the one listed first.

    Source: do Rosario 2021 (thesis), chapter 5, which leaves open what decides between equal loads.
    """
    del rng
    filling = _Filling(problem)
    for lane in _largest_first(problem):
        filling.place(lane, min(filling.fitting(lane), key=filling.seconds.__getitem__))
    return filling.device_of


def greedy(problem: Problem, rng: random.Random) -> list[int]:
    """Largest lane first, to the device that would finish first.

    Without memory limits and base, at most 4/3 - 1/(3m) times the best makespan on m equal devices (Graham 1969), and
    1.58 times on devices that differ by a factor (Kovacs 2010).
    """
    del rng
    filling = _Filling(problem)
    for lane in _largest_first(problem):
        finish = [done + more for done, more in zip(filling.seconds, problem.seconds[lane], strict=True)]
        filling.place(lane, min(filling.fitting(lane), key=finish.__getitem__))
    return filling.device_of


def _karmarkar_karp(problem: Problem, rng: random.Random) -> list[int]:
    """Largest differencing (Karmarkar and Karp 1982) over equal bins.

    At most 4/3 - 1/(3m) times the best makespan on m equal devices (Michiels et al. 2003). A device n times as
    fast as the slowest counts as n bins, rounded, as long as there are lanes for them; that case has no proven bound.
    Base and memory are considered only when bins are assigned to devices.
    """
    del rng
    columns = list(zip(*problem.seconds, strict=True))
    speeds = [max(map(sum, columns)) / sum(column) for column in columns]
    owners = list(range(problem.num_devices))
    spare = len(problem.seconds) - len(owners)
    spare = max(0, spare)
    extra = sorted((n / s, d) for d, s in enumerate(speeds) for n in range(2, min(round(s), 1 + spare) + 1))
    owners += [d for _, d in extra[:spare]]
    order = itertools.count()  # so that equal differences keep the given order
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
            fitting, taken = filling.fitting(lane), problem.seconds[lane]
            ends = {other: filling.seconds[other] + taken[other] for other in fitting}
            filling.place(lane, device if device in fitting else min(ends, key=ends.__getitem__))
    return filling.device_of


HEURISTICS: dict[str, Callable[[Problem, random.Random], list[int]]] = {
    "random": _random,
    "round_robin": _round_robin,
    "greedy_published": _greedy_published,
    "greedy": greedy,
    "karmarkar_karp": _karmarkar_karp,
}

"""Requests with short deadlines while nodes or links fail: how many are late, and why (`experiments.tiers_gateway`)."""

import collections
import concurrent.futures
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from experiments.quota import Quota
from experiments.tiers_bed import RunningNode
from experiments.tiers_faults import Fault, png
from experiments.tiers_gateway_report import EXTRA_MS
from mlcn_jax.tiers.gateway import RESERVE_SECONDS

_PHASES = ("before", "during", "after")  # of a fault
_REQUESTS_OF_TIME, _MOST_TIMES = 200, 50  # a fault comes once in at least so many requests, and at most so often
_WELL_SECONDS, _LOOK_SECONDS = 60.0, 0.2  # longest wait until a fault is forgotten, and between looks
_FIRST_REQUESTS = 20  # that do not count, before all others: servers and connections have just started
_FIRST_PAUSE_SECONDS = 0.01  # between these
_SAMPLE_SECONDS, _SAMPLES = 1e-3, 2_000  # between looks at a quota, and so many are kept
_MOST_HELD_SECONDS = 0.02  # from when a quota is used up until it is known that processes go on
_MOMENT_SECONDS = 0.05  # within which a fault comes, at random, once it is its turn


def waited_for_core() -> float:
    """Seconds for which this thread was ready to run but had no core so far; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Waits:
    """When processes with a quota were kept waiting: a thread looks again and again while the context is open."""

    def __init__(self, quota: Quota):
        self._quota, self._ended = quota, threading.Event()
        self._seen = collections.deque([self._now()], _SAMPLES)
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Waits":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._quota.held_back(), self._quota.waited()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._seen.append(self._now())

    def between(self, start: float, end: float) -> tuple[float, float]:
        """Seconds between two times of `time.perf_counter` that the quota kept them, and anything their first threads.

        The kernel tells of a wait once it has ended. Waits of two cores at the same time count once.
        """
        time.sleep(max(0.0, end + _MOST_HELD_SECONDS - time.perf_counter()))
        times, *totals = zip(*self._seen.copy(), strict=True)
        return _within(times, totals[0], start, end), _within(times, totals[1], start, end)


def _within(times: Sequence[float], totals: Sequence[float], start: float, end: float) -> float:
    """Seconds between start and end in which a total grew that each time shows what waits took that ended before."""
    found, counted = 0.0, start
    for at, (before, after) in zip(times[1:], itertools.pairwise(totals), strict=True):
        if after > before:
            found += max(0.0, min(at, end) - max(at - (after - before), counted))
            counted = max(counted, min(at, end))
    return found


class Asked:
    """What a gateway's tiers have been asked, and whether those of these names are well, from its `/tiers`."""

    def __init__(self, client: httpx.Client, url: str, names: set[str]):
        self._client, self._url, self._names = client, f"{url}/tiers", names

    def _others(self) -> list[dict[str, Any]]:
        return [state for state in self._client.get(self._url).json() if "trouble" in state]

    def requests(self) -> int:
        """Requests that nodes have been sent."""
        return sum(state["requests"] for state in self._others())

    def wait(self, meanwhile: Callable[[], Any] = lambda: time.sleep(_LOOK_SECONDS)) -> bool:
        """Waits until the tiers are well, or too long; returns whether they are. Does something `meanwhile`."""
        end = time.monotonic() + _WELL_SECONDS
        while any(state["trouble"] and state["name"] in self._names for state in self._others()):
            if time.monotonic() > end:
                return False
            meanwhile()
        return True


def under_fault(
    url: str,
    images: np.ndarray,
    requests: int,
    nodes: list[RunningNode],
    fault: Fault,
    quota: Quota,
    extra_ms: float = EXTRA_MS,
) -> dict[str, Any]:
    """Requests with a short deadline while nodes or links fail: how many were late, or not answered, and why.

    A fault begins after a quarter of some requests, once the gateway has forgotten the one before, and ends after half
    of them more, each at a random moment and while requests go on, so that it meets those that are under way. What
    takes longer, as a node that starts again does, is waited for: then half as many requests at least come before the
    next change, and there are fewer faults. Those count that began before the last request. Only nodes whose answers
    can come in time are waited for; before all, some requests that do not count are sent, until these are well.

    Requests come one after the other, so one that takes long keeps others from being sent. Those that would have been
    sent meanwhile, at the usual pace, are added to the requests and, as far as they would have been late, to the late
    ones, as HdrHistogram corrects for coordinated omission.

    Args:
      url: of the gateway.
      images: that are sent, one a request.
      requests: how many, one after the other.
      nodes: that fail.
      fault: how they begin to fail, and how that ends.
      quota: of the gateway, which tells how long it was kept waiting.
      extra_ms: of the deadline, beyond the 95 % time of the end's own lanes.
    """
    deadline = round(httpx.get(f"{url}/", trust_env=False).json()["own_p95_ms"] + extra_ms, 3)
    met = exposed = at_begin = unwell = 0
    bodies = [png(image) for image in images]
    late: list[dict[str, Any]] = []
    unanswered: list[str] = []
    taken = []
    heard: dict[str, collections.Counter[str]] = {phase: collections.Counter() for phase in _PHASES}
    times = min(max(requests // _REQUESTS_OF_TIME, 1), _MOST_TIMES)
    each, rng, now = requests // times, random.Random(0), [_PHASES[0]]
    under_way: concurrent.futures.Future | None = None
    changes, turn = 0, each // 4  # those that are finished, and the request at which the next one starts

    def change(ends: bool) -> None:
        nonlocal met, exposed, at_begin, unwell
        if not ends:
            unwell += not asked.wait()
            at_begin = asked.requests()
        time.sleep(rng.uniform(0, _MOMENT_SECONDS))
        if not ends:
            now[0] = "during"
        else:
            meanwhile = asked.requests() - at_begin
            exposed, met = exposed + meanwhile, met + (meanwhile > 0)
        fault[ends](nodes)
        if ends:
            now[0] = "after"

    with (
        httpx.Client(timeout=30, trust_env=False) as client,
        httpx.Client(timeout=30, trust_env=False) as another,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        Waits(quota) as waits,
    ):
        in_time = {node.plan.artifact.name for node in nodes if 2 * node.plan.delay_ms < extra_ms}
        asked = Asked(another, url, in_time)

        def ask(i: int) -> dict[str, Any]:
            response = client.post(f"{url}/predict?deadline_ms={deadline}", content=bodies[i % len(bodies)])
            return response.raise_for_status().json()["predictions"][0]

        def ask_one_more() -> None:
            with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
                ask(0)
            time.sleep(_FIRST_PAUSE_SECONDS)

        for _ in range(_FIRST_REQUESTS):
            ask_one_more()
        asked.wait(ask_one_more)
        for i in range(requests):
            if under_way is not None and under_way.done():
                under_way.result()  # which raises what went wrong
                under_way, changes, turn = None, changes + 1, max(turn + each // 2, i + each // 4)
            if under_way is None and changes < 2 * times and i >= turn:
                under_way = pool.submit(change, changes % 2 == 1)
            phase, waited, started = now[0], waited_for_core(), time.perf_counter()
            try:
                answer = ask(i)
            except (httpx.HTTPError, ValueError, LookupError) as error:  # none, or none that is one
                unanswered.append(repr(error))
                continue
            ended = time.perf_counter()
            milliseconds = 1e3 * (ended - started)
            taken.append(milliseconds)
            heard[phase][f"{len(answer['lanes'])} lanes"] += 1
            if milliseconds > deadline:
                one = {"request": i, "phase": phase, "ms": milliseconds, "by_gateway_ms": answer["ms"]}
                one["waited_ms"] = 1e3 * (waited_for_core() - waited)
                came = started + max(milliseconds - answer["ms"], 0.0) / 1e3  # to the gateway, at the latest
                due = max(came, started + deadline / 1e3 - RESERVE_SECONDS)  # when the gateway turns to its answer
                both = zip(waits.between(started, came), waits.between(due, ended), strict=True)
                one["held_back_ms"], one["gateway_waited_ms"] = (1e3 * sum(each) for each in both)
                late.append(one | {"lanes": answer["lanes"], "why": why_late(one, deadline)})
    if under_way is not None:
        under_way.result()
        changes += 1
    if now[0] == "during":
        fault[1](nodes)  # so that the next finds all as it was
    time.sleep(1)
    unsent, late_unsent = omitted(taken, deadline)
    return {
        "requests": requests + unsent,
        "omitted": unsent,
        "times": changes // 2,
        "times_met": met,
        "exposed": exposed,
        "begun_unwell": unwell,
        "planned_times": times,
        "deadline_ms": deadline,
        "extra_ms": extra_ms,
        "late": len(late) + late_unsent,
        "late_by_gateway": sum(one["by_gateway_ms"] > deadline for one in late),
        "unexplained": sum(not one["why"] for one in late),
        "unanswered": len(unanswered),
        "p50_ms": float(np.quantile(taken, 0.5)) if taken else None,
        "p999_ms": float(np.quantile(taken, 0.999)) if taken else None,
        "max_ms": max(taken, default=None),
        "heard": {phase: dict(found) for phase, found in heard.items()},
        "late_ones": late[:100],
        "unanswered_ones": unanswered[:20],
    }


def omitted(taken: Sequence[float], deadline: float) -> tuple[int, int]:
    """Requests that were not sent because another took long, and those of them that would have been late.

    A request that takes t instead of the median m keeps t / m - 1 others from being sent, of which the first would have
    taken t - m, the next t - 2 m and so on.

    Args:
      taken: milliseconds of requests that were sent one after the other.
      deadline: milliseconds after which an answer is late.
    """
    if not taken:
        return 0, 0
    usual = float(np.median(taken))
    slow = [time for time in taken if time > deadline]
    unsent = sum(max(0, int(time / usual) - 1) for time in slow)
    return unsent, sum(int((time - deadline) / usual) for time in slow)


def why_late(one: Mapping[str, Any], deadline: float) -> str:
    """Why an answer was late, from what was measured beside it; empty if it would have been late without it.

    A gateway turns to its answer `RESERVE_SECONDS` before the deadline, by its own clock, which starts when a request
    has come. What kept it waiting counts before that start and after that moment: a wait between the two delays
    nothing. That of the client counts outside the time that the gateway took.

    Args:
      one: milliseconds that it took by the client's clock (`ms`) and the gateway's (`by_gateway_ms`); that the quota
        kept the gateway waiting (`held_back_ms`), and anything the thread that answers (`gateway_waited_ms`), both
        where it counts; and that the client waited for a core (`waited_ms`).
      deadline: milliseconds.
    """
    held = one["held_back_ms"]
    there = max(one["gateway_waited_ms"] - held, 0.0)
    waited = min(one["waited_ms"], max(one["ms"] - one["by_gateway_ms"], 0.0))
    if held + there + waited < one["ms"] - deadline:
        return ""
    reasons = {
        "the gateway had used up its quota and was kept waiting": held,
        "the gateway waited for a core": there,
        "the client waited for a core": waited,
    }
    return ", and ".join(f"{reason} for {each:.1f} ms" for reason, each in reasons.items() if each)

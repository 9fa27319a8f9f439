"""Hands tasks to ends, edges and a cloud, over HTTP, under a schedule and a way to treat ends that fail.

A task is a batch of images. An end's lanes answer it; under all schedules but `End` an edge's or the cloud's lanes then
refine the answer. Tiers work side by side: each device has one task at a time, and waiting ones are in its queue.
"""

import asyncio
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from mlcn_jax.tiers import wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.node import PATH

MODES = ("none", "reassign", "monitor")
_LOOK_SECONDS = 0.25
_MOST_ERRORS = 100  # of connections and servers in one run; each is a failed attempt at a task, like a time-out


@dataclasses.dataclass(frozen=True)
class Device:
    """A node that takes tasks, and what it takes of each."""

    url: str
    tier: TierArtifact


@dataclasses.dataclass
class Outcome:
    """What a run took.

    Attributes:
      seconds: until the last task was done; infinite if it never would have been.
      first_seconds: until the last task had its end's answer.
      dispatch_seconds: core seconds of the dispatcher.
      timeouts: attempts at a task that failed, after which it was handed out again.
      sums: of each task, what all its lanes add up to, [images, classes].
      tiers: of each task, the tiers whose lanes these are; none if it was not done.
    """

    seconds: float
    first_seconds: float
    dispatch_seconds: float
    timeouts: int
    sums: list[np.ndarray]
    tiers: list[tuple[str, ...]]

    def largest_error(self, parts: Mapping[str, Sequence[np.ndarray]]) -> float:
        """How far any sum is from what it should be; `parts` is what the lanes of each tier add to each task."""
        return max(
            (
                float(np.max(np.abs(found - sum(parts[name][number] for name in names))))
                for number, (found, names) in enumerate(zip(self.sums, self.tiers, strict=True))
                if names
            ),
            default=0.0,
        )


def summary(runs: Sequence[Outcome], parts: Mapping[str, Sequence[np.ndarray]]) -> dict[str, Any]:
    """Medians of runs, and how far sums are from `parts` (`Outcome.largest_error`); `seconds` is None if endless."""
    seconds = [run.seconds for run in runs]
    ended = [each for each in seconds if math.isfinite(each)]
    return {
        "seconds": statistics.median(ended) if len(ended) == len(seconds) else None,  # None: it never ends
        "all_seconds": ended,
        "first_seconds": statistics.median(run.first_seconds for run in runs),
        "dispatch_seconds": statistics.median(run.dispatch_seconds for run in runs),
        "timeouts": statistics.median(run.timeouts for run in runs),
        "largest_error": max(run.largest_error(parts) for run in runs),
        "runs": len(runs),
    }


@dataclasses.dataclass
class Failures:
    """Ends that die, and what is done about it: `mode` is one of `MODES`, `timeout` in seconds, `die` stops an end."""

    mode: str
    dead: int
    tasks_before: int
    timeout: float
    die: Callable[[int], None]


async def dispatch(
    schedule: str,
    ends: Sequence[Device],
    edges: Sequence[Device],
    clouds: Sequence[Device],
    tasks: Sequence[np.ndarray],
    cloud_share: float = 0.0,
    failures: Failures | None = None,
) -> Outcome:
    """Runs all tasks once.

    Args:
      schedule: one of `tiers_schedules.SCHEDULES`.
      ends, edges, clouds: the devices.
      tasks: the images of each.
      cloud_share: of the ends that `Mapping` maps to the cloud.
      failures: of ends, under the schedule `End`.
    """
    run = _Run(schedule, ends, edges, clouds, tasks, cloud_share, failures)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as client:
        return await run.to_the_end(client)


class _Run:
    def __init__(self, schedule, ends, edges, clouds, tasks, cloud_share, failures):
        self.ends, self.tasks, self.failures = list(ends), list(tasks), failures
        self.todo: asyncio.Queue[int] = asyncio.Queue()
        for number in range(len(tasks)):
            self.todo.put_nowait(number)
        self.further = {"End": [], "End-Edge": [*edges], "End-Cloud": [*clouds], "Mapping": [*edges, *clouds]}[schedule]
        self.queues: dict[int, asyncio.Queue[int]] = {}
        if schedule == "Mapping":  # each further device has its own ends
            self.queues = {i: asyncio.Queue() for i in range(len(self.further))}
        elif self.further:
            shared: asyncio.Queue[int] = asyncio.Queue()
            self.queues = dict.fromkeys(range(len(self.further)), shared)
        to_cloud = round(cloud_share * len(ends)) if schedule == "Mapping" else 0
        self.next_of = [
            len(edges) + i % len(clouds) if schedule == "Mapping" and i < to_cloud else i % max(len(edges), 1)
            for i in range(len(ends))
        ]
        if schedule == "End-Cloud":
            self.next_of = [0] * len(ends)
        self.parts: list[dict[str, np.ndarray]] = [{} for _ in tasks]
        self.stages = 2 if self.further else 1
        self.done = asyncio.Event()
        self.left = len(tasks)
        self.timeouts = self.errors = 0
        self.first = 0.0
        self.counts = [0] * len(ends)
        self.dead: set[int] = set()
        self.busy: dict[int, int] = {}  # task of each end

    async def to_the_end(self, client: httpx.AsyncClient) -> Outcome:
        await asyncio.gather(*(self._connect(client, device) for device in [*self.ends, *self.further]))
        started, before = time.perf_counter(), time.process_time()
        workers = [asyncio.create_task(self._end(client, i, started)) for i in range(len(self.ends))]
        workers += [asyncio.create_task(self._next(client, i)) for i in range(len(self.further))]
        stuck = asyncio.create_task(self._stuck())
        finished = asyncio.create_task(self.done.wait())
        await asyncio.wait([*workers, finished, stuck], return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - started if self.done.is_set() else math.inf
        for worker in [*workers, finished, stuck]:
            worker.cancel()
        for found in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(found, Exception):
                raise found
        sums = [np.sum(list(parts.values()), axis=0) for parts in self.parts]
        tiers = [tuple(parts) for parts in self.parts]
        return Outcome(seconds, self.first, time.process_time() - before, self.timeouts, sums, tiers)

    async def _connect(self, client: httpx.AsyncClient, device: Device) -> None:
        """Opens a connection, which is no part of any task."""
        (await client.get(device.url + "/health")).raise_for_status()

    async def _post(self, client: httpx.AsyncClient, device: Device, number: int) -> None:
        tier, images = device.tier, self.tasks[number]
        body = wire.pack_request(tier.policy.digest, images)
        response = await client.post(device.url + PATH, content=body)
        response.raise_for_status()
        shape = len(images), len(tier.class_names)
        weight = tier.policy.tier(tier.name).weight
        asked = wire.digest_of(body)
        found = wire.unpack_answer(response.content, tier.policy.digest, tier.name, asked, shape, weight)
        if tier.name not in self.parts[number]:
            self.parts[number][tier.name] = found
            if len(self.parts[number]) == self.stages:
                self.left -= 1
                if not self.left:
                    self.done.set()

    async def _end(self, client: httpx.AsyncClient, i: int, started: float) -> None:
        failing = self.failures
        while True:
            number = await self.todo.get()
            self.busy[i] = number
            if failing and i < failing.dead and self.counts[i] == failing.tasks_before and i not in self.dead:
                failing.die(i)
                self.dead.add(i)
            wait = failing.timeout if failing and failing.mode != "none" else None
            answered = await self._try(client, self.ends[i], number, self.todo, wait)
            del self.busy[i]
            if not answered:
                if failing and failing.mode == "monitor":
                    await self._answers_again(client, i)
                continue
            self.counts[i] += 1
            self.first = time.perf_counter() - started
            if self.further:
                self.queues[self.next_of[i]].put_nowait(number)

    async def _try(
        self,
        client: httpx.AsyncClient,
        device: Device,
        number: int,
        queue: asyncio.Queue[int],
        wait: float | None = None,
    ) -> bool:
        """Whether a device did a task, within `wait` seconds if given; if not, the task is in `queue` again.

        Raises:
          httpx.HTTPError: the task is wrong, or there were too many errors: a device has gone for good.
        """
        pause = 0.0  # others that wait for a task come first
        try:
            async with asyncio.timeout(wait):
                await self._post(client, device, number)
            return True
        except TimeoutError:
            pass
        except httpx.HTTPError as error:
            self.errors += 1
            is_wrong = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if is_wrong or self.errors > _MOST_ERRORS:
                raise
            pause = _LOOK_SECONDS
        self.timeouts += 1
        queue.put_nowait(number)
        await asyncio.sleep(pause)
        return False

    async def _answers_again(self, client: httpx.AsyncClient, i: int) -> None:
        """Waits until an end that had failed is healthy."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    if (await client.get(self.ends[i].url + "/health")).status_code == 200:
                        return
            except (TimeoutError, httpx.HTTPError):
                continue

    async def _next(self, client: httpx.AsyncClient, i: int) -> None:
        while True:
            number = await self.queues[i].get()
            await self._try(client, self.further[i], number, self.queues[i])

    async def _stuck(self) -> None:
        """Ends once only dead ends hold tasks, and nobody would take them back."""
        while not (
            self.failures
            and self.failures.mode == "none"
            and self.todo.empty()
            and self.busy
            and all(i in self.dead for i in self.busy)
        ):
            await asyncio.sleep(0.05)

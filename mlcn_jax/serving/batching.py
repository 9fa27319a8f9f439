"""Batching: one thread computes the requests of several clients together.

No request waits for a batch to fill. An idle thread starts with a single item; the items that arrive while it computes
form the next batch. With a deadline, a batch is only so large that the item that has waited longest is ready in time,
and items that cannot be ready in time are rejected at once. Items that were accepted with a due time of their own are
computed even if that has passed. Needs only numpy.

Source: Crankshaw et al. 2017 (Clipper), section 4.3, for batches sized by a deadline; here by times measured at start.
"""

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

_TIMED_CALLS = 3  # calls timed for each batch size; the fastest counts


class Full(Exception):
    """The queue is full."""


class Late(Exception):
    """The result cannot be ready by the deadline."""


class Gone(Exception):
    """The client disconnected before its item was computed."""


@dataclasses.dataclass(frozen=True)
class _Waiting:
    item: np.ndarray
    future: asyncio.Future
    due: float  # on the clock of `time.monotonic`
    dropped: float  # when it is no longer computed
    is_gone: Callable[[], bool]


class Batcher:
    """Computes items for the coroutines of one event loop, in batches.

    Args:
      compute: maps [n, ...] to [n, ...], one row per item; assumed to take as long as for the next power of two. Called
        in one thread.
      max_batch: largest number of rows in a call, a power of two; 1 turns batching off.
      max_waiting: how many items may wait while others are computed.
      on_batch: called with the number of items of each batch, in the computing thread.
      deadline_seconds: longest time from an item's arrival to the result.

    Attributes:
      failed: whether the last call of `compute` raised.
    """

    def __init__(
        self,
        compute: Callable[[np.ndarray], np.ndarray],
        max_batch: int,
        max_waiting: int,
        on_batch: Callable[[int], None] = lambda size: None,
        deadline_seconds: float = float("inf"),
    ):
        self.failed = False
        self._deadline_seconds = deadline_seconds
        self._busy_until = 0.0
        self._compute, self._max_batch, self._max_waiting, self._on_batch = compute, max_batch, max_waiting, on_batch
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._seconds: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of waiting items."""
        return self._waiting.qsize()

    def warm_up(self, item: np.ndarray) -> None:
        """Computes and times batches of 1, 2, 4 ... `max_batch` copies of an item."""
        size = 1
        while size <= self._max_batch:
            items = np.repeat(item[None], size, axis=0)
            self._compute(items)
            self._seconds[size] = min(_seconds(self._compute, items) for _ in range(_TIMED_CALLS))
            size *= 2

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread, for coroutines of `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread once all waiting items are computed."""
        self._waiting.put(None)
        self._thread.join()

    def submit(
        self,
        items: Sequence[np.ndarray],
        is_gone: Callable[[], bool] = lambda: False,
        due: float = float("inf"),
        arrived: float | None = None,
    ) -> list[asyncio.Future]:
        """Returns a future for each item's row, or for the error that `compute` raised; called in the event loop.

        Times are on the clock of `time.monotonic`. `due` is when these items should be ready, if that is earlier than
        `deadline_seconds` after they have `arrived` (None is now): batches are only so large. Items are computed even
        if they are ready later.

        An item whose turn comes too late for a result `deadline_seconds` after its arrival is not computed, nor is one
        whose client `is_gone`: their futures raise `Late` and `Gone`. Nor are items whose future is cancelled.

        Raises:
          Full: more than `max_waiting` items would wait; none of these is accepted.
          Late: by the times that `warm_up` measured they cannot be ready within `deadline_seconds`; none of these is
            accepted.
        """
        if self.waiting + len(items) > self._max_waiting:
            raise Full
        now = time.monotonic()
        dropped = (now if arrived is None else arrived) + self._deadline_seconds
        if max(self._busy_until, now) + self.seconds_for(self.waiting + len(items)) > dropped:
            raise Late
        futures = [self._loop.create_future() for _ in items]
        for item, future in zip(items, futures, strict=True):
            self._waiting.put(_Waiting(item, future, min(due, dropped), dropped, is_gone))
        return futures

    def seconds_for(self, count: int) -> float:
        """Seconds for `count` items, in batches of the size with the most rows per second; 0 before `warm_up`."""
        if not self._seconds or not count:
            return 0.0
        size = self.batch_size(count)
        return -(-count // size) * self._seconds[1 << (size - 1).bit_length()]

    def batch_size(self, waiting: int, seconds: float = float("inf")) -> int:
        """How many of the waiting items to take: the number with the highest throughput, as timed by `warm_up`.

        Args:
          waiting: number of waiting items, at least 1.
          seconds: time that the batch may take; if even one item takes longer, 1 is returned.
        """
        usable = [size for size in self._seconds if size < 2 * waiting]  # the largest may be padded
        if not usable:
            return min(self._max_batch, waiting)
        quick = [size for size in usable if self._seconds[size] <= seconds] or [1]
        return min(max(quick, key=lambda size: (min(size, waiting) / self._seconds[size], size)), waiting)

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            if not self._is_wanted(first):
                continue
            left = first.due - time.monotonic()
            size = self.batch_size(1 + self._waiting.qsize(), left if left > 0 else float("inf"))  # late: no time limit
            batch = [first]
            while len(batch) < size and not self._waiting.empty():
                if (more := self._waiting.get()) is None:
                    self._waiting.put(None)  # so that the loop ends after this batch
                    break
                if self._is_wanted(more):
                    batch.append(more)
            self._take(batch)

    def _is_wanted(self, one: _Waiting) -> bool:
        """Whether an item is still to be computed; if not, its future raises the reason."""
        if one.future.done():  # another item of its request failed
            return False
        ready = time.monotonic() + self.seconds_for(1)
        reason = Gone() if one.is_gone() else Late() if ready > one.dropped else None
        if reason is not None:
            self._loop.call_soon_threadsafe(_deliver, [one.future], [reason])
        return reason is None

    def _take(self, batch: list[_Waiting]) -> None:
        self._busy_until = time.monotonic() + self.seconds_for(len(batch))
        try:
            rows: Iterable = self._compute(np.stack([one.item for one in batch]))
            self.failed = False
        except Exception as error:
            rows = [error] * len(batch)
            self.failed = True
        self._busy_until = 0.0
        self._on_batch(len(batch))
        self._loop.call_soon_threadsafe(_deliver, [one.future for one in batch], rows)


def _deliver(futures: Sequence[asyncio.Future], rows: Iterable) -> None:
    for future, row in zip(futures, rows, strict=True):
        if future.done():  # the client has gone
            continue
        if isinstance(row, Exception):
            future.set_exception(row)
            future.exception()  # marks it as read: asyncio would report it if another item had failed first
        else:
            future.set_result(row)


def _seconds(compute: Callable[[np.ndarray], np.ndarray], items: np.ndarray) -> float:
    started = time.perf_counter()
    compute(items)
    return time.perf_counter() - started

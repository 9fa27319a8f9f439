"""Batching: one thread computes the requests of several clients together.

No request waits for a batch to fill. An idle thread starts with a single item; the items that arrive while it computes
form the next batch. Needs numpy only.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

_TIMED_CALLS = 3  # of each size, of which the fastest counts


class Full(Exception):
    """The queue is full."""


class Batcher:
    """Computes items for the coroutines of one event loop, in batches.

    Args:
      compute: takes [n, ...] and returns [n, ...], one row for each; it takes as long as for the next power of two.
        Called in one thread.
      max_batch: largest number of rows in a call, a power of two; 1 turns batching off.
      max_waiting: how many items may wait while others are computed.
      on_batch: called with the number of items of each batch, in the computing thread.

    Attributes:
      failed: whether the last call of `compute` raised.
    """

    def __init__(
        self,
        compute: Callable[[np.ndarray], np.ndarray],
        max_batch: int,
        max_waiting: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ):
        self.failed = False
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

    def submit(self, items: Sequence[np.ndarray]) -> list[asyncio.Future]:
        """Returns a future for the row of each item, or for what `compute` raised; called in the event loop.

        Raises:
          Full: more than `max_waiting` items would wait; none of these is taken.
        """
        if self.waiting + len(items) > self._max_waiting:
            raise Full
        futures = [self._loop.create_future() for _ in items]
        for pair in zip(items, futures, strict=True):
            self._waiting.put(pair)
        return futures

    def batch_size(self, waiting: int) -> int:
        """How many of the waiting items to take: the number with the most rows per second, as timed by `warm_up`."""
        usable = [size for size in self._seconds if size < 2 * waiting]  # the largest may be padded
        best = max(usable, key=lambda size: (min(size, waiting) / self._seconds[size], size), default=self._max_batch)
        return min(best, waiting)

    def _run(self) -> None:
        while (pair := self._waiting.get()) is not None:
            size = self.batch_size(1 + self._waiting.qsize())
            pairs = [pair]
            while len(pairs) < size:
                if (pair := self._waiting.get()) is None:
                    self._waiting.put(None)  # so that the loop ends after this batch
                    break
                pairs.append(pair)
            self._take(pairs)

    def _take(self, pairs: list[tuple[np.ndarray, asyncio.Future]]) -> None:
        try:
            rows: Iterable = self._compute(np.stack([item for item, _ in pairs]))
            self.failed = False
        except Exception as error:
            rows = [error] * len(pairs)
            self.failed = True
        self._on_batch(len(pairs))
        futures = [future for _, future in pairs]
        self._loop.call_soon_threadsafe(_deliver, futures, rows)


def _deliver(futures: Sequence[asyncio.Future], rows: Iterable) -> None:
    for future, row in zip(futures, rows, strict=True):
        if future.done():  # the client has gone
            continue
        if isinstance(row, Exception):
            future.set_exception(row)
            future.exception()  # or asyncio reports it where another item of the request failed first
        else:
            future.set_result(row)


def _seconds(compute: Callable[[np.ndarray], np.ndarray], items: np.ndarray) -> float:
    started = time.perf_counter()
    compute(items)
    return time.perf_counter() - started

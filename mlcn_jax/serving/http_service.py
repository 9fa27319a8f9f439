"""What all HTTP services of this package share: limits, metrics, request bodies, batches, routes and errors.

Needs starlette, prometheus_client and python_multipart.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import prometheus_client
import prometheus_client.multiprocess
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcn_jax.data.images import ignore_pillows_warning
from mlcn_jax.errors import InputError, is_lack_of_memory
from mlcn_jax.serving.batching import Batcher, Full, Gone, Late

SMALL_BYTES = 2**13  # reading a body up to this size takes less time than handing it to a thread
IS_GONE = "mlcn_jax.is_gone"  # in the scope of a request: a function that tells whether its client has disconnected
_BODIES_HELD = 8  # bodies of the largest size held in memory at once, or smaller ones with as many bytes
_READERS = 2  # threads that read bodies that are not small
_RETRY = {"Retry-After": "1"}
_log = logging.getLogger("mlcn_jax")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one server accepts.

    Attributes:
      max_batch: images that are computed together, a power of two.
      max_queue: images that may wait while others are computed.
      max_body_bytes: size of one request's body.
      max_images: images in one request.
      max_connections: connections open at a time.
      timeout_seconds: time within which a request must have arrived completely.
      deadline_seconds: longest time from then to the answer; later requests are rejected; 0 sets none.
    """

    max_batch: int
    max_queue: int
    max_body_bytes: int
    max_images: int
    max_connections: int
    timeout_seconds: float
    deadline_seconds: float = 0.0


class Metrics:
    """Metrics for Prometheus."""

    def __init__(self, waiting: Callable[[], int]):
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._all = registry  # of all processes
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._all = prometheus_client.CollectorRegistry()
            prometheus_client.multiprocess.MultiProcessCollector(self._all)
        else:
            prometheus_client.ProcessCollector(registry=registry)
        self._requests = prometheus_client.Counter(
            "mlcn_jax_requests", "Requests that were answered", ["path", "status"], registry=registry
        )
        self._seconds = prometheus_client.Histogram(
            "mlcn_jax_predict_seconds",
            "Seconds from the head of a prediction request to its answer, or the first of several",
            buckets=[2.0**i for i in range(-10, 4)],
            registry=registry,
        )
        self._batch_images = prometheus_client.Histogram(
            "mlcn_jax_batch_images",
            "Images computed together",
            buckets=[2**i for i in range(8)],
            registry=registry,
        )
        self._queue = prometheus_client.Gauge(
            "mlcn_jax_waiting_images", "Images waiting", registry=registry, multiprocess_mode="livesum"
        )
        self._waiting = waiting

    def counter(self, name: str, meaning: str, labels: Sequence[str]) -> prometheus_client.Counter:
        """A counter that a service adds, named `mlcn_jax_NAME`."""
        return prometheus_client.Counter(f"mlcn_jax_{name}", meaning, labels, registry=self._registry)

    def batch(self, size: int) -> None:
        """Counts a batch of `size` images."""
        self._batch_images.observe(size)
        self._queue.set(self._waiting())

    def count(self, status: int, path: str = "") -> None:
        """Counts one answer; `path` is one of the routes, or empty."""
        self._requests.labels(path, status).inc()

    def counting(self, app: ASGIApp, routes: Sequence[Route] = (), computing: Sequence[str] = ()) -> ASGIApp:
        """Wraps `app` to count its answers, separately for each of `routes`, and to time those of paths `computing`."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            started = time.perf_counter()

            async def count(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = next((route.path for route in routes if route.path_regex.match(scope["path"])), "")
                    self.count(message["status"], path)
                    if path in computing:
                        self._seconds.observe(time.perf_counter() - started)
                await send(message)

            await app(scope, receive, count)

        return counted

    def text(self) -> bytes:
        """All metrics, in the text format of Prometheus."""
        self._queue.set(self._waiting())
        return prometheus_client.generate_latest(self._all)


class BatchService:
    """Base class of services that compute rows for the requests of many clients, in batches.

    Args:
      compute: maps [n, ...] to [n, ...], one row per item (`batching.Batcher`).
      row: an example of one item, without the first axis.
      limits: what is accepted.
    """

    computing: Sequence[str] = ()  # paths of the requests that are timed

    def __init__(self, compute: Callable[[np.ndarray], np.ndarray], row: np.ndarray, limits: Limits):
        self.limits, self._row = limits, row
        deadline = limits.deadline_seconds or float("inf")
        self.metrics = Metrics(lambda: self.batcher.waiting)
        self.batcher = Batcher(compute, limits.max_batch, limits.max_queue, self.metrics.batch, deadline)
        ignore_pillows_warning()
        self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, "reader")
        self._held_bytes = 0

    def routes(self) -> list[Route]:
        """The service's own routes, besides /health and /metrics."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compiles all programs; raises InputError if one image alone takes longer than the deadline."""
        self.batcher.warm_up(self._row)
        seconds, deadline = self.batcher.seconds_for(1), self.limits.deadline_seconds
        if deadline and seconds > deadline:
            raise InputError(
                f"a single image takes {seconds:.2g} seconds, so no request could be answered within "
                f"--deadline_seconds={deadline:g}: give a longer deadline, or a smaller model"
            )

    async def try_out(self) -> None:
        """Computes one row; raises what a request would meet."""
        await self.rows([self._row])

    @contextlib.asynccontextmanager
    async def running(self, app: Any):
        """Answers requests while the context is open."""
        self.batcher.start(asyncio.get_running_loop())
        yield
        self.batcher.stop()
        self._readers.shutdown(cancel_futures=True)

    async def receive(
        self,
        headers: dict[bytes, bytes],
        receive: Receive,
        use: Callable[[bytes, Callable[[], None]], T],
        small: Callable[[bytes], bool],
        is_gone: Callable[[], bool] = lambda: False,
    ) -> tuple[T, float]:
        """Reads a body and uses it; returns the result, and when the last byte arrived (`time.monotonic`).

        The result is `use(body, check)`, computed in a thread unless `small(body)`. `check()`, which `use` calls before
        each long computation, raises one of these errors if nobody waits for the result any more.

        Raises:
          ClientDisconnect: the client disconnected, or `is_gone`.
          HTTPException: the body is too large, too many large ones are arriving, memory is short, or the deadline has
            passed.
        """
        if b"upgrade" in headers:  # no body can be read after an upgrade
            raise HTTPException(
                400, "Upgrade is not supported: send the request without it (curl --http1.1)", {"Connection": "close"}
            )
        most = self.limits.max_body_bytes
        if int(headers.get(b"content-length", b"0")) > most:
            raise self._too_large()
        parts: list[bytes] = []
        received, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                more = message["more_body"]
                parts.append(message["body"])
                received += len(message["body"])
                self._held_bytes += len(message["body"])
                if received > most:
                    raise self._too_large()
                if self._held_bytes > _BODIES_HELD * most and received > SMALL_BYTES:
                    raise HTTPException(429, "too many large requests are arriving: try again", _RETRY)
            arrived, body = time.monotonic(), b"".join(parts)
            parts.clear()  # so that the body is not held twice

            def check() -> None:
                if is_gone():
                    raise ClientDisconnect
                if 0 < self.limits.deadline_seconds < time.monotonic() - arrived:
                    raise self._late()

            def use_it() -> T:
                check()
                return use(body, check)

            if small(body):
                return use_it(), arrived
            return await asyncio.get_running_loop().run_in_executor(self._readers, use_it), arrived
        except MemoryError as error:
            raise HTTPException(503, "there is no memory to read the request: try again", _RETRY) from error
        finally:
            self._held_bytes -= received

    def check_room(self) -> None:
        """Raises HTTPException if the queue is full."""
        if self.batcher.waiting >= self.limits.max_queue:
            raise self._full()

    async def rows(
        self,
        items: Sequence[np.ndarray],
        is_gone: Callable[[], bool] = lambda: False,
        due: float = float("inf"),
        arrived: float | None = None,
    ) -> list[np.ndarray]:
        """The computed row of each item, if possible by `due` (`Batcher.submit`, also for `arrived`).

        Raises:
          ClientDisconnect: the client `is_gone`, and not all items were computed.
          HTTPException: the queue is full, the deadline cannot be met, or the model failed.
        """
        rows: list[asyncio.Future] = []
        try:
            rows = self.batcher.submit(items, is_gone, due, arrived)
            return [await row for row in rows]
        except Full as error:
            raise self._full() from error
        except Late as error:
            raise self._late() from error
        except Gone as error:
            raise ClientDisconnect from error
        except Exception as error:
            if is_lack_of_memory(error):
                _log.error("memory ran out for %d images", len(items))
                raise HTTPException(503, "there is too little memory at the moment: try again", _RETRY) from error
            _log.error("the model failed: %s", (str(error).splitlines() or [repr(error)])[0])
            raise HTTPException(500, "the model failed") from error
        finally:
            for row in rows:  # the others of a request that has failed
                row.cancel()

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.limits.max_body_bytes / 2**20:g} MiB")

    def _late(self) -> HTTPException:
        return HTTPException(503, "no answer can be ready by the deadline: try again", _RETRY)

    def _full(self) -> HTTPException:
        return HTTPException(429, f"the queue of {self.limits.max_queue} images is full: try again", _RETRY)


def application(service: BatchService) -> ASGIApp:
    """The ASGI application of all paths of a service."""

    async def health(request: Request) -> Response:
        if service.batcher.failed:  # whoever asks may send no request by which it could recover
            with contextlib.suppress(Exception):
                await service.try_out()
        failed = service.batcher.failed
        return JSONResponse({"status": "failing" if failed else "ready"}, 503 if failed else 200)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404 and detail == "Not Found":  # no path matches
            known = [f"{'POST' if 'POST' in (r.methods or ()) else 'GET'} {r.path}" for r in routes]
            detail = f"there is nothing at this path; the paths are {', '.join(known)}"
        if error.status_code == 405:
            detail = f"{request.url.path} takes {(error.headers or {})['Allow']} only"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    routes = sorted(
        [*service.routes(), Route("/health", health), Route("/metrics", metrics)], key=lambda route: route.path
    )
    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse}, lifespan=service.running)
    app.router.redirect_slashes = False
    counted = service.metrics.counting(app, routes, service.computing)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (counted if scope["type"] == "http" else app)(scope, receive, send)

    return serve

"""The HTTP interface of `serve`: reads pictures from requests, returns predictions, enforces limits, counts.

Needs starlette, prometheus_client and python_multipart.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import logging
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import prometheus_client
from PIL import Image
from python_multipart import exceptions, multipart
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlcn_jax.data.images import FORMATS, read_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.serving import page
from mlcn_jax.serving.batching import Batcher, Full
from mlcn_jax.serving.openapi import description

if TYPE_CHECKING:
    from mlcn_jax.serving.artifact import Classifier


_SMALL_BYTES, _SMALL_PIXELS = 2**13, 2**16  # decoded in less time than handing it to a thread takes
_BODIES_HELD = 8  # how many bodies of the largest size may be held at once, or smaller ones with as many bytes
_READERS = 2  # threads that decode what is not small
_RETRY = {"Retry-After": "1"}
_log = logging.getLogger("mlcn_jax")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one server accepts.

    Attributes:
      max_batch: images that are computed together, a power of two.
      max_queue: images that wait while others are computed.
      max_body_bytes: of one request.
      max_images: in one request.
      max_connections: at a time.
      timeout_seconds: in which a request must have arrived completely.
    """

    max_batch: int
    max_queue: int
    max_body_bytes: int
    max_images: int
    max_connections: int
    timeout_seconds: float


class Metrics:
    """Metrics for Prometheus."""

    def __init__(self, waiting: Callable[[], int]):
        self._registry = registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        self._requests = prometheus_client.Counter(
            "mlcn_jax_requests", "Requests that were answered", ["path", "status"], registry=registry
        )
        self._seconds = prometheus_client.Histogram(
            "mlcn_jax_predict_seconds",
            "From the head of a request to /predict to its answer",
            buckets=[2.0**i for i in range(-10, 4)],
            registry=registry,
        )
        self.batch_images = prometheus_client.Histogram(
            "mlcn_jax_batch_images",
            "Images that were computed together",
            buckets=[2**i for i in range(8)],
            registry=registry,
        )
        queue = prometheus_client.Gauge("mlcn_jax_waiting_images", "Images that wait", registry=registry)
        queue.set_function(waiting)

    def count(self, status: int, path: str = "") -> None:
        """Counts one answer; `path` is one of the routes, or empty."""
        self._requests.labels(path, status).inc()

    def counting(self, app: ASGIApp, paths: Sequence[str] = ()) -> ASGIApp:
        """The same application, which counts its answers, separately for each of `paths`."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            started = time.perf_counter()

            async def count(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in paths else ""
                    self.count(message["status"], path)
                    if path == "/predict":
                        self._seconds.observe(time.perf_counter() - started)
                await send(message)

            await app(scope, receive, count)

        return counted

    def text(self) -> bytes:
        """All counts, in the format of Prometheus."""
        return prometheus_client.generate_latest(self._registry)


class Service:
    """`POST /predict` as an ASGI application, with the model and the threads that it needs.

    Args:
      model: that classifies, an export or a training run.
      limits: of what is accepted.
    """

    def __init__(self, model: "Classifier", limits: Limits):
        self.model, self.limits = model, limits
        self.batcher = Batcher(model.probabilities, limits.max_batch, limits.max_queue, self._count_batch)
        self.metrics = Metrics(lambda: self.batcher.waiting)
        self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, "reader")
        self._held_bytes = 0

    def warm_up(self) -> None:
        """Compiles all programs."""
        self.batcher.warm_up(np.zeros(self.model.image_shape, np.uint8))

    @contextlib.asynccontextmanager
    async def running(self, app: Any):
        """Answers requests while it is open."""
        self.batcher.start(asyncio.get_running_loop())
        yield
        self.batcher.stop()
        self._readers.shutdown(cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if b"upgrade" in headers:  # after which no body is read
            raise HTTPException(
                400, "Upgrade is not supported: send the request without it (curl --http1.1)", {"Connection": "close"}
            )
        find = _finder(headers)
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"), True)
        asked = query.get("top", [None])[-1]
        self._count(asked)  # before the body has come
        if self.batcher.waiting >= self.limits.max_queue:
            raise self._full()
        try:
            found, of_body = await self._receive_pixels(find, int(headers.get(b"content-length", b"0")), receive)
        except ClientDisconnect:
            return
        top = self._count(of_body if asked is None else asked)
        good = [pixels for pixels in found if not isinstance(pixels, str)]
        try:
            rows = iter([await row for row in self.batcher.submit(good)])
        except Full as error:
            raise self._full() from error
        except Exception as error:
            _log.error("the model failed: %s", (str(error).splitlines() or [repr(error)])[0])
            raise HTTPException(500, "the model failed") from error
        every = "probabilities" in query
        answer: dict[str, Any] = {
            "predictions": [
                {"error": p} if isinstance(p, str) else self._prediction(next(rows), every, top) for p in found
            ]
        }
        if not good:
            answer["error"] = "none of the images can be read"
        await JSONResponse(answer, 200 if good else 400)(scope, receive, send)

    async def _receive_pixels(self, find: "_Finder", length: int, receive: Receive) -> "_Pixels":
        """Reads a body, and what is in it."""
        most = self.limits.max_body_bytes
        if length > most:
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
                if self._held_bytes > _BODIES_HELD * most and received > _SMALL_BYTES:
                    raise HTTPException(429, "too many large requests are arriving: try again", _RETRY)
            body = b"".join(parts)
            if find is _whole and _is_small(body):
                return self._pixels(find, body)
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._pixels, find, body)
        finally:
            self._held_bytes -= received

    def _pixels(self, find: "_Finder", body: bytes) -> "_Pixels":
        found: list[np.ndarray | str] = []
        images, top = find(body, self.limits.max_images)
        for image in images:
            try:
                found.append(image if isinstance(image, str) else read_pixels(image, self.model.image_shape))
            except InputError as error:
                found.append(str(error))
        return found, top

    def _count(self, top: str | None) -> int:
        """How many of the most probable classes `top` asks for; 0 where it is not given."""
        most = len(self.model.class_names)
        if top is None:
            return 0
        if top == "all":
            return most
        if not re.fullmatch("[0-9]{1,9}", top) or not 1 <= int(top) <= most:
            raise HTTPException(400, f"top is {top[:20]!r}: give a number from 1 to {most}, or all")
        return int(top)

    def _prediction(self, probabilities: np.ndarray, every: bool, top: int) -> dict[str, Any]:
        names, best = self.model.class_names, int(np.argmax(probabilities))
        answer: dict[str, Any] = {"class": names[best], "probability": float(probabilities[best])}
        if every:
            answer["probabilities"] = dict(zip(names, probabilities.tolist(), strict=True))
        if top:
            most = np.argsort(-probabilities, kind="stable")[:top]
            answer["top"] = [{"class": names[i], "probability": float(probabilities[i])} for i in most]
        return answer

    def _count_batch(self, size: int) -> None:
        self.metrics.batch_images.observe(size)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.limits.max_body_bytes / 2**20:g} MiB")

    def _full(self) -> HTTPException:
        return HTTPException(429, f"the queue of {self.limits.max_queue} images is full: try again", _RETRY)


def application(service: Service) -> ASGIApp:
    """The ASGI application of all paths."""

    async def about(request: Request) -> Response:
        vary = {"Vary": "Accept"}
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page.PAGE, headers={**page.HEADERS, **vary})
        return JSONResponse(
            {
                "classes": service.model.class_names,
                "image_shape": service.model.image_shape,
                "step": service.model.step,
                **({"exported": service.model.exported} if service.model.exported else {}),
                "limits": dataclasses.asdict(service.limits),
            },
            headers=vary,
        )

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(service.model.class_names, service.limits))

    async def health(request: Request) -> Response:
        failed = service.batcher.failed
        return JSONResponse({"status": "failing" if failed else "ready"}, 503 if failed else 200)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        detail = error.detail
        if error.status_code == 404:
            routes = [f"{'POST' if path == '/predict' else 'GET'} {path}" for path in paths]
            detail = f"there is nothing at this path; the paths are {', '.join(routes)}"
        if error.status_code == 405:
            detail = f"{request.url.path} takes {(error.headers or {})['Allow']} only"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    app = Starlette(
        routes=[
            Route("/", about),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/predict", service, methods=["POST"]),
        ],
        exception_handlers={HTTPException: refuse},
        lifespan=service.running,
    )
    app.router.redirect_slashes = False
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    counted = service.metrics.counting(app, paths)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (counted if scope["type"] == "http" else app)(scope, receive, send)

    return serve


_Pixels = tuple[list[np.ndarray | str], str | None]  # of each picture, or why it cannot be read; and `top`
_Images = tuple[Sequence[bytes | str], str | None]  # files of pictures, or what is wrong with one; and `top`
_Finder = Callable[[bytes, int], _Images]  # of a body, with at most so many pictures


def _finder(headers: dict[bytes, bytes]) -> _Finder:
    """Chooses how to find the pictures in a body, by the headers."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HTTPException(415, "a body with a Content-Encoding is not supported: send it uncompressed")
    content_type = headers.get(b"content-type", b"application/octet-stream").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        return _whole
    if kind == "application/json":
        return _in_json
    if kind == "multipart/form-data":
        return lambda body, most: _in_form(content_type, body, most)
    raise HTTPException(415, f"{kind} is not supported: send image/*, multipart/form-data or application/json")


def _whole(body: bytes, most: int) -> _Images:
    return [body], None


def _in_json(body: bytes, most: int) -> _Images:
    try:
        content = json.loads(body)
        images, top = content["images"], content.get("top")
        top = top if top is None or isinstance(top, str) else json.dumps(top)
        if not images or not isinstance(images, list):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        message = 'the body is not {"images": [base64, ...]}, nor that with "top": NUMBER'
        raise HTTPException(400, message) from error
    _check_count(len(images), most)
    found: list[bytes | str] = []
    for image in images:
        try:
            found.append(base64.b64decode(image, validate=True))
        except (ValueError, TypeError):
            found.append("it is not base64")
    return found, top


def _in_form(content_type: str, body: bytes, most: int) -> _Images:
    files: list[bytes] = []
    tops: list[str] = []
    ends: list[bool] = []

    def on_file(file: multipart.File) -> None:
        _check_count(len(files) + 1, most)
        file.file_object.seek(0)
        files.append(file.file_object.read())

    def on_field(field: multipart.Field) -> None:
        if field.field_name == b"top":
            tops.append((field.value or b"").decode("latin-1"))

    try:
        multipart.FormParser(
            "multipart/form-data",
            on_field=on_field,
            on_file=on_file,
            on_end=lambda: ends.append(True),
            boundary=multipart.parse_options_header(content_type)[1].get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": len(body) + 1},  # so that nothing is written to the disk
        ).write(body)
    except exceptions.FormParserError as error:
        raise HTTPException(400, f"the form is malformed: {error}") from error
    if not ends or not files:
        raise HTTPException(400, "the form has no file" if ends else "the form is cut short")
    return files, tops[-1] if tops else None


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise HTTPException(413, f"the request has more than {most} images")


def _is_small(body: bytes) -> bool:
    """Whether a picture has few bytes and, by its header, few pixels."""
    if len(body) > _SMALL_BYTES or body.startswith(b"RIFF"):  # a WebP is decoded when it is opened
        return False
    try:
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            return image.width * image.height <= _SMALL_PIXELS
    except Exception:  # `read_pixels` says what it is
        return False

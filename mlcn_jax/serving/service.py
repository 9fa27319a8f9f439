"""`POST /predict`: reads pictures from requests and returns predictions.

Needs starlette, prometheus_client and python_multipart.
"""

import base64
import dataclasses
import io
import json
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from python_multipart import exceptions, multipart
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlcn_jax.data.images import FORMATS, read_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.serving import page
from mlcn_jax.serving.http_service import IS_GONE, SMALL_BYTES, BatchService, Limits
from mlcn_jax.serving.openapi import description
from mlcn_jax.serving.predict import ranked

if TYPE_CHECKING:
    from mlcn_jax.serving.artifact import Classifier


_SMALL_PIXELS = 2**16  # decoding up to this many pixels takes less time than handing them to a thread


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for predictions.

    Attributes:
      pixels: for each picture, uint8 [height, width, channels], or why it cannot be read.
      top: how many of the most probable classes to return; 0 for none.
      every: whether to return the probabilities of all classes.
      arrived: when the request was complete, on the clock of `time.monotonic`.
    """

    pixels: Sequence[np.ndarray | str]
    top: int
    every: bool
    arrived: float

    @property
    def good(self) -> list[np.ndarray]:
        """The pictures that could be read."""
        return [pixels for pixels in self.pixels if not isinstance(pixels, str)]


class Service(BatchService):
    """Answers `POST /predict`, with the model and the threads that it needs.

    Args:
      model: the model that classifies, an export or a training run.
      limits: what is accepted.
    """

    computing: Sequence[str] = ("/predict",)

    def __init__(self, model: "Classifier", limits: Limits):
        super().__init__(model.scores, np.zeros(model.image_shape, np.uint8), limits)
        self.model = model

    def routes(self) -> list[Route]:
        return [
            Route("/", self._about),
            Route("/openapi.json", self._openapi),
            Route("/predict", self, methods=["POST"]),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked = await self.read(scope, receive)
            good = asked.good
            rows = iter(await self.rows(good, _is_gone(scope), arrived=asked.arrived) if good else ())
        except ClientDisconnect:
            return
        found = [{"error": p} if isinstance(p, str) else self.prediction(next(rows), asked) for p in asked.pixels]
        await self.answer(found)(scope, receive, send)

    async def read(self, scope: Scope, receive: Receive) -> Asked:
        """Reads a request; raises HTTPException if it is malformed, ClientDisconnect if the client disconnected."""
        headers = dict(scope["headers"])
        find = _finder(headers)
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"), True)
        asked = query.get("top", [None])[-1]
        self._count(asked)  # rejects a wrong value before the body arrives
        self.check_room()

        def small(body: bytes) -> bool:
            return find is _whole and _is_small(body)

        (found, of_body), arrived = await self.receive(
            headers, receive, lambda body, check: self._pixels(find, body, check), small, _is_gone(scope)
        )
        return Asked(found, self._count(of_body if asked is None else asked), "probabilities" in query, arrived)

    def answer(self, predictions: list[dict[str, Any]]) -> Response:
        """The response with a prediction, or an error, for each picture."""
        some = any("error" not in prediction for prediction in predictions)
        content = {"predictions": predictions, **({} if some else {"error": "none of the images can be read"})}
        return JSONResponse(content, 200 if some else 400)

    def prediction(self, scores: np.ndarray, asked: Asked) -> dict[str, Any]:
        """The answer for one picture, from its scores (`Classifier.scores`), [classes]."""
        names = self.model.class_names
        most = ranked(names, scores, max(asked.top, 1))
        answer: dict[str, Any] = dict(most[0])
        if asked.every:
            answer["probabilities"] = dict(zip(names, np.minimum(scores, 1).tolist(), strict=True))
        if asked.top:
            answer["top"] = most
        return answer

    async def _about(self, request: Request) -> Response:
        vary = {"Vary": "Accept"}
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page.PAGE, headers={**page.HEADERS, **vary})
        return JSONResponse(self.about(), headers=vary)

    def about(self) -> dict[str, Any]:
        """The answer to programs at `/`: the model and the limits."""
        return {
            "classes": self.model.class_names,
            "image_shape": self.model.image_shape,
            "step": self.model.step,
            **({"exported": self.model.exported} if self.model.exported else {}),
            "runtime": self.model.runtime,
            "limits": dataclasses.asdict(self.limits),
        }

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(description(self.model.class_names, self.limits))

    def _pixels(self, find: "_Finder", body: bytes, check: Callable[[], None]) -> "_Pixels":
        found: list[np.ndarray | str] = []
        images, top = find(body, self.limits.max_images)
        for image in images:
            check()
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


_Pixels = tuple[list[np.ndarray | str], str | None]  # for each picture, pixels or why it cannot be read; and `top`
_Images = tuple[Sequence[bytes | str], str | None]  # for each picture, its file or what is wrong with it; and `top`
_Finder = Callable[[bytes, int], _Images]  # finds the pictures in a body, at most the given number


def _is_gone(scope: Scope) -> Callable[[], bool]:
    return scope.get(IS_GONE, lambda: False)


def _finder(headers: dict[bytes, bytes]) -> _Finder:
    """Chooses by the headers how to find the pictures in a body."""
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
        message = 'the body must be {"images": [base64, ...]}, optionally with "top": NUMBER'
        raise HTTPException(400, message) from error
    _check_count(len(images), most)
    found: list[bytes | str] = []
    for image in images:
        try:
            found.append(base64.b64decode("".join(image.split()), validate=True))  # MIME's has line breaks
        except (ValueError, AttributeError):
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
    if len(body) > SMALL_BYTES or body.startswith(b"RIFF"):  # a WebP is decoded when it is opened
        return False
    try:
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            return image.width * image.height <= _SMALL_PIXELS
    except Exception:  # `read_pixels` says what it is
        return False

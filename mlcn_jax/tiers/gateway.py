"""`tiers gateway`: the end device's server. Its own lanes answer at once, and further tiers refine the answer."""

import asyncio
import contextlib
import json
import math
import re
import threading
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlcn_jax.errors import InputError
from mlcn_jax.serving.http_service import IS_GONE, Limits
from mlcn_jax.serving.openapi import description
from mlcn_jax.serving.service import Service
from mlcn_jax.tiers import page
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.client import TierClient
from mlcn_jax.tiers.refine import Answer, refine

RESERVE_SECONDS = 0.01  # of a deadline, kept for a request's way to this process and its answer's way back
_TIMED_RUNS = 50
_JSON_LINES = "application/x-ndjson"


class _Unsent(Response):
    """The response to a client that has gone, which is not counted as an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass


class _Own:
    """The gateway's own lanes as a model of a `Service`."""

    def __init__(self, artifact: TierArtifact):
        self.class_names, self.image_shape = artifact.class_names, artifact.image_shape
        self.step, self.exported, self.runtime = artifact.step, artifact.exported, artifact.runtime
        self.scores = artifact.part  # the rows of this service are squared lengths


class GatewayService(Service):
    """Answers `POST /predict` and `POST /refine` with the tiers of a split model.

    Args:
      artifact: the artifact of the first tier.
      clients: clients of the other tiers, by name; a tier that has none counts as lost.
      limits: what is accepted.
      deadline_ms: deadline of each answer; 0 waits until it is final. Requests may give another.
      bits: bits of each value of a cut that leaves this device.
      noise: standard deviation of the Gaussian noise added to these values, relative to their own.
      may_stop: whether clients may stop tiers, as the page does.

    Raises:
      InputError: fewer bits or noise are requested, but this split sends pixels, which are not changed.
    """

    computing = ("/predict", "/refine")

    def __init__(
        self,
        artifact: TierArtifact,
        clients: Mapping[str, TierClient],
        limits: Limits,
        deadline_ms: float = 0.0,
        bits: int = 32,
        noise: float = 0.0,
        may_stop: bool = False,
    ):
        super().__init__(_Own(artifact), limits)  # type: ignore[arg-type]
        self.artifact, self.policy = artifact, artifact.policy
        names = self.policy.names[1:]
        self.clients = {name: clients.get(name) or TierClient(name, self.policy, []) for name in names}
        for client in self.clients.values():
            client.most_waiting = limits.max_queue
        if self.policy.cut == "pixels" and (noise or bits != 32):
            raise InputError(
                f"--noise={noise:g} and --bits={bits} change the values of a cut, but this split sends exact pixels: "
                "leave both out, or split the model again with another --cut"
            )
        self.deadline_ms, self.own_ms, self.least_ms = deadline_ms, 0.0, 0.0
        self._bits, self._noise, self._may_stop = bits, noise, may_stop
        self._drawing = threading.Lock()
        self._rng = np.random.default_rng()  # secret: noise from a known seed could be subtracted again
        self._answers = self.metrics.counter("tier_answers", "Images by the tiers that answered", ["heard"])

    def routes(self) -> list[Route]:
        return [
            *super().routes(),
            Route("/refine", self._refine, methods=["POST"]),
            Route("/tiers", self._tiers),
            Route("/tiers/{name}", self._stop, methods=["POST"]),
        ]

    def warm_up(self) -> None:
        """Compiles all programs, and times them: no deadline can be shorter than this device's own lanes take."""
        super().warm_up()
        for tier, each in self.artifact.warm_up(self.limits.max_images).items():
            for size, taken in each.items():
                self.clients[tier].home(size).took(taken)
        row = np.zeros((1, *self.artifact.image_shape), np.uint8)
        seconds = []
        for _ in range(_TIMED_RUNS):
            started = time.perf_counter()
            self.artifact.part(row)
            seconds.append(time.perf_counter() - started)
        self.own_ms = 1e3 * float(np.quantile(seconds, 0.95))
        self.least_ms = _rounded_up(self.own_ms + 1e3 * RESERVE_SECONDS)
        if 0 < self.deadline_ms < self.least_ms:
            raise InputError(self._too_short(self.deadline_ms))

    @contextlib.asynccontextmanager
    async def running(self, app: Any):
        watching = [asyncio.create_task(client.watch()) for client in self.clients.values()]
        try:
            async with super().running(app):
                yield
        finally:
            for task in watching:
                task.cancel()
            for client in self.clients.values():
                await client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline, started = self._deadline(scope), time.monotonic()
        try:
            asked = await self.read(scope, receive)
        except ClientDisconnect:
            return
        self._check_deadline(1e3 * deadline, len(asked.good))
        found: list[dict[str, Any]] = [{"error": p} if isinstance(p, str) else {} for p in asked.pixels]
        if asked.good:
            answer = None
            try:
                async with contextlib.aclosing(self._answers_to(asked.good, started, deadline, scope)) as answers:
                    async for answer in answers:  # noqa: B007  # the last one counts
                        if scope.get(IS_GONE, lambda: False)():
                            return
            except ClientDisconnect:
                return
            assert answer is not None
            self._count_answers(answer)
            for image, one in enumerate(one for one in found if not one):
                one |= self.prediction(answer.probabilities(image), asked) | self._heard(
                    answer, image, started, final=True
                )
        await self.answer(found)(scope, receive, send)

    async def _refine(self, request: Request) -> Response:
        deadline, started = self._deadline(request.scope), time.monotonic()
        try:
            asked = await self.read(request.scope, request.receive)
        except ClientDisconnect:
            return _Unsent()
        if len(asked.pixels) != 1:
            raise HTTPException(400, f"/refine takes one picture, not {len(asked.pixels)}")
        if not asked.good:
            raise HTTPException(400, str(asked.pixels[0]))
        answers = self._answers_to(asked.good, started, deadline, request.scope)
        try:
            first = await anext(answers)  # before the response begins, so that a failure still has its own status
        except ClientDisconnect:
            return _Unsent()

        def line(values: dict[str, Any]) -> bytes:
            return json.dumps(values).encode() + b"\n"

        async def lines() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answers):
                answer: Answer | None = first
                if self.policy.groups:
                    coarse, probability = self.policy.group(first.sums[0], first.heard[0])
                    told = {"coarse": coarse, "probability": probability}
                    yield line(told | self._heard(first, 0, started, final=False))
                while answer is not None:
                    told = self.prediction(answer.probabilities(0), asked) | self._heard(answer, 0, started)
                    yield line(told)
                    if told["final"]:
                        break
                    answer = await anext(answers, None)
                else:  # nothing better will come
                    yield line(told | {"final": True, "lost": first.lost[0], "ms": self._ms(started)})
                self._count_answers(first)

        return StreamingResponse(lines(), media_type=_JSON_LINES, headers={"Cache-Control": "no-store"})

    async def _answers_to(
        self, images: list[np.ndarray], started: float, deadline: float, scope: Scope
    ) -> AsyncGenerator[Answer, None]:
        due = started + deadline - RESERVE_SECONDS
        own = np.stack(await self.rows(images, scope.get(IS_GONE, lambda: False), due))
        async with contextlib.aclosing(
            refine(self.policy, np.stack(images), own, self.clients, self._home, self._bits, due)
        ) as answers:
            async for answer in answers:
                yield answer

    async def _home(self, tier: str, images: np.ndarray) -> np.ndarray:
        if self.policy.cut == "pixels":
            return images
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._leaving, tier, images)

    def _leaving(self, tier: str, images: np.ndarray) -> np.ndarray:
        """The values at the cut, with noise; called in threads."""
        rows = self.artifact.home(tier, images)
        if self._noise:
            with self._drawing:
                noise = self._rng.standard_normal(rows.shape, np.float32)
            rows = rows + self._noise * rows.std() * noise
        return rows

    def _heard(self, answer: Answer, image: int, started: float, final: bool | None = None) -> dict[str, Any]:
        lost = answer.lost[image]
        return {
            "tier": answer.tier[image],
            "lanes": self.policy.lanes(answer.heard[image]),
            "ms": self._ms(started),
            "final": bool(answer.final[image]) if final is None else final,
            **({"lost": lost} if lost else {}),
        }

    def _ms(self, started: float) -> float:
        return round(1e3 * (time.monotonic() - started), 2)

    def _count_answers(self, answer: Answer) -> None:
        for heard in answer.heard:
            self._answers.labels("+".join(name for name in self.policy.names if name in heard)).inc()

    def _deadline(self, scope: Scope) -> float:
        """Seconds from the head of a request to its answer."""
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1"), True)
        milliseconds = self.deadline_ms
        if "deadline_ms" in query:
            text = query["deadline_ms"][-1]
            if not re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,6})?", text):
                raise HTTPException(
                    400, f"deadline_ms is {text[:20]!r}: give milliseconds, or 0 to wait for a final answer"
                )
            milliseconds = float(text)
        if milliseconds:
            self._check_deadline(milliseconds)
        return milliseconds / 1e3 or float("inf")

    def _check_deadline(self, milliseconds: float, count: int = 1) -> None:
        """Refuses a deadline before which this device's own lanes cannot answer for so many images."""
        if milliseconds < self._least_ms(count):
            raise HTTPException(400, self._too_short(milliseconds, count))

    def _least_ms(self, count: int) -> float:
        of_all = 1e3 * (self.batcher.seconds_for(count) + RESERVE_SECONDS) if count > 1 else 0.0
        return max(self.least_ms, _rounded_up(of_all))

    def _too_short(self, milliseconds: float, count: int = 1) -> str:
        of_images = f" for {count} images" if count > 1 else ""
        return (
            f"a deadline of {milliseconds:g} ms is too short: this device's own lanes{of_images}, with "
            f"{1e3 * RESERVE_SECONDS:g} ms for a request's way here and back, take {self._least_ms(count):.1f} ms: "
            "give a longer deadline, or fewer lanes to this tier"
        )

    def about(self) -> dict[str, Any]:
        return {
            **super().about(),
            "tiers": self._states(),
            "policy": self.policy.digest,
            "cut": self.policy.cut,
            "bits": self._bits,
            "deadline_ms": self.deadline_ms,
            "own_p95_ms": round(self.own_ms, 2),
            "least_deadline_ms": self.least_ms,
            "may_stop": self._may_stop,
        }

    async def _openapi(self, request: Request) -> Response:
        found = description(self.model.class_names, self.limits)
        predict = found["paths"]["/predict"]["post"]
        deadline = {
            "name": "deadline_ms",
            "in": "query",
            "schema": {"type": "number", "minimum": 0},
            "description": f"milliseconds until the answer, at least {self.least_ms:.1f}; 0 waits for a final one",
        }
        predict["parameters"].append(deadline)
        lines = {"200": {"description": "one JSON object per line; the last is final", "content": {_JSON_LINES: {}}}}
        found["paths"]["/refine"] = {
            "post": {
                **predict,
                "summary": "Classify one picture, with answers that improve",
                "responses": predict["responses"] | lines,
            }
        }
        found["components"]["schemas"]["Prediction"]["properties"] |= {
            "tier": {"type": "string", "description": "the last tier that answered"},
            "lanes": {"type": "array", "items": {"type": "integer"}, "description": "the lanes that have answered"},
            "ms": {"type": "number", "description": "milliseconds since the request began to arrive"},
            "final": {"type": "boolean", "description": "whether no better prediction follows"},
            "lost": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "tiers that would have been asked and did not answer, with the reasons",
            },
        }
        states = {"type": "array", "items": {"type": "object"}}
        answer = {"200": {"description": "the state of each tier", "content": {"application/json": {"schema": states}}}}
        found["paths"]["/tiers"] = {"get": {"summary": "The state of each tier", "responses": answer}}
        if self._may_stop:
            found["paths"]["/tiers/{name}"] = {
                "post": {
                    "summary": "Stop asking a tier (true), or ask it again (false)",
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "boolean"}}}},
                    "responses": answer,
                }
            }
        return JSONResponse(found)

    def _states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = []
        for tier in self.policy.tiers:
            state: dict[str, Any] = {"name": tier.name, "lanes": tier.lanes}
            if tier.name != self.artifact.name:
                client = self.clients[tier.name]
                state |= {
                    "available": client.is_available,
                    "trouble": client.trouble,
                    "stopped": client.stopped,
                    "requests": client.traffic.requests,
                    "sent_bytes": client.traffic.sent,
                    "received_bytes": client.traffic.received,
                    "answers": client.traffic.answers,
                    "failures": client.traffic.failures,
                    "nodes": [
                        {"url": node.url, "trouble": node.breaker.reason, "expected_ms": _ms_of(node.times(1).mean)}
                        for node in client.nodes
                    ],
                }
            states.append(state)
        return states

    async def _tiers(self, request: Request) -> Response:
        return JSONResponse(self._states())

    async def _stop(self, request: Request) -> Response:
        if not self._may_stop:
            raise HTTPException(403, "tiers can be stopped only if the gateway was started with --may_stop")
        name = request.path_params["name"]
        if name not in self.clients:
            raise HTTPException(404, f"there is no tier {name[:40]!r}; there are {', '.join(self.clients)}")
        try:
            body, _ = await self.receive(
                dict(request.headers.raw), request.receive, lambda body, check: body, lambda body: True
            )
        except ClientDisconnect:
            return _Unsent()
        if request.headers.get("content-type") != "application/json" or body not in (b"true", b"false"):
            raise HTTPException(400, "send true to stop the tier or false to resume it, as application/json")
        self.clients[name].stopped = body == b"true"
        return JSONResponse(self._states())

    async def _about(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(page.PAGE, headers={**page.HEADERS, "Vary": "Accept"})
        return await super()._about(request)


def _rounded_up(milliseconds: float) -> float:
    """To tenths, up: what clients are told is then long enough."""
    return math.ceil(round(10 * milliseconds, 6)) / 10


def _ms_of(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)

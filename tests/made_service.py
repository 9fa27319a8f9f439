"""A service before a model that answers when a test says so, and requests to it without HTTP."""

import asyncio
import io
import json
import threading

import numpy as np
from PIL import Image

from mlcn_jax.serving.http_service import Limits, application
from mlcn_jax.serving.service import Service


class Slow:
    """A model that takes its time: it answers once `go` is set."""

    class_names, image_shape, step, exported = ("dark", "light"), (2, 2, 1), 1, "today"
    runtime = "xla"

    def __init__(self):
        self.entered, self.go, self.sizes = threading.Event(), threading.Event(), []

    def scores(self, images):
        self.entered.set()
        self.go.wait(30)
        self.sizes.append(len(images))
        if images[0].max() == 13:
            raise RuntimeError("thirteen")
        if images[0].max() == 14:
            raise MemoryError
        light = images.mean(axis=(1, 2, 3)) / 255
        return np.stack([1 - light, light], axis=1)


def pixel(value):
    buffer = io.BytesIO()
    Image.new("L", (2, 2), value).save(buffer, "PNG")
    return buffer.getvalue()


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def ask(
    app, body, path="/predict", method="POST", whole=None, query=b"", headers=(), parse=json.loads, scope=None
):
    """Status, headers and answer of an ASGI application, if there is one; the body ends once `whole` is set."""
    scope = {**(scope or {}), "type": "http", "method": method, "path": path, "query_string": query, "root_path": ""}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()]
    sent, parts = [], [body, b""] if whole else [body]

    async def receive():
        part = parts.pop(0)
        if whole and not parts:
            await whole.wait()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return (sent[0]["status"], dict(sent[0]["headers"]), parse(sent[1]["body"])) if sent else None


def in_process(check, **limits):
    """Runs `check(app, slow, service)`, a coroutine, with a server without HTTP before a slow model."""
    slow = Slow()
    values = {"max_batch": 8, "max_queue": 8, "max_body_bytes": 1000, "max_images": 4, "max_connections": 9}
    service = Service(slow, Limits(**{**values, "timeout_seconds": 5, **limits}))

    async def run():
        async with service.running(None):
            await asyncio.wait_for(check(application(service), slow, service), 30)

    asyncio.run(run())

"""Nodes that answer too much or too late, and clients that have gone, without a model."""

import asyncio
import json
import time
import types

import httpx
import numpy as np
import pytest
from test_policy import made

from mlcn_jax.serving.http_service import IS_GONE, Limits
from mlcn_jax.tiers import client as clients
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.client import Node, TierClient, TierLost
from mlcn_jax.tiers.node import NodeService

LIMITS = Limits(max_batch=2, max_queue=16, max_body_bytes=2**20, max_images=4, max_connections=50, timeout_seconds=5.0)
IMAGES = np.zeros((1, 4, 4, 1), np.uint8)


def tier_of(handler):
    """A tier with one node, which answers what a function of the request returns."""
    client = TierClient("edge", made(), ["http://node"])
    client.nodes = [Node("http://node", True, httpx.MockTransport(handler))]
    return client


def answer_to(request):
    nonce = json.loads(request.content.partition(b"\n")[0])["nonce"]
    return wire.pack_answer(made().digest, "edge", nonce, np.full((1, 3), 0.5, np.float32))


def ask(client, seconds):
    return client.ask(IMAGES, 32, time.monotonic() + seconds)


def test_an_answer_without_end_is_not_kept():
    sent = []

    async def endless():
        for _ in range(10_000):
            sent.append(1)
            yield bytes(2**12)

    async def handler(request):
        return httpx.Response(200, content=endless())

    async def check():
        client = tier_of(handler)
        with pytest.raises(TierLost, match="the answer has more than 16396 bytes"):
            await ask(client, 5)
        assert len(sent) < 10
        assert not client.is_available, "no other answer of it is awaited"

    asyncio.run(check())


def test_a_tier_that_is_too_far_for_a_deadline_is_not_sent_every_image():
    async def handler(request):
        await asyncio.sleep(0.2)
        return httpx.Response(200, content=answer_to(request))

    async def check():
        client = tier_of(handler)
        assert client.is_worth_asking(1, 0.05), "nothing is known"
        with pytest.raises(TierLost):
            await ask(client, 0.05)
        assert not client.is_worth_asking(1, 0.05)
        assert client.is_worth_asking(1, 5)
        client._asked = 0.0
        assert client.is_worth_asking(1, 0.05), "from time to time"
        assert (await ask(client, 5)).tolist() == [[0.5] * 3]
        client._asked = time.monotonic()
        assert not client.is_worth_asking(1, 0.05)

    asyncio.run(check())


def test_connections_are_opened_before_they_are_needed(monkeypatch):
    monkeypatch.setattr(clients, "_SECONDS_BETWEEN_LOOKS", 0.01)
    asked = []

    async def handler(request):
        asked.append(request.url.path)
        if request.url.path == "/part":
            await asyncio.sleep(5)
        return httpx.Response(200)

    async def check():
        client = tier_of(handler)
        watching = asyncio.create_task(client.watch())
        for looks in (1, 2):
            for _ in range(500):
                await asyncio.sleep(0.01)
                if not client.nodes[0].is_cold:
                    break
            assert asked.count("/health") == looks
            with pytest.raises(TierLost):  # which closes the connection
                await ask(client, 0.03)
        watching.cancel()

    asyncio.run(check())


def test_what_a_client_no_longer_waits_for_is_not_computed():
    computed = []

    def part(rows):
        computed.append(len(rows))
        return np.full((len(rows), 3), 0.5, np.float32)

    policy = made()
    tier = types.SimpleNamespace(part=part, row_shape=(4, 4, 1), row_dtype=np.dtype(np.uint8), policy=policy)
    tier.name = "edge"
    body = wire.pack_request(policy.digest, "n", IMAGES)

    async def check():
        service = NodeService(tier, LIMITS)
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message["type"])

        async with service.running(None):
            for is_gone in (True, False):
                scope = {"type": "http", "method": "POST", "headers": [], IS_GONE: lambda gone=is_gone: gone}
                await service(scope, receive, send)
        assert computed == [1]
        assert sent == ["http.response.start", "http.response.body"]

    asyncio.run(check())

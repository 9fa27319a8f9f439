"""Nodes that answer too much or too late, and clients that have gone, without a model."""

import asyncio
import concurrent.futures
import dataclasses
import gzip
import itertools
import threading
import time
import types

import httpx
import numpy as np
import pytest
from conftest import in_no_time
from test_policy import made

from mlcn_jax.serving.http_service import IS_GONE, Limits, application
from mlcn_jax.tiers import client as clients
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.client import Node, TierClient, TierLost
from mlcn_jax.tiers.node import NodeService
from mlcn_jax.tiers.refine import refine

LIMITS = Limits(max_batch=2, max_queue=16, max_body_bytes=2**20, max_images=4, max_connections=50, timeout_seconds=5.0)
IMAGES = np.zeros((1, 4, 4, 1), np.uint8)


def tier_of(handler):
    """A tier with one node, which answers what a function of the request returns."""
    client = TierClient("edge", made(), ["http://node"])
    client.nodes = [Node("http://node", True, httpx.MockTransport(handler))]
    return client


def service_of(part, limits=LIMITS):
    """A node that answers what a function of the images returns."""
    policy = made()
    tier = types.SimpleNamespace(part=part, row_shape=(4, 4, 1), row_dtype=np.dtype(np.uint8), policy=policy)
    tier.name = "edge"
    return NodeService(tier, limits)


def answer_to(request):
    return wire.pack_answer(made().digest, "edge", wire.digest_of(request.content), np.full((1, 3), 0.5, np.float32))


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


def test_a_tier_is_not_asked_when_no_time_is_left_after_packing(monkeypatch):
    async def check():
        client = tier_of(lambda request: pytest.fail("it was asked"))
        pack = client._pack
        monkeypatch.setattr(client, "_pack", lambda *given: time.sleep(0.2) or pack(*given))
        with pytest.raises(TierLost, match="no time was left to ask it"):
            await ask(client, 0.1)

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


def test_a_node_that_has_failed_comes_after_the_others():
    """Though it would be faster: a request with a short deadline has no time for a second node."""
    asked = []

    def handler(request):
        asked.append(request.url.host)
        if asked == ["fast"]:
            return httpx.Response(500)
        return httpx.Response(200, content=answer_to(request))

    async def check():
        client = tier_of(handler)
        client.nodes = [Node(f"http://{name}", True, httpx.MockTransport(handler)) for name in ("fast", "slow")]
        for node, seconds in zip(client.nodes, (0.001, 0.5), strict=True):
            node.times(1).took(seconds)
        for _ in range(2):
            assert (await ask(client, 5)).tolist() == [[0.5] * 3]
        assert asked == ["fast", "slow", "slow"]
        client.nodes[0].breaker.worked()
        await ask(client, 5)
        assert asked[-1] == "fast"

    asyncio.run(check())


def test_at_a_deadline_the_answer_goes_before_the_requests_that_are_awaited_are_ended():
    async def check():
        ended = []

        async def handler(request):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(request)

        async def at_home(tier, images):
            return images

        own, tiers = np.full((1, 3), 0.1, np.float32), {"edge": tier_of(handler)}
        async for answer in refine(made(), IMAGES, own, tiers, at_home, deadline=time.monotonic() + 0.05):  # noqa: B007
            pass
        assert ended == []
        assert answer.lost[0]["edge"] == "no answer before the deadline"
        await asyncio.sleep(0.01)
        assert len(ended) == 1
        assert tiers["edge"].traffic.failures == {}, "it was not awaited any more"

    in_no_time(check())


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


def test_connections_are_used_before_they_are_closed_as_idle(monkeypatch):
    monkeypatch.setattr(clients, "_SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(clients, "_WARM_SECONDS", 0.05)
    looks = []

    async def handler(request):
        looks.append(time.monotonic())
        return httpx.Response(200)

    async def check():
        watching = asyncio.create_task(tier_of(handler).watch())
        until = time.monotonic() + 5
        while len(looks) < 3:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(check())
    assert all(after - before >= 0.05 for before, after in itertools.pairwise(looks)), "not more often than it takes"


@pytest.mark.parametrize(("breaks", "answers"), [(1, True), (2, False)])
def test_a_connection_that_breaks_before_an_answer_is_tried_once_more(breaks, answers):
    sent = []

    async def handler(request):
        sent.append(request.content)
        if len(sent) <= breaks:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(200, content=answer_to(request))

    async def check():
        client = tier_of(handler)
        if answers:
            assert (await ask(client, 5)).tolist() == [[0.5] * 3]
            assert client.nodes[0].breaker.reason == ""
        else:
            with pytest.raises(TierLost, match="Server disconnected"):
                await ask(client, 5)
        assert client.traffic.sent == sum(map(len, sent))

    asyncio.run(check())
    assert len(sent) == 2
    assert len(set(sent)) == 1, "both have the same answer"


def test_an_answer_that_breaks_off_is_not_asked_for_again():
    sent = []

    async def cut_short():
        yield b"{"
        raise httpx.ReadError("reset")

    async def handler(request):
        sent.append(1)
        return httpx.Response(200, content=cut_short())

    async def check():
        with pytest.raises(TierLost, match="reset"):
            await ask(tier_of(handler), 5)

    asyncio.run(check())
    assert len(sent) == 1


def test_an_older_request_that_ends_does_not_let_another_try_a_node_that_is_being_tried():
    async def check():
        statuses, held = [], [asyncio.Event(), asyncio.Event()]

        async def handler(request):
            statuses.append({0: 413, 4: 413}.get(len(statuses), 500))
            number = len(statuses) - 1
            if number in (0, 4):
                await held[number == 4].wait()
            return httpx.Response(statuses[number], text="no")

        async def until(count):
            while len(statuses) < count:
                await asyncio.sleep(0)

        client = tier_of(handler)
        older = asyncio.create_task(ask(client, 5))
        await until(1)
        for _ in range(3):
            with pytest.raises(TierLost):
                await ask(client, 5)
        client.nodes[0].breaker.seen()
        tries = asyncio.create_task(ask(client, 5))
        await until(5)
        assert not client.is_available
        held[0].set()
        await asyncio.wait([older])
        assert not client.is_available, "the one that tries it is out"
        held[1].set()
        await asyncio.wait([tries])
        assert client.is_available
        assert all(isinstance(task.exception(), TierLost) for task in (older, tries))

    asyncio.run(check())


def test_what_a_client_no_longer_waits_for_is_not_computed():
    computed = []

    def part(rows):
        computed.append(len(rows))
        return np.full((len(rows), 3), 0.5, np.float32)

    body = wire.pack_request(made().digest, IMAGES)

    async def check():
        service = service_of(part)
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


def test_a_request_with_more_images_than_a_node_takes_does_not_take_the_tier_from_others():
    def part(rows):
        return np.full((len(rows), 3), 0.5, np.float32)

    async def check():
        service = service_of(part, dataclasses.replace(LIMITS, max_images=1))
        client = tier_of(None)
        client.nodes = [Node("http://node", True, httpx.ASGITransport(application(service)))]
        async with service.running(None):
            for _ in range(4):
                with pytest.raises(TierLost, match="the request has 2 images; 1 to 1 are accepted"):
                    await client.ask(np.zeros((2, 4, 4, 1), np.uint8), 32, time.monotonic() + 5)
                assert client.is_available
            assert (await ask(client, 5)).tolist() == [[0.5] * 3]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("statuses", "asked"), [((413, 422), 5), ((408, 429, 500, 503), 3), ((400, 404), 1)], ids=["one", "moment", "every"]
)
def test_a_node_is_left_alone_for_what_it_would_say_to_other_requests_too(statuses, asked):
    async def check(status):
        sent = []

        async def handler(request):
            sent.append(1)
            return httpx.Response(status, text="no")

        client = tier_of(handler)
        for _ in range(5):
            with pytest.raises(TierLost):
                await ask(client, 5)
        assert len(sent) == asked

    for status in statuses:
        asyncio.run(check(status))


@pytest.mark.parametrize("bits", [8, 32])
def test_values_that_are_not_finite_are_no_fault_of_a_node(bits):
    async def check():
        client = tier_of(lambda request: pytest.fail("it was asked"))
        for _ in range(4):
            with pytest.raises(TierLost, match="are not all finite"):
                await client.ask(np.full((1, 4), np.nan, np.float32), bits, time.monotonic() + 5)
        assert not client.nodes[0].breaker.is_open

    asyncio.run(check())


def test_an_error_that_nobody_foresaw_costs_a_tier_and_not_the_answer():
    broken = [RuntimeError("not foreseen")]

    async def handler(request):
        if broken:
            raise broken[0]
        return httpx.Response(200, content=answer_to(request))

    async def check():
        client = tier_of(handler)
        breaker = client.nodes[0].breaker
        for _ in range(3):
            with pytest.raises(TierLost, match="not foreseen"):
                await ask(client, 5)
        assert breaker.is_open
        breaker.seen()
        with pytest.raises(TierLost, match="not foreseen"):
            await ask(client, 5)
        assert client.nodes[0].outstanding == 0
        broken.clear()
        breaker.seen()
        assert (await ask(client, 5)).tolist() == [[0.5] * 3], "it may be tried again"

    asyncio.run(check())


def test_health_checks_go_on_after_an_error_that_nobody_foresaw(monkeypatch, caplog):
    monkeypatch.setattr(clients, "_SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(clients._log, "propagate", True)
    looks = []

    async def handler(request):
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("not foreseen")
        return httpx.Response(200)

    async def check():
        client = tier_of(handler)
        watching = asyncio.create_task(client.watch())
        until = time.monotonic() + 5
        while client.nodes[0].is_cold:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(check())
    assert "not foreseen" in caplog.text


def test_a_node_whose_checks_take_too_long_is_checked_more_and_more_seldom():
    """The look-up of a name goes on in a thread after its check was cancelled, and there are few of these threads."""
    looks, is_back = {"gone": [], "down": [], "healthy": []}, asyncio.Event()

    async def handler(request):
        looks[request.url.host].append(time.monotonic())
        if request.url.host == "gone" and not is_back.is_set():
            await asyncio.sleep(60)
        if request.url.host == "down":
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    async def check():
        client = tier_of(None)
        client.nodes = [Node(f"http://{name}", True, httpx.MockTransport(handler)) for name in looks]
        watching = asyncio.create_task(client.watch())
        start = time.monotonic()
        await asyncio.sleep(1)
        assert not client.nodes[2].is_cold, "it does not wait for the others"
        await asyncio.sleep(300)
        gaps = [after - before for before, after in itertools.pairwise(looks["gone"])]
        assert gaps == pytest.approx([2 + pause for pause in (1, 2, 4, 8, 16, *[30] * (len(gaps) - 5))])
        assert len(looks["down"]) == pytest.approx(2 * (time.monotonic() - start), abs=10), "which costs nothing"
        is_back.set()
        await asyncio.sleep(33)
        assert not client.nodes[0].is_cold, "it is found again"
        looks["gone"].clear()
        is_back.clear()
        await asyncio.sleep(30)
        assert len(looks["gone"]) >= 3, "the pauses begin anew"
        watching.cancel()

    in_no_time(check())


def test_large_bodies_are_packed_while_look_ups_of_names_fill_the_threads_of_asyncio():
    rows, looked_up = np.zeros((2**15, 1), np.float32), threading.Event()

    async def handler(request):
        digest = wire.digest_of(request.content)
        sums = np.zeros((len(rows), 3), np.float32)
        return httpx.Response(200, content=wire.pack_answer(made().digest, "edge", digest, sums))

    async def check():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        looking = loop.run_in_executor(None, looked_up.wait, 5)
        try:
            assert (await tier_of(handler).ask(rows, 32, time.monotonic() + 60)).shape == (len(rows), 3)
            assert not looking.done()
        finally:
            looked_up.set()

    asyncio.run(check())


def test_a_compressed_answer_is_not_expanded():
    async def bomb():
        yield gzip.compress(bytes(2**24))

    async def handler(request):
        return httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=bomb())

    async def check():
        with pytest.raises(TierLost, match="the answer has Content-Encoding 'gzip', which was not asked for"):
            await ask(tier_of(handler), 5)

    asyncio.run(check())


def test_only_so_many_images_wait_for_a_tier():
    client = tier_of(None)
    client.most_waiting = 4
    alone_it_may_be_larger = client.room(6)
    with alone_it_may_be_larger, pytest.raises(TierLost, match="6 images wait for it already"), client.room(1):
        pass
    with client.room(3), client.room(1):
        pass
    assert client.traffic.failures == {"full": 1}


@pytest.mark.parametrize(("most", "inline"), [(4, True), (2**16, False)])
def test_a_small_body_that_holds_many_rows_is_unpacked_beside_the_event_loop(most, inline, monkeypatch):
    """One that the node's limit of images lets be large: a body of 1,000 bytes holds a megabyte of zeros."""
    unpack, threads = wire.unpack_request, []

    def unpacked(*arguments):
        threads.append(threading.current_thread())
        return unpack(*arguments)

    monkeypatch.setattr(wire, "unpack_request", unpacked)

    async def check():
        limits = dataclasses.replace(LIMITS, max_images=most, max_queue=most)
        service = service_of(lambda rows: np.full((len(rows), 3), 0.5, np.float32), limits)
        transport = httpx.ASGITransport(application(service))
        async with service.running(None), httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            body = wire.pack_request(made().digest, IMAGES)
            assert (await client.post("/part", content=body)).status_code == 200

    asyncio.run(check())
    assert [thread is threading.main_thread() for thread in threads] == [inline]

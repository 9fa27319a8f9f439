"""The gateway of a small split model and its nodes, in this process: answers, deadlines, and tiers that are lost."""

import asyncio
import base64
import functools
import json
import math
import re
import time
from unittest.mock import AsyncMock

import httpx
import msgspec
import numpy as np
import pytest
from made_tiers import LIMITS, Wire, key_files, lines_of, png, started, strict, with_policy
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mlcn_jax.errors import InputError
from mlcn_jax.serving.http_service import IS_GONE, application
from mlcn_jax.serving.trained import TrainedModel
from mlcn_jax.tiers import client as clients
from mlcn_jax.tiers import health, signatures
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.client import Node
from mlcn_jax.tiers.gateway import GatewayService
from mlcn_jax.tiers.refine import Answer


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """However long this machine stalls, no tier is late, abandoned, or asked again after it has failed."""
    for name in ("_FIRST_SECONDS", "_LEAST_SECONDS", "_LEAST_TIMEOUT", "_MOST_TIMEOUT", "_FIRST_PAUSE"):
        monkeypatch.setattr(health, name, 60.0)
    monkeypatch.setattr(clients, "_SECONDS_BETWEEN_LOOKS", 60.0)


@pytest.fixture
def images(tiers):
    return np.random.default_rng(0).integers(0, 256, (5, *tiers["end"].image_shape)).astype(np.uint8)


@pytest.fixture
def thorough(tiers):
    """The tiers, under a policy that asks all of them."""
    return with_policy(tiers, strict(tiers["end"].policy))


def test_final_answers_are_those_of_the_whole_model(per_lane, thorough, images):
    whole = TrainedModel(per_lane).probabilities(images)

    async def check():
        async with started(thorough) as (client, _, wires):
            for pixels, wanted in zip(images, whole, strict=True):
                found = await lines_of(client, pixels, "?probabilities")
                assert found[0]["coarse"] in ("low", "high")
                assert [line["lanes"] for line in found] == [[1], [1], [0, 1], [0, 1, 2]]
                assert [line["tier"] for line in found] == ["end", "end", "edge", "cloud"]
                assert [line["final"] for line in found] == [False, False, False, True]
                np.testing.assert_allclose(list(found[-1]["probabilities"].values()), wanted, atol=1e-5)
            several = {"images": [base64.b64encode(png(pixels)).decode() for pixels in images[:4]]}
            answer = (await client.post("/predict?probabilities", json=several)).json()["predictions"]
            assert all(found["final"] for found in answer)
            for found, wanted in zip(answer, whole, strict=False):
                np.testing.assert_allclose(list(found["probabilities"].values()), wanted, atol=1e-5)
            assert wires["edge"].asked == wires["cloud"].asked == 6
            metrics = (await client.get("/metrics")).text
            assert re.search(r'tier_answers_total{heard="end\+edge\+cloud"} 9.0', metrics)

    asyncio.run(check())


def test_a_gateway_sends_a_cut_as_exactly_as_it_is_told(per_lane, cut_folder, images):
    tiers = {name: TierArtifact(cut_folder / name) for name in ("end", "edge", "cloud")}
    thorough = with_policy(tiers, strict(tiers["end"].policy))
    whole = TrainedModel(per_lane).probabilities(images)

    async def check(bits):
        async with started(thorough, bits=bits) as (client, _, _):
            lines = [(await lines_of(client, pixels, "?probabilities"))[-1] for pixels in images]
            assert all(line["lanes"] == [0, 1, 2] for line in lines)
            sent = [state["sent_bytes"] for state in (await client.get("/tiers")).json() if "sent_bytes" in state]
            return np.array([list(line["probabilities"].values()) for line in lines]), sum(sent)

    exact, all_bytes = asyncio.run(check(32))
    np.testing.assert_allclose(exact, whole, atol=1e-5)
    coarse, fewer_bytes = asyncio.run(check(8))
    assert 1e-5 < np.max(np.abs(coarse - whole)) < 0.05
    assert fewer_bytes < all_bytes / 2


def test_what_is_final_at_the_end_is_not_sent_anywhere(tiers, images):
    eager = with_policy(tiers, strict(tiers["end"].policy, 0.0))

    async def check():
        async with started(eager) as (client, _, wires):
            assert [line["final"] for line in await lines_of(client, images[0])] == [False, True]
            assert wires["edge"].asked == wires["cloud"].asked == 0

    asyncio.run(check())


async def hang(response):
    await asyncio.sleep(60)


def test_a_deadline_gives_the_best_that_has_come(thorough, images):
    async def check():
        async with started(thorough) as (client, gateway, wires):
            await lines_of(client, images[0])  # so that times are known
            wires["cloud"].change = hang
            found = await lines_of(client, images[0], "?deadline_ms=2000")
            lost = {"cloud": "no answer before the deadline"}
            assert found[-1] | {"final": True, "lanes": [0, 1], "tier": "edge", "lost": lost} == found[-1]
            gateway.least_ms = 50.0
            for query, status in (("?deadline_ms=20", 400), ("?deadline_ms=x", 400), ("?deadline_ms=-1", 400)):
                refused = await client.post(f"/predict{query}", content=png(images[0]))
                assert refused.status_code == status
            assert (
                "own lanes, with 10 ms for a request's way here and back, take 50.0 ms"
                in (await client.post("/predict?deadline_ms=20", content=png(images[0]))).json()["error"]
            )

    asyncio.run(check())


def test_short_deadlines_do_not_keep_tiers_from_being_tried_and_one_that_hangs_is_left_alone(
    thorough, images, monkeypatch
):
    async def check():
        async with started(thorough) as (client, gateway, wires):
            deadline = "?deadline_ms=20000"  # less than is assumed before the first answer
            assert (await lines_of(client, images[0], deadline))[-1]["lanes"] == [0, 1, 2], "nothing is known yet"
            node = gateway.clients["edge"].nodes[0]
            node.times(1).mean = 50.0
            gateway.clients["edge"]._asked = math.inf
            found = await lines_of(client, images[0], deadline)
            assert found[-1]["lost"] == {"edge": "too slow for the deadline"}
            gateway.clients["edge"]._asked = 0.0
            assert (await lines_of(client, images[0], deadline))[-1]["lanes"] == [0, 1, 2], "tried again after a while"
            node.times(1).mean, node.times(1)._spread = 0.01, 0.0
            wires["edge"].change = hang
            monkeypatch.setattr(health, "_LEAST_SECONDS", 0.02)
            for _ in range(20):  # three, unless this machine stalls and leaves no time to ask it
                if node.breaker.is_open:
                    break
                assert (await lines_of(client, images[0], "?deadline_ms=200"))[-1]["lanes"] in ([1, 2], [1])
            assert node.breaker.is_open
            assert node.breaker.reason == "no answer before the deadline"

    asyncio.run(check())


def test_with_a_deadline_there_is_an_answer_however_late_unless_the_queue_is_full(thorough, images):
    async def slowly():
        await asyncio.sleep(0.2)
        yield png(images[0])

    async def check():
        async with started(thorough) as (client, gateway, wires):
            gateway.batcher._seconds = {1: 2.0, 2: 2.0}
            for path in ("/predict", "/refine"):
                answer = await client.post(f"{path}?deadline_ms=100", content=slowly())
                assert answer.status_code == 200, answer.text
                told = json.loads(answer.text.splitlines()[-1])
                told = told if path == "/refine" else told["predictions"][0]
                assert told["lanes"] == [1]
                assert set(told["lost"]) == {"edge", "cloud"}
            assert wires["edge"].asked == 0
            gateway.batcher._max_waiting = 0
            assert (await client.post("/predict?deadline_ms=100", content=png(images[0]))).status_code == 429

    asyncio.run(check())


def test_what_was_accepted_is_answered_even_if_its_turn_comes_late(tiers, images):
    async def check():
        async with started(tiers) as (client, gateway, _):
            await lines_of(client, images[0])  # which compiles
            compute = gateway.batcher._compute

            def slowly(rows):
                time.sleep(0.3)
                return compute(rows)

            gateway.batcher._compute = slowly
            gateway.batcher._seconds = {1: 0.001, 2: 0.001}  # so all are accepted
            asked = [client.post("/predict?deadline_ms=100", content=png(images[0])) for _ in range(3)]
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 200, answer.text
                assert answer.json()["predictions"][0]["lanes"] == [1]

    asyncio.run(check())


def test_what_is_computed_at_home_is_timed_before_the_first_request(tiers, monkeypatch):
    monkeypatch.setattr(TierArtifact, "warm_up", lambda tier, most: {"edge": {1: 0.5, 2: 0.7}})
    gateway = GatewayService(tiers["end"], {}, LIMITS)
    gateway.warm_up()
    assert (gateway.clients["edge"].home(1).mean, gateway.clients["edge"].home(2).mean) == (0.5, 0.7)


def test_the_shortest_deadline_that_is_told_is_long_enough(tiers, monkeypatch):
    gateway = GatewayService(tiers["end"], {}, LIMITS)
    monkeypatch.setattr(np, "quantile", lambda seconds, share: 0.0020549)  # of which rounding leaves less
    gateway.warm_up()
    told = gateway.about()["least_deadline_ms"]
    gateway._check_deadline(told)
    with pytest.raises(HTTPException, match=f"take {told:.1f} ms"):
        gateway._check_deadline(told - 0.2)


def test_a_default_deadline_is_any_number(tiers):
    gateway = GatewayService(tiers["end"], {}, LIMITS, deadline_ms=2.5e6)
    assert gateway._deadline({"query_string": b""}) == 2500
    assert gateway._deadline({"query_string": b"deadline_ms=100"}) == 0.1
    assert gateway._deadline({"query_string": b"deadline_ms=0"}) == float("inf")


def test_a_deadline_before_which_several_images_cannot_be_computed_is_refused(thorough, images):
    async def check():
        async with started(thorough) as (client, gateway, _):
            gateway.least_ms = 5.0
            gateway.batcher._seconds = {1: 0.05, 2: 0.1}
            several = {"images": [base64.b64encode(png(pixels)).decode() for pixels in images[:4]]}
            answer = await client.post("/predict?deadline_ms=150", json=several)
            assert answer.status_code == 400
            said = answer.json()["error"]
            assert "150 ms is too short: this device's own lanes for 4 images, with 10 ms for a request's way" in said
            assert "take 210.0 ms" in said
            assert (await client.post("/predict?deadline_ms=5000", json=several)).status_code == 200

    asyncio.run(check())


def test_a_tier_without_a_node_is_lost_and_does_not_hold_the_others_up(thorough, images):
    async def check():
        async with started(thorough) as (client, gateway, _):
            of_edge = gateway.clients["edge"]
            gateway.clients = GatewayService(thorough["end"], {"cloud": gateway.clients["cloud"]}, LIMITS).clients
            found = (await lines_of(client, images[0]))[-1]
            assert found | {"lanes": [1, 2], "lost": {"edge": "--nodes names no node of it"}} == found
            edge = (await client.get("/tiers")).json()[1]
            assert edge | {"available": False, "trouble": "--nodes names no node of it", "nodes": []} == edge
            await of_edge.close()

    asyncio.run(check())


def test_a_tier_that_is_late_does_not_hold_the_others_up(thorough, images, monkeypatch):
    monkeypatch.setattr(health, "_LEAST_SECONDS", 0.02)

    async def check():
        cloud_has_answered = asyncio.Event()

        async def after_the_cloud(response):
            await cloud_has_answered.wait()
            await asyncio.sleep(0.05)
            return response

        def at_once(response):
            cloud_has_answered.set()
            return response

        async with started(thorough) as (client, gateway, wires):
            await lines_of(client, images[0])
            times = gateway.clients["edge"].nodes[0].times(1)
            times.mean, times._spread = 0.01, 0.0
            wires["edge"].change, wires["cloud"].change = after_the_cloud, at_once
            found = await lines_of(client, images[0])
            assert [line["tier"] for line in found[1:]] == ["end", "cloud", "edge"], "asked before edge answered"

    asyncio.run(check())


FAULTS = {
    "it fails": lambda response: httpx.Response(500, text="broken"),
    "its queue is full": lambda response: httpx.Response(429, text="full"),
    "nothing but noise": lambda response: httpx.Response(200, content=b"\x00" * 40),
    "empty": lambda response: httpx.Response(200, content=b""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_whose_answers_cannot_be_used_is_done_without(thorough, images, fault):
    async def check():
        async with started(thorough) as (client, gateway, wires):
            wires["edge"].change = FAULTS[fault]
            for _ in range(5):
                found = await lines_of(client, images[0])
                assert found[-1]["final"]
                assert found[-1]["lanes"] == [1, 2]
                assert "edge" in found[-1]["lost"]
            assert wires["edge"].asked <= 3, "it is left alone after three failures"
            state = (await client.get("/tiers")).json()[1]
            assert not state["available"]
            assert state["nodes"][0]["trouble"]
            wires["edge"].change = lambda response: response
            node = gateway.clients["edge"].nodes[0]
            await node.look()
            node.breaker._opened = -math.inf  # it is tried again, also if the answers rather than its health were wrong
            assert (await lines_of(client, images[0]))[-1]["lanes"] == [0, 1, 2], "it came back"
            assert (await client.get("/tiers")).json()[1]["available"]

    asyncio.run(check())


def test_a_node_of_another_split_is_named_and_not_asked_again(thorough, tiers, images):
    async def check():
        async with started({**tiers, "end": thorough["end"]}) as (client, _, wires):
            for _ in range(2):
                found = await lines_of(client, images[0])
                assert found[-1]["lanes"] == [1]
            assert "give both tiers of one split" in found[-1]["lost"]["edge"]
            assert wires["edge"].asked == 1

    asyncio.run(check())


def test_answers_must_be_signed_by_a_known_node_where_keys_are_given(thorough, images, tmp_path):
    mine, other = key_files(tmp_path, "mine"), key_files(tmp_path, "other")
    for (_, public), lanes in ((mine, [0, 1, 2]), (other, [1])):
        trusted = signatures.public_keys([public])

        async def check(trusted=trusted, lanes=lanes):
            sign = signatures.private_key(mine[0]).sign
            is_signed = functools.partial(signatures.is_signed, keys=trusted)
            async with started(thorough, sign, is_signed) as (client, _, _wires):
                assert (await lines_of(client, images[0]))[-1]["lanes"] == lanes

        asyncio.run(check())


def test_a_second_node_of_the_tier_answers_for_one_that_fails_and_counts_once(per_lane, thorough, images):
    whole = TrainedModel(per_lane).probabilities(images[:1])[0]

    async def check():
        async with started(thorough) as (client, gateway, wires):
            good, bad = wires["edge"], Wire(wires["edge"].app)
            bad.change = FAULTS["it fails"]
            edge = gateway.clients["edge"]
            edge.nodes = [Node("http://bad", True, bad), Node("http://good", True, good)]
            found = await lines_of(client, images[0], "?probabilities")
            assert (bad.asked, good.asked) == (1, 1)
            np.testing.assert_allclose(list(found[-1]["probabilities"].values()), whole, atol=1e-5)

    asyncio.run(check())


def test_what_a_tier_says_twice_counts_once(tiers):
    answer = Answer(tiers["end"].policy, 2)
    for _ in range(2):
        answer.add("edge", [1], np.ones((1, 10), np.float32))
    assert answer.sums.sum() == 10
    assert answer.heard == [frozenset(), frozenset({"edge"})]


def test_a_request_whose_client_has_gone_is_not_counted_as_answered(tiers):
    async def check():
        async with started(tiers, may_stop=True) as (_, gateway, _wires):
            receive, send = AsyncMock(return_value={"type": "http.disconnect"}), AsyncMock()
            scope = {"type": "http", "method": "POST", "query_string": b"", "root_path": "", "headers": []}
            for path in ("/refine", "/predict", "/tiers/edge"):
                await application(gateway)(scope | {"path": path}, receive, send)
            assert not send.called
            assert b"mlcn_jax_requests_total{" not in gateway.metrics.text()

    asyncio.run(check())


def test_no_further_tier_is_asked_for_a_client_that_has_left(thorough, images):
    async def check():
        async with started(thorough) as (_, gateway, wires):
            send = AsyncMock()
            receive = AsyncMock(return_value={"type": "http.request", "body": png(images[0]), "more_body": False})
            scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "root_path": ""}
            left = {IS_GONE: lambda: wires["edge"].asked > 0}
            await application(gateway)(scope | left | {"headers": []}, receive, send)
            assert (wires["edge"].asked, wires["cloud"].asked) == (1, 0)
            assert not send.called
            assert b"mlcn_jax_tier_answers_total{" not in gateway.metrics.text()

    asyncio.run(check())


def test_what_the_gateway_describes_is_what_it_answers(thorough, images):
    async def check():
        async with started(thorough, may_stop=True) as (client, gateway, _):
            described = (await client.get("/openapi.json")).json()
            assert set(described["paths"]) == {"/health", "/metrics", *(route.path for route in gateway.routes())}
            properties = described["components"]["schemas"]["Prediction"]["properties"]
            for line in await lines_of(client, images[0], "?top=2&probabilities"):
                assert set(line) - {"coarse"} <= set(properties)
            assert b"mlcn_jax_predict_seconds_count 1.0" in gateway.metrics.text()
            gateway._may_stop = False
            assert "/tiers/{name}" not in (await client.get("/openapi.json")).json()["paths"]

    asyncio.run(check())


def test_tiers_can_be_stopped_from_the_page_where_that_is_allowed(thorough, images):
    async def check():
        async with started(thorough, may_stop=True) as (client, gateway, wires):
            send = functools.partial(client.post, headers={"Content-Type": "application/json"})
            assert (await send("/tiers/edge", content=b"true")).json()[1]["stopped"]
            assert 'path="/tiers/{name}",status="200"} 1.0' in (await client.get("/metrics")).text
            assert (await lines_of(client, images[0]))[-1]["lanes"] == [1, 2]
            assert wires["edge"].asked == 0
            assert not (await send("/tiers/edge", content=b"false")).json()[1]["stopped"]
            assert (await lines_of(client, images[0]))[-1]["lanes"] == [0, 1, 2]
            unknown = await send("/tiers/none", content=b"true")
            assert (unknown.status_code, unknown.json()["error"]) == (
                404,
                "there is no tier 'none'; there are edge, cloud",
            )
            assert (await client.post("/tiers/edge", content=b"true")).status_code == 400, (
                "not from another page's form"
            )
            page = await client.get("/", headers={"Accept": "text/html"})
            assert "<script>" in page.text
            assert 'deadline.placeholder = about.deadline_ms || "none"' in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
            cut_off = AsyncMock(return_value={"type": "http.disconnect"})
            request = Request({"type": "http", "headers": [], "path_params": {"name": "edge"}}, cut_off)
            await gateway._stop(request)  # answers nobody
            gateway._may_stop = False
            assert (await send("/tiers/edge", content=b"true")).status_code == 403

    asyncio.run(check())


def test_nobody_can_draw_the_same_noise(tiers):
    of_a_cut = with_policy(tiers, msgspec.structs.replace(tiers["end"].policy, cut="capsules"))["end"]
    drawn = [GatewayService(of_a_cut, {}, LIMITS, noise=0.5)._rng.standard_normal() for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("asked", [{"noise": 0.5}, {"bits": 8}])
def test_nobody_who_asks_for_noise_or_fewer_bits_sends_exact_pixels(tiers, asked):
    with pytest.raises(InputError, match="this split sends exact pixels: leave both out, or split"):
        GatewayService(tiers["end"], {}, LIMITS, **asked)
    of_a_cut = with_policy(tiers, msgspec.structs.replace(tiers["end"].policy, cut="capsules"))["end"]
    assert GatewayService(of_a_cut, {}, LIMITS, **asked).about()["cut"] == "capsules"


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/refine", b"no picture", 400, "it is not an image"),
        ("/predict", b"no picture", 400, None),
        ("/refine", b"", 400, "it is not an image"),
        ("/tiers", b"", 405, "/tiers takes"),
        ("/nothing", b"", 404, "POST /refine"),
    ],
)
def test_what_cannot_be_read_is_named(tiers, path, body, status, said):
    async def check():
        async with started(tiers) as (client, _, _wires):
            response = await client.post(path, content=body)
            assert response.status_code == status
            assert said is None or said in response.json()["error"]

    asyncio.run(check())

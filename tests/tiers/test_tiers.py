"""A small model whose lanes classify alone, split over three tiers: artifacts, nodes and gateway, in this process."""

import asyncio
import base64
import contextlib
import functools
import io
import json
import random
import re
import shutil
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from mlcn_jax import host
from mlcn_jax.config import read_stored
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import artifact as artifacts
from mlcn_jax.serving.http_service import Limits, application
from mlcn_jax.serving.trained import TrainedModel
from mlcn_jax.tiers import placing, signatures, split
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.client import Node, TierClient, check_nodes
from mlcn_jax.tiers.gateway import GatewayService
from mlcn_jax.tiers.node import NodeService
from mlcn_jax.tiers.refine import Answer

LIMITS = Limits(max_batch=2, max_queue=16, max_body_bytes=2**20, max_images=4, max_connections=50, timeout_seconds=5.0)


@pytest.fixture(scope="session")
def tiers(tiers_folder):
    """The artifacts, by name."""
    return {name: TierArtifact(tiers_folder / name) for name in ("end", "edge", "cloud")}


class Wire(httpx.ASGITransport):
    """A node in this process, whose answers and arrival a test can change."""

    def __init__(self, app):
        super().__init__(app)
        self.asked = 0
        self.change = lambda response: response

    async def handle_async_request(self, request):
        self.asked += request.url.path == "/part"
        changed = self.change(await super().handle_async_request(request))
        return await changed if hasattr(changed, "__await__") else changed


@contextlib.asynccontextmanager
async def started(tiers, sign=None, is_signed=None, **options):
    """A gateway's client, the gateway, and the wires to its nodes."""
    async with contextlib.AsyncExitStack() as stack:
        wires, clients = {}, {}
        for name in ("edge", "cloud"):
            service = NodeService(tiers[name], LIMITS, sign)
            await stack.enter_async_context(service.running(None))
            wires[name] = Wire(application(service))
            clients[name] = TierClient(name, tiers["end"].policy, ["http://node"], True, is_signed)
            clients[name].nodes = [Node("http://node", True, wires[name])]
        gateway = GatewayService(tiers["end"], clients, LIMITS, **options)
        await stack.enter_async_context(gateway.running(None))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(application(gateway)), base_url="http://gateway")
        yield await stack.enter_async_context(client), gateway, wires


@pytest.fixture
def images(tiers):
    return np.random.default_rng(0).integers(0, 256, (5, *tiers["end"].image_shape)).astype(np.uint8)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(buffer, "PNG")
    return buffer.getvalue()


def key_files(folder, name):
    """A private key and its public one."""
    private = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    paths = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    paths[0].write_bytes(private.private_bytes(pem, *plain))
    paths[1].write_bytes(public)
    return paths


def strict(policy, margin=None):
    """A policy whose answers are final from this margin on only."""
    changed = {k: msgspec.structs.replace(v, margin=margin) for k, v in policy.thresholds.items()}
    return msgspec.structs.replace(policy, thresholds=changed)


@pytest.fixture
def thorough(tiers):
    """The tiers, under a policy that asks all of them."""
    return with_policy(tiers, strict(tiers["end"].policy))


def with_policy(tiers, policy):
    changed = {}
    for name, tier in tiers.items():
        changed[name] = tier.__class__.__new__(tier.__class__)
        changed[name].__dict__ |= tier.__dict__ | {"policy": policy}
    return changed


async def lines_of(client, pixels, query=""):
    response = await client.post(f"/refine{query}", content=png(pixels), headers={"Content-Type": "image/png"})
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


# --- splitting


@pytest.mark.parametrize("cut", ["pixels", "capsules"])
def test_the_sum_over_the_tiers_is_the_whole_model(per_lane, tiers_folder, images, cut):
    if cut != "pixels":
        tiers_folder = split.split(per_lane, per_lane / "tiers.json", cut, out=f"tiers-{cut}")
    tiers = {name: TierArtifact(tiers_folder / name) for name in ("end", "edge", "cloud")}
    whole = TrainedModel(per_lane)
    rows = {name: tiers["end"].home(name, images) for name in ("edge", "cloud")} | {"end": images}
    total = sum(tier.part(rows[name]) for name, tier in tiers.items())
    np.testing.assert_allclose(np.sqrt(total), whole.lengths(images), atol=1e-5)
    policy = tiers["end"].policy
    np.testing.assert_allclose(policy.probabilities(total, policy.names), whole.probabilities(images), atol=1e-5)
    assert [tier.lanes for tier in policy.tiers] == [(1,), (0,), (2,)]
    assert all(tier.policy.digest == policy.digest for tier in tiers.values())
    if cut != "pixels":
        assert rows["edge"].shape == (5, *tiers["edge"].row_shape)
        held = artifacts.read_weights(tiers_folder / "edge" / artifacts.WEIGHTS)
        assert {name.split("/")[-1] for name in held} == {"capsule_weights", "prior_bias"}, (
            "what is at home stays there"
        )


def test_an_altered_artifact_is_refused(tiers_folder, tmp_path):
    for file in ("weights.npz", "policy.json", "model.json", "part-cpu-1.jaxexport", "manifest.json"):
        copy = shutil.copytree(tiers_folder / "edge", tmp_path / file)
        content = bytearray((copy / file).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / file).write_bytes(bytes(content))
        with pytest.raises(InputError, match="not what was exported"):
            TierArtifact(copy)


def test_lanes_that_are_not_the_policys_and_other_exports_are_refused(tiers_folder, exported, tmp_path):
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "edge")
    write_json(copy / "model.json", read_json(copy / "model.json") | {"lanes": [2]})
    manifest = read_json(copy / "manifest.json")
    found = (copy / "model.json").read_bytes()
    manifest["files"]["model.json"] = {"bytes": len(found), "sha256": host.sha256_of(copy / "model.json")}
    write_json(copy / "manifest.json", artifacts.signed(manifest))
    with pytest.raises(InputError, match="has the lanes 2 of tier edge, and its policy says otherwise"):
        TierArtifact(copy)
    with pytest.raises(InputError, match="is no tier of a split model"):
        TierArtifact(exported / "export")


def test_only_what_a_trusted_key_signed_is_taken(tiers_folder, tmp_path):
    (private, public), (_, other) = key_files(tmp_path, "mine"), key_files(tmp_path, "other")
    copy = shutil.copytree(tiers_folder / "edge", tmp_path / "edge")
    with pytest.raises(InputError, match="is not signed, and only what"):
        TierArtifact(copy, [public])
    manifest = (copy / "manifest.json").read_bytes()
    (copy / "manifest.sig").write_bytes(signatures.private_key(private).sign(manifest))
    assert TierArtifact(copy, [other, public]).name == "edge"
    with pytest.raises(InputError, match=r"is not signed by .*other"):
        TierArtifact(copy, [other])
    for wrong in (private, tmp_path / "none.pem"):
        with pytest.raises(InputError, match=r"no public key|cannot be read"):
            TierArtifact(copy, [wrong])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"lanes": "mlcn1:w1*2"},
            "do not classify alone.*margin_loss=per_lane or per_lane_sum, or lanes of the kind resnet",
        ),
        ({"lanes": "mlcn1:w1", "margin_loss": "per_lane"}, "cannot be split: train a model with 2 lanes"),
        ({"name": "capsnet"}, "CapsNet, which has no lanes"),
    ],
)
def test_models_that_cannot_be_split_are_named(model, said):
    with pytest.raises(InputError, match=said):
        split.check_lanes_classify(ModelSpec(**{"name": "mlcn", "image_shape": (28, 28, 1), "num_classes": 10} | model))
    split.check_lanes_classify(ModelSpec("mlcn", (28, 28, 1), 10, lanes="resnet:w1*2"))
    for alone in ("per_lane", "per_lane_sum"):  # the latter is that of lanes trained apart
        split.check_lanes_classify(ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w1*2", margin_loss=alone))


def test_images_that_the_model_did_not_learn_from_are_refused(per_lane, tmp_path):
    other = shutil.copytree(per_lane, tmp_path / "other")
    write_json(other / "config.json", read_stored(other).replace({"data.split_seed": 7}).to_dict())
    with pytest.raises(InputError, match=r"digits as it is now is not what .*other was trained on"):
        split.split(other, other / "tiers.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiers": [{"name": "a", "lanes": [0]}, {"name": "b", "lanes": [0, 1]}]}, "given twice are 0"),
        ({"tiers": [{"name": "a", "lane": [0]}, {"name": "b"}]}, "unknown field `lane`"),
        ({"tiers": [{"name": "a"}, {"name": "b"}]}, "give tier a either lanes, or flops_share"),
        ({"tiers": [{"name": "a", "flops_share": 0.01}, {"name": "b"}]}, "tiers without lanes are a"),
        (
            {"tiers": [{"name": "a", "lanes": [0]}, {"name": "b"}], "groups": {"x": ["0"]}},
            "each class of the model once",
        ),
        ({"tiers": [{"name": "a", "lanes": [0]}, {"name": "b"}], "tolerance": 2}, "tolerance is 2"),
    ],
)
def test_tiers_that_make_no_sense_are_named(per_lane, tmp_path, given, said):
    (tmp_path / "tiers.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match=said):
        split.split(per_lane, tmp_path / "tiers.json")


def test_lanes_go_where_they_fit_and_help():
    spec = ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w2,mlcn1:w1*3", margin_loss="per_lane")
    labels = np.arange(100) % 10
    truth = np.eye(10, dtype=np.float32)[labels]
    wrong = np.roll(truth, 1, axis=1)
    squares = np.stack([truth, wrong, truth, wrong], axis=-1)
    wishes = placing.Wishes(
        [placing.TierWish("end", flops_share=0.25), placing.TierWish("edge"), placing.TierWish("x")]
    )
    with pytest.raises(InputError, match="give tier edge either"):
        placing.place(Path("tiers.json"), wishes, spec, squares, labels)
    wishes = placing.Wishes([placing.TierWish("end", flops_share=0.25), placing.TierWish("edge")])
    end, edge = placing.place(Path("tiers.json"), wishes, spec, squares, labels)
    assert 2 in end, "the best lane that fits"
    assert 0 in edge, "the large one does not"


# --- answers


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
            for found, wanted in zip(answer, whole, strict=False):
                np.testing.assert_allclose(list(found["probabilities"].values()), wanted, atol=1e-5)
            assert wires["edge"].asked == wires["cloud"].asked == 6
            metrics = (await client.get("/metrics")).text
            assert re.search(r'tier_answers_total{heard="end\+edge\+cloud"} 9.0', metrics)

    asyncio.run(check())


def test_what_is_final_at_the_end_is_not_sent_anywhere(tiers, images):
    eager = with_policy(tiers, strict(tiers["end"].policy, 0.0))

    async def check():
        async with started(eager) as (client, _, wires):
            assert [line["final"] for line in await lines_of(client, images[0])] == [False, True]
            assert wires["edge"].asked == wires["cloud"].asked == 0

    asyncio.run(check())


def test_a_deadline_gives_the_best_that_has_come(thorough, images):
    async def slowly(response):
        await asyncio.sleep(5)
        return response

    async def check():
        async with started(thorough) as (client, gateway, wires):
            await lines_of(client, images[0])  # so that times are known
            wires["cloud"].change = slowly
            before = time.monotonic()
            found = await lines_of(client, images[0], "?deadline_ms=600")
            assert time.monotonic() - before < 2
            assert found[-1] | {"final": True, "lanes": [0, 1], "tier": "edge"} == found[-1]
            gateway.least_ms = 50.0
            for query, status in (("?deadline_ms=20", 400), ("?deadline_ms=x", 400), ("?deadline_ms=-1", 400)):
                refused = await client.post(f"/predict{query}", content=png(images[0]))
                assert refused.status_code == status
            assert (
                "shorter than this device's own lanes take, 50.0 ms"
                in (await client.post("/predict?deadline_ms=20", content=png(images[0]))).json()["error"]
            )

    asyncio.run(check())


def test_short_deadlines_do_not_keep_tiers_from_being_tried_and_one_that_hangs_is_left_alone(thorough, images):
    async def hang(response):
        await asyncio.sleep(60)

    async def check():
        async with started(thorough) as (client, gateway, wires):
            deadline = "?deadline_ms=900"
            assert (await lines_of(client, images[0], deadline))[-1]["lanes"] == [0, 1, 2], "nothing is known yet"
            node = gateway.clients["edge"].nodes[0]
            node.times(1).mean = 5.0
            gateway.clients["edge"]._asked = time.monotonic()
            found = await lines_of(client, images[0], deadline)
            assert found[-1]["lost"] == {"edge": "too slow for the deadline"}
            gateway.clients["edge"]._asked = 0.0
            assert (await lines_of(client, images[0], deadline))[-1]["lanes"] == [0, 1, 2], "tried again after a while"
            node.times(1).mean, node.times(1)._spread = 0.01, 0.0
            wires["edge"].change = hang
            for _ in range(3):
                assert (await lines_of(client, images[0], "?deadline_ms=200"))[-1]["lanes"] in ([1, 2], [1])
            assert node.breaker.is_open
            assert node.breaker.reason == "no answer before the deadline"

    asyncio.run(check())


def test_a_tier_that_is_late_does_not_hold_the_others_up(thorough, images):
    async def slowly(response):
        await asyncio.sleep(0.2)
        return response

    async def check():
        async with started(thorough) as (client, gateway, wires):
            for _ in range(3):
                await lines_of(client, images[0])
            times = gateway.clients["edge"].nodes[0].times(1)
            times.mean, times._spread = 0.01, 0.0
            wires["edge"].change = slowly
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
            while node.breaker.is_open:  # until it is tried again, if the answers rather than its health were wrong
                await asyncio.sleep(0.05)
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


def test_tiers_can_be_stopped_from_the_page_where_that_is_allowed(thorough, images):
    async def check():
        async with started(thorough, may_stop=True) as (client, gateway, wires):
            send = functools.partial(client.post, headers={"Content-Type": "application/json"})
            assert (await send("/tiers/edge", content=b"true")).json()[1]["stopped"]
            assert (await lines_of(client, images[0]))[-1]["lanes"] == [1, 2]
            assert wires["edge"].asked == 0
            assert not (await send("/tiers/edge", content=b"false")).json()[1]["stopped"]
            assert (await lines_of(client, images[0]))[-1]["lanes"] == [0, 1, 2]
            assert (await send("/tiers/none", content=b"true")).status_code == 400
            assert (await client.post("/tiers/edge", content=b"true")).status_code == 400, (
                "not from another page's form"
            )
            page = await client.get("/", headers={"Accept": "text/html"})
            assert "<script>" in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]
            gateway._may_stop = False
            assert (await send("/tiers/edge", content=b"true")).status_code == 403

    asyncio.run(check())


def test_nobody_can_draw_the_same_noise(tiers):
    drawn = [GatewayService(tiers["end"], {}, LIMITS, noise=0.5)._rng.standard_normal() for _ in range(2)]
    assert drawn[0] != drawn[1]


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


def test_nodes_take_what_gateways_send_only(tiers):
    async def check():
        async with started(tiers) as (_, _, wires):
            node = httpx.AsyncClient(transport=wires["edge"], base_url="http://node")
            assert (await node.get("/")).json()["lanes"] == [0]
            statuses = {
                (await node.post("/part", content=random.Random(i).randbytes(200))).status_code for i in range(300)
            }
            assert statuses == {400}
            assert (await node.post("/part", content=bytes(2**21))).status_code == 413
            assert (await node.get("/health")).status_code == 200

    asyncio.run(check())


def test_nodes_of_another_split_stop_a_gateway_from_starting(tiers, monkeypatch, caplog):
    urls = {"edge": ["http://edge"]}

    def about(**changes):
        found = {"tier": "edge", "policy": tiers["edge"].policy.digest, "lanes": [0], **changes}
        return httpx.Response(200, json=found)

    def check(response):
        async def get(self, url):
            if isinstance(response, Exception):
                raise response
            return response

        monkeypatch.setattr(httpx.AsyncClient, "get", get)
        asyncio.run(check_nodes(tiers["end"].policy, urls, True, 1.0))

    check(about())
    for wrong in (about(lanes=[2]), about(tier="cloud"), about(policy="x")):
        with pytest.raises(InputError, match="start all tiers from one split"):
            check(wrong)
    with pytest.raises(InputError, match="is no node of a tier"):
        check(httpx.Response(200, text="hello"))
    monkeypatch.setattr("mlcn_jax.tiers.client._log.propagate", True)
    check(httpx.ConnectError("refused"))
    assert "cannot be reached" in caplog.text

"""What nodes take from gateways, and which nodes a gateway starts with."""

import asyncio
import gzip
import random

import httpx
import pytest
from made_tiers import started

from mlcn_jax.errors import InputError
from mlcn_jax.tiers import client as clients
from mlcn_jax.tiers.client import Node, check_nodes


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


@pytest.fixture
def check(tiers, monkeypatch):
    """Checks one node, which answers what a function of the request returns."""

    def run(respond, seconds=30.0):
        monkeypatch.setattr(clients, "Node", lambda url, tls: Node(url, tls, httpx.MockTransport(respond)))
        asyncio.run(check_nodes(tiers["end"].policy, {"edge": ["http://edge"]}, True, seconds))

    return run


def test_nodes_of_another_split_stop_a_gateway_from_starting(tiers, check, monkeypatch, caplog):
    def about(**changes):
        found = {"tier": "edge", "policy": tiers["edge"].policy.digest, "lanes": [0], **changes}
        return lambda request: httpx.Response(200, json=found)

    def refused(request):
        raise httpx.ConnectError("refused")

    check(about())
    for wrong in (about(lanes=[2]), about(tier="cloud"), about(policy="x")):
        with pytest.raises(InputError, match="start all tiers from the same split"):
            check(wrong)
    for text in ("hello", "[" * 10_000, "[]", "{}"):
        with pytest.raises(InputError, match="is not a node of a tier"):
            check(lambda request, text=text: httpx.Response(200, text=text))
    monkeypatch.setattr(clients._log, "propagate", True)
    check(refused)
    assert "cannot be reached (refused)" in caplog.text
    for status in (408, 429, 500, 503):
        check(lambda request, status=status: httpx.Response(status, json={"error": "busy"}))
        assert f"cannot be reached (its status is {status})" in caplog.text


def test_what_a_node_says_of_itself_is_bounded_in_bytes_and_time(check, monkeypatch, caplog):
    sent = []

    async def endless():
        for _ in range(10_000):
            sent.append(1)
            yield bytes(2**12)

    async def bomb():
        yield gzip.compress(bytes(2**24))

    async def drop_by_drop():
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    for headers, content in (({}, endless), ({"Content-Encoding": "gzip"}, bomb)):
        with pytest.raises(InputError, match="is not a node of a tier"):
            check(lambda request, h=headers, c=content: httpx.Response(200, headers=h, content=c()))
    assert len(sent) < 10
    monkeypatch.setattr(clients._log, "propagate", True)
    check(lambda request: httpx.Response(200, content=drop_by_drop()), 0.1)
    assert "cannot be reached (TimeoutError())" in caplog.text

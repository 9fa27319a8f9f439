"""What nodes take from gateways, and which nodes a gateway starts with."""

import asyncio
import random

import httpx
import pytest
from made_tiers import started

from mlcn_jax.errors import InputError
from mlcn_jax.tiers.client import check_nodes


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
        with pytest.raises(InputError, match="start all tiers from the same split"):
            check(wrong)
    with pytest.raises(InputError, match="is not a node of a tier"):
        check(httpx.Response(200, text="hello"))
    monkeypatch.setattr("mlcn_jax.tiers.client._log.propagate", True)
    check(httpx.ConnectError("refused"))
    assert "cannot be reached" in caplog.text

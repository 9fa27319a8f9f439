"""What the gateway computes for a tier counts as its time, and a tier that is dead does not hold requests up."""

import asyncio
import math
import time

import httpx
import msgspec
import numpy as np
import pytest
from conftest import in_no_time
from test_client import answer_to, ask, tier_of
from test_refine import IMAGES, OWN, POLICY, Says

from mlcn_jax.tiers import client as clients
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.client import TierLost
from mlcn_jax.tiers.policy import Threshold
from mlcn_jax.tiers.refine import refine

# Final once the edge has answered.
EDGE_IS_ENOUGH = msgspec.structs.replace(
    POLICY, thresholds=POLICY.thresholds | {"end+edge": Threshold(0.0, 1.0, 0.0, 0.0)}
)


class Counted(Says):
    """A tier that counts what it is asked, and is known to take `known` seconds."""

    def __init__(self, name, seconds=0.0, known=0.02):
        super().__init__(name, seconds)
        self.asked = 0
        times = self.nodes[0].times(1)
        times.took(known)
        times._spread = 0.0

    async def ask(self, rows, bits, deadline):
        self.asked += 1
        return await super().ask(rows, bits, deadline)


async def answers_of(tiers, home=None, deadline=float("inf")):
    async def at_once(tier, images):
        return images

    answers = refine(EDGE_IS_ENOUGH, IMAGES, OWN, tiers, home or at_once, 32, deadline)
    return [set(answer.heard[0]) async for answer in answers]


def test_a_tier_is_not_late_while_its_input_is_computed_at_home():
    async def home(tier, images):
        await asyncio.sleep(0.5 if tier == "edge" else 0.0)
        return images

    async def check():
        tiers = {"edge": Counted("edge", 0.05, known=0.2), "cloud": Counted("cloud", known=0.5)}
        tiers["edge"].home(1).took(0.5)
        for _ in range(2):
            assert await answers_of(tiers, home) == [{"end"}, {"end", "edge"}]
        assert (tiers["edge"].asked, tiers["cloud"].asked) == (2, 0)
        assert tiers["edge"].expected(1) > 0.5
        tiers["edge"]._asked = time.monotonic()
        assert not tiers["edge"].is_worth_asking(1, 0.45)
        assert tiers["edge"].is_worth_asking(1, 2.0)

    in_no_time(check())


def test_what_packing_takes_is_part_of_a_nodes_time(monkeypatch):
    pack = clients.wire.pack_request

    def slowly(*given):
        time.sleep(0.05)
        return pack(*given)

    monkeypatch.setattr(clients.wire, "pack_request", slowly)
    client = tier_of(lambda request: httpx.Response(200, content=answer_to(request)))
    asyncio.run(ask(client, 5))
    assert client.nodes[0].times(1).mean >= 0.05


@pytest.mark.parametrize("status", [None, 503])
def test_a_node_whose_requests_all_end_before_they_are_late_is_found_dead_by_its_health(monkeypatch, status):
    monkeypatch.setattr(clients, "_LOOK_SECONDS", 0.02)

    async def handler(request):
        if request.url.path == "/health" and status:
            return httpx.Response(status)
        await asyncio.sleep(5)

    async def check():
        client = tier_of(handler)
        times = client.nodes[0].times(1)
        times.took(0.35)
        times._spread = 0.05
        assert times.late > 0.5
        for _ in range(3):
            with pytest.raises(TierLost):
                await ask(client, 0.3)
        assert client.is_available, "no request was late"
        for _ in range(3):
            await client.nodes[0].look()
        assert not client.is_available
        assert "health check" in client.trouble
        node = client.nodes[0]
        for pause in (1.0, 2.0):  # one that is still dead after a pause waits twice as long, also if only checks say so
            node.breaker._opened = -math.inf
            assert client.is_available
            await node.look()
            assert not client.is_available
            assert node.breaker._pause == pause

    in_no_time(check())


def test_a_tier_that_is_silent_leaves_the_next_the_time_that_it_takes():
    async def check():
        tiers = {"edge": Counted("edge", 60.0, known=0.4), "cloud": Counted("cloud", known=0.4)}
        tiers["edge"].nodes[0].times(1)._spread = 0.4  # late after two seconds
        found = await answers_of(tiers, deadline=time.monotonic() + 1.2)
        assert found == [{"end"}, {"end", "cloud"}]

    in_no_time(check())


def test_times_at_home_are_known_before_the_first_request():
    asked = []
    tier = object.__new__(TierArtifact)
    tier.image_shape, tier._home = (4, 4, 1), {"edge": []}
    tier.home = lambda name, images: asked.append((name, len(images))) or np.zeros(1)
    assert list(tier.warm_up(3)["edge"]) == [1, 2, 4], "3 images are padded to 4"
    assert asked == [("edge", size) for size in (1, 1, 2, 2, 4, 4)]
    assert list(tier.warm_up(1)["edge"]) == [1]
    assert list(tier.warm_up(4)["edge"]) == [1, 2, 4]

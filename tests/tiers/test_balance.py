"""Requests over the nodes of one tier."""

import asyncio
import collections

import httpx
from conftest import in_no_time
from test_client import answer_to, ask, tier_of

from mlcn_jax.tiers.client import Node


class Two:
    """A tier of two nodes that take so many seconds for an answer."""

    def __init__(self, *seconds):
        self.seconds, self.asked = list(seconds), collections.Counter()
        self.client = tier_of(None)
        nodes = [httpx.MockTransport(self.node(number)) for number in range(2)]
        self.client.nodes = [Node(f"http://node{i}", True, node) for i, node in enumerate(nodes)]

    def node(self, number):
        async def handler(request):
            self.asked[number] += 1
            await asyncio.sleep(self.seconds[number])
            return httpx.Response(200, content=answer_to(request))

        return handler

    async def ask(self, at_once, times=1):
        for _ in range(times):
            await asyncio.gather(*(ask(self.client, 10) for _ in range(at_once)))


def test_a_node_without_an_answer_so_far_does_its_share():
    async def check():
        two = Two(0.2, 0.2)
        two.client.nodes[0].times(1).took(0.2)
        await two.ask(1)
        assert two.asked == {1: 1}, "it is asked first, so that its time is known"
        await two.ask(4)
        assert min(two.asked.values()) == 2

    in_no_time(check())


def test_a_node_that_was_slow_once_is_measured_again():
    async def check():
        two = Two(0.0, 0.0)
        two.client.nodes[0].times(1).took(0.001)
        two.client.nodes[1].times(1).took(5.0)
        await two.ask(1, 200)
        assert 3 <= two.asked[1] < 10, "now and then, as long as it may still be slow"
        assert two.client.nodes[1].times(1).mean < 4

    in_no_time(check())

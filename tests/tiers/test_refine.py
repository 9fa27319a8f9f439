"""Answers that improve, from tiers that say what a test wants them to say."""

import asyncio
import gc
import time

import msgspec
import numpy as np
from test_policy import made

from mlcn_jax.tiers.client import TierClient, TierLost
from mlcn_jax.tiers.policy import Threshold, Tier, subsets
from mlcn_jax.tiers.refine import Answer, refine

NEVER = Threshold(None, 0.0, 0.0, 0.0)
POLICY = made(
    tiers=(Tier("end", (0,), 1.0, 10), Tier("edge", (1,), 1.0, 10), Tier("cloud", (2,), 1.0, 10)),
    thresholds=dict.fromkeys(("end", "edge", "cloud", "end+edge", "end+cloud", "edge+cloud"), NEVER),
)
IMAGES, OWN = np.zeros((1, 4, 4, 1), np.uint8), np.full((1, 3), 0.1, np.float32)


class Says(TierClient):
    """A tier that answers, or fails, after some seconds."""

    def __init__(self, name, seconds=0.0, error=None):
        super().__init__(name, POLICY, ["http://node"])
        self.seconds, self.error, self.says = seconds, error, OWN

    async def ask(self, rows, bits, deadline):
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.says


async def at_home(tier, images):
    return images


def test_what_fails_at_home_costs_a_tier_and_not_the_answer_that_there_is():
    async def broken(tier, images):
        if tier == "edge":
            raise RuntimeError("not foreseen")
        return images

    async def check():
        clients = {name: Says(name) for name in ("edge", "cloud")}
        answers = [(a.heard[0], dict(a.lost[0])) async for a in refine(POLICY, IMAGES, OWN, clients, broken)]
        assert [heard for heard, _ in answers] == [{"end"}, {"end", "cloud"}]
        assert answers[-1][1] == {"edge": "RuntimeError('not foreseen')"}

    asyncio.run(check())


def test_a_tier_that_fails_when_nobody_waits_any_more_is_no_error():
    async def check():
        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        clients = {"edge": Says("edge"), "cloud": Says("cloud", 0.01, TierLost("away"))}
        soon = time.monotonic() + 1.5  # both are asked at once
        answers = refine(POLICY, IMAGES, OWN, clients, at_home, deadline=soon)
        assert (await anext(answers)).tier[0] == "end"
        assert (await anext(answers)).tier[0] == "edge"
        await asyncio.sleep(0.05)  # the cloud fails meanwhile
        await answers.aclose()
        del answers
        gc.collect()
        await asyncio.sleep(0)
        assert reported == []

    asyncio.run(check())


def test_what_is_said_of_an_image_is_about_that_image():
    settles_some = msgspec.structs.replace(
        POLICY, thresholds=POLICY.thresholds | {"end+edge": Threshold(0.2, 1.0, 0.0, 0.0)}
    )
    clear = np.array([[0.9, 0.1, 0.1], [0.1, 0.1, 0.1]], np.float32)

    async def last(**errors):
        clients = {name: Says(name, error=errors.get(name)) for name in ("edge", "cloud")}
        images, own = np.repeat(IMAGES, 2, axis=0), np.repeat(OWN, 2, axis=0)
        clients["edge"].says, clients["cloud"].says = clear, OWN
        async for answer in refine(settles_some, images, own, clients, at_home):  # noqa: B007  # the last one counts
            pass
        return answer

    answer = asyncio.run(last())
    assert answer.tier == ["edge", "cloud"]
    assert answer.heard == [{"end", "edge"}, {"end", "edge", "cloud"}]
    answer = asyncio.run(last(cloud=TierLost("away")))
    assert answer.tier == ["edge", "edge"]
    assert answer.lost == [{}, {"cloud": "away"}]


def test_an_image_that_others_have_settled_has_lost_nothing():
    settles_some = msgspec.structs.replace(
        POLICY, thresholds=POLICY.thresholds | {"end+cloud": Threshold(0.2, 1.0, 0.0, 0.0)}
    )

    async def check():
        clients = {"edge": Says("edge", 0.05, TierLost("away")), "cloud": Says("cloud")}
        clients["cloud"].says = np.array([[0.9, 0.1, 0.1], [0.1, 0.1, 0.1]], np.float32)
        images, own, soon = np.repeat(IMAGES, 2, axis=0), np.repeat(OWN, 2, axis=0), time.monotonic() + 1.5
        answers = [a async for a in refine(settles_some, images, own, clients, at_home, deadline=soon)]
        assert answers[-1].heard[0] == {"end", "cloud"}
        assert answers[-1].lost == [{}, {"edge": "away"}]

    asyncio.run(check())


def test_tiers_that_are_awaited_at_the_deadline_are_lost():
    async def check():
        clients = {name: Says(name, 60.0) for name in ("edge", "cloud")}
        answers = refine(POLICY, IMAGES, OWN, clients, at_home, deadline=time.monotonic() + 0.05)
        assert [a.lost[0] async for a in answers] == [dict.fromkeys(clients, "no answer before the deadline")]

    asyncio.run(check())


def test_tiers_that_nobody_had_time_to_ask_are_lost():
    async def check():
        clients = {name: Says(name, 60.0) for name in ("edge", "cloud")}
        clients["cloud"].stopped = True  # so that the edge has all the time that there is
        answers = [a async for a in refine(POLICY, IMAGES, OWN, clients, at_home, deadline=time.monotonic() + 0.05)]
        assert answers[-1].lost == [{"edge": "no answer before the deadline", "cloud": "stopped"}]

    asyncio.run(check())


def test_nobody_is_asked_once_the_deadline_has_passed():
    async def check():
        clients = {name: Says(name) for name in ("edge", "cloud")}
        before = time.monotonic() - 1
        answers = [dict(a.lost[0]) async for a in refine(POLICY, IMAGES, OWN, clients, at_home, deadline=before)]
        assert len(answers) == 1, "there is one all the same"
        assert not clients["edge"].is_worth_asking(1, -1)

    asyncio.run(check())


def test_a_final_answer_stays_when_a_tier_that_was_asked_for_others_too_answers():
    names = ("end", "edge", "fog", "cloud")
    policy = made(
        tiers=tuple(Tier(name, (lane,), 1.0, 10) for lane, name in enumerate(names)),
        thresholds={"+".join(some): NEVER for some in subsets(names)} | {"end+edge": Threshold(0.3, 1.0, 0.0, 0.0)},
    )
    answer = Answer(policy, 2)
    for name, part in {"end": [0.6, 0.4, 0], "edge": [1, 0, 0], "fog": [0, 1, 0]}.items():
        answer.add(name, range(2), np.array([part, [0.5, 0.5, 0]], np.float32))
    assert answer.final.tolist() == [True, False]
    assert answer.heard == [{"end", "edge"}, {"end", "edge", "fog"}]
    assert answer.tier == ["edge", "fog"]
    np.testing.assert_allclose(answer.sums, [[1.6, 0.4, 0], [1.5, 1.5, 0]])

"""Answers that improve: the parts of the tiers that have answered are added, until the answer is final or time is up.

The next tier is asked if an answer is not final. The one after it is asked too if the answer is then still not final,
or is late, or if there would be no time left to ask one after the other.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, UInt8

from mlcn_jax.tiers.client import TierClient, TierLost
from mlcn_jax.tiers.policy import Policy

_log = logging.getLogger("mlcn_jax")
Home = Callable[[str, np.ndarray], Coroutine[None, None, np.ndarray]]  # from images to what a tier receives


class Answer:
    """What is known about some images so far.

    Attributes:
      sums: squared lengths of the class capsules, from the lanes heard.
      heard: for each image, the tiers that have answered.
      tier: for each image, the tier that answered last.
      lost: for each image, the tiers that should have answered but did not, and why.
    """

    def __init__(self, policy: Policy, count: int):
        self._policy = policy
        self.sums: Float[np.ndarray, "n classes"] = np.zeros((count, len(policy.class_names)), np.float32)
        self.heard: list[frozenset[str]] = [frozenset()] * count
        self.tier = [""] * count
        self.lost: list[dict[str, str]] = [{} for _ in range(count)]

    def add(self, tier: str, which: Sequence[int], sums: Float[np.ndarray, "some classes"]) -> None:
        """Adds a tier's part for some images, unless it has been added already or the image's answer is final."""
        for image, own in zip(which, sums, strict=True):
            if tier not in self.heard[image] and not self._is_final(image):
                self.sums[image] += own
                self.heard[image] |= {tier}
                self.tier[image] = tier

    def lose(self, tier: str, which: Sequence[int], why: str) -> None:
        """Records why a tier did not answer for some images; what others have settled meanwhile, it has not lost."""
        for image in which:
            if not self._is_final(image):
                self.lost[image][tier] = why

    @property
    def final(self) -> Bool[np.ndarray, " n"]:
        """Whether each image's answer is final."""
        return np.array([self._is_final(image) for image in range(len(self.heard))], bool)

    def _is_final(self, image: int) -> bool:
        heard = self.heard[image]
        return bool(heard) and bool(self._policy.is_final(self.sums[image][None], heard)[0])

    def probabilities(self, image: int) -> np.ndarray:
        """Probability of each class for an image."""
        return self._policy.probabilities(self.sums[image][None], self.heard[image])[0]


async def refine(
    policy: Policy,
    images: UInt8[np.ndarray, "n height width channels"],
    own: Float[np.ndarray, "n classes"],
    clients: Mapping[str, TierClient],
    home: Home,
    bits: int = 32,
    deadline: float = float("inf"),
) -> AsyncGenerator[Answer, None]:
    """Yields the answer each time a tier's part has arrived; it is the same object, changed in place.

    Args:
      policy: the policy of the split.
      images: all images of one request.
      own: the part of the first tier's lanes.
      clients: clients of all other tiers, by name.
      home: computes what a tier receives.
      bits: bits of each value that is sent.
      deadline: time of `time.monotonic` until which tiers are waited for; the first answer is given in any case.
    """
    answer = Answer(policy, len(images))
    answer.add(policy.names[0], range(len(images)), own)
    yield answer
    waiting = list(policy.names[1:])
    asked: dict[asyncio.Task, tuple[str, list[int]]] = {}
    late = float("inf")  # time after which the awaited answers are late

    def ask() -> None:
        """Asks the next available tier, and also those that could not answer in time if they were asked after it."""
        nonlocal late
        while waiting:
            client = clients[waiting.pop(0)]
            which = np.flatnonzero(~answer.final).tolist()
            left = deadline - time.monotonic()
            if not client.is_available or not client.is_worth_asking(len(which), left):
                reason = "" if client.is_available else client.trouble
                answer.lose(client.name, which, reason or "too slow for the deadline")
                continue
            task = asyncio.create_task(_ask(client, images[which], home, bits, deadline))
            task.add_done_callback(_read)
            asked[task] = client.name, which
            after = [clients[name].expected(len(which)) for name in waiting if clients[name].is_available]
            # Late as well once the next tier would have no time left, e.g. if this one is dead and nobody knows yet.
            late = time.monotonic() + min(client.patience(len(which)), left - min(after, default=0.0))
            if not after or client.expected(len(which)) + min(after) <= left:
                return

    try:
        while not answer.final.all():
            if not asked:
                ask()
            if not asked:
                return
            until = min(deadline, late if waiting else float("inf"))
            wait = None if until == float("inf") else max(0.0, until - time.monotonic())
            done, _ = await asyncio.wait(asked, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if time.monotonic() >= deadline:
                    for name, which in asked.values():
                        answer.lose(name, which, "no answer before the deadline")
                    for name in waiting:
                        why = clients[name].trouble or "no time was left to ask it"
                        answer.lose(name, np.flatnonzero(~answer.final).tolist(), why)
                    return
                late = float("inf")
                ask()
                continue
            came = False
            for task in done:
                name, which = asked.pop(task)
                try:
                    answer.add(name, which, task.result())
                    came = True
                except TierLost as error:
                    answer.lose(name, which, str(error))
                except Exception as error:  # nobody foresaw it, but there is an answer already
                    _log.exception("what %s takes could not be computed or sent", name)
                    answer.lose(name, which, repr(error))
            if came:
                yield answer
    finally:
        for task in asked:
            task.cancel()


def _read(task: asyncio.Task) -> None:
    """Marks a task's error as read: asyncio would report that of a task which ends when nobody waits any more."""
    if not task.cancelled():
        task.exception()


async def _ask(client: TierClient, images: np.ndarray, home: Home, bits: int, deadline: float) -> np.ndarray:
    with client.room(len(images)):
        started = time.monotonic()
        rows = await home(client.name, images)
        client.home(len(images)).took(time.monotonic() - started)
        return await client.ask(rows, bits, deadline)

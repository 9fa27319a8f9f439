"""Tiers that share lanes against a model of its own in each tier, as the report has it, at equal FLOPs.

A tier's own model is the tier's lanes, each trained to classify alone, so that both ways compute the same. The answer
of a model of its own replaces the one before; lanes that are shared add up. Each way has margins from which on an
answer is final, chosen on the same validation images for the same tolerance, against its own last answer. Accuracy is
that of all test images; times are measured by one client that asks the tiers one after the other, in the same way for
both.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float, Int

from experiments.tiers_bed import RunningNode
from mlcn_jax.tiers import policy as policies
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.node import PATH

SHARED, OWN = "shared lanes", "a model of its own"
WAYS = (SHARED, OWN)
Parts = Sequence[Float[np.ndarray, "n classes"]]  # what each tier's lanes say of some images


def answer(way: str, parts: Parts) -> Float[np.ndarray, "n classes"]:
    """The answer once some tiers have been heard: the sum of what they said, or what the last said."""
    return np.sum(parts, axis=0) if way == SHARED else parts[-1]


def weight(way: str, weights: Sequence[float]) -> float:
    """Sum of the weights of the lanes in that answer."""
    return sum(weights) if way == SHARED else weights[-1]


def margins(
    way: str, parts: Parts, weights: Sequence[float], labels: Int[np.ndarray, " n"], tolerance: float
) -> list[float | None]:
    """For each tier but the last, the margin from which on its answer is final, chosen on validation images."""
    right = np.argmax(answer(way, parts), axis=1) == labels
    found = []
    for heard in range(1, len(parts)):
        sums = answer(way, parts[:heard])
        lost = right.astype(int) - (np.argmax(sums, axis=1) == labels)
        margin = policies.margins(sums, weight(way, weights[:heard]))
        found.append(policies.threshold(margin, lost, tolerance / (len(parts) - 1)).margin)
    return found


def is_final(way: str, parts: Parts, weights: Sequence[float], least: Sequence[float | None]) -> np.ndarray:
    """Whether the answer of the tiers heard so far is final, of each image."""
    heard = len(parts)
    if heard == len(weights):
        return np.ones(len(parts[0]), bool)
    margin = least[heard - 1]
    if margin is None:
        return np.zeros(len(parts[0]), bool)
    return policies.margins(answer(way, parts), weight(way, weights[:heard])) >= margin


def settled(
    way: str, parts: Parts, weights: Sequence[float], least: Sequence[float | None], labels: Int[np.ndarray, " n"]
) -> dict[str, Any]:
    """Accuracy at each tier, the share of images settled there, and accuracy of the final answers."""
    final = np.zeros(len(labels), bool)
    taken = np.zeros(len(labels), int)
    accuracies, shares = [], []
    for heard in range(1, len(parts) + 1):
        found = np.argmax(answer(way, parts[:heard]), axis=1)
        now = is_final(way, parts[:heard], weights, least) & ~final
        taken[now], final = found[now], final | now
        accuracies.append(float(np.mean(found == labels)))
        shares.append(float(np.mean(now)))
    return {"accuracy": accuracies, "settled": shares, "final_accuracy": float(np.mean(taken == labels))}


def asking(client: httpx.Client, node: RunningNode, tier: TierArtifact) -> Callable[[np.ndarray], np.ndarray]:
    """A function that asks a node what its lanes say of one image."""
    digest, classes, most = tier.policy.digest, len(tier.class_names), tier.policy.tier(tier.name).weight

    def ask(image: np.ndarray) -> np.ndarray:
        nonce = secrets.token_hex(8)
        response = client.post(node.url + PATH, content=wire.pack_request(digest, nonce, image[None]))
        content = response.raise_for_status().content
        return wire.unpack_answer(content, digest, tier.name, nonce, (1, classes), most)

    return ask


def timed(
    ways: dict[str, Sequence[float | None]],
    weights: Sequence[float],
    ask: Sequence[Callable[[np.ndarray], np.ndarray]],
    images: np.ndarray,
) -> dict[str, dict[str, Any]]:
    """Milliseconds to the final answer of each image, and where it was settled; the ways take turns.

    Args:
      ways: with the margins of each.
      weights: of the tiers' lanes.
      ask: of each tier, a function from an image to what it says.
      images: asked one after the other.
    """
    taken: dict[str, list[float]] = {way: [] for way in ways}
    heard: dict[str, list[int]] = {way: [] for way in ways}
    for image in images:
        for way, least in ways.items():
            started, parts = time.perf_counter(), list[np.ndarray]()
            for tier in ask:
                parts.append(tier(image))
                if is_final(way, parts, weights, least)[0]:
                    break
            taken[way].append(1e3 * (time.perf_counter() - started))
            heard[way].append(len(parts))
    return {
        way: {
            "images": len(images),
            "mean_ms": float(np.mean(taken[way])),
            "p95_ms": float(np.quantile(taken[way], 0.95)),
            "settled": [float(np.mean(np.array(heard[way]) == tiers)) for tiers in range(1, len(ask) + 1)],
        }
        for way in ways
    }


def report(names: Sequence[str], found: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of Markdown: what `settled` and `timed` found, a row for each way and tier."""
    lines = ["", "| | tier | accuracy there | settled there |", "| --- | --- | --- | --- |"]
    for way in WAYS:
        rows = zip(names, found[way]["accuracy"], found[way]["settled"], strict=True)
        lines += [f"| {way} | {name} | {accuracy:.4f} | {share:.1%} |" for name, accuracy, share in rows]
    lines += ["", "| | final accuracy | to the final answer, mean ms | 95 %, ms | images timed |", "|" + " --- |" * 5]
    for way in WAYS:
        own, times = found[way], found[way]["times"]
        timing = f"{times['mean_ms']:.1f} | {times['p95_ms']:.1f} | {times['images']:,}"
        lines.append(f"| {way} | {own['final_accuracy']:.4f} | {timing} |")
    return lines

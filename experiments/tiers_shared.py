"""Tiers that share lanes against a model of its own in each tier, as the report has it, at equal FLOPs.

The answer of a model of its own replaces the one before; lanes that are shared add up. Each way has margins from which
on an answer is final, chosen on the same validation images for the same tolerance, against its own last answer.
Accuracy is that of all test images. Times are measured by one client that asks nodes one after the other, in the same
way for both: the models of their own are joined and split again, so that each is the only lane of a node like that of
the tier's lanes, with as many cores and behind such a link.

Each tier's own model is one network, as in the report: one lane that takes as many FLOPs as the tier's lanes do, with
the settings of the run that was split otherwise, so that its validation images are the same. For mlcn2:w2*4 split into
one, one and two lanes:

    common="--config=mlcn2_fashion --config.data.validation_fraction=0.1"
    own="$common --config.model.margin_loss=per_lane --config.data.split_seed=0"  # train.seed of the run that was split
    mlcn_jax train $common --config.model.lanes=mlcn2:w2*4 --config.model.margin_loss=per_lane --workdir=runs/tiers
    mlcn_jax train $own --config.train.seed=1 --config.model.lanes=mlcn2:w2*1 --workdir=runs/own_end
    mlcn_jax train $own --config.train.seed=2 --config.model.lanes=mlcn2:w2*1 --workdir=runs/own_edge
    mlcn_jax train $own --config.train.seed=3 --config.model.lanes=mlcn2:w3*1 --workdir=runs/own_cloud
    python -m experiments.tiers_gateway --workdir=runs/tiers \
        --own_models=end=runs/own_end,edge=runs/own_edge,cloud=runs/own_cloud
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float, Int

from experiments.tiers_bed import RunningNode
from mlcn_jax.analysis.join import join
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.tiers import policy as policies
from mlcn_jax.tiers import split, wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.node import PATH
from mlcn_jax.tiers.placing import lane_flops
from mlcn_jax.training.trained import load_trained

SHARED, OWN = "shared lanes", "a model of its own"
WAYS = (SHARED, OWN)
_TOLERANCE = 0.05  # of FLOPs that are equal
Parts = Sequence[Float[np.ndarray, "n classes"]]  # what each tier says of some images


def packed(right: np.ndarray) -> str:
    """Which images were classified rightly, a bit each, in hexadecimal digits."""
    return np.packbits(right).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    """The same as numbers, 0 or 1."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(float)


def own_folders(text: str, policy: policies.Policy, workdir: Path, spec: ModelSpec) -> dict[str, Path]:
    """The workdirs that `--own_models` names, by tier, from the nearest on; none if it is empty.

    Args:
      text: TIER=WORKDIR,...
      policy: of the split.
      workdir: of the model that was split.
      spec: of that model.

    Raises:
      InputError: a tier has none or has other FLOPs than its model, or one did not learn from the same images.
    """
    given = {name: Path(folder).expanduser() for name, _, folder in (item.partition("=") for item in text.split(","))}
    if not text:
        return {}
    if set(given) != set(policy.names):
        raise InputError(f"--own_models={text} must have a workdir for each of the tiers {', '.join(policy.names)}")
    flops, learned = lane_flops(spec), _learned(workdir)
    for name, folder in given.items():
        lanes, own = policy.tier(name).lanes, load_trained(folder).spec
        if len(own.lane_specs) != 1:
            raise InputError(f"the model in {folder} has the lanes {own.lanes}: train one lane, as the report's tiers")
        ratio = sum(lane_flops(own)) / sum(flops[lane] for lane in lanes)
        if abs(ratio - 1) > _TOLERANCE:
            raise InputError(
                f"the model in {folder} has {ratio:.2f} times the FLOPs of the lanes of tier {name}, "
                f"{spec_of(spec, lanes).lanes}: train a lane that has as many, within {100 * _TOLERANCE:g} %"
            )
        if _learned(folder) != learned:
            raise InputError(
                f"the model in {folder} learned from other images than that in {workdir}: train it with the same "
                "settings of data, and data.split_seed or train.seed"
            )
    return {name: given[name] for name in policy.names}


def split_own(folders: Mapping[str, Path], output: Path, data_dir: str) -> Path:
    """Joins models of their own, one lane for each tier, and splits them into these tiers; returns their folder."""
    columns = join(list(folders.values()), output, data_dir=data_dir or None, weights="equal", decoder_epochs=0)[
        "columns"
    ]
    wishes = output / "tiers.json"
    write_json(wishes, {"tiers": [{"name": name, "lanes": [columns.index(i)]} for i, name in enumerate(folders)]})
    return split.split(output, wishes, data_dir=data_dir)


def _learned(workdir: Path) -> str:
    return read_json(workdir / "model.json")["training_images_sha256"]


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
    found, reach, passed = [], np.ones(len(labels), bool), len(parts) - 1
    for heard in range(1, len(parts)):
        sums = answer(way, parts[:heard])
        lost = (right.astype(int) - (np.argmax(sums, axis=1) == labels)) * reach
        margin = policies.margins(sums, weight(way, weights[:heard]))
        least = policies.threshold(margin, lost, tolerance / passed, passed).margin
        found.append(least)
        reach &= margin < (np.inf if least is None else least)
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
    right = taken == labels
    return {"accuracy": accuracies, "settled": shares, "final_accuracy": float(np.mean(right)), "right": right}


def asking(client: httpx.Client, node: RunningNode, tier: TierArtifact) -> Callable[[np.ndarray], np.ndarray]:
    """A function that asks a node what its lanes say of one image."""
    digest, classes, most = tier.policy.digest, len(tier.class_names), tier.policy.tier(tier.name).weight

    def ask(image: np.ndarray) -> np.ndarray:
        body = wire.pack_request(digest, image[None])
        response = client.post(node.url + PATH, content=body)
        content = response.raise_for_status().content
        return wire.unpack_answer(content, digest, tier.name, wire.digest_of(body), (1, classes), most)

    return ask


def timed(
    ways: Mapping[str, tuple[Sequence[float | None], Sequence[float]]],
    ask: Mapping[str, Sequence[Callable[[np.ndarray], np.ndarray]]],
    images: np.ndarray,
) -> dict[str, dict[str, Any]]:
    """Milliseconds to the final answer of each image, and where it was settled; the ways take turns.

    Args:
      ways: with the margins and the tiers' weights of each.
      ask: of each way and tier, a function that asks a node what it says of an image.
      images: asked one after the other.
    """
    taken: dict[str, list[float]] = {way: [] for way in ways}
    heard: dict[str, list[int]] = {way: [] for way in ways}
    for image in images:
        for way, (least, weights) in ways.items():
            started, known = time.perf_counter(), list[np.ndarray]()
            for tier in ask[way]:
                known.append(tier(image))
                if is_final(way, known, weights, least)[0]:
                    break
            taken[way].append(1e3 * (time.perf_counter() - started))
            heard[way].append(len(known))
    return {
        way: {
            "images": len(images),
            "mean_ms": float(np.mean(taken[way])),
            "p95_ms": float(np.quantile(taken[way], 0.95)),
            "settled": [float(np.mean(np.array(heard[way]) == tiers)) for tiers in range(1, len(weights) + 1)],
        }
        for way, (_, weights) in ways.items()
    }


def measured(
    ways: Mapping[str, Path],
    policy: policies.Policy,
    validation: Split,
    test: Split,
    nodes: list[RunningNode],
    images_timed: int,
) -> dict[str, dict[str, Any]]:
    """Lanes that tiers share, and a model of its own in each: accuracy, where images are settled, times.

    Args:
      ways: folders of both splits.
      policy: whose tolerance both have.
      validation: images on which margins are chosen.
      test: images that are settled.
      nodes: of all tiers of the first way, then of the second.
      images_timed: test images that are timed.
    """
    found, least, ask, left = {}, {}, {}, iter(nodes)
    with httpx.Client(timeout=60, trust_env=False) as client:
        for way, folder in ways.items():
            loaded = [TierArtifact(folder / name) for name in policy.names]
            weights = [tier.policy.tier(tier.name).weight for tier in loaded]
            seen = [tier.part(validation.images) for tier in loaded]
            least[way] = margins(way, seen, weights, validation.labels, policy.tolerance), weights
            parts = [tier.part(test.images) for tier in loaded]
            found[way] = {"margins": least[way][0]}
            found[way] |= settled(way, parts, weights, least[way][0], test.labels)
            ask[way] = [asking(client, next(left), tier) for tier in loaded]
        for each in itertools.chain(*ask.values()):
            each(test.images[0])  # which opens the connection
        times = timed(least, ask, test.images[:images_timed])
    return {way: found[way] | {"times": times[way], "right": packed(found[way]["right"])} for way in ways}


def report(names: Sequence[str], found: dict[str, dict[str, Any]], count: int) -> list[str]:
    """Lines of Markdown: what `settled` (of `count` images) and `timed` found, a row for each way and tier."""
    lines = ["", "| | tier | accuracy there | settled there |", "| --- | --- | --- | --- |"]
    for way in WAYS:
        rows = zip(names, found[way]["accuracy"], found[way]["settled"], strict=True)
        lines += [f"| {way} | {name} | {accuracy:.4f} | {share:.1%} |" for name, accuracy, share in rows]
    lines += [f"| {way} | the final answer | {found[way]['final_accuracy']:.4f} | |" for way in WAYS]
    right = [unpacked(found[way]["right"], count) for way in WAYS]
    more = right[0] - right[1]
    bounds = (100 * policies.upper_bound(sign * more.mean(), more.var(), count) for sign in (-1, 1))
    least, most = (sign * bound for sign, bound in zip((-1, 1), bounds, strict=True))
    lines += [
        "",
        f"Final answers of shared lanes are right {100 * more.mean():+.2f} points more often, {least:+.2f} to "
        f"{most:+.2f} (paired, each bound 95 %; one training of each).",
    ]
    lines += ["", "Time to the final answer:", "", "| | mean, ms | 95 %, ms | images |", "|" + " --- |" * 4]
    for way in WAYS:
        times = found[way]["times"]
        lines.append(f"| {way} | {times['mean_ms']:.1f} | {times['p95_ms']:.1f} | {times['images']:,} |")
    return lines

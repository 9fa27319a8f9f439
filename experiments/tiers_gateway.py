"""A gateway over a test set: settled at the end, accuracy, bytes, latency against the cloud alone; and under faults.

    python -m experiments.tiers_gateway --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_gateway --workdir=runs/mlcn2

Splits the model (first lane at the end, second at the edge, the rest in the cloud, unless --tiers names a file, which
may leave out the edge), starts the nodes with quotas of cores behind links of 20 and 100 ms there and back, and a
gateway, all as processes (`experiments.tiers_bed`). `answers` sends the test set to the gateway, and to the whole model
in the cloud (`mlcn_jax serve`); accuracy lost is given with a paired 95 % bound. `fault: ...` sends requests with a
deadline of the 95 % time of the end's own lanes plus 50 ms while something fails, and counts late and unanswered ones.
`own models` compares with a model of its own in each tier (`experiments.tiers_shared`). Writes `tiers_gateway.json` and
`.md` to `experiments/results/`; run again, it goes on with what is missing.
"""

import contextlib
import datetime
import itertools
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from absl import flags

from experiments import RESULTS, tiers_shared
from experiments.quota import Quota
from experiments.tiers_bed import CORES, NodePlan, RunningNode, bed, limited, start_relay, start_server, url_of
from experiments.tiers_faults import (
    EXPIRED,
    FAULTS,
    FalseNode,
    expired,
    make_certificates,
    make_keys,
    png,
    taken_over,
    under_fault,
)
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.data.datasets import Split, split_validation
from mlcn_jax.files import make_folder, read_json, write_atomic, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.serving import export
from mlcn_jax.tiers import signatures, split, wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.policy import Policy
from mlcn_jax.training.checkpoint import Trained

_DELAY_MS = {"edge": 10.0, "cloud": 50.0}  # each way
_Z95 = 1.6449
CORES_OF = {"end": CORES / 5, "edge": CORES / 5, "cloud": 3 * CORES / 5}
# Images of the test set, requests under each fault, images timed with models of their own.
SCALES = {"smoke": (60, 40, 20), "full": (10_000, 10_000, 2_000)}
_SWITCH_SECONDS = 1e-4  # how long the client waits for Python's lock, which false nodes hold at times
_OF_FAULT = ("requests", "deadline_ms", "late", "late_by_gateway", "unexplained", "unanswered", "p50_ms", "p999_ms")
_MILLISECONDS = "of requests one after the other, by the client's clock"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Of a trained model of at least 3 lanes.", flag_values=values)
    flags.DEFINE_string(
        "tiers", "", "tiers.json; its tiers are named end, edge, cloud, or end, cloud.", flag_values=values
    )
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)
    flags.DEFINE_enum("scale", "full", list(SCALES), "How much is measured.", flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "Folder to write to.", flag_values=values)
    flags.DEFINE_string("name", "tiers_gateway", "Of the files.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder, workdir = Path(values.results).expanduser(), Path(values.workdir).expanduser()
    make_folder(folder, "results")
    path = folder / f"{values.name}{'' if values.scale == 'full' else f'_{values.scale}'}.json"
    config = stored_config(workdir, values.data_dir)
    trained, dataset = load_with_data(workdir, config)
    images, requests, timed = SCALES[values.scale]
    sys.setswitchinterval(_SWITCH_SECONDS)
    tiers = split_model(workdir, values.tiers, trained, values.data_dir)
    policy = Policy.read(tiers / "end" / "policy.json")
    about = {"model": trained.spec.lanes, "data": dataset.name, "scale": values.scale, "policy": policy.digest}
    results = read_json(path) if path.is_file() else {"about": about, "policy": policy.to_dict(), "measured": {}}
    if results["about"] != about:
        raise SystemExit(f"error: {path} is of {results['about']}, not {about}: move it away")
    results |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **host.environment()}
    measured, test = results["measured"], dataset.test[:images]

    def once(key: str, measure: Callable[[], Any]) -> None:
        if key not in measured:
            measured[key] = measure()
            write_json(path, results)
            print(f"{key}: {json.dumps(measured[key])}", flush=True)

    once("subsets", lambda: subsets(tiers, policy, test.images, test.labels))
    once("cloud alone", lambda: cloud_alone(workdir, test.images, test.labels))
    key, public = make_keys(workdir)
    false = [FalseNode(policy, name, signatures.private_key(key).sign) for name in policy.names[1:]]
    faults = {**{kind: taken_over(false, kind) for kind in false[0].kinds}, **FAULTS}
    plans = [NodePlan(tiers / name, CORES_OF[name], _DELAY_MS[name]) for name in policy.names[1:]]
    rest, signed = sum(plan.cores for plan in plans), f"--key={key}"

    def under(name: str, url: str, nodes: list[RunningNode], fault: tuple, quota: Quota) -> None:
        once(f"fault: {name}", lambda: under_fault(url, test.images, requests, nodes, fault, quota.held_back))

    if "answers" not in measured or any(f"fault: {name}" not in measured for name in faults):
        with bed(plans, 1, rest, (signed,)) as nodes, gateway(tiers / "end", nodes, public) as (url, quota):
            once("answers", lambda: answers(url, policy, test.images, test.labels, nodes))
            for name, fault in faults.items():
                under(name, url, nodes, fault, quota)
    if f"fault: {EXPIRED}" not in measured:
        shown = make_certificates(workdir)
        with (
            bed(plans, 1, rest, (signed, *shown.valid)) as nodes,
            gateway(tiers / "end", nodes, public, f"--ca={shown.ca}") as (url, quota),
        ):
            under(EXPIRED, url, nodes, expired((signed, *shown.expired)), quota)
    validation = split_validation(dataset.train, config.data.validation_fraction, config.split_seed)[1]
    if "own models" not in measured:
        with bed([NodePlan(tiers / "end", CORES_OF["end"]), *plans], 1) as nodes:
            once("own models", lambda: own_models(tiers, policy, validation, test, nodes, timed))
    write_atomic(path.with_suffix(".md"), report(results))


def own_models(
    tiers: Path, policy: Policy, validation: Split, test: Split, nodes: list[RunningNode], timed: int
) -> dict[str, dict[str, Any]]:
    """Lanes that tiers share, and a model of its own in each: accuracy, where images are settled, times."""
    loaded = [TierArtifact(tiers / name) for name in policy.names]
    weights = [tier.weight for tier in policy.tiers]
    seen = [tier.part(validation.images) for tier in loaded]
    ways = {
        way: tiers_shared.margins(way, seen, weights, validation.labels, policy.tolerance) for way in tiers_shared.WAYS
    }
    parts = [tier.part(test.images) for tier in loaded]
    with httpx.Client(timeout=60, trust_env=False) as client:
        ask = [tiers_shared.asking(client, node, tier) for node, tier in zip(nodes, loaded, strict=True)]
        for each in ask:
            each(test.images[0])  # which opens the connection
        times = tiers_shared.timed(ways, weights, ask, test.images[:timed])
    return {
        way: {"margins": least, "times": times[way]} | tiers_shared.settled(way, parts, weights, least, test.labels)
        for way, least in ways.items()
    }


def subsets(tiers: Path, policy: Policy, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy of each subset of tiers, computed here: what is left where a tier is lost, or has a model of its own."""
    parts = {name: TierArtifact(tiers / name).part(images) for name in policy.names}
    found = {}
    for size in range(1, len(parts) + 1):
        for heard in itertools.combinations(policy.names, size):
            sums = np.sum([parts[name] for name in heard], axis=0)
            found["+".join(heard)] = float(np.mean(np.argmax(sums, axis=1) == labels))
    return found


def split_model(workdir: Path, tiers: str, trained: Trained, data_dir: str) -> Path:
    """Splits the model, unless it has been for this script, with the parameters that it has now."""
    own = {"end": [0], "edge": [1], "cloud": list(range(2, len(trained.spec.lane_specs)))}
    default = {"tiers": [{"name": name, "lanes": which} for name, which in own.items()]}
    wanted = read_json(Path(tiers)) if tiers else default
    names = [tier.get("name") for tier in wanted.get("tiers", [])]
    if names not in (["end", "edge", "cloud"], ["end", "cloud"]):
        raise SystemExit(f"error: {tiers} has the tiers {names}; give end, edge, cloud, or end, cloud")
    folder = workdir / f"tiers-{Path(tiers).stem if tiers else 'gateway'}"
    kept = folder.with_suffix(".json")
    if folder.exists():
        if not kept.is_file() or read_json(kept) != wanted:
            raise SystemExit(f"error: {folder} is of other tiers than these: move it away, or rename {tiers}")
        if split.is_of(folder, trained):
            return folder
    write_json(kept, wanted)
    return split.split(workdir, Path(tiers) if tiers else kept, "pixels", None, data_dir, folder.name)


@contextlib.contextmanager
def process(name: str, cores: float, *arguments: str) -> Iterator[tuple[str, Quota]]:
    """A server of this package as a process with so many cores; yields its URL and quota."""
    running = start_server(*arguments, "--max_batch=1", "--max_images=1")
    try:
        url = url_of(running)
        with limited(running.pid, name, cores) as quota:
            yield url, quota
    finally:
        running.kill()
        running.wait()


@contextlib.contextmanager
def gateway(artifact: Path, nodes: list[RunningNode], key: Path, *options: str) -> Iterator[tuple[str, Quota]]:
    """A gateway with nodes of other tiers, whose answers must be signed by a key; yields its URL and quota."""
    urls = ",".join(f"{node.plan.artifact.name}={node.url}" for node in nodes)
    options = (f"--nodes={urls}", f"--node_keys={key}", *options)
    with process("end", CORES_OF["end"], "tiers", "gateway", str(artifact), *options) as found:
        yield found


def cloud_alone(workdir: Path, images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The whole model in the cloud, to which every image is sent."""
    export.export(workdir)  # also where there is one: the model may have been trained further
    with process("cloud", CORES_OF["cloud"], "serve", str(workdir / "export")) as (url, _):
        relay, port = start_relay(url.removeprefix("http://"), _DELAY_MS["cloud"])
        try:
            found = send(f"http://127.0.0.1:{port}/predict", images)
        finally:
            relay.kill()
            relay.wait()
    bodies = sum(len(wire.pack_request("0" * 32, secrets.token_hex(8), image[None])) for image in images)
    right = np.array([one["class"] for one in found["answers"]]) == names_of(labels, found["classes"])
    return {
        **found["times"],
        "images": len(right),
        "accuracy": float(right.mean()),
        "sent_bytes": bodies,
        "right": packed(right),
    }


def answers(
    url: str, policy: Policy, images: np.ndarray, labels: np.ndarray, nodes: list[RunningNode]
) -> dict[str, Any]:
    """The test set through the gateway: where it was settled, accuracy, bytes and times."""
    before = [node.link() for node in nodes]
    found = send(f"{url}/predict", images)
    after = [node.link() for node in nodes]
    states = {state["name"]: state for state in httpx.get(f"{url}/tiers", trust_env=False).json()}
    right = np.array([one["class"] for one in found["answers"]]) == names_of(labels, list(policy.class_names))
    own = list(policy.tiers[0].lanes)
    lost = ["lost" in one for one in found["answers"]]
    at_end = [one["lanes"] == own and "lost" not in one for one in found["answers"]]
    return {
        **found["times"],
        "images": len(right),
        "accuracy": float(right.mean()),
        "right": packed(right),
        "settled_at_end": float(np.mean(at_end)),
        "without_a_tier": int(np.sum(lost)),
        "sent_bytes": sum(states[name].get("sent_bytes", 0) for name in states),
        "wire_bytes": sum(a["sent"] - b["sent"] for a, b in zip(after, before, strict=True)),
        "end_flops_share": policy.tiers[0].flops / sum(tier.flops for tier in policy.tiers),
    }


def packed(right: np.ndarray) -> str:
    """Which images were classified rightly, a bit each, in hexadecimal digits."""
    return np.packbits(right).tobytes().hex()


def unpacked(text: str, count: int) -> np.ndarray:
    """The same as numbers, 0 or 1."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(float)


def names_of(labels: np.ndarray, classes: list[str]) -> np.ndarray:
    """The names of classes by their labels."""
    return np.array(classes)[labels]


def send(url: str, images: np.ndarray) -> dict[str, Any]:
    """Sends images one after the other; returns answers, names of classes and times."""
    seconds, found = [], []
    with httpx.Client(timeout=60, trust_env=False) as client:
        classes = client.get(url.rsplit("/", 1)[0] + "/").json()["classes"]
        for image in images:
            started = time.perf_counter()
            response = client.post(url, content=png(image), headers={"Content-Type": "image/png"})
            seconds.append(1e3 * (time.perf_counter() - started))
            found.append(response.raise_for_status().json()["predictions"][0])
    times = {"mean_ms": statistics.mean(seconds), "p95_ms": float(np.quantile(seconds, 0.95))}
    return {"answers": found, "classes": classes, "times": times}


def report(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    measured = results["measured"]
    cloud, own = measured["cloud alone"], measured["answers"]
    right = {name: unpacked(row["right"], row["images"]) for name, row in (("cloud", cloud), ("own", own))}
    lost = right["cloud"] - right["own"]
    bound = lost.mean() + _Z95 * lost.std() / np.sqrt(len(lost))
    rows = [
        (
            "accuracy",
            cloud["accuracy"],
            own["accuracy"],
            f"lost {100 * lost.mean():.2f}, at most {100 * bound:.2f} points",
        ),
        ("settled at the end", "", own["settled_at_end"], f"with {own['end_flops_share']:.1%} of the FLOPs"),
        ("answers without a tier that was asked", "", own["without_a_tier"], "no fault was made"),
        ("bytes of bodies", cloud["sent_bytes"], own["sent_bytes"], f"{own['sent_bytes'] / cloud['sent_bytes']:.3f}"),
        ("mean, ms", cloud["mean_ms"], own["mean_ms"], f"{own['mean_ms'] / cloud['mean_ms']:.3f}"),
        ("p95, ms", cloud["p95_ms"], own["p95_ms"], f"{own['p95_ms'] / cloud['p95_ms']:.3f}"),
    ]
    names = [tier["name"] for tier in results["policy"]["tiers"]]
    links = " and ".join(f"{2 * _DELAY_MS[name]:g}" for name in names[1:])
    lines = [
        f"# A gateway over {', '.join(names)}",
        "",
        f"`{results['about']['model']}`, {len(lost):,} test images of {results['about']['data']}; {results['device']}, "
        f"jax {results['versions']['jax']}. Times {_MILLISECONDS}; links of {links} ms there and back. "
        f"The bound is paired, 95 %. Thresholds from {results['policy']['validation_images']:,} validation images.",
        "",
        "| | cloud alone | tiers | |",
        "| --- | --- | --- | --- |",
        *("| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) + " |" for row in rows),
        "",
        "All nodes fail from a quarter to three quarters of the requests. Late ones, and why, are in the JSON.",
        "",
        "| fault | requests | deadline, ms | late | by the gateway's clock | unexplained | unanswered | median, ms "
        "| 99.9 %, ms | tiers beyond the end heard before, during, after |",
        "|" + " --- |" * 10,
    ]
    alone = f"{len(results['policy']['tiers'][0]['lanes'])} lanes"
    for key, row in measured.items():
        if key.startswith("fault: "):
            shown = [f"{row[f]:.4g}" if isinstance(row[f], float) else str(row[f]) for f in _OF_FAULT]
            refined = [1 - found.get(alone, 0) / max(sum(found.values()), 1) for found in row["heard"].values()]
            shown.append(", ".join(f"{share:.1%}" for share in refined))
            lines.append(f"| {key.removeprefix('fault: ')} | " + " | ".join(shown) + " |")
    lines += ["", "| tiers heard | accuracy |", "| --- | --- |"]
    lines += [f"| {name} | {accuracy:.4f} |" for name, accuracy in measured["subsets"].items()]
    lines += ["", "| tier lost | its lanes | accuracy without it | lost, points |", "| --- | --- | --- | --- |"]
    lines += lost_tiers(results["policy"]["tiers"], measured["subsets"])
    lines += ["", "At equal FLOPs, lanes that tiers share against a model of its own in each (`tiers_shared.py`):"]
    lines += tiers_shared.report(names, measured["own models"])
    return "\n".join(lines) + "\n"


def lost_tiers(tiers: list[dict[str, Any]], accuracies: dict[str, float]) -> list[str]:
    """Rows in Markdown: the accuracy of all other tiers, and what it is less than that of all."""
    whole = "+".join(tier["name"] for tier in tiers)
    rows = []
    for lost in tiers:
        without = accuracies["+".join(tier["name"] for tier in tiers if tier is not lost)]
        points = 100 * (accuracies[whole] - without)
        rows.append(f"| {lost['name']} | {len(lost['lanes'])} | {without:.4f} | {points:.2f} |")
    return rows


if __name__ == "__main__":
    launch_script(define, main)

"""A gateway over a test set: settled at the end, accuracy, bytes, latency against the cloud alone; and under faults.

    python -m experiments.tiers_gateway --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_gateway --workdir=runs/mlcn2

Splits the model (first lane at the end, second at the edge, the rest in the cloud, unless --tiers names a file), starts
the nodes with quotas of cores behind links of 20 and 100 ms there and back, and a gateway, all as processes
(`experiments.tiers_bed`). `answers` sends the test set to the gateway, and to the whole model in the cloud
(`mlcn_jax serve`); accuracy lost is given with a paired 95 % bound. `fault: ...` sends requests with a deadline of the
95 % time of the end's own lanes plus 50 ms while something fails, and counts late and unanswered ones. Writes
`tiers_gateway.json` and `.md` to `experiments/results/`; run again, it goes on with what is missing.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from absl import flags

from experiments import RESULTS
from experiments.tiers_bed import CORES, NodePlan, RunningNode, bed, limited
from experiments.tiers_faults import FAULTS, FalseNode, make_keys, png, under_fault
from experiments.tiers_relay import Link, Relay
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.files import make_folder, read_json, write_atomic, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.serving import export
from mlcn_jax.tiers import split, wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.policy import Policy

_EDGE_MS, _CLOUD_MS = 10.0, 50.0  # each way
_Z95 = 1.6449
CORES_OF = {"end": CORES / 5, "edge": CORES / 5, "cloud": 3 * CORES / 5}
SCALES = {"smoke": (60, 40), "full": (10_000, 10_000)}  # images of the test set, requests under each fault
_MILLISECONDS = "of requests one after the other, by the client's clock"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Of a trained model of at least 3 lanes.", flag_values=values)
    flags.DEFINE_string("tiers", "", "tiers.json; its tiers are named end, edge, cloud.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)
    flags.DEFINE_enum("scale", "full", list(SCALES), "How much is measured.", flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "Folder to write to.", flag_values=values)
    flags.DEFINE_string("name", "tiers_gateway", "Of the files.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder, workdir = Path(values.results).expanduser(), Path(values.workdir).expanduser()
    make_folder(folder, "results")
    path = folder / f"{values.name}{'' if values.scale == 'full' else f'_{values.scale}'}.json"
    trained, dataset = load_with_data(workdir, stored_config(workdir, values.data_dir))
    images, requests = SCALES[values.scale]
    tiers = split_model(workdir, values.tiers, len(trained.spec.lane_specs), values.data_dir)
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
    false = FalseNode(policy)
    faults = {**{kind: false.takes_over(kind) for kind in false.kinds}, **FAULTS}
    if "answers" not in measured or any(f"fault: {name}" not in measured for name in faults):
        rest = CORES_OF["edge"] + CORES_OF["cloud"]
        plans = [
            NodePlan(tiers / "edge", CORES_OF["edge"], _EDGE_MS),
            NodePlan(tiers / "cloud", CORES_OF["cloud"], _CLOUD_MS),
        ]
        key, public = make_keys(workdir)
        with bed(plans, 1, rest, (f"--key={key}",)) as nodes, gateway(tiers / "end", nodes, public) as url:
            once("answers", lambda: answers(url, policy, test.images, test.labels, nodes))
            for name, fault in faults.items():
                once(f"fault: {name}", lambda fault=fault: under_fault(url, test.images, requests, nodes, fault))
    write_atomic(path.with_suffix(".md"), report(results))


def subsets(tiers: Path, policy: Policy, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy of each subset of tiers, computed here: what is left where a tier is lost, or has a model of its own."""
    parts = {name: TierArtifact(tiers / name).part(images) for name in policy.names}
    found = {}
    for size in range(1, len(parts) + 1):
        for heard in itertools.combinations(policy.names, size):
            sums = np.sum([parts[name] for name in heard], axis=0)
            found["+".join(heard)] = float(np.mean(np.argmax(sums, axis=1) == labels))
    return found


def split_model(workdir: Path, tiers: str, lanes: int, data_dir: str) -> Path:
    """Splits the model, unless it has been for this script."""
    folder = workdir / "tiers-gateway"
    if folder.exists():
        return folder
    path = Path(tiers) if tiers else workdir / "tiers-gateway.json"
    if not tiers:
        own = {"end": [0], "edge": [1], "cloud": list(range(2, lanes))}
        write_json(path, {"tiers": [{"name": name, "lanes": which} for name, which in own.items()]})
    return split.split(workdir, path, "pixels", None, data_dir, folder.name)


@contextlib.contextmanager
def process(name: str, cores: float, *arguments: str) -> Iterator[str]:
    """A server of this package as a process with so many cores; yields its URL."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mlcn_jax", *arguments, "--port=0", "--max_batch=1", "--max_images=1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert running.stdout is not None
    line = running.stdout.readline()
    found = re.search(r"(http://[0-9.]+:\d+)", line)
    if not found:
        raise SystemExit(f"error: {line}{running.stdout.read()}")
    with limited(running.pid, name, cores):
        yield found[1]


@contextlib.contextmanager
def gateway(artifact: Path, nodes: list[RunningNode], key: Path) -> Iterator[str]:
    """A gateway with an edge and a cloud, whose answers must be signed by a key; yields its URL."""
    urls = f"edge={nodes[0].url},cloud={nodes[1].url}"
    options = (f"--nodes={urls}", f"--node_keys={key}")
    with process("end", CORES_OF["end"], "tiers", "gateway", str(artifact), *options) as url:
        yield url


def cloud_alone(workdir: Path, images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The whole model in the cloud, to which every image is sent."""
    if not (workdir / "export").is_dir():
        export.export(workdir)

    with process("cloud", CORES_OF["cloud"], "serve", str(workdir / "export")) as url:
        relay = Relay(("127.0.0.1", int(url.rpartition(":")[2])), Link(_CLOUD_MS))
        found = send(f"http://127.0.0.1:{relay.port}/predict", images)
        relay.close()
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
    states = {state["name"]: state for state in httpx.get(f"{url}/tiers").json()}
    right = np.array([one["class"] for one in found["answers"]]) == names_of(labels, list(policy.class_names))
    heard = [len(one["lanes"]) for one in found["answers"]]
    own = len(policy.tiers[0].lanes)
    return {
        **found["times"],
        "images": len(right),
        "accuracy": float(right.mean()),
        "right": packed(right),
        "settled_at_end": float(np.mean(np.array(heard) == own)),
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
        ("bytes of bodies", cloud["sent_bytes"], own["sent_bytes"], f"{own['sent_bytes'] / cloud['sent_bytes']:.3f}"),
        ("mean, ms", cloud["mean_ms"], own["mean_ms"], f"{own['mean_ms'] / cloud['mean_ms']:.3f}"),
        ("p95, ms", cloud["p95_ms"], own["p95_ms"], f"{own['p95_ms'] / cloud['p95_ms']:.3f}"),
    ]
    lines = [
        "# A gateway over end, edge and cloud",
        "",
        f"`{results['about']['model']}`, {len(lost):,} test images of {results['about']['data']}; {results['device']}, "
        f"jax {results['versions']['jax']}. Times {_MILLISECONDS}; links of {2 * _EDGE_MS:g} and {2 * _CLOUD_MS:g} ms "
        f"there and back. The bound is paired, 95 %. Thresholds from {results['policy']['validation_images']:,} "
        "validation images.",
        "",
        "| | cloud alone | tiers | |",
        "| --- | --- | --- | --- |",
        *("| " + " | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) + " |" for row in rows),
        "",
        "| fault | requests | deadline, ms | late | by the gateway's clock | unanswered | median, ms | 99.9 %, ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, row in measured.items():
        if key.startswith("fault: "):
            fields = ("requests", "deadline_ms", "late", "late_by_gateway", "unanswered", "p50_ms", "p999_ms")
            shown = [f"{row[f]:.4g}" if isinstance(row[f], float) else str(row[f]) for f in fields]
            lines.append(f"| {key.removeprefix('fault: ')} | " + " | ".join(shown) + " |")
    lines += ["", "| tiers heard | accuracy |", "| --- | --- |"]
    lines += [f"| {name} | {accuracy:.4f} |" for name, accuracy in measured["subsets"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    launch_script(define, main)

"""The trusted device of a test bed: does its part of a task, as a process of its own with a quota of cores.

    python -m experiments.tiers_home --artifact=runs/mlcn2/tiers-conv1/end --tier=edge --images=task.npy \
        --url=http://127.0.0.1:8001 --parts=parts.npz

For each line on its standard input, a number of bits, it computes what its own lanes add; then what the tier takes of
the images, which it packs in so many bits, sends, and waits for the answer. It writes both parts to a file, and answers
with a line of JSON: the seconds of all this, and the bytes that were sent.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from absl import flags

from experiments.tiers_bed import ENVIRONMENT, limited
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.node import PATH


@contextlib.contextmanager
def home(
    artifact: Path, tier: str, images: np.ndarray, url: str, cores: float
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yields a function that does the task once with so many bits; the first time, without a quota, is over.

    Its result has `own_seconds` (the device's own lanes), `home_seconds` (what leaves it, packed), `away_seconds` (from
    sending it to the answer), `bytes`, and what the `own` lanes and the tier (`answered`) add, [images, classes].
    """
    with tempfile.TemporaryDirectory() as folder:
        given, parts = Path(folder) / "images.npy", Path(folder) / "parts.npz"
        np.save(given, images)
        command = [sys.executable, "-m", "experiments.tiers_home", f"--artifact={artifact}", f"--tier={tier}"]
        running = subprocess.Popen(
            [*command, f"--images={given}", f"--url={url}", f"--parts={parts}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

        def once(bits: int) -> dict[str, Any]:
            assert running.stdin is not None
            assert running.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                running.stdin.write(f"{bits}\n")
                running.stdin.flush()
            line = running.stdout.readline()
            if not line:
                raise InputError(f"{' '.join(command)} has ended, as said above")
            with np.load(parts) as arrays:
                return {**json.loads(line), **arrays}

        try:
            once(32)
            with limited(running.pid, "home", cores, on_one_core=True):
                yield once
        finally:
            running.kill()
            running.wait()


def one_cut(told: Sequence[dict[str, Any]], rest: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """What a task of table 4 takes, medians.

    Args:
      told: of each run, what `home` gives.
      rest: what the lanes of other tiers add, [images, classes].
      lengths: the whole model's; how far those of all tiers together are from it is in the result.
    """
    names = ("own_seconds", "home_seconds", "away_seconds")
    tasks = [sum(each[name] for name in names) for each in told]
    errors = [np.max(np.abs(np.sqrt(each["own"] + each["answered"] + rest) - lengths)) for each in told]
    return {
        **{name: statistics.median(each[name] for each in told) for name in names},
        "task_seconds": statistics.median(tasks),
        "tasks": tasks,
        "bytes_per_image": told[-1]["bytes"] / len(lengths),
        "largest_error": float(max(errors)),
        "runs": len(told),
    }


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("artifact", "", "Of the first tier.", flag_values=values)
    flags.DEFINE_string("tier", "", "That takes what is computed.", flag_values=values)
    flags.DEFINE_string("images", "", "File of NumPy with the images.", flag_values=values)
    flags.DEFINE_string("url", "", "Of the tier's node.", flag_values=values)
    flags.DEFINE_string("parts", "", "File to write what the lanes add to.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    artifact, images = TierArtifact(values.artifact), np.load(values.images)
    with httpx.Client(timeout=None, trust_env=False) as client:
        client.get(f"{values.url}/health").raise_for_status()  # which opens the connection
        for line in sys.stdin:
            told, parts = task(client, values.url + PATH, artifact, values.tier, images, int(line))
            np.savez(values.parts, **parts)  # type: ignore[arg-type]
            print(json.dumps(told), flush=True)


def task(
    client: httpx.Client, url: str, artifact: TierArtifact, tier: str, images: np.ndarray, bits: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Does a task once: seconds and bytes, and what its `own` lanes and the tier (`answered`) add."""
    policy = artifact.policy
    times = [time.perf_counter()]
    own = artifact.part(images)
    times.append(time.perf_counter())
    body = wire.pack_request(policy.digest, artifact.home(tier, images), bits)
    times.append(time.perf_counter())
    response = client.post(url, content=body).raise_for_status()
    shape, most = (len(images), len(artifact.class_names)), policy.tier(tier).weight
    answered = wire.unpack_answer(response.content, policy.digest, tier, wire.digest_of(body), shape, most)
    times.append(time.perf_counter())
    names = ("own_seconds", "home_seconds", "away_seconds")
    seconds = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
    return seconds | {"bytes": len(body)}, {"own": own, "answered": answered}


if __name__ == "__main__":
    launch_script(define, main)

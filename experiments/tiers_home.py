"""The trusted device of a test bed: computes what leaves it, as a process of its own with a quota of cores.

    python -m experiments.tiers_home --artifact=runs/mlcn2/tiers-conv1/end --tier=edge --images=task.npy --body=task

For each line on its standard input it computes what the tier takes of the images, packs it, writes the body of the
request to a file, and answers with a line of JSON: the seconds of both, and the bytes.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.tiers_bed import ENVIRONMENT, limited
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script
from mlcn_jax.tiers import wire
from mlcn_jax.tiers.artifact import TierArtifact


@contextlib.contextmanager
def home(artifact: Path, tier: str, images: np.ndarray, cores: float) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields a function that does it once, with `body` in its result; the first time, without a quota, is over."""
    with tempfile.TemporaryDirectory() as folder:
        given, body = Path(folder) / "images.npy", Path(folder) / "body"
        np.save(given, images)
        command = [sys.executable, "-m", "experiments.tiers_home", f"--artifact={artifact}", f"--tier={tier}"]
        running = subprocess.Popen(
            [*command, f"--images={given}", f"--body={body}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

        def once() -> dict[str, Any]:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write("\n")
            running.stdin.flush()
            line = running.stdout.readline()
            if not line:
                raise InputError(f"{' '.join(command)} has ended")
            return {**json.loads(line), "body": body.read_bytes()}

        try:
            once()
            with limited(running.pid, "home", cores):
                yield once
        finally:
            running.kill()
            running.wait()


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("artifact", "", "Of the first tier.", flag_values=values)
    flags.DEFINE_string("tier", "", "That takes what is computed.", flag_values=values)
    flags.DEFINE_string("images", "", "File of NumPy with the images.", flag_values=values)
    flags.DEFINE_string("body", "", "File to write the request to.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    artifact, images = TierArtifact(values.artifact), np.load(values.images)
    for _ in sys.stdin:
        started = time.perf_counter()
        rows = artifact.home(values.tier, images)
        computed = time.perf_counter()
        body = wire.pack_request(artifact.policy.digest, rows)
        packed = time.perf_counter()
        Path(values.body).write_bytes(body)
        told = {"compute_seconds": computed - started, "pack_seconds": packed - computed, "bytes": len(body)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    launch_script(define, main)

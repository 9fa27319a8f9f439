"""How fast an exported model answers: one image, batches, and the whole command, beside the model that it came from.

    python -m benchmarks.exported --workdir=runs/mlcn1,runs/mlcn2

From uint8 images in host memory to lengths of class capsules there. The model is jitted as commands do it; both
take turns in every round. The command classifies 100 pictures in a process of its own, with starting and compiling.
Writes `benchmarks/results/exported.json` after each model.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags
from PIL import Image

from benchmarks import peers
from mlcn_jax.data import batches
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import model
from mlcn_jax.serving import artifact
from mlcn_jax.training.trained import load_trained

_BATCHES = (1, 8, artifact.MAX_BATCH)
_CALLS = {1: 50, 8: 20, artifact.MAX_BATCH: 2}  # of each in a round
_PICTURES = 100


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list(
        "workdir", [], "Folder of a run that was exported, or several, joined by commas.", flag_values=values
    )
    flags.DEFINE_integer("rounds", 20, "Interleaved rounds.", lower_bound=1, flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir:
        raise InputError("give --workdir=FOLDER of a run that was exported")
    results = {"rounds": values.rounds, **peers.environment(), "models": []}
    for workdir in values.workdir:
        results["models"].append(measure(Path(workdir).expanduser(), values.rounds))
        write_json(peers.RESULTS / "exported.json", results)


def measure(workdir: Path, num_rounds: int) -> dict:
    """One model's figures."""
    exported, trained = artifact.Artifact(workdir / "export", "xla"), load_trained(workdir)
    images = np.random.default_rng(0).integers(0, 256, (max(_BATCHES), *exported.image_shape)).astype(np.uint8)

    def lengths(encoder, images):
        return model.class_lengths(trained.spec, model.encode(trained.spec, encoder, batches.to_pixels(images)))

    jitted = jax.jit(lengths, compiler_options=trained.spec.compiler_options(jax.default_backend()))
    rows = []
    for batch in _BATCHES:
        some = images[:batch]
        sides: dict[str, Callable] = {
            "exported": lambda some=some: exported.lengths(some),
            "model": lambda some=some: np.asarray(jitted(trained.params["encoder"], some)),
        }
        error = float(np.abs(sides["exported"]() - sides["model"]()).max())
        rounds = [{name: seconds(call, _CALLS[batch]) for name, call in sides.items()} for _ in range(num_rounds)]
        row = {"batch": batch, "largest_difference": error}
        for name in sides:
            row[f"{name}_milliseconds"] = 1000 * statistics.median(one[name] for one in rounds)
        row["exported_over_model"] = statistics.median(one["exported"] / one["model"] for one in rounds)
        rows.append(row)
        print(row, flush=True)
    command = {"pictures": _PICTURES, "seconds": command_seconds(workdir / "export", images[:_PICTURES])}
    print(command, flush=True)
    return {
        "model": trained.spec.lanes or trained.spec.name,
        "image_shape": trained.spec.image_shape,
        "inference": rows,
        "command": command,
    }


def seconds(call: Callable, calls: int) -> float:
    """Mean over some calls in a row."""
    call()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def command_seconds(folder: Path, images: np.ndarray) -> float:
    """Of `mlcn_jax.predict` from its start to its end."""
    with tempfile.TemporaryDirectory() as pictures:
        for i, image in enumerate(images):
            Image.fromarray(image.squeeze()).save(Path(pictures) / f"{i}.png")
        started = time.perf_counter()
        command = [sys.executable, "-m", "mlcn_jax.predict", str(folder), pictures, "--json"]
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - started


if __name__ == "__main__":
    launch_script(define, main)

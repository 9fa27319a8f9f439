"""Inference of a trained model in ONNX Runtime against mlcn_jax, on a CPU, one image at a time and in batches.

    make onnx WORKDIR=runs/quickstart
    .venv-onnx/bin/python -m benchmarks.onnx_inference --workdir=runs/quickstart,runs/mlcn2

From uint8 images in host memory to lengths of the class capsules there, which are checked to be equal first, in one
process with as many threads as it has cores. mlcn_jax takes part as the artifact that `mlcn_jax.predict` and
`mlcn_jax.serve` use, which computes 100 images as 64, 32 and 4. Interleaved rounds, each of about a second for each
of the two; ratios are medians over rounds. Needs the exports that `make onnx` converted; writes
`benchmarks/results/onnx.json`.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_script, program

if TYPE_CHECKING:
    from mlcn_jax.serving.onnx import ExportedModel

RESULTS = Path(__file__).parent / "results"
THEIRS, OURS = "onnxruntime", "artifact"
_ROUND_SECONDS = 1.0
_PAUSE_SECONDS = 0.3  # so that the others' threads have gone to sleep


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list(
        "workdir", [], "workdir whose folder `onnx` holds a model, or several, joined by commas", flag_values=values
    )
    flags.DEFINE_list("batches", ["1", "8", "100"], "images per call", flag_values=values)
    flags.DEFINE_integer("rounds", 20, "interleaved rounds", lower_bound=1, flag_values=values)
    flags.DEFINE_string("out", str(RESULTS / "onnx.json"), "file to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir:
        raise InputError("give --workdir=FOLDER, the workdir of a trained model")
    if not all(batch.isdecimal() and int(batch) for batch in values.batches):
        raise InputError(f"--batches={','.join(values.batches)}: numbers of images, such as 1,100")
    batches = [int(batch) for batch in values.batches]
    results = compare_all(
        [Path(name).expanduser() for name in values.workdir], batches, values.rounds, Path(values.out)
    )
    print(table(results["models"]))


def compare_all(workdirs: list[Path], batches: list[int], rounds: int, out: Path) -> dict:
    """Compares the models of several workdirs, and writes the results after each.

    Raises:
      InputError: a workdir holds no ONNX model of its export, its model does not compute in float32, a package is not
        installed, or `out` cannot be written.
    """
    # Slow to load, and only now needed: a mistaken flag has been answered at once.
    from benchmarks import peers
    from mlcn_jax import host
    from mlcn_jax.files import write_json
    from mlcn_jax.serving import onnx

    packages = onnx.versions()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): give another --out=FILE") from error
    results = {"rounds": rounds, "threads": host.num_cores(), **peers.environment(), "models": []}
    results["versions"] |= packages
    for workdir in workdirs:
        model = onnx.read_export(workdir)
        calls = programs(model, workdir, results["threads"])
        shape = "x".join(map(str, model.spec.image_shape))
        for batch in batches:
            title = f"{model.data.name}, {model.lanes}, {shape}"
            results["models"].append({"model": title, "batch": batch, **compare(calls, model, batch, rounds)})
            write_json(out, results)
    return results


def programs(model: "ExportedModel", workdir: Path, threads: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """What is compared: functions from images to lengths."""
    from mlcn_jax.serving import runtime
    from mlcn_jax.serving.onnx_file import open_onnx

    path = workdir / "onnx" / "model.onnx"
    if not path.is_file():
        raise InputError(f"{path} is not there: {program()} onnx --workdir={workdir} makes it")
    if model.spec.compute_dtype != "float32":
        raise InputError(
            f"{workdir} computes in {model.spec.compute_dtype}, its ONNX model in float32: nothing to compare"
        )
    return {THEIRS: open_onnx(path, runtime.OUTPUT, threads, spin=True), OURS: model.artifact.lengths}


def compare(calls: dict[str, Callable], model: "ExportedModel", batch: int, rounds: int) -> dict:
    """Milliseconds of each program on so many images, and how many times as fast as ONNX Runtime ours is."""
    from mlcn_jax.serving import onnx, runtime

    images = np.random.default_rng(0).integers(0, 256, (batch, *model.spec.image_shape), np.uint8)
    wanted = calls[OURS](images)
    counts = {}
    for name, call in calls.items():
        difference = runtime.difference(call(images), wanted)
        if not difference <= onnx.TOLERANCE:
            raise InputError(f"{name} differs from the export by {difference:.2g}: run `{program()} onnx` again")
        once = min(timed(call, images, 1) for _ in range(3))
        counts[name] = max(2, round(_ROUND_SECONDS / once))
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for first in range(rounds):
        for i in range(len(names)):
            name = names[(first + i) % len(names)]
            time.sleep(_PAUSE_SECONDS)
            timed(calls[name], images, 1)  # brings caches and memory back
            seconds[name].append(timed(calls[name], images, counts[name]))
    result: dict = {"milliseconds": {name: spread(1000 * np.array(seconds[name])) for name in names}}
    result[f"{OURS}_over_{THEIRS}"] = spread(np.array(seconds[THEIRS]) / np.array(seconds[OURS]))
    return result


def timed(call: Callable[[np.ndarray], np.ndarray], images: np.ndarray, count: int) -> float:
    """Seconds of one of so many calls."""
    started = time.perf_counter()
    for _ in range(count):
        call(images)
    return (time.perf_counter() - started) / count


def spread(values: np.ndarray) -> dict[str, float]:
    return {"median": statistics.median(values.tolist()), "min": float(values.min()), "max": float(values.max())}


def table(entries: list[dict]) -> str:
    """The comparison in Markdown."""
    lines = [
        "| model | batch | ONNX Runtime, ms | mlcn_jax, ms | times as fast |",
        "|---|---|---|---|---|",
    ]
    for entry in entries:
        milliseconds = [f"{entry['milliseconds'][name]['median']:.2f}" for name in (THEIRS, OURS)]
        ratio = f"{entry[f'{OURS}_over_{THEIRS}']['median']:.2f}"
        lines.append("| " + " | ".join([entry["model"], str(entry["batch"]), *milliseconds, ratio]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    launch_script(define, main)

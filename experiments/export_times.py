"""Times one model in float32 and in int8, in turns, and says in which operators ONNX Runtime spends its time.

    .venv-onnx/bin/python -m experiments.export_times --workdir=runs/mlcn2

The workdir holds an `export` (`mlcn_jax export`) and, in `precision/export`, one of all lanes in int8. Timed are whole
models: float32 as XLA computes the export, float32 with every lane in ONNX Runtime, float32 in the one file that
`mlcn_jax onnx` makes, and int8. The operators are those of ONNX Runtime's profiler, over all lanes, each with as many
threads as in the whole model. Prints one line of JSON, which `experiments.small_lanes` keeps.
"""

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from mlcn_jax.errors import InputError
from mlcn_jax.host import num_cores
from mlcn_jax.launch import launch_script
from mlcn_jax.serving import artifact, onnx, parts, runtime
from mlcn_jax.serving.onnx_file import INPUT, open_onnx
from mlcn_jax.serving.precision.lanes import write_lanes
from mlcn_jax.serving.precision.make import lanes_of, make
from mlcn_jax.serving.precision.speeds import call_seconds

WAYS = ("float32 xla", "float32 onnxruntime", "float32 onnxruntime, one file", "int8 onnxruntime")
LEAST_SHARE = 0.01  # operators with less are counted together
_PROFILED_RUNS = 20


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of a run with its exports.", flag_values=values)
    flags.DEFINE_integer("batch", 64, "Images in a timed call.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("rounds", 10, "Rounds of timing.", lower_bound=1, flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir:
        raise InputError("--workdir=FOLDER is needed")
    print(json.dumps(measure(Path(values.workdir).expanduser(), values.batch, values.rounds)))


def measure(workdir: Path, batch: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a batch in each of `WAYS`, and ONNX Runtime's operators in both precisions."""
    model = onnx.read_export(workdir)
    in_int8 = workdir / "precision" / "export"
    quantised = artifact.Artifact(in_int8)
    shape = model.spec.image_shape
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        none = np.zeros((0, *shape), np.uint8)  # float32 needs no calibration
        float32 = parts.Form("float32", parts.ONNX)
        made = {lane.index: make(lane, float32, none) for lane in lanes_of(model.spec, model.encoder)}
        _, files = write_lanes(folder, model.spec, made, jax.ShapeDtypeStruct(shape, jnp.uint8))
        functions = parts.square_roots(parts.added_up([], parts.open_lanes(folder, files)))
        (folder / "whole.onnx").write_bytes(onnx.convert(model).SerializeToString())
        whole = open_onnx(folder / "whole.onnx", runtime.OUTPUT)
        apart = functools.partial(artifact.apply_in_batches, functions)
        calls = (model.artifact.lengths, apart, whole, quantised.lengths)
        seconds = call_seconds(calls, shape, batch, rounds)
        found = {
            "float32": kernels([folder / name for name in files], shape, batch),
            "int8": kernels([in_int8 / name for name in quantised.manifest["onnx"]], shape, batch),
        }
    return {
        "milliseconds": {way: 1000 * value for way, value in zip(WAYS, seconds.tolist(), strict=True)},
        "operators": {name: {"milliseconds": sum(own.values()), "share": shares(own)} for name, own in found.items()},
    }


def kernels(files: Sequence[Path], image_shape: tuple[int, int, int], batch: int) -> dict[str, float]:
    """Milliseconds of a batch by operator, of some lanes one after the other."""
    import onnxruntime

    images = np.random.default_rng(0).integers(0, 256, (batch, *image_shape), np.uint8)
    total: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for path in files:
            options = onnxruntime.SessionOptions()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(temporary) / path.stem)
            options.intra_op_num_threads = max(1, num_cores() // len(files))  # as `parts.open_lanes`
            options.log_severity_level = 3
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for _ in range(1 + _PROFILED_RUNS):
                session.run(None, {INPUT: images})
            events = json.loads(Path(session.end_profiling()).read_text())
            for name, value in kernel_milliseconds(events).items():
                total[name] = total.get(name, 0.0) + value
    return total


def kernel_milliseconds(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a run by operator, from a profile of ONNX Runtime; the first run warms up and is left out."""
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
    found: dict[str, float] = {}
    for event in events:
        kernel = event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
        if kernel and event["ts"] >= runs[1]:
            name = event["args"]["op_name"]
            found[name] = found.get(name, 0.0) + event["dur"] / 1000 / (len(runs) - 1)
    return found


def shares(milliseconds: Mapping[str, float]) -> dict[str, float]:
    """Share of each operator, the largest first; small ones together as `rest`."""
    total = sum(milliseconds.values())
    ordered = sorted(milliseconds.items(), key=lambda item: -item[1])
    large = {name: round(value / total, 3) for name, value in ordered if value >= LEAST_SHARE * total}
    return large | {"rest": round(sum(value for name, value in ordered if name not in large) / total, 3)}


if __name__ == "__main__":
    launch_script(define, main)

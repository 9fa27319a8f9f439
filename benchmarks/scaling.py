"""What a training step costs against lanes, width, depth and batch.

    python -m benchmarks.scaling

mlcn1 on 28x28x1; each sweep changes one of them. Time and memory stand beside what they would be in proportion to the
FLOPs of the matrix products, from the middle point of the sweep; `exponent` is log(time ratio) / log(FLOPs ratio)
from the point before, 1 where time grows as FLOPs do. Writes `benchmarks/results/scaling.json` and `scaling.png`.
"""

import functools
import json
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import networks, peers
from benchmarks.roofline import compiled_product_flops
from mlcn_jax import devices, train
from mlcn_jax.config import write_json
from mlcn_jax.launch import launch
from mlcn_jax.model import ModelSpec, init_params

SWEEPS = {  # what is swept: (value, lanes, batch)
    "lanes": [(n, f"mlcn1:w2*{n}", 100) for n in (1, 2, 4, 8, 16, 32)],
    "width": [(w, f"mlcn1:w{w}*4", 100) for w in (1, 2, 3, 4, 6, 8)],
    "depth": [(d, f"mlcn1:w2d{d}*4", 100) for d in (1, 2, 3, 4, 5)],
    "batch": [(b, "mlcn1:w2*4", b) for b in (50, 100, 150, 300, 600)],
}
_SWEEPS = flags.DEFINE_list("sweeps", list(SWEEPS), ", ".join(SWEEPS))
_ROUNDS = flags.DEFINE_integer("rounds", 8, "interleaved rounds", lower_bound=1)
_REDRAW = flags.DEFINE_bool("redraw", False, "only draw the picture of the results that are there")


class Step:
    """A compiled training step with its state."""

    def __init__(self, lanes: str, batch: int):
        spec = ModelSpec("mlcn", networks.FASHION, networks.NUM_CLASSES, lanes)
        optimizer = optax.adam(networks.LEARNING_RATE)
        params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(0))
        self.state = train.TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (batch, *networks.FASHION), dtype=np.uint8)
        self.batch = jax.device_put((images, rng.integers(0, networks.NUM_CLASSES, batch, dtype=np.int32)))
        step = train.make_train_step(spec, optimizer, reconstruction_weight=networks.RECONSTRUCTION_WEIGHT, seed=0)
        self.compiled, self.compile_seconds = train.compile_step(step, self.state, self.batch)

    def milliseconds(self, steps: int) -> float:
        """Of a step, after one that is not timed."""
        for i in range(steps + 1):
            self.state, metrics = self.compiled(self.state, *self.batch)
            if i == 0:
                float(metrics["loss"])
                started = time.perf_counter()
        float(metrics["loss"])
        return 1000 * (time.perf_counter() - started) / steps


def run_sweep(points: list[tuple[int, str, int]], rounds: int) -> list[dict]:
    steps = [Step(lanes, batch) for _, lanes, batch in points]
    times = [[step.milliseconds(3) for step in steps] for _ in range(rounds)]
    rows: list[dict] = []
    for i, ((value, lanes, batch), step) in enumerate(zip(points, steps, strict=True)):
        memory = step.compiled.memory_analysis()
        row = {
            "value": value,
            "lanes": lanes,
            "batch": batch,
            "milliseconds": statistics.median(row[i] for row in times),
            "milliseconds_min": min(row[i] for row in times),
            "compile_seconds": step.compile_seconds,
            "flops": compiled_product_flops(step.compiled.as_text()),
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
        }
        if rows:
            before = rows[-1]
            ratios = row["milliseconds"] / before["milliseconds"], row["flops"] / before["flops"]
            row["exponent"] = math.log(ratios[0]) / math.log(ratios[1])
        rows.append(row)
    return rows


def draw(results: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    axes = figure.subplots(2, len(results["sweeps"]), squeeze=False)
    for (name, rows), (above, below) in zip(results["sweeps"].items(), axes.T, strict=True):
        values = [row["value"] for row in rows]
        middle = rows[len(rows) // 2]
        scale = middle["milliseconds"] / middle["flops"]
        above.plot(values, [row["flops"] * scale for row in rows], "--", color="gray", label="in proportion to FLOPs")
        above.plot(values, [row["milliseconds"] for row in rows], "o", label="measured")
        above.set_title(f"{name}: {rows[0]['lanes']} ... {rows[-1]['lanes']}", fontsize=9)
        above.set_ylabel("milliseconds per step")
        above.legend(fontsize=8)
        mebibytes = [(row["temporary_bytes"] + row["argument_bytes"]) / 2**20 for row in rows]
        below.plot(values, mebibytes, "s-", color="C2")
        below.set_xlabel(name)
        below.set_ylabel("MiB of the step's buffers")
        for ax in (above, below):
            ax.set_ylim(bottom=0)
            ax.set_xticks(values, values)
    figure.savefig(peers.RESULTS / "scaling.png", dpi=110)


def main(argv):
    del argv
    path = peers.RESULTS / "scaling.json"
    if _REDRAW.value:
        draw(json.loads(path.read_text()))
        return
    results = {"rounds": _ROUNDS.value, "image_shape": networks.FASHION, **devices.environment(), "sweeps": {}}
    for name in _SWEEPS.value:
        results["sweeps"][name] = run_sweep(SWEEPS[name], _ROUNDS.value)
        write_json(path, results)
        for row in results["sweeps"][name]:
            exponent = f", exponent {row['exponent']:.2f}" if "exponent" in row else ""
            print(f"{name} {row['value']}: {row['milliseconds']:.1f} ms{exponent}", flush=True)
    draw(results)


if __name__ == "__main__":
    launch(functools.partial(app.run, main))

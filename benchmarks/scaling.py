"""Cost of a training step of mlcn1 on 28x28x1 against lanes, width, depth and batch, one at a time.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --sweeps=depth
    python -m benchmarks.scaling --from_json    # only draws again

All points of a sweep are compiled first and then take turns in rounds. The line in the picture is what a step would
take if time followed FLOPs (`cost.matmul_flops` of the traced step) at the rate of the sweep's middle point.
`step_in_curve` is the exponent between neighbours, log(time ratio) / log(FLOPs ratio): 1 where time follows FLOPs.
Where it jumps, `convolutions`, the algorithms that `conv.choose` named, may say why; the two convolutions of a lane of
depth 1 are one call of `conv.lane_convs`, which names that of the second alone where it is `fourier`.

Writes `benchmarks/results/scaling.json` after each sweep, which keeps the sweeps that were not asked for, and
`scaling.png`.
"""

import functools
import itertools
import json
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from matplotlib.figure import Figure

from benchmarks import networks, peers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import tracing
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

TURN_SECONDS = 0.3  # of steps of one point in a round, but at least one step

SWEEPS = {
    "lanes": (1, 2, 4, 8, 16, 32),
    "width": (1, 2, 4, 6, 8),
    "depth": (1, 2, 3, 4, 5),
    "batch": (50, 100, 150, 300, 600),
}
LANES, WIDTH, WIDTH_OF_DEPTHS, DEPTH = 4, 4, 2, 1  # where they are not swept
TITLES = {
    "lanes": f"lanes (width {WIDTH}, depth {DEPTH}, batch {networks.BATCH})",
    "width": f"width ({LANES} lanes, depth {DEPTH}, batch {networks.BATCH})",
    "depth": f"depth ({LANES} lanes, width {WIDTH_OF_DEPTHS}, batch {networks.BATCH})",
    "batch": f"batch ({LANES} lanes, width {WIDTH}, depth {DEPTH})",
}


class Point:
    """A compiled training step, its state and its batch."""

    def __init__(self, lanes: int, width: int, depth: int, batch: int):
        text = f"mlcn1:w{width}d{depth}*{lanes}"
        spec = ModelSpec("mlcn", networks.FASHION, networks.NUM_CLASSES, text, prior_bias=False)
        optimizer = optax.adam(networks.LEARNING_RATE, eps=networks.EPSILON)
        weight = networks.RECONSTRUCTION_WEIGHT
        step = make_train_step(spec, optimizer, reconstruction_weight=weight, seed=0)
        params = jax.jit(functools.partial(init_params, spec))(jax.random.key(0))
        self.state = TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (batch, *spec.image_shape), dtype=np.uint8)
        labels = rng.integers(0, networks.NUM_CLASSES, batch, dtype=np.int32)
        self.batch = jax.device_put((images, labels))
        self.convolutions = tracing.resolve(step, self.state, *self.batch)
        self.flops = cost.matmul_flops(step, self.state, *self.batch)
        self.compiled, self.compile_seconds = compile_step(spec, step, self.state, self.batch)
        self.memory = self.compiled.memory_analysis()

    def _step(self) -> dict:
        self.state, metrics = self.compiled(self.state, *self.batch)
        return metrics

    def seconds(self, steps: int) -> float:
        """Of one step, as the mean of so many after one that finds the memory of other networks' steps."""
        float(self._step()["loss"])
        started = time.perf_counter()
        for _ in range(steps):
            metrics = self._step()
        float(metrics["loss"])
        return (time.perf_counter() - started) / steps


def make_point(sweep: str, value: int) -> Point:
    width = WIDTH_OF_DEPTHS if sweep == "depth" else WIDTH
    return Point(**{"lanes": LANES, "width": width, "depth": DEPTH, "batch": networks.BATCH, sweep: value})


def measure(sweep: str, num_rounds: int) -> dict:
    points = [make_point(sweep, value) for value in SWEEPS[sweep]]
    steps = []
    for point in points:
        steps.append(max(1, round(TURN_SECONDS / point.seconds(1))))
    rounds = [[p.seconds(n) for p, n in zip(points, steps, strict=True)] for _ in range(num_rounds)]
    results = []
    for value, point, seconds in zip(SWEEPS[sweep], points, zip(*rounds, strict=True), strict=True):
        results.append(
            {
                sweep: value,
                "median_milliseconds": 1000 * statistics.median(seconds),
                "min_milliseconds": 1000 * min(seconds),
                "flops": point.flops,
                "compile_seconds": point.compile_seconds,
                "temporary_mebibytes": point.memory.temp_size_in_bytes / 2**20,
                "argument_mebibytes": point.memory.argument_size_in_bytes / 2**20,
                "convolutions": point.convolutions,
            }
        )
    return {
        "rounds": num_rounds,
        **peers.environment(),
        "points": results,
        "step_in_curve": [
            math.log(b["median_milliseconds"] / a["median_milliseconds"]) / math.log(b["flops"] / a["flops"])
            for a, b in itertools.pairwise(results)
        ],
    }


def by_flops(points: list[dict]) -> list[float]:
    """Milliseconds of each point, were all computed at the rate of the middle one."""
    middle = points[len(points) // 2]
    return [middle["median_milliseconds"] * point["flops"] / middle["flops"] for point in points]


def table(results: dict) -> str:
    lines = [
        "| sweep | value | ms | by FLOPs | exponent | compile s | temporary MiB | arguments MiB |",
        "|" + "---|" * 8,
    ]
    for sweep, entry in results.items():
        exponents = ["-", *(f"{exponent:.2f}" for exponent in entry["step_in_curve"])]
        for point, expected, exponent in zip(entry["points"], by_flops(entry["points"]), exponents, strict=True):
            row = [sweep, str(point[sweep]), f"{point['median_milliseconds']:.1f}", f"{expected:.1f}", exponent]
            row.append(f"{point['compile_seconds']:.1f}")
            row += [f"{point[f'{kind}_mebibytes']:.0f}" for kind in ("temporary", "argument")]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(results: dict) -> None:
    """Two by two sweeps: milliseconds beside the line by FLOPs, and below it memory."""
    figure = Figure(figsize=(10, 9), layout="constrained")
    panels = figure.subplots(4, 2, height_ratios=(3, 1, 3, 1))
    for i, sweep in enumerate(SWEEPS):
        above, below = panels[i // 2 * 2 : i // 2 * 2 + 2, i % 2]
        if sweep not in results:
            above.set_visible(False)
            below.set_visible(False)
            continue
        points = results[sweep]["points"]
        values = [point[sweep] for point in points]
        above.plot(values, [point["median_milliseconds"] for point in points], "o", label="measured, median")
        above.plot(values, by_flops(points), label="by FLOPs, at the rate of the middle point")
        above.set_ylim(bottom=0)
        above.set_ylabel("ms per step")
        above.set_title(TITLES[sweep])
        above.legend(fontsize=8)
        for kind in ("temporary", "argument"):
            below.plot(values, [point[f"{kind}_mebibytes"] for point in points], "o-", label=kind)
        below.set_ylim(bottom=0)
        below.set_ylabel("MiB")
        below.set_xlabel(sweep)
        below.legend(fontsize=8)
        for axes in (above, below):
            axes.set_xticks(values, [str(value) for value in values])
    figure.savefig(peers.RESULTS / "scaling.png", dpi=120)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("sweeps", list(SWEEPS), "what to sweep", flag_values=values)
    only = f"only of {', '.join(SWEEPS)}"
    flags.register_validator("sweeps", lambda names: set(names) <= set(SWEEPS), only, flag_values=values)
    flags.DEFINE_integer("rounds", 10, "interleaved rounds of each sweep", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("from_json", False, "only draw what scaling.json holds", flag_values=values)


def main(values: flags.FlagValues) -> None:
    path = peers.RESULTS / "scaling.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for sweep in [] if values.from_json else values.sweeps:
        results[sweep] = measure(sweep, values.rounds)
        write_json(path, results)
    draw(results)
    print(table(results))


if __name__ == "__main__":
    launch_script(define, main)

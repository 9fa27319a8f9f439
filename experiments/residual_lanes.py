"""Residual lanes at fixed budgets of operations: several lanes, one wide lane of the same cost, the capsule head.

    python -m experiments.residual_lanes --workdir=runs/residual_lanes
    python -m experiments.residual_lanes --workdir=runs/residual_lanes --rows=cifar_4xw3d2 --repeats=3 --minutes=60

Trains rows of `ROWS` (those of `GPU_ROWS` if named) on all training images and reads the test set once, when a run
ends. Rows of `TRIALS` chose the settings: they hold 10,000 training images out, are scored on those, and leave the test
set alone. A budget is the FLOPs of the lanes in all training steps: products and convolutions, forward and backward, as
the cost model counts them (`placement.cost.lane_cost`) for the image sizes that a recipe goes through. The decoder,
whose share is shown beside it, and the optimizer are not counted. A run that has ended, also one that is in the
committed results, is not repeated; one that was stopped goes on. Writes `residual_lanes_SCALE`, or for trials, which
are given by themselves and have a workdir of their own, `residual_trials_SCALE`, as JSON, Markdown and PNG to the
workdir and, but for `smoke`, to `experiments/results/`.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.published_rows import config_named
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    select,
    spread,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from experiments.residual_rows import GPU_ROWS, ROWS, TRIALS
from mlcn_jax.analysis.lane_fit import fit_weights
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import decoder_step_flops, lane_cost
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.session import Session, open_session
from mlcn_jax.training.trained import load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 2  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1, 3000, 100), "full": Scale("full", 0)}
HEADER = (
    *("", "lanes", "epochs", "PFLOP", "largest lane, %", "decoder, %", "parameters", "accuracy", "with flips"),
    *("a lane alone", "NLL", "ECE", "minutes", "GFLOP/s", "product rate"),
)
KNOWN = ROWS | GPU_ROWS | TRIALS
_TRAIN_IMAGES = {"cifar10": 50_000, "fashion_mnist": 60_000}
_PRODUCT_SIZE, _PRODUCT_ROUNDS = 2048, 5


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("rows", [], f"Of {', '.join(KNOWN)}; empty: {', '.join(ROWS)}.", flag_values=values)
    flags.DEFINE_integer("first_seed", 0, "Seed of the first training of each row.", lower_bound=0, flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "residual_lanes", SCALES, ("rows", "first_seed")),
        rows=values.rows or list(ROWS),
        first_seed=values.first_seed,
    )


def run(request: Request, *, first_seed: int, rows: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    rows = chosen("rows", rows, KNOWN)
    trials = [row for row in rows if row in TRIALS]
    if trials and len(trials) < len(rows):
        raise InputError(f"--rows has trials, {', '.join(trials)}, and others: give either, in two commands")
    name = "residual_trials" if trials else "residual_lanes"
    runs = [{"row": row, "seed": seed} for seed in range(first_seed, first_seed + request.repeats) for row in rows]
    make_config = functools.partial(configure_run, request.directories)
    kept = kept_results(name, request.scale.name)
    series = Series(request, name, VERSION, make_config, True, measure, kept)
    return carry_out(series, runs, text, functools.partial(report, name))


def configure_run(directories: Mapping[str, str], row: str, seed: int) -> RunConfig:
    """The run of a row and a seed; a trial is scored on validation images alone."""
    given = KNOWN[row]
    config = config_named(given.config)
    changes = {"model.lanes": given.lanes, "train.num_epochs": given.epochs, **given.changes}
    changes |= {"train.seed": seed, "data.dir": directories[given.data]}
    if row in TRIALS:
        changes |= {"data.validation_fraction": 10_000 / _TRAIN_IMAGES[given.data], "train.score_test": False}
    if row in TRIALS or jax.default_backend() != "cpu":
        changes["train.checkpoint_every"] = 0 if row in TRIALS else 1000
    return config.replace(changes)


def training_flops(session: Session, spec: ModelSpec) -> list[float]:
    """FLOPs of all training steps, of each lane: products and convolutions, forward and backward."""
    batch, settings = session.config.train.batch_size, spec.lane_settings
    steps = [session.image_size(step) for step in range(1, session.num_steps + 1)]
    total = []
    for lane in spec.lane_specs:
        costs = {size: lane_cost(lane, settings, _shape(spec, size)).step_flops(batch) for size in set(steps)}
        total.append(float(sum(costs[size] for size in steps)))
    return total


def decoder_share(row: str) -> float:
    """FLOPs of the decoder in training, which no budget counts, over those of the lanes."""
    config = configure_run(dict.fromkeys(_TRAIN_IMAGES, ""), row, 0)
    spec, lanes, begun = config.model_spec(*config.data.shape()), 0.0, 0.0
    for until, size in config.train.sizes():
        costs = [lane_cost(lane, spec.lane_settings, _shape(spec, size)) for lane in spec.lane_specs]
        lanes += (until - begun) * sum(cost.step_flops_per_image for cost in costs)
        begun = until
    return decoder_step_flops(spec) / lanes


def _shape(spec: ModelSpec, size: int) -> tuple[int, int, int]:
    return (size or spec.image_shape[0], size or spec.image_shape[1], spec.image_shape[2])


def measure(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """More of a run that has ended: FLOPs, seconds, scores of the images that it may see, and of fewer of its lanes."""
    config, trained = read_stored(folder), load_trained(folder)
    session, batch = open_session(config), config.train.batch_size
    flops = training_flops(session, trained.spec)
    split = "test" if config.train.score_test else "validation"
    seconds = session.num_steps * batch / summary["images_per_second"]
    record: dict[str, Any] = {
        "split": split,
        "lanes": trained.spec.lanes,
        "epochs": config.train.num_epochs,
        "flops": sum(flops),
        "largest_lane": max(flops) / sum(flops),
        "train_seconds": seconds,
        "product_gflops_per_second": product_gflops_per_second(),
        "nll": summary[f"{split}_nll"],
        "calibration_error": summary[f"{split}_calibration_error"],
        "accuracy": round(100 * summary[f"{split}_accuracy"], 4),
    }
    if f"{split}_accuracy_flips" in summary:
        record["accuracy_flips"] = round(100 * summary[f"{split}_accuracy_flips"], 4)
        record["nll_flips"] = summary[f"{split}_nll_flips"]
    images = session.dataset.test if split == "test" else session.validation
    capsules = class_capsules(trained.spec, trained.params, images, batch)
    mirrored = class_capsules(trained.spec, trained.params, Split(images.images[:, :, ::-1], images.labels), batch)
    squares = {"by_lanes": np.square(capsules), "by_lanes_flips": np.square(capsules) + np.square(mirrored)}
    record |= {name: accuracy_by_lanes(each, images.labels) for name, each in squares.items()}
    if split == "validation":
        weights = fit_weights(capsules, images.labels)
        record["fitted_weights"] = list(weights)
        for name, each in squares.items():
            correct = (each * np.float32(weights)).sum(axis=-1).argmax(axis=-1) == images.labels
            record[name.replace("by_lanes", "accuracy_weighted")] = 100 * float(np.mean(correct))
    return record


def accuracy_by_lanes(squares: np.ndarray, labels: np.ndarray) -> list[float]:
    """Accuracy in % with 1, 2, ... lanes, mean over all choices of so many, of what each lane adds to squared lengths.

    `squares` is [images, classes, lanes].
    """
    lanes = range(squares.shape[-1])
    return [
        statistics.fmean(
            100 * float(np.mean(squares[..., list(kept)].sum(axis=-1).argmax(axis=-1) == labels))
            for kept in itertools.combinations(lanes, count)
        )
        for count in range(1, len(lanes) + 1)
    ]


def product_gflops_per_second() -> float:
    """The best of some products of square float32 matrices: what the machine gives at this hour."""
    a = jnp.ones((_PRODUCT_SIZE, _PRODUCT_SIZE))
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    seconds = []
    for _ in range(_PRODUCT_ROUNDS):
        started = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * _PRODUCT_SIZE**3 / min(seconds) / 1e9


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each row that has been run: means over its seeds."""
    rows = []
    for name, given in KNOWN.items():
        mine = [record for record in select(records, row=name) if "flops" in record]
        if not mine:
            continue
        first = mine[0]
        row: dict[str, Any] = {"row": name, "budget": given.budget, "data": given.data, "split": first["split"]}
        row |= {key: first[key] for key in ("lanes", "epochs", "flops", "largest_lane", "parameters")}
        row["decoder_over_lanes"] = decoder_share(name)
        for key in ("accuracy", "accuracy_flips", "nll", "calibration_error", "train_seconds"):
            row[key] = spread(mine, key)
        row["product_gflops_per_second"] = spread(mine, "product_gflops_per_second")
        for key in ("by_lanes", "by_lanes_flips"):
            row[key] = [statistics.fmean(values) for values in zip(*(record[key] for record in mine), strict=True)]
        rows.append(row)
    return rows


def cells(row: Mapping[str, Any]) -> list[str]:
    """The line of a row of `summarise` under `HEADER`."""

    def told(name: str, digits: int = 2) -> str:
        found = row[name]
        if found is None:
            return "-"
        more = f" ({found['min']:.{digits}f} to {found['max']:.{digits}f}, {found['runs']} runs)"
        return f"{found['mean']:.{digits}f}" + (more if found["runs"] > 1 else "")

    seconds = row["train_seconds"]["mean"]
    return [
        f"{row['row']}" + (" (validation images)" if row["split"] != "test" else ""),
        f"`{row['lanes']}`",
        str(row["epochs"]),
        f"{row['flops'] / 1e15:.3f}",
        f"{100 * row['largest_lane']:.0f}",
        f"{100 * row['decoder_over_lanes']:.0f}",
        f"{row['parameters']:,}",
        told("accuracy"),
        told("accuracy_flips"),
        f"{row['by_lanes'][0]:.2f}, {row['by_lanes_flips'][0]:.2f}",
        told("nll", 4),
        told("calibration_error", 4),
        f"{seconds / 60:.0f}",
        f"{row['flops'] / seconds / 1e9:.0f}",
        f"{row['product_gflops_per_second']['mean']:.0f}",
    ]


def text(records: Records) -> str:
    """The table as Markdown."""
    return markdown(HEADER, map(cells, summarise(records)))


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """A panel for each data set: accuracy with 1, 2, ... of the lanes of each row that is not a trial.

    Lanes that a capsule head joins are left out: none of them classifies alone.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["split"] == "test"] or list(rows)
    shown = [row for row in shown if "resnet_caps" not in row["lanes"]]
    names = list(dict.fromkeys(row["data"] for row in shown))
    entries = max((sum(row["data"] == name for row in shown) for name in names), default=0)
    figure = Figure(figsize=(7.5 * max(1, len(names)), 2 + 0.2 * max(10, entries)), layout="constrained")
    for axes, name in zip(figure.subplots(1, max(1, len(names)), squeeze=False)[0], names, strict=False):
        for row in shown:
            if row["data"] == name:
                curve = row["by_lanes_flips"]
                axes.plot(range(1, len(curve) + 1), curve, marker="o", label=f"{row['row']}, {row['budget']:g} PFLOP")
        axes.set_title(name)
        axes.set_xlabel("lanes kept, mean over all choices")
        axes.set_ylabel("accuracy with flips, %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def report(name: str, series: Series) -> None:
    """Writes the table and the picture of every run that has ended."""
    records = series.records()
    rows = summarise(records)
    lines = [
        "Accuracy in %, without and with the mirror image; `a lane alone` is the mean over the lanes of each run, "
        "without and with. PFLOP: products and convolutions of the lanes in all training steps, forward and backward; "
        "the decoder, in % of these, and the optimizer are not counted. Minutes at the throughput of the steps; "
        "product rate: float32 matrices of 2048, GFLOP/s, when a run ended.",
        *caption(series, records),
    ]
    figure = draw(rows)
    draw_caption(figure, lines)
    write(series, name, {"rows": rows}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

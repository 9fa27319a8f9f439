"""The thesis's figure 4.9: accuracy and speed of training at batches of 100, 150, 300 and 600, relative to 100.

    python -m experiments.batch_size --workdir=runs/batch_size --scale=full --repeats=3
    python -m experiments.batch_size --workdir=runs/batch_size_cpu --scale=cpu --minutes=60
    python -m experiments.batch_size --workdir=runs/batch_size --scale=full --speeds_only

Trains CapsNet and MLCN as published but for the batch; the learning rate stays as it is. Speed is measured afterwards,
a row at a time, in rounds in which its batch sizes take turns, so that what else the machine does meets all of them.
`--speeds_only` measures the speeds of the rows and batch sizes asked for, and trains nothing: they are in `speeds.json`
in the workdir, where a later call with trainings finds them.

Rows are those of `published_rows.ROWS`: three of Fashion-MNIST by default, and any other with `--rows`, such as
`--rows=cifar_capsnet,cifar_mlcn1_4x4,cifar_mlcn2_4x4` for CIFAR-10. At the seconds an epoch that the thesis has for a
P100, a seed of `full` takes 9 h for the default rows and 17 h for the five of CIFAR-10, which are not among them for
that reason. Scales: `full` is 20 epochs of all images, for a GPU; `cpu` is 3 epochs of all images, an hour or two on
two cores; `smoke` trains for a step of batches of 100 and 600 and measures one round. The figure's own numbers are not
at hand, so none are shown. Resumption and what is written (`batch_size_SCALE`), once a run has ended, are as in
`table_4_1.py`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import flags

from experiments.published_rows import ROWS, configure
from experiments.repeated_report import (
    SMOKE,
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    number,
    place,
    select,
    spread,
    titled,
    told,
    write,
)
from experiments.repeated_runs import Request, Series, asked, chosen, define_flags, scales
from mlcn_jax import host
from mlcn_jax.allocator import share_heaps
from mlcn_jax.config import RunConfig
from mlcn_jax.files import markdown, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.model import init_params
from mlcn_jax.training import mesh_runner, step
from mlcn_jax.training.optimizer import optimizer_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=1)
BATCH_SIZES = ("100", "150", "300", "600")
HEADER = ("", "batch", "accuracy", "minus that of batch 100", "images/s", "times as fast as batch 100")
_ROUNDS = 7
_TURN_SECONDS = 2.0


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    rows = ["fashion_capsnet", "fashion_mlcn1_8x4", "fashion_mlcn2_8x4"]
    flags.DEFINE_list("rows", rows, f"Rows of table 4.1 to train, of {', '.join(ROWS)}.", flag_values=values)
    flags.DEFINE_bool("speeds_only", False, "Measure speeds, and train nothing.", flag_values=values)
    flags.DEFINE_list("batch_sizes", [], "Batch sizes; empty: all, and 100 and 600 at scale smoke.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "batch_size", SCALES, ("rows", "batch_sizes", "speeds_only")),
        rows=values.rows,
        batch_sizes=values.batch_sizes or (BATCH_SIZES[::3] if values.scale == "smoke" else BATCH_SIZES),
        speeds_only=values.speeds_only,
    )


def run(request: Request, *, rows: Sequence[str], batch_sizes: Sequence[str], speeds_only: bool = False) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code.

    Then measures the speeds of all batch sizes that have been trained; with `speeds_only`, only those asked for, too.
    """
    rows, batch_sizes = chosen("rows", rows, ROWS), chosen("batch_sizes", batch_sizes, BATCH_SIZES)
    runs = [
        {"row": row, "batch_size": int(size), "seed": seed}
        for seed in range(request.repeats)
        for row in rows
        for size in batch_sizes
        if not speeds_only
    ]
    for row in rows:
        share_heaps(ROWS[row].lanes)
    make_config = functools.partial(configure_run, request.directories)
    kept = kept_results("batch_size", request.scale.name)
    series = Series(request, "batch_size", VERSION, make_config, False, kept=kept)

    def add_speeds(row):
        records = select(series.records(), row=row)
        ended = {str(record["facts"]["batch_size"]) for record in records if "failed" not in record}
        failed = {str(record["facts"]["batch_size"]) for record in records} - ended
        stored = stored_speeds(request).get(row, {}).get("images_per_second", {})
        wanted = {*ended, *stored, *(batch_sizes if speeds_only else ())} - failed
        if wanted - set(stored):
            sizes = [size for size in BATCH_SIZES if size in wanted]
            configs = {size: make_config(row=row, batch_size=int(size), seed=0) for size in sizes}
            speeds = measure(configs, 1 if request.scale.name == SMOKE else _ROUNDS)
            found = {"images_per_second": speeds, "command": request.command}
            found |= {"date": host.today(), **host.environment()}
            path = request.workdir / "speeds.json"
            write_json(path, (read_json(path) if path.exists() else {}) | {row: found})

    code = carry_out(
        series,
        runs,
        lambda records: text(records, stored_speeds(request)),
        report,
        [functools.partial(add_speeds, row) for row in rows],
    )
    if speeds_only and not series.records():
        print(text([], stored_speeds(request)))
    return code


def configure_run(directories: Mapping[str, str], row: str, batch_size: int, seed: int) -> RunConfig:
    """The run of a row, a batch size and a seed."""
    config = configure(ROWS[row].config, ROWS[row].lanes, directories)
    return config.replace({"train.batch_size": batch_size, "train.seed": seed})


def stored_speeds(request: Request) -> dict[str, Any]:
    """What was measured for each row: `images_per_second` [batch size][round], and where, when and how.

    Rows that were not measured for this workdir are those of the results kept with the code.
    """
    path, kept = request.workdir / "speeds.json", kept_results("batch_size", request.scale.name)
    found = read_json(kept)["speeds"] if kept.exists() else {}
    return found | (read_json(path) if path.exists() else {})


def measure(
    configs: Mapping[str, RunConfig], rounds: int, turn_seconds: float = _TURN_SECONDS
) -> dict[str, list[float]]:
    """Images per second of training steps in each of some rounds, on made-up images, by the names of `configs`.

    All take turns in every round, each round beginning with another one. A turn is a step that is not timed, then as
    many as take `_TURN_SECONDS`.
    """
    programs = {}
    for name, config in configs.items():
        take_steps = _prepared(config)
        take_steps(2)
        programs[name] = take_steps, max(1, round(2 * turn_seconds / take_steps(2)))
    found: dict[str, list[float]] = {name: [0.0] * rounds for name in configs}
    for turn in range(rounds):
        for name in np.roll(list(configs), -turn):
            take_steps, count = programs[name]
            take_steps(1)
            found[name][turn] = count * configs[name].train.batch_size / take_steps(count)
    return found


def _prepared(config: RunConfig) -> Callable[[int], float]:
    """A function that trains for so many steps and returns the seconds taken."""
    spec, settings = config.model_spec(*config.data.shape()), config.train
    optimizer = optimizer_of(settings, steps_per_epoch=600)
    weight, size = settings.reconstruction_weight, settings.batch_size
    runner = mesh_runner.MeshRunner(spec, optimizer, None, reconstruction_weight=weight, seed=settings.seed)
    runner.start(step.TrainState.create(init_params(spec, jax.random.key(0)), optimizer))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, *spec.image_shape), dtype=np.uint8)
    labels = rng.integers(0, spec.num_classes, size, dtype=np.int32)
    runner.compile(images, labels)
    batch = runner.place(images, labels)

    def take_steps(count):
        started = time.perf_counter()
        for _ in range(count):
            metrics = runner.step(*batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - started

    return take_steps


def summarise(records: Records, speeds: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each row and batch size of which anything is known: accuracy and images per second, also relative to batch 100.

    `speedup` is over the rounds in which both were measured side by side: the median, the least and the most.
    """
    points = []
    for row in ROWS:
        measured = speeds.get(row, {}).get("images_per_second", {})
        base = spread(select(records, row=row, batch_size=int(BATCH_SIZES[0])), "test_accuracy")
        for size in BATCH_SIZES:
            mine = select(records, row=row, batch_size=int(size))
            accuracy, rates = spread(mine, "test_accuracy"), measured.get(size, [])
            ratios = [a / b for a, b in zip(rates, measured.get(BATCH_SIZES[0], []), strict=False)]
            if mine or rates:
                points.append(
                    {
                        **{"row": row, "batch_size": int(size), "test_accuracy": accuracy},
                        "accuracy_difference": accuracy["mean"] - base["mean"] if accuracy and base else None,
                        "images_per_second": statistics.median(rates) if rates else None,
                        "speedup": (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None,
                    }
                )
    return points


def text(records: Records, speeds: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    lines = []
    for point in summarise(records, speeds):
        mine = select(records, row=point["row"], batch_size=point["batch_size"])
        difference, speedup = point["accuracy_difference"], point["speedup"]
        line = [titled(ROWS[point["row"]].title, mine), str(point["batch_size"]), told(mine, "test_accuracy")]
        line += ["-" if difference is None else f"{difference:+.2f}", number(point["images_per_second"])]
        lines.append([*line, "{:.2f} ({:.2f} to {:.2f})".format(*speedup) if speedup else "-"])
    return markdown(HEADER, lines)


def draw(records: Records, speeds: Mapping[str, Any]) -> "Figure":
    """Accuracy, and speed relative to batch 100, against the batch size: a line for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = summarise(records, speeds)
    for i, row in enumerate(dict.fromkeys(point["row"] for point in points)):
        color = f"C{i}"
        title = titled(ROWS[row].title, select(records, row=row))
        of_row = [point for point in points if point["row"] == row]
        trained = [(point["batch_size"], point["test_accuracy"]) for point in of_row if point["test_accuracy"]]
        if trained:
            sizes, found = zip(*trained, strict=True)
            ranges = [[one["mean"] - one["min"] for one in found], [one["max"] - one["mean"] for one in found]]
            means = [one["mean"] for one in found]
            left.errorbar(sizes, means, yerr=ranges, marker="o", capsize=3, color=color, label=title)
        known = [(point["batch_size"], point["speedup"]) for point in of_row if point["speedup"]]
        if known:
            sizes, found = zip(*known, strict=True)
            ranges = [[mid - low for mid, low, _ in found], [high - mid for mid, _, high in found]]
            middles = [mid for mid, _, _ in found]
            right.errorbar(sizes, middles, yerr=ranges, marker="o", capsize=3, color=color, label=title)
    left.set(xlabel="batch size", ylabel="test accuracy, %")
    right.set(xlabel="batch size", ylabel="times as fast as at batch 100")
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return figure


def report(series: Series) -> None:
    """Writes table and figure of every run that has ended; nothing before there is one."""
    records, speeds = series.records(), stored_speeds(series.request)
    if not records:
        return
    lines = [
        "Test accuracy in %: mean, standard deviation, least and most; trained as published but for the batch size. "
        "Speed, measured by itself: median, least and most of rounds in which the batch sizes of a row took turns.",
        *caption(series, records),
        *(f"Speed of {ROWS[row].title}: on {place(found)}, {found['date']}." for row, found in speeds.items()),
    ]
    figure = draw(records, speeds)
    draw_caption(figure, lines)
    summary = {"points": summarise(records, speeds), "speeds": speeds}
    write(series, "batch_size", summary, text(records, speeds), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

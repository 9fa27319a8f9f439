"""The thesis's figure 4.9: accuracy and seconds an epoch at batches of 100, 150, 300 and 600, relative to 100.

    python -m experiments.batch_size --workdir=runs/batch_size --scale=full --repeats=3
    python -m experiments.batch_size --workdir=runs/batch_size_cpu --scale=cpu --minutes=60

Trains CapsNet and MLCN as published but for the batch; the learning rate stays as it is. Rows are those of
`published_rows.ROWS`. Scales: `full` is 20 epochs of all images, for a GPU; `cpu` is 3 epochs of all images, an hour or
two on two cores; `smoke` takes a step of batches of 100 and 600. The figure's own numbers are not at hand, so none are
shown. Resumption and what is written (`batch_size_SCALE`) are as in `table_4_1.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.published_rows import NUM_EPOCHS, ROWS, configure
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    markdown,
    number,
    select,
    spread,
    titled,
    told,
    write,
)
from experiments.repeated_runs import Flags, Scale, Series, chosen
from mlcn_jax.config import RunConfig
from mlcn_jax.launch import launch_app

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = {
    "smoke": Scale("smoke", 1, num_steps=1, num_train=600, num_test=100),
    "cpu": Scale("cpu", 3),
    "full": Scale("full", NUM_EPOCHS),
}
BATCH_SIZES = ("100", "150", "300", "600")
HEADER = ("", "batch", "accuracy", "minus that of batch 100", "seconds, an epoch", "times as fast as batch 100")

_FLAGS = Flags(SCALES)
_DEFAULT_ROWS = ["fashion_capsnet", "fashion_mlcn1_8x4", "fashion_mlcn2_8x4"]
_ROWS = flags.DEFINE_list("rows", _DEFAULT_ROWS, "Rows of table 4.1 to train.")
_BATCH_SIZES = flags.DEFINE_list("batch_sizes", [], "Batch sizes; empty: all, and 100 and 600 at scale smoke.")


def main(argv: list[str]) -> int:
    return run(
        **_FLAGS.asked(argv, "batch_size", (_ROWS, _BATCH_SIZES)),
        rows=_ROWS.value,
        batch_sizes=_BATCH_SIZES.value or (BATCH_SIZES[::3] if _FLAGS.scale.value == "smoke" else BATCH_SIZES),
    )


def run(
    workdir: Path,
    *,
    scale: str,
    repeats: int,
    rows: Sequence[str],
    batch_sizes: Sequence[str],
    minutes: float,
    directories: Mapping[str, str],
    command: str,
) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    chosen("scale", [scale], SCALES)
    rows, batch_sizes = chosen("rows", rows, ROWS), chosen("batch_sizes", batch_sizes, BATCH_SIZES)
    runs = [
        {"row": row, "batch_size": int(size), "seed": seed}
        for seed in range(repeats)
        for row in rows
        for size in batch_sizes
    ]
    make_config = functools.partial(configure_run, directories)
    series = Series(workdir, "batch_size", VERSION, SCALES[scale], make_config, command, keep_models=False)
    return carry_out(series, runs, minutes, text, report)


def configure_run(directories: Mapping[str, str], row: str, batch_size: int, seed: int) -> RunConfig:
    """The run of a row, a batch size and a seed."""
    config = configure(ROWS[row].config, ROWS[row].lanes, directories)
    return config.replace({"train.batch_size": batch_size, "train.seed": seed})


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each row and batch size: accuracy and seconds an epoch, and both relative to batch 100 where that has ended."""
    points = []
    for row in ROWS:
        base: dict[str, Any] = {}
        for size in map(int, BATCH_SIZES):
            mine = select(records, row=row, batch_size=size)
            found = {name: spread(mine, name) for name in ("test_accuracy", "seconds_per_epoch")}
            means = {name: value and value["mean"] for name, value in found.items()}
            base = base or means
            accuracies, seconds = ((base[name], means[name]) for name in found)
            if mine:
                points.append(
                    {
                        **{"row": row, "batch_size": size},
                        **found,
                        "accuracy_difference": accuracies[1] - accuracies[0] if all(accuracies) else None,
                        "speedup": seconds[0] / seconds[1] if all(seconds) else None,
                    }
                )
    return points


def text(records: Records) -> str:
    """The table as Markdown."""
    lines = []
    for point in summarise(records):
        mine = select(records, row=point["row"], batch_size=point["batch_size"])
        seconds, difference, speedup = (point[n] for n in ("seconds_per_epoch", "accuracy_difference", "speedup"))
        line = [titled(ROWS[point["row"]].title, mine), str(point["batch_size"]), told(mine, "test_accuracy")]
        line += ["-" if difference is None else f"{difference:+.2f}", number(seconds and seconds["mean"])]
        lines.append([*line, number(speedup)])
    return markdown(HEADER, lines)


def draw(records: Records) -> "Figure":
    """Accuracy, and speed relative to batch 100, against the batch size: a line for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = summarise(records)
    for row in dict.fromkeys(point["row"] for point in points):
        title = titled(ROWS[row].title, select(records, row=row))
        mine = [point for point in points if point["row"] == row and point["test_accuracy"]]
        if mine:
            sizes, found = zip(*((point["batch_size"], point["test_accuracy"]) for point in mine), strict=True)
            ranges = [[one["mean"] - one["min"] for one in found], [one["max"] - one["mean"] for one in found]]
            means = [one["mean"] for one in found]
            left.errorbar(sizes, means, yerr=ranges, marker="o", capsize=3, label=title)
            known = [(point["batch_size"], point["speedup"]) for point in mine if point["speedup"]]
            right.plot([size for size, _ in known], [speedup for _, speedup in known], "o-", label=title)
    left.set(xlabel="batch size", ylabel="test accuracy, %")
    right.set(xlabel="batch size", ylabel="times as fast an epoch as at batch 100")
    left.legend()
    return figure


def report(series: Series) -> None:
    """Writes table and figure of every run that has ended."""
    records = series.records()
    lines = [
        "Test accuracy in %: mean, standard deviation, least and most. Seconds: of all training images, at the "
        "throughput of the steps. Trained as published but for the batch size.",
        *caption(series, records),
    ]
    figure = draw(records)
    draw_caption(figure, lines)
    write(series, "batch_size", {"points": summarise(records)}, text(records), lines, figure)


if __name__ == "__main__":
    launch_app(main)

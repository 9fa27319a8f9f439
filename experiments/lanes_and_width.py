"""The thesis's figures 4.4 and 4.5: accuracy and seconds an epoch against lanes, for each width, kind and dataset.

    python -m experiments.lanes_and_width --workdir=runs/lanes_and_width --scale=full --repeats=3
    python -m experiments.lanes_and_width --workdir=runs/lanes_and_width_cpu --scale=cpu --minutes=60

Trains 2, 4, 8, 16 and 32 lanes of width 1, 2, 4 and 8 as published. Scales: `full` is 20 epochs of all images, for a
GPU; `cpu` is 3 epochs of 10,000 images, hours on two cores; `smoke` takes a step of the smallest models. Published
accuracies stand where table 4.1 gives them. Resumption and what is written (`lanes_and_width_SCALE`) are as in
`table_4_1.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.published_rows import NUM_EPOCHS, ROWS, configure
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    number,
    select,
    spread,
    titled,
    told,
    write,
)
from experiments.repeated_runs import Request, Series, asked, chosen, define_flags, scales
from mlcn_jax.config import RunConfig
from mlcn_jax.files import markdown
from mlcn_jax.launch import launch_script

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=1, smoke_images=200, cpu_images=10_000)
FIGURES = {  # config and title of each panel; its name ends with the kind of the lanes
    "fashion_mlcn1": ("mlcn1_fashion", "Fashion-MNIST, mlcn1"),
    "fashion_mlcn2": ("mlcn2_fashion", "Fashion-MNIST, mlcn2"),
    "cifar_mlcn1": ("mlcn1_cifar", "CIFAR-10, mlcn1"),
    "cifar_mlcn2": ("mlcn2_cifar", "CIFAR-10, mlcn2"),
}
LANES, WIDTHS = ("2", "4", "8", "16", "32"), ("1", "2", "4", "8")
HEADER = ("", "width", "lanes", "parameters", "seconds, an epoch", "accuracy", "thesis")


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    flags.DEFINE_list("figures", list(FIGURES), "Which of the figures' panels.", flag_values=values)
    flags.DEFINE_list("lanes", [], "Numbers of lanes; empty: all, and 2 at scale smoke.", flag_values=values)
    flags.DEFINE_list("widths", [], "Widths of the lanes; empty: all, and 1 at scale smoke.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    smoke = values.scale == "smoke"
    return run(
        asked(values, "lanes_and_width", SCALES, ("figures", "lanes", "widths")),
        figures=values.figures,
        lanes=values.lanes or (LANES[:1] if smoke else LANES),
        widths=values.widths or (WIDTHS[:1] if smoke else WIDTHS),
    )


def run(request: Request, *, figures: Sequence[str], lanes: Sequence[str], widths: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    figures = chosen("figures", figures, FIGURES)
    lanes, widths = chosen("lanes", lanes, LANES), chosen("widths", widths, WIDTHS)
    runs = [
        {"figure": figure, "width": int(width), "lanes": int(count), "seed": seed}
        for seed in range(request.repeats)
        for width in widths
        for count in lanes
        for figure in figures
    ]
    make_config = functools.partial(configure_run, request.directories)
    kept = kept_results("lanes_and_width", request.scale.name)
    series = Series(request, "lanes_and_width", VERSION, make_config, False, kept=kept)
    return carry_out(series, runs, text, report)


def lanes_text(figure: str, width: int, lanes: int) -> str:
    return f"{figure.rpartition('_')[2]}:w{width}*{lanes}"


def configure_run(directories: Mapping[str, str], figure: str, width: int, lanes: int, seed: int) -> RunConfig:
    """The run of a panel's data and kind of lanes, a width, a number of lanes and a seed."""
    config = configure(FIGURES[figure][0], lanes_text(figure, width, lanes), directories)
    return config.replace({"train.seed": seed})


def published_accuracy(figure: str, width: int, lanes: int) -> float | None:
    """That of table 4.1, where it has the model."""
    model = FIGURES[figure][0], lanes_text(figure, width, lanes)
    return next((row.accuracy for row in ROWS.values() if (row.config, row.lanes) == model), None)


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each model of the figures: its mean accuracy and seconds an epoch, and the published accuracy."""
    points = []
    for figure in FIGURES:
        for width in map(int, WIDTHS):
            for lanes in map(int, LANES):
                mine = select(records, figure=figure, width=width, lanes=lanes)
                points.append(
                    {
                        **{"figure": figure, "width": width, "lanes": lanes},
                        "parameters": next((record["parameters"] for record in mine if "parameters" in record), None),
                        "seconds_per_epoch": spread(mine, "seconds_per_epoch"),
                        "accuracy": spread(mine, "test_accuracy"),
                        "published_accuracy": published_accuracy(figure, width, lanes),
                    }
                )
    return points


def text(records: Records) -> str:
    """The table as Markdown."""
    lines = []
    for point in summarise(records):
        facts = {name: point[name] for name in ("figure", "width", "lanes")}
        seconds = point["seconds_per_epoch"]
        title = titled(FIGURES[point["figure"]][1], select(records, figure=point["figure"]))
        line = [title, str(point["width"]), str(point["lanes"]), number(point["parameters"])]
        line += [number(seconds and seconds["mean"]), told(select(records, **facts), "test_accuracy")]
        published = point["published_accuracy"]
        lines.append([*line, "-" if published is None else f"{published:.2f}"])
    return markdown(HEADER, lines)


def draw(records: Records) -> "Figure":
    """Accuracy above, seconds an epoch below, a column of panels for each kind and dataset, a line for each width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    axes = figure.subplots(2, len(FIGURES), sharex=True)
    for column, (name, (_, title)) in enumerate(FIGURES.items()):
        points = [point for point in summarise(records) if point["figure"] == name]
        for i, width in enumerate(map(int, WIDTHS)):
            mine = [point for point in points if point["width"] == width]
            for ax, measure in ((axes[0, column], "accuracy"), (axes[1, column], "seconds_per_epoch")):
                there = [(point["lanes"], point[measure]) for point in mine if point[measure]]
                if there:
                    lanes, found = zip(*there, strict=True)
                    means = [one["mean"] for one in found]
                    ranges = [[one["mean"] - one["min"] for one in found], [one["max"] - one["mean"] for one in found]]
                    ax.errorbar(lanes, means, yerr=ranges, marker="o", capsize=3, color=f"C{i}", label=f"width {width}")
            known = [(point["lanes"], point["published_accuracy"]) for point in mine if point["published_accuracy"]]
            if known:
                label = f"thesis, width {width}, {NUM_EPOCHS} epochs"
                axes[0, column].plot(*zip(*known, strict=True), "*", ms=12, color=f"C{i}", mec="black", label=label)
        axes[0, column].set(
            title=titled(title, select(records, figure=name)),
            xscale="log",
            xticks=list(map(int, LANES)),
            xticklabels=LANES,
        )
        axes[0, column].minorticks_off()
        axes[1, column].set(xlabel="lanes", yscale="log")
        axes[0, column].legend(fontsize=8)
    axes[0, 0].set_ylabel("test accuracy, %")
    axes[1, 0].set_ylabel("seconds an epoch")
    return figure


def report(series: Series) -> None:
    """Writes table and figure of every run that has ended."""
    records = series.records()
    lines = [
        f"Trained as published. Test accuracy in %: mean, standard deviation, least and most; the thesis's after "
        f"{NUM_EPOCHS} epochs. Seconds: of all training images, at the throughput of the steps, beside other work.",
        *caption(series, records),
    ]
    figure = draw(records)
    draw_caption(figure, lines)
    write(series, "lanes_and_width", {"points": summarise(records)}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

"""The thesis's table 4.1: CapsNet, mlcn1 and mlcn2 on CIFAR-10 and Fashion-MNIST, as published and at their best.

    python -m experiments.table_4_1 --workdir=runs/table_4_1 --scale=full --repeats=3
    python -m experiments.table_4_1 --workdir=runs/table_4_1_cpu --scale=cpu --minutes=60    # the same again goes on

Columns: `published` trains as published; `per_class` routes over classes; `augmented` shifts and flips the images;
`signed_pixels` gives the encoder pixels in [-1, 1]; `tuned` has the settings named in `published_rows.TUNED`, which
`experiments/table_4_1_tuning.py` compares on validation images; `tuned_per_lane` has them and the margin loss of each
lane alone. CapsNet, the baseline, is trained as published only. The test set is scored for the record and chooses
nothing, but that `tuned_per_lane` was added after looking at it.

Scales: `full` is the published experiment, for a GPU (on two CPU cores a row takes minutes to hours); `cpu` trains for
3 epochs; `smoke` takes two steps on a few images. A run that has ended is not repeated, one that was stopped is
resumed, and every run in the workdir is shown, whatever was selected. Writes `table_4_1_SCALE` as JSON, Markdown and
PNG, and `table_4_1_SCALE_curves.png`, to the workdir and, but for `smoke`, to `experiments/results/`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.published_rows import COLUMNS, NUM_EPOCHS, ROWS, changes, columns_of, configure_row
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    difference,
    draw_table,
    kept_results,
    number,
    select,
    spread,
    titled,
    told,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags, scales
from mlcn_jax.allocator import share_heaps
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown
from mlcn_jax.launch import launch_script

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=2)
_ACROSS = 5  # panels beside one another
HEADER = (
    *("", "parameters", "in the thesis", "seconds, an epoch", "thesis, on a P100", "thesis, accuracy"),
    *COLUMNS,
)


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    flags.DEFINE_list("rows", list(ROWS), "Rows to train.", flag_values=values)
    flags.DEFINE_list(
        "columns", [], "Columns to train; empty: all, and as published only at scale smoke.", flag_values=values
    )


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "table_4_1", SCALES, ("rows", "columns")),
        rows=values.rows,
        columns=values.columns or (COLUMNS[:1] if values.scale == "smoke" else COLUMNS),
    )


def run(request: Request, *, rows: Sequence[str], columns: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    rows, columns = chosen("rows", rows, ROWS), chosen("columns", columns, COLUMNS)
    runs = [
        {"row": row, "column": column, "seed": seed}
        for seed in range(request.repeats)
        for column in columns
        for row in rows
        if column in columns_of(row)
    ]
    if not runs:
        raise InputError(f"CapsNet, the baseline, has the column {COLUMNS[0]} only: there is nothing to train")
    for row in rows:
        share_heaps(ROWS[row].lanes)
    make_config = functools.partial(configure_run, request.directories)
    kept = kept_results("table_4_1", request.scale.name)
    series = Series(request, "table_4_1", VERSION, make_config, keep_models=True, kept=kept)
    return carry_out(series, runs, lambda records: text(records, request.scale), report)


def configure_run(directories: Mapping[str, str], row: str, column: str, seed: int) -> RunConfig:
    """The run of a row, a column and a seed; the test set is also scored after each epoch."""
    return configure_row(row, column, directories).replace({"train.seed": seed, "train.test_every_epoch": True})


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each row: what was published, and each column's mean and spread with the difference in points."""
    rows = []
    for name, row in ROWS.items():
        mine = select(records, row=name)
        accuracy = {column: spread(select(mine, column=column), "test_accuracy") for column in columns_of(name)}
        seconds = spread(select(mine, column="published"), "seconds_per_epoch")
        rows.append(
            {
                "row": name,
                "published_accuracy": row.accuracy,
                "published_seconds_per_epoch": row.seconds,
                "published_parameters": row.parameters,
                "parameters": next((record["parameters"] for record in mine if "parameters" in record), None),
                "seconds_per_epoch": seconds and seconds["mean"],
                "accuracy": accuracy,
                "difference": {column: found and found["mean"] - row.accuracy for column, found in accuracy.items()},
            }
        )
    return rows


def cells(records: Records, scale: Scale) -> list[list[str]]:
    """The lines of the table under `HEADER`."""
    final = scale.num_epochs == NUM_EPOCHS and not scale.num_steps
    lines = []
    for row in summarise(records):
        name, published = row["row"], row["published_accuracy"]
        line = [
            titled(ROWS[name].title, select(records, row=name)),
            number(row["parameters"]),
            number(row["published_parameters"]),
        ]
        line += [number(row["seconds_per_epoch"]), str(row["published_seconds_per_epoch"]), f"{published:.2f}"]
        for column in COLUMNS:
            found = row["accuracy"].get(column)
            cell = told(select(records, row=name, column=column), "test_accuracy")
            cell += f", {difference(found['mean'], published, final)}" if found else ""
            line.append(cell if column in columns_of(name) else "-")
        lines.append(line)
    return lines


def text(records: Records, scale: Scale) -> str:
    """The table as Markdown."""
    return markdown(HEADER, cells(records, scale))


def draw_curves(records: Records) -> "Figure":
    """A panel a row: test accuracy after each epoch, a line a run, and the thesis's after its last epoch."""
    from matplotlib.figure import Figure

    rows = [name for name in ROWS if any("test_accuracy_per_epoch" in record for record in select(records, row=name))]
    across = min(_ACROSS, max(1, len(rows)))
    down = -(-max(1, len(rows)) // across)
    figure = Figure(figsize=(3.3 * across, 3.4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes in panels[len(rows) :]:
        axes.remove()
    colors = {column: f"C{i}" for i, column in enumerate(COLUMNS)}
    for axes, name in zip(panels, rows, strict=False):
        for record in select(records, row=name):
            curve, column = record.get("test_accuracy_per_epoch", []), record["facts"]["column"]
            label = column if record["facts"]["seed"] == 0 else None
            axes.plot(range(1, len(curve) + 1), curve, color=colors[column], label=label)
        axes.axhline(ROWS[name].accuracy, color="gray", ls=":", label=f"thesis, after {NUM_EPOCHS}")
        axes.set_title(titled(ROWS[name].title, select(records, row=name)), fontsize=9)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=7)
    figure.supylabel("test accuracy, %", fontsize=9)
    return figure


def report(series: Series) -> None:
    """Writes the table of every run that has ended, and their curves."""
    records = series.records()
    settings = {data: {column: changes(data, column) for column in COLUMNS} for data in ("cifar10", "fashion_mnist")}
    lines = [
        f"Test accuracy in %: mean, standard deviation, least and most; the thesis's after {NUM_EPOCHS} epochs. Its "
        "parameters count the constant zeros that routing starts from. Seconds: of the published method on all "
        "training images, at the throughput of its steps, beside other work: not comparable.",
        *caption(series, records),
        *(
            f"`{column}` on {data}: {', '.join(f'{field}={value}' for field, value in fields[column].items())}."
            for data, fields in settings.items()
            for column in COLUMNS[1:]
        ),
    ]
    summary = {"settings": settings, "rows": summarise(records)}
    figure = draw_table(HEADER, cells(records, series.scale), lines)
    write(series, "table_4_1", summary, text(records, series.scale), lines, figure, curves=draw_curves(records))


if __name__ == "__main__":
    launch_script(define, main)

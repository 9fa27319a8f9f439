"""Settings for the column `tuned` of table 4.1, compared on images set aside from the training set.

    python -m experiments.table_4_1_tuning --workdir=runs/table_4_1_tuning --scale=full
    python -m experiments.table_4_1_tuning --workdir=runs/table_4_1_tuning --scale=full --candidates=adamw --repeats=3

Trains each of `published_rows.CANDIDATES` on nine tenths of the training images and scores it on the rest after the
last epoch; the test set takes no part. `published_rows.TUNED` names the one that the table uses. The rows are the
fastest of each dataset. Scales, resumption and what is written (`table_4_1_tuning_SCALE`) are as in `table_4_1.py`.
"""

import functools
from collections.abc import Mapping, Sequence

from absl import flags

from experiments.published_rows import CANDIDATES, ROWS, TUNED, changes, configure_row
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_table,
    kept_results,
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

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = scales(smoke_steps=2)
_VALIDATION_FRACTION = 0.1


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    flags.DEFINE_list(
        "rows", ["fashion_mlcn2_2x4", "cifar_mlcn2_4x4"], "Rows of table 4.1 to try them on.", flag_values=values
    )
    flags.DEFINE_list("candidates", list(CANDIDATES), "Settings to try.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "table_4_1_tuning", SCALES, ("rows", "candidates")),
        rows=values.rows,
        candidates=values.candidates,
    )


def run(request: Request, *, rows: Sequence[str], candidates: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    rows = chosen("rows", rows, [row for row in ROWS if ROWS[row].lanes])
    candidates = chosen("candidates", candidates, CANDIDATES)
    runs = [
        {"row": row, "candidate": candidate, "seed": seed}
        for seed in range(request.repeats)
        for candidate in candidates
        for row in rows
    ]
    make_config = functools.partial(configure_run, request.directories)
    kept = kept_results("table_4_1_tuning", request.scale.name)
    series = Series(request, "table_4_1_tuning", VERSION, make_config, False, kept=kept)
    return carry_out(series, runs, text, report)


def configure_run(directories: Mapping[str, str], row: str, candidate: str, seed: int) -> RunConfig:
    """The run of a row, a candidate and a seed, with images set aside."""
    fields = {"train.seed": seed, "data.validation_fraction": _VALIDATION_FRACTION}
    return configure_row(row, candidate, directories).replace(fields)


def cells(records: Records) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table: a line for each candidate that was tried, a column for each row of table 4.1."""
    rows = [row for row in ROWS if select(records, row=row)]
    data = {row: select(records, row=row)[0]["data"]["name"] for row in rows}
    lines = []
    for candidate in _tried(records):
        line = [candidate]
        for row in rows:
            cell = told(select(records, row=row, candidate=candidate), "validation_accuracy")
            line.append(cell + (", used" if candidate == TUNED[data[row]] else ""))
        lines.append(line)
    return ["validation accuracy in %", *(titled(ROWS[row].title, select(records, row=row)) for row in rows)], lines


def _tried(records: Records) -> list[str]:
    return [candidate for candidate in CANDIDATES if select(records, candidate=candidate)]


def text(records: Records) -> str:
    """The table as Markdown."""
    return markdown(*cells(records))


def report(series: Series) -> None:
    """Writes the table of every run that has ended."""
    records = series.records()
    lines = [
        "Accuracy on a tenth of the training images after the last epoch: mean, standard deviation, least and most.",
        *caption(series, records),
        *(
            f"`{candidate}`: {', '.join(f'{field}={value}' for field, value in CANDIDATES[candidate].items())}."
            for candidate in _tried(records)
        ),
    ]
    results = {
        row: {c: spread(select(records, row=row, candidate=c), "validation_accuracy") for c in _tried(records)}
        for row in ROWS
        if select(records, row=row)
    }
    settings = {name: {candidate: changes(name, candidate) for candidate in CANDIDATES} for name in TUNED}
    summary = {"settings": settings, "used": TUNED, "rows": results}
    write(series, "table_4_1_tuning", summary, text(records), lines, draw_table(*cells(records), lines))


if __name__ == "__main__":
    launch_script(define, main)

"""Lanes in 8 bits: how much smaller, how accurate and how fast they are, over several seeds.

    make precision                    # once, for .venv-onnx
    python -m experiments.small_lanes --workdir=runs/small_lanes --repeats=3

Trains the rows, exports each run, and has `mlcn_jax precision` measure every lane in float32, bfloat16 and int8 and
export all of them in int8. `experiments.export_times` then times whole models in turns: float32 in XLA, float32 in ONNX
Runtime, lane by lane and in one file, and int8, and says in which operators ONNX Runtime spends its time. The test set
is read once for each run, before and after. Says which targets are reached, over three seeds: files at least 3.5 times
smaller than those of the same lanes in float32, converted alike, at most 0.1 points lost in the mean, and, on a CPU
with VNNI instructions of one machine, at least 1.3 times as fast as the fastest way in float32. Nothing else should run
meanwhile. A run that has ended is not repeated, one that was stopped goes on. Writes `small_lanes_SCALE` as JSON,
Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`, from where it goes on elsewhere.
"""

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import REPOSITORY
from experiments.export_times import WAYS
from experiments.published_rows import config_named
from experiments.quiet import busy_cores
from experiments.repeated_report import (
    SMOKE,
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    place,
    select,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown, read_json
from mlcn_jax.launch import launch_script
from mlcn_jax.serving import export
from mlcn_jax.serving.parts import ONNX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 5  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 2, 600, 100), "full": Scale("full", 0)}
HEADER = (
    *("", "on", "runs", "times smaller", "than the float32 export", "float32, %", "int8, %", "points"),
    *("float32 in XLA, ms", "float32 in ONNX Runtime, ms", "the same in one file", "int8, ms", "times as fast"),
)
ROWS = {"fashion_mlcn2_2x4": "mlcn2_fashion", "cifar_resnet": "resnet_cifar"}  # modules of `configs`
_ANY_DROP = 100  # points: all lanes become int8
TARGETS = {"smaller": 3.5, "points": -0.1, "faster": 1.3}  # at least
SEEDS = 3  # with fewer, nothing is judged


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("rows", list(ROWS), f"Of {', '.join(ROWS)}.", flag_values=values)
    flags.DEFINE_integer("rounds", 10, "Rounds of timing.", lower_bound=1, flag_values=values)
    text = "Python that has requirements-onnx.txt."
    flags.DEFINE_string("onnx_python", ".venv-onnx/bin/python", text, flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "small_lanes", SCALES, ("rows", "rounds")),
        rows=values.rows,
        rounds=values.rounds,
        onnx_python=values.onnx_python,
    )


def run(request: Request, *, rows: Sequence[str], rounds: int, onnx_python: str) -> int:
    """Trains and measures what has not been yet, reports after each run, and returns the exit code."""
    rows = chosen("rows", rows, ROWS)
    python = str(Path(onnx_python).expanduser().absolute())  # not resolved: it is a link in its environment
    if not Path(python).exists():
        raise InputError(f"--onnx_python={onnx_python} does not exist: `make precision` makes .venv-onnx")
    vnni = host.has_vnni()  # told apart: machines with and without may have one name
    runs = [{"row": row, "seed": seed, "vnni": vnni} for seed in range(request.repeats) for row in rows]
    make_config = functools.partial(configure_run, request.directories)
    measured = functools.partial(measure, python, rounds, request.scale.name != SMOKE)
    kept = kept_results("small_lanes", request.scale.name)
    series = Series(request, "small_lanes", VERSION, make_config, True, measured, kept)
    return carry_out(series, runs, text, report)


def configure_run(directories: Mapping[str, str], row: str, seed: int, vnni: bool) -> RunConfig:
    """The run of a row and a seed, the same on every CPU."""
    del vnni
    config = config_named(ROWS[row])
    return config.replace({"train.seed": seed, "data.dir": directories[config.data.name]})


def measure(python: str, rounds: int, quiet: bool, folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What `mlcn_jax precision` finds out of a run, with all lanes in int8, and the times of whole models.

    Raises:
      InputError: with `quiet`, other work keeps cores busy; the run has been trained, and is not trained again.
    """
    del summary
    busy = busy_cores(quiet)
    export.export(folder)
    flag_values = ("--choose=smallest", f"--max_accuracy_drop={_ANY_DROP}", f"--rounds={rounds}")
    _run(python, "mlcn_jax", "precision", f"--workdir={folder}", *flag_values)
    about = read_json(folder / "precision" / "precision.json")
    if others := [lane["chosen"] for lane in about["lanes"] if not lane["chosen"].startswith("int8")]:
        raise InputError(f"{folder}: lanes are smaller in {', '.join(others)} than in int8: give a row of larger lanes")
    batch = about["terms"]["batch"]
    times = _run(python, "experiments.export_times", f"--workdir={folder}", f"--batch={batch}", f"--rounds={rounds}")
    kept = ("lanes", "test_accuracy", "bytes", "milliseconds", "terms", "packages")
    return {
        "precision": {name: about[name] for name in kept},
        "times": json.loads(times.splitlines()[-1]),
        "busy_cores": [busy, busy_cores(must_be_quiet=False)],  # before and after
    }


def _run(python: str, module: str, *given: str) -> str:
    """What a module prints that runs in another environment; raises InputError if it fails."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([python, "-m", module, *given], env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", file=sys.stderr)
    if done.returncode:
        raise InputError(f"`{module} {' '.join(given)}` failed: see above")
    return done.stdout


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each row on each machine, means over seeds: times are that machine's, sizes and accuracies of all like it.

    CPUs without VNNI instructions add fewer bits exactly, and their lanes are quantised in another way.
    """
    rows = []
    measured = [record for record in records if "times" in record]
    machines = dict.fromkeys((place(record), record["facts"]["vnni"]) for record in measured)
    for name, (machine, vnni) in itertools.product(ROWS, machines):
        every = select(measured, row=name, vnni=vnni)
        mine = [record for record in every if place(record) == machine]
        if not mine:
            continue
        found = [record["precision"] for record in every]
        before, after = ([100 * about["test_accuracy"][way] for about in found] for way in ("before", "chosen"))
        gained = [now - then for then, now in zip(before, after, strict=True)]
        times = {way: statistics.fmean(record["times"]["milliseconds"][way] for record in mine) for way in WAYS}
        reached = {
            "smaller": statistics.fmean(_onnx_bytes(about, "float32") / _onnx_bytes(about, "int8") for about in found),
            "points": round(statistics.fmean(gained), 4),
            "faster": min(times[way] for way in WAYS[:-1]) / times[WAYS[-1]],
        }
        runs = {"smaller": len(every), "points": len(every), "faster": len(mine)}
        rows.append(
            {
                "row": name,
                "machine": f"{machine}, {'with' if vnni else 'without'} VNNI",
                "runs": len(mine),
                **reached,
                "least_points": min(gained),
                "most_points": max(gained),
                "smaller_than_export": statistics.fmean(a["bytes"]["before"] / a["bytes"]["chosen"] for a in found),
                "verdicts": {target: verdict(target, value, runs[target], vnni) for target, value in reached.items()},
                "vnni": vnni,
                "accuracy": {"float32": before, "int8": after},
                "milliseconds": times,
                "operators": mine[0]["times"]["operators"],
                "batch": found[0]["terms"]["batch"],
            }
        )
    return rows


def _onnx_bytes(about: Mapping[str, Any], precision: str) -> int:
    """Bytes of the ONNX files of all lanes: both precisions have the graph, and what was folded, alike."""
    forms = (form for lane in about["lanes"] for form in lane["forms"] if form["runtime"] == ONNX)
    return sum(form["bytes"] for form in forms if form["precision"] == precision)


def verdict(target: str, value: float, runs: int, vnni: bool) -> str:
    """Whether a target is reached, or why that is not judged."""
    if target == "faster" and not vnni:
        return "without VNNI"
    if runs < SEEDS:
        return f"{runs} of {SEEDS} seeds"
    return "reached" if value >= TARGETS[target] else "below"


def text(records: Records) -> str:
    """The table as Markdown, with a verdict beside what has a target."""

    def cells(row: Mapping[str, Any]) -> list[str]:
        told = row["verdicts"]
        return [
            row["row"],
            row["machine"],
            str(row["runs"]),
            f"{row['smaller']:.2f} {told['smaller']}",
            f"{row['smaller_than_export']:.2f}",
            *(f"{statistics.fmean(row['accuracy'][p]):.2f}" for p in ("float32", "int8")),
            f"{row['points']:+.2f} ({row['least_points']:+.2f} to {row['most_points']:+.2f}) {told['points']}",
            *(f"{row['milliseconds'][way]:.2f}" for way in WAYS),
            f"{row['faster']:.2f} {told['faster']}",
        ]

    return markdown(HEADER, [cells(row) for row in summarise(records)])


def operators_told(row: Mapping[str, Any]) -> str:
    """A sentence on where ONNX Runtime spends its time, in both precisions."""
    told = []
    for precision, own in row["operators"].items():
        parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in own["share"].items())
        told.append(f"{precision} {own['milliseconds']:.2f} ms ({parts})")
    return f"{row['row']} on {row['machine']}, one seed, kernels of ONNX Runtime: {'; '.join(told)}."


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Milliseconds of each row in each precision and runtime."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(8, 3 * len(rows)), 7), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(WAYS)
    for i, way in enumerate(WAYS):
        values = [row["milliseconds"][way] for row in rows]
        axes.bar([left + width * i for left in range(len(rows))], values, 0.95 * width, label=way)
    names = [f"{row['row']}, {row['machine'].rpartition(', ')[2]}" for row in rows]
    axes.set_xticks([left + 0.4 - width / 2 for left in range(len(rows))], names)
    axes.set_ylabel("ms of a batch, all lanes")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def report(series: Series) -> None:
    """Writes the table and the picture of every run that has ended."""
    records = series.records()
    rows = summarise(records)
    batch = rows[0]["batch"] if rows else 0
    lines = [
        "Times smaller: ONNX files of all lanes in float32 over those in int8; beside it the weights of the float32 "
        "export, which nothing has folded, over the same. Test accuracy in %, mean over the seeds. Milliseconds of "
        f"{batch} images: whole models in turns; times as fast as the fastest in float32. Points lost: mean, least and "
        "most of the seeds.",
        f"Targets, over {SEEDS} seeds: {TARGETS['smaller']:g} times smaller, at most {-TARGETS['points']:g} points "
        f"lost, and on a CPU with VNNI instructions {TARGETS['faster']:g} times as fast.",
        *map(operators_told, rows),
        *caption(series, records),
    ]
    figure = draw(rows)
    draw_caption(figure, lines)
    write(series, "small_lanes", {"rows": rows}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

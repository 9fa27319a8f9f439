"""The tables and pictures of `experiments.tiers_tables` from its JSON: measured, and predicted apart from that."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.tiers_bed import CORES
from experiments.tiers_relay import described, holds
from mlcn_jax.files import replacing, write_atomic
from mlcn_jax.tiers import schedules

_MOST_ERROR, _LEAST_CONFIGURATIONS = 0.15, 24  # of the corrected model, over configurations not used to fit it
_MOST_OVER = 1.15  # of `monitor`, over the remaining work on living ends


def write_report(results: dict[str, Any], path: Path) -> None:
    """Writes the Markdown and the picture beside the JSON, at `path`."""
    rows = schedule_rows(results)
    others = [row for row in rows if (row["schedule"], row["ends"]) != ("End", 1)]
    reached = mean_error(others, "corrected") <= _MOST_ERROR and len(others) >= _LEAST_CONFIGURATIONS
    parts = [
        "# Lanes on ends, edges and a cloud",
        f"Model `{results['about']['model']}`, {results['about']['data']}; {results['device']}, {results['cpu_count']} "
        f"cores, of which all nodes together have {CORES}; jax {results['versions']['jax']}. "
        f"{results['about']['tasks']} tasks of {results['about']['images']} images.",
        "## The relay",
        _table(
            ("set", "measured", "within 1 ms, 5 %"),
            [(*described(row), _yes(holds(row))) for row in results["measured"]["relay"]],
        ),
        "## Table 2: all tasks on one tier",
        "Measured, medians; core seconds are those of all its nodes:",
        _table(*tier_table(results)),
        "Single tasks on single devices, from which predictions are made, measured:",
        _table(*device_table(results)),
        "## Figure 3: schedules",
        "Measured, medians:",
        _table(
            ("schedule", "ends", "all tasks, s", "ends' answers, s", "runs"),
            [(r["schedule"], r["ends"], r["measured"], r["first"], r["runs"]) for r in rows],
        ),
        "Predicted from single tasks on single devices (not from the runs above):",
        _table(
            ("schedule", "ends", "printed, s", "error", "corrected, s", "error"),
            [
                (r["schedule"], r["ends"], r["printed"], _error(r, "printed"), r["corrected"], _error(r, "corrected"))
                for r in rows
            ],
        ),
        f"Mean error over the {len(others)} configurations that no prediction is made from (one end alone is): printed "
        f"{mean_error(others, 'printed'):.0%}, corrected {mean_error(others, 'corrected'):.0%}. It must be at most "
        f"{_MOST_ERROR:.0%} over at least {_LEAST_CONFIGURATIONS}: {_yes(reached)}.",
        "## Table 4: cuts",
        _table(*cut_table(results)),
        "## Table 5: ends that die",
        f"Measured, seconds, with a time-out of {_timeout(results):.2g} s:",
        _table(*failure_table(results)),
        "Predicted, seconds, from single tasks on single devices (what is left over the ends that live) and from the "
        "run without failures (equation 8):",
        _table(*failure_prediction(results)),
        f"How far `monitor` is from what is left over the ends that live; at most {_MOST_OVER:g} is to be reached:",
        _table(*monitor_table(results)),
    ]
    write_atomic(path.with_suffix(".md"), "\n\n".join(parts) + "\n")
    draw(rows, path.with_suffix(".png"))


def schedule_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What each schedule took with each number of ends, and what models say."""
    measured = results["measured"]
    counts = [int(key.split(", ")[1].split()[0]) for key in measured if key.startswith("schedule ")]
    edges, tasks = results["about"]["edges"], results["about"]["tasks"]
    rows = []
    for schedule in schedules.SCHEDULES:
        for ends in range(1, max(counts, default=0) + 1):
            devices = measured["devices"]
            kinds = {
                name: schedules.Device(count, **devices[name])
                for name, count in (("end", ends), ("edge", edges), ("cloud", 1))
            }
            system = schedules.System(**kinds, tasks=tasks, dispatch=devices["dispatch"], cores=CORES)
            found = measured[f"schedule {schedule}, {ends} ends"]
            rows.append(
                {
                    "schedule": schedule,
                    "ends": ends,
                    "measured": found["seconds"],
                    "first": found["first_seconds"],
                    "runs": found["runs"],
                    "printed": schedules.printed(schedule, system),
                    "corrected": schedules.corrected(schedule, system),
                }
            )
    return rows


def mean_error(rows: Sequence[dict[str, Any]], model: str) -> float:
    """Mean of the relative errors of a model."""
    return statistics.mean(abs(row[model] / row["measured"] - 1) for row in rows)


def tier_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: what all tasks take on the devices of one tier, without its delay and with it."""
    rows = []
    for key, value in results["measured"].items():
        if key.startswith("tier "):
            tier, delay = key.removeprefix("tier ").split(", ")
            rows.append((tier, value["devices"], delay, value["seconds"], value["core_seconds"], value["runs"]))
    return ("tier", "devices", "delay there and back", "all tasks, s", "core seconds", "runs"), rows


def device_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: seconds of a task on one device of each tier, and what the dispatcher uses of it."""
    devices = results["measured"]["devices"]
    tiers = {name: own for name, own in devices.items() if name != "dispatch"}
    rows = [(name, own["communication"], own["processing"], own["work"]) for name, own in tiers.items()]
    rows.append(("dispatcher", "", "", devices["dispatch"]))
    return ("device", "communication, s", "processing, s", "core seconds"), rows


def cut_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: what each cut costs at each delay and rate, over sending pixels."""
    found = {}
    for key, value in results["measured"].items():
        if key.startswith("cut "):
            cut, delay, *rate = key.removeprefix("cut ").split(", ")
            found[cut, delay.removesuffix(" s"), rate[0] if rate else "unlimited"] = value
    rows = []
    for (cut, delay, rate), value in found.items():
        plain = found["pixels", delay, rate]["task_seconds"]
        more = value["task_seconds"] - plain
        costs = (value["bytes_per_image"], value["home_seconds"], value["task_seconds"], more, f"{more / plain:.1%}")
        rows.append((cut, delay, rate, *costs))
    head = ("cut", "delay, s", "rate", "bytes an image", "at home, s", "task, s", "more than pixels, s", "overhead")
    return head, rows


def failure_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: seconds with some ends dead, measured."""
    found = _failures(results)
    rows = []
    for dead, modes in found.items():
        rows.append((dead, *("never" if modes[mode]["seconds"] is None else modes[mode]["seconds"] for mode in modes)))
    return ("dead ends", *found[0]), rows


def failure_prediction(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: the least that dead ends can cost, and what equation 8 says."""
    found = _failures(results)
    rows = []
    for dead, modes in found.items():
        monitor = modes["monitor"]
        about, whole = results["about"], found[0]["reassign"]["seconds"]
        tasks, before, timeout = about["failing_tasks"], monitor["tasks_before"], monitor["timeout"]
        serial = schedules.reassigned(whole, tasks, about["ends"], dead, before, timeout)
        waited = whole + modes["reassign"]["timeouts"] * timeout
        rows.append((dead, _least(results, dead, before), serial, waited))
    head = (
        "dead ends",
        "remaining work over living ends",
        "reassign by equation 8",
        "with the time-outs that happened",
    )
    return head, rows


def monitor_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: what "monitor" took, divided by the least that dead ends can cost."""
    rows = []
    for dead, modes in _failures(results).items():
        ratio = modes["monitor"]["seconds"] / _least(results, dead, modes["monitor"]["tasks_before"])
        rows.append((dead, f"{ratio:.2f}", _yes(ratio <= _MOST_OVER)))
    return ("dead ends", "times as long", "reached"), rows


def _least(results: dict[str, Any], dead: int, before: int) -> float:
    """Seconds that the ends that live need at least, by the time of a task on one end alone."""
    about, end = results["about"], results["measured"]["devices"]["end"]
    seconds = end["communication"] + end["processing"]
    return schedules.living(about["failing_tasks"], about["ends"], dead, before, seconds)


def _timeout(results: dict[str, Any]) -> float:
    return next(value["timeout"] for key, value in results["measured"].items() if key.startswith("failures "))


def _failures(results: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key, value in results["measured"].items():
        if key.startswith("failures "):
            mode, dead = key.removeprefix("failures ").removesuffix(" dead").split(", ")
            found.setdefault(int(dead), {})[mode] = value
    return dict(sorted(found.items()))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Figure 3: seconds against ends, measured; and by both models, in panels of their own."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, name, title in zip(
        axes,
        ("measured", "corrected", "printed"),
        ("measured", "predicted: corrected", "predicted: as printed"),
        strict=True,
    ):
        for schedule in schedules.SCHEDULES:
            own = [row for row in rows if row["schedule"] == schedule]
            shown = [row[name] if row[name] > 0 else math.nan for row in own]  # equation 6 can be negative
            axis.plot([row["ends"] for row in own], shown, marker="o", label=schedule)
        axis.set(title=title, xlabel="ends", yscale="log")
    axes[0].set(ylabel="seconds for all tasks")
    axes[0].legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _error(row: dict[str, Any], model: str) -> str:
    return f"{row[model] / row['measured'] - 1:+.0%}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(text, row)) + " |" for row in rows])

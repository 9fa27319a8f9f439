"""The tables of `experiments.tiers_tables` from its JSON: measured, and predicted apart from that.

Parts that have not been measured yet are left out.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import tiers_schedules
from experiments.tiers_bed import CORES
from experiments.tiers_dispatch import MODES
from experiments.tiers_relay import described, holds
from experiments.tiers_setups import Setup
from experiments.tiers_tables_pictures import draw_failures, draw_schedules
from mlcn_jax.files import markdown, write_atomic

_MOST_ERROR, _LEAST_CONFIGURATIONS = 0.15, 24  # of the corrected model, over configurations not used to fit it
_MOST_OVER = 1.15  # of `monitor`, over the remaining work on living ends
_MOST_DIFFERENCE = 1e-5  # of answers
# What the report measured, on other machines with other networks: each table's head and rows.
_REPORT = {
    2: (
        ("tier", "devices", "delay there and back", "all tasks, s"),
        [
            ("end", 8, "0 ms", 10.4),
            ("edge", 4, "0 ms", 8.4),
            ("edge", 4, "500 ms", 18.3),
            ("cloud", 1, "0 ms", 10.8),
            ("cloud", 1, "1000 ms", 31.0),
        ],
    ),
    4: (
        ("trusted", "delay, s", "overhead"),
        [
            ("end", 0.5, "57.1%"),
            ("end", 1.0, "33.2%"),
            ("end", 1.5, "24.7%"),
            ("end", 2.0, "17.9%"),
            ("edge", 0.5, "44.0%"),
            ("edge", 1.0, "27.2%"),
            ("edge", 1.5, "20.6%"),
            ("edge", 2.0, "15.9%"),
        ],
    ),
    5: (
        ("dead ends", *MODES),
        [
            (0, 24.9, 25.7, 26.4),
            (1, "never", 33.7, 27.2),
            (2, "never", 43.2, 27.3),
            (3, "never", 65.2, 27.7),
            (4, "never", 92.8, 28.0),
            (5, "never", 138.0, 30.7),
            (6, "never", 226.0, 38.3),
        ],
    ),
}


def write_report(results: dict[str, Any], path: Path) -> None:
    """Writes the Markdown, and the picture if there is something in it, beside the JSON, at `path`."""
    about, rows = results["about"], schedule_rows(results)
    parts = [
        "# Lanes on ends, edges and a cloud",
        f"Model `{about['model']}`, {about['data']}; {about['device']}, {about['cpu_count']} cores, of which all nodes "
        f"together have {CORES}. {about['tasks']} tasks of {about['images']} images. {_made(results)}",
    ]
    if results["starts"]:
        head = ("begun", "set", "measured", "within 1 ms, 5 %")
        checks = [(_day(time), row) for time, start in results["starts"].items() for row in start["relay"]]
        parts += ["## The relay", _table(head, [(day, *described(row), _yes(holds(row))) for day, row in checks])]
    if _of(results, "tier "):
        parts += [
            "## Table 2: all tasks on one tier",
            "Measured, medians, and the mean of the core seconds of all its servers: whole processes, which also read, "
            "unpack and answer requests. The report's seconds of inference are those of a network alone.",
            _table(*tier_table(results)),
            *_of_the_report(2),
        ]
    if "devices" in results["measured"]:
        parts += [
            "Single tasks on single devices, from which predictions are made, measured on each device; means of each "
            "tier's:",
            _table(*device_table(results)),
        ]
    if rows:
        parts += _schedule_parts(rows)
        parts += [
            "The mapping behind `Mapping`: ends of each edge (equation 4) and the share of ends that the cloud gets "
            "(equation 5), as printed and as run. `Mapping` is run with the share with which edges and cloud finish "
            "together, and `Mapping as printed` with the printed one, where that is another and not negative. The mean "
            "error of `printed` leaves the former out:",
            _table(*mapping_table(results)),
        ]
        draw_schedules([row for row in rows if row["is_of_figure"]], path.with_suffix(".png"))
    if _of(results, "cut "):
        exact = max(row["largest_error"] for row in _of(results, "cut ").values() if row["bits"] != 8)
        parts += [
            "## Table 4: cuts",
            "Measured, medians of tasks one after the other: a trusted device's own lanes answer, then it computes "
            "the cut, packs and sends it, and waits for the next tier's answer, all with the cores of an end, or of "
            "an edge. The lengths of all tiers together are those of the whole model "
            f"{_difference(exact)} where nothing is rounded.",
            _table(*cut_table(results)),
            *_of_the_report(4),
        ]
    if failures := _failures(results):
        parts += _failure_parts(results)
        measured = {dead: {mode: found["seconds"] for mode, found in of.items()} for dead, of in failures.items()}
        picture = path.with_name(f"{path.stem}_failures.png")
        draw_failures(measured, failure_prediction(results)[1], picture)
    write_atomic(path.with_suffix(".md"), "\n\n".join(parts) + "\n")


def _made(results: dict[str, Any]) -> str:
    """When, with which versions, beside how much other work, and whether answers were right."""
    days = sorted({_day(time) for time in results["starts"]})
    versions = sorted({start["versions"]["jax"] for start in results["starts"].values()})
    busy = [cores for made in results["made"].values() for cores in made["busy_cores"] if cores is not None]
    told = f"Measured on {', '.join(days)} with jax {', '.join(versions)}." if days else ""
    if busy:
        told += f" Before and after measurements, other work kept at most {max(busy):.2f} cores busy."
    errors = [
        row["largest_error"] for name in ("schedule ", "tier ", "failures ") for row in _of(results, name).values()
    ]
    if errors:
        told += f" What nodes answered is what their lanes add up to, {_difference(max(errors))}."
    return told


def _difference(error: float) -> str:
    return f"to {error:.1e} (at most {_MOST_DIFFERENCE:.0e}: {_yes(error <= _MOST_DIFFERENCE)})"


def _schedule_parts(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = ("schedule", "ends", "edges", "edge", "cloud")
    setups = [[row[name] for name in names] for row in rows]
    head = (*names[:3], "edges' delay, ms", "cloud's delay, ms")
    others = [row for row in rows if (row["schedule"], row["ends"]) != ("End", 1)]
    slower = [row for row in others if row["bottleneck"] != "end"]
    reached = bool(others) and mean_error(others, "corrected") <= _MOST_ERROR and len(others) >= _LEAST_CONFIGURATIONS

    def errors(rows: Sequence[dict[str, Any]]) -> str:
        if not rows:
            return "none yet"
        own = predicted_by("printed", rows)
        printed = f"printed {mean_error(own, 'printed'):.0%} (over {len(own)} of them), " if own else ""
        return f"{printed}corrected {mean_error(rows, 'corrected'):.0%}"

    return [
        "## Figure 3: schedules",
        "Measured, medians; delays are there and back:",
        _table(
            (*head, "all tasks, s", "ends' answers, s", "runs"),
            [(*own, r["measured"], r["first"], r["runs"]) for own, r in zip(setups, rows, strict=True)],
        ),
        "Predicted from single tasks on single devices (not from the runs above), and what is slowest by the corrected "
        "model:",
        _table(
            (*head, "printed, s", "error", "corrected, s", "error", "slowest"),
            [
                (*own, r["printed"], _error(r, "printed"), r["corrected"], _error(r, "corrected"), r["bottleneck"])
                for own, r in zip(setups, rows, strict=True)
            ],
        ),
        f"Mean error over the {len(others)} configurations that no prediction is made from (one end alone is): "
        f"{errors(others)}. It must be at most {_MOST_ERROR:.0%} over at least {_LEAST_CONFIGURATIONS}: "
        f"{_yes(reached)}. Where ends are the slowest, all schedules take their time; over the {len(slower)} where "
        f"something else is: {errors(slower)}.",
    ]


def _failure_parts(results: dict[str, Any]) -> list[str]:
    timeout = next(iter(_of(results, "failures ").values()))["timeout"]
    return [
        "## Table 5: ends that die",
        f"Measured, seconds, medians (least to most), with a time-out of {timeout:.2g} s:",
        _table(*failure_table(results)),
        "Predicted, seconds, from the runs without failures: what is left over the ends that live, and equation 8:",
        _table(*failure_prediction(results)),
        f"How far `monitor` is from what is left over the ends that live; at most {_MOST_OVER:g} is to be reached:",
        _table(*monitor_table(results)),
        *_of_the_report(5),
    ]


def _of_the_report(table: int) -> list[str]:
    return ["The report's own, with other networks on other machines:", _table(*_REPORT[table])]


def schedule_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What each schedule took in each setup, and what models say."""
    about, rows = results["about"], []
    for found in _of(results, "schedule ").values():
        setup = Setup(**found["setup"])
        system = setup.system(results["measured"]["devices"], about["tasks"])
        rows.append(
            {
                "schedule": setup.name,
                "ends": setup.ends,
                "edges": setup.edges,
                "edge": 2 * setup.edge_ms,
                "cloud": 2 * setup.cloud_ms,
                "is_of_figure": setup.is_of_figure(about["edges"]),
                "measured": found["seconds"],
                "first": found["first_seconds"],
                "runs": found["runs"],
                "printed": tiers_schedules.printed(setup.schedule, system),
                "corrected": tiers_schedules.corrected(setup.schedule, system),
                "bottleneck": tiers_schedules.bottleneck(setup.schedule, system),
            }
        )
    return rows


def mean_error(rows: Sequence[dict[str, Any]], model: str) -> float:
    """Mean of the relative errors of a model; `printed` does not predict `Mapping` with other shares than its own."""
    return statistics.mean(abs(row[model] / row["measured"] - 1) for row in predicted_by(model, rows))


def predicted_by(model: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a model predicts."""
    return [row for row in rows if model != "printed" or row["schedule"] != "Mapping"]


def mapping_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: which ends edges and cloud get under `Mapping`, by the printed equations and as run."""
    about, rows = results["about"], []
    for found in _of(results, "schedule Mapping").values():
        setup = Setup(**found["setup"])
        system = setup.system(results["measured"]["devices"], about["tasks"])
        given = (setup.name, setup.ends, setup.edges, 2 * setup.edge_ms, 2 * setup.cloud_ms)
        printed = tiers_schedules.printed_ends_per_edge(system), tiers_schedules.printed_cloud_share(system)
        rows.append((*given, *printed, tiers_schedules.cloud_share(system)))
    head = ("schedule", "ends", "edges", "edges' delay, ms", "cloud's delay, ms")
    return (*head, "ends of an edge, printed", "cloud's share, printed", "cloud's share, as run"), rows


def tier_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: what all tasks take on the devices of one tier, without a delay and with some."""
    rows = []
    for key, value in _of(results, "tier ").items():
        tier, delay = key.removeprefix("tier ").split(", ")
        rows.append((tier, value["devices"], delay, value["seconds"], value["core_seconds"], value["runs"]))
    return ("tier", "devices", "delay there and back", "all tasks, s", "core seconds of its servers", "runs"), rows


def device_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: seconds of a task on one device of each tier, and what the dispatcher uses of it."""
    devices = results["measured"]["devices"]
    rows: list[tuple] = []
    for name, own in devices.items():
        if name != "dispatch":
            each = own["processing_of_each"]
            spread = f"{min(each):.4g} to {max(each):.4g}"
            rows.append((name, len(each), own["communication"], own["processing"], spread, own["work"]))
    rows.append(("dispatcher", "", "", "", "", devices["dispatch"]))
    return ("device", "measured", "communication, s", "processing, s", "least to most", "core seconds"), rows


def cut_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: what each cut costs at each delay and rate, over sending pixels."""
    found = _of(results, "cut ").values()
    plain = {(row["home"], row["delay"], row["rate"]): row["task_seconds"] for row in found if row["cut"] == "pixels"}
    rows = []
    for row in found:
        link, bits = (row["home"], row["delay"], row["rate"]), row["bits"] or 8
        rate = f"{row['rate']:g} Mbit/s" if row["rate"] else "unlimited"
        spread = f"{min(row['tasks']):.4g} to {max(row['tasks']):.4g}"
        costs = (row["bytes_per_image"], row["own_seconds"], row["home_seconds"], row["task_seconds"], spread)
        more = row["task_seconds"] - plain[link]
        error = f"{row['largest_error']:.1e}"
        given = (row["home"], row["cut"], bits, row["delay"], rate)
        rows.append((*given, *costs, more, f"{more / plain[link]:.1%}", error))
    head = ("trusted", "cut", "bits", "delay, s", "rate", "bytes an image", "own lanes, s", "cut, s", "task, s")
    return (*head, "least to most", "more than pixels, s", "overhead", "largest error"), rows


def failure_table(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: seconds with some ends dead, measured."""

    def text(found: dict[str, Any] | None) -> str:
        if found is None:
            return ""
        each = found["all_seconds"]
        return "never" if found["seconds"] is None else f"{found['seconds']:.4g} ({min(each):.4g} to {max(each):.4g})"

    rows = [(dead, *(text(modes.get(mode)) for mode in MODES)) for dead, modes in _failures(results).items()]
    return ("dead ends", *MODES), rows


def failure_prediction(results: dict[str, Any]) -> tuple[Sequence[str], list[tuple]]:
    """Head and rows: the least that dead ends can cost, and what equation 8 says."""
    found, about = _failures(results), results["about"]
    rows = []
    for dead, modes in found.items():
        if "reassign" in modes:
            reassign, whole = modes["reassign"], found[0]["reassign"]["seconds"]
            tasks, before, timeout = about["failing_tasks"], reassign["tasks_before"], reassign["timeout"]
            serial = tiers_schedules.reassigned(whole, tasks, about["ends"], dead, before, timeout)
            rows.append(
                (dead, _least(results, "reassign", dead, before), serial, whole + reassign["timeouts"] * timeout)
            )
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
        if "monitor" in modes:
            ratio = modes["monitor"]["seconds"] / _least(results, "monitor", dead, modes["monitor"]["tasks_before"])
            rows.append((dead, f"{ratio:.2f}", _yes(ratio <= _MOST_OVER)))
    return ("dead ends", "times as long", "reached"), rows


def _least(results: dict[str, Any], mode: str, dead: int, before: int) -> float:
    """Seconds that the ends that live need at least, by what all ends take in this mode when none dies."""
    about, whole = results["about"], _failures(results)[0][mode]["seconds"]
    seconds = whole * about["ends"] / about["failing_tasks"]
    return tiers_schedules.living(about["failing_tasks"], about["ends"], dead, before, seconds)


def _of(results: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What was measured under names that begin so."""
    return {key: value for key, value in results["measured"].items() if key.startswith(prefix)}


def _failures(results: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key, value in _of(results, "failures ").items():
        mode, dead = key.removeprefix("failures ").removesuffix(" dead").split(", ")
        found.setdefault(int(dead), {})[mode] = value
    return dict(sorted(found.items()))


def _error(row: dict[str, Any], model: str) -> str:
    return f"{row[model] / row['measured'] - 1:+.0%}"


def _day(time: str) -> str:
    return time[:10]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return markdown(head, (map(text, row) for row in rows))

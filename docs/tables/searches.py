"""Tables of searches."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from tables.parts import commands_of, experiment, has_run, measured_on, percent, place, runs_line, table_of


@place
def nas_compare() -> str:
    result = experiment("nas_compare")

    def after(method: Mapping[str, Any]) -> str:
        shares = method.get("as_good_as_random_after")
        if not shares:
            return "-"
        return ", ".join("never" if share is None else f"{percent(share, 0)} %" for share in shares)

    def share(value: float | None) -> str:
        return "never" if value is None else f"{percent(value, 0)} %"

    rows = [
        [
            method["method"],
            f"{method['begun']:.0f}" if "begun" in method else "-",
            f"{method['trained_to_the_end']:.0f}",
            percent(method["mean"]),
            percent(method["best"]),
            percent(method["test"]) if "test" in method else "-",
            after(method),
            share(method["mean_as_good_as_random_after"]) if "mean_as_good_as_random_after" in method else "-",
            f"{percent(method['overhead'], 1)} %" if "overhead" in method else "-",
        ]
        for method in result["methods"]
    ]
    header = (
        "method | models begun | trained to the end | mean accuracy in % | best | its test accuracy | "
        "as good as random's best after, each seed | mean curves | overhead"
    )
    seeds = result["methods"][0]["seeds"]
    return f"{table_of(header, rows)}\n\n{measured_on(result, f'means of {seeds} seeds')}"


@place
def nas_sweeps() -> str:
    rows = []
    for name in ("flops", "memory", "devices"):
        result = experiment(f"nas_{name}")
        for point in result["points"]:
            rows.append(
                [
                    {"flops": "FLOPs", "memory": "memory", "devices": "number of devices"}[name],
                    point["value"],
                    f"`{point['devices']}`",
                    len(point["accuracies"]),
                    result["search"]["num_epochs"],
                    percent(mean(point["accuracies"]), 1),
                    percent(max(point["accuracies"]), 1),
                ]
            )
    header = "sweep over | value | devices | models | epochs | mean accuracy in % | best"
    return f"{table_of(header, rows)}\n\n{measured_on(experiment('nas_flops'), 'one seed')}"


@place
def unequal_lanes() -> str:
    if not has_run("unequal_lanes_full"):
        return "Not run yet."
    picture = "![Accuracy of unequal and equal lanes](../../experiments/results/unequal_lanes_full.png)"
    return f"{unequal_lanes_table(experiment('unequal_lanes_full'))}\n\n{picture}"


def unequal_lanes_table(result: Mapping[str, Any]) -> str:
    """The arms of each part, with what each has over the best equal lanes."""
    rows = []
    for part, arms in result["parts"].items():
        for arm in arms:
            between, lanes = arm["over_equal"], arm["lanes"]
            told = [f"{between['mean']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})"] if between else ["-"]
            told.append(("yes" if between["visible"] else "no") if between else "-")
            shown = f"`{lanes[0]}`" if len(lanes) == 1 else f"{len(lanes)} mixes"
            accuracies = [f"{arm[name]['mean']:.2f}" for name in ("test_accuracy", "validation_accuracy")]
            rows.append([part, arm["arm"], shown, arm["test_accuracy"]["runs"], *accuracies, *told])
    header = (
        "lanes of kind | arm | lanes | runs | test accuracy in % | validation accuracy | "
        "over the best equal lanes, 95 % | 0.5 points visible"
    )
    return f"{table_of(header, rows)}\n\n{runs_line(result['runs'])}\n\n{commands_of(result['runs'])}"

"""Tables of searches."""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from tables.parts import experiment, measured_on, percent, place, table_of


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

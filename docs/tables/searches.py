"""Tables of searches."""

import itertools
import random
from collections.abc import Mapping
from statistics import mean
from typing import Any

from tables.parts import NAMES, commands_of, experiment, has_run, measured_on, percent, place, runs_line, table_of


@place
def nas_compare() -> str:
    result = experiment("nas_compare")

    def after(method: Mapping[str, Any]) -> str:
        shares = method.get("as_good_as_random_after")
        if not shares:
            return "-"
        return ", ".join("never" if share is None else f"{percent(share, 0)} %" for share in shares)

    def stopped(method: Mapping[str, Any]) -> bool:
        return method.get("begun", 0) > method["trained_to_the_end"]

    def share(value: float | None) -> str:
        return "never" if value is None else f"{percent(value, 0)} %"

    rows = [
        [
            method["method"],
            f"{method['begun']:.0f}" if "begun" in method else "-",
            f"{method['trained_to_the_end']:.0f}",
            "-" if stopped(method) else percent(method["mean"]),
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
def published_buckets() -> str:
    """What a device holds by the thesis's formulas; nothing is measured."""
    from mlcn_jax.nn.lanes import LaneSpec
    from mlcn_jax.nn.spec import ModelSpec
    from mlcn_jax.placement.cost import published_memory_bytes
    from mlcn_jax.search.space import NoLaneFits, make_space

    spec = ModelSpec("mlcn", (32, 32, 3), 10, "mlcn1:w1")
    lanes = {"kinds": ("mlcn1",), "max_width": 5, "max_depth": 5, "baseline": "mlcn1:w2d4*4", "tolerance": 1.0}
    smallest = published_memory_bytes(LaneSpec("mlcn1", 1))
    growing = (published_memory_bytes(LaneSpec("mlcn1", 4, 2)) - smallest) / 3  # the formula's 256 MiB
    rows = []
    for gib in (2, 4, 8, 12):
        most, once = int(gib * 2**30 // smallest), int((gib * 2**30 - smallest + growing) // growing)
        try:
            bucket = make_space(f"memory={gib}GiB flops=8x", spec, 100, **lanes, costs="published").buckets[0]
            counts = itertools.chain.from_iterable(
                itertools.combinations_with_replacement(range(len(bucket.loads)), count) for count in range(1, most + 1)
            )
            load = max(bucket.load(mix) for mix in counts if bucket.fits(mix)) / (bucket.limit / 8)
        except NoLaneFits:
            load = 0.0
        rows.append([f"{gib} GiB", most, f"{load:.2f}", once])
    header = (
        "memory of a device | lanes of width 1 and depth 1 that fit | largest cost of lanes that fit, in baselines | "
        "lanes of width 1 and depth 1, if the 1832 MiB counted once a device"
    )
    lanes |= {"kinds": ("mlcn1", "mlcn2"), "baseline": "mlcn2:w2d4*4"}
    exact, rng = make_space("flops=8x", spec, 100, **lanes), random.Random(0)
    gib = mean(exact.memory_bytes(exact.draw(rng)) for _ in range(100)) / 2**30
    return f"""{table_of(header, rows)}

By the exact costs, memory is not scarce: at batch 100, lanes for 8x FLOPs take {gib:.1f} GiB, the mean of 100 draws."""


@place
def nas_sweeps() -> str:
    """Every sweep that was run, at whatever scale."""
    tables = []
    for suffix, whose in (
        ("", "each device"),
        ("_published", "each device, published costs"),
        ("_shared", "all devices together"),
    ):
        names = [f"nas_{name}{suffix}" for name in ("flops", "memory", "devices")]
        results = [experiment(name) for name in names if has_run(name)]
        if not results:
            continue
        rows = [
            [
                {"flops": "FLOPs", "memory": "memory", "devices": "number of devices"}[result["sweep"]],
                point["value"],
                f"`{point['devices']}`",
                len(point["accuracies"]),
                result["search"]["num_epochs"],
                percent(mean(point["accuracies"]), 1) if point["accuracies"] else "no lane fits",
                percent(max(point["accuracies"]), 1) if point["accuracies"] else "-",
            ]
            for result in results
            for point in result["points"]
        ]
        header = "sweep over | value | devices | models | epochs | mean validation accuracy in % | best"
        data = NAMES[results[0]["data"]]
        lines = dict.fromkeys(measured_on(result, f"{data}, FLOPs of {whose}", "one seed") for result in results)
        tables.append("\n\n".join([table_of(header, rows), *lines]))
    return "\n\n".join(tables)


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
    tables = f"{table_of(header, rows)}\n\n{_compared_arms(result)}"
    return f"{tables}\n\n{runs_line(result['runs'])}\n\n{commands_of(result['runs'])}"


def _compared_arms(result: Mapping[str, Any]) -> str:
    """Unequal lanes as such, and what searching adds to random mixes."""
    from experiments.unequal_lanes import differences

    rows = [
        [part, arm, other, f"{between['mean']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})"]
        for part, arms in result["parts"].items()
        for arm, other, between in differences(arms)
        if other != "equal"
    ]
    return table_of("lanes of kind | arm | over | points of test accuracy, 95 %", rows)

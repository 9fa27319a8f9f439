"""Tables of placement: the cost model, the simulator, partitioners and scaling."""

import re
import textwrap
from collections.abc import Mapping
from statistics import mean
from typing import Any

from tables.parts import commands_of, experiment, has_run, measured_on, percent, place, runs_line, table_of


@place
def cost_model() -> str:
    result = experiment("cost_model")
    names = {
        "seconds": "seconds, device profile",
        "seconds, thesis, scaled": "seconds, thesis's formula, scaled",
        "memory": "memory, device profile",
        "memory, thesis, scaled": "memory, thesis's formula, scaled",
    }

    def row(title: str, fit: Mapping[str, float]) -> list[str]:
        return [
            title,
            f"{fit['pearson_r']:.4f}" if fit["pearson_r"] > 0.9 else f"{fit['pearson_r']:.2f}",
            f"{percent(fit['mean_error'], 1)} %",
            f"{percent(fit['within_10_percent'], 0)} %",
            f"{fit['least_ratio']:.2f} to {fit['largest_ratio']:.2f}",
        ]

    header = "Pearson r | mean error | within 10 % | predicted over measured"
    rows = [row(title, result["lanes"][name]) for name, title in names.items()]
    for kind, found in result.get("by_kind", {}).items():
        rows += [row(f"{kind}: {what}, device profile", found[what]) for what in ("seconds", "memory")]
    tables = [table_of(f"single lanes | {header}", rows)]
    for key, what in (("groups", "groups of equal lanes"), ("recipes", "residual lanes at batch 500")):
        if key in result:
            tables.append(table_of(f"{what} | {header}", [row(title, result[key][n]) for n, title in names.items()]))
    return "\n\n".join([*tables, measured_on(result)])


@place
def links() -> str:
    result = experiment("links")
    rows = []
    for row in result["rows"]:
        found = row["measured_link"]
        names = ("measured_seconds", "predicted_seconds", "chosen", "fastest", "recommended_seconds")
        measured, predicted, chosen, fastest, other = (row[name] for name in names)
        rows.append(
            [
                row["link"],
                f"{1e3 * found['latency_seconds']:.3g} ms, {8e-6 * found['bytes_per_second']:,.0f} Mbit/s",
                f"`{row['lanes']}`",
                f"{chosen}: {1e3 * measured[chosen]:.0f} ({1e3 * predicted[chosen]:.0f} predicted)",
                "the same" if fastest == chosen else f"{fastest}: {1e3 * measured[fastest]:.0f}",
                f"{row['chosen_over_fastest']:.2f}",
                "; ".join(f"{way}: {1e3 * s:.0f}" for way, s in other.items()) or "-",
            ]
        )
    header = "link | as measured | model | chosen, ms a step | fastest | over it | recommended, ms a step"
    turns, summary = sorted({row["turns"] for row in result["rows"]}), result["chosen_over_fastest"]
    splits = sum(len(row["measured_seconds"]) for row in result["rows"])
    what = (
        f"medians of {' or '.join(map(str, turns))} turns; batch {result['batch']}, {splits} splits measured; "
        f"{summary['within']} of {summary['of']} within 10 % of the fastest"
    )
    return f"{table_of(header, rows)}\n\n{measured_on(result, what)}"


@place
def simulator_check() -> str:
    result = experiment("simulator_check")
    checks = result["checks"]
    planned = max(longer for check in checks for longer in check["planned_over_fastest"].values())
    told = [(f"profile {i}", check) for i, check in enumerate(checks, start=1)] + [("all", result)]
    rows = [
        [
            name,
            str(check["configurations"]),
            f"{errors['median_over_measured']:.2f}",
            f"{percent(errors['mean_error'], 1)} %",
            f"{percent(errors['largest_error'], 0)} %",
            f"{percent(check[f'{inside}_interval'], 0)} %",
        ]
        for name, check, errors, inside in [
            *((name, check, check, "inside") for name, check in told),
            ("all, scaled", result, result["scaled"], "inside_scaled"),
        ]
    ]
    level = percent(result["interval_level"], 0)
    header = (
        f"predictions | splits | median over measured | mean error | largest error | inside the interval of {level} %"
    )
    return (
        f"{table_of(header, rows)}\n\n"
        "Splits of two one-core processes. On equal cores, the split that `parallel.plan=auto` picks takes at most "
        f"{percent(planned - 1, 0)} % longer than the fastest of the splits that were measured.\n\n"
        f"{measured_on(checks[-1])}"
    )


@place
def scaling() -> str:
    result = experiment("scaling")

    def over(record: Mapping[str, Any], field: str) -> str:
        value = record.get(field)
        return f"{value['median']:.2f}" if value else ""

    def milliseconds(record: Mapping[str, Any]) -> str:
        value, share = record["milliseconds"], record.get("interval")
        return f"{value:.0f} ({value * share[0]:.0f} to {value * share[1]:.0f})" if share else f"{value:.0f}"

    rows = [
        [
            r["batch"],
            r["devices"],
            r["mode"],
            r["where"],
            milliseconds(r),
            over(r, "over_mlcn_on_one_core"),
            over(r, "over_capsnet_on_one_core"),
        ]
        for r in result["batches"]
        if r["where"] != "oversubscribed"
    ]
    header = "batch | devices | mode | where | ms (90 % within) | over MLCN on one core | over CapsNet on one core"
    real = {
        key: [r["over_mlcn_on_one_core"]["median"] for r in result[key] if r["where"] == "real cores"]
        for key in ("lanes", "width", "depth")
    }
    spans = {key: f"{min(values):.2f} to {max(values):.2f}" for key, values in real.items()}
    one, two = (
        {
            r["batch"]: r["over_mlcn_on_one_core"]["median"]  # milliseconds are of other minutes
            for r in result["batches"]
            if r["mode"] == "mlcn-lane" and r["where"] == where
        }
        for where in ("one process on all cores", "real cores")
    )
    shares = ", ".join(f"{one[batch] / two[batch]:.2f} at batch {batch}" for batch in sorted(one))
    return (
        f"{table_of(header, rows)}\n\n{measured_on(result)}\n\nOn two real cores, the speed-up is {spans['lanes']} for "
        f"2 to 32 lanes of width 4, {spans['width']} for 8 lanes of width 1 to 6, and {spans['depth']} for 8 lanes of "
        "depth 1 to 5. Divided by that of two processes that split the lanes, the speed-up of one process on both "
        f"cores is {shares}."
    )


@place
def scaling_by_parts() -> str:
    if not has_run("scaling_by_parts_full"):
        return "Not run yet."
    picture = "![Speed-ups over CapsNet and over the model itself](../../experiments/results/scaling_by_parts_full.png)"
    return f"{scaling_by_parts_table(experiment('scaling_by_parts_full'))}\n\n{picture}"


def scaling_by_parts_table(result: Mapping[str, Any]) -> str:
    """Speed-ups of all models and splits, and whether deeper or wider lanes gain more."""
    header, *rows = result["table"]
    parts = [table_of(" | ".join(header), rows), " ".join(result["notes"])]
    return "\n\n".join([*parts, runs_line(result["runs"], "measurement"), commands_of(result["runs"])])


@place
def rented() -> str:
    result = experiment("rented")
    rows = [
        [
            " + ".join(row["machines"]),
            row["split"],
            f"{row['predicted_seconds']:.0f}",
            f"{row['measured_seconds']:.0f}",
            f"{row['predicted_seconds'] / row['measured_seconds']:.2f}",
            f"{1000 * row['predicted_cost']:.2f}",
            f"{1000 * row['measured_cost']:.2f}",
        ]
        for row in result["rows"]
    ]
    header = "machines | split | predicted s | measured s | predicted over measured | predicted cost x 1000 | measured"
    inside, repeats, chosen = result["inside_interval"], result["repeats"], result["well_chosen"]
    steps, trained = result["training"]["train.num_steps"], "each once" if repeats == 1 else f"medians of {repeats}"
    unscaled = result["unscaled"]
    held = f" Of the nine times, {round(9 * inside)} lie in their 90 % interval." if inside is not None else ""
    return (
        f"{table_of(header, rows)}\n\n"
        f"Predicted times are off by {percent(result['mean_error_seconds'], 0)} % on average and "
        f"{percent(result['largest_error_seconds'], 0)} % at most, costs by "
        f"{percent(result['largest_error_cost'], 0)} % at most, if measured times are divided by how slow cores were "
        f"at that moment; as measured, times are off by {percent(unscaled['mean_error_seconds'], 0)} % on average and "
        f"{percent(unscaled['largest_error_seconds'], 0)} % at most. "
        f"For {percent(chosen['share_of_deadlines'], 0)} % of "
        "all deadlines between the shortest and the longest time, the machines chosen by prediction are in time and "
        f"cost at most {chosen['over_cheapest']:.2f} times the cheapest that met the deadline; they finish at most "
        f"{percent(result['latest'], 0)} % late.{held}\n\n"
        f"{measured_on(result, f'{steps} training steps, {trained}')}"
    )


def _printed(name: str) -> str:
    """A command of the case and what it printed: tables as they are, the commands to give in a block of code."""
    case = experiment("cheapest_case")[name]
    output, _, launch = case["printed"].strip().partition("\nthe best, for ")
    if launch:
        cost, _, lines = launch.partition(":\n")
        commands, _, files = lines.rpartition("\n")
        output += f"\n\nthe best, for {cost}:\n\n```bash\n{commands}\n```\n\n{files}"
    tables = re.sub(r"(?m)^(\|.*)\n(?=[^|\n])|^([^|\n].*)\n(?=\|)", r"\g<0>\n", output)
    return f"```bash\n{_folded(case['command'])}\n```\n\n{tables}"


def _folded(command: str) -> str:
    """A command over some lines."""
    return "\n".join(textwrap.wrap(command, 110, break_long_words=False, break_on_hyphens=False)).replace(
        "\n", " \\\n    "
    )


@place
def cheapest_describe() -> str:
    return f"{_printed('describe')}\n\n{measured_on(experiment('cheapest_case'))}"


@place
def cheapest_machines() -> str:
    return f"```text\n{experiment('cheapest_case')['machines']}```"


@place
def cheapest_answer() -> str:
    what = "machines of one core, prices made up"
    return f"{_printed('cheapest')}\n\n{measured_on(experiment('cheapest_case'), what)}"


_PARTITIONERS = ("round_robin", "greedy_published", "greedy", "karmarkar_karp", "exact")


_PARTITIONER_TITLES = "round robin | greedy, published | greedy | Karmarkar-Karp | exact"


@place
def balance_simulated() -> str:
    result = experiment("balance")
    rows = [
        [
            devices,
            lanes,
            *(f"{entry['mean_random_over_this'][name]:.2f}" for name in _PARTITIONERS),
            f"{entry['proved_optimal']} of {entry['draws']}",
            f"{entry['exact_seconds']['max']:.2f}",
        ]
        for devices, by_lanes in result["simulated"].items()
        for lanes, entry in by_lanes.items()
    ]
    draws = next(iter(next(iter(result["simulated"].values())).values()))["draws"]
    table = table_of(f"devices | lanes | {_PARTITIONER_TITLES} | proved | max s", rows)
    return f"{table}\n\n{measured_on({**result, 'rounds': 0}, f'simulated, means of {draws} draws')}"


@place
def balance_measured() -> str:
    result = experiment("balance")
    by_number: dict[int, list[Mapping[str, Any]]] = {}
    for entry in result["measured"]:
        by_number.setdefault(entry["num_lanes"], []).append(entry)
    rows = [
        [number, len(draws), title, *(f"{mean(draw[field][name] for draw in draws):.2f}" for name in _PARTITIONERS)]
        for number, draws in by_number.items()
        for title, field in (("measured", "random_over_this"), ("predicted", "predicted_random_over_this"))
    ]
    dates = sorted({entry["date"] for entry in result["measured"] if "date" in entry})
    made_on = measured_on({**result, "date": ", ".join(dates)}, "means over draws of lanes")
    return f"{table_of(f'lanes | draws |  | {_PARTITIONER_TITLES}', rows)}\n\n{made_on}"


@place
def published_scaling() -> str:
    result = experiment("published_scaling")
    rows = [
        [
            f"{point['data']}, {'`' + point['lanes'] + '`' if point['lanes'] else 'CapsNet'}",
            point["mode"],
            f"{point['over_itself_on_one']:.2f}",
            f"{point['over_capsnet_on_one']:.2f}",
        ]
        for point in result["simulated"]["few_devices"]
        if point["devices"] == 8
    ]
    assumed = result["assumed"]
    published = result["published"]["speedup_of_8_k80s_over_capsnet_on_one"]
    return (
        f"{table_of('model | split | over itself on one | over CapsNet on one', rows)}\n\n"
        f"*Simulated, 8 K80s. Assumed: a K80 takes {assumed['k80_slowness']} times as long as a P100; links of "
        f"{assumed['link_us']:g} us and {assumed['link_gbytes']:g} GB/s within a host, {assumed['network_us']:g} us "
        f"and {assumed['network_gbits']:g} Gbit/s between hosts; the decoder is "
        f"{percent(assumed['decoder_share'], 0)} % of a step. The thesis reports {published}.*"
    )


@place
def tie_break() -> str:
    result = experiment("tie_break")
    orders = result["random_over_rule"]
    lanes = list(next(iter(orders.values())))

    def row(title: str, rule: str, listed: str, slowest: int | None = None) -> list[str]:
        those = [found for order, found in orders.items() if slowest is None or order.split(", ")[slowest] == "1"]
        ends = [(min(gains), max(gains)) for gains in ([found[count][rule] for found in those] for count in lanes)]
        return [title, listed, *(" to ".join(dict.fromkeys(f"{gain:.2f}" for gain in pair)) for pair in ends)]

    rows = [
        row("greedy, published", "greedy_published", listed, i)
        for i, listed in enumerate(("first", "second", "third", "last"))
    ]
    rows.append(row("greedy", "greedy", "anywhere"))
    table = table_of(" | ".join(["rule", "the slowest is listed", *(f"{count} lanes" for count in lanes)]), rows)
    chance = f"{result['random_placements_per_draw']} random placements of each"
    told = f"simulated, means of {result['draws']} draws and {chance}, ranges over orders"
    return f"{table}\n\n{measured_on(result, told)}\n\n- `python -m experiments.tie_break`"

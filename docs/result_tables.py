"""The tables and figures of README.md and docs/, made from the committed JSON: one function for each place.

`make_tables.py` puts them into the pages. A function reads its files, and returns Markdown with the device, the
versions and the number of runs beside the figures.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

_ROOT = Path(__file__).parents[1]
_NOT_RUN = "not run"
_NAMES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
MADE: dict[str, Callable[[], str]] = {}


def _place(function: Callable[[], str]) -> Callable[[], str]:
    MADE[function.__name__] = function
    return function


# ---- what the functions below are made of


def _read(path: str) -> dict[str, Any]:
    return json.loads((_ROOT / path).read_text(encoding="utf-8"))


def _experiment(name: str) -> dict[str, Any]:
    return _read(f"experiments/results/{name}.json")


def _benchmark(name: str) -> dict[str, Any]:
    return _read(f"benchmarks/results/{name}.json")


def _table(header: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table under a header of titles with ` | ` between them."""
    titles = header.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _made_on(record: Mapping[str, Any], *more: str) -> str:
    """The line under a table: device, versions, and how often it was measured."""
    cores = record["cpu_count"]
    versions = record["versions"]
    parts = [
        f"{record['device']}, {cores} core{'s' if cores > 1 else ''}",
        f"Python {versions['python']}",
        f"jax {versions['jax']}",
        *(f"{name} {versions[name]}" for name in ("onnx", "onnxruntime", "jax2onnx") if name in versions),
    ]
    if rounds := record.get("rounds"):
        parts.append(f"medians of {rounds} rounds")
    return f"*{', '.join([*parts, *more])}.*"


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}"


def _data(facts: Mapping[str, Any]) -> str:
    """The data set by name, with the copy that was used where it is not the original."""
    name = _NAMES.get(facts["name"], facts["name"])
    # Files older than the field `copy` have only one kind of CIFAR-10 that is not the official one.
    copy = facts.get("copy") or ("JPEG copy" if facts["bytes"] == "not official" else "")
    return f"{name} ({copy})" if copy else name


def _row_title(row: str, runs: Iterable[Mapping[str, Any]]) -> str:
    """Such as "CIFAR-10 (JPEG copy), mlcn1 4x4" of `cifar_mlcn1_4x4`."""
    data = next((_data(run["data"]) for run in runs if run["facts"].get("row") == row), None)
    short, _, model = row.partition("_")
    data = data or {"cifar": "CIFAR-10", "fashion": "Fashion-MNIST"}[short]
    return f"{data}, {'CapsNet' if model == 'capsnet' else model.replace('_', ' ')}"


def _accuracy(spread: Mapping[str, Any] | None) -> str:
    if not spread:
        return _NOT_RUN
    text = f"{spread['mean']:.2f}"
    return text if spread["runs"] == 1 else f"{text} ({spread['min']:.2f} to {spread['max']:.2f})"


def _commands(runs: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(f"- `{command}`" for command in sorted({run["command"] for run in runs}))


def _runs_line(runs: Sequence[Mapping[str, Any]], what: str = "run") -> str:
    dates = sorted({run["date"] for run in runs})
    return _made_on(
        runs[0],
        f"{len(runs)} {what}s, {dates[0]} to {dates[-1]}" if len(dates) > 1 else f"{len(runs)} {what}s, {dates[0]}",
    )


def _curve(run: Mapping[str, Any], epochs: int = 3) -> str:
    return ", ".join(f"{value:.2f}" for value in run["test_accuracy_per_epoch"][:epochs])


# ---- accuracy


def _verdict(difference: float | None) -> str:
    if difference is None:
        return ""
    verdict = "reached" if difference >= 0 else "within 0.5" if difference >= -0.5 else "below"
    return f", {difference:+.2f}, {verdict}"


def _table_4_1(columns: Sequence[str], differences: bool) -> str:
    result = _experiment("table_4_1_full")
    rows = []
    for row in result["rows"]:
        if not any(row["accuracy"].get(column) for column in columns):
            continue
        cells = [
            _accuracy(row["accuracy"].get(column)) + (_verdict(row["difference"].get(column)) if differences else "")
            for column in columns
        ]
        rows.append([_row_title(row["row"], result["runs"]), f"{row['published_accuracy']:.2f}", *cells])
    titles = ["as published" if column == "published" else f"`{column}`" for column in columns]
    return _table(" | ".join(["test accuracy in %, 20 epochs", "thesis", *titles]), rows)


@_place
def readme_accuracy() -> str:
    runs = _experiment("table_4_1_full")["runs"]
    table = _table_4_1(["published", "tuned", "tuned_per_lane"], differences=False)
    return f"{table}\n\n*One seed each; a range is the least and the most of three seeds. {_runs_line(runs)[1:]}"


@_place
def table_4_1_full() -> str:
    result = _experiment("table_4_1_full")
    text = _table_4_1(["published", "signed_pixels", "tuned", "tuned_per_lane"], differences=True)
    run = {(row["row"], c) for row in result["rows"] for c, s in row["accuracy"].items() if s}
    missing = [row["row"] for row in result["rows"] if not any(key[0] == row["row"] for key in run)]
    titles = "; ".join(_row_title(row, result["runs"]) for row in missing)
    rest = f"Not run at this scale: {titles}." if missing else ""
    return f"{text}\n\n{_runs_line(result['runs'])} {rest}\n\n{_commands(result['runs'])}"


@_place
def table_4_1_parameters() -> str:
    result = _experiment("table_4_1_full")
    rows = [
        [
            _row_title(row["row"], ()),
            f"{row['published_parameters']:,}" if row["published_parameters"] else "-",
            f"{row['parameters']:,}" if row["parameters"] else _NOT_RUN,
        ]
        for row in result["rows"]
    ]
    return _table("model | parameters in the thesis | here, without the prior bias", rows)


@_place
def table_4_1_cpu() -> str:
    result, curves = _experiment("table_4_1_cpu"), _experiment("learning_curves")
    peers = {row["lanes"] + key.split("_")[0]: row["tensorflow_accuracy"] for key, row in curves.items()}
    rows = []
    for row in result["rows"]:
        runs = [r for r in result["runs"] if r["facts"]["row"] == row["row"] and r["facts"]["column"] == "published"]
        if not runs:
            continue
        kind = row["row"].split("_")[1]
        peer = peers.get(f"{kind}:w4*4{row['row'].split('_')[0]}") or []
        rows.append(
            [
                _row_title(row["row"], result["runs"]),
                _curve(runs[0]),
                ", ".join(f"{value:.2f}" for value in peer) or "-",
                *(_accuracy(row["accuracy"].get(column)) for column in ("per_class", "augmented", "tuned")),
            ]
        )
    header = (
        "test accuracy in % | as published, epochs 1 to 3 | TensorFlow, 4x4 | `per_class`, epoch 3 | `augmented` | "
        "`tuned`"
    )
    return f"{_table(header, rows)}\n\n{_runs_line(result['runs'])}\n\n{_commands(result['runs'])}"


@_place
def learning_curves() -> str:
    result = _experiment("learning_curves")
    rows = [
        [
            _data(row["data"]),
            f"`{row['lanes']}`",
            row["num_runs"],
            *(f"{value:.2f}" for value in row["mean_accuracy_per_epoch"][:3]),
            ", ".join(f"{value:.2f}" for value in row["tensorflow_accuracy"]) or "-",
        ]
        for _, row in sorted(result.items(), reverse=True)
    ]
    first = next(iter(next(iter(result.values()))["runs"].values()))
    spreads = {key: row["spread_per_epoch"][2] for key, row in result.items() if key.startswith("cifar")}
    apart = " and ".join(f"{value:.1f} ({key.split('_')[1]})" for key, value in sorted(spreads.items()))
    return (
        f"{_table('data | lanes | seeds | epoch 1 | epoch 2 | epoch 3 | TensorFlow, epochs 1 to 3', rows)}\n\n"
        f"{_made_on(first)}\n\n"
        f"After 3 epochs of CIFAR-10 the three seeds lie {apart} points apart, so smaller differences say little."
    )


@_place
def quickstart_seeds() -> str:
    result = _experiment("quickstart_seeds")
    values = [row["test_accuracy"] for row in result["rows"]]
    return (
        f"`make train` (`configs/quickstart.py`) reaches {_percent(mean(values), 1)} % test accuracy on average over "
        f"{len(values)} seeds, {_percent(min(values), 1)} to {_percent(max(values), 1)}, with "
        f"{result['rows'][0]['parameters']:,} parameters.\n\n{_made_on(result, f'{len(values)} runs')}"
    )


@_place
def tuning_cpu() -> str:
    result = _experiment("table_4_1_tuning_cpu")
    keys = list(result["rows"])
    names = list(dict.fromkeys(name for row in result["rows"].values() for name in row))
    rows = []
    for name in names:
        spreads = [result["rows"][key].get(name) for key in keys]
        if any(spreads):
            used = {"adamw_flip_signed": ", `tuned`", "adamw_flip_signed_per_lane": ", `tuned_per_lane`"}.get(name, "")
            rows.append([f"`{name}`{used}", _settings(result, name), *map(_accuracy, spreads)])
    header = " | ".join(["candidate", "what it changes", *(_row_title(key, result["runs"]) for key in keys)])
    return f"{_table(header, rows)}\n\n{_runs_line(result['runs'])}\n\n{_commands(result['runs'])}"


def _settings(result: Mapping[str, Any], name: str) -> str:
    cifar, fashion = (result["settings"][data].get(name, {}) for data in ("cifar10", "fashion_mnist"))

    def told(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{field.split('.')[1]}={value}" for field, value in values.items())

    other = told({field: value for field, value in fashion.items() if cifar.get(field) != value})
    return (told(cifar) or "nothing") + (f" (Fashion-MNIST: {other})" if other else "")


@_place
def tuning_full() -> str:
    result = _experiment("table_4_1_tuning_full")
    rows = [
        [f"`{name}`", _settings(result, name), *(_accuracy(result["rows"][key][name]) for key in result["rows"])]
        for name in next(iter(result["rows"].values()))
        if any(result["rows"][key][name] for key in result["rows"])
    ]
    header = " | ".join(["candidate", "what it changes", *(_row_title(key, result["runs"]) for key in result["rows"])])
    return f"{_table(header, rows)}\n\n{_runs_line(result['runs'])}\n\n{_commands(result['runs'])}"


def _residual_rows(validation: bool) -> str:
    result = _experiment("residual_lanes_full")
    rows = []
    for row in result["rows"]:
        if (row["split"] == "validation") != validation:
            continue
        percents = [_accuracy(row[name]) for name in ("accuracy", "accuracy_flips")]
        alone = ", ".join(f"{row[name][0]:.2f}" for name in ("by_lanes", "by_lanes_flips"))
        errors = [f"{row[name]['mean']:.4f}" for name in ("nll", "calibration_error")]
        seconds, rate = row["train_seconds"]["mean"], row["product_gflops_per_second"]["mean"]
        model = [row["row"], f"`{row['lanes']}`", row["epochs"], f"{row['flops'] / 1e15:.3f}", f"{row['parameters']:,}"]
        rows.append([*model, *percents, alone, *errors, f"{seconds / 60:.0f}", f"{rate:.0f}"])
    header = (
        "row | lanes | epochs | PFLOP | parameters | accuracy | with flips | a lane alone, without and with | NLL | ECE"
        " | minutes | GFLOP/s of matrix products"
    )
    runs = [run for run in result["runs"] if (run.get("split") == "validation") == validation]
    return f"{_table(header, rows)}\n\n{_runs_line(runs)}\n\n{_commands(runs)}"


@_place
def residual_trials() -> str:
    return _residual_rows(validation=True)


@_place
def signed_pixels() -> str:
    tuning, full = _experiment("table_4_1_tuning_cpu"), _experiment("table_4_1_full")
    gains = {
        key.split("_")[1]: row["signed_pixels"]["mean"] - row["published"]["mean"]
        for key, row in tuning["rows"].items()
        if row.get("signed_pixels")
    }
    row = next(row for row in full["rows"] if row["row"] == "cifar_mlcn2_4x4")
    test = row["accuracy"]["signed_pixels"]["mean"] - row["accuracy"]["published"]["mean"]
    return (
        f"With pixels in [-1, 1] instead of the published [0, 1], and nothing else changed, on "
        f"{_data(next(r['data'] for r in tuning['runs'] if r['facts']['row'].startswith('cifar')))}: "
        f"mlcn1 gains {gains['mlcn1']:.1f} points and mlcn2 {gains['mlcn2']:.1f} on validation images after 3 epochs; "
        f"mlcn2 gains {test:.1f} on test images after 20. One seed each."
    )


@_place
def batch_size() -> str:
    result = _experiment("batch_size_cpu")
    rows = [
        [
            _row_title(point["row"], result["runs"]),
            point["batch_size"],
            _accuracy(point["test_accuracy"]),
            f"{point['accuracy_difference']:+.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*point["speedup"]),
        ]
        for point in result["points"]
    ]
    header = "model | batch | test accuracy in % | minus that of batch 100 | times as fast as batch 100"
    rounds = len(next(iter(next(iter(result["speeds"].values()))["images_per_second"].values())))
    speeds = sorted({speed["command"] for speed in result["speeds"].values()})
    more = "\n".join(f"- speeds: `{command}`" for command in speeds)
    return (
        f"{_table(header, rows)}\n\n{_runs_line(result['runs'])} "
        f"Speed: median, least and most of {rounds} rounds.\n\n{_commands(result['runs'])}\n{more}"
    )


@_place
def lanes_and_width() -> str:
    result = _experiment("lanes_and_width_cpu")
    points = {(p["figure"], p["width"], p["lanes"]): p for p in result["points"] if p["accuracy"]}
    lanes = sorted({key[2] for key in points})
    rows = []
    for figure, width in sorted({key[:2] for key in points}, reverse=True):
        run = next(run for run in result["runs"] if run["facts"]["figure"] == figure)
        cells = [_accuracy((points.get((figure, width, count)) or {}).get("accuracy")) for count in lanes]
        rows.append([f"{_data(run['data'])}, {figure.split('_')[1]}", width, *cells])
    header = " | ".join(["test accuracy in %", "width", *(f"{count} lanes" for count in lanes)])
    run = result["runs"][0]
    return (
        f"{_table(header, rows)}\n\n{_runs_line(result['runs'])} {run['data']['train_images']:,} training images, "
        f"{result['scale']['num_epochs']} epochs, one seed.\n\n{_commands(result['runs'])}"
    )


# ---- lanes


@_place
def prune() -> str:
    result = _experiment("prune")
    rows = []
    for kept in (16, 14, 8, 4, 3, 2, 1):
        cells: list[str] = []
        for run in result["runs"]:
            left = run["removed"][16 - kept]
            speed = left["speedup"]
            cells += [
                _percent(left["test_accuracy"]),
                f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})",
            ]
        rows.append([kept, *cells])
    titles = [f"lane dropout {run['lane_dropout']:g}" for run in result["runs"]]
    header = "lanes kept of 16" + "".join(f" | {t}: test accuracy in % | {t}: times as fast" for t in titles)
    made_on = _made_on(result, f"medians of {result['runs'][0]['rounds']} rounds, one model each")
    return f"{_table(header, rows)}\n\n{made_on}\n\n- `{result['command']}`"


@_place
def prune_cifar() -> str:
    texts = []
    for name in ("prune_cifar_signed", "prune_cifar"):
        result = _experiment(name)
        rows = [
            [
                f"`{Path(run['workdir']).name}`",
                _data(run["data"]),
                *(_percent(r["test_accuracy"]) for r in run["removed"]),
            ]
            for run in result["runs"]
        ]
        table = _table("model | data | 4 lanes | 3 | 2 | 1", rows)
        texts.append(
            f"`{name}.json`:\n\n{table}\n\n{_made_on(result, 'test accuracy in %, one seed each')}\n\n"
            f"- `{result['command']}`"
        )
    return "\n\n".join(texts)


@_place
def lane_collapse() -> str:
    result = _experiment("lane_collapse_cifar_mlcn1_4x4")
    rows = [
        [
            f"`{run['setting']}`",
            ", ".join(f"{field}={value}" for field, value in run["changes"].items()) or "nothing",
            f"{run['alive']} of {len(run['spreads'][-1])}",
        ]
        for run in result["runs"]
    ]
    steps = result["runs"][0]["steps"][-1]
    return (
        f"{_table(f'setting | what it changes | lanes alive at step {steps}', rows)}\n\n"
        f"{_made_on(result, _data(result['data']), 'mlcn1 4x4, one seed')} A lane counts as alive while its entries "
        f"differ between test images by more than {result['alive_above']}.\n\n- `{result['command']}`"
    )


# ---- devices


@_place
def cost_model() -> str:
    result = _experiment("cost_model")
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
            f"{_percent(fit['mean_error'], 1)} %",
            f"{_percent(fit['within_10_percent'], 0)} %",
            f"{fit['least_ratio']:.2f} to {fit['largest_ratio']:.2f}",
        ]

    header = "Pearson r | mean error | within 10 % | predicted over measured"
    rows = [row(title, result["lanes"][name]) for name, title in names.items()]
    for kind, found in result.get("by_kind", {}).items():
        rows += [row(f"{kind}: {what}, device profile", found[what]) for what in ("seconds", "memory")]
    groups = [row(title, result["groups"][name]) for name, title in names.items()]
    single, grouped = _table(f"single lanes | {header}", rows), _table(f"groups of equal lanes | {header}", groups)
    return f"{single}\n\n{grouped}\n\n{_made_on(result)}"


def _inside(result: Mapping[str, Any]) -> str:
    share = result.get("inside_interval")
    if share is None:
        return ""
    level = _percent(result["interval_level"], 0)
    return f" Intervals of {level} % hold {_percent(share, 0)} % of the measured splits."


@_place
def simulator_check() -> str:
    result = _experiment("simulator_check")
    planned = max(result["planned_over_fastest"].values())
    return (
        f"{result['configurations']} splits of two one-core processes were predicted and measured. Predicted steps are "
        f"{_percent(result['mean_error'], 1)} % off in the mean, {_percent(result['largest_error'], 0)} % at most. On "
        f"equal cores, the split that `parallel.plan=auto` picks takes at most {_percent(planned - 1, 0)} % longer "
        f"than the fastest of the splits that were measured.{_inside(result)}\n\n{_made_on(result)}"
    )


@_place
def scaling() -> str:
    result = _experiment("scaling")

    def over(record: Mapping[str, Any], field: str) -> str:
        value = record.get(field)
        return f"{value['median']:.2f}" if value else ""

    rows = [
        [
            r["batch"],
            r["devices"],
            r["mode"],
            r["where"],
            f"{r['milliseconds']:.0f}",
            over(r, "over_mlcn_on_one_core"),
            over(r, "over_capsnet_on_one_core"),
        ]
        for r in result["batches"]
        if r["where"] != "oversubscribed"
    ]
    header = "batch | devices | mode | where | ms | over MLCN on one core | over CapsNet on one core"
    real = {
        key: [r["over_mlcn_on_one_core"]["median"] for r in result[key] if r["where"] == "real cores"]
        for key in ("lanes", "width", "depth")
    }
    spans = {key: f"{min(values):.2f} to {max(values):.2f}" for key, values in real.items()}
    one = {r["batch"]: r["milliseconds"] for r in result["batches"] if r["devices"] == 1 and r["mode"] == "mlcn-lane"}
    two = {
        r["batch"]: r["milliseconds"]
        for r in result["batches"]
        if r["devices"] == 2 and r["mode"] == "mlcn-lane" and r["where"] == "real cores"
    }
    shares = ", ".join(f"{two[batch] / one[batch]:.2f} at batch {batch}" for batch in sorted(one))
    return (
        f"{_table(header, rows)}\n\n{_made_on(result)}\n\nOver two real cores, 2 to 32 lanes of width 4 gain "
        f"{spans['lanes']}, 8 lanes of width 1 to 6 {spans['width']}, and 8 lanes of depth 1 to 5 {spans['depth']}. "
        f"One process on both cores is the other way to use them: two processes that split the lanes took {shares} of "
        "its time."
    )


_PARTITIONERS = ("round_robin", "greedy_published", "greedy", "karmarkar_karp", "exact")
_PARTITIONER_TITLES = "round robin | greedy, published | greedy | Karmarkar-Karp | exact"


@_place
def balance_simulated() -> str:
    result = _experiment("balance")
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
    table = _table(f"devices | lanes | {_PARTITIONER_TITLES} | proved | max s", rows)
    return f"{table}\n\n{_made_on({**result, 'rounds': 0}, f'simulated, means of {draws} draws')}"


@_place
def balance_measured() -> str:
    result = _experiment("balance")
    rows = [
        [entry["num_lanes"], title, *(f"{entry[field][name]:.2f}" for name in _PARTITIONERS)]
        for entry in result["measured"]
        for title, field in (("measured", "random_over_this"), ("predicted", "predicted_random_over_this"))
    ]
    made_on = _made_on(result, "one draw of lanes for each number")
    return f"{_table(f'lanes |  | {_PARTITIONER_TITLES}', rows)}\n\n{made_on}"


@_place
def published_scaling() -> str:
    result = _experiment("published_scaling")
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
        f"{_table('model | split | over itself on one | over CapsNet on one', rows)}\n\n"
        f"*Simulated, 8 K80s. Assumed: a K80 takes {assumed['k80_slowness']} P100s' seconds; links of "
        f"{assumed['link_us']:g} us and {assumed['link_gbytes']:g} GB/s within a host, {assumed['network_us']:g} us "
        f"and {assumed['network_gbits']:g} Gbit/s between hosts; the decoder is "
        f"{_percent(assumed['decoder_share'], 0)} % of a step. The thesis reports {published}.*"
    )


# ---- search


@_place
def nas_compare() -> str:
    result = _experiment("nas_compare")

    def after(method: Mapping[str, Any]) -> str:
        shares = method.get("as_good_as_random_after")
        if not shares:
            return "-"
        return ", ".join("never" if share is None else f"{_percent(share, 0)} %" for share in shares)

    def share(value: float | None) -> str:
        return "never" if value is None else f"{_percent(value, 0)} %"

    rows = [
        [
            method["method"],
            f"{method['begun']:.0f}" if "begun" in method else "-",
            f"{method['trained_to_the_end']:.0f}",
            _percent(method["mean"]),
            _percent(method["best"]),
            _percent(method["test"]) if "test" in method else "-",
            after(method),
            share(method["mean_as_good_as_random_after"]) if "mean_as_good_as_random_after" in method else "-",
            f"{_percent(method['overhead'], 1)} %" if "overhead" in method else "-",
        ]
        for method in result["methods"]
    ]
    header = (
        "method | models begun | trained to the end | mean accuracy in % | best | its test accuracy | "
        "as good as random's best after, each seed | mean curves | overhead"
    )
    seeds = result["methods"][0]["seeds"]
    return f"{_table(header, rows)}\n\n{_made_on(result, f'means of {seeds} seeds')}"


@_place
def nas_sweeps() -> str:
    rows = []
    for name in ("flops", "memory", "devices"):
        result = _experiment(f"nas_{name}")
        for point in result["points"]:
            rows.append(
                [
                    {"flops": "FLOPs", "memory": "memory", "devices": "number of devices"}[name],
                    point["value"],
                    f"`{point['devices']}`",
                    len(point["accuracies"]),
                    result["search"]["num_epochs"],
                    _percent(mean(point["accuracies"]), 1),
                    _percent(max(point["accuracies"]), 1),
                ]
            )
    header = "sweep over | value | devices | models | epochs | mean accuracy in % | best"
    return f"{_table(header, rows)}\n\n{_made_on(_experiment('nas_flops'), 'one seed')}"


# ---- speed


def _mebibytes(framework: Mapping[str, Any]) -> str:
    return f"{framework['peak_bytes'] / 2**20:,.0f}"


_FRAMEWORKS = ("mlcn_jax", "keras", "torch")


def _peer_versions(result: Mapping[str, Any]) -> str:
    frameworks = next(iter(result["networks"].values()))["frameworks"]
    versions = {**frameworks["keras"]["versions"], **frameworks["torch"]["versions"]}
    return ", ".join(f"{name} {versions[name]}" for name in ("keras", "tensorflow", "torch"))


@_place
def train_step() -> str:
    result = _benchmark("train_step")
    rows = []
    for network in result["networks"].values():
        frameworks = network["frameworks"]
        fastest = min(("keras", "torch"), key=lambda name: frameworks[name]["milliseconds"]["median"])
        ratio = frameworks[fastest]["ours_over_theirs"]
        rows.append(
            [
                network["title"],
                *(f"{frameworks[name]['images_per_second']:,.0f}" for name in _FRAMEWORKS),
                f"**{network['ours_over_fastest_peer']:.2f}** ({ratio['min']:.2f} to {ratio['max']:.2f})",
                *(_mebibytes(frameworks[name]) for name in _FRAMEWORKS),
            ]
        )
    header = (
        "network | mlcn_jax, images/s | Keras | PyTorch | ratio (min to max) | peak MiB: mlcn_jax | Keras | PyTorch"
    )
    return f"{_table(header, rows)}\n\n{_made_on(result, _peer_versions(result), 'batch 100')}"


@_place
def inference() -> str:
    result = _benchmark("inference")
    rows = [
        [
            network["title"],
            network["batch"],
            *(f"{network['frameworks'][name]['milliseconds']['median']:.2f}" for name in _FRAMEWORKS),
            f"**{network['ours_over_fastest_peer']:.2f}**",
            *(_mebibytes(network["frameworks"][name]) for name in _FRAMEWORKS),
        ]
        for network in result["networks"].values()
    ]
    header = "network | batch | mlcn_jax, ms | Keras | PyTorch | ratio | peak MiB: mlcn_jax | Keras | PyTorch"
    return f"{_table(header, rows)}\n\n{_made_on(result, _peer_versions(result))}"


@_place
def families() -> str:
    result = _benchmark("train_step")
    rows = [
        [family["title"], f"{family['capsnet_over_this']:.2f}", f"{family['thesis']:.2f}" if family["thesis"] else "-"]
        for family in result["families"].values()
        if "capsnet_over_this" in family
    ]
    return f"{_table('CapsNet over | here | thesis, on a P100', rows)}\n\n{_made_on(result)}"


@_place
def roofline() -> str:
    result = _benchmark("roofline")
    rows = [
        [
            network["title"],
            f"{1e3 * network['seconds']:.0f}",
            f"{network['flops'] / 1e9:.1f}",
            f"{network['flops_of_plain_convolutions'] / 1e9:.1f}",
            f"{_percent(network['share_of_product_roof'], 0)} %",
            f"{network['bytes'] / 1e9:.2f}",
            f"{_percent(network['share_of_bandwidth_roof'], 0)} %",
            f"{network['largest_part']}, {_percent(network['parts'][network['largest_part']], 0)} %",
        ]
        for network in result["networks"].values()
    ]
    header = (
        "network | ms | GFLOP | direct | share of the product rate | GB | share of the bandwidth | "
        "largest part of the step"
    )
    return f"{_table(header, rows)}\n\n{_made_on(result)}"


@_place
def routing() -> str:
    result = _benchmark("routing")
    rows = [
        [
            title,
            f"{case['ours']['median_milliseconds']:.0f}",
            f"{case['plain_over_ours_median']:.2f}",
            f"{case['plain']['temporary_mebibytes'] / case['ours']['temporary_mebibytes']:.2f}",
        ]
        for title, case in result["cases"].items()
    ]
    header = "case | ms | the procedure as printed: time over this | temporary memory over this"
    return f"{_table(header, rows)}\n\n{_made_on(result, result['what'])}"


@_place
def lanes_in_turn() -> str:
    result = _benchmark("lanes_in_turn")
    rows = [
        [name, f"{step['seconds']:.2f}", f"{step['temporary_bytes'] / 2**20:,.0f}"]
        for name, step in result["steps"].items()
    ]
    time, memory = result["time_ratio"], result["memory_ratio"]
    batch = f"batch {result['batch']}"
    spread = f"{time['median']:.2f} ({time['min']:.2f} to {time['max']:.2f})"
    ratios = f"in turn over all held: time {spread}, memory {memory:.2f}"
    table = _table("lanes | s per step | temporary memory, MiB", rows)
    return f"{table}\n\n{_made_on(result, result['lanes'], batch, ratios)}"


@_place
def lane_pool() -> str:
    real, simulated = _experiment("lane_pool_kills"), _experiment("lane_pool_simulated")
    rows = [
        [
            f"{row['order']}, machines {'come and go' if row['machines_leave'] else 'stay'}",
            f"{row['hours']:.1f} ({row['least_hours']:.1f} to {row['most_hours']:.1f})",
            _percent(row["lost_share"], 1),
        ]
        for row in simulated["rows"]
    ]
    rows.append(["together in step, machines stay", f"{simulated['hours_together_in_step']:.1f}", "-"])
    machines = f"{len(simulated['machines_gflops'])} machines of {min(simulated['machines_gflops'])} to "
    machines += f"{max(simulated['machines_gflops'])} GFLOP/s"
    held = real["times_taken"] - real["lanes"]
    kills = (
        f"Measured: {real['kills']} workers killed at random moments, {held} of them with a lane; of {real['lanes']} "
        f"lanes {real['lanes_lost']} were lost and {real['lanes_trained_twice_at_once']} trained twice at once; the "
        f"largest difference of a parameter from an undisturbed pool is {real['largest_difference']:g}."
    )
    table = _table("order in which lanes are taken | hours, mean (range) | work done again, %", rows)
    return f"""{kills}

{table}

*Simulated: {simulated["lanes"]} lanes, {machines}, {simulated["draws"]} draws; without any loss \
{simulated["hours_without_any_loss"]:.1f} hours. {_made_on(real)[1:]}"""


@_place
def exported() -> str:
    result = _benchmark("exported")
    rows = [
        [
            f"`{model['model']}`",
            entry["batch"],
            f"{entry['exported_milliseconds']:.2f}",
            f"{entry['exported_over_model']:.2f}",
        ]
        for model in result["models"]
        for entry in model["inference"]
    ]
    commands = "; ".join(
        f"`{model['model']}`: {model['command']['pictures']} pictures in {model['command']['seconds']:.1f} s"
        for model in result["models"]
    )
    return (
        f"{_table('lanes, 28x28x1 | images | export, ms | over the model in process', rows)}\n\n"
        f"{_made_on(result)} "
        f"The command `predict`, with starting and compiling: {commands}."
    )


@_place
def onnx() -> str:
    result = _benchmark("onnx")
    rows = [
        [
            entry["model"],
            entry["batch"],
            f"{entry['milliseconds']['onnxruntime']['median']:.2f}",
            f"{entry['milliseconds']['artifact']['median']:.2f}",
            f"{entry['artifact_over_onnxruntime']['median']:.2f}",
        ]
        for entry in result["models"]
    ]
    header = "model | images | ONNX Runtime, ms | export run by JAX, ms | JAX's speed over ONNX Runtime's"
    return f"{_table(header, rows)}\n\n{_made_on(result)}"


@_place
def serving() -> str:
    result = _benchmark("serving")
    clients = f"{result['clients']}_clients"
    rows = [
        [
            f"`{model['lanes']}`" if model["lanes"] else "CapsNet",
            f"{model['with_batching'][clients]['requests_per_second']:,.0f}",
            f"{model['without_batching'][clients]['requests_per_second']:,.0f}",
            f"{model['throughput_over_without_batching']['median']:.2f}",
            f"{model['single_client_latency_over_without_batching']['median']:.2f}",
        ]
        for model in result["models"]
    ]
    header = (
        f"model, {result['clients']} clients | with batching, requests/s | without | ratio | "
        "a single client waits, times as long"
    )
    return f"{_table(header, rows)}\n\n{_made_on(result, 'clients and server on the same cores')}"


@_place
def conv_algorithms() -> str:
    result = _benchmark("conv_algorithms_cpu")
    names = list(next(iter(result["cases"].values()))["with_gradients_milliseconds"])
    rows = [
        [
            title,
            *(
                f"{case['with_gradients_milliseconds'][name]:.2f}"
                if name in case["with_gradients_milliseconds"]
                else "-"
                for name in names
            ),
            f"`{case['chosen']}`",
        ]
        for title, case in result["cases"].items()
    ]
    header = " | ".join(["convolution", *(f"`{name}`, ms" for name in names), "chosen"])
    return f"{_table(header, rows)}\n\n{_made_on(result, 'with gradients')}"


@_place
def tie_break() -> str:
    result = _experiment("tie_break")
    lanes = list(next(iter(result["random_over_rule"].values())))
    rows = [
        [order, title, *(f"{by_lanes[count][rule]:.2f}" for count in lanes)]
        for order, by_lanes in result["random_over_rule"].items()
        for rule, title in (("greedy_published", "greedy, published"), ("greedy", "greedy"))
    ]
    table = _table(" | ".join(["devices listed", "rule", *(f"{count} lanes" for count in lanes)]), rows)
    draws = result["draws"]
    return f"{table}\n\n{_made_on(result, f'simulated, means of {draws} draws')}\n\n- `python -m experiments.tie_break`"

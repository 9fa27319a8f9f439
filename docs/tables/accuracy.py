"""Tables of accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from tables.parts import (
    accuracy_text,
    commands_of,
    data_title,
    experiment,
    has_run,
    largest,
    measured_on,
    percent,
    place,
    row_title,
    runs_line,
    table_of,
    verdict,
)


def _table_4_1(columns: Sequence[str], differences: bool) -> str:
    from experiments.published_rows import columns_of

    result = experiment("table_4_1_full")
    rows = []
    for row in result["rows"]:
        if not any(row["accuracy"].get(column) for column in columns):
            continue
        cells = [
            accuracy_text(row["accuracy"].get(column)) + (verdict(row["difference"].get(column)) if differences else "")
            if column in columns_of(row["row"])
            else "-"
            for column in columns
        ]
        rows.append([row_title(row["row"], result["runs"]), f"{row['published_accuracy']:.2f}", *cells])
    titles = ["as published" if column == "published" else f"`{column}`" for column in columns]
    return table_of(" | ".join(["test accuracy in %, 20 epochs", "thesis", *titles]), rows)


@place
def readme_accuracy() -> str:
    runs = experiment("table_4_1_full")["runs"]
    table = _table_4_1(["published", "tuned", "tuned_per_lane"], differences=False)
    return f"{table}\n\n*One seed each; a range is the minimum and maximum of two or three seeds. {runs_line(runs)[1:]}"


_HEADLINES = ("cifar_4xw3d2", "fashion_4xw3d2")  # rows of the README: the settings of the configs


@place
def readme_residual() -> str:
    result = experiment("residual_lanes_full")
    rows = {row["row"]: row for row in result["rows"]}
    told = []
    for name in _HEADLINES:
        row, (run, *more) = rows[name], [run for run in result["runs"] if run["facts"]["row"] == name]
        plain, flips = (f"{row[name]['mean']:.2f} %" for name in ("accuracy", "accuracy_flips"))
        told.append(
            f"{plain} on {data_title(run['data'])} in {row['epochs']} epochs ({flips} with mirror images at test time)"
        )
    return (
        f"Residual lanes, `{rows[_HEADLINES[0]]['lanes']}`, reach {' and '.join(told)}, means of {1 + len(more)} seeds "
        "([how to train them](docs/howto/residual.md)). The published lanes, and the same with other settings:"
    )


@place
def table_4_1_full() -> str:
    result = experiment("table_4_1_full")
    text = _table_4_1(["published", "signed_pixels", "tuned", "tuned_per_lane"], differences=True)
    run = {(row["row"], c) for row in result["rows"] for c, s in row["accuracy"].items() if s}
    missing = [row["row"] for row in result["rows"] if not any(key[0] == row["row"] for key in run)]
    titles = "; ".join(row_title(row, result["runs"]) for row in missing)
    rest = f"Not run at this scale: {titles}." if missing else ""
    return f"{text}\n\n{runs_line(result['runs'])} {rest}\n\n{commands_of(result['runs'])}"


@place
def public_code() -> str:
    if not has_run("public_code_full"):
        return "Not run yet."
    result = experiment("public_code_full")
    rows = [
        [
            row["title"],
            *(
                f"{accuracy_text(row[way])}, {row[f'{way}_difference']:+.2f}" if row[way] else "not run"
                for way in ("last", "best")
            ),
        ]
        for row in result["rows"]
    ]
    header = "CIFAR-10, 20 epochs; with points over the thesis | test accuracy in % | in the best epoch by test images"
    from experiments.public_code import explained

    parts = [table_of(header, rows), *explained(result["rows"]), runs_line(result["runs"]), commands_of(result["runs"])]
    return "\n\n".join(parts)


@place
def table_4_1_parameters() -> str:
    from experiments.published_rows import ROWS, configure_row
    from mlcn_jax.nn.model import count_parameters

    rows = []
    for name, row in ROWS.items():
        config = configure_row(name, "published", {"cifar10": "", "fashion_mnist": ""})
        spec = config.model_spec(*config.data.shape())
        counts = [count_parameters(replace(spec, prior_bias=bias))["total"] for bias in (True, False)]
        here = [f"{count:,}{', equal' if count == row.parameters else ''}" for count in counts]
        rows.append([row.title, f"{row.parameters:,}" if row.parameters else "-", *here])
    return table_of("model | parameters in the thesis | here, with the prior bias | without it", rows)


@place
def quickstart_seeds() -> str:
    result = experiment("quickstart_seeds")
    values = [row["test_accuracy"] for row in result["rows"]]
    return (
        f"`make train` (`configs/quickstart.py`) reaches {percent(mean(values), 1)} % test accuracy on average over "
        f"{len(values)} seeds, {percent(min(values), 1)} to {percent(max(values), 1)}, with "
        f"{result['rows'][0]['parameters']:,} parameters.\n\n{measured_on(result, f'{len(values)} runs')}"
    )


@place
def tuning_cpu() -> str:
    result = experiment("table_4_1_tuning_cpu")
    keys = list(result["rows"])
    names = list(dict.fromkeys(name for row in result["rows"].values() for name in row))
    rows = []
    for name in names:
        spreads = [result["rows"][key].get(name) for key in keys]
        if any(spreads):
            used = {"adamw_flip_signed": ", `tuned`", "adamw_flip_signed_per_lane": ", `tuned_per_lane`"}.get(name, "")
            rows.append([f"`{name}`{used}", _settings(result, name), *map(accuracy_text, spreads)])
    header = " | ".join(["candidate", "what it changes", *(row_title(key, result["runs"]) for key in keys)])
    return f"{table_of(header, rows)}\n\n{runs_line(result['runs'])}\n\n{commands_of(result['runs'])}"


def _settings(result: Mapping[str, Any], name: str) -> str:
    cifar, fashion = (result["settings"][data].get(name, {}) for data in ("cifar10", "fashion_mnist"))

    def told(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{field.split('.')[1]}={value}" for field, value in values.items())

    other = told({field: value for field, value in fashion.items() if cifar.get(field) != value})
    return (told(cifar) or "nothing") + (f" (Fashion-MNIST: {other})" if other else "")


@place
def tuning_full() -> str:
    result = experiment("table_4_1_tuning_full")
    rows = [
        [f"`{name}`", _settings(result, name), *(accuracy_text(result["rows"][key][name]) for key in result["rows"])]
        for name in next(iter(result["rows"].values()))
        if any(result["rows"][key][name] for key in result["rows"])
    ]
    header = " | ".join(["candidate", "what it changes", *(row_title(key, result["runs"]) for key in result["rows"])])
    return f"{table_of(header, rows)}\n\n{runs_line(result['runs'])}\n\n{commands_of(result['runs'])}"


def _residual_rows(validation: bool) -> str:
    from experiments.residual_lanes import decoder_share

    name = "residual_trials_full" if validation and has_run("residual_trials_full") else "residual_lanes_full"
    result = experiment(name)
    rows = []
    for row in result["rows"]:
        if (row["split"] == "validation") != validation:
            continue
        percents = [accuracy_text(row[name]) for name in ("accuracy", "accuracy_flips")]
        alone = ", ".join(f"{row[name][0]:.2f}" for name in ("by_lanes", "by_lanes_flips"))
        errors = [f"{row[name]['mean']:.4f}" for name in ("nll", "calibration_error")]
        shares = [f"{100 * share:.0f}" for share in (row["largest_lane"], decoder_share(row["row"]))]
        costs = [row["epochs"], f"{row['flops'] / 1e15:.3f}", *shares, f"{row['parameters']:,}"]
        times = f"{row['train_seconds']['mean']:.0f}", f"{row['product_gflops_per_second']['mean'] / 1e3:.1f}"
        rows.append([row["row"], f"`{row['lanes']}`", *costs, *percents, alone, *errors, *times])
    header = (
        "row | lanes | epochs | PFLOP | largest lane % | decoder % | parameters | accuracy | with flips"
        " | one lane, without and with | NLL | ECE | seconds | TFLOP/s of matrix products"
    )
    runs = [run for run in result["runs"] if (run.get("split") == "validation") == validation]
    about = (
        "With flips, an image and its mirror image are scored together; one lane is the mean of the lanes, each "
        "alone; NLL is the negative log-likelihood, ECE the expected calibration error, both without flips. Commands "
        "are as they were given: rows that have not ended are not in the table."
    )
    return f"{table_of(header, rows)}\n\n{about}\n\n{runs_line(runs)}\n\n{commands_of(runs)}"


_GOALS = {  # with flips at test time or without; to be reached, and hoped for
    "cifar_4xw3d2": ("with flips", 93.0, 94.0),
    "fashion_4xw3d2": ("with flips", 94.3, 95.0),
    "cifar_long": ("without flips", 95.2, 95.8),
}
_EQUAL_COST = {  # rows with 1, 2, 4 and 8 lanes at one cost
    "CIFAR-10, 0.1 PFLOP": ("cifar_1xw4d2", "cifar_2xw3d2", "cifar_4xw2d2", "cifar_8xw1d2"),
    "CIFAR-10, 0.45 PFLOP": ("cifar_1xw6d2", "cifar_2xw4d2", "cifar_4xw3d2", "cifar_8xw2d2"),
    "CIFAR-10, 5 PFLOP": ("cifar_long_1xw12d2", "", "cifar_long", ""),
    "Fashion-MNIST, 0.45 PFLOP": ("fashion_1xw6d2", "", "fashion_4xw3d2", ""),
}


@place
def residual_lanes() -> str:
    return _residual_rows(validation=False)


@place
def residual_goals() -> str:
    rows = {row["row"]: row for row in experiment("residual_lanes_full")["rows"]}
    told = []
    for name, (flips, *goals) in _GOALS.items():
        mean = rows[name]["accuracy_flips" if flips == "with flips" else "accuracy"]["mean"]
        verdicts = (f"{goal:g} is {'reached' if mean >= goal else 'missed'}" for goal in goals)
        told.append(f"for `{name}`, {flips} at test time, {' and '.join(verdicts)}")
    return f"Of the goals that were set beforehand: {'; '.join(told)}."


@place
def residual_equal_cost() -> str:
    rows = {row["row"]: row for row in experiment("residual_lanes_full")["rows"]}

    def told(name: str) -> str:
        if name not in rows:
            return "not run" if name else "-"
        both = ", ".join(f"{rows[name][one]['mean']:.2f}" for one in ("accuracy", "accuracy_flips"))
        return f"{both} ({rows[name]['accuracy']['runs']} seeds)".replace("(1 seeds)", "(1 seed)")

    lines = [[title, *map(told, names)] for title, names in _EQUAL_COST.items()]
    return table_of("accuracy without and with flips | one lane | 2 lanes | 4 lanes | 8 lanes", lines)


@place
def residual_heads() -> str:
    rows = {row["row"]: row for row in experiment("residual_lanes_full")["rows"]}
    heads = {"capsules, routed over classes": "cifar_caps_4xw3d2", "linear": "cifar_shared_4xw3d2"}
    keys = {"accuracy": 2, "accuracy_flips": 2, "nll": 4, "calibration_error": 4}
    lines = [
        [head, rows[name]["epochs"], *(f"{rows[name][key]['mean']:.{digits}f}" for key, digits in keys.items())]
        for head, name in heads.items()
    ]
    return table_of("head | epochs | accuracy | with flips | NLL | ECE", lines)


@place
def residual_trials() -> str:
    return _residual_rows(validation=True)


@place
def own_images() -> str:
    result = experiment("own_images_full")
    rows = [
        [
            f"`{row['recipe']}`, {row['part']} images",
            f"{row['images']:,}",
            *(row[name] for name in ("batch_size", "epochs")),
            f"{row['flops'] / 1e15:.3f}",
            *(accuracy_text(row[name]) for name in ("accuracy", "accuracy_flips")),
            *(f"{row[name]['mean']:.4f}" for name in ("nll", "calibration_error")),
        ]
        for row in result["rows"]
    ]
    header = "recipe | training images | batch | epochs | PFLOP | accuracy | with flips | NLL | ECE"
    return f"{table_of(header, rows)}\n\n{runs_line(result['runs'])}\n\n{commands_of(result['runs'])}"


@place
def signed_pixels() -> str:
    tuning, full = experiment("table_4_1_tuning_cpu"), experiment("table_4_1_full")
    gains = {
        key.split("_")[1]: row["signed_pixels"]["mean"] - row["published"]["mean"]
        for key, row in tuning["rows"].items()
        if row.get("signed_pixels")
    }
    row = next(row for row in full["rows"] if row["row"] == "cifar_mlcn2_4x4")
    found = [row["accuracy"][column] for column in ("signed_pixels", "published")]

    def images(result: Mapping[str, Any]) -> str:
        return data_title(next(run["data"] for run in result["runs"] if run["facts"]["row"].startswith("cifar")))

    test = ""
    if all(found):
        test = f"; mlcn2 gains {found[0]['mean'] - found[1]['mean']:.1f} on test images of {images(full)} after 20"
    return (
        "With pixels in [-1, 1] instead of the published [0, 1], and nothing else changed: mlcn1 gains "
        f"{gains['mlcn1']:.1f} points and mlcn2 {gains['mlcn2']:.1f} on validation images of {images(tuning)} after 3 "
        f"epochs{test}. One seed each."
    )


@place
def batch_size() -> str:
    result = largest("batch_size")
    rows = [
        [
            row_title(point["row"], result["runs"]),
            point["batch_size"],
            accuracy_text(point["test_accuracy"]),
            "-" if point["accuracy_difference"] is None else f"{point['accuracy_difference']:+.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*point["speedup"]) if point["speedup"] else "-",
        ]
        for point in result["points"]
    ]
    header = "model | batch | test accuracy in % | minus that of batch 100 | times as fast as batch 100"
    rounds = [len(rates) for speed in result["speeds"].values() for rates in speed["images_per_second"].values()]
    speed = f"median, minimum and maximum of {rounds[0]} rounds" if rounds else "not measured yet"
    speeds = sorted({speed["command"] for speed in result["speeds"].values()})
    more = "\n".join(f"- speeds: `{command}`" for command in speeds)
    picture = "![Accuracy and speed against batch size](../../experiments/results/batch_size_{}.png)"
    return (
        f"{table_of(header, rows)}\n\n{runs_line(result['runs'])} {result['scale']['num_epochs']} epochs. "
        f"Speed: {speed}.\n\n{commands_of(result['runs'])}\n{more}\n\n{picture.format(result['scale']['name'])}"
    )

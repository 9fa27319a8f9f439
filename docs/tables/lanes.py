"""Tables of what lanes do: how many, how wide, how they are removed, collapse and train alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tables.parts import (
    accuracy_text,
    benchmark,
    commands_of,
    data_title,
    experiment,
    has_run,
    largest,
    measured_on,
    percent,
    place,
    runs_line,
    table_of,
)


@place
def lanes_and_width() -> str:
    result = largest("lanes_and_width")
    points = {(p["figure"], p["width"], p["lanes"]): p for p in result["points"] if p["accuracy"]}
    lanes = sorted({key[2] for key in points})
    rows = []
    for figure, width in sorted({key[:2] for key in points}, reverse=True):
        run = next(run for run in result["runs"] if run["facts"]["figure"] == figure)
        cells = [accuracy_text((points.get((figure, width, count)) or {}).get("accuracy")) for count in lanes]
        rows.append([f"{data_title(run['data'])}, {figure.split('_')[1]}", width, *cells])
    header = " | ".join(["test accuracy in %", "width", *(f"{count} lanes" for count in lanes)])
    images = {data_title(run["data"]): f"{run['data']['train_images']:,}" for run in result["runs"]}
    told = ", ".join(f"{count} training images of {title}" for title, count in images.items())
    about = f"{told}, {result['scale']['num_epochs']} epochs."
    name = f"lanes_and_width_{result['scale']['name']}"
    picture = f"![Accuracy and seconds per epoch against the number of lanes](../../experiments/results/{name}.png)"
    under = f"{runs_line(result['runs'])} {about}\n\n{commands_of(result['runs'])}"
    return f"{table_of(header, rows)}\n\n{under}\n\n{picture}"


@place
def prune() -> str:
    result = experiment("prune")
    made_on = measured_on(result, f"medians of {result['runs'][0]['rounds']} rounds, one model each")
    return f"{_removal_table(result['runs'])}\n\n{made_on}\n\n{_prune_command(result)}"


def _removal_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Test accuracy and speed of some runs of 16 lanes after the least useful ones have been removed."""
    rows = []
    for kept in (16, 14, 8, 4, 3, 2, 1):
        cells: list[str] = []
        for run in runs:
            left = run["removed"][16 - kept]
            speed = left["speedup"]
            cells += [
                percent(left["test_accuracy"]),
                f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})",
            ]
        rows.append([kept, *cells])
    titles = [_removal_title(run) for run in runs]
    header = "lanes kept of 16" + "".join(f" | {t}: test accuracy in % | {t}: times as fast" for t in titles)
    return table_of(header, rows)


def _removal_title(run: Mapping[str, Any]) -> str:
    seed = run.get("facts", {}).get("seed", 0)
    return f"lane dropout {run['lane_dropout']:g}" + (f", seed {seed}" if seed else "")


def _prune_command(result: Mapping[str, Any]) -> str:
    """The command of results of `mlcn_jax prune`, which was once called `python -m experiments.prune`."""
    return f"- `{result['command'].replace('python -m experiments.prune', 'mlcn_jax prune')}`"


@place
def lane_removal() -> str:
    if not has_run("lane_removal_full"):
        return "Not run yet."
    titles = {
        "reconstructions": "Reconstructions",
        "offsets": "Reconstructions with a number added to one lane at a time",
        "changes": "What each lane changes in each class",
    }
    pictures = {"": "Accuracy and speed-up against lanes removed"}
    for name, title in titles.items():
        pictures |= {f"_{dropout}_{name}": f"{title}, lane dropout {dropout}" for dropout in (0.0, 0.1)}
    drawn = [f"![{title}](../../experiments/results/lane_removal_full{name}.png)" for name, title in pictures.items()]
    return "\n\n".join([lane_removal_tables(experiment("lane_removal_full")), *drawn])


def lane_removal_tables(result: Mapping[str, Any]) -> str:
    """What is left without some lanes, and whether a lane means the same in different classes."""
    runs = [run for run in result["runs"] if "removed" in run]
    meaning = [
        [
            _removal_title(run),
            f"{row['alive']} of {row['lanes']}",
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in ("same_lane", "other_lanes")),
        ]
        for run, row in zip(runs, result["rows"], strict=True)
    ]
    agreed = table_of("agreement between classes | lanes alive | of the same lane | of different lanes", meaning)
    return f"""{_removal_table(runs)}

{agreed}

{runs_line(runs)}

{commands_of(runs)}"""


@place
def prune_cifar() -> str:
    result = experiment("prune_cifar")
    rows = [
        [
            f"`{Path(run['workdir']).name}`",
            data_title(run["data"]),
            *(percent(r["test_accuracy"]) for r in run["removed"]),
        ]
        for run in result["runs"]
    ]
    table = table_of("model | data | 4 lanes | 3 | 2 | 1", rows)
    return f"{table}\n\n{measured_on(result, 'test accuracy in %, one seed each')}\n\n{_prune_command(result)}"


@place
def lane_collapse() -> str:
    result = experiment("lane_collapse_cifar_mlcn1_4x4")
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
        f"{table_of(f'setting | what it changes | lanes alive at step {steps}', rows)}\n\n"
        f"{measured_on(result, data_title(result['data']), 'mlcn1 4x4, one seed')} A lane is alive while its "
        f"`lane_spreads` over test images is above {result['alive_above']}.\n\n- `{result['command']}`"
    )


@place
def lanes_in_turn() -> str:
    result = benchmark("lanes_in_turn")
    rows = [
        [name, f"{step['seconds']:.2f}", f"{step['temporary_bytes'] / 2**20:,.0f}"]
        for name, step in result["steps"].items()
    ]
    time, memory = result["time_ratio"], result["memory_ratio"]
    batch = f"batch {result['batch']}"
    spread = f"{time['median']:.2f} ({time['min']:.2f} to {time['max']:.2f})"
    ratios = f"in turn over all held: time {spread}, memory {memory:.2f}"
    table = table_of("lanes | s per step | temporary memory, MiB", rows)
    return f"{table}\n\n{measured_on(result, result['lanes'], batch, ratios)}"


@place
def lane_pool() -> str:
    real, simulated = experiment("lane_pool_kills"), experiment("lane_pool_simulated")
    rows = [
        [
            f"{row['order']}, machines {'come and go' if row['machines_leave'] else 'stay'}",
            f"{row['hours']:.1f} ({row['least_hours']:.1f} to {row['most_hours']:.1f})",
            percent(row["lost_share"], 1),
        ]
        for row in simulated["rows"]
    ]
    rows.append(["together in step, machines stay", f"{simulated['hours_together_in_step']:.1f}", "-"])
    machines = f"{len(simulated['machines_gflops'])} machines of {min(simulated['machines_gflops'])} to "
    machines += f"{max(simulated['machines_gflops'])} GFLOP/s"
    held = real["times_taken"] - real["lanes"]
    kills = (
        f"Measured: {real['kills']} workers killed at random moments, {held} of them during training; of "
        f"{real['lanes']} lanes, {real['lanes_lost']} were lost and {real['lanes_trained_twice_at_once']} trained by "
        "two workers at once; the largest difference of a parameter from an undisturbed pool is "
        f"{real['largest_difference']:g}."
    )
    table = table_of("order in which lanes are taken | hours, mean (range) | work done again, %", rows)
    return f"""{kills}

{table}

*Simulated: {simulated["lanes"]} lanes, {machines}, {simulated["draws"]} draws; without losses \
{simulated["hours_without_any_loss"]:.1f} hours; machines that come and go are there \
{percent(simulated["present_share"], 0)} % of the time. {measured_on(real)[1:]}"""


@place
def pose() -> str:
    if not has_run("pose_full"):
        return "Not run yet."
    picture = "![Accuracy, accuracy lost and confidence after each change](../../experiments/results/pose_full.png)"
    return f"{pose_tables(experiment('pose_full'))}\n\n{picture}"


def pose_tables(result: Mapping[str, Any]) -> str:
    """Accuracy, with what the change costs, and confidence, of each model after each change of the test images."""
    changes = list(result["rows"][0]["accuracy"])
    accuracy, confidence = [], []
    for row in result["rows"]:
        title = {"plain": "plain network", "resnet": "`resnet`", "capsnet": "CapsNet"}.get(row["model"], row["model"])
        told = (f"{row['accuracy'][name]['mean']:.2f} ({row['drop'][name]['mean']:.2f})" for name in changes)
        accuracy.append([title, f"{row['megaflops']:,.0f}", row["runs"], *told])
        confidence.append([title, *(f"{row['confidence'][name]['mean']:.3f}" for name in changes)])
    return f"""{table_of(" | ".join(["test accuracy in % (points lost)", "MFLOP", "runs", *changes]), accuracy)}

{table_of(" | ".join(["mean confidence", *changes]), confidence)}

{runs_line(result["runs"])}

{commands_of(result["runs"])}"""


@place
def lanes_apart() -> str:
    if not has_run("lanes_apart_full"):
        return "Not run yet."
    picture = "![Accuracy of joined lanes](../../experiments/results/lanes_apart_full.png)"
    return f"{lanes_apart_tables(experiment('lanes_apart_full'))}\n\n{picture}"


_TOGETHER = {
    ("fashion", "together"): "with `margin_loss=per_lane`",
    ("cifar", "together"): "as configured",
    ("fashion", "alike"): "with the settings of lanes apart",
}


def lanes_apart_tables(result: Mapping[str, Any]) -> str:
    """The pairs of joined lanes and lanes trained together, and the curves beside single lanes of the same cost."""
    pairs, curves, counts = [], [], (1, 2, 4, 8, 16)
    for part in ("fashion", "cifar"):
        one, runs = result[part], [run for run in result["runs"] if run["facts"]["part"] == part]
        if not runs:
            continue
        title = data_title(runs[0]["data"])
        for between in one["differences"]:
            if between["pairs"]:
                told = f"{between['mean']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})"
                fitted, together = (f"{mean:.2f}" for mean in between["means"])
                means = [fitted, f"{mean(pair['equal'] for pair in one['pairs']):.2f}", together]
                inside = "yes" if between["inside"] else "no"
                pairs.append([title, _TOGETHER[part, between["mode"]], between["pairs"], *means, told, inside])
        for kind, points in one["curves"].items():
            at = {point["lanes"]: f"{point['accuracy']:.2f} ({point['megaflops']:,.0f})" for point in points}
            curves.append([f"{title}, joined, {kind}", *(at.get(count, "-") for count in counts)])
        at = {
            count: f"{mean(p['accuracy'] for p in same):.2f} ({same[0]['megaflops']:,.0f}), `{same[0]['lane']}`"
            for count in counts
            if (same := [point for point in one["single"] if point["lanes"] == count])
        }
        if at:
            curves.append([f"{title}, one lane of that cost", *(at.get(count, "-") for count in counts)])
    compared = (
        "test accuracy in % | lanes together | pairs | joined | joined, equal weights | together"
        " | joined - together, 95 % (Welch) | within 0.3 points"
    )
    grown = " | ".join(["test accuracy in % (MFLOP)", *(f"{count} lane{'s' * (count > 1)}" for count in counts)])
    return f"""{table_of(compared, pairs)}

{table_of(grown, curves)}

{runs_line(result["runs"])}

{commands_of(result["runs"])}"""

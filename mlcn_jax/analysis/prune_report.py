"""What each lane of trained runs is worth, as a table, a picture and JSON, and the resulting smaller run."""

import logging
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcn_jax import host
from mlcn_jax.analysis import prune
from mlcn_jax.analysis.prune import Run
from mlcn_jax.analysis.workdir import train_command
from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder, markdown, write_figure, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn.model import count_parameters
from mlcn_jax.nn.spec import spec_of
from mlcn_jax.placement import cost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger(__name__)

_MOST_TIMED = 16  # numbers of lanes
_FINE_TUNING_EPOCHS = 5  # in the command that is printed


def measure_and_prune(
    workdirs: Sequence[Path],
    *,
    order: str,
    rounds: int,
    results: Path,
    output: Path | None = None,
    keep: int | None = None,
    max_drop: float | None = None,
    data_dir: str = "",
    command: str = "",
) -> None:
    """Runs the command; its flags have been checked against each other."""
    if output:
        prune.check_unused(output)
    host.set_up_jax()
    _log.info("loading %s, and the images", ", ".join(map(str, workdirs)))
    runs = [prune.load_prunable(workdir, data_dir) for workdir in workdirs]
    if keep is not None and keep > len(runs[0].lanes):
        raise InputError(f"--keep={keep}: {workdirs[0]} has {len(runs[0].lanes)} lanes; keep 1 to {len(runs[0].lanes)}")
    make_folder(results, "results")
    about = {"command": command, **host.environment()}
    entries: list[dict[str, Any]] = []
    for workdir, run in zip(workdirs, runs, strict=True):
        entries.append({"workdir": str(workdir), **analyse(run, order, rounds)})
        print(f"{workdir}\n\n{table(entries[-1])}\n", flush=True)
    write_json(results / "prune.json", {"runs": entries, **about})
    if output:
        count = keep or fewest_lanes(entries[0], max_drop or 0.0)
        small, facts = shrink(runs[0], entries[0], count)
        accuracy = facts["ranking_accuracy"]["after"] if small.ranking_from == "validation" else None
        prune.save_run(small, output, accuracy, {**facts, **about})
        print(told(facts, output, fine_tuning(small, output)))
    _log.info("drawing prune.png")
    write_figure(draw(entries), results / "prune.png", dpi=120)
    print(f"written to {results / 'prune.json'} and {results / 'prune.png'}")


def _called(split: str, ranking_from: str) -> str:
    """What is told of `ranking` or `test`."""
    return ranking_from if split == "ranking" else split


def analyse(run: Run, order_name: str, rounds: int) -> dict[str, Any]:
    """Lanes removed alone and one after another: accuracies in [0, 1], parameters, FLOPs, milliseconds.

    A run that leaves the test set alone (`train.score_test`) has no accuracies of it.
    """
    lanes = run.lanes
    splits = {"ranking": run.ranking} | ({"test": run.test} if run.config.train.score_test else {})
    images = (f"{len(split.labels):,} {_called(name, run.ranking_from)} images" for name, split in splits.items())
    _log.info("scoring %d lanes on %s", len(lanes), " and ".join(images))
    v = {name: prune.weighted_capsules(run, split, run.config.train.part_size) for name, split in splits.items()}
    order = prune.ORDERS[order_name](v["ranking"], run.ranking.labels)
    alone = {name: prune.accuracy_without(v[name], split.labels) for name, split in splits.items()}
    curves = {name: prune.accuracy_curve(v[name], split.labels, order) for name, split in splits.items()}
    return {
        "step": run.step,
        "lanes": run.spec.lanes,
        "lane_dropout": run.spec.lane_dropout,
        "data": run.dataset,
        "ranking_from": run.ranking_from,
        "ranking_images": len(run.ranking.labels),
        "test_images": len(run.test.labels) if "test" in splits else 0,
        "removed_alone": [
            {"lane": i, "spec": lanes[i], **{f"{name}_accuracy": float(alone[name][i]) for name in splits}}
            for i in range(len(lanes))
        ],
        "order": order_name,
        "removal_order": order,
        "timed_batch": prune.TIMED_BATCH,
        "rounds": rounds,
        "removed": [
            {**{f"{name}_accuracy": curve[removed] for name, curve in curves.items()}, **costs}
            for removed, costs in enumerate(measure(run, order, rounds))
        ],
    }


def measure(run: Run, order: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Cost of the models without the first 0, 1, ... lanes of `order`; if there are many, only some are timed.

    The speed-up is the median over rounds of the full model's time divided by the smaller one's in the same round.
    """
    specs = [spec_of(run.spec, sorted(order[removed:])) for removed in range(len(order))]
    rows: list[dict[str, Any]] = []
    for spec in specs:
        lanes = [(g.count, cost.cost_of(spec, g.spec)) for g in spec.lane_groups]
        rows.append(
            {
                "lanes": spec.lanes,
                "parameters": count_parameters(spec)["total"],
                "encoder_flops_per_image": sum(count * lane.forward_flops_per_image for count, lane in lanes),
            }
        )
    if rounds:
        timed = np.unique(np.linspace(0, len(order) - 1, min(len(order), _MOST_TIMED)).round().astype(int))
        _log.info("timing %d models with fewer and fewer lanes, %d rounds", len(timed), rounds)
        params = [prune.prune_params(run.spec, run.params, sorted(order[removed:])) for removed in timed]
        seconds = prune.inference_seconds([(specs[i], p) for i, p in zip(timed, params, strict=True)], rounds)
        for i, column in zip(timed, seconds.T, strict=True):
            rows[i]["milliseconds"] = spread(1000 * column)
            rows[i]["speedup"] = spread(seconds[:, 0] / column)
    return rows


def spread(values: np.ndarray) -> dict[str, float]:
    return {name: float(of(values)) for name, of in (("median", np.median), ("min", np.min), ("max", np.max))}


def fewest_lanes(entry: dict[str, Any], max_drop: float) -> int:
    """The fewest lanes that lose at most `max_drop` percentage points on the ranking images."""
    accuracies = [row["ranking_accuracy"] for row in entry["removed"]]
    within = [removed for removed, a in enumerate(accuracies) if 100 * (accuracies[0] - a) <= max_drop + 1e-9]
    return len(accuracies) - max(within)


def shrink(run: Run, entry: dict[str, Any], count: int) -> tuple[Run, dict[str, Any]]:
    """The run with its `count` most useful lanes, and the facts about it, with the smaller model's own scores."""
    kept = sorted(entry["removal_order"][len(run.lanes) - count :])
    small = prune.prune_run(run, kept)
    before, after = entry["removed"][0], entry["removed"][len(run.lanes) - count]
    facts = {
        "pruned_from": entry["workdir"],
        **{name: entry[name] for name in ("step", "order", "ranking_from", "ranking_images", "test_images")},
        "kept_lanes": kept,
        "lanes": {"before": run.spec.lanes, "after": small.spec.lanes},
        "parameters": {"before": before["parameters"], "after": after["parameters"]},
        "ranking_accuracy": {"before": before["ranking_accuracy"], "after": small.scores(run.ranking).accuracy},
    }
    if run.config.train.score_test:
        facts["test_accuracy"] = {"before": before["test_accuracy"], "after": small.scores(run.test).accuracy}
    return small, facts


def fine_tuning(run: Run, workdir: Path) -> str:
    """The command that trains a run in `workdir` for a few more epochs.

    A run that depends on its length, such as one whose rate is zero at its end, is not longer: a new one starts from
    its weights.
    """
    changes: dict[str, Any] = {
        "train.num_steps": 0,
        "train.num_epochs": math.ceil(run.step / run.steps_per_epoch) + _FINE_TUNING_EPOCHS,
    }
    if run.config.depends_on_length:
        changes |= {"init_from": str(workdir), "train.num_epochs": _FINE_TUNING_EPOCHS}
        workdir = workdir.with_name(f"{workdir.name}_tuned")
    return train_command(run.config.replace(changes), workdir, placed=False)  # the sharding may not fit these lanes


def told(facts: dict[str, Any], output: Path, command: str) -> str:
    """The result as readable text."""
    lines = [
        f"{output}: lanes {facts['kept_lanes']} of {facts['pruned_from']} are kept",
        *(
            f"  {what}: {facts[name]['before']:.2%} before, {facts[name]['after']:.2%} after"
            for what, name in (
                (f"{facts['ranking_from']} images", "ranking_accuracy"),
                ("test images", "test_accuracy"),
            )
            if name in facts
        ),
        f"  parameters: {facts['parameters']['before']:,} before, {facts['parameters']['after']:,} after",
        f"evaluate it:       {program()} evaluate --workdir={shlex.quote(str(output))}",
        f"train it further:  {command}",
    ]
    return "\n".join(lines)


def table(entry: dict[str, Any]) -> str:
    """Both tables in Markdown: each lane removed alone, and lanes removed one after another."""
    splits = _splits(entry)
    names = [f"{_called(split, entry['ranking_from'])} accuracy" for split in splits]
    alone, further = [], []
    for row in entry["removed_alone"]:
        accuracies = [f"{row[f'{split}_accuracy']:.2%}" for split in splits]
        alone.append([row["lane"], row["spec"], *accuracies])
    for removed, row in enumerate(entry["removed"]):
        timed = [f"{row[name]['median']:.2f}" if name in row else "" for name in ("milliseconds", "speedup")]
        accuracies = [f"{row[f'{split}_accuracy']:.2%}" for split in splits]
        flops = f"{entry['timed_batch'] * row['encoder_flops_per_image'] / 1e9:.2f}"
        further.append([removed, row["lanes"], *accuracies, f"{row['parameters']:,}", flops, *timed])
    head = ["removed", "lanes", *names, "parameters", "GFLOP", "ms", "speed-up"]
    return "\n\n".join([markdown(["lane", "", *(f"{n} without it" for n in names)], alone), markdown(head, further)])


def _splits(entry: dict[str, Any]) -> list[str]:
    """The images of which an entry has accuracies."""
    return [split for split in ("ranking", "test") if f"{split}_accuracy" in entry["removed"][0]]


def draw(entries: Sequence[dict[str, Any]]) -> "Figure":
    """Each lane's effect alone; accuracy, and speed-up, against the number of removed lanes. One color per run."""
    from matplotlib.figure import Figure

    any_timed = any("speedup" in row for entry in entries for row in entry["removed"])
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    alone, accuracy, speed = figure.subplots(1, 3)
    width, tops = 0.8 / len(entries), []
    for i, entry in enumerate(entries):
        color = f"C{i}"
        name = Path(entry["workdir"]).name.replace("$", "\\$")  # or it would begin a formula
        label = f"{name}, {entry['lanes']}, lane dropout {entry['lane_dropout']:g}"
        removed = np.arange(len(entry["removed"]))
        whole = entry["removed"][0]["ranking_accuracy"]
        effects = [100 * (whole - row["ranking_accuracy"]) for row in entry["removed_alone"]]
        alone.bar(removed + (i - (len(entries) - 1) / 2) * width, effects, width, color=color)
        splits = _splits(entry)
        for split in splits:
            values = [100 * row[f"{split}_accuracy"] for row in entry["removed"]]
            style = ":" if split == "ranking" else "o-"
            accuracy.plot(removed, values, style, color=color, label=label if split == splits[-1] else None)
        timed = [m for m in removed if "speedup" in entry["removed"][m]]
        if timed:
            median, low, high = (
                [entry["removed"][m]["speedup"][which] for m in timed] for which in ("median", "min", "max")
            )
            speed.plot(timed, median, "o-", color=color)
            speed.fill_between(timed, low, high, color=color, alpha=0.2)
            tops += median
        flops = np.array([row["encoder_flops_per_image"] for row in entry["removed"]])
        speed.plot(removed, flops[0] / flops, ":", color=color)
        tops += (flops[0] / flops).tolist()
    speed.set_ylim(0, 1.2 * max(tops))  # outliers must not set the scale
    ranked_on = " or ".join(dict.fromkeys(entry["ranking_from"] for entry in entries))
    alone.axhline(0, color="gray", linewidth=1)
    alone.set_title("one lane removed alone", fontsize=10)
    alone.set_xlabel("lane")
    alone.set_ylabel(f"{ranked_on} accuracy lost, percentage points")
    accuracy.set_title(f"lanes removed, the least useful first (--order={entries[0]['order']})", fontsize=10)
    accuracy.set_ylabel(f"test accuracy, %; dotted: on {ranked_on} images")
    speed.set_title(f"inference, batches of {entries[0]['timed_batch']}, no decoder", fontsize=10)
    speed.set_ylabel(
        "speed-up, median and range; dotted: by FLOPs" if any_timed else "speed-up by FLOPs (not timed: --rounds=0)"
    )
    for axes in (accuracy, speed):
        axes.set_xlabel("lanes removed")
    for axes in (alone, accuracy, speed):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside upper center", ncols=min(3, len(entries)), fontsize=8)
    return figure

"""The results of a search: the table of its models, the best model as a config, the summary and the plots."""

import collections
import itertools
import json
import shlex
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcn_jax import host
from mlcn_jax.config import RunConfig, flat
from mlcn_jax.files import markdown, write_atomic, write_figure, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement import cost
from mlcn_jax.search import models as models_lib

if TYPE_CHECKING:
    from mlcn_jax.search.setup import Search


def step_flops(found: "Search", lanes: str) -> float:
    """FLOPs of one training step of all these lanes together."""
    spec = found.trainer.spec(lanes)
    batch_size = found.config.train.batch_size
    return float(sum(g.count * cost.cost_of(spec, g.spec).step_flops(batch_size) for g in spec.lane_groups))


def rows(found: "Search") -> list[dict[str, Any]]:
    """A row for each model, ready for JSON."""
    table, models = [], found.study.models()
    repeats = models_lib.repeats(models)
    for model in models:
        report = found.space.report(model.mix) if model.mix else []
        table.append(
            {
                "model": model.index if model.index != models_lib.BASELINE else "baseline",
                "state": model.state,
                "origin": model.origin,
                "accuracy": model.accuracies[-1] if model.accuracies else None,
                "repeats": model.score.repeats if model.score else [],
                "accuracies": model.accuracies,
                "train_seconds": model.train_seconds,
                "seconds": model.seconds,
                "step_seconds": model.score.step_seconds if model.score else None,
                "step_flops": step_flops(found, model.lanes) if model.lanes else None,
                "lanes": model.lanes,
                "repeat_of": repeats.get(model.index),
                "devices": report,
                "imbalance": found.space.imbalance(model.mix) if model.mix else None,
                "ended": model.ended,
                "reason": model.reason,
            }
        )
    return table


def write_trials(found: "Search", workdir: Path, least_seconds: float = 0.0) -> None:
    """Writes `trials.json` and `trials.md`, sorted by accuracy, unless written within the last `least_seconds`."""
    if least_seconds and time.time() - _modified(workdir / "trials.json") < least_seconds:
        return
    table = rows(found)
    write_json(workdir / "trials.json", table)
    head = ("model", "state", "from", "accuracy", "training s", "ms a step", "GFLOP", "fill", "lanes")
    lines = []
    for row in sorted(table, key=lambda row: -(row["accuracy"] or 0)):
        fills = [one["fill"] for one in row["devices"]]
        cells = (
            row["model"],
            row["state"] + (f": {_escaped(row['reason'])}" if row["reason"] else ""),
            row["origin"] + (f", repeats model {row['repeat_of']}" if row["repeat_of"] is not None else ""),
            f"{row['accuracy']:.2%}" if row["accuracy"] is not None else "",
            f"{row['train_seconds']:.1f}" if row["train_seconds"] else "",
            f"{1000 * row['step_seconds']:.1f}" if row["step_seconds"] else "",
            f"{row['step_flops'] / 1e9:.1f}" if row["step_flops"] else "",
            f"{min(fills):.0%} to {max(fills):.0%}" if fills else "",
            f"`{row['lanes']}`" if row["lanes"] else "",
        )
        lines.append(cells)
    write_atomic(workdir / "trials.md", markdown(head, lines) + "\n")


def _escaped(text: str) -> str:
    """Any text as part of one cell of a Markdown table: on one line, with `|` escaped."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def write(found: "Search", workdir: Path, test_accuracies: list[float], session: dict[str, float]) -> dict[str, Any]:
    """Writes `best_config.py`, `search.png` and `summary.json`; returns the summary.

    Args:
      found: the search; at least one of its models was trained to the end.
      workdir: the folder to write to.
      test_accuracies: of the best model, one for each repeat.
      session: `wall_seconds` of this session and the `evaluate_seconds` in it that went into training and scoring.
    """
    models, table = found.study.models(), rows(found)
    winner = models_lib.best(models)
    assert winner is not None
    complete = [row["accuracy"] for row in table if row["state"] == "complete" and row["model"] != "baseline"]
    trained = (row for row in table if row["model"] == "baseline" and row["state"] == "complete")
    baseline = next((row["accuracy"] for row in trained), None)
    drawn = [group for model in models if model.mix for group in parse_lanes(model.lanes)]
    histogram: collections.Counter[str] = collections.Counter()
    for group in drawn:
        histogram[str(group.spec)] += group.count
    summary = {
        "method": found.settings.method,
        "devices": found.settings.devices,
        "costs": found.settings.costs,
        "models": dict(collections.Counter(model.state for model in models if model.index != models_lib.BASELINE)),
        "distinct_mixes": len({row["lanes"] for row in table if row["lanes"] and row["model"] != "baseline"}),
        "best": {
            "model": winner.index,
            "lanes": winner.lanes,
            "devices": found.space.report(winner.mix),
            "validation_accuracy": winner.accuracies[-1],
            "test_accuracies": test_accuracies,
        },
        "mean_validation_accuracy": statistics.fmean(complete),
        "baseline_validation_accuracy": baseline,
        "train_seconds": sum(model.train_seconds for model in models),
        "session": session,
        "drawn_lanes": dict(sorted(histogram.items())),
        "train_images": len(found.trainer.train.labels),
        "validation_images": len(found.trainer.validation.labels),
        "num_epochs": found.settings.num_epochs,
        "num_repeats": found.settings.num_repeats,
        "data": {"name": found.trainer.dataset.name, **found.trainer.dataset.provenance},
        **host.environment(),
    }
    write_config(found, winner, workdir / "best_config.py")
    write_json(workdir / "summary.json", summary)
    draw(found, table, summary, workdir / "search.png")
    return summary


def write_config(found: "Search", winner: models_lib.Model, path: Path) -> None:
    """Writes the best model as a config that `train` accepts, with the data and training settings of the search."""
    usual = flat(RunConfig().to_dict())
    config = found.config.replace({"model.name": "mlcn", "model.lanes": winner.lanes})
    changed = {name: value for name, value in flat(config.to_dict()).items() if value != usual[name]}
    facts = {
        "model": winner.index,
        "method": found.settings.method,
        "validation_accuracy": winner.accuracies[-1],
        "epochs": found.settings.num_epochs,
        "training_images": len(found.trainer.train.labels),
        "devices": [
            {name: device[name] for name in ("device", "fill", "lanes")} for device in found.space.report(winner.mix)
        ],
        "train_it": f"mlcn_jax train --config={shlex.quote(str(path))} --workdir=FOLDER",
        "place_its_lanes": f"--config.parallel.plan=stacks --config.parallel.lane={len(found.space.buckets)}",
    }
    lines = [
        '"""The best model of a search, as a configuration for `mlcn_jax train`; FOUND says how it was found."""',
        "",
        "from mlcn_jax.config import default_config",
        "",
        "FOUND = {",  # write values, some of which come from data, only as Python literals: the file is executed
        *(f"    {name!r}: {value!r}," for name, value in json.loads(json.dumps(facts)).items()),
        "}",
        "",
        "",
        "def get_config():",
        "    config = default_config()",
        *(
            f"    config.{name} = {tuple(value) if isinstance(value, list) else value!r}"
            for name, value in changed.items()
        ),
        "    return config",
        "",
    ]
    write_atomic(path, "\n".join(lines))


def text(summary: dict[str, Any], workdir: Path) -> str:
    """The summary as text for the terminal."""
    best, baseline = summary["best"], summary["baseline_validation_accuracy"]
    tests = best["test_accuracies"]
    states = ", ".join(f"{count} {state}" for state, count in summary["models"].items())
    lines = [
        f"best of {sum(summary['models'].values())} models ({states}; {summary['distinct_mixes']} "
        f"different {'mix' if summary['distinct_mixes'] == 1 else 'mixes'}): validation accuracy "
        f"{best['validation_accuracy']:.2%}, test accuracy {statistics.fmean(tests):.2%}"
        + (f" (mean of {len(tests)})" if len(tests) > 1 else ""),
        f"mean of the models {summary['mean_validation_accuracy']:.2%}"
        + (f", baseline {baseline:.2%}" if baseline is not None else ""),
        f"lanes            {best['lanes']}",
        f"train it         {program()} train --config={shlex.quote(str(workdir / 'best_config.py'))} --workdir=FOLDER",
        f"all models       {workdir / 'trials.md'}",
        f"pictures         {workdir / 'search.png'}",
    ]
    empty = [one["device"] for one in best["devices"] if not one["lanes"]]
    if empty:
        lines.append(f"no lane fits     {', '.join(empty)}")
    return "\n".join(lines)


def best_so_far(table: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Training seconds spent, and the best accuracy of models trained to the end by then, excluding the baseline."""
    ended = sorted((row for row in table if row["ended"] and row["model"] != "baseline"), key=lambda row: row["ended"])
    spent = list(itertools.accumulate(row["train_seconds"] for row in ended))
    reached = [row["accuracy"] if row["state"] == "complete" else 0.0 for row in ended]
    return spent, list(itertools.accumulate(reached, max))


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of (cost, accuracy) pairs: each costs more, and is more accurate, than the one before it."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def draw(found: "Search", table: list[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Writes six plots: best so far by models and by time, accuracy by FLOPs and by time, fill, drawn lanes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (trials, seconds, flops), (front, fill, drawn) = figure.subplots(2, 3)
    figure.suptitle(
        f"{found.settings.method} search, {summary['data']['name']}, {summary['train_images']} images, "
        f"{summary['num_epochs']} epochs; validation accuracy in %"
    )
    spent, reached = best_so_far(table)
    done = [row for row in table if row["state"] == "complete" and row["model"] != "baseline"]
    baseline = next((row for row in table if row["model"] == "baseline" and row["state"] == "complete"), None)
    first = next((i for i, value in enumerate(reached) if value), len(reached))
    order = sorted((row for row in table if row["ended"] and row["model"] != "baseline"), key=lambda row: row["ended"])
    numbers = [i for i, row in enumerate(order, start=1) if row["state"] == "complete"]
    if numbers:
        accuracies = [100 * order[i - 1]["accuracy"] for i in numbers]
        trials.plot(numbers, accuracies, ".", color="tab:blue", alpha=0.4, label="each model")
    for axes, x, label, by in (
        (trials, range(1, len(spent) + 1), "models trained", "number of models"),
        (seconds, spent, "training seconds of all models", "training time"),
    ):
        axes.step(list(x)[first:], [100 * value for value in reached[first:]], where="post", label="best so far")
        axes.set(xlabel=label, title=f"best accuracy so far, by {by}")
        if baseline:
            axes.axhline(100 * baseline["accuracy"], color="gray", ls="--", label=f"baseline {found.settings.baseline}")
        if first < len(reached) or baseline:
            axes.legend(fontsize=8)
    trials.xaxis.get_major_locator().set_params(integer=True)  # models are counted in whole numbers
    for axes, name, scale, label, by in (
        (flops, "step_flops", 1e-9, "GFLOP of the lanes in one training step", "computation"),
        (front, "step_seconds", 1e3, "ms of one training step, measured", "time of a step"),
    ):
        if done:
            accuracies = [100 * row["accuracy"] for row in done]
            axes.plot([scale * row[name] for row in done], accuracies, "o", alpha=0.6, label="models")
        if baseline:
            axes.plot(scale * baseline[name], 100 * baseline["accuracy"], "s", color="gray", label="baseline")
        if done or baseline:
            axes.legend(fontsize=8)
        axes.set(xlabel=label, title=f"accuracy, by {by}")
    line = pareto([(1e3 * row["step_seconds"], 100 * row["accuracy"]) for row in done])
    if len(line) > 1:  # a step plot of a single point would be invisible
        front.step(*zip(*line, strict=True), where="post", color="tab:red", label="Pareto front")
        front.legend(fontsize=8)
    names = [bucket.name for bucket in found.space.buckets]
    fills = [[100 * row["devices"][d]["fill"] for row in table if row["devices"]] for d in range(len(names))]
    fill.boxplot(fills, tick_labels=names)
    fill.plot(
        range(1, len(names) + 1), [100 * one["fill"] for one in summary["best"]["devices"]], "r*", label="best model"
    )
    fill.tick_params(axis="x", rotation=45, labelsize=8)
    fill.set(title="how full each device is, % of its scarcer resource", ylim=(0, 105))
    fill.legend(fontsize=8, loc="lower right")
    counts = summary["drawn_lanes"]
    drawn.bar(range(len(counts)), list(counts.values()))
    drawn.set_xticks(range(len(counts)), list(counts), rotation=90, fontsize=7 if len(counts) < 30 else 5)
    drawn.set(title="how often each lane is in the models")
    drawn.yaxis.get_major_locator().set_params(integer=True)
    write_figure(figure, path, dpi=110)

"""How good the mixes are that devices allow: random searches over FLOPs, memory and number of devices.

    python -m experiments.nas_sweeps --config=configs/nas_cifar.py --workdir=runs/nas_flops --sweep=flops
    python -m experiments.nas_sweeps --config=configs/nas_cifar.py --workdir=runs/nas_memory --sweep=memory
    python -m experiments.nas_sweeps --config=configs/nas_cifar.py --workdir=runs/nas_devices --sweep=devices

As figures 6.2 to 6.4 of the thesis: FLOPs of 1, 2, 4 and 8 baselines over 8 devices; memory of 2, 4, 8 and 12 twelfths
of what unlimited mixes take at 8 baselines, since lanes take less here than there; 4, 8, 16 and 32 devices that share 8
baselines. Each point is a search in a folder of its own and is not repeated. On a small machine take a smaller baseline
and few images: --config.search.baseline=mlcn2:w1d1*16 --config.search.num_images=2000 --config.search.num_epochs=3
--config.search.num_repeats=1 --config.search.num_models=16. Writes `experiments/results/nas_SWEEP.json` and `.png`.
"""

import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from experiments import REPOSITORY, RESULTS
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.search import run, setup
from mlcn_jax.search import settings as settings_lib

SWEEPS = {"flops": (1, 2, 4, 8), "memory": (2, 4, 8, 12), "devices": (4, 8, 16, 32)}
_DEVICES, _BASELINES, _TWELFTHS = 8, 8, 12


def define(values: flags.FlagValues) -> None:
    config_flags.DEFINE_config_file(
        "config", str(REPOSITORY / "configs" / "nas_cifar.py"), "A search's config.", flag_values=values
    )
    flags.DEFINE_string("workdir", "", "Folder of the searches, one a point.", flag_values=values)
    flags.DEFINE_enum("sweep", "flops", list(SWEEPS), "What differs from point to point.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir:
        raise InputError("give --workdir=FOLDER")
    try:
        fields = values.config.to_dict()
    except OSError as error:  # of the file, kept until now
        raise InputError(f"--config: {error}") from error
    config, settings = setup.read_config(fields)
    sweep, workdir = values.sweep, Path(values.workdir).expanduser()
    host.set_up_jax(least_seconds=0.1)
    programs: dict[tuple, Any] = {}
    points: list[dict[str, Any]] = []
    for value in SWEEPS[sweep]:
        text = describe(sweep, value, config, settings)
        there = dataclasses.replace(settings, devices=text, name=f"{settings.name} {sweep} {value}")
        points.append(search_at(config, there, workdir / f"{sweep}-{value}", programs))
        points[-1]["value"] = value
        result = {
            "sweep": sweep,
            "points": points,
            "search": dataclasses.asdict(settings) | {"storage": ""},
            "batch_size": config.train.batch_size,
            "data": config.data.name,
            **host.environment(),
        }
        write_json(RESULTS / f"nas_{sweep}.json", result)
        draw(result, RESULTS / f"nas_{sweep}.png")
    print(told(result))


def describe(sweep: str, value: int, config: RunConfig, settings: settings_lib.SearchSettings) -> str:
    """The devices of a point, as text."""
    if sweep == "flops":
        return f"flops={value / _DEVICES}x*{_DEVICES}"
    if sweep == "devices":
        return f"flops={_BASELINES / value}x*{value}"
    flops, most = f"flops={_BASELINES / _DEVICES}x", 2**40
    space = setup.make_space(config, dataclasses.replace(settings, devices=f"memory=1TiB {flops}*{_DEVICES}"))
    rng = random.Random(settings.seed)
    taken = statistics.fmean(row["memory_bytes"] for _ in range(100) for row in space.report(space.draw(rng)))
    lane_mib, head_mib = taken * value / _TWELFTHS / 2**20, (most - space.buckets[0].memory_bytes) / 2**20
    first = f"memory={lane_mib + head_mib:.1f}MiB {flops}"  # it also holds the decoder
    return f"{first}, memory={lane_mib:.1f}MiB {flops}*{_DEVICES - 1}"


def search_at(
    config: RunConfig, settings: settings_lib.SearchSettings, folder: Path, programs: dict[tuple, Any]
) -> dict[str, Any]:
    """A search at one point."""
    summary = run.run(config, settings, folder, programs)
    rows = json.loads((folder / "trials.json").read_text())
    done = [row for row in rows if row["state"] == "complete" and row["model"] != "baseline"]
    return {
        "devices": settings.devices,
        "accuracies": [row["accuracy"] for row in done],
        "step_flops": statistics.fmean(row["step_flops"] for row in done),
        "fill": statistics.fmean(one["fill"] for row in done for one in row["devices"]),
        "baseline": summary["baseline_validation_accuracy"],
        "best": summary["best"],
        "train_seconds": summary["train_seconds"],
    }


def told(result: dict[str, Any]) -> str:
    """The points as Markdown."""
    lines = [f"| {result['sweep']} | models | mean | best | its test accuracy | mean fill |", "|" + "---|" * 6]
    for point in result["points"]:
        accuracies = point["accuracies"]
        lines.append(
            f"| {point['value']} | {len(accuracies)} | {statistics.fmean(accuracies):.2%} | {max(accuracies):.2%} | "
            f"{statistics.fmean(point['best']['test_accuracies']):.2%} | {point['fill']:.0%} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """A box of all models at each point, their mean and the best."""
    from matplotlib.figure import Figure

    labels = {
        "flops": "FLOPs of a step, in baselines",
        "memory": "memory of each device, twelfths of what unlimited mixes take",
        "devices": "devices that share 8 baselines",
    }
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    points = result["points"]
    axes.boxplot(
        [[100 * a for a in point["accuracies"]] for point in points],
        tick_labels=[str(point["value"]) for point in points],
        showmeans=True,
    )
    axes.plot(range(1, len(points) + 1), [100 * max(point["accuracies"]) for point in points], "r*-", label="best")
    if points[0]["baseline"]:
        label = f"baseline {result['search']['baseline']}"
        axes.axhline(100 * points[0]["baseline"], color="gray", ls="--", label=label)
    axes.set(
        xlabel=labels[result["sweep"]],
        ylabel="validation accuracy, %",
        title=f"{result['data']}, {result['search']['num_models']} models a point, {result['search']['method']}",
    )
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    launch_script(define, main)

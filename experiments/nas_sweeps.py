"""How good the mixes are that devices allow: random searches over FLOPs, memory and number of devices.

    python -m experiments.nas_sweeps --sweep=flops --workdir=runs/nas_flops --config.data.dir=DIR
    python -m experiments.nas_sweeps --sweep=memory --workdir=runs/nas_memory --config.data.dir=DIR
    python -m experiments.nas_sweeps --sweep=devices --workdir=runs/nas_devices --config.data.dir=DIR

As figures 6.2 to 6.4 of the thesis: CIFAR-10, published lanes, 64 models of 4 trainings a point. Each device has FLOPs
and memory of its own, so models grow with the number of devices, as accuracy does in figure 6.4. FLOPs of 1, 2, 4 and 8
baselines (4 lanes of width 2 and depth 4) on each of 8 devices of 12 GiB; memory of 2, 4, 8 and 12 GiB on each of 8
devices with 8 baselines; 4, 8, 16 and 32 devices with 8 baselines and 12 GiB. Figure 6.5, the best model so far, is the
right half of the picture. Scores are of validation images, the thesis's of test images.

--config.search.costs=published
    Lanes take what the thesis's formulas say (`space.make_space`). Then 12 GiB hold at most five lanes, and 2 GiB none:
    that point of the memory sweep stays empty, though figure 6.3 has it (docs/differences.md). With exact costs lanes
    need so little that 2 GiB limit nothing, so memory is in twelfths of what unlimited mixes take.
--shared
    All devices together have these FLOPs, so that models do not grow with their number.

EFLOP (1e18) of the training steps of each point, counted by the cost model (`--count` prints them and trains nothing);
one takes 28 hours at a sustained 10 TFLOP/s:

| sweep | exact costs | published costs | shared, exact costs |
| flops | 0.18, 0.36, 0.72, 1.44 | 0.36, 0.49, 0.50, 0.50 | 0.02, 0.05, 0.09, 0.18 |
| memory | 0.19, 0.45, 1.03, 1.39 | 0.00, 0.19, 0.35, 0.50 | 0.02, 0.07, 0.13, 0.17 |
| devices | 0.72, 1.44, 2.88, 5.76 | 0.24, 0.50, 0.98, 1.96 | 0.18, 0.18, 0.18, 0.18 |

So this is for GPUs. On a small machine take a smaller baseline, fewer images and fewer models, such as
--config.search.baseline=mlcn2:w1d1*2 --config.search.num_images=2000 --config.search.num_epochs=3
--config.search.num_repeats=1 --config.search.num_models=16.

Each point is a search in a folder of its own. The same command goes on where it was stopped, and repeats nothing that
is finished. Writes `experiments/results/nas_SWEEP.json` and `.png`, with `_published` or `_shared` after SWEEP; the
date is that of the newest training.
"""

import dataclasses
import datetime
import itertools
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
from mlcn_jax.placement import cost
from mlcn_jax.search import propose, run, setup
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search.space import NoLaneFits
from mlcn_jax.search.trials import Trainer

SWEEPS = {"flops": (1, 2, 4, 8), "memory": (2, 4, 8, 12), "devices": (4, 8, 16, 32)}
_DEVICES, _BASELINES, _GIB = 8, 8, 12  # where a sweep does not vary them


def define(values: flags.FlagValues) -> None:
    config_flags.DEFINE_config_file(
        "config", str(REPOSITORY / "configs" / "nas_cifar.py"), "A search's config.", flag_values=values
    )
    flags.DEFINE_string("workdir", "", "Folder of the searches, one a point.", flag_values=values)
    flags.DEFINE_enum("sweep", "flops", list(SWEEPS), "What differs from point to point.", flag_values=values)
    flags.DEFINE_bool("shared", False, "FLOPs are those of all devices together.", flag_values=values)
    flags.DEFINE_bool("count", False, "Only print how many FLOPs the points take.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir and not values.count:
        raise InputError("give --workdir=FOLDER, or --count to train nothing")
    try:
        fields = values.config.to_dict()
    except OSError as error:  # of the file, kept until now
        raise InputError(f"--config: {error}") from error
    config, settings = setup.read_config(fields)
    if settings.method != "random":
        raise InputError(f"search.method is {settings.method!r}, but the sweeps are of random searches: give random")
    sweep, workdir = values.sweep, Path(values.workdir).expanduser()
    there = {value: at_point(sweep, value, config, settings, values.shared) for value in SWEEPS[sweep]}
    if values.count:
        steps = Trainer(config, settings.num_epochs, settings.num_repeats, settings.num_images).steps_per_epoch
        for value, one in there.items():
            print(f"{sweep} {value}: {planned_flops(config, one, steps):.3g} FLOP, {one.devices}", flush=True)
        return
    host.set_up_jax(least_seconds=0.1)
    programs: dict[tuple, Any] = {}
    points: list[dict[str, Any]] = []
    name = f"nas_{sweep}" + "_published" * (settings.costs == "published") + "_shared" * values.shared
    for value, one in there.items():
        points.append({"value": value, **search_at(config, one, workdir / f"{sweep}-{value}", programs)})
        result = {
            "sweep": sweep,
            "shared": values.shared,
            "points": points,
            "search": dataclasses.asdict(settings) | {"storage": ""},
            "batch_size": config.train.batch_size,
            "data": config.data.name,
            "validation_fraction": config.data.validation_fraction,
            "date": max((point["date"] for point in points if "date" in point), default=None),
            **host.environment(),
        }
        write_json(RESULTS / f"{name}.json", result)
        draw(result, RESULTS / f"{name}.png")
    print(told(result))


def at_point(
    sweep: str, value: int, config: RunConfig, settings: settings_lib.SearchSettings, shared: bool
) -> settings_lib.SearchSettings:
    """The search at one point of a sweep."""
    count = value if sweep == "devices" else _DEVICES
    baselines = value if sweep == "flops" else _BASELINES
    flops = f"flops={baselines / (count if shared else 1):g}x"
    devices = f"memory={value if sweep == 'memory' else _GIB}GiB {flops}*{count}"
    if sweep == "memory" and settings.costs == "exact":
        devices = _twelfths(value, flops, config, settings)
    return dataclasses.replace(settings, devices=devices, name=f"{settings.name} {sweep} {value}")


def _twelfths(value: int, flops: str, config: RunConfig, settings: settings_lib.SearchSettings) -> str:
    """Devices with so many twelfths of the memory that random mixes take where only FLOPs limit them."""
    space = setup.make_space(config, dataclasses.replace(settings, devices=f"memory=1TiB {flops}*{_DEVICES}"))
    rng = random.Random(settings.seed)
    taken = statistics.fmean(row["memory_bytes"] for _ in range(100) for row in space.report(space.draw(rng)))
    lane_mib, head_bytes = taken * value / _GIB / 2**20, 2**40 - space.buckets[0].memory_bytes
    for _ in range(2):  # the first device also holds the decoder, whose size depends on how many lanes there can be
        first = f"memory={lane_mib + head_bytes / 2**20:.2f}MiB {flops}"
        devices = f"{first}, memory={lane_mib:.2f}MiB {flops}*{_DEVICES - 1}"
        space = setup.make_space(config, dataclasses.replace(settings, devices=devices))
        head_bytes = lane_mib * 2**20 + head_bytes - space.buckets[0].memory_bytes
    return devices


def planned_flops(config: RunConfig, settings: settings_lib.SearchSettings, steps_per_epoch: int) -> float:
    """FLOPs of all training steps of a random search, of its models and the baseline; 0 if no lane fits."""
    try:
        plan = propose.Plan(settings.seed, setup.make_space(config, settings))
    except NoLaneFits:
        return 0.0
    models = [settings.baseline, *(plan.of(index)[0].lanes for index in range(settings.num_models))]
    batch_size, total = config.train.batch_size, 0
    for lanes in models:
        spec = config.replace({"model.name": "mlcn", "model.lanes": lanes}).model_spec(*config.data.shape())
        total += batch_size * cost.decoder_step_flops(spec)
        for group in spec.lane_groups:
            lane = cost.cost_of(spec, group.spec)
            total += group.count * lane.step_flops(batch_size)
    return float(total) * steps_per_epoch * settings.num_epochs * settings.num_repeats


def search_at(
    config: RunConfig, settings: settings_lib.SearchSettings, folder: Path, programs: dict[tuple, Any]
) -> dict[str, Any]:
    """A search at one point, whose last model ended on `date` (UTC); without models if no lane fits."""
    try:
        setup.make_space(config, settings)
    except NoLaneFits as error:
        return {"devices": settings.devices, "accuracies": [], "reason": str(error)}
    summary = run.run(config, settings, folder, programs)
    rows = json.loads((folder / "trials.json").read_text())
    done = [row for row in rows if row["state"] == "complete" and row["model"] != "baseline"]
    return {
        "devices": settings.devices,
        "date": datetime.datetime.fromtimestamp(max(row["ended"] for row in done), datetime.UTC).date().isoformat(),
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
        if not accuracies:
            lines.append(f"| {point['value']} | 0, no lane fits | - | - | - | - |")
            continue
        lines.append(
            f"| {point['value']} | {len(accuracies)} | {statistics.fmean(accuracies):.2%} | {max(accuracies):.2%} | "
            f"{statistics.fmean(point['best']['test_accuracies']):.2%} | {point['fill']:.0%} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Left a box of all models at each point, their mean and the best; right the best of the first models."""
    from matplotlib.figure import Figure

    whose, search = ("all devices together" if result["shared"] else "each device"), result["search"]
    unit = "GiB" if search["costs"] == "published" else "twelfths of what unlimited mixes take"
    labels = {
        "flops": f"FLOPs of {whose}, in baselines",
        "memory": f"memory of each device, {unit}",
        "devices": f"devices; FLOPs of {whose}: {_BASELINES} baselines",
    }
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = [point for point in result["points"] if point["accuracies"]]
    if points:
        reached = [[100 * a for a in itertools.accumulate(point["accuracies"], max)] for point in points]
        names = [str(point["value"]) for point in points]
        boxes = [[100 * a for a in point["accuracies"]] for point in points]
        left.boxplot(boxes, tick_labels=names, showmeans=True)
        left.plot(range(1, len(points) + 1), [best[-1] for best in reached], "r*-", label="best")
        if points[0]["baseline"]:
            label = f"baseline {search['baseline']}"
            left.axhline(100 * points[0]["baseline"], color="gray", ls="--", label=label)
        for name, best in zip(names, reached, strict=True):
            right.step(range(1, len(best) + 1), best, where="post", label=name)
        left.legend()
        right.legend(title=result["sweep"])
    left.set(xlabel=labels[result["sweep"]], ylabel="validation accuracy, %")
    right.set(xlabel="models trained", ylabel="best validation accuracy so far, %")
    right.xaxis.get_major_locator().set_params(integer=True)  # models are counted in whole numbers
    images = f"{search['num_images']:,} images" if search["num_images"] else "all training images"
    times = "once" if search["num_repeats"] == 1 else f"{search['num_repeats']} times"
    figure.suptitle(
        f"{result['data']}, {images}, {result['validation_fraction']:.0%} of them for validation; {search['costs']} "
        f"costs; {search['num_models']} models a point, each trained {times} for {search['num_epochs']} epochs",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    launch_script(define, main)

"""Whether unequal lanes classify better than equal ones of the same cost, and whether search finds those that do.

    python -m experiments.unequal_lanes --workdir=runs/unequal_lanes

CIFAR-10 with 10,000 validation images, 4 epochs, models whose training step takes the FLOPs of `resnet:w2d1*4`, less at
most 5 % (equal lanes: 10 %). Parts: `resnet`, lanes of that kind, with the recipe of `configs/resnet_cifar.py`;
`kinds`, resnet and mlcn2 lanes, without what mlcn2 lanes do not allow (growing images, and lanes that each see an image
in a way of their own). Arms of a part:

* `given`: the equal lanes that are the unit of cost;
* `equal`: of all mixes of two or more equal lanes, each trained once, the best on validation images;
* `random`: another random mix of unequal lanes for each seed;
* `halving`, `tpe`: what these searches find with as much training as 24 models take.

The models found are trained afresh, with seeds that no search has used, before they are compared; those of `random` are
not selected at all. Test images are compared, which chose nothing; validation images did, so their accuracies, told
beside, are a little too good for selected arms. A pair is two models of one seed, which see the images in the same
order. Intervals of 95 % are bootstrapped over pairs and over test images, both drawn with replacement. A difference of
0.5 points should be visible: whether the interval is narrow enough for that, 0.5 to each side, is told.

By the cost model, a training takes 0.05 PFLOP in `resnet` and 0.07 in `kinds`, and there are 8 of each arm and some 70
for the searches: 5 PFLOP and 7 PFLOP, 9.5 h and 13 h at 150 GFLOP/s. `--arms` chooses, so that two processes, each with
a workdir of its own, can share the work. What was interrupted goes on; what has ended, in the workdir or in the results
that are kept with the code, is not run again. `smoke` takes a step of each. Writes `unequal_lanes_SCALE` as JSON,
Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`.

Source: for the bootstrap, Efron and Tibshirani 1993 (An introduction to the bootstrap).
"""

import base64
import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from jaxtyping import Bool

from configs import resnet_cifar
from experiments.repeated_report import (
    SMOKE,
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    markdown,
    select,
    spread,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Diverged
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.capsules import lengths
from mlcn_jax.search import run as search_run
from mlcn_jax.search import setup
from mlcn_jax.search.settings import SearchSettings
from mlcn_jax.search.space import Space
from mlcn_jax.search.trials import Trainer
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.trained import load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1, num_train=1000, num_test=100), "full": Scale("full", 4)}
PARTS = {"resnet": "resnet", "kinds": "resnet,mlcn2"}
SEARCHES = ("halving", "tpe")
ARMS = ("given", "equal", "random", *SEARCHES)
GIVEN = "resnet:w2d1*4"
VISIBLE = 0.5  # points
_MODELS = {"halving": 48, "tpe": 24}  # halving stops two thirds of its models after 1 epoch, and trains half as much
_FIRST_SEED = 100  # of the runs that are compared; the searches have 0
_FULL = 0.9  # share of the FLOPs that a mix of equal lanes takes at least
_DRAWS = 10_000  # of the bootstrap


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    values.set_default("repeats", 8)
    flags.DEFINE_list("parts", ["resnet"], f"Which of {', '.join(PARTS)}.", flag_values=values)
    flags.DEFINE_list("arms", list(ARMS), f"Which of {', '.join(ARMS)}.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "unequal_lanes", SCALES, ("parts", "arms")), parts=values.parts, arms=values.arms)


def run(request: Request, *, parts: Sequence[str], arms: Sequence[str]) -> int:
    """Searches and trains what has not been yet, reports after each training, and returns the exit code."""
    parts, arms = chosen("parts", parts, PARTS), chosen("arms", arms, ARMS)
    host.set_up_jax(least_seconds=0.1)
    path = request.workdir / "models.json"
    found = read_json(path) if path.exists() else {}
    add_kept_models(found, request.scale.name)
    for part in parts:
        for arm in arms:
            if arm == "random" or arm not in found.setdefault(part, {}):
                found[part][arm] = models_of(request, part, arm)
                request.workdir.mkdir(parents=True, exist_ok=True)
                write_json(path, found)
    seeds = range(request.repeats)
    runs = [{"part": part, "arm": arm, "seed": seed} for part in parts for seed in seeds for arm in arms]
    series = Series(
        request,
        "unequal_lanes",
        VERSION,
        functools.partial(configure_run, request.directories, found),
        True,
        measure,
        kept_results("unequal_lanes", request.scale.name),
    )
    return carry_out(series, runs, lambda records: text(summarise(records)), functools.partial(report, found))


def add_kept_models(found: dict[str, dict[str, list[str]]], scale: str) -> None:
    """Adds the lanes of the parts and arms in the results kept with the code, to which other processes may add."""
    path = kept_results("unequal_lanes", scale)
    stored = read_json(path) if path.exists() else {}
    for part, arms in stored["models"].items() if stored.get("version") == VERSION else ():
        found[part] = arms | found.get(part, {})


def models_of(request: Request, part: str, arm: str) -> list[str]:
    """The lanes of an arm: one model for all seeds, or one for each; searches what has to be found."""
    if arm == "given":
        return [GIVEN]
    config, settings = search_of(request.directories, part, arm, request.scale.name == SMOKE)
    if arm == "random":
        return random_mixes(setup.make_space(config, settings), request.repeats)
    folder = request.workdir / "searches" / f"{part}-{arm}"
    if arm == "equal":
        return [best_of_equal(config, settings, folder)]
    return [search_run.run(config, settings, folder)["best"]["lanes"]]


def search_of(directories: Mapping[str, str], part: str, arm: str, smoke: bool) -> tuple[RunConfig, SearchSettings]:
    """The search of an arm, and the run that its models have."""
    epochs = SCALES[SMOKE if smoke else "full"].num_epochs
    settings = SearchSettings(
        devices="flops=1x",
        kinds=PARTS[part],
        max_width=4,
        max_depth=4,
        baseline=GIVEN,
        method=arm if arm in SEARCHES else "random",
        num_models=2 if smoke else _MODELS.get(arm, 1),
        num_epochs=epochs,
        num_images=1000 if smoke else 0,
        name=f"{part} {arm}",
    )
    return recipe(directories, part).replace({"train.num_epochs": epochs}), settings


def recipe(directories: Mapping[str, str], part: str) -> RunConfig:
    """The run of a part, but for its lanes, seed and epochs."""
    config = RunConfig.from_dict(resnet_cifar.get_config().to_dict())
    changes: dict[str, Any] = {
        "data.dir": directories["cifar10"],
        "data.validation_fraction": 0.2,
        "data.split_seed": 0,
        "model.decoder": [128, 256],
        "train.checkpoint_every": 0,  # after each epoch: a lane of this kind is calibrated and scored each time
    }
    if part == "kinds":
        changes |= {"data.augment_lanes": False, "train.image_sizes": "", "model.margin_loss": "per_lane_sum"}
    return config.replace(changes)


def equal_mixes(space: Space) -> list[str]:
    """Every mix of two or more equal lanes that fits and takes most of the FLOPs."""
    (bucket,) = space.buckets
    counts = [int(bucket.limit * (1 + 1e-9) / load) for load in bucket.loads]
    return [
        space.text(((lane,) * count,))
        for lane, count in enumerate(counts)
        if count > 1 and bucket.fill([lane] * count) >= _FULL
    ]


def random_mixes(space: Space, count: int) -> list[str]:
    """So many different mixes of unequal lanes; the first of them are the same for any count."""
    rng, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        mix = space.draw(rng)
        if len(set(mix[0])) > 1:
            found[space.text(mix)] = None
    return list(found)


def best_of_equal(config: RunConfig, settings: SearchSettings, folder: Path) -> str:
    """The mix of equal lanes that is best on the validation images; each is trained once, and kept when it has been."""
    trainer = Trainer(config, settings.num_epochs, settings.num_repeats, settings.num_images)
    accuracies: dict[str, float] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for lanes in equal_mixes(setup.make_space(config, settings)):
        stored = folder / f"{lanes.replace(':', '_').replace('*', 'x')}.json"
        if not stored.exists():
            try:
                *_, score = trainer.evaluate(lanes)
                about = {"validation_accuracy": score.accuracy}
            except Diverged as error:
                about = {"validation_accuracy": 0.0, "failed": str(error)}
            write_json(stored, {"lanes": lanes, **about})
        accuracies[lanes] = read_json(stored)["validation_accuracy"]
    return max(accuracies, key=accuracies.__getitem__)


def configure_run(
    directories: Mapping[str, str],
    models: Mapping[str, Mapping[str, Sequence[str]]],
    part: str,
    arm: str,
    seed: int,
) -> RunConfig:
    """The run of a seed of an arm."""
    lanes = models[part][arm]
    changes = {"model.lanes": lanes[seed % len(lanes)], "train.seed": _FIRST_SEED + seed}
    return recipe(directories, part).replace(changes)


def measure(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """More of a run that has ended: its lanes, and which test images it classifies correctly, as packed bits."""
    trained, config = load_trained(folder), RunConfig.from_dict(read_json(folder / "config.json"))
    test = config.data.load().test
    v = class_capsules(trained.spec, trained.params, test, config.train.batch_size)
    correct = np.argmax(np.asarray(lengths(v)), axis=-1) == test.labels
    return {
        "lanes": str(config.model["lanes"]),
        "test_accuracy": 100 * summary["test_accuracy"],
        "correct": base64.b64encode(np.packbits(correct)).decode(),
    }


def correct_of(records: Records) -> Bool[np.ndarray, "seeds images"]:
    """Which test images the runs classify correctly, in the order of the records."""
    images = records[0]["data"]["test_images"]
    rows = [np.frombuffer(base64.b64decode(record["correct"]), np.uint8) for record in records]
    return np.stack([np.unpackbits(row)[:images].astype(bool) for row in rows])


def bootstrap(
    one: Bool[np.ndarray, "seeds images"], other: Bool[np.ndarray, "seeds images"], draws: int = _DRAWS
) -> dict[str, Any]:
    """Accuracy of one less that of the other, in points, and its 95 % interval (percentiles)."""
    difference = one.astype(np.float32) - other
    rng, (seeds, images) = np.random.default_rng(0), difference.shape
    means = np.empty(draws)
    for draw in range(draws):
        by_seed = np.bincount(rng.integers(seeds, size=seeds), minlength=seeds)
        by_image = np.bincount(rng.integers(images, size=images), minlength=images)
        means[draw] = (by_seed @ difference) @ by_image / (seeds * images)
    low, high = np.quantile(means, (0.025, 0.975))
    visible = bool(high - low <= 2 * VISIBLE / 100)
    found = {"mean": difference.mean(), "low": low, "high": high}
    return {name: 100 * float(value) for name, value in found.items()} | {"pairs": seeds, "visible": visible}


def summarise(records: Records) -> dict[str, list[dict[str, Any]]]:
    """For each part: a row for each arm, with its difference from the best equal lanes over the seeds of both."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        by_arm = {
            arm: {one["facts"]["seed"]: one for one in select(records, part=part, arm=arm) if "failed" not in one}
            for arm in ARMS
        }
        for arm, mine in by_arm.items():
            if not mine:
                continue
            both = sorted(mine.keys() & by_arm["equal"].keys()) if arm != "equal" else []
            row = {
                "arm": arm,
                "lanes": sorted({one["lanes"] for one in mine.values()}),
                **{name: spread(list(mine.values()), name) for name in ("test_accuracy", "validation_accuracy")},
                "over_equal": None,
            }
            if len(both) > 1:
                runs = [[of[seed] for seed in both] for of in (mine, by_arm["equal"])]
                row["over_equal"] = bootstrap(*map(correct_of, runs))
            rows.setdefault(part, []).append(row)
    return rows


def text(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A table of the arms of each part (`summarise`) as Markdown."""
    header = ("part", "arm", "lanes", "runs", "test", "validation", "test - equal lanes', 95 %", "0.5 points visible")
    lines = []
    for part, rows in found.items():
        for row in rows:
            between, lanes = row["over_equal"], row["lanes"]
            told = f"{between['mean']:+.2f} ({between['low']:+.2f} to {between['high']:+.2f})" if between else "-"
            lines.append(
                (
                    part,
                    row["arm"],
                    lanes[0] if len(lanes) == 1 else f"{len(lanes)} mixes",
                    str(row["test_accuracy"]["runs"]),
                    *(f"{row[name]['mean']:.2f}" for name in ("test_accuracy", "validation_accuracy")),
                    told,
                    ("yes" if between["visible"] else "no") if between else "-",
                )
            )
    return markdown(header, lines)


def draw(records: Records, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Test accuracy of every run, and the means, by arm; the differences from the best equal lanes beside."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 * max(1, len(found)) + 1), layout="constrained")
    for (part, rows), (left, right) in zip(
        found.items(), figure.subplots(max(1, len(found)), 2, squeeze=False), strict=False
    ):
        for x, row in enumerate(rows):
            mine = select(records, part=part, arm=row["arm"])
            values = [one["test_accuracy"] for one in mine if "failed" not in one]
            left.plot([x] * len(values), values, "o", ms=4, alpha=0.6)
            left.plot([x - 0.25, x + 0.25], [statistics.fmean(values)] * 2, "k-")
            if between := row["over_equal"]:
                bar = [[between["mean"] - between["low"]], [between["high"] - between["mean"]]]
                right.errorbar([x], [between["mean"]], yerr=bar, fmt="o", capsize=4)
        for axes in (left, right):
            axes.set_xticks(range(len(rows)), [row["arm"] for row in rows])
        left.set(ylabel="test accuracy, %", title=f"{part}: {PARTS[part]} lanes of equal cost")
        right.axhline(0, color="gray", lw=0.8)
        right.set(ylabel="points over the best equal lanes, 95 %", title="paired, bootstrapped")
    return figure


def report(models: dict[str, dict[str, list[str]]], series: Series) -> None:
    """Writes table and figure of all that has ended, in other processes, too."""
    add_kept_models(models, series.scale.name)
    records = series.records()
    found = summarise(records)
    lines = [
        f"FLOPs of a training step as of {GIVEN}; test accuracy in %, of models trained afresh with seeds that no "
        "search used; bootstrapped over pairs of equal seed and over test images.",
        *caption(series, records),
    ]
    figure = draw(records, found)
    draw_caption(figure, lines)
    write(series, "unequal_lanes", {"models": dict(models), "parts": found}, text(found), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

"""Whether unequal lanes classify better than equal ones of the same cost, and whether search finds those that do.

    python -m experiments.unequal_lanes --workdir=runs/unequal_lanes

CIFAR-10, 4 epochs of 40,000 of the 50,000 training images; the others are validation images, and the epoch that is best
on them counts. A training step of any model takes the FLOPs of `resnet:w2d1*4`, less at most 5 % (equal lanes:
10 %). Parts: `resnet`, lanes of that kind, with the recipe of `configs/resnet_cifar.py`; `kinds`, resnet and mlcn2
lanes, without what mlcn2 lanes do not allow (growing images, and lanes that each see an image in a way of their own).
Arms of a part:

* `given`: the equal lanes that are the unit of cost;
* `drawn`: mixes of two or more equal lanes, another one for each seed as far as there are so many;
* `equal`: of all such mixes, each trained once, the best on validation images;
* `random`: another random mix of unequal lanes for each seed;
* `halving`, `tpe`: what these searches find with as many epochs of training as 24 models take. In `resnet`, `halving`
  first ranks models after an epoch at 20 pixels, since images grow later; they are scored at full size.

The models found are trained afresh, with seeds that no search has used, before they are compared; those of `random` and
`drawn` are not selected at all. Test images are compared, which chose nothing; validation images did, so their
accuracies, told beside, are a little too good for selected arms. A pair is two models of one seed, which see the images
in the same order. Compared are all arms with `equal`, `random` with `drawn` (unequal lanes as such) and the searches
with `random` (what searching adds). Intervals of 95 %, each by itself, are for other pairs and other test images
(`interval`). A difference of 0.5 points should be visible: whether the interval is narrow enough for that, 0.5 to each
side, is told.

By the cost model, a training takes 0.05 PFLOP in `resnet` and 0.07 in `kinds`, and there are 8 of each arm and some 70
for the searches: 6 PFLOP and 8 PFLOP, 11 h and 15 h at 150 GFLOP/s. `--arms` chooses, so that two processes, each with
a workdir of its own, can share the work. `--minutes` is for searches and trainings together, but a mix of equal lanes
that is in training is trained to its end, which takes some more. What was interrupted goes on; what has ended, in the
workdir or in the results that are kept with the code, is not run again. `smoke` takes a step of each. Writes
`unequal_lanes_SCALE` as JSON, Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`.

Source: for the intervals, Owen 2007 (The pigeonhole bootstrap, Annals of Applied Statistics 1): the variance of a mean
over pairs and images, which a bootstrap of both overestimates.
"""

import base64
import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
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
    place,
    select,
    spread,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Diverged
from mlcn_jax.files import markdown, read_json, write_json
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
ARMS = ("given", "drawn", "equal", "random", *SEARCHES)
OVER = {"equal": ("given", "random", *SEARCHES), "drawn": ("random",), "random": SEARCHES}  # arms compared with each
GIVEN = "resnet:w2d1*4"
VISIBLE = 0.5  # points
_MODELS = {"halving": 54, "tpe": 24}  # of 54, 18 go on after 1 epoch and 6 after 3: as many epochs as 24 to the end
_FIRST_SEED = 100  # of the runs that are compared; the searches have 0
_FULL = 0.9  # share of the FLOPs that a mix of equal lanes takes at least


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    values.set_default("repeats", 8)
    flags.DEFINE_list("parts", list(PARTS), f"Which of {', '.join(PARTS)}.", flag_values=values)
    flags.DEFINE_list("arms", list(ARMS), f"Which of {', '.join(ARMS)}.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "unequal_lanes", SCALES, ("parts", "arms")), parts=values.parts, arms=values.arms)


def run(request: Request, *, parts: Sequence[str], arms: Sequence[str]) -> int:
    """Searches and trains what has not been yet, reports after each training, and returns the exit code."""
    parts, arms = chosen("parts", parts, PARTS), chosen("arms", arms, ARMS)
    path = request.workdir / "models.json"
    found = read_json(path) if path.exists() else {}
    add_kept_models(found, request.scale.name)

    def find(check: Callable[[], None]) -> None:
        for part in parts:
            for arm in arms:
                wanted = request.repeats if arm == "random" else 1  # equal mixes are few, and taken in turn
                if len(found.setdefault(part, {}).get(arm, [])) < wanted:
                    check()
                    found[part][arm] = models_of(request, part, arm, check)
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
    report_found = functools.partial(report, found)
    return carry_out(series, runs, lambda records: text(summarise(records)), report_found, first=find)


def add_kept_models(found: dict[str, dict[str, list[str]]], scale: str) -> None:
    """Adds the lanes of the parts and arms in the results kept with the code, to which other processes may add."""
    path = kept_results("unequal_lanes", scale)
    stored = read_json(path) if path.exists() else {}
    for part, arms in stored["models"].items() if stored.get("version") == VERSION else ():
        found[part] = arms | found.get(part, {})


def models_of(request: Request, part: str, arm: str, check: Callable[[], None]) -> list[str]:
    """The lanes of an arm: one model for all seeds, or one for each; searches what has to be found.

    `check` is called between the trainings of equal lanes, and may raise Stopped; a search is stopped by SIGTERM.
    """
    if arm == "given":
        return [GIVEN]
    config, settings = search_of(request.directories, part, arm, request.scale.name == SMOKE)
    if arm == "random":
        return random_mixes(setup.make_space(config, settings), request.repeats)
    if arm == "drawn":
        mixes = equal_mixes(setup.make_space(config, settings))
        return random.Random(0).sample(mixes, len(mixes))
    folder = request.workdir / "searches" / f"{part}-{arm}"
    if arm == "equal":
        return [best_of_equal(config, settings, folder, check)]
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


def best_of_equal(config: RunConfig, settings: SearchSettings, folder: Path, check: Callable[[], None]) -> str:
    """The mix of equal lanes that is best on the validation images; each is trained once, and kept when it has been.

    `check` is called before each training, and may raise Stopped.
    """
    trainer = Trainer(config, settings.num_epochs, settings.num_repeats, settings.num_images)
    accuracies: dict[str, float] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for lanes in equal_mixes(setup.make_space(config, settings)):
        stored = folder / f"{lanes.replace(':', '_').replace('*', 'x')}.json"
        if not stored.exists():
            check()
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


def interval(one: Bool[np.ndarray, "seeds images"], other: Bool[np.ndarray, "seeds images"]) -> dict[str, Any]:
    """Accuracy of one less that of the other, in points, and its 95 % interval, for two seeds or more.

    The difference of a pair on an image is an effect of the pair, one of the image, and the rest. The variance of the
    means of pairs holds the rest, and so does that of the means of images: their sum, less the rest once, is the
    variance of the mean; never less than either, as it may be by chance. The quantile is Student's for the pairs.
    """
    from scipy.stats import t

    difference = one.astype(np.float64) - other
    seeds, images = difference.shape
    mean, by_seed, by_image = difference.mean(), difference.mean(axis=1), difference.mean(axis=0)
    rest = difference - by_seed[:, None] - by_image[None, :] + mean
    of_seeds, of_images = by_seed.var(ddof=1) / seeds, by_image.var(ddof=1) / images
    of_rest = np.square(rest).sum() / ((seeds - 1) * (images - 1)) / (seeds * images)
    half = float(t.ppf(0.975, seeds - 1)) * math.sqrt(max(of_seeds + of_images - of_rest, of_seeds, of_images))
    found = {"mean": mean, "low": mean - half, "high": mean + half}
    visible = 100 * half <= VISIBLE
    return {name: 100 * float(value) for name, value in found.items()} | {"pairs": seeds, "visible": visible}


def summarise(records: Records) -> dict[str, list[dict[str, Any]]]:
    """For each part: a row for each arm, with its differences, `over_ARM`, over the seeds of both; None if too few.

    Validation accuracy is that of the best epoch, as test accuracy is.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS:
        by_arm = {
            arm: {one["facts"]["seed"]: one for one in select(records, part=part, arm=arm) if "failed" not in one}
            for arm in ARMS
        }
        for arm, mine in by_arm.items():
            if not mine:
                continue
            best = [one | {"validation_accuracy": best_validation(one)} for one in mine.values()]
            row = {
                "arm": arm,
                "lanes": sorted({one["lanes"] for one in mine.values()}),
                **{name: spread(best, name) for name in ("test_accuracy", "validation_accuracy")},
            }
            for other, arms in OVER.items():
                row[f"over_{other}"] = compared(mine, by_arm[other]) if arm in arms else None
            rows.setdefault(part, []).append(row)
    return rows


def best_validation(record: Mapping[str, Any]) -> float:
    """Validation accuracy in % of the epoch that counts, also of a run that ended before this was noted."""
    return record.get("best_validation_accuracy") or max(record["validation_accuracy_per_epoch"])


def compared(mine: Mapping[int, dict[str, Any]], others: Mapping[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The `interval` of the runs of one arm less those of another, by seed; None for fewer than two common seeds.

    A seed counts if both runs are of one kind of device and the same versions, so that arms are compared, not devices.
    Numbers of cores may differ: `--arms` has processes share them.
    """
    both = sorted(seed for seed in mine.keys() & others.keys() if _device(mine[seed]) == _device(others[seed]))
    return interval(*(correct_of([runs[seed] for seed in both]) for runs in (mine, others))) if len(both) > 1 else None


def _device(record: dict[str, Any]) -> str:
    return place(record | {"cpu_count": 1})


def text(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tables of the arms of each part (`summarise`), and of the differences between arms, as Markdown."""
    arms = [
        (
            part,
            row["arm"],
            row["lanes"][0] if len(row["lanes"]) == 1 else f"{len(row['lanes'])} mixes",
            str(row["test_accuracy"]["runs"]),
            *(f"{row[name]['mean']:.2f}" for name in ("test_accuracy", "validation_accuracy")),
        )
        for part, rows in found.items()
        for row in rows
    ]
    between = [
        (
            part,
            f"{arm} - {other}",
            str(one["pairs"]),
            f"{one['mean']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})",
            "yes" if one["visible"] else "no",
        )
        for part, rows in found.items()
        for arm, other, one in differences(rows)
    ]
    header = ("part", "arms", "pairs", "test accuracy, points, 95 %", f"{VISIBLE} points visible")
    return "\n\n".join(
        [markdown(("part", "arm", "lanes", "runs", "test", "validation"), arms), markdown(header, between)]
    )


def differences(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """The arms of a part that are compared, in the order of `OVER`: one, the other, and their `interval`."""
    return [(row["arm"], other, row[f"over_{other}"]) for other in OVER for row in rows if row[f"over_{other}"]]


def draw(records: Records, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Test accuracy of every run, and the means, by arm; the differences between arms beside."""
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
        compared_arms = differences(rows)
        for x, (*_, between) in enumerate(compared_arms):
            bar = [[between["mean"] - between["low"]], [between["high"] - between["mean"]]]
            right.errorbar([x], [between["mean"]], yerr=bar, fmt="o", capsize=4)
        left.set_xticks(range(len(rows)), [row["arm"] for row in rows])
        right.set_xticks(range(len(compared_arms)), [f"{arm}\n- {other}" for arm, other, _ in compared_arms])
        left.set(ylabel="test accuracy, %", title=f"{part}: {PARTS[part]} lanes of equal cost")
        right.axhline(0, color="gray", lw=0.8)
        right.set(ylabel="points of test accuracy, 95 %", title="differences over pairs of equal seed")
    return figure


def report(models: dict[str, dict[str, list[str]]], series: Series) -> None:
    """Writes table and figure of all that has ended, in other processes, too."""
    add_kept_models(models, series.scale.name)
    records = series.records()
    found = summarise(records)
    lines = [
        f"FLOPs of a training step as of {GIVEN}; test accuracy in %, of models trained afresh with seeds that no "
        "search used, after the epoch that is best on validation images. Intervals of 95 %, each by itself, for other "
        "pairs of equal seed and other test images, from the variances that a bootstrap of both estimates (Owen 2007).",
        *caption(series, records),
    ]
    figure = draw(records, found)
    draw_caption(figure, lines)
    write(series, "unequal_lanes", {"models": dict(models), "parts": found}, text(found), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

"""`configs/resnet_folder.py` on a folder of pictures, and how its batch and label smoothing were chosen.

    python -m experiments.own_images --workdir=runs/own_images
    python -m experiments.own_images --workdir=runs/own_images --recipes=configured --part=test --repeats=3

The pictures are PNG files of CIFAR-10: 500 training images of each class, and all test images. `--part=validation`
trains on four fifths of the former and scores the rest: that chose the configuration. `--part=test` trains on all of
them and reads the test images once, when a run ends. A run that has ended, also one that is in the committed results,
is not repeated; one that was stopped goes on. Writes `own_images_SCALE` as JSON, Markdown and PNG to the workdir and,
but for `smoke`, to `experiments/results/`.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from PIL import Image

from experiments.published_rows import config_named
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_table,
    kept_results,
    number,
    select,
    spread,
    told,
    write,
)
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from experiments.residual_lanes import measure
from mlcn_jax.config import RunConfig
from mlcn_jax.data.datasets import Dataset
from mlcn_jax.files import markdown, put_in_place
from mlcn_jax.launch import launch_script

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1), "full": Scale("full", 0)}
_IMAGES = {"smoke": (20, 5), "full": (500, 1000)}  # of each class, for training and for testing
PARTS = ("validation", "test")
_LARGE = {"train.batch_size": 500, "train.learning_rate": 0.12, "train.num_epochs": 10, "model.label_smoothing": 0.2}
_SMALL = _LARGE | {"train.batch_size": 100, "train.learning_rate": 0.054}
RECIPES: dict[str, dict[str, Any]] = {
    "configured": {},
    "batch_500": _LARGE,
    "batch_100": _SMALL,
    "batch_100_longer": _SMALL | {"train.num_epochs": 20},
    "batch_100_no_smoothing": _SMALL | {"model.label_smoothing": 0.0},
}
HEADER = ("", "images", "batch", "epochs", "PFLOP", "accuracy", "with flips", "NLL", "ECE", "minutes")


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("recipes", list(RECIPES), f"Of {', '.join(RECIPES)}.", flag_values=values)
    flags.DEFINE_enum("part", "validation", PARTS, "Images that are scored.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "own_images", SCALES, ("recipes", "part")), recipes=values.recipes, part=values.part)


def run(request: Request, *, recipes: Sequence[str], part: str) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    recipes = chosen("recipes", recipes, RECIPES)
    runs = [{"recipe": name, "part": part, "seed": seed} for seed in range(request.repeats) for name in recipes]
    folder = request.workdir / "pictures"
    if not folder.exists():
        cifar = config_named("resnet_cifar").replace({"data.dir": request.directories["cifar10"]}).data.load()
        write_pictures(cifar, folder, *_IMAGES[request.scale.name])
    make_config = functools.partial(configure_run, folder)
    kept = kept_results("own_images", request.scale.name)
    series = Series(request, "own_images", VERSION, make_config, True, measure, kept)
    return carry_out(series, runs, text, report)


def write_pictures(dataset: Dataset, folder: Path, num_train: int, num_test: int) -> None:
    """Writes the first images of each class, so many of each part, as `folder`/PART/CLASS/NUMBER.png."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        for part, split, most in (("train", dataset.train, num_train), ("test", dataset.test, num_test)):
            for label, name in enumerate(dataset.class_names):
                own = Path(made) / folder.name / part / name
                own.mkdir(parents=True)
                for i in np.flatnonzero(split.labels == label)[:most]:
                    Image.fromarray(split.images[i]).save(own / f"{i:05}.png")
        put_in_place(Path(made) / folder.name, folder)


def configure_run(folder: Path, recipe: str, part: str, seed: int) -> RunConfig:
    """The run of a recipe; on validation images, it leaves the test images alone."""
    held_out = {"data.validation_fraction": 0.2, "train.score_test": False} if part == "validation" else {}
    changes = {**RECIPES[recipe], **held_out, "data.dir": str(folder), "train.seed": seed}
    return config_named("resnet_folder").replace(changes)


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each recipe that has been run on a part: means over its seeds."""
    rows = []
    for part in PARTS:
        for recipe in RECIPES:
            mine = [record for record in select(records, recipe=recipe, part=part) if "flops" in record]
            if not mine:
                continue
            settings = configure_run(Path(), recipe, part, 0)
            row: dict[str, Any] = {"recipe": recipe, "part": part, "batch_size": settings.train.batch_size}
            row |= {key: mine[0][key] for key in ("lanes", "epochs", "flops", "parameters")}
            row["images"] = round(mine[0]["data"]["train_images"] * (1 - settings.data.validation_fraction))
            for key in ("accuracy", "accuracy_flips", "nll", "calibration_error", "train_seconds"):
                row[key] = spread(mine, key)
            rows.append(row)
    return rows


def text(records: Records) -> str:
    """The table as Markdown."""
    return markdown(HEADER, map(functools.partial(_cells, records), summarise(records)))


def _cells(records: Records, row: Mapping[str, Any]) -> list[str]:
    mine = select(records, recipe=row["recipe"], part=row["part"])
    return [
        f"{row['recipe']}, {row['part']} images",
        f"{row['images']:,}",
        str(row["batch_size"]),
        str(row["epochs"]),
        f"{row['flops'] / 1e15:.3f}",
        told(mine, "accuracy"),
        told(mine, "accuracy_flips"),
        *(f"{row[name]['mean']:.3f}" for name in ("nll", "calibration_error")),
        number(row["train_seconds"]["mean"] / 60),
    ]


def report(series: Series) -> None:
    """Writes the table of every run that has ended."""
    records = series.records()
    rows = summarise(records)
    lines = [
        "Accuracy in %, without and with the mirror image. PFLOP: products and convolutions of the lanes in all "
        "training steps, forward and backward. Minutes at the throughput of the steps.",
        *caption(series, records),
    ]
    figure = draw_table(HEADER, [_cells(records, row) for row in rows], lines)
    write(series, "own_images", {"rows": rows}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

"""Removing lanes with and without lane dropout, and what each lane means: figures 4.2, 4.3 and 4.6 of the thesis.

    python -m experiments.lane_removal --workdir=runs/lane_removal --minutes=60

Trains 16 lanes of mlcn1, width 4, on Fashion-MNIST as published, without lane dropout and with 0.1, for 20 epochs each,
on 54,000 of the 60,000 training images; the epoch that is best on the other 6,000 counts. Then removes one lane after
another, in the order that `mlcn_jax prune` finds on these 6,000, and scores and times what is left (figure 4.6). With
the same models: reconstructions (figure 4.2), what is added to one lane at a time and how that changes a reconstruction
(figure 4.3), as by `mlcn_jax explain`, and whether a lane means the same in different classes, as a number.

That number is the agreement of a lane's change images, from all test images. Change image of a lane in a class: the
reconstruction from the capsule of that class, which is the image's true one, with 0.25 added to its entry of the lane,
less that with 0.25 subtracted, over 0.5; the mean over the images of the class. Agreement of a lane: the cosine of its
change images in two classes, the mean over all pairs of classes. It is 1 if the lane changes every class in the same
way, and negative if it does the opposite. Beside it stands that of different lanes: the mean cosine of the lane's
change image in one class and another lane's in another class, without its sign, which means nothing there: only squares
of what lanes compute are used. A lane that gives the same output for every image
(`evaluate.ALIVE`) means nothing, so means are over lanes that are alive, and over pairs of these. A run that ended
before the agreement of each pair was kept has none of different lanes unless all are alive; without its `run.json`, it
is measured again, and not trained again. Pixels are compared: a change that follows outlines, such as thickness, agrees
only as far as the outlines of two classes do.

By the cost model, training takes 1.38 PFLOP a model, 2.6 h at 150 GFLOP/s, 5.1 h for both; decoders, compiling, scoring
and timing come on top. `smoke` takes a step of each. One JSON a run; what has ended, in the workdir or in the results
that are kept with the code, is not run again. Writes `lane_removal_SCALE` as JSON, Markdown and PNG to the workdir and,
but for `smoke`, to `experiments/results/`; so for the pictures of what lanes mean, which are drawn when a run ends.

Source: do Rosario 2021 (thesis), chapter 4; for the agreement, this project.
"""

import functools
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float

from experiments import RESULTS
from experiments.published_rows import NUM_EPOCHS, configure
from experiments.repeated_report import SMOKE, Records, caption, carry_out, draw_caption, kept_results, write
from experiments.repeated_runs import Request, Scale, Series, asked, define_flags
from mlcn_jax.analysis import explain, prune_report
from mlcn_jax.analysis.explain_report import explain_run
from mlcn_jax.analysis.prune import load_prunable
from mlcn_jax.config import RunConfig
from mlcn_jax.data.batches import Split, padded_batches
from mlcn_jax.files import markdown
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.evaluate import ALIVE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1, 1000, 100), "full": Scale("full", NUM_EPOCHS)}
LANES = "mlcn1:w4*16"
DROPOUTS = (0.0, 0.1)
PICTURES = ("reconstructions", "offsets", "changes")  # of what lanes mean, as they are called in the results
_OFFSET = 0.25
_BATCH_SIZE = 50
_ROUNDS = 10  # of timing
_RANKED = 500  # test images, for the measures of `explain`


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "lane_removal", SCALES, ()))


def run(request: Request) -> int:
    """Trains and measures what has not been yet, reports after each run, and returns the exit code."""
    runs = [{"lane_dropout": dropout, "seed": seed} for seed in range(request.repeats) for dropout in DROPOUTS]
    make_config = functools.partial(configure_run, request.directories)
    measured = functools.partial(measure, 0 if request.scale.name == SMOKE else _ROUNDS)
    kept = kept_results("lane_removal", request.scale.name)
    series = Series(request, "lane_removal", VERSION, make_config, True, measured, kept)
    return carry_out(series, runs, text, report)


def configure_run(directories: Mapping[str, str], lane_dropout: float, seed: int) -> RunConfig:
    """The published run of 16 lanes with this lane dropout; a tenth of the training images is held out."""
    changes = {"model.lane_dropout": lane_dropout, "train.seed": seed, "data.validation_fraction": 0.1}
    return configure("mlcn1_fashion", LANES, directories).replace(changes)


def measure(rounds: int, folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """More of a run that has ended: what is left of it without some lanes, and what each lane means."""
    model = load_prunable(folder)
    removal = prune_report.analyse(model, "alone", rounds)
    del removal["data"]  # which the record has
    explained = explain_run(folder, folder / "explain", [], _RANKED)
    images = [picture["index"] for picture in explained["pictures"]]
    (folder / "explain" / f"image_{images[-1]}.png").replace(folder / "explain" / "offsets.png")
    changes = change_images(model.spec, model.params, model.test)
    figure = draw_changes(changes, model.class_names)
    figure.savefig(folder / "explain" / "changes.png", dpi=100, bbox_inches="tight")
    return {
        **removal,
        "ranking": explained["ranking"],
        "explained_image": images[-1],
        "agreements": agreements(changes).tolist(),
    }


def change_images(spec: ModelSpec, params: dict, split: Split) -> Float[np.ndarray, "lanes classes h w channels"]:
    """Change of the reconstruction per unit added to a lane's entry of the true class: means over each class's images.

    Zero in a class without images.
    """
    total = np.zeros((), np.float64)
    for images, labels, mask in padded_batches(split, _BATCH_SIZE):
        total = total + np.asarray(_summed_changes(spec, params, images, labels, mask), np.float64)
    counts = np.bincount(split.labels, minlength=spec.num_classes)
    return total / np.maximum(counts, 1)[:, None, None, None]


@functools.partial(jax.jit, static_argnums=0)
def _summed_changes(spec, params, images, labels, mask):
    v, _ = explain.look(spec, params["encoder"], images)
    less, more = jnp.moveaxis(explain.perturb(spec, params["decoder"], v, labels, jnp.array([-_OFFSET, _OFFSET])), 1, 0)
    of_class = jax.nn.one_hot(labels, spec.num_classes) * mask[:, None]
    return jnp.einsum("lb...,bk->lk...", (more - less) / (2 * _OFFSET), of_class)


def agreements(changes: Float[np.ndarray, "lanes classes *pixels"]) -> Float[np.ndarray, "lanes lanes"]:
    """For each two lanes, also of a lane and itself: the mean cosine of their change images in two different classes.

    A change image (`change_images`) of zeros agrees with none. There must be two classes or more.
    """
    lanes, classes = changes.shape[:2]
    flat = changes.reshape(lanes, classes, -1)
    norms = np.linalg.norm(flat, axis=-1, keepdims=True)
    unit = np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 0)
    cosines = np.einsum("lkp,mjp->lmkj", unit, unit)
    return (cosines.sum(axis=(2, 3)) - np.trace(cosines, axis1=2, axis2=3)) / (classes * (classes - 1))


def mean_agreements(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Of the lanes of a run that are alive: `same_lane`, the mean agreement of each with itself, and `other_lanes`, of
    each two, whatever its sign, since only squares of what lanes compute are used; None where there are none.
    """
    alive = alive_lanes(record)
    if "agreements" in record:
        between = np.array(record["agreements"])[np.ix_(alive, alive)]
        same, others = np.diagonal(between).tolist(), np.abs(between[~np.eye(len(alive), dtype=bool)]).tolist()
    else:  # an older run: those of different lanes are means over all other lanes
        same, others = ([record["agreement"][name][lane] for lane in alive] for name in ("same_lane", "other_lanes"))
        others = others if len(alive) == len(record["lane_spreads"]) else []
    return {name: statistics.fmean(of) if of else None for name, of in (("same_lane", same), ("other_lanes", others))}


def alive_lanes(record: Mapping[str, Any]) -> list[int]:
    """The lanes of a run that do not give the same output for every image."""
    return [lane for lane, spread in enumerate(record["lane_spreads"]) if spread > ALIVE]


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each run that has ended: how many lanes are alive, and the agreement of these (`mean_agreements`)."""
    return [
        {
            **record["facts"],
            "alive": len(alive_lanes(record)),
            "lanes": len(record["lane_spreads"]),
            **mean_agreements(record),
        }
        for record in records
        if "removed" in record
    ]


def text(records: Records) -> str:
    """Tables of removal and of agreement as Markdown."""
    runs = [record for record in records if "removed" in record]
    titles = [f"lane dropout {run['lane_dropout']:g}, seed {run['facts']['seed']}" for run in runs]
    kept = range(max((len(run["removed"]) for run in runs), default=0), 0, -1)
    removal = [[str(left), *(f"{100 * run['removed'][-left]['test_accuracy']:.2f}" for run in runs)] for left in kept]
    meaning = [
        [
            title,
            f"{row['alive']} of {row['lanes']}",
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in ("same_lane", "other_lanes")),
        ]
        for title, row in zip(titles, summarise(records), strict=True)
    ]
    agreed = ("agreement between classes", "lanes alive", "the same lane", "different lanes")
    return "\n\n".join([markdown(("lanes kept: test accuracy, %", *titles), removal), markdown(agreed, meaning)])


def draw_changes(changes: Float[np.ndarray, "lanes classes h w channels"], class_names: Sequence[str]) -> "Figure":
    """The change images, a row for each lane and a column for each class, each lane with colours of its own scale."""
    from matplotlib.figure import Figure

    lanes, classes, height, width, _ = changes.shape
    gray = changes.mean(axis=-1)
    limits = np.maximum(np.abs(gray).max(axis=(1, 2, 3), keepdims=True), 1e-12)
    gap = np.full((lanes, classes, height + 1, width + 1), np.nan)
    gap[:, :, :height, :width] = gray / limits
    sheet = gap.transpose(0, 2, 1, 3).reshape(lanes * (height + 1), classes * (width + 1))
    figure = Figure(figsize=(1.5 + 0.7 * classes, 1 + 0.7 * lanes), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(sheet, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xticks(np.arange(classes) * (width + 1) + width / 2, class_names, rotation=45, ha="right", fontsize=8)
    names = [f"lane {lane}" for lane in range(lanes)]
    axes.set_yticks(np.arange(lanes) * (height + 1) + height / 2, names, fontsize=8)
    axes.tick_params(length=0)
    axes.set_title("change of the reconstruction by a lane, mean over the test images of each class", fontsize=9)
    figure.colorbar(drawn, ax=axes, fraction=0.03, label="over the lane's largest")
    return figure


def report(series: Series) -> None:
    """Writes the tables and the pictures of every run that has ended."""
    records = series.records()
    runs = [record | {"workdir": f"seed {record['facts']['seed']}"} for record in records if "removed" in record]
    if not runs:
        return
    lines = [
        "The epoch that is best on validation images counts. Lanes are ranked by the accuracy on these with each lane "
        "removed alone; the least useful is removed first. Alive: a lane whose entries differ between test images by "
        f"more than {ALIVE:g}. Agreement: mean cosine of the mean changes of the reconstruction in two classes, of "
        "lanes that are alive and, without its sign, of pairs of these.",
        *caption(series, records),
    ]
    figure = prune_report.draw(runs)
    figure.set_figheight(6)  # with room for the caption
    draw_caption(figure, lines)
    write(series, "lane_removal", {"rows": summarise(records)}, text(records), lines, figure)
    copy_pictures(series, [series.workdir] if series.scale.name == SMOKE else [series.workdir, RESULTS])


def copy_pictures(series: Series, folders: Sequence[Path]) -> None:
    """Puts the pictures of what lanes mean, of the models of seed 0 that are in the workdir, beside the tables."""
    for dropout in DROPOUTS:
        for name in PICTURES:
            made = series.workdir / "runs" / f"lane_dropout{dropout}" / "seed0" / "explain" / f"{name}.png"
            for folder in folders if made.exists() else ():
                shutil.copyfile(made, folder / f"lane_removal_{series.scale.name}_{dropout}_{name}.png")


if __name__ == "__main__":
    launch_script(define, main)

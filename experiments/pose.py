"""Whether capsules and lanes keep the pose: trained on shifted images, tested on changed ones.

    python -m experiments.pose --workdir=runs/pose --repeats=3
    python -m experiments.pose --workdir=runs/pose --repeats=3 --models=mlcn1,mlcn2,resnet,plain --minutes=60

Fashion-MNIST in the middle of canvases of 40x40, which training shifts by up to 6 pixels; nothing else is augmented.
The test images are moved, rotated, sheared and scaled within affNIST's ranges, by itself and together, or their parts
are shuffled (`changed_images.CHANGES`). A model that keeps the pose should lose little accuracy by the former, and its
confidence, the mean probability of its most probable class, by the latter. A capsule's probability is its length, which
need not sum to 1 over the classes as those of `resnet` lanes do, so confidence is compared within a model.

Models: CapsNet and published lanes with the published settings; `resnet` lanes, and `plain`, a single one of them,
which is a residual CNN with a linear head: with the recipe of `configs/resnet_fashion.py`, but for its flips, smaller
images, views of each lane and label smoothing, so that all models see the same. Lanes and `plain` cost the same within
8 %; CapsNet, as published, 7.7 times as much.

5 epochs on all training images; the test set is read at the end and chooses nothing. By the cost model, training takes
0.19 PFLOP a model and seed and 1.42 for CapsNet: 3 seeds take 4.1 h and 7.9 h at 150 GFLOP/s. Decoders, compiling and
scoring come on top. `smoke` takes a step of each.

One JSON a run; what has ended, in the workdir or in the results that are kept with the code, is not run again. Writes
`pose_SCALE` as JSON, Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`.

Source: Sabour et al. 2017, section 5.2, for training on shifted and testing on transformed images.
"""

import functools
import hashlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.changed_images import CANVAS, CHANGES, MARGIN, change, on_canvas
from experiments.data_parts import write_files
from experiments.published_rows import configure
from experiments.repeated_report import Records, caption, carry_out, draw_caption, kept_results, select, write
from experiments.repeated_runs import Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax.allocator import share_heaps
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.batches import Split
from mlcn_jax.files import markdown, put_in_place
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.model import class_lengths, class_probabilities, encode, param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import matmul_flops
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.trained import Trained, load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 1  # raised with every change after which results cannot stand beside older ones
SCALES = {"smoke": Scale("smoke", 1, 1, 600, 100), "full": Scale("full", 5)}
# A module of `configs`, and lanes, by name.
MODELS = {
    "mlcn1": ("mlcn1_fashion", "mlcn1:w4*2"),
    "mlcn2": ("mlcn2_fashion", "mlcn2:w4*4"),
    "resnet": ("resnet_fashion", "resnet:w2d2*3"),
    "plain": ("resnet_fashion", "resnet:w3d3*1"),
    "capsnet": ("capsnet_fashion", ""),
}
TITLES = {"resnet": "resnet lanes", "plain": "plain network", "capsnet": "CapsNet"}
_COMMON = {
    "data.max_shift": MARGIN,
    "data.reflect": False,
    "data.alternate_flips": False,
    "data.augment_lanes": False,
    "model.label_smoothing": 0.0,
    "train.image_sizes": "",
    "train.checkpoint_every": 0,
}
_SHUFFLED = [name for name, kinds in CHANGES.items() if isinstance(kinds, int)]


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("models", list(MODELS), f"Of {', '.join(MODELS)}.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(asked(values, "pose", SCALES, ("models",)), models=values.models)


def run(request: Request, *, models: Sequence[str]) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    models = chosen("models", models, MODELS)
    if len(models) == 1:
        share_heaps(MODELS[models[0]][1])
    runs = [{"model": model, "seed": seed} for seed in range(request.repeats) for model in models]
    folder = request.workdir / "canvas"
    if not folder.exists():
        make_canvases(request.directories["fashion_mnist"], folder)
    make_config = functools.partial(configure_run, {"fashion_mnist": str(folder)})
    kept = kept_results("pose", request.scale.name)
    series = Series(request, "pose", VERSION, make_config, True, measure, kept)
    return carry_out(series, runs, text, report)


def make_canvases(directory: str, folder: Path) -> None:
    """Writes Fashion-MNIST on canvases of 40x40, in the format of its official files."""
    dataset = configure("mlcn1_fashion", "mlcn1:w4", {"fashion_mnist": directory}).data.load()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        train, test = (Split(on_canvas(split.images), split.labels) for split in (dataset.train, dataset.test))
        write_files("fashion_mnist", Path(made) / folder.name, train, test)
        put_in_place(Path(made) / folder.name, folder)


def configure_run(directories: Mapping[str, str], model: str, seed: int) -> RunConfig:
    """The run of a model: published, or the residual recipe, on shifted images."""
    return configure(*MODELS[model], directories).replace(_COMMON | {"train.seed": seed})


def training_megaflops(model: str) -> float:
    """MFLOP per image of a training step, forward and backward, without the decoder, which is the same for all."""
    spec = configure_run({"fashion_mnist": ""}, model, 0).replace({"model.conv": "native"})
    return _encoder_flops(spec.model_spec((CANVAS, CANVAS, 1), 10)) / 1e6


@functools.cache
def _encoder_flops(spec: ModelSpec) -> int:
    def step(encoder, images):
        return jax.grad(lambda p: jnp.sum(encode(spec, p, images)))(encoder)

    encoder = param_shapes(spec)["encoder"]
    one, two = (
        matmul_flops(step, encoder, jax.ShapeDtypeStruct((batch, *spec.image_shape), jnp.float32)) for batch in (1, 2)
    )
    return two - one


def measure(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """More of a run that has ended: accuracy in % and confidence on the test images after each change."""
    config, trained = read_stored(folder), load_trained(folder)
    changed = changed_test_images(config.data.dir)
    scores = {name: score(trained, split, config.train.batch_size) for name, split in changed.items()}
    digest = hashlib.sha256(b"".join(split.images.tobytes() for split in changed.values())).hexdigest()[:16]
    return {
        "megaflops": training_megaflops(_model_of(config)),
        "test_images_sha256": digest,
        **{what: {name: score[what] for name, score in scores.items()} for what in ("accuracy", "confidence")},
    }


def _model_of(config: RunConfig) -> str:
    return next(name for name, (_, lanes) in MODELS.items() if lanes == config.model["lanes"])


@functools.lru_cache(maxsize=1)
def changed_test_images(directory: str) -> dict[str, Split]:
    """The test images in a folder after each change, made once."""
    test = configure("mlcn1_fashion", "mlcn1:w4", {"fashion_mnist": directory}).data.load().test
    return {name: Split(change(test.images, name), test.labels) for name in CHANGES}


def score(trained: Trained, split: Split, batch_size: int) -> dict[str, float]:
    """Accuracy in %, and the mean probability of the most probable class."""
    lengths = class_lengths(trained.spec, class_capsules(trained.spec, trained.params, split, batch_size))
    probabilities = np.asarray(class_probabilities(trained.spec, lengths))
    correct = np.asarray(lengths).argmax(axis=-1) == split.labels  # probabilities are at most 1, and can be equal
    return {"accuracy": 100 * float(correct.mean()), "confidence": float(probabilities.max(axis=-1).mean())}


def summarise(records: Records) -> list[dict[str, Any]]:
    """Each model that has been run: of each change, means over seeds, with the least and the most.

    `drop` is the accuracy in points that the change costs, in each seed from the same model's unchanged test images.
    """
    rows = []
    for model in MODELS:
        mine = [record for record in select(records, model=model) if "accuracy" in record]
        if not mine:
            continue
        row: dict[str, Any] = {"model": model, "megaflops": mine[0]["megaflops"], "runs": len(mine)}
        for what in ("accuracy", "confidence"):
            row[what] = {name: _spread([record[what][name] for record in mine]) for name in CHANGES}
        drops = {name: [one["accuracy"]["none"] - one["accuracy"][name] for one in mine] for name in CHANGES}
        row["drop"] = {name: _spread(values) for name, values in drops.items()}
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def text(records: Records) -> str:
    """Tables of accuracy, with the drop, and of confidence as Markdown."""
    rows = summarise(records)
    header = ("accuracy in % (drop)", "MFLOP", "runs", *CHANGES)
    accuracy = [
        [
            TITLES.get(row["model"], row["model"]),
            f"{row['megaflops']:,.0f}",
            str(row["runs"]),
            *(f"{row['accuracy'][name]['mean']:.2f} ({row['drop'][name]['mean']:.2f})" for name in CHANGES),
        ]
        for row in rows
    ]
    confidence = [
        [TITLES.get(row["model"], row["model"]), *(f"{row['confidence'][name]['mean']:.3f}" for name in CHANGES)]
        for row in rows
    ]
    return "\n\n".join([markdown(header, accuracy), markdown(("confidence", *CHANGES), confidence)])


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Panels of accuracy, drop and confidence against the kind of change; a bar for each model, with its seeds' range.

    The seeds' range is that of the least and the most.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10), layout="constrained")
    panels = {"accuracy": "test accuracy, %", "drop": "points lost by the change", "confidence": "mean confidence"}
    width = 0.8 / max(1, len(rows))
    for axes, (what, title) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for i, row in enumerate(rows):
            places = np.arange(len(CHANGES)) + (i - (len(rows) - 1) / 2) * width
            found = [row[what][name] for name in CHANGES]
            ends = [[abs(one["mean"] - one[end]) for one in found] for end in ("min", "max")]
            label = f"{TITLES.get(row['model'], row['model'])}, {row['megaflops']:,.0f} MFLOP"
            axes.bar(places, [one["mean"] for one in found], width, yerr=ends, label=label, capsize=2)
        axes.set_ylabel(title)
        axes.axvline(len(CHANGES) - len(_SHUFFLED) - 0.5, color="gray", lw=0.8, ls=":")
        axes.set_xticks(range(len(CHANGES)), [name.replace(" ", "\n", 1) for name in CHANGES])
    if rows:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(MODELS))
    return figure


def report(series: Series) -> None:
    """Writes the tables and the picture of every run that has ended."""
    records = series.records()
    rows = summarise(records)
    lines = [
        f"Fashion-MNIST on canvases of {CANVAS}x{CANVAS}, in training shifted by up to {MARGIN} pixels; changes of the "
        "test images within affNIST's ranges. Bars: means over seeds, with the least and the most. MFLOP: of a "
        "training step for each image, without the decoder. Confidence: mean probability of the most probable class.",
        *caption(series, records),
    ]
    figure = draw(rows)
    draw_caption(figure, lines)
    write(series, "pose", {"rows": rows}, text(records), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

"""Scores over a whole split, and the pictures drawn from them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mlcn_jax import capsules, conv, data, losses, parallel
from mlcn_jax.checkpoint import load_trained
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.model import ModelSpec, apply_model, classification_loss, encode, reconstruct

ALIVE = 0.05  # least spread of a lane that tells images apart
_SPREAD_IMAGES = 500


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a split; `confusion[t, p]` counts images of class t that were taken for class p."""

    loss: float
    confusion: np.ndarray

    @property
    def accuracy(self) -> float:
        """Share of images whose longest class capsule is that of their class."""
        return float(np.trace(self.confusion) / self.confusion.sum())

    @property
    def accuracy_per_class(self) -> list[float | None]:
        """Accuracy among the images of each class; None for a class without images."""
        counts = self.confusion.sum(axis=1)
        correct = np.diag(self.confusion)
        return [float(c / n) if n else None for c, n in zip(correct, counts, strict=True)]

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """The scores of a test set, ready for JSON."""
        return {
            "test_accuracy": self.accuracy,
            "test_loss": self.loss,
            "test_accuracy_per_class": dict(zip(class_names, self.accuracy_per_class, strict=True)),
        }


def to_pixels(images: jax.Array) -> jax.Array:
    """uint8 pixels as float32 in [0, 1]."""
    return images.astype(jnp.float32) / 255.0


def make_evaluator(
    spec: ModelSpec, reconstruction_weight: float, mesh: Mesh | None = None
) -> Callable[[dict, data.Split, int], Scores]:
    """A function `(params, split, batch_size) -> Scores` that compiles once.

    The loss is that of training: the mean over images of margin loss plus weighted reconstruction loss, with
    the true class masked. Accuracy looks at the lengths alone. Over a mesh, `params` lie as `parallel` placed them.
    """

    lane_axis = parallel.lane_axis(mesh)

    def sums_of_batch(params, images, labels, mask):
        pixels = to_pixels(images)
        v = encode(spec, params["encoder"], pixels, lane_axis)
        return head_sums(spec, reconstruction_weight, params["decoder"], v, pixels, labels, mask, lane_axis)

    options = conv.compiler_options(jax.default_backend())
    sums = jax.jit(parallel.sum_over(mesh, sums_of_batch), compiler_options=options)

    def evaluate(params: dict, split: data.Split, batch_size: int) -> Scores:
        return scores_of(split, batch_size, lambda batch: sums(params, *parallel.place_batch(mesh, batch)))

    return evaluate


def head_sums(
    spec: ModelSpec,
    reconstruction_weight: float,
    decoder: dict,
    v: Float[Array, "batch classes dim"],
    pixels: Float[Array, "batch h w channels"],
    labels: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    lane_axis: str = "",
) -> tuple[Array, Array]:
    """Sums over the images that `mask` keeps, from their class capsules on: of the losses, and in the confusion."""
    loss = classification_loss(spec, v, labels)
    reconstructions = reconstruct(spec, decoder, v, labels, lane_axis)
    loss += reconstruction_weight * losses.reconstruction_loss(reconstructions, pixels)
    truth = jax.nn.one_hot(labels, spec.num_classes) * mask[:, None]
    predicted = jax.nn.one_hot(jnp.argmax(capsules.lengths(v), axis=-1), spec.num_classes)
    return jnp.sum(loss * mask), truth.T @ predicted


def scores_of(split: data.Split, batch_size: int, sums: Callable[[tuple], tuple[Array, Array]]) -> Scores:
    """Scores of a split, `sums` giving what `head_sums` does for each of its padded batches."""
    loss, confusion = 0.0, np.zeros(())
    for batch in data.padded_batches(split, batch_size):
        batch_loss, batch_confusion = jax.device_get(sums(batch))
        loss += float(batch_loss)
        confusion = confusion + batch_confusion
    return Scores(loss / len(split.labels), confusion.astype(np.int64))


def class_capsules(
    spec: ModelSpec, params: dict, split: data.Split, batch_size: int
) -> Float[np.ndarray, "n classes lanes"]:
    """Class capsules of every image of a split, in float32."""
    capsules_of = _compiled_encoder(spec)
    batches = data.padded_batches(split, batch_size)
    v = [np.asarray(capsules_of(params["encoder"], images), np.float32) for images, _, _ in batches]
    return np.concatenate(v)[: len(split.labels)]


@functools.lru_cache(maxsize=1)
def _compiled_encoder(spec: ModelSpec) -> Callable[[dict, np.ndarray], Array]:
    options = conv.compiler_options(jax.default_backend())
    return jax.jit(lambda encoder, images: encode(spec, encoder, to_pixels(images)), compiler_options=options)


def lane_spreads(spec: ModelSpec, params: dict, split: data.Split, batch_size: int) -> list[float]:
    """How much the entries of each lane in the class capsules differ between images, in the order of the columns.

    The standard deviation over 500 images of the whole split, mean over classes, over that of a lane with its share in
    a model that gives probability 1 to the true class and 0 to others, where classes are equally many. A lane below
    `ALIVE` says the same of every image: it is near zero or saturated, where squash has almost no gradient. Empty for
    CapsNet.
    """
    if not spec.lane_groups:
        return []
    evenly = np.unique(np.linspace(0, len(split.labels) - 1, _SPREAD_IMAGES).astype(int))
    v = class_capsules(spec, params, split[evenly], min(batch_size, len(evenly)))
    share = spec.certain_length / math.sqrt(v.shape[2])
    perfect = share * math.sqrt((1 - 1 / spec.num_classes) / spec.num_classes)
    return [float(spread) / perfect for spread in v.std(axis=0).mean(axis=0)]


def evaluate_workdir(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Scores the best checkpoint of a workdir on the test set of `config`, and draws the pictures anew.

    Raises:
      InputError: the workdir holds no trained model, or the images do not fit it.
    """
    trained = load_trained(workdir)
    dataset = config.data.load()
    shape, expected = dataset.test.images.shape[1:], trained.spec.image_shape
    if shape != expected or dataset.class_names != trained.class_names:
        raise InputError(
            f"the model in {workdir} takes {expected} images of {len(trained.class_names)} classes, {dataset.name} "
            f"has {shape} images of {len(dataset.class_names)}: evaluate on data like what it was trained on"
        )
    evaluator = make_evaluator(trained.spec, config.train.reconstruction_weight)
    scores = evaluator(trained.params, dataset.test, config.train.batch_size)
    write_pictures(workdir, trained.spec, trained.params, dataset, scores)
    return {
        **scores.to_dict(dataset.class_names),
        "lane_spreads": lane_spreads(trained.spec, trained.params, dataset.test, config.train.batch_size),
        "step": trained.step,
        "images": len(dataset.test.labels),
        "data": {"name": dataset.name, **dataset.provenance},
    }


def write_pictures(workdir: Path, spec: ModelSpec, params: dict, dataset: data.Dataset, scores: Scores) -> None:
    """Draws `confusion.png` and `reconstructions.png` of the test set."""
    save_confusion(workdir / "confusion.png", scores, dataset.class_names)
    save_reconstructions(workdir / "reconstructions.png", spec, params, dataset.test, dataset.class_names)


def save_confusion(path: Path, scores: Scores, class_names: Sequence[str]) -> None:
    """Draws the confusion matrix, each row as shares of its class, with the accuracy of each class."""
    from matplotlib.figure import Figure

    n = len(class_names)
    shares = scores.confusion / np.maximum(1, scores.confusion.sum(axis=1, keepdims=True))
    size = max(5.0, 0.45 * n + 2.5) if n <= 40 else 16.0
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1)
    names = [
        name if a is None else f"{name}  {a:.1%}"
        for name, a in zip(class_names, scores.accuracy_per_class, strict=True)
    ]
    font = 9 if n <= 40 else 5
    axes.set_xticks(range(n), class_names, rotation=90, fontsize=font)
    axes.set_yticks(range(n), names, fontsize=font)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class, and its accuracy")
    axes.set_title(f"accuracy {scores.accuracy:.2%}")
    if n <= 20:
        for t, p in np.argwhere(scores.confusion > 0):
            color = "black" if shares[t, p] > 0.6 else "white"
            axes.text(p, t, scores.confusion[t, p], ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the true class")
    figure.savefig(path, dpi=120)


def save_reconstructions(
    path: Path, spec: ModelSpec, params: dict, split: data.Split, class_names: Sequence[str], examples: int = 4
) -> None:
    """Draws, for up to 10 classes, a column of images, each above its reconstruction from the predicted class.

    A prediction that is wrong is named in red.
    """
    from matplotlib.figure import Figure

    @jax.jit
    def reconstruct(params, images):
        v, reconstructions = apply_model(spec, params, to_pixels(images))
        return jnp.argmax(capsules.lengths(v), axis=-1), reconstructions

    columns = min(10, spec.num_classes)
    figure = Figure(figsize=(1.15 * columns, 2.5 * examples), layout="constrained")
    figure.suptitle("test images, and below each its reconstruction from the predicted class's capsule", fontsize=9)
    axes = figure.subplots(2 * examples, columns, squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for label in range(columns):
        images = split.images[split.labels == label][:examples]
        if not len(images):
            continue
        predicted, reconstructions = jax.device_get(reconstruct(params, images))
        for i in range(len(images)):
            above, below = axes[2 * i, label], axes[2 * i + 1, label]
            above.imshow(images[i].squeeze(), cmap="gray", vmin=0, vmax=255)
            above.set_title(class_names[label], fontsize=7)
            below.imshow(reconstructions[i].squeeze(), cmap="gray", vmin=0, vmax=1)
            below.set_title(class_names[predicted[i]], fontsize=7, color="black" if predicted[i] == label else "red")
    figure.savefig(path, dpi=110)

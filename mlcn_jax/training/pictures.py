"""Pictures for a test set: confusion matrix and reconstructions."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.files import write_figure
from mlcn_jax.nn.model import apply_model, class_lengths
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.evaluate import Scores

_GAP = 0.3  # between pictures, for a name, as a share of their size
_COLUMNS, _LEAST_COLUMNS = 10, 5  # of classes; fewer than the latter leave a margin, so that the title fits
_EXAMPLES = 4  # of each class


def write_pictures(workdir: Path, spec: ModelSpec, params: dict, dataset: datasets.Dataset, scores: Scores) -> None:
    """Draws `confusion.png` and `reconstructions.png` of the test set."""
    save_confusion(workdir / "confusion.png", scores, dataset.class_names)
    save_reconstructions(workdir / "reconstructions.png", spec, params, dataset.test, dataset.class_names)


def save_confusion(path: Path, scores: Scores, class_names: Sequence[str]) -> None:
    """Draws the confusion matrix, each row as fractions of its class, with the accuracy of each class."""
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
    rotation = 90 if max(map(len, class_names)) > 2 else 0
    axes.set_xticks(range(n), class_names, rotation=rotation, fontsize=font, parse_math=False)
    axes.set_yticks(range(n), names, fontsize=font, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class, and its accuracy")
    axes.set_title(f"accuracy {scores.accuracy:.2%}")
    if n <= 20:
        for t, p in np.argwhere(scores.confusion > 0):
            color = "black" if shares[t, p] > 0.6 else "white"
            axes.text(p, t, scores.confusion[t, p], ha="center", va="center", fontsize=7, color=color)
    beside = axes.inset_axes((1.03, 0.0, 0.04, 1.0))  # as tall as the matrix
    figure.colorbar(picture, cax=beside, label="share of the true class")
    write_figure(figure, path, dpi=120, bbox_inches="tight")


def save_reconstructions(
    path: Path, spec: ModelSpec, params: dict, split: datasets.Split, class_names: Sequence[str]
) -> None:
    """Draws a column of images for each of up to 10 classes, each above its reconstruction from the predicted class.

    Wrong predictions are labelled in red.
    """
    from matplotlib.figure import Figure

    labels = np.unique(split.labels)[:_COLUMNS]
    shown = [np.flatnonzero(split.labels == label)[:_EXAMPLES] for label in labels]
    images = split.images[np.concatenate(shown)]

    @jax.jit
    def reconstruct(params, images):
        v, reconstructions = apply_model(spec, params, to_pixels(images))
        return jnp.argmax(class_lengths(spec, v), axis=-1), reconstructions

    predicted, reconstructions = jax.device_get(reconstruct(params, images))
    pixels = images / np.float32(255), np.clip(reconstructions, 0, 1)
    height, width = (round(_GAP * size) + size for size in spec.image_shape[:2])
    # One picture of all: an axis for each image would take seconds to draw.
    mosaic = np.ones((2 * _EXAMPLES * height, len(labels) * width, 3))
    across = 1.15 * max(_LEAST_COLUMNS, len(labels))
    figure = Figure(figsize=(across, 1.15 * len(labels) * len(mosaic) / len(mosaic[0]) + 0.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title("test images, and below each its reconstruction from the predicted class's capsule", fontsize=9)
    axes.axis("off")
    places = [(row, column) for column, images_of in enumerate(shown) for row in range(len(images_of))]
    for i, (row, column) in enumerate(places):
        label = labels[column]
        right = predicted[i] == label
        for below, (name, color) in enumerate(((label, "black"), (predicted[i], "black" if right else "red"))):
            top, left = (2 * row + below + 1) * height - spec.image_shape[0], column * width
            mosaic[top : top + spec.image_shape[0], left : left + spec.image_shape[1]] = pixels[below][i]
            middle = left + spec.image_shape[1] / 2
            text = axes.text(middle, top - 1, class_names[name], ha="center", va="bottom", fontsize=7, color=color)
            text.set_parse_math(False)
    axes.imshow(mosaic)
    write_figure(figure, path, dpi=110)

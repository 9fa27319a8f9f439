"""Scores over an entire split of a dataset."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import padded_batches, to_pixels
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn import capsules, conv, losses
from mlcn_jax.nn.model import ModelSpec, classification_loss, encode, reconstruct

ALIVE = 0.05  # minimum spread of a lane that distinguishes images
_SPREAD_IMAGES = 500


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a split; `confusion[t, p]` counts images of class t that were classified as p."""

    loss: float
    confusion: np.ndarray

    @property
    def accuracy(self) -> float:
        """Fraction of images whose longest class capsule is that of their class."""
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


def make_evaluator(
    spec: ModelSpec, reconstruction_weight: float, mesh: Mesh | None = None
) -> Callable[[dict, datasets.Split, int], Scores]:
    """A function `(params, split, batch_size) -> Scores` that compiles once.

    The loss is that of training: the mean over images of margin loss plus weighted reconstruction loss, decoded
    from the true class's capsule. Accuracy depends on the lengths only. With a mesh, `params` must be sharded by it.
    """

    lane_axis = mesh_lib.lane_axis(mesh)

    def sums_of_batch(params, images, labels, mask):
        pixels = to_pixels(images)
        v = encode(spec, params["encoder"], pixels, lane_axis)
        return head_sums(spec, reconstruction_weight, params["decoder"], v, pixels, labels, mask, lane_axis)

    options = conv.compiler_options(jax.default_backend())
    sums = jax.jit(mesh_lib.sum_over(mesh, sums_of_batch), compiler_options=options)

    def evaluate(params: dict, split: datasets.Split, batch_size: int) -> Scores:
        return scores_of(split, batch_size, lambda batch: sums(params, *mesh_lib.place_batch(mesh, batch)))

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
    """Sums over the images that `mask` keeps, from their class capsules: the losses, and the confusion matrix."""
    loss = classification_loss(spec, v, labels)
    reconstructions = reconstruct(spec, decoder, v, labels, lane_axis)
    loss += reconstruction_weight * losses.reconstruction_loss(reconstructions, pixels)
    truth = jax.nn.one_hot(labels, spec.num_classes) * mask[:, None]
    predicted = jax.nn.one_hot(jnp.argmax(capsules.lengths(v), axis=-1), spec.num_classes)
    return jnp.sum(loss * mask), truth.T @ predicted


def scores_of(split: datasets.Split, batch_size: int, sums: Callable[[tuple], tuple[Array, Array]]) -> Scores:
    """Scores of a split; `sums` returns the result of `head_sums` for each of its padded batches."""
    loss, confusion = 0.0, np.zeros(())
    for batch in padded_batches(split, batch_size):
        batch_loss, batch_confusion = jax.device_get(sums(batch))
        loss += float(batch_loss)
        confusion = confusion + batch_confusion
    return Scores(loss / len(split.labels), confusion.astype(np.int64))


def class_capsules(
    spec: ModelSpec, params: dict, split: datasets.Split, batch_size: int
) -> Float[np.ndarray, "n classes lanes"]:
    """Class capsules of every image of a split, in float32."""
    capsules_of = _compiled_encoder(spec)
    batches = padded_batches(split, batch_size)
    v = [np.asarray(capsules_of(params["encoder"], images), np.float32) for images, _, _ in batches]
    return np.concatenate(v)[: len(split.labels)]


@functools.lru_cache(maxsize=1)
def _compiled_encoder(spec: ModelSpec) -> Callable[[dict, np.ndarray], Array]:
    options = conv.compiler_options(jax.default_backend())
    return jax.jit(lambda encoder, images: encode(spec, encoder, to_pixels(images)), compiler_options=options)


def lane_spreads(spec: ModelSpec, params: dict, split: datasets.Split, batch_size: int) -> list[float]:
    """How much each lane's entries in the class capsules vary between images, in the order of the columns.

    The standard deviation over 500 images from the entire split, averaged over classes, divided by that of a lane in a
    perfect model (probability 1 for the true class, 0 for others) with equally frequent classes. A lane below `ALIVE`
    gives the same output for every image: it is near zero or saturated, where squash has almost no gradient. Empty
    for CapsNet.
    """
    if not spec.lane_groups:
        return []
    evenly = np.unique(np.linspace(0, len(split.labels) - 1, _SPREAD_IMAGES).astype(int))
    v = class_capsules(spec, params, split[evenly], min(batch_size, len(evenly)))
    share = spec.certain_length / math.sqrt(v.shape[2])
    perfect = share * math.sqrt((1 - 1 / spec.num_classes) / spec.num_classes)
    return [float(spread) / perfect for spread in v.std(axis=0).mean(axis=0)]

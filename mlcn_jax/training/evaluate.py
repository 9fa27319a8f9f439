"""Scores over an entire split of a dataset."""

import dataclasses
import functools
import logging
import math
import time
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
from mlcn_jax.errors import Diverged
from mlcn_jax.nn import losses
from mlcn_jax.nn.calibration import group_statistics, join_statistics
from mlcn_jax.nn.model import (
    class_lengths,
    class_probabilities,
    classification_loss,
    encode,
    join_lanes,
    lane_outputs,
    reconstruct,
)
from mlcn_jax.nn.spec import ModelSpec

_log = logging.getLogger(__name__)

ALIVE = 0.05  # minimum spread of a lane that distinguishes images
_SPREAD_IMAGES = 500
_SECONDS_BETWEEN_REPORTS = 5.0
_TINY = 1e-30


_BINS = 15  # of the calibration error


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a split.

    Attributes:
      loss: the loss of training on labels, without a teacher, mean over images.
      confusion: entry [t, p] counts images of class t that were classified as p.
      nll: negative log-likelihood of the labels in nats, mean over images, from probabilities that are divided by their
        sum over classes; one below 1e-30 counts as 1e-30, 69 nats.
      calibration_error: mean difference between the largest of these probabilities and accuracy, over 15 bins of equal
        width, weighted by their images (Guo et al. 2017, section 2).
      lane_accuracies: of each lane alone; of each dimension of the class capsules for CapsNet.
    """

    loss: float
    confusion: np.ndarray
    nll: float = math.nan
    calibration_error: float = math.nan
    lane_accuracies: Sequence[float] = ()

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

    def to_dict(self, class_names: Sequence[str], split: str = "test") -> dict[str, Any]:
        """The scores of a split of this name, ready for JSON."""
        return {
            f"{split}_accuracy": self.accuracy,
            f"{split}_loss": self.loss,
            f"{split}_nll": self.nll,
            f"{split}_calibration_error": self.calibration_error,
            f"{split}_accuracy_per_class": dict(zip(class_names, self.accuracy_per_class, strict=True)),
        }


def make_evaluator(spec: ModelSpec, reconstruction_weight: float, mesh: Mesh | None = None) -> Callable[..., Scores]:
    """A function `(params, split, batch_size, flips=False) -> Scores` that compiles once for each value of `flips`.

    The loss is that of training: the mean over images of classification loss plus weighted reconstruction loss, decoded
    from the true class's capsule. All else depends on the lengths only; with `flips`, on the root mean square of the
    lengths for the image and for its mirror image. With a mesh, `params` must be sharded by it.
    """

    lane_axis = mesh_lib.lane_axis(mesh)

    def sums_of_batch(flips, params, images, labels, mask):
        pixels = to_pixels(images)
        outputs = [lane_outputs(spec, params["encoder"], x, lane_axis) for x in views(pixels, flips)]
        return head_sums(spec, reconstruction_weight, params["decoder"], outputs, pixels, labels, mask, lane_axis)

    options = spec.compiler_options(jax.default_backend())
    sums = {
        flips: jax.jit(mesh_lib.sum_over(mesh, functools.partial(sums_of_batch, flips)), compiler_options=options)
        for flips in (False, True)
    }

    def evaluate(params: dict, split: datasets.Split, batch_size: int, flips: bool = False) -> Scores:
        return scores_of(split, batch_size, lambda batch: sums[flips](params, *mesh_lib.place_batch(mesh, batch)))

    return evaluate


def make_calibrator(spec: ModelSpec, mesh: Mesh | None = None) -> Callable[[dict, Sequence[np.ndarray]], dict]:
    """A function `(encoder, batches) -> statistics` (`calibration.join_statistics`), for batches of uint8 images.

    With a mesh, the encoder's parameters must be sharded by it, as the statistics will be. If no lane normalises,
    the result is empty.
    """
    if not spec.normalises:
        return lambda encoder, batches: {}
    options = spec.compiler_options(jax.default_backend())

    def of_batch(encoder, images):
        return group_statistics(spec, encoder, to_pixels(images), mesh_lib.num_lane_shares(mesh))

    collect = jax.jit(mesh_lib.lanes_over(mesh, of_batch), compiler_options=options)
    join = jax.jit(join_statistics)

    def calibrate(encoder: dict, batches: Sequence[np.ndarray]) -> dict:
        return join([collect(encoder, mesh_lib.place_batch(mesh, batch)) for batch in batches])

    return calibrate


def check_statistics(statistics: dict, step: int) -> None:
    """Raises Diverged unless the statistics of a calibrator are finite."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(statistics)):
        raise Diverged(f"step {step}: statistics of normalisation are not finite; earlier checkpoints are kept")


def views(pixels: Float[Array, "batch h w c"], flips: bool) -> list[Float[Array, "batch h w c"]]:
    """The images as they are, and mirrored left to right if `flips`."""
    return [pixels, pixels[:, :, ::-1]] if flips else [pixels]


def head_sums(
    spec: ModelSpec,
    reconstruction_weight: float,
    decoder: dict,
    outputs: Sequence[Float[Array, "batch classes dim"]],
    pixels: Float[Array, "batch h w channels"],
    labels: Int[Array, " batch"],
    mask: Float[Array, " batch"],
    lane_axis: str = "",
) -> dict[str, Array]:
    """Sums over the images that `mask` keeps, from the lanes' outputs for each view of them, the plain one first.

    `loss`, `confusion`, `nll`, `lanes` [dim]: correct predictions of each lane alone, without flips, and `bins`
    [15, 3]: images, probability and correct predictions in each bin.
    """
    v = [join_lanes(spec, each) for each in outputs]
    loss = classification_loss(spec, outputs[0], labels)
    reconstructions = reconstruct(spec, decoder, v[0], labels, lane_axis)
    loss += reconstruction_weight * losses.reconstruction_loss(reconstructions, pixels)
    lengths = class_lengths(spec, v[0])
    if len(v) > 1:
        lengths = jnp.sqrt(sum(jnp.square(class_lengths(spec, each)) for each in v) / len(v))
    probabilities = class_probabilities(spec, lengths)
    probabilities /= jnp.maximum(jnp.sum(probabilities, axis=-1, keepdims=True), _TINY)
    truth = jax.nn.one_hot(labels, spec.num_classes) * mask[:, None]
    predicted = jax.nn.one_hot(jnp.argmax(lengths, axis=-1), spec.num_classes)
    likelihood = jnp.sum(truth * probabilities, axis=-1)
    largest, correct = jnp.max(probabilities, axis=-1), jnp.sum(truth * predicted, axis=-1)
    bins = jax.nn.one_hot(jnp.clip((largest * _BINS).astype(jnp.int32), 0, _BINS - 1), _BINS)
    of_lanes = jnp.argmax(jnp.abs(v[0]), axis=1) == labels[:, None]
    return {
        "loss": jnp.sum(loss * mask),
        "confusion": truth.T @ predicted,
        "nll": -jnp.sum(mask * jnp.log(jnp.where(mask > 0, jnp.maximum(likelihood, _TINY), 1.0))),
        "lanes": mask @ of_lanes.astype(mask.dtype),
        "bins": bins.T @ jnp.stack([mask, largest * mask, correct], axis=-1),
    }


def sum_shapes(num_classes: int, num_lanes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the results of `head_sums`."""
    return {"loss": (), "confusion": (num_classes, num_classes), "nll": (), "lanes": (num_lanes,), "bins": (_BINS, 3)}


def scores_of(split: datasets.Split, batch_size: int, sums: Callable[[tuple], dict[str, Array]]) -> Scores:
    """Scores of a split; `sums` returns the result of `head_sums` for each of its padded batches.

    A long evaluation logs its progress.
    """
    total: dict[str, np.ndarray] = {}
    count, said = len(split.labels), time.monotonic()
    for i, batch in enumerate(padded_batches(split, batch_size)):
        for name, value in jax.device_get(sums(batch)).items():
            total[name] = total.get(name, 0) + np.asarray(value, np.float64)
        done = min(count, (i + 1) * batch_size)
        if time.monotonic() - said > _SECONDS_BETWEEN_REPORTS and done < count:
            said = time.monotonic()
            _log.info("scored %s of %s images", f"{done:,}", f"{count:,}")
    _, probability, correct = total["bins"].T
    return Scores(
        loss=float(total["loss"]) / count,
        confusion=total["confusion"].astype(np.int64),
        nll=float(total["nll"]) / count,
        calibration_error=float(np.abs(probability - correct).sum()) / count,
        lane_accuracies=tuple((total["lanes"] / count).tolist()),
    )


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
    options = spec.compiler_options(jax.default_backend())
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
    joint = ~spec.classifies_alone if spec.margin_loss == "joint" else np.zeros(v.shape[2], bool)
    certain = np.where(joint, 1 / math.sqrt(max(1, joint.sum())), 1.0)  # the length of each lane's entry for its class
    perfect = certain * math.sqrt((1 - 1 / spec.num_classes) / spec.num_classes)
    return (v.std(axis=0).mean(axis=0) / perfect).tolist()

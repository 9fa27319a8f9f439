"""Distillation: a teacher's predictions, and the losses that combine them with the labels."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mlcn_jax.nn import losses
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.nn.spec import ModelSpec

_TINY = 1e-30
Probabilities = Callable[[Float[Array, "batch h w channels"]], Float[Array, "batch classes"]]


@dataclasses.dataclass(frozen=True)
class Distillation:
    """How lanes learn from a teacher.

    Attributes:
      probabilities: the teacher's probability of each class for images with pixels in [0, 1].
      weight: weight of the teacher in the loss, in (0, 1]; the labels get the rest.
      temperature: that of `losses.soften` for the teacher, and in `losses.soft_divergence` for residual lanes.

    Source: Hinton et al. 2015, arXiv 1503.02531, for soft targets; Beyer et al. 2022, arXiv 2106.05237, section 2, for
    a teacher that sees each image as its student does.
    """

    probabilities: Probabilities
    weight: float
    temperature: float

    def target(
        self, labels: Int[Array, " batch"], soft: Float[Array, "batch classes"]
    ) -> Float[Array, "batch classes"]:
        """Probability of each class for a loss that is linear in it, as the margin loss is: labels and teacher mixed.

        The loss is then the expected margin loss of a label drawn from the softened teacher. Lengths are not logits and
        have no temperature, so where it is above 1, lanes become less sure of a class than the teacher is.
        """
        softened = losses.soften(soft, self.temperature)
        return (1 - self.weight) * jax.nn.one_hot(labels, soft.shape[-1]) + self.weight * softened

    def cross_entropy(
        self,
        log_probabilities: Float[Array, "batch classes"],
        labels: Int[Array, " batch"],
        smoothing: float,
        soft: Float[Array, "batch classes"],
    ) -> Float[Array, " batch"]:
        """Loss of a lane that classifies alone: cross-entropy of the labels and distance from the teacher, mixed."""
        own = losses.cross_entropy(log_probabilities, labels, smoothing)
        from_teacher = losses.soft_divergence(log_probabilities, soft, self.temperature)
        return (1 - self.weight) * own + self.weight * from_teacher


def model_probabilities(spec: ModelSpec, encoder: dict) -> Probabilities:
    """A model's predictions for images: each class's share of the sum of the squared lengths.

    Where lanes classify alone, that is the weighted mean of their probabilities. Otherwise, what a student learns
    beyond the label are the lengths of other classes that the margin loss has left above m_minus.
    """

    def probabilities(images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes"]:
        arrays = jax.tree.map(jnp.asarray, encoder)  # of any device; closed over as NumPy's, convolutions refuse them
        squares = jnp.square(class_lengths(spec, encode(spec, arrays, images)))
        return squares / jnp.maximum(jnp.sum(squares, axis=-1, keepdims=True), _TINY)

    return probabilities


def mean_probabilities(members: list[Probabilities]) -> Probabilities:
    """The predictions of an ensemble: the mean of the models' probabilities (Hinton et al. 2015, section 5)."""

    def probabilities(images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes"]:
        return sum(member(images) for member in members) / len(members)  # type: ignore[return-value]

    return probabilities

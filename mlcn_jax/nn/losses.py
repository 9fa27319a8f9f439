"""Margin loss on class lengths, losses of lanes that classify alone, and the reconstruction error."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_TINY = 1e-30


def margin_loss(
    class_lengths: Float[Array, "batch classes"],
    labels: Int[Array, " batch"] | Float[Array, "batch classes"],
    m_plus: float = 0.9,
    m_minus: float = 0.1,
    absent_weight: float = 0.5,
) -> Float[Array, " batch"]:
    """Margin loss of each image, summed over classes, in float32.

    `T max(0, m_plus - |v|)^2 + absent_weight (1 - T) max(0, |v| - m_minus)^2`.

    T is 1 for the label, or the probability p of each class where these are given instead. The loss is linear in T, so
    it is then the expected loss of a label drawn from p. It is least at the length
    `(p m_plus + a (1 - p) m_minus) / (p + a (1 - p))` with a = absent_weight, which grows with p.

    Source: Sabour et al. 2017, eq. 4; Menon et al. 2021, arXiv 2005.10419, eq. 3, for expected losses as distillation.
    """
    class_lengths = class_lengths.astype(jnp.float32)
    target = labels if labels.ndim == 2 else jax.nn.one_hot(labels, class_lengths.shape[-1])
    present = jnp.square(jnp.maximum(0.0, m_plus - class_lengths))
    absent = jnp.square(jnp.maximum(0.0, class_lengths - m_minus))
    return jnp.sum(target * present + absent_weight * (1.0 - target) * absent, axis=-1)


def lane_margin_loss(
    v: Float[Array, "batch classes lanes"], labels: Int[Array, " batch"] | Float[Array, "batch classes"]
) -> Float[Array, "lanes batch"]:
    """Margin loss of each image with each lane classifying alone, in float32; labels as for `margin_loss`.

    Lane l is judged by `|v_kl|`, the length class capsule k would have if l were the only lane. If L lanes agree on
    lengths, the class capsules are sqrt(L) times as long.

    Source: this project. In the published loss, a lane whose entries are small is pushed towards zero by the
    lengths that result from the other lanes.
    """
    alone = jnp.abs(v.astype(jnp.float32))
    return jax.vmap(margin_loss, in_axes=(2, None))(alone, labels)


def cross_entropy(
    log_probabilities: Float[Array, "batch classes"], labels: Int[Array, " batch"], smoothing: float = 0.0
) -> Float[Array, " batch"]:
    """Cross-entropy of each image, in float32, from log-probabilities that are normalised over classes.

    The target is 1 - smoothing for the label plus smoothing / K for each of K classes.

    Source: Szegedy et al. 2016, section 7, for label smoothing.
    """
    log_probabilities = log_probabilities.astype(jnp.float32)
    num_classes = log_probabilities.shape[-1]
    target = (1.0 - smoothing) * jax.nn.one_hot(labels, num_classes) + smoothing / num_classes
    return -jnp.sum(target * log_probabilities, axis=-1)


def soften(probabilities: Float[Array, "batch classes"], temperature: float) -> Float[Array, "batch classes"]:
    """Probabilities raised to the power 1 / T and normalised, which divides their logits by the temperature T > 0.

    Source: Hinton et al. 2015, arXiv 1503.02531, equation 1.
    """
    return jax.nn.softmax(jnp.log(jnp.maximum(probabilities, _TINY)) / temperature)


def soft_divergence(
    log_probabilities: Float[Array, "batch classes"], soft: Float[Array, "batch classes"], temperature: float
) -> Float[Array, " batch"]:
    """Distance of each image from a teacher's probabilities, in float32: 0 where both agree.

    `T^2 KL(q || p)`, with q and p the probabilities of teacher and student at temperature T (`soften`). The factor T^2
    keeps gradients as large at every temperature.

    Args:
      log_probabilities: of the student, normalised over classes.
      soft: the teacher's probabilities.
      temperature: T, above 0.

    Source: Hinton et al. 2015, arXiv 1503.02531, section 2.
    """
    p = jax.nn.log_softmax(log_probabilities.astype(jnp.float32) / temperature)
    q = jax.nn.log_softmax(jnp.log(jnp.maximum(soft, _TINY)) / temperature)
    return temperature**2 * jnp.sum(jnp.exp(q) * (q - p), axis=-1)


def ensemble_cross_entropy(
    log_probabilities: Float[Array, "batch classes lanes"], labels: Int[Array, " batch"], smoothing: float = 0.0
) -> Float[Array, " batch"]:
    """Cross-entropy of the mean of the lanes' probabilities, from their logarithms, as for `cross_entropy`."""
    log_probabilities = log_probabilities.astype(jnp.float32)
    mean = jax.nn.logsumexp(log_probabilities, axis=-1) - jnp.log(log_probabilities.shape[-1])
    return cross_entropy(mean, labels, smoothing)


def reconstruction_loss(
    reconstructions: Float[Array, "batch height width channels"],
    images: Float[Array, "batch height width channels"],
) -> Float[Array, " batch"]:
    """Mean squared error over the pixels of each image, in float32; pixels are in [0, 1].

    Sabour et al. 2017, section 4.1, sum the squared errors with weight 0.0005; for 28x28x1, the mean over 784
    pixels with weight 0.392 is the same.
    """
    difference = reconstructions.astype(jnp.float32) - images.astype(jnp.float32)
    return jnp.mean(jnp.square(difference), axis=(1, 2, 3))

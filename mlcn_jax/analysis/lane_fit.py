"""Fits what joined lanes share: their weights in class lengths, and the decoder that reads their columns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8
from scipy.optimize import minimize

from mlcn_jax.data.batches import Batches, Split, to_pixels
from mlcn_jax.nn import losses
from mlcn_jax.nn.model import CapsuleNetwork, reconstruct
from mlcn_jax.nn.spec import ModelSpec

_TINY = 1e-12
_DIGITS = 4  # decimals of a stored weight
_DECODER_BATCH = 100
_DECODER_RATE = 1e-3


def fit_weights(v: Float[np.ndarray, "n classes lanes"], labels: Int[np.ndarray, " n"]) -> tuple[float, ...]:
    """Weights w >= 0, 1 on average, that minimise the negative log-likelihood of the labels.

    The probability of class k is `sum_l w_l v_kl^2`, divided by its sum over classes; of lanes that return
    probabilities p_l it is `sum_l w_l p_l / sum_l w_l`, a mixture.

    Args:
      v: class capsules of validation images.
      labels: their classes.

    Source: Breiman 1996, "Stacked regressions", for weights of models fitted on held-out data.
    """
    return _fit(*_squares(v, labels))


def fit_first_weights(
    v: Float[np.ndarray, "n classes lanes"], labels: Int[np.ndarray, " n"]
) -> list[tuple[float, ...]]:
    """`fit_weights` of the first lane, of the first two, and so on."""
    of_label, of_all = _squares(v, labels)
    return [_fit(of_label[:, :count], of_all[:, :count]) for count in range(1, v.shape[-1] + 1)]


def _squares(v: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squared entries of the labels' class capsules and the sum of those of all classes, each [n, lanes]."""
    squares = np.square(v.astype(np.float64))
    of_label = np.take_along_axis(squares, labels[:, None, None].astype(np.int64), axis=1)[:, 0]
    return of_label + _TINY, squares.sum(axis=1) + _TINY


def _fit(of_label: Float[np.ndarray, "n lanes"], of_all: Float[np.ndarray, "n lanes"]) -> tuple[float, ...]:
    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        label, everything = of_label @ weights, of_all @ weights
        gradient = (of_all / everything[:, None] - of_label / label[:, None]).mean(axis=0)
        return float(np.mean(np.log(everything) - np.log(label))), gradient

    count = of_all.shape[-1]
    found = minimize(loss, np.ones(count), jac=True, method="L-BFGS-B", bounds=[(_TINY, None)] * count).x
    return tuple(round(float(weight), _DIGITS) for weight in found / found.mean())


def accuracy(
    v: Float[np.ndarray, "n classes lanes"], labels: Int[np.ndarray, " n"], weights: Float[np.ndarray, " lanes"]
) -> float:
    """Fraction of images for which the longest class capsule, with these weights, is that of the true class."""
    return float(np.mean(np.argmax(np.square(v, dtype=np.float64) @ weights, axis=-1) == labels))


def train_decoder(
    spec: ModelSpec, v: Float[np.ndarray, "n classes lanes"], split: Split, num_epochs: int, seed: int
) -> dict:
    """The decoder's parameters, trained from scratch with Adam on the columns of trained lanes, which stay unchanged.

    Args:
      spec: the model.
      v: class capsules of the images.
      split: the images, and the classes whose capsules are decoded.
      num_epochs: passes over the images; 0 returns the initial values.
      seed: seed of the initial values and of the order of the images.
    """
    network, optimizer = CapsuleNetwork(spec), optax.adam(_DECODER_RATE)
    key, one = jax.random.key(seed), jnp.zeros((1, spec.num_classes, v.shape[-1]))
    classes = jnp.zeros(1, jnp.int32)
    params = jax.jit(lambda: network.init(key, one, classes, method="reconstruct"))()["params"]["decoder"]
    state = optimizer.init(params)

    def loss_of(
        params: dict, v: Array, images: UInt8[Array, "batch h w channels"], labels: Int[Array, " batch"]
    ) -> Array:
        return jnp.mean(losses.reconstruction_loss(reconstruct(spec, params, v, labels), to_pixels(images)))

    @jax.jit
    def step(params, state, *batch):
        updates, state = optimizer.update(jax.grad(loss_of)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    size = min(_DECODER_BATCH, len(split.labels))
    order = Batches(split.images, np.arange(len(split.labels), dtype=np.int32), size, seed)
    for number in range(num_epochs * order.steps_per_epoch):
        images, places = order.at(number)
        params, state = step(params, state, v[places], images, split.labels[places])
    return params

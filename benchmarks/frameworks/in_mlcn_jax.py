"""The networks in mlcn_jax: its own training step, compiled as the command `train` compiles it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from benchmarks import networks
from benchmarks.networks import Network
from mlcn_jax import host
from mlcn_jax.data import batches
from mlcn_jax.distributed.mesh import place_batch
from mlcn_jax.nn import capsules, conv
from mlcn_jax.nn.calibration import calibrate, fold_statistics, whiten
from mlcn_jax.nn.model import CapsuleNetwork, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def make_spec(network: Network, dtype: str = "float32") -> ModelSpec:
    """The network as mlcn_jax's `ModelSpec`. Without prior bias: it is no variable in the peers."""
    name = "mlcn" if network.lanes else "capsnet"
    shape, classes = network.image_shape, networks.NUM_CLASSES
    return ModelSpec(
        name, shape, classes, network.lanes_text, prior_bias=False, compute_dtype=dtype, norm_group=network.batch
    )


def start_weights(network: Network, seed: int = 0, folded: bool = False) -> dict[str, np.ndarray]:
    """The weights from which every framework starts, by their path in mlcn_jax's parameters.

    If `folded`, normalisation has been folded into them with statistics of random images, as in an export.
    """
    spec = make_spec(network)
    params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(seed))
    images = np.random.default_rng(seed).random((networks.BATCH, *network.image_shape), np.float32)
    if network.kind == "resnet":
        params = whiten(spec, params, images)
    if folded:
        params = fold_statistics(spec, calibrate(spec, params, [images]))
    return traverse_util.flatten_dict(jax.device_get(params), sep="/")


class Program:
    """Training and inference of one network, started from given weights."""

    def __init__(self, network: Network, batch: int, weights: dict[str, np.ndarray], variant: str, dtype: str):
        del batch
        host.compute_in_turn()
        self.spec = make_spec(network, dtype)
        self.params = jax.device_put(traverse_util.unflatten_dict(weights, sep="/"))
        self.compiled = self.state = None
        self._warm = False
        options = conv.compiler_options(jax.default_backend())
        if variant.endswith("frozen"):
            weights, self.params = self.params, None
            self._infer = jax.jit(lambda images: self._lengths(weights, images), compiler_options=options)
        else:
            infer = jax.jit(self._lengths, compiler_options=options)
            self._infer = lambda images: infer(self.params, images)

    def _lengths(self, params, images):
        v = CapsuleNetwork(self.spec).apply({"params": params}, batches.to_pixels(images), method="encode")
        return capsules.lengths(v)

    def train(self, images: np.ndarray, labels: np.ndarray):
        """Takes a training step; returns its loss, which `float` waits for."""
        batch = place_batch(None, (images, labels))
        if self.compiled is None:
            optimizer = optax.adam(networks.LEARNING_RATE, eps=networks.EPSILON)
            step = make_train_step(self.spec, optimizer, reconstruction_weight=networks.RECONSTRUCTION_WEIGHT, seed=0)
            params, self.params = self.params, None  # the step takes them over
            self.state = TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
            self.compiled, _ = compile_step(step, self.state, batch)
            self.state, metrics = self.compiled(self.state, *batch)
            jax.block_until_ready(metrics)
            host.return_unused_memory()  # as training does
            return metrics["loss"]
        self.state, metrics = self.compiled(self.state, *batch)
        return metrics["loss"]

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Class probabilities [batch, classes]."""
        probabilities = np.asarray(self._infer(images))
        if not self._warm:
            host.return_unused_memory()  # as after compiling a training step
            self._warm = True
        return probabilities

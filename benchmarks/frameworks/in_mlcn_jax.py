"""The networks in mlcn_jax: its own training step, compiled as the command `train` compiles it, and their exports."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from benchmarks import networks
from benchmarks.networks import Network
from mlcn_jax import host
from mlcn_jax.allocator import return_unused_memory, share_heaps
from mlcn_jax.distributed.mesh import place_batch
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.nn.calibration import calibrate, fold_statistics, whiten
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.step import TrainState, compile_step, make_train_step, step_block

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_ROOT = Path(__file__).parents[2]
_OF_DATA = ("image_shape", "num_classes")  # fields of a `ModelSpec` that its images give


def make_spec(network: Network, dtype: str = "float32") -> ModelSpec:
    """The network as mlcn_jax's `ModelSpec`. Without prior bias: it is no variable in the peers."""
    name = "mlcn" if network.lanes else "capsnet"
    shape, classes = network.image_shape, networks.NUM_CLASSES
    return ModelSpec(
        name, shape, classes, network.lanes_text, prior_bias=False, compute_dtype=dtype, norm_group=network.batch
    )


def start_params(network: Network, calibrated: bool = False) -> dict:
    """The parameters from which every framework starts; if `calibrated`, with the statistics of random images."""
    spec = make_spec(network)
    params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(0))
    images = np.random.default_rng(0).random((networks.BATCH, *network.image_shape), np.float32)
    if network.kind == "resnet":
        params = whiten(spec, params, images)
    return calibrate(spec, params, [images]) if calibrated else params


def start_weights(network: Network, folded: bool = False) -> dict[str, np.ndarray]:
    """`start_params` by their path; if `folded`, with normalisation folded into them, as in an export."""
    params = start_params(network, calibrated=folded)
    if folded:
        params = fold_statistics(make_spec(network), params)
    return traverse_util.flatten_dict(jax.device_get(params), sep="/")


def write_export(network: Network, folder: Path, dtype: str) -> None:
    """Writes the network as `mlcn_jax export` writes a trained one, to `folder/export`, in place of an older one."""
    from mlcn_jax.config import RunConfig  # not above: with the checkpoints, it is memory that a step does not need
    from mlcn_jax.serving import export
    from mlcn_jax.training.trained import Trained

    spec = make_spec(network, dtype)
    shutil.rmtree(folder / "export", ignore_errors=True)  # the manifest lists all files that are there
    (folder / "export").mkdir()
    fields = {name: value for name, value in dataclasses.asdict(spec).items() if name not in _OF_DATA}
    config = RunConfig().replace({f"model.{name}": value for name, value in fields.items()})
    write_json(folder / "export" / "config.json", config.to_dict())
    names = tuple(map(str, range(networks.NUM_CLASSES)))
    trained = Trained(spec, names, jax.device_get(start_params(network, calibrated=True)), 0)
    export.write(trained, folder / "export", "python -m benchmarks.inference")


def prepare(network: Network, folder: Path, do: str, dtype: str, onnx_python: str = "") -> None:
    """Writes what frameworks start from: weights; for inference an export; with `onnx_python` its ONNX model.

    Raises:
      InputError: it cannot be converted.
    """
    np.savez(folder / "weights.npz", **start_weights(network, folded=do == "infer"))
    if do == "infer":
        write_export(network, folder, dtype)
    if onnx_python:
        command = [onnx_python, "-m", "benchmarks.convert", str(folder)]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no reason given"]
            raise InputError(f"{network.title} cannot be converted to ONNX: {reason[-1]}")


class Program:
    """Training of one network, started from given weights."""

    def __init__(self, network: Network, batch: int, weights: dict[str, np.ndarray], variant: str, dtype: str):
        del batch, variant
        host.compute_in_turn()  # as `mlcn_jax train` does
        self.spec = make_spec(network, dtype)
        share_heaps(self.spec.lanes)
        self.params = jax.device_put(traverse_util.unflatten_dict(weights, sep="/"))
        self.compiled = self.state = self.block = None

    def train(self, images: np.ndarray, labels: np.ndarray):
        """Takes a training step; returns its loss, which `float` waits for."""
        batch = place_batch(None, (images, labels))
        if self.compiled is None:
            optimizer = optax.adam(networks.LEARNING_RATE, eps=networks.EPSILON)
            step = make_train_step(self.spec, optimizer, reconstruction_weight=networks.RECONSTRUCTION_WEIGHT, seed=0)
            params, self.params = self.params, None  # the step takes them over
            self.state = TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
            self.compiled, _ = compile_step(self.spec, step, self.state, batch)
            self.block = step_block(self.compiled)
            self.state, metrics = self.compiled(self.state, *batch)
            jax.block_until_ready(metrics)
            return_unused_memory()  # as training does
            return metrics["loss"]
        self.block.prepare()
        self.state, metrics = self.compiled(self.state, *batch)
        return metrics["loss"]


def device_peak_bytes() -> int | None:
    """Most memory of the device so far; None where it is the host's."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

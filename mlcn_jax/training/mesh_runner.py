"""Training on one device or over a mesh, as one program."""

from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from mlcn_jax.data import datasets
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn.model import ModelSpec
from mlcn_jax.training import evaluate
from mlcn_jax.training.step import TrainState, compile_step, make_train_step


class MeshRunner:
    """A `runner.Runner` on one device or over a mesh, as one program.

    Args:
      spec, optimizer, reconstruction_weight, seed, max_shift, flip: as for `step.make_train_step`.
      mesh: from `mesh.make_mesh`; None for one device.
    """

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: optax.GradientTransformation,
        mesh: Mesh | None,
        *,
        reconstruction_weight: float,
        seed: int,
        max_shift: int = 0,
        flip: bool = False,
    ):
        self._mesh = mesh
        self._step = make_train_step(
            spec,
            optimizer,
            reconstruction_weight=reconstruction_weight,
            seed=seed,
            max_shift=max_shift,
            flip=flip,
            mesh=mesh,
        )
        self._evaluate = evaluate.make_evaluator(spec, reconstruction_weight, mesh)

    def start(self, state: TrainState) -> None:
        """Copies a full state, wherever it is, to the devices."""
        self._state = mesh_lib.place_state(self._mesh, state)

    def compile(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Compiles the step for batches of this shape; returns the seconds taken."""
        batch = mesh_lib.place_batch(self._mesh, (images, labels))
        self._compiled, seconds = compile_step(self._step, self._state, batch)
        return seconds

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Starts copying a batch to the devices; returns the arguments of `step`."""
        return mesh_lib.place_batch(self._mesh, (images, labels))

    def step(self, images: Array, labels: Array) -> dict[str, Array]:
        """Starts a training step and returns its metrics without waiting for them."""
        self._state, metrics = self._compiled(self._state, images, labels)
        return metrics

    def scores(self, split: datasets.Split, batch_size: int) -> evaluate.Scores:
        """Scores of the current parameters."""
        return self._evaluate(self._state.params, split, batch_size)

    def fetch(self) -> TrainState:
        """The full state in host memory, valid until the next step."""
        return mesh_lib.to_host(self._state)

"""Training on one device or over a mesh, as one program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from mlcn_jax.allocator import return_unused_memory
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn.calibration import with_statistics
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import largest_memory_bytes
from mlcn_jax.training import evaluate
from mlcn_jax.training.step import TrainState, compile_step, make_train_step, step_block

_PLAIN = Augmentation()


class MeshRunner:
    """A `runner.Runner` on one device or over a mesh, as one program.

    Args:
      spec, optimizer, reconstruction_weight, seed, augmentation, distillation, accumulation_steps, exchange_dtype: as
        for `step.make_train_step`.
      mesh: from `mesh.make_mesh`; None for one device.

    Arguments, results and errors of the methods are those of `runner.Runner`.

    Source: do Rosario et al. 2019, section III, for lanes on several devices; as one sharded program: this project.
    """

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: optax.GradientTransformation,
        mesh: Mesh | None,
        *,
        reconstruction_weight: float,
        seed: int,
        augmentation: Augmentation = _PLAIN,
        distillation: Distillation | None = None,
        accumulation_steps: int = 1,
        exchange_dtype: str = "float32",
    ):
        self._spec, self._mesh = spec, mesh

        def make_step(size: int) -> Callable:
            return make_train_step(
                spec,
                optimizer,
                reconstruction_weight=reconstruction_weight,
                seed=seed,
                augmentation=dataclasses.replace(augmentation, size=size),
                mesh=mesh,
                distillation=distillation,
                accumulation_steps=accumulation_steps,
                exchange_dtype=exchange_dtype,
            )

        self._make_step = make_step
        self._evaluate = evaluate.make_evaluator(spec, reconstruction_weight, mesh)
        self._calibrate = evaluate.make_calibrator(spec, mesh)
        self._statistics: dict = {}

    def start(self, state: TrainState) -> None:
        """Takes over a full state, from host memory or any device, whose arrays the first step consumes."""
        self._state = mesh_lib.place_state(self._mesh, state)

    def compile(self, images: np.ndarray, labels: np.ndarray, soft: Any = (), *, sizes: Sequence[int] = (0,)) -> float:
        """Compiles the step for batches of this shape and each of `sizes`; returns the seconds taken."""
        batch = self.place(images, labels, soft)
        compiled = {
            size: compile_step(self._spec, self._make_step(size), self._state, batch) for size in dict.fromkeys(sizes)
        }
        self._compiled = {size: program for size, (program, _) in compiled.items()}
        self._blocks = {size: step_block(program) for size, program in self._compiled.items()}
        self._untried = set(self._compiled)
        return sum(seconds for _, seconds in compiled.values())

    def step_bytes(self) -> dict[jax.Device, int]:
        """Memory of the largest compiled step on one device."""
        return {jax.local_devices()[0]: largest_memory_bytes(self._compiled.values())}

    def place(self, images: np.ndarray, labels: np.ndarray, soft: Any = ()) -> tuple[Any, ...]:
        """Starts copying a batch to the devices; returns the arguments of `step`."""
        return mesh_lib.place_batch(self._mesh, (images, labels, soft))

    def step(self, *batch: Any, size: int = 0) -> dict[str, Array]:
        """Starts a training step and returns its metrics; waits only for the first step of each program."""
        self._blocks[size].prepare()
        self._state, metrics = self._compiled[size](self._state, *batch)
        if size in self._untried:
            self._untried.discard(size)
            jax.block_until_ready(metrics)
            return_unused_memory()  # what only the first step has needed
        return metrics

    def wait(self) -> None:
        """Blocks until the last step has been taken."""
        jax.block_until_ready(self._state)

    def calibrate(self, batches: Sequence[np.ndarray]) -> dict:
        """Collects the statistics for evaluation of the current parameters, for `scores`, and returns them."""
        self._statistics = self._calibrate(self._state.params["encoder"], batches)
        return mesh_lib.to_host(self._statistics)

    def scores(self, split: datasets.Split, batch_size: int, flips: bool = False) -> evaluate.Scores:
        """Scores of the parameters last calibrated."""
        return self._evaluate(with_statistics(self._state.params, self._statistics), split, batch_size, flips)

    def fetch(self) -> TrainState:
        """The full state in host memory, valid until the next step."""
        return mesh_lib.to_host(self._state)

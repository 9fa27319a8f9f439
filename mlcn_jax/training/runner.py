"""The runner protocol: runs training steps, as one program over a mesh or as stacks of lanes with separate programs."""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Array

from mlcn_jax.data.datasets import Split
from mlcn_jax.training.evaluate import Scores
from mlcn_jax.training.step import TrainState


class Runner(Protocol):
    """Holds the state of a run on the devices of its plan, and takes training steps.

    The order of calls: `start`, `compile`, then `place` and `step` for each batch; `scores` and `fetch` at any time
    between steps, and `start` again to load another state. All processes of a run make the same calls.
    Losses and gradients do not depend on the runner, up to rounding.
    """

    def start(self, state: TrainState) -> None:
        """Copies a full state, wherever it is, to the devices; the caller may go on using it."""

    def compile(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Compiles the step for batches of these shapes; returns the seconds taken.

        Args:
          images: uint8 [batch, height, width, channels].
          labels: int32 [batch].
        """
        ...

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Starts copying a batch, as in `compile`, to the devices; returns the arguments of `step`."""
        ...

    def step(self, images: Any, labels: Any) -> dict[str, Array]:
        """Starts a training step and returns its metrics, float32 scalars (`step.make_train_step`), without waiting."""
        ...

    def scores(self, split: Split, batch_size: int) -> Scores:
        """Scores of the current parameters on a split, in batches of `batch_size` images."""
        ...

    def fetch(self) -> TrainState:
        """The full state in host memory, valid until the next step."""
        ...

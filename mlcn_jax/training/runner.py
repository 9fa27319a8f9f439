"""The protocol of what runs training steps: one program over a mesh, or stacks of lanes with programs of their own."""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Array

from mlcn_jax.data.datasets import Split
from mlcn_jax.training.evaluate import Scores
from mlcn_jax.training.step import TrainState


class Runner(Protocol):
    """Holds the state of a run where its plan says, and takes steps.

    The order of calls: `start`, `compile`, then `place` and `step` for each batch; `scores` and `fetch` at any time
    between steps, and `start` again to take over another state. Among several processes all make the same calls.
    """

    def start(self, state: TrainState) -> None:
        """Takes over a state, whole and wherever it lies; it is copied, and may be used on."""

    def compile(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Compiles the step for batches of these shapes; returns the seconds taken.

        Args:
          images: uint8 [batch, height, width, channels].
          labels: int32 [batch].
        """
        ...

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Starts bringing a batch to the devices; returns what `step` takes."""
        ...

    def step(self, images: Any, labels: Any) -> dict[str, Array]:
        """Takes a training step and returns its metrics (`step.make_train_step`) before they are computed."""
        ...

    def scores(self, split: Split, batch_size: int) -> Scores:
        """Scores of the current parameters."""
        ...

    def fetch(self) -> TrainState:
        """The whole state in host memory, valid until the next step."""
        ...

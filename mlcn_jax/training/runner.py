"""The runner protocol: runs training steps, as one program over a mesh or as stacks of lanes with separate programs."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from mlcn_jax.data.batches import Split
from mlcn_jax.training.evaluate import Scores
from mlcn_jax.training.step import TrainState


class Runner(Protocol):
    """Holds the state of a run on the devices of its plan, and takes training steps.

    The order of calls: `start`, `compile`, then `place` and `step` for each batch. At any time between steps: `fetch`,
    `calibrate` and then `scores`, and `start` again to load another state. All processes of a run make the same calls.
    Losses and gradients do not depend on the runner, up to rounding.

    Source: do Rosario et al. 2019, section III, for lanes on several devices; the runners are this project's.
    """

    def start(self, state: TrainState) -> None:
        """Takes over a full state, from host memory or any device; the caller must not use its arrays any more."""

    def compile(self, images: np.ndarray, labels: np.ndarray, soft: Any = (), *, sizes: Sequence[int] = (0,)) -> float:
        """Compiles the step for batches of these shapes; returns the seconds taken.

        Args:
          images: uint8 [batch, height, width, channels].
          labels: int32 [batch].
          soft: a teacher's probabilities, float32 [batch, classes], if they were computed before; else empty.
          sizes: `Augmentation.size` of the steps to take, in pixels, each compiled separately.

        Raises:
          InputError: the images are too small for a lane, a convolution algorithm does not support their shape, or
            the batch is not a whole number of the groups that are normalised together.
        """
        ...

    def step_bytes(self) -> dict[jax.Device, int]:
        """Memory of the largest compiled program of a step on devices of this process, as the compiler counted it.

        On a mesh a step is one program, the same on all devices, of which one is named. In stacks, what a device holds
        for other programs is not in it. It is 0 where the backend does not report it.
        """
        ...

    def place(self, images: np.ndarray, labels: np.ndarray, soft: Any = ()) -> tuple[Any, ...]:
        """Starts copying a batch, as in `compile`, to the devices; returns the arguments of `step`."""
        ...

    def step(self, *batch: Any, size: int = 0) -> dict[str, Array]:
        """Starts a training step and returns its metrics, float32 scalars (`step.make_train_step`), without waiting.

        Args:
          batch: what `place` returned.
          size: one of the `sizes` compiled, in pixels.
        """
        ...

    def wait(self) -> None:
        """Blocks until the last step has been taken."""
        ...

    def calibrate(self, batches: Sequence[np.ndarray]) -> dict:
        """Collects the statistics for evaluation of the current parameters, for `scores`, and returns them.

        Args:
          batches: uint8 training images, each as for `compile`.

        Returns:
          `calibration.join_statistics` of all lanes, in host memory; empty if no lane normalises.

        Raises:
          InputError: a batch is not a whole number of the groups that are normalised together.
        """
        ...

    def scores(self, split: Split, batch_size: int, flips: bool = False) -> Scores:
        """Scores of the parameters last calibrated on a split, in batches of `batch_size` images.

        With `flips`, the images and their mirror images are classified together (`evaluate.make_evaluator`).

        Raises:
          InputError: `batch_size` is below 1.
        """
        ...

    def fetch(self) -> TrainState:
        """The full state in host memory, valid until the next step."""
        ...

"""Inference of the networks in mlcn_jax as `Artifact` runs it: the exported model, padding and all."""

from pathlib import Path

import jax
import numpy as np

from benchmarks.networks import Network
from mlcn_jax.serving.predict import open_model

PACKAGES = ("jax", "jaxlib", "numpy")


class Program:
    """The export in a folder; `variant` is its runtime: `xla`, or `auto` for the one measured to be fastest."""

    def __init__(self, network: Network, batch: int, folder: Path, variant: str, dtype: str):
        del network, batch, dtype  # the export has them
        self.model = open_model(str(folder / "export"), variant, spin=True)

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Lengths of the class capsules [batch, classes]."""
        return self.model.lengths(images)

    def runtime(self) -> str | dict[int, str]:
        """What computes, by number of images where it was measured."""
        return self.model.runtime


def device_peak_bytes() -> int | None:
    """Most memory of the device so far; None where it is the host's."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

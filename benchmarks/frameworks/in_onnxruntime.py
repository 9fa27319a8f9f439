"""Inference of the networks in ONNX Runtime, as one would run them there: the converted model, with default options."""

from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.networks import Network
from mlcn_jax import host

PACKAGES = ("onnxruntime", "numpy")


class Program:
    """The converted model in a folder."""

    def __init__(self, network: Network, batch: int, folder: Path, variant: str, dtype: str):
        del network, batch, variant
        if dtype != "float32":
            raise ValueError(f"the converted model computes in float32 only, not in {dtype}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = host.num_cores()  # its own default counts cores that this process may not use
        path = folder / "onnx" / "model.onnx"
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Lengths of the class capsules [batch, classes]."""
        return self._session.run(["lengths"], {"images": images})[0]

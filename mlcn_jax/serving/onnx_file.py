"""Runs a file in the ONNX format with ONNX Runtime on the CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.host import num_cores

INPUT = "images"  # uint8 [n, height, width, channels]


def open_onnx(path: Path, output: str, threads: int | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """The function that a file holds, from `INPUT` to an output.

    Args:
      path: of the file.
      output: its name in the file.
      threads: that compute; by default one for each core.

    Raises:
      InputError: ONNX Runtime is not installed, or cannot read the file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            f"{path} is computed by ONNX Runtime, which is not installed: pip install 'mlcn_jax[onnxruntime]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or num_cores()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # what ONNX Runtime raises has no common base
        reason = (str(error).splitlines() or [repr(error)])[0][:200]
        raise InputError(
            f"ONNX Runtime {onnxruntime.__version__} cannot read {path} ({reason}): install the version that the "
            "manifest names, or make the file again"
        ) from error
    return lambda images: session.run([output], {INPUT: np.asarray(images)})[0]

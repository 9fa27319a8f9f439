"""Opens an ONNX file for ONNX Runtime on the CPU."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.host import adds_bytes_exactly, num_threads

INPUT = "images"  # uint8 [n, height, width, channels]
FULL_RANGE = "int8_full_range"  # metadata property of a file whose 8-bit weights use all 8 bits
_log = logging.getLogger(__name__)


def open_onnx(
    path: Path, output: str, threads: int | None = None, spin: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """The function that an ONNX file holds, from the input `INPUT` to one output.

    Args:
      path: the file.
      output: name of the output in the file.
      threads: number of threads that compute; by default `num_threads`.
      spin: whether they look for work for a while after a call, as is ONNX Runtime's default. The next call then
        starts sooner, but XLA, decoding of images, a server or another open file has to do without their cores.

    Raises:
      InputError: ONNX Runtime cannot be imported, or cannot use the file.
      MemoryError: memory ran out; the function that is returned raises it too.
      OSError: the file cannot be read.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError(
            f"{path} needs ONNX Runtime, which cannot be imported ({error}): pip install 'mlcn_jax[onnxruntime]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or num_threads()
    options.log_severity_level = 4  # errors are raised anyway
    if not spin:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    path.read_bytes()  # raises what ONNX Runtime would take for damage, such as too many open files or a failing disk
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of ONNX Runtime have no common base class
        _check_memory(path, error)
        raise InputError(
            f"ONNX Runtime {onnxruntime.__version__} cannot read {path} ({_reason(error)}): install the version in the "
            "manifest, or write the file again"
        ) from error
    if FULL_RANGE in session.get_modelmeta().custom_metadata_map and not adds_bytes_exactly():
        _log.warning("%s has 8-bit weights whose sums may saturate on this CPU: export on this machine", path)

    def compute(images: np.ndarray) -> np.ndarray:
        try:
            return session.run([output], {INPUT: np.asarray(images)})[0]
        except Exception as error:
            _check_memory(path, error)
            raise

    return compute


def _check_memory(path: Path, error: Exception) -> None:
    """Raises MemoryError if an error of ONNX Runtime says that memory ran out."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "allocate memory" in str(error):
        raise MemoryError(f"ONNX Runtime, {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]

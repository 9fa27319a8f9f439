"""Opens exported lanes of several precisions: XLA or ONNX Runtime computes what each adds to the squared lengths.

Lanes are independent, and the squared length of a class capsule is a sum over lanes. So each lane can have a precision
and a runtime of its own, and the results are added.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mlcn_jax.host import num_threads
from mlcn_jax.serving.onnx_file import open_onnx

Functions = Sequence[tuple[int, Callable[[np.ndarray], Any]]]  # (least rows it is used for, function), descending
MAX_BATCH = 128  # images in one call of a function; more are split into several calls
XLA, ONNX = "xla", "onnxruntime"
PER_LANE = "per lane"  # where lanes of both are together
OUTPUT = "part"  # output name in a lane's ONNX file
STEM = "part"  # start of the file names of the functions that compute the XLA lanes
# Largest differences of a lane's class capsules. The order of a convolution's sums depends on the number of images, so
# a value may be rounded to the neighbouring value in bfloat16 or 8 bits.
_TOLERANCES = {"float32": 1e-5, "tensorfloat32": 2.5e-3, "bfloat16": 2e-2, "int8": 1e-2}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a lane is computed: the precision of its weights and products, and the runtime."""

    precision: str
    runtime: str

    def __str__(self) -> str:
        return f"{self.precision} {self.runtime}"


FLOAT32 = Form("float32", XLA)
FORMS = (FLOAT32, Form("float32", ONNX), Form("bfloat16", XLA), Form("int8", ONNX))


def tolerance(precisions: Sequence[str], weights: np.ndarray) -> float:
    """How far the lengths of the same lanes, computed in these precisions, may differ between two computations.

    A length is the norm of what the lanes give, each times the root of its weight, so it differs at most by the norm of
    their differences. Lanes that all compute in float32 differ by far less than one of them may. In products GPUs round
    float32 to TF32, which has three bits more than bfloat16, and other accelerators to bfloat16.
    """
    rounded = {"cpu": "float32", "gpu": "tensorfloat32"}.get(jax.default_backend(), "bfloat16")
    precisions = [rounded if precision == "float32" else precision for precision in precisions]
    if set(precisions) == {"float32"}:
        return _TOLERANCES["float32"] * max(1.0, float(np.sqrt(np.mean(weights))))
    of_lanes = np.array([_TOLERANCES[precision] for precision in precisions])
    return float(np.sqrt(np.sum(weights * np.square(of_lanes))))


def lane_file(lane: int) -> str:
    """The file of a lane that ONNX Runtime computes."""
    return f"lane{lane}.onnx"


def open_lanes(folder: Path, files: Sequence[str]) -> list[Callable[[np.ndarray], np.ndarray]]:
    """The lanes in some ONNX files, as functions that share this process's threads.

    Raises:
      InputError: as for `open_onnx`.
    """
    threads = max(1, num_threads() // max(1, len(files)))
    return [open_onnx(folder / name, OUTPUT, threads) for name in files]


def added_up(functions: Functions, sessions: Sequence[Callable[[np.ndarray], np.ndarray]]) -> Functions:
    """Functions that add the parts of the ONNX Runtime lanes to those of the XLA lanes.

    `functions` compute the XLA lanes (none if there are no such lanes). `sessions`, one for each ONNX Runtime lane, are
    computed with them, each on a thread.
    """
    parallel = sessions and len(sessions) + bool(functions) > 1
    pool = ThreadPoolExecutor(min(len(sessions), num_threads())) if parallel else None

    def add(call: Callable | None) -> Callable[[np.ndarray], np.ndarray]:
        def total(rows: np.ndarray) -> np.ndarray:
            # ONNX Runtime's lanes are computed while XLA's are.
            others = (pool.map if pool else map)(lambda session: session(rows), sessions)
            own = np.zeros((), np.float32) if call is None else np.asarray(call(rows))
            return sum(others, own)

        return total

    return [(least, add(call)) for least, call in functions] or [(1, add(None))]


def square_roots(functions: Functions) -> Functions:
    """Functions to lengths from functions to squared lengths."""

    def root(call: Callable) -> Callable[[np.ndarray], np.ndarray]:
        return lambda rows: np.sqrt(call(rows))

    return [(least, root(call)) for least, call in functions]


def call_sizes(count: int) -> list[int]:
    """Numbers of rows, powers of two up to `MAX_BATCH`, of the calls that compute `count` rows.

    Only the last call may have padding, and beyond 8 rows only if that is at most an eighth of it: more takes longer
    than another call does.
    """
    sizes = [MAX_BATCH] * (count // MAX_BATCH)
    left = count % MAX_BATCH
    while left:
        size = 1 << (left - 1).bit_length()
        if size > 8 and size - left > size // 8:
            size //= 2
        sizes.append(size)
        left = max(left - size, 0)
    return sizes


def model_digest(lanes: str, lane_weights: Sequence[float], arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 that identifies a model, also for its tiers and for its lanes in other precisions.

    Args:
      lanes: in the form of `ModelSpec.lanes`.
      lane_weights: weight of each lane.
      arrays: arrays of the lanes in float32, by name.
    """
    content = hashlib.sha256(repr((lanes, list(lane_weights))).encode())
    for name, array in sorted(arrays.items()):
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()

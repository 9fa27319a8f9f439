"""Reads the lanes of an export in several precisions: what each adds to the squared lengths, by XLA or ONNX Runtime.

Lanes are independent, and the squared length of a class capsule is a sum over lanes. So each lane can have a precision
and a runtime of its own, and what they give is added up.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlcn_jax.host import num_cores
from mlcn_jax.serving.onnx_file import open_onnx

if TYPE_CHECKING:
    from mlcn_jax.serving.artifact import Functions

XLA, ONNX = "xla", "onnxruntime"
OUTPUT = "part"  # of a lane's file for ONNX Runtime
STEM = "part"  # of the functions that compute the lanes in XLA


@dataclasses.dataclass(frozen=True)
class Form:
    """How a lane is computed: the precision of its weights and products, and the runtime."""

    precision: str
    runtime: str

    def __str__(self) -> str:
        return f"{self.precision} {self.runtime}"


FLOAT32 = Form("float32", XLA)
FORMS = (FLOAT32, Form("float32", ONNX), Form("bfloat16", XLA), Form("int8", ONNX))


def lane_file(lane: int) -> str:
    """The file of a lane that ONNX Runtime computes."""
    return f"lane{lane}.onnx"


def open_lanes(folder: Path, files: Sequence[str]) -> list[Callable[[np.ndarray], np.ndarray]]:
    """The lanes in some files for ONNX Runtime, which share this machine's cores.

    Raises:
      InputError: as for `open_onnx`.
    """
    threads = max(1, num_cores() // max(1, len(files)))
    return [open_onnx(folder / name, OUTPUT, threads) for name in files]


def added_up(functions: "Functions", sessions: Sequence[Callable[[np.ndarray], np.ndarray]]) -> "Functions":
    """Functions of the lanes in XLA (none if there are no such lanes), each with the other lanes' parts added.

    Lanes of ONNX Runtime, `sessions`, are computed side by side, one on a thread.
    """
    pool = ThreadPoolExecutor(min(len(sessions), num_cores())) if len(sessions) > 1 else None
    side_by_side = pool.map if pool else map

    def add(call: Callable | None) -> Callable[[np.ndarray], np.ndarray]:
        def total(rows: np.ndarray) -> np.ndarray:
            pending = call(rows) if call is not None else np.float32(0)  # XLA computes while ONNX Runtime does
            others = side_by_side(lambda session: session(rows), sessions)
            return sum(others, np.float32(0)) + np.asarray(pending)

        return total

    return [(least, add(call)) for least, call in functions] or [(1, add(None))]


def square_roots(functions: "Functions") -> "Functions":
    """Functions to lengths, from those to squared lengths."""

    def root(call: Callable) -> Callable[[np.ndarray], np.ndarray]:
        return lambda rows: np.sqrt(call(rows))

    return [(least, root(call)) for least, call in functions]


def model_digest(lanes: str, lane_weights: Sequence[float], arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a model, to which tiers and lanes in other precisions belong: its lanes, their weights and arrays.

    Args:
      lanes: as `ModelSpec.lanes` has them.
      lane_weights: of the lanes.
      arrays: of the lanes in float32, by name.
    """
    content = hashlib.sha256(repr((lanes, list(lane_weights))).encode())
    for name, array in sorted(arrays.items()):
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()

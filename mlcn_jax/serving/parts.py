"""Reads the lanes of an export in several precisions: what each adds to the squared lengths, by XLA or ONNX Runtime.

Lanes are independent, and the squared length of a class capsule is a sum over lanes. So each lane can have a precision
and a runtime of its own, and what they give is added up.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

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


def added_up(functions: "Functions", sessions: Sequence[Callable[[np.ndarray], np.ndarray]]) -> "Functions":
    """Functions of the lanes in XLA (none if there are no such lanes), each with the other lanes' parts added."""

    def add(call: Callable | None) -> Callable[[np.ndarray], np.ndarray]:
        def total(rows: np.ndarray) -> np.ndarray:
            pending = call(rows) if call is not None else np.float32(0)  # XLA computes while ONNX Runtime does
            return sum((session(rows) for session in sessions), np.float32(0)) + np.asarray(pending)

        return total

    return [(least, add(call)) for least, call in functions] or [(1, add(None))]


def square_roots(functions: "Functions") -> "Functions":
    """Functions to lengths, from those to squared lengths."""

    def root(call: Callable) -> Callable[[np.ndarray], np.ndarray]:
        return lambda rows: np.sqrt(call(rows))

    return [(least, root(call)) for least, call in functions]


def weights_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a model's arrays in float32, by name, to which its lanes in other precisions belong."""
    content = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()

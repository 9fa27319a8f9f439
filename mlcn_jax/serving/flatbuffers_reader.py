"""Reads flatbuffers where the package `flatbuffers`, which `jax.export` needs but does not bring, is not installed.

Only what jax's generated readers call. Source: the format's description, "FlatBuffers Internals".
"""

import contextlib
import importlib.util
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """While active, `import flatbuffers` finds the package where it is installed, and this reader where it is not."""
    if importlib.util.find_spec("flatbuffers"):
        yield
        return
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class Table:
    """A table at a position; a vtable, an `int32` before it, has the place of each field, 0 for one left out."""

    def __init__(self, data: bytearray, position: int):
        self.Bytes, self.Pos = data, position

    def Offset(self, slot: int) -> int:
        vtable = self.Pos - self._read("<i", self.Pos)
        return self._read("<H", vtable + slot) if slot < self._read("<H", vtable) else 0

    def Indirect(self, place: int) -> int:
        return place + self._read("<I", place)

    def Vector(self, field: int) -> int:
        return self.Indirect(field + self.Pos) + 4

    def VectorLen(self, field: int) -> int:
        return self._read("<I", self.Vector(field) - 4)

    def String(self, place: int) -> bytes:
        start = self.Indirect(place)
        return bytes(self.Bytes[start + 4 : start + 4 + self._read("<I", start)])

    def Get(self, dtype: np.dtype, place: int):
        return np.frombuffer(self.Bytes, dtype, 1, place).item()

    def GetVectorAsNumpy(self, dtype: np.dtype, field: int) -> np.ndarray:
        return np.frombuffer(self.Bytes, dtype, self.VectorLen(field), self.Vector(field))

    def _read(self, form: str, place: int) -> int:
        return struct.unpack_from(form, self.Bytes, place)[0]


class _Offset:
    """What `UOffsetTFlags` is there for."""

    py_type = int


def _modules() -> dict[str, Any]:
    """The package and its modules, as far as they are used."""
    names = (
        "flatbuffers",
        *(f"flatbuffers.{part}" for part in ("compat", "encode", "number_types", "packer", "table")),
    )
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name in names[1:]:
        setattr(modules["flatbuffers"], name.rpartition(".")[2], modules[name])
    modules["flatbuffers.compat"].import_numpy = lambda: np
    modules["flatbuffers.table"].Table = Table
    modules["flatbuffers.packer"].uoffset = "<I"
    modules["flatbuffers.encode"].Get = lambda form, data, place: struct.unpack_from(form, data, place)[0]
    kinds = modules["flatbuffers.number_types"]
    kinds.UOffsetTFlags, kinds.BoolFlags = _Offset, np.dtype("?")
    for sign, letter in (("Int", "i"), ("Uint", "u")):
        for size in (1, 2, 4, 8):
            setattr(kinds, f"{sign}{8 * size}Flags", np.dtype(f"<{letter}{size}"))
    return modules

"""Lanes in their forms, as the files of an artifact: written for an export or a tier, and read back one by one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving.artifact import MIXED_FORMAT, WEIGHTS, Artifact, read_weights
from mlcn_jax.serving.export import write_functions
from mlcn_jax.serving.onnx_file import open_onnx
from mlcn_jax.serving.parts import ONNX, OUTPUT, STEM, Form, lane_file
from mlcn_jax.serving.precision.make import Made, from_arrays, lanes_function


def write_lanes(
    folder: Path, spec: ModelSpec, chosen: Mapping[int, Made], row: jax.ShapeDtypeStruct
) -> tuple[list[dict[str, Any]], list[str]]:
    """Writes lanes, by index, in their forms; returns the functions for those in XLA, and the files of the others."""
    in_xla = {lane: own for lane, own in chosen.items() if own.form.runtime != ONNX}
    functions: list[dict[str, Any]] = []
    if in_xla:
        weights = {name: array for own in in_xla.values() for name, array in own.arrays.items()}
        precisions = {lane: own.form.precision for lane, own in in_xla.items()}
        functions = write_functions(folder, STEM, spec, lanes_function(spec, precisions), weights, row)
    files = []
    for lane, own in chosen.items():
        if own.form.runtime == ONNX:
            (folder / lane_file(lane)).write_bytes(own.onnx)
            files.append(lane_file(lane))
    return functions, files


def read_lanes(folder: Path, spec: ModelSpec, digest: str) -> list[Made]:
    """The lanes of an export in several precisions, ready to run here.

    Args:
      folder: one that `mlcn_jax precision` wrote.
      spec: the model.
      digest: `parts.model_digest` of the model in float32.

    Raises:
      InputError: the folder is not such an export, was altered, or belongs to another model.
    """
    exported = Artifact(folder)
    if exported.manifest["format"] != MIXED_FORMAT:
        raise InputError(f"{folder} is an export in one precision: give one that `{program()} precision` wrote")
    if exported.description["model_sha256"] != digest:
        raise InputError(
            f"{folder} belongs to another model, or to another checkpoint of it: make it again with "
            f"`{program()} export` and `{program()} precision`"
        )
    weights = read_weights(folder / WEIGHTS)
    lanes = []
    for lane, form in enumerate(Form(**form) for form in exported.description["forms"]):
        if form.runtime == ONNX:
            path = folder / lane_file(lane)
            lanes.append(Made(form, path.stat().st_size, open_onnx(path, OUTPUT), onnx=path.read_bytes()))
            continue
        arrays = {name: array for name, array in weights.items() if name.split("/")[0] == str(lane)}
        lanes.append(from_arrays(spec, lane, form, arrays))
    return lanes

"""Converts an exported model to an ONNX file, kept only if ONNX Runtime computes the same lengths from it."""

from pathlib import Path

import jax
import numpy as np

from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder, replacing, write_json
from mlcn_jax.host import sha256_of
from mlcn_jax.serving import onnx, runtime
from mlcn_jax.serving.onnx_file import INPUT, open_onnx

BATCHES = (1, 7, 100)  # batch sizes that are checked


def export(workdir: Path, data_dir: str = "", folder: Path | None = None) -> Path:
    """Writes `model.onnx` and `model.json` to `folder`, in place of older ones, and returns the path of `model.onnx`.

    `folder` is `workdir/onnx` by default. `data_dir` is as in `onnx.read_export`.

    Raises:
      InputError: there is no export or it is damaged, its run's images cannot be read, a package is not installed, or
        the folder cannot be written to.
    """
    versions = onnx.versions()
    model = onnx.read_export(workdir, data_dir)
    test = model.data.load().test.images[: max(BATCHES)]
    if test.shape[1:] != tuple(model.spec.image_shape):
        raise InputError(
            f"the model takes images of shape {tuple(model.spec.image_shape)}, but these have {test.shape[1:]}: give a "
            "--data_dir with images like those that it was trained on"
        )
    images = {
        "random": np.random.default_rng(0).integers(0, 256, (max(BATCHES), *model.spec.image_shape), np.uint8),
        "test": test,
    }
    path = (folder or workdir / "onnx") / "model.onnx"
    make_folder(path.parent, "output")
    converted = onnx.convert(model)
    with replacing(path) as partial:
        partial.write_bytes(converted.SerializeToString())
        differences = check(model, partial, images)
        description = {
            "class_names": model.artifact.class_names,
            "image_shape": model.spec.image_shape,
            "lanes": model.lanes,
            "input": {
                "name": INPUT,
                "type": "uint8",
                "shape": ["batch", *model.spec.image_shape],
                "meaning": "pictures as mlcn_jax.data.images.read_pixels gives them: upright, gray or RGB, "
                "resized (bilinear)",
            },
            "output": {
                "name": runtime.OUTPUT,
                "type": "float32",
                "shape": ["batch", len(model.artifact.class_names)],
                "meaning": "length of each class capsule; the longest is the predicted class, and its probability is "
                "min(length / certain_length, 1) ** probability_power",
                **onnx.probability(model.spec),
            },
            "export": model.artifact.manifest["sha256"],
            "step": model.artifact.manifest["step"],
            "opset": converted.opset_import[0].version,
            "checked": {"batches": BATCHES, "tolerance": onnx.TOLERANCE, "largest_difference": differences},
            "versions": {**model.artifact.manifest["versions"], **versions},
            "sha256": sha256_of(partial),
        }
    write_json(path.with_suffix(".json"), description)
    return path


def check(model: onnx.ExportedModel, path: Path, images: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference between ONNX Runtime's lengths and the model's, for each kind of images.

    The model's lengths are those of its export or, if that does not compute in float32, of the same model in float32.
    Accelerators round to TF32 or bfloat16 in products unless they are told not to.

    Raises:
      RuntimeError: one is above the tolerance.
    """
    in_float32 = model.spec.compute_dtype == "float32" and jax.default_backend() == "cpu"
    own = model.artifact.lengths if in_float32 else jax.jit(model.lengths)
    converted = open_onnx(path, runtime.OUTPUT)
    largest = {}
    for kind, some in images.items():
        batches = [some[:n] for n in BATCHES]
        with jax.default_matmul_precision("highest"):
            each = [runtime.difference(converted(x), np.asarray(own(x))) for x in batches]
        largest[kind] = float(np.max(each))  # NaN if one is, unlike max
        if not largest[kind] <= onnx.TOLERANCE:
            raise RuntimeError(f"for {kind} images ONNX Runtime differs from the model by {largest[kind]:.2g}: {path}")
    return largest

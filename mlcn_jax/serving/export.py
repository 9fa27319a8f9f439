"""Exports a trained model as an artifact: a folder that `predict` and `serve` use without training code."""

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from mlcn_jax import host
from mlcn_jax.config import read_stored
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.files import hold, put_in_place, read_json, write_atomic, write_json
from mlcn_jax.nn import tracing
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import artifact, model_card
from mlcn_jax.serving.parts import tolerance
from mlcn_jax.serving.predict import source_of
from mlcn_jax.training.trained import Trained, load_trained

# (platform of jax.export, jax's name for its devices, smallest batch, batch size that algorithms are chosen for)
_FUNCTIONS = (("cpu", "cpu", 1, 1), ("cpu", "cpu", 8, 8), ("cpu", "cpu", 32, 32), ("cuda", "gpu", 1, 64))
_PACKAGES = ("jax", "jaxlib", "numpy", "flax")


def export(workdir: Path) -> Path:
    """Writes the best checkpoint of a workdir as `workdir/export`, in place of an older one, and returns that folder.

    Before the export is put in place it is loaded again, and must give the same lengths as the model on this platform,
    to 1e-5 (in float32 on a CPU; otherwise to what rounding to TF32 or bfloat16 allows).

    Raises:
      InputError: the workdir holds no trained model, or flatbuffers is not installed.
    """
    folder = workdir / "export"
    if folder.exists() and not (folder / artifact.MANIFEST).is_file():
        raise InputError(f"{folder} exists but is not an export: move it away, because exporting would replace it")
    if not (workdir / "model.json").is_file():
        load_trained(workdir)  # raises, before a folder is created
    with hold(workdir), tempfile.TemporaryDirectory(dir=workdir, prefix=".export-") as temporary:
        trained, config = load_trained(workdir), read_stored(workdir)
        weights = trained.spec.lane_weights  # may have been fitted after training
        summary = _summary(workdir, trained.step) if weights == tuple(config.model["lane_weights"]) else {}
        config = config.replace({"model.lane_weights": list(weights)})
        made = Path(temporary) / "export"
        made.mkdir()
        write_json(made / "config.json", config.to_dict())
        write(trained, made, f"mlcn_jax export --workdir={shlex.quote(str(workdir))}", source_of(workdir))
        checked = artifact.Artifact(made, "xla")
        _check(trained, checked)
        card = model_card.text(checked, summary, config.data.dir)
        write_atomic(made / model_card.FILE, card)
        put_in_place(made, folder)
    return folder


def write(trained: Trained, folder: Path, command: str, source: Mapping[str, Any] | None = None) -> None:
    """Writes a model as an artifact to an empty folder.

    Args:
      trained: the model; its normalisation is folded into its weights.
      folder: the folder, which may hold other files of the artifact.
      command: the command that exports the model again.
      source: of a training run, `predict.source_of`.

    Raises:
      InputError: flatbuffers is not installed.
    """
    spec = trained.spec
    trained = dataclasses.replace(trained, params=fold_statistics(spec, trained.params))
    weights = flat_weights(trained.params["encoder"])
    description = {
        "class_names": trained.class_names,
        "image_shape": spec.image_shape,
        "lanes": spec.lanes or spec.name,
        "parameters": sum(array.size for array in weights.values() if array.dtype != bool),  # flags of `fold`
        "preprocessing": "turned upright by EXIF, gray or RGB, resized (bilinear) to image_shape, uint8; pixels / "
        + ("127.5 - 1" if spec.signed_pixels else "255")
        + " is part of the functions",
        "output": "length of each class capsule, float32; the longest is the predicted class",
        "certain_length": spec.certain_length,
        "probability_power": spec.probability_power,
    }
    write_json(folder / artifact.MODEL, description)
    np.savez(folder / artifact.WEIGHTS, **weights)  # type: ignore[arg-type]

    def lengths(weights, images):
        encoder = traverse_util.unflatten_dict(dict(weights), sep="/")
        return class_lengths(spec, encode(spec, encoder, to_pixels(images)))

    row = jax.ShapeDtypeStruct(spec.image_shape, jnp.uint8)
    functions = write_functions(folder, "inference", spec, lengths, weights, row)
    write_manifest(folder, trained.step, functions, command, source=source)


def write_functions(
    folder: Path,
    stem: str,
    spec: ModelSpec,
    function: Callable[[dict[str, jax.Array], jax.Array], jax.Array],
    weights: Mapping[str, np.ndarray],
    row: jax.ShapeDtypeStruct,
) -> list[dict[str, Any]]:
    """Serializes `function(weights, rows)` for each platform and number of rows.

    Args:
      folder: folder to write to.
      stem: first part of the file names.
      spec: the model that the function belongs to.
      function: function to export.
      weights: its first argument, by name.
      row: shape and dtype of one row of its second argument.

    Returns:
      The fields of an `artifact.Function` for each file, as JSON.

    Raises:
      InputError: flatbuffers is not installed.
    """
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
    functions, constant = [], artifact.compiled_in(weights)
    for platform, device, min_batch, usual_batch in _FUNCTIONS:
        name = f"{stem}-{platform}-{min_batch}.jaxexport"
        (batch,) = jax.export.symbolic_shape("batch", constraints=[f"batch >= {min_batch}"])
        rows = jax.ShapeDtypeStruct((batch, *row.shape), row.dtype)
        target = tracing.Target(platform=device, batch=usual_batch, inference=True, constant_weights=constant)
        with tracing.using(target), _without_paths():
            exported = jax.export.export(jax.jit(function), platforms=[platform])(shapes, rows)
        try:
            (folder / name).write_bytes(exported.serialize())
        except ImportError as error:
            raise InputError("exporting a model needs flatbuffers: pip install flatbuffers") from error
        functions.append(
            {
                "file": name,
                "platforms": [platform],
                "min_batch": min_batch,
                "compiler_options": spec.compiler_options(device, min_batch),
            }
        )
    return functions


def write_manifest(
    folder: Path,
    step: int,
    functions: list[dict[str, Any]],
    command: str,
    onnx: Sequence[str] | None = None,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Writes the manifest of all files in a folder.

    Args:
      folder: the folder; all files in it are listed.
      step: training steps taken.
      functions: as returned by `write_functions`.
      command: the command that exports the model again.
      onnx: files of the lanes that ONNX Runtime computes; None unless lanes have precisions of their own.
      source: as for `write`.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": host.sha256_of(path)} for path in sorted(folder.iterdir())
    }
    manifest = {
        "format": artifact.FORMAT if onnx is None else artifact.MIXED_FORMAT,
        "step": step,
        "functions": functions,
        **({} if onnx is None else {"onnx": list(onnx)}),
        **({} if source is None else {"source": source}),
        "files": files,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES} | _runtime_version(onnx),
    }
    write_json(folder / artifact.MANIFEST, artifact.signed(manifest))


def _runtime_version(files: Sequence[str] | None) -> dict[str, str]:
    """The version of ONNX Runtime if it computes any `files`."""
    if not files:
        return {}
    import onnxruntime  # asked for its version because its package has several names, such as onnxruntime-gpu

    return {"onnxruntime": onnxruntime.__version__}


def flat_weights(encoder: dict) -> dict[str, np.ndarray]:
    """The arrays of nested parameters, by their path joined with `/`."""
    leaves = jax.tree_util.tree_leaves_with_path(encoder)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
    """Keeps the paths of this machine's source files out of the functions that are traced."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _summary(workdir: Path, step: int) -> dict[str, Any]:
    """The run's summary; empty if there is none or it scores the checkpoint of another step."""
    path = workdir / "summary.json"
    summary = read_json(path) if path.is_file() else {}
    return summary if isinstance(summary, dict) and summary.get("best_step") == step else {}


def _check(trained: Trained, exported: artifact.Artifact) -> None:
    """Raises RuntimeError if the artifact and the model give lengths that differ by more than rounding.

    In bfloat16 that may be eight times what the model's own lengths differ by from those in float32: folded statistics
    are rounded with their kernels.
    """
    spec, rng = trained.spec, np.random.default_rng(0)
    lanes = max(1, len(spec.weights))  # CapsNet has none
    allowed = tolerance([spec.compute_dtype] * lanes, spec.weights if spec.lane_groups else np.ones(1))

    @functools.partial(jax.jit, static_argnums=0)
    def lengths(spec, params, images):
        return class_lengths(spec, encode(spec, params["encoder"], to_pixels(images)))

    for n in (1, 8):
        images = rng.integers(0, 256, (n, *spec.image_shape)).astype(np.uint8)
        expected, most = np.asarray(lengths(spec, trained.params, images)), allowed
        if spec.compute_dtype != "float32":
            exact = lengths(dataclasses.replace(spec, compute_dtype="float32"), trained.params, images)
            most = max(most, 8 * float(np.max(np.abs(expected - np.asarray(exact)))))
        error = np.max(np.abs(exported.lengths(images) - expected))
        if not error <= most:
            raise RuntimeError(f"the exported function differs from the model by {error}")

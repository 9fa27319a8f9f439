"""Classifies pictures with a trained model; an exported model needs only jax, flatbuffers, numpy and Pillow.

    mlcn_jax predict runs/mlcn2/export image.png photos/ --json
    mlcn_jax predict runs/mlcn2 image.png    # a training run, exported or not
    mlcn_jax predict digits image.png        # the model that comes with the package

A folder of pictures stands for the pictures in it. For a training run, its export is used if that is of the
newest checkpoint and `model.json`, otherwise the best checkpoint. Prints the class of each picture and its probability
(`artifact.Classifier.probabilities`). Exit codes: 0 all were classified, 2 the input cannot be used, 3 some pictures
could not be read; the others are classified.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcn_jax.data.images import SUFFIXES, ignore_pillows_warning, read_pixels
from mlcn_jax.errors import Damaged, InputError
from mlcn_jax.files import read_json
from mlcn_jax.launch import EXIT_FAILED, program
from mlcn_jax.pretrained import find_export, names

if TYPE_CHECKING:
    from mlcn_jax.serving.artifact import Classifier

RUNTIME_HELP = "auto (the fastest, measured), xla, or onnxruntime with a model that `mlcn_jax onnx` converted"
MODEL_HELP = "folder that `mlcn_jax export` wrote, folder of a training run, or a model of the package: digits"


def predict(model: "Classifier", files: Sequence[Path], batch_size: int = 64) -> Iterator[dict[str, Any]]:
    """Classifies pictures in the given order, `batch_size` at a time.

    Yields:
      For each file, its name as `file`, and either its `class` and `probability` or, as `error`, why it cannot be read.
    """

    def read(path: Path) -> np.ndarray | str:
        try:
            return read_pixels(path, model.image_shape)
        except InputError as error:
            return str(error)

    ignore_pillows_warning()
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch_size):
            some = files[start : start + batch_size]
            read_ones = list(pool.map(read, some))
            good = [pixels for pixels in read_ones if not isinstance(pixels, str)]
            scores = iter(model.scores(np.stack(good)) if good else ())
            for path, pixels in zip(some, read_ones, strict=True):
                if isinstance(pixels, str):
                    yield {"file": str(path), "error": pixels}
                    continue
                yield {"file": str(path), **ranked(model.class_names, next(scores))[0]}


def ranked(class_names: Sequence[str], scores: np.ndarray, count: int = 1) -> list[dict[str, Any]]:
    """The `count` most probable classes, each as `class` and `probability`, from `Classifier.scores`, [classes]."""
    most = np.argsort(-scores, kind="stable")[:count]
    return [{"class": class_names[i], "probability": min(float(scores[i]), 1.0)} for i in most]


def open_model(given: str, runtime: str = "auto", spin: bool = False) -> "Classifier":
    """The model that a command line names: an export, a training workdir, or a model that comes with the package.

    `runtime` and `spin` are as for `Artifact`; a training run that is not exported has XLA only. Call it before JAX
    looks for its devices: XLA then computes in the thread that asks (`host.compute_in_turn`), which is faster for a
    single image.

    Raises:
      InputError: it is none of them, or cannot be used.
    """
    from mlcn_jax import host
    from mlcn_jax.serving.artifact import MANIFEST, Artifact, check_runtime

    host.compute_in_turn()
    folder = find_export(given).expanduser()
    if not folder.exists():
        raise InputError(
            f"{given} does not exist: give a folder that `{program()} export` wrote, the folder of a training run, or "
            f"the name of a model that comes with the package: {', '.join(names())}"
        )
    checkpoints = folder / "checkpoints"
    if (folder / MANIFEST).is_file() or not checkpoints.is_dir():
        return Artifact(folder, runtime, spin)
    if export_is_current(folder):
        return Artifact(folder / "export", runtime, spin)
    check_runtime(runtime)
    if runtime not in ("auto", "xla"):
        raise InputError(
            f"runtime {runtime!r} needs an export of the newest checkpoint, which {folder} does not have: "
            f"run {program()} export --workdir={folder}, then {program()} onnx --workdir={folder}"
        )
    try:
        from mlcn_jax.serving.trained import TrainedModel
    except ImportError as error:
        raise InputError(
            f"{folder} is a training run, and reading it needs the training packages ({error}): pip install mlcn_jax, "
            f"or give a folder that `{program()} export` wrote"
        ) from error
    return TrainedModel(folder)


def export_is_current(workdir: Path) -> bool:
    """Whether a training run has an export of its newest checkpoint and `model.json`; true also of a damaged one."""
    from mlcn_jax.serving.artifact import MANIFEST

    manifest = workdir / "export" / MANIFEST
    now = source_of(workdir)
    try:
        of = read_json(manifest).get("source") if manifest.is_file() else None
        if of is None or of["model"] != now["model"]:
            return False
        if now["checkpoint"] and "facts" in of:  # which earlier versions did not write
            newest = str(now["checkpoint"])
            return of["facts"].get(newest) == now["facts"][newest]
        return of["checkpoint"] >= now["checkpoint"]  # all checkpoints may have been removed since
    except (Damaged, AttributeError, KeyError, TypeError):
        return True  # whoever reads it says what is wrong


def source_of(workdir: Path) -> dict[str, Any]:
    """What an export of a training run depends on: its checkpoints, above all the newest, and its `model.json`."""
    from mlcn_jax.host import sha256_of

    def digest(path: Path) -> str:
        try:
            return sha256_of(path)
        except FileNotFoundError:  # a run that goes on removes checkpoints meanwhile
            return ""

    saved = [path for path in (workdir / "checkpoints").glob("*") if path.name.isdecimal()]
    return {
        "checkpoint": max((int(path.name) for path in saved), default=0),
        "facts": {path.name: digest(path / "facts" / "metadata") for path in saved},  # with a digest of the parameters
        "model": digest(workdir / "model.json"),  # lanes' weights may be fitted after training
    }


def _files_of(paths: Sequence[str]) -> list[Path]:
    """The given files and, for each given folder, the files in it with the suffix of a picture, sorted by name."""
    files = []
    for given in paths:
        path = Path(given)
        if not os.path.isdir(given):
            files.append(path)
            continue
        try:
            visible = (file for file in path.iterdir() if not file.name.startswith("."))
            inside = sorted(file for file in visible if file.suffix.lower() in SUFFIXES)
        except OSError as error:
            raise InputError(
                f"{path} cannot be listed ({error.strerror}): give its files, or another folder"
            ) from error
        if not inside:
            raise InputError(f"{path} has no files that end in {', '.join(SUFFIXES)}: give another folder, or files")
        files += inside
    return files


def printable(text: str) -> str:
    """The text on one line, with control characters escaped: names may hold newlines and terminal commands."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def main(argv: Sequence[str] | None = None) -> int:
    """Classifies the pictures named in `argv` (by default the command line's); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="mlcn_jax predict",
        description=(__doc__ or "").split("\n")[0],
        epilog="Takes no configuration: mlcn_jax train --help lists the fields of one.",
    )
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="PNG, JPEG, WebP, BMP or GIF, or a folder of them")
    parser.add_argument("--runtime", default="auto", help=RUNTIME_HELP)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_intermixed_args(argv)
    files = _files_of(arguments.images)

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # silences XLA's messages about slow constant folding
    failed = False
    for found in predict(open_model(arguments.model, arguments.runtime), files):
        failed |= "error" in found
        if arguments.json:
            print(json.dumps(found), flush=True)
        elif "error" in found:
            print(printable(f"{found['file']}: {found['error']}"), file=sys.stderr, flush=True)
        else:
            print(printable(f"{found['file']}: {found['class']}, {found['probability']:.1%}"), flush=True)
    return EXIT_FAILED if failed else 0

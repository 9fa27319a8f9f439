"""An exported model: a folder with functions, weights and a description, verified before any of it is used.

Needs jax, flatbuffers, numpy and Pillow, and no training code. An artifact holds programs: use only those whose source
you trust. Its manifest shows whether it was damaged, not who exported it.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax import host, pretrained
from mlcn_jax.errors import InputError
from mlcn_jax.launch import NO_ACCESS, program
from mlcn_jax.serving import parts
from mlcn_jax.serving.parts import MAX_BATCH, ONNX, PER_LANE, XLA, Functions, call_sizes

FORMAT = 1
MIXED_FORMAT = 2  # lanes in several precisions, some of them for ONNX Runtime
MANIFEST, MODEL, WEIGHTS = "manifest.json", "model.json", "weights.npz"
CONVERTED = "onnx/model.onnx"  # in the folder that holds the export
RUNTIMES = ("auto", XLA, ONNX)
_UNREADABLE = {errno.ENOENT, *NO_ACCESS}  # other errors, such as too many open files, say nothing about a folder
# Weights of up to this many bytes are compiled into the programs, already transformed: mostly twice as fast for 8
# images of published lanes on a CPU (benchmarks/results/inference_parts.json), in ten times their memory a program.
_COMPILED_IN_BYTES = 2**25


@dataclasses.dataclass(frozen=True)
class Function:
    """One serialized `jax.export` function `(weights, uint8 images) -> lengths of the class capsules`.

    Attributes:
      file: its file name in the folder.
      platforms: platforms of `jax.export` on which it runs.
      min_batch: smallest number of images for which it is the fastest one on its platform.
      compiler_options: options of `jax.jit`; ignored if the installed jax does not know them.
    """

    file: str
    platforms: tuple[str, ...]
    min_batch: int
    compiler_options: Mapping[str, str]


class Classifier:
    """A model that is ready to classify.

    Attributes:
      class_names: names of the classes, in the order of `lengths`.
      image_shape: height, width and channels of the images.
      step: training steps taken.
      exported: the day of the export, as YYYY-MM-DD; empty if the model was not exported.
    """

    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    step: int
    exported: str = ""
    _certain_length: float
    _probability_power: int
    _compute: Callable[[np.ndarray], np.ndarray]
    _runtime: str = XLA

    @property
    def runtime(self) -> str | dict[int, str]:
        """What computes: `xla`, `onnxruntime` or `per lane`; where the faster one does, that of each batch size so far.

        Batch sizes are powers of two; which is used between two of them follows from the times of both.
        """
        choices = getattr(self._compute, "choices", None)  # of `runtime.Fastest`, which needs onnxruntime to import
        return choices() if choices else self._runtime

    def lengths(self, images: np.ndarray) -> np.ndarray:
        """Lengths of the class capsules; the longest belongs to the predicted class.

        Args:
          images: uint8 [n, height, width, channels]. There is a program for each power of two up to `MAX_BATCH`,
            compiled when it is first needed; other numbers of images are split and padded (`parts.call_sizes`).

        Returns:
          float32 [n, classes].

        Raises:
          InputError: the images have another type or shape.
        """
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
            raise InputError(
                f"images are {images.dtype} {images.shape}; the model takes uint8 [n, "
                + ", ".join(map(str, self.image_shape))
                + "]"
            )
        if not len(images):
            return np.zeros((0, len(self.class_names)), np.float32)
        if len(images) <= MAX_BATCH:
            return self._compute(images)
        return np.concatenate([self._compute(images[i : i + MAX_BATCH]) for i in range(0, len(images), MAX_BATCH)])

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Probability of each class: the length of its capsule, at most 1. They need not add up to 1.

        Where lanes return probabilities themselves, it is the squared length, and where all lanes do, probabilities
        add up to 1.

        Lengths are at most 1 in a CapsNet, but a class capsule of L lanes, each squashed by itself, can be as long as
        sqrt(L). Where each lane learned to classify alone (`margin_loss` of `per_lane`), a length of sqrt(L) stands
        for probability 1: the probability is then the root mean square of those of the lanes. Arguments, result and
        errors are those of `lengths`.

        Source: Sabour et al. 2017, section 3.
        """
        return np.minimum(self.scores(images), 1)

    def scores(self, images: np.ndarray) -> np.ndarray:
        """`probabilities` before they are limited to 1: they order the classes even if several are certain."""
        return (self.lengths(images) / self._certain_length) ** self._probability_power

    def warm_up(self, most: int = MAX_BATCH) -> None:
        """Compiles the programs for 1, 2, 4 ... images up to `most`."""
        size = 1
        while size <= min(most, MAX_BATCH):
            self.lengths(np.zeros((size, *self.image_shape), np.uint8))
            size *= 2
        if warm_up := getattr(self._compute, "warm_up", None):  # of `runtime.Fastest`
            warm_up(min(most, MAX_BATCH))


class Artifact(Classifier):
    """A verified artifact, ready to classify.

    Args:
      folder: one that `mlcn_jax export` wrote, or a model that comes with the package, such as `digits`.
      runtime: one of `RUNTIMES`. `xla` runs the exported programs; `onnxruntime` runs the model that `mlcn_jax onnx`
        converted and put next to the export; `auto` measures both for each batch size and uses the faster one
        (`runtime.Fastest`).
      spin: whether ONNX Runtime's threads look for work for a while after a call (`open_onnx`), where it computes the
        whole model. `predict` and `serve` say False, as they have other work for the cores.

    Attributes:
      description: the content of `model.json`: classes, image shape, lanes and how to prepare images.
      manifest: the content of `manifest.json`: files with their SHA-256, functions, versions, step and date.

    Raises:
      InputError: the folder is not an export, was altered or truncated, is of a newer version, or cannot run on this
        platform; or the runtime is unknown or cannot be used.
      OSError: the machine fails, as with too many open files.
    """

    def __init__(self, folder: str | Path, runtime: str = "auto", spin: bool = True):
        folder = pretrained.find_export(str(folder))
        with reading(folder, "export the model again"):
            self.manifest = verified_manifest(folder)
            self.description = description = json.loads((folder / MODEL).read_text())
            self.class_names = tuple(description["class_names"])
            self.image_shape = tuple(description["image_shape"])
            self._certain_length = float(description.get("certain_length", 1.0))  # not in exports of older versions
            self._probability_power = int(description.get("probability_power", 1))
            self.step, self.exported = self.manifest["step"], self.manifest["date"]
            functions = [Function(**function) for function in self.manifest["functions"]]
            weights = read_weights(folder / WEIGHTS)
        if "tier" in description:
            raise InputError(
                f"{folder} holds only the lanes of tier {description['tier']!r}, not a whole model: serve it with "
                f"{program()} tiers node, or give the export of the whole model"
            )
        row = jax.ShapeDtypeStruct(self.image_shape, jnp.uint8)
        check_runtime(runtime)
        mixed, files = self.manifest["format"] == MIXED_FORMAT, self.manifest.get("onnx", ())
        if mixed and runtime != "auto" and (runtime != XLA or files):
            raise InputError(f"{folder} has a runtime per lane: runtime {runtime!r} cannot be chosen, use auto")
        in_xla = functions or not mixed  # the lanes may all be for ONNX Runtime
        try:
            programs = load_functions(folder, functions, jax.device_put(weights), row, self.manifest) if in_xla else []
            lanes = parts.open_lanes(folder, files)
        finally:  # whatever was wrong with files of another export
            check_unchanged(folder, self.manifest)
        if mixed:
            self._compute = functools.partial(apply_in_batches, parts.square_roots(parts.added_up(programs, lanes)))
            self._runtime = PER_LANE
            return
        self._compute = functools.partial(apply_in_batches, programs)
        path = folder.resolve()
        converted = path.parent / CONVERTED
        required = runtime == ONNX
        if required or (runtime == "auto" and converted.is_file() and jax.default_backend() == "cpu"):
            from mlcn_jax.serving.runtime import choose  # needs onnxruntime, which the rest does not

            dtype = json.loads((folder / "config.json").read_text())["model"]["compute_dtype"]
            self._compute = choose(
                self._compute, converted, self.manifest, self.image_shape, required, dtype, spin, path.name
            )
            self._runtime = ONNX if required else XLA


def check_runtime(runtime: str) -> None:
    """Raises InputError if there is no such runtime."""
    if runtime not in RUNTIMES:
        raise InputError(f"runtime {runtime!r} is unknown: use {', '.join(RUNTIMES)}")


def apply_in_batches(functions: Functions, rows: np.ndarray) -> np.ndarray:
    """The output of `functions` for rows [n, ...], n > 0, in calls of `parts.call_sizes`."""
    found, start = [], 0
    for size in call_sizes(len(rows)):
        some = rows[start : start + size]
        start += size
        if len(some) < size:
            some = np.concatenate([some, np.zeros((size - len(some), *rows.shape[1:]), rows.dtype)])
        call = next(call for least, call in functions if size >= least)
        found.append(np.asarray(call(some)))
    return np.array(found[0][: len(rows)]) if len(found) == 1 else np.concatenate(found)[: len(rows)]


def load_functions(
    folder: Path,
    functions: Sequence[Function],
    weights: Mapping[str, jax.Array],
    row: jax.ShapeDtypeStruct,
    manifest: Mapping[str, Any],
) -> Functions:
    """The functions of a verified artifact that run on this platform, ready for `apply_in_batches`.

    Args:
      folder: the artifact.
      functions: functions that compute the same for different platforms and numbers of rows.
      weights: their first argument.
      row: shape and dtype of one row of their second argument.
      manifest: the manifest of the artifact.

    Raises:
      InputError: none runs on this platform, or this jax cannot read them.
    """
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    usable = [function for function in functions if platform in function.platforms]
    if not usable:
        made_for = sorted({name for function in functions for name in function.platforms})
        raise InputError(
            f"{folder} was exported for {', '.join(made_for)} and cannot run on {platform}: set "
            "JAX_PLATFORMS=cpu, or " + _again(manifest)
        )
    return [
        (function.min_batch, _load(folder / function.file, function, dict(weights), row, manifest))
        for function in sorted(usable, key=lambda function: -function.min_batch)
    ]


def _load(path: Path, function: Function, weights: dict[str, jax.Array], row: jax.ShapeDtypeStruct, manifest):
    try:
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
        call, options = exported.call, dict(function.compiler_options)
        jax.eval_shape(call, weights, jax.ShapeDtypeStruct((function.min_batch, *row.shape), row.dtype))
    except ImportError as error:
        raise InputError("reading an exported model needs flatbuffers: pip install flatbuffers") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the type that jax raises here differs between its versions
        reason = (str(error).splitlines() or [repr(error)])[0][:200]
        raise InputError(
            f"{path} was exported with jax {manifest['versions']['jax']} and cannot be used by jax "
            f"{jax.__version__} ({reason}). jax reads exports for six months: " + _again(manifest)
        ) from error
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except Exception:  # for an unknown option, jaxlib versions raise different types
        options = {}
    if compiled_in(weights):
        return jax.jit(functools.partial(call, weights), compiler_options=options)
    return functools.partial(jax.jit(call, compiler_options=options), weights)


def compiled_in(weights: Mapping[str, Any]) -> bool:
    """Whether these arrays, by name, are small enough to be compiled into the programs of a model."""
    return sum(array.nbytes for array in weights.values()) <= _COMPILED_IN_BYTES


def _again(manifest: Mapping[str, Any]) -> str:
    return f"export it again where it was trained: {manifest['command']}"


def signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the SHA-256 of its own content added."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


@contextlib.contextmanager
def reading(folder: Path, again: str) -> Iterator[None]:
    """Raises InputError if the block cannot read the files of an artifact; leaves errors of the machine as they are.

    Args:
      folder: the artifact.
      again: for the message: how to make another one, where the files match the manifest but hold something else.
    """
    try:
        yield
    except (InputError, MemoryError):
        raise
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        raise InputError(f"{folder} cannot be read ({error.strerror or error}): make it readable") from error
    except Exception as error:
        raise InputError(f"{folder} cannot be read ({error!r}): {again}") from error


def verified_manifest(
    folder: Path, what: str = "an exported model", command: str = "export --workdir=WORKDIR"
) -> dict[str, Any]:
    """The manifest of an artifact, once all its files are found to match it.

    Args:
      folder: the artifact.
      what, command: for messages: what it should be, and the command that writes it.

    Raises:
      InputError: a file does not match the manifest, or there is none.
    """
    path = folder / MANIFEST
    if not path.is_file():
        inside = folder / "export" / MANIFEST
        has_export = inside.is_file() and command.startswith("export")  # and that is what is wanted
        hint = f"give {inside.parent}" if has_export else f"{program()} {command.split(' -')[0]} writes one"
        raise InputError(f"{folder} is not {what}: it has no {MANIFEST}; {hint}")
    damaged = f"{folder} is damaged"
    again = f"copy the folder again, or make it again: {program()}"
    remedy = f"{again} {command}"
    try:
        manifest = json.loads(path.read_text())
        version, files = manifest["format"], manifest["files"]
        whole = signed(manifest)["sha256"] == manifest["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{damaged} ({MANIFEST} cannot be read: {error!r}): {remedy}") from error
    if isinstance(version, int) and version > MIXED_FORMAT:
        raise InputError(
            f"{folder} is of format {version}, from a newer mlcn_jax than this one, which reads format {MIXED_FORMAT}: "
            "update mlcn_jax, or export the model again with this version"
        )
    if version == MIXED_FORMAT and command.startswith("export"):
        remedy = f"{again} precision --workdir=WORKDIR, with --profiles if its lanes were placed"
    if not whole or version not in (FORMAT, MIXED_FORMAT):
        raise InputError(f"{damaged} ({MANIFEST} was altered): {remedy}")
    try:
        named = {MODEL, WEIGHTS, *(f["file"] for f in manifest["functions"]), *manifest.get("onnx", ())}
        known = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{damaged} ({MANIFEST} cannot be read: {error!r}): {remedy}") from error
    if unknown := named - set(known):
        raise InputError(f"{damaged} ({MANIFEST} does not list {', '.join(sorted(unknown))}): {remedy}")
    for name, (size, digest) in known.items():
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise InputError(f"{damaged} ({name} is missing): {remedy}")
        if file.stat().st_size != size or host.sha256_of(file) != digest:
            raise InputError(f"{damaged} ({name} was altered or truncated): {remedy}")
    return manifest


def check_unchanged(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises InputError if an artifact was replaced, or removed, while its files were read."""
    try:
        now = json.loads((folder / MANIFEST).read_text())["sha256"]
    except FileNotFoundError:
        now = None
    if now != manifest["sha256"]:
        raise InputError(f"{folder} was replaced while it was read: run the same command again")


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an artifact, by name; raises InputError if they are compressed."""
    with zipfile.ZipFile(path) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise InputError(f"{path} is compressed, but the weights of an export never are: export the model again")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)

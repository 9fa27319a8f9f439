"""Chooses the runtime for a model's batches on this CPU: XLA or, if there is a converted model, ONNX Runtime.

The faster one is measured when a batch size is first used. The result is kept in a file of the cache folder, for the
same model, CPU, number of cores and versions. Needs onnxruntime, and what an `Artifact` needs.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mlcn_jax import host, pretrained
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import program
from mlcn_jax.serving.onnx_file import open_onnx
from mlcn_jax.serving.parts import ONNX, XLA, call_sizes, tolerance

OUTPUT = "lengths"  # output name of a converted model
TOLERANCE = 1e-5  # largest difference of lengths at which a converted model may replace XLA
_ROUNDS, _ROUND_SECONDS = 3, 0.05
_PAUSE_SECONDS = 0.1  # lets the other runtime's threads go to sleep
_SPREAD_SECONDS = 0.1  # until the system has spread threads that wake up over the cores: till then both share one
_log = logging.getLogger("mlcn_jax")

Compute = Callable[[np.ndarray], np.ndarray]


class Fastest:
    """Computes lengths with the runtime that is fastest for the given number of images.

    Args:
      computes: for each runtime, XLA first, a function from uint8 images to lengths. Another runtime than XLA is used
        only if its lengths of random images differ by no more than `TOLERANCE`.
      image_shape: height, width and channels.
      record: file of earlier measurements, or None to keep none.
      conditions: what the measurements depend on; a `record` with other conditions is replaced.

    Attributes:
      milliseconds: time of each runtime, by number of images (powers of two).
    """

    def __init__(
        self,
        computes: Mapping[str, Compute],
        image_shape: tuple[int, int, int],
        record: Path | None,
        conditions: Mapping[str, Any],
    ):
        self._computes, self._shape, self._record, self._conditions = computes, image_shape, record, conditions
        self.milliseconds: dict[int, dict[str, float]] = _read(record, conditions, set(computes))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Lengths of the class capsules, float32 [n, classes], for uint8 images [n, height, width, channels]."""
        return self._computes[self.choice(len(images))](images)

    def choice(self, count: int) -> str:
        """The runtime for a batch of `count` images; measures it if it is not known yet.

        XLA's programs take powers of two (`parts.call_sizes`), whose times add up. The others compute as many images
        as they are given: their time is taken as linear between the two powers of two around `count`.
        """
        size = 1 << (count - 1).bit_length()
        own = dict(self._known(size))
        if count < size and len(own) > 1:
            own[XLA] = sum(self._known(each)[XLA] for each in call_sizes(count))
            half, share = self._known(size // 2), 2 * count / size - 1
            for name in (own.keys() & half.keys()) - {XLA}:
                own[name] = half[name] + share * (own[name] - half[name])
        return min(own, key=own.__getitem__)

    def warm_up(self, most: int) -> None:
        """Compiles XLA's programs for all batches up to `most` images that XLA computes.

        Batches between two powers of two may need programs of sizes that another runtime computes.
        """
        of_xla = (call_sizes(count) for count in range(1, most + 1) if self.choice(count) == XLA)
        for size in sorted({size for sizes in of_xla for size in sizes}):
            self._computes[XLA](_noise(size, self._shape))

    def choices(self) -> dict[int, str]:
        """The faster runtime for each number of images (powers of two) that has been measured."""
        return {size: min(own, key=own.__getitem__) for size, own in sorted(self.milliseconds.items())}

    def _known(self, size: int) -> dict[str, float]:
        if size not in self.milliseconds:
            self.milliseconds[size] = self._measure(size)
            self._keep()
        return self.milliseconds[size]

    def _measure(self, size: int) -> dict[str, float]:
        images = _noise(size, self._shape)
        able, wanted = {}, None
        for name, compute in self._computes.items():
            found = compute(images)
            wanted = found if wanted is None else wanted
            differs = difference(found, wanted)
            if differs <= TOLERANCE:
                able[name] = compute
            else:
                _log.warning("%s is not used: its lengths differ from those of %s by %.2g", name, XLA, differs)
        seconds: dict[str, list[float]] = {name: [] for name in able}
        for _ in range(_ROUNDS):
            for name, compute in able.items():
                time.sleep(_PAUSE_SECONDS)
                _seconds_of_call(compute, images, _SPREAD_SECONDS)
                seconds[name].append(_seconds_of_call(compute, images, _ROUND_SECONDS))
        return {name: 1000 * statistics.median(values) for name, values in seconds.items()}

    def _keep(self) -> None:
        if self._record is None:
            return
        known = {str(size): own for size, own in sorted(self.milliseconds.items())}
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._record, {**self._conditions, "milliseconds": known})
        except OSError as error:  # it is measured again next time
            _log.warning("%s cannot be written (%s)", self._record, error.strerror)


def choose(
    xla: Compute,
    converted: Path,
    manifest: Mapping[str, Any],
    image_shape: tuple[int, int, int],
    required: bool,
    dtype: str = "float32",
    spin: bool = False,
    name: str = "export",
) -> Compute:
    """The function that computes the lengths of an exported model.

    Args:
      xla: the function that runs the programs of the export.
      converted: the file of the converted model.
      manifest: the manifest of the export.
      image_shape: height, width and channels.
      required: whether to use ONNX Runtime always, or only where it is faster and can be used.
      dtype: what the export computes in; the converted model computes in float32.
      spin: as for `open_onnx`.
      name: name of the export's folder, for the message if there is no converted model.

    Raises:
      InputError: ONNX Runtime is required and cannot be used, or computes other lengths than XLA. Where it is not
        required, a warning says why it is not used.
      OSError: it is required, and the machine fails while the converted model is read.
    """
    problem = _problem(converted, manifest, name)
    if dtype != "float32":
        problem = f"the export computes in {dtype} and a converted model in float32, which gives other lengths"
    if problem and required:
        raise InputError(f"runtime {ONNX} cannot be used: {problem}")
    problem = problem or ("" if required else _inexact(converted))
    if problem:
        _log.warning("computing with XLA because ONNX Runtime cannot be used: %s", problem)
        return xla
    try:
        own = open_onnx(converted, OUTPUT, spin=spin)
    except (InputError, OSError) as error:
        if required:
            raise
        _log.warning("computing with XLA because ONNX Runtime cannot be used: %s", error)
        return xla
    if required:
        image, allowed = _noise(1, image_shape), tolerance(["float32"], np.ones(1))
        if not (differs := difference(own(image), xla(image))) <= allowed:  # nor if it is NaN
            raise InputError(
                f"runtime {ONNX} cannot be used: on this machine its lengths differ from those of {XLA} by "
                f"{differs:.2g}, {allowed:g} is allowed; use runtime {XLA}, or another version of onnxruntime"
            )
        return own
    import onnxruntime  # asked for its version because its package has several names, such as onnxruntime-gpu

    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    conditions = {
        "model": manifest["sha256"],
        "converted": _description(converted)["sha256"],
        "cpu": host.name_of(jax.local_devices()[0]),
        "features": host.cpu_digest(),
        "threads": host.num_threads(),
        "spin": spin,
        "rounds": [_ROUNDS, _PAUSE_SECONDS, _SPREAD_SECONDS, _ROUND_SECONDS],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "async_dispatch": bool(jax.config.values["jax_cpu_enable_async_dispatch"]),
        "versions": {**versions, "onnxruntime": onnxruntime.__version__},
    }
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()
    try:
        record = host.cache_folder() / f"runtimes-{digest[:16]}.json"  # machines that share the folder keep their own
    except RuntimeError:  # this user has no home directory
        record = None
    return Fastest({XLA: xla, ONNX: own}, image_shape, record, conditions)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of lengths, both [n, classes], relative to the longest if that is shorter than 1."""
    return float(np.max(np.abs(found - wanted)) / (min(1.0, np.max(wanted)) or 1.0))


def _problem(path: Path, manifest: Mapping[str, Any], name: str = "export") -> str:
    """Why the converted model at `path` cannot be used in place of an export; empty if it can."""
    workdir = path.parent.parent
    again = f"{program()} onnx --workdir={workdir} converts it"
    if pretrained.is_pretrained(workdir):  # nothing is written into the package
        again = f"copy {workdir} to a folder of your own, and give that; {program()} onnx --workdir=COPY converts it"
    elif name != "export":  # the only name that `onnx` reads
        again = f"copy {workdir / name} to FOLDER/export, and give that; {program()} onnx --workdir=FOLDER converts it"
    if not path.is_file():
        return f"{path} is missing: {again}"
    try:
        known, digest = _description(path), host.sha256_of(path)
        if not isinstance(known, dict):
            raise ValueError("its .json holds no object")
        _difference_on_test_images(known)
    except (FileNotFoundError, ValueError) as error:
        return f"{path} cannot be read ({error}): {again} again"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}; the converted model may be intact"
    if known.get("export") != manifest["sha256"]:
        return f"{path} was converted from another export: {again} again"
    if known.get("sha256") != digest:
        return f"{path} was altered or truncated: {again} again"
    if importlib.util.find_spec("onnxruntime") is None:
        return "onnxruntime is not installed: pip install 'mlcn_jax[onnxruntime]'"
    return ""


def _inexact(path: Path) -> str:
    """Whether lengths of test images differed by more than `TOLERANCE` when the model was converted; empty if not."""
    largest = _difference_on_test_images(_description(path))
    return f"its lengths differ from those of {XLA} by {largest:.2g} on test images" if largest > TOLERANCE else ""


def _difference_on_test_images(description: Mapping[str, Any]) -> float:
    """What the conversion found; 0 if it did not check. Raises ValueError if it is no number."""
    try:
        return float(description.get("checked", {}).get("largest_difference", {}).get("test", 0.0))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"its .json does not say how much lengths differ: {error}") from error


def _description(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".json").read_text())


def _read(record: Path | None, conditions: Mapping[str, Any], names: set[str]) -> dict[int, dict[str, float]]:
    """The measurements in `record` that were made under `conditions`."""
    if record is None:
        return {}
    try:
        kept = json.loads(record.read_text())
        if {name: kept.get(name) for name in conditions} != dict(conditions):
            return {}
        found = {
            int(size): {str(name): float(ms) for name, ms in own.items()} for size, own in kept["milliseconds"].items()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # it is only a cache
        return {}
    return {size: own for size, own in found.items() if own and set(own) <= names}


def _noise(count: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def _seconds_of_call(compute: Compute, images: np.ndarray, least: float) -> float:
    """Mean time of a call, of as many as take at least so many seconds together."""
    started, calls = time.perf_counter(), 0
    while True:
        compute(images)
        calls += 1
        if (passed := time.perf_counter() - started) >= least:
            return passed / calls

"""Measures the lanes of an exported model in each precision, chooses a mix, and writes it as an export."""

import dataclasses
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.data.batches import Split
from mlcn_jax.data.datasets import Dataset, ranking_images, split_validation
from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder, put_in_place, read_object, write_atomic, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.forms import read_profiles
from mlcn_jax.placement.problem import NoRoom
from mlcn_jax.serving import artifact, model_card, onnx
from mlcn_jax.serving.export import flat_weights, write_manifest
from mlcn_jax.serving.parts import FORMS, Form, model_digest, tolerance
from mlcn_jax.serving.precision.lanes import write_lanes
from mlcn_jax.serving.precision.make import Lane, Made, lanes_of, make
from mlcn_jax.serving.precision.mix import Mix, cheapest_mix, is_accurate, mix_accuracy, mixes_timed
from mlcn_jax.serving.precision.place import TASK, place_lanes
from mlcn_jax.serving.precision.speeds import call_seconds
from mlcn_jax.training.session import check_learned

FILE = "precision.json"
PLACED, TIERS = "placed", "tiers.json"  # with device profiles: an export, and what `tiers split` takes
_BATCH = 500  # images whose parts are computed in one call
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Which mix to choose, and how to calibrate and time it.

    Attributes:
      choose: `smallest` or `fastest`.
      max_accuracy_drop: percentage points of validation accuracy that the mix may lose.
      calibration_images: training images to calibrate int8 on.
      batch: images in a timed call.
      rounds: rounds of timing.
    """

    choose: str = "smallest"
    max_accuracy_drop: float = 0.1
    calibration_images: int = 512
    batch: int = 64
    rounds: int = 10


def precision(
    workdir: Path, results: Path, terms: Terms, command: str, data_dir: str = "", profiles: Sequence[Path] = ()
) -> dict[str, Any]:
    """Writes the chosen mix to `results/export` and all that was measured to `results/precision.json`; returns that.

    With device profiles, the forms that were chosen with devices are written to `results/placed`, and the devices to
    `results/tiers.json`; those of an earlier call are removed.

    Args:
      workdir: folder of a run that was exported.
      results: folder to write to.
      terms: what to choose, and how to measure.
      command: the command that makes the export again.
      data_dir: overrides the run's `data.dir`, if not empty.
      profiles: device profiles; if given, a form and a device are also chosen for each lane (`place_lanes`).

    Raises:
      InputError: there is no export or it is damaged, it has no lanes, its images are not those that it was trained on,
        the folder cannot be written to or is the workdir, or a package is not installed.
      NoRoom: the lanes do not fit the devices; everything else was written.
    """
    packages = onnx.versions()
    model = onnx.read_export(workdir, data_dir)
    if not model.spec.lane_specs:
        raise InputError(f"{workdir} holds a CapsNet, which has no lanes: give a run of a model with lanes")
    folder = results / "export"
    if folder.resolve() == (workdir / "export").resolve():
        raise InputError(
            f"--output={results} is the run's own folder, whose export would be replaced by the mix: give another "
            "--output=FOLDER, or none for WORKDIR/precision"
        )
    for replaced in (folder, results / PLACED) if profiles else (folder,):
        if replaced.exists() and not _is_mix(replaced):
            raise InputError(
                f"{replaced} exists but is not an export that {program()} precision wrote: give another "
                "--output=FOLDER, or move it away, because it would be replaced"
            )
    devices = read_profiles(model.spec, profiles, TASK) if profiles else []
    dataset = model.data.load()
    check_images(dataset, model)
    config = RunConfig.from_dict(dict(model.config))
    train, validation = split_validation(dataset.train, config.data.validation_fraction, config.split_seed)
    check_learned(workdir, dataset, train)
    data = {"name": dataset.name, "train_images": len(train.labels), **dataset.provenance}
    make_folder(results, "output")
    ranking, ranked_on = ranking_images(train, validation)
    if ranked_on == "training":
        _log.warning(
            "no validation images were held out: the mix is chosen on training images, which overstates its accuracy"
        )
    evenly = np.unique(np.linspace(0, len(train.labels) - 1, terms.calibration_images).astype(int))

    lanes = lanes_of(model.spec, model.encoder)
    made = []
    for lane in lanes:
        _log.info("%s of %d: %s", lane, len(lanes), ", ".join(map(str, FORMS)))
        made.append([make(lane, form, train.images[evenly]) for form in FORMS])
    parts = [[_parts(each.call, ranking.images) for each in own] for own in made]
    seconds = _seconds_of_kinds(lanes, made, terms)
    fastest = terms.choose == "fastest"
    costs = [
        [(s, each.num_bytes) if fastest else (each.num_bytes, s) for each, s in zip(*both, strict=True)]
        for both in zip(made, seconds, strict=True)
    ]
    in_float32 = mix_accuracy(parts, [0] * len(lanes), ranking.labels)  # another model's if the export is in bfloat16
    least = in_float32 - terms.max_accuracy_drop / 100
    cheapest, proven = cheapest_mix(parts, costs, ranking.labels, least)

    with tempfile.TemporaryDirectory(dir=results, prefix=".export-") as temporary:
        written: dict[Mix, Path] = {}

        def opened(mix: Mix) -> artifact.Artifact:
            """A mix as a whole export."""
            if mix in written:
                return artifact.Artifact(written[mix])
            path = written[mix] = Path(temporary) / str(len(written))
            chosen = [own[form] for own, form in zip(made, mix, strict=True)]
            return _written(path, model, chosen, command, ranking.images)

        def seconds_of(mixes: Sequence[Mix]) -> list[float]:
            """Seconds of a call of the export as it was, and of each mix; they are open only meanwhile."""
            calls = [model.artifact.lengths, *(opened(each).lengths for each in mixes)]
            return call_seconds(calls, model.spec.image_shape, terms.batch, terms.rounds).tolist()

        mix, tried = cheapest, dict[Mix, float]()
        measured = {
            "terms": dataclasses.asdict(terms),
            "lanes": _rows(lanes, made, mix, seconds, parts, ranking),
            "ranked_on": ranked_on,
            "packages": packages,
            **host.environment(),
        }
        try:
            if fastest:
                kinds = [str(lane) for lane in model.spec.lane_specs]
                mix, tried = mixes_timed(
                    cheapest,
                    kinds,
                    len(FORMS),
                    lambda each: is_accurate(parts, each, ranking.labels, least),
                    lambda some: seconds_of(some)[1:],
                )
            # Also after others were tried: the least of several measurements is less than it takes.
            before_seconds, chosen_seconds = seconds_of([mix])
        except InputError as error:
            write_json(results / FILE, measured)
            raise InputError(f"{error}; what was measured is in {results / FILE}") from error
        if fastest and chosen_seconds > before_seconds:
            _log.warning(
                "the export in %s is faster than every mix that was timed: it takes %.2f ms for %d images, the chosen "
                "mix %.2f",
                *(workdir / "export", 1000 * before_seconds, terms.batch, 1000 * chosen_seconds),
            )
        path, export = written[mix], opened(mix)
        about = measured | {
            "lanes": _rows(lanes, made, mix, seconds, parts, ranking),
            "proven": proven and not fastest,
            "accuracy": {
                "before": _accuracy(model.artifact.lengths, ranking),
                "float32": in_float32,
                "chosen": _accuracy(export.lengths, ranking),
            },
            "test_accuracy": {
                name: _accuracy(own.lengths, dataset.test)
                for name, own in (("before", model.artifact), ("chosen", export))
                if config.train.score_test
            },
            "bytes": {"before": _weight_bytes(model.artifact), "chosen": _weight_bytes(export)},
            "milliseconds": {"before": 1000 * before_seconds, "chosen": 1000 * chosen_seconds},
            "tried": [
                {"forms": [str(FORMS[form]) for form in each], "milliseconds": 1000 * s}
                for each, s in (tried or {mix: chosen_seconds}).items()
            ],
            "placement": {},
            "export": str(folder),
        }
        tested = {"test_accuracy": about["test_accuracy"]["chosen"]} if about["test_accuracy"] else {}
        _write_card(path, export, {"data": data, **tested}, model.data.dir)
        put_in_place(path, folder)
        write_json(results / FILE, about)
    if _is_mix(results / PLACED):  # of an earlier call, from other forms
        shutil.rmtree(results / PLACED)
        (results / TIERS).unlink(missing_ok=True)
    if devices:
        held = [[each.num_bytes for each in own] for own in made]
        about_lanes = (parts, held, ranking.labels)
        try:
            placed = place_lanes(model.spec, devices, *about_lanes, terms.max_accuracy_drop, terms.batch, mix)
        except NoRoom as error:
            raise NoRoom(f"{error}; the measurements, and the export without devices, are in {results}") from error
        about["placement"] = placed
        write_json(results / FILE, about)
        forms = [{str(each.form): each for each in own} for own in made]
        chosen = [own[lane["exported"]] for own, lane in zip(forms, placed["lanes"], strict=True)]
        _export_placed(results, model, chosen, command, ranking.images, data)
        write_json(results / TIERS, tiers_of([lane["device"] for lane in placed["lanes"]]))
    return about


def _is_mix(folder: Path) -> bool:
    """Whether a folder is an export of lanes in several precisions, going by its manifest."""
    try:
        return read_object(folder / artifact.MANIFEST).get("format") == artifact.MIXED_FORMAT
    except InputError:
        return False


def tiers_of(devices: Sequence[int]) -> dict[str, Any]:
    """The content of `tiers.json`, from the device of each lane; a device without lanes is no tier."""
    tiers = [
        {"name": f"device{device}", "lanes": [lane for lane, own in enumerate(devices) if own == device]}
        for device in sorted(set(devices))
    ]
    return {"tiers": tiers}


def _export_placed(
    results: Path,
    model: onnx.ExportedModel,
    chosen: Sequence[Made],
    command: str,
    images: np.ndarray,
    data: Mapping[str, Any],
) -> None:
    """Writes the forms that were chosen with devices as an export, in place of an older one."""
    with tempfile.TemporaryDirectory(dir=results, prefix=".placed-") as temporary:
        made = Path(temporary) / PLACED
        _write_card(made, _written(made, model, chosen, command, images), {"data": data}, model.data.dir)
        put_in_place(made, results / PLACED)


def check_images(dataset: Dataset, model: onnx.ExportedModel) -> None:
    """Raises InputError if the images are of another size or of other classes than the model's."""
    shape, expected = dataset.train.images.shape[1:], tuple(model.spec.image_shape)
    names = tuple(model.artifact.class_names)
    if shape != expected or dataset.class_names != names:
        raise InputError(
            f"the model takes {'x'.join(map(str, expected))} images of {len(names)} classes, but {dataset.name}, used "
            f"for calibration, has {'x'.join(map(str, shape))} images of {len(dataset.class_names)} classes: give "
            "--data_dir=FOLDER with the images that it was trained on"
        )


def _parts(call: Callable[[np.ndarray], Any], images: np.ndarray) -> Float[np.ndarray, "n classes"]:
    return np.concatenate([np.asarray(call(images[s : s + _BATCH])) for s in range(0, len(images), _BATCH)])


def _accuracy(lengths: Callable[[np.ndarray], np.ndarray], split: Split) -> float:
    return float(np.mean(np.argmax(_parts(lengths, split.images), axis=-1) == split.labels))


def _seconds_of_kinds(lanes: Sequence[Lane], made: Sequence[Sequence[Made]], terms: Terms) -> list[list[float]]:
    """Seconds of a call of each lane in each form; equal lanes are timed once."""
    kinds: dict[str, list[float]] = {}
    found = []
    for lane, own in zip(lanes, made, strict=True):
        kind = str(lane.spec.lane_specs[lane.index])
        if kind not in kinds:
            calls = [each.call for each in own]
            kinds[kind] = call_seconds(calls, lane.spec.image_shape, terms.batch, terms.rounds).tolist()
        found.append(kinds[kind])
    return found


def _rows(
    lanes: Sequence[Lane],
    made: Sequence[Sequence[Made]],
    mix: Mix,
    seconds: Sequence[Sequence[float]],
    parts: Sequence[Sequence[np.ndarray]],
    ranking: Split,
) -> list[dict[str, Any]]:
    """Each lane: its bytes, milliseconds and accuracy alone in each form, and the form that was chosen."""
    return [
        {
            "lane": str(lane.spec.lane_specs[lane.index]),
            "chosen": str(own[form].form),
            "forms": [
                {
                    **dataclasses.asdict(each.form),
                    "bytes": each.num_bytes,
                    "milliseconds": 1000 * s,
                    # A lane of weight 0 adds nothing, from which no class follows.
                    "accuracy_alone": mix_accuracy([[part]], [0], ranking.labels) if np.any(part) else None,
                }
                for each, s, part in zip(own, times, part_of, strict=True)
            ],
        }
        for lane, own, form, times, part_of in zip(lanes, made, mix, seconds, parts, strict=True)
    ]


def _written(
    folder: Path,
    model: onnx.ExportedModel,
    chosen: Sequence[Made],
    command: str,
    images: UInt8[np.ndarray, "n h w c"],
) -> artifact.Artifact:
    """Writes the export of all lanes, each in its chosen form, and checks it on some images; it has no card yet."""
    folder.mkdir()
    write_json(folder / "config.json", model.config)
    arrays = flat_weights(model.encoder)
    description = model.artifact.description | {
        "forms": [dataclasses.asdict(own.form) for own in chosen],
        "model_sha256": model_digest(model.spec.lanes, model.spec.weights.tolist(), arrays),
    }
    write_json(folder / artifact.MODEL, description)
    row = jax.ShapeDtypeStruct(model.spec.image_shape, jnp.uint8)
    functions, files = write_lanes(folder, model.spec, dict(enumerate(chosen)), row)
    weights = {name: array for own in chosen for name, array in own.arrays.items()}
    np.savez(folder / artifact.WEIGHTS, **weights)  # type: ignore[arg-type]
    write_manifest(folder, model.artifact.step, functions, command, files)
    exported = artifact.Artifact(folder)
    _check(exported, chosen, model.spec, images)
    return exported


def _write_card(folder: Path, exported: artifact.Artifact, summary: Mapping[str, Any], data_dir: str) -> None:
    write_atomic(folder / model_card.FILE, model_card.text(exported, summary, data_dir))


def _check(exported: artifact.Artifact, chosen: Sequence[Made], spec: ModelSpec, images: np.ndarray) -> None:
    """Raises InputError if the lengths of the export differ from those of its lanes together.

    The two are computed by different programs. If they differ, the packages or the machine are at fault, and the
    measured accuracy is not that of the export.
    """
    allowed = tolerance([own.form.precision for own in chosen], spec.weights)
    for n in (1, 8):
        expected = np.sqrt(sum(np.asarray(own.call(images[:n])) for own in chosen))
        error = float(np.max(np.abs(exported.lengths(images[:n]) - expected)))
        if not error <= allowed:
            forms = ", ".join(sorted({str(own.form) for own in chosen}))
            raise InputError(
                f"lengths of {n} images differ by {error:.2g} between the export and its single lanes, but rounding "
                f"in {forms} explains only {allowed:.2g}, so nothing was exported: install other versions of "
                "onnxruntime and jax2onnx (in a clone, those of requirements-onnx.txt), or give a smaller "
                "--max_accuracy_drop, so that fewer lanes have low precision"
            )


def _weight_bytes(exported: artifact.Artifact) -> int:
    """Bytes of the files that hold weights; ONNX files also hold the graph of their lane."""
    files = exported.manifest["files"]
    return sum(known["bytes"] for name, known in files.items() if name == artifact.WEIGHTS or name.endswith(".onnx"))


def table(about: Mapping[str, Any]) -> str:
    """What was measured, as a text table: lane by precision, the mix that was chosen, and what it costs."""
    rows = [["lane", "precision", "runtime", "KB", "ms", "alone", ""]]
    for number, lane in enumerate(about["lanes"]):
        for form in lane["forms"]:
            chosen = "chosen" if str(Form(form["precision"], form["runtime"])) == lane["chosen"] else ""
            rows.append(
                [
                    f"{number} {lane['lane']}",
                    form["precision"],
                    form["runtime"],
                    f"{form['bytes'] / 1000:,.1f}",
                    f"{form['milliseconds']:.2f}",
                    "-" if form["accuracy_alone"] is None else f"{form['accuracy_alone']:.2%}",
                    chosen,
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    accuracy, test, size, speed = (about[name] for name in ("accuracy", "test_accuracy", "bytes", "milliseconds"))
    lines += [
        "",
        f"{about['ranked_on']} accuracy {accuracy['before']:.2%} before, {accuracy['chosen']:.2%} chosen"
        + _doubt(about),
        *([f"test accuracy {test['before']:.2%} before, {test['chosen']:.2%} chosen"] if test else []),
        f"files of weights {size['before']:,} bytes before, {size['chosen']:,} chosen: "
        f"{size['before'] / size['chosen']:.2f} times smaller",
        f"{about['terms']['batch']} images in {speed['before']:.2f} ms before, {speed['chosen']:.2f} ms chosen: "
        f"{speed['before'] / speed['chosen']:.2f} times as fast",
    ]
    if placed := about["placement"]:
        lines += ["", "form and device of each lane, chosen together:"]
        devices = placed["devices"]
        lines += [f"  {n} {x['lane']}: {x['form']} on {devices[x['device']]}" for n, x in enumerate(placed["lanes"])]
        lines.append(
            f"  {about['terms']['batch']} images in {placed['makespan_milliseconds']:.2f} ms by the profiles, "
            f"{placed['accuracy_drop']:.2f} percentage points lost"
        )
    return "\n".join(lines)


def _doubt(about: Mapping[str, Any]) -> str:
    """In what sense the mix may not be the best."""
    if about["proven"]:
        return ""
    if about["terms"]["choose"] == "fastest":
        return f" (the fastest of {len(about['tried'])} mixes that were timed)"
    return " (a smaller mix may be as accurate: there are too many to try them all)"

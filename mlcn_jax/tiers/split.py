"""Splits a trained model into one artifact per tier, and chooses when an answer is final."""

import dataclasses
import logging
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.analysis.lane_fit import fit_weights
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.data.batches import Split
from mlcn_jax.data.datasets import split_validation
from mlcn_jax.errors import InputError
from mlcn_jax.files import hold, put_in_place, read_json, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.spec import ModelSpec, rows_of, spec_of
from mlcn_jax.serving import artifact
from mlcn_jax.serving.export import flat_weights, write_functions, write_manifest
from mlcn_jax.serving.parts import model_digest, tolerance
from mlcn_jax.serving.precision.lanes import read_lanes, write_lanes
from mlcn_jax.serving.precision.make import Made
from mlcn_jax.tiers import policy as policies
from mlcn_jax.tiers import signatures
from mlcn_jax.tiers.artifact import HOME, PART, SIGNATURE, TierArtifact
from mlcn_jax.tiers.cuts import PIXELS, Part
from mlcn_jax.tiers.placing import Wishes, check_given, lane_flops, place, read_wishes
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.session import check_learned
from mlcn_jax.training.trained import Trained, load_trained

FOLDER = "tiers"
GOOD_VALIDATION_IMAGES = 5000  # with fewer, the bounds on what a threshold costs are wide
LEAST_WEIGHT = 0.01  # that is fitted to a lane: with 0, a tier that has no other would have no answer
_MODEL = "model.json"  # of a workdir
_log = logging.getLogger(__name__)


def split(
    workdir: Path,
    wishes_path: Path,
    cut: str = PIXELS,
    key: Path | None = None,
    data_dir: str = "",
    out: str = "",
    precision: Path | None = None,
) -> Path:
    """Writes an artifact for each tier into a folder of `workdir`, in place of older ones, and returns that folder.

    If the model has no weights of its lanes, they are fitted on the validation images and stored in `model.json`, where
    all that reads the model finds them; lanes of `precision` keep the weights that they were exported with.

    Before they are put in place they are loaded again, and must add up to the whole model's lengths, as far as their
    precisions allow (`parts.tolerance`).

    Args:
      workdir: folder of a trained model.
      wishes_path: `tiers.json` (`placing.Wishes`).
      cut: what leaves the first tier (`cuts.NAMES`).
      key: private key to sign with, a PEM file.
      data_dir: overrides the run's `data.dir`, for the validation images, if not empty.
      out: name of the folder in `workdir`; empty is `tiers`.
      precision: export of the model in which each lane has a precision, which the tiers keep; None for float32.

    Raises:
      InputError: the workdir, the tiers, the cut, the key or the export cannot be used, the images are not those that
        the model was trained on, or its lanes do not classify alone.
    """
    if precision is not None and cut != PIXELS:
        raise InputError(f"--cut={cut} splits lanes, but those of --precision stay whole: give --cut={PIXELS}")
    if out and (Path(out).name != out or out == ".."):
        raise InputError(f"--out={out} must be the name of a folder, which is made in {workdir}")
    signing = None if key is None else signatures.private_key(key)
    if not (workdir / _MODEL).is_file():
        load_trained(workdir)  # raises, before a folder is created
    with hold(workdir), tempfile.TemporaryDirectory(dir=workdir, prefix=".tiers-") as temporary:
        config = stored_config(workdir, data_dir)
        trained, dataset = load_with_data(workdir, config)
        check_lanes_classify(trained.spec)
        wishes = read_wishes(wishes_path, trained.class_names)
        check_given(wishes_path, wishes, len(trained.spec.lane_specs))  # before anything is computed
        folder = workdir / (out or FOLDER)
        if folder.exists() and not any(folder.glob(f"*/{policies.FILE}")):
            raise InputError(
                f"{folder} exists but holds no split model: move it away, because splitting would replace it"
            )
        train, validation = split_validation(dataset.train, config.data.validation_fraction, config.split_seed)
        check_learned(workdir, dataset, train)
        _check_validation(workdir, len(validation.labels))
        chosen: list[Made] = []
        fits = precision is None and not trained.spec.lane_weights
        trained = _folded(trained)  # as the tiers hold it: in bfloat16, folding changes what is rounded
        if precision is not None:
            chosen = read_lanes(precision, trained.spec, _digest(trained))
            squares = _squares_of(chosen, validation.images)
        else:
            v = class_capsules(trained.spec, trained.params, validation, config.train.part_size)
            if fits:
                trained = _weighted(trained, v, validation)
            squares = np.square(v) * trained.spec.weights.astype(np.float32)
        lanes = place(wishes_path, wishes, trained.spec, squares, validation.labels)
        for wish, own in zip(wishes.tiers, lanes, strict=True):
            if not trained.spec.weights[own].any():
                raise InputError(
                    f"{wishes_path}: the lanes of tier {wish.name}, {', '.join(map(str, own))}, have weight 0 in "
                    f"{workdir / _MODEL}, so it would have no answer: give it another lane"
                )
        policy, parts = _policy(trained, wishes, lanes, cut, squares, validation)
        changed = {"cut": cut if cut != PIXELS else "", "out": out if out != FOLDER else ""}
        given = {"tiers": wishes_path, **changed, "key": key, "data_dir": data_dir, "precision": precision}
        options = [f"--{name}={value}" for name, value in given.items() if value]
        command = shlex.join(["mlcn_jax", "tiers", "split", str(workdir), *options])
        made = Path(temporary) / "tiers"
        for i, tier in enumerate(policy.tiers):
            others = {other.name: part for other, part in zip(policy.tiers, parts, strict=True) if other != tier}
            _write(made / tier.name, trained, policy, i, parts[i], {} if i else others, command, chosen)
            if signing is not None:
                content = (made / tier.name / artifact.MANIFEST).read_bytes()
                (made / tier.name / SIGNATURE).write_bytes(signing.sign(content))
        computed = [trained.spec.compute_dtype] * len(trained.spec.weights)
        precisions = [own.form.precision for own in chosen] or computed
        _check(made, policy, squares, validation, tolerance(precisions, trained.spec.weights))
        if fits:
            _store_weights(workdir, trained.spec.lane_weights)
            _log.info(
                "weights of the lanes were fitted on %d validation images and are now in %s; exports made before "
                "have none, and resuming the run drops them",
                *(len(validation.labels), workdir / _MODEL),
            )
        put_in_place(made, folder)
    return folder


def _weighted(trained: Trained, v: np.ndarray, validation: Split) -> Trained:
    """The model with weights that are fitted to its lanes' class capsules of the validation images."""
    weights = tuple(max(weight, LEAST_WEIGHT) for weight in fit_weights(v, validation.labels))
    return dataclasses.replace(trained, spec=dataclasses.replace(trained.spec, lane_weights=weights))


def _store_weights(workdir: Path, weights: Sequence[float]) -> None:
    about = read_json(workdir / _MODEL)
    about["spec"]["lane_weights"] = list(weights)
    write_json(workdir / _MODEL, about)


def is_of(folder: Path, trained: Trained) -> bool:
    """Whether a folder holds a split of this model, with the parameters that it has now."""
    digest = _digest(_folded(trained))
    return any(policies.Policy.read(path).model == digest for path in folder.glob(f"*/{policies.FILE}"))


def check_lanes_classify(spec: ModelSpec) -> None:
    """Raises InputError unless each lane of a model classifies alone, so that some of them can give an answer."""
    lanes = f"lanes {spec.lanes}" if spec.lanes else "CapsNet, which has no lanes,"
    if not spec.lanes or (spec.margin_loss == "joint" and not spec.classifies_alone.all()):
        raise InputError(
            f"{lanes} with model.margin_loss={spec.margin_loss} do not classify alone, so a part of them gives no good "
            "answer: train with --config.model.margin_loss=per_lane or per_lane_sum, or lanes of the kind resnet"
        )
    if len(spec.lane_specs) < 2:
        raise InputError(f"{lanes} cannot be split: train a model with 2 lanes or more")


def _check_validation(workdir: Path, count: int) -> None:
    if not count:
        raise InputError(
            f"{workdir} was trained without validation images, on which thresholds are chosen: train with "
            "--config.data.validation_fraction=0.1"
        )
    if count < GOOD_VALIDATION_IMAGES:
        _log.warning(
            "thresholds are chosen on %d validation images; with fewer than %d, few answers can be shown to be final",
            *(count, GOOD_VALIDATION_IMAGES),
        )


def _policy(
    trained: Trained, wishes: Wishes, lanes: list[list[int]], cut: str, squares: np.ndarray, validation: Split
) -> tuple[policies.Policy, list[Part]]:
    spec, names = trained.spec, [tier.name for tier in wishes.tiers]
    parts, tiers, flops = [], [], lane_flops(spec)
    for i, (name, own) in enumerate(zip(names, lanes, strict=True)):
        weights = tuple(spec.weights[own].tolist())
        part = Part(spec_of(spec, own), weights, cut if i else PIXELS)
        parts.append(part)
        tiers.append(policies.Tier(name, tuple(own), float(sum(weights)), sum(flops[lane] for lane in own)))
    sums = {name: squares[..., own].sum(axis=-1) for name, own in zip(names, lanes, strict=True)}
    thresholds = policies.thresholds(
        names, sums, {tier.name: tier.weight for tier in tiers}, validation.labels, wishes.tolerance
    )
    order = {name: i for i, name in enumerate(trained.class_names)}
    groups = {name: tuple(order[member] for member in members) for name, members in wishes.groups.items()}
    policy = policies.Policy(
        format=policies.FORMAT,
        model=_digest(trained),
        class_names=trained.class_names,
        cut=cut,
        tiers=tuple(tiers),
        power=spec.probability_power,
        groups=groups,
        tolerance=wishes.tolerance,
        validation_images=len(validation.labels),
        thresholds=thresholds,
    )
    return policy, parts


def _folded(trained: Trained) -> Trained:
    return dataclasses.replace(trained, params=fold_statistics(trained.spec, trained.params))


def _digest(folded: Trained) -> str:
    return model_digest(folded.spec.lanes, folded.spec.weights.tolist(), flat_weights(folded.params["encoder"]))


def _weights_of(trained: Trained, lanes: list[int]) -> dict[str, np.ndarray]:
    """The arrays of some lanes, [lanes, ...], by name."""
    encoder = trained.params["encoder"]
    rows = rows_of(trained.spec, lanes)
    return flat_weights({name: jax.tree.map(lambda a, own=own: a[own], encoder[name]) for name, own in rows.items()})


def _write(
    folder: Path,
    trained: Trained,
    policy: policies.Policy,
    index: int,
    part: Part,
    others: dict[str, Part],
    command: str,
    chosen: Sequence[Made] = (),
) -> None:
    """Writes one tier's artifact.

    `others` are the parts of other tiers whose input this tier computes; `chosen` are all lanes, if they have
    precisions of their own.
    """
    folder.mkdir(parents=True)
    own = policy.tiers[index]
    files: list[str] | None = None
    if chosen:
        lanes = {lane: chosen[lane] for lane in own.lanes}
        functions, files = write_lanes(folder, trained.spec, lanes, part.row)
        weights = {PART: {name: array for lane in lanes.values() for name, array in lane.arrays.items()}}
    else:
        weights = {PART: part.split_weights(_weights_of(trained, list(own.lanes)))[1]}
        functions = write_functions(folder, PART, trained.spec, part.after, weights[PART], part.row)
    home = {tier: other for tier, other in others.items() if other.cut != PIXELS}
    image = jax.ShapeDtypeStruct(trained.spec.image_shape, jnp.uint8)
    for tier, other in home.items():
        needed = other.split_weights(_weights_of(trained, list(policy.tier(tier).lanes)))[0]
        weights[HOME + tier] = needed
        functions += write_functions(folder, HOME + tier, trained.spec, other.before, needed, image)
    arrays = {f"{stem}:{name}": array for stem, own in weights.items() for name, array in own.items()}
    np.savez(folder / artifact.WEIGHTS, **arrays)  # type: ignore[arg-type]
    about = {
        "tier": own.name,
        "lanes": own.lanes,
        "class_names": trained.class_names,
        "image_shape": trained.spec.image_shape,
        "row_shape": part.row.shape,
        "row_dtype": str(part.row.dtype),
        "home": list(home),
        "output": "what the lanes add to the squared length of each class capsule, float32",
    }
    write_json(folder / artifact.MODEL, about)
    write_json(folder / policies.FILE, policy.to_dict())
    write_manifest(folder, trained.step, functions, command, files)


def _squares_of(chosen: Sequence[Made], images: np.ndarray) -> np.ndarray:
    """What each lane adds to the squared lengths, [n, classes, lanes]."""
    starts = range(0, len(images), artifact.MAX_BATCH)
    columns = [[np.asarray(own.call(images[s : s + artifact.MAX_BATCH])) for s in starts] for own in chosen]
    return np.stack([np.concatenate(column) for column in columns], axis=-1)


def _check(folder: Path, policy: policies.Policy, squares: np.ndarray, validation: Split, tolerance: float) -> None:
    """Raises RuntimeError if the tiers' answers do not add up to the whole model's lengths."""
    tiers = [TierArtifact(folder / name) for name in policy.names]
    for n in (1, 8):
        images = validation.images[:n]
        rows = [tiers[0].home(tier.name, images) if i else images for i, tier in enumerate(tiers)]
        total = sum(tier.part(own) for tier, own in zip(tiers, rows, strict=True))
        error = np.max(np.abs(np.sqrt(total) - np.sqrt(squares[: len(images)].sum(axis=-1))))
        if not error <= tolerance:
            raise RuntimeError(f"the sum over the tiers differs from the whole model by {error}")


def describe(folder: Path) -> str:
    """What a split model is, as a table: each tier's lanes and share of the FLOPs, and when an answer is final.

    `folder` is in the workdir of the model, whose `model.json` has the weights of the lanes.
    """
    policy = policies.Policy.read(next(folder.glob(f"*/{policies.FILE}")))
    total = sum(tier.flops for tier in policy.tiers)
    lines = [f"{'tier':<12}{'lanes':<16}{'FLOPs':>8}"]
    lines += [f"{tier.name:<12}{','.join(map(str, tier.lanes)):<16}{tier.flops / total:>8.1%}" for tier in policy.tiers]
    weights = read_json(folder.parent / _MODEL)["spec"].get("lane_weights", [])
    shown = ", ".join(f"{weight:g}" for weight in weights) or "1 each"
    lines.append(f"\nweights of the lanes, in {folder.parent / _MODEL}: {shown}")
    lines += [f"\n{'answered':<20}{'margin':>8}{'settled':>9}{'loss':>8}{'at most':>9}  (95 %, validation images)"]
    for name, found in policy.thresholds.items():
        margin = "never" if found.margin is None else f"{found.margin:.3f}"
        lines.append(
            f"{name:<20}{margin:>8}{found.settled:>9.1%}{100 * found.loss:>8.2f}{100 * found.loss_bound:>9.2f}"
        )
    lines.append(f"\n{program()} tiers gateway {folder / policy.names[0]} --nodes=NAME=URL,... answers with them")
    return "\n".join(lines)

"""Joins the lanes of finished workdirs into one model: checks that they fit together, and writes an ordinary workdir.

A lane that learned to classify alone needs no other lane, so lanes trained apart, on any machine at any time, can be
columns of one model. What they share is fitted afterwards (`lane_fit`): weights on validation images and the decoder on
training images, both from columns that are computed once.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mlcn_jax.analysis import lane_fit, prune
from mlcn_jax.analysis.workdir import train_command
from mlcn_jax.config import RunConfig, flat, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json
from mlcn_jax.nn import resnet
from mlcn_jax.nn.calibration import without_statistics
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LANE_KINDS, LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.session import Session, check_learned, check_settings, open_session
from mlcn_jax.training.teacher import stored_digests
from mlcn_jax.training.trained import Trained, load_trained

_log = logging.getLogger(__name__)

FILE = "joined.json"
# What a lane computes depends on these; the rest of a spec is that of the first workdir.
_OF_LANES = (
    *("image_shape", "num_classes", "signed_pixels", "lane_routing", "num_routing_iters", "prior_bias"),
    "compute_dtype",
)
# Which images a run has depends on these.
_OF_IMAGES = ("name", "dir", "cache_dir", "label_kind", "image_size", "test_fraction", "validation_fraction")
_SET = ("lanes", "lane_weights", "lane_dropout", "lane_seeds", "margin_loss", "decoder_gradient", "norm_group")
_WHITENING_TOLERANCE = 1e-2  # relative to the largest entry: other machines round eigenvectors differently


@dataclasses.dataclass(frozen=True)
class Lane:
    """A trained lane.

    Attributes:
      spec: its kind, width and depth.
      params: its parameters with a leading axis of 1, with the statistics for evaluation.
      seed: its entry of `model.lane_seeds`; None if its run had none.
      source: the workdir that it was trained in, and its number there.
      step: training steps of its checkpoint.
    """

    spec: LaneSpec
    params: dict
    seed: int | None
    source: str
    step: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A finished workdir: its configuration, its best parameters, its images with their digests, and its teachers."""

    workdir: Path
    config: RunConfig
    trained: Trained
    session: Session
    facts: dict[str, Any]
    teachers: tuple[str, ...]

    @property
    def lanes(self) -> list[Lane]:
        """Its lanes in the order of the columns."""
        spec, found = self.trained.spec, list[Lane]()
        for group in spec.lane_groups:
            for row in range(group.count):
                cut = functools.partial(_row, row=row)
                number = len(found)
                seed = spec.lane_seeds[number] if spec.lane_seeds else None
                params = jax.tree.map(cut, self.trained.params["encoder"][group.name])
                step = self.trained.lane_steps[number] if self.trained.lane_steps else self.trained.step
                found.append(Lane(group.spec, params, seed, f"{self.workdir}:{number}", step))
        return found


def _row(array: jax.Array, row: int) -> np.ndarray:
    return np.asarray(array)[row : row + 1]


def join(
    workdirs: Sequence[Path],
    output: Path,
    *,
    data_dir: str | None = None,
    weights: str = "fitted",
    decoder_epochs: int = 5,
) -> dict[str, Any]:
    """Writes the model of all lanes of some workdirs as a new workdir, and returns the content of its `joined.json`.

    It is at step 0 of a run with the settings of the first workdir, so that further training starts from these lanes;
    it has a teacher only if all of them had the same.

    Args:
      workdirs: finished runs; their lanes become columns in this order, with equal lanes next to each other.
      output: the workdir to create; it appears complete or not at all.
      data_dir: overrides `data.dir` of all runs, if the images have moved; empty for where they are downloaded.
      weights: `fitted` on validation images, or `equal`: all 1.
      decoder_epochs: passes over the training images that train the decoder.

    Raises:
      InputError: a workdir cannot be used or does not fit the first, with every difference named, or the output exists.
    """
    prune.check_unused(output)
    parts = read_parts(workdirs, data_dir)
    lanes = [lane for part in parts for lane in part.lanes]
    _check_distinct(lanes)
    spec, order = joined_spec(parts, lanes)
    check_settings(joined_config(parts[0].config, spec), spec)
    session = parts[0].session
    if weights == "fitted" and not len(session.validation.labels):
        raise InputError(
            f"{workdirs[0]} has no validation images to fit the lanes' weights on (data.validation_fraction is 0): "
            "give --weights=equal, or train with a validation_fraction"
        )
    splits = {"train": session.train[: None if decoder_epochs else 0], "validation": session.validation}
    if parts[0].config.train.score_test:
        splits["test"] = session.dataset.test
    splits = {name: split for name, split in splits.items() if len(split.labels)}
    columns = {name: columns_of(spec, lanes, split, parts[0].config) for name, split in splits.items()}
    counts = range(1, len(lanes) + 1)
    of_first = [(1.0,) * count for count in counts]  # weights of the first lane, of the first two, and so on
    if weights == "fitted":
        held, labels = columns["validation"], session.validation.labels
        of_first = lane_fit.fit_first_weights(held, labels)
        spec = dataclasses.replace(spec, lane_weights=tuple(of_first[-1][i] for i in order))
    _log.info("training the decoder for %d epochs", decoder_epochs)
    seed = parts[0].config.train.seed
    v = columns["train"][..., order] if decoder_epochs else np.empty((0, spec.num_classes, len(lanes)))
    started = time.monotonic()
    decoder = jax.block_until_ready(lane_fit.train_decoder(spec, v, session.train, decoder_epochs, seed))
    decoder_seconds = time.monotonic() - started
    params = {"encoder": _stacked(spec, [lanes[i] for i in order]), "decoder": decoder}
    rows = further_lanes(lanes, of_first, {name: columns[name] for name in columns if name != "train"}, splits)
    about = {
        "workdirs": [str(part.workdir) for part in parts],
        "weights": weights,
        "decoder_epochs": decoder_epochs,
        "decoder_seconds": decoder_seconds,
        "lanes": rows,
        "columns": list(order),
        **{f"{name}_accuracy": rows[-1][f"{name}_accuracy"] for name in splits if name != "train"},
    }
    run = _as_run(parts, spec, params)
    prune.save_run(run, output, about.get("validation_accuracy"), about, FILE)
    return about


def read_parts(workdirs: Sequence[Path], data_dir: str | None = None) -> list[Part]:
    """Reads workdirs and their images; `data_dir` as for `join`.

    Raises:
      InputError: one cannot be used or is not finished, or they do not fit together; every difference is named.
    """
    paths = [workdir.resolve() for workdir in workdirs]
    if again := next((path for path in paths if paths.count(path) > 1), None):
        raise InputError(f"{again} is given twice: its lanes can be joined once")
    sessions: dict[tuple, Session] = {}
    parts = []
    for workdir in workdirs:
        config = read_stored(workdir)
        config = config if data_dir is None else config.replace({"data.dir": data_dir})
        _check_finished(workdir, config)
        trained = load_trained(workdir)
        check_alone(workdir, trained.spec)
        images = (*(getattr(config.data, name) for name in _OF_IMAGES), config.split_seed)
        if images not in sessions:
            _log.info("loading the images of %s: %s", workdir, config.data.name)
            sessions[images] = open_session(config)
        facts = _facts(workdir, trained, sessions[images])
        parts.append(Part(workdir, config, trained, sessions[images], facts, stored_digests(workdir)))
    first = parts[0]
    rows: list[str] = []
    alike = [first]
    for part in parts[1:]:
        found = differences(first.facts, part.facts, there=f"in {first.workdir}", here=f"in {part.workdir}")
        rows += found
        alike += [] if found else [part]
    if rows := rows + _whitening_differences(alike):
        raise InputError(
            "these lanes were not trained for one model:\n" + "\n".join(rows) + "\njoin workdirs that agree on these; "
            "validation images agree if data.split_seed (or train.seed) and data.validation_fraction do"
        )
    return parts


def settings_in_common(config: RunConfig) -> dict[str, Any]:
    """The settings that runs must share for their lanes to be joined, by their names; images may be elsewhere."""
    values, places = flat(config.to_dict()), ("dir", "cache_dir")
    names = [f"data.{name}" for name in _OF_IMAGES if name not in places] + [f"model.{name}" for name in _OF_LANES]
    return {name: values[name] for name in names if name in values} | {"data.split_seed": config.split_seed}


def _check_finished(workdir: Path, config: RunConfig) -> None:
    """Raises InputError if the run of a workdir has not ended; what was joined or pruned needs no further training."""
    made = any((workdir / name).exists() for name in (FILE, prune.FILE)) and not (workdir / "metrics.jsonl").exists()
    if not made and not (workdir / "summary.json").exists():
        raise InputError(
            f"{workdir} is not finished: its training was interrupted or is still running; finish it first with "
            + train_command(config, workdir)
        )


def check_alone(workdir: Path, spec: ModelSpec) -> None:
    """Raises InputError if a lane of a model did not learn to classify alone."""
    if not spec.lane_groups:
        raise InputError(f"{workdir} holds a {spec.name}, which has no lanes to join: give workdirs of an MLCN")
    several = len(spec.lane_specs) > 1 or _was_one_of_several(workdir)
    if spec.margin_loss == "joint" and (~spec.classifies_alone).any() and several:
        raise InputError(
            f"the lanes of {workdir} were trained on their joint length (model.margin_loss=joint), so none classifies "
            "alone: give runs with model.margin_loss=per_lane or per_lane_sum"
        )


def _was_one_of_several(workdir: Path) -> bool:
    """Whether all other lanes of a model were pruned, and the one that is left has not been trained since."""
    path = workdir / prune.FILE
    if not path.exists() or (workdir / "metrics.jsonl").exists():
        return False
    return sum(group.count for group in parse_lanes(read_json(path)["lanes"]["before"])) > 1


def _facts(workdir: Path, trained: Trained, session: Session) -> dict[str, Any]:
    check_learned(workdir, session.dataset, session.train)
    return {
        "training images (SHA-256)": datasets.digest(session.train),
        "validation images (SHA-256)": datasets.digest(session.validation),
        "test images (SHA-256)": datasets.digest(session.dataset.test),
        "classes": list(trained.class_names),
        **{f"model.{name}": getattr(trained.spec, name) for name in _OF_LANES},
    }


def _whitening_differences(parts: Sequence[Part]) -> list[str]:
    """A line for each workdir that was whitened differently from the first one that was whitened at all."""
    whitened = [part for part in parts if _whitenings(part.trained)]
    return [
        f"  whitening: the first convolutions of {whitened[0].workdir} and {part.workdir} were set from other images"
        for part in whitened[1:]
        if not _same_whitening(whitened[0].trained, part.trained)
    ]


def _whitenings(trained: Trained) -> list[np.ndarray]:
    groups = trained.params["encoder"].values()
    return [np.asarray(group["trunk"][resnet.FROZEN]["kernel"][0]) for group in groups if "trunk" in group]


def _same_whitening(first: Trained, other: Trained) -> bool:
    kernels = _whitenings(first) + _whitenings(other)
    close = functools.partial(np.allclose, kernels[0], rtol=0, atol=_WHITENING_TOLERANCE * np.abs(kernels[0]).max())
    return all(close(kernel) for kernel in kernels)


def _check_distinct(lanes: Sequence[Lane]) -> None:
    seen: dict[tuple, Lane] = {}
    for lane in lanes:
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(lane.params)]
        twin = seen.setdefault((lane.spec, hash(tuple(leaves))), lane)
        if twin is not lane:
            raise InputError(
                f"{twin.source} and {lane.source} are the same lane: train one with another seed (model.lane_seeds)"
            )


def joined_spec(parts: Sequence[Part], lanes: Sequence[Lane]) -> tuple[ModelSpec, list[int]]:
    """The model of some lanes, without weights, and the lane of each column: equal lanes are next to each other."""
    first = parts[0]
    kinds = list(dict.fromkeys(lane.spec for lane in lanes))
    order = [i for kind in kinds for i, lane in enumerate(lanes) if lane.spec == kind]
    seeds = [lanes[i].seed for i in order]
    published = not all(LANE_KINDS[kind.kind].classifies for kind in kinds)
    spec = dataclasses.replace(
        first.trained.spec,
        lanes=",".join(str(lanes[i].spec) for i in order),
        lane_weights=(),
        lane_dropout=0.0,  # that of a single lane that was trained on the joint length of all, its own
        lane_seeds=() if None in seeds else tuple(seed for seed in seeds if seed is not None),
        margin_loss="per_lane_sum" if first.trained.spec.margin_loss == "joint" else first.trained.spec.margin_loss,
        decoder_gradient="none" if published else first.trained.spec.decoder_gradient,
        norm_group=_norm_group(parts),
    )
    return dataclasses.replace(spec, lanes=",".join(map(str, spec.lane_groups))), order


def _norm_group(parts: Sequence[Part]) -> int:
    """The images that further training normalises together.

    As many as the first lanes that normalise had, or the most below that divide a part of a batch of the first workdir.
    """
    normalise = [each for each in parts if each.trained.spec.normalises]
    group, settings = (normalise or parts)[0].trained.spec.norm_group, parts[0].config.train
    part = settings.batch_size // settings.accumulation_steps
    if not normalise or (part <= group and settings.accumulation_steps == 1):
        return group
    return max(size for size in range(1, group + 1) if part % size == 0)


def columns_of(
    spec: ModelSpec, lanes: Sequence[Lane], split: datasets.Split, config: RunConfig
) -> Float[np.ndarray, "n classes lanes"]:
    """Class capsules of a split, one lane after another; equal lanes share a program."""
    _log.info("computing %d lanes on %s images", len(lanes), f"{len(split.labels):,}")
    columns = np.empty((len(split.labels), spec.num_classes, len(lanes)), np.float32)
    for i in sorted(range(len(lanes)), key=lambda i: str(lanes[i].spec)):
        one = dataclasses.replace(spec, lanes=str(lanes[i].spec), lane_seeds=(), lane_weights=())
        (group,) = one.lane_groups
        params = {"encoder": {group.name: jax.tree.map(jnp.asarray, lanes[i].params)}}
        columns[..., i : i + 1] = class_capsules(one, params, split, config.train.part_size)
    return columns


def further_lanes(
    lanes: Sequence[Lane],
    weights: Sequence[Sequence[float]],
    columns: dict[str, np.ndarray],
    splits: dict[str, datasets.Split],
) -> list[dict[str, Any]]:
    """For each lane: its weight, its accuracy alone, and the accuracy of joining only the lanes up to it.

    Args:
      lanes: the lanes.
      weights: weights of the first lane alone, of the first two, and so on.
      columns: class capsules of the lanes, by split.
      splits: the images.
    """

    def row(i: int) -> dict[str, Any]:
        found: dict[str, Any] = {"lane": str(lanes[i].spec), "seed": lanes[i].seed, "weight": weights[-1][i]}
        found |= {"source": lanes[i].source, "step": lanes[i].step}
        for name, v in columns.items():
            labels = splits[name].labels
            found[f"{name}_accuracy_alone"] = lane_fit.accuracy(v[..., i : i + 1], labels, np.ones(1))
            found[f"{name}_accuracy"] = lane_fit.accuracy(v[..., : i + 1], labels, np.array(weights[i]))
        return found

    return [row(i) for i in range(len(lanes))]


def _stacked(spec: ModelSpec, lanes: Sequence[Lane]) -> dict:
    """Parameters of the encoder, from those of its lanes in the order of the columns."""
    encoder, first = {}, 0
    for group in spec.lane_groups:
        own = [lane.params for lane in lanes[first : first + group.count]]
        encoder[group.name] = jax.tree.map(lambda *rows: jnp.concatenate(rows), *own)
        first += group.count
    return encoder


def common_teachers(parts: Sequence[Part]) -> tuple[str, ...]:
    """The teachers that all workdirs learned from; empty if these differ, or if there are none."""
    first = parts[0].teachers
    return first if all(part.teachers == first for part in parts) else ()


def joined_config(config: RunConfig, spec: ModelSpec, teachers: Sequence[str] = ()) -> RunConfig:
    """The configuration of a joined model: that of the first workdir, without what holds only for its own lanes.

    Its teacher stays if all lanes had it: `teachers` are the `common_teachers`.
    """
    changes: dict[str, Any] = {
        name: list(value) if isinstance(value := getattr(spec, field), tuple) else value
        for field in _SET
        for name in (f"model.{field}",)
    }
    lanes_apart = config.train.lanes_apart and bool(spec.lane_seeds)
    changes |= {"init_from": "", "train.lanes_apart": lanes_apart}
    if not teachers:
        changes["train.teacher"] = ""
    if not spec.classifies_alone.all():
        changes |= {"data.augment_lanes": False, "train.image_sizes": ""}
    return config.replace(changes).without_rounds()  # their coordinator's state is not joined


def _as_run(parts: Sequence[Part], spec: ModelSpec, params: dict) -> prune.Run:
    """The joined model as a run of the first workdir's settings at step 0."""
    first, teachers = parts[0], common_teachers(parts)
    session = first.session
    optimizer = jax.jit(session.optimizer.init)(without_statistics(params))
    return prune.Run(
        config=joined_config(first.config, spec, teachers),
        spec=spec,
        class_names=first.trained.class_names,
        params=params,
        optimizer=optimizer,
        step=0,
        conv={},
        steps_per_epoch=session.steps_per_epoch,
        training_digest=datasets.digest(session.train),
        dataset={"name": session.dataset.name, **session.dataset.provenance},
        ranking=session.validation,
        ranking_from="validation",
        test=session.dataset.test,
        teachers=teachers,
    )

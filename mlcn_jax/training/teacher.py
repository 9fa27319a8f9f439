"""The teacher of a run: trained models, checked against it, and their outputs where these can be kept."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from mlcn_jax import pretrained
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation, Split, padded_batches, to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_object
from mlcn_jax.nn.calibration import fold_statistics
from mlcn_jax.nn.distillation import Distillation, mean_probabilities, model_probabilities
from mlcn_jax.settings import check
from mlcn_jax.training.session import Session
from mlcn_jax.training.trained import Trained, load_trained

TEACHERS = "teachers_sha256"  # in model.json
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The teacher of a run, or none.

    Attributes:
      distillation: how lanes learn from it; None without a teacher.
      digests: SHA-256 of each of its models: parameters, and how their outputs are joined.
      compiler_options: those of its first model.
    """

    distillation: Distillation | None = None
    digests: tuple[str, ...] = ()
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Its entry in `model.json`, so that the run is not resumed with another one."""
        return {TEACHERS: list(self.digests)} if self.digests else {}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `step.make_train_step`."""
        return {"distillation": self.distillation} if self.distillation else {}

    def kept(self, session: Session) -> Float32[np.ndarray, "n ways classes"] | None:
        """Its probabilities for all training images, as `batches.Batches` takes them; None where steps compute them.

        They are kept where a run sees an image in one way, or mirrored as a second one: then it is faster that a step
        only reads them (`benchmarks/distillation.py`). Other augmentation shows the teacher new images in every step.
        It does not depend on `train.num_epochs` and `train.num_steps`, which a resumed run may change.
        """
        data, images = session.config.data, session.train.images
        if self.distillation is None or data.augmentation() != Augmentation():
            return None
        ways = [images, images[:, :, ::-1]] if data.alternate_flips else [images]
        _log.info("computing the teacher's predictions for %s images", f"{len(images):,}")
        probabilities = self.distillation.probabilities
        ask = jax.jit(lambda images: probabilities(to_pixels(images)), compiler_options=dict(self.compiler_options))

        def of(images: np.ndarray) -> Float32[np.ndarray, "n classes"]:
            split = Split(images, np.zeros(len(images), np.int32))
            batches = padded_batches(split, session.config.train.part_size)
            return np.concatenate([np.asarray(ask(batch)) for batch, _, _ in batches])[: len(images)]

        return np.stack([of(way) for way in ways], axis=1)


def stored_digests(workdir: Path) -> tuple[str, ...]:
    """`Teacher.digests` of the run in a workdir; empty if it had no teacher."""
    return tuple(read_object(workdir / "model.json").get(TEACHERS, ()))


def open_teacher(session: Session) -> Teacher:
    """Loads the models that `train.teacher` names; raises InputError if one is no trained model or does not fit."""
    settings = session.config.train
    names = [name.strip() for name in settings.teacher.split(",")] if settings.teacher else []
    if not names:
        return Teacher()
    check(settings.teacher_temperature <= 100, "train.teacher_temperature", settings.teacher_temperature, "at most 100")
    if session.spec.ensemble_weight:
        raise InputError(
            f"train.teacher is {settings.teacher!r} with model.ensemble_weight={session.spec.ensemble_weight}, but "
            "each lane learns from the teacher individually: leave model.ensemble_weight at 0"
        )
    models = [_load(name, session) for name in names]
    members = [model_probabilities(m.spec, _encoder(m)) for m in models]
    _log.info("learning from %s: %s", " and ".join(names), ", ".join(m.spec.lanes or m.spec.name for m in models))
    distillation = Distillation(mean_probabilities(members), settings.teacher_weight, settings.teacher_temperature)
    return Teacher(distillation, tuple(map(_digest, models)), models[0].spec.compiler_options(jax.default_backend()))


def _digest(model: Trained) -> str:
    spec = model.spec
    joined = (spec.lanes, list(spec.lane_weights), spec.num_routing_iters, spec.lane_routing)
    return hashlib.sha256(f"{model.sha256} {joined}".encode()).hexdigest()


def _load(name: str, session: Session) -> Trained:
    if not name:
        raise InputError(
            f"train.teacher is {session.config.train.teacher!r}: give the workdir of a trained model, or several "
            "separated by commas"
        )
    workdir = pretrained.find_workdir(name)
    try:
        trained = load_trained(workdir)
    except InputError as error:
        raise InputError(f"train.teacher={name}: {error}") from error
    if (workdir / "metrics.jsonl").exists() and not (workdir / "summary.json").exists():
        raise InputError(
            f"train.teacher={name} is not finished: its training was interrupted or is still running, and a run "
            "cannot be resumed with a teacher that has changed: finish it first"
        )
    spec, mine = trained.spec, session.spec
    if spec.image_shape != mine.image_shape:
        raise InputError(
            f"train.teacher={name} takes images of {_shape(spec.image_shape)}, and {session.dataset.name} has "
            f"{_shape(mine.image_shape)}: give a teacher that was trained on such images"
        )
    if trained.class_names != session.dataset.class_names:
        raise InputError(
            f"train.teacher={name} has {len(trained.class_names)} classes ({_some(trained.class_names)}), and "
            f"{session.dataset.name} has {len(session.dataset.class_names)} ({_some(session.dataset.class_names)}): "
            "give a teacher that was trained on the same classes, in the same order"
        )
    if count := validation_images_learned(workdir, session):
        _log.warning(
            "train.teacher=%s learned from %s of the %s validation images, so validation accuracy will look too good: "
            "train it with the same data.validation_fraction and data.split_seed",
            *(name, f"{count:,}", f"{len(session.validation.labels):,}"),
        )
    return trained


def validation_images_learned(workdir: Path, session: Session) -> int:
    """How many of a run's validation images the model of a workdir was trained on; 0 also where that is not known.

    It is known where the SHA-256 in the workdir's `model.json` is that of its own split of the run's images.
    """
    if not len(session.validation.labels):
        return 0
    try:
        config, learned = read_stored(workdir), read_object(workdir / "model.json").get("training_images_sha256")
    except InputError:  # a workdir of another version may be without
        return 0
    whole = session.dataset.train
    if datasets.digest(_split(whole, config)[0]) != learned:
        return 0
    places = Split(np.arange(len(whole.labels)), whole.labels)
    return len(np.intersect1d(_split(places, config)[0].images, _split(places, session.config)[1].images))


def _split(images: Split, config: RunConfig) -> tuple[Split, Split]:
    return datasets.split_validation(images, config.data.validation_fraction, config.split_seed)


def _encoder(trained: Trained) -> dict:
    """In host memory, so that every device of the run can use it."""
    return jax.tree.map(np.asarray, fold_statistics(trained.spec, trained.params)["encoder"])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

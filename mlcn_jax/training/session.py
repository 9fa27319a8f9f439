"""Resolves a configuration: the one place that turns it into data, model, optimizer and step options.

The layers below take these values as plain arguments.
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from mlcn_jax.config import RunConfig, flat
from mlcn_jax.data import batches, datasets
from mlcn_jax.distributed.mesh import DATA_AXIS
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_object
from mlcn_jax.nn import resnet
from mlcn_jax.nn.calibration import trained_shapes, whiten
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.remat import OFFLOAD, has_host_memory
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import DataSettings, ParallelSettings
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.apart import check_lanes_apart
from mlcn_jax.training.evaluate import Scores
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.plan import Plan, make_plan
from mlcn_jax.training.stacks_runner import check_independent
from mlcn_jax.training.trained import describe_model

_log = logging.getLogger(__name__)
_CALIBRATION_IMAGES = 4_000
_WHITENED_IMAGES = 5_000


@dataclasses.dataclass(frozen=True)
class Session:
    """A resolved configuration.

    Attributes:
      config: the configuration, to be stored, and compared on resume.
      dataset: all images and classes.
      train, validation: the training images, and those held out of them for validation.
      spec: the model.
      optimizer: the optimizer; its learning rate depends on `steps_per_epoch`.
      steps_per_epoch: training steps per pass over `train`.
    """

    config: RunConfig
    dataset: datasets.Dataset
    train: datasets.Split
    validation: datasets.Split
    spec: ModelSpec
    optimizer: optax.GradientTransformation
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        """Steps of the entire run."""
        settings = self.config.train
        num_steps = settings.num_epochs * self.steps_per_epoch
        return min(num_steps, settings.num_steps) if settings.num_steps else num_steps

    def image_size(self, step: int) -> int:
        """`Augmentation.size` of a step, counted from 1; depends on the run's epochs, not on `train.num_steps`."""
        settings = self.config.train
        return settings.image_size((step - 1) / (settings.num_epochs * self.steps_per_epoch))

    def image_sizes(self, start: int, end: int) -> list[int]:
        """Every `image_size` of the steps after `start`, until `end`, and perhaps some that none of them has."""
        settings = self.config.train
        last = settings.num_epochs * self.steps_per_epoch
        limits = [(0.0, 0), *settings.sizes()]
        return [
            size
            for (begin, _), (until, size) in itertools.pairwise(limits)
            if begin <= (end - 1) / last and start / last < until
        ]

    def model_facts(self) -> dict[str, Any]:
        """The content of `model.json`."""
        return describe_model(self.spec, self.dataset.class_names, datasets.digest(self.train))


def open_session(config: RunConfig) -> Session:
    """Loads the data and resolves the rest; raises InputError if any of it cannot be used."""
    settings, dataset = config.train, config.data.load()
    spec = config.model_spec(dataset.train.images.shape[1:], len(dataset.class_names))
    check_settings(config, spec)
    fraction = config.data.validation_fraction
    train, validation = datasets.split_validation(dataset.train, fraction, config.split_seed, dataset.class_names)
    steps_per_epoch = batches.steps_per_epoch(len(train.labels), settings.batch_size)
    return Session(
        config=config,
        dataset=dataset,
        train=train,
        validation=validation,
        spec=spec,
        optimizer=optimizer_of(settings, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
    )


def check_settings(config: RunConfig, spec: ModelSpec) -> None:
    """Raises InputError if a configuration has settings that its model cannot be trained with."""
    alone = bool(spec.lane_groups) and spec.classifies_alone.all()
    for field, given in (
        ("data.augment_lanes", config.data.augment_lanes),
        ("train.image_sizes", config.train.image_sizes),
    ):
        if given and not alone:
            raise InputError(f"{field} is {given} with model.lanes={spec.lanes!r}: it needs lanes of kind resnet only")
    largest = max(spec.image_shape[:2])
    wrong = [size for _, size in config.train.sizes() if size and not resnet.MIN_SIZE <= size <= largest]
    if wrong:
        raise InputError(
            f"train.image_sizes has {wrong[0]} pixels; it must be from {resnet.MIN_SIZE}, the least that resnet lanes "
            f"can do, to the {largest} of the images, or empty"
        )
    check_remat(spec)
    if spec.normalises:
        resnet.num_groups(config.train.batch_size, spec.norm_group)
        together = min(config.train.batch_size, spec.norm_group)
        for height, width in [(size, size) for _, size in config.train.sizes() if size] + [spec.image_shape[:2]]:
            if together * resnet.last_map(height, width) < 2:
                raise InputError(
                    f"of images of {height}x{width} pixels the last stage of resnet lanes leaves one pixel, and "
                    "normalising a single one leaves nothing: give train.batch_size and model.norm_group of 2 or more"
                )
    if config.train.lanes_apart:
        check_lanes_apart(config, spec)


def warn_of_unused(config: RunConfig, spec: ModelSpec) -> None:
    """Logs a warning for each setting that does nothing with the lanes of a model, or none."""
    train = config.train
    values, defaults = flat(config.to_dict()), flat(RunConfig().to_dict())
    of_optimizer = {
        ("adam",): ("lr_decay",),
        ("adamw", "sgd", "muon"): ("warmup_epochs", "weight_decay"),
        ("sgd", "muon"): ("momentum", "bias_learning_rate", "head_learning_rate", "whitening_epochs"),
    }
    needs: dict[str, tuple[Any, str]] = {
        f"train.{field}": (train.optimizer in optimizers, f"train.optimizer={' or '.join(optimizers)}")
        for optimizers, fields in of_optimizer.items()
        for field in fields
    }
    needs |= dict.fromkeys(("train.teacher_weight", "train.teacher_temperature"), (train.teacher, "a train.teacher"))
    rounds = (field for field in values if field.startswith("train.rounds.") and field != "train.rounds.steps")
    needs |= dict.fromkeys(rounds, (train.rounds.steps, "train.rounds.steps above 0"))
    needs["data.split_seed"] = (config.data.validation_fraction, "data.validation_fraction above 0")
    needs["model.norm_group"] = (spec.normalises, "residual lanes (resnet)")
    for field, (used, needed) in needs.items():
        if not used and values[field] != defaults[field]:
            _log.warning("%s is %s, which does nothing without %s", field, values[field], needed)
    classifying = bool(spec.lane_groups) and spec.classifies_alone.any()
    routing = bool(spec.lane_groups) and not spec.classifies_alone.all()
    if config.parallel.profile and config.parallel.plan == "mesh":
        _log.warning(
            "parallel.profile does nothing with parallel.plan=mesh: give plan=stacks or auto to place lanes by it"
        )
    if config.parallel.partitioner != ParallelSettings.partitioner and config.parallel.plan != "stacks":
        _log.warning(
            "parallel.partitioner is %s, which does nothing with parallel.plan=%s: give plan=stacks to use it",
            *(config.parallel.partitioner, config.parallel.plan),
        )
    pairs = list(zip(spec.lane_specs, spec.lane_seeds, strict=False))
    if twins := [f"{lane} with seed {seed}" for lane, seed in dict.fromkeys(pairs) if pairs.count((lane, seed)) > 1]:
        _log.warning("model.lane_seeds: several lanes are %s, which start equal: give each a seed of its own", twins[0])
    size, shift = spec.image_shape[:2], 0 if config.data.reflect else config.data.max_shift
    for field, pixels, side in (("max_shift", shift, min(size)), ("cutout", config.data.cutout, max(size))):
        if pixels >= side:
            _log.warning("data.%s is %d pixels of images of %d: nothing is left of some images", field, pixels, side)
    if config.data.reflect and not config.data.max_shift:
        _log.warning("data.reflect fills what shifts uncover: without data.max_shift, it does nothing")
    if config.data.augment_lanes and not (config.data.max_shift or config.data.mirrors or config.data.cutout):
        _log.warning("data.augment_lanes draws for each lane, but no augmentation is given, so it does nothing")
    if spec.num_routing_iters != ModelSpec.num_routing_iters and spec.lane_groups and spec.lane_routing == "published":
        _log.warning(
            "model.num_routing_iters is %d: with one output capsule in a lane, as published, iterations change nothing",
            spec.num_routing_iters,
        )
    for field in ("lane_routing", "margin_loss"):
        value = getattr(spec, field)
        if value != getattr(ModelSpec, field) and not routing:
            _log.warning("model.%s is %s, which is for lanes of capsules: without any, it does nothing", field, value)
    if config.train.optimizer in ("sgd", "muon") and not spec.normalises:
        _log.warning(
            "train.optimizer is %s, which is for residual lanes (resnet): without any, AdamW with a peak rate of 0.001 "
            "trains all parameters, and train.learning_rate, momentum and weight_decay do nothing",
            config.train.optimizer,
        )
    for field, value in (
        ("model.label_smoothing", spec.label_smoothing),
        ("model.ensemble_weight", spec.ensemble_weight),
    ):
        if value and not classifying:
            _log.warning(
                "%s is %g, which is for lanes that classify alone (resnet): without any, it does nothing", field, value
            )


def check_learned(workdir: Path, dataset: datasets.Dataset, train: datasets.Split) -> None:
    """Raises InputError unless the run in a workdir learned from these training images of a dataset."""
    now = {"class_names": list(dataset.class_names), "training_images_sha256": datasets.digest(train)}
    learned = read_object(workdir / "model.json")
    if any(learned.get(name) != value for name, value in now.items()):
        raise InputError(
            f"{dataset.name} is not the data that {workdir} was trained on (the classes or the SHA-256 differ from its "
            "model.json): give --data_dir=FOLDER with the original images"
        )


def calibration_images(train: datasets.Split, batch_size: int, parts: int = 1) -> list[np.ndarray]:
    """Batches of training images, uint8, each in equal parts, for `Runner.calibrate`: the same for every step."""
    count = max(1, min(_CALIBRATION_IMAGES, len(train.labels)) // batch_size)
    return np.split(_some(train, count * batch_size), count * parts)


def _some(train: datasets.Split, count: int) -> np.ndarray:
    """Evenly spaced images in a fixed random order: of all classes, even if the images are sorted by class."""
    evenly = np.linspace(0, len(train.labels) - 1, count).astype(int)
    return train.images[np.random.default_rng(0).permutation(evenly)]


def whiten_from(spec: ModelSpec, params: dict, train: datasets.Split) -> dict:
    """Parameters with the whitening of some training images (`calibration.whiten`), if any lane has one."""
    if not spec.normalises:
        return params
    return whiten(spec, params, _some(train, min(_WHITENED_IMAGES, len(train.labels))))


def with_flips(data: DataSettings, score: Callable[[], Scores], split: str = "test") -> dict[str, float]:
    """Scores with test-time augmentation by horizontal flips; empty unless training mirrors images too."""
    if not data.mirrors:
        return {}
    scores = score()
    return {f"{split}_accuracy_flips": scores.accuracy, f"{split}_nll_flips": scores.nll}


def plan_of(config: RunConfig, spec: ModelSpec, kept: Path | None = None, batch_size: int = 0) -> Plan:
    """Which device computes what; raises InputError if the available devices are not suitable.

    Args:
      config, spec: what is trained.
      kept: as for `plan.make_plan`.
      batch_size: images of a step, if these are not the configuration's `train.batch_size`.
    """
    settings, batch_size = config.parallel, batch_size or config.train.batch_size
    if spec.remat == OFFLOAD:
        check_offload(settings.plan, jax.local_devices()[0])
    plan = make_plan(
        spec,
        batch_size,
        kind=settings.plan,
        data=settings.data,
        lane=settings.lane,
        partitioner=settings.partitioner,
        profile_files=[Path(name.strip()).expanduser() for name in settings.profile.split(",") if name.strip()],
        platforms=[name.strip() for name in settings.platforms.split(",") if name.strip()],
        kept=kept,
        exchange_dtype=settings.exchange_dtype,
        clip_norm=config.train.clip_norm,
        accumulation_steps=config.train.accumulation_steps,
        rounds=not config.train.obstacle_to_rounds,
    )
    parts = config.train.accumulation_steps
    if plan.head is None:
        check_parts(spec, batch_size, plan.mesh.shape[DATA_AXIS] if plan.mesh is not None else 1, parts)
    else:
        check_independent(spec, parts)
    return plan


def state_shapes(spec: ModelSpec, optimizer: optax.GradientTransformation) -> dict[str, Any]:
    """Shapes and dtypes of `params` and `optimizer` in checkpoints, without computing them."""
    return {"params": trained_shapes(spec), "optimizer": jax.eval_shape(optimizer.init, param_shapes(spec))}


def check_offload(plan: str, device: jax.Device) -> None:
    """Raises InputError unless a device of a `parallel.plan` can send activations to its host's memory."""
    if not has_host_memory(device):
        raise InputError(
            f"model.remat={OFFLOAD} sends activations to the host's memory, and {device.device_kind} "
            + ("has no other" if device.platform == "cpu" else "cannot reach it")
            + ": use model.remat=full, which recomputes them"
        )
    if plan != "mesh":
        raise InputError(
            f"model.remat={OFFLOAD} is not supported with parallel.plan={plan}: use parallel.plan=mesh, or "
            "model.remat=full, which recomputes lanes"
        )


def check_remat(spec: ModelSpec) -> None:
    """Raises InputError if there are no activations that `model.remat` could save."""
    if spec.remat == "none":
        return
    if not spec.lane_groups:
        raise InputError(
            f"model.remat={spec.remat} computes lanes again, and CapsNet has no lanes: leave it at none, and use "
            "train.accumulation_steps"
        )
    if spec.classifies_alone.all() and not spec.couples_lanes:
        raise InputError(
            f"model.remat={spec.remat} with model.lanes={spec.lanes!r}: lanes that classify alone hold one lane's "
            "activations already: leave it at none, and use train.accumulation_steps"
        )


def step_options(config: RunConfig) -> dict[str, Any]:
    """The keyword arguments of `step.make_train_step` that a configuration sets."""
    return {
        "reconstruction_weight": config.train.reconstruction_weight,
        "seed": config.train.seed,
        "augmentation": config.data.augmentation(),
        "accumulation_steps": config.train.accumulation_steps,
        "exchange_dtype": config.parallel.exchange_dtype,
    }

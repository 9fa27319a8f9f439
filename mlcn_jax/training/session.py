"""Resolves a configuration: the one place that turns it into data, model, optimizer and step options.

The layers below take these values as plain arguments.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax

from mlcn_jax.config import RunConfig, TrainSettings
from mlcn_jax.data import batches, datasets
from mlcn_jax.nn.model import ModelSpec, init_params
from mlcn_jax.training.checkpoint import describe_model
from mlcn_jax.training.optimizer import make_optimizer
from mlcn_jax.training.plan import Plan, make_plan


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

    @property
    def step_options(self) -> dict[str, Any]:
        """The keyword arguments of `step.make_train_step` that the configuration sets."""
        return step_options(self.config)

    def plan(self) -> Plan:
        """Which device computes what; raises InputError if the available devices are not suitable."""
        return plan_of(self.config, self.spec)

    def model_facts(self) -> dict[str, Any]:
        """The content of `model.json`."""
        return describe_model(self.spec, self.dataset.class_names, datasets.digest(self.train))

    def state_shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of `params` and `optimizer` in checkpoints, without computing them."""
        params = jax.eval_shape(lambda key: init_params(self.spec, key), jax.random.key(0))
        return {"params": params, "optimizer": jax.eval_shape(self.optimizer.init, params)}


def open_session(config: RunConfig) -> Session:
    """Loads the data and resolves the rest; raises InputError if any of it cannot be used."""
    settings, dataset = config.train, config.data.load()
    train, validation = datasets.split_validation(dataset.train, config.data.validation_fraction, settings.seed)
    steps_per_epoch = batches.steps_per_epoch(len(train.labels), settings.batch_size)
    return Session(
        config=config,
        dataset=dataset,
        train=train,
        validation=validation,
        spec=config.model_spec(dataset.train.images.shape[1:], len(dataset.class_names)),
        optimizer=optimizer_of(settings, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
    )


def plan_of(config: RunConfig, spec: ModelSpec) -> Plan:
    """Which device computes what, according to a configuration; raises as `plan.make_plan`."""
    settings = config.parallel
    return make_plan(
        spec,
        config.train.batch_size,
        kind=settings.plan,
        data=settings.data,
        lane=settings.lane,
        partitioner=settings.partitioner,
        profile_files=[Path(name.strip()) for name in settings.profile.split(",") if name.strip()],
        platforms=[name.strip() for name in settings.platforms.split(",") if name.strip()],
    )


def step_options(config: RunConfig) -> dict[str, Any]:
    """The keyword arguments of `step.make_train_step` that a configuration sets."""
    return {
        "reconstruction_weight": config.train.reconstruction_weight,
        "seed": config.train.seed,
        "max_shift": config.data.max_shift,
        "flip": config.data.flip,
    }


def optimizer_of(settings: TrainSettings, steps_per_epoch: int) -> optax.GradientTransformation:
    """The optimizer given by the settings."""
    return make_optimizer(
        settings.optimizer,
        learning_rate=settings.learning_rate,
        num_steps=settings.num_epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        lr_decay=settings.lr_decay,
        warmup_steps=round(settings.warmup_epochs * steps_per_epoch),
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    )

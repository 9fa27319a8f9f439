"""A configuration resolved: the one place that turns it into data, model, optimizer and the options of a step.

Everything below takes these values as plain arguments.
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
    """What a configuration stands for.

    Attributes:
      config: the configuration, for what is stored of it and compared on resume.
      dataset: all images and classes.
      train, validation: the images that are learned from and those held out of them.
      spec: the model.
      optimizer: its rate depends on `steps_per_epoch`.
      steps_per_epoch: training steps of one pass over `train`.
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
        """Steps of the whole run."""
        settings = self.config.train
        num_steps = settings.num_epochs * self.steps_per_epoch
        return min(num_steps, settings.num_steps) if settings.num_steps else num_steps

    @property
    def step_options(self) -> dict[str, Any]:
        """The keyword arguments of `step.make_train_step` that the configuration decides."""
        return step_options(self.config)

    def plan(self) -> Plan:
        """Which device computes what; raises InputError where the devices of this process do not suit."""
        return plan_of(self.config, self.spec)

    def model_facts(self) -> dict[str, Any]:
        """What `model.json` holds."""
        return describe_model(self.spec, self.dataset.class_names, datasets.digest(self.train))

    def state_shapes(self) -> dict[str, Any]:
        """Shapes and types of `params` and `optimizer` as checkpoints hold them, without computing any."""
        params = jax.eval_shape(lambda key: init_params(self.spec, key), jax.random.key(0))
        return {"params": params, "optimizer": jax.eval_shape(self.optimizer.init, params)}


def open_session(config: RunConfig) -> Session:
    """Loads the data and resolves the rest; raises InputError where something of it cannot be used."""
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
    """Which device computes what of a model, as a configuration says; raises as `plan.make_plan`."""
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
    """The keyword arguments of `step.make_train_step` that a configuration decides."""
    return {
        "reconstruction_weight": config.train.reconstruction_weight,
        "seed": config.train.seed,
        "max_shift": config.data.max_shift,
        "flip": config.data.flip,
    }


def optimizer_of(settings: TrainSettings, steps_per_epoch: int) -> optax.GradientTransformation:
    """The optimizer that the settings name."""
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

"""Trials of a search: models trained for a few epochs on part of the images, with programs that models share.

Equal lanes form stacks of 1, 2, 4, 8 ... lanes on one device (`StacksRunner`), so that a stack of one size is compiled
only once for all models that have it.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Collection, Generator
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.config import RunConfig
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Batches, steps_per_epoch
from mlcn_jax.errors import Diverged, InputError, is_lack_of_memory
from mlcn_jax.nn import conv, lanes
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.evaluate import check_statistics
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.session import calibration_images, step_options, whiten_from
from mlcn_jax.training.stack_programs import Stack
from mlcn_jax.training.stacks_runner import StacksRunner
from mlcn_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a model after some epochs.

    Attributes:
      epoch: epochs trained so far.
      accuracy: geometric mean over the repeats of the share of validation images that are classified correctly.
      repeats: the accuracy of each repeat.
      train_seconds: time spent in training steps so far, by all repeats.
      score_seconds, compile_seconds: time spent on scoring and on compiling so far.
      steps: training steps so far, of all repeats.
    """

    epoch: int
    accuracy: float
    repeats: tuple[float, ...]
    train_seconds: float
    score_seconds: float
    compile_seconds: float
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.train_seconds / self.steps


class Trainer:
    """Trains models that differ in their lanes, on the first device of this process.

    Args:
      config: data, model settings and training settings; its lanes and epochs do not matter.
      num_epochs: epochs of a trial.
      num_repeats: trainings of each model, each with its own initial parameters and order of the images.
      num_images: images of the training set to use, the same share of each class; 0 uses all.
      scored_epochs: epochs after which a model is scored, besides the last.
      programs: compiled programs of other trainers with the same settings, to use and to add to.

    Raises:
      InputError: the data cannot be used, or no images are set aside for validation.
    """

    def __init__(
        self,
        config: RunConfig,
        num_epochs: int,
        num_repeats: int,
        num_images: int,
        scored_epochs: Collection[int] = (),
        programs: dict[tuple, Any] | None = None,
    ):
        if not config.data.validation_fraction:
            raise InputError(
                "data.validation_fraction is 0: a search compares models on validation images, because the test set "
                "must not influence the choice; give 0.1, for example"
            )
        self._config, self._num_epochs, self._num_repeats = config, num_epochs, num_repeats
        self._scored_epochs = {*scored_epochs, num_epochs}
        self.dataset = config.data.load()
        settings = config.train
        images = self.dataset.train
        if num_images >= len(images.labels):
            raise InputError(
                f"search.num_images is {num_images}, but there are only {len(images.labels)} images: give fewer, "
                "or 0 for all"
            )
        try:
            if num_images:
                _, images = datasets.split_validation(images, num_images / len(images.labels), settings.seed)
            self.train, self.validation = datasets.split_validation(
                images, config.data.validation_fraction, config.split_seed
            )
            self.steps_per_epoch = steps_per_epoch(len(self.train.labels), settings.batch_size)
        except InputError as error:
            if not num_images or not 0 <= config.data.validation_fraction < 1:
                raise
            raise InputError(
                f"search.num_images is {num_images}, too few: give more, or 0 for all ({error})"
            ) from error
        self._optimizer = optimizer_of(dataclasses.replace(settings, num_epochs=num_epochs), self.steps_per_epoch)
        self._programs = {} if programs is None else programs
        self._calibration_images = calibration_images(self.train, settings.batch_size)

    def spec(self, lanes_text: str) -> ModelSpec:
        """The model with these lanes."""
        config = self._config.replace({"model.name": "mlcn", "model.lanes": lanes_text})
        return config.model_spec(self.dataset.train.images.shape[1:], len(self.dataset.class_names))

    def evaluate(self, lanes_text: str) -> Generator[Score, None, None]:
        """Trains a model and yields its score after each of the scored epochs.

        Raises:
          Diverged: the loss is not finite.
        """
        for score, _, _ in self._train(lanes_text):
            yield score

    def test(self, lanes_text: str) -> list[float]:
        """Trains a model as `evaluate` does and returns the test accuracy of each repeat."""
        *_, (_, runner, states) = self._train(lanes_text)
        return [self._accuracy(runner, state, self.dataset.test) for state in states]

    def _train(self, lanes_text: str) -> Generator[tuple[Score, StacksRunner, list[TrainState]], None, None]:
        settings, spec = self._config.train, self.spec(lanes_text)
        runner = StacksRunner(
            spec,
            self._optimizer,
            group_stacks(spec),
            jax.devices()[0],
            **step_options(self._config),
            clip_norm=settings.clip_norm,
            programs=self._programs,
        )
        seconds = dict.fromkeys(("train", "score", "compile"), 0.0)
        batches = [
            Batches(
                self.train.images,
                self.train.labels,
                settings.batch_size,
                settings.seed + repeat,
                alternate_flips=self._config.data.alternate_flips,
            )
            for repeat in range(self._num_repeats)
        ]
        num_steps = self._num_epochs * self.steps_per_epoch
        sizes = [settings.image_size(step / num_steps) for step in range(num_steps)]
        states = [self._start_state(spec, repeat) for repeat in range(self._num_repeats)]
        runner.start(states[0])
        seconds["compile"] = runner.compile(*batches[0].at(0), sizes=sizes)
        for epoch in range(self._num_epochs):
            for repeat, state in enumerate(states):
                runner.start(state)
                started = time.monotonic()
                for step in range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch):
                    metrics = runner.step(*runner.place(*batches[repeat].at(step)), size=sizes[step])
                loss = float(jax.device_get(metrics["loss"]))
                states[repeat] = runner.fetch()
                seconds["train"] += time.monotonic() - started
                if not math.isfinite(loss):
                    raise Diverged(f"epoch {epoch + 1}, repeat {repeat + 1}: the loss is {loss}")
            if epoch + 1 not in self._scored_epochs:
                continue
            started = time.monotonic()
            accuracies = [self._accuracy(runner, state, self.validation) for state in states]
            seconds["score"] += time.monotonic() - started
            score = Score(
                epoch=epoch + 1,
                accuracy=math.exp(sum(math.log(max(a, 1e-9)) for a in accuracies) / len(accuracies)),
                repeats=tuple(accuracies),
                train_seconds=seconds["train"],
                score_seconds=seconds["score"],
                compile_seconds=seconds["compile"],
                steps=(epoch + 1) * self.steps_per_epoch * self._num_repeats,
            )
            yield score, runner, states

    def _accuracy(self, runner: StacksRunner, state: TrainState, split: datasets.Split) -> float:
        runner.start(state)
        check_statistics(runner.calibrate(self._calibration_images), int(state.step))
        return runner.scores(split, self._config.train.batch_size).accuracy

    def _start_state(self, spec: ModelSpec, repeat: int) -> TrainState:
        """Initial parameters. The step count goes on from one repeat to the next, so each has its own augmentation."""
        key = jax.random.key(self._config.train.seed + repeat)
        encoder, first = {}, 0
        for group in spec.lane_groups:
            images = jnp.zeros((1, *spec.image_shape))
            draw = conv.compiled_once(lanes.init_group, static_argnums=(1, 3))
            encoder[group.name] = draw(key, group, first, spec.lane_settings, images)
            first += group.count
        small = dataclasses.replace(spec, lanes=f"{_smallest(spec)}*{first}")  # the decoder depends on their number
        params = {"encoder": encoder, "decoder": init_params(small, key)["decoder"]}
        params = jax.device_get(whiten_from(spec, params, self.train))
        optimizer = jax.device_get(self._optimizer.init(params))
        step = jnp.asarray(repeat * self._num_epochs * self.steps_per_epoch, jnp.int32)
        return TrainState(step, params, optimizer)


def _smallest(spec: ModelSpec) -> lanes.LaneSpec:
    """The narrowest lane of the kind that starts fastest or, on images too small for it, of the model's own kind."""
    fits = min(spec.image_shape[:2]) >= lanes.LANE_KINDS["mlcn1"].min_size
    return lanes.LaneSpec("mlcn1" if fits else spec.lane_groups[0].spec.kind, 1)


def group_stacks(spec: ModelSpec) -> list[Stack]:
    """A stack for each group of equal lanes, cut into powers of two, all on the first device."""
    counts = [
        1 << bit for group in spec.lane_groups for bit in range(group.count.bit_length()) if group.count >> bit & 1
    ]
    ends = list(itertools.accumulate(counts))
    return [Stack(jax.devices()[0], tuple(range(end - count, end))) for count, end in zip(counts, ends, strict=True)]


FAILURES = (InputError, Diverged, MemoryError, RuntimeError)  # errors that a model can cause


def reason_of(error: Exception) -> str:
    """Why a model failed, on one line; raises the error again if the model did not cause it."""
    if isinstance(error, RuntimeError) and not is_lack_of_memory(error):
        raise error
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no details'])[0]}"

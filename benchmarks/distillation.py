"""A training step taught by a teacher: its outputs computed in the step or kept, against labels alone.

    python -m benchmarks.distillation

Kept outputs need images that are always the same; where augmentation changes them, the step has to compute them, once
if all lanes see the same view and once for each lane if each sees its own. The steps take turns. Writes
`benchmarks/results/distillation.json`.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from mlcn_jax import host
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.calibration import calibrate, fold_statistics, whiten
from mlcn_jax.nn.distillation import Distillation, model_probabilities
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.optimizer import make_optimizer
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

RESULTS = Path(__file__).parent / "results"
_SHAPE, _CLASSES = (32, 32, 3), 10


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("teacher", "resnet:w3d2*4", "lanes of the teacher", flag_values=values)
    flags.DEFINE_string("lanes", "resnet:w1d2*2", "lanes of the model that learns", flag_values=values)
    flags.DEFINE_integer("batch", 500, "images per step", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "rounds that count, after one that warms up", flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "distillation.json"), "where to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    spec = ModelSpec("mlcn", _SHAPE, _CLASSES, lanes=values.lanes, norm_group=values.batch)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (values.batch, *_SHAPE), np.uint8)
    labels = np.arange(values.batch, dtype=np.int32) % _CLASSES
    soft = np.full((values.batch, _CLASSES), 1 / _CLASSES, np.float32)
    distillation = Distillation(_teacher(values.teacher, images), 0.9, 4.0)
    shifted = Augmentation(max_shift=2)
    own = dataclasses.replace(shifted, per_lane=True)
    optimizer = make_optimizer("muon", learning_rate=0.1, num_steps=100, steps_per_epoch=100)
    cases: dict[str, tuple[dict[str, Any], tuple]] = {
        "labels alone": ({}, (images, labels)),
        "kept": ({"distillation": distillation}, (images, labels, soft)),
        "computed, one view": ({"distillation": distillation, "augmentation": shifted}, (images, labels)),
        "computed, a view for each lane": ({"distillation": distillation, "augmentation": own}, (images, labels)),
    }
    params = jax.device_get(whiten(spec, init_params(spec, jax.random.key(0)), images[:100] / np.float32(255)))
    steps: dict[str, Callable] = {}
    states: dict[str, TrainState] = {}
    for name, (options, batch) in cases.items():
        states[name] = TrainState.create(jax.device_put(params), optimizer)
        step = make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0, **options)
        steps[name], _ = compile_step(step, states[name], batch)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(values.rounds + 1):
        for name, (_, batch) in cases.items():
            started = time.perf_counter()
            states[name], metrics = steps[name](states[name], *batch)
            jax.block_until_ready(metrics)
            seconds[name].append(time.perf_counter() - started)
    found = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    result = {
        **{name: values[name].value for name in ("teacher", "lanes", "batch", "rounds")},
        "seconds": found,
        **host.environment(),
    }
    write_json(Path(values.output), result)
    for name, value in found.items():
        print(f"{name:<32}{1000 * value:8.1f} ms, {value / found['labels alone']:.2f} times labels alone")


def _teacher(lanes: str, images: np.ndarray) -> Callable:
    """With random parameters, which take as long as trained ones."""
    spec = ModelSpec("mlcn", _SHAPE, _CLASSES, lanes=lanes, norm_group=len(images))
    params = calibrate(spec, init_params(spec, jax.random.key(1)), [jax.numpy.asarray(images[:100] / np.float32(255))])
    return model_probabilities(spec, jax.device_get(fold_statistics(spec, params)["encoder"]))


if __name__ == "__main__":
    launch_script(define, main)

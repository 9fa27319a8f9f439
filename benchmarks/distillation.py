"""A training step taught by a teacher: its outputs computed in the step or kept, against labels alone.

    python -m benchmarks.distillation

Like is compared with like: for images as they are, shifted, and shifted for each lane by itself, steps on labels alone
and with outputs computed in the step take turns. Kept outputs need images that are always the same, so there is one
case of them. They are paid for with one pass over the images, which is timed too: from so many epochs on, keeping them
is faster. Where augmentation changes the images, the step has to compute them, once if all lanes see the same view and
once for each lane if each sees its own. Writes `benchmarks/results/distillation.json`.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from benchmarks import peers
from mlcn_jax.data.batches import Augmentation, to_pixels
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.calibration import calibrate, fold_statistics, whiten
from mlcn_jax.nn.distillation import Distillation, model_probabilities
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

ALONE, COMPUTED, KEPT = "labels alone", "computed", "kept"
PLAIN = "images as they are"
PASS = "one pass of the teacher"  # over a batch, for the outputs that are kept
_SHAPE, _CLASSES = (32, 32, 3), 10


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("teacher", "resnet:w3d2*4", "lanes of the teacher", flag_values=values)
    flags.DEFINE_string("lanes", "resnet:w1d2*2", "lanes of the model that learns", flag_values=values)
    flags.DEFINE_integer("batch", 500, "images per step", flag_values=values)
    flags.DEFINE_integer("rounds", 7, "rounds that count, after one that warms up", flag_values=values)
    flags.DEFINE_string("output", str(peers.RESULTS / "distillation.json"), "where to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    spec = ModelSpec("mlcn", _SHAPE, _CLASSES, lanes=values.lanes, norm_group=values.batch)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (values.batch, *_SHAPE), np.uint8)
    labels = np.arange(values.batch, dtype=np.int32) % _CLASSES
    soft = np.full((values.batch, _CLASSES), 1 / _CLASSES, np.float32)
    distillation = Distillation(_teacher(values.teacher, images), 0.9, 4.0)
    optimizer = optimizer_of(TrainSettings(optimizer="muon", learning_rate=0.1, num_epochs=1), steps_per_epoch=100)
    cases = make_cases(distillation, images, labels, soft)
    params = jax.device_get(whiten(spec, init_params(spec, jax.random.key(0)), images[:100] / np.float32(255)))
    calls: dict[str, Callable] = {}
    for name, (options, batch) in cases.items():
        state = TrainState.create(jax.device_put(params), optimizer)
        step = make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0, **options)
        calls[name] = peers.stepping(compile_step(spec, step, state, batch)[0], state, batch)
    compiler = spec.compiler_options(jax.default_backend())
    ask = jax.jit(lambda images: distillation.probabilities(to_pixels(images)), compiler_options=compiler)
    calls[PASS] = lambda: ask(images)
    found = {name: statistics.median(seconds) for name, seconds in peers.in_turns(calls, values.rounds).items()}
    epochs = epochs_until_kept_is_faster(found)
    result = {
        **{name: values[name].value for name in ("teacher", "lanes", "batch", "rounds")},
        "seconds": found,
        "epochs_until_kept_is_faster": epochs,
        **peers.environment(),
    }
    write_json(Path(values.output), result)
    for name, value in found.items():
        images_are = name.partition(", ")[2]
        alone = found.get(f"{ALONE}, {images_are}", found[f"{ALONE}, {PLAIN}"])
        print(f"{name:<44}{1000 * value:8.1f} ms, {value / alone:.2f} times labels alone on such images")
    print("kept outputs are never faster" if epochs is None else f"kept outputs are faster from {epochs:.1f} epochs on")


def make_cases(
    distillation: Distillation, images: np.ndarray, labels: np.ndarray, soft: np.ndarray
) -> dict[str, tuple[dict[str, Any], tuple]]:
    """Options and batch of each case: labels alone and computed outputs on like images, and kept outputs."""
    shifted = Augmentation(max_shift=2)
    kinds: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "shifted": {"augmentation": shifted},
        "shifted for each lane": {"augmentation": dataclasses.replace(shifted, per_lane=True)},
    }
    cases: dict[str, tuple[dict[str, Any], tuple]] = {}
    for name, options in kinds.items():
        cases[f"{ALONE}, {name}"] = (options, (images, labels))
        cases[f"{COMPUTED}, {name}"] = ({"distillation": distillation, **options}, (images, labels))
    cases[f"{KEPT}, {PLAIN}"] = ({"distillation": distillation}, (images, labels, soft))
    return cases


def epochs_until_kept_is_faster(seconds: Mapping[str, float]) -> float | None:
    """Epochs after which the pass over images that are seen in one way has paid for itself; None if never."""
    saved = seconds[f"{COMPUTED}, {PLAIN}"] - seconds[f"{KEPT}, {PLAIN}"]
    return seconds[PASS] / saved if saved > 0 else None


def _teacher(lanes: str, images: np.ndarray) -> Callable:
    """With random parameters, which take as long as trained ones."""
    spec = ModelSpec("mlcn", _SHAPE, _CLASSES, lanes=lanes, norm_group=len(images))
    params = calibrate(spec, init_params(spec, jax.random.key(1)), [jax.numpy.asarray(images[:100] / np.float32(255))])
    return model_probabilities(spec, jax.device_get(fold_statistics(spec, params)["encoder"]))


if __name__ == "__main__":
    launch_script(define, main)

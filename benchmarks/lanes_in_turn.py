"""Residual lanes one at a time against all at once: memory and time of a training step.

    python -m benchmarks.lanes_in_turn

The loss of a lane that classifies alone needs no other lane, so its backward pass follows its forward pass and only one
lane's activations are held. With `model.decoder_gradient=all` the lanes are coupled and all activations are held. The
two steps take turns. Writes `benchmarks/results/lanes_in_turn.json`.
"""

import dataclasses
import statistics

import jax
import numpy as np
from absl import flags

from benchmarks import peers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.calibration import whiten
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, compile_step, make_train_step


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("lanes", "resnet:w4d2*4", "lanes of the model", flag_values=values)
    flags.DEFINE_integer("batch", 500, "images per step", flag_values=values)
    flags.DEFINE_integer("rounds", 20, "rounds that count, after one that warms up", flag_values=values)


def main(values: flags.FlagValues) -> None:
    apart = ModelSpec("mlcn", (32, 32, 3), 10, lanes=values.lanes, label_smoothing=0.2)
    specs = {"in turn": apart, "all held": dataclasses.replace(apart, decoder_gradient="all")}
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (values.batch, 32, 32, 3), np.uint8)
    batch = (images, np.arange(values.batch, dtype=np.int32) % 10)
    optimizer = optimizer_of(TrainSettings(optimizer="muon", learning_rate=0.1, num_epochs=1), steps_per_epoch=100)
    params = jax.device_get(whiten(apart, init_params(apart, jax.random.key(0)), images[:100] / np.float32(255)))
    steps, calls = {}, {}
    for name, spec in specs.items():
        state = TrainState.create(jax.device_put(params), optimizer)
        step = make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0)
        steps[name], _ = compile_step(spec, step, state, batch)
        calls[name] = peers.stepping(steps[name], state, batch)
    seconds = peers.in_turns(calls, values.rounds)
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    found = {
        name: {
            "seconds": statistics.median(seconds[name]),
            "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        }
        for name, step in steps.items()
    }
    result = {
        "lanes": values.lanes,
        "batch": values.batch,
        "rounds": values.rounds,
        "steps": found,
        "memory_ratio": found["in turn"]["temporary_bytes"] / found["all held"]["temporary_bytes"],
        "time_ratio": peers.spread(ratios),
        **peers.environment(),
    }
    write_json(peers.RESULTS / "lanes_in_turn.json", result)
    print(f"memory {result['memory_ratio']:.3f}, time {statistics.median(ratios):.3f} of all lanes held")


if __name__ == "__main__":
    launch_script(define, main)

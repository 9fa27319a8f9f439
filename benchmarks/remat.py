"""Lanes computed again in the backward pass against all activations held: memory and time of a training step.

    python -m benchmarks.remat

Compares what a lane may keep between its forward and its backward pass (`mlcn_jax/nn/remat.py`): all (`none`), what
its convolutions give (`full`), nothing (`nothing`), or the results of products in the host's memory (`offload`, where
there is one beside the device's); and all, computing the batch in four parts (`train.accumulation_steps`). The steps
take turns, so that what slows the machine down slows all of them. Says whether `full` takes at most 0.5 of the memory
and 1.35 times the time. Writes `benchmarks/results/remat.json`.
"""

import dataclasses
import statistics
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from absl import flags

from benchmarks import peers
from mlcn_jax import host
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import remat
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

MOST = {"memory": 0.5, "time": 1.35}  # of `full`, over `none`
_PARTS = 4  # of a batch
POLICIES = {"none": None, "full": remat.POLICIES["full"], "nothing": jax.checkpoint_policies.nothing_saveable}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("lanes", "mlcn1:w4*16", "lanes of the model", flag_values=values)
    flags.DEFINE_integer("batch", 100, "images per step", flag_values=values)
    flags.DEFINE_list("image", ["28", "28", "1"], "height, width and channels of the images", flag_values=values)
    flags.DEFINE_integer("rounds", 30, "rounds that count, after one that warms up", flag_values=values)
    flags.DEFINE_string("output", str(peers.RESULTS / "remat.json"), "file to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    busy = host.busy_cores()
    shape = tuple(int(size) for size in values.image)
    spec = ModelSpec("mlcn", shape, 10, lanes=values.lanes)
    images = np.random.default_rng(0).integers(0, 256, (values.batch, *shape), np.uint8)
    batch = (images, np.arange(values.batch, dtype=np.int32) % 10)
    optimizer = optimizer_of(TrainSettings(), steps_per_epoch=100)
    params = jax.device_get(init_params(spec, jax.random.key(0)))
    steps, calls, compile_seconds = {}, {}, {}
    policies = dict(POLICIES)
    if remat.has_host_memory(jax.devices()[0]):
        policies[remat.OFFLOAD] = remat.POLICIES[remat.OFFLOAD]
    for name, policy in policies.items():
        state = TrainState.create(jax.device_put(params), optimizer)
        own = dataclasses.replace(spec, remat="none" if policy is None else "full")
        step = make_train_step(own, optimizer, reconstruction_weight=0.392, seed=0)
        with mock.patch.dict(remat.POLICIES, full=policy):  # of this step only
            steps[name], compile_seconds[name] = compile_step(spec, step, state, batch)
        calls[name] = peers.stepping(steps[name], state, batch)
    state = TrainState.create(jax.device_put(params), optimizer)
    step = make_train_step(spec, optimizer, reconstruction_weight=0.392, seed=0, accumulation_steps=_PARTS)
    steps["accumulated"], compile_seconds["accumulated"] = compile_step(spec, step, state, batch)
    calls["accumulated"] = peers.stepping(steps["accumulated"], state, batch)
    seconds = peers.in_turns(calls, values.rounds)
    kept = {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}
    found = {}
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["none"], strict=True)]
        found[name] = {
            "seconds": statistics.median(times),
            "compile_seconds": compile_seconds[name],
            "temporary_bytes": kept[name],
            "memory_ratio": kept[name] / kept["none"],
            "time_ratio": peers.spread(ratios),
        }
        print(f"{name}: memory {found[name]['memory_ratio']:.3f}, time {statistics.median(ratios):.3f} of none")
    full = {"memory": found["full"]["memory_ratio"], "time": found["full"]["time_ratio"]["median"]}
    verdicts = {
        name: {"measured": full[name], "at_most": most, "verdict": "reached" if full[name] <= most else "missed"}
        for name, most in MOST.items()
    }
    print(verdicts)
    settings = {"lanes": values.lanes, "batch": values.batch, "image": shape, "rounds": values.rounds}
    about = {"policies": found, "verdicts": verdicts, "busy_cores": busy}
    write_json(Path(values.output), {**settings, **about, **peers.environment()})


if __name__ == "__main__":
    launch_script(define, main)

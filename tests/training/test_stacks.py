"""Lanes in stacks compute what one device does, each device holds only its own, and a run moves between plans."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_params import made_params

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import loop, mesh_runner, stack_programs, stacks_runner, step
from mlcn_jax.training.checkpoint import load_trained

UNEQUAL = ModelSpec(
    *("mlcn", (18, 19, 2), 3, "mlcn2:w1*3,mlcn1:w1d2*2,mlcn1:w2"),
    decoder=(16, 24),
    lane_dropout=0.3,
    signed_pixels=True,
    conv="native",
)
STEP = {"reconstruction_weight": 0.4, "seed": 0, "augmentation": Augmentation(max_shift=2, flip=True)}
PLACEMENTS = [[0] * 6, [2, 0, 2, 1, 0, 3], [1, 1, 0, 1, 0, 1], [5, 4, 3, 2, 1, 0], [3, 3, 3, 3, 3, 2]]


def make_batch(rng):
    return rng.integers(0, 256, (8, 18, 19, 2), dtype=np.uint8), rng.integers(0, 3, 8, dtype=np.int32)


def make_state(optimizer):
    params = made_params(UNEQUAL)
    return jax.device_get(step.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)))


def make_runner(device_of, optimizer, **more):
    devices = jax.devices()
    return stacks_runner.StacksRunner(
        UNEQUAL, optimizer, stack_programs.make_stacks(devices, device_of), devices[0], **STEP, **more
    )


def take_steps(runner, optimizer, batch, count):
    runner.start(make_state(optimizer))
    runner.compile(*batch)
    metrics = [jax.device_get(runner.step(*runner.place(*batch))) for _ in range(count)]
    return metrics, runner.fetch()


@functools.cache
def on_one_device(clip_norm):
    """The optimizer, and the metrics and state after one step of the ordinary runner."""
    optimizer = optax.sgd(1.0, momentum=0.9)  # its state is the gradient after one step
    if clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    batch = make_batch(np.random.default_rng(0))
    (metrics,), state = take_steps(mesh_runner.MeshRunner(UNEQUAL, optimizer, None, **STEP), optimizer, batch, 1)
    return optimizer, batch, metrics, state


QUICK = [(PLACEMENTS[1], 0.2), (PLACEMENTS[3], 0.0)]
LONG = [pytest.param(d, c, marks=pytest.mark.long) for d in PLACEMENTS for c in (0.0, 0.2) if (d, c) not in QUICK]


@pytest.mark.parametrize(("device_of", "clip_norm"), [*QUICK, *LONG])
def test_every_placement_has_the_loss_and_gradients_of_one_device(device_of, clip_norm):
    optimizer, batch, theirs, expected = on_one_device(clip_norm)
    (mine,), state = take_steps(make_runner(device_of, optimizer, clip_norm=clip_norm), optimizer, batch, 1)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, err_msg=name)
    for (path, a), (_, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (state.optimizer, expected.optimizer)), strict=True
    ):
        error = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
        assert error < (2e-5 if clip_norm else 1e-5), f"{jax.tree_util.keystr(path)}: {error}"
    assert jax.tree.leaves(state.optimizer)
    assert state.step == 1


def test_a_device_holds_only_its_lanes_and_runs_only_them(rng):
    optimizer = optax.adam(1e-3)
    runner = make_runner([2, 0, 2, 1, 0, 3], optimizer)
    take_steps(runner, optimizer, make_batch(rng), 2)
    held = {s: {name: len(leaf["capsule_weights"]) for name, leaf in state.params["encoder"].items()}
            for s, state in runner._states.items()}  # fmt: skip
    assert held == {
        0: {"mlcn2_w1d1": 1, "mlcn1_w1d2": 1},
        1: {"mlcn1_w1d2": 1},
        2: {"mlcn2_w1d1": 2},
        3: {"mlcn1_w2d1": 1},
    }
    for s, state in runner._states.items():
        assert jax.tree.structure(state.optimizer[0].mu) == jax.tree.structure(state.params)
        assert "decoder" not in state.params
        assert {leaf.device.id for leaf in jax.tree.leaves(state)} == {s}


def test_scores_are_those_of_one_device(rng):
    optimizer = optax.adam(1e-3)
    images, labels = make_batch(rng)
    split = datasets.Split(images[:7], labels[:7])
    scores = []
    for runner in (
        mesh_runner.MeshRunner(UNEQUAL, optimizer, None, **STEP),
        make_runner([2, 0, 2, 1, 0, 3], optimizer),
    ):
        runner.start(make_state(optimizer))
        scores.append(runner.scores(split, 4))
    assert abs(scores[0].loss - scores[1].loss) < 1e-6
    np.testing.assert_array_equal(scores[0].confusion, scores[1].confusion)


@pytest.mark.long
def test_bfloat16_lanes_in_stacks_train(rng):
    spec = dataclasses.replace(UNEQUAL, compute_dtype="bfloat16")
    devices, optimizer = jax.devices(), optax.adam(1e-3)
    runner = stacks_runner.StacksRunner(
        spec, optimizer, stack_programs.make_stacks(devices, [0, 0, 0, 1, 1, 1]), devices[0], **STEP
    )
    metrics, _ = take_steps(runner, optimizer, make_batch(rng), 4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.long
def test_a_run_goes_on_in_stacks_as_if_it_had_never_moved(tiny, tmp_path):
    tiny = tiny.replace({"model.lanes": "mlcn1:w1*2,mlcn2:w1"})
    whole = loop.train(tiny, tmp_path / "whole")
    moves = tmp_path / "moves"
    for steps, plan, lane in ((5, "stacks", 2), (10, "mesh", 1), (15, "stacks", 3)):
        loop.train(tiny.replace({"train.num_steps": steps, "parallel.plan": plan, "parallel.lane": lane}), moves)
    summary = loop.train(tiny.replace({"parallel.plan": "stacks", "parallel.lane": 2}), moves)
    for a, b in zip(*(jax.tree.leaves(load_trained(w).params) for w in (tmp_path / "whole", moves)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    assert summary["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=0.01)
    laid_out = summary["parallel"]["lanes"].values()
    assert sorted(laid_out) == ["mlcn1:w1d1*1", "mlcn1:w1d1*1,mlcn2:w1d1*1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.lane": 9}, "needs 9 devices, but jax finds 8"),
        ({"parallel.lane": 2, "parallel.data": 2}, "parallel.data is 2; it must be 1 with parallel.plan=stacks"),
        ({"parallel.lane": 2, "parallel.platforms": "tpu"}, "finds no 'tpu' here"),
        ({"parallel.lane": 2, "parallel.partitioner": "best"}, "parallel.partitioner is 'best'"),
        ({"parallel.lane": 2, "model.name": "capsnet", "model.lanes": ""}, "CapsNet has no lanes"),
        ({"parallel.lane": 2, "parallel.profile": "nowhere.json"}, "nowhere.json cannot be read"),
    ],
)
def test_stacks_that_cannot_be_are_refused(tiny, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        loop.train(tiny.replace({"parallel.plan": "stacks", **changes}), tmp_path)

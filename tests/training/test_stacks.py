"""Lanes in stacks compute what one device does, each device holds only its own, and a run moves between plans."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_collectives import collective_bytes, collective_messages
from made_params import made_params

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import loop, mesh_runner, stack_programs, stacks_runner, step
from mlcn_jax.training.splits import Messages, can_stack
from mlcn_jax.training.trained import load_trained

UNEQUAL = ModelSpec(
    *("mlcn", (18, 19, 2), 3, "mlcn2:w1*3,mlcn1:w1d2*2,mlcn1:w2"),
    decoder=(16, 24),
    lane_dropout=0.3,
    signed_pixels=True,
    conv="native",
)
STEP = {"reconstruction_weight": 0.4, "seed": 0, "augmentation": Augmentation(max_shift=2, flip=True)}
IN_ORDER = [0, 0, 1, 1, 2, 2]
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
    runner.wait()
    return metrics, runner.fetch()


@pytest.fixture
def among_processes(monkeypatch):
    """Stacks exchange by the collectives of several processes, here over the devices of one."""
    monkeypatch.setattr(stacks_runner.jax, "process_count", lambda: 2)


def assert_same_gradients(mine, theirs, tolerance):
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (mine, theirs)), strict=True):
        error = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


@functools.cache
def on_one_device(clip_norm):
    """The optimizer, and the metrics and state after one step of the ordinary runner."""
    optimizer = optax.sgd(1.0, momentum=0.9)  # its state is the gradient after one step
    if clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    batch = make_batch(np.random.default_rng(0))
    (metrics,), state = take_steps(mesh_runner.MeshRunner(UNEQUAL, optimizer, None, **STEP), optimizer, batch, 1)
    return optimizer, batch, metrics, state


QUICK = [(PLACEMENTS[1], 0.2)]
LONG = [pytest.param(d, c, marks=pytest.mark.long) for d in PLACEMENTS for c in (0.0, 0.2) if (d, c) not in QUICK]


@pytest.mark.parametrize(("device_of", "clip_norm"), [*QUICK, *LONG])
def test_every_placement_has_the_loss_and_gradients_of_one_device(device_of, clip_norm):
    optimizer, batch, theirs, expected = on_one_device(clip_norm)
    (mine,), state = take_steps(make_runner(device_of, optimizer, clip_norm=clip_norm), optimizer, batch, 1)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, err_msg=name)
    assert_same_gradients(state.optimizer, expected.optimizer, 2e-5 if clip_norm else 1e-5)
    assert jax.tree.leaves(state.optimizer)
    assert state.step == 1


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [0.0, pytest.param(0.2, marks=pytest.mark.long)])
@pytest.mark.usefixtures("among_processes")
def test_processes_exchange_what_one_device_computes(clip_norm):
    optimizer, batch, theirs, expected = on_one_device(clip_norm)
    (mine,), state = take_steps(make_runner(IN_ORDER, optimizer, clip_norm=clip_norm), optimizer, batch, 1)
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, err_msg=name)
    assert_same_gradients(state.optimizer, expected.optimizer, 2e-5 if clip_norm else 1e-5)


@pytest.mark.parametrize("how", ["devices", pytest.param("processes", marks=pytest.mark.long)])
def test_columns_in_bfloat16_round_the_gradients_and_nothing_else(how, request):
    if how == "processes":
        request.getfixturevalue("among_processes")
    optimizer, batch, theirs, expected = on_one_device(0.0)
    runner = make_runner(IN_ORDER, optimizer, exchange_dtype="bfloat16")
    (mine,), state = take_steps(runner, optimizer, batch, 1)
    np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=2e-3)
    assert_same_gradients(state.optimizer, expected.optimizer, 0.05)
    with pytest.raises(AssertionError):
        assert_same_gradients(state.optimizer, expected.optimizer, 1e-5)


def words(lanes, dtype_bytes, numbers):
    return 4 * (-(-8 * 3 * lanes * dtype_bytes // 4) + numbers)


@pytest.mark.parametrize(
    ("dtype", "size", "clip_norm"),
    [
        ("float32", 4, 0.2),
        ("bfloat16", 2, 0.0),
        pytest.param("float32", 4, 0.0, marks=pytest.mark.long),
        pytest.param("bfloat16", 2, 0.2, marks=pytest.mark.long),
    ],
)
def test_a_step_takes_a_message_from_each_device_and_one_to_it(rng, dtype, size, clip_norm):
    """Two lanes on the head and on three devices one or two: with clipping, squares go to the head and a sum back."""
    optimizer = optax.sgd(0.1)
    runner = make_runner([2, 0, 2, 1, 0, 3], optimizer, exchange_dtype=dtype, clip_norm=clip_norm)
    batch = make_batch(rng)
    take_steps(runner, optimizer, batch, 0)
    metrics = [runner.step(*runner.place(*batch)) for _ in range(3)]
    assert runner._exchange.sent["messages"] == 3 * (6 + (6 if clip_norm else 0))
    sizes = [words(lanes, size, 2) + words(lanes, size, 6) for lanes in (2, 1, 1)]
    assert runner._exchange.sent["bytes"] == 3 * (sum(sizes) + (6 * 4 if clip_norm else 0))
    sent = runner._exchange.sent["messages"]
    assert all(np.isfinite(jax.device_get(one["grad_norm"])) for one in metrics[:2])
    assert runner._exchange.sent["messages"] == sent, "a norm came with the messages of the next step"
    jax.device_get(metrics[2]["grad_norm"])
    assert runner._exchange.sent["messages"] == sent + (0 if clip_norm else 3)


@pytest.mark.usefixtures("among_processes")
def test_a_step_among_processes_takes_a_gather_and_a_scatter(rng):
    optimizer, batch = optax.sgd(0.1), make_batch(rng)
    runner = make_runner(IN_ORDER, optimizer)
    take_steps(runner, optimizer, batch, 0)
    for _ in range(3):
        runner.step(*runner.place(*batch))
    among, stacks = runner._exchange, len(set(IN_ORDER))
    to_head, to_stacks = words(2, 4, 2), words(2, 4, 6)
    assert among.sent == {"messages": 3 * 2, "bytes": 3 * stacks * (to_head + to_stacks)}
    message = jax.ShapeDtypeStruct((stacks, to_head // 4), jnp.uint32, sharding=among._shared)
    gather = among._all_gather.lower(message).compile().as_text()
    assert collective_bytes(gather)["all-gather"] == stacks * to_head
    assert collective_messages(gather) == {"all-gather": 1}
    message = jax.ShapeDtypeStruct((stacks * stacks, to_stacks // 4), jnp.uint32, sharding=among._shared)
    scatter = among._reduce_scatter.lower(message).compile().as_text()
    assert collective_bytes(scatter)["reduce-scatter"] == stacks * to_stacks
    assert collective_messages(scatter) == {"reduce-scatter": 1}


@pytest.mark.long
def test_norms_are_those_of_one_device_step_by_step(rng):
    optimizer, batch = optax.sgd(0.1), make_batch(rng)
    found = []
    for runner in (mesh_runner.MeshRunner(UNEQUAL, optimizer, None, **STEP), make_runner(IN_ORDER, optimizer)):
        take_steps(runner, optimizer, batch, 0)
        metrics = [runner.step(*runner.place(*batch)) for _ in range(3)]
        found.append([float(jax.device_get(one["grad_norm"])) for one in metrics])
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert len(set(found[0])) == 3


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
    assert scores[0].lane_accuracies == scores[1].lane_accuracies
    assert len(set(scores[0].lane_accuracies)) > 1


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
    ("lanes", "changes", "taken"),
    [
        ("resnet:w1*2", {}, True),
        ("resnet:w1*2", {"ensemble_weight": 0.5}, False),
        ("resnet:w1*2", {"decoder_gradient": "all"}, False),
        ("mlcn1:w1*2", {"ensemble_weight": 0.5}, True),
        ("mlcn1:w1*2", {"decoder_gradient": "all"}, True),
    ],
)
def test_stacks_refuse_what_plans_leave_out(lanes, changes, taken):
    spec = ModelSpec("mlcn", (18, 18, 1), 4, lanes, **changes)
    with contextlib.nullcontext() if taken else pytest.raises(InputError, match="cannot share their gradients"):
        stacks_runner.check_independent(spec)
    assert can_stack(spec, Messages(parts=1)) == taken


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

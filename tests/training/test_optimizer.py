"""The optimizer that the settings name: its rates, step by step, and its clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import at_step, optimizer_of


def moves_of(optimizer, steps):
    """How far each step takes one parameter with a constant gradient."""
    params, moves = {"head": jnp.float32(0.0)}, []
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update({"head": jnp.float32(1.0)}, state, params)
        moves.append(-float(updates["head"]))
    return moves


def test_the_learning_rate_falls_once_an_epoch(tiny):
    """With a constant gradient, Adam moves by the rate itself."""
    settings = tiny.replace({"train.learning_rate": 0.1, "train.lr_decay": 0.5}).train
    optimizer = optimizer_of(settings, steps_per_epoch=3)
    moves = moves_of(optimizer, 7)
    np.testing.assert_allclose(moves, [0.1] * 3 + [0.05] * 3 + [0.025], rtol=1e-4)


def test_every_epoch_of_a_compiled_run_begins_with_its_own_rate(tiny):
    """Of steps over an epoch's 166, in float32 and by a compiled program, the floor is too small at some epochs."""
    optimizer = optimizer_of(tiny.replace({"train.learning_rate": 0.1, "train.lr_decay": 0.5}).train, 166)
    params = {"head": jnp.float32(0.0)}
    state = optimizer.init(params)

    @jax.jit
    def move(state):
        return optimizer.update({"head": jnp.float32(1.0)}, state, params)[0]["head"]

    for epoch in range(8):
        first, last = (move(at_step(state, 166 * epoch + step)) for step in (0, 165))
        np.testing.assert_allclose(first / last, 1.0, rtol=1e-3)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon"])
def test_runs_may_be_longer_than_anyone_trains(tiny, name):
    """As of one that `train.num_steps` ends."""
    many = {"train.num_epochs": 500_000_000, "train.whitening_epochs": 1e308, "train.lookahead": 0.5}
    optimizer = optimizer_of(tiny.replace({"train.optimizer": name} | many).train, 6)
    params = {"trunk": {"whitening": {"bias": jnp.ones((1, 2))}}, "head": jnp.ones((1, 2, 2))}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates))


def test_adamw_warms_up_and_ends_at_zero(tiny):
    settings = tiny.replace(
        {"train.optimizer": "adamw", "train.learning_rate": 0.1, "train.num_epochs": 4, "train.weight_decay": 0.0}
    ).train
    optimizer = optimizer_of(settings, steps_per_epoch=5)
    moves = moves_of(optimizer, 21)
    np.testing.assert_allclose(moves[:6], np.linspace(0, 0.1, 6), rtol=1e-4, atol=1e-7)
    assert moves[-1] == pytest.approx(0.0, abs=1e-7)
    assert moves[5:] == sorted(moves[5:], reverse=True)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_rates_fall_even_in_a_run_no_longer_than_its_warm_up(tiny, name):
    settings = tiny.replace({"train.optimizer": name, "train.num_epochs": 1, "train.weight_decay": 0.0}).train
    optimizer = optimizer_of(settings, steps_per_epoch=10)
    moves = moves_of(optimizer, 11)
    assert 0 < moves[9] < 0.6 * max(moves)
    assert moves[10] == pytest.approx(0.0, abs=1e-7)


def test_clipping_bounds_the_gradient_that_adam_sees(tiny):
    optimizer = optimizer_of(tiny.replace({"train.clip_norm": 0.5}).train, 10)
    gradient = {"a": jnp.array([3.0, 4.0])}
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    first_moment = optax.tree.get(state, "mu")["a"]  # a tenth of the gradient after one step
    np.testing.assert_allclose(first_moment, [0.03, 0.04], rtol=1e-5)


def test_sgd_of_residual_lanes_is_that_of_pytorch(rng):
    """The decay is added to the gradient and goes through the momentum; the whitening's bias has none."""
    tree = {"trunk": {"conv1_1": (), "norm1_1": {"bias": ()}, "whitening": {"bias": ()}}, "head": {"kernel": ()}}
    params = jax.tree.map(lambda _: rng.normal(size=3).astype(np.float32), tree, is_leaf=lambda leaf: leaf == ())
    rates = {"learning_rate": 0.1, "bias_learning_rate": 2.0, "head_learning_rate": 0.5}
    common = {"num_epochs": 4, "warmup_epochs": 0.0, "weight_decay": 0.05, "momentum": 0.6}
    optimizer = optimizer_of(TrainSettings(optimizer="sgd", whitening_epochs=2, **rates, **common), steps_per_epoch=2)
    state = optimizer.init(params)

    slow = [
        # a leaf, its rate, momentum and decay, and the steps over which the rate falls
        [params["head"]["kernel"], 0.5, 0.85, 0.05, 8],
        [params["trunk"]["conv1_1"], 0.1, 0.6, 0.05, 8],
        [params["trunk"]["norm1_1"]["bias"], 2.0, 0.85, 0.05, 8],
        [params["trunk"]["whitening"]["bias"], 2.0, 0.85, 0.0, 4],
    ]
    buffers = [np.zeros(3) for _ in slow]
    for step in range(6):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for i, (row, grad) in enumerate(zip(slow, jax.tree.leaves(grads), strict=True)):
            value, rate, momentum, decay, falls = row
            grad = grad + decay / rate * value
            buffers[i] = momentum * buffers[i] + grad
            row[0] = value - rate * max(0.0, 1 - step / falls) * (grad + momentum * buffers[i])
        for leaf, row in zip(jax.tree.leaves(params), slow, strict=True):
            np.testing.assert_allclose(leaf, row[0], rtol=1e-4, atol=1e-5)

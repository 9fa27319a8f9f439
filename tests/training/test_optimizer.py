"""The optimizer that the settings name: its rates, step by step, and its clipping."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlcn_jax.training.session import optimizer_of


def test_the_learning_rate_falls_once_an_epoch(tiny):
    """One parameter, constant gradient: Adam then moves by the rate itself."""
    settings = tiny.replace({"train.learning_rate": 0.1, "train.lr_decay": 0.5}).train
    optimizer = optimizer_of(settings, steps_per_epoch=3)
    params, moves = jnp.float32(0.0), []
    state = optimizer.init(params)
    for _ in range(7):
        updates, state = optimizer.update(jnp.float32(1.0), state, params)
        moves.append(-float(updates))
    np.testing.assert_allclose(moves, [0.1] * 3 + [0.05] * 3 + [0.025], rtol=1e-4)


def test_adamw_warms_up_and_ends_at_zero(tiny):
    settings = tiny.replace(
        {"train.optimizer": "adamw", "train.learning_rate": 0.1, "train.num_epochs": 4, "train.weight_decay": 0.0}
    ).train
    optimizer = optimizer_of(settings, steps_per_epoch=5)
    params, moves = jnp.float32(0.0), []
    state = optimizer.init(params)
    for _ in range(21):
        updates, state = optimizer.update(jnp.float32(1.0), state, params)
        moves.append(-float(updates))
    np.testing.assert_allclose(moves[:6], np.linspace(0, 0.1, 6), rtol=1e-4, atol=1e-7)
    assert moves[-1] == pytest.approx(0.0, abs=1e-7)
    assert moves[5:] == sorted(moves[5:], reverse=True)


def test_clipping_bounds_the_gradient_that_adam_sees(tiny):
    optimizer = optimizer_of(tiny.replace({"train.clip_norm": 0.5}).train, 10)
    gradient = {"a": jnp.array([3.0, 4.0])}
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    first_moment = optax.tree.get(state, "mu")["a"]  # a tenth of the gradient after one step
    np.testing.assert_allclose(first_moment, [0.03, 0.04], rtol=1e-5)

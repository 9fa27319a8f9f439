"""Residual lanes at fixed budgets: what is counted and scored."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import residual_lanes
from experiments.residual_rows import GPU_ROWS, ROWS, TRIALS
from mlcn_jax.nn.lane_losses import outputs_and_loss
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import lane_cost, matmul_flops
from mlcn_jax.training.session import check_settings

DIRECTORIES = {"cifar10": "", "fashion_mnist": ""}


def test_accuracy_by_lanes_equals_removing_each_choice():
    rng = np.random.default_rng(0)
    v, labels = rng.random((50, 3, 4)), rng.integers(0, 3, 50)
    expected = []
    for count in (1, 2, 3, 4):
        found = []
        for removed in itertools.combinations(range(4), 4 - count):
            kept = v.copy()
            kept[..., list(removed)] = 0
            found.append(100 * np.mean(np.argmax(np.linalg.norm(kept, axis=-1), axis=-1) == labels))
        expected.append(np.mean(found))
    np.testing.assert_allclose(residual_lanes.accuracy_by_lanes(v**2, labels), expected)


def test_a_lane_costs_what_its_loss_and_gradient_compute():
    spec = ModelSpec("mlcn", (12, 12, 3), 5, "resnet:w1*2", norm_group=4, conv="native")
    params = param_shapes(spec)["encoder"]
    images, labels = jax.ShapeDtypeStruct((8, 12, 12, 3), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(params, images, labels):
        return jax.grad(lambda p: outputs_and_loss(spec, p, images, labels)[1])(params)

    lane = lane_cost(spec.lane_specs[0], spec.lane_settings, spec.image_shape)
    assert 2 * lane.step_flops(8) == pytest.approx(matmul_flops(step, params, images, labels), rel=1e-6)


@pytest.mark.parametrize("row", ROWS | GPU_ROWS)
@pytest.mark.long
def test_rows_have_as_many_epochs_as_their_budget_allows(row):
    config = residual_lanes.configure_run(DIRECTORIES, row, seed=0)
    shape, images = ((28, 28, 1), 60_000) if config.data.name == "fashion_mnist" else ((32, 32, 3), 50_000)
    spec = config.model_spec(shape, 10)
    check_settings(config, spec)
    flops, before = np.zeros(len(spec.lane_specs)), 0.0
    for until, size in (*config.train.sizes(), (1.0, 0)):
        image_shape = (size or shape[0], size or shape[1], shape[2])
        lanes = [lane_cost(lane, spec.lane_settings, image_shape).step_flops_per_image for lane in spec.lane_specs]
        flops += (until - before) * images * config.train.num_epochs * np.array(lanes)
        before = until
    budget, total = residual_lanes.KNOWN[row].budget, flops.sum() / 1e15
    assert total <= budget
    assert total * (1 + 1 / config.train.num_epochs) > budget
    assert len(flops) < 4 or flops.max() <= 0.4 * flops.sum()


def test_the_decoder_is_told_beside_the_budget_that_leaves_it_out():
    products = 40 * 512 + 512 * 1024 + 1024 * 3072
    share = residual_lanes.decoder_share("cifar_4xw3d2")
    flops = 2 * (3 * products - 40 * 512) * 11 * 50_000
    assert share == pytest.approx(flops / 0.443e15, rel=0.02)
    row = {"row": "cifar_4xw3d2", "split": "test", "lanes": "a", "epochs": 10, "flops": 4.5e14, "largest_lane": 0.25}
    row |= {"decoder_over_lanes": share, "parameters": 1, "by_lanes": [90.0], "by_lanes_flips": [91.0]}
    one = {"mean": 90.0, "min": 90.0, "max": 90.0, "runs": 1}
    row |= dict.fromkeys(("accuracy", "accuracy_flips", "nll", "calibration_error", "train_seconds"), one)
    line = residual_lanes.cells({**row, "product_gflops_per_second": one})
    told = dict(zip(residual_lanes.HEADER, line, strict=True))
    assert told["decoder, %"] == f"{100 * share:.0f}"
    assert told["largest lane, %"] == "25"


def test_trials_leave_the_test_set_alone():
    for row in TRIALS:
        config = residual_lanes.configure_run(DIRECTORIES, row, seed=0)
        assert not config.train.score_test
        assert config.data.validation_fraction > 0

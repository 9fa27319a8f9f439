"""Removing lanes and what they mean: what is trained, and the number of their agreement."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import lane_removal
from mlcn_jax.analysis import explain
from mlcn_jax.data.batches import Split
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec


def test_both_models_are_the_published_lanes_but_for_lane_dropout():
    without, dropout = (lane_removal.configure_run({"fashion_mnist": ""}, rate, 0) for rate in lane_removal.DROPOUTS)
    assert (without.model["lane_dropout"], dropout.model["lane_dropout"]) == (0.0, 0.1)
    assert without.replace({"model.lane_dropout": 0.1}).hash() == dropout.hash()
    spec = without.model_spec(*without.data.shape())
    assert [str(lane) for lane in spec.lane_specs] == ["mlcn1:w4d1"] * 16
    assert (without.data.validation_fraction, without.train.optimizer) == (0.1, "adam")
    assert lane_removal.SCALES["full"].num_epochs == 20


def test_a_lane_that_does_the_same_in_every_class_agrees_and_one_that_does_the_opposite_does_not():
    up, across = np.array([1.0, 0, 0, 0]), np.array([0, 1.0, 0, 0])
    changes = np.array([[up, 5 * up, 2 * up], [across, across, -across], [0 * up, 0 * up, 0 * up]])
    found = lane_removal.agreements(changes.reshape(3, 3, 2, 2, 1))
    np.testing.assert_allclose(found, np.diag([1.0, -1 / 3, 0.0]), atol=1e-12)


def test_lanes_that_mean_the_same_as_each_other_are_seen_in_the_baseline(rng):
    everywhere = rng.normal(size=100)
    np.testing.assert_allclose(lane_removal.agreements(np.broadcast_to(everywhere, (4, 5, 100))), 1)
    np.testing.assert_allclose(lane_removal.agreements(rng.normal(size=(4, 5, 10_000))), 0, atol=0.03)


def test_change_images_are_means_over_the_images_of_each_class(rng):
    spec = ModelSpec("mlcn", (20, 20, 1), 4, "mlcn1:w1*2", decoder=(8,))
    params = init_params(spec, jax.random.key(0))
    labels = np.arange(60, dtype=np.int32) % 3  # more than a batch, and a class without images
    split = Split(rng.integers(0, 256, (60, 20, 20, 1), dtype=np.uint8), labels)
    found = lane_removal.change_images(spec, params, split)
    assert found.shape == (2, 4, 20, 20, 1)
    assert not found[:, 3].any()
    ones = split[split.labels == 1]
    v, _ = explain.look(spec, params["encoder"], ones.images)
    classes, kept = jnp.array(ones.labels), jnp.ones(2)
    less, more = (
        explain.respond(spec, params["decoder"], v, classes, jnp.array([0.0, added]), kept)[1]
        for added in (-0.25, 0.25)
    )
    np.testing.assert_allclose(found[1, 1], (more - less).mean(axis=0) / 0.5, atol=1e-6)
    assert np.abs(found[1, 1]).max() > 1e-3


def record(dropout):
    return {
        "facts": {"lane_dropout": dropout, "seed": 0},
        "lane_dropout": dropout,
        "lane_spreads": [0.9, 0.01, 0.5],
        "agreements": [[0.8, 0.9, 0.1], [0.9, -1.0, 0.9], [0.1, 0.9, 0.6]],
        "removed": [{"test_accuracy": accuracy} for accuracy in (0.9, 0.89, 0.5)],
    }


def test_means_are_over_lanes_that_are_alive():
    records = [record(0.0), record(0.1), {"facts": {}, "failed": "nan"}]
    row, _ = lane_removal.summarise(records)
    assert (row["alive"], row["lanes"]) == (2, 3)
    assert (row["same_lane"], row["other_lanes"]) == (pytest.approx(0.7), pytest.approx(0.1))
    text = lane_removal.text(records)
    assert "| lane dropout 0.1, seed 0 | 2 of 3 | 0.70 | 0.10 |" in text
    assert "| 1 | 50.00 | 50.00 |" in text
    dead = record(0.0) | {"lane_spreads": [0.0, 0.0, 0.0]}
    assert "| lane dropout 0, seed 0 | 0 of 3 | - | - |" in lane_removal.text([dead])
    (alone,) = lane_removal.summarise([record(0.0) | {"lane_spreads": [0.0, 0.0, 0.5]}])
    assert (alone["same_lane"], alone["other_lanes"]) == (0.6, None)


def test_older_runs_whose_agreements_are_over_all_lanes_count_as_far_as_all_are_alive():
    older = record(0.0) | {"agreement": {"same_lane": [0.8, -1.0, 0.6], "other_lanes": [0.2, 0.9, 0.1]}}
    del older["agreements"]
    (row,) = lane_removal.summarise([older])
    assert (row["same_lane"], row["other_lanes"]) == (pytest.approx(0.7), None)
    (row,) = lane_removal.summarise([older | {"lane_spreads": [0.9, 0.1, 0.5]}])
    assert row["other_lanes"] == pytest.approx(0.4)


def test_change_images_are_drawn_a_row_for_each_lane():
    changes = np.zeros((3, 4, 5, 5, 1))
    changes[2, 1, 0, 0] = -7.0
    sheet = lane_removal.draw_changes(changes, list("abcd")).axes[0].images[0].get_array()
    assert sheet.shape == (3 * 6, 4 * 6)
    assert sheet[12, 6] == -1.0, "over the lane's largest"


def test_pictures_of_models_that_are_here_are_put_beside_the_tables(tmp_path):
    made = tmp_path / "runs" / "lane_dropout0.1" / "seed0" / "explain"
    made.mkdir(parents=True)
    (made / "changes.png").write_bytes(b"a picture")
    results = tmp_path / "results"
    results.mkdir()
    lane_removal.copy_pictures(SimpleNamespace(workdir=tmp_path, scale=SimpleNamespace(name="full")), [results])
    assert [path.name for path in results.iterdir()] == ["lane_removal_full_0.1_changes.png"]

"""Whether the pose is kept: what is trained and what is told of it."""

import numpy as np
import pytest
from made_records import PLACE

from experiments import pose
from experiments.changed_images import CHANGES
from mlcn_jax.data.batches import Augmentation, Split
from mlcn_jax.data.datasets import digest
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import lane_cost
from mlcn_jax.training.session import check_settings

NOWHERE = {"fashion_mnist": ""}


@pytest.mark.parametrize("model", pose.MODELS)
def test_all_models_see_the_same_shifted_images_and_the_test_set_chooses_nothing(model):
    config = pose.configure_run(NOWHERE, model, seed=2)
    check_settings(config, config.model_spec((40, 40, 1), 10))
    assert (config.data.augmentation(), config.data.alternate_flips) == (Augmentation(max_shift=6), False)
    assert (config.train.seed, config.model["label_smoothing"], config.data.validation_fraction) == (2, 0.0, 0.0)
    assert pose._model_of(config) == model


@pytest.mark.long
def test_lanes_and_the_plain_network_cost_the_same():
    costs = {model: pose.training_megaflops(model) for model in pose.MODELS}
    assert costs["capsnet"] / costs["mlcn1"] == pytest.approx(7.7, abs=0.05)
    del costs["capsnet"]
    assert max(costs.values()) < 1.085 * min(costs.values())
    spec = ModelSpec("mlcn", (40, 40, 1), 10, pose.MODELS["mlcn1"][1])
    lane = lane_cost(spec.lane_specs[0], spec.lane_settings, spec.image_shape)
    assert costs["mlcn1"] == pytest.approx(2 * lane.step_flops(1) / 1e6)


def test_canvases_are_the_images_in_the_middle(directories, tmp_path):
    pose.make_canvases(directories["fashion_mnist"], tmp_path / "canvas")
    before, after = (
        pose.configure_run({"fashion_mnist": folder}, "mlcn1", 0).data.load()
        for folder in (directories["fashion_mnist"], str(tmp_path / "canvas"))
    )
    assert after.train.images.shape == (1200, 40, 40, 1)
    middle = Split(np.ascontiguousarray(after.train.images[:, 6:34, 6:34]), after.train.labels)
    assert digest(middle) == digest(before.train)
    assert after.train.images.sum(dtype=int) == before.train.images.sum(dtype=int)
    np.testing.assert_array_equal(after.test.labels, before.test.labels)


def record(model, seed, accuracy):
    drop = {name: 2.0 * i for i, name in enumerate(CHANGES)}
    return PLACE | {
        "facts": {"model": model, "seed": seed},
        "megaflops": 600.0,
        "accuracy": {name: accuracy - drop[name] for name in CHANGES},
        "confidence": {name: 0.9 - drop[name] / 100 for name in CHANGES},
    }


def test_what_a_change_costs_is_told_beside_the_accuracy_and_drawn():
    records = [record("mlcn1", 0, 90.0), record("mlcn1", 1, 91.0), record("capsnet", 0, 92.0)]
    lanes, capsnet = pose.summarise(records)
    assert (lanes["runs"], lanes["accuracy"]["none"]) == (2, {"mean": 90.5, "min": 90.0, "max": 91.0})
    assert lanes["drop"]["translation"] == {"mean": 2.0, "min": 2.0, "max": 2.0}
    assert "| mlcn1 | 600 | 2 | 90.50 (0.00) | 88.50 (2.00) | 86.50 (4.00) |" in pose.text(records)
    assert "| CapsNet | 0.900 | 0.880 | 0.860 |" in pose.text(records)
    figure = pose.draw([lanes, capsnet])
    accuracy, _, confidence = figure.axes
    assert [bar.get_height() for bar in accuracy.containers[1]] == [90.5 - 2 * i for i in range(len(CHANGES))]
    assert [label.get_text() for label in confidence.get_xticklabels()][-1] == "4x4\nparts shuffled"
    assert pose.summarise([{"facts": {"model": "mlcn1", "seed": 0}, "failed": "nan"}]) == []

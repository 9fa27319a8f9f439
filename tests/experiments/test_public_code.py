"""The layers of the authors' public code as a kind of the experiments, and what is told of its runs."""

import jax
import pytest

from experiments import public_code
from mlcn_jax.nn.lanes import Lane, LaneSettings, LaneSpec

DIRECTORIES = {"cifar10": "", "fashion_mnist": ""}


def test_lanes_have_the_layers_of_the_public_code():
    """9x9 to 64 filters and 6x6 with stride 2 to 8 capsules of 16 on 10x10 positions, which give 10 classes."""
    lane = Lane(LaneSpec(public_code.KIND, 4), LaneSettings(10, prior_bias=False))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
    params = jax.eval_shape(lane.init, jax.random.key(0), images)["params"]
    assert jax.tree.map(lambda array: array.shape, params) == {
        "conv1": {"kernel": (9, 9, 3, 64), "bias": (64,)},
        "primary": {"kernel": (6, 6, 64, 128), "bias": (128,)},
        "capsule_weights": (10 * 10 * 8, 16, 10),
    }
    assert jax.eval_shape(lane.apply, {"params": params}, images).shape == (2, 10)


def test_each_variant_is_one_step_from_the_one_before():
    text, layers, batches = (public_code.configure_run(DIRECTORIES, v, 1) for v in public_code.VARIANTS)
    assert layers == text.replace({"model.lanes": "mlcn1_code:w4*4"})
    assert batches == layers.replace({"train.batch_size": 32})
    assert (text.train.seed, text.train.test_every_epoch) == (1, True)


def test_last_and_best_epochs_are_told_apart():
    def record(variant, seed, curve):
        facts = {"variant": variant, "seed": seed}
        return {"facts": facts, "test_accuracy": curve[-1], "test_accuracy_per_epoch": curve, "parameters": 5}

    records = [record("text", 0, [50.0, 62.0, 60.0]), record("text", 1, [55.0, 61.0, 62.0])]
    text, layers, _ = public_code.summarise(records)
    assert (text["last"]["mean"], text["best"]["mean"]) == (61.0, 62.0)
    assert text["best_difference"] == pytest.approx(62.0 - 63.88)
    assert (layers["last"], layers["best_difference"]) == (None, None)
    assert "as in the thesis's text | 5 | 61.00 ± 1.41" in public_code.text(records)
    assert public_code.draw(records).axes[0].lines

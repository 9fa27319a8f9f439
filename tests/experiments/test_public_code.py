"""The layers of the authors' public code as kinds of the experiments, and what is told of their runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from made_records import PLACE

from experiments import public_code
from mlcn_jax.files import write_json
from mlcn_jax.nn.lanes import LANE_KINDS, Lane, LaneSettings, LaneSpec

DIRECTORIES = {"cifar10": "", "fashion_mnist": ""}


KINDS = tuple(LANE_KINDS)  # after the import of the experiment, which other programs read results with


@pytest.fixture(autouse=True)
def kinds():
    public_code.add_kinds()
    yield
    for kind in set(LANE_KINDS) - set(KINDS):
        del LANE_KINDS[kind]


def test_reading_results_adds_no_kind_of_lane():
    assert not [kind for kind in KINDS if kind.endswith("_code")]


def shapes_of(kind):
    lane = Lane(LaneSpec(kind, 4), LaneSettings(10, prior_bias=False))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")
    params = jax.eval_shape(lane.init, jax.random.key(0), images)["params"]
    assert jax.eval_shape(lane.apply, {"params": params}, images).shape == (2, 10)
    return jax.tree.map(lambda array: array.shape, params)


def test_lanes_have_the_layers_of_the_public_code():
    """Type 1 has 8 capsules of 16 on 10x10 positions, type 2 on 11x11; they give 10 classes."""
    primary = {"kernel": (6, 6, 64, 128), "bias": (128,)}
    assert shapes_of("mlcn1_code") == {
        "conv1": {"kernel": (9, 9, 3, 64), "bias": (64,)},
        "primary": primary,
        "capsule_weights": (10 * 10 * 8, 16, 10),
    }
    assert shapes_of("mlcn2_code") == {
        "conv1": {
            **{"first": (3, 64), "first_bias": (64,), "depthwise": (6, 6, 64, 1)},
            **{"pointwise": (64, 64), "bias": (64,)},
        },
        **{f"conv{i}": {"kernel": (3, 3, 64, 64), "bias": (64,)} for i in (2, 3, 4)},
        "primary": primary,
        "capsule_weights": (11 * 11 * 8, 16, 10),
    }


def test_the_joint_convolution_is_a_1x1_and_a_separable_one(rng):
    module = public_code._SeparableParams(3, 5, jnp.float32)
    params = module.init(jax.random.key(0))["params"]
    params = jax.tree.map(lambda array: jnp.asarray(rng.normal(size=array.shape), jnp.float32), params)
    images = rng.normal(size=(2, 9, 9, 3)).astype(np.float32)

    def convolve(x, kernel, groups=1):
        layout, strides = ("NHWC", "HWIO", "NHWC"), (1, 1)
        convolution = lax.conv_general_dilated
        y = convolution(x, kernel, strides, "VALID", dimension_numbers=layout, feature_group_count=groups)
        return np.asarray(y)

    first, bias, separable = (np.asarray(params[name]) for name in ("first_bias", "bias", "pointwise"))
    x = images @ np.asarray(params["first"]) + first
    expected = convolve(x, params["depthwise"].transpose(0, 1, 3, 2), groups=5) @ separable + bias
    kernel, joint_bias = module.apply({"params": params})
    np.testing.assert_allclose(convolve(images, kernel) + np.asarray(joint_bias), expected, rtol=1e-4, atol=1e-4)


def test_what_is_trained_differs_from_the_published_in_its_lanes():
    config = public_code.configure_run(DIRECTORIES, "mlcn2", 1)
    assert (str(config.model["lanes"]), config.train.batch_size) == ("mlcn2_code:w4*4", 100)
    assert (config.train.seed, config.train.test_every_epoch) == (1, True)


def record(facts, curve, copy=""):
    about = {"facts": facts, "test_accuracy": curve[-1], "test_accuracy_per_epoch": curve, "parameters": 5}
    return PLACE | about | {"data": {"copy": copy}}


def test_last_and_best_epochs_are_told_apart_beside_what_the_text_gives(tmp_path, monkeypatch):
    kept = tmp_path / "table_4_1.json"
    monkeypatch.setattr(public_code, "kept_results", lambda name, scale: kept)
    published = {"row": "cifar_mlcn1_4x4", "column": "published"}
    runs = [record(published | {"seed": 0}, [50.0, 62.0, 60.0]), record(published | {"seed": 1}, [55.0, 61.0, 62.0])]
    runs += [record(published | {"seed": 2}, [90.0], "a copy"), record({**published, "column": "tuned"}, [91.0])]
    write_json(kept, {"runs": runs})
    records = [record({"part": "mlcn1", "seed": 0}, [60.0, 66.0, 64.0])]
    text, layers, none, _ = public_code.summarise(records, "full")
    assert (text["last"]["mean"], text["best"]["mean"]) == (61.0, 62.0)
    assert text["best_difference"] == pytest.approx(62.0 - 63.88)
    assert (layers["last"]["mean"], layers["best"]["mean"]) == (64.0, 66.0)
    assert (none["last"], none["best_difference"]) == (None, None)
    (told,) = public_code.explained(public_code.summarise(records, "full"))
    assert told == (
        "mlcn1 4x4 is -2.88 points from the thesis as its text says; the layers of the public code change +3.00 (2 and "
        "1 runs), the epoch that is best on test images +2.00, and +2.12 remain."
    )
    assert "| mlcn1 4x4, as in the thesis's text | 5 | 61.00 ± 1.41" in public_code.text(records, "full")
    left, _ = public_code.draw(records, "full").axes
    assert len(left.lines) == 4

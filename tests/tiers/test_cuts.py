"""Lanes divided at a cut compute what they compute whole."""

import numpy as np
import pytest
from made_params import made_params

from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn.calibration import calibrate, fold_statistics
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving.export import flat_weights
from mlcn_jax.tiers.cuts import Part, cuts_of

LANES = {
    "mlcn1:w1,mlcn2:w1d2": ("pixels", "conv1", "capsules", "columns"),
    "resnet:w1d1,resnet:w1d3": ("pixels", "stem", "stage1", "stage2", "stage3", "columns"),
    "mlcn1:w1,resnet_caps:w1d1": ("pixels", "capsules", "columns"),
    "mlcn1:w1,resnet:w1d1": ("pixels", "columns"),
}


def made(lanes, images):
    spec = ModelSpec("mlcn", (20, 20, 1), 10, lanes=lanes, margin_loss="per_lane", lane_weights=(0.5, 2.0))
    params = made_params(spec)
    if "resnet" in lanes:
        params = fold_statistics(spec, calibrate(spec, params, [to_pixels(images)]))
    return spec, params["encoder"]


@pytest.mark.parametrize(
    "lanes", [pytest.param(name, marks=pytest.mark.long) if "d3" in name else name for name in LANES]
)
def test_home_and_tier_together_give_the_whole_models_lengths(lanes):
    images = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 1)).astype(np.uint8)
    spec, encoder = made(lanes, images)
    whole = np.asarray(class_lengths(spec, encode(spec, encoder, to_pixels(images))))
    assert cuts_of(spec) == LANES[lanes]
    arrays = flat_weights(encoder)
    for cut in cuts_of(spec):
        part = Part(spec, spec.lane_weights, cut)
        home, tier = part.split_weights(arrays)
        assert not set(home) & set(tier)
        rows = part.before(home, images) if cut != "pixels" else images
        assert rows.shape[1:] == part.row.shape
        assert rows.dtype == part.row.dtype
        np.testing.assert_allclose(np.sqrt(part.after(tier, rows)), whole, atol=1e-5)


def test_noise_does_not_lengthen_a_column_beyond_1():
    spec, _ = made("mlcn1:w1,mlcn2:w1d2", np.zeros((1, 20, 20, 1), np.uint8))
    part = Part(spec, spec.lane_weights, "columns")
    squares = np.asarray(part.after({}, np.full((1, *part.row.shape), -1.3, np.float32)))
    np.testing.assert_allclose(squares, sum(spec.lane_weights))


def test_a_cut_that_a_lane_does_not_have_is_named():
    spec = ModelSpec("mlcn", (20, 20, 1), 10, lanes="mlcn1:w1,resnet:w1d1")
    with pytest.raises(InputError, match=r"--cut=conv1: lanes .* can be cut at pixels, columns"):
        Part(spec, (1.0, 1.0), "conv1")

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_params import made_params

from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules, conv, model
from mlcn_jax.nn.model import CapsuleNetwork, count_parameters
from mlcn_jax.nn.spec import COMPUTE_DTYPES, ModelSpec, spec_of

SMALL = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn1:w1*2,mlcn2:w1", decoder=(6, 5))


@pytest.mark.parametrize(
    ("spec", "total"),
    [
        (ModelSpec("capsnet", (28, 28, 1), 10), 8_227_088),
        (ModelSpec("capsnet", (32, 32, 3), 10), 11_769_600),
        (ModelSpec("mlcn", (32, 32, 3), 10, "mlcn1:w4*4"), 5_250_816),
        (ModelSpec("capsnet", (28, 28, 1), 10, prior_bias=False), 8_215_568),
        (ModelSpec("capsnet", (32, 32, 3), 10, prior_bias=False), 11_749_120),
        (ModelSpec("mlcn", (32, 32, 3), 10, "mlcn1:w4*4", prior_bias=False), 5_248_768),
        (ModelSpec("mlcn", (28, 28, 1), 10, "mlcn1:w4*4", prior_bias=False), 2_790_416),
    ],
)
def test_parameter_counts_are_the_published_ones(spec, total):
    counts = count_parameters(spec)
    assert counts["total"] == total
    if spec.name == "mlcn":
        assert sum(counts["per_lane"]) + counts["decoder"] == total


def test_a_digest_tells_models_apart_but_not_how_they_are_trained():
    same = [SMALL, dataclasses.replace(SMALL), dataclasses.replace(SMALL, remat="full")]
    others = [dataclasses.replace(SMALL, **change) for change in ({"compute_dtype": "bfloat16"}, {"norm_group": 5})]
    assert len({spec.digest for spec in same}) == 1
    assert len({spec.digest for spec in (SMALL, *others)}) == 3


@pytest.mark.parametrize("lane_routing", ["published", "per_class"])
def test_class_capsules_have_one_column_per_lane(lane_routing, rng):
    spec = ModelSpec("mlcn", (18, 18, 1), 3, SMALL.lanes, lane_routing=lane_routing, decoder=(6,))
    images = jnp.array(rng.uniform(size=(4, 18, 18, 1)), jnp.float32)
    params = made_params(spec)
    v = jax.jit(model.encode, static_argnums=0)(spec, params["encoder"], images)
    assert v.shape == (4, 3, 3)
    assert len(np.unique(np.asarray(v).round(7))) == v.size  # neither classes nor lanes repeat each other


def test_prediction_reconstructs_from_the_longest_capsule(rng):
    images = jnp.array(rng.uniform(size=(5, *SMALL.image_shape)), jnp.float32)
    variables = {"params": made_params(SMALL, 1)}
    network = jax.jit(CapsuleNetwork(SMALL).apply)
    v, predicted = network(variables, images)
    longest = jnp.argmax(capsules.lengths(v), axis=-1)
    _, same = network(variables, images, longest)
    _, other = network(variables, images, (longest + 1) % 3)
    np.testing.assert_array_equal(predicted, same)
    assert not np.allclose(predicted, other)


def test_reconstruction_of_a_class_ignores_the_other_capsules(rng):
    variables = {"params": made_params(SMALL, 1)}
    v = jnp.array(rng.normal(size=(2, 3, 3)), jnp.float32)
    classes = jnp.array([1, 2])

    def total(v):
        return jnp.sum(CapsuleNetwork(SMALL).apply(variables, v, classes, method="reconstruct"))

    gradient = jax.jit(jax.grad(total))(v)
    assert np.any(gradient[0, 1])
    assert np.any(gradient[1, 2])
    assert not np.any(gradient[0, jnp.array([0, 2])])
    assert not np.any(gradient[1, :2])


def test_dropped_lanes_keep_the_mean():
    v = jnp.ones((2, 3, 5))
    keys = jax.random.split(jax.random.key(0), 4000)
    dropped = jax.vmap(lambda key: model.drop_lanes(key, v, 0.25))(keys)
    assert set(np.unique(np.asarray(dropped).round(5))) == {0.0, np.float32(1 / 0.75).round(5)}
    np.testing.assert_allclose(jnp.mean(dropped, axis=0), v, atol=0.05)
    columns = np.asarray(dropped).reshape(4000, 6, 5)
    assert np.all(columns == columns[:, :1])  # a lane is dropped for all images and classes or for none


@pytest.mark.parametrize("name", ["mlcn", "capsnet"])
def test_parameters_are_the_same_where_jax_uses_64_bits(name):
    lanes = "mlcn1:w1,mlcn2:w1d2,resnet:w1,resnet_caps:w1" if name == "mlcn" else ""
    spec = ModelSpec(name, (20, 20, 1), 2, lanes=lanes)
    wanted = model.init_params(spec, jax.random.key(0))
    with jax.enable_x64(True):
        assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, model._init(spec, jax.random.key(0)), wanted))


def test_shapes_are_those_of_the_initial_values_and_the_callers_own():
    params = model.init_params(SMALL, jax.random.key(0))
    for _ in range(2):
        shapes = model.param_shapes(SMALL)
        assert jax.tree.structure(shapes) == jax.tree.structure(params)
        for shape, value in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
            assert (shape.shape, shape.dtype) == (value.shape, value.dtype)
        del shapes["encoder"]


@pytest.mark.parametrize("name", ["mlcn", "capsnet"])
def test_bfloat16_is_close_to_float32(name, rng):
    lanes = SMALL.lanes if name == "mlcn" else ""
    images = jnp.array(rng.uniform(size=(3, *SMALL.image_shape)), jnp.float32)
    outputs = {}
    for dtype in COMPUTE_DTYPES:
        spec = ModelSpec(name, (18, 18, 1), 3, lanes, decoder=(6, 5), compute_dtype=dtype)
        params = made_params(spec)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.param_shapes(spec))} == {jnp.dtype("float32")}
        outputs[dtype] = jax.jit(model.apply_model, static_argnums=0)(spec, params, images)
    v32, v16 = (np.asarray(outputs[d][0], np.float32) for d in ("float32", "bfloat16"))
    assert outputs["bfloat16"][0].dtype == jnp.bfloat16
    np.testing.assert_allclose(v16, v32, atol=0.03 * np.abs(v32).max())
    assert not np.array_equal(v16, v32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "resnet"}, "model.name is 'resnet'"),
        ({"lane_routing": "none"}, "model.lane_routing is 'none'; it must be one of published, per_class"),
        ({"compute_dtype": "float16"}, "float32, bfloat16"),
        ({"conv": "magic"}, "model.conv is 'magic'"),
        ({"image_shape": (28, 16, 1)}, "28x16 pixels are too small for mlcn1: its layers need at least 17x17"),
        ({"num_routing_iters": 0}, "num_routing_iters is 0"),
        ({"lane_dropout": 1.0}, r"lane_dropout is 1.0; it must be in \[0, 1\)"),
        ({"decoder": ()}, "model.decoder"),
        ({"margin_loss": "lane"}, "model.margin_loss is 'lane'; it must be one of joint, per_lane"),
        ({"margin_loss": "per_lane", "lane_dropout": 0.1}, "lane_dropout is 0.1 with model.margin_loss=per_lane"),
        ({"name": "capsnet", "lanes": "", "margin_loss": "per_lane"}, "CapsNet has no lanes"),
        ({"num_classes": 1}, "at least 2 classes"),
        ({"name": "capsnet"}, "CapsNet has no lanes"),
        ({"lanes": "mlcn1:w"}, "expected a width"),
    ],
)
def test_bad_specs_are_refused(changes, message):
    good = {"name": "mlcn", "image_shape": (18, 18, 1), "num_classes": 3, "lanes": "mlcn1:w1"}
    with pytest.raises(InputError, match=message):
        ModelSpec(**{**good, **changes})


@pytest.mark.parametrize("name", ["mlcn", "capsnet"])
def test_signed_pixels_are_read_as_twice_the_pixels_less_one(rng, name):
    spec = ModelSpec(name, (18, 18, 2), 3, "mlcn1:w1*2,mlcn2:w1d2" if name == "mlcn" else "", signed_pixels=True)
    params = made_params(spec)
    images = jnp.array(rng.uniform(size=(4, 18, 18, 2)), jnp.float32)
    as_published = dataclasses.replace(spec, signed_pixels=False)
    encode = jax.jit(model.encode, static_argnums=0)
    encoded = encode(spec, params["encoder"], images)
    np.testing.assert_allclose(encoded, encode(as_published, params["encoder"], 2 * images - 1), rtol=1e-5)
    assert not np.allclose(encoded, encode(as_published, params["encoder"], images), rtol=0.1)


def test_the_smallest_image_works():
    spec = ModelSpec("mlcn", (17, 17, 1), 2, "mlcn1:w1", decoder=(4,))
    v, _ = jax.jit(model.apply_model, static_argnums=0)(spec, made_params(spec), jnp.ones((1, 17, 17, 1)))
    assert v.shape == (1, 2, 1)


def test_class_lengths_weigh_the_squares_of_the_lanes(rng):
    weights = (0.5, 0.0, 2.0)
    spec = dataclasses.replace(SMALL, lane_weights=weights)
    v = rng.normal(size=(4, 3, 3)).astype(np.float32)
    expected = np.sqrt((np.array(weights) * v.astype(np.float64) ** 2).sum(axis=-1))
    np.testing.assert_allclose(model.class_lengths(spec, jnp.array(v)), expected, rtol=1e-6)
    np.testing.assert_array_equal(model.class_lengths(SMALL, jnp.array(v)), capsules.lengths(jnp.array(v)))


def test_probabilities_of_weighted_lanes_that_classify_alone_are_their_weighted_mean(rng):
    weights = np.array([0.5, 1.5, 1.0])
    spec = ModelSpec("mlcn", (18, 18, 1), 4, "resnet:w1*3", lane_weights=tuple(weights))
    each = rng.dirichlet(np.ones(4), size=(5, 3)).transpose(0, 2, 1)  # [images, classes, lanes]
    v = model.join_lanes(spec, jnp.log(jnp.array(each, jnp.float32)))
    found = model.class_probabilities(spec, model.class_lengths(spec, v))
    np.testing.assert_allclose(found, each @ weights / weights.sum(), rtol=1e-5)


def test_weights_do_not_enter_a_loss(rng):
    v, labels = jnp.array(rng.uniform(-0.9, 0.9, size=(4, 3, 3)), jnp.float32), jnp.array([0, 1, 2, 0])
    for margin_loss in ("joint", "per_lane"):
        spec = dataclasses.replace(SMALL, margin_loss=margin_loss)
        weighted = dataclasses.replace(spec, lane_weights=(3.0, 0.0, 1.0))
        found, expected = (model.classification_loss(one, v, labels) for one in (weighted, spec))
        np.testing.assert_array_equal(found, expected)


def test_a_part_of_a_model_keeps_the_weights_of_its_lanes():
    spec = dataclasses.replace(SMALL, lane_weights=(3.0, 0.0, 1.0), margin_loss="per_lane")
    assert spec_of(spec, [0, 2]).lane_weights == (3.0, 1.0)
    assert spec_of(spec, [1]).lane_weights == ()
    assert spec_of(SMALL, [1]).lane_weights == ()
    assert spec.certain_length == 2.0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "lane_weights has 1 values for 3 lanes"),
        ((1.0, -1.0, 1.0), "must be finite and 0 or more"),
        ((0.0, 0.0, 0.0), "at least one above 0"),
        ((1.0, float("nan"), 1.0), "must be finite"),
    ],
)
def test_unusable_weights_are_refused(weights, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, lane_weights=weights)


@pytest.mark.parametrize(
    ("lanes", "batch", "dtype", "fused"),
    [
        ("mlcn1:w2*4", None, "float32", True),
        ("mlcn2:w2,resnet:w1d1", 8, "float32", True),
        ("mlcn1:w2*4", 1, "float32", False),
        ("resnet:w1d1*2", None, "float32", False),
        ("resnet:w1d1*2", None, "bfloat16", True),
        ("", None, "float32", False),
    ],
)
def test_products_are_fused_where_lanes_have_chains_of_them(lanes, batch, dtype, fused, monkeypatch):
    monkeypatch.setattr(conv, "compiler_options", lambda platform, chains: chains)
    spec = ModelSpec("mlcn" if lanes else "capsnet", (32, 32, 3), 10, lanes=lanes, compute_dtype=dtype)
    assert spec.compiler_options("cpu", batch) == fused


@pytest.mark.parametrize(
    ("images", "found", "cure"),
    [
        (np.zeros((2, 18, 18, 1), np.uint8), r"uint8 \[2, 18, 18, 1\]", "divide them by 255"),
        (np.zeros((2, 18, 17, 1), np.float32), r"float32 \[2, 18, 17, 1\]", "resize them"),
        (np.zeros((18, 18, 1), np.float32), r"float32 \[18, 18, 1\]", "resize them"),
    ],
)
def test_images_of_another_shape_or_range_are_refused(images, found, cure):
    expected = r"expected pixels in \[0, 1\], as float \[batch, 18, 18, 1\]"
    with pytest.raises(InputError, match=f"images are {found}; {expected}: {cure}"):
        model.apply_model(SMALL, {}, images)


@pytest.mark.parametrize("sequence", [list, np.array])
def test_lists_and_numbers_of_numpy_may_be_given(sequence):
    own = {"decoder": sequence([6, 5]), "lane_weights": sequence([1.0, 0.5, 2.0])}
    spec = ModelSpec("mlcn", sequence([18, 18, 1]), sequence([3])[0], SMALL.lanes, **own)
    expected = dataclasses.replace(SMALL, lane_weights=(1.0, 0.5, 2.0))
    assert (spec, hash(spec), spec.digest) == (expected, hash(expected), expected.digest)
    assert hash(spec) == hash(dataclasses.replace(SMALL, lane_weights=(1.0, 0.5, 2.0)))


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 0), (28.0, 28, 1), "28x28x1"])
def test_image_shapes_are_three_numbers_of_pixels(shape):
    with pytest.raises(InputError, match=r"image_shape is .*; it must be height, width and channels, such as"):
        ModelSpec("mlcn", shape, 10, "mlcn1:w1")

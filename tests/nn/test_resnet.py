"""Residual lanes: whitening, normalisation, folding, losses, independence of lanes, and their join."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from mlcn_jax.data.batches import Augmentation
from mlcn_jax.errors import InputError
from mlcn_jax.nn import calibration, capsules, conv_winograd, lanes, losses, model, resnet, tracing
from mlcn_jax.nn.lane_losses import outputs_and_loss
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import make_loss

SPEC = ModelSpec("mlcn", (12, 12, 3), 4, lanes="resnet:w1d3*2", norm_group=4, decoder=(8,), label_smoothing=0.1)
MIXED = dataclasses.replace(SPEC, image_shape=(18, 18, 3), lanes="resnet:w1*2,mlcn1:w1*2", decoder=(8,))

lane_outputs = jax.jit(model.lane_outputs, static_argnums=0)
encode = jax.jit(model.encode, static_argnums=0)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).uniform(size=(8, 12, 12, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def params(images):
    return calibration.whiten(SPEC, model.init_params(SPEC, jax.random.key(0)), images)


def mixed(seed=0):
    rng = np.random.default_rng(seed)
    images = jnp.asarray(rng.uniform(size=(8, *MIXED.image_shape)), jnp.float32)
    return model.init_params(MIXED, jax.random.key(0)), images, jnp.arange(8) % 4


def test_whitened_patches_are_uncorrelated_with_variance_one(images):
    kernel, bias = resnet.whitening(images, epsilon=0.0)
    patches = np.stack([images[:, i : 11 + i, j : 11 + j] for i in (0, 1) for j in (0, 1)], axis=3).reshape(-1, 12)
    white = patches @ kernel.reshape(12, 24) + bias
    np.testing.assert_allclose(np.cov(white[:, :12].T, bias=True), np.eye(12), atol=1e-4)
    np.testing.assert_allclose(white[:, 12:], -white[:, :12], atol=1e-4)
    again, _ = resnet.whitening(images[::-1], epsilon=0.0)
    np.testing.assert_allclose(again, kernel, atol=1e-4)  # signs do not hang on the order of the images


def test_whitening_of_some_images_at_a_time_is_that_of_all(images, monkeypatch):
    expected = resnet.whitening(images)
    monkeypatch.setattr(resnet, "_WHITENED_AT_ONCE", 3)
    for found, whole in zip(resnet.whitening(images), expected, strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("signed", [False, True])
def test_lanes_are_whitened_with_the_bits_of_all_images_converted_at_once(signed, params, monkeypatch):
    monkeypatch.setattr(resnet, "_WHITENED_AT_ONCE", 10)
    images = np.random.default_rng(0).integers(0, 256, (1000, 12, 12, 3), np.uint8)
    spec = dataclasses.replace(SPEC, signed_pixels=signed)
    tracemalloc.start()
    found = calibration.whiten(spec, params, images)["encoder"]["resnet_w1d3"]["trunk"]["whitening"]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < images.size * 4, "no copy in float32"
    pixels = np.asarray(lanes.first_input(jnp.asarray(images / np.float32(255)), signed, jnp.float32))
    for name, expected in zip(("kernel", "bias"), resnet.whitening(pixels), strict=True):
        np.testing.assert_array_equal(found[name][0], expected)
        np.testing.assert_array_equal(found[name][-1], expected)


def test_patches_are_in_the_order_on_which_the_bits_of_the_whitening_depend(images):
    (found,) = resnet._patches(images, np.asarray)
    expected = [images[:, i : 11 + i, j : 11 + j].reshape(-1, 3) for i in (0, 1) for j in (0, 1)]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=1))
    assert found.flags.c_contiguous
    assert found.dtype == np.float64


def test_training_normalises_each_group_of_images_alone(params, images):
    whole = lane_outputs(SPEC, params["encoder"], images)
    halves = [lane_outputs(SPEC, params["encoder"], half) for half in (images[:4], images[4:])]
    np.testing.assert_allclose(whole, np.concatenate(halves), atol=1e-5)
    one_group = lane_outputs(dataclasses.replace(SPEC, norm_group=8), params["encoder"], images)
    assert np.abs(whole - one_group).max() > 1e-3


def test_normalised_values_and_their_gradient_are_those_of_the_definition():
    x, g = (np.random.default_rng(seed).normal(2, 3, (4, 5, 3, 2)).astype(np.float32) for seed in (0, 1))

    def by_definition(x, bias):
        groups = x.reshape(2, 2, 5, 3, 2)
        mean, variance = (f(groups, axis=(1, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        return ((groups - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape) + bias[None, None, None]

    norm, bias = resnet.GhostBatchNorm(group_size=2, folded=False), jnp.array([0.5, -2.0])
    ways = (by_definition, lambda x, bias: norm.apply({"params": {"bias": bias}}, x))
    (expected, expected_gradients), (actual, gradients) = [
        (y, back(g)) for y, back in (jax.vjp(f, x, bias) for f in ways)
    ]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "batch", "size", "most", "parts"),
    [
        ("native", 12, 7, 3, 4),
        ("native", 12, 8, 5, 3),
        ("native", 7, 6, 1, 1),
        ("native", 11, 6, 4, 1),
        ("winograd", 12, 7, 3, 4),
        ("winograd", 7, 8, 1, 7),
    ],
)
def test_convolutions_pooled_in_parts_have_the_gradients_of_the_whole(
    algorithm, batch, size, most, parts, rng, monkeypatch
):
    monkeypatch.setattr(conv_winograd, "_PART_BYTES", most * 4 * 36 * 4 * (3 + 5))
    monkeypatch.setattr(resnet, "_PART_BYTES", most * size * size * 5 * 4)
    monkeypatch.setattr(resnet, "_PART_IMAGES", 2)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((batch, size, size, 3), (3, 3, 3, 5)))
    assert resnet._parts(algorithm, x.shape, kernel) == parts
    weights = jnp.asarray(rng.normal(size=(batch, size // 2, size // 2, 5)), jnp.float32)

    def whole(x, kernel):
        even, layout = size // 2 * 2, ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        return resnet._pool(y[:, :even, :even])

    def in_parts(x, kernel):
        return resnet._convolve_and_pool(algorithm, x, kernel)

    np.testing.assert_allclose(in_parts(x, kernel), whole(x, kernel), atol=1e-5 if algorithm == "native" else 1e-4)
    found, expected = (
        jax.value_and_grad(lambda x, kernel, of=of: jnp.sum(weights * of(x, kernel)), (0, 1))(x, kernel)
        for of in (in_parts, whole)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_lanes_with_tiles_are_those_without(params, images):
    def values_and_gradients(conv):
        spec = dataclasses.replace(SPEC, conv=conv)
        return jax.value_and_grad(lambda encoder: jnp.sum(lane_outputs(spec, encoder, images)))(params["encoder"])

    found, expected = (values_and_gradients(conv) for conv in ("winograd", "native"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


def test_the_first_of_equal_values_gets_the_gradient_of_pooling():
    x = jnp.zeros((1, 2, 4, 1)).at[0, 1, 3, 0].set(1.0)
    pooled, which = resnet._largest(x)
    assert pooled.tolist() == [[[[0.0], [1.0]]]]
    assert which.tolist() == [[[[0], [3]]]]


def test_groups_that_do_not_divide_a_batch_are_refused(params, images):
    with pytest.raises(InputError, match="batches of 6 images per device cannot be split"):
        lane_outputs(SPEC, params["encoder"], images[:6])


def test_statistics_are_means_and_variances_over_all_images():
    """Of the variance within groups and that of the groups' means, which is the variance over all of them."""
    values = np.random.default_rng(0).normal(size=(2, 3, 50, 5)) + np.arange(3)[None, :, None, None]
    groups = {"norm": {"means": jnp.asarray(values.mean(axis=2)), "variances": jnp.asarray(values.var(axis=2))}}
    halves = [{"norm": {k: v[:, part] for k, v in groups["norm"].items()}} for part in (slice(0, 1), slice(1, 3))]
    found = resnet.join_statistics(halves)["norm"]
    np.testing.assert_allclose(found["mean"], values.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found["variance"], values.var(axis=(1, 2)), rtol=1e-5)


def test_calibrated_lanes_see_each_image_alone_and_folding_changes_nothing(params, images):
    calibrated = calibration.calibrate(SPEC, params, [images[:4], images[4:]])
    together = encode(SPEC, calibrated["encoder"], images)
    np.testing.assert_allclose(together[:3], encode(SPEC, calibrated["encoder"], images[:3]), atol=1e-5)
    folded = calibration.fold_statistics(SPEC, calibrated)
    np.testing.assert_allclose(encode(SPEC, folded["encoder"], images), together, atol=1e-5)
    shapes = calibration.trained_shapes(SPEC)
    assert jax.tree.map(jnp.shape, calibrated) == jax.tree.map(jnp.shape, shapes)
    assert jax.tree.structure(calibration.without_statistics(calibrated)) == jax.tree.structure(params)
    with pytest.raises(InputError, match="resnet_w1d3 has no statistics"):
        calibration.fold_statistics(SPEC, params)
    with pytest.raises(InputError, match="images is empty"):
        calibration.calibrate(SPEC, params, [])


def test_lanes_without_statistics_do_not_classify_by_the_other_images_of_a_batch(params, images):
    with pytest.raises(InputError, match=r"resnet_w1d3 has no statistics.*mlcn_jax\.calibrate"):
        model.apply_model(SPEC, params, images)
    calibrated = calibration.calibrate(SPEC, params, [images])
    v, _ = model.apply_model(SPEC, calibrated, images)
    np.testing.assert_allclose(v, encode(SPEC, calibrated["encoder"], images), atol=1e-6)
    folded, _ = model.apply_model(SPEC, calibration.fold_statistics(SPEC, calibrated), images)
    np.testing.assert_allclose(folded, v, atol=1e-5)


def test_with_the_statistics_of_one_group_evaluation_equals_training(params, images):
    spec = dataclasses.replace(SPEC, norm_group=8)
    calibrated = calibration.calibrate(spec, params, [images])
    trained = lane_outputs(spec, params["encoder"], images)
    np.testing.assert_allclose(lane_outputs(spec, calibrated["encoder"], images), trained, atol=1e-4)


def test_squared_lengths_are_the_sum_of_the_lanes_probabilities(params, images):
    outputs = np.asarray(lane_outputs(SPEC, params["encoder"], images), np.float64)
    np.testing.assert_allclose(np.exp(outputs).sum(axis=1), 1, rtol=1e-5)
    v = encode(SPEC, params["encoder"], images)
    np.testing.assert_allclose(np.square(capsules.lengths(v)), np.exp(outputs).sum(axis=2), rtol=1e-5)
    probabilities = model.class_probabilities(SPEC, capsules.lengths(v))
    np.testing.assert_allclose(probabilities, np.exp(outputs).mean(axis=2), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_hundreds_have_finite_losses_with_right_gradients(params, images, dtype):
    """Probabilities of e^-400 are 0 in class capsules, but neither the loss nor its gradient goes through them."""
    spec = dataclasses.replace(SPEC, compute_dtype=dtype, label_smoothing=0.0)
    labels = jnp.arange(8) % 4
    trunk = params["encoder"]["resnet_w1d3"]["trunk"]
    start = 1e4 * params["encoder"]["resnet_w1d3"]["head"]["kernel"]

    def loss(kernel):
        encoder = {"resnet_w1d3": {"trunk": trunk, "head": {"kernel": kernel}}}
        outputs, value = outputs_and_loss(spec, encoder, images, labels)
        return value, outputs

    loss = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, outputs), gradient = loss(start)
    assert outputs.dtype == jnp.float32
    assert outputs.min() < -400
    right = np.take_along_axis(np.asarray(outputs, np.float64), labels[:, None, None], axis=1)
    np.testing.assert_allclose(value, -right.mean(axis=0).sum(), rtol=1e-5)
    assert np.isfinite(gradient).all()
    if dtype == "float32":  # steps this small are lost in bfloat16
        step = 1e-3 * start
        changed = loss(start + step)[0][0] - loss(start - step)[0][0]
        np.testing.assert_allclose(2 * jnp.vdot(gradient, step), changed, rtol=2e-2)
    v = model.join_lanes(spec, outputs)
    np.testing.assert_allclose(model.class_probabilities(spec, model.class_lengths(spec, v)).sum(axis=1), 1, rtol=1e-4)


def test_cross_entropy_equals_numpy():
    log_p = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]))
    target = np.array([[0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3], [0.1 / 3, 0.9 + 0.1 / 3, 0.1 / 3]])
    found = losses.cross_entropy(jnp.asarray(log_p), jnp.array([0, 1]), 0.1)
    np.testing.assert_allclose(found, -(target * log_p).sum(axis=1), rtol=1e-5)


def gradients(spec, params, images, labels, reconstruction_weight=0.4):
    loss = make_loss(spec, reconstruction_weight)
    return jax.jit(jax.grad(lambda p: loss(p, images, labels, jax.random.key(0), {})[0]))(params)["encoder"]


@pytest.mark.long
def test_gradients_taken_lane_by_lane_are_those_of_the_whole_loss():
    params, images, labels = mixed()
    found = gradients(MIXED, params, images, labels)

    def plain(encoder):
        outputs = model.lane_outputs(MIXED, encoder, images)
        v = model.join_lanes(MIXED, outputs)
        v = jnp.concatenate([jax.lax.stop_gradient(v[..., :2]), v[..., 2:]], axis=-1)
        decoded = model.reconstruct(MIXED, params["decoder"], v, labels)
        loss = model.classification_loss(MIXED, outputs, labels) + 0.4 * losses.reconstruction_loss(decoded, images)
        return jnp.mean(loss)

    expected = jax.jit(jax.grad(plain))(params["encoder"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)
    assert np.abs(found["resnet_w1d1"]["trunk"]["conv1_1"]).max() > 1e-4
    assert np.abs(found["mlcn1_w1d1"]["conv1"]["kernel"]).max() > 1e-4
    assert not np.any(found["resnet_w1d1"]["trunk"]["whitening"]["kernel"])


@pytest.mark.parametrize(
    ("changes", "independent"),
    [({}, True), ({"ensemble_weight": 0.5}, False), ({"decoder_gradient": "all"}, False)],
)
def test_a_lane_that_classifies_alone_learns_nothing_from_the_others(changes, independent):
    spec = dataclasses.replace(MIXED, **changes)
    params, images, labels = mixed()
    before = gradients(spec, params, images, labels, 100.0)  # so that the decoder's part is not lost in rounding
    other = jax.tree.map(lambda x: x, params)
    other["encoder"]["resnet_w1d1"] = jax.tree.map(lambda x: x.at[1].multiply(1.5), params["encoder"]["resnet_w1d1"])
    after = gradients(spec, other, images, labels, 100.0)
    own = [np.asarray(tree["resnet_w1d1"]["trunk"]["conv1_1"][0]) for tree in (before, after)]
    assert np.array_equal(*own) == independent


def test_the_blend_of_the_losses_of_lanes_and_of_their_ensemble_equals_numpy():
    logits = 3 * np.random.default_rng(0).normal(size=(6, 4, 3))
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    labels = np.arange(6) % 4
    truth = 0.9 * np.eye(4)[labels] + 0.1 / 4
    of_lanes = -np.einsum("nk,nkl->n", truth, log_p)
    of_ensemble = -np.einsum("nk,nk->n", truth, np.log(np.exp(log_p).mean(axis=2)))
    spec = dataclasses.replace(SPEC, lanes="resnet:w1d3*3", ensemble_weight=0.3)
    found = model.lane_cross_entropy(spec, jnp.asarray(log_p, jnp.float32), jnp.asarray(labels))
    np.testing.assert_allclose(found, 0.7 * of_lanes + 0.3 * 3 * of_ensemble, rtol=1e-5)


def test_published_lanes_learn_nothing_from_lanes_that_classify_alone():
    """Without the decoder, which all lanes feed."""
    params, images, labels = mixed()
    other = jax.tree.map(lambda x: x, params)
    other["encoder"]["resnet_w1d1"] = jax.tree.map(lambda x: 1.5 * x, params["encoder"]["resnet_w1d1"])
    own = [gradients(MIXED, tree, images, labels, 0.0)["mlcn1_w1d1"] for tree in (params, other)]
    jax.tree.map(np.testing.assert_array_equal, *own)
    assert np.abs(own[0]["conv1"]["kernel"]).max() > 0


@pytest.mark.parametrize("ensemble_weight", [0.0, 0.5])
def test_accelerators_compute_equal_lanes_in_one_loop_with_the_same_result(images, params, ensemble_weight):
    spec = dataclasses.replace(SPEC, ensemble_weight=ensemble_weight)
    loss = make_loss(spec, 0.0, augmentation=Augmentation(per_lane=True, max_shift=1))
    shifts = np.random.default_rng(1).integers(0, 3, (8, 2, 2))

    def gradients_of(params):
        labels = jnp.arange(8) % 4
        return jax.grad(lambda p: loss(p, jnp.asarray(images), labels, None, {"shift": shifts}, ())[0])(params)

    found, convolutions = {}, {}
    for platform in ("cpu", "gpu"):
        with tracing.using(tracing.Target(platform=platform)):
            convolutions[platform] = str(jax.make_jaxpr(gradients_of)(params)).count("conv_general_dilated[")
            found[platform] = jax.jit(gradients_of)(params)["encoder"]
    assert convolutions["gpu"] < convolutions["cpu"], "one program for both lanes"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 3e-6), found["gpu"], found["cpu"])


def test_the_activations_of_one_lane_are_held_at_a_time(monkeypatch):
    """Those of loops over some images at a time, too."""
    monkeypatch.setattr(resnet, "_PART_BYTES", 2**18)

    def temporary_bytes(lanes):
        spec = ModelSpec("mlcn", (20, 20, 2), 3, lanes, norm_group=16)
        encoder = jax.eval_shape(lambda: model.init_params(spec, jax.random.key(0)))["encoder"]
        batch = jax.ShapeDtypeStruct((64, *spec.image_shape), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
        gradient = jax.jit(jax.grad(lambda encoder, *batch: outputs_and_loss(spec, encoder, *batch)[1]))
        return gradient.lower(encoder, *batch).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes("resnet:w1*3") < 1.03 * temporary_bytes("resnet:w1*2")


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf, -0.0])
def test_a_lane_that_diverges_leaves_the_others_as_they_are(broken):
    """Though each is computed after the one before."""

    @jax.jit
    def results(kernels, images):
        return lanes.lanes_one_by_one(lambda kernel, images: (kernel * images).sum(), kernels, images, 3)

    rng = np.random.default_rng(0)
    kernels, images = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), jnp.asarray(rng.normal(size=4), jnp.float32)
    found, changed = results(kernels, images), results(kernels.at[0].set(broken), images)
    assert found[0] != changed[0]
    assert found[1:] == changed[1:]
    assert np.isfinite(found).all()


@pytest.mark.long
def test_a_lane_trains_the_same_whatever_the_number_of_lanes(images, params):
    alone = dataclasses.replace(SPEC, lanes="resnet:w1d3")
    of_one = {
        "encoder": jax.tree.map(lambda x: x[:1], params["encoder"]),
        "decoder": model.init_params(alone, jax.random.key(1))["decoder"],
    }
    labels = jnp.arange(8) % 4
    many = gradients(SPEC, params, images, labels)
    one = gradients(alone, of_one, images, labels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:1], b, atol=1e-6), many, one)


@pytest.mark.long
def test_the_capsule_head_routes_the_same_trunk(images):
    spec = dataclasses.replace(SPEC, lanes="resnet_caps:w1*2", lane_routing="per_class", label_smoothing=0.0)
    params = model.init_params(spec, jax.random.key(0))
    v = encode(spec, params["encoder"], images)
    assert v.shape == (8, 4, 2)
    assert spec.probability_power == 1
    assert np.abs(gradients(spec, params, images, jnp.arange(8) % 4)["resnet_caps_w1d1"]["capsule_weights"]).max() > 0


def test_each_lane_sees_its_own_view(images, params):
    loss = make_loss(SPEC, 0.0, augmentation=Augmentation(per_lane=True))
    labels = jnp.arange(8) % 4
    plain = {"flip": jnp.zeros((8, 2), bool)}
    mirrored = {"flip": jnp.zeros((8, 2), bool).at[:, 1].set(True)}
    gradient = jax.jit(jax.grad(lambda p, draws: loss(p, images, labels, jax.random.key(0), draws)[0]))
    first, second = (gradient(params, draws)["encoder"]["resnet_w1d3"] for draws in (plain, mirrored))
    np.testing.assert_array_equal(first["head"]["kernel"][0], second["head"]["kernel"][0])
    assert np.abs(first["head"]["kernel"][1] - second["head"]["kernel"][1]).max() > 1e-6


def test_muon_turns_kernels_and_keeps_their_norms_and_the_whitening(params, images):
    common = {"learning_rate": 0.1, "num_epochs": 5, "warmup_epochs": 0.0, "whitening_epochs": 1, "weight_decay": 1e-3}
    for name, lookahead in (("muon", 0.0), ("sgd", 0.0), ("adamw", 0.7)):
        optimizer = optimizer_of(TrainSettings(optimizer=name, lookahead=lookahead, **common), steps_per_epoch=2)
        state, current = jax.jit(optimizer.init)(params), params
        update = jax.jit(optimizer.update)
        for step in range(6 if lookahead else 3):
            grads = jax.tree.map(jnp.ones_like, current)
            updates, state = update(grads, state, current)
            moved = optax.apply_updates(current, updates)
            trunk, before = (tree["encoder"]["resnet_w1d3"]["trunk"] for tree in (moved, current))
            np.testing.assert_array_equal(trunk["whitening"]["kernel"], before["whitening"]["kernel"])
            still = np.array_equal(trunk["whitening"]["bias"], before["whitening"]["bias"])
            assert still == (step >= 2 and name != "adamw") or not step
            assert np.abs(trunk["conv2_1"] - before["conv2_1"]).max() > 1e-4
            if name == "muon":
                norms = jnp.sqrt(jnp.sum(jnp.square(trunk["conv2_1"]), axis=(1, 2, 3, 4)))
                np.testing.assert_allclose(norms, np.sqrt(48), rtol=1e-5)
            current = moved


def test_lookahead_equals_a_slow_loop(params):
    settings = TrainSettings(optimizer="sgd", learning_rate=0.1, num_epochs=2, warmup_epochs=0.0)
    plain, ahead = (optimizer_of(dataclasses.replace(settings, lookahead=x), 6) for x in (0.0, 0.8))
    start = params["encoder"]["resnet_w1d3"]["head"]
    tree = {"encoder": {"resnet_w1d3": {"head": start}}}
    state, current = ahead.init(tree), tree
    fast_state, fast, slow = plain.init(tree), tree, tree
    for step in range(1, 13):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(step * p), current)
        updates, state = ahead.update(grads, state, current)
        current = optax.apply_updates(current, updates)
        updates, fast_state = plain.update(jax.tree.map(lambda p, step=step: jnp.sin(step * p), fast), fast_state, fast)
        fast = optax.apply_updates(fast, updates)
        if step in (5, 10):
            kept = 0.8 * (step / 12) ** 3
            slow = fast = jax.tree.map(lambda s, f, kept=kept: kept * s + (1 - kept) * f, slow, fast)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), current, fast)


def test_small_images_and_unknown_values_are_refused():
    with pytest.raises(InputError, match="8x8 pixels are too small for resnet: its layers need at least 9x9"):
        dataclasses.replace(SPEC, image_shape=(8, 8, 3))
    with pytest.raises(InputError, match="17x17"):
        dataclasses.replace(SPEC, lanes="resnet:w1,mlcn1:w1")
    for changes, message in (
        ({"label_smoothing": 1.0}, "model.label_smoothing is 1.0; it must be in"),
        ({"norm_group": 0}, "model.norm_group is 0"),
        ({"decoder_gradient": "some"}, "auto, all, none"),
        ({"lane_dropout": 0.1}, "learns to classify without the others"),
    ):
        with pytest.raises(InputError, match=message):
            dataclasses.replace(SPEC, **changes)

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_params import made_params
from PIL import Image

from mlcn_jax.data.batches import Split
from mlcn_jax.nn import capsules, losses, model
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import evaluate, pictures

SPEC = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn1:w1*2", decoder=(6,))


@pytest.fixture
def split(rng):
    return Split(rng.integers(0, 256, (23, 18, 18, 1)).astype(np.uint8), rng.integers(0, 3, 23).astype(np.int32))


@pytest.mark.parametrize("batch_size", [1, 7, 23, 50])
def test_scores_equal_a_slow_count_whatever_the_batch_size(split, batch_size):
    params = made_params(SPEC, 3)
    scores = evaluate.make_evaluator(SPEC, reconstruction_weight=0.5)(params, split, batch_size)
    apply = jax.jit(functools.partial(model.apply_model, SPEC))
    confusion, loss, of_lanes = np.zeros((3, 3), int), 0.0, np.zeros(2)
    for image, label in zip(split.images, split.labels, strict=True):
        pixels, label = jnp.asarray(image[None] / np.float32(255)), jnp.array([label])
        v, reconstruction = apply(params, pixels, label)
        class_lengths = capsules.lengths(v)
        of_lanes += np.argmax(np.square(v[0]), axis=0) == label
        confusion[int(label[0]), int(np.argmax(class_lengths))] += 1
        loss += float(losses.margin_loss(class_lengths, label)[0])
        loss += 0.5 * float(losses.reconstruction_loss(reconstruction, pixels)[0])
    np.testing.assert_array_equal(scores.confusion, confusion)
    np.testing.assert_allclose(scores.loss, loss / 23, rtol=1e-5)
    assert scores.accuracy == pytest.approx(np.trace(confusion) / 23)
    assert scores.lane_accuracies == pytest.approx(of_lanes / 23)
    per_class = [confusion[k, k] / confusion[k].sum() for k in range(3)]
    assert scores.accuracy_per_class == pytest.approx(per_class)


def test_a_class_without_images_has_no_accuracy():
    scores = evaluate.Scores(0.0, np.array([[2, 0], [0, 0]]))
    assert scores.accuracy == 1.0
    assert scores.accuracy_per_class[1] is None


def test_a_lane_that_says_the_same_of_every_image_has_no_spread(split):
    params = made_params(SPEC, 3)
    assert min(evaluate.lane_spreads(SPEC, params, split, 2)) > 0
    for group in params["encoder"].values():  # one pattern of primary capsules, whatever the image, and far out
        group["primary"]["kernel"] *= 0
        group["primary"]["bias"] += 1
        group["capsule_weights"] *= 1e6
    assert max(evaluate.lane_spreads(SPEC, params, split, 2)) < 1e-5
    assert np.abs(evaluate.class_capsules(SPEC, params, split, 2)).max() > 0.1


@pytest.mark.parametrize("margin_loss", ["joint", "per_lane"])
@pytest.mark.parametrize(("num_classes", "num_lanes"), [(3, 2), (100, 32)])
def test_a_perfect_lane_has_spread_one_whatever_the_model(monkeypatch, num_classes, num_lanes, margin_loss):
    """Beside one that is silent, on images that are sorted by class."""
    spec = ModelSpec("mlcn", (18, 18, 1), num_classes, f"mlcn1:w1*{num_lanes}", margin_loss=margin_loss)
    labels = np.repeat(np.arange(num_classes), 1500 // num_classes)
    v = np.zeros((len(labels), num_classes, num_lanes))
    v[np.arange(len(labels)), labels, 1:] = 1.0 if margin_loss == "per_lane" else 1 / np.sqrt(num_lanes)
    monkeypatch.setattr(evaluate, "class_capsules", lambda spec, params, split, size: v[split.labels])
    split = Split(np.zeros(len(labels)), np.arange(len(labels)))
    silent, *others = evaluate.lane_spreads(spec, {}, split, 100)
    assert silent == 0
    np.testing.assert_allclose(others, 1, rtol=0.05)


def test_perfect_lanes_that_classify_alone_and_ones_that_do_not_have_spread_one_beside_each_other(monkeypatch):
    spec = ModelSpec("mlcn", (18, 18, 1), 4, "resnet:w1*2,mlcn1:w1*4")
    labels = np.arange(1500) % 4
    v = np.zeros((len(labels), 4, 6))
    v[np.arange(len(labels)), labels] = np.where(spec.classifies_alone, 1.0, 1 / np.sqrt(4))
    monkeypatch.setattr(evaluate, "class_capsules", lambda spec, params, split, size: v[split.labels])
    split = Split(np.zeros(len(labels)), np.arange(len(labels)))
    np.testing.assert_allclose(evaluate.lane_spreads(spec, {}, split, 100), 1, rtol=0.05)


@pytest.mark.parametrize("num_classes", [3, 30])
def test_pictures_are_drawn(tmp_path, split, num_classes, real_pictures):
    names = [f"class {k}" for k in range(num_classes)]
    scores = evaluate.Scores(0.1, np.eye(num_classes, dtype=int))
    pictures.save_confusion(tmp_path / "confusion.png", scores, names)
    params = made_params(SPEC, 3)
    pictures.save_reconstructions(tmp_path / "reconstructions.png", SPEC, params, split, names)
    for name in ("confusion.png", "reconstructions.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_a_long_evaluation_says_how_far_it_is(rng, monkeypatch, caplog):
    caplog.set_level("INFO", "mlcn_jax")
    split = Split(np.zeros((5, 1, 1, 1), np.uint8), np.zeros(5, np.int32))
    nothing = {name: np.zeros(shape) for name, shape in evaluate.sum_shapes(2, 1).items()}
    evaluate.scores_of(split, 2, lambda batch: nothing)
    assert not caplog.messages
    monkeypatch.setattr(evaluate, "_SECONDS_BETWEEN_REPORTS", -1.0)
    evaluate.scores_of(split, 2, lambda batch: nothing)
    assert caplog.messages == ["scored 2 of 5 images", "scored 4 of 5 images"]

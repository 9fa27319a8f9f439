"""Arguments, splits, batches and augmentation, and real data where it is found."""

import itertools
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation, Batches, augment, draw, draw_per_lane, padded_batches, steps_per_epoch
from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import DataSettings
from mlcn_jax.training.step import make_input

# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fashion-mnist", {}, r"'fashion-mnist'; did you mean fashion_mnist\?; the known ones are mnist, .*folder\."),
        ("zzz", {}, r"'zzz'; the known ones are mnist, [^?]*$"),
        ("digits", {"test_fraction": 1.0}, r"test_fraction is 1\.0; expected at least 0 and less than 1"),
        ("digits", {"test_fraction": -0.1}, r"test_fraction is -0\.1"),
        ("digits", {"test_fraction": float("nan")}, r"test_fraction is nan"),
        ("digits", {"image_size": 32}, r"image_size is 32; expected 0"),
        ("folder", {"image_size": -1}, r"image_size is -1"),
        ("folder", {}, r"'folder' needs --config\.data\.dir"),
        ("digits", {"directory": "."}, r"has no files: leave it out, or .*--config\.data\.name=folder"),
        ("cifar10", {"label_kind": "coarse"}, r"expected 'fine', or, for the dataset 'cifar100', 'coarse'"),
        ("mnist", {"directory": "no/such/folder"}, r"data\.dir=no/such/folder is not an existing"),
    ],
)
def test_bad_arguments(name, options, message):
    with pytest.raises(InputError, match=message):
        datasets.load(name, **options)


# ---------------------------------------------------------------- digits


def test_digits():
    dataset = datasets.load("digits")
    assert dataset.provenance["bytes"] == "embedded"
    assert dataset.train.images.shape[1:] == (28, 28, 1)
    assert len(dataset.train.labels) + len(dataset.test.labels) == 1797
    assert dataset.train.images.max() == 255
    train, test = np.bincount(dataset.train.labels), np.bincount(dataset.test.labels)
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.005)
    np.testing.assert_array_equal(datasets.load("digits").test.images, dataset.test.images)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"pip install 'mlcn_jax\[digits\]'"):
        datasets.load("digits")


# ---------------------------------------------------------------- splits and batches


def numbered(n: int, num_classes: int = 4) -> datasets.Split:
    """A split whose image i has the value i in every pixel."""
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 2, 3, 1)).copy()
    return datasets.Split(images, (np.arange(n) % num_classes).astype(np.int32))


def numbers(images: np.ndarray) -> list[int]:
    return images[:, 0, 0, 0].tolist()


@given(n=st.integers(8, 200), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_validation_split_is_a_stratified_partition(n, fraction, seed):
    split = numbered(n)
    train, validation = datasets.split_validation(split, fraction, seed)
    assert sorted(numbers(train.images) + numbers(validation.images)) == list(range(n))
    for part in (train, validation):
        assert numbers(part.images) == sorted(numbers(part.images))
        np.testing.assert_array_equal(part.labels, np.array(numbers(part.images)) % 4)
        assert set(part.labels.tolist()) == {0, 1, 2, 3}
    for label, total in enumerate(np.bincount(split.labels)):
        held_out = np.sum(validation.labels == label)
        assert held_out == np.clip(round(fraction * total), 1, total - 1)


def test_validation_split_is_drawn_by_its_seed():
    split = numbered(200)
    first, again, other = (numbers(datasets.split_validation(split, 0.25, seed)[1].images) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_validation_split_of_nothing():
    train, validation = datasets.split_validation(numbered(9), 0.0, 0)
    assert (len(train.labels), validation.images.shape) == (9, (0, 2, 3, 1))


@pytest.mark.parametrize("fraction", [1.0, -0.5, 2.0])
def test_validation_fraction_out_of_range(fraction):
    with pytest.raises(InputError, match=rf"validation_fraction is {fraction}; expected at least 0"):
        datasets.split_validation(numbered(9), fraction, 0)


def test_validation_of_a_class_with_one_image():
    with pytest.raises(InputError, match="Class '3' has 1 image"):
        datasets.split_validation(numbered(4 + 3), 0.5, 0)


def test_steps_per_epoch():
    assert [steps_per_epoch(10, batch_size) for batch_size in (1, 3, 5, 6, 10)] == [10, 3, 2, 1, 1]
    for batch_size in (11, 0, -1):
        with pytest.raises(InputError, match=rf"batch size is {batch_size}; it must be 1 to 10"):
            steps_per_epoch(10, batch_size)


def test_a_batch_is_a_function_of_seed_and_step():
    split = numbered(50)
    long_running = Batches(split.images, split.labels, 8, seed=3)
    history = [long_running.at(step) for step in range(20)]
    for step in (19, 0, 7, 6, 13):  # Any order, forth and back over the epochs' borders.
        fresh = Batches(split.images, split.labels, 8, seed=3)
        for images, labels in (fresh.at(step), long_running.at(step)):
            np.testing.assert_array_equal(images, history[step][0])
            np.testing.assert_array_equal(labels, history[step][1])
    other = Batches(split.images, split.labels, 8, seed=4)
    assert any(numbers(other.at(step)[0]) != numbers(history[step][0]) for step in range(6))


def test_every_image_once_an_epoch_in_a_fresh_order_with_its_label():
    split = numbered(40)
    batches = Batches(split.images, split.labels, 8, seed=0)
    epochs = []
    for epoch in range(3):
        parts = [batches.at(epoch * 5 + i) for i in range(5)]
        for images, labels in parts:
            assert images.shape == (8, 2, 3, 1)
            assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
            np.testing.assert_array_equal(labels, np.array(numbers(images)) % 4)
        epochs.append([number for images, _ in parts for number in numbers(images)])
        assert sorted(epochs[-1]) == list(range(40))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(40))


def test_the_incomplete_batch_is_dropped_not_always_the_same_images():
    split = numbered(11)
    batches = Batches(split.images, split.labels, 4, seed=0)
    assert batches.steps_per_epoch == 2
    seen = [{*numbers(batches.at(2 * e)[0]), *numbers(batches.at(2 * e + 1)[0])} for e in range(20)]
    assert all(len(epoch) == 8 for epoch in seen)
    assert set().union(*seen) == set(range(11))
    with pytest.raises(InputError, match="batch size is 12"):
        Batches(split.images, split.labels, 12, seed=0)


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (8, 4), (3, 4), (5, 1), (0, 2)])
def test_padded_batches_cover_everything_once(n, batch_size):
    split = numbered(n)
    seen_images, seen_labels = [], []
    for images, labels, mask in padded_batches(split, batch_size):
        assert images.shape == (batch_size, 2, 3, 1)
        assert (labels.shape, mask.shape) == ((batch_size,), (batch_size,))
        assert (images.dtype, labels.dtype, mask.dtype) == (np.uint8, np.int32, np.float32)
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert mask.any()
        seen_images += numbers(images[mask == 1])
        seen_labels += labels[mask == 1].tolist()
        assert not images[mask == 0].any()
    assert seen_images == list(range(n))
    assert seen_labels == split.labels.tolist()


def test_padded_batches_of_no_size():
    with pytest.raises(InputError, match="batch size is 0"):
        next(padded_batches(numbered(3), 0))


# ---------------------------------------------------------------- augmentation


def shifted(image: np.ndarray, down: int, right: int, mirrored: bool) -> np.ndarray:
    """The image moved and then mirrored, pixel by pixel."""
    height, width, _ = image.shape
    result = np.zeros_like(image)
    for y, x in itertools.product(range(height), range(width)):
        if 0 <= y - down < height and 0 <= x - right < width:
            result[y, width - 1 - x if mirrored else x] = image[y - down, x - right]
    return result


ALL_CHANGES = Augmentation(max_shift=2, reflect=True, flip=True, cutout=2, mirror_lanes=True)


def augmented(seed, images, augmentation):
    return augment(images, draw(jax.random.key(seed), images, augmentation), augmentation)


def test_a_reflected_shift_repeats_the_image_and_cutout_sets_a_square_to_its_mean():
    image = np.arange(25, dtype=np.float32).reshape(1, 5, 5, 1)
    reflected = augment(image, {"shift": np.array([[0, 2]])}, Augmentation(max_shift=2, reflect=True))
    np.testing.assert_array_equal(reflected[0, :, :, 0], np.pad(image[0, :, :, 0], 2, mode="reflect")[:5, 2:7])
    cut = np.asarray(augment(image, {"cutout": np.array([[0, 2]])}, Augmentation(cutout=2)))[0, :, :, 0]
    expected = image[0, :, :, 0].copy()
    expected[:1, 1:3] = image.mean()
    np.testing.assert_array_equal(cut, expected)


def test_cutout_sets_as_many_pixels_as_it_says():
    image = np.arange(81, dtype=np.float32).reshape(1, 9, 9, 1)
    for size in range(1, 6):
        cut = np.asarray(augment(image, {"cutout": np.array([[4, 4]])}, Augmentation(cutout=size)))
        expected, first = image.copy(), 4 - size // 2
        expected[:, first : first + size, first : first + size] = image.mean()
        np.testing.assert_array_equal(cut, expected)


def test_every_lane_sees_an_image_in_a_way_of_its_own_whatever_their_number():
    images = jax.random.uniform(jax.random.key(0), (6, 8, 8, 1))
    keys, mirrored = jax.random.split(jax.random.key(1), 3), np.array([False, True, False])
    three, two = (draw_per_lane(keys[:n], mirrored[:n], images, ALL_CHANGES) for n in (3, 2))
    for name, values in three.items():
        np.testing.assert_array_equal(values[:, :2], two[name])
        assert (values[:, 0] != values[:, 2]).any()
    plain = draw_per_lane(keys, mirrored, images, Augmentation(per_lane=True, mirror_lanes=True))
    np.testing.assert_array_equal(plain["flip"], [[False, True, False]] * 6)


@pytest.mark.parametrize("changes", [{}, {"flip": True}, {"alternate_flips": True}])
def test_lanes_mirror_images_only_where_training_does(changes):
    augmentation = DataSettings(augment_lanes=True, max_shift=1, **changes).augmentation()
    prepare = make_input(ModelSpec("mlcn", (9, 9, 1), 3, "resnet:w1*2"), 0, augmentation)
    draws = prepare(0, np.zeros((4, 9, 9, 1), np.uint8))[2]
    assert draws["shift"].shape == (4, 2, 2)
    assert ("flip" in draws) == bool(changes)
    assert DataSettings(**changes).augmentation().mirror_lanes is False, "lanes that see images alike"


def test_alternating_flips_show_every_image_both_ways_in_two_epochs():
    images = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 1)).astype(np.uint8)
    labels = np.arange(6, dtype=np.int32)
    batches = Batches(images, labels, 3, 0, alternate_flips=True)
    seen = [dict(zip(labels_, images_, strict=True)) for images_, labels_ in map(batches.at, range(4))]
    for label in range(6):
        first, second = (next(part[label] for part in epoch if label in part) for epoch in (seen[:2], seen[2:]))
        np.testing.assert_array_equal(first, second[:, ::-1])
        assert (first == images[label]).all() or (second == images[label]).all()


@pytest.mark.parametrize(("max_shift", "flip"), [(0, False), (0, True), (1, False), (2, True)])
def test_augment_is_one_of_the_allowed_moves_each_about_as_often(max_shift, flip):
    rng = np.random.default_rng(0)
    image = rng.uniform(0.1, 1, (5, 4, 2)).astype(np.float32)
    shifts = range(-max_shift, max_shift + 1)
    moves = list(itertools.product(shifts, shifts, [False, True] if flip else [False]))
    candidates = np.stack([shifted(image, *move) for move in moves])
    repeats = 40 * len(moves)
    images = np.repeat(image[None], repeats, axis=0)
    result = np.asarray(jax.jit(augmented, static_argnums=2)(0, images, Augmentation(max_shift=max_shift, flip=flip)))
    assert result.dtype == np.float32
    equal = (result[:, None] == candidates[None]).all(axis=(2, 3, 4))
    np.testing.assert_array_equal(equal.sum(axis=1), 1)  # Each is exactly one of the allowed moves ...
    counts = equal.sum(axis=0)
    assert counts.min() >= 15  # ... and none of them is rare: 40 are expected.
    assert counts.max() <= 70


def test_augment_is_drawn_by_its_key_and_treats_each_image_by_itself():
    images = jax.random.uniform(jax.random.key(0), (16, 6, 6, 1))
    first, again, other = (np.asarray(augmented(seed, images, ALL_CHANGES)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    blank = images.at[3].set(0)
    changed = np.asarray(augmented(1, blank, ALL_CHANGES)) != first
    assert changed[3].any()
    assert not np.delete(changed, 3, axis=0).any()


# ---------------------------------------------------------------- real files


def real_folder(pattern: str) -> str:
    """The folder of real files in $MLCN_JAX_TEST_DATA; or skips."""
    root = os.environ.get("MLCN_JAX_TEST_DATA")
    found = sorted(Path(root).glob(pattern)) if root else []
    if not found:
        pytest.skip(f"no {pattern} in $MLCN_JAX_TEST_DATA")
    return str(found[0].parent)


def test_real_fashion_mnist():
    dataset = datasets.load("fashion_mnist", directory=real_folder("fashion_mnist/train-images-idx3-ubyte*"))
    assert dataset.provenance["bytes"] == "official"
    assert dataset.train.images.shape == (60000, 28, 28, 1)
    assert dataset.test.images.shape == (10000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), 6000)
    np.testing.assert_array_equal(dataset.train.labels[:4], [9, 0, 0, 3])


def test_real_cifar10():
    dataset = datasets.load("cifar10", directory=real_folder("**/cifar-10-batches-bin"))
    assert dataset.train.images.shape == (50000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), 5000)
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), 1000)
    assert dataset.provenance["bytes"] == "official"
    planes = dataset.train.images[:1000].astype(np.float32)
    # Natural images are smooth: were planes or axes mixed up, neighbours would differ as strangers do.
    assert np.abs(np.diff(planes, axis=2)).mean() < 0.5 * np.abs(planes - planes[:, :, ::-1]).mean()

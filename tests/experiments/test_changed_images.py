"""Changed test images: ranges, places, and pixels that are kept."""

import numpy as np
import pytest

from experiments import changed_images
from experiments.changed_images import CANVAS, CHANGES, SIZE

KINDS = {"rotation": (0.342, 1.0), "shear": (0.2, 1.0), "scaling": (0.0, 1.2)}  # sin(20 degrees)


@pytest.fixture
def images(rng):
    return changed_images.on_canvas(rng.integers(1, 256, (40, SIZE, SIZE, 1), dtype=np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_keeps_to_its_range_and_leaves_the_rest(kind):
    matrices = changed_images.draw_matrices([kind], 2000, np.random.default_rng(0))
    beside, along = np.abs(matrices[:, 1, 0]), np.diagonal(matrices, axis1=1, axis2=2)
    most_beside, most_along = KINDS[kind]
    assert 0.99 * most_beside <= beside.max() <= most_beside + 1e-4
    assert along.max() == pytest.approx(most_along, abs=1e-3)
    determinants = np.linalg.det(matrices)
    if kind == "scaling":
        assert along.min() == pytest.approx(0.8, abs=1e-3)
        assert abs(np.corrcoef(along.T)[0, 1]) < 0.1, "height and width are scaled separately"
    else:
        np.testing.assert_allclose(determinants, 1)


def test_all_of_these_are_drawn_together():
    matrices = changed_images.draw_matrices(["rotation", "shear", "scaling"], 500, np.random.default_rng(0))
    assert np.ptp(np.linalg.det(matrices)) > 0.5
    assert np.abs(matrices[:, 1, 0]).max() > 0.45, "beyond a rotation or a shear alone"


def test_a_pixel_goes_where_its_matrix_says():
    image = np.zeros((1, CANVAS + 1, CANVAS + 1, 1), np.uint8)  # with a pixel in its centre
    image[0, 20 - 5, 20 + 10] = 200
    quarter = np.array([[[0.0, -1.0], [1.0, 0.0]]])
    (row, column, _) = np.argwhere(changed_images.transform(image, quarter)[0])[0]
    assert (row - 20, column - 20) == (-10, -5)
    longer = changed_images.transform(image, np.array([[[1.0, 0.0], [0.0, 1.2]]]))
    assert np.unravel_index(longer.argmax(), longer.shape)[1:3] == (15, 32)


def test_translation_stays_on_the_canvas_and_goes_as_far_as_in_training(images):
    moved = changed_images.translate(images, np.random.default_rng(0))
    corners = np.array([np.argwhere(image[..., 0]).min(axis=0) for image in moved])
    assert (corners.min(), corners.max()) == (0, CANVAS - SIZE)
    for image, before, (row, column) in zip(moved, images, corners, strict=True):
        np.testing.assert_array_equal(image[row : row + SIZE, column : column + SIZE], before[6:34, 6:34])
    whole = np.random.default_rng(0).integers(1, 256, (3, CANVAS, CANVAS, 1), dtype=np.uint8)  # no room to move
    np.testing.assert_array_equal(changed_images.translate(whole, np.random.default_rng(0)), whole)


@pytest.mark.parametrize("side", [2, 4])
def test_shuffled_parts_are_the_same_in_other_places(images, side):
    images = images[:, 6:34, 6:34]
    shuffled = changed_images.shuffle_parts(images, side, np.random.default_rng(0))
    size = SIZE // side

    def parts(image):
        return [image[r : r + size, c : c + size] for r in range(0, SIZE, size) for c in range(0, SIZE, size)]

    for before, after in zip(images, shuffled, strict=True):
        assert sorted(part.tobytes() for part in parts(before)) == sorted(part.tobytes() for part in parts(after))
        assert not any(np.array_equal(*pair) for pair in zip(parts(before), parts(after), strict=True))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_always_the_same(images, name):
    changed = changed_images.change(images, name)
    assert (changed.shape, changed.dtype) == (images.shape, images.dtype)
    np.testing.assert_array_equal(changed, changed_images.change(images, name))
    assert np.array_equal(changed, images) == (name == "none")

"""Test images that a model has not been trained on: moved, rotated, sheared, scaled, or with their parts shuffled.

Images of 28x28 pixels are in the middle of a canvas of 40x40, as in affNIST. Each change is drawn for each image, with
affNIST's ranges: rotation by -20 to 20 degrees, shear by -0.2 to 0.2, and scaling by 0.8 to 1.2, separately for height
and width. Translation here is by up to 6 pixels along each axis, which keeps an unchanged image on its canvas, as in
training, and less where it would cost pixels of the changed one. Pixels are interpolated linearly.

Source: Tieleman 2013, affNIST, https://www.cs.toronto.edu/~tijmen/affNIST/.
"""

import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import affine_transform

Images = UInt8[np.ndarray, "n height width 1"]

SIZE, CANVAS = 28, 40
MARGIN = (CANVAS - SIZE) // 2
DEGREES, SHEAR, SCALES = 20.0, 0.2, (0.8, 1.2)
_AFFINE = ("rotation", "shear", "scaling")
# What is done to the images of a test set: affine changes, translation last, or how many parts a side is cut into.
CHANGES: dict[str, tuple[str, ...] | int] = {
    "none": (),
    "translation": ("translation",),
    "rotation": ("rotation",),
    "shear": ("shear",),
    "scaling": ("scaling",),
    "all of these": (*_AFFINE, "translation"),
    "2x2 parts shuffled": 2,
    "4x4 parts shuffled": 4,
}


def on_canvas(images: Images) -> Images:
    """Images of 28x28 in the middle of black canvases of 40x40."""
    return np.pad(images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))


def change(images: Images, name: str) -> Images:
    """The images, on their canvases, after the change of this name (`CHANGES`), always with the same draws."""
    kinds = CHANGES[name]
    rng = np.random.default_rng(list(CHANGES).index(name))
    if isinstance(kinds, int):
        return on_canvas(shuffle_parts(images[:, MARGIN:-MARGIN, MARGIN:-MARGIN], kinds, rng))
    if affine := [kind for kind in kinds if kind in _AFFINE]:
        images = transform(images, draw_matrices(affine, len(images), rng))
    return translate(images, rng) if "translation" in kinds else images


def draw_matrices(kinds: list[str], count: int, rng: np.random.Generator) -> Float[np.ndarray, "{count} 2 2"]:
    """Matrices that take a pixel's (row, column), counted from the centre, to its new place.

    It is rotated, then sheared, then scaled, each only if `kinds` has it. A shear of s moves it s columns a row.
    """
    angles = np.radians(rng.uniform(-DEGREES, DEGREES, count)) * ("rotation" in kinds)
    shears = rng.uniform(-SHEAR, SHEAR, count) * ("shear" in kinds)
    scales = rng.uniform(*SCALES, (count, 2)) if "scaling" in kinds else np.ones((count, 2))
    ones, zeros = np.ones(count), np.zeros(count)

    def matrix(rows: list[list[np.ndarray]]) -> np.ndarray:
        return np.moveaxis(np.array(rows), -1, 0)

    rotation = matrix([[np.cos(angles), -np.sin(angles)], [np.sin(angles), np.cos(angles)]])
    shear = matrix([[ones, zeros], [shears, ones]])
    return matrix([[scales[:, 0], zeros], [zeros, scales[:, 1]]]) @ shear @ rotation


def transform(images: Images, matrices: Float[np.ndarray, "n 2 2"]) -> Images:
    """Images after affine changes about their centres; what comes from outside is black."""
    centre = (np.array(images.shape[1:3]) - 1) / 2
    changed = np.empty_like(images)
    for i, inverse in enumerate(np.linalg.inv(matrices)):  # from a pixel of the result to where it comes from
        pixels = images[i, :, :, 0].astype(np.float32)
        moved = affine_transform(pixels, inverse, offset=centre - inverse @ centre, order=1)
        changed[i, :, :, 0] = np.round(moved)
    return changed


def translate(images: Images, rng: np.random.Generator) -> Images:
    """Images moved by up to 6 pixels along each axis, and only as far as none that is not black leaves the canvas."""
    moved = np.zeros_like(images)
    for i, image in enumerate(images):
        shift = []
        for axis in (0, 1):
            filled = np.flatnonzero(image.any(axis=(1 - axis, 2)))
            first, last = (filled[0], filled[-1]) if len(filled) else (MARGIN, MARGIN)
            least, most = max(-MARGIN, -first), min(MARGIN, len(image) - 1 - last)
            shift.append(rng.integers(least, most, endpoint=True))
        moved[i] = np.roll(image, shift, axis=(0, 1))
    return moved


def shuffle_parts(images: Images, side: int, rng: np.random.Generator) -> Images:
    """Images cut into `side` x `side` equal parts that change places at random: none stays in its own."""
    count, height, width, channels = images.shape
    parts = images.reshape(count, side, height // side, side, width // side, channels).swapaxes(2, 3)
    parts = parts.reshape(count, side * side, height // side, width // side, channels)
    orders = np.array([_derangement(side * side, rng) for _ in range(count)])
    parts = np.take_along_axis(parts, orders[:, :, None, None, None], axis=1)
    parts = parts.reshape(count, side, side, height // side, width // side, channels)
    return parts.swapaxes(2, 3).reshape(images.shape)


def _derangement(count: int, rng: np.random.Generator) -> np.ndarray:
    while True:
        order = rng.permutation(count)
        if not np.any(order == np.arange(count)):
            return order

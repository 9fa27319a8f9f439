"""Batches as pure functions of (seed, step), augmentation, and pixels."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray, UInt8

from mlcn_jax.errors import InputError

Images = UInt8[np.ndarray, "n height width channels"]
Labels = Int32[np.ndarray, " n"]
_FLIPS = 2**32  # no epoch has this number


@dataclasses.dataclass(frozen=True)
class Split:
    """Images, uint8 [n, height, width, channels], and their labels, int32 [n]."""

    images: Images
    labels: Labels

    def __getitem__(self, indices: np.ndarray | slice) -> "Split":
        """The images and labels at these indices of the first axis, as in NumPy."""
        return Split(self.images[indices], self.labels[indices])


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """The number of full batches in `num_examples`.

    Raises:
      InputError: `batch_size` is below 1 or above `num_examples`.
    """
    if not 1 <= batch_size <= num_examples:
        raise InputError(
            f"the batch size is {batch_size}; it must be 1 to {num_examples}, the number of training images: lower "
            "train.batch_size"
        )
    return num_examples // batch_size


class Batches:
    """Shuffled batches of a training set in memory, each a pure function of (seed, step).

    Every epoch visits the images in a different order and drops the last, incomplete batch. A run resumed at
    any step thus sees the same batches as an uninterrupted one.

    Args:
      images: uint8 [n, height, width, channels].
      labels: int32 [n].
      batch_size: images per batch, at most n.
      seed: not negative.
      alternate_flips: mirrors a random half of the images in even epochs and the other half in odd ones, so that each
        pair of epochs shows every image both ways (Jordan 2024, arXiv 2404.00498, section 3.6).
      soft: a third array of each batch, float32 [n, ways, classes]: a teacher's probabilities for each image as it is
        and, with `alternate_flips`, mirrored; None for none.

    Raises:
      InputError: `batch_size` is below 1 or above n.
    """

    def __init__(
        self,
        images: Images,
        labels: Labels,
        batch_size: int,
        seed: int,
        alternate_flips: bool = False,
        soft: Float32[np.ndarray, "n ways classes"] | None = None,
    ):
        self.steps_per_epoch = steps_per_epoch(len(images), batch_size)
        self._split = Split(images, labels)
        self._batch_size = batch_size
        self._seed = seed
        self._soft = soft
        self._mirrored_first = None
        if alternate_flips:
            self._mirrored_first = np.random.default_rng((seed, _FLIPS)).integers(0, 2, len(images)).astype(bool)
        self._order = (-1, np.empty(0, np.int64))  # The epoch last requested, and the order of its images.

    def at(self, step: int) -> tuple[np.ndarray, ...]:
        """The batch of `step` (0, 1, ... over all epochs): uint8 [b, height, width, channels], int32 [b].

        With `soft`, also float32 [b, classes].
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._order = (epoch, rng.permutation(len(self._split.labels)))
        start = position * self._batch_size
        indices = self._order[1][start : start + self._batch_size]
        batch = self._split[indices]
        images, mirrored = batch.images, np.zeros(len(indices), bool)
        if self._mirrored_first is not None:
            mirrored = self._mirrored_first[indices] ^ bool(epoch % 2)
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        soft = () if self._soft is None else (self._soft[indices, mirrored.astype(int)],)
        return images, batch.labels, *soft


def padded_batches(split: Split, batch_size: int) -> Iterator[tuple[Images, Labels, Float32[np.ndarray, " b"]]]:
    """Yields every image once, in order, in batches of one shape: images, labels and a mask.

    The mask is 1 for images and 0 for padding; the last batch is padded with zeros.

    Raises:
      InputError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; it must be 1 or more")
    for start in range(0, len(split.labels), batch_size):
        batch = split[start : start + batch_size]
        count = len(batch.labels)
        mask = (np.arange(batch_size) < count).astype(np.float32)
        padding = (0, batch_size - count)
        images = np.pad(batch.images, (padding, (0, 0), (0, 0), (0, 0)))
        yield images, np.pad(batch.labels, padding), mask


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random changes of training images.

    Attributes:
      max_shift: each image is moved by -max_shift to max_shift pixels along each axis; 0 does not shift.
      reflect: fills the area uncovered by a shift with the reflected image instead of zeros.
      flip: mirrors each image left to right with probability 1/2.
      cutout: height and width of a square at a random place, cut at the borders, that is set to the image's mean; 0
        for none (DeVries and Taylor 2017, arXiv 1708.04552).
      per_lane: each lane augments the image differently.
      size: height and width in pixels to which lanes that classify alone see images resized; 0 leaves them as they are.
      mirror_lanes: with `per_lane`, every second lane (or odd seed) sees the image mirrored.
    """

    max_shift: int = 0
    reflect: bool = False
    flip: bool = False
    cutout: int = 0
    per_lane: bool = False
    size: int = 0
    mirror_lanes: bool = False


Draws = dict[str, Array]  # what was drawn for each image, [batch, ...], by kind of change


def draw(key: PRNGKeyArray, images: Float[Array, "b height width channels"], augmentation: Augmentation) -> Draws:
    """Draws how `augment` changes each image; derive the key from (seed, step)."""
    batch, height, width, _ = images.shape
    shift_key, flip_key = jax.random.split(key)
    draws: Draws = {}
    if augmentation.max_shift:
        draws["shift"] = jax.random.randint(shift_key, (batch, 2), 0, 2 * augmentation.max_shift + 1)
    if augmentation.flip:
        draws["flip"] = jax.random.bernoulli(flip_key, shape=(batch, 1, 1, 1))[:, 0, 0, 0]
    if augmentation.cutout:
        sizes = jnp.array([[height, width]])
        draws["cutout"] = jax.random.randint(jax.random.fold_in(key, 2), (batch, 2), jnp.zeros_like(sizes), sizes)
    return draws


def draw_per_lane(
    keys: PRNGKeyArray,
    mirrored: Bool[Array, " lanes"],
    images: Float[Array, "b height width channels"],
    augmentation: Augmentation,
) -> Draws:
    """As `draw`, for each lane: arrays [batch, lanes, ...].

    Args:
      keys: random keys of the lanes, [lanes].
      mirrored: lanes that see the images mirrored, if the augmentation's `mirror_lanes` is true.
      images, augmentation: as for `draw`.
    """
    draws = jax.vmap(lambda key: draw(key, images, augmentation), out_axes=1)(keys)
    if augmentation.mirror_lanes:
        mirrored = jnp.broadcast_to(mirrored[None], (len(images), len(mirrored)))
        draws["flip"] = mirrored ^ draws["flip"] if "flip" in draws else mirrored
    return draws


def augment(
    images: Float[Array, "b height width channels"], draws: Draws, augmentation: Augmentation
) -> Float[Array, "b height width channels"]:
    """Images changed as drawn: shifted, mirrored, then cut out; on device and under `jit` (`augmentation` static).

    Args:
      images: pixels in [0, 1].
      draws: from `draw`, or one lane's of `draw_per_lane`.
      augmentation: the one used to draw them.
    """
    _, height, width, channels = images.shape
    if "shift" in draws:
        margin = (augmentation.max_shift, augmentation.max_shift)
        mode = "reflect" if augmentation.reflect else "constant"
        padded = jnp.pad(images, ((0, 0), margin, margin, (0, 0)), mode=mode)

        def crop(image: Float[Array, "..."], corner: Int32[Array, " 2"]) -> Float[Array, "..."]:
            return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

        images = jax.vmap(crop)(padded, draws["shift"])
    if "flip" in draws:
        images = jnp.where(draws["flip"][:, None, None, None], images[:, :, ::-1], images)
    if "cutout" in draws:
        corners = draws["cutout"] - augmentation.cutout // 2
        rows, columns = (jnp.arange(size)[None] - corners[:, i, None] for i, size in enumerate((height, width)))
        rows, columns = ((inside >= 0) & (inside < augmentation.cutout) for inside in (rows, columns))
        square = (rows[:, :, None] & columns[:, None])[..., None]
        images = jnp.where(square, jnp.mean(images, axis=(1, 2), keepdims=True), images)
    return images


def resize(images: Float[Array, "b height width channels"], size: int) -> Float[Array, "b size size channels"]:
    """Images resized linearly, with antialiasing; as they are if `size` is 0 or theirs."""
    batch, height, width, channels = images.shape
    if size in (0, height) and height == width:
        return images
    return jax.image.resize(images, (batch, size or height, size or width, channels), "linear")


def to_pixels(images: jax.Array) -> jax.Array:
    """uint8 pixels as float32 in [0, 1]."""
    return images.astype(jnp.float32) / 255.0

"""Batches as pure functions of (seed, step), augmentation, and pixels."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray

from mlcn_jax.data.datasets import Images, Labels, Split
from mlcn_jax.errors import InputError


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """The number of full batches in `num_examples`.

    Raises:
      InputError: `batch_size` is below 1 or above `num_examples`.
    """
    if not 1 <= batch_size <= num_examples:
        raise InputError(f"The batch size is {batch_size}; it must be 1 to {num_examples}, the training set's size.")
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

    Raises:
      InputError: `batch_size` is below 1 or above n.
    """

    def __init__(self, images: Images, labels: Labels, batch_size: int, seed: int):
        self.steps_per_epoch = steps_per_epoch(len(images), batch_size)
        self._split = Split(images, labels)
        self._batch_size = batch_size
        self._seed = seed
        self._order = (-1, np.empty(0, np.int64))  # The epoch last requested, and the order of its images.

    def at(self, step: int) -> tuple[Images, Labels]:
        """The batch of `step` (0, 1, ... over all epochs): uint8 [b, height, width, channels], int32 [b]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._order = (epoch, rng.permutation(len(self._split.labels)))
        start = position * self._batch_size
        batch = self._split[self._order[1][start : start + self._batch_size]]
        return batch.images, batch.labels


def padded_batches(split: Split, batch_size: int) -> Iterator[tuple[Images, Labels, Float32[np.ndarray, " b"]]]:
    """Yields every image once, in order, in batches of one shape: images, labels and a mask.

    The mask is 1 for images and 0 for padding; the last batch is padded with zeros.

    Raises:
      InputError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise InputError(f"The batch size is {batch_size}; it must be at least 1.")
    for start in range(0, len(split.labels), batch_size):
        batch = split[start : start + batch_size]
        count = len(batch.labels)
        mask = (np.arange(batch_size) < count).astype(np.float32)
        padding = (0, batch_size - count)
        images = np.pad(batch.images, (padding, (0, 0), (0, 0), (0, 0)))
        yield images, np.pad(batch.labels, padding), mask


def augment(
    key: PRNGKeyArray, images: Float[Array, "b height width channels"], *, max_shift: int, flip: bool
) -> Float[Array, "b height width channels"]:
    """Shifts and flips each image at random, on device and under `jit` (`max_shift` and `flip` static).

    Args:
      key: the randomness; derive it from (seed, step).
      images: the batch.
      max_shift: each image is moved by -max_shift to max_shift pixels along each axis and filled with zeros. Not
        negative; 0 does not shift.
      flip: mirrors each image left to right with probability 1/2.
    """
    batch, height, width, channels = images.shape
    shift_key, flip_key = jax.random.split(key)
    if max_shift:
        margin = (max_shift, max_shift)
        padded = jnp.pad(images, ((0, 0), margin, margin, (0, 0)))
        corners = jax.random.randint(shift_key, (batch, 2), 0, 2 * max_shift + 1)

        def crop(image: Float[Array, "..."], corner: Int32[Array, " 2"]) -> Float[Array, "..."]:
            return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

        images = jax.vmap(crop)(padded, corners)
    if flip:
        mirrored = jax.random.bernoulli(flip_key, shape=(batch, 1, 1, 1))
        images = jnp.where(mirrored, images[:, :, ::-1], images)
    return images


def to_pixels(images: jax.Array) -> jax.Array:
    """uint8 pixels as float32 in [0, 1]."""
    return images.astype(jnp.float32) / 255.0

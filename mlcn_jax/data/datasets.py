"""Named datasets and folders of images, as arrays in memory.

A dataset is one function and one line in `DATASETS`. Images are uint8 [n, height, width, channels], labels
are int32 [n]; who uses them scales pixels to [0, 1].
"""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mlcn_jax.data import sources
from mlcn_jax.data.batches import Split
from mlcn_jax.data.folder import read_folder
from mlcn_jax.errors import InputError, did_you_mean

_log = logging.getLogger(__name__)

LABEL_KINDS = ("fine", "coarse")
TEST_FRACTION = 0.2
_HELD_OUT_SEED = 0  # A held-out test set is the same in every run, whatever the run's seed.
_DIGITS_TEST_FRACTION = 0.2
_DIGITS_SIZE = 28
_FOLDER_SIZE = 32
_RANKING_IMAGES = 5_000


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A training set, a test set, and the names of the classes, in the order of the labels.

    `provenance` is for `summary.json`: `bytes` is "official", "not official", "embedded" or "own"; `note` is
    a sentence with details.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    provenance: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of `load`."""

    name: str
    directory: str
    cache_dir: str
    label_kind: str
    image_size: int
    test_fraction: float


def load(
    name: str,
    *,
    directory: str = "",
    cache_dir: str = "",
    label_kind: str = LABEL_KINDS[0],
    image_size: int = 0,
    test_fraction: float = TEST_FRACTION,
) -> Dataset:
    """Loads an entire dataset into memory and checks it.

    Args:
      name: a key of `DATASETS`.
      directory: folder with the files of the dataset; if empty, uses the cache and downloads what it lacks. For
        `folder`: one with a folder of pictures per class, or with `train` and `test` of that form.
      cache_dir: folder for downloads; if empty, `$MLCN_JAX_CACHE`, else `~/.cache/mlcn_jax`.
      label_kind: "fine" (100 classes) or "coarse" (20); for `cifar100` only.
      image_size: height and width to resize to, in pixels; 0 means 32; for `folder` only.
      test_fraction: fraction of each class held out as the test set if a `folder` has none; in [0, 1).

    Raises:
      InputError: an argument or a file cannot be used; the message says how to fix it.
    """
    if name not in DATASETS:
        meant = did_you_mean(name, DATASETS)
        raise InputError(f"Unknown dataset {name!r}{meant}; the known ones are {', '.join(DATASETS)}.")
    if directory and not Path(directory).expanduser().is_dir():
        raise InputError(
            f"data.dir={directory} is not an existing folder: give --config.data.dir=FOLDER or, if a command takes no "
            "configuration, --data_dir=FOLDER."
        )
    if directory and name == "digits":
        raise InputError(
            f"data.dir={directory} is given with the dataset 'digits', which comes with scikit-learn and has no files: "
            "leave it out, or train on images of your own with --config.data.name=folder."
        )
    check_settings(name, label_kind=label_kind, image_size=image_size, test_fraction=test_fraction)
    dataset = DATASETS[name](_Request(name, directory, cache_dir, label_kind, image_size, test_fraction))
    _check(dataset)
    return dataset


def check_settings(name: str, *, label_kind: str, image_size: int, test_fraction: float) -> None:
    """Raises InputError if a dataset cannot have these settings, which are those of `load`."""
    if label_kind not in LABEL_KINDS or (label_kind != LABEL_KINDS[0] and name != "cifar100"):
        raise InputError(f"label_kind is {label_kind!r}; expected 'fine', or, for the dataset 'cifar100', 'coarse'.")
    if image_size < 0 or (image_size and name != "folder"):
        raise InputError(
            f"data.image_size is {image_size}; expected 0, or, for the dataset 'folder', a number of pixels."
        )
    _check_fraction("data.test_fraction", test_fraction)
    if test_fraction != TEST_FRACTION and name != "folder":
        raise InputError(f"data.test_fraction is {test_fraction}; {name} has test images: leave it at {TEST_FRACTION}.")


def _check(dataset: Dataset) -> None:
    num_classes = len(dataset.class_names)
    for part, split in (("training", dataset.train), ("test", dataset.test)):
        images, labels = split.images, split.labels
        what = f"{dataset.name}: the {part} set"
        if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype != np.int32 or labels.ndim != 1:
            raise TypeError(f"{what} is {images.dtype}{images.shape}, {labels.dtype}{labels.shape}")
        if len(images) != len(labels):
            raise InputError(f"{what} has {len(images)} images but {len(labels)} labels; were files mixed up?")
        if not len(images):
            raise InputError(f"{what} has no images.")
        wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
        if wrong.size:
            raise InputError(
                f"{what} has {wrong.size} labels out of range: the first, at position {wrong[0]}, is "
                f"{labels[wrong[0]]}; expected 0 to {num_classes - 1}. Do they belong to another dataset?"
            )
    sizes = dataset.train.images.shape[1:], dataset.test.images.shape[1:]
    if sizes[0] != sizes[1]:
        raise InputError(f"{dataset.name}: training images are {sizes[0]}, but test images {sizes[1]}.")


def _idx(request: _Request, class_names: tuple[str, ...]) -> Dataset:
    contents, provenance = sources.read_files(request.name, request.directory, request.cache_dir)

    def parse(file: str, rank: int) -> np.ndarray:
        return sources.parse_idx(contents[file], f"{file} in {request.directory}", rank)

    def read(part: str) -> Split:
        images = parse(f"{part}-images-idx3-ubyte", rank=3)[..., np.newaxis]
        return Split(images, parse(f"{part}-labels-idx1-ubyte", rank=1).astype(np.int32))

    return Dataset(request.name, read("train"), read("t10k"), class_names, provenance)


def _cifar(request: _Request, class_names: tuple[str, ...], label_bytes: int, label_index: int) -> Dataset:
    contents, provenance = sources.read_files(request.name, request.directory, request.cache_dir)
    *train, test = (
        sources.parse_cifar(contents[file], f"{file} in {request.directory}", label_bytes, label_index)
        for file in sources.SOURCES[request.name].files
    )

    def join(parts: list[tuple[np.ndarray, np.ndarray]]) -> Split:
        images, labels = zip(*parts, strict=True)
        # Contiguous, so that a batch is copied to the device as it is.
        return Split(np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels).astype(np.int32))

    return Dataset(request.name, join(train), join([test]), class_names, provenance)


def _cifar100(request: _Request) -> Dataset:
    if request.label_kind == "coarse":
        return _cifar(request, sources.CIFAR100_COARSE, label_bytes=2, label_index=0)
    return _cifar(request, sources.CIFAR100_FINE, label_bytes=2, label_index=1)


def _digits(request: _Request) -> Dataset:
    try:
        from sklearn import datasets  # Slow to import, and needed only here.
    except ImportError as error:
        raise InputError("'digits' comes with scikit-learn: pip install 'mlcn_jax[digits]'") from error
    bunch = datasets.load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    size = (_DIGITS_SIZE, _DIGITS_SIZE)
    images = [np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in pixels]
    everything = Split(np.stack(images)[..., np.newaxis], bunch.target.astype(np.int32))
    train, test = _hold_out(everything, _DIGITS_TEST_FRACTION, _HELD_OUT_SEED, sources.DIGITS)
    note = f"{len(images)} images from scikit-learn, resized; a fixed fifth of each class is the test set."
    return Dataset(request.name, train, test, sources.DIGITS, {"bytes": "embedded", "note": note})


def _folder(request: _Request) -> Dataset:
    if not request.directory:
        raise InputError("'folder' needs --config.data.dir=FOLDER, with a folder of images per class.")
    root = Path(request.directory).expanduser()
    images, labels, num_train, class_names = read_folder(root, request.image_size or _FOLDER_SIZE)
    everything = Split(images, labels)
    if num_train is not None:
        if request.test_fraction not in (0, TEST_FRACTION):
            _log.warning("data.test_fraction does nothing, because %s has a test folder", root)
        train, test = everything[:num_train], everything[num_train:]
        note = f"Images of {root}, with a test set of its own."
    elif request.test_fraction:
        train, test = _hold_out(everything, request.test_fraction, _HELD_OUT_SEED, class_names)
        note = f"Images of {root}; a fixed {request.test_fraction:.0%} of each class is the test set."
    else:
        raise InputError(f"{root} has no test folder, and test_fraction is 0: add one, or raise test_fraction.")
    return Dataset(request.name, train, test, class_names, {"bytes": "own", "note": note})


DATASETS: dict[str, Callable[[_Request], Dataset]] = {
    "mnist": lambda request: _idx(request, sources.DIGITS),
    "fashion_mnist": lambda request: _idx(request, sources.FASHION_MNIST),
    "cifar10": lambda request: _cifar(request, sources.CIFAR10, label_bytes=1, label_index=0),
    "cifar100": _cifar100,
    "digits": _digits,
    "folder": _folder,
}


# Height, width and channels of the images, and the number of classes, of datasets that need not be read for this.
SHAPES: dict[str, tuple[tuple[int, int, int], int]] = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "digits": ((28, 28, 1), 10),
}


def split_validation(train: Split, fraction: float, seed: int, class_names: Sequence[str] = ()) -> tuple[Split, Split]:
    """Splits off a validation set: `fraction` of each class, at least one image; `seed` selects them.

    Args:
      train: the training set.
      fraction: in [0, 1); 0 gives an empty validation set.
      seed: the same seed gives the same split.
      class_names: what an error calls the classes; their numbers if empty.

    Returns:
      The rest of the training set, and the validation set.

    Raises:
      InputError: `fraction` is out of range, or a class has a single image.
    """
    _check_fraction("data.validation_fraction", fraction)
    if fraction == 0:
        return train, train[:0]
    names = class_names or [str(label) for label in range(int(train.labels.max()) + 1)]
    return _hold_out(train, fraction, seed, names)


def ranking_images(train: Split, validation: Split) -> tuple[Split, str]:
    """The images on which parts of a trained model are compared, and the split they are from.

    The "validation" images, or if none were held out, 5,000 "training" images, always the same ones.
    """
    if len(validation.labels):
        return validation, "validation"
    drawn = np.random.default_rng(0).permutation(len(train.labels))[:_RANKING_IMAGES]
    return train[np.sort(drawn)], "training"


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise InputError(f"{name} is {fraction}; expected at least 0 and less than 1.")


def _hold_out(split: Split, fraction: float, seed: int, class_names: Sequence[str]) -> tuple[Split, Split]:
    """Splits into (kept, held out), class by class, with at least one image of each class in both."""
    rng = np.random.default_rng(seed)
    held_out = np.zeros(len(split.labels), bool)
    for label in np.unique(split.labels):
        members = np.flatnonzero(split.labels == label)
        if len(members) < 2:
            raise InputError(
                f"Class {class_names[label]!r} has 1 image; at least 2 are needed to hold one out. "
                "Add images, or remove the class."
            )
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        held_out[rng.permutation(members)[:count]] = True
    return split[~held_out], split[held_out]


def digest(split: Split) -> str:
    """SHA-256 of the images and labels, 16 hexadecimal digits."""
    content = hashlib.sha256(np.ascontiguousarray(split.images).data)
    content.update(np.ascontiguousarray(split.labels).data)
    return content.hexdigest()[:16]

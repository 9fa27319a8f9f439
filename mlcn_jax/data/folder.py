"""Folders of pictures, one folder per class, as arrays."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8
from PIL import Image
from tqdm import tqdm

from mlcn_jax import host
from mlcn_jax.data.images import SUFFIXES, upright
from mlcn_jax.errors import InputError

_log = logging.getLogger(__name__)


def read_folder(
    root: Path, size: int
) -> tuple[UInt8[np.ndarray, "n {size} {size} channels"], Int32[np.ndarray, " n"], int | None, tuple[str, ...]]:
    """Reads `root/CLASS/*`, or `root/train/CLASS/*` followed by `root/test/CLASS/*`.

    Images are turned upright according to their EXIF orientation and resized, without keeping their proportions.
    Hidden files and folders are ignored.

    Args:
      root: an existing folder.
      size: height and width of the result, in pixels.

    Returns:
      Images, with one channel if all are grayscale, else three; labels; the number of training images, which come
      first (None if there is no test set); and class names, sorted.

    Raises:
      InputError: fewer than two classes, a class without images, images that cannot be read, or a test class
        that the training set lacks.
    """
    # A class may be called "train": the training set contains folders, a class contains images.
    train_root = root / "train" if _folders(root / "train") else root
    test_root = root / "test"
    class_names = tuple(folder.name for folder in _folders(train_root))
    if len(class_names) < 2:
        raise InputError(
            f"{train_root} has too few class folders ({', '.join(class_names) or 'none'}); "
            "expected at least 2 with images in them, such as FOLDER/cat/1.png and FOLDER/dog/1.png."
            + ("" if train_root == root else " If train is a class, move the folders in it away.")
        )
    if wrong := [name for name in class_names if any("\ud800" <= c <= "\udfff" for c in name)]:
        raise InputError(f"{train_root} has the class folder {wrong[0]!r}, whose name is not UTF-8: rename it.")
    train = _list_images(train_root, class_names)
    if train_root != root:
        _check_test(root, test_root)
    test = _list_images(test_root, class_names) if train_root != root and _folders(test_root) else []
    count = len(train + test)
    too_large = InputError(
        f"the {count:,} images of {root} at {size} pixels do not fit this machine's memory: give a smaller "
        "--config.data.image_size, or fewer images."
    )
    if 2 * count * size**2 > host.machine_memory_bytes():  # where Linux would kill the process
        raise too_large
    try:
        images = _read_images([path for path, _ in train + test], size)
    except (MemoryError, OverflowError) as error:  # the latter above 2**31 pixels
        raise too_large from error
    labels = np.array([label for _, label in train + test], np.int32)
    return images, labels, len(train) if test else None, class_names


def _folders(root: Path) -> list[Path]:
    """The folders in `root`, sorted by name; none if it is not a folder."""
    paths = root.iterdir() if root.is_dir() else ()
    return sorted(path for path in paths if path.is_dir() and not path.name.startswith("."))


def _check_test(root: Path, test_root: Path) -> None:
    """Refuses test images that would not be seen, and names what else is beside the training images."""
    inside = test_root.iterdir() if test_root.is_dir() and not _folders(test_root) else ()
    if any(path.suffix.lower() in SUFFIXES and not path.name.startswith(".") for path in inside):
        raise InputError(
            f"{test_root} has images but no class folders: expected {test_root}/CLASS/1.png, as in {root / 'train'}. "
            "Without them, move it away, and a fixed part of the training images is the test set."
        )
    if others := [path.name for path in _folders(root) if path.name not in ("train", "test")]:
        _log.warning("%s has other folders beside train, whose images are not used: %s", root, ", ".join(others))


def _list_images(root: Path, class_names: Sequence[str]) -> list[tuple[Path, int]]:
    """Path and label of every image under `root`."""
    found = []
    for folder in _folders(root):
        if folder.name not in class_names:
            raise InputError(f"{folder} is not a class of the training set; its classes are {', '.join(class_names)}.")
        visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        paths = [path for path in visible if path.suffix.lower() in SUFFIXES]
        if not paths:
            raise InputError(f"{folder} has no images; expected files ending in {', '.join(SUFFIXES)}.")
        if others := [path.name for path in visible if path.suffix.lower() not in SUFFIXES and path.is_file()]:
            told = "%s: %d of its files are of other kinds and not used, such as %s"
            _log.warning(told, folder, len(others), others[0])
        if inside := _folders(folder):
            _log.warning("%s has folders inside, such as %s, whose images are not used", folder, inside[0].name)
        found += [(path, class_names.index(folder.name)) for path in paths]
    return found


def _read_images(paths: Sequence[Path], size: int) -> UInt8[np.ndarray, "n {size} {size} channels"]:
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda path: _read_image(path, size), paths)
        images = list(tqdm(results, desc="reading images", total=len(paths), disable=None))
    refused = [f"{path}: {image}" for path, image in zip(paths, images, strict=True) if isinstance(image, str)]
    if refused:
        shown = "\n  ".join(refused[:3]) + ("\n  ..." if len(refused) > 3 else "")
        raise InputError(
            f"{len(refused)} of {len(paths)} images cannot be used; make them readable, repair or remove them (a lack "
            "of memory can look like damage):"
            f"\n  {shown}"
        )
    arrays = [image for image in images if not isinstance(image, str)]
    channels = max(image.shape[-1] for image in arrays)
    return np.stack([np.broadcast_to(image, (size, size, channels)) for image in arrays])


def _read_image(path: Path, size: int) -> UInt8[np.ndarray, "{size} {size} channels"] | str:
    """One image, of 1 or 3 channels, or the reason why it cannot be used."""
    try:
        image = upright(path)
    except InputError as error:
        return str(error)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).reshape(size, size, -1)

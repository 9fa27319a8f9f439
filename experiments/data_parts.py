"""The images that a list of runs shares: all of a dataset, or a fixed part of each class, written to files."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from mlcn_jax.data import datasets, sources
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json, write_json
from mlcn_jax.settings import DataSettings

# What to call training sets that are known, by `data.digest`, and yet not the official bytes; "" if made from these.
_KNOWN_COPIES = {
    "29f8e3101e0cb417": "JPEG copy",
    "b8495bfcae8eb75a": "",  # Fashion-MNIST on canvases of 40x40 (`pose.py`)
}


def prepare(settings: DataSettings, folder: Path, num_train: int, num_test: int) -> tuple[str, dict[str, Any]]:
    """The folder with the files of the part, and what is to be told of the images.

    Args:
      settings: those of the whole dataset: MNIST's kind or CIFAR-10.
      folder: where the part and the facts are kept, for all runs of a workdir.
      num_train, num_test: images in the part; 0 takes all.

    Raises:
      InputError: the images cannot be used, or are not those that `folder` was prepared from.
    """
    dataset = settings.load()
    facts = {
        "name": dataset.name,
        "copy": _copy(dataset),
        **dataset.provenance,
        "digest": datasets.digest(dataset.train),
        "all_train_images": len(dataset.train.labels),
        "all_test_images": len(dataset.test.labels),
    }
    if facts["bytes"] == "own":
        del facts["note"]  # it names the folder
    train, test = _part(dataset.train, num_train), _part(dataset.test, num_test)
    facts |= {"train_images": len(train.labels), "test_images": len(test.labels)}
    path = folder / f"{dataset.name}.json"
    if path.exists() and (before := read_json(path)) != facts:
        raise InputError(
            f"the runs in {folder.parent} were made with other images of {dataset.name}:\n"
            + "\n".join(differences(before, facts))
            + "\ngive the folder with the same files, or another --workdir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    directory = settings.dir
    if num_train or num_test:
        directory = str(folder / dataset.name)
        write_files(dataset.name, Path(directory), train, test)
    write_json(path, facts)
    return directory, facts


def _copy(dataset: datasets.Dataset) -> str:
    if dataset.provenance["bytes"] in ("official", "own"):
        return ""
    return _KNOWN_COPIES.get(datasets.digest(dataset.train), "not the official bytes")


def _part(split: datasets.Split, num_images: int) -> datasets.Split:
    if not num_images or num_images >= len(split.labels):
        return split
    return datasets.split_validation(split, num_images / len(split.labels), seed=0)[1]


def write_files(name: str, folder: Path, train: datasets.Split, test: datasets.Split) -> None:
    """Writes images in the format of the dataset's official files."""
    folder.mkdir(exist_ok=True)
    if name != "cifar10":
        for part, split in (("train", train), ("t10k", test)):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx(split.images[..., 0]))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(_idx(split.labels))
        return
    *train_files, test_file = sources.SOURCES[name].files
    batches = np.array_split(np.arange(len(train.labels)), len(train_files))
    for file, indices in zip(train_files, batches, strict=True):
        (folder / file).write_bytes(_cifar(train[indices]))
    (folder / test_file).write_bytes(_cifar(test))


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _cifar(split: datasets.Split) -> bytes:
    planes = split.images.transpose(0, 3, 1, 2).reshape(len(split.labels), -1)
    return np.concatenate([split.labels[:, np.newaxis].astype(np.uint8), planes], axis=1).tobytes()

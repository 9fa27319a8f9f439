"""Scores of a trained workdir on its test set, or on other images of the same classes."""

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.batches import Images, Split
from mlcn_jax.data.datasets import Dataset, digest, split_validation
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json
from mlcn_jax.nn.model import class_lengths
from mlcn_jax.settings import DataSettings
from mlcn_jax.training.evaluate import class_capsules, lane_spreads, make_evaluator
from mlcn_jax.training.pictures import write_pictures
from mlcn_jax.training.session import with_flips
from mlcn_jax.training.trained import Trained, load_trained

_log = logging.getLogger(__name__)
_TOP = 5  # classes of `test_top5_accuracy`, reported for models with more than twice as many classes


def evaluate_workdir(
    config: RunConfig, workdir: Path, pictures: Path | None = None, *, all_images: bool = False
) -> dict[str, Any]:
    """Scores the best checkpoint of a workdir on the test set of `config`, and draws the pictures again.

    Args:
      config: names the images, which need not be those that the model was trained on. Those of a folder are resized to
        the model's size.
      workdir: the model's workdir.
      pictures: folder for the pictures; None is the workdir. If it cannot be written to, no pictures are drawn and a
        warning is logged.
      all_images: whether to score all images of `config`, including those for training.

    Raises:
      InputError: the workdir does not hold a trained model, or the images do not fit it.
    """
    _log.info("loading %s, and the images: %s", workdir, config.data.name)
    trained = load_trained(workdir)
    data = dataclasses.replace(config.data, image_size=_image_size(config.data, trained))
    dataset = fitted(data.load(), trained, workdir)
    _check_unseen(dataset, config, workdir, all_images)
    if all_images:
        dataset = _all_as_test_set(dataset)
    folder = pictures or workdir
    reason = "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"
    evaluator = make_evaluator(trained.spec, config.train.reconstruction_weight)
    _log.info("scoring %s images", f"{len(dataset.test.labels):,}")
    scores = evaluator(trained.params, dataset.test, config.train.part_size)
    if not reason:
        _log.info("drawing confusion.png and reconstructions.png")
        try:
            write_pictures(folder, trained.spec, trained.params, dataset, scores)
        except OSError as error:
            reason = str(error)
    if reason:  # the scores are useful without them
        _log.warning("pictures are not drawn: %s", reason)
    return {
        **scores.to_dict(dataset.class_names),
        **with_flips(config.data, lambda: evaluator(trained.params, dataset.test, config.train.part_size, flips=True)),
        **_top_accuracy(trained, dataset.test, config.train.part_size),
        "lane_spreads": lane_spreads(trained.spec, trained.params, dataset.test, config.train.part_size),
        "step": trained.step,
        "images": len(dataset.test.labels),
        "data": {"name": dataset.name, **dataset.provenance},
    }


def fitted(dataset: Dataset, trained: Trained, workdir: Path) -> Dataset:
    """The images as a model takes them, gray or RGB, with the labels in the order of its classes.

    Raises:
      InputError: they are of another size or of other classes.
    """
    expected, shape = trained.spec.image_shape, dataset.test.images.shape[1:]
    if shape[:2] != expected[:2]:
        others = "give a folder of images (--config.data.name=folder), which are resized, or another dataset"
        raise InputError(
            f"the model in {workdir} takes images of {expected[0]}x{expected[1]} pixels, but those of {dataset.name} "
            f"have {shape[0]}x{shape[1]}: "
            + ("leave out --config.data.image_size" if dataset.name == "folder" else others)
        )
    differences = [
        f"{who}: {_listed(names)}"
        for who, names in (
            ("only the model has", [name for name in trained.class_names if name not in dataset.class_names]),
            (f"only {dataset.name} has", [name for name in dataset.class_names if name not in trained.class_names]),
        )
        if names
    ]
    if differences:
        raise InputError(
            f"the classes of {dataset.name} are not those of the model in {workdir} ({'; '.join(differences)}): name "
            "the folders of the images after the model's classes, or give another dataset"
        )
    order = np.array([trained.class_names.index(name) for name in dataset.class_names], np.int32)
    train, test = (
        Split(_with_channels(split.images, expected[2]), order[split.labels]) for split in (dataset.train, dataset.test)
    )
    return dataclasses.replace(dataset, train=train, test=test, class_names=trained.class_names)


def top_accuracy(lengths: Float[np.ndarray, "n classes"], labels: Int[np.ndarray, " n"], top: int) -> float:
    """Fraction of images whose class is among the `top` longest capsules; ties go to the first classes."""
    longest = np.argsort(-lengths, axis=1, kind="stable")[:, :top]
    return float((longest == labels[:, np.newaxis]).any(axis=1).mean())


def _top_accuracy(trained: Trained, split: Split, batch_size: int) -> dict[str, float]:
    if trained.spec.num_classes <= 2 * _TOP:
        return {}
    v = class_capsules(trained.spec, trained.params, split, batch_size)
    lengths = np.asarray(class_lengths(trained.spec, jnp.asarray(v)))
    return {f"test_top{_TOP}_accuracy": top_accuracy(lengths, split.labels, _TOP)}


def _image_size(data: DataSettings, trained: Trained) -> int:
    """For a folder, the given size or the model's; for other datasets, the given size unless it is the model's own."""
    size = trained.spec.image_shape[0]
    if data.name == "folder":
        return data.image_size or size
    return 0 if data.image_size == size else data.image_size


def _with_channels(images: Images, channels: int) -> Images:
    """Images with the given number of channels, converted as when pictures are read."""
    if images.shape[-1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=-1)
    gray = [np.asarray(Image.fromarray(image).convert("L"))[..., np.newaxis] for image in images]
    return np.stack(gray) if gray else images[..., :1]


def _all_as_test_set(dataset: Dataset) -> Dataset:
    parts = dataset.train, dataset.test
    everything = Split(np.concatenate([part.images for part in parts]), np.concatenate([part.labels for part in parts]))
    provenance = {**dataset.provenance, "scored": "all images, including those for training"}
    return dataclasses.replace(dataset, test=everything, provenance=provenance)


def _check_unseen(dataset: Dataset, config: RunConfig, workdir: Path, all_images: bool) -> None:
    """Warns if the model was trained on images that are scored, or may have been: on some of a folder that changed."""
    stored = read_stored(workdir)
    folders = [Path(each.data.dir).expanduser().resolve() for each in (config, stored) if each.data.name == "folder"]
    of_the_run = len(folders) == 2 and folders[0] == folders[1]
    if not (all_images or of_the_run):
        return
    try:
        train = split_validation(dataset.train, stored.data.validation_fraction, stored.split_seed)[0]
        same = digest(train) == read_json(workdir / "model.json").get("training_images_sha256")
    except InputError:  # too few images to have been trained on
        same = False
    if same and all_images:
        _log.warning("the model was trained on these images: its accuracy on them says little")
    if not same and of_the_run:
        _log.warning(
            "%s, or what is held out of it, has changed since the model was trained: it may have learned some of the "
            "images that are scored",
            folders[0],
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")

"""Opens a trained workdir: its model and the images of its configuration, checked against each other."""

from pathlib import Path

from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.datasets import Dataset
from mlcn_jax.errors import InputError
from mlcn_jax.training.checkpoint import Trained, load_trained


def stored_config(workdir: Path, data_dir: str = "") -> RunConfig:
    """The configuration of a workdir; `data_dir` overrides its `data.dir` if the images have moved."""
    config = read_stored(workdir)
    return config.replace({"data.dir": data_dir}) if data_dir else config


def load_with_data(workdir: Path, config: RunConfig) -> tuple[Trained, Dataset]:
    """The trained model of a workdir, and the images of `config`.

    Raises:
      InputError: the workdir holds no trained model, or the images do not match it.
    """
    trained = load_trained(workdir)
    dataset = config.data.load()
    shape, expected = dataset.test.images.shape[1:], trained.spec.image_shape
    if shape != expected or dataset.class_names != trained.class_names:
        raise InputError(
            f"the model in {workdir} takes {expected} images of {len(trained.class_names)} classes, but {dataset.name} "
            f"has {shape} images of {len(dataset.class_names)}: give data like its training data"
        )
    return trained, dataset

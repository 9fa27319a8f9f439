"""Opens a trained workdir: its model and the images of its configuration, checked against each other."""

import shlex
from pathlib import Path

from mlcn_jax.config import RunConfig, flat, read_stored
from mlcn_jax.data.datasets import Dataset
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.training.trained import Trained, load_trained


def stored_config(workdir: Path, data_dir: str = "") -> RunConfig:
    """The configuration of a workdir; `data_dir` overrides its `data.dir` if the images have moved."""
    config = read_stored(workdir)
    return config.replace({"data.dir": data_dir}) if data_dir else config


def train_command(config: RunConfig, workdir: Path, placed: bool = True) -> str:
    """The command that starts or resumes training in a workdir; unless `placed`, on the devices that it finds."""
    defaults, values = (flat(c.to_dict()) for c in (RunConfig(), config))
    fixed = config.fixed()
    changes = [
        f"--config.{name}={tuple(value) if isinstance(value, list) else value}"
        for name, value in values.items()
        if value != defaults[name] and (placed or not name.startswith("parallel.") or name in fixed)
    ]
    command = "rounds" if config.train.rounds.steps else "train"
    return f"{program()} {shlex.join([command, '--config=default', f'--workdir={workdir}', *changes])}"


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

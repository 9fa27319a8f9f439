"""Scores of a trained workdir on its test set."""

from pathlib import Path
from typing import Any

from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.training.checkpoint import load_trained
from mlcn_jax.training.evaluate import lane_spreads, make_evaluator
from mlcn_jax.training.pictures import write_pictures


def evaluate_workdir(config: RunConfig, workdir: Path, pictures: Path | None = None) -> dict[str, Any]:
    """Scores the best checkpoint of a workdir on the test set of `config`, and draws the pictures anew.

    The pictures go to the folder `pictures`, to the workdir where none is given.

    Raises:
      InputError: the workdir holds no trained model, or the images do not fit it.
    """
    trained = load_trained(workdir)
    dataset = config.data.load()
    shape, expected = dataset.test.images.shape[1:], trained.spec.image_shape
    if shape != expected or dataset.class_names != trained.class_names:
        raise InputError(
            f"the model in {workdir} takes {expected} images of {len(trained.class_names)} classes, {dataset.name} "
            f"has {shape} images of {len(dataset.class_names)}: evaluate on data like what it was trained on"
        )
    evaluator = make_evaluator(trained.spec, config.train.reconstruction_weight)
    scores = evaluator(trained.params, dataset.test, config.train.batch_size)
    write_pictures(pictures or workdir, trained.spec, trained.params, dataset, scores)
    return {
        **scores.to_dict(dataset.class_names),
        "lane_spreads": lane_spreads(trained.spec, trained.params, dataset.test, config.train.batch_size),
        "step": trained.step,
        "images": len(dataset.test.labels),
        "data": {"name": dataset.name, **dataset.provenance},
    }

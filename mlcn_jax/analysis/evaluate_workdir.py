"""Scores of a trained workdir on its test set."""

from pathlib import Path
from typing import Any

from mlcn_jax.analysis.workdir import load_with_data
from mlcn_jax.config import RunConfig
from mlcn_jax.training.evaluate import lane_spreads, make_evaluator
from mlcn_jax.training.pictures import write_pictures


def evaluate_workdir(config: RunConfig, workdir: Path, pictures: Path | None = None) -> dict[str, Any]:
    """Scores the best checkpoint of a workdir on the test set of `config`, and draws the pictures anew.

    The pictures go to the folder `pictures`, to the workdir where none is given.

    Raises:
      InputError: the workdir holds no trained model, or the images do not fit it.
    """
    trained, dataset = load_with_data(workdir, config)
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

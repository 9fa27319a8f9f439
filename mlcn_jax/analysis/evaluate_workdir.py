"""Scores a trained workdir on its test set."""

import logging
import os
from pathlib import Path
from typing import Any

from mlcn_jax.analysis.workdir import load_with_data
from mlcn_jax.config import RunConfig
from mlcn_jax.training.evaluate import lane_spreads, make_evaluator
from mlcn_jax.training.pictures import write_pictures

_log = logging.getLogger(__name__)


def evaluate_workdir(config: RunConfig, workdir: Path, pictures: Path | None = None) -> dict[str, Any]:
    """Scores the best checkpoint of a workdir on the test set of `config`, and redraws the pictures.

    The pictures go to the folder `pictures`, or by default to the workdir; if that cannot be written to, there is only
    a warning.

    Raises:
      InputError: the workdir holds no trained model, or the images do not match it.
    """
    trained, dataset = load_with_data(workdir, config)
    folder = pictures or workdir
    reason = "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"
    evaluator = make_evaluator(trained.spec, config.train.reconstruction_weight)
    scores = evaluator(trained.params, dataset.test, config.train.batch_size)
    if not reason:
        try:
            write_pictures(folder, trained.spec, trained.params, dataset, scores)
        except OSError as error:
            reason = str(error)
    if reason:  # the scores are useful without them
        _log.warning("pictures are not drawn: %s", reason)
    return {
        **scores.to_dict(dataset.class_names),
        "lane_spreads": lane_spreads(trained.spec, trained.params, dataset.test, config.train.batch_size),
        "step": trained.step,
        "images": len(dataset.test.labels),
        "data": {"name": dataset.name, **dataset.provenance},
    }

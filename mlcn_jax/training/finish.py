"""The end of a run: its parameters scored on the held-out images and the test set, and drawn."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from mlcn_jax import host
from mlcn_jax.distributed import processes
from mlcn_jax.nn.calibration import with_statistics
from mlcn_jax.nn.model import count_parameters
from mlcn_jax.training import evaluate, pictures
from mlcn_jax.training.runner import Runner
from mlcn_jax.training.session import Session, calibration_images, with_flips

_log = logging.getLogger(__name__)


def final_results(session: Session, runner: Runner, workdir: Path, step: int) -> dict[str, Any]:
    """Scores of the parameters that a runner holds, and facts about the run, for `summary.json`; draws the pictures.

    Args:
      session: the run's session; its settings determine whether the test set is scored.
      runner: holds the parameters and collects their statistics for evaluation.
      workdir: the run's workdir.
      step: training step of the parameters, for the log.
    """
    settings, dataset, validation = session.config.train, session.dataset, session.validation
    size = settings.part_size
    calibrating = calibration_images(session.train, settings.batch_size, settings.accumulation_steps)
    params = with_statistics(runner.fetch().params, runner.calibrate(calibrating))
    splits = {"validation": validation} if len(validation.labels) else {}
    if settings.score_test:
        splits["test"] = dataset.test
    results: dict[str, Any] = {}
    for name, split in splits.items():
        _log.info("scoring %s %s images of step %d", f"{len(split.labels):,}", name, step)
        scores = runner.scores(split, size)
        results |= scores.to_dict(dataset.class_names, name)
        mirrored = partial(runner.scores, split, size, flips=True)
        results |= with_flips(session.config.data, mirrored, name)
    if settings.score_test and processes.is_first():
        _log.info("drawing confusion.png and reconstructions.png")
        try:
            pictures.write_pictures(workdir, session.spec, params, dataset, scores)
        except OSError as error:  # the scores are kept
            _log.warning("pictures are not drawn: %s", error)
        results["lane_spreads"] = evaluate.lane_spreads(session.spec, params, dataset.test, size)
    return {
        **results,
        "parameters": count_parameters(session.spec)["total"],
        "peak_memory_bytes": host.peak_memory_bytes(),
        "data": {"name": dataset.name, "train_images": len(session.train.labels), **dataset.provenance},
        "config_hash": session.config.hash(),
        **host.environment(),
    }

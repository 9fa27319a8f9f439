"""Scores of a run in rounds: metrics of each round, checkpoints that other commands can read, and the summary."""

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlcn_jax.errors import Diverged
from mlcn_jax.files import write_json
from mlcn_jax.nn.calibration import with_statistics
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.rounds.vector import Vector, from_vector
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.evaluate import check_statistics
from mlcn_jax.training.finish import final_results
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.metrics import MetricsWriter, read_rows
from mlcn_jax.training.session import Session, calibration_images, step_options
from mlcn_jax.training.step import TrainState
from mlcn_jax.training.trained import best_params

CHECKPOINTS = "checkpoints"  # in the workdir, as those of an ordinary run
_log = logging.getLogger(__name__)


class Judge:
    """Scores parameters on the coordinator's device.

    Args:
      session: the session of the run.
      workdir: folder for metrics, checkpoints and the summary.
      step: training steps done so far.
    """

    def __init__(self, session: Session, workdir: Path, step: int):
        self._session, self._workdir = session, workdir
        self._checkpoints = Checkpoints(workdir / CHECKPOINTS)
        self._like = param_shapes(session.spec)
        self._runner = MeshRunner(session.spec, session.optimizer, None, **step_options(session.config))
        self._writer = MetricsWriter(workdir, step)
        rows = read_rows(workdir / "metrics.jsonl")
        self._validated = {row["step"] for row in rows if row.get("split") == "validation"}
        settings = session.config.train
        self._by_lane = settings.lanes_apart and len(session.spec.lane_specs) > 1
        self._calibrating = calibration_images(session.train, settings.batch_size, settings.accumulation_steps)
        self._checkpoints.delete_after(step)  # checkpoints of rounds that were lost
        self._last = self._checkpoints.newest_step()

    def record(self, step: int, metrics: Mapping[int, Mapping[str, float]], seconds: float) -> None:
        """Records a round before it is saved. If saving fails, the row is dropped on resume and the round repeated.

        Args:
          step: training steps done.
          metrics: metrics of each worker that took part.
          seconds: duration of the round.
        """
        means = {name: statistics.mean(own[name] for own in metrics.values()) for name in ("loss", "accuracy")}
        self._writer.write(step, "train", {**means, "workers": len(metrics), "round_seconds": seconds})
        self._writer.to_disk()
        _log.info(
            "step %d  loss %.4f  accuracy %.2f%%  %d workers  %.1f s", step, *_shown(means), len(metrics), seconds
        )

    def score(self, step: int, vector: Vector) -> None:
        """Scores the parameters after `step` steps, and saves a checkpoint, if one is due."""
        session = self._session
        every = session.config.train.checkpoint_every or session.steps_per_epoch
        if step // every > self._last // every or step == session.num_steps:
            self._save(step, vector)
        self._last = step

    def _save(self, step: int, vector: Vector) -> None:
        """Writes a checkpoint like that of an ordinary run, with the accuracy on the validation images."""
        if self._checkpoints.has(step):
            return
        session = self._session
        params, accuracy = self._load(vector, step), None
        of_lanes: Sequence[float] = ()
        statistics = self._runner.calibrate(self._calibrating)
        check_statistics(statistics, step)
        calibrated = with_statistics(params, statistics)
        if len(session.validation.labels):
            scores = self._runner.scores(session.validation, session.config.train.part_size)
            accuracy, of_lanes = scores.accuracy, scores.lane_accuracies if self._by_lane else ()
            if not math.isfinite(scores.loss):
                raise Diverged(f"step {step}: the validation loss is {scores.loss}; earlier checkpoints are kept")
            if step not in self._validated:  # the coordinator may have been killed between this row and the checkpoint
                self._writer.write(step, "validation", {"loss": scores.loss, "accuracy": accuracy})
            _log.info("step %d  validation loss %.4f  accuracy %.2f%%", step, scores.loss, 100 * accuracy)
        state = {"params": calibrated, "optimizer": {"steps": np.int32(step)}}  # the optimizers' states are elsewhere
        self._writer.to_disk()
        self._checkpoints.save(step, state, {"config_hash": session.config.hash()}, accuracy, of_lanes)
        self._checkpoints.wait()  # before the coordinator saves its own state: Orbax saves one thing at a time

    def _load(self, vector: Vector, step: int) -> dict:
        params = from_vector(vector, self._like)
        self._runner.start(TrainState(jnp.asarray(step, jnp.int32), params, ()))
        return params

    def finish(self, vector: Vector, about: Mapping[str, Any]) -> dict[str, Any]:
        """Scores the best parameters and writes the summary, which it returns.

        Args:
          vector: the parameters at the end.
          about: facts about the rounds, for the summary.
        """
        session = self._session
        best: dict[str, Any] = {"best_step": session.num_steps}
        self._load(vector, session.num_steps)
        if len(session.validation.labels):
            params, best = best_params(self._checkpoints, session.spec)
            self._runner.start(TrainState(jnp.asarray(best["best_step"], jnp.int32), jax.device_get(params), ()))
        summary = {
            **final_results(session, self._runner, self._workdir, best["best_step"]),
            **best,
            "steps": session.num_steps,
            "rounds": dict(about),
        }
        write_json(self._workdir / "summary.json", summary)
        return summary

    def close(self) -> None:
        """Waits for what is written in the background and closes it."""
        self._writer.close()
        self._checkpoints.close()


def _shown(means: Mapping[str, float]) -> tuple[float, float]:
    return means["loss"], 100 * means["accuracy"]

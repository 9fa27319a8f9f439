"""The training loop: start or resume, steps, scores, checkpoints, summary."""

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mlcn_jax import host
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Batches, Split
from mlcn_jax.distributed import processes
from mlcn_jax.errors import Damaged, Diverged, InputError, differences
from mlcn_jax.files import hold, read_json, write_json
from mlcn_jax.launch import program
from mlcn_jax.nn import tracing
from mlcn_jax.nn.calibration import with_statistics
from mlcn_jax.placement.cost import check_fits_memory
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training import evaluate
from mlcn_jax.training.checkpoint import ROUNDS, Checkpoints
from mlcn_jax.training.finish import final_results
from mlcn_jax.training.metrics import MetricsWriter, Progress, StepLog, read_rows
from mlcn_jax.training.plan import algorithms_of, make_runner
from mlcn_jax.training.room import check_step_fits
from mlcn_jax.training.session import Session, calibration_images, open_session, plan_of, step_options, warn_of_unused
from mlcn_jax.training.start import announce, check_is_no_other, check_resumable, start_state
from mlcn_jax.training.stop_signals import StopSignals
from mlcn_jax.training.teacher import open_teacher
from mlcn_jax.training.trained import best_params

_log = logging.getLogger(__name__)

_PROFILED_STEPS = 5


def train(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Trains, scores the test set and returns the summary, which is also written to `workdir/summary.json`.

    A run in the workdir is resumed from its newest intact checkpoint, and ends with the same parameters as an
    uninterrupted run.

    Raises:
      InputError: some input cannot be used; a run already in the workdir is left unchanged.
      Stopped: a signal asked the run to stop; a checkpoint was saved if it had taken a step.
      Diverged: the loss is not finite; earlier checkpoints are kept.
    """
    settings = config.train
    if settings.rounds.steps:
        raise InputError(
            f"train.rounds.steps is {settings.rounds.steps}: start it with {program()} rounds, or leave it at 0"
        )
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        if not processes.is_first():
            logging.getLogger("mlcn_jax").setLevel(logging.WARNING)
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(hold(workdir))
        check_is_no_other(workdir)
        _log.info("loading %s", config.data.name)
        session = open_session(config)
        _check_alone(stop)
        about = session.dataset.provenance
        if about.get("bytes") == "not official":
            _log.warning("these are not the official files of %s: %s", config.data.name, about["note"])
        warn_of_unused(config, session.spec)
        try:
            teacher = open_teacher(session)
        except InputError:  # a finished student needs its teacher no more
            finished = _finished_summary(workdir, session.num_steps) if jax.process_count() == 1 else None
            if finished is None or finished.get("config_hash") != config.hash() or not _has_scores(finished, settings):
                raise
            _log.info("%s is finished: %d steps; its teacher can no longer be used", workdir, session.num_steps)
            stop.check(f"after the end of {workdir}")
            return finished
        dataset, validation, spec = session.dataset, session.validation, session.spec
        steps_per_epoch = session.steps_per_epoch
        check_fits_memory(spec, host.total_memory_bytes())

        if any((workdir / ROUNDS).glob("[0-9]*")):
            raise InputError(
                f"{workdir} holds a run in rounds: give another --workdir (with --config.init_from={workdir} to start "
                f"from its weights once it has ended), or go on with {program()} rounds"
            )
        checkpoints = Checkpoints(workdir / "checkpoints")
        stack.callback(checkpoints.close)
        model_facts = session.model_facts() | teacher.facts()
        _check_same(processes.gather(model_facts | _scored_images(session)))
        if checkpoints.exist():
            check_resumable(session, workdir, model_facts)
        plan = plan_of(config, spec, workdir)  # which keeps files there, and not in the workdir of another run
        state, algorithms = start_state(session, checkpoints)
        state, algorithms = processes.arrays_from_first(state), processes.in_first(lambda: algorithms)
        for _, size in settings.sizes():
            algorithms = algorithms_of(plan, spec, settings.part_size, algorithms, size)
        stack.enter_context(tracing.using(tracing.Target(algorithms=tracing.as_pairs(algorithms))))
        start = int(state.step)
        num_steps = max(session.num_steps, start)
        finished = processes.in_first(lambda: _finished_summary(workdir, start))
        if start == num_steps and finished:
            apart = processes.in_first(lambda: read_stored(workdir).train.lanes_apart)
            if len(validation.labels) and apart != settings.lanes_apart:
                raise InputError(
                    f"{workdir} is finished, with train.lanes_apart={apart}, by which its best checkpoints were "
                    "chosen: leave it as it was, or train in another --workdir"
                )
        if start == num_steps and finished and _has_scores(finished, settings):
            _log.info("%s is finished: %d steps", workdir, start)
            write_json(workdir / "config.json", config.to_dict())
            if finished.get("config_hash") != config.hash():  # it was shortened, or its teacher has moved
                finished["config_hash"] = config.hash()
                write_json(workdir / "summary.json", finished)
            stop.check(f"after the end of {workdir}")
            return finished

        announce(session, plan.about, workdir, start, num_steps)
        options = step_options(config) | teacher.options
        runner = make_runner(plan, spec, session.optimizer, clip_norm=settings.clip_norm, **options)
        runner.start(state)
        del state
        batches = Batches(
            session.train.images,
            session.train.labels,
            settings.batch_size,
            settings.seed,
            alternate_flips=config.data.alternate_flips,
            soft=teacher.kept(session),
        )
        _check_alone(stop)
        _log.info("compiling the training step")
        compile_seconds = runner.compile(*batches.at(start), sizes=session.image_sizes(start, num_steps) or [0])
        check_step_fits(runner)
        write_json(workdir / "config.json", config.to_dict())
        (workdir / "summary.json").unlink(missing_ok=True)  # of a run that goes on, which is not finished any more
        if start < num_steps:  # without weights that were fitted to the lanes as they were
            write_json(workdir / "model.json", model_facts)
        writer = MetricsWriter(workdir, start)
        stack.callback(writer.close)
        progress = Progress(start, num_steps, steps_per_epoch)
        stack.callback(progress.close)
        log = StepLog(writer, progress, settings.batch_size, settings.log_every)
        trace = stack.enter_context(contextlib.ExitStack())
        first_profiled = start + max(0, min(10, num_steps - start - _PROFILED_STEPS))

        calibrating = calibration_images(session.train, settings.batch_size, settings.accumulation_steps)
        by_lane = settings.lanes_apart and len(spec.lane_specs) > 1

        def score(split_name: str, split: Split, step: int) -> evaluate.Scores:
            scores = runner.scores(split, settings.part_size)
            writer.write(step, split_name, {"loss": scores.loss, "accuracy": scores.accuracy})
            progress.say(f"step {step}  {split_name} loss {scores.loss:.4f}  accuracy {scores.accuracy:.2%}")
            return scores

        def save(step: int, validate: bool) -> None:
            statistics = runner.calibrate(calibrating)
            evaluate.check_statistics(statistics, step)
            # A step's loss is from before its update, so a state is tried on the newest batch before saving.
            loss = runner.scores(Split(*batches.at(step - 1)[:2]), settings.part_size).loss
            if not math.isfinite(loss):
                raise Diverged(f"step {step}: the loss after it is {loss}; earlier checkpoints are kept")
            scores = score("validation", validation, step) if validate else None
            state = runner.fetch()
            if not processes.is_first():
                return
            parts = {"params": with_statistics(state.params, statistics), "optimizer": state.optimizer}
            writer.to_disk()
            checkpoints.save(
                step,
                parts,
                {"config_hash": config.hash(), "conv": algorithms},
                scores.accuracy if scores else None,
                scores.lane_accuracies if scores and by_lane else (),
            )

        stop.check(f"before step {start + 1}")
        if start == num_steps and len(validation.labels) and processes.in_first(lambda: checkpoints.lacks_rank(start)):
            checkpoints.delete_after(start - 1)  # a run that was stopped there is scored as if it had ended there
            save(start, validate=True)
        with jax.transfer_guard("disallow"):  # every transfer below is an explicit one
            for step in range(start + 1, num_steps + 1):
                if config.profile and step == first_profiled + 1:
                    trace.enter_context(jax.profiler.trace(str(workdir / "profile")))
                with log.timing_input():
                    batch = runner.place(*batches.at(step - 1))
                metrics = runner.step(*batch, size=session.image_size(step))
                log.add(step, metrics)
                if step == first_profiled + _PROFILED_STEPS:
                    log.flush()
                    trace.close()
                test_due = settings.test_every_epoch and step % steps_per_epoch == 0
                save_due = step % (settings.checkpoint_every or steps_per_epoch) == 0 or step == num_steps
                stopping = stop.due(step)
                if plan.in_each_process and (step % settings.log_every == 0 or step == num_steps):
                    processes.meet(f"step {step}")  # otherwise, one could finish and end the run long before another
                if test_due or save_due or stopping:
                    with log.paused():
                        if test_due:
                            runner.calibrate(calibrating)
                            # Before the save, so that it is on disk before the checkpoint.
                            score("test", dataset.test, step)
                        if save_due or stopping:
                            save(step, validate=save_due and len(validation.labels) > 0)
                if step < num_steps and stopping:
                    log.finish()
                    checkpoints.wait()
                    stop.check(f"after step {step} of {num_steps}")
        log.finish()
        checkpoints.wait()
        progress.close()

        state, best = runner.fetch(), {"best_step": num_steps}
        if len(validation.labels):
            params = state.params
            if processes.is_first():
                params, best = best_params(checkpoints, spec)
            state = dataclasses.replace(state, params=processes.arrays_from_first(params))
            runner.start(state)
        results = final_results(session, runner, workdir, best["best_step"])
        summary = {
            **results,
            **best,
            "steps": num_steps,
            "steps_this_session": num_steps - start,
            "images_per_second": _throughput(workdir, settings.batch_size, settings.log_every),
            "input_share": log.input_share,
            "compile_seconds": compile_seconds,
            "parallel": plan.about,
        }
        write_json(workdir / "summary.json", summary)
        stop.check(f"after the end of {workdir}")
        return summary


def _check_alone(stop: StopSignals) -> None:
    """Raises Stopped if a signal has arrived; processes of a run stop together, after a step."""
    if jax.process_count() == 1:
        stop.check("before the first step")


def _scored_images(session: Session) -> dict[str, str]:
    """Digests of the images that a run is scored on, of which each process computes its share."""
    splits = {"validation": session.validation}
    if session.config.train.score_test:
        splits["test"] = session.dataset.test
    return {f"{name}_images_sha256": datasets.digest(split) for name, split in splits.items()}


def _check_same(facts: Sequence[dict[str, Any]]) -> None:
    """Raises InputError if the facts of a process differ from those of process 0."""
    for number, own in enumerate(facts):
        if rows := differences(facts[0], own, there="in process 0", here=f"in process {number}"):
            raise InputError(
                f"process {number} has other images or another teacher than process 0:\n"
                + "\n".join(rows)
                + "\ngive all processes copies of the same files"
            )


def _throughput(workdir: Path, batch_size: int, log_every: int) -> float | None:
    """Training throughput in images per second over all steps on record, those of earlier sessions included."""
    images, seconds, before = 0, 0.0, 0
    for row in read_rows(workdir / "metrics.jsonl"):
        if "images_per_second" in row:
            steps = row["step"] - before
            # Of a model that was pruned, the first row counts only its own steps.
            count = batch_size * (steps if before else min(steps, log_every))
            images, seconds, before = images + count, seconds + count / row["images_per_second"], row["step"]
    return images / seconds if seconds else None


def _has_scores(summary: dict, settings: TrainSettings) -> bool:
    return not settings.score_test or "test_accuracy" in summary


def _finished_summary(workdir: Path, step: int) -> dict | None:
    """The summary of a run that ended at `step`, if it exists and is complete."""
    path = workdir / "summary.json"
    if not path.exists():
        return None
    try:
        summary = read_json(path)
    except Damaged:
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == step else None

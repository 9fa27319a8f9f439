"""The training loop: start or resume, steps, scores, checkpoints, the summary."""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mlcn_jax import host
from mlcn_jax.config import RunConfig, model_defaults, read_stored
from mlcn_jax.data import batches as batches_lib
from mlcn_jax.data import datasets
from mlcn_jax.distributed import processes
from mlcn_jax.errors import Diverged, InputError, Stopped
from mlcn_jax.files import hold, read_json, write_json
from mlcn_jax.nn import conv
from mlcn_jax.nn.model import ModelSpec, count_parameters, init_params
from mlcn_jax.placement.cost import check_fits_memory
from mlcn_jax.training import evaluate, pictures
from mlcn_jax.training.checkpoint import Checkpoints, Trained, describe_model, load_trained
from mlcn_jax.training.metrics import MetricsWriter, Progress, StepLog
from mlcn_jax.training.plan import make_plan, make_runner
from mlcn_jax.training.step import TrainState, make_optimizer

_log = logging.getLogger(__name__)

_PROFILED_STEPS = 5


def train(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Trains, scores the test set and returns the summary that it writes to `workdir/summary.json`.

    A workdir that holds a run is resumed from its newest checkpoint that verifies, and ends with the same
    parameters as a run that was never stopped.

    Raises:
      InputError: something given cannot be used; the run that the workdir holds is left as it is.
      Stopped: a signal asked to stop; a checkpoint was saved.
      Diverged: the loss is not finite; earlier checkpoints are kept.
    """
    settings = config.train
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_StopSignals())
        if not processes.is_first():
            logging.getLogger("mlcn_jax").setLevel(logging.WARNING)
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(hold(workdir))
        dataset = config.data.load()
        train_split, validation = datasets.split_validation(
            dataset.train, config.data.validation_fraction, settings.seed
        )
        steps_per_epoch = batches_lib.steps_per_epoch(len(train_split.labels), settings.batch_size)
        spec = config.model_spec(dataset.train.images.shape[1:], len(dataset.class_names))
        check_fits_memory(spec, host.total_memory_bytes())
        optimizer = make_optimizer(settings, steps_per_epoch)
        plan = make_plan(config.parallel, spec, settings.batch_size)

        checkpoints = Checkpoints(workdir / "checkpoints")
        stack.callback(checkpoints.close)
        model_facts = describe_model(spec, dataset.class_names, datasets.digest(train_split))
        if checkpoints.exist():
            config.check_resumable(read_stored(workdir), workdir)
            _check_same_model(workdir, model_facts)
        state, conv_choices = _start_state(config, spec, optimizer, checkpoints)
        state, conv_choices = processes.arrays_from_first(state), processes.from_first(conv_choices)
        stack.enter_context(conv.choices(conv_choices))
        start = int(state.step)
        num_steps = settings.num_epochs * steps_per_epoch
        if settings.num_steps:
            num_steps = min(num_steps, settings.num_steps)
        num_steps = max(num_steps, start)
        write_json(workdir / "config.json", config.to_dict())
        write_json(workdir / "model.json", model_facts)
        finished = processes.from_first(_finished_summary(workdir, start))
        if start == num_steps and finished:
            _log.info("%s is finished: %d steps", workdir, start)
            return finished

        runner = make_runner(plan, config, spec, optimizer)
        runner.start(state)
        del state
        batches = batches_lib.Batches(train_split.images, train_split.labels, settings.batch_size, settings.seed)
        compile_seconds = runner.compile(*batches.at(start))
        writer = MetricsWriter(workdir, start)
        stack.callback(writer.close)
        progress = Progress(start, num_steps, steps_per_epoch)
        stack.callback(progress.close)
        log = StepLog(writer, progress, settings.batch_size, settings.log_every)
        trace = stack.enter_context(contextlib.ExitStack())
        first_profiled = start + max(0, min(10, num_steps - start - _PROFILED_STEPS))

        def score(split_name: str, split: datasets.Split, step: int) -> evaluate.Scores:
            scores = runner.scores(split, settings.batch_size)
            writer.write(step, split_name, {"loss": scores.loss, "accuracy": scores.accuracy})
            progress.say(f"step {step}  {split_name} loss {scores.loss:.4f}  accuracy {scores.accuracy:.2%}")
            return scores

        def save(step: int, validate: bool) -> None:
            # The loss of a step is that before its update: what is saved is tried on the newest batch first.
            loss = runner.scores(datasets.Split(*batches.at(step - 1)), settings.batch_size).loss
            if not math.isfinite(loss):
                raise Diverged(f"step {step}: the loss after it is {loss}; checkpoints of earlier steps are kept")
            accuracy = score("validation", validation, step).accuracy if validate else None
            state = runner.fetch()
            if not processes.is_first():
                return
            parts = {"params": state.params, "optimizer": state.optimizer}
            checkpoints.save(step, parts, {"config_hash": config.hash(), "conv": conv_choices}, accuracy)

        stop.check(f"before step {start + 1}")
        with jax.transfer_guard("disallow"):  # every transfer below is an explicit one
            for step in range(start + 1, num_steps + 1):
                if config.profile and step == first_profiled + 1:
                    trace.enter_context(jax.profiler.trace(str(workdir / "profile")))
                with log.timing_input():
                    batch = runner.place(*batches.at(step - 1))
                metrics = runner.step(*batch)
                log.add(step, metrics)
                if step == first_profiled + _PROFILED_STEPS:
                    log.flush()
                    trace.close()
                test_due = settings.test_every_epoch and step % steps_per_epoch == 0
                save_due = step % (settings.checkpoint_every or steps_per_epoch) == 0 or step == num_steps
                stopping = stop.due(step)
                if test_due or save_due or stopping:
                    with log.paused():
                        if test_due:  # before the save: what a checkpoint follows is on disk already
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

        state, best_step = runner.fetch(), num_steps
        if len(validation.labels):
            params = state.params
            if processes.is_first():
                restored, facts = checkpoints.restore({"params": params}, best=True)
                params, best_step = restored["params"], facts["step"]
            state = dataclasses.replace(state, params=processes.arrays_from_first(params))
            runner.start(state)
        scores, spreads = runner.scores(dataset.test, settings.batch_size), []
        if processes.is_first():
            pictures.write_pictures(workdir, spec, state.params, dataset, scores)
            spreads = evaluate.lane_spreads(spec, state.params, dataset.test, settings.batch_size)
        summary = {
            **scores.to_dict(dataset.class_names),
            "lane_spreads": spreads,
            "best_step": best_step,
            "steps": num_steps,
            "steps_this_session": num_steps - start,
            "images_per_second": log.images_per_second,
            "input_share": log.input_share,
            "compile_seconds": compile_seconds,
            "parameters": count_parameters(spec)["total"],
            "peak_memory_bytes": host.peak_memory_bytes(),
            "data": {"name": dataset.name, "train_images": len(train_split.labels), **dataset.provenance},
            "config_hash": config.hash(),
            "parallel": plan.about,
            **host.environment(),
        }
        write_json(workdir / "summary.json", summary)
        stop.check(f"after the end of {workdir}")
        return summary


def _check_same_model(workdir: Path, mine: dict[str, Any]) -> None:
    """Raises InputError where `model.json` is of other images, classes or training data than `mine`."""
    theirs = read_json(workdir / "model.json")
    if isinstance(theirs.get("spec"), dict):
        theirs["spec"] = model_defaults() | theirs["spec"]
    rows = [f"  {name}: {theirs.get(name)} there, {mine[name]} now" for name in mine if theirs.get(name) != mine[name]]
    if rows:
        raise InputError(
            f"{workdir} holds a run on other data:\n"
            + "\n".join(rows)
            + "\nresume it with the data it started with, or train in another --workdir (with --config.init_from="
            + f"{workdir} to start from its weights)"
        )


def _finished_summary(workdir: Path, step: int) -> dict | None:
    """The summary of a run that ended at `step`, if it is there and whole."""
    try:
        summary = read_json(workdir / "summary.json")
    except InputError:
        return None
    return summary if isinstance(summary, dict) and summary.get("steps") == step else None


def _start_state(
    config: RunConfig, spec: ModelSpec, optimizer: optax.GradientTransformation, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, str]]:
    """The state to start from, and the convolution algorithms that the run has used so far (`conv.choices`).

    1. The newest checkpoint of this workdir that verifies.
    2. `config.init_from`: the best parameters of another workdir, with a fresh optimizer.
    3. Random parameters from `config.train.seed`.
    """
    key = jax.random.key(config.train.seed)
    if checkpoints.exist():
        shapes = jax.eval_shape(lambda k: init_params(spec, k), key)
        restored, facts = checkpoints.restore({"params": shapes, "optimizer": jax.eval_shape(optimizer.init, shapes)})
        _log.info("resuming from step %d", facts["step"])
        state = TrainState(jnp.asarray(facts["step"], jnp.int32), restored["params"], restored["optimizer"])
        return state, dict(facts.get("conv", {}))
    params = jax.jit(lambda k: init_params(spec, k))(key)
    if config.init_from:
        params = _adapt(params, spec, load_trained(Path(config.init_from).expanduser()))
    return jax.jit(TrainState.create, static_argnums=1)(params, optimizer), {}


def _adapt(params: dict, spec: ModelSpec, trained: Trained) -> dict:
    """`trained` parameters where they fit; arrays that depend on a differing number of classes stay as they are."""

    def shape_of(spec: ModelSpec) -> dict[str, Any]:
        same = ("name", "image_shape", "lane_routing", "prior_bias", "signed_pixels", "decoder")
        return {"lanes": ",".join(map(str, spec.lane_groups)), **{name: getattr(spec, name) for name in same}}

    theirs, mine = shape_of(trained.spec), shape_of(spec)
    rows = [
        f"  {field}: {theirs[field]!r} there, {mine[field]!r} now" for field in mine if mine[field] != theirs[field]
    ]
    if rows:
        raise InputError("config.init_from names a model of another shape or input:\n" + "\n".join(rows))
    fresh = []

    def choose(path, mine, theirs):
        if mine.shape == theirs.shape:
            return theirs
        fresh.append(jax.tree_util.keystr(path, simple=True, separator="/"))
        return mine

    adapted = jax.tree_util.tree_map_with_path(choose, params, trained.params)
    if fresh:
        _log.info("another number of classes: %s start from random values", ", ".join(fresh))
    return adapted


class _StopSignals:
    """Notes the first SIGTERM or Ctrl-C in `requested`; a second one ends the process, whatever it computes.

    Python's own handlers wait until a compiler returns, so a thread counts the signals as they come.
    """

    requested = ""

    def __enter__(self):
        one_process = jax.process_count() == 1
        signals = (signal.SIGTERM, signal.SIGINT) if one_process else ()
        self._before = {s: signal.signal(s, self._note) for s in signals}
        came, self._coming = os.pipe()
        os.set_blocking(self._coming, False)
        self._fd_before = signal.set_wakeup_fd(self._coming) if signals else None
        threading.Thread(target=self._end_at_the_second, args=(came,), daemon=True).start()
        return self

    def _end_at_the_second(self, came: int) -> None:
        with open(came, "rb", buffering=0) as numbers:
            stops = 0
            while number := numbers.read(1):
                stops += number[0] in self._before
                if stops > 1:
                    time.sleep(1.0)  # for a KeyboardInterrupt to tidy up
                    os._exit(128 + number[0])

    def due(self, step: int) -> bool:
        """Whether to stop after this step; processes of one run agree on it."""
        if jax.process_count() > 1 and processes.asked_to_stop(step):
            self.requested = "SIGTERM"
        return bool(self.requested)

    def _note(self, number, frame):
        self.requested = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self, when: str) -> None:
        """Raises Stopped if a signal has come."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested} {when}")

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._fd_before is not None:
            signal.set_wakeup_fd(self._fd_before)
        os.close(self._coming)

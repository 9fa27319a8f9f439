"""A search from start to finish: opens what it needs, trains models, tests the best one, writes the results."""

import contextlib
import functools
import logging
import os
import platform
import random
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mlcn_jax import files, host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError, Stopped
from mlcn_jax.placement import cost
from mlcn_jax.search import models as models_lib
from mlcn_jax.search import report, storage
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search.setup import Search, open_search, storage_url
from mlcn_jax.search.space import Mix
from mlcn_jax.search.study import Study
from mlcn_jax.training.stop_signals import SignalWatch

_log = logging.getLogger(__name__)

_PROCESS_BYTES = 600 * 2**20  # memory of a worker process, without its model
_PEAK = 5  # times `LaneCost.held_bytes` that a step takes, at most (experiments/results/cost_model.json)


def run(
    config: RunConfig,
    settings: settings_lib.SearchSettings,
    workdir: Path,
    programs: dict[tuple, Any] | None = None,
) -> dict[str, Any]:
    """Starts or continues a search until all its models are trained, writes the results and returns the summary.

    `programs` is as in `trials.Trainer`.

    Raises:
      InputError: an input cannot be used, or no model could be trained; finished models are kept.
      Stopped: SIGTERM or Ctrl-C arrived; the message says how many models have ended.
    """
    with files.hold(workdir), storage.storage_errors(storage_url(settings, workdir)):
        begun = (workdir / "search.db").exists() or (workdir / "trials.json").exists()
        for name in ("config.json", "checkpoints"):
            if (workdir / name).exists() and not begun:
                raise InputError(f"{workdir} holds a training run ({name}), not a search: give another --workdir")
        found = open_search(config, settings, workdir, create=True, programs=programs)
        with _stoppable(found.study), worker_slot(found):
            started = time.monotonic()
            found.study.work(
                found.space,
                found.trainer.evaluate,
                to_the_end=True,
                done=functools.partial(report.write_trials, found, workdir, least_seconds=20.0),
            )
            wall_seconds = time.monotonic() - started
            models = found.study.models()
            report.write_trials(found, workdir)
            winner = models_lib.best(models)
            if winner is None:
                raise InputError(_why_none(models, settings))
            test = found.study.noted("test")
            if not test or test["index"] != winner.index:
                _log.info("training model %d once more, to score it on the test set: %s", winner.index, winner.lanes)
                test = {"index": winner.index, "accuracies": found.trainer.test(winner.lanes)}
                found.study.note("test", test)
        _log.info("drawing search.png, writing best_config.py and summary.json")
        session = {"wall_seconds": wall_seconds, "evaluate_seconds": found.study.evaluate_seconds}
        return report.write(found, workdir, test["accuracies"], session)


def _why_none(models: Sequence[models_lib.Model], settings: settings_lib.SearchSettings) -> str:
    """Why no model was trained to the end, and what to do."""
    if any(model.state == "waiting" for model in models):
        return (
            f"search.max_training_seconds={settings.max_training_seconds:g} is used up, and no model was trained to "
            "the end: raise it, and the same command continues the search"
        )
    reasons = [model.reason for model in models if model.reason]
    return "no model was trained to the end; the first failed with " + (reasons or ["no reason"])[0]


def work(config: RunConfig, settings: settings_lib.SearchSettings, workdir: Path) -> None:
    """Trains models of a search that another process started, until none is waiting; raises as `run` does."""
    with storage.storage_errors(storage_url(settings, workdir)):
        if not settings.storage and not (workdir / "search.db").exists():
            raise InputError(
                f"{workdir} holds no search: start it first, with the same command without --worker, or give the "
                "--config.search.storage of one that was started"
            )
        found = open_search(config, settings, workdir, create=False)
        with _stoppable(found.study), worker_slot(found):
            found.study.work(found.space, found.trainer.evaluate, to_the_end=False)


@contextlib.contextmanager
def _stoppable(study: Study) -> Iterator[None]:
    """Turns SIGTERM and Ctrl-C into `Stopped`, which reports the progress; a second signal kills the process."""
    here = threading.current_thread() is threading.main_thread()  # Python allows handlers only there
    signals = (signal.SIGTERM, signal.SIGINT) if here else ()
    before: dict[signal.Signals, Any] = {}
    hook, watch = sys.unraisablehook, SignalWatch(signals)

    def stop(number: int, frame: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number).name)  # libraries do not catch this one

    def again(failure: "sys.UnraisableHookArgs") -> None:
        """Repeats a signal that arrived in a callback of the garbage collector, where exceptions are ignored."""
        if not isinstance(failure.exc_value, KeyboardInterrupt):
            hook(failure)
            return
        for one in before:
            signal.signal(one, stop)
        watch.ignored += 1
        threading.Timer(0.1, os.kill, (os.getpid(), signal.Signals[str(failure.exc_value)])).start()

    try:
        with watch:
            if signals:
                before |= {one: signal.signal(one, stop) for one in signals}
                sys.unraisablehook = again
            yield
    except KeyboardInterrupt as error:
        raise Stopped(f"stopped by {error or 'SIGINT'}: {study.progress()}") from error
    finally:
        sys.unraisablehook = hook
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def worker_slot(found: Search) -> Iterator[None]:
    """Waits until this machine has room for another worker: a core and memory for a model, or an accelerator."""
    rng = random.Random(0)
    mixes = [found.space.draw(rng) for _ in range(20)]
    largest = max(_model_bytes(found, mix) for mix in mixes)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the one that a worker uses
    names = ["".join(c for c in first if c.isalnum() or c in "-_")]
    if jax.default_backend() == "cpu":
        room = int(host.usable_memory_bytes() / (largest + _PROCESS_BYTES))
        names = [f"core{core}" for core in host.cores()[: max(1, room)]]
    folder = _own_folder()
    if folder is None:
        _log.warning(
            "no folder that only this user can write to (set MLCN_JAX_CACHE to one): "
            "workers of other searches on this machine are not counted"
        )
        yield
        return
    paths = [folder / f"worker-{name}.lock" for name in names]
    waiting = False
    while True:
        try:
            lock = next(filter(None, map(files.try_lock, paths)), None)
        except OSError as error:
            if not any(path.is_symlink() or path.is_dir() for path in paths):
                raise
            raise InputError(
                f"{error}: this path is needed for the lock file of a worker: remove what is there"
            ) from error
        if lock is not None:
            break
        if not waiting:
            _log.info("waiting for another worker to end: this machine has room for %d", len(paths))
            waiting = True
        time.sleep(1.0)
    try:
        yield
    finally:
        lock.release()


def _model_bytes(found: Search, mix: Mix) -> float:
    """Memory of a training step of a model's lanes on this machine: what it takes, or more."""
    spec, batch_size = found.trainer.spec(found.space.text(mix)), found.config.train.batch_size
    return _PEAK * sum(
        group.count * cost.cost_of(spec, group.spec).held_bytes(batch_size) for group in spec.lane_groups
    )


def _own_folder() -> Path | None:
    """A folder that all processes of this user on this machine share and nobody else can write to, or None."""
    temporary = Path(tempfile.gettempdir()) / f"mlcn_jax-{os.getuid()}"
    cache = host.cache_folder() / f"workers-{platform.node()}"
    for folder in (temporary, cache):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=folder is cache, exist_ok=True)
            found = folder.lstat()  # of a link itself
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
                return folder
    return None

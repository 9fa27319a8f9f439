"""A search from beginning to end: all it needs is opened, models are trained, the best is tested, results written."""

import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments import nas_report
from mlcn_jax import devices, search, storage, study, train
from mlcn_jax.config import RunConfig, check_fields
from mlcn_jax.errors import InputError
from mlcn_jax.trials import Trainer

_log = logging.getLogger("mlcn_jax.nas")

_PROCESS_BYTES = 600 * 2**20  # of a worker, without its model
_FREE = {"data.dir", "data.cache_dir", "model.lanes", "train.num_epochs", "train.num_steps"}
_FREE |= {"train.checkpoint_every", "train.log_every", "train.test_every_epoch"}


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that is ready: what it trains, where its mixes come from, and where its trials are kept."""

    config: RunConfig
    settings: study.SearchSettings
    trainer: Trainer
    space: search.Space
    study: study.Study


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, study.SearchSettings]:
    """The run and the search of a config such as `configs/nas_quickstart.py`, as a nested dictionary.

    Raises:
      InputError: a field is unknown, missing or out of range.
    """
    if "search" not in values:
        raise InputError("the config has no search fields: start from configs/nas_quickstart.py")
    check_fields("search", study.SearchSettings, values["search"])
    return RunConfig.from_dict(values), study.SearchSettings(**values["search"])


def make_space(config: RunConfig, settings: study.SearchSettings) -> search.Space:
    """The mixes that fit the devices of a search; raises InputError where there are none."""
    spec = config.replace({"model.name": "mlcn", "model.lanes": settings.baseline}).model_spec(*config.data.shape())
    return search.make_space(
        settings.devices,
        spec,
        config.train.batch_size,
        kinds=settings.lane_kinds,
        max_width=settings.max_width,
        max_depth=settings.max_depth,
        baseline=settings.baseline,
        tolerance=settings.tolerance,
    )


def open_search(
    config: RunConfig,
    settings: study.SearchSettings,
    workdir: Path,
    *,
    create: bool,
    programs: dict[tuple, Any] | None = None,
) -> Search:
    """Loads the data, counts what lanes cost and opens the storage; `programs` is as in `trials.Trainer`.

    Raises:
      InputError: any of this cannot be used.
    """
    trainer = Trainer(
        config, settings.num_epochs, settings.num_repeats, settings.num_images, settings.scored_epochs, programs
    )
    space = make_space(config, settings)
    facts = {name: value for name, value in config.flat_as_before().items() if name.split(".")[0] != "parallel"}
    facts = {name: value for name, value in facts.items() if name not in _FREE} | study.facts_of(settings)
    url = settings.storage or f"sqlite:///{workdir.resolve() / 'search.db'}"
    return Search(config, settings, trainer, space, study.Study(settings, facts, url, create=create))


def run(
    config: RunConfig,
    settings: study.SearchSettings,
    workdir: Path,
    programs: dict[tuple, Any] | None = None,
) -> dict[str, Any]:
    """Starts or goes on with a search until all its models are trained, reports, and returns the summary.

    `programs` is as in `trials.Trainer`.

    Raises:
      InputError: something given cannot be used, or no model could be trained; what has finished is kept.
    """
    with train.hold(workdir), storage.storage_errors(settings.storage or str(workdir)):
        found = open_search(config, settings, workdir, create=True, programs=programs)
        with worker_slot(found):
            started = time.monotonic()
            found.study.work(
                found.space,
                found.trainer.evaluate,
                to_the_end=True,
                done=functools.partial(nas_report.write_trials, found, workdir, least_seconds=20.0),
            )
            wall_seconds = time.monotonic() - started
            models = found.study.models()
            nas_report.write_trials(found, workdir)
            winner = study.best(models)
            if winner is None:
                reasons = [model.reason for model in models if model.reason]
                raise InputError(
                    "no model was trained to the end; the first failed with " + (reasons or ["no reason"])[0]
                )
            test = found.study.noted("test")
            if not test or test["index"] != winner.index:
                test = {"index": winner.index, "accuracies": found.trainer.test(winner.lanes)}
                found.study.note("test", test)
        session = {"wall_seconds": wall_seconds, "evaluate_seconds": found.study.evaluate_seconds}
        return nas_report.write(found, workdir, test["accuracies"], session)


def work(config: RunConfig, settings: study.SearchSettings, workdir: Path) -> None:
    """Trains models of a search that another process started, until none waits; raises as `run`."""
    with storage.storage_errors(settings.storage or str(workdir)):
        if not settings.storage and not (workdir / "search.db").exists():
            raise InputError(
                f"{workdir} holds no search: start it without --worker first, or give --config.search.storage"
            )
        found = open_search(config, settings, workdir, create=False)
        with worker_slot(found):
            found.study.work(found.space, found.trainer.evaluate, to_the_end=False)


@contextlib.contextmanager
def worker_slot(found: Search) -> Iterator[None]:
    """Waits until this machine bears one more worker: a core and the memory of a model for each, or an accelerator."""
    rng = random.Random(0)
    mixes = [found.space.draw(rng) for _ in range(20)]
    largest = max(sum(one["memory_bytes"] for one in found.space.report(mix)) for mix in mixes)
    slots, visible = 1, "".join(c for c in os.environ.get("CUDA_VISIBLE_DEVICES", "0") if c.isalnum())
    if jax.default_backend() == "cpu":
        slots = int(min(devices.num_cores(), devices.usable_memory_bytes() / (2 * largest + _PROCESS_BYTES)))
    told = False
    with contextlib.ExitStack() as stack:
        while True:
            for i in range(max(1, slots)):
                path = Path(tempfile.gettempdir()) / f"mlcn_jax-worker-{os.getuid()}-{visible}-{i}.lock"
                file = path.open("w")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.close()
                    continue
                stack.enter_context(file)
                yield
                return
            if not told:
                _log.info("this machine bears %d workers, which are there: waiting for one to end", max(1, slots))
                told = True
            time.sleep(1.0)

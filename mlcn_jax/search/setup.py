"""Prepares a search: reads its settings, builds the space of mixes, opens its storage."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlcn_jax import host
from mlcn_jax.config import RunConfig, check_fields
from mlcn_jax.data import datasets
from mlcn_jax.errors import InputError
from mlcn_jax.search import space as space_lib
from mlcn_jax.search.settings import IMAGES, PROFILES, ROUNDING, VALIDATION, SearchSettings, facts_of
from mlcn_jax.search.study import Study
from mlcn_jax.search.trials import Trainer
from mlcn_jax.training.session import check_settings
from mlcn_jax.training.stacks_runner import check_independent

_log = logging.getLogger(__name__)

_FREE = {"data.dir", "data.cache_dir", "model.lanes", "train.num_epochs", "train.num_steps"}
_FREE |= {"train.checkpoint_every", "train.log_every", "train.test_every_epoch"}


@dataclasses.dataclass(frozen=True)
class Search:
    """A search that is ready to run: what it trains, where its mixes come from, and where its trials are stored."""

    config: RunConfig
    settings: SearchSettings
    trainer: Trainer
    space: space_lib.Space
    study: Study


def read_config(values: Mapping[str, Any]) -> tuple[RunConfig, SearchSettings]:
    """The run and the search of a config such as `configs/nas_quickstart.py`, as a nested dictionary.

    Raises:
      InputError: a field is unknown, missing or out of range.
    """
    if "search" not in values:
        raise InputError(
            "the configuration has no search fields: start from --config=nas_quickstart, which has them all"
        )
    check_fields("search", SearchSettings, values["search"])
    config = RunConfig.from_dict(values)
    if config.train.accumulation_steps > 1:
        raise InputError(
            f"train.accumulation_steps is {config.train.accumulation_steps}, but a search trains whole batches: set it "
            "to 1"
        )
    if not config.train.score_test:
        raise InputError(
            "train.score_test is False, but a search scores its best model on test images when it ends: leave it True"
        )
    if config.init_from:
        raise InputError(
            f"init_from is {config.init_from!r}, but the models of a search start from random values: leave it empty"
        )
    if config.train.rounds.steps:
        raise InputError(
            f"train.rounds.steps is {config.train.rounds.steps}, but a search trains without rounds: set it to 0"
        )
    if config.train.teacher:
        raise InputError(
            f"train.teacher is {config.train.teacher!r}, but a search trains on labels alone: leave it empty, then "
            "train the lanes that the search found with the teacher"
        )
    return config, SearchSettings(**values["search"])


def make_space(config: RunConfig, settings: SearchSettings) -> space_lib.Space:
    """The space of mixes that fit the devices of a search.

    Raises:
      InputError: there are none, or the configuration has settings that some of its lanes cannot be trained with.
    """
    spec = config.replace({"model.name": "mlcn", "model.lanes": settings.baseline}).model_spec(*config.data.shape())
    every_kind = ",".join([settings.baseline, *(f"{kind}:w1" for kind in settings.lane_kinds)])
    try:
        check_settings(config, dataclasses.replace(spec, lanes=every_kind))
        check_independent(dataclasses.replace(spec, lanes=every_kind))
    except InputError as error:
        raise InputError(f"search.baseline={settings.baseline}, search.kinds={settings.kinds}: {error}") from error
    return space_lib.make_space(
        settings.devices,
        spec,
        config.train.batch_size,
        kinds=settings.lane_kinds,
        max_width=settings.max_width,
        max_depth=settings.max_depth,
        baseline=settings.baseline,
        tolerance=settings.tolerance,
        costs=settings.costs,
    )


def storage_url(settings: SearchSettings, workdir: Path) -> str:
    """The database of a search: the one that is given, or a file in its workdir."""
    path = str(workdir.resolve() / "search.db").replace("%", "%25")  # what follows one is decoded
    return settings.storage or f"sqlite:///{path}"


def open_search(
    config: RunConfig,
    settings: SearchSettings,
    workdir: Path,
    *,
    create: bool,
    programs: dict[tuple, Any] | None = None,
) -> Search:
    """Loads the data, computes what lanes cost and opens the storage; `programs` is as in `trials.Trainer`.

    `create` is as in `study.Study`.

    Raises:
      InputError: the data, the devices or the storage cannot be used.
    """
    _log.info("loading the data: %s", config.data.name)
    trainer = Trainer(
        config, settings.num_epochs, settings.num_repeats, settings.num_images, settings.scored_epochs, programs
    )
    _log.info("%d training and %d validation images", len(trainer.train.labels), len(trainer.validation.labels))
    _log.info("computing what lanes cost on the devices: %s", settings.devices)
    space = make_space(config, settings)
    _log.info("%d kinds of lanes for %d devices", len(space.menu), len(space.buckets))
    facts = {
        name: value
        for name, value in config.flat_as_before().items()
        if name not in _FREE and not name.startswith("parallel.")
    } | facts_of(settings)
    facts[ROUNDING] = config.parallel.exchange_dtype
    facts[IMAGES], facts[VALIDATION] = datasets.digest(trainer.train), datasets.digest(trainer.validation)
    facts[PROFILES] = [host.sha256_of(path) for path in space_lib.profiles_of(settings.devices)]
    url = storage_url(settings, workdir)
    return Search(config, settings, trainer, space, Study(settings, facts, url, create=create))

"""A search as an Optuna study: which mix each trial gets, what became of it, and workers that come, die and go.

Every model of a search has an index. Its trial waits in the study's storage until a worker takes it; one whose worker
is not heard of for two heartbeats is put back. An index thus ends once, whatever happens to workers.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import random
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.lanes import LANE_KINDS, parse_lanes
from mlcn_jax.search import Mix, Space
from mlcn_jax.trials import Score

try:
    import optuna
    import sqlalchemy
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise InputError("a search needs Optuna: pip install optuna") from error

_log = logging.getLogger(__name__)

METHODS = ("random", "evolution", "halving", "tpe", "nsgaii")
BASELINE = -1  # index of the model that all others are compared with
_VERSION = 1  # of what is stored
_MAX_DEATHS = 3  # workers that a model may take with it, by memory that the machine does not have, say
_PUT_BACK_SECONDS = 2.0  # after which nobody else is about to do it
_LOCK_SECONDS = 30.0  # to wait for another worker's transaction in SQLite
_POPULATION, _TOURNAMENT = 8, 5  # of evolution
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
_FREE_ON_RESUME = {"num_models", "max_training_seconds", "storage", "heartbeat_seconds"}

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """What to search for and how; `configs/nas_quickstart.py` describes each field."""

    devices: str
    kinds: str
    max_width: int
    max_depth: int
    baseline: str
    tolerance: float
    method: str
    num_models: int
    num_epochs: int
    num_repeats: int
    num_images: int
    reduction_factor: int
    max_training_seconds: float
    seed: int
    name: str
    storage: str
    heartbeat_seconds: int

    def __post_init__(self):
        for field, least in (
            *(("max_width", 1), ("max_depth", 1), ("num_models", 1), ("num_epochs", 1), ("num_repeats", 1)),
            *(("num_images", 0), ("reduction_factor", 2), ("max_training_seconds", 0), ("seed", 0)),
            ("heartbeat_seconds", 1),
        ):
            if getattr(self, field) < least:
                raise InputError(f"search.{field} is {getattr(self, field)}; it must be {least} or more")
        if not 0 < self.tolerance <= 1:
            raise InputError(f"search.tolerance is {self.tolerance}; it must be above 0, and at most 1")
        if self.method not in METHODS:
            raise InputError(f"search.method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        unknown = [kind for kind in self.lane_kinds if kind not in LANE_KINDS]
        if unknown or not self.lane_kinds:
            raise InputError(f"search.kinds is {self.kinds!r}; it must be some of {', '.join(LANE_KINDS)}")
        parse_lanes(self.baseline)

    @property
    def lane_kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind.strip() for kind in self.kinds.split(",") if kind.strip()))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the search and what became of it.

    Attributes:
      index: `BASELINE`, or 0 and up.
      state: `complete`, `stopped early`, `failed`, `running` or `waiting`.
      lanes: all of them, as text; empty before it is known.
      mix: the lanes of each device, as places in the menu.
      origin: how the mix was found: `draw`, `baseline` or the name of a move.
      score: after the last epoch that it was trained; None before the first.
      accuracies: after each epoch.
      seconds: of training, compiling and scoring.
      ended: seconds since 1970 at its end; 0 before.
      reason: why it failed.
    """

    index: int
    state: str
    lanes: str
    mix: Mix
    origin: str
    score: Score | None
    accuracies: tuple[float, ...]
    seconds: float
    ended: float
    reason: str

    @property
    def train_seconds(self) -> float:
        return self.score.train_seconds if self.score else 0.0


class Study:
    """A search in its storage.

    Args:
      settings: of the search.
      facts: all that decides its results, by names; a study that was started with others is refused.
      url: SQLAlchemy's, of the storage.
      create: whether to start the study where there is none, which only one process may do.

    Raises:
      InputError: the storage cannot be used, or holds no such study, or one with other facts.
    """

    def __init__(self, settings: SearchSettings, facts: Mapping[str, Any], url: str, *, create: bool):
        self._settings = settings
        self.evaluate_seconds = 0.0  # spent by this process in training and scoring models
        self._storage = _open_storage(url, settings.heartbeat_seconds)
        with storage_errors(url):
            stored = [name for name in optuna.get_all_study_names(self._storage) if name == settings.name]
            if not stored and not create:
                raise InputError(
                    f"{url} holds no search named {settings.name!r}: start it without --worker first (search.name)"
                )
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=settings.name,
                load_if_exists=True,
                direction="maximize",
                sampler=self._sampler(),
                pruner=self._pruner(),
            )
            mine = json.loads(json.dumps({"version": _VERSION, **facts}))
            theirs = self._study.user_attrs.get("facts")
            if theirs is None and create:
                self._study.set_user_attr("facts", mine)
                theirs = mine
        rows = [
            f"  {field}: {(theirs or {}).get(field)!r} there, {mine.get(field)!r} now"
            for field in sorted(set(mine) | set(theirs or {}))
            if (theirs or {}).get(field) != mine.get(field)
        ]
        if rows:
            raise InputError(
                f"{url} holds a search named {settings.name!r} with other settings:\n"
                + "\n".join(rows)
                + "\ngive the same ones to go on with it, or another search.name or --workdir"
            )

    def _sampler(self) -> "optuna.samplers.BaseSampler":
        seed = self._settings.seed
        if self._settings.method == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
        if self._settings.method == "nsgaii":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=_POPULATION)
        return optuna.samplers.RandomSampler(seed=seed)

    def _pruner(self) -> "optuna.pruners.BasePruner":
        if self._settings.method != "halving":
            return optuna.pruners.NopPruner()
        return optuna.pruners.SuccessiveHalvingPruner(reduction_factor=self._settings.reduction_factor)

    def enqueue(self) -> bool:
        """Makes every model that has no trial wait for a worker, and those whose worker ended without noting a reason.

        One process may call it at a time.

        Returns:
          Whether any model is still to be trained.
        """
        known: dict[int, FrozenTrial] = {}
        for trial in self._trials():
            known[trial.user_attrs["index"]] = trial
        grace, unfinished = 2 * self._settings.heartbeat_seconds, False
        for index in range(BASELINE, self._settings.num_models):
            last = known.get(index)
            if last is None:
                self._study.enqueue_trial({}, user_attrs={"index": index})
            elif last.state == TrialState.RUNNING and "model" not in last.user_attrs:
                if _seconds_since(last.datetime_start) > grace:
                    # Its worker died before the first heartbeat, without which nobody else would notice.
                    self._study.tell(last.number, state=TrialState.FAIL)
            elif last.state == TrialState.FAIL and "reason" not in last.user_attrs:
                if _seconds_since(last.datetime_complete) > _PUT_BACK_SECONDS:
                    self._study.enqueue_trial({}, user_attrs=_kept(last))
            elif last.state.is_finished():
                continue
            unfinished = True
        return unfinished

    def work(
        self,
        space: Space,
        evaluate: Callable[[str], Generator[Score, None, None]],
        *,
        to_the_end: bool,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes one waiting trial after the other until none is left.

        Args:
          space: of the mixes.
          evaluate: trains the model of some lanes, given as text, and yields its score after each epoch. What it raises
            for lack of memory, a loss that is not finite or an `InputError` is noted, and the search goes on.
          to_the_end: whether to wait for the trials of other workers, and train those again whose workers die.
          done: called after each trial.
        """

        def objective(trial: "optuna.Trial") -> float:
            return self._run(trial, space, evaluate)

        while True:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                optuna.storages.fail_stale_trials(self._study)
            unfinished = self.enqueue() if to_the_end else False
            states, spent = {trial.state for trial in self._trials()}, self._spent()
            if TrialState.WAITING in states and not spent:
                try:
                    self._study.optimize(objective, n_trials=1, catch=(_Failed,))
                except optuna.exceptions.UpdateFinishedTrialError:
                    _log.warning("this worker was not heard of for too long: its model went to another one")
                done()
            elif unfinished and (not spent or TrialState.RUNNING in states):
                time.sleep(1.0)
            else:
                return

    def _spent(self) -> bool:
        """Whether all training seconds are used up."""
        most = self._settings.max_training_seconds
        return 0 < most <= sum(model.train_seconds for model in self.models())

    def _run(
        self, trial: "optuna.Trial", space: Space, evaluate: Callable[[str], Generator[Score, None, None]]
    ) -> float:
        if "index" not in trial.user_attrs:
            raise _Failed("another worker took the last trial first")
        index = trial.user_attrs["index"]
        mix: Mix = ()
        if index == BASELINE:
            origin, lanes = "baseline", self._settings.baseline
        else:
            mix, origin = self._propose(index, trial, space)
            lanes = space.text(mix)
        self._storage.record_heartbeat(trial._trial_id)  # optuna's thread may not have come to it; see `enqueue`
        trial.set_user_attr("model", {"origin": origin, "lanes": lanes, "mix": mix})
        seconds, scores, score = 0.0, evaluate(lanes), None
        try:
            for epoch in itertools.count(1):
                started = time.monotonic()
                try:
                    after = next(scores, None)
                finally:
                    seconds += time.monotonic() - started
                    self.evaluate_seconds += time.monotonic() - started
                if after is None:
                    break
                score = after
                trial.set_user_attr("score", dataclasses.asdict(score) | {"seconds": seconds})
                trial.report(score.accuracy, epoch)
                if epoch < self._settings.num_epochs and trial.should_prune():
                    _log.info("model %d: %.2f %% after epoch %d, stopped early", index, 100 * score.accuracy, epoch)
                    raise optuna.TrialPruned
        except (InputError, Diverged, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            trial.set_user_attr("reason", f"{type(error).__name__}: {str(error).splitlines()[0]}")
            _log.warning("model %d failed (%s): %s", index, lanes, error)
            raise _Failed from error
        finally:
            scores.close()
        assert score is not None, "nothing was trained"
        _log.info("model %d: %.2f %%, %.0f s (%s)", index, 100 * score.accuracy, seconds, lanes)
        return score.accuracy

    def _propose(self, index: int, trial: "optuna.Trial", space: Space) -> tuple[Mix, str]:
        """A mix by the method of the search; for random ones it depends on seed and index alone."""
        rng = random.Random(f"{self._settings.seed} {index}")
        if self._settings.method == "evolution":
            ended = [model for model in self.models() if model.state == "complete" and model.index != BASELINE]
            if len(ended) >= min(_POPULATION, self._settings.num_models // 4):
                youngest = sorted(ended, key=lambda model: model.ended)[-_POPULATION:]
                rivals = rng.sample(youngest, min(_TOURNAMENT, len(youngest)))
                return space.mutate(rng, max(rivals, key=lambda model: model.accuracies[-1]).mix)
        elif self._settings.method in ("tpe", "nsgaii"):
            widths, depths = ([getattr(lane, name) for lane in space.menu] for name in ("width", "depth"))
            weights = space.taste(
                mlcn2=trial.suggest_float("mlcn2", 0, 1),
                width=trial.suggest_float("width", min(widths), max(widths)) if max(widths) > 1 else 1,
                depth=trial.suggest_float("depth", min(depths), max(depths)) if max(depths) > 1 else 1,
                spread=trial.suggest_float("spread", 0.3, 3, log=True),
            )
            return space.draw(rng, weights=weights), "draw"
        return space.draw(rng), "draw"

    def _trials(self) -> list["FrozenTrial"]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if "index" in trial.user_attrs]

    def models(self) -> list[Model]:
        """All models, by index; of one that was put back, its newest trial."""
        latest = {trial.user_attrs["index"]: trial for trial in self._trials()}
        return [_model(latest[index]) for index in sorted(latest)]

    def note(self, name: str, value: Any) -> None:
        """Keeps something beside the trials, ready for JSON."""
        self._study.set_user_attr(name, value)

    def noted(self, name: str) -> Any:
        """What was kept; None if nothing was."""
        return self._study.user_attrs.get(name)


class _Failed(Exception):
    """A trial failed and the search goes on."""


def facts_of(settings: SearchSettings) -> dict[str, Any]:
    """What of the settings decides the results, by full names."""
    values = dataclasses.asdict(settings)
    return {f"search.{name}": value for name, value in values.items() if name not in _FREE_ON_RESUME}


def best(models: Sequence[Model]) -> Model | None:
    """The model with the highest accuracy of those that were trained to the end, without the baseline."""
    complete = [model for model in models if model.state == "complete" and model.index != BASELINE]
    return max(complete, key=lambda model: model.accuracies[-1], default=None)


def _model(trial: "FrozenTrial") -> Model:
    attrs, state = trial.user_attrs, trial.state
    names = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "stopped early", TrialState.FAIL: "failed"}
    model, score = attrs.get("model", {}), dict(attrs.get("score", {}))
    seconds = score.pop("seconds", 0.0)
    return Model(
        index=attrs["index"],
        state=names.get(state, state.name.lower()),
        lanes=model.get("lanes", ""),
        mix=tuple(tuple(lanes) for lanes in model.get("mix", ())),
        origin=model.get("origin", ""),
        score=Score(**score) if score else None,
        accuracies=tuple(trial.intermediate_values[step] for step in sorted(trial.intermediate_values)),
        seconds=seconds,
        ended=trial.datetime_complete.timestamp() if trial.datetime_complete else 0.0,
        reason=attrs.get("reason", ""),
    )


def _seconds_since(moment: "datetime.datetime | None") -> float:
    return (datetime.datetime.now() - moment).total_seconds() if moment else 0.0


def _kept(trial: "FrozenTrial") -> dict[str, Any]:
    return {name: trial.user_attrs[name] for name in ("index", "deaths") if name in trial.user_attrs}


def _put_back(study: "optuna.Study", trial: "FrozenTrial") -> None:
    """Has the model of a trial whose worker died trained again, unless that happened often."""
    attrs = _kept(trial)
    newer = study.get_trials(deepcopy=False)[trial.number + 1 :]
    if "index" not in attrs or any(other.user_attrs.get("index") == attrs["index"] for other in newer):
        return
    attrs["deaths"] = attrs.get("deaths", 0) + 1
    if attrs["deaths"] < _MAX_DEATHS:
        _log.info("model %d goes back: its worker is gone", attrs["index"])
        study.enqueue_trial({}, user_attrs=attrs)
        return
    attrs["model"] = trial.user_attrs.get("model", {})
    attrs["reason"] = f"{attrs['deaths']} workers died while they trained it; is there too little memory?"
    study.add_trial(optuna.create_trial(state=TrialState.FAIL, user_attrs=attrs))


def _open_storage(url: str, heartbeat_seconds: int) -> "optuna.storages.RDBStorage":
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine = {"connect_args": {"timeout": _LOCK_SECONDS}}
    try:
        with storage_errors(url), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs=engine,
                heartbeat_interval=heartbeat_seconds,
                grace_period=2 * heartbeat_seconds,
                heartbeat_stale_trial_callback=_put_back,
            )
    except ImportError as error:
        raise InputError(
            f"search.storage={_shown(url)} needs a driver that is not installed ({error}); for PostgreSQL: "
            "pip install 'psycopg[binary]'"
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"the search's storage {_shown(url)} is of another version of Optuna ({optuna.__version__} is installed): "
            f"{error}"
        ) from error


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turns what a storage raises into an InputError that says how to mend it; what has finished stays in it."""
    try:
        yield
    except sqlalchemy.exc.ArgumentError as error:
        raise InputError(
            f"search.storage={_shown(url)} is no address of a database ({error}): give one such as "
            "sqlite:////folder/search.db or postgresql://user:password@host/database"
        ) from error
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error if isinstance(error, sqlalchemy.exc.SQLAlchemyError) else error.__cause__ or error
        detail = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
        if "no column" in detail or "malformed" in detail or "not a database" in detail:
            hint = "it is no storage of a search: give another search.storage or --workdir"
        elif "lock" in detail:
            hint = "another program holds it: wait for it or end it, and keep SQLite files off network folders"
        elif "full" in detail:
            hint = "free disk space"
        else:
            hint = "see that the database runs, that its address is right and that you may write there"
        raise InputError(
            f"the search's storage {_shown(url)} cannot be used ({detail}): {hint}. Models that have finished are "
            "kept; the same command goes on"
        ) from error


def _shown(url: str) -> str:
    """An address without its password."""
    try:
        return sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url

"""A search as an Optuna study: which mix each trial gets, its result, and workers that may start, stop or die.

Every model of a search has an index. Its trial waits in the study's storage until a worker takes it. If that worker
sends no heartbeat for two intervals, the trial fails without a reason, and the process that started or continues the
search queues its model again. So each index ends exactly once, whatever happens to workers.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import random
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlcn_jax.errors import InputError, differences
from mlcn_jax.search import propose
from mlcn_jax.search.models import BASELINE, Model, model_from, model_of
from mlcn_jax.search.settings import BEFORE, NOT_NOTED, ROUNDING, VALIDATION, SearchSettings
from mlcn_jax.search.space import Mix, Space
from mlcn_jax.search.storage import open_storage, shown, storage_errors
from mlcn_jax.search.trials import FAILURES, Score, reason_of

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

_log = logging.getLogger(__name__)

_VERSION = 1  # of the format of what is stored
_MAX_DEATHS = 5  # workers that may die while they train one model, for lack of memory, for example
_START_SECONDS = 30  # how long a worker waits for the search to be started
_POPULATION, _TOURNAMENT = 8, 5  # of evolution


class _WithoutLost:
    """A study without the trials whose worker was lost or stopped: their models have another trial, and count once."""

    def __init__(self, study: Any):
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def get_trials(self, **options: Any) -> "list[FrozenTrial]":
        from optuna.trial import TrialState

        trials = self._study.get_trials(**options)
        return [trial for trial in trials if trial.state != TrialState.FAIL or "reason" in trial.user_attrs]


class Study:
    """A search in its storage.

    Args:
      settings: those of the search.
      facts: every setting that determines its results, by name; a stored study with other facts is rejected.
      url: the storage, as SQLAlchemy writes it.
      create: whether to create the study if there is none; only one process may do so.

    Raises:
      InputError: the storage cannot be used, or holds no such study, or one with other facts.
    """

    def __init__(self, settings: SearchSettings, facts: Mapping[str, Any], url: str, *, create: bool):
        self._settings = settings
        self.evaluate_seconds = 0.0  # spent by this process in training and scoring models
        self._first_seen: dict[int, float] = {}  # when each running trial that had not begun was first seen
        self._lost = False  # whether the last trial was given to another worker while this one trained it
        self._interrupt: KeyboardInterrupt | None = None  # that ended the last trial
        self._plan: propose.Plan | None = None
        self._storage = open_storage(url, settings.heartbeat_seconds)
        import optuna  # `open_storage` has raised if it is missing

        address = shown(url)
        with storage_errors(url):
            stored = settings.name in optuna.get_all_study_names(self._storage)
            if not stored and not create:
                raise InputError(
                    f"{address} holds no search named {settings.name!r}: start it first, with the same command without "
                    "--worker, or give the search.name of one that was started"
                )
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=settings.name,
                load_if_exists=True,
                direction="maximize",
                pruner=self._pruner(),
            )
            mine = json.loads(json.dumps({"version": _VERSION, **facts}))
            theirs = self.noted("facts")
            if theirs is None and create:
                self.enqueue()
                self.note("facts", mine)  # after which workers may begin
                theirs = mine
            for _ in range(_START_SECONDS):
                if theirs is not None:
                    break
                time.sleep(1.0)
                theirs = self.noted("facts")
            else:
                if theirs is None:
                    raise InputError(
                        f"{address}: the search {settings.name!r} has not been started: start it with the "
                        "same command without --worker"
                    )
        before = BEFORE | {name: mine.get(name) for name in NOT_NOTED}
        if VALIDATION in theirs:  # searches that noted these images noted roundings, too, but at first not the default
            before[ROUNDING] = "float32"
        theirs = {name: value for name, value in before.items() if name in mine} | theirs
        if rows := differences(theirs, mine, sorted(set(mine) | set(theirs))):
            raise InputError(
                f"{address} holds a search named {settings.name!r} with other settings:\n"
                + "\n".join(rows)
                + "\nuse the same settings to continue it, or another search.name or --workdir"
            )

    def _sampler(self, trials: int) -> "optuna.samplers.BaseSampler":
        """A sampler for the trial that follows `trials` others; they differ, so no session repeats another, nor
        a worker another but where both begin at once."""
        import optuna

        seed = random.Random(f"{self._settings.seed} {trials}").getrandbits(32)
        if self._settings.method == "tpe":
            return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
        if self._settings.method == "nsgaii":
            return optuna.samplers.NSGAIISampler(seed=seed, population_size=_POPULATION)
        return optuna.samplers.RandomSampler(seed=seed)

    def _pruner(self) -> "optuna.pruners.BasePruner":
        import optuna

        if self._settings.method != "halving":
            return optuna.pruners.NopPruner()
        least, factor = self._settings.min_epochs, self._settings.reduction_factor

        class Pruner(optuna.pruners.SuccessiveHalvingPruner):
            def prune(self, study: Any, trial: "FrozenTrial") -> bool:
                return super().prune(_WithoutLost(study), trial)  # type: ignore[arg-type]

        return Pruner(min_resource=least, reduction_factor=factor)

    def enqueue(self) -> bool:
        """Queues every model that has no trial, and those whose worker ended without a reason.

        Only one process may call it at a time.

        Returns:
          Whether any model is still to be trained.
        """
        from optuna.trial import TrialState

        latest = {trial.user_attrs["index"]: trial for trial in self._trials()}
        self._withdraw(trial for index, trial in latest.items() if index >= self._settings.num_models)
        grace, unfinished = 2 * self._settings.heartbeat_seconds, False
        for index in range(self._settings.num_models):
            last = latest.get(index)
            if last is None:
                self._study.enqueue_trial({}, user_attrs={"index": index})
            elif last.state == TrialState.RUNNING and not {"begun", "model"} & set(last.user_attrs):
                first_seen = self._first_seen.setdefault(last.number, time.monotonic())
                if time.monotonic() - first_seen > grace:
                    # Its worker died before its first heartbeat; until then Optuna does not count it as dead.
                    self._study.tell(last.number, state=TrialState.FAIL)
            elif last.state == TrialState.FAIL and "reason" not in last.user_attrs:
                self._put_back(last)
            elif last.state.is_finished():
                continue
            unfinished = True
        return unfinished

    def _withdraw(self, trials: Iterable["FrozenTrial"]) -> None:
        """Ends those of the trials that wait: they were queued when `search.num_models` was larger.

        They are queued again if it is raised.
        """
        import optuna

        for trial in trials:
            if trial.state == optuna.trial.TrialState.WAITING:
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # a worker has just begun it
                    self._storage.set_trial_user_attr(trial._trial_id, "stopped", True)
                    self._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)

    def _put_back(self, trial: "FrozenTrial") -> None:
        """Queues the model of a trial whose worker died, unless that has happened too often."""
        died = "stopped" not in trial.user_attrs  # a worker that a user stopped does not count
        attrs = {"index": trial.user_attrs["index"], "deaths": trial.user_attrs.get("deaths", 0) + died}
        if attrs["deaths"] < _MAX_DEATHS:
            _log.info(
                "model %d will be trained again: its worker %s", attrs["index"], "died" if died else "was stopped"
            )
            self._study.enqueue_trial({}, user_attrs=attrs)
            return
        import optuna

        attrs["model"] = trial.user_attrs.get("model", {})
        attrs["reason"] = f"{attrs['deaths']} workers died while they trained it; this machine may lack memory for it"
        self._study.add_trial(optuna.create_trial(state=optuna.trial.TrialState.FAIL, user_attrs=attrs))

    def work(
        self,
        space: Space,
        evaluate: Callable[[str], Generator[Score, None, None]],
        *,
        to_the_end: bool,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes waiting trials one by one until none is left.

        Args:
          space: the space of mixes.
          evaluate: trains the model of the given lanes (as text) and yields its score after each of
            `SearchSettings.scored_epochs`. If it raises one of `FAILURES` (out of memory, a loss that is not finite, or
            `InputError`), the reason is stored and the search goes on.
          to_the_end: whether to wait for the trials of other workers, and retrain those whose worker died.
          done: called after each trial.
        """
        import optuna
        from optuna.trial import TrialState

        def objective(trial: "optuna.Trial") -> float:
            self._lost, self._interrupt = False, None
            try:
                value = self._run(trial, space, evaluate)
            except optuna.exceptions.UpdateFinishedTrialError:
                self._lost = True
                raise
            except KeyboardInterrupt as interrupt:
                self._interrupt = interrupt  # optuna raises another error where the trial went to another worker
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                    trial.set_user_attr("stopped", True)
                raise
            self._lost = self._storage.get_trial(trial._trial_id).state.is_finished()
            return value

        if to_the_end:
            self._train_baseline(evaluate)
        waiting = False  # for other workers
        while True:
            with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
                optuna.storages.fail_stale_trials(self._study)
            unfinished = self.enqueue() if to_the_end else False
            trials = self._trials()
            states, spent = {trial.state for trial in trials}, self._spent(trials)
            if TrialState.WAITING in states and not spent:
                waiting = False
                self._study.sampler = self._sampler(sum(t.state != TrialState.WAITING for t in trials))
                try:
                    self._study.optimize(objective, n_trials=1, catch=(_Failed,))
                except Exception:
                    if self._interrupt is not None:
                        raise self._interrupt from None
                    if not self._lost:
                        raise
                    _log.warning("this worker sent no heartbeat for too long: its model went to another worker")
                done()
            elif unfinished and (not spent or TrialState.RUNNING in states):
                if not waiting:
                    running = sum(trial.state == TrialState.RUNNING for trial in trials)
                    _log.info("waiting for other workers, which are training %d more", running)
                waiting = True
                time.sleep(1.0)
            else:
                if spent and TrialState.WAITING in states:
                    most = self._settings.max_training_seconds
                    _log.info("search.max_training_seconds=%g is used up: %s", most, self.progress())
                return

    def progress(self) -> str:
        """How many models have ended, are in training and are waiting, as text."""
        latest = self._latest()
        states = [
            "waiting" if trial.state.name == "FAIL" and "reason" not in trial.user_attrs else trial.state.name.lower()
            for trial in latest.values()
        ]
        running = states.count("running")
        ended = len(states) - running - states.count("waiting")
        total = max(len(states), self._settings.num_models)
        return f"{ended} of {total} models have ended, {running} in training, {total - ended - running} waiting"

    def _train_baseline(self, evaluate: Callable[[str], Generator[Score, None, None]]) -> None:
        """Trains the model that all others are compared with, and stores its score with the study.

        It is not a trial, since samplers and pruners would learn from it.
        """
        if self.noted("baseline"):
            return
        _log.info("training the baseline: %s", self._settings.baseline)
        accuracies: list[float] = []
        found: dict[str, Any] = {"lanes": self._settings.baseline, "accuracies": [], "reason": ""}
        try:
            for score, seconds in self._timed(evaluate(self._settings.baseline)):
                accuracies.append(score.accuracy)
                found |= {"accuracies": accuracies, "score": _stored(score, seconds)}
        except FAILURES as error:
            found["reason"] = reason_of(error)
            _log.warning("the baseline failed (%s): %s", self._settings.baseline, error)
        else:
            _log.info("baseline: %.2f %%, %.0f s (%s)", 100 * score.accuracy, seconds, self._settings.baseline)
        self.note("baseline", found)

    def _timed(self, scores: Generator[Score, None, None]) -> Iterator[tuple[Score, float]]:
        """Each score with the seconds spent on it and on those before it."""
        seconds = 0.0
        with contextlib.closing(scores):
            while True:
                started = time.monotonic()
                try:
                    score = next(scores, None)
                finally:
                    seconds += time.monotonic() - started
                    self.evaluate_seconds += time.monotonic() - started
                if score is None:
                    return
                yield score, seconds

    def _spent(self, trials: Sequence["FrozenTrial"]) -> bool:
        """Whether all training seconds are used up."""
        most = self._settings.max_training_seconds
        scores = (trial.user_attrs.get("score") for trial in trials)
        return 0 < most <= sum(score["train_seconds"] for score in scores if score)

    def _run(
        self, trial: "optuna.Trial", space: Space, evaluate: Callable[[str], Generator[Score, None, None]]
    ) -> float:
        import optuna

        if "index" not in trial.user_attrs:
            raise _Failed("another worker took the last trial first")
        index = trial.user_attrs["index"]
        self._storage.record_heartbeat(trial._trial_id)  # Optuna's thread may not have sent one; see `enqueue`
        trial.set_user_attr("begun", True)
        mix, origin, lanes, _ = self._propose(index, trial, space)
        trial.set_user_attr("model", {"origin": origin, "lanes": lanes, "mix": mix})
        _log.info("model %d (%d of %d, %s): training %s", index, index + 1, self._settings.num_models, origin, lanes)
        try:
            for score, seconds in self._timed(evaluate(lanes)):
                trial.set_user_attr("score", _stored(score, seconds))
                trial.report(score.accuracy, score.epoch)
                if score.epoch < self._settings.num_epochs and trial.should_prune():
                    _log.info("model %d: %.2f %%, stopped after epoch %d", index, 100 * score.accuracy, score.epoch)
                    raise optuna.TrialPruned
        except FAILURES as error:
            trial.set_user_attr("reason", reason_of(error))
            _log.warning("model %d failed (%s): %s", index, lanes, error)
            traceback.clear_frames(error.__traceback__)  # its frames may keep large arrays alive
            raise _Failed from error
        _log.info("model %d: %.2f %%, %.0f s (%s)", index, 100 * score.accuracy, seconds, lanes)
        return score.accuracy

    def _propose(self, index: int, trial: "optuna.Trial", space: Space) -> propose.Proposal:
        """A mix chosen by the search's method; its lanes are those of no other model if a few draws can find such.

        A random mix depends only on the seed and the index, whichever worker draws it and when (`propose.Plan`). The
        other methods look at the stored models; two workers that draw the same lanes at the same time both train them.
        """
        if self._settings.method in ("random", "halving"):
            self._plan = self._plan or propose.Plan(self._settings.seed, space)
            found, other = self._plan.of(index)
        else:
            models = [model for model in self.models() if model.index not in (BASELINE, index)]
            theirs = {model.lanes: model.index for model in reversed(models)}
            rng = propose.generator(self._settings.seed, index)
            found = propose.first_new(self._candidates(trial, space, models, rng), theirs, space)
            other = theirs.get(found.lanes)
        if other is not None:
            _log.warning(
                "model %d repeats model %d: %d draws gave no new lanes; with larger search.devices, search.max_width "
                "or search.max_depth there are more to choose from",
                *(index, other, 1 + propose.REDRAWS),
            )
        elif found.redraws:
            _log.info(
                "model %d: another model already has the lanes drawn first, so draw %d is used",
                index,
                1 + found.redraws,
            )
        return found

    def _candidates(
        self, trial: "optuna.Trial", space: Space, models: Sequence[Model], rng: random.Random
    ) -> Iterator[tuple[Mix, str]]:
        """Candidate mixes, each with its origin, from a method that learns from the models so far."""
        if self._settings.method == "evolution":
            ended = [model for model in models if model.state == "complete"]
            if len(ended) < max(2, min(_POPULATION, self._settings.num_models // 4)):
                return propose.drawn(space, rng)
            youngest = sorted(ended, key=lambda model: model.ended)[-_POPULATION:]
            rivals = rng.sample(youngest, min(_TOURNAMENT, len(youngest)))
            parent = max(rivals, key=lambda model: model.accuracies[-1]).mix
            return (space.mutate(rng, parent) for _ in itertools.count())
        kinds = sorted({lane.kind for lane in space.menu})
        widths, depths = ([getattr(lane, name) for lane in space.menu] for name in ("width", "depth"))
        weights = space.taste(
            kinds={kind: trial.suggest_float(kind, 0, 1) for kind in kinds} if len(kinds) > 1 else {},
            width=trial.suggest_float("width", min(widths), max(widths)) if max(widths) > 1 else 1,
            depth=trial.suggest_float("depth", min(depths), max(depths)) if max(depths) > 1 else 1,
            spread=trial.suggest_float("spread", 0.3, 3, log=True),
        )
        return propose.drawn(space, rng, weights)

    def _trials(self) -> list["FrozenTrial"]:
        return [trial for trial in self._study.get_trials(deepcopy=False) if "index" in trial.user_attrs]

    def models(self) -> list[Model]:
        """The baseline, once trained, then all models by index; a model that was queued again has its newest trial."""
        latest = self._latest()
        baseline = self.noted("baseline")
        first = []
        if baseline:
            state = "failed" if baseline["reason"] else "complete"
            model = {"lanes": baseline["lanes"], "origin": "baseline"}
            attrs = {
                "index": BASELINE,
                "model": model,
                "score": baseline.get("score", {}),
                "reason": baseline["reason"],
            }
            first = [model_from(attrs, state, baseline["accuracies"])]
        return first + [model_of(latest[index]) for index in sorted(latest)]

    def _latest(self) -> dict[int, "FrozenTrial"]:
        """The newest trial of every model that is wanted or was begun, by index."""
        latest = {trial.user_attrs["index"]: trial for trial in self._trials()}
        wanted = self._settings.num_models
        return {i: trial for i, trial in latest.items() if i < wanted or "model" in trial.user_attrs}

    def note(self, name: str, value: Any) -> None:
        """Stores a JSON-serializable value with the study."""
        self._study.set_user_attr(name, value)

    def noted(self, name: str) -> Any:
        """The value stored under a name, or None."""
        return self._study.user_attrs.get(name)


class _Failed(Exception):
    """A trial failed and the search goes on."""


def _stored(score: Score, seconds: float) -> dict[str, Any]:
    return dataclasses.asdict(score) | {"seconds": seconds, "ended": time.time()}

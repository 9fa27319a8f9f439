"""Every model of a study ends once, whatever becomes of its workers; methods find a better region that was planted."""

import dataclasses
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from made_study import SETTINGS, make_score, make_space, make_study, planted, run
from optuna.trial import TrialState

from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.search import models as models_lib
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search import space, study
from mlcn_jax.search.run import _why_none


def test_all_models_and_the_baseline_are_trained_once_and_a_second_run_trains_none(tmp_path):
    trained = []

    def evaluate(lanes):
        trained.append(lanes)
        yield from planted(lanes)

    models = run(make_study(tmp_path), evaluate)
    assert [model.index for model in models] == [-1, *range(6)]
    assert {model.state for model in models} == {"complete"}
    assert trained == [model.lanes for model in models]
    assert models[0].lanes == "mlcn1:w1"
    assert run(make_study(tmp_path), evaluate) == models
    assert len(trained) == 7
    more = run(make_study(tmp_path, num_models=8), evaluate)
    assert more[:7] == models
    assert len(more) == len(trained) == 9
    assert models_lib.best(models) == max(models[1:], key=lambda model: model.accuracies[-1])


def test_models_that_are_no_longer_wanted_leave_the_queue_until_they_are_wanted_again(tmp_path):
    queued = make_study(tmp_path)
    queued.enqueue()
    fewer = make_study(tmp_path, num_models=2)
    assert [model.index for model in run(fewer)] == [-1, 0, 1]
    assert fewer.progress() == "2 of 2 models have ended, 0 in training, 0 waiting"
    assert [model.index for model in run(make_study(tmp_path, num_models=4))] == [-1, 0, 1, 2, 3]


def test_random_mixes_depend_on_the_seed_alone(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    mixes = [
        [model.mix for model in run(make_study(folder, seed=seed))]
        for folder, seed in zip(folders, (0, 0, 1), strict=True)
    ]
    assert mixes[0] == mixes[1] != mixes[2]
    rng = random.Random("0 3")
    assert mixes[0][4] == make_space().draw(rng)


def test_what_fails_is_noted_with_its_reason_and_the_search_goes_on(tmp_path):
    errors = iter([Diverged("the loss is nan"), RuntimeError("RESOURCE_EXHAUSTED: out of memory"), MemoryError()])

    def evaluate(lanes):
        error = None if lanes == "mlcn1:w1" else next(errors, None)
        if error:
            raise error
        yield from planted(lanes)

    models = run(make_study(tmp_path), evaluate)
    assert [model.state for model in models] == ["complete"] + ["failed"] * 3 + ["complete"] * 3
    assert [model.reason for model in models[1:4]] == [
        "Diverged: the loss is nan",
        "RuntimeError: RESOURCE_EXHAUSTED: out of memory",
        "MemoryError: no details",
    ]


def test_an_interrupted_model_is_trained_again(tmp_path):
    calls = []

    def evaluate(lanes):
        calls.append(lanes)
        if len(calls) == 3:
            raise KeyboardInterrupt
        yield from planted(lanes)

    with pytest.raises(KeyboardInterrupt):
        run(make_study(tmp_path), evaluate)
    models = run(make_study(tmp_path), evaluate)
    assert {model.state for model in models} == {"complete"}
    assert len(models) == 7
    assert calls[2] in calls[3:]  # the one that was interrupted, and no other
    assert len(calls) == 8


def test_an_interrupt_counts_also_where_the_model_went_to_another_worker(tmp_path):
    study = make_study(tmp_path)

    def evaluate(lanes):
        yield from planted(lanes)
        for trial in study._trials():  # none yet while the baseline is trained
            if trial.state == TrialState.RUNNING:
                study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(study, evaluate)


def work_slowly(folder, main):
    """A worker in a process of its own, which notes what it begins and ends."""

    def evaluate(lanes):
        log(folder, f"begin {lanes}")
        time.sleep(0.3)
        yield from planted(lanes)
        log(folder, f"end {lanes}")

    found = make_study(folder, create=main, num_models=10)
    found.work(make_space(), evaluate, to_the_end=main)


def log(folder, line):
    with (Path(folder) / "log").open("a") as file:
        file.write(line + "\n")


@pytest.mark.long
def test_after_kill_9_nothing_finished_is_lost_or_run_again(tmp_path):
    make_study(tmp_path, num_models=10).enqueue()
    context = multiprocessing.get_context("spawn")  # jax has threads, which a fork would lose
    workers = [context.Process(target=work_slowly, args=(tmp_path, main)) for main in (True, False)]
    for worker in workers:
        worker.start()
    while not (tmp_path / "log").exists() or (tmp_path / "log").read_text().count("begin") < 6:
        time.sleep(0.02)
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
    killed = (tmp_path / "log").read_text().splitlines()
    work_slowly(tmp_path, True)
    models = make_study(tmp_path, create=False, num_models=10).models()
    assert [model.index for model in models] == list(range(-1, 10))
    assert {model.state for model in models} == {"complete"}
    finished = {line.removeprefix("end ") for line in killed if line.startswith("end")}
    again = (tmp_path / "log").read_text().splitlines()[len(killed) :]
    begun_again = [line.removeprefix("begin ") for line in again if line.startswith("begin")]
    twice = finished & set(begun_again)
    assert len(twice) <= 1  # one may have ended just before it could be stored
    assert len(begun_again) == len(set(begun_again))


def die_at_work(folder):
    """Five workers, one after another, that any model but the baseline kills; forked before jax has threads."""
    for _ in range(5):
        worker = os.fork()
        if not worker:
            work_and_die(folder)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGKILL


def work_and_die(folder):

    def evaluate(lanes):
        if lanes != SETTINGS.baseline:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from planted(lanes)

    make_study(folder, num_models=1).work(make_space(), evaluate, to_the_end=True)


@pytest.mark.long
def test_a_model_whose_workers_die_again_and_again_fails_with_that_reason(tmp_path):
    workers = multiprocessing.get_context("spawn").Process(target=die_at_work, args=(tmp_path,))
    workers.start()
    workers.join()
    assert workers.exitcode == 0
    models = run(make_study(tmp_path, num_models=1))
    assert [model.state for model in models] == ["complete", "failed"]
    assert "5 workers died" in models[1].reason


def test_halving_stops_the_worse_half_early(tmp_path):
    def evaluate(lanes):
        (score,) = planted(lanes)
        for epoch in range(1, 5):
            yield dataclasses.replace(score, epoch=epoch, train_seconds=float(epoch))

    models = run(make_study(tmp_path, method="halving", num_models=24, num_epochs=4), evaluate)[1:]
    complete = [model for model in models if model.state == "complete"]
    stopped = [model for model in models if model.state == "stopped early"]
    assert len(complete) + len(stopped) == 24
    assert 0 < len(complete) < 12
    assert all(len(model.accuracies) == 4 for model in complete)
    assert max(m.accuracies[-1] for m in complete) == max(m.accuracies[-1] for m in models)
    assert sum(model.train_seconds for model in models) < 0.7 * 4 * 24


def test_halving_counts_a_model_once_that_was_interrupted_after_a_rung(tmp_path):
    """Of six models two go on: were the interrupted one, which is the best, counted twice, it would be both."""
    given, of_new = {}, iter([0.0, 0.5, 0.1, 0.2, 0.3, 0.05, 0.49])

    def evaluate(lanes):
        is_new = lanes not in given
        accuracy = given[lanes] if not is_new else given.setdefault(lanes, next(of_new))
        for epoch in (1, 2):
            yield dataclasses.replace(make_score(accuracy), epoch=epoch)
            if is_new and accuracy == 0.5:
                raise KeyboardInterrupt

    options = {"method": "halving", "num_epochs": 2, "reduction_factor": 3}
    with pytest.raises(KeyboardInterrupt):
        run(make_study(tmp_path, num_models=5, **options), evaluate)
    run(make_study(tmp_path, num_models=5, **options), evaluate)
    (*_, last) = run(make_study(tmp_path, num_models=6, **options), evaluate)
    assert (last.accuracies[0], last.state) == (0.49, "complete")


@pytest.mark.long
@pytest.mark.parametrize(
    ("tried", "num_models"),
    [("evolution", 24), *(pytest.param(name, 40, marks=pytest.mark.long) for name in ("tpe", "nsgaii"))],
)
def test_a_planted_better_region_is_found(tmp_path, tried, num_models):
    def reached(method, seed):
        folder = tmp_path / f"{method} {seed}"
        folder.mkdir()
        best = models_lib.best(run(make_study(folder, method=method, num_models=num_models, seed=seed)))
        return best.accuracies[-1]

    seeds = range(2)
    theirs = [reached("random", seed) for seed in seeds]
    mine = [reached(tried, seed) for seed in seeds]
    assert sum(mine) > sum(theirs) + 0.1, (mine, theirs)


def test_genetic_children_have_what_their_parents_have(tmp_path):
    found = make_study(tmp_path, method="nsgaii", num_models=24)
    run(found)
    widths = [trial.params["width"] for trial in found._trials()]
    assert len(set(widths[:8])) == 8
    assert set(widths[8:]) & set(widths[:8])  # crossed over, not drawn


def test_a_worker_that_was_taken_for_dead_goes_on_with_the_next_model(tmp_path):
    other = make_study(tmp_path)
    calls = []

    def evaluate(lanes):
        calls.append(lanes)
        if len(calls) == 3:  # the second model
            (running,) = [t for t in other._study.get_trials() if t.state == TrialState.RUNNING]
            other._study.tell(running.number, state=TrialState.FAIL)
        yield from planted(lanes)

    models = run(make_study(tmp_path), evaluate)
    assert {model.state for model in models} == {"complete"}
    assert len(models) == 7
    assert calls[2] in calls[3:]
    assert len(calls) == 8


def test_a_worker_that_proposes_for_long_is_not_taken_for_dead(tmp_path, monkeypatch):
    main, worker = make_study(tmp_path, num_models=1), make_study(tmp_path, num_models=1)
    propose, states = worker._propose, []

    def slowly(*args):
        main._first_seen = dict.fromkeys(range(9), -math.inf)
        main.enqueue()
        states.extend(trial.state for trial in main._trials())
        return propose(*args)

    monkeypatch.setattr(worker, "_propose", slowly)
    run(worker)
    assert states == [TrialState.RUNNING]


def test_a_small_evolution_evolves(tmp_path):
    models = run(make_study(tmp_path, method="evolution", num_models=4))
    assert [model.origin for model in models[1:3]] == ["draw", "draw"]
    assert all(model.origin in space.MOVES for model in models[3:])


def test_training_seconds_end_a_search_that_then_goes_on(tmp_path):
    models = run(make_study(tmp_path, max_training_seconds=3.0))
    assert [model.state for model in models] == ["complete"] * 4 + ["waiting"] * 3  # with the baseline
    assert {model.state for model in run(make_study(tmp_path))} == {"complete"}


def test_a_limit_that_is_used_up_before_any_model_has_ended_is_told(tmp_path):
    def evaluate(lanes):
        yield from planted(lanes)
        if lanes != SETTINGS.baseline:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make_study(tmp_path, max_training_seconds=1.0), evaluate)
    models = run(make_study(tmp_path, max_training_seconds=1.0), evaluate)
    assert models_lib.best(models) is None
    told = _why_none(models, dataclasses.replace(SETTINGS, max_training_seconds=1.0))
    assert told.startswith("search.max_training_seconds=1 is used up")
    assert "raise it" in told


def test_a_worker_needs_a_search(tmp_path):
    with pytest.raises(InputError, match="holds no search named 'nas'"):
        make_study(tmp_path, create=False)


def test_other_settings_are_refused_by_name(tmp_path):
    make_study(tmp_path)
    with pytest.raises(InputError, match=r"search.max_width: 4 there, 3 now(.|\n)*another search.name"):
        make_study(tmp_path, max_width=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "guess"}, "search.method is 'guess'; it must be one of random"),
        ({"num_models": 0}, "search.num_models is 0; it must be 1 or more"),
        ({"max_training_seconds": math.nan}, "search.max_training_seconds is nan; it must be 0 or more, and finite"),
        ({"tolerance": 0.0}, "search.tolerance"),
        ({"kinds": "mlcn1,mlcn9"}, "search.kinds"),
        ({"method": "halving", "num_epochs": 4, "min_epochs": 4}, "no model is ever compared before its last epoch"),
        ({"baseline": "mlcn1"}, "model.lanes: expected"),
    ],
)
def test_settings_that_cannot_be_used(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SETTINGS, **changes)


@pytest.mark.parametrize("images", settings_lib.NOT_NOTED)
def test_a_search_does_not_go_on_with_other_images_devices_or_rounding(tmp_path, images):
    def opened(digest):
        facts = settings_lib.facts_of(SETTINGS) | {images: digest}
        return study.Study(SETTINGS, facts, f"sqlite:///{tmp_path / 'search.db'}", create=True)

    found = opened("one")
    with pytest.raises(InputError, match=f"{images}: 'one' there, 'other' now"):
        opened("other")
    found.note("facts", {name: value for name, value in found.noted("facts").items() if name != images})
    opened("other")  # a search that did not note them goes on


def test_a_search_that_noted_images_and_no_rounding_had_the_default(tmp_path):
    def opened(**more):
        facts = settings_lib.facts_of(SETTINGS) | {settings_lib.VALIDATION: "one", **more}
        return make_study(tmp_path, facts=facts)

    opened()
    opened(**{settings_lib.ROUNDING: "float32"})
    with pytest.raises(InputError, match="exchange_dtype: 'float32' there, 'bfloat16' now"):
        opened(**{settings_lib.ROUNDING: "bfloat16"})


def test_costs_are_part_of_what_must_agree_and_older_searches_have_exact_ones(tmp_path):
    found = make_study(tmp_path)
    found.note("facts", {name: value for name, value in found.noted("facts").items() if name != "search.costs"})
    make_study(tmp_path)
    with pytest.raises(InputError, match=r"search\.costs: 'exact' there, 'published' now"):
        make_study(tmp_path, costs="published")

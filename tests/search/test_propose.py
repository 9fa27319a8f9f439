"""No two models of a search get the same lanes, as long as there are others."""

import dataclasses
import logging
import math
import os
import signal
import sys
import time
from unittest import mock

import pytest

from mlcn_jax import host
from mlcn_jax.commands import search
from mlcn_jax.errors import Stopped
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.search import budget, models, propose, report, run, space, study
from mlcn_jax.search.settings import SearchSettings
from mlcn_jax.search.trials import Score

MENU = [LaneSpec("mlcn1", 1), LaneSpec("mlcn1", 2)]
SETTINGS = SearchSettings(
    devices="", kinds="mlcn1", max_width=2, max_depth=1, baseline="mlcn1:w1", num_models=4, num_epochs=1
)


@pytest.fixture
def small():
    """A device for 6, 4 and 1, 2 and 2, or no and 3 lanes: four mixes in all."""
    return space.Space(MENU, [budget.Bucket("device", "flops", 6.0, math.inf, (1.0, 2.0), (1.0, 1.0))])


def make_study(folder, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return study.Study(settings, {"seed": settings.seed}, f"sqlite:///{folder}/search.db", create=True)


def evaluate(lanes):
    yield Score(1, 0.5, (0.5,), 1.0, 0.0, 0.0, 1)


def test_random_models_differ_and_depend_on_seed_and_index_alone(small):
    drawn = [small.draw(propose.generator(0, index)) for index in range(4)]
    plan, other = propose.Plan(0, small), propose.Plan(0, small)
    backwards = [other.of(index)[0] for index in (3, 2, 1, 0)][::-1]
    found = [plan.of(index)[0] for index in range(4)]
    assert found == backwards
    assert len(set(drawn)) < len({one.lanes for one in found}) == 4
    for index, one in enumerate(found):
        assert (one.redraws == 0) == (drawn[index] not in drawn[:index] and one.mix == drawn[index])


def test_where_no_mix_is_left_the_first_draw_is_repeated(small):
    proposal, first = propose.Plan(0, small).of(4)
    assert proposal.mix == small.draw(propose.generator(0, 4))
    assert first in range(4)
    assert propose.Plan(0, small).of(3)[1] is None


@pytest.mark.parametrize(("method", "seed"), [("random", 0), ("evolution", 0), ("tpe", 1)])
def test_a_search_trains_each_mix_once_and_says_so_before_it_repeats_one(tmp_path, small, caplog, method, seed):
    """With tpe for most seeds: the weights that it draws may leave a mix out."""
    caplog.set_level(logging.INFO)
    make_study(tmp_path, method=method, seed=seed).work(small, evaluate, to_the_end=True)
    found = make_study(tmp_path, method=method, seed=seed)
    mixes = [model.lanes for model in found.models()[1:]]
    assert len(set(mixes)) == 4
    assert "already has the lanes drawn first, so draw" in caplog.text
    assert "repeats" not in caplog.text
    make_study(tmp_path, method=method, seed=seed, num_models=5).work(small, evaluate, to_the_end=True)
    assert "model 4 repeats model" in caplog.text
    ended = found.models()
    assert models.repeats(ended) == {4: mixes.index(ended[-1].lanes)}


def test_a_search_says_what_it_does(tmp_path, small, caplog):
    caplog.set_level(logging.INFO)
    found = make_study(tmp_path)
    found.work(small, evaluate, to_the_end=True)
    assert "training the baseline: mlcn1:w1" in caplog.messages
    assert f"model 2 (3 of 4, draw): training {found.models()[3].lanes}" in caplog.messages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_search_that_is_stopped_says_where_it_stands_and_loses_no_model(tmp_path, small, number):
    before, found, stop = signal.getsignal(number), make_study(tmp_path), True

    def stopped(lanes):
        if stop and lanes != SETTINGS.baseline and found.progress().startswith("2 of 4"):
            assert found.progress() == "2 of 4 models have ended, 1 in training, 1 waiting"
            os.kill(os.getpid(), number)
        yield from evaluate(lanes)

    for _ in range(6):  # more often than a model may take its worker with it
        with pytest.raises(Stopped) as error, run._stoppable(found):
            found.work(small, stopped, to_the_end=True)
        assert str(error.value) == f"stopped by {number.name}: 2 of 4 models have ended, 0 in training, 2 waiting"
        assert signal.getsignal(number) == before
    stop = False
    found.work(small, stopped, to_the_end=True)
    assert {model.state for model in found.models()} == {"complete"}
    assert found.progress() == "4 of 4 models have ended, 0 in training, 0 waiting"


class Garbage:
    """Raises nothing when it is collected, like the callbacks of JAX."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)


def test_a_signal_during_garbage_collection_still_stops_the_search(tmp_path, small):
    def collects(lanes):
        if lanes == SETTINGS.baseline:
            Garbage()
            time.sleep(5)
        yield from evaluate(lanes)

    hook, found = sys.unraisablehook, make_study(tmp_path)
    with pytest.raises(Stopped, match="stopped by SIGTERM: 0 of 4"), run._stoppable(found):
        found.work(small, collects, to_the_end=True)
    assert sys.unraisablehook is hook


def test_the_command_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "run", mock.Mock(side_effect=Stopped("stopped by SIGTERM: 0 of 8 models have ended")))
    monkeypatch.setattr(host, "set_up_jax", mock.Mock())
    given = ["--config=nas_quickstart", f"--workdir={tmp_path / 'a b'}"]
    assert search.main(given) == 75
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stopped by SIGTERM: 0 of 8 models have ended. Continue with:"
    assert lines[1].endswith(f"search --config=nas_quickstart '--workdir={tmp_path}/a b'")


def test_the_report_counts_different_mixes(tmp_path):
    device = {"device": "device", "lanes": "mlcn1:w1*6"}
    best = {"validation_accuracy": 0.5, "test_accuracies": [0.5], "lanes": "mlcn1:w1*6", "devices": [device]}
    summary = {"models": {"complete": 5}, "distinct_mixes": 4, "best": best, "mean_validation_accuracy": 0.4}
    summary["baseline_validation_accuracy"] = None
    text = report.text(summary, tmp_path)
    assert text.startswith("best of 5 models (5 complete; 4 different mixes): validation accuracy 50.00%")
    assert "; 1 different mix)" in report.text({**summary, "distinct_mixes": 1}, tmp_path)

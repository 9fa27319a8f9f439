"""The comparison of searches: what stays when it is stopped, and what is told of a search that had ended before."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from absl import flags

from experiments import nas_compare
from mlcn_jax.files import read_json
from mlcn_jax.search import run as search_run


@pytest.fixture
def setting(monkeypatch):
    """The small setting of seed 0, with a trainer whose trainings take no time: those trained, and when to stop."""
    values = flags.FlagValues()
    nas_compare.define(values)
    values(["nas_compare"])
    config, settings = nas_compare.configure(0, values)
    trained, most = [], [3]

    def evaluate(lanes):
        if len(trained) == most[0]:
            raise KeyboardInterrupt
        trained.append(lanes)
        yield SimpleNamespace(accuracy=len(trained) / 100)

    monkeypatch.setattr(nas_compare, "Trainer", lambda *given, **more: SimpleNamespace(evaluate=evaluate))
    return SimpleNamespace(config=config, settings=settings, trained=trained, most=most)


def test_equal_lanes_that_have_been_trained_stay_when_the_next_is_stopped(setting, tmp_path):
    given = (0, setting.config, setting.settings, tmp_path, {})
    with pytest.raises(KeyboardInterrupt):
        nas_compare.equal_lanes(*given)
    setting.most[0] = 1000
    run = nas_compare.equal_lanes(*given)
    lanes = [point["lanes"] for point in run["points"]]
    assert lanes == setting.trained == list(dict.fromkeys(lanes))
    assert len(lanes) > 3
    assert run["accuracies"] == [i / 100 for i in range(1, len(lanes) + 1)]
    assert len(run["date"]) == len("2026-01-01")
    assert [path.name for path in tmp_path.iterdir()] == ["equal-0.json"]
    assert nas_compare.equal_lanes(*given) == run
    assert setting.trained == lanes


def a_search(folder, evaluate_seconds):
    """As a search ends that was resumed: what it leaves in its folder, and its summary."""
    rows = [
        {"state": "complete", "model": model, "accuracy": a, "train_seconds": 1.0, "step_flops": 1.0, "ended": ended}
        for model, a, ended in (("baseline", 0.4, 1.0), (1, 0.6, 1767225600.0), (0, 0.5, 1767225599.0))
    ]
    folder.mkdir(parents=True)
    (folder / "trials.json").write_text(json.dumps(rows))
    session = {"wall_seconds": 3.0, "evaluate_seconds": evaluate_seconds}
    return {"models": {"complete": 2}, "session": session, "best": {"test_accuracies": [0.5]}}


def test_a_search_that_was_resumed_after_its_last_model_has_no_overhead(setting, tmp_path, monkeypatch):
    settings = dataclasses.replace(setting.settings, num_models=2)
    seconds = iter([0.0, 2.0, 0.0])
    monkeypatch.setattr(search_run, "run", lambda config, settings, folder, programs: a_search(folder, next(seconds)))

    def search(method, seed):
        return nas_compare.search_with(method, seed, setting.config, settings, tmp_path, {})

    runs = [search("random", 0), search("halving", 0)]
    assert [run["date"] for run in runs] == ["2026-01-01"] * 2
    assert read_json(tmp_path / "random-0" / "run.json") == runs[0]
    rows = nas_compare.table(runs)
    assert ["overhead" in row for row in rows] == [False, True]
    assert rows[1]["overhead"] == pytest.approx(0.5)
    random_line, halving_line = nas_compare.told({"methods": rows}).splitlines()[2:]
    assert random_line.endswith("| - |")
    assert halving_line.endswith("| 50.0% |")


def test_the_results_have_the_date_of_the_newest_training(setting, tmp_path, monkeypatch, capsys):
    values = flags.FlagValues()
    nas_compare.define(values)
    values(["nas_compare", f"--workdir={tmp_path}", "--num_models=2", "--methods=tpe", "--seeds=0"])
    setting.most[0] = 1000
    monkeypatch.setattr(search_run, "run", lambda config, settings, folder, programs: a_search(folder, 2.0))
    monkeypatch.setattr(nas_compare, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(nas_compare, "_MOST_MODELS", 1)
    (tmp_path / "results").mkdir()
    nas_compare.main(values)
    result = read_json(tmp_path / "results" / "nas_compare.json")
    assert [run["date"] for run in result["runs"][:2]] == ["2026-01-01"] * 2
    assert result["date"] == result["runs"][2]["date"]
    assert "jax" in result["versions"]
    older = read_json(tmp_path / "equal-0.json")
    del older["date"]  # as one that an older version trained
    (tmp_path / "equal-0.json").write_text(json.dumps(older))
    nas_compare.main(values)
    assert read_json(tmp_path / "results" / "nas_compare.json")["date"] == "2026-01-01"

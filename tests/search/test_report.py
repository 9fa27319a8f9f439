"""What a search writes: the table of its models, the config of the best one, as Python source, and the picture."""

import ast
import json
import os
import re
import runpy
import time
import types

import pytest

from mlcn_jax.config import RunConfig
from mlcn_jax.search import models, report

HOSTILE = [
    '"""\nraise SystemExit("run")\n"""',
    "\nraise SystemExit('run')",
    "x'; raise SystemExit('run')#",
    "na\\Users",
    "\\",
    "\r\u2028\x1b[2J",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_data_gave_stays_data(tmp_path, text):
    device = {"device": text, "fill": 0.5, "lanes": text, "more": text}
    found = types.SimpleNamespace(
        settings=types.SimpleNamespace(method="random", num_epochs=1),
        config=RunConfig().replace({"data.dir": text}),
        space=types.SimpleNamespace(report=lambda mix: [device], buckets=[None]),
        trainer=types.SimpleNamespace(train=types.SimpleNamespace(labels=[1, 2, 3])),
    )
    winner = types.SimpleNamespace(index=0, lanes="mlcn1:w1d1*2", accuracies=[0.25], mix={})
    (tmp_path / text).mkdir()
    path = tmp_path / text / "best_config.py"
    report.write_config(found, winner, path)
    made = runpy.run_path(str(path))
    assert made["FOUND"]["devices"] == [{"device": text, "fill": 0.5, "lanes": text}]
    config = RunConfig.from_dict(made["get_config"]().to_dict())
    assert (config.data.dir, config.model["lanes"]) == (text, "mlcn1:w1d1*2")
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]


@pytest.mark.parametrize("reason", ["RuntimeError: shapes [2|3]\n| 9 | complete |", "a\\|b", "ends in \\", *HOSTILE])
def test_the_text_of_an_error_stays_in_its_cell(tmp_path, reason):
    failed = models.model_from({"index": 0, "reason": reason}, "failed", [])
    report.write_trials(types.SimpleNamespace(study=types.SimpleNamespace(models=lambda: [failed])), tmp_path)
    header, _, row = (tmp_path / "trials.md").read_text().splitlines()
    cells = re.sub(r"\\.", "", row).split("|")  # without what is escaped
    assert len(cells) == len(header.split("|"))
    assert cells[2].strip().startswith("failed:")
    assert json.loads((tmp_path / "trials.json").read_text())[0]["reason"] == reason


def test_the_last_results_are_written_whatever_the_clock_of_the_file_server_says(tmp_path):
    found = types.SimpleNamespace(study=types.SimpleNamespace(models=list))
    (tmp_path / "trials.json").write_text("[1]")
    os.utime(tmp_path / "trials.json", (time.time() + 60,) * 2)
    report.write_trials(found, tmp_path, 5.0)
    assert (tmp_path / "trials.json").read_text() == "[1]"
    report.write_trials(found, tmp_path)
    assert json.loads((tmp_path / "trials.json").read_text()) == []


def test_the_picture_names_what_it_shows_and_counts_whole_models(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "write_figure", lambda figure, path, **how: drawn.append(figure))
    device = {"fill": 0.9}
    row = {"state": "complete", "accuracy": 0.9, "train_seconds": 2.0, "step_flops": 1e9, "step_seconds": 0.01}
    table = [{**row, "model": i, "ended": 10.0 + i, "devices": [device]} for i in range(2)]
    found = types.SimpleNamespace(
        settings=types.SimpleNamespace(method="random", baseline="mlcn1:w1"),
        space=types.SimpleNamespace(buckets=[types.SimpleNamespace(name="device 0")]),
    )
    summary = {"data": {"name": "digits"}, "train_images": 10, "num_epochs": 1, "best": {"devices": [device]}}
    report.draw(found, table, {**summary, "drawn_lanes": {"mlcn1:w1d1": 2}}, tmp_path / "search.png")
    trials, seconds, flops, front, *_ = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert trials.get_title() == "best accuracy so far, by number of models"
    assert all(tick == round(tick) for tick in trials.get_xticks())
    named = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (trials, seconds, flops, front)]
    assert named == [["each model", "best so far"], ["best so far"], ["models"], ["models"]]  # there is no baseline

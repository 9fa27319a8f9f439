"""Scripts of repeated runs: what is trained, what is kept, what is refused, and speeds measured beside them."""

import errno
import functools
import json
import os
import shutil
import signal
import time
import types

import filelock
import numpy as np
import pytest
from made_files import idx_files, write_files
from made_records import PLACE, ROW, made_request
from matplotlib.figure import Figure

from experiments import (
    REPOSITORY,
    batch_size,
    lanes_and_width,
    published_rows,
    repeated_report,
    repeated_runs,
    table_4_1,
)
from experiments import table_4_1_tuning as tuning
from experiments.repeated_runs import Series
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Diverged, InputError, Stopped
from mlcn_jax.files import write_json
from mlcn_jax.training.stop_signals import StopSignals

TUNED = published_rows.TUNED["fashion_mnist"]


@pytest.fixture
def trained(monkeypatch):
    """Replaces training by made-up results: the configurations that were trained, and what seeds raise instead."""
    configs, raised = [], {}

    def train(config, workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        if config.train.seed in raised:
            raise raised[config.train.seed]
        configs.append(config)
        return {
            "test_accuracy": 0.9 + 0.01 * config.train.seed,
            "lane_spreads": [0.9, 0.0],
            "parameters": 7,
            "steps": 2,
            "steps_this_session": 2,
            "images_per_second": 100.0,
            "compile_seconds": 1.0,
        }

    monkeypatch.setattr("mlcn_jax.training.loop.train", train)
    return types.SimpleNamespace(configs=configs, raised=raised)


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(repeated_report, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def run(tmp_path, directories, results, monkeypatch):
    """Runs a script in a made-up place; tables become empty pictures, which are drawn faster."""
    for script in (table_4_1, tuning):
        monkeypatch.setattr(script, "draw_table", lambda *args: Figure())

    def run(script=table_4_1, **changes):
        given = {name: changes.pop(name) for name in ("repeats", "minutes") if name in changes}
        scale = script.SCALES[changes.pop("scale", "smoke")]
        asked = {"rows": [ROW], "columns": ["published"]} if script is table_4_1 else {}
        images = changes.pop("directories", directories)
        return script.run(made_request(tmp_path / "runs", images, scale, **given), **asked | changes)

    return run


def test_runs_in_the_kept_results_have_ended_unless_they_are_of_another_kind(tmp_path, directories, trained):
    kept, facts = tmp_path / "kept.json", [{"row": ROW, "column": "published", "seed": seed} for seed in (0, 1)]

    def series(name):
        configure = functools.partial(table_4_1.configure_run, directories)
        request = made_request(tmp_path / name, directories, table_4_1.SCALES["smoke"])
        return Series(request, "table_4_1", 1, configure, True, kept=kept)

    first = series("first")
    first.train(facts[:1], lambda: None)
    (record,) = first.records()
    del record["config"]
    record["data"]["copy"] = ""  # as if the images were the official ones
    write_json(kept, {**first.marker, "runs": [record]})
    second = series("second")
    second.train(facts, lambda: None)
    assert [config.train.seed for config in trained.configs] == [0, 1]
    assert [one["facts"] for one in second.records()] == facts
    second.train(facts, lambda: None, again=facts)  # whose models are needed
    assert [config.train.seed for config in trained.configs] == [0, 1, 0]
    shutil.rmtree(tmp_path / "second" / "runs")
    second.train(facts[1:], lambda: None)
    for change in ({"config_hash": "0" * 16}, {"data": record["data"] | {"copy": "JPEG copy"}}):
        write_json(kept, {**first.marker, "runs": [record | change]})
        assert [one["facts"] for one in second.records()] == facts[1:]
    write_json(kept, {**first.marker, "version": 2, "runs": [record]})
    assert [one["facts"] for one in second.records()] == facts[1:]


def test_students_stay_where_the_workdir_of_their_teacher_is_another(tmp_path, directories, trained):
    def series(name, teacher=None):
        def configure(way):
            config = table_4_1.configure_run(directories, ROW, "published", 0)
            return config.replace({"train.teacher": str(teacher or tmp_path / name / "runs" / "teacher")})

        request = made_request(tmp_path / name, directories, table_4_1.SCALES["smoke"])
        return Series(request, "table_4_1", 1, configure, True, kept=tmp_path / "kept.json")

    first = series("first")
    first.train([{"way": "taught"}], lambda: None)
    (record,) = first.records()
    assert trained.configs[0].train.teacher == str(tmp_path / "first" / "runs" / "teacher")
    path = tmp_path / "first" / "runs" / "taught" / "run.json"
    write_json(path, record | {"config_hash": RunConfig.from_dict(record["config"]).hash()})
    assert len(first.records()) == 1, "an older version noted the hash with the path"
    write_json(path, record)
    record["data"]["copy"] = ""
    write_json(tmp_path / "kept.json", {**first.marker, "runs": [record]})
    assert [one["facts"] for one in series("second").records()] == [{"way": "taught"}]
    assert not series("third", teacher=tmp_path / "another").records()


def test_processes_report_one_after_the_other(tmp_path, directories, trained):
    """Each reads the results that are kept, adds its own, and writes them."""
    free = []

    def report(series):
        lock = filelock.FileLock(host.cache_folder() / "experiments.lock", timeout=0)
        try:
            with lock:
                free.append(True)
        except filelock.Timeout:
            free.append(False)

    configure = functools.partial(table_4_1.configure_run, directories)
    request = made_request(tmp_path / "runs", directories, table_4_1.SCALES["smoke"])
    series = Series(request, "table_4_1", 1, configure, True)
    facts = {"row": ROW, "column": "published", "seed": 0}
    repeated_report.carry_out(series, [facts], lambda records: "", report)
    assert free == [False, False]


def test_a_run_that_has_ended_is_not_repeated_and_all_are_shown(run, trained, results, tmp_path, capsys):
    assert run(scale="cpu", columns=["published", "augmented"]) == 0
    assert run(scale="cpu", repeats=2) == 0
    asked = [(config.train.seed, config.data.flip, config.train.num_epochs) for config in trained.configs]
    assert asked == [(0, False, 3), (0, True, 3), (1, False, 3)]
    for folder in (results, tmp_path / "runs"):
        written = json.loads((folder / "table_4_1_cpu.json").read_text())
        assert len(written["runs"]) == 3
        assert (folder / "table_4_1_cpu.png").stat().st_size > 0
    (row,) = (row for row in written["rows"] if row["row"] == ROW)
    assert row["difference"]["published"] == pytest.approx(90.5 - 91.01)
    assert row["seconds_per_epoch"] == pytest.approx(12.0)  # 1,200 images at 100 a second
    assert {"device", "date", "versions", "command", "data", "config_hash"} <= set(written["runs"][0])
    assert "90.50 ± 0.71, 90.00 to 91.00, 2 runs, -0.51 |" in capsys.readouterr().out
    assert "not the official bytes" in (results / "table_4_1_cpu.md").read_text()
    assert str(tmp_path) not in (results / "table_4_1_cpu.json").read_text()


def test_smoke_stays_in_the_workdir_and_takes_few_images(run, trained, results, tmp_path):
    run(rows=["fashion_capsnet", "cifar_mlcn1_4x4"])
    assert not results.exists()
    fashion, cifar = (c.data.load() for c in trained.configs)
    assert len(fashion.train.labels) == 600
    assert len(fashion.test.labels) == 100
    assert len(cifar.train.labels) == 100  # there are no more
    assert (
        "fashion_mnist (not the official bytes): 600 of 1,200 train and 100 of 200 test images"
        in (tmp_path / "runs" / "table_4_1_smoke.md").read_text()
    )


def test_what_has_ended_is_kept_and_shown_when_the_disk_is_full(run, trained, tmp_path, capsys):
    trained.raised[1] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        run(repeats=3)
    assert "| 90.00, 1 run, -1.01 |" in capsys.readouterr().out
    trained.raised.clear()
    assert run(repeats=3) == 0
    assert [config.train.seed for config in trained.configs] == [0, 1, 2]


def test_a_run_that_diverges_is_shown_and_not_repeated(run, trained, capsys):
    trained.raised[0] = Diverged("step 3: the loss is nan\nand more")
    assert run(repeats=2) == 3
    assert "91.00, 1 run, 1 failed" in capsys.readouterr().out
    trained.raised.clear()
    assert run(repeats=2) == 3
    assert [config.train.seed for config in trained.configs] == [1]


def test_the_minutes_end_it_between_runs(run, trained, monkeypatch):
    trained.raised[1] = Stopped("stopped by SIGTERM after step 1")
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 1; 1 of 3 runs have ended"):
        run(repeats=3)
    trained.raised.clear()
    timers = []
    monkeypatch.setattr(repeated_runs._Limit, "_later", lambda self, seconds, do: timers.append((seconds, do)))
    monkeypatch.setattr("mlcn_jax.host.environment", lambda: timers[0][1]() or PLACE)  # after the second run
    with pytest.raises(Stopped, match=r"the 2 minutes are over; 2 of 3 runs have ended"):
        run(repeats=3, minutes=2)
    assert timers[0][0] == 120


def test_a_signal_just_before_a_run_listens_stops_that_run(run, monkeypatch):
    """As long as it takes to begin a run, the signal is the series' own to note."""
    monkeypatch.setattr(repeated_runs, "_AGAIN_SECONDS", 0.1)

    def train(config, workdir):
        os.kill(os.getpid(), signal.SIGTERM)
        with StopSignals() as stop:
            for _ in range(50):
                stop.check("in a run")
                time.sleep(0.1)
        raise AssertionError("the run went on to its end")

    monkeypatch.setattr("mlcn_jax.training.loop.train", train)
    with pytest.raises(Stopped, match="stopped by SIGTERM; 0 of 1 runs"):
        run()
    time.sleep(0.2)  # in which nothing else arrives


def test_runs_of_another_version_scale_settings_or_images_are_refused(run, trained, monkeypatch, tmp_path, directories):
    run(columns=["tuned"])
    with monkeypatch.context() as patch:
        patch.setattr(table_4_1, "VERSION", 2)
        with pytest.raises(InputError, match=r"version: 1 there, 2 now"):
            run()
    with pytest.raises(InputError, match=r"scale.name: 'smoke' there, 'cpu' now"):
        run(scale="cpu")
    with pytest.raises(InputError, match=r"script: 'table_4_1' there, 'table_4_1_tuning' now"):
        run(tuning, rows=[ROW], candidates=["adamw"])
    with monkeypatch.context() as patch:
        patch.setitem(published_rows.CANDIDATES[TUNED], "train.learning_rate", 0.5)
        with pytest.raises(InputError, match=r"settings:\n  train.learning_rate: 0.002 there, 0.5 now\nremove"):
            run()
    other = write_files(tmp_path / "other", idx_files(num_train=1300, num_test=200, size=28))
    with pytest.raises(InputError, match=r"(?s)other images of fashion_mnist.*all_train_images: 1200 there, 1300 now"):
        run(directories=directories | {"fashion_mnist": str(other)})
    assert len(trained.configs) == 1


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        (table_4_1, {"rows": ["cifar_capsnet", "mnist"]}, "--rows: mnist is not one of cifar_capsnet, "),
        (table_4_1, {"columns": ["best"]}, "--columns: best is not one of published, "),
        (table_4_1, {"rows": ["cifar_capsnet"], "columns": ["tuned"]}, "there is nothing to train"),
        (tuning, {"rows": ["cifar_capsnet"], "candidates": ["adamw"]}, "--rows: cifar_capsnet is not one of"),
        (lanes_and_width, {"figures": ["4.6"], "lanes": ["2"], "widths": ["1"]}, "--figures: 4.6 is not one of"),
        (lanes_and_width, {"figures": [], "lanes": ["2"], "widths": ["1"]}, "--figures: nothing is not one of"),
        (batch_size, {"rows": [ROW], "batch_sizes": ["64"]}, "--batch_sizes: 64 is not one of 100, 150, 300, 600"),
    ],
)
def test_what_is_not_known_is_refused(run, script, changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run(script, **changes)
    assert not (tmp_path / "runs").exists()


def test_candidates_are_compared_on_validation_images(run, monkeypatch, tmp_path, capsys):
    def train(config, workdir):
        workdir.mkdir(parents=True)
        assert config.data.validation_fraction == 0.1
        rows = [{"step": step, "split": "validation", "accuracy": a} for step, a in ((1, 0.5), (2, 0.4))]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        measured = ("lane_spreads", "parameters", "steps", "steps_this_session", "images_per_second", "compile_seconds")
        return {**dict.fromkeys(measured, 1), "test_accuracy": 0.9, "validation_accuracy": 0.5}

    monkeypatch.setattr("mlcn_jax.training.loop.train", train)
    run(tuning, rows=[ROW], candidates=["published", TUNED])
    assert f"| {TUNED} | 40.00, 1 run, used |" in capsys.readouterr().out
    records = json.loads((tmp_path / "runs" / "table_4_1_tuning_smoke.json").read_text())["runs"]
    assert [record["lane_spreads"] for record in records] == [1, 1]
    assert [record["best_validation_accuracy"] for record in records] == [50.0, 50.0], "of the checkpoint that is kept"
    written = (tmp_path / "runs" / "table_4_1_tuning_smoke.md").read_text()
    assert "90" not in written
    assert "test images; 60 of the train images are held out for validation." in written


@pytest.mark.long
def test_lanes_and_width_covers_both_kinds_and_datasets(run, trained, tmp_path):
    run(lanes_and_width, figures=list(lanes_and_width.FIGURES), lanes=["32"], widths=["2"])
    asked = {(config.data.name, config.model["lanes"]) for config in trained.configs}
    assert asked == {(name, lanes) for name in ("fashion_mnist", "cifar10") for lanes in ("mlcn1:w2*32", "mlcn2:w2*32")}
    points = json.loads((tmp_path / "runs" / "lanes_and_width_smoke.json").read_text())["points"]
    published = {(p["figure"], p["lanes"], p["width"]): p["published_accuracy"] for p in points}
    assert published["cifar_mlcn2", 32, 2] == 75.18
    assert sum(accuracy is not None for accuracy in published.values()) == 8
    assert sum(point["accuracy"] is not None for point in points) == 4


@pytest.mark.long
def test_the_speed_of_a_row_is_measured_once_and_anew_with_another_batch_size(run, trained, tmp_path, monkeypatch):
    taken = []

    def prepared(config):
        def take_steps(count):
            taken.append((config.train.batch_size, count))
            return count * config.train.batch_size / 150  # seconds: 150 images a second

        return take_steps

    monkeypatch.setattr(batch_size, "_prepared", prepared)
    asked = {"rows": [ROW], "scale": "cpu", "batch_sizes": ["100", "600"]}
    for _ in range(2):
        assert run(batch_size, **asked) == 0
    turns = [taken[4:][i : i + 2] for i in range(0, len(taken) - 4, 2)]
    small, large = [(100, 1), (100, 3)], [(600, 1), (600, 1)]  # a step that is not timed, then 2 seconds or a step
    assert turns == [small, large, large, small] * 3 + [small, large]
    results = json.loads((tmp_path / "runs" / "batch_size_cpu.json").read_text())
    assert results["speeds"][ROW]["images_per_second"] == {"100": [150.0] * 7, "600": [150.0] * 7}
    assert any("Speed of Fashion-MNIST, mlcn2 2x4: on" in line for line in results["caption"])
    taken.clear()
    run(batch_size, **asked | {"batch_sizes": ["150"]})
    assert {size for size, _ in taken} == {100, 150, 600}


def test_speeds_leave_out_what_failed_and_stop_between_rows(run, trained, tmp_path, monkeypatch):
    def measure(configs, rounds):
        os.kill(os.getpid(), signal.SIGTERM)
        return {size: [1.0] for size in configs}

    monkeypatch.setattr(batch_size, "measure", measure)
    failing = batch_size.configure_run
    trained.raised[1] = Diverged("the loss is nan")
    monkeypatch.setattr(
        batch_size,
        "configure_run",
        lambda *args, **facts: failing(*args, **facts).replace({"train.seed": int(facts["batch_size"] == 600)}),
    )
    with pytest.raises(Stopped, match="stopped by SIGTERM; 4 of 4 runs have ended"):
        run(batch_size, rows=[ROW, "fashion_mlcn1_2x4"], batch_sizes=["100", "600"])
    speeds = json.loads((tmp_path / "runs" / "speeds.json").read_text())
    assert speeds[ROW]["images_per_second"] == {"100": [1.0]}
    assert len(speeds) == 1


def test_speeds_alone_are_measured_without_training_and_kept_for_later(run, trained, tmp_path, monkeypatch, capsys):
    measured = []

    def measure(configs, rounds):
        measured.append((next(iter(configs.values())).data.name, list(configs)))
        return {size: [float(size)] for size in configs}

    monkeypatch.setattr(batch_size, "measure", measure)
    asked = {"rows": [ROW, "cifar_mlcn1_4x4"], "scale": "cpu"}
    assert run(batch_size, **asked, batch_sizes=["100", "600"], speeds_only=True) == 0
    assert (trained.configs, measured) == ([], [("fashion_mnist", ["100", "600"]), ("cifar10", ["100", "600"])])
    assert "| CIFAR-10, mlcn1 4x4 | 600 | not run | - | 600 | 6.00 (6.00 to 6.00) |" in capsys.readouterr().out
    assert not (tmp_path / "runs" / "batch_size_cpu.json").exists(), "nothing has been trained"
    run(batch_size, **asked, batch_sizes=["100", "600"], speeds_only=True)
    assert len(measured) == 2
    run(batch_size, rows=[ROW], scale="cpu", batch_sizes=["150"])
    assert measured[2:] == [("fashion_mnist", ["100", "150", "600"])]
    assert [config.train.batch_size for config in trained.configs] == [150]
    points = json.loads((tmp_path / "runs" / "batch_size_cpu.json").read_text())["points"]
    assert [(p["batch_size"], p["speedup"][0]) for p in points if p["row"] == ROW] == [
        (100, 1.0),
        (150, 1.5),
        (600, 6.0),
    ]


def test_the_table_of_the_docs_is_made_before_speeds_are_measured(run, trained, results, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    from tables import accuracy

    trained.raised[1] = Stopped("stopped by SIGTERM")
    with pytest.raises(Stopped):
        run(batch_size, rows=[ROW], scale="cpu", batch_sizes=["100"], repeats=2)
    found = json.loads((results / "batch_size_cpu.json").read_text())
    monkeypatch.setattr(accuracy, "largest", lambda name: found)
    text = accuracy.batch_size()
    assert "| Fashion-MNIST (not the official bytes), mlcn2 2x4 | 100 | 90.00 | +0.00 | - |" in text
    assert "Speed: not measured yet." in text


def test_steps_are_taken_and_timed(tiny):
    take_steps = batch_size._prepared(tiny)
    assert 0 < min(take_steps(1) for _ in range(5)) < take_steps(40)


@pytest.mark.long
def test_a_smoke_run_is_stopped_by_the_clock_and_resumed(run, tmp_path):
    with pytest.raises(Stopped, match=r"minutes are over; 0 of 1 runs"):
        run(columns=["tuned"], minutes=0.001)
    assert run(columns=["tuned"]) == 0
    (record,) = json.loads((tmp_path / "runs" / "table_4_1_smoke.json").read_text())["runs"]
    assert record["steps"] == 2
    assert record["parameters"] == 1_800_722
    assert 0 <= record["test_accuracy"] <= 100
    assert np.isfinite(record["seconds_per_epoch"])

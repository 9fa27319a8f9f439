"""The report's tables from measurements: what is measured and what is predicted stand apart."""

import json
import types
from pathlib import Path

from experiments import tiers_tables
from experiments.tiers_tables_report import mean_error, schedule_rows, write_report
from mlcn_jax.tiers import schedules


def made():
    tier = {"communication": 0.1, "processing": 0.1, "work": 0.0}
    measured = {
        "relay": [{"delay_ms": 5.0, "measured_ms": 5.2}, {"rate_mbit": 2.0, "measured_mbit": 1.97}],
        "devices": {"end": tier, "edge": tier, "cloud": tier, "dispatch": 0.0},
        "tier end, 0 ms": {"seconds": 1.25, "devices": 2, "core_seconds": 0.75, "runs": 1},
        "cut pixels, 0.5 s": {"home_seconds": 0.0, "task_seconds": 1.0, "bytes_per_image": 800.0, "runs": 3},
        "cut conv1, 0.5 s": {"home_seconds": 0.1, "task_seconds": 1.5, "bytes_per_image": 9000.0, "runs": 3},
    }
    for cut, seconds in (("pixels", 1.0), ("conv1", 4.0)):
        row = {"home_seconds": 0.1, "task_seconds": seconds, "bytes_per_image": 9000.0, "runs": 3}
        measured[f"cut {cut}, 0.5 s, 20 Mbit/s"] = row
    for name in schedules.SCHEDULES:
        for ends in (1, 2):
            measured[f"schedule {name}, {ends} ends"] = {"seconds": 2.0, "first_seconds": 1.0, "runs": 1}
    for mode, seconds in (("none", None), ("reassign", 4.0), ("monitor", 2.2)):
        for dead in (0, 1):
            taken = {"seconds": 2.0 if not dead else seconds, "tasks_before": 2, "timeout": 0.5, "timeouts": 3 * dead}
            measured[f"failures {mode}, {dead} dead"] = taken
    about = {
        "model": "mlcn1:w1*3",
        "data": "digits",
        "ends": 2,
        "edges": 1,
        "tasks": 10,
        "images": 4,
        "failing_tasks": 20,
    }
    return {"about": about, "measured": measured, "device": "a CPU", "cpu_count": 2, "versions": {"jax": "0"}}


def test_tables_tell_what_was_measured_and_how_far_models_are_off(tmp_path):
    results = made()
    results["measured"]["devices"]["end"] = {"communication": 0.1, "processing": 0.3, "work": 0.0}
    write_report(json.loads(json.dumps(results)), tmp_path / "tables.json")
    text = (tmp_path / "tables.md").read_text()
    assert (tmp_path / "tables.png").stat().st_size > 1000
    assert "| 1 | never | 4 | 2.2 |" in text
    assert "| 0 | 4 | 2 |" in text, "predicted from single tasks: 2 on each end, then 8 on each"
    assert "| 1 | 7.2 | 10 | 3.5 |" in text
    assert "| 0 | 0.50 | yes |" in text, "what was measured over what was predicted, in a table of its own"
    assert "It must be at most 15% over at least 24: no." in text
    assert "| conv1 | 0.5 | unlimited | 9000 | 0.1 | 1.5 | 0.5 | 50.0% |" in text
    assert "| conv1 | 0.5 | 20 Mbit/s | 9000 | 0.1 | 4 | 3 | 300.0% |" in text
    assert "| end | 2 | 0 ms | 1.25 | 0.75 | 1 |" in text
    assert "| 5 ms each way | 5.20 ms | yes |" in text
    assert "the 7 configurations that no prediction is made from" in text
    rows = schedule_rows(results)
    assert len(rows) == 8
    end = rows[0]
    assert (end["schedule"], end["ends"], end["corrected"]) == ("End", 1, 4.0)
    assert mean_error([end], "corrected") == 1
    lines = [line for line in text.splitlines() if "End-Cloud | 2" in line]
    assert len(lines) == 2, "measured and predicted are in tables of their own"


def test_a_model_that_was_trained_further_is_split_again(tmp_path, monkeypatch):
    tables = object.__new__(tiers_tables.Tables)
    tables.workdir, tables.data_dir, tables.path = tmp_path, "", tmp_path / "tables.json"
    tables.trained, tables.spec = None, types.SimpleNamespace(lane_specs=range(3))
    (tmp_path / "tiers-pixels").mkdir()  # of the model as it was
    made = []
    monkeypatch.setattr(tiers_tables, "TierArtifact", Path)
    monkeypatch.setattr(tiers_tables, "load_trained", lambda workdir: made.append("with its weights"))
    monkeypatch.setattr(tiers_tables.split, "is_of", lambda folder, trained: folder.name in made)
    monkeypatch.setattr(tiers_tables.split, "split", lambda *given: made.append(given[-1]))
    for _ in range(2):
        assert tables._split()["edge"] == tmp_path / "tiers-pixels" / "edge"
    assert made == ["tiers-pixels", "with its weights"]

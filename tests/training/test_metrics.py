import io
import logging
import sys

import numpy as np
import pytest

from mlcn_jax.training import metrics
from mlcn_jax.training.metrics import MetricsWriter, Progress, StepLog, read_rows


def test_rows_after_the_resumed_step_and_a_half_written_one_are_dropped(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": 1.0 / step})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('3\n{"a": 1}\n{"step": 15, "split": "train", "loss": 9.0}\n')  # damaged, and one more row
        file.write('{"step": 40, "spl')  # killed while writing
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, "train", {"loss": 7.0})
    writer.close()
    rows = read_rows(path)
    assert [(row["step"], row["loss"]) for row in rows] == [(10, 0.1), (20, 0.05), (15, 9.0), (30, 7.0)]
    assert path.read_text().count("\n") == 4
    assert [file.read_bytes().count(b"train/loss") for file in sorted((tmp_path / "tensorboard").iterdir())] == [3, 1]


def test_tensorboard_can_follow_a_run_between_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_FLUSH_SECONDS", 0)
    writer = MetricsWriter(tmp_path, 0)
    writer.write(10, "train", {"loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()
    writer.close()


def test_a_failed_write_of_tensorboards_events_is_told_at_once(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, 0)

    def full(event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._tensorboard, "write_event", full)
    with pytest.raises(OSError, match="No space"):
        writer.write(10, "train", {"loss": 1.0})


def test_rows_of_a_resumed_run_are_those_of_one_that_was_never_stopped(tmp_path):
    def run(folder, first, last):
        writer = MetricsWriter(folder, first)
        log = StepLog(writer, Progress(first, 20, 20), batch_size=10, every=10)
        for step in range(first + 1, last + 1):
            log.add(step, {"loss": np.float32(step), "grad_norm": np.float32(1), "accuracy": np.float32(0.5)})
            if step % 7 == 0:
                with log.paused():  # for a checkpoint
                    pass
        log.finish()
        writer.close()
        return [(row["step"], row["loss"]) for row in read_rows(folder / "metrics.jsonl")]

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", 0, 20)
    run(tmp_path / "parts", 0, 17)  # killed: it goes on from step 14
    assert run(tmp_path / "parts", 14, 20) == whole
    assert whole == [(7, 4.0), (10, 9.0), (14, 12.5), (20, 17.5)]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_what_is_asked_for(terminal, monkeypatch, caplog):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    with caplog.at_level(logging.INFO, logger="mlcn_jax"):
        progress = Progress(20, 100, steps_per_epoch=40)
        progress.advance(50)
        progress.report(50, {"loss": 0.125, "accuracy": 0.5, "images_per_second": 1234.0})
        progress.say("scored")
        progress.close()
    shown = screen.getvalue() if terminal else caplog.text
    for part in ("loss 0.1250", "accuracy 50.00%", "1234 images/s", "50/100", "scored"):
        assert part in shown
    assert ("epoch 2" in shown) == (not terminal)

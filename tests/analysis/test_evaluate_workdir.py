"""Scores of a workdir that cannot be written to."""

import errno
import os

import pytest

from mlcn_jax.analysis import evaluate_workdir
from mlcn_jax.training import loop


@pytest.fixture
def trained(tiny, tmp_path):
    config = tiny.replace({"train.num_steps": 1, "train.checkpoint_every": 1})
    loop.train(config, tmp_path)
    return config, tmp_path


def test_scores_are_told_where_nothing_can_be_written(trained, monkeypatch, caplog):
    config, workdir = trained
    usual = evaluate_workdir.evaluate_workdir(config, workdir)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate_workdir, "write_pictures", full)
    assert evaluate_workdir.evaluate_workdir(config, workdir) == usual
    assert "No space left" in caplog.text

    def forbidden(*args):
        raise AssertionError("drawn for nothing")

    monkeypatch.setattr(evaluate_workdir, "write_pictures", forbidden)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert evaluate_workdir.evaluate_workdir(config, workdir) == usual
    assert "cannot be written to" in caplog.text

"""Runs in rounds as processes: one command for all of them, and processes that are killed."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY

from experiments import local_rounds
from mlcn_jax.files import read_json


@pytest.mark.long
def test_one_command_trains_here(tmp_path):
    fields = {"model.lanes": "mlcn1:w1", "model.decoder": 8, "train.num_steps": 6, "train.rounds.steps": 3}
    command = [sys.executable, "-m", "mlcn_jax", "rounds", "--config=configs/default.py", f"--workdir={tmp_path}"]
    command += [f"--config.{name}={value}" for name, value in (fields | {"train.rounds.workers": 2}).items()]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert read_json(tmp_path / "summary.json")["rounds"]["rounds"] == 2


@pytest.mark.long
def test_killed_at_random_moments_every_round_counts_once():
    found = local_rounds.kill(2, seed=1)
    assert {kill["process"] for kill in found["kills"]} == {"coordinator", "worker 0"}
    assert found["every_round_once"]
    assert found["same_parameters"]
    assert [target["verdict"] for target in found["verdicts"].values()] == ["reached"]

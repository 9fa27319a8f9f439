"""Runs in rounds as processes: one command for all of them, and processes that are killed or stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from experiments import round_kills
from mlcn_jax import host
from mlcn_jax.commands import rounds as command
from mlcn_jax.files import read_json
from mlcn_jax.rounds import coordinator
from mlcn_jax.training.metrics import read_rows


@pytest.mark.parametrize(("flags", "found"), [((), "false"), (("--serve=127.0.0.1:0",), None)])
def test_processes_of_one_command_share_a_gpu(tmp_path, monkeypatch, flags, found):
    """None takes most of its memory at once, unless the user says so."""
    name, seen = "XLA_PYTHON_CLIENT_PREALLOCATE", []

    def coordinate(*args):
        seen.append(os.environ.get(name))
        return {}

    monkeypatch.setattr(coordinator, "coordinate", coordinate)
    monkeypatch.setattr(host, "set_up_jax", lambda: None)
    monkeypatch.setenv(name, "true")  # so that what the command sets is undone
    given = ["--config=quickstart", f"--workdir={tmp_path}", *flags]
    assert command.main(given) == 0
    monkeypatch.delenv(name)
    assert command.main(given) == 0
    assert seen == ["true", found]


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
@pytest.mark.timeout(900)
def test_killed_at_random_moments_every_round_counts_once(tmp_path):
    """Over a slow link, with rounds that need all workers and with rounds that do not."""
    found = round_kills.measure(3, 1, tmp_path / "kills.json")
    killed = [kill["process"] for quorum in (2, 1) for kill in found[f"quorum {quorum}"]["kills"]]
    assert set(killed) == {"coordinator", "worker 0"}
    assert found["quorum 2"]["same_parameters"]
    assert found["quorum 1"]["workers_in_a_round"] < 2 == found["quorum 2"]["workers_in_a_round"]
    assert all(target["verdict"] == "reached" for target in found["verdicts"].values())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_that_is_stopped_is_left_out_until_it_goes_on(tmp_path, held_port):
    fields = {
        "model.lanes": "mlcn1:w1",
        "model.decoder": 8,
        "train.batch_size": 60,
        "train.num_epochs": 10_000,
        "train.checkpoint_every": 1_000_000,
        "train.rounds.steps": 300,
        "train.rounds.workers": 3,
        "train.rounds.quorum": 2,
        "train.rounds.patience_seconds": 3,
    }
    common = [sys.executable, "-m", "mlcn_jax", "rounds", "--config=configs/default.py"]
    common += [f"--config.{name}={value}" for name, value in fields.items()]
    address = f"127.0.0.1:{held_port}"
    places = [[f"--serve={address}"], *([f"--coordinator={address}", f"--worker={i}"] for i in range(3))]
    names = ["coordinator", *(f"worker{i}" for i in range(3))]
    log = tmp_path / "worker2.log"

    def until(condition):
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in running)
            time.sleep(0.01)

    def counts(after=0):
        """How many workers counted, in rounds from one on."""
        return [row["workers"] for row in read_rows(tmp_path / "coordinator" / "metrics.jsonl")[after:]]

    def begun():
        return log.read_text().count("worker 2 computes round")

    running = []
    try:
        for name, own in zip(names, places, strict=True):
            with (tmp_path / f"{name}.log").open("w") as file:
                command = [*common, *own, f"--workdir={tmp_path / name}"]
                running.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file))
        until(lambda: counts()[-1:] == [3])
        before = begun()
        until(lambda: begun() > before)
        running[-1].send_signal(signal.SIGSTOP)
        so_far = len(counts())
        until(lambda: 2 in counts(so_far))
        so_far = len(counts())
        running[-1].send_signal(signal.SIGCONT)
        until(lambda: 3 in counts(so_far))
        assert "worker 2 was late: round" in log.read_text()
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()

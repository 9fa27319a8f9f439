"""Training from the command line, as a user meets it: with signals, kills, and mistakes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import REPOSITORY, TINY

from mlcn_jax.commands import front, train
from mlcn_jax.errors import InputError
from mlcn_jax.training.trained import load_trained

QUICKSTART = "--config=configs/quickstart.py"
SMALL = [f"--config.{field}={value}" for field, value in TINY.items()]


def command(*args):
    return [sys.executable, "main.py", *map(str, args)]


def run(*args, env=None):
    return subprocess.run(command(*args), cwd=REPOSITORY, capture_output=True, text=True, timeout=240, env=env)


@pytest.mark.long
def test_train_evaluate_describe(tmp_path, capsys):
    trained = run(QUICKSTART, *SMALL, f"--workdir={tmp_path}")
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    names = ("test_accuracy", "test_loss", "images_per_second", "compile_seconds", "parameters", "steps")
    assert set(names) <= set(summary)
    assert summary["steps"] == 20
    assert f"test accuracy {summary['test_accuracy']:.2%}" in trained.stdout
    for name in ("checkpoints", "metrics.jsonl", "reconstructions.png"):
        assert str(tmp_path / name) in trained.stdout
        assert (tmp_path / name).exists()
    assert "step 20/20" in trained.stderr

    (tmp_path / "confusion.png").unlink()
    assert front.run(["--mode=evaluate", f"--workdir={tmp_path}"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["test_accuracy"] == summary["test_accuracy"]
    assert scores["lane_spreads"] == pytest.approx(summary["lane_spreads"])
    assert scores["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    assert (tmp_path / "confusion.png").exists()
    (tmp_path / "confusion.png").unlink()
    assert front.run(["evaluate", f"--workdir={tmp_path}", f"--output={tmp_path / 'drawn'}"]) == 0
    assert json.loads(capsys.readouterr().out) == scores
    assert [path.name for path in tmp_path.rglob("confusion.png")] == ["confusion.png"]

    assert front.run(["describe", f"--workdir={tmp_path}", "--config.train.seed=3"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == summary["parameters"]


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"lane_spreads": [0.001, 0.3, 0.0]}, "2 of 3 lanes give nearly the same"),
        ({"lane_spreads": [0.3]}, ""),
        ({}, ""),
    ],
)
def test_lanes_that_say_nothing_are_told(capsys, tmp_path, known, said):
    train.print_summary(tmp_path, {"test_accuracy": 0.5, "test_loss": 1.0} | known)
    printed = capsys.readouterr().out
    assert said in printed
    assert (f"mlcn_jax prune --workdir={tmp_path}" in printed) == bool(said)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (
            (QUICKSTART, "--workdir=W", "--mode=trian"),
            ["--mode=trian", "evaluate, describe", "did you mean train?"],
        ),
        ((QUICKSTART, "--workdir=W", "--config.model.lanes=mlcn1:w4*2x"), ["character 11", "          ^"]),
        (
            (QUICKSTART, "--workdir=W", "--config.train.batch=3"),
            ["field --config.train.batch;", "mean --config.train.batch_size?"],
        ),
        ((QUICKSTART, "--workdir=W", "--config.train.seed=x"), ["--config.train.seed=x"]),
        ((QUICKSTART, "--workdir=W", "--config.data.name=mist"), ["mist", "did you mean mnist?"]),
        ((QUICKSTART, "--workdir=W", "--config.train.batch_size=1439"), ["1439", "1438"]),
        (("--config=configs/none.py", "--workdir=W"), ["configs/none.py", "mlcn2_cifar"]),
        (("--workdir=W",), ["--config"]),
        ((QUICKSTART,), ["--workdir"]),
        ((QUICKSTART, "--workdir=/proc/none"), ["/proc/none", "cannot be written"]),
        ((QUICKSTART, "--wrkdir=W"), ["wrkdir", "workdir"]),
        (("--mode=evaluate", "--workdir=W"), ["holds no run"]),
        ((QUICKSTART, "--workdir=W", "--config.search.seed=1"), ["a field of searches", "mlcn_jax search"]),
        ((QUICKSTART, "--workdir=W", "--batch_size=1"), ["unknown flag", "did you mean --config.train.batch_size?"]),
        ((QUICKSTART, "--workdir=W", "--keep=1"), ["unknown flag --keep", "mlcn_jax train --help"]),
        ((QUICKSTART, "runs/w"), ["'runs/w'", "--name=value"]),
        (("explain", "--workdir=W", "--config.train.seed=1"), ["does not take a configuration", "explain --help"]),
        ((QUICKSTART, "--workdir=W", "--sweep=train.seed=0,1"), ["--mode=sweep"]),
        ((QUICKSTART, "--workdir=W", "--mode=sweep", "--sweep=train.sed=0,1"), ["train.sed", "train.seed"]),
    ],
)
def test_bad_input_gets_one_clear_error(args, parts, tmp_path):
    args = [arg.replace("=W", f"={tmp_path / 'w'}") if arg == "--workdir=W" else arg for arg in args]
    with pytest.raises(InputError) as caught:
        front.run(args)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not (tmp_path / "w" / "checkpoints").exists() or not list((tmp_path / "w" / "checkpoints").iterdir())


def test_an_error_is_one_message_with_its_exit_code():
    result = run(QUICKSTART, "--wrkdir=W")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: unknown flag --wrkdir; did you mean --workdir?")
    assert result.stderr.count("\n") == 1


def test_no_network_and_no_files_says_what_to_put_where(tmp_path):
    """Proxies that lead nowhere stand for a missing network."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    args = (QUICKSTART, f"--workdir={tmp_path}", "--config.data.name=mnist", f"--config.data.cache_dir={tmp_path}")
    result = run(*args, env={**os.environ, **nowhere})
    assert result.returncode == 2
    assert "train-images-idx3-ubyte" in result.stderr
    assert "could not be downloaded" in result.stderr
    assert "--config.data.dir" in result.stderr


@pytest.mark.long
def test_killed_at_random_moments_it_ends_with_the_same_parameters(tmp_path):
    """kill -9 while starting, training, or saving; the same command again; bit for bit the same end."""
    args = (QUICKSTART, *SMALL, "--config.train.num_steps=90", "--config.train.checkpoint_every=3")
    whole = run(*args, f"--workdir={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr

    moments = random.Random(0)
    workdir = tmp_path / "killed"
    checkpoints = workdir / "checkpoints"
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen(
            command(*args, f"--workdir={workdir}"), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        before = set(checkpoints.glob("*")) if checkpoints.exists() else set()
        if attempt:  # wait for something new in the folder, often a save just begun, so that every attempt gets on
            while process.poll() is None and set(checkpoints.glob("*")) <= before:
                time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.15))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, errors.decode()
            break
    last = run(*args, f"--workdir={workdir}")
    assert last.returncode == 0, last.stderr
    assert kills >= 2
    ours, theirs = (load_trained(f"{tmp_path}/{name}").params for name in ("whole", "killed"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_stop_signal_saves_and_exits_with_its_own_code(tmp_path, number):
    args = command(QUICKSTART, *SMALL, "--config.train.num_steps=2000", "--config.train.num_epochs=1000")
    args += ["--config.train.checkpoint_every=2000", f"--workdir={tmp_path}"]
    process = subprocess.Popen(args, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "run the same command again" in errors
    assert 5 <= load_trained(tmp_path).step < 2000

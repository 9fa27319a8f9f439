"""The scripts of experiments and benchmarks: flags belong to a call."""

import importlib
import io
import json
import re
import subprocess
import sys

import pytest
from absl import flags

from experiments import REPOSITORY, lane_collapse, repeated_runs, table_4_1
from mlcn_jax import host, launch
from mlcn_jax.errors import InputError

SCRIPTS = [
    f"{folder}.{path.stem}"
    for folder in ("experiments", "benchmarks")
    for path in sorted((REPOSITORY / folder).glob("*.py"))
    if "launch_script(" in path.read_text()
]


def parsed(script, *given):
    values = flags.FlagValues()
    script.define(values)
    values(["script", *given])
    return values


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_are_those_of_a_call_and_all_have_a_meaning(name):
    values = parsed(importlib.import_module(name))
    assert all(values[flag].help for flag in values)


def test_there_are_scripts():
    assert {"experiments.table_4_1", "experiments.nas_sweeps", "benchmarks.scaling"} <= set(SCRIPTS)


def test_what_was_given_is_told_without_folders():
    values = parsed(table_4_1, "--workdir=mine", "--scale=full", "--rows=cifar_capsnet", "--cifar_dir=mine")
    asked = repeated_runs.asked(values, "table_4_1", table_4_1.SCALES, ("rows", "columns"))
    assert asked.command == "python -m experiments.table_4_1 --workdir=FOLDER --scale=full --rows=cifar_capsnet"
    assert asked.directories == {"fashion_mnist": "", "cifar10": "mine"}
    with pytest.raises(InputError, match="--scale: large is not one of smoke, cpu, full"):
        repeated_runs.asked(parsed(table_4_1, "--workdir=mine", "--scale=large"), "table_4_1", table_4_1.SCALES, ())
    stored = json.loads((REPOSITORY / "experiments/results/lane_collapse_cifar_mlcn1_4x4.json").read_text())["command"]
    given = stored.split()[3:]
    names = ("row", "settings", "steps", "seed")
    assert repeated_runs.command("lane_collapse", parsed(lane_collapse, *given), names) == stored


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        ("tie_break", "--draw=3", "Unknown command line flag 'draw'. Did you mean: draws"),
        ("tie_break", "--draws=none", "flag --draws=none"),
        ("tie_break", "draws", "unknown argument 'draws'"),
        (
            "nas_sweeps",
            "--config.search.num_imags=3",
            "is not a field of the configuration (--config.search.num_imags)",
        ),
    ],
)
def test_a_mistaken_flag_is_one_message(script, given, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *given.split()])  # where ml_collections looks for --config
    with pytest.raises(InputError, match=re.escape(message)):
        launch._parse_flags(importlib.import_module(f"experiments.{script}").define, sys.argv)


def test_a_mistake_ends_a_script_with_its_exit_code():
    done = run_script("nas_sweeps", "--workdir=w --config=nowhere.py")
    assert done.returncode == 2
    assert "No such file or directory: 'nowhere.py'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Unable to initialize backend 'cuda': no such device", "JAX_PLATFORMS is 'cuda': unset it"),
        ("Could not determine home directory.", "set MLCN_JAX_CACHE to a folder"),
    ],
)
def test_what_is_wrong_with_the_machine_is_one_message(message, told, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")

    def command():
        raise RuntimeError(message)

    with pytest.raises(SystemExit) as ended:
        launch.launch(command)
    assert ended.value.code == launch.EXIT_INPUT
    assert told in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show_are_escaped(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    launch.launch(lambda: print("runs/größe"))
    assert out.getvalue() == b"runs/gr\\xf6\\xdfe\n"


def test_programs_of_scripts_are_computed_as_in_training(monkeypatch):
    done = []
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setattr(host, "compute_in_turn", lambda: done.append("in turn"))
    launch.launch_script(lambda values: None, lambda values: done.append("main"))
    assert done == ["in turn", "main"]


def test_help_tells_what_there_is_to_give():
    done = run_script("tie_break", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("What decides how the published greedy rule fares")
    assert "--draws: Lane sets drawn for each number of lanes." in done.stdout


def run_script(script, given):
    command = [sys.executable, "-m", f"experiments.{script}", *given.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=100)

"""The front door: its list, the help of each command, and which configuration or model a name means."""

import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from conftest import REPOSITORY

from mlcn_jax import config as config_lib
from mlcn_jax import host, pretrained
from mlcn_jax.commands import arguments, fields, front
from mlcn_jax.errors import InputError
from mlcn_jax.search.settings import SearchSettings


def help_of(command, capsys):
    with pytest.raises(SystemExit) as ended:
        front.run([command, "--help"])
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_list_names_every_command(capsys):
    assert front.run(["--help"]) == front.run([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name:<10}{summary}" in listed for name, (_, summary) in front.COMMANDS.items())


def test_a_version_may_be_missing(capsys, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert front.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mlcn_jax not installed, jax not installed")


def test_versions_are_told(capsys):
    assert front.run(["--version"]) == front.run(["version"]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {
        f"mlcn_jax {version('mlcn_jax')}, jax {version('jax')}, flax {version('flax')}, optax {version('optax')}"
    }


@pytest.mark.parametrize("command", front.COMMANDS)
def test_help_tells_of_the_command_and_of_its_configuration(command, capsys):
    told = help_of(command, capsys)
    assert f"mlcn_jax {command}" in told
    with_config = command in {"train", "evaluate", "describe", "sweep", "search", "cheapest", "rounds"}
    assert ("--config.train.batch_size=100 " in told) == with_config
    assert ("--config.search.method=random " in told) == (command == "search")
    assert with_config or "train --help" in told
    assert "_worker" not in told


@pytest.mark.parametrize("cls", [*config_lib.SECTIONS.values(), SearchSettings, config_lib.RunConfig])
def test_every_field_has_a_meaning(cls):
    known = fields.meanings(cls)
    assert [field.name for field in dataclasses.fields(cls)] == list(known) or set(known) == {
        field.name for field in dataclasses.fields(cls)
    }
    assert all(known.values())


def test_a_meaning_may_take_several_lines():
    class Two:
        """Of two.

        Attributes:
          a, b: both
            of them.
          c: the third.

        Raises:
          d: no field.
        """

    assert fields.meanings(Two) == {"a": "both of them.", "b": "both of them.", "c": "the third."}


def test_an_unknown_command_names_the_nearest():
    with pytest.raises(InputError, match=r"no command 'explian'; did you mean explain\?"):
        front.run(["explian"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("search --workdir=w", "--config=FILE is needed, with search fields"),
        ("search --workdir=w --config=quickstart", "has no search fields"),
        ("search --workdir=w --config=nas_quickstart --config.search.num_model=1", "--config.search.num_models"),
        ("train --workdir=w --config=nas_quickstart --config.search.seed=1", "is a field of searches"),
        ("train --workdir=w --config=quickstart --num_epochs=3", "did you mean --config.train.num_epochs"),
        ("sweep --workdir=w --config=quickstart", "a sweep needs --sweep="),
        ("sweep --workdir=w --config=quickstart --sweep=train.seed=0 --config.parallel.processes=2", "in one process"),
        ("profile --data=mnst", "--data=mnst is not one of .*mnist"),
        ("profile --output=.", "--output=. is a folder: give the name of a file"),
        ("profile --forms=mlcn2:w4,resnt:w1", "resnt"),
        ("explain", "--workdir=FOLDER is needed"),
        ("explain --workdir=digits --num_ranked=0", "num_ranked"),
        ("rounds --workdir=w --config=quickstart --coordinator=a:1 --worker=0 --ca=", "--ca= has an empty file name"),
        ("describe", "--config is missing"),
        ("describe --config=", "--config is empty"),
        ("describe --config=quickstart --workdir=digits", "give the one that is to be described"),
        ("train --workdir=w --config=quickstart --config.train.score_test false", "'false' belongs to no flag"),
        ("train --workdir=w --config=quickstart --config.model.decoder[0]=32", r"no field --config.model.decoder\[0\]"),
        ("train --workdir=w --config=quickstart --noconfig.data.flip=true", "data.flip"),
        ("evaluate --workdir=digits --noall_images=true", "all_images"),
        (
            "evaluate --workdir=digits --config.model.lanes=x",
            "model.lanes does not change how a trained model",
        ),
        ("sweep --workdir=w --config=quickstart --sweep=parallel.processes=1,2", "in one process"),
    ],
)
def test_what_a_command_cannot_use(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        front.run(argv.split())
    assert not list(tmp_path.iterdir()) or argv.startswith("sweep")


@pytest.mark.parametrize("given", ["--output=p.json", "--link_worker={}", "--sharing_worker={}"])
def test_a_profile_is_measured_as_training_computes(given, tmp_path, monkeypatch):
    def in_turn():
        raise InputError("computes in turn")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "compute_in_turn", in_turn)
    with pytest.raises(InputError, match="computes in turn"):
        front.run(["profile", given])


def test_a_mistake_is_answered_before_jax_is_loaded():
    code = (
        "import sys\nfrom mlcn_jax.commands import front\n"
        "for argv in ('train --wrkdir=w', 'train --workdir=w', 'prune --keep=x', 'profile --core=1', 'explain'):\n"
        "    try: front.run(argv.split())\n"
        "    except ValueError: pass\n"
        "    else: raise SystemExit('no error')\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("start", [["main.py"], ["-m", "mlcn_jax"], ["-m", "experiments.nas"]])
def test_ways_to_start(start):
    done = subprocess.run([sys.executable, *start, "--help"], cwd=REPOSITORY, capture_output=True, text=True)
    moved = "experiments" in start[-1]
    assert "mlcn_jax search --config" in done.stderr if moved else "mlcn_jax COMMAND" in done.stdout, done.stderr
    assert done.returncode == (2 if moved else 0)


@pytest.mark.parametrize("name", ["quickstart", "quickstart.py", "configs/quickstart.py"])
def test_a_configuration_of_the_package_is_found_anywhere(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    front.run(["describe", "--config", name, "--config.model.lanes=mlcn1:w1"])
    assert json.loads(capsys.readouterr().out)["lanes"] == ["mlcn1:w1d1"]


def test_settings_that_the_data_cannot_have_are_refused_without_reading_it():
    for setting, told in (("image_size=64", "image_size is 64; expected 0"), ("test_fraction=1.7", "test_fraction is")):
        with pytest.raises(InputError, match=told):
            front.run(["describe", "--config=mlcn1_cifar", f"--config.data.{setting}"])


def test_a_file_goes_before_a_configuration_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.py").write_text("raise RuntimeError('mine')\n")
    assert arguments.config_file("quickstart.py").resolve() == tmp_path / "quickstart.py"
    with pytest.raises(InputError, match=r"quickstart.py, line 1: RuntimeError: mine"):
        front.run(["describe", "--config=quickstart.py"])
    (tmp_path / "quickstart.py").write_text("config = 3\n")
    with pytest.raises(InputError, match=r"quickstart.py has no get_config\(\); --config takes a Python file"):
        arguments.execute(tmp_path / "quickstart.py")
    (tmp_path / "quickstart.py").write_text("def get_config():\n    return 3\n")
    with pytest.raises(InputError, match=r"returns no ConfigDict"):
        front.run(["describe", "--config=quickstart.py"])


def test_a_config_file_that_names_an_unknown_field_says_where(tmp_path):
    path = tmp_path / "mine.py"
    lines = ["from mlcn_jax.config import default_config", "def get_config():", "    config = default_config()"]
    path.write_text("\n".join([*lines, "    config.train.batch = 3", "    return config", ""]))
    with pytest.raises(InputError, match=r"train.batch"):
        front.run(["describe", f"--config={path}"])


@pytest.mark.parametrize("kind", ["ConfigDict", "FrozenConfigDict"])
def test_flags_change_fields_that_a_config_file_leaves_out(kind, tmp_path):
    path = tmp_path / "mine.py"
    lines = [f"from ml_collections import {kind}", "def get_config():"]
    path.write_text("\n".join([*lines, f"    return {kind}({{'model': {{'lanes': 'mlcn2:w1*2'}}}})", ""]))
    argv = [f"--config={path}", "--config.model.margin_loss=per_lane", "--config.train.batch_size=7"]
    config = arguments.parse("train", "", lambda values: None, argv, config="run").config
    assert (config.model.lanes, config.model.margin_loss, config.train.batch_size) == ("mlcn2:w1*2", "per_lane", 7)


def test_a_config_that_is_no_python_file_says_what_is_expected(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"train": {"score_test": true}}')
    with pytest.raises(InputError, match=r"config.json.*takes a Python file with get_config\(\)"):
        front.run(["describe", f"--config={path}"])


def test_the_pretrained_model_is_meant_where_there_is_no_such_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = pretrained.find_workdir("digits")
    assert pretrained.is_pretrained(found)
    assert pretrained.find_export("digits") == found / "export"
    assert str(pretrained.output_folder("", found, "explain")) == "explain-digits"
    with pytest.raises(InputError, match="cp -r"):
        front.run(["export", "--workdir=digits"])
    (tmp_path / "digits").mkdir()
    assert str(pretrained.find_workdir("digits")) == str(pretrained.find_export("digits")) == "digits"
    with pytest.raises(InputError, match="holds no run"):
        front.run(["evaluate", "--workdir=digits"])


def test_the_pretrained_model_evaluates_as_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    summary = json.loads((pretrained.find_workdir("digits") / "summary.json").read_text())
    front.run(["evaluate", "--workdir=digits"])
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == pytest.approx(summary["test_accuracy"], abs=0.005)
    assert (tmp_path / "evaluate-digits" / "confusion.png").exists()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("train.num_epochs=1e3", "--config.train.num_epochs=1e3: it must be an integer"),
        ("train.learning_rate=fast", "--config.train.learning_rate=fast: it must be a number"),
        ("profile=maybe", "--config.profile=maybe: it must be true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_plain_words(field, message):
    with pytest.raises(InputError, match=re.escape(message) + "$"):
        front.run(["train", "--config=quickstart", "--workdir=W", f"--config.{field}"])

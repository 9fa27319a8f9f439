"""The package as a user installs it: built as a wheel, and used in an empty folder, far from the clone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest
from conftest import REPOSITORY
from PIL import Image

from mlcn_jax.data import datasets

pytestmark = pytest.mark.long
SOURCES = ("mlcn_jax", "configs", "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the installed wheel, over the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / name, source / name)
    offline = ["--no-deps", "--no-index"]
    build = [*PIP, "wheel", *offline, "--no-build-isolation", f"--wheel-dir={folder}", str(source)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    assert wheel.stat().st_size < 1.5e6
    subprocess.run([*PIP, "install", *offline, f"--target={folder / 'site'}", str(wheel)], check=True, timeout=120)
    return folder / "site"


@pytest.fixture
def command(installed, tmp_path, monkeypatch):
    """Calls the console script in an empty folder; returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed))

    def call(*args, code=0):
        program = [installed / "bin" / "mlcn_jax", *map(str, args)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return call


def test_what_is_in_it(installed):
    package = installed / "mlcn_jax"
    assert (package / "py.typed").is_file()
    assert {path.name for path in (REPOSITORY / "configs").glob("*.py")} <= set(os.listdir(package / "configs"))
    assert (package / "serving" / "artifact.py").is_file()
    assert sum(path.stat().st_size for path in (package / "pretrained" / "digits").rglob("*") if path.is_file()) < 1e6
    assert not (installed / "configs").exists()
    code = "import mlcn_jax.configs.quickstart as q; print(q.__file__, q.get_config().data.name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(package / "configs" / "quickstart.py"), "digits"]


def test_commands_work_in_an_empty_folder(command, tmp_path):
    assert "explain" in command("--help")
    assert json.loads(command("describe", "--config=configs/quickstart.py"))["parameters"] > 1e6
    assert "did you mean quickstart?" in command("describe", "--config=quickstrt", code=2)


def test_the_pretrained_model_can_be_tried_at_once(command, tmp_path):
    test = datasets.load("digits").test
    names = [f"{i}.png" for i in range(8)]
    for name, image in zip(names, test.images, strict=False):
        Image.fromarray(image[..., 0]).save(name)
    rows = [json.loads(line) for line in command("predict", "digits", *names, "--json").splitlines()]
    assert sum(row["class"] == str(label) for row, label in zip(rows, test.labels, strict=False)) >= 7
    assert "explain-digits" in command("explain", "--workdir=digits", "--images=3", "--num_ranked=20")
    assert {"image_3.png", "ranking.json"} <= set(os.listdir(tmp_path / "explain-digits"))


def test_a_model_is_trained_and_used(command, tmp_path):
    few = ("--config.data.validation_fraction=0.2", "--config.train.num_steps=4", "--config.model.lanes=mlcn1:w1*2")
    assert "test accuracy" in command("train", "--config=quickstart", "--workdir=run", *few)
    assert 0 <= json.loads(command("evaluate", "--workdir=run"))["test_accuracy"] <= 1
    assert "| 0 | mlcn1" in command("prune", "--workdir=run", "--keep=1", "--output=smaller")
    command("export", "--workdir=smaller")
    Image.fromarray(datasets.load("digits").test.images[0, ..., 0]).save("0.png")
    program = [sys.executable, "-m", "mlcn_jax.predict", "smaller/export", "0.png", "--json"]
    (line,) = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert json.loads(line)["class"] in map(str, range(10))


def test_the_pretrained_model_is_served(installed, command, tmp_path):
    Image.fromarray(datasets.load("digits").test.images[0, ..., 0]).save("0.png")
    program = [installed / "bin" / "mlcn_jax", "serve", "digits", "--port=0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        line = server.stdout.readline()
        url = re.search(r"http://127.0.0.1:\d+/predict", line)
        assert url, line + server.stdout.read()
        request = urllib.request.Request(url[0], (tmp_path / "0.png").read_bytes(), {"Content-Type": "image/png"})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["predictions"][0]["class"] in map(str, range(10))
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0

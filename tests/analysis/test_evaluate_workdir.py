"""Scores of a trained model: on other images, of the most probable classes, and where nothing can be written."""

import dataclasses
import errno
import json
import logging
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from mlcn_jax import pretrained
from mlcn_jax.analysis import evaluate_workdir
from mlcn_jax.commands import front
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.errors import InputError
from mlcn_jax.settings import DataSettings
from mlcn_jax.training.trained import load_trained


@pytest.fixture(scope="module")
def trained(finished, tmp_path_factory):
    workdir = shutil.copytree(finished, tmp_path_factory.mktemp("run") / "run")
    return read_stored(workdir), workdir


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


@pytest.fixture(scope="module")
def digits():
    return datasets.load("digits")


@pytest.fixture(scope="module")
def model():
    return load_trained(pretrained.find_workdir("digits"))


@pytest.fixture
def folder(digits, tmp_path):
    """Two digits of each class as larger pictures in RGB."""
    for label, name in enumerate(digits.class_names):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i, image in enumerate(digits.test.images[digits.test.labels == label][:2]):
            picture = Image.fromarray(image[..., 0]).convert("RGB").resize((56, 56))
            picture.save(tmp_path / "pictures" / name / f"{i}.png")
    return tmp_path / "pictures"


def evaluated(capsys, *flags):
    front.run(["evaluate", "--workdir=digits", *flags])
    return json.loads(capsys.readouterr().out)


def test_another_folder_is_scored_in_the_size_and_color_of_the_model(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ("--config.data.name=folder", f"--config.data.dir={folder}")
    everything = evaluated(capsys, *flags, "--all_images")
    assert everything["images"] == 20
    assert everything["test_accuracy"] >= 0.9
    assert everything["data"]["scored"]
    assert "test_top5_accuracy" not in everything
    assert evaluated(capsys, *flags)["images"] == 10
    assert (tmp_path / "evaluate-digits" / "confusion.png").is_file()
    with pytest.raises(InputError, match=r"28x28 pixels, but those of folder have 40x40: leave out"):
        evaluated(capsys, *flags, "--config.data.image_size=40")
    (folder / "9").rename(folder / "nine")
    with pytest.raises(InputError, match=r"only the model has: 9; only folder has: nine\): name the folders"):
        evaluated(capsys, *flags)


def test_all_images_are_told_apart_from_the_test_set_of_the_run(trained, capsys, caplog, monkeypatch):
    _, workdir = trained
    before = (workdir / "confusion.png").stat().st_mtime_ns
    monkeypatch.setattr(logging.getLogger("mlcn_jax"), "propagate", True)
    front.run(["evaluate", f"--workdir={workdir}", "--all_images"])
    assert json.loads(capsys.readouterr().out)["images"] == 1797
    assert (workdir / "confusion.png").stat().st_mtime_ns == before
    assert (workdir / "evaluate" / "confusion.png").is_file()
    assert "the model was trained on these images" in caplog.text


def test_a_folder_that_has_changed_since_the_training_is_told(folder, digits, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("mlcn_jax"), "propagate", True)
    config = RunConfig().replace({"data.name": "folder", "data.dir": str(folder), "data.test_fraction": 0.5})
    learned = {"training_images_sha256": datasets.digest(config.data.load().train)}
    (tmp_path / "model.json").write_text(json.dumps(learned))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))

    def told(**changes):
        caplog.clear()
        now = config.replace({f"data.{name}": value for name, value in changes.items()})
        evaluate_workdir._check_unseen(now.data.load(), now, tmp_path, False)
        return caplog.text

    other = shutil.copytree(folder, tmp_path / "other")
    assert not told()
    assert not told(validation_fraction=0.5)
    shutil.copy(folder / "3" / "0.png", folder / "3" / "2.png")
    assert "pictures, or what is held out of it, has changed since the model was trained" in told()
    assert not told(dir=str(other)), "the same images elsewhere"
    shutil.copy(folder / "3" / "0.png", other / "3" / "2.png")
    assert not told(dir=str(other)), "other images"


def test_settings_of_the_runs_folder_are_not_those_of_another_dataset(folder, tmp_path, monkeypatch):
    config = RunConfig().replace({"data.name": "folder", "data.dir": str(folder), "data.test_fraction": 0.5})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    asked = []
    monkeypatch.setattr(evaluate_workdir, "evaluate_workdir", lambda config, *args, **how: asked.append(config.data))
    front.run(["evaluate", f"--workdir={tmp_path}", "--config.data.name=digits"])
    front.run(["evaluate", f"--workdir={tmp_path}", "--config.data.name=folder", "--config.data.test_fraction=0.1"])
    assert asked == [DataSettings(), dataclasses.replace(config.data, test_fraction=0.1)]


def test_settings_of_a_configuration_that_is_given_are_kept(folder, tmp_path, monkeypatch):
    lines = f"""from mlcn_jax.config import default_config

def get_config():
    config = default_config()
    config.data.dir, config.data.image_size, config.data.test_fraction = {str(folder)!r}, 28, 0.5
    return config
"""
    (tmp_path / "pictures.py").write_text(lines)
    (tmp_path / "config.json").write_text(json.dumps(RunConfig().to_dict()))
    asked = []
    monkeypatch.setattr(evaluate_workdir, "evaluate_workdir", lambda config, *args, **how: asked.append(config.data))
    flags = (f"--config={tmp_path / 'pictures.py'}", "--config.data.name=folder")
    front.run(["evaluate", f"--workdir={tmp_path}", *flags])
    assert [(data.name, data.dir, data.image_size, data.test_fraction) for data in asked] == [
        ("folder", str(folder), 28, 0.5)
    ]


def test_labels_follow_the_classes_of_the_model_and_gray_becomes_rgb(digits, model):
    turned = dataclasses.replace(digits, class_names=digits.class_names[::-1])
    rgb = dataclasses.replace(model, spec=dataclasses.replace(model.spec, image_shape=(28, 28, 3)))
    found = evaluate_workdir.fitted(turned, rgb, "W")
    assert found.class_names == digits.class_names
    np.testing.assert_array_equal(found.test.labels, 9 - digits.test.labels)
    np.testing.assert_array_equal(found.test.images, np.repeat(digits.test.images, 3, axis=-1))
    np.testing.assert_array_equal(evaluate_workdir.fitted(found, model, "W").test.images, digits.test.images)


@pytest.mark.parametrize(
    ("name", "given", "used"), [("folder", 0, 28), ("folder", 40, 40), ("mnist", 28, 0), ("mnist", 40, 40)]
)
def test_folders_are_resized_for_the_model(model, name, given, used):
    assert evaluate_workdir._image_size(DataSettings(name=name, image_size=given), model) == used


def test_among_the_most_probable_classes():
    lengths = np.array([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5], [0.2, 0.2, 0.2]])
    labels = np.array([2, 0, 2])
    assert evaluate_workdir.top_accuracy(lengths, labels, 2) == pytest.approx(1 / 3)
    assert evaluate_workdir.top_accuracy(lengths, labels, 1) == 0
    assert evaluate_workdir.top_accuracy(lengths, labels, 3) == 1


def test_top_accuracy_is_told_of_many_classes(model, digits, monkeypatch):
    assert evaluate_workdir._top_accuracy(model, digits.test, 100) == {}
    monkeypatch.setattr(evaluate_workdir, "_TOP", 1)
    scores = json.loads((pretrained.find_workdir("digits") / "summary.json").read_text())
    found = evaluate_workdir._top_accuracy(model, digits.test, 100)
    assert found == {"test_top1_accuracy": pytest.approx(scores["test_accuracy"], abs=0.005)}

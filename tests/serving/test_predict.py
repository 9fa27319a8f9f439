"""What `mlcn_jax.predict` prints."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mlcn_jax import pretrained
from mlcn_jax.errors import InputError
from mlcn_jax.serving import artifact, export, onnx, predict


def test_names_are_shown_and_not_obeyed(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "a\x1b[2J\nb.png", tmp_path / "c\r\x1b]0;title\x07.png"
    found = [
        {"file": str(good), "class": "cat\x1b[1m", "probability": 0.5},
        {"file": str(bad), "error": "it is\nno image"},
    ]
    monkeypatch.setattr(predict, "open_model", lambda given, runtime: None)
    monkeypatch.setattr(predict, "predict", lambda *args: found)
    monkeypatch.setattr(sys, "argv", ["predict", "export", str(good), str(bad)])
    assert predict.main() == 3
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/a\\x1b[2J\\nb.png: cat\\x1b[1m, 50.0%\n"
    assert err == f"{tmp_path}/c\\r\\x1b]0;title\\x07.png: it is\\nno image\n"


def test_of_several_classes_that_are_certain_the_one_with_the_longest_capsule_is_told(tmp_path):
    class Long(artifact.Classifier):
        class_names, image_shape, _certain_length, _probability_power = ("a", "b", "c"), (2, 2, 1), 1.0, 1

        def lengths(self, images):
            return np.tile(np.float32([1.1, 0.5, 1.3]), (len(images), 1))

    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    (found,) = predict.predict(Long(), [tmp_path / "a.png"])
    assert (found["class"], found["probability"]) == ("c", 1.0)
    assert [one["class"] for one in predict.ranked("abc", Long().scores(np.zeros(1))[0], 3)] == ["c", "a", "b"]


@pytest.mark.parametrize("given", [".", "../digits", "../../pretrained/digits"])
def test_the_model_of_the_package_is_known_by_every_path(given, monkeypatch):
    monkeypatch.chdir(pretrained.find_workdir("digits"))
    workdir = pretrained.find_workdir(given)
    assert str(pretrained.output_folder("", workdir, "explain")) == "explain-digits"
    with pytest.raises(InputError, match="digits comes with the package: copy it"):
        pretrained.check_writable(workdir, "export")


def test_usual_names_are_shown_as_they_are():
    assert predict.printable("größe 日本 (1).png: cat, 50.0%") == "größe 日本 (1).png: cat, 50.0%"
    assert predict.printable("\udcff") == "\\udcff"


def test_files_of_a_folder_are_its_pictures(tmp_path):
    for name in ("b.png", "a.JPG", "._a.jpg", "notes.txt"):
        (tmp_path / name).touch()
    assert predict._files_of([str(tmp_path), "c"]) == [tmp_path / "a.JPG", tmp_path / "b.png", Path("c")]


def test_a_workdir_is_used_by_its_export_only_while_that_is_newer_than_the_model(finished, tmp_path, rng, caplog):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    trained = predict.open_model(str(tmp_path))
    assert not isinstance(trained, artifact.Artifact)
    manifest = export.export(tmp_path) / "manifest.json"
    exported = predict.open_model(str(tmp_path))
    assert isinstance(exported, artifact.Artifact)
    images = rng.integers(0, 256, (5, *trained.image_shape)).astype(np.uint8)
    np.testing.assert_allclose(trained.probabilities(images), exported.probabilities(images), atol=1e-5)
    assert trained.class_names == exported.class_names
    described = (tmp_path / "model.json").read_text()
    (tmp_path / "model.json").write_text(described + " ")  # lanes may have other weights now
    assert not isinstance(predict.open_model(str(tmp_path)), artifact.Artifact)
    (tmp_path / "model.json").write_text(described)  # whenever it was written, as after a copy of the run
    assert isinstance(predict.open_model(str(tmp_path)), artifact.Artifact)
    onnx.read_export(tmp_path)
    assert "is older than" not in caplog.text
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").mkdir()
    assert isinstance(predict.open_model(str(tmp_path)), artifact.Artifact)  # to which checkpoints are nothing
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "moved").rename(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "999999").mkdir()
    os.utime(manifest, (2**32, 2**32))
    assert not predict.export_is_current(tmp_path)
    with pytest.raises(InputError, match="needs an export of the newest checkpoint"):
        predict.open_model(str(tmp_path), "onnxruntime")
    with pytest.raises(InputError, match="runtime 'tensorrt' is unknown"):
        predict.open_model(str(tmp_path), "tensorrt")
    assert isinstance(predict.open_model(str(manifest.parent)), artifact.Artifact)
    onnx.read_export(tmp_path)
    assert "is older than the run's newest checkpoint" in caplog.text


def test_the_model_of_the_package_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(artifact.Artifact("digits").class_names) == 10


def test_an_export_of_a_run_that_was_trained_anew_is_not_used(exported, tmp_path):
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda path: int(path.name))
    fewer = newest.with_name("1")
    newest.rename(fewer)
    for other in (path for path in fewer.parent.iterdir() if path != fewer):
        shutil.rmtree(other)
    assert not predict.export_is_current(tmp_path), "fewer steps"
    fewer.rename(newest)
    assert predict.export_is_current(tmp_path)
    facts = newest / "facts" / "metadata"
    facts.write_text(facts.read_text().replace('"params": "', '"params": "0'))
    assert not predict.export_is_current(tmp_path), "another seed"
    shutil.copytree(exported / "checkpoints", tmp_path / "checkpoints", dirs_exist_ok=True)
    assert predict.export_is_current(tmp_path)
    assert len([*newest.parent.iterdir()]) > 1
    shutil.rmtree(newest)
    assert predict.export_is_current(tmp_path), "the best one was kept"
    manifest = tmp_path / "export" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["source"]["facts"]
    manifest.write_text(json.dumps(content))
    assert predict.export_is_current(tmp_path), "an earlier version wrote no facts"


@pytest.mark.parametrize("source", [{}, "abc", {"model": "", "checkpoint": "1500"}, 3])
def test_an_altered_manifest_is_left_to_whoever_reads_the_export(tmp_path, source):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "manifest.json").write_text(json.dumps({"source": source}))
    assert predict.export_is_current(tmp_path)


def test_the_export_of_the_model_that_comes_with_the_package_is_of_its_checkpoint():
    assert predict.export_is_current(pretrained.find_workdir("digits"))


def test_a_model_that_does_not_exist_is_not_called_an_export_without_a_manifest(tmp_path):
    with pytest.raises(
        InputError, match=r"nothing does not exist: give a folder that .* comes with the package: digits"
    ):
        predict.open_model(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="is not an exported model: it has no manifest"):
        predict.open_model(str(tmp_path))


def test_a_workdir_without_a_model_says_so(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="holds no trained model"):
        predict.open_model(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mlcn_jax.serving.trained", None)
    with pytest.raises(InputError, match=r"reading it needs the training packages .*pip install mlcn_jax"):
        predict.open_model(str(tmp_path))

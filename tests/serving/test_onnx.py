"""Exported models as ONNX: read back, converted lane by lane, and kept only where ONNX Runtime gives the same.

What runs ONNX Runtime is skipped where requirements-onnx.txt is not installed.
"""

import dataclasses
import importlib.util
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn import calibration
from mlcn_jax.nn.capsules import lengths
from mlcn_jax.nn.model import encode, param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import onnx, runtime
from mlcn_jax.serving import onnx_export as script
from mlcn_jax.serving.artifact import Artifact
from mlcn_jax.serving.onnx_file import open_onnx
from mlcn_jax.training.trained import load_trained

installed = pytest.mark.skipif(not importlib.util.find_spec("jax2onnx"), reason="needs requirements-onnx.txt")

SPECS = {
    "mixed": ModelSpec("mlcn", (17, 18, 3), 3, "mlcn1:w1*2,mlcn2:w2,mlcn2:w1d2*2"),
    "per_class": ModelSpec("mlcn", (18, 17, 1), 4, "mlcn1:w2*2,mlcn2:w1", lane_routing="per_class", signed_pixels=True),
    "bfloat16": ModelSpec("mlcn", (17, 17, 1), 2, "mlcn1:w1d2", compute_dtype="bfloat16", prior_bias=False),
    "capsnet": ModelSpec("capsnet", (17, 17, 1), 3, num_routing_iters=2),
    "resnet": ModelSpec("mlcn", (12, 13, 3), 3, "resnet:w1d3*2,resnet:w1", norm_group=8, lane_weights=(1.0, 0.5, 2.0)),
}


@pytest.fixture
def copied(exported, tmp_path):
    for name in ("export", "config.json"):
        copy = shutil.copytree if (exported / name).is_dir() else shutil.copy
        copy(exported / name, tmp_path / name)
    return tmp_path


def model_of(spec: ModelSpec) -> onnx.ExportedModel:
    """With random parameters, routing logits among them, large enough for lengths that are neither 0 nor 1."""
    shapes = param_shapes(spec)["encoder"]
    rng, scale = np.random.default_rng(1), 0.1 if spec.name == "capsnet" else 0.5
    encoder = jax.tree.map(lambda a: jax.numpy.asarray(rng.normal(0, scale, a.shape), np.float32), shapes)
    pixels = some_images(spec, 16) / np.float32(255)
    folded = calibration.fold_statistics(spec, calibration.calibrate(spec, {"encoder": encoder}, [pixels]))
    encoder = folded["encoder"]
    artifact = SimpleNamespace(class_names=tuple("abcdefgh"[: spec.num_classes]))
    return onnx.ExportedModel(artifact, spec, encoder, spec.lanes or spec.name, None)


def some_images(spec: ModelSpec, n: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (n, *spec.image_shape), np.uint8)


def test_an_export_is_read_back_as_the_model(exported, rng):
    trained, model = load_trained(exported), onnx.read_export(exported)
    assert model.spec == trained.spec
    assert model.data.name == "digits"
    images = rng.integers(0, 256, (5, *trained.spec.image_shape)).astype(np.uint8)
    wanted = jax.jit(lambda x: lengths(encode(trained.spec, trained.params["encoder"], to_pixels(x))))(images)
    np.testing.assert_allclose(jax.jit(model.lengths)(images), wanted, atol=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_without_vmap_is_the_model_in_float32(name):
    model = model_of(SPECS[name])
    function = onnx.without_vmap(model.spec, model.encoder)
    images = some_images(model.spec, 3)
    wanted = np.asarray(jax.jit(model.lengths)(images))
    assert wanted.max() > 0.1
    assert wanted.std() > 0.01
    assert wanted.dtype == np.float32
    assert runtime.difference(np.asarray(jax.jit(function)(images)), wanted) < 1e-5
    assert "custom_vmap" not in str(jax.make_jaxpr(function)(images))


def test_data_may_have_moved(exported, tmp_path):
    assert onnx.read_export(exported, str(tmp_path)).data.dir == str(tmp_path)


def test_fields_that_older_exports_could_have_are_dropped(exported, monkeypatch):
    stored = json.loads((exported / "export" / "config.json").read_text())
    stored["data"] |= {"name": "digits", "label_kind": "coarse"}
    read = onnx.read_json
    monkeypatch.setattr(onnx, "read_json", lambda path: stored if path.name == "config.json" else read(path))
    assert onnx.read_export(exported).data.label_kind == "fine"


def test_what_was_altered_or_is_not_there_is_refused(copied, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(onnx, "versions", dict)
    with pytest.raises(InputError, match="mlcn_jax export"):
        script.export(tmp_path_factory.mktemp("empty"))
    config = copied / "export" / "config.json"
    config.write_text(config.read_text().replace("published", "per_class"))
    with pytest.raises(InputError, match=r"config\.json was altered"):
        script.export(copied)


def test_an_export_that_is_replaced_while_it_is_read_is_refused(copied, monkeypatch):
    read, manifest = onnx.read_json, copied / "export" / "manifest.json"

    def read_later(path):
        manifest.write_text(json.dumps({"sha256": "of another"}))
        return read(path)

    monkeypatch.setattr(onnx, "read_json", read_later)
    with pytest.raises(InputError, match="was replaced while it was read"):
        onnx.read_export(copied)


def test_packages_that_are_not_installed_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None if name == "jax2onnx" else name)
    with pytest.raises(InputError, match=r"^jax2onnx cannot be imported: in a clone, run `make onnx WORKDIR="):
        script.export(tmp_path)


@installed
@pytest.mark.parametrize("name", SPECS)
def test_onnx_runtime_gives_the_models_lengths(name, tmp_path):
    model = model_of(SPECS[name])
    converted = onnx.convert(model)
    (tmp_path / "model.onnx").write_bytes(converted.SerializeToString())
    converted = open_onnx(tmp_path / "model.onnx", runtime.OUTPUT, 2)
    for n in (1, 3):
        images = some_images(model.spec, n)
        wanted = np.asarray(jax.jit(model.lengths)(images))
        assert runtime.difference(converted(images), wanted) < 1e-5
        if name == "resnet":
            np.testing.assert_allclose(np.square(converted(images)).sum(axis=1), 3.5, rtol=1e-5)


@installed
def test_the_command_writes_a_checked_model_that_says_what_it_takes(exported):
    import onnxruntime

    path = script.export(exported)
    session = onnxruntime.InferenceSession(path)
    model = onnx.read_export(exported)
    images = model.data.load().test.images[:130]
    for name in ("onnxruntime", "auto"):
        np.testing.assert_allclose(
            Artifact(exported / "export", name).lengths(images), model.artifact.lengths(images), atol=1e-5
        )
    np.testing.assert_allclose(
        session.run(["lengths"], {"images": images})[0], model.artifact.lengths(images), atol=1e-5
    )
    (taken,) = session.get_inputs()
    assert (taken.name, taken.type, taken.shape) == ("images", "tensor(uint8)", ["batch", 28, 28, 1])
    facts = session.get_modelmeta().custom_metadata_map
    description = json.loads(path.with_suffix(".json").read_text())
    assert json.loads(facts["class_names"]) == description["class_names"] == list(model.artifact.class_names)
    length, power = (json.loads(facts[name]) for name in ("certain_length", "probability_power"))
    assert (length, power) == (description["output"]["certain_length"], description["output"]["probability_power"])
    np.testing.assert_allclose(
        np.minimum(model.artifact.lengths(images) / length, 1) ** power, model.artifact.probabilities(images), rtol=1e-6
    )
    assert 0 < max(description["checked"]["largest_difference"].values()) < 1e-4
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.json", "model.onnx"]


@installed
def test_a_model_that_computes_something_else_does_not_land(copied, monkeypatch):
    path = script.export(copied)
    before = path.read_bytes()
    read = onnx.read_export

    def altered(*args):
        model = read(*args)
        return dataclasses.replace(model, encoder=jax.tree.map(lambda a: 1.01 * a, model.encoder))

    monkeypatch.setattr(onnx, "read_export", altered)
    with pytest.raises(RuntimeError, match="differs from the model"):
        script.export(copied)
    assert path.read_bytes() == before


def test_on_accelerators_the_check_does_not_compare_with_rounded_products(monkeypatch):
    model = model_of(SPECS["mixed"])
    images = {"random": some_images(model.spec, max(script.BATCHES))}
    exact = jax.jit(model.lengths)
    model.artifact.lengths = lambda images: exact(images) + 1e-3
    monkeypatch.setattr(script, "open_onnx", lambda *args: exact)
    with pytest.raises(RuntimeError, match=r"ONNX Runtime differs from the model by 0\.001"):
        script.check(model, None, images)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert script.check(model, None, images)["random"] < 1e-5
    monkeypatch.setattr(script, "open_onnx", lambda *args: lambda some: exact(some).at[1:].set(jnp.nan))
    with pytest.raises(RuntimeError, match="differs from the model by nan"):  # not in the first batch, of one image
        script.check(model, None, images)


def test_images_of_another_shape_are_refused_before_the_conversion(copied, monkeypatch):
    wide = np.zeros((40, 24, 24, 3), np.uint8)
    data = SimpleNamespace(load=lambda: SimpleNamespace(test=SimpleNamespace(images=wide)))
    model = SimpleNamespace(spec=SimpleNamespace(image_shape=(24, 24, 1)), data=data)
    monkeypatch.setattr(onnx, "versions", dict)
    monkeypatch.setattr(onnx, "read_export", lambda *args: model)
    with pytest.raises(InputError, match=r"takes images of shape \(24, 24, 1\), but these have \(24, 24, 3\)"):
        script.export(copied)


def test_the_folder_is_made_before_the_conversion(copied, monkeypatch):
    monkeypatch.setattr(onnx, "versions", dict)
    monkeypatch.setattr(onnx, "convert", Mock(side_effect=RuntimeError("converted")))
    with pytest.raises(RuntimeError, match="converted"):
        script.export(copied, folder=copied / "new" / "folder")
    assert (copied / "new" / "folder").is_dir()
    (copied / "onnx").write_text("a file")
    with pytest.raises(InputError, match=r"onnx cannot be written to .*: give another --output=FOLDER"):
        script.export(copied)

"""Exported models: equal to the model, used without training code, and refused where they were altered."""

import contextlib
import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPOSITORY
from made_files import huge_png
from PIL import Image

from mlcn_jax import host
from mlcn_jax.analysis import explain
from mlcn_jax.config import read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules
from mlcn_jax.nn.calibration import calibrate, fold_statistics
from mlcn_jax.nn.model import class_lengths, encode, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import artifact, export, model_card, onnx, predict
from mlcn_jax.serving.parts import tolerance
from mlcn_jax.serving.trained import TrainedModel
from mlcn_jax.training import evaluate
from mlcn_jax.training.session import open_session
from mlcn_jax.training.start import check_resumable
from mlcn_jax.training.trained import Trained, load_trained

TRAINING_CODE = (
    "absl",
    "filelock",
    "flax",
    "jaxtyping",
    "matplotlib",
    "ml_collections",
    "optax",
    "orbax",
    "sklearn",
    "tqdm",
)


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported / "export", tmp_path / "export")


@pytest.fixture(scope="module")
def loaded(exported):
    return artifact.Artifact(exported / "export")


@pytest.fixture
def pictures(rng, tmp_path, loaded):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (40, 30, 3)).astype(np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.mark.parametrize("n", [0, 1, 5, artifact.MAX_BATCH + 2])
def test_an_artifact_computes_what_the_model_does(exported, loaded, rng, n):
    trained = load_trained(exported)
    images = rng.integers(0, 256, (n, *loaded.image_shape)).astype(np.uint8)
    found = loaded.lengths(images)
    assert found.shape == (n, 10)
    if n:
        v = jax.jit(lambda params, x: encode(trained.spec, params["encoder"], to_pixels(x)))(trained.params, images)
        np.testing.assert_allclose(found, capsules.lengths(v), atol=1e-5)
    assert loaded.class_names == trained.class_names


def test_a_model_in_bfloat16_may_be_rounded_otherwise_than_its_export(exported, loaded):
    trained = load_trained(exported)
    with pytest.raises(RuntimeError, match="differs from the model"):
        export._check(trained, SimpleNamespace(lengths=lambda images: loaded.lengths(images) + 1e-3))
    in_bfloat16 = dataclasses.replace(trained.spec, compute_dtype="bfloat16")
    export._check(dataclasses.replace(trained, spec=in_bfloat16), loaded)


def test_a_residual_model_in_bfloat16_is_exported(tmp_path):
    """Folded statistics are rounded with the kernels, which moves lengths by more than the order of sums does."""
    spec = ModelSpec("mlcn", (12, 12, 1), 4, "resnet_caps:w1d2", decoder=(4,), compute_dtype="bfloat16")
    for seed in range(3):
        rng = np.random.default_rng(seed)
        pixels = jnp.asarray(rng.random((32, 12, 12, 1), np.float32))
        params = jax.jit(functools.partial(calibrate, spec))(init_params(spec, jax.random.key(seed)), [pixels])
        folded = fold_statistics(spec, params)
        lengths = jax.jit(lambda images, p=folded: class_lengths(spec, encode(spec, p["encoder"], to_pixels(images))))
        trained = Trained(spec, tuple("abcd"), params, 1)
        export._check(trained, SimpleNamespace(lengths=lengths))
        with pytest.raises(RuntimeError, match="differs from the model"):
            export._check(trained, SimpleNamespace(lengths=lambda images, f=lengths: f(images) + 0.5))


def test_large_weights_of_lanes_make_larger_lengths_that_are_rounded_more():
    assert tolerance(["float32"] * 2, np.ones(2)) == 1e-5
    assert tolerance(["float32"] * 2, np.array([1e4, 1e4])) == pytest.approx(1e-3)


def test_probabilities_are_lengths_of_at_most_one(loaded, rng, monkeypatch):
    monkeypatch.setattr(loaded, "lengths", lambda images: np.array([[0.2, 1.3]], np.float32))
    np.testing.assert_allclose(loaded.probabilities(np.zeros(1)), [[0.2, 1.0]])
    np.testing.assert_allclose(loaded.scores(np.zeros(1)), [[0.2, 1.3]])
    monkeypatch.setattr(loaded, "_certain_length", 2.0)
    np.testing.assert_allclose(loaded.probabilities(np.zeros(1)), [[0.1, 0.65]])


def test_lanes_that_classify_alone_and_signed_pixels_are_exported(exported, tmp_path, rng):
    """A probability is then what the lanes say on average."""
    trained = load_trained(exported)
    count = sum(group.count for group in trained.spec.lane_groups)
    spec = dataclasses.replace(trained.spec, margin_loss="per_lane", signed_pixels=True)
    export.write(dataclasses.replace(trained, spec=spec), tmp_path, "command")
    images = rng.integers(0, 256, (2, *spec.image_shape)).astype(np.uint8)
    loaded = artifact.Artifact(tmp_path)
    v = encode(trained.spec, trained.params["encoder"], 2 * to_pixels(images) - 1)
    np.testing.assert_allclose(loaded.lengths(images), capsules.lengths(v), atol=1e-5)
    assert "127.5 - 1" in json.loads((tmp_path / "model.json").read_text())["preprocessing"]
    assert count > 1
    np.testing.assert_allclose(loaded.probabilities(images), loaded.lengths(images) / np.sqrt(count), rtol=1e-6)


def test_weights_that_were_fitted_after_training_are_those_of_all_exports(exported, tmp_path):
    workdir = shutil.copytree(exported, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    stored = json.loads((workdir / "model.json").read_text())
    stored["spec"]["lane_weights"] = [4.0, 0.0]
    (workdir / "model.json").write_text(json.dumps(stored))
    export.export(workdir)
    assert onnx.read_export(workdir).spec.lane_weights == (4.0, 0.0)
    assert "Not measured when the model was exported" in (workdir / "export" / "README.md").read_text()
    assert json.loads((workdir / "config.json").read_text())["model"]["lane_weights"] == []


def test_lane_weights_are_used_by_all_that_read_lengths(exported, tmp_path, rng):
    """Weights 1 and 0 leave one lane: so do the model, its export, ONNX and the scores."""
    for name in ("config.json", "model.json"):
        stored = json.loads((exported / name).read_text())
        stored["model" if name == "config.json" else "spec"]["lane_weights"] = [4.0, 0.0]
        (tmp_path / name).write_text(json.dumps(stored))
    shutil.copytree(exported / "checkpoints", tmp_path / "checkpoints")
    trained = load_trained(tmp_path)
    images = rng.integers(0, 256, (5, *trained.spec.image_shape)).astype(np.uint8)
    v = np.asarray(encode(trained.spec, trained.params["encoder"], to_pixels(images)))
    export.export(tmp_path)
    model = onnx.read_export(tmp_path)
    by_lane = onnx.without_vmap(model.spec, model.encoder)
    for lengths in (artifact.Artifact(tmp_path / "export").lengths, TrainedModel(tmp_path).lengths, by_lane):
        np.testing.assert_allclose(lengths(images), 2 * np.abs(v[..., 0]), atol=1e-5)
    labels = np.abs(v[..., 0]).argmax(axis=-1).astype(np.int32)
    scores = evaluate.make_evaluator(trained.spec, 0.0)(trained.params, datasets.Split(images, labels), 5)
    assert scores.accuracy == 1.0
    assert (explain.look(trained.spec, trained.params["encoder"], images)[1] == labels).all()
    session = open_session(read_stored(tmp_path))
    check_resumable(session, tmp_path, session.model_facts())


def test_no_function_holds_a_path_of_this_machine(exported):
    functions = list((exported / "export").glob("*.jaxexport"))
    assert len(functions) == 4
    for function in functions:
        content = function.read_bytes()
        assert str(REPOSITORY).encode() not in content
        assert b".py" not in content
    assert jax.config.jax_traceback_in_locations_limit != 0


def test_the_model_card_says_what_the_model_is_and_may_be_edited(exported, copied):
    card = (copied / "README.md").read_text()
    summary = json.loads((exported / "summary.json").read_text())
    assert f"{summary['test_accuracy']:.2%} of the test images" in card
    assert summary["data"]["note"] in card
    assert "`mlcn1:w1*2`" in card
    assert "gray images of 28x28 pixels" in card
    assert "mlcn_jax predict FOLDER" in card
    python = card.split("```python\n")[1].split("```")[0]
    compile(python, "card", "exec")
    (copied / "README.md").write_text("my own words")
    artifact.Artifact(copied)


def test_the_model_card_leaves_out_what_is_not_known_and_private_folders(loaded, exported):
    assert "Not measured" in model_card.text(loaded, {})
    assert export._summary(exported, 7) == {}
    note = "Images of /home/me/pets; a fixed 20% of each class is the test set."
    card = model_card.text(loaded, {"data": {"name": "folder", "note": note}}, "/home/me/pets")
    assert "Images of pets; a fixed" in card
    assert "/home/me" not in card
    assert model_card._code("a`|\n") == "`a'/\\n`"


def test_images_of_another_shape_or_type_are_refused(loaded):
    for images in (np.zeros((2, 5, 5, 1), np.uint8), np.zeros((2, *loaded.image_shape), np.float32)):
        with pytest.raises(InputError, match=r"the model takes uint8 \[n, "):
            loaded.lengths(images)


def test_each_number_of_images_gets_its_fastest_function_and_each_platform_has_one(exported, loaded):
    calls = []
    loaded = artifact.Artifact(exported / "export")
    functions = [(n, lambda x, n=n: calls.append(n) or np.zeros((len(x), 10))) for n, _ in loaded._compute.args[0]]
    loaded._compute = functools.partial(artifact.apply_in_batches, functions)
    for n in (1, 4, 5, 8, 100):
        loaded.lengths(np.zeros((n, *loaded.image_shape), np.uint8))
    assert calls == [1, 1, 8, 8, 32, 32, 1], "100 images are computed as 64, 32 and 4"
    manifest = json.loads((exported / "export" / "manifest.json").read_text())
    for function in manifest["functions"]:
        content = bytearray((exported / "export" / function["file"]).read_bytes())
        assert list(jax.export.deserialize(content).platforms) == function["platforms"]
    assert {name for function in manifest["functions"] for name in function["platforms"]} == {"cpu", "cuda"}


def test_weights_too_large_to_be_compiled_in_give_the_same(exported, loaded, rng, monkeypatch):
    monkeypatch.setattr(artifact, "_COMPILED_IN_BYTES", 0)
    images = rng.integers(0, 256, (9, *loaded.image_shape)).astype(np.uint8)
    arguments = artifact.Artifact(exported / "export")
    np.testing.assert_allclose(arguments.lengths(images), loaded.lengths(images), atol=1e-5)
    assert loaded._compute.args[0][0][1].lower(images).out_info.shape == (9, 10)  # no weights are asked for
    assert not hasattr(arguments._compute.args[0][0][1], "lower")


def test_without_flatbuffers_what_to_install_is_told(exported, monkeypatch):
    def fail(content):
        raise ImportError("No module named 'flatbuffers'")

    monkeypatch.setattr(jax.export, "deserialize", fail)
    with pytest.raises(InputError, match="pip install flatbuffers"):
        artifact.Artifact(exported / "export")


def test_the_command_needs_no_training_code_and_answers_what_it_can(exported, pictures):
    (pictures / "bomb.png").write_bytes(huge_png(10_000, 10_001))
    (pictures / "text.jpg").write_text("no picture")
    converted = exported / artifact.CONVERTED  # one that cannot be used, which is noticed without training code, too
    converted.parent.mkdir()
    converted.write_bytes(b"")
    name = "a" * 300 + ".png"
    hide = f"import sys, runpy; sys.modules.update(dict.fromkeys({TRAINING_CODE!r}))"
    arguments = ["predict", str(exported / "export"), str(pictures), "--json", name, str(pictures / "a.png")]
    code = f"{hide}; sys.argv = {arguments!r}; runpy.run_module('mlcn_jax.predict', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    shutil.rmtree(converted.parent)
    assert done.returncode == 3, done.stderr
    assert "computing with XLA because ONNX Runtime cannot be used" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["file"].rpartition("/")[2] for row in rows] == [
        "a.png",
        "b.png",
        "bomb.png",
        "c.png",
        "text.jpg",
        name,
        "a.png",
    ]
    assert "megapixels" in rows[2]["error"]
    assert "not an image" in rows[4]["error"]
    loaded = artifact.Artifact(exported / "export")
    expected = list(predict.predict(loaded, sorted(pictures.glob("?.png")), batch_size=2))
    for row, other in zip([rows[0], rows[1], rows[3]], expected, strict=True):
        assert set(row) == {"file", "class", "probability"}
        assert row["class"] == other["class"]
        assert row["probability"] == pytest.approx(other["probability"], abs=1e-5)
    assert rows[6] == rows[0]


@pytest.mark.parametrize("name", ["weights.npz", "model.json", "config.json", "inference-cpu-8.jaxexport"])
@pytest.mark.parametrize("how", ["altered", "cut", "missing"])
def test_an_artifact_that_was_altered_or_cut_is_refused(copied, name, how):
    content = bytearray((copied / name).read_bytes())
    if how == "altered":
        content[len(content) // 2] ^= 1
        (copied / name).write_bytes(content)
    elif how == "cut":
        (copied / name).write_bytes(content[:-1])
    else:
        (copied / name).unlink()
    with pytest.raises(InputError, match=rf"{name} (was altered or truncated|is missing)\): copy the folder again"):
        artifact.Artifact(copied)


def rewrite(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(artifact.signed(manifest | changes)))


def test_a_manifest_that_was_altered_is_refused(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    for text in (json.dumps(manifest | {"step": 7}), "{", "[]", "{}", "[" * 200_000):
        (copied / "manifest.json").write_text(text)
        with pytest.raises(InputError, match=r"manifest.json (was altered|cannot be read)"):
            artifact.Artifact(copied)


@pytest.mark.parametrize(
    ("name", "content"),
    [("weights.npz", b""), ("weights.npz", b"PK\x03\x04"), ("model.json", b"{"), ("model.json", b"[]")],
)
def test_damage_that_the_manifest_agrees_with_is_one_error(copied, name, content):
    (copied / name).write_bytes(content)
    manifest = json.loads((copied / "manifest.json").read_text())
    known = {"bytes": len(content), "sha256": host.sha256_of(copied / name)}
    rewrite(copied, files={**manifest["files"], name: known})
    with pytest.raises(InputError, match=r"cannot be read .*: export the model again"):
        artifact.Artifact(copied)
    rewrite(copied, files={})
    with pytest.raises(InputError, match=r"manifest.json does not list .*model.json"):
        artifact.Artifact(copied)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError("2 GiB"), OSError(24, "open")])
def test_what_does_not_show_damage_is_not_taken_for_it(copied, monkeypatch, error):
    def fail(path):
        raise error

    monkeypatch.setattr(artifact, "read_weights", fail)
    expected, said = (InputError, "make it readable") if isinstance(error, PermissionError) else (type(error), None)
    with pytest.raises(expected, match=said):
        artifact.Artifact(copied)


def test_an_export_that_is_replaced_while_it_is_read_is_refused(copied, monkeypatch):
    read = artifact.read_weights
    monkeypatch.setattr(artifact, "read_weights", lambda path: (rewrite(copied, step=7), read(path))[1])
    with pytest.raises(InputError, match="was replaced while it was read: run the same command again"):
        artifact.Artifact(copied)


def test_an_export_that_is_replaced_while_its_programs_are_read_is_told_so(copied, monkeypatch):
    """However its files then fail: without them, with those of a newer jax, or without a manifest for a moment."""

    def replaced(error, remove):
        def load(*args):
            (copied / "manifest.json").unlink() if remove else rewrite(copied, step=json.dumps(str(error)))
            raise error

        return load

    for error, remove in ((FileNotFoundError(2, "gone"), False), (InputError("a newer jax"), True)):
        monkeypatch.setattr(artifact, "load_functions", replaced(error, remove))
        with pytest.raises(InputError, match="was replaced while it was read: run the same command again"):
            artifact.Artifact(copied)


def test_newer_versions_other_platforms_and_other_folders_are_named(copied, tmp_path):
    rewrite(copied, format=3)
    with pytest.raises(InputError, match="format 3, from a newer mlcn_jax"):
        artifact.Artifact(copied)
    rewrite(copied, format=0)
    with pytest.raises(InputError, match=r"manifest\.json was altered"):
        artifact.Artifact(copied)
    rewrite(copied, format=1, functions=[])
    with pytest.raises(InputError, match="cannot run on cpu"):
        artifact.Artifact(copied)
    with pytest.raises(InputError, match=r"has no manifest.json; give .*/export"):
        artifact.Artifact(tmp_path)
    with pytest.raises(InputError, match=r"has no manifest.json; .*mlcn_jax export"):
        artifact.Artifact(tmp_path / "elsewhere")


def test_a_file_outside_of_the_folder_is_not_read(copied):
    (copied.parent / "secret").write_text("x")
    files = json.loads((copied / "manifest.json").read_text())["files"]
    secret = {"bytes": 1, "sha256": host.sha256_of(copied.parent / "secret")}
    rewrite(copied, files={**files, "../secret": secret})
    with pytest.raises(InputError, match=r"\.\./secret is missing"):
        artifact.Artifact(copied)


def test_past_the_window_of_jax_export_the_command_to_export_again_is_given(copied, exported, monkeypatch):
    def refuse(data):
        raise ValueError("calling convention version 9 is below 11, the oldest that is supported")

    monkeypatch.setattr(jax.export, "deserialize", refuse)
    with pytest.raises(InputError, match="version 9 is below 11") as caught:
        artifact.Artifact(copied)
    assert f"mlcn_jax export --workdir={exported}" in str(caught.value)


def test_an_unknown_compiler_option_is_left_out(copied, rng):
    manifest = json.loads((copied / "manifest.json").read_text())
    for function in manifest["functions"]:
        function["compiler_options"] = {"xla_of_the_future": "1"}
    rewrite(copied, functions=manifest["functions"])
    loaded = artifact.Artifact(copied)
    assert loaded.lengths(np.zeros((1, *loaded.image_shape), np.uint8)).shape == (1, 10)


def test_exporting_again_replaces_and_leaves_nothing_else(exported, tmp_path):
    workdir = shutil.copytree(exported, tmp_path / "run")
    stamp = (workdir / "export" / "weights.npz").stat().st_ino
    export.export(workdir)
    assert (workdir / "export" / "weights.npz").stat().st_ino != stamp
    assert not list(workdir.glob(".export-*"))
    artifact.Artifact(workdir / "export")


def test_what_is_exported_is_read_once_no_training_can_change_it(exported, tmp_path, monkeypatch):
    workdir, hold, read = shutil.copytree(exported, tmp_path / "run"), export.hold, []

    @contextlib.contextmanager
    def holding(workdir):
        assert not read
        with hold(workdir):
            yield

    monkeypatch.setattr(export, "hold", holding)
    load = export.load_trained
    monkeypatch.setattr(export, "load_trained", lambda workdir: read.append(workdir) or load(workdir))
    export.export(workdir)
    assert len(read) == 1


def test_a_workdir_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no trained model"):
        export.export(tmp_path)

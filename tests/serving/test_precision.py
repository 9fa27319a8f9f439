"""Lanes in several precisions: made, chosen, exported and split. What makes int8 needs requirements-onnx.txt."""

import asyncio
import dataclasses
import importlib.util
import io
import itertools
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_profile import make_profile
from PIL import Image

from mlcn_jax.commands import front
from mlcn_jax.data.datasets import split_validation
from mlcn_jax.errors import InputError
from mlcn_jax.nn import calibration
from mlcn_jax.nn.capsules import lengths
from mlcn_jax.nn.model import encode, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.forms import read_profiles
from mlcn_jax.placement.problem import NoRoom
from mlcn_jax.serving import export, onnx, predict
from mlcn_jax.serving.artifact import Artifact
from mlcn_jax.serving.onnx_file import open_onnx
from mlcn_jax.serving.parts import FLOAT32, FORMS, OUTPUT, Form, added_up, model_digest, square_roots, tolerance
from mlcn_jax.serving.precision import export as precision_export
from mlcn_jax.serving.precision import lanes as precision_lanes
from mlcn_jax.serving.precision import make as precision_make
from mlcn_jax.serving.precision import mix as precision_mix
from mlcn_jax.serving.precision import place as precision_place
from mlcn_jax.serving.precision.make import Made, lane_part, lanes_of, make
from mlcn_jax.tiers import split
from mlcn_jax.tiers.artifact import TierArtifact

installed = pytest.mark.skipif(not importlib.util.find_spec("jax2onnx"), reason="needs requirements-onnx.txt")
BFLOAT16, INT8 = Form("bfloat16", "xla"), Form("int8", "onnxruntime")


@pytest.fixture(scope="module")
def workdir(per_lane, tmp_path_factory):
    copied = shutil.copytree(per_lane, tmp_path_factory.mktemp("precision") / "run")
    export.export(copied)
    return copied


@pytest.fixture(scope="module")
def model(workdir):
    return onnx.read_export(workdir)


@pytest.fixture(scope="module")
def images(model):
    return model.data.load().test.images[:9]


def mixed(model, folder, forms, calibration):
    """An export with these forms of the lanes, and the lanes."""
    lanes = lanes_of(model.spec, model.encoder)
    chosen = [make(lane, form, calibration) for lane, form in zip(lanes, forms, strict=True)]
    precision_export._written(folder, model, chosen, "mlcn_jax precision", calibration)
    return chosen


@pytest.fixture(scope="module")
def in_xla(model, images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_xla") / "export"
    return folder, mixed(model, folder, [FLOAT32, BFLOAT16, FLOAT32], images)


def test_the_parts_of_all_lanes_are_the_squared_lengths(model, images):
    spec = dataclasses.replace(model.spec, lane_weights=(1.0, 0.5, 2.0))
    parts = [make(lane, FLOAT32, images).call(images) for lane in lanes_of(spec, model.encoder)]
    v = encode(model.spec, model.encoder, images / np.float32(255))
    np.testing.assert_allclose(np.sqrt(sum(parts)), lengths(v, np.array(spec.lane_weights)), atol=1e-5)


def test_a_lane_in_bfloat16_is_computed_from_the_weights_that_are_stored():
    """Kernels that are joined from two are joined after rounding, as an export does it."""
    spec = ModelSpec("mlcn", (28, 28, 1), 10, "mlcn2:w1")
    params = jax.tree.map(lambda a: 3 * a, init_params(spec, jax.random.key(0))["encoder"])
    (lane,) = lanes_of(spec, params)
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), np.uint8)
    part = jax.jit(lambda params: lane_part(spec, 0, params, images, "bfloat16"))
    found = make(lane, BFLOAT16, images).call(images)
    stored = part(jax.tree.map(lambda a: a.astype(jnp.bfloat16), lane.params))
    assert np.linalg.norm(found - stored) < 0.7 * np.linalg.norm(found - part(lane.params))


def residual_lane(conv):
    """A residual lane, and images whose neighbouring pixels hardly differ: whitening magnifies what rounding does."""
    spec = ModelSpec("mlcn", (12, 12, 1), 3, "resnet:w1", norm_group=8, conv=conv)
    rng = np.random.default_rng(0)
    images = (100 + rng.normal(0, 1, (8, 12, 12, 1)).cumsum(axis=1).cumsum(axis=2)).clip(0, 255).astype(np.uint8)
    pixels = images / np.float32(255)
    params = calibration.whiten(spec, init_params(spec, jax.random.key(0)), pixels)
    params = calibration.fold_statistics(spec, calibration.calibrate(spec, params, [pixels]))
    return lanes_of(spec, params["encoder"])[0], images


@pytest.mark.parametrize("conv", ["native", "im2col"])
def test_a_residual_lane_in_bfloat16_whitens_in_float32(conv):
    lane, images = residual_lane(conv)
    found = make(lane, BFLOAT16, images)
    assert {n.split("/")[-1] for n, a in found.arrays.items() if a.dtype == np.float32} == {"kernel", "bias"}
    np.testing.assert_allclose(found.call(images), make(lane, FLOAT32, images).call(images), atol=0.03)


@installed
def test_a_residual_lane_in_int8_whitens_in_float32():
    """All other convolutions are computed in 8 bits."""
    import onnx as onnx_package

    lane, images = residual_lane("native")
    found = make(lane, INT8, images)
    graph = onnx_package.load_from_string(found.onnx).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    first, *others = [makers.get(node.input[1], "") for node in graph.node if node.op_type == "Conv"]
    assert first != "DequantizeLinear"
    assert others
    assert set(others) == {"DequantizeLinear"}
    np.testing.assert_allclose(found.call(images), make(lane, FLOAT32, images).call(images), atol=0.1)


@installed
def test_activations_in_int8_are_cut_off_where_that_makes_results_better(monkeypatch):
    """One bright pixel, in a corner that few activations see, takes no resolution from all others."""
    spec = ModelSpec("mlcn", (20, 20, 1), 3, "mlcn1:w1")
    (lane,) = lanes_of(spec, jax.tree.map(lambda a: 20 * a, init_params(spec, jax.random.key(0))["encoder"]))
    images = np.random.default_rng(0).integers(0, 4, (64, 20, 20, 1), np.uint8)
    images[0, 0, 0] = 255
    wanted = make(lane, FLOAT32, images).call(images)

    def error():
        return float(np.mean(np.square(make(lane, INT8, images).call(images) - wanted)))

    cut_off = error()
    monkeypatch.setattr(precision_make, "_PERCENTILES", (100,))
    assert cut_off < 0.5 * error()


def test_an_export_of_several_precisions_is_not_converted(in_xla):
    with pytest.raises(InputError, match=r"holds lanes in several precisions, .* give the workdir of the run itself"):
        onnx.read_export(in_xla[0].parent)


def test_an_export_of_several_precisions_is_read_like_any_other(in_xla, model, images, capsys):
    folder, chosen = in_xla
    found = Artifact(folder)
    expected = np.sqrt(sum(np.asarray(own.call(images)) for own in chosen))
    np.testing.assert_allclose(found.lengths(images), expected, atol=2e-2)
    assert json.loads((folder / "config.json").read_text()) == model.config
    assert 1e-5 < np.abs(found.lengths(images) - model.artifact.lengths(images)).max() < 2e-2
    assert found.probabilities(images).shape == (9, 10)
    with np.load(folder / "weights.npz") as arrays:
        in_bfloat16 = [a for name, a in arrays.items() if name.startswith("1/")]
    assert {a.dtype for a in in_bfloat16} == {np.dtype(np.uint16)}


def test_a_picture_is_classified_by_an_export_of_several_precisions(in_xla, images, tmp_path):
    folder, chosen = in_xla
    Image.fromarray(images[0, ..., 0]).save(tmp_path / "a.png")
    lengths = np.sqrt(sum(np.asarray(own.call(images[:1])) for own in chosen))[0]
    model = predict.open_model(str(folder))
    (found,) = predict.predict(model, [tmp_path / "a.png"])
    assert found["class"] == model.class_names[lengths.argmax()]
    assert found["probability"] == pytest.approx(lengths.max() / np.sqrt(3), abs=2e-2)


def test_a_server_answers_with_an_export_of_several_precisions(in_xla, images):
    pytest.importorskip("prometheus_client")  # the environment of `make test-onnx` has no server
    from made_service import ask

    from mlcn_jax.serving.http_service import Limits, application
    from mlcn_jax.serving.service import Service

    model = predict.open_model(str(in_xla[0]))
    service = Service(model, Limits(2, 8, 10_000, 4, 9, timeout_seconds=5))
    picture = io.BytesIO()
    Image.fromarray(images[0, ..., 0]).save(picture, "PNG")

    async def asked():
        async with service.running(None):
            return await ask(application(service), picture.getvalue())

    status, _, answer = asyncio.run(asked())
    (found,), expected = answer["predictions"], model.probabilities(images[:1])[0]
    assert status == 200
    assert found["class"] == model.class_names[expected.argmax()]
    assert found["probability"] == pytest.approx(expected.max(), abs=1e-5)
    assert service.about()["runtime"] == "per lane"


def test_an_export_that_differs_from_its_lanes_is_one_message(in_xla, model, images):
    folder, chosen = in_xla
    precision_export._check(Artifact(folder), chosen, model.spec, images)
    first = dataclasses.replace(chosen[0], call=lambda batch: chosen[0].call(batch) + 1)
    with pytest.raises(InputError, match=r"lengths of 1 images differ by .* rounding in bfloat16 xla, float32 xla"):
        precision_export._check(Artifact(folder), [first, *chosen[1:]], model.spec, images)
    four = ["bfloat16"] * 4
    assert tolerance(four[:1], np.ones(1)) == pytest.approx(2e-2)
    assert tolerance(four, np.ones(4)) == pytest.approx(4e-2), "errors of lanes add like their capsules"
    assert tolerance(four[:2], np.array([1.9, 0.1])) < tolerance(four, np.ones(4))


@pytest.mark.parametrize(("backend", "allowed"), [("cpu", 1e-5), ("gpu", 5e-3), ("tpu", 4e-2)])
def test_accelerators_round_float32_in_products(monkeypatch, backend, allowed):
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert tolerance(["float32"] * 4, np.ones(4)) == pytest.approx(allowed)


def test_its_lanes_are_read_back_for_the_same_model_only(in_xla, model, workdir, images):
    folder, chosen = in_xla
    with np.load(workdir / "export" / "weights.npz") as arrays:
        digest = model_digest(model.spec.lanes, model.spec.weights.tolist(), dict(arrays))
        assert digest != model_digest(model.spec.lanes, [2.0, 1.0, 1.0], dict(arrays))
    for own, read in zip(chosen, precision_lanes.read_lanes(folder, model.spec, digest), strict=True):
        assert read.form == own.form
        np.testing.assert_allclose(read.call(images), own.call(images), atol=1e-6)
    with pytest.raises(InputError, match="belongs to another model, or to another checkpoint"):
        precision_lanes.read_lanes(folder, model.spec, "0")
    with pytest.raises(InputError, match="is an export in one precision"):
        precision_lanes.read_lanes(workdir / "export", model.spec, digest)


def test_tiers_have_the_lanes_as_they_are_in_the_export(in_xla, workdir, images):
    folder, chosen = in_xla
    tiers = split.split(workdir, workdir / "tiers.json", out="mixed", precision=folder)
    found = sum(TierArtifact(tiers / name).part(images) for name in ("end", "edge", "cloud"))
    np.testing.assert_allclose(found, sum(np.asarray(own.call(images)) for own in chosen), atol=2e-2)
    with pytest.raises(InputError, match="those of --precision stay whole"):
        split.split(workdir, workdir / "tiers.json", cut="capsules", precision=folder)


def test_forms_that_were_chosen_with_devices_are_exported_for_tiers_of_these_devices(
    in_xla, model, workdir, images, tmp_path
):
    _, chosen = in_xla
    data = {"name": "digits", "train_images": 1_200}
    precision_export._export_placed(tmp_path, model, chosen, "mlcn_jax precision", images, data)
    card = (tmp_path / "placed" / "README.md").read_text()
    assert "`digits`, 1,200 training images." in card
    assert "Not measured on test images." in card
    assert "evaluate" not in card
    (tmp_path / "tiers.json").write_text(json.dumps(precision_export.tiers_of([2, 0, 2])))
    tiers = split.split(workdir, tmp_path / "tiers.json", out="placed", precision=tmp_path / "placed")
    found = {name: TierArtifact(tiers / name) for name in ("device0", "device2")}
    for name, lanes in (("device0", (1,)), ("device2", (0, 2))):
        assert found[name].lanes == lanes
        expected = sum(np.asarray(chosen[lane].call(images)) for lane in lanes)
        np.testing.assert_allclose(found[name].part(images), expected, atol=2e-2)


def test_a_card_is_written_in_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    monkeypatch.setattr(precision_export.model_card, "text", lambda *args: "größe 日本")
    precision_export._write_card(tmp_path, None, {}, "")
    assert (tmp_path / "README.md").read_text("utf-8") == "größe 日本"


def test_an_altered_file_is_found(in_xla, tmp_path):
    folder = shutil.copytree(in_xla[0], tmp_path / "export")
    with (folder / "weights.npz").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match=r"weights\.npz was altered or truncated"):
        Artifact(folder)
    manifest = json.loads((in_xla[0] / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"onnx": ["lane0.onnx"]}))
    with pytest.raises(InputError, match=r"manifest\.json was altered"):
        Artifact(folder)


def test_without_onnx_runtime_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match=r"cannot be imported .*: pip install 'mlcn_jax\[onnxruntime\]'"):
        open_onnx(tmp_path / "lane0.onnx", OUTPUT)


@pytest.mark.skipif(not importlib.util.find_spec("onnxruntime"), reason="needs onnxruntime")
def test_what_onnx_runtime_cannot_read_is_one_error(tmp_path):
    (tmp_path / "lane0.onnx").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"cannot read .*lane0.onnx"):
        open_onnx(tmp_path / "lane0.onnx", OUTPUT)


def test_images_of_another_size_are_refused(model):
    dataset = model.data.load()
    small = dataclasses.replace(dataset.train, images=dataset.train.images[:, :20, :20])
    with pytest.raises(InputError, match="28x28x1 images of 10 classes, but digits, used for calibration, has 20x20x1"):
        precision_export.check_images(dataclasses.replace(dataset, train=small), model)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_accuracy_drop=-1"], "must be 0 or more"),
        (["--max_accuracy_drop=nan"], "must be 0 or more"),
        (["--choose=prettiest"], "choose"),
    ],
)
def test_flags_that_cannot_be_used(workdir, flags, message):
    with pytest.raises(InputError, match=message):
        front.run(["precision", f"--workdir={workdir}", *flags])


def some_parts(rng, num_lanes, num_forms):
    labels = rng.integers(0, 4, 60)
    good = np.eye(4)[labels] + rng.normal(0, 0.8, (num_lanes, 1, 60, 4))
    noise = rng.normal(0, 0.5, (num_lanes, num_forms, 60, 4)) * np.arange(num_forms)[None, :, None, None]
    return np.square(good + noise).astype(np.float32), labels


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_mix_is_that_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    parts, labels = some_parts(rng, 4, 3)
    costs = [[(3.0, 0.0), (2.0, float(rng.random())), (1.0, float(rng.random()))] for _ in range(4)]
    least = precision_mix.mix_accuracy(parts, [0] * 4, labels) - 0.05
    enough = [
        mix for mix in itertools.product(range(3), repeat=4) if precision_mix.mix_accuracy(parts, mix, labels) >= least
    ]

    def cost(mix):
        return tuple(np.sum([costs[lane][form] for lane, form in enumerate(mix)], axis=0))

    mix, proven = precision_mix.cheapest_mix(parts, costs, labels, least)
    assert proven
    np.testing.assert_allclose(cost(mix), min(map(cost, enough)))


def test_with_too_many_mixes_one_that_is_accurate_enough_is_found(monkeypatch):
    parts, labels = some_parts(np.random.default_rng(0), 5, 3)
    costs = [[(3.0,), (2.0,), (1.0,)]] * 5
    least = precision_mix.mix_accuracy(parts, [0] * 5, labels)
    monkeypatch.setattr(precision_mix, "MOST_TRIED", 1)
    mix, proven = precision_mix.cheapest_mix(parts, costs, labels, least)
    assert not proven
    assert precision_mix.mix_accuracy(parts, mix, labels) >= least


def test_the_fastest_mix_is_found_by_the_times_of_whole_models():
    """Form 2 costs a second once, so the sum of the lanes' times leads to a slow mix."""
    kinds, own = ["a", "a", "b"], {"a": (3.0, 2.0, 9.0), "b": (3.0, 3.5, 2.9)}

    def seconds(mixes):
        return [sum(own[kind][form] for kind, form in zip(kinds, m, strict=True)) + (2 in m) for m in mixes]

    best, tried = precision_mix.mixes_timed((1, 1, 2), kinds, 3, lambda mix: True, seconds)
    assert best == min(tried, key=tried.__getitem__) == (1, 1, 0)
    assert list(tried.values()) == seconds(tried)
    slower = iter(range(1, 9))  # the machine, with each call

    def busy(mixes):
        factor = next(slower)
        return [factor * s for s in seconds(mixes)]

    best, tried = precision_mix.mixes_timed((1, 1, 2), kinds, 3, lambda mix: True, busy)
    assert best == min(tried, key=tried.__getitem__) == (1, 1, 0)
    np.testing.assert_allclose(list(tried.values()), seconds(tried))
    _, tried = precision_mix.mixes_timed((1, 1, 2), kinds, 3, lambda mix: mix != (1, 1, 0), seconds)
    assert (1, 1, 0) not in tried


@pytest.mark.parametrize("most_mixes", [0, 1000])
def test_lanes_are_placed_in_forms_that_together_lose_no_more_than_allowed(most_mixes, tmp_path, monkeypatch):
    """Lanes agree, so that one alone in int8 changes little, and all of them in int8 change much."""
    monkeypatch.setattr(precision_place, "_MOST_MIXES", most_mixes)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400)
    parts = [[np.eye(3)[labels] + rng.uniform(0, 1, (400, 3)) for _ in FORMS] for _ in range(3)]
    for own in parts:
        own[1], own[2] = own[0], own[0]
        own[3] = own[0] + rng.uniform(0, 1.5, (400, 3))
    lane = "mlcn2:w1d1"
    seconds = {"infer float32 native": {lane: 2e-3}, "infer int8 onnxruntime": {lane: 1e-3}}
    for name in "ab":
        dataclasses.replace(make_profile(), form_seconds=seconds, num_classes=3).save(tmp_path / f"{name}.json")
    spec = ModelSpec("mlcn", (28, 28, 1), 3, f"{lane}*3")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    with pytest.raises(
        InputError, match=r"a.json was measured with other inputs:\n  images: \(28, 28, 1\) in the profile"
    ):
        read_profiles(dataclasses.replace(spec, image_shape=(32, 32, 3)), files, "infer")
    with pytest.raises(InputError, match="has no infer seconds of mlcn2:w2"):
        read_profiles(dataclasses.replace(spec, lanes="mlcn2:w2*3"), files, "infer")
    profiles = read_profiles(spec, files, "infer")
    num_bytes = [[1, 1, 1, 1]] * 3
    base = precision_mix.mix_accuracy(parts, [0] * 3, labels)
    all_int8 = 100 * (base - precision_mix.mix_accuracy(parts, [3] * 3, labels))
    for allowed, makespan in ((all_int8 + 0.01, 2.0), (0.0, 4.0)):
        placed = precision_place.place_lanes(spec, profiles, parts, num_bytes, labels, allowed, 1, [0] * 3)
        mix = [3 if lane["form"].startswith("int8") else 0 for lane in placed["lanes"]]
        assert 100 * (base - precision_mix.mix_accuracy(parts, mix, labels)) <= allowed
        assert placed["makespan_milliseconds"] <= makespan
        exported = {"float32 native": "float32 xla", "int8 onnxruntime": "int8 onnxruntime"}
        assert all(lane["exported"] == exported[lane["form"]] for lane in placed["lanes"])
    assert mix != [3] * 3
    with pytest.raises(NoRoom):
        precision_place.place_lanes(spec, profiles, parts, [[2**60] * 4] * 3, labels, 1.0, 1, [0] * 3)


@pytest.mark.parametrize(("tries", "mix"), [(12, [0, 0, 0]), (0, [3, 0, 0])])
def test_lanes_that_lose_nothing_alone_and_much_together_are_not_all_left_in_float32(monkeypatch, tries, mix):
    """One may be in int8: the search finds it, and it is no slower than a mix that is known to be accurate."""
    parts = []
    for wrong in (1.1, 1.2, 1.3):
        right, turned = np.full((50, 2), [1.0, 0.0]), np.full((50, 2), [0.0, wrong])
        parts.append([right, right, right, turned])
    lane = "mlcn2:w1d1"
    seconds = {"infer float32 native": {lane: 2e-3}, "infer int8 onnxruntime": {lane: 1e-3}}
    profiles = [dataclasses.replace(make_profile(), form_seconds=seconds)] * 2
    spec = ModelSpec("mlcn", (28, 28, 1), 2, f"{lane}*3")
    monkeypatch.setattr(precision_place, "_MOST_MIXES", 0)
    monkeypatch.setattr(precision_place, "_TRIES", tries)
    labels = np.zeros(50, np.int32)
    placed = precision_place.place_lanes(spec, profiles, parts, [[1] * 4] * 3, labels, 1.0, 1, mix)
    assert placed["accuracy_drop"] == 0
    assert placed["makespan_milliseconds"] == pytest.approx(3.0)
    assert [found["form"].split()[0] for found in placed["lanes"]].count("int8") == 1


@pytest.mark.parametrize("most_mixes", [0, 1000])
def test_lanes_are_in_xla_where_another_runtime_loses_images_in_float32(monkeypatch, most_mixes):
    right, wrong = np.full((50, 2), [1.0, 0.0]), np.full((50, 2), [0.0, 2.0])
    parts = [[right, wrong, wrong, wrong]] * 2
    lane = "mlcn2:w1d1"
    seconds = {"infer float32 native": {lane: 2e-3}, "infer float32 onnxruntime": {lane: 1e-3}}
    profiles = [dataclasses.replace(make_profile(), form_seconds=seconds)] * 2
    spec = ModelSpec("mlcn", (28, 28, 1), 2, f"{lane}*2")
    monkeypatch.setattr(precision_place, "_MOST_MIXES", most_mixes)
    labels = np.zeros(50, np.int32)
    placed = precision_place.place_lanes(spec, profiles, parts, [[1] * 4] * 2, labels, 0.0, 1, [0, 0])
    assert [found["exported"] for found in placed["lanes"]] == ["float32 xla"] * 2
    assert placed["accuracy_drop"] == 0


def test_a_form_of_a_profile_that_no_export_has_is_refused():
    with pytest.raises(InputError, match="'infer int8 native', a form that no export has: measure it again"):
        precision_place.exported_form("infer int8 native")


@pytest.mark.skipif(not importlib.util.find_spec("ortools"), reason="needs OR-Tools")
@pytest.mark.parametrize("seed", range(4))
def test_few_lanes_are_placed_as_brute_force_places_them(seed):
    """Errors of lanes may cancel, so that two lose less together than one of them alone."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 100)
    parts = [[np.eye(3)[labels] + rng.uniform(0, 2, (100, 3))] * len(FORMS) for _ in range(3)]
    parts = [[own + rng.uniform(0, 2, own.shape) * (form > 0) for form, own in enumerate(lane)] for lane in parts]
    lanes = [f"mlcn2:w{width}d1" for width in (1, 2, 3)]
    names = ("infer bfloat16 native", "infer float32 native", "infer int8 onnxruntime")
    forms = {name: FORMS.index(precision_place.exported_form(name)) for name in names}
    made = [{form: {lane: rng.uniform(1, 9) for lane in lanes} for form in forms} for _ in range(2)]
    profiles = [dataclasses.replace(make_profile(), form_seconds=seconds) for seconds in made]
    spec = ModelSpec("mlcn", (28, 28, 1), 3, ",".join(lanes))
    base = precision_mix.mix_accuracy(parts, [0] * 3, labels)
    for allowed in (0.0, 2.0, 5.0):
        best = np.inf
        for own in itertools.product(forms, repeat=3):
            if precision_mix.mix_accuracy(parts, [forms[form] for form in own], labels) < base - allowed / 100 - 1e-9:
                continue
            for devices in itertools.product((0, 1), repeat=3):
                taken = [0.0, 0.0]
                for lane, form, device in zip(lanes, own, devices, strict=True):
                    taken[device] += made[device][form][lane]
                best = min(best, max(taken))
        placed = precision_place.place_lanes(spec, profiles, parts, [[1] * 4] * 3, labels, allowed, 1, [0] * 3)
        assert placed["makespan_milliseconds"] == pytest.approx(1000 * best, rel=1e-5)
        assert placed["accuracy_drop"] <= allowed + 1e-6


@pytest.mark.long
def test_the_smallest_mix_of_forms_in_xla_is_measured_and_exported(
    workdir, model, images, tmp_path, monkeypatch, capsys
):
    """The whole command without the packages that make int8."""
    xla = tuple(form for form in FORMS if form.runtime == "xla")
    monkeypatch.setattr(precision_export, "FORMS", xla)
    monkeypatch.setattr(onnx, "versions", dict)
    out = tmp_path / "results"
    flags = [f"--workdir={workdir}", f"--output={out}", "--rounds=1", "--max_accuracy_drop=5"]
    front.run(["precision", *flags])
    about = json.loads((out / "precision.json").read_text())
    assert {lane["chosen"] for lane in about["lanes"]} == {"bfloat16 xla"}
    assert "times smaller" in capsys.readouterr().out
    card = (out / "export" / "README.md").read_text()
    assert f"{about['test_accuracy']['chosen']:.2%} of the test images" in card
    assert "`digits`, " in card
    for found in (Artifact(out / "export"), Artifact(out / "export", "xla")):
        np.testing.assert_allclose(found.lengths(images), model.artifact.lengths(images), atol=0.03)
    front.run(["precision", *flags, "--choose=fastest"])
    about = json.loads((out / "precision.json").read_text())
    best = min(about["tried"], key=lambda each: each["milliseconds"])
    assert best["forms"] == [lane["chosen"] for lane in about["lanes"]]
    assert ["float32 xla"] * 3 in [each["forms"] for each in about["tried"]]
    assert about["milliseconds"]["chosen"] > 0

    def no_room(*args):
        raise NoRoom("too lossy")

    monkeypatch.setattr(precision_export, "read_profiles", lambda *args: [make_profile()])
    monkeypatch.setattr(precision_export, "place_lanes", no_room)
    out = tmp_path / "without room"
    with pytest.raises(NoRoom, match="too lossy; the measurements"):
        front.run(["precision", *flags, f"--output={out}", "--profiles=a.json"])
    assert len(json.loads((out / "precision.json").read_text())["lanes"]) == 3
    assert Artifact(out / "export").image_shape == model.artifact.image_shape


def test_what_was_measured_is_kept_where_the_mix_cannot_be_exported(workdir, tmp_path, monkeypatch):
    """A lane of weight 0 has no accuracy of its own."""

    def made(lane, form, calibration):
        return Made(form, 4, lambda images: np.full((len(images), 10), lane.index, np.float32))

    def fail(*args):
        raise InputError("they differ")

    monkeypatch.setattr(onnx, "versions", dict)
    monkeypatch.setattr(precision_export, "make", made)
    monkeypatch.setattr(precision_export, "_written", fail)
    file = tmp_path / "precision.json"
    with pytest.raises(InputError, match=rf"^they differ; what was measured is in {file}$"):
        front.run(["precision", f"--workdir={workdir}", f"--output={tmp_path}", "--rounds=1"])
    about = json.loads(file.read_text())
    alone = [lane["forms"][0]["accuracy_alone"] for lane in about["lanes"]]
    assert alone[0] is None
    assert alone[1] == alone[2] > 0
    rest = {name: {"before": 1, "chosen": 1} for name in ("accuracy", "bytes", "milliseconds")}
    rows = precision_export.table(about | rest | {"test_accuracy": {}, "proven": True, "placement": {}}).splitlines()
    assert [row.split()[6] for row in rows[1 : len(FORMS) + 1]] == ["-"] * len(FORMS)


def test_what_cannot_be_used_is_refused_before_anything_is_computed(workdir, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "versions", dict)
    monkeypatch.setattr(precision_export, "make", lambda *args: pytest.fail("computed"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="give another --output=FOLDER"):
        front.run(["precision", f"--workdir={workdir}", f"--output={tmp_path / 'file'}"])
    with pytest.raises(InputError, match="is the run's own folder, whose export would be replaced"):
        front.run(["precision", f"--workdir={workdir}", f"--output={workdir}"])
    other = shutil.copytree(workdir, tmp_path / "other")
    with pytest.raises(InputError, match=r"other/export exists but is not an export that .* precision wrote"):
        front.run(["precision", f"--workdir={workdir}", f"--output={other}"])
    about = json.loads((other / "model.json").read_text())
    (other / "model.json").write_text(json.dumps(about | {"training_images_sha256": "0"}))
    with pytest.raises(InputError, match=r"digits is not the data that .*other was trained on"):
        front.run(["precision", f"--workdir={other}"])
    assert not (other / "precision").exists()


def test_parts_of_lanes_are_added_up_in_float32():
    def in_xla(rows):
        return np.full((len(rows), 3), 2, np.float32)

    def session(rows):
        return np.full((len(rows), 3), 7, np.float32)

    rows = np.zeros((4, 1), np.uint8)
    for functions, expected in (([(1, in_xla)], 16), ([], 14)):
        ((least, call),) = added_up(functions, [session, session])
        assert (least, call(rows).dtype) == (1, np.float32)
        np.testing.assert_array_equal(call(rows), np.full((4, 3), expected))
        np.testing.assert_array_equal(
            square_roots([(1, call)])[0][1](rows), np.sqrt(np.full((4, 3), expected, np.float32))
        )


@installed
def test_int8_is_measured_chosen_exported_and_split(workdir, model, images, tmp_path, capsys):
    out = tmp_path / "results"
    front.run(["precision", f"--workdir={workdir}", f"--output={out}", "--rounds=1", "--max_accuracy_drop=5"])
    about = json.loads((out / "precision.json").read_text())
    assert {lane["chosen"] for lane in about["lanes"]} == {"int8 onnxruntime"}
    printed = capsys.readouterr().out
    assert "times smaller" in printed
    found = Artifact(out / "export")
    assert about["bytes"]["chosen"] < 0.6 * about["bytes"]["before"]
    assert np.abs(found.lengths(images) - model.artifact.lengths(images)).max() < 0.05
    dataset = model.data.load()
    validation = split_validation(dataset.train, 0.2, 0)[1]
    accuracy = np.mean(found.lengths(validation.images).argmax(-1) == validation.labels)
    np.testing.assert_allclose(accuracy, about["accuracy"]["chosen"])
    tiers = split.split(workdir, workdir / "tiers.json", out="int8", precision=out / "export")
    parts = sum(TierArtifact(tiers / name).part(images) for name in ("end", "edge", "cloud"))
    np.testing.assert_allclose(np.sqrt(parts), found.lengths(images), atol=1e-2)


@installed
def test_int8_is_calibrated_on_one_batch_after_another(model, monkeypatch):
    """Also on a last one that is smaller; the activations of all of them could take more memory than there is."""
    from onnxruntime.quantization.calibrate import HistogramCollector

    collect, held = HistogramCollector.collect, []

    def look(collector, values):
        held.append(max(map(len, values.values())))
        collect(collector, values)

    monkeypatch.setattr(HistogramCollector, "collect", look)
    images = model.data.load().test.images[: precision_make.CALIBRATION_BATCH + 6]
    lane = lanes_of(model.spec, model.encoder)[0]
    found = make(lane, INT8, images)
    assert held == [1, 1] * (len(precision_make._PERCENTILES) - 1)
    np.testing.assert_allclose(found.call(images), make(lane, FLOAT32, images).call(images), atol=0.05)


@installed
def test_channels_of_the_last_convolution_have_one_range(model, images, tmp_path):
    import onnx as onnx_package

    lane = lanes_of(model.spec, model.encoder)[0]
    path = precision_make._optimized(lane, tmp_path)
    equalised = precision_make._equalised(path, [images[:5], images[5:]], "lane")
    np.testing.assert_allclose(open_onnx(equalised, OUTPUT)(images), open_onnx(path, OUTPUT)(images), atol=1e-5)
    probed = onnx_package.load(equalised)
    name = [node.output[0] for node in probed.graph.node if node.op_type == "Conv"][-1]
    probed.graph.output.append(onnx_package.helper.make_tensor_value_info(name, onnx_package.TensorProto.FLOAT, None))
    onnx_package.save(probed, tmp_path / "found.onnx")
    ranges = np.abs(open_onnx(tmp_path / "found.onnx", name)(images)).max(axis=(0, 2, 3))
    np.testing.assert_allclose(ranges, 1.0, rtol=1e-4)


@installed
def test_scales_that_are_not_finite_are_one_error(model, images):
    lane = lanes_of(model.spec, jax.tree.map(lambda a: np.full_like(a, np.nan), model.encoder))[0]
    with pytest.raises(InputError, match=r"lane 0, mlcn1:w1d1: .* not finite"):
        make(lane, INT8, images)

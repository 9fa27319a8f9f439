"""Runs of residual lanes: over devices, resumed, scored, exported and pruned."""

import asyncio
import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import optax
import pytest
from made_files import image_folder
from made_service import ask

from mlcn_jax.analysis import explain, prune
from mlcn_jax.config import RunConfig
from mlcn_jax.data.batches import Augmentation, Split
from mlcn_jax.data.images import read_pixels
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.nn import calibration, resnet
from mlcn_jax.nn.model import class_probabilities, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import artifact, export, trained
from mlcn_jax.serving.http_service import Limits, application
from mlcn_jax.serving.service import Service
from mlcn_jax.training import loop
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.evaluate import head_sums, scores_of
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.plan import Plan, algorithms_of
from mlcn_jax.training.session import Session, calibration_images, check_settings, open_session
from mlcn_jax.training.stack_programs import Stack, make_stacks
from mlcn_jax.training.stacks_runner import StacksRunner
from mlcn_jax.training.step import TrainState
from mlcn_jax.training.trained import load_trained
from tests.conftest import TINY

SPEC = ModelSpec(*("mlcn", (12, 12, 1), 3, "resnet:w1*4"), norm_group=4, decoder=(8,), label_smoothing=0.1)
MOVES = Augmentation(max_shift=1, reflect=True, cutout=3, per_lane=True, mirror_lanes=True)
OPTIMIZER = optax.sgd(0.1)
SIZES = (0, 10)


def two_steps(runner):
    """The state, metrics, statistics and scores after a step on full images and one on small ones."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, *SPEC.image_shape), dtype=np.uint8)
    labels = (np.arange(8) % 3).astype(np.int32)
    params = calibration.whiten(SPEC, init_params(SPEC, jax.random.key(0)), images / np.float32(255))
    runner.start(jax.device_get(TrainState.create(params, OPTIMIZER)))
    runner.compile(images, labels, sizes=SIZES)
    with jax.transfer_guard("disallow"):
        for size in SIZES:
            metrics = runner.step(*runner.place(images, labels), size=size)
        statistics = runner.calibrate([images])
        scores = runner.scores(Split(images, labels), 4, flips=True)
    return jax.device_get((runner.fetch().params, metrics, statistics)), scores


def settings():
    return {"reconstruction_weight": 0.4, "seed": 0, "augmentation": MOVES}


@pytest.fixture(scope="module")
def on_one_device():
    return two_steps(MeshRunner(SPEC, OPTIMIZER, None, **settings()))


def assert_same(mine, theirs):
    (tree, scores), (expected, expected_scores) = mine, theirs
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), tree, expected)
    np.testing.assert_array_equal(scores.confusion, expected_scores.confusion)
    np.testing.assert_allclose(scores.nll, expected_scores.nll, rtol=1e-5)
    np.testing.assert_allclose(scores.loss, expected_scores.loss, rtol=1e-5)


@pytest.mark.long
def test_a_mesh_trains_as_one_device_does(on_one_device, monkeypatch):
    """Also where it convolves one image at a time."""
    monkeypatch.setattr(resnet, "_PART_BYTES", 1)
    monkeypatch.setattr(resnet, "_PART_IMAGES", 1)
    mesh = mesh_lib.make_mesh(2, 2)
    assert_same(two_steps(MeshRunner(SPEC, OPTIMIZER, mesh, **settings())), on_one_device)


@pytest.mark.long
def test_stacks_train_as_one_device_does(on_one_device):
    stacks = make_stacks(jax.devices()[:2], [1, 0, 1, 1])
    assert_same(two_steps(StacksRunner(SPEC, OPTIMIZER, stacks, jax.devices()[0], **settings())), on_one_device)


def test_equal_stacks_share_their_programs_but_not_what_their_lanes_see():
    """As in a search, where a stack's program may have been compiled for lanes at another place of another model."""
    spec = dataclasses.replace(SPEC, lanes="resnet:w1*2")
    images = np.random.default_rng(0).integers(0, 256, (8, *spec.image_shape), dtype=np.uint8)
    labels, programs = (np.arange(8) % 3).astype(np.int32), {}
    params = init_params(spec, jax.random.key(0))
    alike = jax.tree.map(lambda x: np.repeat(x[:1], 2, axis=0), jax.device_get(params["encoder"]))
    state = jax.device_get(TrainState.create({"encoder": alike, "decoder": params["decoder"]}, OPTIMIZER))
    stacks = [Stack(jax.devices()[0], (lane,)) for lane in range(2)]
    runner = StacksRunner(spec, OPTIMIZER, stacks, jax.devices()[0], programs=programs, **settings())
    runner.start(state)
    runner.compile(images, labels)
    runner.step(*runner.place(images, labels))
    first, second = runner.fetch().params["encoder"]["resnet_w1d1"]["head"]["kernel"]
    assert sum(key[0] == "forward" for key in programs) == 1
    assert np.abs(first - second).max() > 1e-6, "equal lanes became different, because they saw images differently"


def test_stacks_refuse_coupled_lanes():
    stacks = make_stacks(jax.devices()[:1], [0] * 4)
    coupled = dataclasses.replace(SPEC, ensemble_weight=0.5)
    with pytest.raises(InputError, match="lanes that classify alone without waiting"):
        StacksRunner(coupled, OPTIMIZER, stacks, jax.devices()[0], **settings())


def test_normalising_a_single_value_is_refused():
    config = RunConfig().replace({"train.batch_size": 4, "model.norm_group": 1})
    spec = dataclasses.replace(SPEC, norm_group=1)
    with pytest.raises(InputError, match="of images of 12x12 pixels the last stage of resnet lanes leaves one pixel"):
        check_settings(config, spec)
    check_settings(config, dataclasses.replace(spec, image_shape=(17, 12, 1)))
    check_settings(config, dataclasses.replace(spec, norm_group=2))


def test_groups_never_cross_devices():
    with pytest.raises(InputError, match=r"2 of a batch of 8: use model\.norm_group=2 or another divisor of 2"):
        mesh_lib.check_split(SPEC, 8, 4, 1)
    mesh_lib.check_split(SPEC, 8, 2, 1)


def test_scores_equal_numpy():
    """Likelihood and calibration error from given log-probabilities, with the mirror images' beside them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 40, 3, 4)) * 3
    log_p = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    labels = rng.integers(0, 3, 40).astype(np.int32)
    images = np.zeros((40, *SPEC.image_shape), np.uint8)
    decoder = init_params(SPEC, jax.random.key(0))["decoder"]

    def sums(batch):
        outputs = [np.asarray(each, np.float32) for each in log_p]
        return head_sums(SPEC, 0.0, decoder, outputs, batch[0] / 255.0, batch[1], batch[2])

    scores = scores_of(Split(images, labels), 40, sums)
    p = np.exp(log_p).mean(axis=(0, 3))
    np.testing.assert_allclose(scores.nll, -np.log(p[np.arange(40), labels]).mean(), rtol=1e-5)
    bins, error = np.clip((p.max(axis=1) * 15).astype(int), 0, 14), 0.0
    for b in range(15):
        here = bins == b
        error += abs((p.max(axis=1)[here] - (p.argmax(axis=1) == labels)[here]).sum()) / 40
    np.testing.assert_allclose(scores.calibration_error, error, rtol=1e-4)
    assert scores.accuracy == (p.argmax(axis=1) == labels).mean()


RECIPE = {
    "model.lanes": "resnet:w1*2",
    "model.label_smoothing": 0.1,
    "model.norm_group": 25,
    "data.alternate_flips": True,
    "data.max_shift": 1,
    "data.reflect": True,
    "data.cutout": 4,
    "data.augment_lanes": True,
    "data.validation_fraction": 0.2,
    "train.optimizer": "muon",
    "train.learning_rate": 0.1,
    "train.bias_learning_rate": 2.6,
    "train.head_learning_rate": 0.04,
    "train.lookahead": 0.7,
    "train.num_epochs": 1,
    "train.image_sizes": "14:0.4",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 20 steps: its configuration, workdir and summary."""
    config = RunConfig().replace(TINY | RECIPE)
    workdir = tmp_path_factory.mktemp("residual") / "whole"
    return config, workdir, loop.train(config, workdir)


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    config, workdir, summary = run
    loop.train(config.replace({"train.num_steps": 7}), tmp_path)
    resumed = loop.train(config, tmp_path)
    found, expected = (load_trained(folder).params for folder in (tmp_path, workdir))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    kept = Checkpoints(workdir / "checkpoints", read_only=True).restore({})[1]["conv"]
    spec = load_trained(workdir).spec
    of_sizes = [algorithms_of(Plan(), spec, config.train.batch_size, {}, size).keys() for size in (0, 14)]
    assert of_sizes[1] - of_sizes[0]
    assert of_sizes[0] | of_sizes[1] <= kept.keys(), "a later version would choose anew"
    assert resumed["test_nll"] == summary["test_nll"]
    assert summary["test_accuracy"] > 0.4
    assert summary["test_accuracy_flips"] > 0.3
    with pytest.raises(InputError, match=r"train\.momentum"):
        loop.train(config.replace({"train.momentum": 0.5}), tmp_path)


@pytest.mark.long
def test_statistics_that_are_not_finite_are_not_saved(run, tmp_path, monkeypatch):
    config, _, _ = run
    calibrate, calls = MeshRunner.calibrate, []

    def failing(self, batches):
        calls.append(0)
        return jax.tree.map(lambda x: x * (np.nan if len(calls) > 1 else 1), calibrate(self, batches))

    monkeypatch.setattr(MeshRunner, "calibrate", failing)
    with pytest.raises(Diverged, match="step 10: statistics of normalisation are not finite"):
        loop.train(config, tmp_path)
    assert load_trained(tmp_path).step == 5


@pytest.mark.long
def test_a_run_can_leave_the_test_set_alone(run, tmp_path, monkeypatch):
    config, _, _ = run
    scores, scored = MeshRunner.scores, []

    def scores_of_split(self, split, *rest, **more):
        scored.append(len(split.labels))
        return scores(self, split, *rest, **more)

    monkeypatch.setattr(MeshRunner, "scores", scores_of_split)
    summary = loop.train(config.replace({"train.score_test": False, "train.num_steps": 3}), tmp_path)
    assert not [name for name in summary if name.startswith("test_")]
    assert 0 < summary["validation_accuracy"] <= 1
    assert "validation_accuracy_flips" in summary
    assert not (tmp_path / "confusion.png").exists()
    session = open_session(config)
    assert len(session.validation.labels) in scored
    assert len(session.dataset.test.labels) not in scored


def test_calibration_batches_hold_all_classes_of_images_that_are_sorted_by_class():
    labels = np.repeat(np.arange(4, dtype=np.uint8), 100)
    batches = calibration_images(Split(labels[:, None, None, None], labels), 50)
    assert len(batches) == 8
    assert all(set(np.unique(batch)) == {0, 1, 2, 3} for batch in batches)


@pytest.mark.parametrize("epochs", [1, 7])
def test_the_sizes_to_compile_are_those_of_the_steps_to_take(epochs):
    config = RunConfig().replace({"train.image_sizes": "9:0.35,12:0.5,14:0.7", "train.num_epochs": epochs})
    session = types.SimpleNamespace(config=config, steps_per_epoch=20)
    for start, end in itertools.combinations(range(0, 20 * epochs + 1, 5), 2):
        expected = dict.fromkeys(Session.image_size(session, step) for step in range(start + 1, end + 1))
        assert Session.image_sizes(session, start, end) == list(expected)
    assert Session.image_sizes(session, 20 * epochs, 20 * epochs) == [], "at the end"
    longer = types.SimpleNamespace(config=config.replace({"train.num_epochs": 10**9}), steps_per_epoch=20)
    assert Session.image_sizes(longer, 0, 20 * 10**9) == [9, 12, 14, 0], "at once"


@pytest.mark.long
def test_an_export_classifies_as_the_workdir_does_with_probabilities_that_sum_to_one(run):
    _, workdir, _ = run
    export.export(workdir)
    exported = artifact.Artifact(workdir / "export")
    images = np.random.default_rng(0).integers(0, 256, (5, *exported.image_shape), dtype=np.uint8)
    probabilities = exported.probabilities(images)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(trained.TrainedModel(workdir).probabilities(images), probabilities, atol=1e-5)
    stored = np.load(workdir / "export" / "weights.npz")
    assert not [name for name in stored if "statistics" in name]  # folded into the kernels


@pytest.mark.long
def test_a_pruned_model_keeps_the_statistics_of_its_lanes(run, tmp_path):
    _, workdir, summary = run
    loaded = prune.load_prunable(workdir)
    smaller = prune.prune_run(loaded, [1])
    group = smaller.params["encoder"]["resnet_w1d1"]
    for name, values in group["statistics"]["trunk"].items():
        whole = loaded.params["encoder"]["resnet_w1d1"]["statistics"]["trunk"][name]["mean"]
        np.testing.assert_array_equal(values["mean"], whole[1:])
    config = loaded.config.replace({"model.remat": "full"})  # as of a mix, whose other lanes are removed
    spec = dataclasses.replace(loaded.spec, remat="full")
    again = prune.prune_run(dataclasses.replace(loaded, config=config, spec=spec), [1])
    assert again.config.model["remat"] == again.spec.remat == "none"
    assert smaller.spec.certain_length == 1.0
    assert smaller.scores(loaded.test).accuracy > 0.3
    lengths = np.linalg.norm(prune.weighted_capsules(smaller, loaded.test[:20], 10), axis=-1)
    np.testing.assert_allclose(class_probabilities(smaller.spec, lengths).sum(axis=1), 1, rtol=1e-5)
    assert json.loads((workdir / "summary.json").read_text())["test_accuracy"] == summary["test_accuracy"]


@pytest.mark.long
@pytest.mark.parametrize(("classes", "size", "channels"), [(1000, 24, 1), (3, 96, 3)])
def test_folders_of_images_are_trained_served_and_explained(classes, size, channels, tmp_path):
    """At the least and the largest size, the most classes, gray and in colour."""
    folder = image_folder(tmp_path / "images", {f"{k:03}": 2 if classes > 10 else 50 for k in range(classes)}, channels)
    changes = {"data.name": "folder", "data.dir": str(folder), "data.image_size": size, "data.test_fraction": 0.5}
    config = RunConfig().replace(TINY | RECIPE | changes | {"train.image_sizes": "", "train.num_steps": 2})
    workdir = tmp_path / "run"
    if classes > 10:
        with pytest.raises(InputError, match="Class '000' has 1 image"):
            loop.train(config, workdir)
        config = config.replace({"data.validation_fraction": 0.0})
    assert np.isfinite(loop.train(config, workdir)["test_nll"])

    loaded, file = load_trained(workdir), next(folder.rglob("*.png")).read_bytes()
    model = trained.TrainedModel(workdir)
    pixels = read_pixels(file, (size, size, channels))
    (probabilities,) = model.probabilities(pixels[None])
    np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
    limits = Limits(max_batch=4, timeout_seconds=10, max_queue=4, max_body_bytes=10**6, max_images=2, max_connections=9)
    service = Service(model, limits)

    async def answer():
        async with service.running(None):
            return await ask(application(service), file, query=b"probabilities")

    status, _, found = asyncio.run(answer())
    assert status == 200
    np.testing.assert_allclose(list(found["predictions"][0]["probabilities"].values()), probabilities, atol=1e-5)

    v = np.asarray(explain.look(loaded.spec, loaded.params["encoder"], pixels[None])[0])
    np.testing.assert_allclose((v**2).sum(axis=-1)[0] / 2, probabilities, atol=1e-5)  # the mean over two lanes
    for row in explain.rank(loaded.spec, loaded.params, pixels[None]):
        alone = np.abs(v[0, :, 1 - row["index"]])
        expected = np.abs(alone - np.linalg.norm(v[0], axis=-1)).mean()
        np.testing.assert_allclose(row["length_change_without"], expected, rtol=1e-3)
        assert row["pixel_change_per_unit"] > 0

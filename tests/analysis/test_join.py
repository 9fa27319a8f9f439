"""Joined lanes: the model they make, what is refused, and what can be done with it afterwards."""

import dataclasses
import json
import shlex
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_params import made_params

from mlcn_jax.analysis import join as join_lib
from mlcn_jax.analysis import lane_fit, prune
from mlcn_jax.analysis.workdir import train_command
from mlcn_jax.commands import join as command
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Split
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn import calibration
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.model import class_lengths
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import artifact, export, onnx
from mlcn_jax.settings import RoundSettings
from mlcn_jax.training import loop
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.evaluate import class_capsules
from mlcn_jax.training.session import check_settings
from mlcn_jax.training.teacher import TEACHERS, stored_digests
from mlcn_jax.training.trained import Trained, load_trained

APART = {
    "model.margin_loss": "per_lane_sum",
    "model.decoder_gradient": "none",
    "model.decoder": "8",
    "model.lanes": "mlcn1:w1",
    "train.lanes_apart": True,
    "data.validation_fraction": 0.2,
    "data.split_seed": 1,
    "train.batch_size": 50,
    "train.num_steps": 10,
}


def lane(folder, seed, changes=()):
    config = RunConfig().replace(APART | {"model.lane_seeds": str(seed), "train.seed": seed} | dict(changes))
    loop.train(config, folder)
    return folder


@pytest.fixture(scope="module")
def lanes(tmp_path_factory):
    """Three workdirs of one lane each, the second of another kind."""
    folder = tmp_path_factory.mktemp("lanes")
    kinds = ({}, {"model.lanes": "mlcn2:w1"}, {})
    return [lane(folder / str(seed), seed, changes) for seed, changes in enumerate(kinds)]


@pytest.fixture(scope="module")
def joined(lanes, tmp_path_factory):
    """The three as one model, with what was told about it."""
    output = tmp_path_factory.mktemp("joined") / "model"
    return output, join_lib.join(lanes, output, decoder_epochs=1)


def test_a_joined_model_has_the_columns_of_its_lanes_and_their_weights(lanes, joined, rng):
    output, about = joined
    model = load_trained(output)
    assert model.spec.lanes == "mlcn1:w1d1*2,mlcn2:w1d1*1"
    assert model.spec.lane_seeds == (0, 2, 1)
    assert about["columns"] == [0, 2, 1]
    split = Split(rng.integers(0, 256, (6, 28, 28, 1)).astype(np.uint8), np.zeros(6, np.int32))
    v = class_capsules(model.spec, model.params, split, 6)
    for column, workdir in enumerate(lanes[i] for i in about["columns"]):
        alone = load_trained(workdir)
        np.testing.assert_allclose(v[..., [column]], class_capsules(alone.spec, alone.params, split, 6), atol=1e-5)
    weights = np.array([about["lanes"][i]["weight"] for i in about["columns"]])
    np.testing.assert_allclose(model.spec.weights, weights)
    np.testing.assert_allclose(class_lengths(model.spec, v), np.sqrt(np.square(v) @ weights), atol=1e-5)


def test_accuracy_with_each_further_lane_is_told_and_is_that_of_the_model(joined):
    output, about = joined
    run = prune.load_prunable(output)
    for name, split in (("validation", run.ranking), ("test", run.test)):
        assert run.scores(split).accuracy == about["lanes"][-1][f"{name}_accuracy"] == about[f"{name}_accuracy"]
        assert about["lanes"][0][f"{name}_accuracy"] == about["lanes"][0][f"{name}_accuracy_alone"]
    assert about == json.loads((output / "joined.json").read_text())
    table, next_steps = command.told(about, output).split("written to ")
    assert table.count("mlcn1:w1d1") == 2
    assert next_steps.endswith(train_command(run.config, output))
    assert about["decoder_seconds"] > 0


def test_the_next_command_leaves_out_devices_that_may_not_fit_the_joined_lanes(joined, tmp_path):
    output, about = joined
    on_two = read_stored(output).replace({"parallel.plan": "stacks", "parallel.lane": 2})
    (tmp_path / "config.json").write_text(json.dumps(on_two.to_dict()))
    assert "parallel" not in command.told(about, tmp_path)


def test_accuracy_with_each_further_lane_is_that_of_joining_only_these(lanes, joined, tmp_path):
    _, about = joined
    two = join_lib.join(lanes[:2], tmp_path / "two", decoder_epochs=0)
    for name in ("validation_accuracy", "test_accuracy"):
        assert two[name] == about["lanes"][1][name]


def test_weights_of_later_lanes_do_not_change_what_the_first_lanes_give():
    """Two lanes that disagree, and a third that is right, next to which the fit gives the second all the rest."""
    truth = np.eye(2)[[0, 1, 0, 1]]
    v = np.stack([truth, 0.9 * (1 - truth), truth], axis=-1)
    split = Split(np.zeros((4, 1, 1, 1), np.uint8), np.array([0, 1, 0, 1], np.int32))
    few = [join_lib.Lane(LaneSpec("mlcn1", 1), {}, seed, str(seed), 1) for seed in range(3)]
    weights = [(1.0,), (1.2, 0.8), (0.1, 0.9, 2.0)]
    rows = join_lib.further_lanes(few, weights, {"test": v}, {"test": split})
    assert [row["test_accuracy"] for row in rows] == [1.0, 1.0, 1.0]
    assert [row["test_accuracy_alone"] for row in rows] == [1.0, 0.0, 1.0]
    assert [row["weight"] for row in rows] == [0.1, 0.9, 2.0]


@pytest.mark.long
def test_a_joined_model_is_pruned_exported_and_trained_on(joined, tmp_path):
    output = shutil.copytree(joined[0], tmp_path / "model")
    run = prune.load_prunable(output)
    smaller = prune.prune_run(run, [0, 2])
    assert smaller.spec.lane_weights == (run.spec.lane_weights[0], run.spec.lane_weights[2])
    assert smaller.spec.lane_seeds == (0, 1)
    prune.save_run(smaller, tmp_path / "smaller", None, {})
    exported = artifact.Artifact(export.export(tmp_path / "smaller"))
    images = run.test.images[:4]
    v = class_capsules(smaller.spec, smaller.params, run.test[:4], 4)
    np.testing.assert_allclose(exported.lengths(images), class_lengths(smaller.spec, v), atol=1e-5)
    assert onnx.read_export(tmp_path / "smaller").spec.lane_weights == smaller.spec.lane_weights
    smaller_config = read_stored(tmp_path / "smaller")
    assert smaller_config.model["lane_seeds"] == (0, 1)
    assert smaller_config.model_spec(*smaller_config.data.shape()) == smaller.spec
    summary = loop.train(read_stored(output).replace({"train.num_steps": 2}), output)
    assert summary["steps"] == 2
    assert summary["validation_accuracy"] >= joined[1]["validation_accuracy"]


@pytest.mark.long
def test_a_lane_is_added_to_a_trained_model(joined, lanes, tmp_path):
    fourth = lane(tmp_path / "3", 3)
    about = join_lib.join([joined[0], fourth], tmp_path / "four", decoder_epochs=0, weights="equal")
    spec = load_trained(tmp_path / "four").spec
    assert (spec.lanes, spec.lane_seeds, spec.lane_weights) == ("mlcn1:w1d1*3,mlcn2:w1d1*1", (0, 2, 3, 1), ())
    assert [row["weight"] for row in about["lanes"]] == [1.0] * 4
    with pytest.raises(InputError, match="are the same lane"):
        join_lib.join([joined[0], lanes[1]], tmp_path / "again", decoder_epochs=0)


def test_every_difference_of_the_runs_is_named(lanes, tmp_path):
    other = lane(tmp_path / "other", 5, {"data.split_seed": 2, "model.signed_pixels": True})
    match = (
        r"(?s)training images \(SHA-256\).*validation images \(SHA-256\).*model.signed_pixels: False in .*data.split"
    )
    with pytest.raises(InputError, match=match):
        join_lib.join([lanes[0], other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_are_where_this_machine_has_them_or_downloads_them(lanes, tmp_path, monkeypatch):
    moved = shutil.copytree(lanes[0], tmp_path / "moved")
    stored = read_json(moved / "config.json")
    elsewhere = {"name": "mnist", "dir": "/of/another/machine"}
    write_json(moved / "config.json", stored | {"data": stored["data"] | elsewhere})
    with pytest.raises(InputError, match=r"data\.dir=/of/another/machine is not an existing folder"):
        join_lib.read_parts([moved])
    write_json(moved / "config.json", stored)
    load = datasets.load
    monkeypatch.setattr(datasets, "load", lambda name, **options: load(name, **options | {"directory": ""}))
    for given in (str(tmp_path), ""):  # the digits of scikit-learn are in no folder
        assert join_lib.read_parts([moved], given)[0].config.data.dir == given


def test_where_the_model_cannot_be_written_is_told_before_anything_is_computed(lanes, tmp_path, monkeypatch):
    monkeypatch.setattr(join_lib, "read_parts", None)
    with pytest.raises(InputError, match=r"cannot hold checkpoints because it has '\['"):
        join_lib.join(lanes, tmp_path / "out[1]")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file cannot be written to"):
        join_lib.join(lanes, tmp_path / "file" / "out")


def test_lanes_that_need_one_another_and_workdirs_given_twice_are_refused(finished, lanes, tmp_path):
    with pytest.raises(InputError, match="joint length"):
        join_lib.join([finished, lanes[0]], tmp_path / "out")
    pruned, run = tmp_path / "pruned", prune.load_prunable(finished)
    prune.save_run(prune.prune_run(run, [0]), pruned, None, {"lanes": {"before": run.spec.lanes}})
    with pytest.raises(InputError, match="joint length"):
        join_lib.join([pruned, lanes[0]], tmp_path / "out")
    with pytest.raises(InputError, match="given twice"):
        join_lib.join([lanes[0], lanes[0] / ".." / "0"], tmp_path / "out")
    other = shutil.copytree(lanes[0], tmp_path / "other")
    write_json(other / "model.json", read_json(other / "model.json") | {"training_images_sha256": "0"})
    with pytest.raises(InputError, match=r"digits is not the data that .*other was trained on"):
        join_lib.join([lanes[0], other], tmp_path / "out")


def test_a_workdir_whose_training_was_interrupted_is_refused_with_the_command_that_finishes_it(lanes, joined, tmp_path):
    stopped = shutil.copytree(lanes[0], tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    with pytest.raises(InputError, match=rf"{stopped} is not finished.* train --config=default --workdir={stopped} --"):
        join_lib.read_parts([lanes[1], stopped])
    assert not (joined[0] / "summary.json").exists()
    assert len(join_lib.read_parts([joined[0]])[0].lanes) == 3
    trained_on = shutil.copytree(joined[0], tmp_path / "trained_on")
    (trained_on / "metrics.jsonl").touch()
    with pytest.raises(InputError, match=rf"{trained_on} is not finished"):
        join_lib.read_parts([trained_on])


def test_the_command_that_finishes_a_run_has_its_configuration(lanes):
    config = read_stored(lanes[0])
    command = shlex.split(train_command(config, lanes[0]))
    changes = dict(one.removeprefix("--config.").split("=", 1) for one in command if one.startswith("--config."))
    assert RunConfig().replace(changes) == config
    in_rounds = config.replace({"train.rounds.steps": 5})
    assert " rounds --config=default" in train_command(in_rounds, lanes[0])
    computed = config.replace({"parallel.exchange_dtype": "bfloat16", "parallel.data": 2})
    assert "parallel.exchange_dtype=bfloat16" in train_command(computed, lanes[0], placed=False)
    assert "parallel.data" not in train_command(computed, lanes[0], placed=False)


def test_a_joined_model_has_a_teacher_if_all_its_lanes_had_it(lanes, tmp_path):
    students = [shutil.copytree(lanes[i], tmp_path / str(i)) for i in (0, 2)]
    for student in students:
        write_json(student / "model.json", read_json(student / "model.json") | {TEACHERS: ["a"]})
        write_json(student / "config.json", read_stored(student).replace({"train.teacher": "here"}).to_dict())
    join_lib.join(students, tmp_path / "joined", decoder_epochs=0, weights="equal")
    assert read_stored(tmp_path / "joined").train.teacher == "here"
    assert stored_digests(tmp_path / "joined") == ("a",)
    parts = join_lib.read_parts([students[0], lanes[2]])
    assert join_lib.common_teachers(parts) == join_lib.common_teachers(parts[1:]) == ()
    assert join_lib.joined_config(parts[0].config, parts[0].trained.spec, ()).train.teacher == ""


RESIDUAL = {
    "model.lanes": "resnet:w1",
    "model.decoder_gradient": "auto",
    "data.augment_lanes": True,
    "data.max_shift": 1,
    "train.image_sizes": "20:0.5",
}


def test_a_joined_model_has_settings_that_it_can_be_trained_with():
    changes = {"model.margin_loss": "joint", "model.lane_seeds": "0", "train.rounds.steps": 5}
    dropped = RunConfig().replace(APART | changes | {"model.lane_dropout": 0.3, "train.lanes_apart": False})
    one = SimpleNamespace(config=dropped, trained=SimpleNamespace(spec=dropped.model_spec((28, 28, 1), 10)))
    spec, _ = join_lib.joined_spec([one], [join_lib.Lane(LaneSpec("mlcn1", 1), {}, seed, "one", 10) for seed in (0, 1)])
    assert join_lib.joined_config(dropped, spec).model["lane_dropout"] == spec.lane_dropout == 0
    config = RunConfig().replace(APART | RESIDUAL | changes)
    first = SimpleNamespace(config=config, trained=SimpleNamespace(spec=config.model_spec((28, 28, 1), 10)))
    residual, published = (
        join_lib.Lane(LaneSpec(kind, 1), {}, seed, kind, 10) for seed, kind in enumerate(("resnet", "mlcn1"))
    )
    mixed, _ = join_lib.joined_spec([first], [residual, published])
    check_settings(join_lib.joined_config(config, mixed), mixed)
    alike, _ = join_lib.joined_spec([first], [residual, dataclasses.replace(residual, seed=1)])
    kept = join_lib.joined_config(config, alike)
    check_settings(kept, alike)
    assert kept.data.augment_lanes
    assert kept.train.image_sizes == "20:0.5"
    assert kept.train.rounds == RoundSettings(), "or neither train nor rounds would take the workdir"


@pytest.mark.parametrize(
    ("batch", "parts", "group", "expected"),
    [(128, 1, 125, 64), (100, 1, 125, 125), (500, 1, 125, 125), (12, 1, 3, 3), (100, 2, 125, 50), (12, 2, 4, 3)],
)
def test_images_that_a_joined_model_normalises_together_fit_the_batches_of_the_first_run(batch, parts, group, expected):
    def part(lanes, batch, group, steps=1):
        changes = {"model.lanes": lanes, "train.batch_size": batch, "model.norm_group": group}
        changes["train.accumulation_steps"] = steps
        config = RunConfig().replace(APART | {"model.lane_seeds": "0", "model.decoder_gradient": "auto"} | changes)
        return SimpleNamespace(config=config, trained=SimpleNamespace(spec=config.model_spec((28, 28, 1), 10)))

    runs = [part("mlcn1:w1", batch, 7, parts), part("resnet:w1", 2 * group, group)]
    lanes = [join_lib.Lane(LaneSpec(kind, 1), {}, seed, kind, 10) for seed, kind in enumerate(("mlcn1", "resnet"))]
    spec, _ = join_lib.joined_spec(runs, lanes)
    joined = join_lib.joined_config(runs[0].config, spec)
    check_settings(joined, spec)
    check_parts(spec, batch, 1, parts)
    assert joined.model["norm_group"] == spec.norm_group == expected


@pytest.mark.long
def test_lanes_of_several_kinds_are_joined_and_trained_on(lanes, tmp_path):
    residual = lane(tmp_path / "residual", 7, RESIDUAL)
    join_lib.join([residual, lanes[0]], tmp_path / "both", decoder_epochs=0)
    summary = loop.train(read_stored(tmp_path / "both").replace({"train.num_steps": 2}), tmp_path / "both")
    assert summary["steps"] == 2


def test_fitted_weights_favour_the_lanes_that_know(rng):
    """Against a search over a grid, and for a lane that says nothing."""
    labels = rng.integers(0, 3, 400)
    truth = np.eye(3)[labels]
    good = 0.7 * truth + 0.1
    noisy = np.where(rng.uniform(size=(400, 1)) < 0.6, good, 0.7 * np.eye(3)[rng.integers(0, 3, 400)] + 0.1)
    v = np.sqrt(np.stack([good, noisy, np.full((400, 3), 1 / 3)], axis=-1))
    weights = np.array(lane_fit.fit_weights(v[..., 1:], labels))

    def nll(share):
        p = share * noisy[np.arange(400), labels] + (1 - share) / 3
        return -np.log(p).mean()

    shares = np.linspace(0, 1, 201)
    assert weights.mean() == pytest.approx(1)
    assert weights[0] / 2 == pytest.approx(min(shares, key=nll), abs=0.01)
    assert lane_fit.fit_weights(v, labels) == pytest.approx((3, 0, 0), abs=1e-3)


def test_lanes_that_were_whitened_from_other_images_are_told_apart(rng):
    spec = ModelSpec("mlcn", (12, 12, 1), 3, "resnet:w1*1", norm_group=4, decoder=(8,))
    params = made_params(spec)

    def whitened(scale):
        images = (scale * rng.uniform(size=(50, 12, 12, 1))).astype(np.float32)
        return Trained(spec, (), calibration.whiten(spec, params, images), 0)

    first, dark = whitened(1.0), whitened(0.5)
    rounded = dataclasses.replace(first, params=jax.tree.map(lambda x: x * (1 + 1e-4), first.params))
    assert join_lib._same_whitening(first, rounded)
    assert not join_lib._same_whitening(first, dark)
    published = Trained(spec, (), {"encoder": {"mlcn1_w1d1": {}}}, 0)
    found = {"published": published, "first": first, "rounded": rounded, "dark": dark}
    parts = [SimpleNamespace(workdir=name, trained=trained) for name, trained in found.items()]
    (line,) = join_lib._whitening_differences(parts)
    assert "the first convolutions of first and dark were" in line
    assert join_lib._whitening_differences(parts[:3]) == []

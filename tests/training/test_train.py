"""Whole runs: what they write, resumed, finished, stopped, fine-tuned, and refused where they do not fit."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlcn_jax import files, pretrained
from mlcn_jax.analysis import evaluate_workdir
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.errors import Damaged, Diverged, InputError, Stopped
from mlcn_jax.files import read_json
from mlcn_jax.nn import conv, model
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import loop, mesh_runner, pictures
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.metrics import MetricsWriter, read_rows
from mlcn_jax.training.session import open_session, warn_of_unused
from mlcn_jax.training.start import start_state
from mlcn_jax.training.step import compile_step, make_train_step
from mlcn_jax.training.trained import load_trained


def params_of(workdir):
    return load_trained(workdir).params


def test_a_process_with_other_images_is_named():
    facts = {"training_images_sha256": "0123", "class_names": ["a", "b"]}
    loop._check_same([facts, dict(facts)])
    with pytest.raises(InputError, match=r"(?s)process 2 has other images.*'0123' in process 0, '4567' in process 2"):
        loop._check_same([facts, dict(facts), facts | {"training_images_sha256": "4567"}])


def test_images_that_processes_score_together_are_compared_too(tiny):
    session = open_session(tiny)
    other = dataclasses.replace(session.dataset, test=session.dataset.test[1:])
    facts = [loop._scored_images(one) for one in (session, dataclasses.replace(session, dataset=other))]
    with pytest.raises(InputError, match=r"process 1 has other images(?s:.*)test_images_sha256"):
        loop._check_same(facts)
    facts[1] = loop._scored_images(dataclasses.replace(session, validation=session.train))
    with pytest.raises(InputError, match="validation_images_sha256"):
        loop._check_same(facts)


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def copied(finished, tmp_path):
    """A run that has ended, to be changed."""
    return shutil.copytree(finished, tmp_path / "copied")


@pytest.mark.long
def test_a_few_hundred_steps_learn_the_digits(tiny, tmp_path, real_pictures):
    config = tiny.replace(
        {"model.lanes": "mlcn1:w1*4", "train.num_steps": 250, "train.num_epochs": 20, "train.checkpoint_every": 0}
    )
    summary = loop.train(config, tmp_path)
    assert summary["test_accuracy"] > 0.93
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 250
    assert summary["parameters"] == model.count_parameters(load_trained(tmp_path).spec)["total"]
    assert summary["images_per_second"] > 0
    assert summary["compile_seconds"] > 0
    assert summary["data"]["bytes"] == "embedded"
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["split"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    for name in ("confusion.png", "reconstructions.png", "config.json", "model.json"):
        assert (tmp_path / name).stat().st_size > 100


def test_a_run_of_an_older_version_goes_on(tiny, copied):
    for name, part in (("config.json", "model"), ("model.json", "spec")):
        stored = json.loads((copied / name).read_text())
        del stored[part]["margin_loss"], stored[part]["signed_pixels"]
        (copied / name).write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"model.margin_loss: 'joint' there, 'per_lane' now"):
        loop.train(tiny.replace({"model.margin_loss": "per_lane"}), copied)
    assert loop.train(tiny.replace({"train.num_steps": 25}), copied)["steps_this_session"] == 5


def test_weights_that_were_fitted_to_the_lanes_last_until_these_train_further(tiny, copied):
    stored = json.loads((copied / "model.json").read_text())
    stored["spec"]["lane_weights"] = [0.5, 1.5]
    (copied / "model.json").write_text(json.dumps(stored))
    loop.train(tiny, copied)
    assert load_trained(copied).spec.lane_weights == (0.5, 1.5), "it is finished"
    assert loop.train(tiny.replace({"train.num_steps": 25}), copied)["steps_this_session"] == 5
    assert load_trained(copied).spec.lane_weights == ()
    with pytest.raises(InputError, match=r"model\.lane_weights"):
        loop.train(tiny.replace({"model.lane_weights": [0.5, 1.5]}), copied)


def test_a_resumed_run_equals_an_uninterrupted_one(tiny, tmp_path):
    """With everything that is drawn; the run below has nothing of it."""
    config = tiny.replace({"data.max_shift": 2, "model.lane_dropout": 0.3, "train.optimizer": "adamw"})
    loop.train(config, tmp_path / "whole")
    loop.train(config.replace({"train.num_steps": 5}), tmp_path / "parts")
    loop.train(config.replace({"train.num_steps": 13}), tmp_path / "parts")
    loop.train(config, tmp_path / "parts")
    assert_same_bits(params_of(tmp_path / "whole"), params_of(tmp_path / "parts"))
    losses_of = [
        {r["step"]: r["loss"] for r in read_rows(tmp_path / name / "metrics.jsonl")} for name in ("whole", "parts")
    ]
    assert losses_of[0][5] == losses_of[1][5]
    assert losses_of[0][10] == losses_of[1][10]
    assert losses_of[0][20] == losses_of[1][20]


@pytest.mark.long
def test_a_resumed_run_keeps_its_convolution_algorithms(finished, tiny, tmp_path, monkeypatch):
    loop.train(tiny.replace({"train.num_steps": 5}), tmp_path / "parts")
    monkeypatch.setattr(conv, "choose", lambda *shape, **_: "native")  # as a later version might
    loop.train(tiny, tmp_path / "parts")
    loop.train(tiny, tmp_path / "other")
    assert_same_bits(params_of(finished), params_of(tmp_path / "parts"))
    with pytest.raises(AssertionError):
        assert_same_bits(params_of(finished), params_of(tmp_path / "other"))


def test_a_finished_run_is_not_run_again(tiny, copied):
    stamp = (copied / "summary.json").stat().st_mtime_ns
    assert loop.train(tiny, copied) == json.loads((copied / "summary.json").read_text())
    assert (copied / "summary.json").stat().st_mtime_ns == stamp


def test_a_run_that_ended_before_its_summary_keeps_its_throughput(tiny, copied):
    before = read_json(copied / "summary.json")["images_per_second"]
    (copied / "summary.json").unlink()
    assert loop.train(tiny, copied)["images_per_second"] == before


def test_pictures_that_cannot_be_written_cost_no_scores(tiny, copied, caplog, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = read_json(copied / "summary.json")
    (copied / "summary.json").unlink()
    monkeypatch.setattr(pictures, "save_confusion", full)
    assert loop.train(tiny, copied)["test_accuracy"] == before["test_accuracy"]
    assert "pictures are not drawn" in caplog.text


def test_throughput_is_that_of_all_sessions_by_the_steps_of_each_row(tmp_path):
    """40 steps of 10 images at 100 a second, then 10 at 50: 500 images in 6 seconds."""
    rows = [(20, 100.0), (40, 100.0), (50, 50.0)]
    lines = [{"step": step, "split": "train", "images_per_second": rate} for step, rate in rows]
    text = "".join(
        f"{json.dumps(line)}\n" for line in [*lines[:2], {"step": 40, "split": "test", "loss": 1.0}, lines[2]]
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    assert loop._throughput(tmp_path, 10, 20) == pytest.approx(500 / 6)
    assert loop._throughput(tmp_path, 10, 5) == pytest.approx(
        350 / 4.5
    )  # resumed with more rows: the first may lack steps
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[2]))  # of a run that goes on from a pruned one
    assert loop._throughput(tmp_path, 10, 20) == pytest.approx(50.0)
    assert loop._throughput(tmp_path / "none", 10, 20) is None


def test_a_finished_run_that_is_shortened_is_finished_with_the_new_settings(tiny, copied):
    shorter = tiny.replace({"train.num_steps": 10})
    summary = loop.train(shorter, copied)
    assert (summary["steps"], summary["config_hash"]) == (20, shorter.hash())
    assert summary == json.loads((copied / "summary.json").read_text())


@pytest.mark.parametrize("name", ["config.json", "model.json"])
def test_a_damaged_file_is_named(copied, name):
    (copied / name).write_text('{"a')
    with pytest.raises(InputError, match=f"{name} is damaged"):
        evaluate_workdir.evaluate_workdir(read_stored(copied), copied)


def test_a_model_file_that_holds_something_else_is_named(tiny, copied):
    (copied / "model.json").write_text("[]")
    with pytest.raises(Damaged, match=r"model\.json is damaged \(it holds no object\)"):
        loop.train(tiny, copied)


def test_a_lost_model_file_is_named(tiny, copied):
    (copied / "model.json").unlink()
    with pytest.raises(InputError, match=r"model\.json is missing"):
        loop.train(tiny, copied)


def test_capsnet_ends_with_its_best_checkpoint_and_can_be_read(tiny, tmp_path):
    changes = {"model.name": "capsnet", "model.lanes": "", "data.validation_fraction": 0.1}
    few = {"train.num_steps": 2, "train.checkpoint_every": 1, "train.batch_size": 4, "train.score_test": False}
    summary = loop.train(tiny.replace(changes | few), tmp_path)
    assert summary["steps"] == 2
    assert load_trained(tmp_path).step == summary["best_step"]


def test_a_summary_that_cannot_be_read_is_not_taken_for_an_unfinished_run(tiny, copied, monkeypatch):
    def fail(path, *args, **kwargs):
        if path.name == "summary.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *args, **kwargs)

    read = files.Path.read_text
    monkeypatch.setattr(files.Path, "read_text", fail)
    with pytest.raises(InputError, match=r"summary\.json cannot be read .Input/output error"):
        loop.train(tiny, copied)
    monkeypatch.undo()
    assert (copied / "summary.json").exists()


def test_a_damaged_summary_is_made_again(tiny, copied):
    first = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text('{"a')
    assert loop.train(tiny, copied)["test_accuracy"] == first["test_accuracy"]


@pytest.mark.long
def test_sigterm_saves_and_the_rest_follows(tiny, tmp_path, monkeypatch):
    config = tiny.replace({"train.checkpoint_every": 0, "train.num_steps": 60})
    loop.train(config, tmp_path / "whole")

    write = MetricsWriter.write

    def write_and_stop(self, *row):
        write(self, *row)
        first.undo()  # a second signal would end the process at once
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as first:
        first.setattr(MetricsWriter, "write", write_and_stop)
        with pytest.raises(Stopped, match="SIGTERM after step"):
            loop.train(config, tmp_path / "parts")
    assert signal.getsignal(signal.SIGTERM) is before
    saved = load_trained(tmp_path / "parts").step
    assert 5 <= saved < 60
    loop.train(config, tmp_path / "parts")
    assert_same_bits(params_of(tmp_path / "whole"), params_of(tmp_path / "parts"))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    original = make_train_step

    def make(*args, **kwargs):
        step_fn = original(*args, **kwargs)

        def step(state, *batch):
            state, metrics = step_fn(state, *batch)
            bad = state.step == 13
            return state, {**metrics, "loss": jnp.where(bad, jnp.nan, metrics["loss"])}

        return step

    monkeypatch.setattr(mesh_runner, "make_train_step", make)
    with pytest.raises(Diverged, match="step 13: the loss is nan"):
        loop.train(tiny, tmp_path)
    assert load_trained(tmp_path).step == 10
    assert not (tmp_path / "summary.json").exists()


def test_the_best_checkpoint_is_chosen_on_validation(tiny, tmp_path, monkeypatch):
    """Validation images are not trained on, and the test set chooses nothing."""
    config = tiny.replace({"data.validation_fraction": 0.2, "train.num_steps": 30, "train.learning_rate": 3e-3})
    summary = loop.train(config, tmp_path)
    rows = [r for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "validation"]
    assert [row["step"] for row in rows] == [5, 10, 15, 20, 25, 30]
    best = max(rows, key=lambda row: (row["accuracy"], row["step"]))
    assert summary["best_step"] == best["step"] == load_trained(tmp_path).step
    assert summary["data"]["train_images"] < 1438
    assert not [r for r in read_rows(tmp_path / "metrics.jsonl") if r["split"] == "test"]


def test_another_model_in_the_same_workdir_is_refused(tiny, finished, copied, monkeypatch):
    monkeypatch.setattr(loop, "plan_of", lambda *args: pytest.fail("a plan would keep its files there"))
    with pytest.raises(InputError, match=r"model.lanes: 'mlcn1:w1\*2' there, 'mlcn2:w1' now"):
        loop.train(tiny.replace({"model.lanes": "mlcn2:w1"}), copied)
    assert_same_bits(params_of(finished), params_of(copied))
    assert read_stored(copied).model["lanes"] == "mlcn1:w1*2"


def test_a_signal_while_images_are_loaded_ends_the_run_before_it_compiles(tiny, tmp_path, monkeypatch):
    def load(config):
        os.kill(os.getpid(), signal.SIGINT)
        return open_session(config)

    monkeypatch.setattr(loop, "open_session", load)
    with pytest.raises(Stopped, match="stopped by SIGINT before the first step"):
        loop.train(tiny, tmp_path / "run")


def test_what_does_nothing_with_a_models_lanes_is_told(caplog):
    config = RunConfig().replace({"model.lane_routing": "per_class", "model.margin_loss": "per_lane"})
    for lanes, warnings in (("resnet:w1*2", 2), ("resnet:w1,mlcn1:w1", 0)):
        caplog.clear()
        warn_of_unused(
            config, ModelSpec("mlcn", (18, 18, 1), 4, lanes, lane_routing="per_class", margin_loss="per_lane")
        )
        assert sum("is for lanes of capsules" in message for message in caplog.messages) == warnings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"parallel.partitioner": "exact"},
            "is exact, which does nothing with parallel.plan=mesh",
        ),
        ({"data.reflect": True}, "without data.max_shift, it does nothing"),
        ({"data.augment_lanes": True}, "no augmentation is given, so it does nothing"),
        ({"model.num_routing_iters": 5}, "iterations change nothing"),
        ({"model.lanes": "mlcn1:w1*2", "model.lane_seeds": "3,3"}, "several lanes are mlcn1:w1d1 with seed 3"),
        ({"data.max_shift": 18}, "data.max_shift is 18 pixels of images of 18: nothing is left of some images"),
        (
            {"train.weight_decay": 0.1},
            "train.weight_decay is 0.1, which does nothing without train.optimizer=adamw or sgd",
        ),
        ({"train.optimizer": "adamw", "train.lr_decay": 0.5}, "which does nothing without train.optimizer=adam"),
        ({"train.optimizer": "adamw", "train.momentum": 0.5}, "does nothing without train.optimizer=sgd or muon"),
        ({"train.teacher_weight": 0.5}, "train.teacher_weight is 0.5, which does nothing without a train.teacher"),
        ({"train.rounds.workers": 3}, "train.rounds.workers is 3, which does nothing without train.rounds.steps"),
        ({"data.split_seed": 3}, "data.split_seed is 3, which does nothing without data.validation_fraction"),
        ({"model.norm_group": 4}, "model.norm_group is 4, which does nothing without residual lanes"),
        ({"data.cutout": 18}, "data.cutout is 18 pixels of images of 18: nothing is left of some images"),
    ],
)
def test_a_setting_that_does_nothing_is_told(changes, said, caplog):
    for given in ({}, changes):
        config = RunConfig().replace(given)
        caplog.clear()
        warn_of_unused(config, config.model_spec((18, 18, 1), 4))
        assert [said in message for message in caplog.messages] == [True] * bool(given)


def test_a_signal_on_the_way_past_a_finished_run_is_heard(finished, tiny, monkeypatch):
    monkeypatch.setattr(loop.StopSignals, "requested", "SIGTERM")
    monkeypatch.setattr(loop, "_check_alone", lambda stop: None)  # as if it came after the images were loaded
    with pytest.raises(Stopped, match="after the end of"):
        loop.train(tiny, finished)


def test_a_run_that_was_stopped_where_it_ends_later_is_scored_there(tiny, tmp_path, monkeypatch):
    config = tiny.replace({"data.validation_fraction": 0.2, "train.score_test": False, "train.num_steps": 8})
    whole = loop.train(config, tmp_path / "whole")

    def due(self, step):
        self.requested = "SIGTERM" if step == 8 else ""
        return step == 8

    with monkeypatch.context() as patch:
        patch.setattr(loop.StopSignals, "due", due)
        with pytest.raises(Stopped, match="after step 8 of 20"):
            loop.train(config.replace({"train.num_steps": 20}), tmp_path / "stopped")
    ended = loop.train(config, tmp_path / "stopped")
    assert ended["validation_accuracy"] == whole["validation_accuracy"]
    scored, expected = (
        [row for row in read_rows(tmp_path / name / "metrics.jsonl") if row["split"] == "validation"]
        for name in ("stopped", "whole")
    )
    assert scored == expected
    assert scored[-1]["step"] == 8
    checkpoints = Checkpoints(tmp_path / "stopped" / "checkpoints", read_only=True)
    assert not checkpoints.lacks_rank(8)
    checkpoints.close()


def test_a_run_that_goes_on_is_not_finished_any_more(finished, tiny, tmp_path, monkeypatch):
    workdir = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(loop.StopSignals, "requested", "SIGTERM")
    monkeypatch.setattr(loop, "_check_alone", lambda stop: None)  # as if it came while the step was compiled
    with pytest.raises(Stopped, match="before step 21"):
        loop.train(tiny.replace({"train.num_steps": 21}), workdir)
    assert not (workdir / "summary.json").exists()


def test_a_run_is_as_it_was_if_it_cannot_go_on_with_the_given_settings(finished, tiny, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json")}
    changes = {"train.num_steps": 40, "train.accumulation_steps": 2, "parallel.plan": "stacks", "parallel.lane": 2}
    with pytest.raises(InputError, match=r"accumulation_steps=2 with parallel\.plan=stacks"):
        loop.train(tiny.replace(changes), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json")} == before


def test_a_run_in_rounds_is_not_overwritten(tiny, tmp_path):
    """It may have no ordinary checkpoint yet."""
    (tmp_path / "rounds" / "3").mkdir(parents=True)
    with pytest.raises(InputError, match="holds a run in rounds"):
        loop.train(tiny, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("search.db", "", "holds a search .search.db., not a run: give another --workdir"),
        ("trials.json", "[]", "holds a search .trials.json., not a run"),
        ("manifest.json", "{}", "holds an exported model .manifest.json., not a run"),
        (
            "config.json",
            '{"mine": 1}',
            "config.json: there is no field mine.*: if this file is not of a run, give another",
        ),
        ("config.json", "mine", "config.json.*: if this file is not of a run, give another --workdir"),
    ],
)
def test_what_is_no_run_is_not_written_over(name, content, message, tiny, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        loop.train(tiny, tmp_path)
    assert (tmp_path / name).read_text() == content


def test_the_test_set_can_be_scored_later(finished, tiny, tmp_path):
    workdir, config = shutil.copytree(finished, tmp_path / "run"), tiny.replace({"train.score_test": False})
    (workdir / "summary.json").unlink()
    assert "test_accuracy" not in loop.train(config, workdir)
    weighted = read_json(workdir / "model.json") | {"lane_weights": [0.5, 1.5]}  # as `tiers split` fits them
    files.write_json(workdir / "model.json", weighted)
    assert loop.train(tiny, workdir)["test_accuracy"] == read_json(finished / "summary.json")["test_accuracy"]
    assert read_json(workdir / "model.json") == weighted, "the lanes are as they were"


@pytest.mark.long
def test_fine_tuning_keeps_what_fits(tiny, finished, tmp_path, monkeypatch):
    donor = params_of(finished)
    load = datasets.load

    def four_classes(name, **kwargs):
        full = load(name, **kwargs)
        train_split, test_split = (split[np.flatnonzero(split.labels < 4)] for split in (full.train, full.test))
        return datasets.Dataset("four", train_split, test_split, full.class_names[:4], full.provenance)

    monkeypatch.setattr(datasets, "load", four_classes)
    config = tiny.replace({"init_from": str(finished), "train.num_steps": 1, "train.learning_rate": 1e-12})
    loop.train(config, tmp_path / "four")
    tuned = params_of(tmp_path / "four")
    for name in ("conv1", "primary"):
        ours, theirs = (p["encoder"]["mlcn1_w1d1"][name]["kernel"] for p in (tuned, donor))
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    np.testing.assert_allclose(tuned["decoder"]["hidden2"]["kernel"], donor["decoder"]["hidden2"]["kernel"], atol=1e-9)
    assert tuned["encoder"]["mlcn1_w1d1"]["capsule_weights"].shape[-1] == 4
    with pytest.raises(InputError, match="that does not match this one:\n  lanes"):
        loop.train(config.replace({"model.lanes": "mlcn1:w2*2"}), tmp_path / "other")
    with pytest.raises(InputError, match="that does not match this one:\n  signed_pixels: False there, True now"):
        loop.train(config.replace({"model.signed_pixels": True}), tmp_path / "other")
    loop.train(config.replace({"model.lanes": "mlcn1:w1d1,mlcn1:w1"}), tmp_path / "same lanes in other words")


def test_fine_tuning_starts_from_a_packaged_model_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder has that name
    donor = load_trained(pretrained.find_workdir("digits"))
    config = read_stored(pretrained.find_workdir("digits")).replace({"init_from": "digits"})
    session = types.SimpleNamespace(config=config, spec=donor.spec, optimizer=optax.sgd(0.1), train=None)
    monkeypatch.setattr("mlcn_jax.training.start.whiten_from", None)  # the donor's lanes are whitened
    state, _ = start_state(session, Checkpoints(tmp_path / "checkpoints"))
    assert_same_bits(donor.params, state.params)


def test_a_profile_is_written(tiny, tmp_path):
    loop.train(tiny.replace({"profile": True, "train.num_steps": 7, "train.checkpoint_every": 0}), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_workdir_that_cannot_be_written_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        loop.train(tiny, tmp_path / "file" / "sub")


def test_a_run_on_other_data_is_refused_and_left_as_it_is(tiny, copied, monkeypatch):
    load = datasets.load

    def one_image_less(name, **kwargs):
        full = load(name, **kwargs)
        return dataclasses.replace(full, train=full.train[1:])

    monkeypatch.setattr(datasets, "load", one_image_less)
    before = {name: (copied / name).read_text() for name in ("config.json", "model.json", "summary.json")}
    with pytest.raises(
        InputError, match="a run on different data or with another teacher:\n  training_images_sha256: "
    ):
        loop.train(tiny.replace({"train.num_steps": 30}), copied)
    assert before == {name: (copied / name).read_text() for name in before}


def test_a_workdir_in_use_is_refused(tiny, tmp_path):
    with files.hold(tmp_path), pytest.raises(InputError, match="another process is using"):
        loop.train(tiny, tmp_path)


def test_parameters_without_a_finite_loss_are_never_saved(tiny, tmp_path):
    """The loss of the last step is that before its update, and says nothing of what is saved."""
    with pytest.raises(Diverged, match="step 1: the loss after it is nan"):
        loop.train(tiny.replace({"train.learning_rate": 1e38, "train.num_steps": 1}), tmp_path)
    with pytest.raises(InputError, match="holds no checkpoint yet"):
        load_trained(tmp_path)


def test_fewer_steps_than_were_made_end_where_the_run_stands(tiny, copied):
    (copied / "summary.json").unlink()
    summary = loop.train(tiny.replace({"train.num_steps": 5}), copied)
    assert summary["steps"] == summary["best_step"] == load_trained(copied).step == 20
    assert summary["steps_this_session"] == 0


def test_a_signal_before_the_first_step_stops(tiny, tmp_path, monkeypatch):

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return compile_step(*args)

    monkeypatch.setattr(mesh_runner, "compile_step", interrupted)
    with pytest.raises(Stopped, match="SIGINT before step 1"):
        loop.train(tiny, tmp_path)
    assert not (tmp_path / "summary.json").exists()

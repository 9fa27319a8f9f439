"""Lanes removed: against dropped columns, and the command from a trained run to a smaller one that trains on."""

import dataclasses
import json
import logging
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from conftest import TINY
from made_params import made_params
from PIL import Image

from mlcn_jax.analysis import evaluate_workdir, prune
from mlcn_jax.analysis import prune_report as script
from mlcn_jax.commands import front
from mlcn_jax.commands import prune as command_prune
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn import model
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.placement import cost
from mlcn_jax.training import evaluate, loop, start
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.teacher import TEACHERS
from mlcn_jax.training.trained import load_trained

LANES = "mlcn1:w1*2,mlcn2:w1"
SPEC = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn1:w1*2,mlcn2:w1*3,mlcn1:w1d2", decoder=(6,), conv="native")


@pytest.fixture(scope="module")
def config():
    changes = {"model.lanes": LANES, "data.validation_fraction": 0.1, "train.learning_rate": 3e-3}
    return RunConfig().replace({**TINY, **changes})


@pytest.fixture(scope="module")
def workdir(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    loop.train(config, folder)
    return folder


@pytest.fixture(scope="module")
def run(workdir):
    return prune.load_prunable(workdir)


@pytest.fixture(scope="module")
def pruned(workdir, tmp_path_factory):
    """The command's smaller model and its other files: one lane of three removed."""
    folder = tmp_path_factory.mktemp("pruned")
    script.measure_and_prune(
        [workdir], order="alone", rounds=2, results=folder / "results", output=folder / "small", keep=2
    )
    return folder


@pytest.fixture(scope="module")
def params():
    return made_params(SPEC)


@pytest.fixture(scope="module")
def images():
    return jnp.asarray(np.random.default_rng(0).random((4, 18, 18, 1)), jnp.float32)


@pytest.fixture(scope="module")
def whole(params, images):
    """Class capsules of the whole model."""
    return jax.jit(model.encode, static_argnums=0)(SPEC, params["encoder"], images)


@pytest.mark.parametrize(
    ("kept", "lanes"),
    [
        ((0, 1, 2, 3, 4, 5), "mlcn1:w1d1*2,mlcn2:w1d1*3,mlcn1:w1d2*1"),
        ((1, 2, 4), "mlcn1:w1d1*1,mlcn2:w1d1*2"),
        ((5,), "mlcn1:w1d2*1"),
    ],
)
def test_the_smaller_model_is_the_whole_one_without_the_columns(params, images, whole, kept, lanes):
    classes = jnp.array([0, 1, 2, 1])
    smaller = spec_of(SPEC, kept)
    assert smaller == dataclasses.replace(SPEC, lanes=lanes)
    apply = jax.jit(model.apply_model, static_argnums=0)
    v, reconstructions = apply(smaller, prune.prune_params(SPEC, params, kept), images, classes)
    np.testing.assert_allclose(v, whole[:, :, np.array(kept)], rtol=1e-5, atol=1e-6)
    masked = whole * jnp.isin(jnp.arange(6), np.array(kept))[None, None]
    expected = model.reconstruct(SPEC, params["decoder"], masked, classes)
    np.testing.assert_allclose(reconstructions, expected, rtol=1e-5, atol=1e-6)


def test_computation_falls_with_the_lanes(params, images):
    def flops(kept):
        spec, smaller = spec_of(SPEC, kept), prune.prune_params(SPEC, params, kept)
        return cost.matmul_flops(lambda p, x: model.encode(spec, p, x), smaller["encoder"], images)

    assert flops([0]) * 2 == flops([0, 1])
    assert flops([0, 1]) + flops([3]) + flops([5]) == flops([0, 1, 3, 5])


def test_an_accuracy_of_dropped_columns_is_that_of_the_smaller_model(workdir, run):
    v = evaluate.class_capsules(run.spec, run.params, run.test, batch_size=50)
    assert v.shape == (len(run.test.labels), 10, 3)
    curve = prune.accuracy_curve(v, run.test.labels, [1, 2, 0])
    smaller = [prune.prune_run(run, kept) for kept in ([0, 2], [0])]
    assert curve[1:] == [small.scores(run.test).accuracy for small in smaller]
    assert curve[0] == json.loads((workdir / "summary.json").read_text())["test_accuracy"]
    assert curve[0] > curve[2]
    alone = prune.accuracy_without(v, run.test.labels)
    assert alone[1] == curve[1]


def test_the_optimizer_keeps_what_it_knows_of_the_parameters_that_stay(run):
    twice = jax.tree.map(lambda leaf: 2 * leaf, run.params)
    optimizer = optax.tree.set(run.optimizer, mu=run.params, nu=twice)
    small = prune.prune_run(dataclasses.replace(run, optimizer=optimizer), [1, 2])
    jax.tree.map(np.testing.assert_array_equal, optax.tree.get(small.optimizer, "mu"), small.params)
    jax.tree.map(
        lambda nu, p: np.testing.assert_array_equal(nu, 2 * p), optax.tree.get(small.optimizer, "nu"), small.params
    )


def test_a_pruned_run_recomputes_activations_as_before_if_its_lanes_need_it(run):
    full = dataclasses.replace(run, config=run.config.replace({"model.remat": "full"}))
    assert prune.prune_run(full, [0, 2]).config.model["remat"] == "full"
    assert prune.prune_run(run, [0, 2]).config.model["remat"] == "none"


def test_a_pruned_student_goes_on_with_its_teacher_wherever_that_is_and_with_no_other(config, workdir, tmp_path):
    student, small = shutil.copytree(workdir, tmp_path / "student"), tmp_path / "small"
    write_json(student / "config.json", config.replace({"train.teacher": "here"}).to_dict())
    write_json(student / "model.json", read_json(student / "model.json") | {TEACHERS: ["a", "b"]})
    prune.save_run(prune.prune_run(prune.load_prunable(student), [0, 2]), small, None, {})
    mine = read_json(small / "model.json")
    assert mine[TEACHERS] == ["a", "b"]
    moved = SimpleNamespace(config=read_stored(small).replace({"train.teacher": "there"}))
    start.check_resumable(moved, small, mine)
    with pytest.raises(InputError, match=f"with another teacher:\n  {TEACHERS}"):
        start.check_resumable(SimpleNamespace(config=read_stored(small)), small, mine | {TEACHERS: ["c"]})


def test_lanes_are_ordered_from_the_least_useful_on():
    labels = np.array([0, 1, 0, 1])
    truth = np.eye(2)[labels]
    v = np.stack([0.1 * (1 - truth), 0.8 * truth, 0.3 * truth], axis=-1).astype(np.float32)
    np.testing.assert_array_equal(prune.accuracy_without(v, labels), [1, 1, 1])
    v[3] = [[0.9, 0, 0.1], [0, 0.8, 0.2]]  # lane 0 misleads
    np.testing.assert_array_equal(prune.accuracy_without(v, labels), [1, 0.75, 0.75])
    assert prune.ORDERS["alone"](v, labels) == [0, 1, 2]
    assert prune.accuracy_curve(v, labels, [2, 1, 0]) == [0.75, 0.75, 0]


def test_greedy_order_keeps_one_of_two_equal_lanes():
    labels = np.array([0, 1, 0, 1, 1])
    truth = np.eye(2)[labels]
    most, few = (np.where(np.isin(np.arange(5), own)[:, None], truth, 0.5) for own in ((0, 1, 2, 3), (0, 4)))
    v = np.stack([0.5 * most, 0.5 * most, 0.9 * few], axis=-1).astype(np.float32)  # undecided of the other images
    assert prune.ORDERS["alone"](v, labels) == [0, 1, 2]
    assert prune.ORDERS["greedy"](v, labels) == [0, 2, 1]


@pytest.mark.parametrize("order", prune.ORDERS)
def test_among_equals_the_lane_that_is_better_by_itself_stays_and_one_of_weight_0_goes_first(order):
    labels = np.array([1, 0, 1, 0])
    truth = np.eye(2)[labels]
    weak = np.where(np.arange(4)[:, None] < 2, truth, 1 - truth)
    for weight in (0.0, 0.1):
        v = np.stack([truth, truth, weight * weak], axis=-1).astype(np.float32)
        assert prune.ORDERS[order](v, labels) == [2, 0, 1]
    misleading = np.stack([1 - truth, 0 * truth], axis=-1).astype(np.float32)
    assert prune.ORDERS[order](misleading, labels) == [1, 0]


def test_a_drop_of_accuracy_is_judged_in_percentage_points_of_the_ranking_images():
    accuracies = ((0.9, 0.9), (0.897, 0.5), (0.89, 0.9), (0.895, 0.1), (0.2, 0.9))
    entry = {"removed": [{"ranking_accuracy": ranking, "test_accuracy": test} for ranking, test in accuracies]}
    assert [script.fewest_lanes(entry, drop) for drop in (0.0, 0.3, 0.5, 1.0, 100.0)] == [5, 4, 2, 2, 1]


def test_the_command_measures_and_writes(workdir, run, pruned):
    results = json.loads((pruned / "results" / "prune.json").read_text())
    (entry,) = results["runs"]
    assert results["device"]
    assert (entry["workdir"], entry["lanes"], entry["ranking_from"]) == (str(workdir), LANES, "validation")
    assert entry["ranking_images"] == len(run.ranking.labels)
    assert entry["removed"][0]["test_accuracy"] == json.loads((workdir / "summary.json").read_text())["test_accuracy"]
    assert [row["lane"] for row in entry["removed_alone"]] == [0, 1, 2]
    without = [row["ranking_accuracy"] for row in entry["removed_alone"]]
    assert [without[lane] for lane in entry["removal_order"]] == sorted(without, reverse=True)
    assert entry["removed"][1]["ranking_accuracy"] == max(without)
    assert all(row["milliseconds"]["min"] > 0 for row in entry["removed"])
    assert entry["removed"][0]["speedup"] == {"median": 1, "min": 1, "max": 1}
    flops = [row["encoder_flops_per_image"] for row in entry["removed"]]
    assert flops == sorted(flops, reverse=True)
    with Image.open(pruned / "results" / "prune.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_a_run_that_leaves_the_test_set_alone_is_pruned_without_it(run, monkeypatch):
    silent = dataclasses.replace(run, config=run.config.replace({"train.score_test": False}))
    scored, capsules = [], prune.weighted_capsules
    monkeypatch.setattr(prune, "weighted_capsules", lambda own, *rest: scored.append(rest[0]) or capsules(own, *rest))
    entry = {"workdir": "run", **script.analyse(silent, "alone", 0)}
    _, facts = script.shrink(silent, entry, 1)
    assert [len(split.labels) for split in scored] == [len(run.ranking.labels)]
    shown = script.table(entry) + script.told(facts, script.Path("small"), "train")
    assert "validation accuracy" in shown
    assert "test" not in shown + str(sorted(entry["removed"][0])) + str(sorted(facts)).replace("test_images", "")
    figure = script.draw([entry | {"workdir": "runs/r$#$"}])
    figure.canvas.draw()  # it is no formula
    assert figure.legends[0].get_texts()[0].get_text().startswith("r\\$#\\$, ")


def test_the_smaller_model_evaluates_as_reported(pruned):
    about = json.loads((pruned / "small" / "pruned.json").read_text())
    small = load_trained(pruned / "small")
    (entry,) = json.loads((pruned / "results" / "prune.json").read_text())["runs"]
    assert about["kept_lanes"] == sorted(entry["removal_order"][1:])
    for name in ("ranking_accuracy", "test_accuracy"):
        assert about[name] == {"before": entry["removed"][0][name], "after": entry["removed"][1][name]}
    assert about["parameters"]["after"] == model.count_parameters(small.spec)["total"]
    assert about["parameters"]["after"] < about["parameters"]["before"]
    scores = evaluate_workdir.evaluate_workdir(read_stored(pruned / "small"), pruned / "small")
    assert scores["test_accuracy"] == about["test_accuracy"]["after"]
    assert scores["step"] == about["step"]


@pytest.mark.parametrize("changes", [{"train.lookahead": 0.5}, {"train.optimizer": "sgd"}])
def test_a_run_that_depends_on_its_length_is_trained_on_as_a_new_one(run, tmp_path, changes):
    command = script.fine_tuning(dataclasses.replace(run, config=run.config.replace(changes)), tmp_path / "small")
    assert f"--workdir={tmp_path / 'small_tuned'}" in command
    assert f"--config.init_from={tmp_path / 'small'}" in command


def test_the_printed_command_trains_the_smaller_model_on(run, pruned, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "_FINE_TUNING_EPOCHS", 1)
    small = shutil.copytree(pruned / "small", tmp_path / "small")
    command = shlex.split(script.fine_tuning(prune.load_prunable(small), small))
    command = command[command.index("train") :]
    assert command[:3] == ["train", "--config=default", f"--workdir={small}"]
    changes = dict(argument.removeprefix("--config.").split("=", 1) for argument in command[3:])
    before = load_trained(small)
    summary = loop.train(RunConfig.from_dict({}).replace(changes), small)
    steps = run.steps_per_epoch * 2  # pruned within the first epoch, and one more
    assert (summary["steps"], summary["steps_this_session"]) == (steps, steps - before.step)
    assert summary["parameters"] == model.count_parameters(before.spec)["total"]
    assert summary["test_accuracy"] > json.loads((small / "pruned.json").read_text())["test_accuracy"]["after"]
    checkpoints = Checkpoints(small / "checkpoints", read_only=True)
    assert checkpoints.best_step() > before.step
    checkpoints.close()


def test_adamw_trains_on_as_a_new_run(run):
    adamw = dataclasses.replace(run, config=run.config.replace({"train.optimizer": "adamw"}))
    command = shlex.split(script.fine_tuning(adamw, Path("runs/small")))
    assert {"--config.init_from=runs/small", "--workdir=runs/small_tuned", "--config.train.num_epochs=5"} <= set(
        command
    )


def test_lanes_are_never_ranked_on_test_images(config, run, workdir, tmp_path, monkeypatch):
    dataset = config.data.load()
    _, validation = datasets.split_validation(dataset.train, 0.1, config.train.seed)
    np.testing.assert_array_equal(run.ranking.images, validation.images)
    without = shutil.copytree(workdir, tmp_path / "without")
    (without / "config.json").write_text(json.dumps(config.replace({"data.validation_fraction": 0.0}).to_dict()))
    about = json.loads((without / "model.json").read_text())
    about["training_images_sha256"] = datasets.digest(dataset.train)
    (without / "model.json").write_text(json.dumps(about))
    monkeypatch.setattr(datasets, "_RANKING_IMAGES", 60)
    drawn = prune.load_prunable(without)
    assert (drawn.ranking_from, len(drawn.ranking.labels)) == ("training", 60)
    images = {image.tobytes() for image in dataset.train.images}
    assert {image.tobytes() for image in drawn.ranking.images} <= images
    np.testing.assert_array_equal(drawn.ranking.labels, prune.load_prunable(without).ranking.labels)


def test_two_runs_are_drawn_together(workdir, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mlcn_jax")
    script.measure_and_prune([workdir, workdir], order="greedy", rounds=0, results=tmp_path)
    first, second = json.loads((tmp_path / "prune.json").read_text())["runs"]
    assert first == second
    assert "speedup" not in first["removed"][0]
    assert (tmp_path / "prune.png").stat().st_size > 1000
    assert f"loading {workdir}, {workdir}, and the images" in caplog.messages
    assert sum(message.startswith("scoring 3 lanes on ") for message in caplog.messages) == 2


def test_a_picture_that_cannot_be_drawn_costs_neither_results_nor_the_smaller_model(workdir, tmp_path):
    (tmp_path / "prune.png").mkdir()
    small = tmp_path / "small"
    with pytest.raises(OSError, match=r"prune\.png"):
        script.measure_and_prune([workdir], order="alone", rounds=0, results=tmp_path, output=small, keep=2)
    assert len(json.loads((tmp_path / "prune.json").read_text())["runs"]) == 1
    assert len(prune.load_prunable(small).lanes) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workdirs": []}, "--workdir=FOLDER"),
        ({"workdirs": ["a", ""]}, "--workdir=FOLDER"),
        ({"keep": 0}, "--keep=0.*at least 1 lane"),
        ({"keep": -1}, "--keep=-1.*at least 1 lane"),
        ({"keep": 2, "max_drop": 1.0}, "--keep or --max_accuracy_drop"),
        ({"max_drop": -0.1}, "max_accuracy_drop=-0.1.*0 or more"),
        ({"max_drop": float("nan")}, "max_accuracy_drop=nan"),
        ({"keep": 2, "output": ""}, "needs --output=FOLDER"),
        ({}, "either --keep or --max_accuracy_drop"),
        ({"keep": 2, "workdirs": ["a", "b"]}, "a single --workdir"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    given = {"workdirs": ["a"], "keep": None, "max_drop": None, "output": "small", **flags}
    with pytest.raises(InputError, match=message):
        command_prune.check_flags(**given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep=0", "--output=small"], r"^--keep=0: at least 1 lane must be kept$"),
        (["--keep=2", "--output=small", "--results=small/prune"], "^--results=small/prune is "),
        (["--keep=two"], "^flag --keep=two: "),
    ],
)
def test_the_command_refuses_with_one_message(flags, message):
    with pytest.raises(InputError, match=message):
        front.run(["prune", "--workdir=none", *flags])


def test_more_lanes_than_there_are_cannot_be_kept(workdir, tmp_path):
    with pytest.raises(InputError, match=r"--keep=4: .* has 3 lanes; keep 1 to 3"):
        script.measure_and_prune([workdir], order="alone", rounds=0, results=tmp_path, output=tmp_path / "o", keep=4)
    with pytest.raises(InputError, match="at least one lane"):
        spec_of(SPEC, [])


@pytest.mark.parametrize("used", ["same", "file"])
def test_nothing_is_overwritten(workdir, tmp_path, used):
    output = {"same": workdir, "file": tmp_path / "file"}[used]
    (tmp_path / "file").touch()
    before = sorted(workdir.rglob("*"))
    with pytest.raises(InputError, match="already exists"):
        script.measure_and_prune([workdir], order="alone", rounds=0, results=tmp_path, output=output, keep=1)
    assert sorted(workdir.rglob("*")) == before


def test_what_is_no_run_with_lanes_on_its_images_is_refused(config, workdir, tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        prune.load_prunable(tmp_path)
    capsnet = config.replace({"model.name": "capsnet", "model.lanes": ""})
    (tmp_path / "config.json").write_text(json.dumps(capsnet.to_dict()))
    with pytest.raises(InputError, match="holds a capsnet, which has no lanes"):
        prune.load_prunable(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(InputError, match="holds no trained model"):
        prune.load_prunable(tmp_path)
    other = shutil.copytree(workdir, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(config.replace({"train.seed": 1}).to_dict()))  # another split
    with pytest.raises(InputError, match=r"digits is not the data that .* was trained on"):
        prune.load_prunable(other)


def test_a_folder_that_cannot_be_written_leaves_nothing(run, workdir, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for place, name in ((prune, "write_json"), (ocp.CheckpointManager, "save")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(InputError, match=r"--output=.*small cannot be written .(?i:no space left)"):
                prune.save_run(run, tmp_path / "small", None, {})
        assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--results"):
        script.measure_and_prune([workdir], order="alone", rounds=0, results=tmp_path / "file" / "results")

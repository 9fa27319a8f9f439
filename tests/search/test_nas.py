"""The search command: what it writes, its resumption, and the config that `train` takes."""

import dataclasses
import json
import logging
import os
import random
import runpy
from types import SimpleNamespace

import pytest

from configs import nas_cifar, nas_quickstart
from experiments import nas_compare
from mlcn_jax.analysis import describe
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.search import report, setup
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search.run import _model_bytes, run, work
from mlcn_jax.search.trials import Trainer


def make_config(**search):
    config = nas_quickstart.get_config()
    config.model.decoder, config.model.conv = (16,), "native"
    config.search.update({"num_models": 3, "num_epochs": 1, "num_images": 200, "max_width": 2, "max_depth": 1})
    config.search.update({"baseline": "mlcn2:w1*4", "devices": "flops=0.5x*2", "heartbeat_seconds": 1, **search})
    return setup.read_config(config.to_dict())


@pytest.mark.long
def test_a_search_from_beginning_to_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config, settings = make_config()
    summary = run(config, settings, tmp_path)
    steps = ("loading the data", "computing what lanes cost", "training the baseline", "to score it on the test set")
    assert [any(step in message for message in caplog.messages) for step in (*steps, "drawing")] == [True] * 5
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert [row["model"] for row in trials] == ["baseline", 0, 1, 2]
    best = max(trials[1:], key=lambda row: row["accuracy"])
    assert summary["best"]["model"] == best["model"]
    assert summary["best"]["validation_accuracy"] == best["accuracy"]
    assert summary["models"] == {"complete": 3}
    lanes = [row["lanes"] for row in trials[1:]]
    assert summary["distinct_mixes"] == len(set(lanes))
    assert [row["repeat_of"] for row in trials[1:]] == [
        lanes.index(one) if lanes.index(one) < i else None for i, one in enumerate(lanes)
    ]
    for name in ("search.png", "trials.md", "summary.json"):
        assert (tmp_path / name).stat().st_size > 0

    found = RunConfig.from_dict(runpy.run_path(str(tmp_path / "best_config.py"))["get_config"]().to_dict())
    assert found == config.replace({"model.lanes": best["lanes"]})
    described = describe.describe(found)
    assert sum(described["lane_costs"][lane]["step_flops"] for lane in described["lanes"]) == best["step_flops"]
    assert sum(device["flops"] for device in best["devices"]) == pytest.approx(best["step_flops"])

    again = run(config, settings, tmp_path)
    assert again["session"]["evaluate_seconds"] == 0.0
    assert again["best"] == summary["best"]
    work(config, settings, tmp_path)  # a worker finds nothing to do
    with pytest.raises(InputError, match=r"search.max_width: 2 there, 1 now"):
        run(*make_config(max_width=1), tmp_path)


@pytest.mark.long
def test_when_every_model_fails_the_first_reason_is_given(tmp_path):
    config, settings = make_config(num_models=1)
    with pytest.raises(InputError, match="no model was trained to the end; the first failed with Diverged"):
        run(config.replace({"train.learning_rate": 1e30}), settings, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "checkpoints"])
def test_a_training_run_is_not_written_over(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"holds a training run .{name}., not a search: give another --workdir"):
        run(*make_config(), tmp_path)
    assert not (tmp_path / "search.db").exists()


def test_the_database_is_in_the_workdir_whatever_its_name(tmp_path):
    folder = tmp_path / "a%20b #é"
    folder.mkdir()
    setup.open_search(*make_config(), folder, create=True)
    assert (folder / "search.db").is_file()
    assert os.listdir(tmp_path) == [folder.name]


def test_a_search_does_not_go_on_with_another_rounding(tmp_path):
    config, settings = make_config()
    setup.open_search(config, settings, tmp_path, create=True)
    with pytest.raises(InputError, match=r"parallel.exchange_dtype: 'float32' there, 'bfloat16' now"):
        setup.open_search(config.replace({"parallel.exchange_dtype": "bfloat16"}), settings, tmp_path, create=True)


def test_a_worker_without_a_search_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="start it first, with the same command without --worker"):
        work(*make_config(), tmp_path)


def test_configs_that_cannot_be_used():
    values = nas_quickstart.get_config().to_dict()
    with pytest.raises(InputError, match="has no search fields"):
        setup.read_config({name: value for name, value in values.items() if name != "search"})
    with pytest.raises(InputError, match=r"search.num_models is 2.5"):
        setup.read_config({**values, "search": {**values["search"], "num_models": 2.5}})
    with pytest.raises(InputError, match=r"no field search.surprise"):
        setup.read_config({**values, "search": {**values["search"], "surprise": 1}})
    for field, value in (("train.score_test", False), ("train.rounds.steps", 5), ("init_from", "digits")):
        changed = RunConfig.from_dict(values).replace({field: value}).to_dict()
        with pytest.raises(InputError, match=f"{field} is {value!r}, but "):
            setup.read_config({**changed, "search": values["search"]})


def test_settings_that_some_lanes_cannot_be_trained_with_are_refused_at_once():
    config, settings = make_config(kinds="resnet,mlcn1")
    setup.make_space(config, settings)
    with pytest.raises(InputError, match=r"search\.kinds=resnet,mlcn1: data\.augment_lanes is True"):
        setup.make_space(config.replace({"data.augment_lanes": True}), settings)
    with pytest.raises(InputError, match=r"search\.kinds=resnet,mlcn1: batches of 60 images .*norm_group=25"):
        setup.make_space(config.replace({"train.batch_size": 60, "model.norm_group": 25}), settings)
    with pytest.raises(InputError, match=r"search\.kinds=resnet,mlcn1: .* leave model\.ensemble_weight at 0"):
        setup.make_space(config.replace({"model.ensemble_weight": 0.2}), settings)


def test_workers_wait_for_the_memory_that_models_take_here_whatever_the_published_formula_says():
    config, settings = make_config(costs="published", devices="memory=12GiB flops=1x*2")
    space, exact = (
        setup.make_space(config, dataclasses.replace(settings, costs=one)) for one in settings_lib.COSTS[::-1]
    )
    trainer, mix = Trainer(config, 1, 1, 200), space.draw(random.Random(0))
    found = SimpleNamespace(config=config, settings=settings, space=space, trainer=trainer)
    assert _model_bytes(found, mix) == pytest.approx(5 * exact.memory_bytes(mix)), "with work space"
    assert space.memory_bytes(mix) > 100 * exact.memory_bytes(mix)


def test_the_thesis_setting_is_four_baselines_on_each_of_eight_devices():
    config, settings = setup.read_config(nas_cifar.get_config().to_dict())
    assert (settings.num_models, settings.num_epochs, settings.num_repeats, config.train.batch_size) == (64, 10, 4, 100)
    assert settings.devices == "memory=12GiB flops=4x*8"
    assert settings.baseline == "mlcn2:w2d4*4"


def test_best_so_far_counts_the_seconds_of_those_that_were_stopped():
    rows = [
        {"model": 0, "ended": 1.0, "state": "complete", "accuracy": 0.5, "train_seconds": 4.0},
        {"model": 1, "ended": 2.0, "state": "stopped early", "accuracy": 0.9, "train_seconds": 1.0},
        {"model": "baseline", "ended": 0.5, "state": "complete", "accuracy": 0.8, "train_seconds": 4.0},
        {"model": 2, "ended": 3.0, "state": "complete", "accuracy": 0.6, "train_seconds": 4.0},
    ]
    assert report.best_so_far(rows) == ([4.0, 5.0, 9.0], [0.5, 0.5, 0.6])
    assert report.pareto([(3.0, 0.6), (1.0, 0.5), (2.0, 0.4), (4.0, 0.6)]) == [(1.0, 0.5), (3.0, 0.6)]


def test_methods_are_compared_at_equal_seconds():
    def run(method, spent, best):
        return {
            "method": method,
            "seed": 0,
            "spent": spent,
            "best_so_far": best,
            "accuracies": best,
            "session": {"wall_seconds": 1.1, "evaluate_seconds": 1.0},
            "models": {"complete": 2, "waiting": 3},
            "best": {"test_accuracies": [0.4]},
        }

    rows = nas_compare.table([run("random", [5.0, 10.0], [0.4, 0.6]), run("evolution", [2.0, 4.0], [0.3, 0.7])])
    assert [row["as_good_as_random_after"] for row in rows] == [[1.0], [0.4]]
    assert [row["mean_as_good_as_random_after"] for row in rows] == [1.0, 0.4]
    assert rows[0]["overhead"] == pytest.approx(0.1)
    assert rows[1]["begun"] == 2
    rows[1]["begun"] = 3
    means = [line.split(" | ")[3] for line in nas_compare.told({"methods": rows}).splitlines()[2:]]
    assert means == ["50.00%", "-"], "a mean of those that were kept is not comparable"

"""What the experiments on lanes trained apart run, and what they compute from it."""

import random
from types import SimpleNamespace

import pytest
from absl import flags

from experiments import lane_pool, lanes_apart
from mlcn_jax.files import write_json
from mlcn_jax.training.apart import check_lanes_apart

NOWHERE = {"fashion_mnist": "", "cifar10": ""}


@pytest.mark.parametrize("part", list(lanes_apart.PARTS))
def test_lanes_of_a_part_train_apart_on_the_same_images_as_those_trained_together(part):
    runs = lanes_apart.runs_of(part, repeats=1, smoke=False)
    configs = [lanes_apart.configure_run(NOWHERE, **facts) for facts in runs]
    for facts, config in zip(runs, configs, strict=True):
        if facts["mode"] != "together":
            check_lanes_apart(config, config.model_spec(*config.data.shape()))
        assert (config.split_seed, config.data.validation_fraction) == (0, 0.1)
    pairs = lanes_apart.PARTS[part].num_pairs
    assert sum(facts["mode"] == "together" for facts in runs) == pairs
    assert len({tuple(facts.items()) for facts in runs}) == len(runs)
    joins = lanes_apart.joins_of(part, runs)
    assert [len(joins[f"{part}_pair{i}"]) for i in range(pairs)] == [4] * pairs
    assert [len(joins[f"{part}_{kind}"]) for kind in lanes_apart.KINDS] == [16, 16]
    joined = [tuple(one.items()) for i in range(pairs) for one in joins[f"{part}_pair{i}"]]
    assert len(set(joined)) == len(joined)
    assert len({one["lane"] for one in joins[f"{part}_mixed"]}) > 1


def test_the_interval_is_students():
    found = lanes_apart.interval([0.1, 0.3, -0.1, 0.2])
    assert found["mean"] == pytest.approx(0.125)
    assert (found["low"], found["high"]) == pytest.approx((0.125 - 0.27175, 0.125 + 0.27175), abs=1e-4)
    assert lanes_apart.interval([0.1]) is None
    assert not found["inside"]
    assert lanes_apart.interval([0.0, 0.1, 0.05, -0.05])["inside"]


def series_in(workdir, kept=()):
    records = [{"facts": facts} for facts in kept]
    return SimpleNamespace(workdir=workdir, scale=SimpleNamespace(name="none"), kept_records=lambda: records)


def test_lanes_are_joined_as_soon_as_they_have_been_trained_and_once(tmp_path, monkeypatch):
    joins = lanes_apart.joins_of("cifar", lanes_apart.runs_of("cifar", repeats=1, smoke=False))
    series, joined = series_in(tmp_path), []

    def join(workdirs, output, decoder_epochs, weights="fitted"):
        joined.append((output.name, decoder_epochs))
        output.mkdir(parents=True)
        return {}

    monkeypatch.setattr(lanes_apart, "join", join)
    first, second = ([lanes_apart.folder_of(series, one) for one in joins[f"cifar_pair{i}"]] for i in range(2))
    for folder in (*first, *second):
        folder.mkdir(parents=True)
    for folder, record in (*((folder, {}) for folder in (*first, *second[:3])), (second[3], {"failed": "nan"})):
        write_json(folder / "run.json", record)
    (tmp_path / "joined" / "cifar_pair0.equal").mkdir(parents=True)  # left by one that was killed
    for _ in range(2):
        lanes_apart.join_due(series, joins)
    assert joined == [("cifar_pair0", 5), ("cifar_pair0.equal", 0)]
    assert [path.name for path in (tmp_path / "joined").iterdir()] == ["cifar_pair0.json"]


def test_a_model_joined_elsewhere_counts_while_its_lanes_have_the_settings_of_now(tmp_path, monkeypatch):
    joins = lanes_apart.joins_of("cifar", lanes_apart.runs_of("cifar", repeats=1, smoke=False))
    lanes = joins["cifar_pair0"]
    write_json(tmp_path / "kept.json", {"joined": {"cifar_pair0": {"lanes": lanes}}})
    monkeypatch.setattr(lanes_apart, "kept_results", lambda name, scale: tmp_path / "kept.json")
    assert list(lanes_apart.joined(series_in(tmp_path, lanes))) == ["cifar_pair0"]
    assert list(lanes_apart.joined(series_in(tmp_path, lanes[1:]))) == []


def test_what_is_run_is_what_there_is_to_run():
    values = flags.FlagValues()
    lanes_apart.define(values)
    values(["lanes_apart"])
    assert values.scale in lanes_apart.SCALES


def test_a_simulated_pool_trains_every_lane_and_loses_work_only_when_machines_leave():
    lanes = [1e9 * (1 + i % 3) for i in range(30)]
    order = sorted(range(len(lanes)), key=lambda i: -lanes[i])
    least = lane_pool.STEPS * sum(lanes) / (1e9 * sum(lane_pool.GFLOPS)) / 3600
    stay = lane_pool.simulate_pool(lanes, order, random.Random(0), leaving=False)
    assert stay.lost == 0
    assert least <= stay.hours < 2 * least
    assert len(stay.finished_hours) == 30
    heavy = [300 * lane for lane in lanes]
    leave = lane_pool.simulate_pool(heavy, order, random.Random(0))
    assert leave.hours > 300 * least
    assert 0 < leave.lost < 0.1
    assert len(leave.finished_hours) == 30

"""What the experiments on lanes trained apart run, and what they compute from it."""

import random
from collections import Counter
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
    for mode in lanes_apart.PARTS[part].together:
        assert sum(facts["mode"] == mode for facts in runs) == pairs
    seeds = [
        seed
        for facts, config in zip(runs, configs, strict=True)
        for seed in config.model["lane_seeds"]
        if facts["mode"] in ("apart", "alike") and facts["lane"] == runs[0]["lane"]
    ]
    assert len(set(seeds)) == len(seeds)
    assert len({tuple(facts.items()) for facts in runs}) == len(runs)
    joins = lanes_apart.joins_of(part, runs)
    assert [len(joins[f"{part}_pair{i}"]) for i in range(pairs)] == [4] * pairs
    assert [len(joins[f"{part}_{kind}"]) for kind in lanes_apart.KINDS] == [16, 16]
    joined = [tuple(one.items()) for i in range(pairs) for one in joins[f"{part}_pair{i}"]]
    assert len(set(joined)) == len(joined)
    of_size = Counter(one["lane"] for one in joins[f"{part}_mixed"])
    assert len(of_size) == 1 + len(lanes_apart.PARTS[part].others)
    assert max(of_size.values()) - min(of_size.values()) <= 1


def test_more_pairs_than_a_part_has_at_least_can_be_asked_for():
    for pairs, expected in ((0, 3), (2, 3), (5, 5)):
        runs = lanes_apart.runs_of("cifar", repeats=1, smoke=False, pairs=pairs)
        assert sum(facts["mode"] == "together" for facts in runs) == expected
        assert len(lanes_apart.joins_of("cifar", runs)[f"cifar_pair{expected - 1}"]) == 4


@pytest.mark.long
@pytest.mark.parametrize("part", list(lanes_apart.PARTS))
def test_single_lanes_cost_as_much_as_the_joined_ones_beside_which_they_stand(part):
    known = lanes_apart.PARTS[part]
    one = lanes_apart.training_megaflops(part, known.lane)
    for count, single in known.single.items():
        assert lanes_apart.training_megaflops(part, single) == pytest.approx(count * one, rel=0.06)


def test_a_lanes_cost_is_that_of_its_step_with_the_decoder():
    lane = 2 * 81 * (2 * 16 * 400 + 3 * 16 * 32 * 36) + 2 * 3 * 1152 * 10  # forward and gradients, without the image's
    decoder = 2 * (2 * 10 * 128 + 3 * (128 * 256 + 256 * 784))
    assert lanes_apart.training_megaflops("fashion", "mlcn2:w2") == pytest.approx((lane + decoder) / 1e6, rel=1e-3)


def test_the_interval_is_welchs_and_inside_only_with_enough_pairs():
    found = lanes_apart.interval([90.1, 90.3, 89.9, 90.2], [90.0, 90.6, 89.6, 90.2], 4)
    assert found["mean"] == pytest.approx(0.025)
    half = 2.7814 * 0.225  # of 3.98 degrees of freedom, and the standard error
    assert (found["low"], found["high"]) == pytest.approx((0.025 - half, 0.025 + half), abs=1e-3)
    assert not found["inside"]
    shifted = lanes_apart.interval([90.1, 90.3, 89.9, 90.2], [90.0, 90.2, 89.8, 90.1], 4)
    assert shifted["high"] - shifted["low"] == pytest.approx(2 * 2.44691 * 0.120761, abs=1e-4)
    assert lanes_apart.interval([0.1], [0.1], 1) is None
    close = ([90.0, 90.1, 90.05, 89.95], [90.05, 90.0, 89.95, 90.1])
    assert lanes_apart.interval(*close, 4)["inside"]
    assert not lanes_apart.interval(*close, 8)["inside"]


def test_each_way_of_training_together_is_compared_over_the_pairs_that_have_it():
    pairs = [
        {"weighted": 90.0 + i, "equal": 90.0, "together": 89.0 + i, "alike": 89.0 + 2 * i if i < 2 else None}
        for i in range(4)
    ]
    together, alike = (lanes_apart.difference(pairs, mode, 3) for mode in ("together", "alike"))
    assert (together["pairs"], alike["pairs"]) == (4, 2)
    assert (together["mean"], alike["mean"]) == pytest.approx((1.0, 0.5))
    assert together["means"] == pytest.approx([91.5, 90.5])
    assert lanes_apart.difference(pairs[:1], "together", 3)["pairs"] == 0
    assert lanes_apart.difference(pairs[2:], "alike", 3)["means"] == []


def series_in(workdir, kept=(), records=()):
    known = [{"facts": facts} for facts in kept]
    scale = SimpleNamespace(name="none")
    return SimpleNamespace(workdir=workdir, scale=scale, kept_records=lambda: known, records=lambda: list(records))


def test_accuracy_is_drawn_against_the_number_of_lanes_and_against_cost(tmp_path):
    lanes = [{"lane": "mlcn2:w2d1", "test_accuracy": share} for share in (0.85, 0.9, 0.95)]
    (tmp_path / "joined").mkdir()
    write_json(tmp_path / "joined" / "fashion_equal.json", {"lanes": [], "weighted": {"lanes": lanes}})
    single = {"facts": lanes_apart.one_of("fashion", "single", "mlcn2:w3d3", 0), "test_accuracy": 91.0}
    series = series_in(tmp_path, records=[single])
    by_lanes, _, by_cost, _ = lanes_apart.draw(series).axes
    joined, one = by_lanes.lines
    assert (list(joined.get_xdata()), list(joined.get_ydata())) == ([1, 2, 3], [85, 90, 95])
    assert (list(one.get_xdata()), list(one.get_ydata())) == ([4], [91])
    costs = [lanes_apart.training_megaflops("fashion", lane) for lane in ("mlcn2:w2", "mlcn2:w3d3")]
    joined, one = by_cost.lines
    assert list(joined.get_xdata()) == pytest.approx([costs[0], 2 * costs[0], 3 * costs[0]])
    assert list(one.get_xdata()) == costs[1:]
    assert f"| fashion, one mlcn2:w3d3 at the cost of 4 | 1 | {costs[1]:.3g} | 91.00 |" in lanes_apart.text(series)


def test_lanes_are_joined_as_soon_as_they_have_been_trained_and_once(tmp_path, monkeypatch):
    joins = lanes_apart.joins_of("cifar", lanes_apart.runs_of("cifar", repeats=1, smoke=False))
    series, joined = series_in(tmp_path), []

    def join(workdirs, output, decoder_epochs, weights="fitted"):
        joined.append((output.name, decoder_epochs))
        output.mkdir(parents=True)
        return {"workdirs": list(map(str, workdirs))}

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
    assert str(tmp_path) not in (tmp_path / "joined" / "cifar_pair0.json").read_text()


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

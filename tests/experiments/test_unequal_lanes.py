"""The comparison of unequal with equal lanes: what is trained, at what cost, and what is computed from it."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
from made_records import made_request

from experiments import repeated_runs, unequal_lanes
from mlcn_jax.errors import Stopped
from mlcn_jax.files import read_json, write_json
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement.cost import lane_cost
from mlcn_jax.search import setup

NOWHERE = {"cifar10": ""}


def step_flops(lanes):
    spec = unequal_lanes.recipe(NOWHERE, "resnet").model_spec((32, 32, 3), 10)
    costs = [lane_cost(group.spec, spec.lane_settings, spec.image_shape) for group in parse_lanes(lanes)]
    return sum(group.count * one.step_flops(500) for group, one in zip(parse_lanes(lanes), costs, strict=True))


@pytest.mark.parametrize("part", list(unequal_lanes.PARTS))
def test_models_of_all_arms_cost_the_same_and_those_that_are_drawn_are_unequal(part):
    config, settings = unequal_lanes.search_of(NOWHERE, part, "equal", smoke=False)
    space, limit = setup.make_space(config, settings), step_flops(unequal_lanes.GIVEN)
    equal, drawn = unequal_lanes.equal_mixes(space), unequal_lanes.random_mixes(space, 8)
    assert unequal_lanes.GIVEN in equal
    for lanes, kinds, least in (*((one, {1}, 0.9) for one in equal), *((one, range(2, 20), 0.95) for one in drawn)):
        assert least * limit <= step_flops(lanes) <= limit * (1 + 1e-9)
        assert len(parse_lanes(lanes)) in kinds
        assert len(unequal_lanes.recipe(NOWHERE, part).replace({"model.lanes": lanes}).model["lanes"]) > 0
    assert len(set(drawn)) == 8
    assert unequal_lanes.random_mixes(space, 3) == drawn[:3]


def test_runs_that_are_compared_differ_in_their_lanes_and_have_seeds_of_no_search():
    models = {"resnet": {"equal": ["resnet:w1d1*11"], "random": ["resnet:w1,resnet:w2", "resnet:w1,resnet:w3"]}}
    one, other = (unequal_lanes.configure_run(NOWHERE, models, "resnet", arm, 1) for arm in ("equal", "random"))
    assert other.model["lanes"] == models["resnet"]["random"][1]
    assert other.replace({"model.lanes": one.model["lanes"]}).hash() == one.hash()
    searched, _ = unequal_lanes.search_of(NOWHERE, "resnet", "tpe", smoke=False)
    assert searched.train.seed < 100 <= one.train.seed
    assert (one.data.validation_fraction, one.split_seed) == (0.2, searched.split_seed)


def test_the_interval_tells_differences_of_pairs_from_those_of_seeds(rng):
    """Seeds of very different models leave no trace in the interval of a difference that all pairs have."""
    images, lost = 2000, 100
    one = rng.random((8, images)) < np.linspace(0.5, 0.9, 8)[:, None]
    one[:, :lost] = True
    other = one.copy()
    other[:, :lost] = False
    found = unequal_lanes.interval(one, other)
    assert found["mean"] == pytest.approx(5.0)
    half = 2.365 * 100 * np.sqrt(0.05 * 0.95 / images)  # Student's for 8 pairs; over images, pairs add nothing
    assert (found["low"], found["high"]) == pytest.approx((5 - half, 5 + half), abs=0.01)
    assert not found["visible"]
    shifted = np.zeros((4, images), bool)
    shifted[:2] = True  # by pairs: 1, 1, 0, 0
    half = 3.182 * 100 * np.sqrt(1 / 3 / 4)
    found = unequal_lanes.interval(shifted, np.zeros_like(shifted))
    assert (found["low"], found["high"]) == pytest.approx((50 - half, 50 + half), abs=0.1)
    same = unequal_lanes.interval(one, one)
    assert (same["mean"], same["low"], same["high"], same["visible"]) == (0, 0, 0, True)


def test_the_interval_is_as_wide_as_means_of_repeated_experiments_differ(rng):
    """Without an effect of seeds: what a pair and an image have in common counts once, not three times."""
    found = []
    for _ in range(200):
        likely = rng.choice([0.2, 0.9], size=500)
        changed = likely + rng.choice([-0.1, 0.1], size=500)  # by image, the same in all pairs
        found.append(unequal_lanes.interval(*(rng.random((8, 500)) < each for each in (likely, changed))))
    half = np.mean([(one["high"] - one["low"]) / 2 for one in found])
    assert half == pytest.approx(1.96 * np.std([one["mean"] for one in found]), rel=0.35)


def test_arms_are_compared_over_the_seeds_that_both_have():
    place = {"device": "CPU", "cpu_count": 1, "platform": "cpu", "versions": {"jax": "0.10.2", "python": "3.11"}}

    def run(arm, seed, correct):
        packed = base64.b64encode(np.packbits(np.array(correct, bool))).decode()
        accuracy = 100 * float(np.mean(correct))
        record = {"facts": {"part": "resnet", "arm": arm, "seed": seed}, "lanes": f"{arm}{seed}", "correct": packed}
        curve = {"validation_accuracy": 80.0, "validation_accuracy_per_epoch": [70.0, 90.0, 80.0]}
        best = {"best_validation_accuracy": 90.0} if seed else {}  # which older runs did not note
        return record | place | {"test_accuracy": accuracy, "data": {"test_images": 3}} | curve | best

    records = [run("equal", 0, [1, 0, 0]), run("equal", 1, [1, 0, 0]), run("equal", 2, [1, 1, 1])]
    records += [run("tpe", 1, [1, 1, 0]), run("tpe", 0, [1, 1, 1]), run("given", 0, [0, 0, 0])]
    found = unequal_lanes.summarise(records)
    given, equal, tpe = found["resnet"]
    assert (given["over_equal"], equal["over_equal"]) == (None, None)
    assert tpe["over_equal"]["pairs"] == 2
    assert tpe["over_equal"]["mean"] == pytest.approx(50.0)
    assert tpe["lanes"] == ["tpe0", "tpe1"]
    elsewhere = [one | {"device": "GPU"} if one["facts"]["arm"] == "tpe" else one for one in records]
    assert unequal_lanes.summarise(elsewhere)["resnet"][2]["over_equal"] is None, "devices are not compared"
    text = unequal_lanes.text(found)
    assert "| resnet | tpe | 2 mixes | 2 | 83.33 | 90.00 |" in text
    assert "| resnet | tpe - equal | 2 | +50.00 (" in text
    left, right = unequal_lanes.draw(records, found).axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["given", "equal", "tpe"]
    assert [label.get_text() for label in right.get_xticklabels()] == ["tpe\n- equal"]
    records += [run("random", seed, [seed, 1, 0]) for seed in (0, 1)]
    records += [run("drawn", seed, [seed, 0, 0]) | {"cpu_count": 2} for seed in (0, 1)] + [run("given", 1, [1, 0, 0])]
    rows = {row["arm"]: row for row in unequal_lanes.summarise(records)["resnet"]}
    told = {(arm, other): one["mean"] for arm, other, one in unequal_lanes.differences(list(rows.values()))}
    assert list(told) == [
        *(("given", "equal"), ("random", "equal"), ("tpe", "equal")),
        *(("random", "drawn"), ("tpe", "random")),
    ]
    assert told["random", "drawn"] == pytest.approx(100 / 3)
    assert told["tpe", "random"] == pytest.approx(100 / 3)
    assert rows["given"]["over_random"] is rows["equal"]["over_equal"] is None


def test_halving_first_ranks_models_after_an_epoch_at_20_pixels():
    """As the docstring says; an epoch has 80 steps."""
    config, settings = unequal_lanes.search_of(NOWHERE, "resnet", "halving", smoke=False)
    assert settings.scored_epochs[0] == 1
    sizes = [config.train.image_size(step / (80 * settings.num_epochs)) for step in range(80 * settings.num_epochs)]
    assert set(sizes[:80]) == {20} != set(sizes)


def test_the_minutes_end_searches_and_what_was_found_stays(tmp_path, monkeypatch, directories):
    calls, timers = [], []
    monkeypatch.setattr(repeated_runs._Limit, "_later", lambda self, seconds, do: timers.append(do))

    def models_of(request, part, arm, check):
        calls.append(arm)
        if arm == "equal":
            timers[-1]()
            check()
            pytest.fail("the minutes were over")
        return ["resnet:w1d1*11"] * request.repeats

    monkeypatch.setattr(unequal_lanes, "models_of", models_of)
    monkeypatch.setattr(unequal_lanes, "kept_results", lambda name, scale: tmp_path / "none.json")
    request = made_request(tmp_path / "work", directories, unequal_lanes.SCALES["smoke"], minutes=0.003)
    with pytest.raises(Stopped, match=r"the 0.003 minutes are over; 0 of 3 runs have ended"):
        unequal_lanes.run(request, parts=["resnet"], arms=["random", "equal", "tpe"])
    assert read_json(request.workdir / "models.json") == {"resnet": {"random": ["resnet:w1d1*11"]}}
    with pytest.raises(Stopped):
        unequal_lanes.run(request, parts=["resnet"], arms=["random", "equal", "tpe"])
    assert calls == ["random", "equal", "equal"]


def test_equal_lanes_that_have_been_trained_stay_when_the_next_is_stopped(tmp_path, monkeypatch):
    trained, mixes = [], ["resnet:w1*2", "resnet:w2*2", "resnet:w3*2"]

    def evaluate(lanes):
        trained.append(lanes)
        yield SimpleNamespace(accuracy=0.1 * len(trained))

    def check():
        if len(trained) == 2:
            raise Stopped("the minutes are over")

    monkeypatch.setattr(unequal_lanes, "Trainer", lambda *given: SimpleNamespace(evaluate=evaluate))
    monkeypatch.setattr(unequal_lanes, "equal_mixes", lambda space: mixes)
    monkeypatch.setattr(unequal_lanes.setup, "make_space", lambda *given: None)
    given = (*unequal_lanes.search_of(NOWHERE, "resnet", "equal", smoke=False), tmp_path)
    with pytest.raises(Stopped):
        unequal_lanes.best_of_equal(*given, check)
    assert trained == mixes[:2]
    assert unequal_lanes.best_of_equal(*given, lambda: None) == mixes[2]
    assert trained == mixes


def test_more_repeats_add_random_mixes_and_fewer_take_none_away(tmp_path, monkeypatch):
    monkeypatch.setattr(unequal_lanes, "models_of", lambda request, *given: [f"mix{i}" for i in range(request.repeats)])
    monkeypatch.setattr(unequal_lanes, "kept_results", lambda name, scale: tmp_path / "none.json")
    monkeypatch.setattr(unequal_lanes, "carry_out", lambda *given, first: first(lambda: None))

    def mixes(repeats):
        request = made_request(tmp_path, {"cifar10": ""}, repeats=repeats)
        unequal_lanes.run(request, parts=["resnet"], arms=["random"])
        return read_json(tmp_path / "models.json")["resnet"]["random"]

    assert [len(mixes(repeats)) for repeats in (2, 4, 3)] == [2, 4, 4]


def test_models_that_were_found_elsewhere_are_not_searched_again(tmp_path, monkeypatch):
    kept = tmp_path / "kept.json"
    monkeypatch.setattr(unequal_lanes, "kept_results", lambda name, scale: kept)

    def with_kept(mine):
        unequal_lanes.add_kept_models(mine, "full")
        return mine

    assert with_kept({}) == {}
    found = {"resnet": {"tpe": ["resnet:w1d1*11"]}}
    write_json(kept, {"version": unequal_lanes.VERSION, "models": found})
    assert with_kept({}) == found
    mine = {"resnet": {"equal": ["resnet:w1d2*6"], "tpe": ["mine"]}}
    assert with_kept(mine) == {"resnet": {"equal": ["resnet:w1d2*6"], "tpe": ["mine"]}}
    write_json(kept, {"version": unequal_lanes.VERSION - 1, "models": found})
    assert with_kept({}) == {}


def test_what_another_process_has_found_meanwhile_stays_in_the_results(tmp_path, monkeypatch):
    """Two processes share the arms; one reports beside results of an arm that it does not have."""
    kept, written = tmp_path / "kept.json", []
    monkeypatch.setattr(unequal_lanes, "kept_results", lambda name, scale: kept)
    monkeypatch.setattr(unequal_lanes, "write", lambda series, name, summary, *rest: written.append(summary["models"]))
    monkeypatch.setattr(unequal_lanes, "models_of", lambda request, part, arm, check: [f"resnet:w1d2*{len(arm)}"])

    def carry_out(series, runs, text, report, first):
        request.workdir.mkdir(exist_ok=True)
        first(lambda: None)
        write_json(kept, {"version": unequal_lanes.VERSION, "models": {"resnet": {"tpe": ["resnet:w1d1*11"]}}})
        report(SimpleNamespace(records=lambda: [], scale=series.scale))
        assert series._config({"part": "resnet", "arm": "tpe", "seed": 0}).model["lanes"] == "resnet:w1d1*11"

    monkeypatch.setattr(unequal_lanes, "carry_out", carry_out)
    monkeypatch.setattr(unequal_lanes, "caption", lambda *given: [])
    request = made_request(tmp_path / "work", {"cifar10": "", "fashion_mnist": ""})
    unequal_lanes.run(request, parts=["resnet"], arms=["equal"])
    assert written == [{"resnet": {"tpe": ["resnet:w1d1*11"], "equal": ["resnet:w1d2*5"]}}]
    kept.unlink()
    monkeypatch.setattr(unequal_lanes, "models_of", lambda *given: pytest.fail("it was found before"))
    unequal_lanes.run(request, parts=["resnet"], arms=["equal"])

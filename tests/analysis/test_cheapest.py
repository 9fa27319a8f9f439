"""The cheapest machines, against brute force over all sets and splits; what is in the way is said."""

import collections
import dataclasses
import itertools
import json
import math
import time

import numpy as np
import pytest
from made_profile import make_profile

from mlcn_jax.analysis import cheapest, cheapest_report, market
from mlcn_jax.commands import arguments, front
from mlcn_jax.commands import cheapest as command
from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import simulate
from mlcn_jax.placement.catalog import Offer
from mlcn_jax.placement.cost import cost_of
from mlcn_jax.placement.problem import Placement
from mlcn_jax.placement.simulate import Link
from mlcn_jax.placement.spot import Interruptions
from mlcn_jax.training import splits

SPEC = ModelSpec("mlcn", (28, 28, 1), 10, "mlcn1:w2*4,mlcn1:w1d2*2")
TASK = market.Task(SPEC, 100, 2000, 500, 10_000, 10**8, apart=False)
TERMS = market.Terms(100.0, 60.0, 2.0, 1e7, None, Link(1e-4, 1e8), 2)
LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}
FREE = {"latency_seconds": 0.0, "bytes_per_second": 1e18}
RESIDUALS = {"lane": [0.05, -0.05, 0.05], "stack": [0.1, -0.1, 0.1]}


@pytest.fixture(scope="module")
def profiles():
    """Of a fast and a slow device."""
    fast = dataclasses.replace(make_profile(), link=LINK, residuals=RESIDUALS, memory_bytes=2**40)
    fast = dataclasses.replace(fast, head_seconds_of={name: s * 1e-4 for name, s in fast.head_seconds_of.items()})
    slower = {name: [(size, 3 * s) for size, s in pairs] for name, pairs in fast.layer_seconds.items()}
    return {"fast": fast, "slow": dataclasses.replace(fast, layer_seconds=slower)}


def offers(profiles, *given):
    return [(offer, profiles[offer.machine.split("-")[0]], f"{offer.machine}.json") for offer in given]


FAST, SLOW = Offer("fast", 3.0), Offer("slow", 0.8)


def steps_over(devices, link):
    """Seconds of a step under every mesh and every placement of lanes, over pairs of a machine and a profile."""
    machines, of_each = zip(*devices, strict=True)
    count, cluster = len(devices), simulate.Cluster(machines, Link(**of_each[0].link), link)
    given = (of_each, [1.0] * count)
    for data in (n for n in (1, 2, 4) if count % n == 0):
        if count // data in (1, 2):  # there are four and two equal lanes
            yield splits.predict_mesh(SPEC, 100, data, count // data, *given, cluster).total_seconds
    each = [itertools.combinations_with_replacement(range(count), lanes) for lanes in (4, 2)]
    for first, second in itertools.product(*each) if count > 1 else ():
        if len({*first, *second}) == count:
            placement = Placement("", (*first, *second), (1.0,) * count, (0.0,) * count, 0.0)
            yield splits.predict_stacks(SPEC, 100, placement, *given, "ring", cluster).total_seconds


def brute_force(task, terms, given):
    """Seconds and cost of every set of up to two machines under every split, a single one also on fewer devices."""
    sets = [*((entry,) for entry in given), *itertools.combinations_with_replacement(given, 2)]
    for chosen in sets:
        devices = [(m, profile) for m, (offer, profile, _) in enumerate(chosen) for _ in range(offer.devices)]
        for used in range(1 if len(chosen) == 1 else len(devices), len(devices) + 1):
            for step in steps_over(devices[:used], terms.link):
                saved = task.steps / task.save_every * terms.checkpoint_seconds
                seconds = terms.startup_seconds + task.data_bytes / terms.download_bytes_per_second
                seconds += task.steps * step + saved
                paid = max(seconds, terms.minimum_seconds) / 3600
                yield seconds, sum(offer.price for offer, _, _ in chosen) * paid


def test_the_front_is_that_of_brute_force_over_sets_splits_and_placements(profiles):
    """The link costs nothing, so that the fastest placement is the one that computes fastest."""
    free = {name: dataclasses.replace(one, link=FREE) for name, one in profiles.items()}
    task, terms = dataclasses.replace(TASK, scored_images=0), dataclasses.replace(TERMS, link=Link(**FREE))
    given = offers(free, FAST, SLOW, Offer("fast-2", 5.0, devices=2), Offer("slow-dear", 0.9))
    whole, every = market.Market(task, terms, given), list(brute_force(task, terms, given))
    found = whole.ways()
    assert len(every) > 200
    for seconds, cost in every:
        assert any(way.seconds <= 1.0001 * seconds and way.cost <= 1.0001 * cost for way in found)
    for deadline in 1.0001 * np.quantile([seconds for seconds, _ in every], (0.1, 0.3, 0.6, 1.0)):
        least = min(cost for seconds, cost in every if seconds <= deadline)
        assert cheapest.best_way(whole, found, deadline).cost == pytest.approx(least, rel=1e-4)


def test_no_set_or_split_that_was_passed_over_is_better(profiles):
    terms = dataclasses.replace(TERMS, interruptions_per_hour=0.2)
    given = offers(profiles, FAST, SLOW, Offer("fast-2", 5.0, devices=2), Offer("slow-spot", 0.3, spot=True))
    whole = market.Market(TASK, terms, given)
    found = whole.ways()
    every = []
    for size in (1, 2):
        for chosen in itertools.combinations_with_replacement(range(len(whole.choices)), size):
            every += whole.on(chosen)
    assert len(every) > 20
    for way in every:
        assert any(f.seconds <= way.seconds and f.cost <= way.cost for f in found)


def test_over_a_slow_link_the_fullest_device_has_fewer_lanes(profiles):
    """What is sent grows with its number of lanes; the command asks for the placement that was predicted."""

    def fullest(link):
        whole = market.Market(TASK, dataclasses.replace(TERMS, link=link), offers(profiles, FAST, SLOW))
        stacks = [way for way in whole.on((0, 1)) if way.kind == "stacks"]
        best = min(stacks, key=lambda way: way.seconds)
        assert f"partitioner={best.placement.partitioner} " in cheapest_report.commands(whole, best, ["--config=x"])[0]
        return max(collections.Counter(best.placement.device_of).values())

    assert fullest(Link(0.0, 1e12)) > 3
    assert fullest(Link(0.0, 1e3)) == 3


def test_a_machine_trains_on_fewer_devices_where_its_own_link_is_slow(profiles):
    slow = {"fast": dataclasses.replace(profiles["fast"], link=LINK | {"latency_seconds": 10.0})}
    whole = market.Market(TASK, TERMS, offers(slow, Offer("fast-4", 5.0, devices=4)))
    assert {way.data * way.lane for way in whole.on((0,))} == {1, 2, 3, 4}
    (best,) = whole.ways()
    assert best.data * best.lane == 1
    (line,) = cheapest_report.commands(whole, best, ["--config=x"])
    assert line.startswith(f"taskset --cpu-list 0-{profiles['fast'].cpu_count - 1} ")


def test_the_command_trains_where_the_way_says_whatever_was_given(profiles):
    whole = market.Market(TASK, TERMS, offers(profiles, FAST))
    way = next(way for way in whole.on((0,)) if way.data * way.lane == 1)
    given = ["--config=x", "--config.parallel.plan=auto", "--config.parallel.lane=4", "--config.parallel.processes=2"]
    (line,) = cheapest_report.commands(whole, way, [*given, "--config.parallel.exchange_dtype=bfloat16"])
    told = dict(flag.split("=") for flag in line.split() if flag.startswith("--config.parallel."))
    assert told == {
        "--config.parallel.exchange_dtype": "bfloat16",
        "--config.parallel.plan": "mesh",
        "--config.parallel.data": "1",
        "--config.parallel.lane": "1",
    }


def test_accelerators_of_one_process_send_columns_straight_to_the_head(profiles):
    gpu = {"fast": dataclasses.replace(profiles["fast"], platform="gpu")}
    alone = market.Market(TASK, TERMS, offers(gpu, Offer("fast-4", 5.0, devices=4)))
    way = next(way for way in alone.on((0,)) if way.kind == "stacks" and way.lane == 4)
    given = (SPEC, 100, way.placement, [gpu["fast"]] * 4, [1.0] * 4)
    assert way.step_seconds == pytest.approx(splits.predict_stacks(*given, "direct").total_seconds, rel=1e-9)
    assert way.step_seconds != pytest.approx(splits.predict_stacks(*given, "ring").total_seconds, rel=1e-9)
    (line,) = cheapest_report.commands(alone, way, ["--config=x"])
    assert "parallel.processes" not in line


def test_machines_of_several_places_do_not_train_together(profiles):
    given = offers(profiles, *(dataclasses.replace(one, region=place) for one in (FAST, SLOW) for place in ("a", "b")))
    whole = market.Market(TASK, TERMS, given)
    assert len(whole.choices) == 4
    ways = whole.ways()
    assert any(len(way.machines) == 2 for way in ways)
    assert all(len({whole.choices[n].offer.region for n in way.machines}) == 1 for way in ways)


def test_a_row_is_not_rented_twice(profiles):
    terms = dataclasses.replace(TERMS, interruptions_per_hour=0.2)
    row = {"available": 1, "row": "machines.csv, line 2"}
    given = offers(profiles, Offer("slow", 0.8, **row), Offer("slow", 0.3, spot=True, **row))
    task = dataclasses.replace(TASK, apart=True)
    assert all(len(way.machines) == 1 for way in market.Market(task, terms, given).ways())


def test_a_profile_of_other_lanes_leaves_only_its_machine_out(profiles):
    other = dataclasses.replace(profiles["slow"], image_shape=(32, 32, 3))
    given = [*offers(profiles, FAST), (SLOW, other, "other.json"), (SLOW, other, "other.json")]
    whole = market.Market(TASK, TERMS, given)
    assert [choice.offer for choice in whole.choices] == [FAST]
    (reason,) = whole.passed
    assert reason.startswith("slow: other.json: the device profile was measured with other lanes: image_shape: ")
    with pytest.raises(InputError, match=r"no machine has a profile that .* with these lanes:\n  slow: other\.json"):
        market.Market(TASK, TERMS, given[1:])


def test_a_step_is_never_faster_than_the_bound_by_which_sets_are_passed_over(profiles):
    whole = market.Market(TASK, TERMS, offers(profiles, FAST, SLOW, Offer("fast-2", 5.0, devices=2)))
    for chosen in itertools.combinations_with_replacement(range(len(whole.choices)), 2):
        assert all(way.seconds >= whole._least_seconds(chosen) for way in whole.on(chosen))


def test_machines_whose_shares_take_faster_algorithms_are_not_passed_over(profiles):
    """Half a batch of these lanes takes less than half the seconds of the whole."""
    spec = dataclasses.replace(SPEC, lanes="mlcn1:w2d2*2")
    lane, fast = cost_of(spec, spec.lane_groups[0].spec), profiles["fast"]
    assert 2 * fast.model_seconds([lane], 50, 200) < fast.model_seconds([lane], 100, 200)
    free = dataclasses.replace(fast, link=FREE, head_seconds_of=dict.fromkeys(fast.head_seconds_of, 0.0))
    task = dataclasses.replace(TASK, spec=spec)
    whole = market.Market(task, dataclasses.replace(TERMS, link=Link(0.0, 1e18)), offers({"fast": free}, FAST))
    best = min(way.seconds for way in whole.on((0, 0)))
    assert 0.9 * best < whole._least_seconds((0, 0)) <= best


def test_machines_that_are_fast_at_other_lanes_are_not_passed_over(profiles):
    """Together they are faster than the sum of their speeds at the whole model."""

    def leaning(factor, power):
        layers = profiles["fast"].layer_seconds.items()
        changed = {name: [(x, factor * s * 2 ** (power * (x - 10))) for x, s in pairs] for name, pairs in layers}
        return dataclasses.replace(profiles["fast"], layer_seconds=changed)

    task = dataclasses.replace(TASK, spec=dataclasses.replace(SPEC, lanes="mlcn1:w1*12,mlcn1:w4"))
    lean = {"narrow": leaning(0.03, 0.3), "wide": leaning(0.7, -0.6)}
    whole = market.Market(task, TERMS, offers(lean, Offer("narrow", 1.0), Offer("wide", 1.0)))
    best = min(way.seconds for way in whole.on((0, 1)))
    assert whole._least_seconds((0, 1)) <= best
    assert whole.ways()[0].seconds == best


def test_without_a_link_no_two_machines_train_together(profiles):
    alone = market.Market(TASK, dataclasses.replace(TERMS, link=None), offers(profiles, FAST, SLOW))
    assert all(len(way.machines) == 1 for way in alone.ways())


def test_a_machine_is_interrupted_only_while_its_own_lanes_are_trained(profiles):
    terms = dataclasses.replace(TERMS, interruptions_per_hour=1.0, link=None)
    given = offers(profiles, Offer("fast", 1.0, spot=True, available=1), Offer("slow", 1.0, spot=True, available=1))
    task = dataclasses.replace(TASK, apart=True)
    ways = [way for way in market.Market(task, terms, given).ways() if way.kind == "apart" and len(way.machines) == 2]
    assert ways
    for way in ways:
        assert 0.3 * way.seconds / 3600 < way.interruptions < 2 * way.seconds / 3600


def test_lanes_apart_are_a_way_where_lanes_learn_alone(profiles):
    slow_link = dataclasses.replace(TERMS, link=Link(0.1, 1e5))
    given = offers(profiles, FAST, SLOW)
    together = market.Market(TASK, slow_link, given)
    assert not [way for way in together.ways() if way.kind == "apart"]
    apart = market.Market(dataclasses.replace(TASK, apart=True), slow_link, given)
    fastest = apart.ways()[0]
    assert fastest.kind == "apart"
    assert len(fastest.machines) == 2
    assert [sum(held[kind] for held in fastest.lanes) for kind in (0, 1)] == [4, 2]
    given = [
        "--config=x",
        "--config.model.lanes=mlcn1:w2*4",
        "--config.parallel.plan=stacks",
        "--config.parallel.lane=4",
    ]
    launched = cheapest_report.commands(apart, fastest, given)
    *trained, joined = launched
    assert len(trained) == 6
    assert all(line.count("model.lanes") == 1 and "train.lanes_apart=true" in line for line in trained)
    assert not any("config.parallel" in line for line in trained)
    seeds = [line.split("model.lane_seeds=")[1].split()[0] for line in trained]
    assert sorted(seeds) == [str(lane) for lane in range(6)], "the lane's place in the model"
    folders = [line.split("--workdir=")[1].split()[0] for line in trained]
    assert len(set(folders)) == 6
    assert f"join --workdir={','.join(folders)} --output=runs/cheapest --weights=equal" in joined


def test_single_lanes_are_trained_without_the_weights_of_all(profiles):
    spec = dataclasses.replace(TASK.spec, lane_weights=(1.0, 2.0, 1.0, 1.0, 1.0, 1.0))
    apart = market.Market(dataclasses.replace(TASK, apart=True, spec=spec), TERMS, offers(profiles, FAST, SLOW))
    way = next(way for way in apart.ways() if way.kind == "apart")
    for given in ("--config=x", "--config.model.lane_weights=(1.0,2.0,1.0,1.0,1.0,1.0)"):
        *trained, _ = cheapest_report.commands(apart, way, [given])
        assert all(line.count("lane_weights=") == 1 and "--config.model.lane_weights=()" in line for line in trained)


def test_spot_machines_save_at_the_best_interval_and_count_what_is_lost(profiles):
    terms = dataclasses.replace(TERMS, interruptions_per_hour=3.0, link=None)
    spot = market.Market(TASK, terms, offers(profiles, Offer("slow", 0.8, spot=True))).ways()[0]
    demand = market.Market(TASK, terms, offers(profiles, SLOW)).ways()[0]
    assert spot.seconds > demand.seconds
    assert demand.save_every == TASK.save_every
    assert demand.interruptions == demand.lost_seconds == 0
    best = math.sqrt(2 * terms.checkpoint_seconds * 1200) / spot.step_seconds
    assert spot.save_every == pytest.approx(best, rel=0.1)
    assert 0 < spot.lost_seconds < spot.save_every * spot.step_seconds


def test_validating_at_a_checkpoint_is_a_part_of_what_it_costs(profiles):
    terms = dataclasses.replace(TERMS, interruptions_per_hour=3.0, link=None)
    spot = offers(profiles, Offer("slow", 0.8, spot=True))
    with pytest.raises(InputError, match="slow: 20000 interruptions per hour are more than one a minute"):
        market.Market(TASK, dataclasses.replace(TERMS, interruptions_per_hour=20000.0), spot)
    plain = market.Market(TASK, terms, spot).ways()[0]
    validating = market.Market(dataclasses.replace(TASK, validation_images=5000), terms, spot).ways()[0]
    assert validating.save_every > 1.2 * plain.save_every
    assert validating.seconds > plain.seconds
    interval = validating.save_every * validating.step_seconds
    assert f"saving every {cheapest.duration(interval)} of work costs" in cheapest_report.advice(validating)
    without = Interruptions(3 / 3600, 0.0, terms.checkpoint_seconds).lost_seconds(interval)
    assert validating.lost_seconds > without, "the time of validating is lost, too"
    assert cheapest_report.advice(market.Market(TASK, terms, offers(profiles, SLOW)).ways()[0]) == ""


def test_steps_on_small_images_take_less_and_statistics_of_normalisation_more(profiles):
    def way(**changes):
        return market.Market(dataclasses.replace(TASK, **changes), TERMS, offers(profiles, SLOW)).ways()[0]

    whole, small = way(), way(step_share=0.25)
    assert small.step_seconds == pytest.approx(0.25 * whole.step_seconds)
    saved_seconds = 0.75 * TASK.steps * whole.step_seconds
    assert whole.seconds - small.seconds == pytest.approx(saved_seconds, rel=1e-3)
    assert way(calibration_images=4000).seconds > whole.seconds
    residual = dataclasses.replace(SPEC, lanes="resnet:w1*2")
    shares = [cheapest._step_share(residual, 100, sizes) for sizes in ([0, 0], [14, 0])]
    assert shares[0] == 1
    assert 0.5 < shares[1] < 0.5 + 0.5 * 0.4, "a quarter of the pixels, with borders and the decoder"


def test_a_model_that_does_not_divide_trains_on_fewer_of_a_machines_devices(profiles):
    spec = dataclasses.replace(SPEC, lanes="mlcn1:w2,mlcn1:w1d2,mlcn1:w1")
    task, many = dataclasses.replace(TASK, spec=spec, batch_size=99), Offer("fast-7", 5.0, devices=7)
    ways = market.Market(task, TERMS, offers(profiles, many)).on((0,))
    assert {way.data * way.lane for way in ways} == {1, 2, 3}


@pytest.mark.parametrize("changes", [{"messages": splits.Messages(parts=2)}, {"messages": splits.Messages(parts=3)}])
def test_what_a_run_would_refuse_is_no_way(profiles, changes):
    whole = market.Market(TASK, TERMS, offers(profiles, FAST, SLOW))
    assert {way.kind for way in whole.on((0, 1))} == {"mesh", "stacks"}
    parts = market.Market(dataclasses.replace(TASK, **changes), TERMS, offers(profiles, FAST, SLOW))
    assert {way.kind for way in parts.on((0, 1))} == ({"mesh"} if changes["messages"].parts == 2 else set())


def test_more_sets_than_can_be_tried_are_refused(profiles):
    many = [Offer(f"fast-{i}", 1.0 + i / 1000, startup_seconds=500.0 - i, available=1) for i in range(300)]
    with pytest.raises(InputError, match=r"--most_machines=3 of 300 different offers give .* sets of machines"):
        market.Market(TASK, dataclasses.replace(TERMS, most_machines=3), offers(profiles, *many)).ways()


def test_devices_of_a_machine_beside_others_have_cores_of_their_own(profiles):
    whole = market.Market(TASK, TERMS, offers(profiles, Offer("fast-2", 5.0, devices=2), SLOW))
    way = next(way for way in whole.on((0, 1)) if way.kind == "stacks")
    count = profiles["fast"].cpu_count
    first, second, third = cheapest_report.commands(whole, way, ["--config=x"])
    assert first.startswith(f"taskset --cpu-list 0-{count - 1} ")
    assert second.startswith(f"taskset --cpu-list {count}-{2 * count - 1} ")
    assert "taskset" not in third


def test_the_interval_is_of_the_run_and_the_start_is_certain(profiles):
    way = market.Market(TASK, TERMS, offers(profiles, FAST)).ways()[0]
    assert 110 < way.interval.low_seconds < way.seconds < way.interval.high_seconds


def test_a_thousand_offers_take_seconds(profiles):
    rng = np.random.default_rng(0)
    given = [
        Offer(
            f"{kind}-{i}",
            float(rng.uniform(0.5, 5)),
            devices=int(rng.choice([1, 2, 4])),
            startup_seconds=float(rng.uniform(60, 300)),
            region=f"r{i % 7}",
            available=1,
        )
        for i in range(500)
        for kind in ("fast", "slow")
    ]
    started = time.process_time()
    whole = market.Market(dataclasses.replace(TASK, apart=True), TERMS, offers(profiles, *given))
    ways = whole.ways(3600.0)
    assert time.process_time() - started < 60  # 5, and the solver's own threads
    assert ways


def test_a_deadline_that_cannot_be_met_names_the_nearest_that_can(profiles):
    whole = market.Market(TASK, TERMS, offers(profiles, SLOW))
    ways = whole.ways()
    with pytest.raises(
        InputError, match=r"no way trains it in 1 s: the earliest .* is --deadline=(\d+m|\d+s) \(slow"
    ) as told:
        cheapest.best_way(whole, ways, 1.0)
    nearest = str(told.value).split("--deadline=")[1].split()[0]
    assert cheapest.best_way(whole, ways, cheapest.seconds_of(nearest, "deadline"))


def test_a_model_that_fits_nowhere_says_what_would_make_it_fit(profiles):
    small = {"slow": dataclasses.replace(profiles["slow"], memory_bytes=2000)}
    whole = market.Market(TASK, TERMS, offers(small, SLOW))
    with pytest.raises(InputError, match=r"fits none of the 1 machines: mlcn1:w.* it would fit with.*model\.remat"):
        cheapest.best_way(whole, whole.ways(), math.inf)


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21600), ("1h30m", 5400), ("90s", 90), ("2d", 172800), ("0.5h", 1800)]
)
def test_times_are_read(text, seconds):
    assert cheapest.seconds_of(text, "deadline") == seconds


@pytest.mark.parametrize("text", ["6", "six hours", "0h", "-1h", "6 h"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(InputError, match=f"--deadline={text} is not a time above 0"):
        cheapest.seconds_of(text, "deadline")


def test_profiles_are_found_by_accelerator_and_by_name(profiles, tmp_path):
    h100 = dataclasses.replace(profiles["fast"], device="NVIDIA H100 80GB HBM3")
    h100.save(tmp_path / "h100.json")
    given = [Offer("p5", 1.0, accelerator="H100"), Offer("box", 1.0), Offer("g", 1.0, accelerator="A100-80GB")]
    found = cheapest.read_profiles(f"{tmp_path}/h100.json,box={tmp_path}/h100.json", given)
    assert set(found) == {"h100", "box"}
    judged, passed = cheapest.with_profiles(given, found, TERMS)
    assert [offer.machine for offer, _, _ in judged] == ["p5", "box"]
    assert [reason.partition(" (measure")[0] for reason in passed] == ["A100-80GB: no profile"]
    more = [Offer("big", 1.0, accelerator="H100-80GB"), *given]
    assert set(cheapest.read_profiles(f"{tmp_path}/h100.json", more)) == {"h100-80gb"}, "the name that says most"
    large = dataclasses.replace(given[1], cpus=64.0)
    assert "it has 64 cores, but the profile" in cheapest.with_profiles([large], found, TERMS)[1][0]
    with pytest.raises(InputError, match=r"catalog has no machine or accelerator 'bxo'; did you mean box\?"):
        cheapest.read_profiles(f"bxo={tmp_path}/h100.json", given)
    with pytest.raises(InputError, match="which is not an accelerator of the catalog: name its machine"):
        cheapest.read_profiles(f"{tmp_path}/h100.json", given[1:2])
    with pytest.raises(InputError, match=r"no machine .* has a device profile: .*\(H100, box, A100-80GB\).* --out"):
        cheapest.read_profiles("", given)


def test_the_command_finds_and_writes(profiles, tmp_path, capsys):
    profiles["fast"].save(tmp_path / "fast.json")
    profiles["slow"].save(tmp_path / "slow.json")
    catalog = tmp_path / "machines.csv"
    catalog.write_text(f"machine,price,profile\nbig,3,{tmp_path}/fast.json\nlittle,0.8,{tmp_path}/slow.json\n")
    given = ["--config=quickstart", "--config.model.lanes=mlcn1:w2*4", "--config.train.num_steps=100", "--deadline=1d"]
    front.run(
        [
            "cheapest",
            *given,
            f"--catalog={catalog}",
            f"--output={tmp_path}/out",
            "--latency_seconds=1e-4",
            "--bytes_per_second=1e8",
        ]
    )
    told, stored = capsys.readouterr().out, json.loads((tmp_path / "out" / "cheapest.json").read_text())
    best = next(way for way in stored["ways"] if way["best"])
    assert best["cost"] == min(way["cost"] for way in stored["ways"])
    assert "| best | " in told
    assert "train --config=quickstart '--config.model.lanes=mlcn1:w2*4' " in told
    assert (tmp_path / "out" / "cheapest.png").stat().st_size > 1000
    for wrong, message in (
        ([], "--catalog=FILE is needed"),
        ([f"--catalog={catalog}", "--latency_seconds=1e-4"], "describe one link: give both or neither"),
        ([f"--catalog={catalog}", "--deadline=soon"], "is not a time above 0"),
        ([f"--catalog={catalog}", "--startup_seconds=nan"], "--startup_seconds is nan: give a finite number"),
        (
            [f"--catalog={catalog}", f"--output={tmp_path}/none", "--config.model.remat=full"],
            "model.remat is full, but device profiles predict",
        ),
        ([f"--catalog={catalog}", "--config.train.rounds.steps=5"], "training in rounds is not compared"),
    ):
        with pytest.raises(InputError, match=message):
            front.run(["cheapest", "--config=quickstart", *wrong])
    assert not (tmp_path / "none").exists(), "a folder is made only for what is written"


def test_fields_of_the_configuration_are_launched_however_they_were_written():
    argv = ["--config", "quickstart", "--noconfig.train.score_test", "--catalog=c", "--config.train.seed", "1"]
    argv.append("--config.train.lanes_apart")
    values = arguments.parse("cheapest", "", command.define, argv, config="run")
    assert command._config_flags(argv, values["config"]) == [
        "--config=quickstart",
        "--config.train.score_test=False",
        "--config.train.seed=1",
        "--config.train.lanes_apart=True",
    ]


def test_rows_of_one_name_may_have_several_profiles(profiles, tmp_path):
    for name, profile in profiles.items():
        profile.save(tmp_path / f"{name}.json")
    given = [Offer("box", price, profile=f"{tmp_path}/{name}.json") for name, price in (("fast", 3.0), ("slow", 1.0))]
    judged, passed = cheapest.with_profiles(given, cheapest.read_profiles("", given), TERMS)
    assert [file for _, _, file in judged] == [offer.profile for offer in given]
    assert not passed

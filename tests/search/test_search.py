"""Mixes that are proposed fit, are full, are drawn uniformly, and change by small moves."""

import collections
import dataclasses
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcn_jax.errors import InputError
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost
from mlcn_jax.search import budget
from mlcn_jax.search import space as space_lib
from mlcn_jax.search.settings import SearchSettings
from mlcn_jax.search.space import MOVES, Space

MENU = [LaneSpec(kind, w, d) for kind in ("mlcn1", "mlcn2") for w in range(1, 6) for d in range(1, 6)]
LOADS = tuple(lane.width**2 * lane.depth * (1.0 if lane.kind == "mlcn1" else 0.6) for lane in MENU)
BYTES = tuple(10.0 + lane.width * lane.depth for lane in MENU)


def make_bucket(limit, memory=math.inf, crowding=0.0):
    return budget.Bucket("device", "flops", limit, memory, LOADS, BYTES, crowding)


budgets = st.lists(
    st.builds(
        make_bucket,
        st.floats(0.1, 200.0),
        st.one_of(st.just(math.inf), st.floats(1.0, 300.0)),
        st.sampled_from([0.0, 0.15]),
    ),
    min_size=1,
    max_size=5,
)


def slow_fits(bucket, lanes):
    load = sum(LOADS[lane] for lane in lanes) * max(len(lanes), 1) ** bucket.crowding
    return load <= bucket.limit * (1 + 1e-6) and sum(BYTES[lane] for lane in lanes) <= bucket.memory_bytes * (1 + 1e-9)


def make_space(buckets, tolerance=0.05):
    try:
        return Space(MENU, buckets, tolerance)
    except InputError:
        assert not any(slow_fits(bucket, [lane]) for bucket in buckets for lane in range(len(MENU)))
        return None


@settings(max_examples=60, deadline=None)
@given(budgets, st.integers(0, 99), st.sampled_from([0.05, 1.0]))
def test_a_drawn_mix_fits_and_takes_no_further_lane(buckets, seed, tolerance):
    space = make_space(buckets, tolerance)
    if space is None:
        return
    mix = space.draw(random.Random(seed))
    for bucket, lanes in zip(buckets, mix, strict=True):
        assert slow_fits(bucket, lanes)
        assert not any(
            slow_fits(bucket, [*lanes, lane]) for lane in range(len(MENU)) if LOADS[lane] < bucket.limit * 0.999
        )


@settings(max_examples=40, deadline=None)
@given(budgets, st.integers(0, 99))
def test_moves_stay_within_the_budgets_and_change_the_mix(buckets, seed):
    space, rng = make_space(buckets), random.Random(seed)
    if space is None:
        return
    mix = space.draw(rng)
    for _ in range(5):
        new, move = space.mutate(rng, mix)
        assert all(map(slow_fits, buckets, new))
        assert new != mix or move == "draw"
        mix = new


def test_every_move_happens_and_does_what_its_name_says():
    space, rng = Space(MENU, [make_bucket(60.0)] * 4), random.Random(0)
    mix, moves = space.draw(rng), collections.Counter()
    for _ in range(300):
        new, move = space.mutate(rng, mix)
        moves[move] += 1
        before, after = ([collections.Counter(lanes) for lanes in m] for m in (mix, new))
        whole = [sum(one, collections.Counter()) for one in (before, after)]
        gone, come = set(whole[0] - whole[1]), set(whole[1] - whole[0])
        if move in ("add", "move"):
            assert sum(a != b for a, b in zip(before, after, strict=True)) <= (1 if move == "add" else 2)
        if move == "remove":
            assert gone
        if move in ("widen", "deepen"):
            name = "width" if move == "widen" else "depth"
            larger = {dataclasses.replace(MENU[a], **{name: getattr(MENU[a], name) + 1}) for a in gone}
            assert larger & {MENU[b] for b in come}
        mix = new
    assert set(moves) == set(MOVES)


def test_lanes_are_drawn_uniformly_among_those_that_fit():
    bucket = make_bucket(5.0)  # the first lane that is drawn, of an empty device
    rng = random.Random(1)
    counts = collections.Counter(bucket.draw(0, *bucket.room([]), rng) for _ in range(6000))
    fitting = [lane for lane in range(len(MENU)) if LOADS[lane] <= 5.0]
    assert set(counts) == set(fitting)
    expected = 6000 / len(fitting)
    assert sum((counts[lane] - expected) ** 2 / expected for lane in fitting) < 2.5 * len(fitting)


def test_crowding_stays_constant_beyond_what_was_measured():
    bucket = dataclasses.replace(make_bucket(math.inf), crowding=0.5, crowded_lanes=(0.5, 4.0))
    one, four, nine = (bucket.load([0] * count) / (LOADS[0] * count) for count in (1, 4, 9))
    assert (one, four, nine) == pytest.approx((1.0, 2.0, 2.0))
    light = min(range(len(MENU)), key=LOADS.__getitem__)
    room = dataclasses.replace(bucket, limit=2 * LOADS[light] * 10)  # for ten of these
    assert room.draw(9, *room.room([light] * 9), random.Random(0)) is not None
    assert room.draw(10, *room.room([light] * 10), random.Random(0)) is None


def test_memory_decides_where_it_is_scarcer():
    bucket = make_bucket(1e9, memory=14.0)
    rng = random.Random(0)
    drawn = {bucket.draw(0, *bucket.room([]), rng) for _ in range(500)}
    assert drawn == {lane for lane in range(len(MENU)) if BYTES[lane] <= 14.0}
    assert bucket.fill([0]) == pytest.approx(BYTES[0] / 14.0)


def test_a_device_that_no_lane_fits_stays_empty_and_is_reported():
    space = Space(MENU, [make_bucket(60.0), make_bucket(0.1)])
    mix = space.draw(random.Random(0))
    assert mix[0]
    assert not mix[1]
    report = space.report(mix)
    assert report[1]["lanes"] == ""
    assert report[1]["fill"] == 0.0
    assert space.imbalance(mix) == 0.0  # of the devices that hold lanes


def test_budgets_below_the_smallest_lane_say_which_it_is():
    with pytest.raises(InputError, match=r"not even the smallest lane, mlcn2:w1d1, fits any device"):
        Space(MENU, [make_bucket(0.1), make_bucket(0.2)])


def test_a_thousand_models_for_eight_devices_are_full_and_balanced_within_seconds():
    space, rng = Space(MENU, [make_bucket(32.0, memory=1e4)] * 8), random.Random(0)
    started = time.process_time()
    mixes = [space.draw(rng) for _ in range(1000)]
    assert time.process_time() - started < 5.0
    fills = [bucket.fill(lanes) for mix in mixes for bucket, lanes in zip(space.buckets, mix, strict=True)]
    assert sum(fills) / len(fills) >= 0.95
    assert max(map(space.imbalance, mixes)) < 0.05


def test_text_has_every_lane_once():
    space = Space(MENU, [make_bucket(60.0)] * 2)
    mix = space.draw(random.Random(3))
    counts = {group.spec: group.count for group in parse_lanes(space.text(mix))}
    assert counts == collections.Counter(MENU[lane] for lanes in mix for lane in lanes)


def test_taste_prefers_what_it_names():
    space = Space(MENU, [make_bucket(100.0)] * 2)
    rng = random.Random(0)
    weights = space.taste({"mlcn1": 0.0}, width=2.0, depth=3.0, spread=0.3)
    drawn = collections.Counter(
        MENU[lane] for _ in range(20) for lanes in space.draw(rng, weights=weights) for lane in lanes
    )
    assert drawn.most_common(1)[0][0] == LaneSpec("mlcn2", 2, 3)


SPEC = ModelSpec("mlcn", (28, 28, 1), 10, "mlcn1:w1", decoder=(16,))
CHOICE = {"kinds": ("mlcn1",), "max_width": 2, "max_depth": 1, "baseline": "mlcn1:w2*2", "tolerance": 0.05}


def test_costs_are_those_of_the_lanes_and_the_decoder_has_its_place():
    space = space_lib.make_space("memory=64MiB flops=0.5x*2, flops=3G", SPEC, 50, **CHOICE)
    lane = cost.lane_cost(LaneSpec("mlcn1", 2), SPEC.lane_settings, SPEC.image_shape)
    assert [bucket.limit for bucket in space.buckets] == [lane.step_flops(50), lane.step_flops(50), 3e9]
    assert space.buckets[1].loads[1] == lane.step_flops(50)
    assert space.buckets[1].lane_bytes[1] == lane.held_bytes(50)
    assert space.buckets[1].memory_bytes == 64 * 2**20
    decoder = 4 * 4 * (10 * 16 + 16 + 16 * 784 + 784)  # of one lane, state and gradient
    assert 64 * 2**20 - space.buckets[0].memory_bytes > decoder
    assert space.buckets[2].memory_bytes == math.inf
    assert space.draw(random.Random(0))[1] in ((1,), (0, 0, 0), (0, 0))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("", "describes no device"),
        ("flops=1x*0", "describes no device"),
        ("memory=1GiB", "does not describe a device"),
        ("flops=1x seconds=2", "does not describe a device"),
        ("flops=fast", "must be a number above 0"),
        ("flops=0x", "must be a number above 0"),
        ("memory=3parsec flops=1x", "must be a number above 0"),
        ("flops=1x*two", "does not describe a device"),
        ("flops=1x*" + "9" * 5000, "does not describe a device"),
        ("flops=1x*8,flops=0.25x*3000000000", "3,000,000,008 devices or more"),
        ("flops=1x flops=2x", "does not describe a device"),
        ("profile=/nowhere.json seconds=1", "cannot be read"),
        ("flops=1e400", "has room for inf lanes"),
        ("flops=1e30", "at most 10,000 are tried: give smaller limits"),
        ("flops=1K", "not even the smallest lane"),
        ("memory=1KiB flops=1x", "not even the smallest lane"),
    ],
)
def test_devices_that_cannot_be_used(devices, message):
    with pytest.raises(InputError, match=message):
        space_lib.make_space(devices, SPEC, 50, **CHOICE)


# ---- by the thesis's formulas

PUBLISHED = {
    "kinds": ("mlcn1", "mlcn2"),
    "max_width": 5,
    "max_depth": 5,
    "baseline": "mlcn2:w2d4*4",
    "costs": "published",
}


def published_space(devices, tolerance=1.0):
    return space_lib.make_space(devices, SPEC, 100, tolerance=tolerance, **PUBLISHED)


def test_published_costs_are_those_of_the_formulas_for_every_kind():
    space = published_space("memory=12GiB flops=2x*2")
    by_hand = {"w1d1": (1, 2088), "w2d4": (16, 2856), "w4d2": (32, 2856), "w3d2": (18, 2600), "w5d4": (100, 8232)}
    assert {bucket.limit for bucket in space.buckets} == {2 * 4 * 2**2 * 4}
    assert {bucket.memory_bytes for bucket in space.buckets} == {12 * 2**30}  # also where the decoder is
    for kind in ("mlcn1", "mlcn2"):
        for lane, (load, mib) in by_hand.items():
            i = space.menu.index(LaneSpec(kind, int(lane[1]), int(lane[3])))
            for bucket in space.buckets:
                assert (bucket.loads[i], bucket.lane_bytes[i]) == (load, mib * 2**20)
    assert space.report(((i,), ()))[0]["cost"] == 100
    w2d1 = space.menu.index(LaneSpec("mlcn1", 2, 1))
    assert space.buckets[0].lane_bytes[w2d1] == pytest.approx((2**0.5 * 256 + 1832) * 2**20)


def test_published_mixes_fit_the_formulas():
    rng = random.Random(0)
    for devices, limit, mib in (("memory=12GiB flops=1x*4", 64, 12288), ("memory=4GiB flops=8x*4", 512, 4096)):
        space = published_space(devices)
        for _ in range(50):
            for own in space.draw(rng):
                lanes = [space.menu[lane] for lane in own]
                assert sum(lane.width**2 * lane.depth for lane in lanes) <= limit
                assert sum(lane.width ** (lane.depth / 2) * 256 + 1832 for lane in lanes) <= mib


def test_by_formula_6_1_two_gibibytes_hold_no_lane_and_twelve_five():
    """Against the thesis's figure 6.3, which has models for devices of 2 GB."""
    message = "device 0 has a cost.* of 512 and 2,048.0 MiB, it needs a cost.* of 1 and 2,088.0 MiB"
    with pytest.raises(space_lib.NoLaneFits, match=message):
        published_space("memory=2GiB flops=8x*8")
    bucket, rng = published_space("memory=12GiB flops=8x").buckets[0], random.Random(0)
    assert bucket.fits([0] * 5)
    assert not bucket.fits([0] * 6)
    four, eight = (published_space(f"memory=12GiB flops={times}x*8") for times in (4, 8))
    assert four.draw(random.Random(1)) == eight.draw(random.Random(1))  # FLOPs no longer limit anything
    assert max(bucket.load(own) for own in (eight.draw(rng)[0] for _ in range(300))) < 4 * 64


@pytest.mark.parametrize("devices", ["flops=3G", "memory=12GiB flops=1x, flops=1e9", "profile=gpu.json seconds=0.05"])
def test_published_costs_are_in_baselines_only(devices):
    with pytest.raises(
        InputError, match=r"formulas give neither FLOPs nor seconds: .* such as 'memory=12GiB flops=4x\*8'"
    ):
        published_space(devices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": "thesis"}, "search.costs is 'thesis'; it must be one of exact, published"),
        ({"costs": "published", "kinds": "mlcn1,resnet"}, "for the kinds mlcn1 and mlcn2, but search.kinds"),
        ({"costs": "published", "baseline": "resnet:w1"}, "search.baseline 'resnet:w1': give only those kinds"),
    ],
)
def test_costs_that_cannot_be_used(changes, message):
    with pytest.raises(InputError, match=message):
        SearchSettings(**changes)

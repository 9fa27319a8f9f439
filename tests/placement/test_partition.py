"""Partitioners against brute force, their proven bounds, and lanes that do not fit."""

import itertools
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import tie_break
from mlcn_jax.errors import InputError
from mlcn_jax.placement import exact
from mlcn_jax.placement.partition import PARTITIONERS, partition
from mlcn_jax.placement.problem import Problem, lower_bound_seconds, uniform_seconds

COSTS = st.lists(st.integers(1, 125), min_size=1, max_size=6)
SPEEDS = st.lists(st.sampled_from([1.0, 2.0, 3.1, 4.2, 6.0]), min_size=1, max_size=3)


def on_speeds(costs, speeds, **more):
    return Problem(uniform_seconds(costs, [1 / speed for speed in speeds]), **more)


def brute_force(problem):
    """The shortest makespan of all placements that fit; None where none does."""
    best = None
    for places in itertools.product(range(problem.num_devices), repeat=len(problem.seconds)):
        loads, held = list(problem.base_seconds), [0] * problem.num_devices
        for lane, device in enumerate(places):
            loads[device] += problem.seconds[lane][device]
            held[device] += problem.memory_bytes[lane]
        if all(h <= limit for h, limit in zip(held, problem.limit_bytes, strict=True)):
            best = max(loads) if best is None else min(best, max(loads))
    return best


@settings(max_examples=60, deadline=None)
@given(costs=COSTS, devices=st.integers(1, 3))
def test_on_equal_devices_greedy_and_karmarkar_karp_keep_their_bound(costs, devices):
    problem = on_speeds(costs, [1.0] * devices)
    best = brute_force(problem)
    for name in ("greedy", "greedy_published", "karmarkar_karp"):
        assert partition(name, problem).makespan_seconds <= (4 / 3 - 1 / (3 * devices)) * best + 1e-9


@settings(max_examples=60, deadline=None)
@given(costs=COSTS, speeds=SPEEDS, base=st.floats(0, 50))
def test_no_partitioner_beats_brute_force_and_exact_equals_it(costs, speeds, base):
    problem = on_speeds(costs, speeds, base_seconds=[base] + [0.0] * (len(speeds) - 1))
    best = brute_force(problem)
    assert lower_bound_seconds(problem) <= best * (1 + 1e-9)
    for name in PARTITIONERS:
        placement = partition(name, problem, time_limit_seconds=60.0)
        assert placement.lower_bound_seconds <= best * (1 + 1e-9)
        assert placement.makespan_seconds >= best * (1 - 1e-9)
        if placement.optimal:
            assert placement.makespan_seconds == pytest.approx(best, rel=2e-5)
    assert partition("exact", problem, time_limit_seconds=60.0).optimal
    if not base:
        assert partition("greedy", problem).makespan_seconds <= 1.58 * best + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    lanes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=1, max_size=5),
    limits=st.lists(st.integers(10, 40), min_size=1, max_size=3),
)
def test_memory_limits_are_kept_and_exact_finds_what_fits(lanes, limits):
    costs, memory = zip(*lanes, strict=True)
    problem = on_speeds(costs, [1.0] * len(limits), memory_bytes=memory, limit_bytes=limits)
    best = brute_force(problem)
    for name in PARTITIONERS:
        try:
            placement = partition(name, problem, time_limit_seconds=60.0)
        except InputError:
            assert best is None or name != "exact"
            continue
        assert all(held <= limit for held, limit in zip(placement.memory_bytes, limits, strict=True))
        if name == "exact":
            assert placement.makespan_seconds == pytest.approx(best, rel=2e-5)


@pytest.mark.parametrize(
    ("costs", "memory", "limits"),
    [([5, 5, 4, 4, 3, 3, 2, 2], [1] * 6 + [3, 3], [8, 8, 3]), ([4, 4, 4, 9], [1] * 4, [4, 2])],
)
def test_a_device_that_is_thousands_of_times_as_fast_keeps_exact_from_no_optimum(costs, memory, limits):
    """It could end at so many times that trying them one by one takes longer than there is."""
    factors = [1.0] * (len(limits) - 1) + [1 / 5000]
    names = [f"lane {i}" for i in range(len(costs))]
    devices = [f"device {i}" for i in range(len(limits))]
    problem = Problem(uniform_seconds(costs, factors), memory, limits, lane_names=names, device_names=devices)
    found = partition("exact", problem, time_limit_seconds=60.0)
    assert found.optimal
    assert found.makespan_seconds == pytest.approx(brute_force(problem), rel=1e-4)


@pytest.mark.parametrize("slow", [1e5, 1e18])
@pytest.mark.parametrize("limits", [(), (5, 5, 0)])
def test_a_slow_device_does_not_hide_how_fast_the_others_are(limits, slow):
    """With limits, greedy finds no room for the lane that needs 3."""
    rng = random.Random(0)
    problem = Problem([[rng.uniform(1, 2), rng.uniform(1, 2), slow] for _ in range(8)], [1] * 7 + [3], limits)
    found = partition("exact", problem, time_limit_seconds=60.0)
    assert found.optimal
    assert found.makespan_seconds == pytest.approx(brute_force(problem), rel=2e-5)


def test_a_device_that_is_a_million_times_as_slow_takes_no_memory():
    tracemalloc.start()
    partition("karmarkar_karp", Problem([[1.0, 1e6]] * 3))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_lanes_that_do_not_fit_where_karmarkar_karp_wants_them_go_where_they_end_first():
    """The first device has room for one lane; the rest of its share must not go to the slow, empty one."""
    problem = Problem([[1.0, 50.0, 1.0]] * 8, memory_bytes=[1] * 8, limit_bytes=[1, 8, 8])
    assert partition("karmarkar_karp", problem).makespan_seconds < 60


def test_exact_keeps_limits_that_fractions_of_bytes_would_exceed():
    problem = Problem([[1.0, 9.0]] * 4, [1000.45] * 4, [4001.0, 9999.0])
    assert sorted(partition("exact", problem).device_of) == [0, 0, 0, 1]


def test_exact_out_of_time_is_no_worse_than_greedy(monkeypatch):
    problem = Problem([[3.1, 3.1], [5.0, 5.0], [2.2, 2.2]])
    greedy = partition("greedy", problem).makespan_seconds
    monkeypatch.setattr(exact, "integer_costs", lambda problem: None)
    monkeypatch.setattr(exact._Program, "solve", lambda self, deadline: ([0, 0, 0], "feasible", 0))
    found = partition("exact", problem)
    assert (found.makespan_seconds, found.optimal) == (greedy, False)


def test_a_table_of_seconds_sends_each_lane_where_it_is_fast():
    problem = Problem([[1.0, 9.0], [9.0, 1.0], [2.0, 8.0]])
    assert partition("exact", problem).device_of == (0, 1, 0)
    assert partition("greedy", problem).device_of == (0, 1, 0)


def test_loads_and_imbalance_follow_from_the_placement():
    placement = partition("round_robin", on_speeds([6, 2, 4], [1.0, 2.0], memory_bytes=[1, 2, 3]))
    assert placement.device_of == (0, 1, 0)
    assert placement.seconds == (10.0, 1.0)
    assert placement.memory_bytes == (4.0, 2.0)
    assert placement.imbalance == pytest.approx(10 / 5.5 - 1)
    assert placement.lower_bound_seconds == pytest.approx(4.0)


def test_greedy_published_ignores_that_a_device_is_slow_until_it_is_loaded():
    problem = on_speeds([6, 2], [1.0, 6.0])
    assert partition("greedy_published", problem).device_of == (0, 1)
    assert partition("greedy", problem).device_of == (1, 1)
    assert partition("greedy_published", on_speeds([6, 2], [6.0, 1.0])).device_of == (0, 1)
    assert partition("greedy", on_speeds([6, 2], [6.0, 1.0])).device_of == (0, 0)


def test_greedy_published_is_the_better_the_later_the_slowest_device_is_listed():
    """Over all orders of the thesis's devices, against random placement of few lanes."""
    by_place = [[], [], [], []]
    for speeds, gain in tie_break.gains(num_lanes=6, draws=30, seed=0).items():
        by_place[speeds.index(1.0)].append(gain)
    first, second, third, last = ([gain["greedy_published"] for gain in gains] for gains in by_place)
    assert max(first) < 1 < min(second)
    assert max(second) < min(third) < min(last)
    assert min(gain["greedy"] for gains in by_place for gain in gains) > max(third)


def test_random_follows_its_seed():
    problem = on_speeds([1] * 30, [1.0] * 4)
    assert partition("random", problem, seed=1) == partition("random", problem, seed=1)
    assert partition("random", problem, seed=1).device_of != partition("random", problem, seed=2).device_of


def test_greedy_shortens_the_makespan_of_random_as_the_thesis_found():
    rng, ratios = random.Random(0), {(1.0, 3.1, 4.2, 6.0): [], (1.0,) * 4: []}
    for seed in range(100):
        costs = [rng.randint(1, 5) ** 2 * rng.randint(1, 5) for _ in range(24)]
        for speeds, values in ratios.items():
            problem = on_speeds(costs, speeds)
            greedy = partition("greedy", problem).makespan_seconds
            values.append(partition("random", problem, seed=seed).makespan_seconds / greedy)
    unequal, equal = (sum(values) / len(values) for values in ratios.values())
    assert unequal > 3.0
    assert equal > 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": []}, "at least one lane"),
        ({"seconds": [[1.0, 2.0], [1.0]]}, "on all 2 devices"),
        ({"seconds": [[0.0]]}, "above 0"),
        ({"seconds": [[float("nan")]]}, "above 0"),
        ({"seconds": [[1.0]], "memory_bytes": [1, 2]}, "2 entries for 1 lanes"),
        ({"seconds": [[1.0]], "limit_bytes": [-1]}, "0 or more"),
        ({"seconds": [[1.0, float("inf")]]}, "above 0 on every device, and finite"),
        ({"seconds": [[1.0]], "memory_bytes": [float("inf")]}, "memory_bytes holds inf: numbers must be finite"),
        ({"seconds": [[1.0, 1.0]], "base_seconds": [1.0, float("nan")]}, "base_seconds holds nan"),
        ({"seconds": [[1.0, 1.0]], "limit_bytes": [1.0, float("nan")]}, "limit_bytes holds nan"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Problem(**arguments)


def test_lanes_that_cannot_fit_name_the_obstacle():
    mib = 2**20
    wide = on_speeds([1, 9], [1, 1], memory_bytes=[mib, 30 * mib], limit_bytes=[20 * mib, 10 * mib])
    with pytest.raises(InputError, match=r"lane 1 needs 30 MiB, more than any device can hold .*device 0, 20 MiB"):
        partition("greedy", wide)
    many = on_speeds([1] * 4, [1, 1], memory_bytes=[8 * mib] * 4, limit_bytes=[20 * mib, 10 * mib])
    with pytest.raises(InputError, match="need 32 MiB together, but the devices hold 30 MiB"):
        partition("greedy", many)
    pieces = on_speeds([1] * 3, [1, 1], memory_bytes=[8 * mib] * 3, limit_bytes=[15 * mib, 15 * mib])
    for name in PARTITIONERS:
        with pytest.raises(InputError, match="8 MiB"):
            partition(name, pieces)
    with pytest.raises(InputError, match=r"'best' is unknown: use one of random, .*exact"):
        partition("best", many)

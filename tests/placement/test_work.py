"""Work and depth of programs by hand, and bounds against each other."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from mlcn_jax.placement import bounds
from mlcn_jax.placement.simulate import Cluster, Link, collective_seconds
from mlcn_jax.placement.work import combined, work_of


def test_elements_reductions_and_products_by_hand():
    x = jnp.ones((8, 16))
    found = work_of(lambda x: jnp.exp(x) + 1, x)
    assert (found.work, found.depth) == (256, 2)
    found = work_of(lambda x: jnp.sum(x, axis=1), x)
    assert (found.work, found.depth) == (128, 4)
    found = work_of(lambda x: x @ x.T, x)
    assert (found.work, found.depth, found.product_flops) == (2 * 8 * 8 * 16, 1 + 4, 2 * 8 * 8 * 16)
    assert found.least_bytes == 4 * (8 * 16 + 8 * 8)
    assert found.moved_bytes == found.least_bytes + 4 * (2 * 8 * 16 + 8 * 8)


def test_a_convolution_sums_over_its_window_and_channels():
    x, kernel = jnp.ones((2, 10, 10, 3)), jnp.ones((5, 5, 3, 7))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    found = work_of(convolve, x, kernel)
    assert (found.work, found.depth) == (2 * 2 * 36 * 7 * 75, 1 + 7)


def test_what_only_moves_values_takes_nothing():
    found = work_of(
        lambda x: jnp.concatenate([x.T.reshape(-1), jnp.zeros(3)])[2:].astype(jnp.bfloat16), jnp.ones((4, 5))
    )
    assert (found.work, found.depth) == (0, 0)
    found = work_of(lambda x: checkpoint_name(jnp.tile(jnp.stack(jnp.unstack(x)[::-1]), 2), "kept"), jnp.ones((4, 5)))
    assert (found.work, found.depth) == (0, 0)


def test_independent_chains_are_side_by_side():
    def two(x):
        return jnp.exp(jnp.exp(jnp.exp(x))) + jnp.sin(x)

    assert work_of(two, jnp.ones(10)).depth == 4
    assert work_of(two, jnp.ones(10)).work == 50


def test_results_that_nothing_reads_take_nothing():
    assert work_of(lambda x: (x, jnp.exp(x))[0], jnp.ones(10)).work == 0


@pytest.mark.parametrize("length", [2, 100])
def test_a_loop_is_followed_turn_by_turn(length):
    def loop(x):
        return jax.lax.scan(lambda carry, row: (jnp.sin(carry + row), jnp.exp(row)), x[0], x)

    x = jnp.ones((length, 6))
    found = work_of(loop, x)
    assert found.work == length * 3 * 6
    assert found.depth == 2 * length  # the rows' own chains are shorter, and side by side
    side_by_side = work_of(lambda x: jax.lax.scan(lambda carry, row: (carry, jnp.exp(row)), 0.0, x)[1], x)
    assert side_by_side.depth == 1


@pytest.mark.parametrize("length", [3, 4, 5, 10, 32, 100])
def test_a_chain_that_another_one_overtakes_later_is_followed_to_the_end(length):
    def loop(x):
        start = x
        for _ in range(30):
            start = jnp.cos(start)

        def turn(carry, _):
            fast, slow = carry
            fast = jnp.sin(jnp.sin(fast))
            return (fast, slow + fast), jnp.exp(slow)

        return jax.lax.scan(turn, (x, start), None, length=length)

    fast, slow = 0, 30
    for _ in range(length):
        row, fast = slow + 1, fast + 2
        slow = max(fast, slow) + 1
    assert work_of(lambda x: loop(x)[0][1], jnp.ones(8)).depth == slow
    assert work_of(lambda x: loop(x)[1], jnp.ones(8)).depth == row


def test_of_branches_the_largest_counts():
    def choose(flag, x):
        return jax.lax.cond(flag, lambda x: jnp.exp(jnp.exp(x)), lambda x: x, x)

    found = work_of(choose, True, jnp.ones(10))
    assert 20 <= found.work <= 22
    assert 2 <= found.depth <= 4


def test_functions_within_and_own_gradients_are_followed():
    @jax.custom_vjp
    def cube(x):
        return x * x * x

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3.0 * x * x * g,))
    assert work_of(jax.jit(cube), jnp.ones(10)).work == 20
    assert work_of(lambda x: jax.grad(lambda x: jnp.sum(jax.checkpoint(cube)(x)))(x), jnp.ones(10)).work >= 30


def test_parts_add_up():
    part = work_of(jnp.exp, jnp.ones(10))
    whole = combined([(3, part), (1, part)], 7, 100)
    assert (whole.work, whole.depth, whole.least_bytes, whole.parallelism) == (40, 7, 100, 40 / 7)


@pytest.mark.parametrize("length", [2, 20])
def test_a_result_of_an_early_turn_can_be_the_deepest(length):
    def loop(x):
        deep = x
        for _ in range(30):
            deep = jnp.cos(deep)
        return jax.lax.scan(lambda carry, row: (row, carry), deep, jnp.ones((length, 8)))[1]

    assert work_of(lambda x: jnp.sin(loop(x)), jnp.ones(8)).depth == 31


def test_communication_by_hand():
    link = Link(1.0, 0.5)  # G is 2
    assert bounds.communication(4, 8.0, link) == {
        "tree": 2 * 2 * (1 + 16),
        "butterfly": 2 * (1 + 16),
        "ring": 2 * 3 * (1 + 4),
        "rabenseifner": 2 * 2 + 2 * 16 * 3 / 4,
        "least_latency": 2,
        "least_bytes": 24,
    }
    assert bounds.communication(6, 8.0, link) == {
        "tree": 2 * 3 * (1 + 16),
        "butterfly": (2 + 2) * (1 + 16),
        "ring": 2 * 5 * (1 + 16 / 6),
        "rabenseifner": 2 * 2 + 2 * 16 * 3 / 4 + 2 * (1 + 16),
        "least_latency": 3,
        "least_bytes": 2 * 16 * 5 / 6,
    }


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1024), st.integers(0, 10**9), st.floats(0, 1e-2), st.floats(1e3, 1e11))
def test_no_algorithm_beats_its_bounds_and_the_simulator_agrees(devices, num_bytes, latency, rate):
    link = Link(latency, rate)
    found = bounds.communication(devices, num_bytes, link)
    for name in bounds.ALGORITHMS:
        assert found[name] >= found["least_latency"] * (1 - 1e-9)
        if name != "butterfly":
            assert found[name] >= found["least_bytes"] * (1 - 1e-9)
    simulated = collective_seconds("all-reduce", num_bytes, Cluster((0,) * devices, link, link))
    assert found["ring"] == pytest.approx(simulated)


def test_communication_outweighs_computing_where_the_curves_cross():
    link = Link(0.0, 1.0)
    found = bounds.limit(100.0, dict.fromkeys(range(2, 200), 10.0), link)  # computing 100 / P, communication up to 20
    times = {n: 100 / n + bounds.fastest(n, 10.0, link) for n in range(1, 200)}
    assert found.outweighed_at == next(n for n in range(2, 200) if bounds.fastest(n, 10.0, link) >= 100 / n)
    few = bounds.limit(100.0, dict.fromkeys(range(2, 5), 10.0), link)
    assert few.best_speedup == pytest.approx(100 / min(times[n] for n in range(1, 5)))
    assert few.outweighed_at is None
    assert bounds.limit(1.0, {2: 1e9}, link).at_devices == 1


def test_only_numbers_of_devices_that_are_possible_and_work_that_is_divided_count():
    free = Link(0.0, 1e9)
    assert bounds.limit(100.0, {3: 0.0, 7: 0.0}, free) == bounds.Limit(None, pytest.approx(7.0), 7)
    undivided = bounds.limit(100.0, {3: 0.0, 7: 0.0}, free, undivided_seconds=30.0)
    assert undivided == bounds.Limit(None, pytest.approx(100 / (30 + 70 / 7)), 7)


def test_brent_and_the_least_seconds():
    assert bounds.brent(100, 7, 10) == (10, 17)
    assert bounds.brent(100, 30, 10) == (30, 40)
    assert bounds.least_seconds(100, 10, 50, 1, devices=2) == 5.0

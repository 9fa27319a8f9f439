"""Simulated steps against formulas by hand, against collectives message by message, and against common sense."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcn_jax.errors import InputError
from mlcn_jax.placement.partition import partition
from mlcn_jax.placement.problem import Placement, Problem, uniform_seconds
from mlcn_jax.placement.simulate import (
    ALGORITHMS,
    COLLECTIVES,
    EXCHANGES,
    Cluster,
    Link,
    collective_seconds,
    simulate_mesh,
    simulate_stacks,
)

WITHIN, BETWEEN = Link(2e-5, 1e10), Link(5e-5, 1.25e9)
FREE = Link(0.0, math.inf)
LINKS = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e11))
HOSTS = st.lists(st.integers(0, 6), min_size=1, max_size=20)
BYTES = st.integers(0, 10**9)
SECONDS = st.floats(1e-3, 10)


def one_host(devices, link=WITHIN):
    return Cluster((0,) * devices, link, link)


def ring_by_messages(kind, num_bytes, links):
    """The end of a ring in which device i passes what it has got on over links[i] as soon as that is free."""
    devices = len(links)
    free, arrived = [0.0] * devices, [0.0] * devices  # arrived: the part that each device passes on next
    for _ in range((devices - 1) * (2 if kind == "all-reduce" else 1)):
        free = [max(free[i], arrived[i]) + links[i].seconds(num_bytes / devices) for i in range(devices)]
        arrived = [free[i - 1] for i in range(devices)]
    return max(free)


def tree_by_messages(starts, link, grows):
    """The end of a binomial tree: the first half, a power of two, and the rest become one device each, then meet.

    `starts` says from when each device has how many bytes; the result says the same of the first one.
    """
    if len(starts) == 1:
        return starts[0]
    half = 2 ** (math.ceil(math.log2(len(starts))) - 1)
    (ready, held), (other_ready, sent) = (
        tree_by_messages(part, link, grows) for part in (starts[:half], starts[half:])
    )
    return max(ready, other_ready) + link.seconds(sent), held + sent * grows


def test_collectives_on_two_and_four_devices_by_hand():
    a, b = 2e-5, 1e-10
    for devices, ring, ring_reduce, tree, tree_reduce in (
        (2, a + 500 * b, 2 * a + 1000 * b, 2 * a + 1500 * b, 2 * a + 2000 * b),
        (4, 3 * a + 750 * b, 6 * a + 1500 * b, 4 * a + 2750 * b, 4 * a + 4000 * b),
    ):
        cluster = one_host(devices)
        for kind in ("all-gather", "reduce-scatter"):
            assert collective_seconds(kind, 1000, cluster) == pytest.approx(ring)
            assert collective_seconds(kind, 1000, cluster, algorithm="tree") == pytest.approx(tree)
        assert collective_seconds("all-reduce", 1000, cluster) == pytest.approx(ring_reduce)
        assert collective_seconds("all-reduce", 1000, cluster, algorithm="tree") == pytest.approx(tree_reduce)


def test_collectives_over_two_hosts_by_hand():
    cluster = Cluster((0, 0, 1, 1), WITHIN, BETWEEN)
    ring, tree = (collective_seconds("all-reduce", 4000, cluster, algorithm=name) for name in ALGORITHMS)
    assert ring == pytest.approx(6 * BETWEEN.seconds(1000))
    assert tree == pytest.approx(2 * WITHIN.seconds(4000) + 2 * BETWEEN.seconds(4000))
    gather = collective_seconds("all-gather", 4000, cluster, algorithm="tree")
    up = WITHIN.seconds(1000) + BETWEEN.seconds(2000)
    assert gather == pytest.approx(up + WITHIN.seconds(4000) + BETWEEN.seconds(4000))


def test_groups_share_the_link_of_a_host_that_they_leave_and_no_other():
    cluster = Cluster((0, 0, 1, 1), WITHIN, BETWEEN)
    half = Link(BETWEEN.latency_seconds, BETWEEN.bytes_per_second / 2)
    across = collective_seconds("all-reduce", 4000, cluster, [[0, 2], [1, 3]])
    assert across == pytest.approx(2 * half.seconds(2000))
    inside = collective_seconds("all-reduce", 4000, cluster, [[0, 1], [2, 3]])
    assert inside == pytest.approx(2 * WITHIN.seconds(2000))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_link_that_is_not_shared_is_not_slower_because_others_are(algorithm):
    slow, fast = Link(0.0, 1e8), Link(0.0, 1e9)
    cluster = Cluster((0, 1, 2, 2), WITHIN, {0: slow, 1: fast, 2: fast})
    both = collective_seconds("all-reduce", 1e6, cluster, [[0, 2], [1, 3]], algorithm=algorithm)
    assert both == collective_seconds("all-reduce", 1e6, cluster, [[0, 2]], algorithm=algorithm)
    alike = Cluster((0, 1, 2, 2, 3, 3), WITHIN, fast)  # of equal groups, some leave a host that others leave too
    groups = [[2, 4], [3, 5], [0, 1]]
    apart = [collective_seconds("all-reduce", 1e6, alike, some, algorithm=algorithm) for some in (groups, groups[2:])]
    assert apart[0] == pytest.approx(2 * apart[1])


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(COLLECTIVES), num_bytes=BYTES, hosts=HOSTS, within=LINKS, between=LINKS)
def test_a_ring_takes_what_its_messages_take(kind, num_bytes, hosts, within, between):
    hosts = sorted(hosts)
    links = [within if hosts[i] == hosts[(i + 1) % len(hosts)] else between for i in range(len(hosts))]
    seconds = collective_seconds(kind, num_bytes, Cluster(hosts, within, between))
    assert seconds == pytest.approx(ring_by_messages(kind, num_bytes, links))


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(COLLECTIVES), num_bytes=BYTES, hosts=HOSTS, within=LINKS, between=LINKS)
def test_a_tree_takes_what_its_messages_take(kind, num_bytes, hosts, within, between):
    def to_one(held, grows):
        counts = sorted((hosts.count(host) for host in set(hosts)), reverse=True)
        on_hosts = [tree_by_messages([(0.0, held)] * count, within, grows) for count in counts]
        return tree_by_messages(on_hosts, between, grows)[0]

    back = to_one(num_bytes, grows=False)
    expected = back + (back if kind == "all-reduce" else to_one(num_bytes / len(hosts), grows=True))
    seconds = collective_seconds(kind, num_bytes, Cluster(hosts, within, between), algorithm="tree")
    assert seconds == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(COLLECTIVES),
    algorithm=st.sampled_from(ALGORITHMS),
    num_bytes=BYTES,
    hosts=HOSTS,
    links=st.tuples(LINKS, LINKS),
    better=st.tuples(st.floats(0, 1), st.floats(1, 100)),
)
def test_a_better_link_is_never_slower(kind, algorithm, num_bytes, hosts, links, better):
    before = collective_seconds(kind, num_bytes, Cluster(hosts, *links), algorithm=algorithm)
    for which in (0, 1):
        changed = list(links)
        latency, bandwidth = links[which].latency_seconds, links[which].bytes_per_second
        changed[which] = Link(latency * better[0], bandwidth * better[1])
        after = collective_seconds(kind, num_bytes, Cluster(hosts, *changed), algorithm=algorithm)
        assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_on_many_devices_a_ring_wins_with_large_messages_and_a_tree_with_small_ones(kind):
    for num_bytes, winner in ((1e10, "ring"), (1e3, "tree")):
        seconds = {name: collective_seconds(kind, num_bytes, one_host(64), algorithm=name) for name in ALGORITHMS}
        assert min(seconds, key=seconds.__getitem__) == winner


@settings(max_examples=60, deadline=None)
@given(lanes=SECONDS, head=SECONDS, share=st.floats(0, 1), exchange=st.sampled_from(EXCHANGES))
def test_one_device_takes_its_work_and_sends_nothing(lanes, head, share, exchange):
    placement = Placement("by hand", (0,), (lanes,), (), 0.0)
    stacks = simulate_stacks(
        placement, one_host(1), column_bytes=4000, head_seconds=head, forward_share=share, exchange=exchange
    )
    exchanged = dict.fromkeys(COLLECTIVES, 4000)
    mesh = simulate_mesh(
        1, 1, one_host(1), lane_seconds=[lanes], head_seconds=[head], forward_share=share, exchanged=exchanged
    )
    for step in (stacks, mesh):
        assert step.communication_seconds == 0
        assert step.total_seconds == pytest.approx(lanes + head)
        assert step.idle_shares == pytest.approx((0.0,), abs=1e-12)


def test_stacks_by_hand():
    cluster = Cluster((0, 0, 1), WITHIN, BETWEEN)
    placement = Placement("by hand", (0, 1, 1, 2), (1.0, 4.0, 2.0), (), 0.0)
    step = simulate_stacks(placement, cluster, column_bytes=4000, head_seconds=0.5, forward_share=0.25)
    sent = WITHIN.seconds(8000) + BETWEEN.seconds(4000)
    assert step.gather_seconds == step.spread_seconds == pytest.approx(sent)
    assert (step.forward_seconds, step.head_seconds, step.backward_seconds) == (1.0, 0.5, 3.0)
    assert step.total_seconds == pytest.approx(4.5 + 2 * sent)
    assert step.busy_seconds == (1.5, 4.0, 2.0)
    assert step.idle_shares[1] == pytest.approx(1 - 4 / step.total_seconds)


def test_in_a_collective_every_stack_counts_as_many_lanes_as_the_largest():
    placement = Placement("by hand", (0, 1, 1), (1.0, 2.0), (), 0.0)
    step = simulate_stacks(
        placement, one_host(2), column_bytes=4000, head_seconds=0.5, forward_share=0.25, exchange="ring"
    )
    assert step.gather_seconds == step.spread_seconds == pytest.approx(WITHIN.seconds(8000))


def test_mesh_by_hand():
    cluster = Cluster((0, 0, 1, 1), WITHIN, BETWEEN)
    step = simulate_mesh(
        2,
        2,
        cluster,
        lane_seconds=[1.0, 1.0, 4.2, 4.2],
        head_seconds=[0.1, 0.1, 0.2, 0.2],
        forward_share=0.5,
        exchanged={"all-gather": 8000, "reduce-scatter": 8000, "all-reduce": 1e6},
        num_collectives={"all-gather": 4},
    )
    assert step.gather_seconds == pytest.approx(4 * WITHIN.seconds(1000))
    assert step.spread_seconds == pytest.approx(WITHIN.seconds(4000))
    assert step.reduce_seconds == pytest.approx(2 * Link(5e-5, 1.25e9 / 2).seconds(5e5))
    assert step.total_seconds == pytest.approx(4.4 + step.communication_seconds)
    assert step.idle_shares[0] == pytest.approx(1 - 1.1 / step.total_seconds)


@settings(max_examples=60, deadline=None)
@given(
    lanes=st.integers(1, 4),
    devices=st.integers(1, 8),
    seconds=SECONDS,
    share=st.floats(0, 1),
    link=LINKS,
    exchange=st.sampled_from(EXCHANGES),
)
def test_stacks_of_equal_lanes_on_equal_devices_are_a_mesh(lanes, devices, seconds, share, link, exchange):
    cluster, column_bytes = one_host(devices, link), 4000
    placement = partition("greedy", Problem(uniform_seconds([seconds] * lanes * devices, [1.0] * devices)))
    stacks = simulate_stacks(
        placement, cluster, column_bytes=column_bytes, head_seconds=0.0, forward_share=share, exchange=exchange
    )
    columns = lanes * devices * column_bytes
    mesh = simulate_mesh(
        1,
        devices,
        cluster,
        lane_seconds=[lanes * seconds] * devices,
        head_seconds=[0.0] * devices,
        forward_share=share,
        exchanged={"all-gather": columns, "reduce-scatter": columns},
        algorithm="tree" if exchange == "tree" else "ring",
    )
    assert stacks.total_seconds == pytest.approx(mesh.total_seconds)


@settings(max_examples=60, deadline=None)
@given(devices=st.integers(1, 64), exchange=st.sampled_from(EXCHANGES))
def test_with_free_links_and_lanes_for_all_n_devices_are_n_times_as_fast(devices, exchange):
    placement = partition("greedy", Problem(uniform_seconds([1.0] * devices, [1.0] * devices)))
    step = simulate_stacks(
        placement,
        one_host(devices, FREE),
        column_bytes=4000,
        head_seconds=0.0,
        forward_share=0.3,
        exchange=exchange,
    )
    assert step.total_seconds == pytest.approx(1.0)
    assert max(step.idle_shares) == pytest.approx(0.0, abs=1e-9)


def test_devices_without_lanes_take_no_part():
    lanes = Placement("by hand", (0, 1), (1.0, 1.0), (), 0.0)
    idle = Placement("by hand", (0, 1), (1.0, 1.0, 0.0), (), 0.0)
    work = {"column_bytes": 4000, "head_seconds": 0.5, "forward_share": 0.3}
    for exchange in EXCHANGES:
        step = simulate_stacks(idle, one_host(3), exchange=exchange, **work)
        assert step.total_seconds == simulate_stacks(lanes, one_host(2), exchange=exchange, **work).total_seconds
        assert step.idle_shares[2] == 1.0


def test_1024_devices_on_128_hosts_take_milliseconds():
    cluster = Cluster([d // 8 for d in range(1024)], WITHIN, BETWEEN)
    placement = Placement("by hand", tuple(range(1024)) * 4, (1.0,) * 1024, (), 0.0)
    exchanged = dict.fromkeys(COLLECTIVES, 1e6)
    started = time.process_time()
    for algorithm in ALGORITHMS:
        for data in (1, 32, 1024):
            work = {"lane_seconds": [1.0] * 1024, "head_seconds": [0.1] * 1024, "forward_share": 0.3}
            simulate_mesh(data, 1024 // data, cluster, exchanged=exchanged, algorithm=algorithm, **work)
        simulate_stacks(placement, cluster, column_bytes=4000, head_seconds=0.1, forward_share=0.3, exchange=algorithm)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1e-6, 1e9), "latency_seconds is -1e-06"),
        (lambda: Link(0.0, 0.0), "bytes_per_second is 0.0: give more than 0"),
        (lambda: Link(0.0, math.nan), "bytes_per_second is nan"),
        (lambda: Cluster((), WITHIN, BETWEEN), "no devices"),
        (lambda: collective_seconds("gossip", 1, one_host(2)), "'gossip' is unknown: use one of all-gather"),
        (lambda: collective_seconds("all-reduce", 1, one_host(2), algorithm="star"), "use one of ring, tree"),
        (lambda: collective_seconds("all-reduce", -1, one_host(2)), "num_bytes holds -1"),
        (lambda: collective_seconds("all-reduce", 1, one_host(2), [[0, 2]]), "device 2 is not in the cluster"),
        (lambda: collective_seconds("all-reduce", 1, one_host(2), [[]]), "empty or names a device twice"),
        (lambda: mesh(data=3), "data=3 times lane=1 does not match the cluster's 2 devices"),
        (lambda: mesh(lane_seconds=[1.0]), "lane_seconds has 1 entries for 2 devices"),
        (lambda: mesh(head_seconds=[0.0, -1.0]), "head_seconds holds -1.0"),
        (lambda: mesh(lane_seconds=[0.0, 0.0]), "no device has anything to compute"),
        (lambda: mesh(forward_share=1.5), "forward_share is 1.5"),
        (lambda: mesh(exchanged={"all-to-all": 1}), "'all-to-all' is unknown"),
        (lambda: mesh(num_collectives={"all-gather": 0}), "num_collectives holds 0"),
        (lambda: stacks(head=2), "device 2 is not in the cluster"),
        (lambda: stacks(exchange="pigeon"), "'pigeon' is unknown: use one of direct, ring, tree"),
        (lambda: stacks(column_bytes=-4), "column_bytes holds -4"),
        (lambda: stacks(head_seconds=math.inf), "head_seconds holds inf"),
        (lambda: stacks(placement=Placement("by hand", (0,), (1.0,), (), 0.0)), "placement.seconds has 1 entries"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def mesh(data=2, **changes):
    work = {"lane_seconds": [1.0, 1.0], "head_seconds": [0.0, 0.0], "forward_share": 0.3, "exchanged": {}}
    return simulate_mesh(data, 1, one_host(2), **{**work, **changes})


def stacks(**changes):
    placement = Placement("by hand", (0, 1), (1.0, 1.0), (), 0.0)
    work = {"placement": placement, "column_bytes": 4000, "head_seconds": 0.0, "forward_share": 0.3}
    return simulate_stacks(cluster=one_host(2), **{**work, **changes})

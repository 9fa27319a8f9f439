"""Adaptive time-outs and circuit breakers."""

import random

import pytest

from mlcn_jax.tiers import health
from mlcn_jax.tiers.health import Breaker, Times


def test_time_outs_follow_what_answers_take_and_double_when_they_fail():
    times = Times()
    assert times.timeout > 1, "nothing is known yet"
    for _ in range(100):
        times.took(0.1)
    assert times.mean == pytest.approx(0.1)
    assert 0.1 < times.late < 0.15
    assert times.timeout == pytest.approx(4 * times.late)
    before = times.timeout
    times.timed_out()
    assert times.timeout == pytest.approx(2 * before)
    times.took(0.1)
    assert times.timeout == pytest.approx(before, rel=0.05)
    for _ in range(100):
        times.timed_out()
    assert times.timeout == 60
    steady = times.late
    rng = random.Random(0)
    times.took(0.1)
    for _ in range(200):
        times.took(rng.uniform(0.05, 0.15))
    assert 0.15 < times.late < steady, "what varies is waited for"


def test_before_the_first_answer_it_is_known_in_what_time_none_came():
    times = Times()
    assert times.may_take(0.001), "nothing is known"
    times.takes_more_than(0.05)
    assert not times.may_take(0.05)
    assert times.may_take(0.1)
    times.takes_more_than(0.01)
    assert not times.may_take(0.05)
    times.took(0.03)
    assert times.may_take(0.05), "one has come"
    times.takes_more_than(0.5)
    assert times.may_take(0.05), "its time is known, and how much it varies"


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    return now


def test_a_node_that_fails_is_left_alone_for_longer_and_longer_and_tried_with_one_request(clock):
    breaker = Breaker(random.Random(0))
    for _ in range(2):
        breaker.asked()
        breaker.failed("slow")
    assert not breaker.is_open
    breaker.failed("slow")
    assert breaker.is_open
    assert breaker.reason == "slow"
    pauses = []
    for _ in range(4):
        start = clock[0]
        while breaker.is_open:
            clock[0] += 0.1
        pauses.append(clock[0] - start)
        probe = breaker.asked()
        assert breaker.is_open, "one request tries it, no second one"
        breaker.failed("slow", probe)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]
    breaker.seen()
    assert not breaker.is_open
    probe = breaker.asked()
    breaker.ended(probe)
    assert not breaker.is_open
    breaker.worked()
    assert not breaker.is_open
    assert breaker.reason == ""


def test_an_answer_that_cannot_be_right_is_enough(clock):
    breaker = Breaker(random.Random(0))
    breaker.failed("of another model", surely=True)
    assert breaker.is_open
    breaker.seen()
    assert breaker.is_open, "its health was not in doubt"
    clock[0] += 60
    assert not breaker.is_open


def until_tried(breaker, clock):
    while breaker.is_open:
        clock[0] += 0.1


def test_requests_sent_before_a_node_is_tried_again_say_nothing_of_it(clock):
    breaker = Breaker(random.Random(0))
    assert breaker.asked() is None
    for _ in range(3):
        breaker.failed("slow")
    until_tried(breaker, clock)
    probe = breaker.asked()
    breaker.ended(None)
    assert breaker.is_open, "the one that tries it is still out"
    breaker.failed("slow")
    breaker.ended(probe)
    assert not breaker.is_open, "the older failure began no new pause"
    breaker.failed("slow", probe)
    assert not breaker.is_open, "this one has ended"
    probe = breaker.asked()
    breaker.worked()
    assert not breaker.is_open, "an older request may work"
    breaker.failed("slow", probe)
    assert not breaker.is_open, "one failure after an answer"


@pytest.mark.parametrize("surely", [False, True])
def test_many_failures_at_once_are_one_pause(clock, surely):
    breaker = Breaker(random.Random(0))
    for _ in range(20):
        breaker.failed("no", surely=surely)
    start = clock[0]
    until_tried(breaker, clock)
    assert clock[0] - start < 1


def test_what_is_sure_of_one_of_many_failures_is_sure(clock):
    breaker = Breaker(random.Random(0))
    for sure in (False, False, False, True, False):
        breaker.failed("no", surely=sure)
    breaker.seen()
    assert breaker.is_open

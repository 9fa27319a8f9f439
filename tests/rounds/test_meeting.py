"""What counts in a round, and when it ends."""

import numpy as np
import pytest

from mlcn_jax.errors import InputError
from mlcn_jax.rounds.meeting import Meeting
from mlcn_jax.rounds.messages import Change, Fetch
from mlcn_jax.rounds.vector import decode, encode
from mlcn_jax.settings import RoundSettings

START = np.array([1, 2, 3], np.float32)


class _Over(Exception):
    pass


class Bed:
    """A meeting with a clock that is set by hand."""

    def __init__(self, workers=3, quorum=0, round_=0):
        self.now = 0.0
        settings = RoundSettings(5, workers, bits=32, quorum=quorum, patience_seconds=10)
        self.meeting = Meeting(settings, "run", START, round_, wait_seconds=0.0, clock=lambda: self.now)

    def fetch(self, worker, have=-1):
        return self.meeting.fetch(Fetch("run", worker, have))

    def push(self, worker, round_=0, value=1.0, run="run"):
        return self.meeting.push(
            Change(run, worker, round_, encode(np.full(3, value, np.float32), 32), {"loss": value})
        )

    def ended(self):
        """The workers that count, if the round can end."""

        def give_up():
            raise _Over

        try:
            changes, metrics = self.meeting.gather(give_up)
        except _Over:
            return None
        assert list(changes) == list(metrics)
        return list(changes)


def test_a_round_ends_when_all_have_answered():
    bed = Bed()
    assert [bed.push(i).counts for i in (2, 0)] == [True, True]
    assert bed.ended() is None
    bed.push(1)
    assert bed.ended() == [0, 1, 2]


def test_a_quorum_goes_on_after_some_patience():
    bed = Bed()
    bed.now = 5.0
    bed.push(0)
    bed.now = 100.0
    assert bed.ended() is None, "one of three is no quorum"
    bed.push(2)
    assert bed.ended() == [0, 2]
    bed.meeting.advance(START, b"")
    bed.push(0, 1)
    bed.push(2, 1)
    assert bed.ended() == [0, 2], "who did not answer is not waited for again"
    bed.meeting.advance(START, b"")
    assert bed.fetch(1, -1).round == 2
    bed.push(0, 2)
    bed.push(2, 2)
    assert bed.ended() is None, "it takes part again"
    bed.push(1, 2)
    assert bed.ended() == [0, 1, 2]


def test_patience_counts_from_the_first_answer():
    bed = Bed(2, quorum=1)
    bed.now = 50.0
    bed.push(0)
    bed.now = 59.0
    assert bed.ended() is None
    bed.now = 60.0
    assert bed.ended() == [0]


def test_nobody_counts_twice_and_nothing_late_counts():
    bed = Bed(2)
    bed.push(0, value=1.0)
    assert bed.push(0, value=7.0).counts
    bed.push(1)
    changes, _ = bed.meeting.gather(lambda: None)
    np.testing.assert_array_equal(changes[0], [1, 1, 1])
    bed.meeting.advance(START, b"")
    late = bed.push(1, 0)
    assert not late.counts
    assert late.reason == "round 0 is over, and round 1 is open"
    assert not bed.push(1, 2).counts


def test_what_a_worker_is_told():
    bed = Bed(1)
    begin = bed.fetch(0)
    assert (begin.round, begin.kind) == (0, "full")
    np.testing.assert_array_equal(decode(begin.content, 3, 32), START)
    assert bed.fetch(0, 0).kind == "again", "its change has not come, or was lost with the coordinator"
    bed.push(0)
    assert bed.fetch(0, 0).kind == "wait"
    bed.meeting.advance(START + 1, b"update")
    assert bed.fetch(0, 0).kind == "update"
    assert bed.fetch(0, 0).content == b"update"
    assert bed.fetch(0, 7).kind == "full", "it knows rounds that this coordinator does not"
    bed.meeting.finish()
    assert bed.fetch(0, 1).kind == "finished"
    assert not bed.push(0, 1).counts


def test_after_a_restart_there_is_no_update():
    assert Bed(1, round_=4).fetch(0, 3).kind == "full"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "other"}, "worker 0 is of another configuration or other images"),
        ({"worker": 3}, "there is no worker 3: train.rounds.workers is 3"),
        ({"value": np.nan}, "the change of worker 0 in round 0 has values that are not finite"),
    ],
)
def test_changes_that_cannot_be_used_are_refused_by_name(given, message):
    bed = Bed()
    with pytest.raises(InputError, match=message):
        bed.push(**{"worker": 0, **given})
    assert bed.ended() is None

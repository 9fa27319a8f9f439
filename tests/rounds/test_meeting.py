"""What counts in a round, and when it ends."""

import json
import threading

import numpy as np
import pytest

from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.rounds.meeting import Meeting
from mlcn_jax.rounds.messages import Change, Divergence, Fetch
from mlcn_jax.rounds.vector import decode, digest, encode
from mlcn_jax.settings import RoundSettings

START = np.array([1, 2, 3], np.float32)


def at(round_):
    """The parameters that a round begins with."""
    return START + np.float32(round_)


class _Over(Exception):
    pass


class Bed:
    """A meeting with a clock that is set by hand."""

    def __init__(self, workers=3, quorum=0, round_=0, counted=None):
        self.now = 0.0
        settings = RoundSettings(5, workers, bits=32, quorum=quorum, patience_seconds=10)
        self.meeting = Meeting(
            settings, "run", at(round_), round_, counted or {}, wait_seconds=0.0, clock=lambda: self.now
        )

    def fetch(self, worker, have=None, sent=None, **given):
        digests = ["" if round_ is None else digest(at(round_), round_) for round_ in (have, sent)]
        return self.meeting.fetch(Fetch("run", worker, *digests), **given)

    def push(self, worker, round_=0, value=1.0, run="run", **metrics):
        content = encode(np.full(3, value, np.float32), 32)
        metrics = {"loss": 1.0, "accuracy": 0.5} | metrics
        return self.meeting.push(Change(run, worker, round_, digest(at(round_), round_), content, metrics))

    def diverge(self, worker, round_=0):
        return self.meeting.diverge(Divergence("run", worker, digest(at(round_), round_), f"worker {worker} is NaN"))

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
    bed.meeting.advance(at(1), b"")
    bed.push(0, 1)
    bed.push(2, 1)
    assert bed.ended() == [0, 2], "who did not answer is not waited for again"
    bed.meeting.advance(at(2), b"")
    assert bed.fetch(1).round == 2
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
    bed.meeting.advance(at(1), b"")
    late = Bed(3)
    late.push(0)
    late.push(1)
    late.now = 10.0
    assert late.ended() == [0, 1]
    assert not late.push(2).counts, "the sum is being made"
    assert late.push(1).counts, "it is in the sum"
    assert late.fetch(2, 0).kind == "wait", "not to send again"
    late.meeting.advance(at(1), b"")
    assert late.push(1).counts, "whose first answer was lost"
    assert late.push(2).reason == "round 0 is over or was restarted; round 1 is open"
    assert not late.push(1, 2).counts


def test_who_counted_is_known_after_a_restart():
    """The coordinator was killed after it had saved a round, and before its answers came."""
    bed = Bed()
    bed.push(0)
    bed.push(1)
    bed.now = 10.0
    assert bed.ended() == [0, 1]
    restarted = Bed(round_=1, counted=json.loads(json.dumps(bed.meeting.counted)))
    assert restarted.push(0).counts, "it is in the sum"
    assert not restarted.push(2).counts
    assert restarted.fetch(1, sent=0).counted
    assert not restarted.fetch(2, sent=0).counted
    assert not restarted.fetch(1).counted, "it has sent nothing"
    for round_ in (1, 2):
        restarted.push(1, round_)
        restarted.push(2, round_)
        restarted.now += 10.0
        assert restarted.ended() == [1, 2]
        restarted.meeting.advance(at(round_ + 1), b"")
    assert restarted.fetch(0, sent=0).counted, "however long it was away"
    assert restarted.fetch(1, 2, sent=2).counted


def test_a_change_in_a_round_that_was_made_again_without_it_does_not_count():
    """The coordinator took it, and was killed before it saved the round."""
    assert Bed().push(2).counts
    restarted = Bed()
    restarted.push(0)
    restarted.push(1)
    restarted.now = 10.0
    assert restarted.ended() == [0, 1]
    restarted.meeting.advance(at(1), b"")
    assert restarted.fetch(0, 0, sent=0).counted
    assert not restarted.fetch(2, sent=0).counted


def test_a_change_to_other_parameters_of_the_same_round_does_not_count():
    """The coordinator lost its newest round, and came to another one in its place."""
    bed = Bed(1, round_=4)
    change = Change("run", 0, 4, digest(at(5), 4), encode(START, 32), {"loss": 1.0, "accuracy": 0.5})
    assert not bed.meeting.push(change).counts
    assert bed.meeting.fetch(Fetch("run", 0, digest(at(5), 4))).kind == "full"


def test_a_round_that_changed_nothing_is_another_round():
    bed = Bed(1)
    bed.push(0)
    bed.meeting.gather(lambda: None)
    bed.meeting.advance(at(0), b"nothing")
    content = encode(np.zeros(3, np.float32), 32)
    bed.meeting.push(Change("run", 0, 1, digest(at(0), 1), content, {"loss": 1.0, "accuracy": 0.5}))
    assert bed.ended() == [0]


def test_workers_that_are_too_few_are_told_of(caplog):
    bed = Bed(3)
    bed.push(0)
    assert bed.ended() is None
    assert not caplog.records
    bed.now = 10.0
    assert bed.ended() is None
    assert "round 0 waits: 1 of 3 workers have answered, and 2 are needed" in caplog.records[0].getMessage()


def test_a_coordinator_that_hears_of_no_worker_says_so_once(caplog):
    bed = Bed(2)
    bed.fetch(0)
    bed.now = 9.0
    assert bed.ended() is None
    bed.fetch(1)
    bed.now = 18.0
    assert bed.ended() is None
    assert not caplog.records
    for bed.now in (19.0, 30.0):
        assert bed.ended() is None
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "0 of 2 workers have answered, and 2 are needed (train.rounds.quorum); none has been heard for 10 seconds"
    )


def test_the_end_waits_for_workers_to_hear_of_it():
    bed, heard = Bed(2), []
    bed.meeting.finish()
    bed.meeting.wait_until_heard(0.01, lambda: None)
    waiting = threading.Thread(target=lambda: heard.append(bed.meeting.wait_until_heard(60, lambda: None)))
    waiting.start()
    assert bed.fetch(0).kind == "finished"
    waiting.join(0.1)
    assert waiting.is_alive()
    assert bed.fetch(1, 0).kind == "finished"
    waiting.join(10)
    assert heard == [None]


def test_a_worker_that_was_gone_when_its_call_was_answered_has_not_heard_of_the_end():
    """It would be started again, and look for a coordinator that has left."""

    def give_up():
        raise _Over

    bed = Bed(1)
    bed.meeting.finish()
    bed.fetch(0, is_there=lambda: False)
    with pytest.raises(_Over):
        bed.meeting.wait_until_heard(5, give_up)
    bed.fetch(0)
    bed.meeting.wait_until_heard(5, give_up)


def test_what_a_worker_is_told():
    bed = Bed(1)
    begin = bed.fetch(0)
    assert (begin.round, begin.kind) == (0, "full")
    np.testing.assert_array_equal(decode(begin.content, 3, 32), at(0))
    assert bed.fetch(0, 0).kind == "again", "its change has not come, or was lost with the coordinator"
    bed.push(0)
    assert bed.fetch(0, 0).kind == "wait"
    bed.meeting.gather(lambda: None)
    bed.meeting.advance(at(1), b"update")
    assert bed.fetch(0, 0).kind == "update"
    assert bed.fetch(0, 0).content == b"update"
    assert bed.fetch(0, 7).kind == "full", "it knows rounds that this coordinator does not"
    bed.meeting.finish()
    assert bed.fetch(0, 1).kind == "finished"
    assert not bed.push(0, 1).counts
    bed.meeting.finish("diverged")
    assert bed.fetch(0, 1).kind == "diverged"


def test_after_a_restart_there_is_no_update():
    assert Bed(1, round_=4).fetch(0, 3).kind == "full"


def test_of_two_processes_with_one_number_the_earlier_is_refused_by_name(caplog):
    """So that it is not told that its changes count, while another's are taken in their place."""
    caplog.set_level("INFO", "mlcn_jax")
    bed = Bed(2)
    first = bed.meeting.join(0, "a")
    assert bed.meeting.join(0, "a") == first, "whose answer was lost"
    assert not caplog.records
    second = bed.meeting.join(0, "b")
    assert "worker 0 was started again" in caplog.text
    assert bed.push(0, run=second).counts
    for call in (lambda: bed.push(0, run=first), lambda: bed.meeting.fetch(Fetch(first, 0, ""))):
        with pytest.raises(InputError, match=r"another process has joined with --worker=0 .* from 0 to 1"):
            call()
    assert bed.push(1, run=bed.meeting.join(1, "a")).counts
    assert bed.ended() == [0, 1]
    restarted = Bed(2, round_=1)
    assert restarted.push(0, 1, run=second).counts, "a coordinator that was started again takes those that joined"
    with pytest.raises(InputError, match="another process has joined"):
        restarted.push(0, 1, run=first)
    with pytest.raises(InputError, match="there is no worker 2"):
        bed.meeting.join(2, "c")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "other"}, "worker 0 is of another run: the run that it joined was started anew"),
        ({"worker": 3}, "there is no worker 3: train.rounds.workers is 3"),
        ({"value": np.nan}, "the change of worker 0 in round 0 has values that are not finite"),
        ({"other": 1.0}, "the metrics of worker 0 in round 0 are .*; they must be finite values of loss and accuracy"),
        ({"loss": np.nan}, "the metrics of worker 0 in round 0 are .*; they must be finite"),
    ],
)
def test_changes_that_cannot_be_used_are_refused_by_name(given, message):
    bed = Bed()
    with pytest.raises(InputError, match=message):
        bed.push(**{"worker": 0, **given})
    assert bed.ended() is None


def test_a_worker_that_still_computes_is_waited_for_when_the_run_has_diverged():
    bed = Bed(workers=3, quorum=3)
    bed.push(0)
    bed.diverge(1)
    with pytest.raises(Diverged):
        bed.ended()
    bed.meeting.finish("diverged")
    bed.fetch(0)

    def give_up():
        raise _Over

    with pytest.raises(_Over):  # worker 2 has not heard of it
        bed.meeting.wait_until_heard(5, give_up)
    bed.fetch(2)
    bed.meeting.wait_until_heard(5, give_up)


def test_a_round_has_diverged_when_too_few_workers_are_left_that_have_not():
    bed = Bed(workers=3, quorum=2)
    assert not bed.diverge(2, round_=1)
    assert bed.diverge(2)
    bed.push(0)
    assert bed.ended() is None
    bed.push(1)
    assert bed.ended() == [0, 1]  # without waiting for worker 2

    bed = Bed(workers=3, quorum=2)
    bed.push(0)
    bed.diverge(1)
    bed.fetch(1)  # it was started again
    bed.diverge(2)
    assert bed.ended() is None
    bed.diverge(1)
    with pytest.raises(Diverged, match="round 0 has diverged in workers: worker 2 is NaN; worker 1 is NaN"):
        bed.ended()

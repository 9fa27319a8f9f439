"""A worker of a run in rounds: what it keeps, repeats, and drops."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.rounds import coordinator, worker
from mlcn_jax.rounds.messages import Begin
from mlcn_jax.rounds.vector import digest
from mlcn_jax.training import checkpoint
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.session import open_session

ROUNDS = {"train.num_steps": 14, "train.rounds.steps": 4, "train.rounds.workers": 2, "data.validation_fraction": 0.1}


@pytest.fixture
def trainer(tiny, tmp_path):
    made = []

    def make():
        made.append(worker.Trainer(open_session(tiny.replace(ROUNDS)), 1, tmp_path / "worker1"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_worker_repeats_a_round_only_from_the_same_parameters(trainer, rng):
    first = trainer()
    vector = rng.normal(scale=0.05, size=first.size).astype(np.float32)
    content, metrics = first.change(0, vector, False, lambda: None)
    first.close()
    again = trainer()
    assert again.change(0, vector, False, None) == (content, metrics), "without a step"
    other, _ = again.change(0, vector + np.float32(0.01), False, lambda: None)
    assert other != content
    with pytest.raises(Diverged, match="worker 1, step 8: parameters or metrics are not finite"):
        again.change(1, np.full_like(vector, np.nan), False, lambda: None)
    again._kept = dataclasses.replace(again._kept, after=np.full_like(vector, np.inf))
    with pytest.raises(Diverged, match="worker 1, step 8: the change is too large to be sent"):
        again.change(1, vector, True, lambda: None)


def test_a_round_compiles_the_image_sizes_that_its_steps_have(monkeypatch):
    sizes, runner = [16, 16, 20, 20, 20, 20], Mock()
    one = object.__new__(worker.Trainer)
    one._session, one._runner, one._compiled = SimpleNamespace(image_size=lambda step: sizes[step - 1]), runner, set()
    one._part = lambda step: ()
    monkeypatch.setattr(worker, "check_step_fits", lambda runner: None)
    for first in (0, 2, 4, 0):  # a restarted coordinator may begin again
        one._compile(first, first + 2)
    assert [call.kwargs["sizes"] for call in runner.compile.call_args_list] == [[16], [20], [16]]


def test_what_a_change_left_out_is_added_to_the_next_only_if_it_counted(trainer, rng):
    one = trainer()
    vector = rng.normal(scale=0.05, size=one.size).astype(np.float32)
    assert one.sent == ""
    one.change(0, vector, False, lambda: None)
    left = one._kept.after
    assert left.any()
    one.change(1, vector, True, lambda: None)
    np.testing.assert_array_equal(one._kept.before, left)
    sent, last = one.sent, one._kept.after
    one.close()
    assert sent == digest(vector, 1)
    for counted, before in ((False, left), (True, last)):  # each as if it were killed before it heard of the next round
        other = trainer()
        assert other.sent == sent
        other._save = lambda: None
        other.change(2, vector, counted, lambda: None)
        np.testing.assert_array_equal(other._kept.before, before)
        other.close()


def test_a_worker_asks_whether_its_change_counted():
    """With the digest of its round, also after it was started again; the answer comes with the next round."""
    asked, counted = [], []

    class Trained(Exception):
        pass

    class Stub:
        size, bits, sent = 2, 32, "sent"

        def enter(self, run):
            assert run == "run"

        def start(self):
            return np.zeros(2, np.float32)

        def change(self, round_, vector, did_count, check):
            counted.append(did_count)
            raise Trained

    class Client:
        def call(self, name, request):
            asked.append(request.sent)
            return Begin(3, "full", np.zeros(2, "<f4").tobytes(), counted=True)

    with pytest.raises(Trained):
        worker.follow(Client(), Stub(), "run/process", 0, None)
    assert (asked, counted) == (["sent"], [True])


@pytest.fixture
def named(tiny):
    """Gives the name of the run in a workdir."""
    session = open_session(tiny.replace(ROUNDS))

    def name(workdir):
        own = Checkpoints(workdir / checkpoint.ROUNDS)
        try:
            return coordinator.name_of_run(session, workdir, own)
        finally:
            own.close()

    return name


def test_a_run_keeps_its_name_and_one_that_is_started_anew_gets_another(tiny, named, tmp_path):
    first = named(tmp_path / "first")
    assert named(tmp_path / "first") == first
    assert named(tmp_path / "second") != first
    earlier = tmp_path / "earlier"  # of a version that drew no number
    own = Checkpoints(earlier / checkpoint.ROUNDS)
    own.save(1, {"params": {"vector": np.zeros(2)}, "optimizer": {"x": np.zeros(2)}}, {})
    own.close()
    assert named(earlier) == coordinator.identity(open_session(tiny.replace(ROUNDS)))
    assert first.startswith(named(earlier))


def test_a_worker_drops_what_it_kept_of_an_earlier_run_of_the_same_configuration(trainer, named, tmp_path, rng, caplog):
    old, new = named(tmp_path / "old"), named(tmp_path / "new")
    one = trainer()
    vector = rng.normal(scale=0.05, size=one.size).astype(np.float32)
    one.enter(old)
    first = one.change(0, vector, False, lambda: None)
    one.change(1, vector, True, lambda: None)
    one.close()
    again = trainer()
    again.enter(old)
    assert again.sent == digest(vector, 1)
    assert "worker 1 has the state of an earlier run" not in caplog.text
    again.enter(new)
    assert again.sent == ""
    assert "worker 1 has the state of an earlier run" in caplog.text
    assert again.change(0, vector, False, lambda: None) == first, "optimizer and residual are new"
    again.close()
    last = trainer()
    last.enter(new)
    assert last.sent == digest(vector, 0)


def test_what_an_earlier_version_kept_is_used_in_its_run_and_dropped_in_another(trainer, tiny, named, tmp_path, rng):
    one = trainer()
    vector = rng.normal(scale=0.05, size=one.size).astype(np.float32)
    one.change(0, vector, False, lambda: None)  # in a run without a number
    one.close()
    again = trainer()
    again.enter(coordinator.identity(open_session(tiny.replace(ROUNDS))))
    assert again.sent == digest(vector, 0)
    again.enter(named(tmp_path / "new"))
    assert again.sent == ""


def test_the_state_of_another_worker_is_refused(tiny, trainer, tmp_path, rng):
    one = trainer()
    one.change(0, rng.normal(scale=0.05, size=one.size).astype(np.float32), False, lambda: None)
    one.close()
    with pytest.raises(InputError, match="holds the state of worker 1 of this run, but this is worker 0"):
        worker.Trainer(open_session(tiny.replace(ROUNDS)), 0, tmp_path / "worker1")
    wider = tiny.replace({**ROUNDS, "model.lanes": "mlcn1:w2*2"})
    with pytest.raises(InputError, match="holds the state of worker 1 of another run, but this is worker 1"):
        worker.Trainer(open_session(wider), 1, tmp_path / "worker1")

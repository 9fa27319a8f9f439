"""Runs in rounds: equal to ordinary optimizers where they should be, resumed, and refused where they cannot be."""

import contextlib
import dataclasses
import threading

import jax
import numpy as np
import optax
import pytest

from mlcn_jax.analysis import prune
from mlcn_jax.config import read_stored
from mlcn_jax.data.batches import Batches
from mlcn_jax.errors import Diverged, InputError, Stopped
from mlcn_jax.files import write_json
from mlcn_jax.rounds import coordinator, link, worker
from mlcn_jax.rounds.judge import Judge
from mlcn_jax.rounds.messages import Join
from mlcn_jax.rounds.vector import num_bytes, to_vector
from mlcn_jax.settings import RoundSettings
from mlcn_jax.training import loop
from mlcn_jax.training.checkpoint import ROUNDS, Checkpoints
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.metrics import read_rows
from mlcn_jax.training.optimizer import at_step
from mlcn_jax.training.session import open_session, step_options
from mlcn_jax.training.start import start_state
from mlcn_jax.training.trained import load_trained

PLAIN = {
    "train.num_steps": 4,
    "train.rounds.steps": 1,
    "train.rounds.bits": 32,
    "train.rounds.learning_rate": 1.0,
    "train.score_test": False,
    "train.checkpoint_every": 100,
}


@pytest.fixture(autouse=True)
def one_save_at_a_time(monkeypatch):
    """Orbax cannot save from several threads of one process at once; workers have a process each elsewhere."""
    save, lock = Checkpoints.save, threading.Lock()

    def alone(self, *args, **kwargs):
        with lock:
            save(self, *args, **kwargs)
            self.wait()

    monkeypatch.setattr(Checkpoints, "save", alone)


@contextlib.contextmanager
def workers(session, folder, port, stop_after=None):
    """Workers in threads; gives a function that raises what one of them raised, or Stopped after some rounds."""
    errors, over = [], threading.Event()

    def enough():
        return stop_after is not None and len(read_rows(folder / "metrics.jsonl")) >= stop_after

    def check_worker():
        if over.is_set() or enough():
            raise Stopped("over")

    def run(i):
        client = link.Client(f"127.0.0.1:{port}", link.Tls(), check_worker)
        trainer = worker.Trainer(session, i, folder / f"worker{i}")
        try:
            facts = session.model_facts()["training_images_sha256"]
            name = client.call("join", Join(i, session.config.fixed(), facts, f"process {i}"))
            worker.follow(client, trainer, name, i, check_worker)
        except Stopped:
            pass
        except Exception as error:
            errors.append(error)
        finally:
            trainer.close()
            client.close()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(session.config.train.rounds.workers)]
    for thread in threads:
        thread.start()

    def check():
        if errors:
            raise errors[0]
        if enough():
            raise Stopped("enough")

    try:
        yield check
        for thread in threads:
            thread.join(60)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors


def in_rounds(monkeypatch, config, folder, optimizer=None, **options):
    """The parameters at the end, as a vector, and the summary."""
    session = open_session(config)
    if optimizer:
        session = dataclasses.replace(session, optimizer=optimizer)
    monkeypatch.setattr(coordinator, "open_session", lambda config: session)
    summary = coordinator.coordinate(
        config, folder, "127.0.0.1:0", on_start=lambda port: workers(session, folder, port, **options)
    )
    return to_vector(load_trained(folder).params), summary


def test_what_a_run_begins_with_is_computed_and_not_sent(tiny, tmp_path, monkeypatch):
    kinds, fetch = [], coordinator.Meeting.fetch

    def noted(self, *request):
        begin = fetch(self, *request)
        kinds.append((begin.round, begin.kind, len(begin.content)))
        return begin

    monkeypatch.setattr(coordinator.Meeting, "fetch", noted)
    in_rounds(monkeypatch, tiny.replace(PLAIN), tmp_path)
    assert (0, "again", 0) in kinds
    assert "full" not in {kind for _, kind, _ in kinds}


def by_one_optimizer(config, optimizer):
    """The same batches with an ordinary optimizer, without rounds."""
    session = dataclasses.replace(open_session(config), optimizer=optimizer)
    state, _ = start_state(session, None)
    runner = MeshRunner(session.spec, optimizer, None, **step_options(session.config))
    runner.start(state)
    batches = Batches(session.train.images, session.train.labels, config.train.batch_size, config.train.seed)
    runner.compile(*batches.at(0))
    for step in range(session.num_steps):
        runner.step(*runner.place(*batches.at(step)))
    return to_vector(runner.fetch().params)


def test_one_worker_and_single_steps_are_nesterov_sgd(tiny, tmp_path, monkeypatch):
    config = tiny.replace(PLAIN | {"train.rounds.learning_rate": 0.5, "train.rounds.momentum": 0.8})
    found, summary = in_rounds(monkeypatch, config, tmp_path, optax.sgd(0.2))
    expected = by_one_optimizer(config, optax.sgd(0.1, 0.8, nesterov=True))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert summary["steps"] == 4
    assert np.abs(found - to_vector(start_state(open_session(config), None)[0].params)).max() > 1e-3


def test_two_workers_take_the_step_of_the_whole_batch(tiny, tmp_path, monkeypatch):
    config = tiny.replace(PLAIN | {"train.rounds.workers": 2, "train.rounds.momentum": 0.0})
    found, _ = in_rounds(monkeypatch, config, tmp_path, optax.sgd(0.1))
    np.testing.assert_allclose(found, by_one_optimizer(config, optax.sgd(0.1)), atol=2e-6)


LONG = {"train.num_steps": 14, "train.rounds.steps": 4, "train.rounds.workers": 2, "data.validation_fraction": 0.1}


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(tiny, tmp_path, monkeypatch):
    """In 8 bits, with Adam: what workers and coordinator keep is all that the rest depends on."""
    config = tiny.replace(LONG)
    expected, summary = in_rounds(monkeypatch, config, tmp_path / "whole")
    with pytest.raises(Stopped):
        in_rounds(monkeypatch, config, tmp_path / "cut", stop_after=2)
    found, resumed = in_rounds(monkeypatch, config, tmp_path / "cut")
    np.testing.assert_array_equal(found, expected)
    assert resumed["validation_accuracy"] == summary["validation_accuracy"]
    steps = [row["step"] for row in read_rows(tmp_path / "cut" / "metrics.jsonl") if row["split"] == "train"]
    assert steps == [4, 8, 12, 14]
    monkeypatch.undo()
    with pytest.raises(InputError, match="a run in rounds of another length"):
        coordinator.coordinate(config.replace({"train.num_steps": 20}), tmp_path / "cut", "127.0.0.1:0")


@pytest.mark.long
def test_a_checkpoint_that_was_due_when_the_coordinator_was_killed_is_made_up_for(tiny, tmp_path, monkeypatch):
    config = tiny.replace(LONG | {"train.checkpoint_every": 8})

    def kill(self, step, vector):
        raise Stopped("while it scores")

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "_save", kill)
        with pytest.raises(Stopped):
            in_rounds(patch, config, tmp_path)
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))
    in_rounds(monkeypatch, config, tmp_path)
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if row["split"] == "validation"]
    assert steps == [8, 14]


def test_a_score_whose_checkpoint_was_lost_is_written_once(tiny, tmp_path, monkeypatch):
    session = open_session(tiny.replace(LONG))
    vector, step = to_vector(start_state(session, None)[0].params), session.num_steps

    def kill(*args):
        raise Stopped("before the checkpoint")

    judge = Judge(session, tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", kill)
        with pytest.raises(Stopped):
            judge.score(step, vector)
    judge.close()
    judge = Judge(session, tmp_path, step)
    judge.score(step, vector)
    judge.close()
    assert [(row["step"], row["split"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(step, "validation")]
    assert (tmp_path / "checkpoints" / str(step)).exists()


def test_the_run_of_another_command_is_not_written_over(tiny, tmp_path):
    loop.train(tiny.replace({"train.num_steps": 2}), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match="holds an ordinary run"):
        coordinator.coordinate(tiny.replace(LONG), tmp_path, "127.0.0.1:0")
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_search_is_not_written_over(tiny, tmp_path):
    (tmp_path / "trials.json").touch()
    with pytest.raises(InputError, match="holds a search"):
        coordinator.coordinate(tiny.replace(LONG), tmp_path, "127.0.0.1:0")


def test_an_outer_step_that_is_not_finite_ends_the_run():
    vector = np.array([1.0, 2.0], np.float32)
    settings = RoundSettings(2, learning_rate=1e30)
    shared = coordinator.Shared(3, vector, coordinator.start_outer(settings, vector), np.zeros_like(vector))
    with pytest.raises(Diverged, match="round 3: the outer step is not finite"):
        coordinator.outer_step(settings, shared, {0: np.full(2, 1e30, np.float32)})


HUGE = np.full(300, 3e38, np.float32)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(("start", "left"), [(0.0, -1.0), (-1.0, 0.0)])
def test_a_finite_change_that_is_too_large_ends_the_run(bits, start, left):
    settings = RoundSettings(2, learning_rate=1.0, momentum=0.0, bits=bits)
    shared = coordinator.Shared(3, start * HUGE, coordinator.start_outer(settings, HUGE), left * HUGE)
    with pytest.raises(Diverged, match=r"round 3: the (outer step is|parameters are) not finite"):
        coordinator.outer_step(settings, shared, {0: HUGE})


def test_workers_end_as_failures_when_the_coordinator_diverges(tiny, tmp_path, monkeypatch):
    told, follow = [], worker.follow

    def diverge(*args):
        raise Diverged("round 0: the parameters are not finite")

    def note(*args):
        try:
            follow(*args)
        except Diverged as error:
            told.append(str(error))
            raise

    monkeypatch.setattr(coordinator, "outer_step", diverge)
    monkeypatch.setattr(worker, "follow", note)
    with pytest.raises(Diverged, match="the parameters are not finite"):
        in_rounds(monkeypatch, tiny.replace(PLAIN), tmp_path)
    assert told == ["the run has diverged: see the coordinator's message"]


def test_a_run_ends_when_its_workers_diverge_in_their_own_steps(tiny, tmp_path, monkeypatch):
    change = worker.Trainer.change

    def diverge(self, round_, *more):
        if round_ == 1:
            raise Diverged(f"worker {self._worker}, step 2: parameters or metrics are not finite")
        return change(self, round_, *more)

    monkeypatch.setattr(worker.Trainer, "change", diverge)
    with pytest.raises(Diverged, match="round 1 has diverged in workers: worker 0, step 2"):
        in_rounds(monkeypatch, tiny.replace(PLAIN), tmp_path)


def test_a_round_that_diverges_when_it_is_scored_is_told_and_not_kept(tiny, tmp_path, monkeypatch):
    score, told = Judge.score, []

    def diverge(self, step, vector):
        told.append(step)
        if len(told) == 2:
            raise Diverged(f"step {step}: the validation loss is nan")
        return score(self, step, vector)

    monkeypatch.setattr(Judge, "score", diverge)
    with pytest.raises(Diverged, match="the validation loss is nan"):
        in_rounds(monkeypatch, tiny.replace(PLAIN), tmp_path)
    own = Checkpoints(tmp_path / ROUNDS)
    assert own.newest_step() == 1
    own.close()


@pytest.mark.long
def test_8_bits_learn_as_32_do(tiny, tmp_path, monkeypatch):
    config = tiny.replace(LONG | {"train.num_steps": 40, "train.rounds.steps": 10})
    losses = {}
    for bits in (8, 32):
        folder = tmp_path / str(bits)
        in_rounds(monkeypatch, config.replace({"train.rounds.bits": bits}), folder)
        rows = [row for row in read_rows(folder / "metrics.jsonl") if row["split"] == "train"]
        losses[bits] = rows[-1]["loss"]
        assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert abs(losses[8] / losses[32] - 1) < 0.05
    assert num_bytes(10**6, 8) < 0.26 * num_bytes(10**6, 32)


def test_a_worker_with_other_settings_is_told_which(tiny):
    session, other = open_session(tiny.replace(LONG)), open_session(tiny.replace(LONG | {"train.seed": 3}))
    data = session.model_facts()["training_images_sha256"]
    with pytest.raises(InputError, match=r"train\.seed: 3 in worker 1, 0 in the coordinator"):
        coordinator.check_worker(session, Join(1, other.config.fixed(), data, "a"))
    with pytest.raises(InputError, match="training images: 'x' in worker 1"):
        coordinator.check_worker(session, Join(1, session.config.fixed(), "x", "a"))
    coordinator.check_worker(session, Join(1, session.config.fixed(), data, "a"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.rounds.steps": 0}, "train.rounds.steps is 0"),
        ({"train.rounds.workers": 3}, "train.batch_size=50 cannot be divided among train.rounds.workers=3"),
        ({"parallel.processes": 2}, "parallel.processes is 2; it must be 1 in rounds"),
        ({"train.lookahead": 0.9}, "train.lookahead=0.9 is not possible in rounds"),
        ({"train.test_every_epoch": True}, "train.test_every_epoch is True, but has no effect in rounds"),
        ({"profile": True}, "profile is True, but has no effect in rounds"),
        ({"train.teacher": "runs/large"}, "train.teacher='runs/large' is not possible in rounds"),
        ({"model.lanes": "resnet:w1*2", "model.norm_group": 50}, "a worker's part of a batch has 25"),
    ],
)
def test_settings_that_have_no_rounds_are_refused(tiny, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        coordinator.coordinate(tiny.replace(LONG | changes), tmp_path, "127.0.0.1:0")


def test_parts_that_do_not_divide_a_batch_are_refused_by_the_coordinator(tiny, tmp_path):
    session = open_session(tiny.replace(LONG | {"train.accumulation_steps": 7}))
    with pytest.raises(InputError, match=r"train\.accumulation_steps=7 does not divide train.batch_size"):
        coordinator.check_rounds(session)


def test_an_ordinary_training_refuses_rounds(tiny, tmp_path):
    with pytest.raises(InputError, match=r"start it with .*mlcn_jax rounds"):
        loop.train(tiny.replace(LONG), tmp_path)


def test_statistics_that_are_not_finite_are_not_saved(tiny, tmp_path, monkeypatch):
    session = open_session(tiny.replace(LONG))
    judge = Judge(session, tmp_path, 0)
    monkeypatch.setattr(judge._runner, "calibrate", lambda images: {"mean": np.full(1, np.nan)})
    with pytest.raises(Diverged, match="step 14: statistics of normalisation are not finite"):
        judge.score(14, to_vector(start_state(session, None)[0].params))
    judge.close()
    assert not (tmp_path / "checkpoints" / "14").exists()


def test_lanes_apart_have_their_own_best_checkpoints(tiny, tmp_path, monkeypatch):
    settings = {
        "model.lanes": "mlcn2:w1*2",
        "model.lane_seeds": "4,7",
        "model.margin_loss": "per_lane_sum",
        "model.decoder_gradient": "none",
        "data.validation_fraction": 0.1,
        "data.split_seed": 0,
        "train.lanes_apart": True,
        "train.num_steps": 2,
        "train.checkpoint_every": 1,
    }
    session = open_session(tiny.replace(PLAIN | settings))
    params = start_state(session, None)[0].params
    judge, vector = Judge(session, tmp_path, 0), to_vector(params)
    judge._load(vector, 0)
    scored = judge._runner.scores(session.validation, 50)
    for step, lanes, confusion in ((1, (0.6, 0.2), np.ones((10, 10))), (2, (0.4, 0.9), np.eye(10))):
        scores = dataclasses.replace(scored, confusion=confusion, lane_accuracies=lanes)
        monkeypatch.setattr(judge._runner, "scores", lambda *_, scores=scores, **__: scores)
        judge.score(step, step * vector)
    summary = judge.finish(2 * vector, {})
    judge.close()
    assert (summary["best_step"], summary["lane_steps"]) == (2, [1, 2])
    [group] = judge._runner.fetch().params["encoder"].values()
    [start] = params["encoder"].values()
    for ours, own in zip(jax.tree.leaves(group), jax.tree.leaves(start), strict=True):
        np.testing.assert_allclose(ours[0], own[0])
        np.testing.assert_allclose(ours[1], 2 * own[1])


def test_a_run_in_rounds_is_pruned_and_trained_on_in_the_ordinary_way(tiny, tmp_path):
    """Its checkpoints have no optimizer state: that of each worker is the worker's own."""
    session = open_session(tiny.replace(LONG | {"data.validation_fraction": 0.0}))
    params = start_state(session, None)[0].params
    judge = Judge(session, tmp_path, 0)
    judge.score(session.num_steps, to_vector(params))
    judge.close()
    write_json(tmp_path / "config.json", session.config.to_dict())
    write_json(tmp_path / "model.json", session.model_facts())
    run = prune.load_prunable(tmp_path)
    counts = [int(count) for _, count in optax.tree.get_all_with_path(run.optimizer, "count")]
    assert sorted(counts) == [0, 14], "of the moments and of the learning rate"
    prune.save_run(prune.prune_run(run, [1]), tmp_path / "smaller", None, {})
    config = read_stored(tmp_path / "smaller")
    assert config.train.rounds == RoundSettings()
    summary = loop.train(config.replace({"train.num_steps": 15}), tmp_path / "smaller")
    assert (summary["steps"], summary["steps_this_session"]) == (15, 1)


def test_a_late_worker_has_the_rates_of_its_steps(tiny):
    for changes in ({}, {"train.optimizer": "muon", "model.lanes": "resnet:w1*2", "model.norm_group": 25}):
        session = open_session(tiny.replace(LONG | changes))
        params = start_state(session, None)[0].params
        state = at_step(session.optimizer.init(params), 70)
        counts = optax.tree.get_all_with_path(state, "count")
        of_rates = [value for path, value in counts if "Schedule" in path[-1].tuple_name]
        others = [value for path, value in counts if "Schedule" not in path[-1].tuple_name]
        assert of_rates == [70] * len(of_rates)
        assert of_rates
        assert not any(others), "moments are averages of the steps that were taken"
    plain = optax.trace(0.9).init({"x": np.zeros(2, np.float32)})
    assert jax.tree.structure(at_step(plain, 3)) == jax.tree.structure(plain)

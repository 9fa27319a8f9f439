"""A pool of lanes: who takes what, what is joined when, and what is left by workers that die."""

import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from mlcn_jax.analysis import pool as pool_lib
from mlcn_jax.commands import work as command
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Diverged, InputError, Stopped
from mlcn_jax.files import try_lock, write_json
from mlcn_jax.launch import EXIT_FAILED

LANES = """
config = "default"
join_at = [2, 3]

[set]
data.validation_fraction = 0.2
data.split_seed = 0
model.margin_loss = "per_lane_sum"
model.decoder_gradient = "none"
model.decoder = [8]
train.num_steps = 12
train.checkpoint_every = 1

[[lanes]]
kind = "mlcn1:w1"
seeds = [0, 1]

[[lanes]]
kind = "mlcn1:w2"
seeds = [0]
[lanes.set]
train.batch_size = 50
"""
NAMES = ["mlcn1_w1-s0", "mlcn1_w1-s1", "mlcn1_w2-s0"]

BY_SIZE = [NAMES[2], *NAMES[:2]]


def read(folder, text=LANES):
    (folder / "lanes.toml").write_text(text)
    return pool_lib.read_pool(folder, lambda name: RunConfig())


class Recorder:
    """Stands for training and joining: notes what it is asked to do, and fails once where it is told to."""

    def __init__(self, fail=None):
        self.trained, self.joined, self.data_dirs, self._fail = [], [], [], fail or {}

    def train(self, config, workdir):
        self.trained.append(workdir.name)
        if error := self._fail.pop(workdir.name, None):
            raise error
        write_json(workdir / "summary.json", {"config_hash": config.hash()})

    def join(self, workdirs, output, data_dir):
        if error := self._fail.pop(output.name, None):
            raise error
        self.data_dirs.append(data_dir)
        self.joined.append((output.name, [workdir.name for workdir in workdirs]))
        output.mkdir(parents=True)

    def work(self, pool):
        return pool_lib.work(pool, train=self.train, join_lanes=self.join, poll_seconds=0.01)


def test_lanes_are_trained_in_turn_and_joined_when_enough_have_come(tmp_path):
    pool, recorder = read(tmp_path), Recorder()
    assert [lane.name for lane in pool.lanes] == NAMES
    assert pool.lanes[2].config.train.batch_size == 50
    assert pool.lanes[1].config.model["lane_seeds"] == (1,)
    assert recorder.work(pool) == {}
    assert recorder.trained == BY_SIZE
    assert recorder.joined == [("2", [NAMES[0], NAMES[2]]), ("3", NAMES)]
    events = [json.loads(line)["event"] for line in (pool.lanes[0].workdir / "workers.jsonl").read_text().splitlines()]
    assert events == ["taken", "finished", "left"]
    again = Recorder()
    again.work(pool)
    assert again.trained == again.joined == []


def test_what_another_worker_has_is_left_and_what_one_began_comes_first(tmp_path):
    pool = read(tmp_path)
    (pool.lanes[1].workdir / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "claims").mkdir()
    other = try_lock(tmp_path / "claims" / NAMES[2])
    recorder, train = Recorder(), Recorder.train

    def release_after_two(config, workdir):
        train(recorder, config, workdir)
        if len(recorder.trained) == 2:
            other.release()  # as when the other worker dies

    pool_lib.work(pool, train=release_after_two, join_lanes=recorder.join, poll_seconds=0.01)
    assert recorder.trained == [NAMES[1], NAMES[0], NAMES[2]]


def test_a_lane_that_diverges_is_told_and_not_tried_again(tmp_path):
    pool = read(tmp_path)
    first, second = Recorder({NAMES[1]: Diverged("nan")}), Recorder()
    assert first.work(pool) == {NAMES[1]: "nan"}
    assert first.joined == [("2", [NAMES[0], NAMES[2]])]
    assert second.work(pool) == {NAMES[1]: "nan"}
    assert second.trained == []


def test_what_one_machine_cannot_train_is_left_to_others(tmp_path):
    pool = read(tmp_path)
    small = Recorder({NAMES[0]: InputError("not enough memory")})
    with pytest.raises(InputError, match=f"1 lanes are left that this machine cannot train; {NAMES[0]}: not enough"):
        small.work(pool)
    assert small.trained == BY_SIZE
    other = Recorder()
    other.work(pool)
    assert other.trained == NAMES[:1]


@pytest.mark.parametrize(
    "error", [InputError("other images"), MemoryError("too little"), RuntimeError("RESOURCE_EXHAUSTED: 2 GiB")]
)
def test_what_one_machine_cannot_join_is_left_to_others(tmp_path, error):
    pool = read(tmp_path)
    first, second = Recorder({"2": error}), Recorder()
    assert first.work(pool) == {"joined-2": str(error)}
    assert (first.trained, first.joined) == (BY_SIZE, [("3", NAMES)])
    assert second.work(pool) == {}
    assert second.joined == [("2", NAMES[:2])]


def test_a_join_that_failed_is_told_in_the_end(tmp_path, monkeypatch, capsys):
    read(tmp_path)
    monkeypatch.setattr(pool_lib, "work", lambda pool: {"joined-2": "other images"})
    assert command.main([f"--pool={tmp_path}"]) == EXIT_FAILED
    assert "joined-2 failed: other images; to try again, start a worker" in capsys.readouterr().out


def test_lanes_are_joined_on_the_images_of_this_machine(tmp_path):
    (tmp_path / "lanes.toml").write_text(LANES)
    recorder = Recorder()
    recorder.work(pool_lib.read_pool(tmp_path, lambda name: RunConfig(), {"data.dir": "here"}))
    assert recorder.data_dirs == ["here", "here"]


def test_a_model_of_lanes_that_have_changed_is_not_kept_for_that_of_now(tmp_path):
    text = LANES.replace("join_at = [2, 3]", "")
    Recorder().work(read(tmp_path, text))
    for seeds in ("[0]", "[0, 2]"):
        changed = read(tmp_path, text.replace("seeds = [0, 1]", f"seeds = {seeds}"))
        with pytest.raises(
            InputError, match=f"joined/3 was joined of lanes that .* no longer has, .*: {NAMES[1]}\\. Move"
        ):
            Recorder().work(changed)
    shutil.rmtree(tmp_path / "joined" / "3")
    again = Recorder()
    again.work(changed)
    assert again.joined == [("3", [NAMES[0], "mlcn1_w1-s2", NAMES[2]])]


def test_without_numbers_all_that_finish_are_joined_in_the_end(tmp_path):
    pool, recorder = read(tmp_path, LANES.replace("join_at = [2, 3]", "")), Recorder({NAMES[1]: Diverged("nan")})
    assert recorder.work(pool) == {NAMES[1]: "nan"}
    assert recorder.joined == [("2", [NAMES[0], NAMES[2]])]


def test_a_worker_that_is_stopped_leaves_its_lane(tmp_path):
    pool = read(tmp_path)
    with pytest.raises(Stopped):
        Recorder({NAMES[0]: Stopped("SIGTERM")}).work(pool)
    assert try_lock(tmp_path / "claims" / NAMES[0]) is not None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('config = "default"', "", "lacks config"),
        ("join_at = [2, 3]", "join_at = [4]", "numbers of lanes from 1 to 3"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "seed 1 twice"),
        ("seeds = [0, 1]", "seeds = 2", "seeds is 2; it must be a list of integers, 0 or more"),
        ("seeds = [0, 1]", "seeds = [true]", r"seeds is \[True\]; it must be a list of integers"),
        ("seeds = [0, 1]", "seeds = [-1]", r"seeds is \[-1\]; it must be a list of integers"),
        ('config = "default"', "config = 3", "config is 3; it must be text"),
        ("join_at = [2, 3]", "join_at = 2", "join_at is 2; it must be a list of numbers"),
        ("[set]", "[[set]]", r"set is \[.*; it must be a table"),
        ('kind = "mlcn1:w1"', "kind = 1", "kind is 1; it must be text for one lane"),
        ('kind = "mlcn1:w1"', 'kind = "mlcn1:w1*2"', r"kind is 'mlcn1:w1\*2'; it must be text for one lane"),
        ('kind = "mlcn1:w2"', 'kind = "mlcn1:w1d1"', "names mlcn1:w1d1 with seed 0 twice"),
        ("validation_fraction = 0.2", "validation_fraction = 0", "validation_fraction is 0; it must be above 0"),
        ("seeds = [0, 1]", "seeds = [0]\ncount = 2", "has unknown keys count; it may have kind, seeds, set"),
        ('"per_lane_sum"', '"joint"', "model.margin_loss is 'joint'"),
        ("[set]", "[set", "cannot be read"),
        ("[set]", '[set]\ntrain.teacher = "teacher"', "train.teacher is 'teacher'; it must be an absolute path"),
        ("[set]", '[set]\ntrain.teacher = "digits,runs/b"', "train.teacher is 'runs/b'; it must be an absolute path"),
        ("[set]", '[set]\ninit_from = "runs/b"', "init_from is 'runs/b'; it must be an absolute path"),
        ("train.num_steps", "train.num_stepz", "lanes.toml: there is no field train.num_stepz"),
        ("model.decoder = [8]", "model.decoder = 8", "lanes.toml: model.decoder is 8; it must be a list of integers"),
        ("[set]", '[set]\nmodel.lanes = "mlcn1:w1*2"', "lanes.toml: set has model.lanes, which kind and seeds give"),
        ("[set]", "[set]\ntrain.rounds.steps = 2", "train.rounds.steps is 2; it must be 0"),
        ("[set]", "[set]\nparallel.processes = 2", "parallel.processes is 2; it must be 1"),
        (
            "train.batch_size = 50",
            "data.split_seed = 1\nmodel.prior_bias = false",
            "model.prior_bias: True for the first lane, False for mlcn1:w2 with seed 0\n  data.split_seed: 0 for",
        ),
    ],
)
def test_a_pool_that_cannot_be_used_is_refused(tmp_path, old, new, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, LANES.replace(old, new))


def test_models_that_every_worker_finds_at_the_same_place_may_be_named(tmp_path):
    pool = read(tmp_path, LANES.replace("[set]", f'[set]\ninit_from = "digits"\ntrain.teacher = "digits, {tmp_path}"'))
    assert pool.lanes[0].config.train.teacher == f"digits, {tmp_path}"


def test_processes_of_the_same_number_on_two_hosts_are_told_apart(tmp_path):
    """One is killed, and the other has the lane when a third takes it."""
    events = [("a", 7, "taken"), ("b", 7, "taken"), ("c", 9, "taken"), ("b", 7, "left"), ("c", 9, "left")]
    history = tmp_path / pool_lib.HISTORY
    lines = [
        json.dumps({"event": event, "time": float(time), "host": host, "process": process})
        for time, (host, process, event) in enumerate(events)
    ]
    history.write_text("\n".join(lines))
    assert pool_lib.overlaps(history, {("a", 7): 0.5}) == [(("b", 7), ("c", 9))]
    assert pool_lib.overlaps(history, {("a", 7): 0.5, ("b", 7): 1.5}) == []


def test_the_example_of_the_docs_is_a_pool(tmp_path):
    page = (REPOSITORY / "docs" / "howto" / "lanes_apart.md").read_text()
    (tmp_path / "lanes.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    pool = pool_lib.read_pool(tmp_path, lambda name: command._config(tmp_path, name))
    assert (len(pool.lanes), pool.join_at) == (8, (4, 8))
    assert pool.lanes[-1].config.train.num_epochs == 15
    assert pool.lanes[0].config.data.augment_lanes


def test_the_command_needs_a_pool(tmp_path):
    with pytest.raises(InputError, match="--pool=FOLDER is needed"):
        command.main([])
    with pytest.raises(InputError, match=r"lanes\.toml is missing"):
        command.main([f"--pool={tmp_path}"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_killed_at_random_moments_lose_no_lane_and_train_none_twice_at_once(tmp_path):
    """Two workers, of which one is killed (SIGKILL) and replaced again and again."""
    read(tmp_path)
    rng, killed = random.Random(0), {}
    start = [sys.executable, "-m", "mlcn_jax", "work", f"--pool={tmp_path}"]
    workers = [subprocess.Popen(start, cwd=REPOSITORY, stderr=subprocess.DEVNULL) for _ in range(2)]
    for _ in range(4):
        time.sleep(rng.uniform(2, 12))
        victim = rng.randrange(2)
        if workers[victim].poll() is None:
            killed[platform.node(), workers[victim].pid] = time.time()
            os.kill(workers[victim].pid, signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = subprocess.Popen(start, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    pool = pool_lib.read_pool(tmp_path, lambda name: RunConfig())
    assert all(lane.is_finished for lane in pool.lanes)
    assert (tmp_path / "joined" / "3" / "model.json").exists()
    for lane in pool.lanes:
        assert not pool_lib.overlaps(lane.workdir / pool_lib.HISTORY, killed)


@pytest.mark.long
def test_workers_need_no_network(tmp_path):
    """Each in a network namespace of its own, where not even the loopback interface is up: no byte can be sent."""
    alone = ["unshare", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    read(tmp_path)
    start = [*alone, sys.executable, "-m", "mlcn_jax", "work", f"--pool={tmp_path}"]
    workers = [subprocess.Popen(start, cwd=REPOSITORY, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    assert (tmp_path / "joined" / "3" / "model.json").exists()

"""What the experiment on local rounds makes of its runs, and of one in which a worker fails."""

import pytest
from absl import flags

from experiments import local_rounds
from experiments.tiers_relay import Link
from mlcn_jax.errors import InputError


class Process:
    """A process that ended with a code, or has not ended yet."""

    def __init__(self, code=None):
        self.returncode = code

    def poll(self):
        return self.returncode

    def terminate(self):
        if self.returncode is None:
            self.returncode = -15

    def wait(self):
        assert self.returncode is not None, "this would wait forever"
        return self.returncode


def run_of(monkeypatch, folder, *codes):
    processes = [Process(code) for code in codes]
    monkeypatch.setattr(local_rounds.Run, "start", lambda self, i: processes[i])
    (folder / "run.log").write_text("error: no space\n")
    return local_rounds.Run({}, folder / "run", Link()), processes


def test_a_worker_that_fails_ends_the_case(monkeypatch, tmp_path):
    run, processes = run_of(monkeypatch, tmp_path, None, 0, 3)
    with pytest.raises(InputError, match="worker 1 ended by itself with code 3:\nerror: no space"):
        run.end()
    assert [process.returncode for process in processes] == [-15, 0, 3]


def test_the_rest_is_ended_after_the_coordinator(monkeypatch, tmp_path):
    run, processes = run_of(monkeypatch, tmp_path, 0, 0, None)
    run.end()
    assert processes[2].returncode == -15
    run, _ = run_of(monkeypatch, tmp_path, 2, None, None)
    with pytest.raises(InputError, match="the coordinator ended with code 2"):
        run.end()


def test_each_target_has_a_verdict():
    def seed(slower, slow):
        accuracies = {"loopback": 0.9, "slow": slow, "sum in every step": 0.91}
        return {"slow_over_loopback": slower, "validation_accuracy": accuracies, "bytes_per_step": 1000.0}

    def told(found):
        return [target["verdict"] for target in found.values()]

    found = local_rounds.verdicts([seed(1.1, 0.905), seed(1.4, 0.909)], 200_000.0)
    assert told(found) == ["reached"] * 3
    assert [target["measured"] for target in found.values()] == pytest.approx([1.25, 0.005, 0.3])
    assert told(local_rounds.verdicts([seed(1.1, 0.9), seed(1.6, 0.909)], 99_000.0)) == ["below"] * 3
    assert told(local_rounds.verdicts([seed(1.1, 0.91), seed(None, 0.91)], 1e6)) == ["below", "reached", "reached"]


def test_rounds_that_were_begun_again_are_counted():
    rounds = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 1), (0, 1), (0, 1), (0, 2), (1, 2)]
    log = "".join(f"12:00:00 worker {worker} computes round {r}: steps 1 to 2\nstep 3\n" for worker, r in rounds)
    assert local_rounds.computed_again(log) == {"worker 0": 2, "worker 1": 1}


class Killed:
    """A run in which a process writes what it has done when it is started again."""

    def __init__(self, write):
        self.write, self.done = write, []

    def kill(self, i):
        self.done.append(("kill", i))

    def start_again(self, i):
        self.done.append(("start", i))
        self.write()

    def wait_for(self, condition):
        assert condition()


def append(path, text):
    path.write_text(path.read_text() + text)


def rows(folder, *steps):
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "split": "train"}}\n' for step in steps))


def test_what_one_kill_cost_is_told_of_it(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    (folder / local_rounds.FOLDER / "1").mkdir(parents=True)
    begun = [f"worker {i} computes round {r}\n" for r in (0, 0, 1) for i in (0, 1)]
    log.write_text("".join(begun))
    rows(folder, 6, 12)

    def resume():
        """The coordinator had recorded a second round, and not saved it."""
        append(log, "resuming after round 1\nworker 0 computes round 1\nworker 1 resumes after round 9\n")
        (folder / local_rounds.FOLDER / "2").mkdir()

    run = Killed(resume)
    found = local_rounds.kill_one(run, folder, 0)
    assert run.done == [("kill", 0), ("start", 0)]
    assert found == {
        "process": "coordinator",
        "round_before": 2,
        "round_after": 1,
        "computed_again": {"worker 0": 1, "worker 1": 0},
    }

    def compute():
        append(log, "worker 1 computes round 1\nworker 1 computes round 2\n")
        rows(folder, 6, 12, 18)

    found = local_rounds.kill_one(Killed(compute), folder, 2)
    assert (found["process"], found["round_before"], found["round_after"]) == ("worker 1", 2, 3)
    assert found["computed_again"] == {"worker 0": 0, "worker 1": 1}


def test_the_worst_kill_is_judged():
    def kill(again=0, before=5, after=5):
        return {"computed_again": {"worker 0": 0, "worker 1": again}, "round_before": before, "round_after": after}

    def below(kills, *killed, same=True):
        found = {"kills": killed, "every_round_once": same, "same_parameters": same}
        judged = local_rounds.kill_verdicts(kills, found)
        return [name for name, target in judged.items() if target["verdict"] == "below"]

    assert not below(3, kill(), kill(again=1), kill(before=5, after=4))
    assert below(3, kill(), kill(again=2), kill()) == ["rounds that a worker computed again after a kill"]
    assert below(1, kill(before=5, after=3)) == ["rounds that the coordinator lost in a kill"]
    assert below(2, kill(), same=False) == [
        "runs that do not have every round once",
        "runs with other parameters at the end",
        "kills that are missing",
    ]


def test_the_accuracy_is_stated_beforehand():
    values = flags.FlagValues()
    local_rounds.define(values)
    values(["local_rounds"])
    assert 0.5 < values.accuracy < 1.0

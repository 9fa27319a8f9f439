"""What the experiment on local rounds makes of its runs, and of one in which a worker fails."""

import pytest

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
    return local_rounds.Run({}, folder / "run", Link()), processes


def test_a_worker_that_fails_ends_the_case(monkeypatch, tmp_path):
    run, processes = run_of(monkeypatch, tmp_path, None, 0, 3)
    with pytest.raises(InputError, match=r"worker 1 ended by itself with code 3: see .*run\.log"):
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


def test_rounds_that_were_begun_again_are_counted_against_the_kills_that_can_have_cost_them():
    rounds = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 1), (0, 1), (0, 1), (0, 2), (1, 2)]
    log = "".join(f"12:00:00 worker {worker} computes round {r}: steps 1 to 2\nstep 3\n" for worker, r in rounds)
    again = local_rounds.computed_again(log)
    assert again == {"worker 0": 2, "worker 1": 1}
    killed = [{"process": name} for name in ("worker 0", "coordinator", "worker 1")]
    assert local_rounds.again_per_kill(again, killed) == 1.0
    assert local_rounds.again_per_kill(again, killed[::2]) == 2.0

"""What the experiment on local rounds makes of its runs, and of one in which a worker fails."""

import jax
import pytest
from absl import flags

from experiments import local_rounds, packet_link, round_runs, workers
from experiments.tiers_relay import Link
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.nn.model import param_shapes


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
    monkeypatch.setattr(round_runs.Run, "start", lambda self, i: processes[i])
    (folder / "run.log").write_text("error: no space\n")
    return round_runs.Run({}, folder / "run", Link()), processes


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
    def alone(loopback):
        accuracies = {"loopback": loopback, "sum in every step": 0.91}
        return {"test_accuracy": accuracies, "validation_accuracy": accuracies}

    def seed(slower, loopback, same=True):
        times = {"slow_over_loopback": slower, "slow_over_loopback_from_start": 1.2}
        return {**alone(loopback), **times, "bytes_per_step": 1000.0, "same_parameters": same}

    def told(found):
        return [target["verdict"] for target in found.values()]

    found = local_rounds.verdicts([seed(1.1, 0.905), seed(1.4, 0.909), alone(0.904)], 200_000.0)
    assert told(found) == ["reached"] * 5
    assert [target["measured"] for target in found.values()] == pytest.approx([1.25, 1.2, 0.005, 0.4, 0])
    worse = local_rounds.verdicts([seed(1.1, 0.905, same=False), seed(1.6, 0.909), alone(0.9)], 99_000.0)
    assert told(worse) == ["missed", "reached", "missed", "missed", "missed"]
    never = local_rounds.verdicts([seed(1.1, 0.91), seed(None, 0.91)], 1e6, "validation_accuracy")
    assert told(never) == ["missed", "reached", "reached", "reached", "reached"]
    assert local_rounds.over_loopback({"slow": 3.0, "loopback": 2.0}) == 1.5
    assert local_rounds.over_loopback({"slow": 3.0, "loopback": None}) is None


def test_the_accuracy_is_stated_beforehand():
    values = flags.FlagValues()
    local_rounds.define(values)
    values(["local_rounds"])
    assert 0.5 < values.accuracy < 1.0


def test_a_trial_leaves_the_test_images_and_the_results_alone(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(local_rounds, "measure", lambda values, path: asked.append((values, path)) or {"verdicts": {}})
    for given in ([], ["--trial"]):
        values = flags.FlagValues()
        local_rounds.define(values)
        values(["local_rounds", f"--workdir={tmp_path}", *given])
        monkeypatch.setattr(local_rounds, "RESULTS", tmp_path / "results")
        (tmp_path / "results").mkdir(exist_ok=True)
        local_rounds.main(values)
    (_, final), (trial, tried) = asked
    assert (final, tried) == (tmp_path / "results" / "local_rounds.json", tmp_path / "trial.json")
    assert local_rounds.settings(trial, 0)["train.score_test"] is False


def test_results_of_other_settings_are_not_replaced(tmp_path):
    values = flags.FlagValues()
    local_rounds.define(values)
    values(["local_rounds", f"--workdir={tmp_path}"])
    write_json(tmp_path / "out.json", {"version": 0, "seeds": [{"seed": 0}]})
    with pytest.raises(
        InputError,
        match=r"out.json holds results that cannot stand beside those asked for:\n  version: 0 there, \d+ now",
    ):
        local_rounds.measure(values, tmp_path / "out.json")


def test_a_case_is_kept_for_what_was_asked(tmp_path):
    path, made = tmp_path / "case.json", []

    def make():
        made.append(len(made))
        return {"result": made[-1]}

    asked = {"model.lanes": "mlcn1:w1", "train.num_epochs": 2, "data.dir": "here"}
    found = [local_rounds.kept(path, asked | {"data.dir": place}, make) for place in ("here", "there")]
    assert [one["result"] for one in found] == [0, 0]
    with pytest.raises(InputError, match=r"made with other settings:\n  train.num_epochs: 2 there, 3 now\n"):
        local_rounds.kept(path, asked | {"train.num_epochs": 3}, make)
    with pytest.raises(InputError, match=r"  train\.rounds.steps: None there, 5 now"):
        local_rounds.kept(path, asked | {"train.rounds.steps": 5}, make)
    assert made == [0]


def test_the_row_written_just_before_the_end_is_read(tmp_path, monkeypatch):
    """The coordinator writes it between two looks, and has ended at the second."""
    folder, left = tmp_path / "case", [1, 0]

    class Ending:
        bytes_moved = 5

        def __init__(self, *given):
            folder.mkdir()
            write_json(folder / "summary.json", {"rounds": {"digest": "d"}})

        def is_running(self):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {len(left)}}}\n')
            return bool(left.pop(0))

        def end(self):
            assert not left

    for name in ("busy_cores", "product_gflops_per_second"):
        monkeypatch.setattr(local_rounds, name, lambda: None)
    monkeypatch.setattr(local_rounds, "Run", Ending)
    monkeypatch.setattr(local_rounds, "programs_of", lambda folder: folder / "programs")
    assert [row["step"] for row in local_rounds.timed({}, folder, "slow")["rows"]] == [2, 1]


@pytest.mark.parametrize("what", ["timed", "plain", "summed"])
def test_cases_of_all_kinds_are_refused_for_other_settings(what, tmp_path, monkeypatch):
    calls = {
        "timed": lambda changes: local_rounds.timed(changes, tmp_path / "case", "slow"),
        "plain": lambda changes: local_rounds.plain(changes, tmp_path / "case"),
        "summed": lambda changes: local_rounds.summed(changes, tmp_path / "case.json", "slow"),
    }
    asked = []
    monkeypatch.setattr(local_rounds, "kept", lambda path, wanted, make: asked.append((path, wanted)) or {"summary": 0})
    calls[what]({"model.lanes": "mlcn1:w1"})
    ((path, wanted),) = asked
    assert path == tmp_path / "case.json"
    assert wanted["model.lanes"] == "mlcn1:w1"
    assert what == "plain" or wanted["link"] == "slow"


@pytest.mark.long
@pytest.mark.skipif(not packet_link.possible(), reason="needs root and /dev/net/tun")
def test_the_sum_is_that_of_two_processes(tmp_path, monkeypatch):
    """Over 10 Mbit/s it takes at least the time of its bytes: those of all parameters, to and fro."""
    monkeypatch.setattr(local_rounds, "SUM_STEPS", 3)
    monkeypatch.setattr(local_rounds, "busy_cores", lambda: None)  # other tests run beside it
    changes = {"model.lanes": "mlcn1:w1*2", "model.decoder": "64", "train.batch_size": 20}
    found = {link: local_rounds.summed(changes, tmp_path / f"{link}.json", link) for link in local_rounds.LINKS}
    config = workers.config_of(changes)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config.model_spec(*config.data.shape()))))
    assert 2 * 4 * parameters < found["slow"]["bytes_per_step"] < 1.2 * 2 * 4 * parameters
    assert found["slow"]["seconds_per_step"] > 4 * parameters / 1.25e6 + 0.1
    assert found["loopback"]["seconds_per_step"] < found["slow"]["seconds_per_step"]

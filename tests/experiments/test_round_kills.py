"""What the experiment on killed processes of local rounds makes of its runs."""

from experiments import round_kills


def test_rounds_that_were_begun_again_are_counted():
    rounds = [(0, 0), (1, 0), (0, 1), (1, 1), (1, 1), (0, 1), (0, 1), (0, 2), (1, 2)]
    log = "".join(f"12:00:00 worker {worker} computes round {r}: steps 1 to 2\nstep 3\n" for worker, r in rounds)
    assert round_kills.computed_again(log) == {"worker 0": 2, "worker 1": 1}


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


def rows(folder, *steps, workers=2):
    text = "".join(f'{{"step": {step}, "split": "train", "workers": {workers}}}\n' for step in steps)
    (folder / "metrics.jsonl").write_text(text)


def test_what_one_kill_cost_is_told_of_it(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    (folder / round_kills.ROUNDS / "1").mkdir(parents=True)
    begun = [f"worker {i} computes round {r}\n" for r in (0, 0, 1) for i in (0, 1)]
    log.write_text("".join(begun))
    rows(folder, 6, 12)

    def resume():
        """The coordinator had recorded a second round, and not saved it."""
        append(log, "resuming after round 1\nworker 0 computes round 1\nworker 1 resumes after round 9\n")
        (folder / round_kills.ROUNDS / "2").mkdir()

    run = Killed(resume)
    found = round_kills.kill_one(run, folder, 0)
    assert run.done == [("kill", 0), ("start", 0)]
    assert found == {
        "process": "coordinator",
        "round_before": 2,
        "round_after": 1,
        "is_back": True,
        "twice": False,
        "computed_again": {"worker 0": 1, "worker 1": 0},
    }

    steps = iter([(6, 12, 18, 24), (6, 12, 18, 24, 30)])

    def lose_one_and_gain_two():
        """Between the kills two more rounds were recorded, which would hide that the second start lost one."""
        done = next(steps)
        rows(folder, *done)
        append(log, f"resuming after round {2 if len(done) == 4 else 3}\n")
        (folder / round_kills.ROUNDS / str(len(done) + 3)).mkdir()

    found = round_kills.kill_one(Killed(lose_one_and_gain_two), folder, 0, twice_after=0.0)
    assert (found["round_before"], found["round_after"]) == (4, 3)
    rows(folder, 6, 12)

    def compute():
        append(log, "worker 1 computes round 1\nworker 1 computes round 2\n")
        rows(folder, 6, 12, 18, 24)

    run = Killed(compute)
    found = round_kills.kill_one(run, folder, 2, twice_after=0.0)
    assert run.done == [("kill", 2), ("start", 2)] * 2
    assert (found["process"], found["round_before"], found["round_after"]) == ("worker 1", 2, 4)
    assert (found["is_back"], found["twice"]) == (True, True)
    assert found["computed_again"] == {"worker 0": 0, "worker 1": 3}


def test_a_worker_is_back_once_a_change_of_it_has_counted(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    folder.mkdir()
    log.write_text("worker 1 computes round 0\n")
    rows(folder, 6)

    def late():
        append(log, "worker 1 computes round 4\n")
        rows(folder, 6, 12, 18, 24, workers=1)

    class Ended(Killed):
        def wait_for(self, condition):
            assert not condition()

    assert not round_kills.kill_one(Ended(late), folder, 2)["is_back"]


def test_the_worst_kill_is_judged():
    def kill(again=0, before=5, after=5, back=True, twice=False):
        cost = {"computed_again": {"worker 0": 0, "worker 1": again}, "round_before": before, "round_after": after}
        return cost | {"is_back": back, "twice": twice}

    def below(kills, *killed, same=True):
        all_workers = {"kills": killed[:1], "every_round_once": same, "same_parameters": same}
        fewer = {"kills": killed[1:], "every_round_once": True, "same_parameters": None}
        found = {"quorum 2": all_workers, "quorum 1": fewer}
        judged = round_kills.kill_verdicts(kills, found)
        return [name for name, target in judged.items() if target["verdict"] == "missed"]

    assert not below(3, kill(), kill(again=1), kill(before=5, after=4))
    assert not below(1, kill(again=2, twice=True))
    assert below(3, kill(), kill(again=2), kill()) == ["rounds that a worker computed again after a kill"]
    assert below(1, kill(before=5, after=3)) == ["rounds that the coordinator lost in a kill"]
    assert below(2, kill(), kill(back=False)) == ["killed processes that did not take part again"]
    assert below(2, kill(), same=False) == [
        "runs that do not have every round once",
        "runs with other parameters at the end",
        "kills that are missing",
    ]


def test_half_of_the_kills_meet_a_run_that_needs_fewer_workers(monkeypatch, tmp_path):
    asked = []

    def disturbed(kills, quorum, rng):
        asked.append((kills, quorum))
        return {"kills": [], "every_round_once": True, "same_parameters": None}

    monkeypatch.setattr(round_kills, "disturbed", disturbed)
    round_kills.measure(21, 0, tmp_path / "kills.json")
    assert asked == [(11, 2), (10, 1)]
    assert (round_kills.SLOW.delay_ms, round_kills.SLOW.rate_mbit) == (50, 10)

"""Local rounds over a slow link, whose processes are killed at random moments and started again.

    python -m experiments.round_kills                       # some minutes on two cores

Two workers and the coordinator are processes of this machine; the link of each worker is a relay of 10 Mbit/s and 50 ms
in each direction. A worker or the coordinator is killed (SIGKILL) and started again, a random time after the one before
has been through a new round; every third one is killed a second time while it starts. In one half of the kills a round
needs both workers: the parameters at the end must be those of a run that nobody disturbed, bit for bit. In the other
half one worker is enough (`train.rounds.quorum`): the run goes on without the other, which must take part again.

For each kill the rounds that workers began again are counted in the log, and those that the coordinator recorded and
lost: the most that a kill has cost is judged, of two kills of one start their mean. Writes `round_kills.json` to the
results, with a verdict for each target.
"""

import collections
import random
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS
from experiments.round_runs import SLOW, WORKERS, Run, judged, log_of, show
from experiments.tiers_relay import Link
from mlcn_jax import host
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.training.checkpoint import ROUNDS
from mlcn_jax.training.metrics import read_rows

VERSION = 4  # raised with every change after which results cannot stand beside older ones
_TRAINING = {
    "data.validation_fraction": 0.2,
    "model.lanes": "mlcn1:w1*2",
    "model.decoder": "8",
    "train.batch_size": 50,
    "train.checkpoint_every": 30,
    "train.rounds.steps": 6,
    "train.rounds.workers": WORKERS,
    "train.rounds.patience_seconds": 2,
}
_EPOCHS_PER_KILL = {WORKERS: 10, WORKERS - 1: 25}  # by quorum: or the run ends before the last kill
_KILL_SECONDS = (0.0, 3.0)  # from the first new round of the process that was killed last to the next kill
_AGAIN_SECONDS = (0.0, 8.0)  # from a start to the second kill of a process that is killed twice
_MOST_AGAIN = 1.0  # rounds that a worker computes again, or that the coordinator loses, after a kill


def computed_again(log: str) -> dict[str, int]:
    """How many times each worker began a round that it had begun before, from the log of a run."""
    begun = collections.Counter(re.findall(r"worker (\d+) computes round (\d+)", log))
    return {f"worker {i}": sum(times - 1 for (own, _), times in begun.items() if own == str(i)) for i in range(WORKERS)}


def kill_one(run: Run, folder: Path, victim: int, twice_after: float | None = None) -> dict[str, Any]:
    """Kills a process of the run in a folder, starts it again, and waits until it has been through a new round.

    If it is killed twice, the second time comes so many seconds after it was started again.

    Returns:
      the `process`; `round_before`, the rounds that the coordinator had recorded when it happened, and `round_after`,
      those that it went on from, of two kills those of the one that cost more; whether the process `is_back`, that is,
      was in a new round, and, a worker, in one whose change counted; whether it was killed `twice`; and the rounds that
      were `computed_again` since, by worker.
    """
    again, resumed_before = computed_again(log_of(folder)), len(_resumed(folder))
    run.kill(victim)
    before, reached = [len(recorded(folder))], newest_round(folder, victim)
    run.start_again(victim)
    if twice_after is not None:
        time.sleep(twice_after)
        run.kill(victim)
        before.append(len(recorded(folder)))
        run.start_again(victim)
    run.wait_for(lambda: newest_round(folder, victim) > reached and _takes_part(folder, victim, before[0]))
    text = log_of(folder)
    resumed = _resumed(folder)[resumed_before:] if victim == 0 else []
    pairs = [(before[0], len(recorded(folder)))]
    if resumed:  # of a start that was killed before it had resumed there is nothing to tell
        pairs = list(zip(before[-len(resumed) :], resumed, strict=True))
    worst = max(pairs, key=lambda pair: pair[0] - pair[1])
    return {
        "process": "coordinator" if victim == 0 else f"worker {victim - 1}",
        "round_before": worst[0],
        "round_after": worst[1],
        "is_back": newest_round(folder, victim) > reached and _takes_part(folder, victim, before[0]),
        "twice": twice_after is not None,
        "computed_again": {name: times - again[name] for name, times in computed_again(text).items()},
    }


def _resumed(folder: Path) -> list[int]:
    """The rounds after which the coordinator has resumed, from the log."""
    return [int(number) for number in re.findall(r"\bresuming after round (\d+)", log_of(folder))]


def _takes_part(folder: Path, victim: int, before: int) -> bool:
    """Whether a round after so many had all workers, if the victim is one."""
    return victim == 0 or any(row["workers"] == WORKERS for row in _rounds(folder)[before + 1 :])


def newest_round(folder: Path, process: int) -> int:
    """The newest round that the coordinator (0) has saved, or that a worker has begun; -1 if there is none."""
    if process == 0:
        rounds = [path.name for path in (folder / ROUNDS).glob("[0-9]*") if path.name.isdigit()]
    else:
        rounds = re.findall(rf"worker {process - 1} computes round (\d+)", log_of(folder))
    return max(map(int, rounds), default=-1)


def recorded(folder: Path) -> list[int]:
    """Steps at the end of each round that the coordinator has recorded; it may not have saved the newest."""
    return [row["step"] for row in _rounds(folder)]


def _rounds(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["split"] == "train"]


def kill_verdicts(kills: int, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The targets of runs whose processes are killed, from what came of them, by their quorum."""
    every = [one for run in found.values() for one in run["kills"]]
    again = [max(one["computed_again"].values()) / (1 + one["twice"]) for one in every]  # of each of the two
    lost = [one["round_before"] - one["round_after"] for one in every]
    others = [run for run in found.values() if run["same_parameters"] is False]
    return {
        "rounds that a worker computed again after a kill": judged(max(again, default=None), _MOST_AGAIN),
        "rounds that the coordinator lost in a kill": judged(max([0, *lost]) if lost else None, _MOST_AGAIN),
        "killed processes that did not take part again": judged(sum(not one["is_back"] for one in every), 0),
        "runs that do not have every round once": judged(sum(not r["every_round_once"] for r in found.values()), 0),
        "runs with other parameters at the end": judged(len(others), 0),
        "kills that are missing": judged(kills - len(every), 0),
    }


def disturbed(kills: int, quorum: int, rng: random.Random) -> dict[str, Any]:
    """What comes of a run over the slow link whose processes are killed, if a round needs so many workers.

    `same_parameters` says whether they are those of a run that nobody disturbed, as they must be if a round needs all
    workers; else it is None.
    """
    killed = list[dict[str, Any]]()
    changes = _TRAINING | {"train.rounds.quorum": quorum, "train.num_epochs": _EPOCHS_PER_KILL[quorum] * kills}
    with tempfile.TemporaryDirectory() as folder:
        place, quiet = Path(folder, "disturbed"), Path(folder, "quiet")
        if quorum == WORKERS:  # over any link
            Run(changes, quiet, Link()).end()
        run = Run(changes, place, SLOW)
        run.wait_for(lambda: newest_round(place, 0) > 0)
        while len(killed) < kills:
            time.sleep(rng.uniform(*_KILL_SECONDS))
            if not run.is_running():
                break
            twice_after = rng.uniform(*_AGAIN_SECONDS) if len(killed) % 3 == 2 else None
            killed.append(kill_one(run, place, rng.randrange(WORKERS + 1), twice_after))
        run.end()
        summary, length = read_json(place / "summary.json"), _TRAINING["train.rounds.steps"]
        same = None
        if quorum == WORKERS:
            same = summary["rounds"]["digest"] == read_json(quiet / "summary.json")["rounds"]["digest"]
        steps = [*range(length, summary["steps"], length), summary["steps"]]
        return {
            "kills": killed,
            "rounds": len(steps),
            "workers_in_a_round": statistics.fmean(row["workers"] for row in _rounds(place)),
            "every_round_once": recorded(place) == steps,
            "same_parameters": same,
            "validation_accuracy": summary["validation_accuracy"],
            "computed_again": computed_again(log_of(place)),
        }


def measure(kills: int, seed: int, path: Path) -> dict[str, Any]:
    """What comes of runs whose processes are killed, one with a quorum of all workers and one with fewer.

    The first is written beside `path` before the second begins, in `*.begun.json`.
    """
    rng = random.Random(seed)
    parts = {quorum: kills // 2 + kills % 2 * (quorum == WORKERS) for quorum in (WORKERS, WORKERS - 1)}
    found: dict[str, Any] = {}
    for quorum, count in parts.items():
        if count:
            found[f"quorum {quorum}"] = disturbed(count, quorum, rng)
            write_json(path.with_suffix(".begun.json"), {"version": VERSION, **found, **host.environment()})
    return {"version": VERSION, **found, "verdicts": kill_verdicts(kills, found)}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("kills", 20, "Processes to kill.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "round_kills.json"), "File to write.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    path = Path(values.output)
    found = measure(values.kills, 0, path)
    write_json(path, {**found, **host.environment()})
    path.with_suffix(".begun.json").unlink(missing_ok=True)
    print(found)
    show(found["verdicts"])


if __name__ == "__main__":
    launch_script(define, main)

"""Local rounds over a slow link and over none, beside a gradient sum in every step; and processes that are killed.

    python -m experiments.local_rounds --workdir=FOLDER --data_dir=FOLDER                # hours on two cores
    python -m experiments.local_rounds --workdir=FOLDER --kills=20                       # some minutes

Two workers and the coordinator are processes of this machine. The slow link of each worker is a relay of 10 Mbit/s and
50 ms in each direction (`experiments.tiers_relay`). Three seeds train in rounds over the slow link and over loopback,
and in the ordinary way, which computes what a sum of gradients in every step would. That sum is timed over 20 steps:
rounds of one step in 32 bits, over both links. Time counts from the first round's end, when all have compiled, to an
accuracy that was stated beforehand (`--accuracy`).

With `--kills`, a worker or the coordinator is killed (SIGKILL) and started again, a random time after the one before
has been through a new round; what came of it is compared with a run that nobody disturbed: as a round needs both
workers there, the parameters at the end must be the same, bit for bit. For each kill the rounds that workers began
again are counted in the log, and those that the coordinator recorded and lost: the most that a kill has cost is judged.

Writes `local_rounds.json`, or `local_rounds_kills.json`, to the results, with a verdict for each target: means over the
seeds. Cases that are finished in the workdir and seeds in the results, by the same `VERSION`, are not run again.
"""

import collections
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import REPOSITORY, RESULTS
from experiments.tiers_relay import Link, Relay
from mlcn_jax import host
from mlcn_jax.distributed.processes import free_port
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.rounds.coordinator import FOLDER
from mlcn_jax.rounds.vector import num_bytes
from mlcn_jax.training.metrics import read_rows

WORKERS = 2
VERSION = 1  # raised with every change after which results cannot stand beside older ones
SLOW = Link(delay_ms=50, rate_mbit=10)
LINKS = {"loopback": Link(), "slow": SLOW}
_KILLED = {
    "data.validation_fraction": 0.2,
    "model.lanes": "mlcn1:w1*2",
    "model.decoder": "8",
    "train.batch_size": 50,
    "train.checkpoint_every": 30,
    "train.rounds.steps": 6,
    "train.rounds.workers": WORKERS,
    "train.rounds.quorum": WORKERS,
}
_EPOCHS_PER_KILL = 15
_KILL_SECONDS = (0.0, 3.0)  # from the first new round of the process that was killed last to the next kill
_POLL_SECONDS = 0.1
_LOG_END = 2000  # characters shown when a process failed
_MOST_SLOWER = 1.3  # time to the stated accuracy over the slow link, by that over loopback
_MOST_BYTES = 0.01  # of those of a sum of gradients in every step
_MOST_LOST = 0.5  # percentage points of accuracy, against a sum in every step
_MOST_AGAIN = 1.0  # rounds that a worker computes again, or that the coordinator loses, after a kill


class Run:
    """The processes of a run in rounds, each with its link."""

    def __init__(self, changes: dict[str, Any], folder: Path, link: Link):
        self._folder, self._port = folder, free_port()
        self._flags = [f"--config={REPOSITORY / 'configs' / 'default.py'}"]
        self._flags += [f"--config.{name}={value}" for name, value in changes.items()]
        self._relays = [Relay(("127.0.0.1", self._port), Link(link.delay_ms, link.rate_mbit)) for _ in range(WORKERS)]
        cores = sorted(os.sched_getaffinity(0))
        self._cores = [cores, *([cores[i % len(cores)]] for i in range(WORKERS))]
        self.processes = [self.start(i) for i in range(WORKERS + 1)]

    def start(self, i: int) -> subprocess.Popen:
        """Starts the coordinator (0) or a worker, in the place of one that ended."""
        own = ["--serve", f"127.0.0.1:{self._port}", "--workdir", str(self._folder)]
        if i:
            own = ["--coordinator", f"127.0.0.1:{self._relays[i - 1].port}", "--worker", str(i - 1)]
            own += ["--workdir", str(self._folder / f"worker{i - 1}")]
        log = (self._folder.parent / f"{self._folder.name}.log").open("a")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlcn_jax", "rounds", *self._flags, *own],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
            )
        os.sched_setaffinity(process.pid, self._cores[i])
        return process

    def kill(self, i: int) -> None:
        """Kills a process."""
        self.processes[i].send_signal(signal.SIGKILL)
        self.processes[i].wait()

    def start_again(self, i: int) -> None:
        """Starts a process that was killed."""
        self.processes[i] = self.start(i)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds or the coordinator has ended."""
        while self.is_running() and not condition():
            time.sleep(_POLL_SECONDS)

    @property
    def bytes_moved(self) -> int:
        """Bytes that went over all links so far, in both directions."""
        return sum(relay.sent + relay.received for relay in self._relays)

    def is_running(self) -> bool:
        """Whether the coordinator is at work.

        Raises:
          InputError: a worker failed, for which the coordinator would wait forever; all processes were ended.
        """
        if self.processes[0].poll() is not None:
            return False
        for i, process in enumerate(self.processes[1:]):
            if code := process.poll():
                self._stop()
                raise InputError(f"worker {i} ended by itself with code {code}:\n{log_of(self._folder)[-_LOG_END:]}")
        return True

    def end(self) -> None:
        """Waits for the coordinator, then ends the rest; raises InputError if it or a worker failed."""
        while self.is_running():
            time.sleep(_POLL_SECONDS)
        self._stop()
        if code := self.processes[0].returncode:
            raise InputError(f"the coordinator ended with code {code}:\n{log_of(self._folder)[-_LOG_END:]}")

    def _stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        for relay in self._relays:
            relay.close()


def timed(changes: dict[str, Any], folder: Path, link: str) -> dict[str, Any]:
    """Runs a case unless it is finished: when each row of its metrics came, and the bytes that were moved by then."""
    path = folder.parent / f"{folder.name}.json"
    if path.exists() and (stored := read_json(path)).get("version") == VERSION:
        return stored
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut, whose times are lost
    run, rows = Run(changes, folder, LINKS[link]), list[dict[str, Any]]()
    while run.is_running():
        for row in read_rows(folder / "metrics.jsonl")[len(rows) :]:
            rows.append({**row, "at_seconds": time.monotonic(), "bytes": run.bytes_moved})
        time.sleep(_POLL_SECONDS)
    run.end()
    summary = read_json(folder / "summary.json")
    result = {"version": VERSION, "link": link, "rows": rows, "bytes": run.bytes_moved}
    result |= {name: summary[name] for name in ("validation_accuracy", "parameters", "steps")}
    write_json(path, result)
    return result


def seconds_to(case: dict[str, Any], accuracy: float) -> float | None:
    """Seconds from the end of the first round until a validation accuracy was first measured; None if it never was."""
    start = case["rows"][0]["at_seconds"]
    reached = [row for row in case["rows"] if row["split"] == "validation" and row["accuracy"] >= accuracy]
    return reached[0]["at_seconds"] - start if reached else None


def settings(values: Any, seed: int) -> dict[str, Any]:
    """The training that all cases share."""
    changes = {
        "data.name": values.data,
        "data.dir": values.data_dir,
        "data.validation_fraction": 0.1,
        "model.lanes": values.lanes,
        "train.batch_size": values.batch,
        "train.num_epochs": values.epochs,
        "train.checkpoint_every": values.every,
        "train.seed": seed,
        "train.score_test": False,
    }
    if "resnet" in values.lanes:
        changes |= {"model.norm_group": values.batch // WORKERS, "train.optimizer": "muon", "train.learning_rate": 0.12}
    return changes


def measure(values: Any, path: Path) -> dict[str, Any]:
    """Rounds over both links, gradient sums in every step over both, and ordinary training, all with each seed.

    What is there so far is written to `path` after each seed.
    """
    workdir = Path(values.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    rounds = {
        "train.rounds.workers": WORKERS,
        "train.rounds.steps": values.steps,
        "train.rounds.learning_rate": values.outer_rate,
        "train.rounds.momentum": values.outer_momentum,
    }
    training = {name: value for name, value in (settings(values, 0) | rounds).items() if name != "data.dir"}
    about = {"version": VERSION, "training": training, "stated_accuracy": values.accuracy}
    stored = read_json(path) if path.exists() else {}
    seeds = stored["seeds"] if all(stored.get(name) == value for name, value in about.items()) else []
    for seed in range(len(seeds), values.repeats):
        common = settings(values, seed)
        found = {link: timed(common | rounds, workdir / f"rounds_{link}_{seed}", link) for link in LINKS}
        plain = workdir / f"plain_{seed}"
        if not (plain / "summary.json").exists():
            fields = [f"--config.{name}={value}" for name, value in common.items()]
            command = [sys.executable, "-m", "mlcn_jax", "train", f"--config={REPOSITORY / 'configs' / 'default.py'}"]
            subprocess.run([*command, *fields, f"--workdir={plain}"], check=True, cwd=REPOSITORY)
        times = {link: seconds_to(found[link], values.accuracy) for link in LINKS}
        seeds.append(
            {
                "seed": seed,
                "seconds_to_it": times,
                "slow_over_loopback": times["slow"] / times["loopback"] if all(times.values()) else None,
                "validation_accuracy": {link: found[link]["validation_accuracy"] for link in LINKS}
                | {"sum in every step": read_json(plain / "summary.json")["validation_accuracy"]},
                "bytes_per_step": found["slow"]["bytes"] / found["slow"]["steps"] / WORKERS,
            }
        )
        write_json(path, {**about, "seeds": seeds, **host.environment()})
    every = {"train.rounds.workers": WORKERS, "train.rounds.steps": 1, "train.rounds.bits": 32, "train.num_steps": 20}
    sums = {}
    for link in LINKS:
        case = timed(settings(values, 0) | every, workdir / f"sum_{link}", link)
        rows = [row for row in case["rows"] if row["split"] == "train"]
        count = rows[-1]["step"] - rows[0]["step"]
        sums[link] = {
            "seconds_per_step": (rows[-1]["at_seconds"] - rows[0]["at_seconds"]) / count,
            "bytes_per_step": (rows[-1]["bytes"] - rows[0]["bytes"]) / count / WORKERS,
        }
    parameters = case["parameters"]
    return {
        **about,
        "seeds": seeds,
        "sum_in_every_step": sums,
        "bytes_expected": {"round": 2 * num_bytes(parameters, 8), "sum": 2 * num_bytes(parameters, 32)},
        "verdicts": verdicts(seeds, sums["slow"]["bytes_per_step"]),
    }


def verdicts(seeds: Sequence[Mapping[str, Any]], sum_bytes: float) -> dict[str, dict[str, Any]]:
    """The targets of rounds over the slow link, from the results of all seeds and the bytes of a gradient sum."""
    slower = [one["slow_over_loopback"] for one in seeds]
    every, slow = (
        statistics.fmean(100 * one["validation_accuracy"][name] for one in seeds)
        for name in ("sum in every step", "slow")
    )
    share = statistics.fmean(one["bytes_per_step"] for one in seeds) / sum_bytes
    return {
        "time to the stated accuracy, by that over loopback": judged(
            None if None in slower else statistics.fmean(slower), _MOST_SLOWER
        ),
        "bytes, by those of a sum in every step": judged(share, _MOST_BYTES),
        "accuracy lost against a sum in every step, points": judged(every - slow, _MOST_LOST),
    }


def judged(measured: float | None, most: float) -> dict[str, Any]:
    """A target, and whether it was reached; what was never measured is below it."""
    good = measured is not None and measured <= most
    return {"measured": measured, "at_most": most, "verdict": "reached" if good else "below"}


def computed_again(log: str) -> dict[str, int]:
    """How many times each worker began a round that it had begun before, from the log of a run."""
    begun = collections.Counter(re.findall(r"worker (\d+) computes round (\d+)", log))
    return {f"worker {i}": sum(times - 1 for (own, _), times in begun.items() if own == str(i)) for i in range(WORKERS)}


def kill_one(run: Run, folder: Path, victim: int) -> dict[str, Any]:
    """Kills a process of the run in a folder, starts it again, and waits until it has been through a new round.

    Returns:
      the `process`; `round_before`, the rounds that the coordinator had recorded when it happened, and `round_after`,
      those that it went on from; and the rounds that were `computed_again` since, by worker.
    """
    again = computed_again(log_of(folder))
    run.kill(victim)
    before, reached = len(recorded(folder)), newest_round(folder, victim)
    run.start_again(victim)
    run.wait_for(lambda: newest_round(folder, victim) > reached)
    text = log_of(folder)
    resumed = re.findall(r"\bresuming after round (\d+)", text) if victim == 0 else []
    return {
        "process": "coordinator" if victim == 0 else f"worker {victim - 1}",
        "round_before": before,
        "round_after": int(resumed[-1]) if resumed else len(recorded(folder)),
        "computed_again": {name: times - again[name] for name, times in computed_again(text).items()},
    }


def log_of(folder: Path) -> str:
    """What all processes of the run in a folder have logged."""
    return folder.with_name(f"{folder.name}.log").read_text()


def newest_round(folder: Path, process: int) -> int:
    """The newest round that the coordinator (0) has saved, or that a worker has begun; -1 if there is none."""
    if process == 0:
        rounds = [path.name for path in (folder / FOLDER).glob("[0-9]*") if path.name.isdigit()]
    else:
        rounds = re.findall(rf"worker {process - 1} computes round (\d+)", log_of(folder))
    return max(map(int, rounds), default=-1)


def recorded(folder: Path) -> list[int]:
    """Steps at the end of each round that the coordinator has recorded; it may not have saved the newest."""
    return [row["step"] for row in read_rows(folder / "metrics.jsonl") if row["split"] == "train"]


def kill_verdicts(kills: int, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The targets of a run whose processes are killed, from what came of it."""
    again = [max(one["computed_again"].values()) for one in found["kills"]]
    lost = [one["round_before"] - one["round_after"] for one in found["kills"]]
    return {
        "rounds that a worker computed again after a kill": judged(max(again, default=None), _MOST_AGAIN),
        "rounds that the coordinator lost in a kill": judged(max([0, *lost]) if lost else None, _MOST_AGAIN),
        "runs that do not have every round once": judged(int(not found["every_round_once"]), 0),
        "runs with other parameters at the end": judged(int(not found["same_parameters"]), 0),
        "kills that are missing": judged(kills - len(found["kills"]), 0),
    }


def kill(kills: int, seed: int) -> dict[str, Any]:
    """What comes of a run whose processes are killed at random moments."""
    rng, killed = random.Random(seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        changes = _KILLED | {"train.num_epochs": _EPOCHS_PER_KILL * kills}
        Run(changes, Path(folder, "quiet"), Link()).end()
        place = Path(folder, "disturbed")
        disturbed = Run(changes, place, Link())
        disturbed.wait_for(lambda: newest_round(place, 0) > 0)
        while len(killed) < kills:
            time.sleep(rng.uniform(*_KILL_SECONDS))
            if not disturbed.is_running():
                break
            killed.append(kill_one(disturbed, place, rng.randrange(WORKERS + 1)))
        disturbed.end()
        again = computed_again(log_of(place))
        rounds = {name: recorded(Path(folder, name)) for name in ("quiet", "disturbed")}
        summaries = {name: read_json(Path(folder, name, "summary.json")) for name in rounds}
    digests = {name: summary["rounds"]["digest"] for name, summary in summaries.items()}
    found = {
        "version": VERSION,
        "kills": killed,
        "rounds": len(rounds["quiet"]),
        "every_round_once": rounds["quiet"] == rounds["disturbed"],
        "same_parameters": digests["quiet"] == digests["disturbed"],
        "validation_accuracy": {name: summary["validation_accuracy"] for name, summary in summaries.items()},
        "computed_again": again,
    }
    return {**found, "verdicts": kill_verdicts(kills, found)}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the runs; a finished one is kept.", flag_values=values)
    flags.DEFINE_string("data", "fashion_mnist", "Dataset.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Its folder; if empty, it is downloaded.", flag_values=values)
    flags.DEFINE_string("lanes", "resnet:w4d2*4", "Lanes of the model.", flag_values=values)
    flags.DEFINE_integer("batch", 500, "Images per step, of both workers together.", flag_values=values)
    flags.DEFINE_integer("epochs", 4, "Epochs of each run.", flag_values=values)
    flags.DEFINE_integer("steps", 50, "Steps of a round.", flag_values=values)
    flags.DEFINE_integer("every", 50, "Steps between scores.", flag_values=values)
    flags.DEFINE_float("outer_rate", 0.7, "Learning rate of the outer step.", flag_values=values)
    flags.DEFINE_float("outer_momentum", 0.9, "Momentum of the outer step.", flag_values=values)
    text = (
        "Validation accuracy to which time is taken. It is fixed before the runs, so that none of them decides what is "
        "measured: the thesis's models end at 0.91 after 20 epochs, and 4 epochs of residual lanes should pass 0.88."
    )
    flags.DEFINE_float("accuracy", 0.88, text, lower_bound=0.1, upper_bound=1.0, flag_values=values)
    flags.DEFINE_integer("repeats", 3, "Seeds.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("kills", 0, "Kill so many processes instead.", lower_bound=0, flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.kills and not values.workdir:
        raise InputError("--workdir=FOLDER is needed: the runs are kept there")
    path = RESULTS / f"local_rounds{'_kills' if values.kills else ''}.json"
    found = kill(values.kills, 0) if values.kills else measure(values, path)
    write_json(path, {**found, **host.environment()})
    print(found)
    for what, target in found["verdicts"].items():
        value = "never" if target["measured"] is None else f"{target['measured']:.3g}"
        print(f"{what}: {value}, at most {target['at_most']:g}: {target['verdict']}")


if __name__ == "__main__":
    launch_script(define, main)

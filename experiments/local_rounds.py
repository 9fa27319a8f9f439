"""Local rounds over a slow link and over none, beside a gradient sum in every step.

    python -m experiments.local_rounds --workdir=FOLDER --data_dir=FOLDER                # hours on two cores, as root

Two workers and the coordinator are processes of this machine. The slow link of each worker is a relay of 10 Mbit/s and
50 ms in each direction (`experiments.tiers_relay`). Three seeds train in rounds and in the ordinary way, which computes
what a sum of gradients in every step would. The first two train in rounds twice, over the slow link and over loopback,
for the times; the third over loopback only, since a link does not change what is computed. A sum in every step is timed
over 20 steps of two processes with `parallel.data=2`, over loopback and over a link of packets that is as slow
(`experiments.packet_link`). Time counts to a validation accuracy that was stated beforehand (`--accuracy`), from the
start and from the first round's end, when all have compiled; both are judged. Bytes are all that go over links, once
each: those of a step of rounds over those of a step with a sum. Accuracy is that of test images, with the best
parameters by validation images. `--trial` leaves the test images alone and compares validation accuracy, to choose the
outer step's settings and the stated accuracy: few rounds need less momentum than DiLoCo's 0.9, and the accuracy should
come near the end. The relay is checked first, and nothing is timed while other work keeps cores busy.

Writes `local_rounds.json` to the results, or `trial.json` to the workdir, with a verdict for each target: means over
the seeds. Cases that are finished in the workdir, and seeds in the results, are not run again if the same is asked; a
workdir or a file of other cases is refused.
What comes of processes that are killed is another experiment (`experiments.round_kills`).
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import REPOSITORY, RESULTS, packet_link, workers
from experiments.kept_rows import stored_results
from experiments.quiet import busy_cores
from experiments.residual_lanes import product_gflops_per_second
from experiments.round_runs import POLL_SECONDS, SLOW, WORKERS, Run, judged, programs_of, show
from experiments.tiers_relay import Link, checked
from mlcn_jax import host
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.rounds.vector import num_bytes
from mlcn_jax.training.metrics import read_rows

VERSION = 5  # raised with every change after which results cannot stand beside older ones
LINKS = {"loopback": Link(), "slow": SLOW}
SUM_STEPS = 20
TIMED_SEEDS = 2  # train over both links, each of which is the first once
_MOST_SLOWER = 1.3  # time to the stated accuracy over the slow link, by that over loopback
_MOST_BYTES = 0.01  # of those of a sum of gradients in every step
_MOST_LOST = 0.5  # percentage points of accuracy, against a sum in every step
_SUM_TIMEOUT_SECONDS = 600  # of a process: heartbeats share the slow link with the sum
_SWITCH_SECONDS = 1e-4  # how long a relay waits for Python's lock


def kept(path: Path, asked: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case gave, from `path` if it is finished, else made now and written there.

    Args:
      path: of a JSON file.
      asked: all that the case depends on; the folder of the images does not count.
      make: gives the result.

    Raises:
      InputError: what is there was asked otherwise.
    """
    asked = {"version": VERSION, **asked}
    asked.pop("data.dir", None)
    if path.exists():
        stored = read_json(path)
        before = stored.get("asked", {})
        if rows := differences(before, asked, dict.fromkeys([*before, *asked])):
            raise InputError(
                f"{path} was made with other settings:\n" + "\n".join(rows) + "\ngive them, or another --workdir"
            )
        return stored
    result = {"asked": asked, **make()}
    write_json(path, result)
    return result


def timed(changes: dict[str, Any], folder: Path, link: str) -> dict[str, Any]:
    """A case of rounds: when each row of its metrics came, and the bytes that were moved by then."""

    def make() -> dict[str, Any]:
        for left in (folder, programs_of(folder)):  # by a run that was cut, whose times are lost
            shutil.rmtree(left, ignore_errors=True)
        busy, rate = busy_cores(), product_gflops_per_second()
        started = time.monotonic()
        run, rows = Run(changes, folder, LINKS[link]), list[dict[str, Any]]()
        running = True
        while running:
            running = run.is_running()  # if not, what was written last is read
            for row in read_rows(folder / "metrics.jsonl")[len(rows) :]:
                rows.append({**row, "at_seconds": time.monotonic() - started, "bytes": run.bytes_moved})
            time.sleep(POLL_SECONDS)
        run.end()
        summary = read_json(folder / "summary.json")
        names = ("validation_accuracy", "test_accuracy", "parameters", "steps")
        of_run = {name: summary[name] for name in names if name in summary}
        of_run |= {"digest": summary["rounds"]["digest"], "busy_cores": busy, "product_gflops_per_second": rate}
        return {"link": link, "rows": rows, "bytes": run.bytes_moved, **of_run}

    return kept(folder.with_name(f"{folder.name}.json"), {"link": link, **machine(), **changes}, make)


def plain(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The summary of an ordinary training."""

    def make() -> dict[str, Any]:
        fields = [f"--config.{name}={value}" for name, value in changes.items()]
        command = [sys.executable, "-m", "mlcn_jax", "train", f"--config={REPOSITORY / 'configs' / 'default.py'}"]
        subprocess.run([*command, *fields, f"--workdir={folder}"], check=True, cwd=REPOSITORY)
        return {"summary": read_json(folder / "summary.json")}

    return kept(folder.with_name(f"{folder.name}.json"), changes, make)["summary"]


def summed(changes: dict[str, Any], path: Path, link: str) -> dict[str, Any]:
    """A gradient sum in every step of two processes: seconds of a step and, over the slow link, bytes on it, both ways.

    Bytes are those that TCP delivers, as the relay counts those of rounds.
    """
    changes = changes | {"parallel.data": WORKERS, "parallel.timeout_seconds": _SUM_TIMEOUT_SECONDS}
    cores = sorted(os.sched_getaffinity(0))

    def make() -> dict[str, Any]:
        busy = busy_cores()
        with contextlib.ExitStack() as stack:
            where: dict[str, Any] = {}
            if link == "slow":
                shaped = stack.enter_context(packet_link.PacketLink(SLOW.delay_ms, SLOW.rate_mbit))
                where = {"prefixes": [shaped.prefix(i) for i in range(WORKERS)], "address": packet_link.ADDRESSES[0]}
            group = workers.Group(workers.Run(changes, [[cores[i % len(cores)]] for i in range(WORKERS)], **where))
            stack.callback(group.close)
            group.seconds(1)  # now that all have compiled
            before = shaped.bytes_moved if where else 0
            seconds = group.seconds(SUM_STEPS)
            moved = (shaped.bytes_moved - before) / (SUM_STEPS + 1) if where else None  # one step is not timed
        return {"seconds_per_step": seconds, "bytes_per_step": moved, "busy_cores": busy}

    return kept(path, {"link": link, "steps": SUM_STEPS, **machine(), **changes}, make)


def machine() -> dict[str, Any]:
    """Where cases are timed; times of two machines are not compared."""
    return {name: host.environment()[name] for name in ("device", "cpu_count")}


def seconds_to(case: dict[str, Any], accuracy: float, from_start: bool = False) -> float | None:
    """Seconds from the end of the first round until a validation accuracy was first measured; None if it never was.

    With `from_start`, from the start of the processes, compiling included.
    """
    start = 0.0 if from_start else case["rows"][0]["at_seconds"]
    reached = [row for row in case["rows"] if row["split"] == "validation" and row["accuracy"] >= accuracy]
    return reached[0]["at_seconds"] - start if reached else None


def settings(values: Any, seed: int) -> dict[str, Any]:
    """The training that all cases share."""
    changes = {
        "data.name": values.data,
        "data.dir": str(Path(values.data_dir).resolve()) if values.data_dir else "",
        "data.validation_fraction": 0.1,
        "model.lanes": values.lanes,
        "train.batch_size": values.batch,
        "train.num_epochs": values.epochs,
        "train.checkpoint_every": values.every,
        "train.seed": seed,
        "train.score_test": not values.trial,
    }
    if "resnet" in values.lanes:
        changes |= {"model.norm_group": values.batch // WORKERS, "train.optimizer": "muon", "train.learning_rate": 0.12}
    return changes


def measure(values: Any, path: Path) -> dict[str, Any]:
    """Gradient sums in every step over both links, rounds over both, and ordinary training, all with each seed.

    Seeds that are in `path`, and cases in the workdir, are not measured again.
    """
    workdir = Path(values.workdir).resolve()  # processes have another working directory
    workdir.mkdir(parents=True, exist_ok=True)
    rounds = {
        "train.rounds.workers": WORKERS,
        "train.rounds.steps": values.steps,
        "train.rounds.learning_rate": values.outer_rate,
        "train.rounds.momentum": values.outer_momentum,
    }
    training = {name: value for name, value in (settings(values, 0) | rounds).items() if name != "data.dir"}
    about = {"version": VERSION, "training": training, "stated_accuracy": values.accuracy, **machine()}
    seeds = stored_results(path, about).get("seeds", [])
    wanted = range(values.first_seed, values.first_seed + values.repeats)
    if other := [one["seed"] for one in seeds if one["seed"] not in wanted]:
        raise InputError(f"{path} has seeds {other}, which are not asked for: give another --output")
    sys.setswitchinterval(_SWITCH_SECONDS)
    about["relay"] = checked()
    sums = {link: summed(settings(values, 0), workdir / f"sum_{link}.json", link) for link in LINKS}
    judged_by = "validation_accuracy" if values.trial else "test_accuracy"
    for seed in [seed for seed in wanted if seed not in [one["seed"] for one in seeds]]:
        common = settings(values, seed)
        both = seed - values.first_seed < TIMED_SEEDS
        in_turn = list(LINKS)[:: -1 if seed % 2 else 1] if both else ["loopback"]  # so that neither is always the first
        found = {link: timed(common | rounds, workdir / f"rounds_{link}_{seed}", link) for link in in_turn}
        accuracies = found | {"sum in every step": plain(common, workdir / f"plain_{seed}")}
        seeds.append(
            {
                "seed": seed,
                **{
                    name: {way: about_it[name] for way, about_it in accuracies.items()}
                    for name in dict.fromkeys((judged_by, "validation_accuracy"))
                },
                "parameters": found["loopback"]["parameters"],
                **(compared(found, values.accuracy) if both else {}),
            }
        )
    parameters = seeds[0]["parameters"]
    return {
        **about,
        "seeds": seeds,
        "slow_link": {"delay_ms": SLOW.delay_ms, "rate_mbit": SLOW.rate_mbit},
        "sum_in_every_step": sums,
        "bytes_expected": {"round": 2 * WORKERS * num_bytes(parameters, 8), "sum": 2 * num_bytes(parameters, 32)},
        "verdicts": verdicts(seeds, sums["slow"]["bytes_per_step"], judged_by),
    }


def compared(found: Mapping[str, dict[str, Any]], accuracy: float) -> dict[str, Any]:
    """What a seed shows of the slow link beside loopback: seconds to an accuracy, their ratios and bytes."""
    times, from_start = ({link: seconds_to(found[link], accuracy, whole) for link in LINKS} for whole in (False, True))
    return {
        "seconds_to_it": times,
        "seconds_from_start": from_start,
        "slow_over_loopback": over_loopback(times),
        "slow_over_loopback_from_start": over_loopback(from_start),
        "same_parameters": found["slow"]["digest"] == found["loopback"]["digest"],
        "bytes_per_step": found["slow"]["bytes"] / found["slow"]["steps"],
        **{name: {link: found[link][name] for link in LINKS} for name in ("busy_cores", "product_gflops_per_second")},
    }


def over_loopback(seconds: Mapping[str, float | None]) -> float | None:
    """Seconds over the slow link by those over loopback; None if the accuracy was not reached over one of them."""
    slow, loopback = seconds["slow"], seconds["loopback"]
    return slow / loopback if slow is not None and loopback else None


def verdicts(
    seeds: Sequence[Mapping[str, Any]], sum_bytes: float, judged_by: str = "test_accuracy"
) -> dict[str, dict[str, Any]]:
    """The targets of rounds over the slow link, from the results of all seeds and the bytes of a gradient sum.

    Accuracy is that of rounds over loopback, over which all seeds train; times and bytes are of seeds over both links.
    `judged_by` is the accuracy of a seed that is compared.
    """
    every, rounds = (
        statistics.fmean(100 * one[judged_by][name] for one in seeds) for name in ("sum in every step", "loopback")
    )
    over_both = [one for one in seeds if "slow_over_loopback" in one]
    share = statistics.fmean(one["bytes_per_step"] for one in over_both) / sum_bytes

    def slower(name: str) -> dict[str, Any]:
        found = [one[name] for one in over_both]
        return judged(None if None in found else statistics.fmean(found), _MOST_SLOWER)

    return {
        "time to the stated accuracy from the first round on, by that over loopback": slower("slow_over_loopback"),
        "time to the stated accuracy from the start, by that over loopback": slower("slow_over_loopback_from_start"),
        "bytes, by those of a sum in every step": judged(share, _MOST_BYTES),
        "accuracy lost against a sum in every step, points": judged(every - rounds, _MOST_LOST),
        "seeds with other parameters over the slow link": judged(
            sum(not one["same_parameters"] for one in over_both), 0
        ),
    }


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the runs; a finished one is kept.", flag_values=values)
    flags.DEFINE_string("data", "fashion_mnist", "Dataset.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Its folder; if empty, it is downloaded.", flag_values=values)
    flags.DEFINE_string("lanes", "resnet:w4d2*4", "Lanes of the model.", flag_values=values)
    flags.DEFINE_integer("batch", 500, "Images per step, of both workers together.", flag_values=values)
    flags.DEFINE_integer("epochs", 4, "Epochs of each run.", flag_values=values)
    flags.DEFINE_integer("steps", 54, "Steps of a round.", flag_values=values)
    flags.DEFINE_integer("every", 54, "Steps between scores.", flag_values=values)
    flags.DEFINE_float("outer_rate", 0.7, "Learning rate of the outer step.", flag_values=values)
    flags.DEFINE_float("outer_momentum", 0.5, "Momentum of the outer step.", flag_values=values)
    text = (
        "Validation accuracy to which time is taken, fixed before the runs so that none of them decides what is "
        "measured: one that --trial reaches near its end. The thesis's models end at 0.91 after 20 epochs."
    )
    flags.DEFINE_float("accuracy", 0.91, text, lower_bound=0.1, upper_bound=1.0, flag_values=values)
    flags.DEFINE_boolean("trial", False, "Leaves the test images alone, to choose settings.", flag_values=values)
    flags.DEFINE_integer("repeats", 3, "Seeds.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("first_seed", 0, "The first of them.", lower_bound=0, flag_values=values)
    text = "File to write; empty for local_rounds.json in the results, or trial.json in the workdir."
    flags.DEFINE_string("output", "", text, flag_values=values)


def main(values: flags.FlagValues) -> None:
    if not values.workdir:
        raise InputError("--workdir=FOLDER is needed: the runs are kept there")
    default = Path(values.workdir) / "trial.json" if values.trial else RESULTS / "local_rounds.json"
    path = Path(values.output or default).resolve()
    found = measure(values, path)
    write_json(path, {**found, **host.environment()})
    print(found)
    show(found["verdicts"])


if __name__ == "__main__":
    launch_script(define, main)

"""Predicted time and cost of real trainings on three kinds of machine, single and in pairs, against what they took.

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.rented --profile=profile.json --data_dir=FOLDER

The kinds are one core of this machine each, whole or with a quota of its time; how much slower that makes it is
measured, and takes the place of a profile of each. Their prices are made up. All three singles and six pairs train the
same configuration, in turns, with the commands that `mlcn_jax cheapest` prints. What each takes to start, and to save
once at the end, is that of the faster of two runs of one step. What a shared machine gives changes by the minute, so
every time is divided by what steps of other models take on the cores used just before and after it, over what the
profile says. For every deadline from the shortest time to the longest, what `cheapest` picks is compared with the
cheapest that was measured in time. Goes on where it was stopped. Writes `experiments/results/rented.json` and `.png`.
"""

import contextlib
import dataclasses
import itertools
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import REPOSITORY, RESULTS, workers
from experiments.kept_rows import stored_results
from experiments.simulator_check import digest
from mlcn_jax import host
from mlcn_jax.analysis import cheapest, cheapest_report, market
from mlcn_jax.distributed.processes import free_port
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.catalog import Offer
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.simulate import Link
from mlcn_jax.training.session import open_session

KINDS = {"full": (1.0, 1.0), "half": (2.0, 0.4), "third": (3.0, 0.3)}  # asked slowness, and price per hour
_BATCH = 100
_YARDSTICK_TURNS = 3
_SLOWNESS_ROUNDS = 5
_STARTS = 2
_WELL_CHOSEN = 1.1  # times the cheapest that were in time


def slower_profile(profile: DeviceProfile, slowness: float) -> DeviceProfile:
    """The profile of a device that takes so many times as long for everything."""
    if slowness == 1.0:
        return profile

    def slower(values: Mapping[str, float]) -> dict[str, float]:
        return {name: slowness * value for name, value in values.items()}

    return dataclasses.replace(
        profile,
        layer_seconds={name: [(x, slowness * s) for x, s in pairs] for name, pairs in profile.layer_seconds.items()},
        value_seconds=slower(profile.value_seconds),
        step_seconds=slowness * profile.step_seconds,
        parameter_seconds=slowness * profile.parameter_seconds,
        head_seconds_of=slower(profile.head_seconds_of),
    )


def sets() -> list[tuple[str, ...]]:
    """All singles and pairs."""
    return [*((kind,) for kind in KINDS), *itertools.combinations_with_replacement(KINDS, 2)]


def training(values: Any) -> dict[str, Any]:
    """What all sets of machines train: fields that are not at their defaults."""
    return {
        "data.name": values.data,
        "model.lanes": values.lanes,
        "train.batch_size": _BATCH,
        "train.num_epochs": 100,
        "train.num_steps": values.steps,
        "train.checkpoint_every": values.steps,
        "train.score_test": "false",
    }


def base(values: Any) -> list[str]:
    """`--config` and the fields of the training."""
    fields = training(values) | ({"data.dir": values.data_dir} if values.data_dir else {})
    return [f"--config={REPOSITORY / 'configs' / 'default.py'}", *(f"--config.{k}={v}" for k, v in fields.items())]


def market_of(
    values: Any, profile: DeviceProfile, slowness_of: Mapping[str, float], startup: float, folder: Path
) -> market.Market:
    """The three kinds as offers, of which two of each may be had; `folder` gets a profile of each."""
    config = workers.config_of(dict(flag[9:].split("=", 1) for flag in base(values)[1:]))
    offers = []
    for kind, (_, price) in KINDS.items():
        of_kind, file = slower_profile(profile, slowness_of[kind]), folder / f"{kind}.json"
        of_kind.save(file)
        offers.append((Offer(kind, price, available=2, startup_seconds=startup), of_kind, str(file)))
    link = Link(**profile.link) if profile.link else None
    terms = market.Terms(0.0, 0.0, 0.0, float("inf"), None, link, 2)  # saving once counts as a part of the start
    return market.Market(cheapest.task_of(config, open_session(config)), terms, offers)


class Bed:
    """The cores, and how slow they are just now.

    Args:
      profile: of one core.
      data: the dataset whose images the yardstick takes.
    """

    def __init__(self, profile: DeviceProfile, data: str):
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        changes = {"data.name": data, "model.lanes": "mlcn1:w1", "train.batch_size": _BATCH}
        cores = [[core] for core in self._cores]
        self._groups = {count: workers.Group(workers.Run(changes, cores[:count], alone=True)) for count in (1, 2)}
        self._profile = profile

    def seconds(self, kinds: Sequence[str], commands: Sequence[str]) -> dict[str, float]:
        """What the commands took, together, and how slow the cores were, over the profile."""
        before = self._slowness(len(kinds))
        taken = measure(kinds, commands, self._cores)
        return {"seconds": taken, "slowness": (before + self._slowness(len(kinds))) / 2}

    def slowness_of(self, kind: str) -> float:
        """How many times slower than a whole core a kind is."""
        if kind == "full":
            return 1.0
        self._slowness(1)  # brings caches and memory back
        ratios = []
        for _ in range(_SLOWNESS_ROUNDS):
            whole = self._slowness(1)
            with workers.held_back(self._groups[1].pids[0], KINDS[kind][0]):
                ratios.append(self._slowness(1) / whole)
        return statistics.median(ratios)

    def _slowness(self, count: int) -> float:
        """Mean over so many cores, all of them at work: machines that are rented would not slow each other down."""
        turns = [statistics.mean(self._groups[count].slowness(self._profile)) for _ in range(_YARDSTICK_TURNS)]
        return statistics.mean(turns)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def measure(kinds: Sequence[str], commands: Sequence[str], cores: Sequence[int]) -> float:
    """Seconds from the start of all commands to the end of the last, each on a core, held back as its kind is.

    Nothing is compiled yet, as on a machine that was just rented.
    """
    port, running = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.ExitStack() as stack:
            started = time.monotonic()
            for i, (kind, command, core) in enumerate(zip(kinds, commands, cores, strict=False)):
                given = command.partition("  # ")[0].replace("HOST:29500", f"127.0.0.1:{port}")
                arguments = [a for a in shlex.split(given)[1:] if not a.startswith("--workdir=")]
                while arguments[0] != "train":  # the program may be several words
                    arguments.pop(0)
                with workers.on_core(core):
                    running.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "mlcn_jax", *arguments, f"--workdir={folder}/run"],
                            cwd=REPOSITORY,
                            env={
                                **os.environ,
                                "MLCN_JAX_WATCHED": "1",
                                "JAX_NUM_CPU_DEVICES": "1",
                                "MLCN_JAX_CACHE": f"{folder}/cache",
                            },
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL if i else None,
                        )
                    )
                stack.enter_context(workers.held_back(running[-1].pid, KINDS[kind][0]))
            codes = [process.wait() for process in running]
            taken = time.monotonic() - started
        if any(codes):
            raise InputError(f"a training failed with exit codes {codes}: its message is above")
        return taken


def summarize(rows: Sequence[Mapping[str, Any]], times: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Errors of time and cost; and what the choice by prediction costs, for every deadline up to the longest time.

    Between two neighbours of all predicted and measured times, the choice is the same for every deadline. Deadlines
    that none met, but that were predicted to be met, count for what is late, not for what is well chosen; nor does what
    is cheap because it is late.

    Args:
      rows: predicted and measured times and costs of each set of machines.
      times: what `Bed.seconds` measured of each, from which `unscaled` has the errors of times as they were taken.
    """
    errors = {
        what: [abs(row[f"predicted_{what}"] / row[f"measured_{what}"] - 1) for row in rows]
        for what in ("seconds", "cost")
    }
    raw = [
        abs(row["predicted_seconds"] / statistics.median(one["seconds"] for one in taken) - 1)
        for row, taken in zip(rows, times, strict=True)
    ]
    ends = {row[f"{how}_seconds"] for row in rows for how in ("predicted", "measured")}
    choices = []
    for start, end in itertools.pairwise(sorted(ends)):
        able = [row for row in rows if row["predicted_seconds"] <= start]
        pick = min(able, key=lambda row: row["predicted_cost"]) if able else None
        least = min((row["measured_cost"] for row in rows if row["measured_seconds"] <= start), default=None)
        choices.append(
            {
                "deadline_seconds": [start, end],
                "met": least is not None,
                "picked": pick["machines"] if pick else None,
                "over_cheapest": pick["measured_cost"] / least if pick and least is not None else None,
                "late": max(0.0, pick["measured_seconds"] / start - 1) if pick else 0.0,
            }
        )
    met = [c for c in choices if c["met"]]
    good = [c for c in met if c["picked"] and not c["late"] and c["over_cheapest"] <= _WELL_CHOSEN]
    seconds = [sum(c["deadline_seconds"][1] - c["deadline_seconds"][0] for c in some) for some in (good, met)]
    intervals = [row["interval"][0] <= row["measured_seconds"] <= row["interval"][1] for row in rows if row["interval"]]
    return {
        "mean_error_seconds": statistics.mean(errors["seconds"]),
        "largest_error_seconds": max(errors["seconds"]),
        "unscaled": {"mean_error_seconds": statistics.mean(raw), "largest_error_seconds": max(raw)},
        "largest_error_cost": max(errors["cost"]),
        "well_chosen": {"over_cheapest": _WELL_CHOSEN, "share_of_deadlines": seconds[0] / seconds[1]},
        "latest": max(choice["late"] for choice in choices),
        "inside_interval": statistics.mean(intervals) if intervals else None,
        "choices": choices,
    }


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Measured and predicted time and cost of all nine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        x, y = ([row[f"{how}_{what}"] for how in ("predicted", "measured")] for what in ("seconds", "cost"))
        axes.plot(x, y, color="0.7", zorder=0)
        axes.plot(x[0], y[0], "o", color="C0", fillstyle="none")
        axes.plot(x[1], y[1], "o", color="C1")
        axes.annotate(" + ".join(row["machines"]), (x[1], y[1]), (4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="seconds of the training (open: predicted, filled: measured)", ylabel="cost at made-up prices")
    axes.margins(0.12)  # for the names
    axes.set(xlim=(0, None), ylim=(0, None))
    figure.savefig(path, dpi=120)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("profile", "profile.json", "Profile of one core.", flag_values=values)
    flags.DEFINE_string("data", "fashion_mnist", "Dataset.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Its folder; if empty, it is downloaded.", flag_values=values)
    flags.DEFINE_string("lanes", "mlcn1:w2*4,mlcn2:w2d2*4", "Lanes of the model.", flag_values=values)
    flags.DEFINE_integer("steps", 400, "Training steps.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("repeats", 3, "Trainings of each.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output", str(RESULTS), "Folder for rented.json and rented.png.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    profile = workers.one_core_profile(values.profile)
    output = Path(values.output)
    output.mkdir(parents=True, exist_ok=True)
    path, about = output / "rented.json", {"training": training(values), "profile": digest(profile)}
    about |= {"kinds": {kind: list(of) for kind, of in KINDS.items()}}
    stored = stored_results(path, about)
    slowness, startup = dict(stored.get("slowness", {})), dict(stored.get("startup_seconds", {}))
    times: list[list[dict[str, float]]] = stored.get("times", [[] for _ in sets()])
    rows: list[dict[str, Any]] = []

    def save() -> None:
        more = {"repeats": min(map(len, times)), "slowness": slowness, "startup_seconds": startup, "times": times}
        found = summarize(rows, times) if rows else {}
        write_json(path, {**about, "date": host.today(), **host.environment(), **found, **more, "rows": rows})

    bed = Bed(profile, values.data)
    for kind in KINDS:
        if kind not in slowness:
            slowness[kind] = bed.slowness_of(kind)
    folder = tempfile.TemporaryDirectory()  # which the commands read, too
    for kinds in sets():
        name = " + ".join(kinds)
        if name not in startup:
            ordered, commands, *_ = _way(values, profile, slowness, 0.0, kinds, Path(folder.name))
            short = [_one_step(command, values) for command in commands]
            tried = [bed.seconds(ordered, short) for _ in range(_STARTS)]
            startup[name] = min(one["seconds"] / one["slowness"] for one in tried)
            save()
    ways = [_way(values, profile, slowness, startup[" + ".join(kinds)], kinds, Path(folder.name)) for kinds in sets()]
    for repeat in range(values.repeats):
        for (ordered, commands, way, _), taken in zip(ways, times, strict=True):
            if len(taken) == repeat:
                taken.append(bed.seconds(ordered, commands))
                ratio = way.seconds * taken[-1]["slowness"] / taken[-1]["seconds"]
                print(f"{ratio:.2f}  {taken[-1]['seconds']:4.0f} s  {' + '.join(ordered)}", flush=True)
                save()
    bed.close()
    folder.cleanup()
    for kinds, (_, _, way, split), taken in zip(sets(), ways, times, strict=True):
        seconds = statistics.median(one["seconds"] / one["slowness"] for one in taken)
        rows.append(
            {
                "machines": kinds,
                "split": split,
                "predicted_seconds": way.seconds,
                "measured_seconds": seconds,
                "predicted_cost": way.cost,
                "measured_cost": sum(KINDS[kind][1] for kind in kinds) / 3600 * seconds,
                "interval": [way.interval.low_seconds, way.interval.high_seconds] if way.interval else None,
            }
        )
    save()
    draw(rows, output / "rented.png")
    print(summarize(rows, times))


def _way(
    values: Any,
    profile: DeviceProfile,
    slowness: Mapping[str, float],
    startup: float,
    kinds: Sequence[str],
    folder: Path,
) -> tuple[list[str], list[str], market.Way, str]:
    """The fastest way over some kinds: these in the order of its commands, the commands, the way and its split."""
    whole = market_of(values, profile, slowness, startup, folder)
    numbers = tuple(sorted([c.offer.machine for c in whole.choices].index(kind) for kind in kinds))
    way = min(whole.on(numbers), key=lambda way: way.seconds)
    ordered = [whole.choices[n].offer.machine for n in way.machines]
    return ordered, cheapest_report.commands(whole, way, base(values)), way, cheapest_report.split_of(way)


def _one_step(command: str, values: Any) -> str:
    """The command with a single training step: almost all of that is its start and saving at the end."""
    return command.replace(f"--config.train.num_steps={values.steps}", "--config.train.num_steps=1")


if __name__ == "__main__":
    launch_script(define, main)

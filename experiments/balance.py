"""How much shorter the makespan gets when unequal lanes are placed with care (do Rosario 2021, thesis, chapter 5).

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.balance --profile=profile.json

Lanes whose width and depth are drawn from 1..5, of cost width^2 * depth, on 4 equal devices and on 4 with the thesis's
speeds (K80 1, M40 3.1, P100 4.2, V100 6). Many draws, simulated: a device takes the sum of its lanes' costs over its
speed. With a profile of one core also measured: training steps of a few draws, as stacks of two processes of one core
each, the second of which has half of its core; placements of a draw take turns. A measurement that was stopped goes on,
and without a profile what was measured stays. With another profile, or on another machine, or with other versions, a
measurement needs another `--output`. Writes that JSON, and the picture beside it; its date is that of the simulation,
and measured rows have their own.
"""

import itertools
import os
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS, workers
from experiments.kept_rows import is_row, stored_results
from experiments.simulator_check import digest
from mlcn_jax import host
from mlcn_jax.files import markdown, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.lanes import PUBLISHED_KINDS
from mlcn_jax.placement.partition import PARTITIONERS, partition
from mlcn_jax.placement.problem import Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training import splits

SPEEDS = {"4 equal devices": (1.0, 1.0, 1.0, 1.0), "4 unequal devices": (1.0, 3.1, 4.2, 6.0)}
LANES = (6, 9, 12, 24)
_LARGEST = 5  # of widths and depths
_SLOWNESS = 2.0  # of the second process
_BATCH = 100
_TURN_SECONDS = 1.0


def simulate(speeds: tuple[float, ...], num_lanes: int, draws: int, seed: int) -> dict[str, Any]:
    """Makespans of every partitioner over the exact one's, and how often and fast that one proves its own optimal."""
    rng = random.Random(seed)
    over_exact: dict[str, list[float]] = {name: [] for name in PARTITIONERS}
    random_over: dict[str, list[float]] = {name: [] for name in PARTITIONERS}
    seconds, proved = [], 0
    for draw in range(draws):
        costs = [rng.randint(1, _LARGEST) ** 2 * rng.randint(1, _LARGEST) for _ in range(num_lanes)]
        problem = Problem(uniform_seconds(costs, [1 / speed for speed in speeds]))
        makespans = {}
        for name in PARTITIONERS:
            started = time.perf_counter()
            placement = partition(name, problem, seed=draw)
            makespans[name] = placement.makespan_seconds
            if name == "exact":
                seconds.append(time.perf_counter() - started)
                proved += placement.optimal
        for name, makespan in makespans.items():
            over_exact[name].append(makespan / makespans["exact"])
            random_over[name].append(makespans["random"] / makespan)
    return {
        "mean_makespan_over_exact": {name: statistics.mean(values) for name, values in over_exact.items()},
        "mean_random_over_this": {name: statistics.mean(values) for name, values in random_over.items()},
        "proved_optimal": proved,
        "draws": draws,
        "exact_seconds": {"median": statistics.median(seconds), "max": max(seconds)},
    }


def measure(num_lanes: int, profile: DeviceProfile, seed: int, rounds: int) -> dict[str, Any]:
    """Step times of one draw in each partitioner's placement; equal placements are measured once."""
    rng = random.Random(seed)
    kinds = [rng.choice(PUBLISHED_KINDS) for _ in range(num_lanes)]
    lanes = [f"{kind}:w{rng.randint(1, _LARGEST)}d{rng.randint(1, _LARGEST)}" for kind in kinds]
    changes = {"data.name": "fashion_mnist", "model.lanes": ",".join(lanes), "train.batch_size": _BATCH}
    config = workers.config_of(changes)
    spec = config.model_spec(*config.data.shape())
    problem = splits.placement_problem(spec, _BATCH, [profile, profile], ["0", "1"], [1.0, _SLOWNESS])
    placements = {name: partition(name, problem, seed=seed) for name in PARTITIONERS}
    others = (partition("random", problem, seed=other) for other in itertools.count(seed))
    placements["random"] = next(one for one in others if len(set(one.device_of)) == 2)  # every process needs a lane
    cores = [[core] for core in sorted(os.sched_getaffinity(0))[:2]]
    groups = {}
    for placement in placements.values():
        if placement.device_of not in groups:
            run = workers.Run(changes, cores, device_of=placement.device_of, slowness=_SLOWNESS)
            groups[placement.device_of] = workers.Group(run)
    steps = {device_of: max(2, round(_TURN_SECONDS / group.seconds(1))) for device_of, group in groups.items()}
    turns = [{at: group.seconds(steps[at]) for at, group in groups.items()} for _ in range(rounds)]
    for group in groups.values():
        group.close()
    by_name = {name: [turn[placement.device_of] for turn in turns] for name, placement in placements.items()}
    return {
        "lanes": spec.lanes,
        "milliseconds": {name: 1000 * statistics.median(seconds) for name, seconds in by_name.items()},
        "random_over_this": {
            name: statistics.median(r / s for r, s in zip(by_name["random"], seconds, strict=True))
            for name, seconds in by_name.items()
        },
        "predicted_random_over_this": {
            name: placements["random"].makespan_seconds / placement.makespan_seconds
            for name, placement in placements.items()
        },
    }


def measured_rows(path: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured rows in a file of results, none if there is no such file.

    Raises:
      InputError: they were measured with other settings, or elsewhere, than `about` says.
    """
    if not path.exists() or not read_json(path).get("measured"):
        return []  # what was simulated is simulated again
    return stored_results(path, about)["measured"]


def draw_picture(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (title, entries) in zip(figure.subplots(1, 2), results.items(), strict=True):
        for name in PARTITIONERS:
            if name != "exact":
                values = [entries[str(n)]["mean_makespan_over_exact"][name] for n in LANES]
                axes.plot(LANES, values, "o-", label=name.replace("_", " "))
        axes.axhline(1, color="gray", linewidth=1)
        axes.set_ylim(bottom=0.9)
        axes.set_xticks(LANES)
        axes.set_xlabel("lanes")
        axes.set_ylabel("makespan over the shortest possible")
        axes.set_title(f"{title}, mean of draws (simulated)")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def table(results: dict[str, Any]) -> str:
    """How many times longer random placement takes than each partitioner, in Markdown."""
    names = [name for name in PARTITIONERS if name != "random"]
    head = ["devices", "lanes", *(name.replace("_", " ") for name in names), "proved", "exact, max s"]
    lines = []
    for title, entries in results.items():
        for n, entry in entries.items():
            ratios = [f"{entry['mean_random_over_this'][name]:.2f}" for name in names]
            proved = f"{entry['proved_optimal']} of {entry['draws']}"
            lines.append([title, n, *ratios, proved, f"{entry['exact_seconds']['max']:.2f}"])
    return markdown(head, lines)


def measured_table(rows: list[dict[str, Any]]) -> str:
    """The same of measured steps, means over draws, and what was predicted for it."""
    names = [name for name in PARTITIONERS if name != "random"]
    head = ["lanes", "", *(name.replace("_", " ") for name in names)]
    lines = []
    for n in dict.fromkeys(row["num_lanes"] for row in rows):
        for what, key in (("measured", "random_over_this"), ("predicted", "predicted_random_over_this")):
            draws = [row[key] for row in rows if row["num_lanes"] == n]
            lines.append([str(n), what, *(f"{statistics.mean(draw[name] for draw in draws):.2f}" for name in names)])
    return markdown(head, lines)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("draws", 100, "Lane sets drawn for each number of lanes.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("profile", "", "Profile of one core; without it nothing is measured.", flag_values=values)
    flags.DEFINE_integer("measured_draws", 10, "Lane sets measured for each number.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "rounds", 3, "Rounds in which the placements of a draw take turns.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "Of the draws.", flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "balance.json"), "JSON to write.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    path = Path(values.output).expanduser()
    if values.profile:  # refused before anything is done
        profile = workers.one_core_profile(values.profile)
        about = {"rounds": values.rounds, "slowness": _SLOWNESS, "batch": _BATCH, "profile": digest(profile)}
        about |= host.environment()
        measured = measured_rows(path, about)
    results: dict[str, Any] = {
        title: {str(n): simulate(speeds, n, values.draws, values.seed) for n in LANES}
        for title, speeds in SPEEDS.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    simulated = {"simulated": results, "seed": values.seed, "date": host.today()}
    stored = read_json(path) if path.exists() else host.environment()
    write_json(path, {**stored, **simulated})
    draw_picture(results, path.with_suffix(".png"))
    print(table(results))
    if not values.profile:
        return
    for num_lanes, draw in itertools.product(LANES, range(values.measured_draws)):
        row = {"num_lanes": num_lanes, "seed": values.seed + draw}
        if not any(is_row(one, row) for one in measured):
            measured.append({**row, **measure(num_lanes, profile, row["seed"], values.rounds), "date": host.today()})
            write_json(path, {**simulated, "measured": measured, **about})
    print(measured_table(measured))


if __name__ == "__main__":
    launch_script(define, main)

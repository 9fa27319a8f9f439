"""How much shorter the makespan gets when unequal lanes are placed with care (do Rosario 2021, thesis, chapter 5).

    python -m experiments.balance

Lanes whose width and depth are drawn from 1..5, of cost width^2 * depth, on 4 equal devices and on 4 with the thesis's
speeds (K80 1, M40 3.1, P100 4.2, V100 6). Many draws, simulated: a device takes the sum of its lanes' costs over its
speed. Writes `experiments/results/balance.json` and `.png`.
"""

import functools
import random
import statistics
import time
from typing import Any

from absl import app, flags

from experiments import RESULTS
from mlcn_jax import devices
from mlcn_jax.config import write_json
from mlcn_jax.launch import launch
from mlcn_jax.partition import PARTITIONERS, Problem, partition, uniform_seconds

SPEEDS = {"4 equal devices": (1.0, 1.0, 1.0, 1.0), "4 unequal devices": (1.0, 3.1, 4.2, 6.0)}
LANES = (6, 9, 12, 24)
_LARGEST = 5  # of widths and depths

_DRAWS = flags.DEFINE_integer("draws", 100, "Lane sets drawn for each number of lanes.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")


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


def draw_picture(results: dict[str, Any]) -> None:
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
    figure.savefig(RESULTS / "balance.png", dpi=120)


def table(results: dict[str, Any]) -> str:
    """How many times longer random placement takes than each partitioner, in Markdown."""
    names = [name for name in PARTITIONERS if name != "random"]
    head = ["devices", "lanes", *(name.replace("_", " ") for name in names), "proved", "exact, max s"]
    lines = [head, ["---"] * len(head)]
    for title, entries in results.items():
        for n, entry in entries.items():
            ratios = [f"{entry['mean_random_over_this'][name]:.2f}" for name in names]
            proved = f"{entry['proved_optimal']} of {entry['draws']}"
            lines.append([title, n, *ratios, proved, f"{entry['exact_seconds']['max']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str]) -> None:
    del argv
    results: dict[str, Any] = {
        title: {str(n): simulate(speeds, n, _DRAWS.value, _SEED.value) for n in LANES}
        for title, speeds in SPEEDS.items()
    }
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / "balance.json", {"simulated": results, "seed": _SEED.value, **devices.environment()})
    draw_picture(results)
    print(table(results))


if __name__ == "__main__":
    launch(functools.partial(app.run, main))

"""What decides how the published greedy rule fares: the order in which devices are listed.

    python -m experiments.tie_break

The rule gives the largest lane to the device that is least loaded so far. At first all devices are empty, so the order
in which they are listed breaks the tie. The draws are those of `experiments.balance`: lanes of width and depth 1..5 and
cost width^2 * depth, on 4 devices with the thesis's speeds (1, 3.1, 4.2, 6), listed in each of the 24 orders.
Each draw is also placed at random, a hundred times. Simulated. Writes `experiments/results/tie_break.json`.
"""

import itertools
import random
import statistics

from absl import flags

from experiments import RESULTS
from mlcn_jax import host
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.partition import partition
from mlcn_jax.placement.problem import Problem, uniform_seconds

SPEEDS = (1.0, 3.1, 4.2, 6.0)
LANES = (6, 9, 12, 24)
_RULES = ("greedy_published", "greedy")
_PLACEMENTS = 100  # by chance, of each set of lanes


def gains(num_lanes: int, draws: int, seed: int) -> dict[tuple[float, ...], dict[str, float]]:
    """For each order of the devices, how many times longer random placement takes than each rule, mean over the draws.

    Random placement, the mean of `_PLACEMENTS`, knows no order: it is the same for all.
    """
    rng, chance = random.Random(seed), random.Random(seed)
    found = {order: dict.fromkeys(_RULES, 0.0) for order in itertools.permutations(SPEEDS)}
    for _ in range(draws):
        costs = [rng.randint(1, 5) ** 2 * rng.randint(1, 5) for _ in range(num_lanes)]
        problem = Problem(uniform_seconds(costs, [1 / speed for speed in SPEEDS]))
        placements = [partition("random", problem, seed=chance.getrandbits(32)) for _ in range(_PLACEMENTS)]
        by_chance = statistics.fmean(placement.makespan_seconds for placement in placements)
        for order, rules in found.items():
            problem = Problem(uniform_seconds(costs, [1 / speed for speed in order]))
            for rule in _RULES:
                rules[rule] += by_chance / partition(rule, problem).makespan_seconds / draws
    return found


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("draws", 100, "Lane sets drawn for each number of lanes.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of the draws.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    found = {n: gains(n, values.draws, values.seed) for n in LANES}
    result = {
        "random_over_rule": {
            ", ".join(f"{speed:g}" for speed in order): {str(n): found[n][order] for n in LANES}
            for order in itertools.permutations(SPEEDS)
        },
        "draws": values.draws,
        "random_placements_per_draw": _PLACEMENTS,
        "seed": values.seed,
        "date": host.today(),
        **host.environment(),
    }
    write_json(RESULTS / "tie_break.json", result)
    for speeds, by_lanes in result["random_over_rule"].items():
        for n, found in by_lanes.items():
            told = ", ".join(f"{rule} {value:.2f}" for rule, value in found.items())
            print(f"devices of speeds {speeds}, {n} lanes: {told}")


if __name__ == "__main__":
    launch_script(define, main)

"""A pool of lanes: workers killed at random moments, and a hundred lanes on ten unequal machines, simulated.

    python -m experiments.lane_pool --kills=20              # real: about 10 minutes on two quiet cores
    python -m experiments.lane_pool                         # the simulation, seconds

Kills: two workers train a pool of small lanes on the digits; at random moments one of them is killed (SIGKILL), and
another started. Counts lanes lost and lanes that two workers had at once, and compares the lanes' parameters with
those of a pool that nobody disturbed.

Simulation: lanes of three sizes on machines of 30 to 300 GFLOP/s, which leave at random times and come back, and what
they did since the last checkpoint is lost. Beside it, the same lanes trained together in step by machines that never
leave, on links of 100 Mbit/s (`placement.simulate`).

Writes `lane_pool_kills` or `lane_pool_simulated` as JSON to the results, and a picture of the simulation.
"""

import heapq
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import REPOSITORY, RESULTS
from mlcn_jax import host
from mlcn_jax.analysis import pool as pool_lib
from mlcn_jax.config import RunConfig
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import partition, simulate
from mlcn_jax.placement.cost import cost_of
from mlcn_jax.placement.problem import Problem, uniform_seconds
from mlcn_jax.training.trained import load_trained

POOL = """
config = "default"

[set]
data.validation_fraction = 0.2
data.split_seed = 0
model.margin_loss = "per_lane_sum"
model.decoder_gradient = "none"
model.decoder = [8]
train.num_epochs = 4
train.checkpoint_every = 3
train.log_every = 1

[[lanes]]
kind = "mlcn1:w1"
seeds = [0, 1, 2, 3, 4, 5]

[[lanes]]
kind = "mlcn2:w1"
seeds = [0, 1, 2, 3, 4, 5]
"""
_SECONDS = (1.0, 25.0)  # between kills: a worker needs some to start

SPEC = ModelSpec("mlcn", (32, 32, 3), 10, "resnet:w1d2")
SIZES = {"resnet:w1d1": 50, "resnet:w1d2": 35, "resnet:w2d2": 15}
GFLOPS = (30, 30, 45, 60, 80, 100, 130, 170, 230, 300)  # of the machines
STEPS, BATCH, CHECKPOINT_STEPS = 10_000, 500, 100
PRESENT_HOURS, ABSENT_HOURS = 3.0, 1.5  # means of exponential distributions
LINK = simulate.Link(0.02, 100e6 / 8)
DRAWS = 20


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("kills", 0, "Kill so many workers for real; 0 simulates.", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of the random moments.", flag_values=values)
    flags.DEFINE_string("output", "", "Folder of the results; empty for experiments/results.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder = Path(values.output) if values.output else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    found = kill_workers(values.kills, values.seed) if values.kills else simulated(values.seed)
    name = "lane_pool_kills" if values.kills else "lane_pool_simulated"
    write_json(folder / f"{name}.json", {**found, **host.environment()})
    print({name: value for name, value in found.items() if not isinstance(value, list)})
    if not values.kills:
        draw(folder / f"{name}.png", found)


def kill_workers(kills: int, seed: int) -> dict[str, Any]:
    """What comes of a pool whose workers are killed, compared with one that is left alone."""
    rng, killed = random.Random(seed), dict[tuple[str, int], float]()
    with tempfile.TemporaryDirectory() as disturbed, tempfile.TemporaryDirectory() as quiet:
        for folder in (quiet, disturbed):
            Path(folder, pool_lib.FILE).write_text(POOL)
        subprocess.run(_worker(quiet), check=True, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        started = time.monotonic()
        workers = [subprocess.Popen(_worker(disturbed), cwd=REPOSITORY, stderr=subprocess.DEVNULL) for _ in range(2)]
        while len(killed) < kills and any(worker.poll() is None for worker in workers):
            time.sleep(rng.uniform(*_SECONDS))
            victim = rng.randrange(2)
            if workers[victim].poll() is None:
                killed[platform.node(), workers[victim].pid] = time.time()
                os.kill(workers[victim].pid, signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = subprocess.Popen(_worker(disturbed), cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        codes = [worker.wait() for worker in workers]
        seconds = time.monotonic() - started
        mine, theirs = (pool_lib.read_pool(Path(folder), lambda name: RunConfig()) for folder in (disturbed, quiet))
        histories = [lane.workdir / pool_lib.HISTORY for lane in mine.lanes]
        return {
            "kills": len(killed),
            "exit_codes": codes,
            "seconds": seconds,
            "lanes": len(mine.lanes),
            "lanes_lost": sum(not lane.is_finished for lane in mine.lanes),
            "lanes_trained_twice_at_once": sum(bool(pool_lib.overlaps(history, killed)) for history in histories),
            "times_taken": sum('"taken"' in line for history in histories for line in history.read_text().splitlines()),
            "joined": mine.joined(len(mine.lanes)).exists(),
            "largest_difference": max(
                _difference(a.workdir, b.workdir) for a, b in zip(mine.lanes, theirs.lanes, strict=True)
            ),
        }


def _worker(folder: str) -> list[str]:
    return [sys.executable, "-m", "mlcn_jax", "work", f"--pool={folder}"]


def _difference(mine: Path, theirs: Path) -> float:
    leaves = (jax.tree.leaves(load_trained(folder).params["encoder"]) for folder in (mine, theirs))
    return max(float(np.abs(a - b).max()) for a, b in zip(*leaves, strict=True))


class Outcome(NamedTuple):
    """Hours until all lanes were trained, the share of work that was done again, and when each lane was finished."""

    hours: float
    lost: float
    finished_hours: list[float]


def lane_steps() -> list[tuple[str, float]]:
    """Each lane of the simulation and the FLOPs of its step."""
    found = []
    for text, count in SIZES.items():
        kind, _, rest = text.partition(":w")
        width, _, depth = rest.partition("d")
        cost = cost_of(SPEC, LaneSpec(kind, int(width), int(depth)))
        found += [(text, float(cost.step_flops(BATCH)))] * count
    return found


def simulate_pool(lanes: Sequence[float], order: Sequence[int], rng: random.Random, leaving: bool = True) -> Outcome:
    """A pool of lanes, given by the FLOPs of a step, taken in `order`, begun ones first, as `pool.work` does."""
    done, taken, finished = [0] * len(lanes), set[int](), dict[int, float]()
    lost_flops = 0.0
    events: list[tuple[float, int, str]] = [(0.0, machine, "free") for machine in range(len(GFLOPS))]
    leaves = [rng.expovariate(1 / (3600 * PRESENT_HOURS)) if leaving else float("inf") for _ in GFLOPS]
    heapq.heapify(events)
    busy: dict[int, tuple[int, float]] = {}
    while len(finished) < len(lanes):
        now, machine, event = heapq.heappop(events)
        if event == "done":
            lane, _ = busy.pop(machine)
            finished[lane] = now
            taken.discard(lane)
        if event == "leave":
            if machine in busy:  # back to its last checkpoint
                lane, since = busy.pop(machine)
                steps = done[lane] + int((now - since) * GFLOPS[machine] * 1e9 / lanes[lane])
                kept = steps - steps % CHECKPOINT_STEPS
                lost_flops += (steps - kept) * lanes[lane]
                done[lane] = max(done[lane], kept)
                taken.discard(lane)
            back = now + rng.expovariate(1 / (3600 * ABSENT_HOURS))
            leaves[machine] = back + rng.expovariate(1 / (3600 * PRESENT_HOURS))
            heapq.heappush(events, (back, machine, "free"))
        if event in ("free", "done"):
            waiting = [lane for lane in order if lane not in taken and lane not in finished]
            if waiting:
                lane = min(waiting, key=lambda lane: done[lane] == 0)
                taken.add(lane)
                busy[machine] = (lane, now)
                end = now + (STEPS - done[lane]) * lanes[lane] / (GFLOPS[machine] * 1e9)
                heapq.heappush(events, min((end, machine, "done"), (leaves[machine], machine, "leave")))
            else:  # it looks again, as long as it is there
                heapq.heappush(events, min((now + 60, machine, "free"), (leaves[machine], machine, "leave")))
    lost = lost_flops / (STEPS * sum(lanes))
    return Outcome(max(finished.values()) / 3600, lost, sorted(t / 3600 for t in finished.values()))


def simulated(seed: int) -> dict[str, Any]:
    """The pool's hours, by the order in which lanes are taken, and what they are to be compared with."""
    flops = [one for _, one in lane_steps()]
    ideal = STEPS * sum(flops) / (sum(GFLOPS) * 1e9) / 3600
    orders = {
        "small first": sorted(range(len(flops)), key=lambda i: flops[i]),
        "large first": sorted(range(len(flops)), key=lambda i: -flops[i]),
    }
    rows = []
    for name, order in orders.items():
        for leaving in (False, True):
            outcomes = [simulate_pool(flops, order, random.Random(seed + i), leaving) for i in range(DRAWS)]
            rows.append(
                {
                    "order": name,
                    "machines_leave": leaving,
                    "hours": statistics.fmean(one.hours for one in outcomes),
                    "least_hours": min(one.hours for one in outcomes),
                    "most_hours": max(one.hours for one in outcomes),
                    "lost_share": statistics.fmean(one.lost for one in outcomes),
                    "finished_hours": outcomes[0].finished_hours,
                }
            )
    return {
        "lanes": len(flops),
        "machines_gflops": list(GFLOPS),
        "hours_without_any_loss": ideal,
        "hours_together_in_step": together_hours(flops),
        "present_share": PRESENT_HOURS / (PRESENT_HOURS + ABSENT_HOURS),
        "draws": DRAWS,
        "rows": rows,
    }


def together_hours(flops: Sequence[float]) -> float:
    """Hours of the same lanes trained in step by machines that never leave (`simulate.simulate_stacks`)."""
    problem = Problem(uniform_seconds(flops, [1e-9 / speed for speed in GFLOPS]))
    placement = partition.partition("greedy", problem)
    cluster = simulate.Cluster(range(len(GFLOPS)), LINK, LINK)
    step = simulate.simulate_stacks(
        placement,
        cluster,
        column_bytes=4 * BATCH * SPEC.num_classes,
        head_seconds=0.0,
        forward_share=1 / 3,
        head=len(GFLOPS) - 1,
    )
    return STEPS * step.total_seconds / 3600


def draw(path: Path, found: dict[str, Any]) -> None:
    """Lanes finished against hours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    ax = figure.subplots()
    for row in found["rows"]:
        label = f"{row['order']}, machines {'come and go' if row['machines_leave'] else 'stay'}"
        ax.step([0, *row["finished_hours"]], range(len(row["finished_hours"]) + 1), where="post", label=label)
    ax.axvline(found["hours_together_in_step"], color="gray", ls="--", label="together in step, machines stay")
    ax.set(xlabel="hours", ylabel="lanes finished", title=f"{found['lanes']} lanes, 10 machines, simulated")
    ax.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    launch_script(define, main)

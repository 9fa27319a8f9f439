"""A training step with memory that stays in the process, against the C library's defaults and huge pages.

    python -m benchmarks.allocator

Each setting of the allocator (`mlcn_jax.launch.keep_memory`) has a process of its own for each model, and they take
turns. Writes `benchmarks/results/allocator.json`: for each model the median and the slowest turn, and how much longer
than with memory that is kept the others take. glibc on Linux only.
"""

import os
import statistics
from pathlib import Path
from unittest import mock

from absl import flags

from benchmarks import peers
from experiments import workers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "kept": {},
    "defaults": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}


def define(values: flags.FlagValues) -> None:
    models = ["mlcn1:w2*32", "mlcn1:w4*16", "mlcn2:w4*16", "resnet:w4d2*4"]
    flags.DEFINE_list("models", models, "lanes of each model", flag_values=values)
    flags.DEFINE_integer("batch", 100, "images per step", flag_values=values)
    flags.DEFINE_integer("rounds", 10, "turns of each setting", flag_values=values)
    flags.DEFINE_integer("steps", 5, "steps of a turn", flag_values=values)


def measure(lanes: str, values: flags.FlagValues) -> dict:
    """Seconds of a step of one model with each setting."""
    changes = {"data.name": "fashion_mnist", "model.lanes": lanes, "train.batch_size": values.batch}
    if "resnet" in lanes:
        changes["model.norm_group"] = values.batch
    groups = {}
    for name, environment in SETTINGS.items():
        with mock.patch.dict(os.environ, environment):
            groups[name] = workers.Group(workers.Run(changes, [sorted(os.sched_getaffinity(0))]))
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for group in groups.values():
        group.seconds(2)
    for _ in range(values.rounds):
        for name, group in groups.items():
            seconds[name].append(group.seconds(values.steps))
    for group in groups.values():
        group.close()
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, seconds["kept"], strict=True))
        for name, own in seconds.items()
    }
    return {
        "lanes": lanes,
        "median_seconds": {name: statistics.median(own) for name, own in seconds.items()},
        "slowest_seconds": {name: max(own) for name, own in seconds.items()},
        "over_kept": ratios,
    }


def main(values: flags.FlagValues) -> None:
    rows = []
    for lanes in values.models:
        rows.append(measure(lanes, values))
        print(rows[-1], flush=True)
    about = {"batch": values.batch, "rounds": values.rounds, "steps": values.steps, **peers.environment()}
    write_json(RESULTS / "allocator.json", {**about, "models": rows})


if __name__ == "__main__":
    launch_script(define, main)

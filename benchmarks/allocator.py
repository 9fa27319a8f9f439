"""A training step with memory that stays in the process, in one heap or several, against the C library's defaults.

    python -m benchmarks.allocator

Each setting of the allocator has a process of its own for each model, and they take turns: that of `mlcn_jax train`
(`allocator.keep_memory`, `allocator.share_heaps`), the same with one heap and with up to eight for each core, the
defaults, and those with huge pages. Writes `benchmarks/results/allocator.json`: for each model the median and the
slowest turn, and how many times as long as with the first the others take. glibc on Linux only.
"""

import os
import statistics
from unittest import mock

from absl import flags

from benchmarks import peers
from experiments import workers
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

_KEPT = {"mmap_max": 0, "top_pad": 2**26, "trim_threshold": 2**40}
SETTINGS = {  # of glibc.malloc; without any, those of mlcn_jax
    "kept": {},
    "one heap": _KEPT | {"arena_max": 1},
    "several heaps": _KEPT,
    "defaults": {"hugetlb": 0},
    "huge pages": {"hugetlb": 1},
}
_BATCH, _RESIDUAL_BATCH = 100, 500


def define(values: flags.FlagValues) -> None:
    models = ["mlcn1:w2*32", "mlcn1:w4*16", "mlcn2:w4*16", "capsnet", "resnet:w4d2*4"]
    flags.DEFINE_list("models", models, "lanes of each model, or capsnet", flag_values=values)
    flags.DEFINE_integer("rounds", 10, "turns of each setting", flag_values=values)
    flags.DEFINE_integer("steps", 5, "steps of a turn", flag_values=values)


def measure(lanes: str, values: flags.FlagValues) -> dict:
    """Seconds of a step of one model with each setting."""
    batch = _RESIDUAL_BATCH if "resnet" in lanes else _BATCH
    model = {"model.name": "capsnet", "model.lanes": ""} if lanes == "capsnet" else {"model.lanes": lanes}
    changes = {"data.name": "fashion_mnist", "train.batch_size": batch, **model}
    if "resnet" in lanes:
        changes["model.norm_group"] = batch
    groups = {}
    for name, settings in SETTINGS.items():
        tunables = ":".join(f"glibc.malloc.{setting}={value}" for setting, value in settings.items())
        with mock.patch.dict(os.environ, {"GLIBC_TUNABLES": tunables} if tunables else {}):
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
        "batch": batch,
        "median_seconds": {name: statistics.median(own) for name, own in seconds.items()},
        "slowest_seconds": {name: max(own) for name, own in seconds.items()},
        "over_kept": ratios,
    }


def main(values: flags.FlagValues) -> None:
    rows = []
    for lanes in values.models:
        rows.append(measure(lanes, values))
        print(rows[-1], flush=True)
    about = {"rounds": values.rounds, "steps": values.steps, **peers.environment()}
    write_json(peers.RESULTS / "allocator.json", {**about, "models": rows})


if __name__ == "__main__":
    launch_script(define, main)

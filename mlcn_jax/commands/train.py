"""Trains a model, or resumes a run that was stopped.

    mlcn_jax train --config=quickstart --workdir=runs/quickstart
    mlcn_jax train --config=my_config.py --workdir=runs/mine --config.train.batch_size=300

The same command resumes an unfinished run. A config file is Python that is executed: use only files you trust. Writes
to the workdir: checkpoints, `metrics.jsonl`, `summary.json`, `reconstructions.png` and `confusion.png`.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from mlcn_jax.allocator import share_heaps
from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of, needed_workdir
from mlcn_jax.launch import program


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "workdir", "", "Folder of the run: configuration, checkpoints, metrics, pictures.", flag_values=values
    )


def main(argv: Sequence[str]) -> int:
    values = arguments.parse("train", __doc__, define, argv, config="run")
    workdir = needed_workdir(values)
    config = config_of(values)

    # Imported here because it is slow to load: a mistaken flag has been reported by now.
    from mlcn_jax import host
    from mlcn_jax.config import flat
    from mlcn_jax.distributed import processes
    from mlcn_jax.training import loop

    host.compute_in_turn()  # before processes join, which looks for devices
    share_heaps(config.model["lanes"])
    if config.parallel.processes != 1:
        if config.parallel.processes and not processes.is_watched():
            return processes.watch(config.parallel)
        processes.join(config.parallel, flat(config.to_dict()))
    host.set_up_jax()
    summary = loop.train(config, workdir)
    if processes.is_first():
        print_summary(workdir, summary)
    return 0


def print_summary(workdir: Path, summary: dict[str, Any]) -> None:
    """Prints the results of a run as text."""
    from mlcn_jax.training import evaluate

    for split in ("validation", "test"):
        if f"{split}_accuracy" in summary:
            mirrored = summary.get(f"{split}_accuracy_flips")
            flips = "" if mirrored is None else f", with mirror images {mirrored:.2%}"
            print(f"{split} accuracy {summary[f'{split}_accuracy']:.2%}{flips}, loss {summary[f'{split}_loss']:.4f}")
    spreads = summary.get("lane_spreads", [])  # older versions did not write it
    if silent := sum(spread < evaluate.ALIVE for spread in spreads):
        print(
            f"{silent} of {len(spreads)} lanes give nearly the same output for every image (lane_spreads in "
            f"summary.json); measure what they are worth: {program()} prune --workdir={shlex.quote(str(workdir))}"
        )
    for what, name in (
        ("model", "checkpoints"),
        ("metrics", "metrics.jsonl"),
        ("summary", "summary.json"),
        ("reconstructions", "reconstructions.png"),
        ("confusion matrix", "confusion.png"),
    ):
        if (workdir / name).exists():
            print(f"{what:<17}{workdir / name}")

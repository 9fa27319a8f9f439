"""Trains every point of a grid of settings, each in a workdir of its own, and prints them sorted.

    mlcn_jax sweep --config=quickstart --workdir=runs/sweep --sweep='train.learning_rate=1e-3,3e-4;train.seed=0,1,2'

Names the best point and, where `train.seed` is swept, the mean and spread over seeds. The same command continues a
sweep that was stopped. Writes `sweep.json` to the workdir. Exit code 3: a point failed.
"""

from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of, needed_workdir
from mlcn_jax.launch import EXIT_FAILED


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the sweep, with a workdir for each point.", flag_values=values)
    text = "The grid, such as 'train.learning_rate=1e-3,3e-4;train.seed=0,1'."
    flags.DEFINE_string("sweep", "", text, flag_values=values)


def main(argv: Sequence[str]) -> int:
    values = arguments.parse("sweep", __doc__, define, argv, config="run")
    workdir = needed_workdir(values)
    config = config_of(values)
    from mlcn_jax import host
    from mlcn_jax.training import sweep

    host.set_up_jax()
    rows = sweep.sweep(config, workdir, values.sweep)
    print(sweep.report(rows))
    return EXIT_FAILED if any("error" in row for row in rows) else 0

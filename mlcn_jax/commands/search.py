"""Searches for the lanes that fill given devices and classify best.

    mlcn_jax search --config=nas_quickstart --workdir=runs/nas
    mlcn_jax search --config=nas_quickstart --workdir=runs/nas --worker    # any number of these

The first command starts the search or continues it, trains models as every worker does, waits for the last models of
the workers, scores the best model on the test set and reports. The same command continues a search that was stopped.
`--worker` only trains; on other machines, give --config.search.storage=postgresql://... to it and to the first command.
Writes to the workdir: `best_config.py`, which `train` takes, `trials.md`, `trials.json`, `summary.json`, `search.png`.
"""

import shlex
import sys
from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import needed_workdir
from mlcn_jax.errors import InputError, Stopped
from mlcn_jax.launch import EXIT_STOPPED, program


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the search: its storage and results.", flag_values=values)
    text = "Only train models of a search that was started without this flag."
    flags.DEFINE_bool("worker", False, text, flag_values=values)


def main(argv: Sequence[str]) -> int:
    values = arguments.parse("search", __doc__, define, argv, config="search")
    workdir = needed_workdir(values)
    if not values["config"].present:
        raise InputError("--config=FILE is needed, with search fields, such as nas_quickstart")

    from mlcn_jax import host
    from mlcn_jax.search import report, run, setup, storage

    optuna, _ = storage.load_packages()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it says of trials is in this project's own log lines
    config, settings = setup.read_config(values.config.to_dict())
    host.set_up_jax(least_seconds=0.1)  # workers share the cached programs
    try:
        if values.worker:
            run.work(config, settings, workdir)
        else:
            print(report.text(run.run(config, settings, workdir), workdir))
    except Stopped as stopped:
        print(f"{stopped}. Continue with:\n  {program()} search {shlex.join(argv)}", file=sys.stderr)
        return EXIT_STOPPED
    return 0

"""Searches for the lanes that fill given devices and classify best.

    mlcn_jax search --config=nas_quickstart --workdir=runs/nas
    mlcn_jax search --config=nas_quickstart --workdir=runs/nas --worker    # any number of these

The first command starts or resumes the search, trains models as every worker does, waits for the workers to finish
their last models, scores the best one on the test set and writes a report. `--worker` only trains. For workers on other
machines, give all commands the same --config.search.storage=postgresql://... Writes to the workdir: `best_config.py`
(for `train`), `trials.md`, `trials.json`, `summary.json` and `search.png`.
"""

from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import needed_workdir
from mlcn_jax.errors import InputError


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the search: its storage and results.", flag_values=values)
    text = "Only train models of a search that was started without this flag."
    flags.DEFINE_bool("worker", False, text, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("search", __doc__, define, argv, config="search")
    workdir = needed_workdir(values)
    if not values["config"].present:
        raise InputError("--config=FILE is needed, with search fields, such as nas_quickstart")

    from mlcn_jax import host
    from mlcn_jax.search import report, run, setup

    config, settings = setup.read_config(values.config.to_dict())
    host.keep_compiled_programs(least_seconds=0.1)  # workers share them
    if values.worker:
        run.work(config, settings, workdir)
        return
    summary = run.run(config, settings, workdir)
    print(report.told(summary, workdir))

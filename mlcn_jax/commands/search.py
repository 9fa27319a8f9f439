"""Searches for the lanes that fill given devices and classify best.

    python -m experiments.nas --config=configs/nas_quickstart.py --workdir=runs/nas
    python -m experiments.nas --config=configs/nas_quickstart.py --workdir=runs/nas --worker    # as many as you like

The first command starts the search or goes on with it, trains models as every worker does, waits for the workers'
last ones, scores the test set for the best and reports. `--worker` only trains; on other machines give it
--config.search.storage=postgresql://... too, as to the first. Writes to the workdir: `best_config.py`, which main.py
trains, `trials.md`, `trials.json`, `summary.json` and `search.png`.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_app
from mlcn_jax.search import report, run, setup

_QUICKSTART = str(Path(__file__).parents[2] / "configs" / "nas_quickstart.py")
_CONFIG = config_flags.DEFINE_config_file("config", _QUICKSTART, "Python file with get_config(), with search fields.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of the search: its storage and what comes out.")
_WORKER = flags.DEFINE_bool("worker", False, "Only train models of a search that was started without this flag.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise InputError(f"unknown argument {argv[1]!r}: flags are written --name=value")
    if not _WORKDIR.value:
        raise InputError("give --workdir=FOLDER")
    config, settings = setup.read_config(_CONFIG.value.to_dict())
    workdir = Path(_WORKDIR.value).expanduser()
    host.keep_compiled_programs(least_seconds=0.1)  # workers share them
    if _WORKER.value:
        run.work(config, settings, workdir)
        return
    summary = run.run(config, settings, workdir)
    print(report.told(summary, workdir))


if __name__ == "__main__":
    launch_app(main)

"""Trains, evaluates, describes and exports capsule networks.

    python main.py --config=configs/mlcn2_cifar.py --workdir=runs/mlcn2 --config.train.batch_size=300
    python main.py --mode=evaluate --workdir=runs/mlcn2
    python main.py --mode=describe --config=configs/capsnet_mnist.py
    python main.py --mode=export --workdir=runs/mlcn2
    python main.py --mode=sweep --config=configs/quickstart.py --workdir=runs/sweep \
        --sweep='train.learning_rate=1e-3,3e-4;train.seed=0,1,2'

The same training command resumes an unfinished run. A config file is Python that is executed: run only those
you trust. Exit codes: 0 done, 2 input that cannot be used, 3 the loss is not finite or a point of a sweep
failed, 75 stopped by SIGTERM or Ctrl-C after saving a checkpoint.
"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from mlcn_jax.errors import InputError
from mlcn_jax.launch import EXIT_FAILED, launch_app

if TYPE_CHECKING:
    from mlcn_jax.config import RunConfig

MODES = ("train", "evaluate", "describe", "sweep", "export")
_CONFIGS = Path(__file__).parent / "configs"

_CONFIG = config_flags.DEFINE_config_file("config", str(_CONFIGS / "default.py"), "Python file with get_config().")
_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of the run: configuration, checkpoints, metrics, pictures.")
_MODE = flags.DEFINE_string("mode", "train", f"One of {', '.join(MODES)}.")
_SWEEP = flags.DEFINE_string("sweep", "", "Grid of a sweep, such as 'train.learning_rate=1e-3,3e-4;train.seed=0,1'.")


def main(argv: list[str]) -> int:
    mode, workdir = _MODE.value, Path(_WORKDIR.value).expanduser()
    if len(argv) > 1:
        raise InputError(f"unknown argument {argv[1]!r}: flags are written --name=value, see python main.py --help")
    if mode not in MODES:
        raise InputError(f"--mode={mode} is not one of {', '.join(MODES)}")
    if _SWEEP.value and mode != "sweep":
        raise InputError("--sweep needs --mode=sweep")
    if not _WORKDIR.value and mode != "describe":
        raise InputError(f"--mode={mode} needs --workdir=FOLDER")

    # Slow to load, and only now needed: a mistaken flag has been answered at once.
    from mlcn_jax import host
    from mlcn_jax.analysis import describe, evaluate_workdir
    from mlcn_jax.config import flat
    from mlcn_jax.distributed import processes
    from mlcn_jax.serving import export
    from mlcn_jax.training import loop, sweep

    if mode == "export":
        folder = export.export(workdir)
        print(f"exported {folder}; use it with: python -m mlcn_jax.predict {shlex.quote(str(folder))} IMAGE ...")
        return 0
    config = _run_config(mode, workdir)
    if config.parallel.processes != 1 and mode == "sweep":
        raise InputError("--mode=sweep runs in one process: leave parallel.processes at 1")
    if config.parallel.processes != 1 and mode == "train":
        if config.parallel.processes and not processes.is_watched():
            return processes.watch(config.parallel)
        processes.join(config.parallel, flat(config.to_dict()))
    host.keep_compiled_programs()
    if mode == "train":
        summary = loop.train(config, workdir)
        if processes.is_first():
            _print_summary(workdir, summary)
    elif mode == "evaluate":
        print(json.dumps(evaluate_workdir.evaluate_workdir(config, workdir), indent=2))
    elif mode == "describe":
        print(json.dumps(describe.describe(config), indent=2))
    else:
        rows = sweep.sweep(config, workdir, _SWEEP.value)
        print(sweep.table(rows))
        return EXIT_FAILED if any("error" in row for row in rows) else 0
    return 0


def _run_config(mode: str, workdir: Path) -> "RunConfig":
    """The configuration of `--config` and its overrides; without `--config`, the one stored in the workdir."""
    from mlcn_jax.config import RunConfig, read_stored

    flag = flags.FLAGS["config"]
    if flag.present:
        file = config_flags.get_config_filename(flag)
        if not Path(file).is_file():
            raise InputError(f"--config={file} is no file; there are {_config_files()}")
        return RunConfig.from_dict(_CONFIG.value.to_dict())
    if mode in ("evaluate", "describe") and _WORKDIR.value:
        return read_stored(workdir).replace(config_flags.get_override_values(flag))
    raise InputError(f"--mode={mode} needs --config=FILE; there are {_config_files()}")


def _config_files() -> str:
    return ", ".join(f"{_CONFIGS.name}/{file.name}" for file in sorted(_CONFIGS.glob("*.py")))


def _print_summary(workdir: Path, summary: dict) -> None:
    from mlcn_jax.training import evaluate

    print(f"test accuracy {summary['test_accuracy']:.2%}, loss {summary['test_loss']:.4f}")
    spreads = summary.get("lane_spreads", [])  # an older version wrote none
    if silent := sum(spread < evaluate.ALIVE for spread in spreads):
        print(
            f"{silent} of {len(spreads)} lanes say the same of every image (lane_spreads in summary.json); what they "
            f"are worth: python -m experiments.prune --workdir={workdir}"
        )
    for what, name in (
        ("model", "checkpoints"),
        ("metrics", "metrics.jsonl"),
        ("summary", "summary.json"),
        ("reconstructions", "reconstructions.png"),
        ("confusion matrix", "confusion.png"),
    ):
        print(f"{what:<17}{workdir / name}")


if __name__ == "__main__":
    launch_app(main)

"""Trains unclaimed lanes of a pool, one after another. Run any number of workers, on any machines.

    mlcn_jax work --pool=/shared/pool

The pool is a folder with a file `lanes.toml`, which names the configuration, the lanes and how many of them make a
joined model ("Train lanes apart and join them" in the docs). A worker resumes lanes that another one left unfinished,
even if it was killed, and joins a model when enough lanes are finished. It ends when no lane is left; Ctrl-C stops it
after a checkpoint. The folder must be on a file system with locks that hold between the machines, such as NFS.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError
from mlcn_jax.launch import EXIT_FAILED

if TYPE_CHECKING:
    from mlcn_jax.config import RunConfig


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("pool", "", "Folder of the pool, with lanes.toml.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "This machine's config.data.dir, if not empty.", flag_values=values)


def main(argv: Sequence[str]) -> int:
    values = arguments.parse("work", __doc__, define, argv)
    if not values.pool:
        raise InputError("--pool=FOLDER is needed: a folder with lanes.toml")
    folder = Path(values.pool).expanduser()

    from mlcn_jax import host
    from mlcn_jax.analysis.pool import read_pool, work

    host.set_up_jax()
    changes = {"data.dir": values.data_dir} if values.data_dir else {}
    pool = read_pool(folder, lambda given: _config(folder, given), changes)
    failed = work(pool)
    done = sum(lane.is_finished for lane in pool.lanes)
    print(f"{done} of {len(pool.lanes)} lanes are finished")
    for name, reason in failed.items():
        lane = folder / "lanes" / name
        again = f"to train it again, remove {lane}" if lane.exists() else "to try again, start a worker"
        print(f"{name} failed: {reason}; {again}")
    for count in range(1, len(pool.lanes) + 1):
        if pool.joined(count).exists():
            print(f"model of {count} lanes: {pool.joined(count)}")
    return EXIT_FAILED if failed else 0


def _config(folder: Path, given: str) -> "RunConfig":
    """The packaged configuration of a name, or that of a file, whose path may be relative to the pool's folder."""
    from mlcn_jax.config import RunConfig

    beside = folder / given
    file = beside if beside.is_file() else arguments.config_file(given)
    return RunConfig.from_dict(arguments.execute(file).to_dict())

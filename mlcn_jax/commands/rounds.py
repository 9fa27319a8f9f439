"""Trains one model with several workers that rarely communicate: each takes some steps before changes are exchanged.

    mlcn_jax rounds --config=quickstart --workdir=runs/rounds --config.train.rounds.steps=50 \\
        --config.train.rounds.workers=2                                    # everything on this machine
    mlcn_jax rounds --config=... --workdir=runs/rounds --serve=0.0.0.0:29600                  # the coordinator
    mlcn_jax rounds --config=... --workdir=runs/worker1 --coordinator=HOST:29600 --worker=1   # a worker, elsewhere

All of them take the same configuration (`train.rounds`). The same command resumes a process that was stopped. Without
`--serve` and `--coordinator` the workers are started here. Writes to the coordinator's workdir what `train` writes.
Certificates (`--tls_cert`, `--tls_key`, `--ca`) encrypt the connection and let in only workers that have one.
"""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.allocator import share_heaps
from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of, needed_workdir
from mlcn_jax.commands.train import print_summary
from mlcn_jax.distributed import processes
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.files import given_file
from mlcn_jax.launch import EXIT_FAILED
from mlcn_jax.settings import RoundSettings

_STOP_SECONDS = 20.0
_PARENT = "MLCN_JAX_PARENT"  # pid of the process that started this one; when that ends, this one does
_log = logging.getLogger("mlcn_jax")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of the run, or of the worker's state.", flag_values=values)
    flags.DEFINE_string("serve", "", "HOST:PORT on which this coordinator listens for workers.", flag_values=values)
    flags.DEFINE_string("coordinator", "", "HOST:PORT of the coordinator, for a worker.", flag_values=values)
    flags.DEFINE_integer("worker", -1, "Number of this worker, from 0.", flag_values=values)
    flags.DEFINE_string("tls_cert", None, "Own certificate (PEM).", flag_values=values)
    flags.DEFINE_string("tls_key", None, "Private key (PEM) of --tls_cert.", flag_values=values)
    flags.DEFINE_string("ca", None, "CA certificates (PEM) to verify the other side with.", flag_values=values)


def main(argv: Sequence[str]) -> int:
    if _PARENT in os.environ:
        processes.end_with(int(os.environ[_PARENT]))
    values = arguments.parse("rounds", __doc__, define, argv, config="run")
    workdir, config = needed_workdir(values), config_of(values)
    if values.serve and values.coordinator:
        raise InputError("--serve makes this the coordinator, --coordinator a worker: give one of them")
    if bool(values.coordinator) != (values.worker >= 0):
        raise InputError("a worker needs both --coordinator=HOST:PORT and its number, --worker=0 and so on")
    if not importlib.util.find_spec("grpc"):
        raise InputError("rounds need grpcio: pip install 'mlcn_jax[rounds]'")

    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # which gRPC reads when it is imported
    if not values.serve and not values.coordinator:  # a GPU is shared by this process and the workers that it starts
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from mlcn_jax import host
    from mlcn_jax.rounds.coordinator import coordinate
    from mlcn_jax.rounds.link import Tls
    from mlcn_jax.rounds.worker import work

    tls = Tls(*(given_file(option, values[option].value) for option in ("tls_cert", "tls_key", "ca")))
    share_heaps(config.model["lanes"])
    host.set_up_jax()
    if values.coordinator:
        work(config, workdir, values.coordinator, values.worker, tls)
        return 0
    here = None if values.serve else _Here(list(argv), workdir, config.train.rounds)
    summary = coordinate(config, workdir, values.serve or "127.0.0.1:0", tls, here)
    print_summary(workdir, summary)
    return 0


class _Here:
    """Starts workers on this machine and stops them at the end.

    Args:
      argv: flags of this command.
      workdir: folder in which each worker has a folder.
      settings: settings of the rounds.
    """

    def __init__(self, argv: list[str], workdir: Path, settings: RoundSettings):
        self._argv, self._workdir, self._settings = argv, workdir, settings

    @contextlib.contextmanager
    def __call__(self, port: int) -> Iterator[Callable[[], None]]:
        common = [sys.executable, "-m", "mlcn_jax", "rounds", *self._argv, f"--coordinator=127.0.0.1:{port}"]
        running = [
            subprocess.Popen(
                [*common, f"--worker={i}", f"--workdir={self._workdir / f'worker{i}'}"],
                env={**os.environ, _PARENT: str(os.getpid())},
            )
            for i in range(self._settings.workers)
        ]
        told: set[int] = set()

        def check() -> None:
            for i, process in enumerate(running):
                if process.poll() is not None and i not in told:
                    told.add(i)
                    _log.warning("worker %d ended with code %d", i, process.returncode)
            left = len(running) - len(told)
            if left < self._settings.enough and EXIT_FAILED in (process.returncode for process in running):
                raise Diverged("a worker diverged, as it says above; earlier rounds are kept")
            if left < self._settings.enough:
                raise InputError(
                    f"{left} of {len(running)} workers are left, and a round needs {self._settings.enough} "
                    "(train.rounds.quorum): see the other workers' messages above; the same command resumes after the "
                    "last complete round"
                )

        try:
            yield check
        finally:
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS if sys.exc_info()[0] is None else 0)
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()

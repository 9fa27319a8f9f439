"""Whether a compiled training step fits the memory of its device."""

import logging

from mlcn_jax import host
from mlcn_jax.distributed import processes
from mlcn_jax.errors import InputError
from mlcn_jax.launch import less_memory
from mlcn_jax.training.runner import Runner

_log = logging.getLogger(__name__)


def check_step_fits(runner: Runner) -> None:
    """Compares the memory that a compiled step needs with the device's; every process must call it.

    A CPU states no limit, and a machine may swap: more than its memory is only warned of.

    Raises:
      InputError: the device of a process states less memory than the step needs.
    """

    def check() -> None:
        for device, needed in runner.step_bytes().items():
            limit = host.device_memory_bytes(device)
            available = host.machine_memory_bytes() if limit is None else limit
            if needed <= available:
                continue
            told = f"a training step needs {needed / 2**30:,.2f} GiB, but "
            sizes = f"{available / 2**30:,.2f} GiB of memory"
            if limit is not None:
                raise InputError(f"{told}the device has {sizes} for programs: {less_memory()}")
            _log.warning("%sthis machine has %s, so it may be slow or be killed: %s", told, sizes, less_memory())

    processes.everywhere(check)

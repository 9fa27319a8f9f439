"""One framework's program in a process of its own, which does what it is told on standard input.

    python -m benchmarks.worker FRAMEWORK NETWORK VARIANT BATCH DTYPE WEIGHTS

WEIGHTS is a .npz file or, for frameworks that run an exported or converted model, the folder that holds it. Each line
of standard input is a command as JSON, each line of standard output its answer. Only the process that is working uses
the CPU: the others wait for a line.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.networks import NETWORKS, NUM_CLASSES
from mlcn_jax.allocator import keep_memory

_NUM_BATCHES = 4  # different ones, in turn


def _resident_bytes(field: str) -> int:
    """`VmRSS`, or `VmHWM`, its largest value so far."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


class Worker:
    def __init__(self, framework: str, network: str, variant: str, batch: str, dtype: str, weights: str):
        self.module = importlib.import_module(f"benchmarks.frameworks.in_{framework}")
        self.imported_bytes = _resident_bytes("VmRSS")
        rng = np.random.default_rng(0)
        shape = (int(batch), *NETWORKS[network].image_shape)
        self.batches = []
        for _ in range(_NUM_BATCHES):
            images = rng.integers(0, 256, shape, dtype=np.uint8)
            self.batches.append((images, rng.integers(0, NUM_CLASSES, int(batch), dtype=np.int32)))
        source = Path(weights)
        given = dict(np.load(source)) if source.suffix == ".npz" else source
        self.program = self.module.Program(NETWORKS[network], int(batch), given, variant, dtype)
        self.count = 0

    def about(self):
        versions = {name: importlib.metadata.version(name) for name in self.module.PACKAGES}
        return {"python": platform.python_version(), **versions}

    def train(self, steps: int):
        """Losses of the next steps, and the seconds until the last is known."""
        started = time.perf_counter()
        losses = []
        for _ in range(steps):
            losses.append(self.program.train(*self.batches[self.count % _NUM_BATCHES]))
            self.count += 1
        losses = [float(loss) for loss in losses]
        return {"seconds": time.perf_counter() - started, "losses": losses}

    def infer(self, steps: int):
        """The first batch's class probabilities, and the seconds of so many calls."""
        started = time.perf_counter()
        for _ in range(steps):
            probabilities = self.program.infer(self.batches[0][0])
        return {"seconds": time.perf_counter() - started, "probabilities": probabilities.tolist()}

    def runtime(self):
        """What computes, where that is chosen by measuring."""
        return self.program.runtime()

    def memory(self):
        """Most memory so far: the device's if it has its own, else this process's; and that of the bare framework."""
        on_device = getattr(self.module, "device_peak_bytes", lambda: None)()
        host = {"host_peak_bytes": _resident_bytes("VmHWM"), "imported_bytes": self.imported_bytes}
        return {"peak_bytes": host["host_peak_bytes"] if on_device is None else on_device, **host}


def main():
    keep_memory()  # whatever the framework
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a framework prints is no answer
    worker = Worker(*sys.argv[1:])
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

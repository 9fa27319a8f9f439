"""Measures the peak rates of a device, and how much the devices of one machine slow each other down."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.analysis.measure_device import Lab, Program, bind, measure_link, spec_of
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.lane_list import parse_lanes

_LANES = "mlcn1:w3, mlcn2:w2d3, resnet:w2"
_BATCH = 100
_TURN_SECONDS = 1.0  # long enough to average out variation within a second, as a training run does
_MOST_WORKERS = 8
_PRODUCTS = (512, 1024, 2048)
_COPIED_BYTES = (2**16, 2**20, 2**24, 2**28)
_PEAK_SECONDS = 0.2


def measure(values: Any) -> dict[str, Any]:
    """The fields of a profile that are not about lanes: `link`, `sharing` and `peak`. Binds this process to its cores.

    Args:
      values: flags of the command `profile`.
    """
    cores = bind(values.cores)
    given = (values.data, values.lane_routing, values.compute_dtype)
    return {
        "link": measure_link(cores),
        "sharing": measure_sharing(cores, values.cores, *given, rounds=values.rounds),
        "peak": peak(values.compute_dtype),
    }


def peak(compute_dtype: str) -> dict[str, float]:
    """The highest rate of a matrix product and of reading and writing, over some sizes.

    The sizes reach from what fits the nearest cache to what fits none, so that no program is above both rates.
    """
    flops = max(
        2 * size**3 / _least(lambda x: x @ x, jnp.ones((size, size), jnp.dtype(compute_dtype))) for size in _PRODUCTS
    )
    moved = max(2 * size / _least(lambda x: x + 1, jnp.zeros(size // 4, jnp.float32)) for size in _COPIED_BYTES)
    return {"flops_per_second": flops, "bytes_per_second": moved}


def _least(function: Callable, x: jax.Array) -> float:
    """The fastest of some calls, in seconds."""
    options = conv.compiler_options(jax.default_backend())
    compiled = jax.jit(function, compiler_options=options).lower(x).compile()
    jax.block_until_ready(compiled(x))
    least, ends = math.inf, time.perf_counter() + _PEAK_SECONDS
    while (started := time.perf_counter()) < ends or least == math.inf:
        jax.block_until_ready(compiled(x))
        least = min(least, time.perf_counter() - started)
    return least


def measure_sharing(
    cores: Sequence[int], num_cores: int, data: str, lane_routing: str, compute_dtype: str, rounds: int
) -> dict[str, float] | None:
    """How much longer steps take while processes of as many cores compute at once on all of this machine's cores.

    Args:
      cores: the cores that this process had at its start (`measure_device.bind`).
      num_cores: cores of each device; 0 for all.
      data, lane_routing, compute_dtype: as for `measure_device.spec_of`.
      rounds: in each, one process computes alone, then all at once.

    Returns:
      The field `sharing` of a profile; None on accelerators, which have memory of their own, and if there is no room
      for a second device.
    """
    count = min(_MOST_WORKERS, len(cores) // num_cores) if num_cores else 1
    if jax.default_backend() != "cpu" or count < 2:
        return None
    workers = []
    for i in range(count):
        own = list(cores[i * num_cores : (i + 1) * num_cores])
        values = json.dumps({"cores": own, "data": data, "lane_routing": lane_routing, "compute_dtype": compute_dtype})
        workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "mlcn_jax", "profile", f"--sharing_worker={values}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                text=True,
            )
        )
    try:
        _ask(workers)  # once, until all have compiled
        ratios = []
        for _ in range(rounds):
            alone, together = _ask(workers[:1])[0], _ask(workers)[0]
            ratios += [math.log(b / a) for a, b in zip(alone, together, strict=True)]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return {"devices": count, "slowdown": max(1.0, math.exp(statistics.mean(ratios))), "spread": _spread(ratios)}


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _ask(workers: Sequence[subprocess.Popen]) -> list[list[float]]:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = []
    for worker in workers:
        assert worker.stdout is not None
        line = next((line for line in worker.stdout if line.startswith("[")), "")
        if not line:
            raise InputError(
                "how devices slow each other down could not be measured: one of the processes ended; see its message "
                "above"
            )
        answers.append(json.loads(line))
    return answers


def sharing_worker(cores: Sequence[int], data: str, lane_routing: str, compute_dtype: str) -> None:
    """One of the processes of `measure_sharing`: answers each line with the median seconds of some lanes' steps."""
    os.sched_setaffinity(0, cores)
    lab = Lab(spec_of(data, lane_routing, compute_dtype))
    programs = [lab.lane_step(group, _BATCH) for group in parse_lanes(_LANES)]
    for _ in sys.stdin:
        print(json.dumps([_median(program) for program in programs]), flush=True)


def _median(program: Program) -> float:
    seconds: list[float] = []
    ends = time.perf_counter() + _TURN_SECONDS
    while (started := time.perf_counter()) < ends or not seconds:
        program.run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)

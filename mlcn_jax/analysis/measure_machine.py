"""Measures the peak rates of a device, and how much the devices of one machine slow each other down."""

import contextlib
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.analysis.measure_device import Lab, Program, bind, lab_spec, measure_link
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.lane_list import parse_lanes

_log = logging.getLogger(__name__)

_LANES = "mlcn1:w3, mlcn2:w2d3, resnet:w2"
_BATCH = 100
_TURN_SECONDS = 1.0  # long enough to average out variation within a second, as a training run does
_LEAST_STEPS = 5  # of a turn
_MOST_WORKERS = 8
_PRODUCTS = (512, 1024, 2048)
_COPIED_BYTES = (2**16, 2**20, 2**24, 2**28)
_PEAK_SECONDS = 0.2


@contextlib.contextmanager
def measuring(values: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Measures the fields of a profile that are not about lanes, which are measured inside the block. Binds the cores.

    Args:
      values: flags of the command `profile`.

    Yields:
      A function to call once the lanes are measured; it returns the fields `link`, `sharing` and `peak` of a profile.
      How devices share the machine is measured before and after, since other load on it changes within minutes.
    """
    cores = bind(values.cores)
    with Sharing(cores, values.cores, values.data, values.lane_routing, values.compute_dtype) as sharing:
        sharing.measure(values.rounds - values.rounds // 2)
        fields = {"link": measure_link(cores), "peak": peak(values.compute_dtype)}

        def finish() -> dict[str, Any]:
            try:
                sharing.measure(values.rounds // 2)
            except InputError as error:  # what was found before stands
                _log.warning("%s; used is what was measured before the lanes", error)
            return fields | {"sharing": sharing.found()}

        yield finish


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
    options = conv.compiler_options(jax.default_backend(), chains=x.dtype == jnp.bfloat16)
    compiled = jax.jit(function, compiler_options=options).lower(x).compile()
    jax.block_until_ready(compiled(x))
    least, ends = math.inf, time.perf_counter() + _PEAK_SECONDS
    while (started := time.perf_counter()) < ends or least == math.inf:
        jax.block_until_ready(compiled(x))
        least = min(least, time.perf_counter() - started)
    return least


class Sharing:
    """How much longer steps take while processes of as many cores compute at once on all of this machine's cores.

    The speed of a shared machine changes by the minute, and devices that wait for one another in every step are as slow
    as the slowest of them. So each turn is compared with all turns in which one process computed alone, and among
    processes that compute at once, the slowest counts in each step.

    Args:
      cores: the cores that this process had at its start (`measure_device.bind`).
      num_cores: cores of each device; 0 for all.
      data, lane_routing, compute_dtype: as for `measure_device.lab_spec`.
    """

    def __init__(self, cores: Sequence[int], num_cores: int, data: str, lane_routing: str, compute_dtype: str):
        self._workers: list[subprocess.Popen] = []
        self._counts: list[int] = []
        self._alone: list[list[float]] = []
        self._together: list[list[float]] = []
        count = min(_MOST_WORKERS, len(cores) // num_cores) if num_cores else 1
        if jax.default_backend() != "cpu" or count < 2:
            return  # accelerators have memory of their own, and here there is no room for a second device
        for i in range(count):
            own = list(cores[i * num_cores : (i + 1) * num_cores])
            values = {"cores": own, "data": data, "lane_routing": lane_routing, "compute_dtype": compute_dtype}
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "mlcn_jax", "profile", f"--sharing_worker={json.dumps(values)}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                    text=True,
                )
            )

    def __enter__(self) -> "Sharing":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def measure(self, rounds: int) -> None:
        """Takes turns: in each round one process computes alone, then all at once."""
        if not self._workers:
            return
        if not self._counts:
            one = [1] * len(parse_lanes(_LANES))
            _ask(self._workers, one)  # until all have compiled
            times = _ask(self._workers, one)[0]
            self._counts = [max(_LEAST_STEPS, round(_TURN_SECONDS / seconds)) for (seconds,) in times]
        for _ in range(rounds):
            self._alone.append([statistics.mean(steps) for steps in _ask(self._workers[:1], self._counts)[0]])
            self._together.append(slowest(_ask(self._workers, self._counts)))

    def found(self) -> dict[str, float] | None:
        """The field `sharing` of a profile; None on accelerators, and if there is no room for a second device."""
        if not self._workers:
            return None
        return {"devices": len(self._workers), **compare(self._alone, self._together)}


def slowest(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each program, the mean seconds of a step in which all devices wait for one another.

    Args:
      times: for each device and program, the seconds of each step.
    """
    return [statistics.mean(max(same) for same in zip(*steps, strict=True)) for steps in zip(*times, strict=True)]


def compare(alone: Sequence[Sequence[float]], together: Sequence[Sequence[float]]) -> dict[str, float]:
    """How many times longer steps take together, and the standard deviation of its logarithm, over turns and programs.

    Args:
      alone, together: for each turn, the mean seconds of a step of each program.
    """
    typical = [statistics.median(turns) for turns in zip(*alone, strict=True)]
    ratios = [math.log(b / a) for turn in together for a, b in zip(typical, turn, strict=True)]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return {"slowdown": max(1.0, math.exp(statistics.mean(ratios))), "spread": spread}


def _ask(workers: Sequence[subprocess.Popen], counts: Sequence[int]) -> list[list[list[float]]]:
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that has ended is named where its answer is read
            worker.stdin.write(json.dumps(counts) + "\n")
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
    """One of the processes of `Sharing`: reads step counts, one for each lane, and prints the seconds of each step."""
    os.sched_setaffinity(0, cores)
    lab = Lab(lab_spec(data, lane_routing, compute_dtype))
    programs = [lab.lane_step(group, _BATCH) for group in parse_lanes(_LANES)]
    for line in sys.stdin:
        answer = [_times(program, count) for program, count in zip(programs, json.loads(line), strict=True)]
        print(json.dumps(answer), flush=True)


def _times(program: Program, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        program.run()
        seconds.append(time.perf_counter() - started)
    return seconds

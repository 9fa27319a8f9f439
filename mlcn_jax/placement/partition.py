"""Assigns lanes to devices so that all finish at about the same time. Pure Python.

A lane's time on a device is given by a table `seconds[lane][device]`, so devices may differ by one factor
(`uniform_seconds`) or have unrelated costs, as a CPU and a GPU do. A heuristic is one function and one line in
`HEURISTICS`.
"""

import random

from mlcn_jax.errors import InputError
from mlcn_jax.placement.exact import solve_exactly
from mlcn_jax.placement.heuristics import HEURISTICS
from mlcn_jax.placement.problem import NoRoom, Placement, Problem, lower_bound_seconds, mib


def partition(name: str, problem: Problem, *, seed: int = 0, time_limit_seconds: float = 2.0) -> Placement:
    """Places every lane on one device.

    Args:
      name: one of `PARTITIONERS`.
      problem: the lanes and devices.
      seed: seed of `random`.
      time_limit_seconds: time after which `exact` returns the best placement found.

    Raises:
      InputError: the name is unknown; NoRoom: the lanes do not fit, and the message names the lane or the device.
    """
    if name not in PARTITIONERS:
        raise InputError(f"partitioner {name!r} is unknown: use one of {', '.join(PARTITIONERS)}")
    for i, needed in enumerate(problem.memory_bytes):
        if needed > max(problem.limit_bytes):
            device = max(range(problem.num_devices), key=problem.limit_bytes.__getitem__)
            raise NoRoom(
                f"{problem.lane_names[i]} needs {mib(needed)}, more than any device can hold (most: "
                f"{problem.device_names[device]}, {mib(problem.limit_bytes[device])}): make it narrower or "
                "shallower, use a smaller batch or a larger device"
            )
    if sum(problem.memory_bytes) > sum(problem.limit_bytes):
        raise NoRoom(
            f"the lanes need {mib(sum(problem.memory_bytes))} together, but the devices hold "
            f"{mib(sum(problem.limit_bytes))}: use fewer lanes, a smaller batch or more devices"
        )
    bound, optimal = lower_bound_seconds(problem), False
    if name == "exact":
        device_of, proved, optimal = solve_exactly(problem, time_limit_seconds)
        bound = max(bound, proved)
    else:
        device_of = HEURISTICS[name](problem, random.Random(seed))
    seconds, memory = list(problem.base_seconds), [0.0] * problem.num_devices
    for i, device in enumerate(device_of):
        seconds[device] += problem.seconds[i][device]
        memory[device] += problem.memory_bytes[i]
    optimal = optimal or max(seconds) <= bound * (1 + 1e-9)
    return Placement(name, tuple(device_of), tuple(seconds), tuple(memory), bound, optimal)


PARTITIONERS = (*HEURISTICS, "exact")

"""The precision, convolution algorithm and device of each lane in training, chosen together from device profiles."""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.errors import InputError
from mlcn_jax.nn.spec import COMPUTE_DTYPES, ModelSpec
from mlcn_jax.placement.forms import FormProblem, form_problem, place_together, read_profiles, training_bytes

TASK = "train"


def place_training(spec: ModelSpec, batch_size: int, files: Sequence[Path]) -> dict[str, Any]:
    """Form and device of every lane, so that the slowest device finishes a training step as early as possible.

    Lanes alone: loss and decoder are left out, and accuracy does not limit the choice. Optimal with OR-Tools, greedy
    without.

    Args:
      spec: the model.
      batch_size: images per step.
      files: profiles of the devices, measured with `mlcn_jax profile --forms=LANES`.

    Returns:
      The choice, ready for JSON, beside what the best placement takes with all lanes in one precision, which is what
      `mlcn_jax train` can do. `optimal` says whether the choice was proven to be the fastest in the time that is
      allowed, `memory` whether the profiles hold the memory of forms; if not, it is ignored.

    Raises:
      InputError: the model has no lanes, or a profile cannot be used; NoRoom: the lanes do not fit the devices.
    """
    if not spec.lane_specs:
        raise InputError("--profiles: CapsNet has no lanes to place: give a configuration with lanes")
    profiles = read_profiles(spec, files, TASK)
    memory = training_bytes(profiles, spec, batch_size)
    room = [profile.memory_bytes for profile in profiles]
    problem = form_problem(profiles, spec.lane_specs, TASK, batch_size, memory_bytes=memory, limit_bytes=room)
    partitioner = "exact" if importlib.util.find_spec("ortools") else "greedy"
    placed = place_together(partitioner, problem)
    alike: dict[str, float] = {}
    for precision in COMPUTE_DTYPES:
        with contextlib.suppress(InputError):  # some lanes lack it, or do not fit in it
            alike[precision] = place_together(partitioner, _only(problem, precision)).makespan_seconds
    return {
        "devices": [profile.device for profile in profiles],
        "lanes": [
            {"lane": str(lane), "form": problem.forms[form].removeprefix(f"{TASK} "), "device": device}
            for lane, form, device in zip(spec.lane_specs, placed.form_of, placed.device_of, strict=True)
        ],
        "makespan_seconds": placed.makespan_seconds,
        "in_one_precision_seconds": alike,
        "partitioner": partitioner,
        "optimal": placed.optimal,
        "memory": bool(memory),
    }


def _only(problem: FormProblem, precision: str) -> FormProblem:
    """The problem in the forms of one precision."""
    kept = [f for f, form in enumerate(problem.forms) if form.split()[1] == precision]

    def of(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[row[f] for f in kept] for row in rows]

    return dataclasses.replace(
        problem,
        seconds=of(problem.seconds),
        forms=[problem.forms[f] for f in kept],
        memory_bytes=of(problem.memory_bytes),
        losses=(),
    )

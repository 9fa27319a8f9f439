"""Predicts whether a training step fits the memory of a device, before it is compiled, and what makes it fit."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LaneGroup
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.remat import OFFLOAD
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.placement.cost import compiled_memory_bytes
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.session import check_remat, step_options
from mlcn_jax.training.step import TrainState, make_train_step

_STEPS_PER_EPOCH = 1000  # learning rates depend on it, memory does not
_FEW = 2  # from this many lanes of a group on, each two more add about the same memory (experiments/memory_plan.py)
_MARGIN = 1.05  # over the extrapolation from few lanes, which can be some percent too low (the same script)


def fit_memory(config: RunConfig, spec: ModelSpec, memory_bytes: int) -> dict[str, Any]:
    """Memory of a training step on one device; if it is too much, also with settings that need less.

    Args:
      config, spec: the run and its model.
      memory_bytes: memory of a device that programs may use.

    Returns:
      `platform`, whose programs these are; `device_bytes`; `tried`, a list of changed settings (none at first),
      predicted bytes and whether they fit; `fits`, the settings to change so that it fits, or None if none was found.

    Raises:
      InputError: there are several devices or a teacher, activations are offloaded to host memory, or the settings
        cannot be used.
    """
    parallel, tried = config.parallel, []
    if parallel.plan != "mesh" or parallel.data * parallel.lane > 1:
        raise InputError(
            f"parallel.plan={parallel.plan} with parallel.data={parallel.data} and parallel.lane={parallel.lane} is "
            "given, but memory is predicted for one device only: describe what one device gets as a run of its own "
            "(parallel.plan=mesh, its lanes and its part of the batch), which leaves out what devices send each other; "
            "train compares the compiled step with the memory of the devices before it begins"
        )
    if config.train.teacher:
        raise InputError(
            "the memory of a teacher is not predicted: describe the run without train.teacher, and add the teacher's "
            "parameters and what it takes to classify a batch"
        )
    if spec.remat == OFFLOAD:
        raise InputError(
            f"the memory of model.remat={OFFLOAD} is not predicted: describe the run with model.remat=full, whose "
            "result is the same"
        )
    size, workers = config.train.batch_size, config.train.rounds.workers
    if config.train.rounds.steps and size % workers:
        raise InputError(
            f"train.batch_size={size} cannot be divided among train.rounds.workers={workers}: use a multiple"
        )
    check_remat(spec)
    check_parts(spec, _batch_size(config), 1, config.train.accumulation_steps)
    for changes in _savings(config, spec):
        changed = config.replace(changes)
        need = predicted_bytes(changed, dataclasses.replace(spec, remat=changed.model["remat"]))
        tried.append({"changes": changes, "bytes": need, "fits": need <= memory_bytes})
        if need <= memory_bytes:
            break
    fits = tried[-1]["changes"] if tried[-1]["fits"] else None
    platform = jax.default_backend()
    return {"platform": platform, "device_bytes": memory_bytes, "tried": tried, "fits": fits}


def _savings(config: RunConfig, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Settings that give the same result, from the given ones to those that need the least memory."""
    changes: dict[str, Any] = {}
    yield changes
    if spec.remat == "none" and is_good(check_remat, dataclasses.replace(spec, remat="full")):
        changes = {"model.remat": "full"}
        yield changes
    size, parts = _batch_size(config), config.train.accumulation_steps
    for more in range(2, size + 1):
        if more >= 2 * parts and is_good(check_parts, spec, size, 1, more):
            parts = more
            yield changes | {"train.accumulation_steps": parts}


def _batch_size(config: RunConfig) -> int:
    """Images that one device computes in a step: in rounds, a worker has its part of a batch."""
    rounds = config.train.rounds
    return config.train.batch_size // (rounds.workers if rounds.steps else 1)


def is_good(check: Callable[..., None], *args: Any) -> bool:
    """Whether a check passes, and raises no InputError."""
    try:
        check(*args)
    except InputError:
        return False
    return True


def predicted_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Memory of a training step on one device: state, batch and temporaries.

    If the lanes of a group run as one function or in a scan, the step itself is compiled, which takes little longer for
    many lanes. Of lanes that run one by one, steps with a few are compiled, and further lanes add what its group's
    third and fourth do.
    """
    if not is_extrapolated(spec):
        return compiled_bytes(config, spec)
    counts = [group.count for group in spec.lane_groups]
    few = [_FEW if _has_many(group) else group.count for group in spec.lane_groups]
    base = compiled_bytes(config, first_of_each(spec, few))
    total = float(base)
    for place, (count, start) in enumerate(zip(counts, few, strict=True)):
        if count > start:
            two_more = [n + 2 * (i == place) for i, n in enumerate(few)]
            total += (count - start) * (compiled_bytes(config, first_of_each(spec, two_more)) - base) / 2
    return round(_MARGIN * total)


def is_extrapolated(spec: ModelSpec) -> bool:
    """Whether memory is predicted from steps with fewer lanes, and not that of the compiled step itself."""
    return spec.remat == "none" and any(map(_has_many, spec.lane_groups))


def _has_many(group: LaneGroup) -> bool:
    """Whether a group's lanes run one by one (`lanes.apply_group`), and are more than those that are compiled."""
    return group.kind.normalises and group.count > _FEW + 2


def first_of_each(spec: ModelSpec, counts: list[int]) -> ModelSpec:
    """The model with only the first lanes of each group."""
    lanes: list[int] = []
    first = 0
    for group, count in zip(spec.lane_groups, counts, strict=True):
        lanes += range(first, first + count)
        first += group.count
    return spec_of(spec, lanes)


def compiled_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Memory of a training step on one device as counted by the compiler; nothing is computed."""
    optimizer = optimizer_of(config.train, _STEPS_PER_EPOCH)
    params = param_shapes(spec)
    state = jax.eval_shape(lambda params: TrainState.create(params, optimizer), params)
    size = _batch_size(config)
    images = jax.ShapeDtypeStruct((size, *spec.image_shape), jnp.uint8)
    step = jax.jit(
        make_train_step(spec, optimizer, **step_options(config)),
        donate_argnums=0,
        compiler_options=spec.compiler_options(jax.default_backend()),
    )
    return compiled_memory_bytes(step.lower(state, images, jax.ShapeDtypeStruct((size,), jnp.int32)).compile())

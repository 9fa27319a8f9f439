"""Sharding over a mesh of devices: the batch over one axis, the lanes over the other.

Sharding determines where something is computed, never what: parameters, loss and gradients are those of one device,
except for the rounding of what is sent in bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from mlcn_jax.errors import InputError
from mlcn_jax.nn import tracing, words
from mlcn_jax.nn.spec import ModelSpec

DATA_AXIS = "data"
LANE_AXIS = "lane"


def make_mesh(data: int, lane: int) -> Mesh | None:
    """A mesh of `data` times `lane` devices; None for a single device, which needs no mesh.

    Raises:
      InputError: there are not enough devices.
    """
    devices = take_devices(data, lane, jax.devices())
    if data * lane == 1:
        return None
    types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, lane), (DATA_AXIS, LANE_AXIS), types, devices=devices)


def take_devices(data: int, lane: int, present: Sequence[jax.Device]) -> list[jax.Device]:
    """The first `data` times `lane` of the available devices.

    Raises:
      InputError: there are not enough, or a process would be left without one.
    """
    if data * lane > len(present):
        raise InputError(
            f"parallel.data={data} times parallel.lane={lane} needs {data * lane} devices, but jax finds "
            f"{len(present)} ({present[0].device_kind}): use fewer, add processes (parallel.processes), or, to try "
            f"it on a CPU, set JAX_NUM_CPU_DEVICES={data * lane}"
        )
    if jax.process_count() > 1 and data * lane != len(present):
        raise InputError(
            f"parallel.data={data} times parallel.lane={lane} is {data * lane}, but the {jax.process_count()} "
            f"processes have {len(present)} devices in all: every device of every process must be used"
        )
    return list(present[: data * lane])


def check_split(spec: ModelSpec, batch_size: int, data: int, lane: int) -> None:
    """Raises InputError, suggesting the nearest valid number, if the mesh does not divide batch or lanes evenly."""
    if batch_size % data:
        raise InputError(
            f"parallel.data={data} does not divide train.batch_size={batch_size}: use parallel.data="
            f"{_nearest_divisor(batch_size, data)} or a batch of {max(1, round(batch_size / data)) * data}"
        )
    share, group = batch_size // data, min(spec.norm_group, batch_size)
    if share % group and spec.normalises:
        raise InputError(
            f"model.norm_group={spec.norm_group}: {group} images are normalised together, but parallel.data={data} "
            f"gives each device {share} of a batch of {batch_size}: use model.norm_group="
            f"{_nearest_divisor(share, group)} or another divisor of {share}, another batch or fewer devices"
        )
    counts = [lanes.count for lanes in spec.lane_groups]
    if lane > 1 and not counts:
        raise InputError(f"CapsNet has no lanes to shard over parallel.lane={lane} devices: use parallel.data")
    uneven = [str(group) for group in spec.lane_groups if group.count % lane]
    if uneven:
        raise InputError(
            f"parallel.lane={lane} does not divide {', '.join(uneven)}: each device of a mesh needs an "
            f"equal number. Use parallel.lane={_nearest_divisor(math.gcd(*counts), lane)}, other lanes, or "
            "parallel.plan=stacks, which places lanes one by one"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def lane_axis(mesh: Mesh | None) -> str:
    """The axis that the modules of `model` gather over; empty if all lanes are on one device."""
    return LANE_AXIS if mesh is not None and mesh.shape[LANE_AXIS] > 1 else ""


def state_specs(tree: Any, lane: int) -> Any:
    """The sharding of parameters, or of a tree like them, over `lane` devices: a `PartitionSpec` for each array.

    Lanes are sharded along their first axis, and dense layers of the decoder by units if the lane axis divides them
    evenly. Everything else is replicated on every device.
    """

    def spec_of(path, leaf) -> PartitionSpec:
        names = {key.key for key in path if isinstance(key, jax.tree_util.DictKey)}
        if lane == 1 or not leaf.ndim:
            return PartitionSpec()
        if "encoder" in names:
            return PartitionSpec(LANE_AXIS)
        if "decoder" in names and leaf.shape[-1] % lane == 0:
            return PartitionSpec(*[None] * (leaf.ndim - 1), LANE_AXIS)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def place_state(mesh: Mesh | None, tree: Any) -> Any:
    """Places parameters, or a tree like them, on their devices; every process passes the full tree."""
    if mesh is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda spec, leaf: _place(mesh, spec, leaf), state_specs(tree, mesh.shape[LANE_AXIS]), tree)


def place_batch(mesh: Mesh | None, batch: Any) -> Any:
    """Places arrays whose first axis is the batch on their devices; every process passes the full batch.

    On CPUs it waits: a step whose inputs have not arrived would run in another thread (`host.compute_in_turn`).
    """
    if mesh is None:
        placed = jax.device_put(batch)
    else:
        placed = jax.tree.map(lambda leaf: _place(mesh, PartitionSpec(DATA_AXIS), leaf), batch)
    on_cpu = jax.default_backend() == "cpu"
    return jax.block_until_ready(placed) if on_cpu else placed


def _place(mesh: Mesh, spec: PartitionSpec, leaf: Any) -> Array:
    sharding = NamedSharding(mesh, spec)
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    mine = sharding.addressable_devices_indices_map(host.shape)
    shards = [jax.device_put(host[index], device) for device, index in mine.items()]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def to_host(tree: Any) -> Any:
    """Full arrays in this process's memory, possibly shared with `tree`; every process must call it."""
    leaves, structure = jax.tree.flatten(tree)
    apart = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable]
    if apart:
        gathered = _gather(leaves[apart[0]].sharding.mesh)([leaves[i] for i in apart])
        for i, leaf in zip(apart, gathered, strict=True):
            leaves[i] = leaf.addressable_data(0)
    return jax.tree.unflatten(structure, jax.device_get(leaves))


@functools.cache
def _gather(mesh: Mesh) -> Callable:
    """One program that copies arrays to all devices, compiled once for all saves of a run."""
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, PartitionSpec()))


def value_and_grad_over(mesh: Mesh | None, function: Callable, exchange_dtype: str = "float32") -> Callable:
    """Differentiates `function(params, images, labels, *rest) -> (loss, metrics)`, means over the batch, over a mesh.

    On each device `function` sees that device's shard of the lanes and of the batch, and gathers what it needs over
    `lane_axis`. All devices of one lane axis get the same results, and each loss is weighted by one over the number of
    devices, so that the gradient of a gather is the sum of the gradients on the devices that used it.

    One sum over all devices brings the results, the gradients of what every device holds, and the part of the norm of
    what is sharded; before it, another over the data axis brings the gradients of what is sharded, if there are both.
    Gradients are summed, and lanes gathered, in `exchange_dtype`; if it is not float32, the rest is a sum of its own.

    Returns:
      The function `(params, images, labels, *rest) -> ((loss, metrics), gradients, norm)`; `norm` is that of all
      gradients, or None without a mesh.
    """
    with_gradient = jax.value_and_grad(function, has_aux=True)
    if mesh is None:
        return lambda params, *batch: (*with_gradient(params, *batch), None)

    sent_in = "" if exchange_dtype == "float32" else exchange_dtype  # empty: each array is sent in its own dtype
    data, axes = mesh.shape[DATA_AXIS], _axes(mesh)

    def total(tree: Any, over: tuple[str, ...], dtype: str = "") -> Any:
        """The sum of all arrays over devices, in one message."""
        flat, apart = ravel_pytree(tree)
        return apart(words.psum(flat, over, dtype) if dtype and flat.size else lax.psum(flat, over))

    def on_a_device(specs, params, *batch):
        with tracing.using(dataclasses.replace(tracing.current(), exchange_dtype=sent_in)):
            results, gradients = jax.tree.map(lambda x: x / mesh.size, with_gradient(params, *batch))
        split = jax.tree.map(lambda x, spec: x if any(spec) else None, gradients, specs)
        same = jax.tree.map(lambda x, spec: None if any(spec) else x, gradients, specs)
        if data > 1 and jax.tree.leaves(split):
            split = total(split, (DATA_AXIS,), sent_in)
        squares = [jnp.sum(jnp.square(x)) / data for x in jax.tree.leaves(split)]
        scalars = (results, [sum(squares)] if squares else [])
        if sent_in:
            same, (results, squares) = total(same, axes, sent_in), total(scalars, axes)
        else:
            same, (results, squares) = total((same, scalars), axes)
        norm = jnp.sqrt(sum(squares, optax.tree.norm(same, squared=True)))
        gradients = jax.tree.map(lambda a, b: b if a is None else a, split, same, is_leaf=lambda x: x is None)
        return results, gradients, norm

    def over_mesh(params, images, *rest):
        specs, everywhere = state_specs(params, mesh.shape[LANE_AXIS]), PartitionSpec()
        step = _over(mesh, functools.partial(on_a_device, specs), (everywhere, specs, everywhere))
        return step(params, images, *rest)

    return over_mesh


def sum_over(mesh: Mesh | None, function: Callable) -> Callable:
    """Turns `function(params, images, *rest)`, whose results are sums over the batch, into one over a mesh.

    Each device sees the same shards as in `value_and_grad_over`.
    """
    if mesh is None:
        return function
    axes = _axes(mesh)

    def add(*args):
        flat, apart = ravel_pytree(function(*args))
        return jax.tree.map(lambda x: x / mesh.shape[LANE_AXIS], apart(lax.psum(flat, axes)))  # each has the same sums

    return _over(mesh, add, PartitionSpec())


def num_lane_shares(mesh: Mesh | None) -> int:
    """Devices over which the lanes are sharded."""
    return 1 if mesh is None else mesh.shape[LANE_AXIS]


def lanes_over(mesh: Mesh | None, function: Callable) -> Callable:
    """Turns `function(encoder, images)` into one over a mesh; its results are arrays [lanes, groups of images, ...]."""
    if mesh is None:
        return function
    lanes, batch = PartitionSpec(LANE_AXIS), PartitionSpec(DATA_AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=(lanes, batch), out_specs=PartitionSpec(LANE_AXIS, DATA_AXIS))


def _axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which there are several devices."""
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)


def _over(mesh: Mesh, function: Callable, out_specs: Any) -> Callable:
    """`function(params, images, *rest)` on each device of a mesh, with its shards of parameters and of the batch."""
    axes = _axes(mesh)

    def vary(x, spec):
        """Marks what is the same on several devices as varying, so that its gradient is not summed over them."""
        missing = tuple(axis for axis in axes if axis not in spec)
        return lax.pcast(x, missing, to="varying") if missing else x

    def over_mesh(params, images, *rest):
        batch = PartitionSpec(DATA_AXIS) if DATA_AXIS in axes else PartitionSpec()
        others = jax.tree.map(lambda leaf: batch if leaf.shape[:1] == images.shape[:1] else PartitionSpec(), rest)
        in_specs = (state_specs(params, mesh.shape[LANE_AXIS]), batch, *others)

        def on_a_device(*shares):
            return function(*jax.tree.map(vary, shares, in_specs))

        return jax.shard_map(on_a_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(params, images, *rest)

    return over_mesh

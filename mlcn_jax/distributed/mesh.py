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
    if share % group and any(lanes.kind.normalises for lanes in spec.lane_groups):
        raise InputError(
            f"model.norm_group={group} images are normalised together, but parallel.data={data} gives each device "
            f"{share} of a batch of {batch_size}: use model.norm_group={_nearest_divisor(share, group)} or another "
            f"divisor of {share}, another batch or fewer devices"
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


def mean_over(mesh: Mesh | None, function: Callable, exchange_dtype: str = "float32") -> Callable:
    """Turns `function(params, images, labels, key)`, whose results are means over the batch, into one over a mesh.

    On each device it sees that device's shard of the lanes and of the batch, and gathers what it needs over
    `lane_axis`. All devices of one lane axis get the same results, and each result is weighted by one over their
    number, so that the gradient of a gather is the sum of the gradients on the devices that used it. Gradients are
    summed, and lanes gathered, in `exchange_dtype`; results are averaged in their own.
    """
    return _over(mesh, function, lax.pmean, exchange_dtype)


def sum_over(mesh: Mesh | None, function: Callable) -> Callable:
    """As `mean_over`, for a function whose results are sums over the batch."""

    def add(results, axes):
        times = 1 if mesh is None else mesh.shape[LANE_AXIS]  # how many devices compute each sum
        return jax.tree.map(lambda x: x / times, lax.psum(results, axes))

    return _over(mesh, function, add)


def num_lane_shares(mesh: Mesh | None) -> int:
    """Devices over which the lanes are sharded."""
    return 1 if mesh is None else mesh.shape[LANE_AXIS]


def lanes_over(mesh: Mesh | None, function: Callable) -> Callable:
    """Turns `function(encoder, images)` into one over a mesh; its results are arrays [lanes, groups of images, ...]."""
    if mesh is None:
        return function
    lanes, batch = PartitionSpec(LANE_AXIS), PartitionSpec(DATA_AXIS)
    return jax.shard_map(function, mesh=mesh, in_specs=(lanes, batch), out_specs=PartitionSpec(LANE_AXIS, DATA_AXIS))


def global_norm(mesh: Mesh | None, tree: Any) -> Array:
    """The norm of all arrays of a tree placed as by `place_state`, with one sum over the devices for all arrays."""
    if not lane_axis(mesh):
        return optax.tree.norm(tree)
    specs = state_specs(tree, num_lane_shares(mesh))

    def squares(shares):
        layout = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
        parts = [(any(spec), jnp.sum(jnp.square(x))) for spec, x in zip(layout, jax.tree.leaves(shares), strict=True)]
        split, whole = (sum((x for is_split, x in parts if is_split == kind), jnp.zeros(())) for kind in (True, False))
        return lax.psum(split, LANE_AXIS) + whole

    return jnp.sqrt(jax.shard_map(squares, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec())(tree))


def _over(mesh: Mesh | None, function: Callable, reduce: Callable, exchange_dtype: str = "float32") -> Callable:
    if mesh is None:
        return function
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    sent_in = "" if exchange_dtype == "float32" else exchange_dtype  # empty: each array is sent in its own dtype

    def missing_in(spec) -> tuple[str, ...]:
        """The axes over whose devices a value is the same."""
        return tuple(axis for axis in axes if axis not in spec)

    def vary(x, spec):
        """Marks a value as varying over devices, so that its gradients are summed over all devices that used it."""
        missing = missing_in(spec)
        return lax.pcast(x, missing, to="varying") if missing else x

    def vary_rounding(x, missing):
        """`vary`, with the sum in `exchange_dtype`."""

        @jax.custom_vjp
        def varying(x):
            return lax.pcast(x, missing, to="varying")

        def backward(_, gradient):
            return (words.psum(gradient, missing, sent_in),)

        varying.defvjp(lambda x: (varying(x), None), backward)
        return varying(x) if sent_in else lax.pcast(x, missing, to="varying")

    def vary_together(params, specs):
        """`vary` of all parameters, as one array for each set of axes, so that one sum brings all their gradients."""
        leaves, tree = jax.tree.flatten(params)
        layout = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
        kinds = [(missing_in(spec), leaf.dtype) for spec, leaf in zip(layout, leaves, strict=True)]
        for kind in dict.fromkeys(kind for kind in kinds if kind[0]):
            places = [i for i, own in enumerate(kinds) if own == kind]
            flat, apart = ravel_pytree([leaves[i] for i in places])
            for i, leaf in zip(places, apart(vary_rounding(flat, kind[0])), strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    def together(results):
        flat, apart = ravel_pytree(results)
        return apart(reduce(flat, axes))

    def over_mesh(params, images, *rest):
        batch = PartitionSpec(DATA_AXIS) if DATA_AXIS in axes else PartitionSpec()
        others = jax.tree.map(lambda leaf: batch if leaf.shape[:1] == images.shape[:1] else PartitionSpec(), rest)
        in_specs = (state_specs(params, mesh.shape[LANE_AXIS]), batch, *others)

        def on_a_device(params, *batch):
            batch = jax.tree.map(vary, batch, in_specs[1:])
            with tracing.using(dataclasses.replace(tracing.current(), exchange_dtype=sent_in)):
                return together(function(vary_together(params, in_specs[0]), *batch))

        mapped = jax.shard_map(on_a_device, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
        return mapped(params, images, *rest)

    return over_mesh

"""Communication between stacks of lanes, within one process or among several: messages to the head and back, and sums.

A step needs two: each stack's message to the head, and the head's to each stack (`messages`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

_AXIS = "stack"


@jax.jit
def _sum(parts):
    return sum(parts[1:], parts[0])


class AmongDevices:
    """Exchanges messages and sums between the devices of one process, by copying.

    `sent` counts `messages` and `bytes` that went from one device to another.
    """

    def __init__(self, devices: Sequence[jax.Device], head: jax.Device):
        self._devices, self._head = devices, head
        self.sent: Counter[str] = Counter()

    def _move(self, x: Array, device: jax.Device) -> Array:
        """A copy on another device; between different kinds of devices via the host, the only way jax supports."""
        (here,) = x.devices()
        if here != device:
            self.sent.update(messages=1, bytes=x.nbytes)
        return jax.device_put(x if here.platform == device.platform else jax.device_get(x), device)

    def joined(self, parts: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """The shapes of what `gather` returns, given those of each stack's part."""
        return tuple(parts)

    def together(self, parts: Sequence[Array]) -> Any:
        """What the head passes to `spread`, from the part of each stack [1, ...]; traced."""
        return tuple(parts)

    def gather(self, parts: Mapping[int, Array]) -> tuple[Array, ...]:
        """The parts of all stacks, on the head."""
        return tuple(self._move(parts[s], self._head) for s in range(len(self._devices)))

    def spread(self, parts: Any, part: jax.ShapeDtypeStruct | None) -> Iterator[tuple[int, Array]]:
        """Yields each stack with its part, of shape `part`; those whose copy blocks, via the host, come last."""
        del part
        for s in sorted(range(len(self._devices)), key=lambda s: self._devices[s].platform != self._head.platform):
            yield s, self._move(parts[s], self._devices[s])

    def total(self, vectors: Mapping[int, Array], from_head: Any, size: int) -> Array:
        """The sum of the vectors [1, size] of all stacks and the head."""
        del size
        return _sum([self._move(v, self._head) for v in vectors.values()] + [from_head])

    def copy(self, total: Array, s: int) -> Array:
        """A copy of a total on the device of stack `s`, or on the head if `s` is -1."""
        return self._move(total, self._head if s < 0 else self._devices[s])

    def add_up(self, tree: Any) -> Any:
        """Sums arrays over processes, each with its own part and zeros elsewhere; every process gets the sum."""
        return tree


class AmongProcesses:
    """As `AmongDevices`, but among several processes, by collectives over a mesh of the stacks' devices, head first.

    Every process takes part in each collective. `sent` counts collectives as `traffic` does: the full array of each.
    """

    def __init__(self, devices: Sequence[jax.Device], head: jax.Device):
        assert devices[0] == head
        self._devices = devices
        self.sent: Counter[str] = Counter()
        self._known_zeros: dict[tuple, Array] = {}
        self._mine = [s for s, device in enumerate(devices) if device.process_index == jax.process_index()]
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self._shared, everywhere = (NamedSharding(self._mesh, PartitionSpec(*axis)) for axis in ((_AXIS,), ()))
        self._all_gather = jax.jit(lambda x: x, out_shardings=everywhere)
        self._all_reduce = jax.jit(lambda x: jnp.sum(x, axis=0, keepdims=True), out_shardings=everywhere)
        scatter = partial(jax.lax.psum_scatter, axis_name=_AXIS, scatter_dimension=0, tiled=True)
        spec = PartitionSpec(_AXIS)
        self._reduce_scatter = jax.jit(jax.shard_map(scatter, mesh=self._mesh, in_specs=spec, out_specs=spec))

    def _over_mesh(self, parts: Sequence[Array]) -> Array:
        """One array over the mesh from the parts of this process's stacks and those of the others."""
        shape = (len(self._devices) * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._shared, list(parts))

    def joined(self, parts: Sequence[jax.ShapeDtypeStruct]) -> Any:
        return jax.ShapeDtypeStruct((len(self._devices), *parts[0].shape[1:]), parts[0].dtype)

    def together(self, parts: Sequence[Array]) -> Any:
        return jnp.concatenate(parts)

    def gather(self, parts: Mapping[int, Array]) -> Array:
        whole = self._over_mesh(list(parts.values()))
        self.sent.update(messages=1, bytes=whole.nbytes)
        return self._all_gather(whole).addressable_data(0)

    def spread(self, parts: Any, part: jax.ShapeDtypeStruct) -> Iterator[tuple[int, Array]]:
        each = [self._zeros(s, (len(self._devices), *part.shape[1:]), part.dtype) for s in self._mine]
        if parts is not None:
            each[0] = parts
        self.sent.update(messages=1, bytes=each[0].nbytes)
        scattered = self._reduce_scatter(self._over_mesh(each))
        for s in self._mine:
            yield s, self.copy(scattered, s)

    def total(self, vectors: Mapping[int, Array], from_head: Any, size: int) -> Array:
        parts = [vectors[s] if s in vectors else self._zeros(s, (1, size), np.float32) for s in self._mine]
        if from_head is not None:
            parts[0] = _sum([parts[0], from_head])
        self.sent.update(messages=1, bytes=parts[0].nbytes)
        return self._all_reduce(self._over_mesh(parts))

    def copy(self, total: Array, s: int) -> Array:
        device = self._devices[max(s, 0)]
        return next(shard.data for shard in total.addressable_shards if shard.device == device)

    def _zeros(self, s: int, shape: tuple[int, ...], dtype: Any) -> Array:
        key = (s, shape, np.dtype(dtype).name)
        if key not in self._known_zeros:
            self._known_zeros[key] = jax.device_put(np.zeros(shape, dtype), self._devices[s])
        return self._known_zeros[key]

    def add_up(self, tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):  # one message for each
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            whole = self._sum_over_processes(np.concatenate([leaves[i].ravel() for i in places]))
            ends = np.cumsum([leaves[i].size for i in places])
            for i, part in zip(places, np.split(whole, ends[:-1]), strict=True):
                leaves[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, leaves)

    def _sum_over_processes(self, vector: np.ndarray) -> np.ndarray:
        parts = [vector[None], *[np.zeros_like(vector[None])] * (len(self._mine) - 1)]
        placed = [jax.device_put(part, self._devices[s]) for part, s in zip(parts, self._mine, strict=True)]
        return jax.device_get(self._all_reduce(self._over_mesh(placed)).addressable_data(0))[0]

"""Bytes exchanged between the devices of a mesh, counted in advance and in a compiled program."""

import collections
import functools
import math
import re
from collections.abc import Iterator

import jax
from jax.sharding import PartitionSpec

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec


@functools.lru_cache
def exchanged_bytes(spec: ModelSpec, batch_size: int, data: int, lane: int) -> dict[str, int]:
    """Bytes per device of all arrays that a training step on a mesh gathers, scatters and reduces, by collective.

    Over `lane` devices: the class capsules and the decoder's activations are gathered forward and, in the transpose of
    that, their gradients reduced and scattered backward; gradients of what is not sharded are summed. Over `data`: all
    gradients are summed. In addition, scalars: the loss, its two parts, accuracy, and a part of the gradient's norm.
    Equal to what `collective_bytes` finds in the compiled program.
    """
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    layout = jax.tree.leaves(mesh_lib.state_specs(params, lane), is_leaf=lambda x: isinstance(x, PartitionSpec))
    split = [any(spec_of) for spec_of in layout]
    whole = [leaf.size for leaf in jax.tree.leaves(params)]
    sizes = [size // (lane if is_split else 1) for size, is_split in zip(whole, split, strict=True)]
    reduced = 4 + any(split)
    if data > 1:
        reduced += sum(sizes)
    elif lane > 1:
        reduced += sum(size for size, is_split in zip(sizes, split, strict=True) if not is_split)
    gathered = 0
    if lane > 1:
        layers = [size for size in (*spec.decoder, math.prod(spec.image_shape)) if size % lane == 0]
        num_lanes = len(spec.lane_specs)
        gathered = batch_size // data * (num_lanes * spec.num_classes + sum(layers))
    return {"all-gather": 4 * gathered, "reduce-scatter": 4 * gathered, "all-reduce": 4 * reduced}


def collective_bytes(compiled_text: str) -> dict[str, int]:
    """Bytes of all arrays that a compiled program (`compiled.as_text()`) gathers, scatters and reduces, by collective.

    Full arrays are counted: the output of a gather, the input of a scatter. Other collectives are listed if present.
    """
    totals = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for name, size in _collectives(compiled_text):
        totals[name] = totals.get(name, 0) + size
    return totals


def collective_messages(compiled_text: str) -> dict[str, int]:
    """How many arrays a compiled program (`compiled.as_text()`) gathers, scatters and reduces, by kind of collective.

    A collective of several arrays counts as several: on CPUs, each of its arrays is sent by itself.
    """
    return dict(collections.Counter(name for name, _ in _collectives(compiled_text)))


def _collectives(compiled_text: str) -> Iterator[tuple[str, int]]:
    """The kind of collective and the bytes of each array."""
    pattern = r" = (\(.*?\)|\S+) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\((.*)"
    for shapes, name, rest in re.findall(pattern, compiled_text):
        times = 1
        if name == "reduce-scatter":
            group = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
            times = len(group.group(1).split(",")) if group else 1
        for kind, bits, dims in re.findall(r"\b([a-z]+)(\d+)\[([\d,]*)\]", shapes):
            del kind
            yield name, times * (int(bits) // 8) * math.prod(int(n) for n in dims.split(",") if n)

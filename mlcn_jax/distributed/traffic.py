"""Bytes and messages that the devices of a mesh exchange in a training step."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.spec import ModelSpec


@functools.lru_cache
def exchanged_bytes(
    spec: ModelSpec, batch_size: int, data: int, lane: int, exchange_dtype: str = "float32"
) -> dict[str, int]:
    """Bytes per device of all arrays that a training step on a mesh gathers, scatters and reduces, by collective.

    Over `lane` devices: the class capsules and the decoder's activations are gathered forward and, in the transpose of
    that, their gradients reduced and scattered backward, except for columns that get no gradient; gradients of what is
    not sharded are summed. Over `data`: all gradients are summed. In addition, scalars: the loss, its parts, accuracy,
    and a part of the gradient's norm.
    All but these scalars, and columns of lanes that classify alone, are sent in `exchange_dtype`, or in the model's
    dtype if that has fewer bytes, but for gradients of parameters (a CPU sends what is in bfloat16 in float32, unless
    `exchange_dtype` says so). In bfloat16, a scatter is an all-to-all, and a sum an all-to-all and a gather
    (`nn.words`), of as many bytes each.
    """
    size_of = jnp.dtype(exchange_dtype).itemsize
    of_value = min(size_of, spec.dtype.itemsize)
    layout, whole = _layout(spec, lane)
    sizes = [size // (lane if any(axes) else 1) for size, axes in zip(whole, layout, strict=True)]
    gradients = 0
    if data > 1:
        gradients = sum(sizes)
    elif lane > 1:
        gradients = sum(size for size, axes in zip(sizes, layout, strict=True) if not any(axes))
    columns = layers = 0
    if lane > 1:
        columns = batch_size // data * len(spec.lane_specs) * spec.num_classes
        columns *= 4 if spec.classifies_alone.any() else of_value
        layers = of_value * batch_size // data * sum(_gathered_layers(spec, lane))
    reduced = 4 * (4 + bool(spec.classifies_alone.any()) + any(map(any, layout))) + size_of * gradients
    scattered = layers + columns * _columns_get_gradients(spec)
    return {"all-gather": columns + layers, "reduce-scatter": scattered, "all-reduce": reduced}


@functools.lru_cache
def exchanged_messages(
    spec: ModelSpec, data: int, lane: int, parts: int = 1, exchange_dtype: str = "float32"
) -> dict[str, int]:
    """Collectives of a training step on a mesh, by kind, without zeros.

    Gathers and scatters: of columns and of each layer of the decoder that divides, in each of the `parts` of gradient
    accumulation. Sums: one of the gradients of all arrays that are sharded over lanes, if the batch is sharded as well,
    and one of all other gradients, metrics and a part of the norm (`mesh.value_and_grad_over`); these are apart unless
    gradients are sent in float32.
    """
    layout, _ = _layout(spec, lane)
    layers = len(_gathered_layers(spec, lane)) if lane > 1 else 0
    gathers, scatters = layers + (lane > 1), layers + (lane > 1 and _columns_get_gradients(spec))
    split, same = any(map(any, layout)), not all(map(any, layout))
    reduced = (1 + (data > 1 and split) + (same and exchange_dtype != "float32")) if data * lane > 1 else 0
    found = {"all-gather": parts * gathers, "reduce-scatter": parts * scatters, "all-reduce": reduced}
    return {name: count for name, count in found.items() if count}


def _layout(spec: ModelSpec, lane: int) -> tuple[list[PartitionSpec], list[int]]:
    """The sharding over `lane` devices and the size of every array of the parameters."""
    params = param_shapes(spec)
    layout = jax.tree.leaves(mesh_lib.state_specs(params, lane), is_leaf=lambda x: isinstance(x, PartitionSpec))
    return layout, [leaf.size for leaf in jax.tree.leaves(params)]


def _columns_get_gradients(spec: ModelSpec) -> bool:
    """Whether a loss of the joined columns reaches the lanes; lanes that classify alone have their own."""
    return not spec.classifies_alone.all() or spec.couples_lanes


def _gathered_layers(spec: ModelSpec, lane: int) -> list[int]:
    """The sizes of the decoder's layers whose units are sharded."""
    return [size for size in (*spec.decoder, math.prod(spec.image_shape)) if size % lane == 0]

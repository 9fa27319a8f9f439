"""What a computation costs, read from the computation itself."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from mlcn_jax import parallel
from mlcn_jax.config import RunConfig
from mlcn_jax.model import ModelSpec, apply_model, count_parameters, init_params


def describe(config: RunConfig) -> dict[str, Any]:
    """What a configuration builds: lanes, input shape, parameters, and FLOPs of a forward pass per image.

    FLOPs are those of the plain (native) convolution, whatever algorithm runs. The dataset is not read, except
    a folder of images, whose classes must be counted.
    """
    image_shape, num_classes = config.data.shape()
    spec = config.model_spec(image_shape, num_classes)
    counts = count_parameters(spec)
    plain = dataclasses.replace(spec, conv="native")
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    lanes = [str(group.spec) for group in spec.lane_groups for _ in range(group.count)]
    return {
        "model": spec.name,
        "input_shape": list(image_shape),
        "num_classes": num_classes,
        "lanes": lanes,
        "parameters": counts["total"],
        "parameters_per_lane": counts["per_lane"],
        "parameters_decoder": counts["decoder"],
        "forward_flops_per_image": matmul_flops(lambda p, x: apply_model(plain, p, x), params, image),
    }


def matmul_flops(fn: Callable, *args) -> int:
    """Floating-point operations in the matrix products and convolutions of `fn(*args)`.

    One multiplication and one addition count as two. Element-wise work (activations, squash, softmax) is left
    out, as is usual. Counted from the traced program, so a new layer or lane kind needs no formula of its own;
    nothing is compiled or run, and `args` may be `jax.ShapeDtypeStruct`s. Results that nothing reads, such as
    the images' gradient in a training step, cost nothing, as XLA leaves them out.
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return _count(jaxpr, [True] * len(jaxpr.outvars))[0]


def exchanged_bytes(spec: ModelSpec, batch_size: int, data: int, lane: int) -> dict[str, int]:
    """Bytes of all arrays that a training step on a mesh gathers, scatters and reduces, on each device, by collective.

    Over `lane` devices: the class capsules and the decoder's activations, gathered forward and, in the transpose of
    that, their gradients summed and scattered backward; the gradients of what is not split, summed. Over `data`: all
    gradients, summed. And the scalars: loss, its two parts, accuracy, and a share of the gradient's norm for each array
    that is split. Equal to what `collective_bytes` finds in the compiled program.
    """
    if spec.lane_routing == "published" and spec.lane_groups:
        spec = dataclasses.replace(spec, prior_bias=False)  # it has no gradient then (`capsules.single_capsule`)
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    layout = jax.tree.leaves(parallel.state_specs(params, lane), is_leaf=lambda x: isinstance(x, PartitionSpec))
    split = [any(spec_of) for spec_of in layout]
    whole = [leaf.size for leaf in jax.tree.leaves(params)]
    sizes = [size // (lane if is_split else 1) for size, is_split in zip(whole, split, strict=True)]
    reduced = 4 + sum(split)
    if data > 1:
        reduced += sum(sizes)
    elif lane > 1:
        reduced += sum(size for size, is_split in zip(sizes, split, strict=True) if not is_split)
    gathered = 0
    if lane > 1:
        layers = [size for size in (*spec.decoder, math.prod(spec.image_shape)) if size % lane == 0]
        num_lanes = sum(group.count for group in spec.lane_groups)
        gathered = batch_size // data * (num_lanes * spec.num_classes + sum(layers))
    return {"all-gather": 4 * gathered, "reduce-scatter": 4 * gathered, "all-reduce": 4 * reduced}


def collective_bytes(compiled_text: str) -> dict[str, int]:
    """Bytes of all arrays that a compiled program (`compiled.as_text()`) gathers, scatters and reduces, by collective.

    Counted whole: what a gather returns, what a scatter takes. Other collectives are listed where there are any.
    """
    totals = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    pattern = r" = (\(.*?\)|\S+) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\((.*)"
    for shapes, name, rest in re.findall(pattern, compiled_text):
        size = 0
        for kind, bits, dims in re.findall(r"\b([a-z]+)(\d+)\[([\d,]*)\]", shapes):
            del kind
            size += int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n)
        if name == "reduce-scatter":
            group = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
            size *= len(group.group(1).split(",")) if group else 1
        totals[name] = totals.get(name, 0) + size
    return totals


def _count(jaxpr, read: list[bool]) -> tuple[int, list[bool]]:
    """FLOPs of a program of whose outputs only those marked are read, and which of its inputs it then reads."""
    total = 0
    needed = {id(v) for v, is_read in zip(jaxpr.outvars, read, strict=True) if is_read}
    for equation in reversed(jaxpr.eqns):
        outputs = [id(v) in needed for v in equation.outvars]
        if not any(outputs):
            continue
        inputs = [True] * len(equation.invars)
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        elif name == "conv_general_dilated":
            total += _convolution_flops(equation)
        else:
            inner = list(_inner_jaxprs(equation.params))
            is_call = [(len(j.invars), len(j.outvars)) for j in inner] == [(len(inputs), len(outputs))]
            if is_call and name != "scan":
                flops, inputs = _count(inner[0], outputs)
                total += flops
            else:
                repeats = equation.params["length"] if name == "scan" else 1
                total += repeats * sum(_count(j, [True] * len(j.outvars))[0] for j in inner)
        needed |= {id(v) for v, is_read in zip(equation.invars, inputs, strict=True) if is_read}
    return total, [id(v) in needed for v in jaxpr.invars]


def _convolution_flops(equation) -> int:
    """A gradient's convolution, whose operand has zeros between and around its entries, costs as much as forward."""
    image, kernel, out = equation.invars[0].aval, equation.invars[1].aval, equation.outvars[0].aval
    numbers = equation.params["dimension_numbers"]
    axes = zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)
    places = math.prod(min(image.shape[i], out.shape[o]) for i, o in axes)
    batch_and_features = math.prod(out.shape[d] for d in numbers.out_spec[:2])
    return 2 * (kernel.size // kernel.shape[numbers.rhs_spec[0]]) * places * batch_and_features


def _inner_jaxprs(params: dict):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex_core.Jaxpr):
                yield item

"""What a computation costs, read from the computation itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from mlcn_jax.config import RunConfig
from mlcn_jax.model import apply_model, count_parameters, init_params


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

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
    nothing is compiled or run, and `args` may be `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            features = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * (kernel.size // kernel.shape[features]) * equation.outvars[0].aval.size
        else:
            repeats = equation.params.get("length", 1) if name == "scan" else 1
            total += repeats * sum(_count(inner) for inner in _inner_jaxprs(equation.params))
    return total


def _inner_jaxprs(params: dict):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex_core.Jaxpr):
                yield item

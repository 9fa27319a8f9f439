"""Gradient accumulation: a batch in parts, one after the other, with the loss and the gradients of the whole batch."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from mlcn_jax.errors import InputError
from mlcn_jax.nn import tracing
from mlcn_jax.nn.spec import ModelSpec


def check_parts(spec: ModelSpec, batch_size: int, data: int, parts: int) -> None:
    """Raises InputError unless `data` devices can each compute their share of a batch in `parts` equal parts.

    Images that are normalised together stay together.
    """
    share = batch_size // data
    on_each = f", of which each of parallel.data={data} devices has {share}" if data > 1 else ""
    if share % parts:
        raise InputError(
            f"train.accumulation_steps={parts} does not divide train.batch_size={batch_size}{on_each}: use a divisor "
            f"of {share}, such as {max(n for n in range(1, min(parts, share) + 1) if share % n == 0)}"
        )
    group = min(spec.norm_group, batch_size)
    if (share // parts) % group and spec.normalises:
        raise InputError(
            f"model.norm_group={spec.norm_group}: {group} images of a batch are normalised together, but "
            f"train.accumulation_steps={parts} gives parts of {share // parts}: use a divisor of {share // group}, "
            f"the number of groups that a device has, or a divisor of {share // parts} as model.norm_group"
        )


def in_parts(function: Callable, parts: int) -> Callable:
    """Turns `function(params, images, labels, key, draws, soft=())` into one that computes the batch in equal parts.

    Its result `(loss, metrics)` is of means over the batch, and only the loss passes gradients on, into `params`. All
    parts get the same `key`. Where it is differentiated, the gradient of each part is computed right after its loss and
    added to those before, so that the activations of one part are held.

    `optax.MultiSteps` would take a batch per part instead: each step of the run would see other images and random keys,
    and its sums would be part of the optimizer state.
    """
    if parts == 1:
        return function

    def cut(x: Array) -> Array:
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    def mean_of(one_part: Callable, params: dict, images: Array, labels: Array, key: Array, *rest: Any) -> Any:
        def result_of(part):
            return one_part(params, *part[:2], key, *part[2:])

        def add(total, part):
            result = result_of(part)
            return jax.tree.map(lambda a, b: a + b / parts, total, result), None

        split = jax.tree.map(cut, (images, labels, *rest))
        shapes = jax.eval_shape(result_of, jax.tree.map(_first, split))
        return lax.scan(add, jax.tree.map(tracing.zeros, shapes), split)[0]

    @jax.custom_vjp
    def outputs(params, *batch):
        return mean_of(function, params, *batch)

    def forward(params, *batch):
        results, gradients = mean_of(jax.value_and_grad(function, has_aux=True), params, *batch)
        return results, (gradients, (None,) * len(batch))

    def backward(residuals, cotangents):
        gradients, of_batch = residuals
        return jax.tree.map(lambda gradient: gradient * cotangents[0], gradients), *of_batch

    outputs.defvjp(forward, backward)
    return outputs


def _first(x: Array) -> Array:
    return x[0]

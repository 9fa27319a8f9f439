"""The optimizers of a run, built from optax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from mlcn_jax.nn import resnet
from mlcn_jax.settings import TrainSettings

_FIRST_RATE = 0.2  # of the peak, at the start of the warm-up
_LOOKAHEAD_STEPS = 5
_SCHEDULES = (optax.ScaleByScheduleState.__name__,)  # optimizer states that count steps for rates
_NEWTON_SCHULZ_STEPS = 3


def optimizer_of(settings: TrainSettings, steps_per_epoch: int) -> optax.GradientTransformation:
    """The optimizer of a run.

    * `adam`: as published, its rate multiplied by `lr_decay` after each epoch; epsilon is 1e-7, the default of Keras,
      with which the published results were made.
    * `adamw`: with warm-up and cosine decay.
    * `sgd`, `muon`: for residual lanes; rates rise from a fifth to their peak in the warm-up, then fall linearly to
      zero. The convolutions are trained by Nesterov SGD, or by Muon with kernels kept at constant norm; biases of the
      normalisation, the head, and the whitening's bias by Nesterov SGD with rates of their own; all other parameters,
      such as the decoder's and those of published lanes, by AdamW with a peak rate of 0.001.

    Muon's kernels, of constant norm, and the whitening's bias have no weight decay.

    Source: Jordan 2024, arXiv 2404.00498, and the Muon variant of its code, for `sgd` and `muon`; Zhang et al. 2019,
    arXiv 1907.08610, for Lookahead.
    """
    name, rate, decay = settings.optimizer, settings.learning_rate, settings.weight_decay
    num_steps = settings.num_epochs * steps_per_epoch
    warmup_steps = round(min(settings.warmup_epochs * steps_per_epoch, num_steps))
    if warmup_steps >= num_steps:
        warmup_steps = num_steps // 2
    if name == "adam":
        optimizer = optax.adam(_staircase(rate, steps_per_epoch, settings.lr_decay), eps=1e-7)
    elif name == "adamw":
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warmup_steps, num_steps)
        optimizer = optax.adamw(schedule, weight_decay=decay)
    else:
        shape = _triangle(warmup_steps, num_steps)
        whitening = _falling(settings.whitening_epochs * steps_per_epoch)
        sgd = _nesterov(rate, shape, decay, settings.momentum)
        parts = {
            "kernel": sgd if name == "sgd" else _muon(rate, shape, settings.momentum),
            "bias": _nesterov(settings.bias_learning_rate, shape, decay),
            "head": _nesterov(settings.head_learning_rate, shape, decay),
            "whitening": _nesterov(settings.bias_learning_rate, whitening),
            "frozen": optax.set_to_zero(),
            "other": optax.adamw(lambda step: _OTHER_RATE * shape(step), weight_decay=1e-4),
        }
        optimizer = optax.partition(parts, lambda params: jax.tree_util.tree_map_with_path(_part, params))
    if settings.lookahead:
        optimizer = _lookahead(optimizer, lambda step: settings.lookahead * (step / float(num_steps)) ** 3)
    optimizer = _without_frozen(optimizer)
    if settings.clip_norm:
        return optax.chain(_clip_by_global_norm(settings.clip_norm), optimizer)
    return optimizer


_OTHER_RATE = 1e-3
_MANY_STEPS = 1e12  # over which nothing falls


def _clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """As `optax.clip_by_global_norm`, but `update` may be given the `norm`.

    Of gradients that are sharded over devices, optax's own norm would take a sum over them for each array.
    """

    def update(updates: optax.Updates, state: optax.OptState, params: Any = None, *, norm: Any = None, **more: Any):
        del params, more
        norm = optax.tree.norm(updates) if norm is None else norm
        return jax.tree.map(lambda x: jnp.where(norm < most, x, x / norm.astype(x.dtype) * most), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def at_step(state: optax.OptState, step: int) -> optax.OptState:
    """An optimizer state with the step counts of schedules set to `step`; counts of moments are kept."""

    def schedules(path: tuple, value: Any) -> bool:
        del value
        return getattr(path[-1], "tuple_name", "") in _SCHEDULES

    if not optax.tree.get_all_with_path(state, "count", schedules):
        return state
    return optax.tree.set(state, schedules, count=jnp.asarray(step, jnp.int32))


def _part(path: tuple, leaf: Any) -> str:
    """The part of the optimizer that trains a parameter, given its path in the tree of parameters."""
    del leaf
    names = [key.key for key in path]
    if "trunk" in names:
        *_, layer, last = names
        if layer == resnet.FROZEN:
            return "whitening" if last == "bias" else "frozen"
        return "bias" if last == "bias" else "kernel"
    return "head" if "head" in names else "other"


def _without_frozen(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Leaves frozen parameters exactly as they are: neither decay nor the rounding of a mean changes them."""

    def still(path: tuple, update: Array) -> Array:
        return jnp.zeros_like(update) if _part(path, update) == "frozen" else update

    def update(updates: optax.Updates, state: optax.OptState, params: Any = None):
        updates, state = inner.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(still, updates), state

    return optax.GradientTransformation(inner.init, update)


def _staircase(rate: float, steps_per_epoch: int, decay: float) -> Callable[[Array], Array]:
    """As `optax.exponential_decay`, whose division rounds: at some steps it counts an epoch too few."""
    return lambda step: rate * jnp.power(decay, jnp.asarray(step // steps_per_epoch, jnp.float32))


def _triangle(warmup_steps: int, num_steps: int) -> Callable[[Array], Array]:
    def shape(step):
        rising = _FIRST_RATE + (1 - _FIRST_RATE) * step / float(max(1, warmup_steps))
        falling = (float(num_steps) - step) / float(max(1, num_steps - warmup_steps))
        return jnp.clip(jnp.minimum(rising, falling) if warmup_steps else falling, 0.0)

    return shape


def _falling(num_steps: float) -> Callable[[Array], Array]:
    num_steps = float(round(min(num_steps, _MANY_STEPS)))

    def shape(step):
        return jnp.clip(1 - step / num_steps, 0.0) if num_steps else jnp.zeros(())

    return shape


def _nesterov(
    rate: float, shape: Callable, weight_decay: float = 0.0, momentum: float = 0.85
) -> optax.GradientTransformation:
    """Nesterov SGD; the decay is a part of the gradient, so that momentum multiplies it, as in PyTorch."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay / rate if rate else 0.0),
        optax.trace(momentum, nesterov=True),
        optax.scale_by_learning_rate(lambda step: rate * shape(step)),
    )


def _muon(rate: float, shape: Callable, momentum: float) -> optax.GradientTransformation:
    """Muon for stacked kernels [lanes, h, w, in, out], each lane a matrix of its own, and norms that stay as they are.

    A normalisation follows each kernel, so its norm only scales the effective rate.
    """

    def matrices(params):
        return jax.tree.map(lambda _: MuonDimensionNumbers((1, 2, 3), (4,)), params)

    return optax.chain(
        scale_by_muon(ns_steps=_NEWTON_SCHULZ_STEPS, beta=momentum, weight_dimension_numbers=matrices),
        optax.scale_by_learning_rate(lambda step: rate * shape(step)),
        optax.stateless_with_tree_map(_keep_norm),
    )


def _keep_norm(update: Array, kernel: Array) -> Array:
    """The update after which each lane's kernel [lanes, h, w, in, out] has the norm of its start, sqrt(out)."""
    moved = kernel + update
    norm = jnp.sqrt(jnp.sum(jnp.square(moved), axis=(1, 2, 3, 4), keepdims=True))
    return moved * (jnp.sqrt(float(kernel.shape[-1])) / norm) - kernel


class _Lookahead(NamedTuple):
    step: Array
    slow: optax.Params
    inner: optax.OptState


def _lookahead(inner: optax.GradientTransformation, weight: Callable) -> optax.GradientTransformation:
    """Lookahead whose slow weights have a weight that grows: every few steps, slow and fast meet at their mean.

    `optax.lookahead` wraps the parameters themselves, which checkpoints and scores would all have to know.
    """

    def init(params):
        return _Lookahead(jnp.zeros((), jnp.int32), params, inner.init(params))

    def update(grads, state, params):
        updates, inner_state = inner.update(grads, state.inner, params)
        step = state.step + 1
        due, kept = step % _LOOKAHEAD_STEPS == 0, weight(step)
        slow = jax.tree.map(
            lambda s, p, u: jnp.where(due, kept * s + (1 - kept) * (p + u), s), state.slow, params, updates
        )
        updates = jax.tree.map(lambda s, p, u: jnp.where(due, s - p, u), slow, params, updates)
        return updates, _Lookahead(step, slow, inner_state)

    return optax.GradientTransformation(init, update)

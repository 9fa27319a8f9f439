"""Outputs of all lanes in training, and the loss of lanes that classify alone, each with an immediate backward pass.

The loss of such a lane needs no other lane, so its gradient is computed right after its forward pass: the activations
of only one lane are held at a time.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mlcn_jax.nn import losses
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.lanes import LaneGroup, LaneSettings, apply_group, apply_lane, in_one_loop, lanes_one_by_one
from mlcn_jax.nn.model import gather_lanes, lane_cross_entropy, num_shares
from mlcn_jax.nn.model import lane_outputs as model_outputs
from mlcn_jax.nn.remat import scan_lanes
from mlcn_jax.nn.spec import ModelSpec

View = Callable[[Array, Any, Array], Array]
_TURNS = 4  # in which the lanes of a group are computed again: more are slower, fewer hold more (benchmarks/remat.py)


def _as_they_are(images: Array, draws: Any, lane: Array) -> Array:
    del draws, lane
    return images


def outputs_and_loss(
    spec: ModelSpec,
    encoder: dict,
    images: Float[Array, "batch h w channels"],
    labels: Int[Array, " batch"],
    draws: Any = (),
    soft: Any = (),
    *,
    view: View = _as_they_are,
    distillation: Distillation | None = None,
    seen_by_teacher: View = _as_they_are,
    lane_axis: str = "",
) -> tuple[Float[Array, "batch classes lanes"], Array]:
    """Outputs of the lanes, and the loss of those that classify alone: the mean over images, summed over lanes.

    No gradient flows into the outputs of lanes that classify alone unless `spec.ensemble_weight` or
    `spec.decoder_gradient` asks for it: then all lanes' activations are held.

    Args:
      spec: the model, or the part of it whose lanes are computed here.
      encoder: parameters of the lanes; on a mesh, this device's share.
      images: pixels in [0, 1].
      labels: classes.
      draws: a tree of arrays, passed to `view`.
      soft: the teacher's probabilities, [batch, classes], if they are the same for all lanes; otherwise the teacher is
        evaluated for each lane.
      view: `(images, draws, index of a lane in spec) -> images` as a lane that classifies alone sees them.
      distillation: how lanes learn from a teacher, if they do; not with `spec.ensemble_weight`.
      seen_by_teacher: as `view`, for the images that the teacher sees for each lane.
      lane_axis: as for `model.encode`; on a mesh, the loss is that of all lanes once it is averaged over the axis.
    """
    batch = (images, labels, draws, soft)
    rule = _Rule(spec.label_smoothing, view, distillation, seen_by_teacher)
    if not spec.lane_groups:
        return model_outputs(spec, encoder, images, lane_axis), jnp.zeros(())
    coupled = spec.couples_lanes
    shares = num_shares(lane_axis)
    columns, loss, first = [], jnp.zeros(()), 0
    for whole in spec.lane_groups:
        group = LaneGroup(whole.spec, whole.count // shares)
        params = encoder[group.name]
        ids = jnp.arange(first, first + whole.count)
        first += whole.count
        if lane_axis:
            ids = lax.dynamic_slice_in_dim(ids, lax.axis_index(lane_axis) * group.count, group.count)
        if not group.kind.classifies:
            columns.append(_joint_columns(spec, group, params, images))
            continue
        if coupled:
            lane = partial(_lane, group, spec.lane_settings, rule, batch=batch)
            if spec.remat == "none" and not in_one_loop():
                results = [lane(p, i) for p, i in _each(params, ids, group.count)]
                column, own = (jnp.stack(parts, axis=-1) for parts in zip(*results, strict=True))
            else:
                each, own = scan_lanes(lane, (params, ids), spec.remat)
                column = jnp.moveaxis(each, 0, -1)
            if distillation is not None:
                loss = loss + shares * jnp.sum(own)
        else:
            column, own = losses_of_group(group, spec.lane_settings, rule)(params, ids, batch)
            column, loss = lax.stop_gradient(column), loss + shares * jnp.sum(own)
        columns.append(column)
    outputs = gather_lanes(spec, columns, lane_axis)
    if coupled and distillation is None:
        loss = jnp.mean(lane_cross_entropy(spec, outputs, labels))
    return outputs, loss


def _joint_columns(
    spec: ModelSpec, group: LaneGroup, params: dict, images: Float[Array, "batch h w channels"]
) -> Float[Array, "batch classes lanes"]:
    """Outputs of lanes that learn from their joint loss, with the activations that `spec.remat` keeps."""
    if spec.remat == "none":
        return apply_group(params, group, spec.lane_settings, images)

    def column(lane_params: dict) -> Array:
        return apply_lane(lane_params, group.spec, spec.lane_settings, images)

    at_once = 1 if group.kind.normalises else max(1, group.count // _TURNS)
    return jnp.moveaxis(scan_lanes(column, (params,), spec.remat, at_once), 0, -1)


def _each(params: dict, ids: Array, count: int) -> list[tuple[dict, Array]]:
    return [(jax.tree.map(lambda x, i=i: x[i], params), ids[i]) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What a lane that classifies alone sees and learns; as for `outputs_and_loss`."""

    smoothing: float = 0.0
    view: View = _as_they_are
    distillation: Distillation | None = None
    seen_by_teacher: View = _as_they_are

    def loss(self, column: Array, lane: Array, batch: tuple) -> Array:
        """Mean loss of a lane from its log-probabilities; `lane` is its index in the model."""
        images, labels, draws, soft = batch
        if self.distillation is None:
            return jnp.mean(losses.cross_entropy(column, labels, self.smoothing))
        if isinstance(soft, tuple):
            soft = self.distillation.probabilities(self.seen_by_teacher(images, draws, lane))
        return jnp.mean(self.distillation.cross_entropy(column, labels, self.smoothing, soft))


def _lane(
    group: LaneGroup,
    settings: LaneSettings,
    rule: _Rule,
    params: dict,
    lane: Array,
    batch: tuple,
) -> tuple[Float[Array, "batch classes"], Array]:
    """One lane's log-probabilities and its mean loss; `lane` is its index in the model."""
    images, _, draws, _ = batch
    one = LaneGroup(group.spec, 1)
    stacked = jax.tree.map(lambda x: x[None], params)
    column = apply_group(stacked, one, settings, rule.view(images, draws, lane))[..., 0]
    return column, rule.loss(column, lane, batch)


_PLAIN = _Rule()


def losses_of_group(
    group: LaneGroup, settings: LaneSettings, rule: _Rule = _PLAIN
) -> Callable[[dict, Array, tuple], tuple[Array, Array]]:
    """The function `(params, ids, (images, labels, draws, soft)) -> (outputs, losses)` of lanes that classify alone.

    Outputs [batch, classes, lanes] are log-probabilities, losses [lanes] mean cross-entropies. Where it is
    differentiated, each lane's gradient is computed right after its outputs; only the losses pass gradients on.
    """
    lane = partial(_lane, group, settings, rule)

    def run(function: Callable, params: dict, ids: Array, batch: tuple) -> list:
        def of_lane(one: dict, images: Array) -> Any:
            return function(one["params"], one["id"], (images, *batch[1:]))

        return lanes_one_by_one(of_lane, {"params": params, "id": ids}, batch[0], group.count)

    @jax.custom_vjp
    def outputs(params, ids, batch):
        columns, own = zip(*run(lane, params, ids, batch), strict=True)
        return jnp.stack(columns, axis=-1), jnp.stack(own)

    def forward(params, ids, batch):
        def with_gradient(params, lane_id, batch):
            def loss(params):
                column, own = lane(params, lane_id, batch)
                return own, column

            (own, column), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            return column, own, gradient

        columns, own, gradients = zip(*run(with_gradient, params, ids, batch), strict=True)
        together = jax.tree.map(lambda *lanes: jnp.stack(lanes), *gradients)
        return (jnp.stack(columns, axis=-1), jnp.stack(own)), together

    def backward(gradients, cotangents):
        def scaled(gradient):
            return gradient * jnp.expand_dims(cotangents[1], tuple(range(1, gradient.ndim)))

        return jax.tree.map(scaled, gradients), None, None

    outputs.defvjp(forward, backward)
    return outputs

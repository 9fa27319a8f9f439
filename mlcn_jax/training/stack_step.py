"""The programs of a step in stacks of lanes: functions that each device compiles, and what they pass to one another."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from mlcn_jax.data import batches
from mlcn_jax.distributed import messages
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.lane_losses import outputs_and_loss
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.training import evaluate
from mlcn_jax.training.stack_programs import LaneByLane, Stack, save, whole
from mlcn_jax.training.step import TrainState, head_loss, lane_options, make_input, soft_targets

METRICS = ("cross_entropy", "loss", "margin", "reconstruction", "accuracy")
FROM_STACK = 2  # scalars: loss of lanes that classify alone; squared norm of this stack's previous gradient
FROM_HEAD = len(METRICS) + 1  # scalars: the metrics, and the squared norm of the entire previous gradient

Columns = Sequence[jax.ShapeDtypeStruct]


class StackStep:
    """The functions of a step, to be compiled for the devices of some stacks.

    Columns and their gradients are [1, batch, classes, lanes]. Squares of norms are [1, 1].

    Args:
      spec, optimizer, stacks, reconstruction_weight, seed, augmentation, distillation, exchange_dtype, clip_norm: as
        for `stacks_runner.StacksRunner`.
      alike: whether columns are padded to the lanes of the largest stack.
    """

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: optax.GradientTransformation,
        stacks: Sequence[Stack],
        *,
        reconstruction_weight: float,
        seed: int,
        augmentation: batches.Augmentation,
        distillation: Distillation | None,
        exchange_dtype: str,
        clip_norm: float,
        alike: bool,
    ):
        self._spec, self._optimizer, self._stacks, self._clip_norm = spec, optimizer, stacks, clip_norm
        self._weight, self._augmentation, self._distillation = reconstruction_weight, augmentation, distillation
        self._prepare = make_input(spec, seed, augmentation)
        self.sum_shapes = evaluate.sum_shapes(spec.num_classes, len(spec.lane_specs))
        self.specs = [spec_of(spec, stack.lanes) for stack in stacks]
        most = max(len(stack.lanes) for stack in stacks)
        self.widths = [most if alike else len(stack.lanes) for stack in stacks]
        self.order = list(itertools.chain.from_iterable(stack.lanes for stack in stacks))
        self._place_of = np.argsort(self.order)  # of each lane in the concatenated columns of all stacks
        computed_in = np.dtype(spec.dtype).name
        self.dtype = exchange_dtype if computed_in == "float32" else computed_in
        if spec.classifies_alone.any():
            self.dtype = "float32"

    def forward(self, s: int, size: int) -> Callable:
        """The message to the head, and what `backward` needs: for lanes that classify alone, their gradients.

        The places of the stack's lanes in the model are an argument, so that models share the program.
        """
        augmentation = dataclasses.replace(self._augmentation, size=size)
        alone = self.specs[s].classifies_alone.any()

        def forward(params, step, square, places, images, labels, soft):
            pixels, _, draws = self._prepare(step, images, places)
            own = self.specs[s]
            if alone:
                soft = soft_targets(self._distillation, augmentation, pixels, soft)

            def outputs(encoder):
                v, loss = outputs_and_loss(
                    own,
                    encoder,
                    pixels,
                    labels,
                    draws,
                    soft,
                    **lane_options(augmentation, self._distillation),
                )
                return self.padded(s, v), loss

            vjp: Any
            again = own.remat != "none" and not alone
            policy = jax.checkpoint_policies.nothing_saveable if again else save
            saving = jax.checkpoint(outputs, policy=policy, prevent_cse=False)
            (columns, loss), vjp = jax.vjp(saving, params["encoder"])
            vjp.args_res = [None]  # the parameters, which are passed to `backward`
            numbers = jnp.concatenate([loss.reshape(1), square[0]])
            return messages.pack(columns, numbers, self.dtype), self._lane_by_lane(s, vjp)

        return forward

    def _lane_by_lane(self, s: int, vjp: Any) -> Any:
        """What `backward` needs, split by lane if lanes run in turn (`conv_spectral.lanes_in_turn`)."""
        counts = {group.count for group in self.specs[s].lane_groups}

        def cut(x):
            by_lane = self._stacks[s].device.platform == "cpu" and x.ndim > 2 and x.shape[0] in counts
            return LaneByLane([x[i] for i in range(x.shape[0])]) if by_lane else x

        return jax.tree.map(cut, vjp)

    def padded(self, s: int, v: Array) -> Array:
        """A stack's outputs [batch, classes, lanes] as its columns, of the type of all lanes' together."""
        v = v.astype(jnp.float32) if self._spec.classifies_alone.any() else v
        return jnp.pad(v, ((0, 0), (0, 0), (0, self.widths[s] - v.shape[-1])))[None]

    def backward(self, columns: jax.ShapeDtypeStruct) -> Callable:
        """The gradients, the square of their norm, and the head's numbers, from the head's message."""

        def backward(state, vjp, message):
            vjp = jax.tree.map(whole, vjp, is_leaf=lambda x: isinstance(x, LaneByLane))
            vjp.args_res = [state.params["encoder"]]
            dcolumns, numbers = messages.unpack(message, columns.shape, self.dtype)
            (grads,) = vjp((dcolumns.astype(columns.dtype), jnp.ones(())))
            grads = {"encoder": grads}
            return grads, _square(grads), numbers

        return backward

    def update(self, state, grads, total=None):
        """The new state; `total` is the sum of the squares of all norms, needed only for clipping."""
        if total is not None:
            scale = jnp.minimum(1.0, self._clip_norm / jnp.sqrt(total[0, 0]))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, optimizer_state = self._optimizer.update(grads, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state)

    def join(self, columns):
        """Joins the columns of all stacks to class capsules."""
        counts = [len(stack.lanes) for stack in self._stacks]
        v = jnp.concatenate([columns[s][..., :count] for s, count in enumerate(counts)], axis=-1)
        return v.reshape(v.shape[-3:])[..., self._place_of]

    def read(self, columns: Columns, received):
        """Class capsules, and the sums of the numbers, from the messages of all stacks."""
        parts = [messages.unpack(received[s], like.shape, self.dtype) for s, like in enumerate(columns)]
        values = [value.astype(like.dtype) for (value, _), like in zip(parts, columns, strict=True)]
        return self.join(values), sum(numbers for _, numbers in parts)

    def cut(self, columns: Columns, dv, numbers) -> list[Array]:
        """The message to each stack: its part of the class capsules' gradients, and the numbers for all."""
        (dcolumns,) = jax.linear_transpose(self.join, columns)(dv)
        return [messages.pack(part, numbers, self.dtype) for part in dcolumns]

    def head_step(self, state, v, from_stacks, square, images, labels, soft):
        """Gradients of decoder and class capsules, numbers for all stacks, and the decoder gradients' squared norm."""
        pixels, lane_key, _ = self._prepare(state.step, images)
        target = None
        if self._distillation is not None and not self._spec.classifies_alone.all():
            soft = soft_targets(self._distillation, self._augmentation, pixels, soft)
            target = self._distillation.target(labels, soft)

        def loss_fn(decoder, v):
            return head_loss(self._spec, self._weight, decoder, v, pixels, labels, lane_key, target=target)

        with_gradients = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (loss, metrics), (grads, dv) = with_gradients(state.params["decoder"], v)
        metrics["loss"] = loss + from_stacks[0]
        numbers = [metrics.get(name, jnp.zeros(())) for name in METRICS] + [square[0, 0] + from_stacks[1]]
        grads = {"decoder": grads}
        return grads, dv, jnp.stack(numbers), _square(grads)

    def head_sums(self, params, outputs, images, labels, mask):
        """All sums of `evaluate.head_sums`, as one row [1, numbers]."""
        pixels = batches.to_pixels(images)
        sums = evaluate.head_sums(self._spec, self._weight, params["decoder"], outputs, pixels, labels, mask)
        return jnp.concatenate([sums[name].reshape(-1) for name in self.sum_shapes])[None]


def _square(grads: dict) -> Array:
    return optax.tree.norm(grads, squared=True).reshape(1, 1)

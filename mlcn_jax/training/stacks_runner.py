"""Unequal lanes over devices: each device computes its own stack of lanes; only columns and gradients are exchanged.

A step: every device computes the columns of its lanes from the batch; one device, the head, joins them to class
capsules, computes the loss, updates the decoder and computes the columns' gradients; every device then updates its
lanes with its part of them. Each device has its own programs, dispatched without waiting for one another, so devices
may differ in kind, and holds only its lanes' parameters and optimizer state. In one process, columns are copied between
devices; several processes gather and scatter them in small collectives.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from mlcn_jax import host
from mlcn_jax.data import batches, datasets
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.distributed import exchange
from mlcn_jax.errors import InputError
from mlcn_jax.nn.calibration import group_statistics, join_statistics, param_shapes, with_statistics
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.lane_losses import outputs_and_loss
from mlcn_jax.nn.model import lane_outputs
from mlcn_jax.nn.resnet import STATISTICS
from mlcn_jax.nn.spec import ModelSpec, rows_of, spec_of
from mlcn_jax.training import evaluate
from mlcn_jax.training.stack_programs import LaneByLane, Stack, group_of, lower, save, whole
from mlcn_jax.training.step import TrainState, head_loss, lane_options, make_input, soft_targets

_METRICS = ("loss", "margin", "reconstruction", "accuracy", "squares")

_PLAIN = batches.Augmentation()


class StacksRunner:
    """A `runner.Runner` for lanes in stacks.

    Args:
      spec, optimizer, reconstruction_weight, seed, augmentation, distillation, accumulation_steps: as for
        `step.make_train_step`; only one part is supported.
      stacks: the lanes of each device; a device of this process may have several.
      head: the device that computes the loss and the decoder.
      clip_norm: the optimizer's; 0 for none.
      programs: compiled programs of other runners, to reuse and to add to. The runners may differ only in their
        lanes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        optimizer: optax.GradientTransformation,
        stacks: Sequence[Stack],
        head: jax.Device,
        *,
        reconstruction_weight: float,
        seed: int,
        augmentation: batches.Augmentation = _PLAIN,
        distillation: Distillation | None = None,
        accumulation_steps: int = 1,
        clip_norm: float = 0.0,
        programs: dict[tuple, Any] | None = None,
    ):
        self._spec, self._optimizer, self._stacks, self._clip_norm = spec, optimizer, stacks, clip_norm
        self._sum_shapes = evaluate.sum_shapes(spec.num_classes)
        self._metrics = (*(("cross_entropy",) if spec.classifies_alone.any() else ()), *_METRICS)
        self._weight = reconstruction_weight
        if spec.ensemble_weight or (spec.decoder_gradient == "all" and spec.classifies_alone.any()):
            raise InputError(
                "parallel.plan=stacks trains lanes that classify alone without waiting for the others, so it cannot "
                "share their gradients: leave model.ensemble_weight at 0 and model.decoder_gradient at auto, or use "
                "parallel.plan=mesh"
            )
        if accumulation_steps > 1:
            raise InputError(
                f"train.accumulation_steps={accumulation_steps} with parallel.plan=stacks, which computes a batch at "
                "once: leave it at 1 and use model.remat=full, more devices or a smaller batch, or parallel.plan=mesh"
            )
        self._augmentation, self._distillation = augmentation, distillation
        self._prepare = make_input(spec, seed, augmentation)
        self._specs = [spec_of(spec, stack.lanes) for stack in stacks]
        alike = jax.process_count() > 1  # as collectives require
        most = max(len(stack.lanes) for stack in stacks)
        self._widths = [most if alike else len(stack.lanes) for stack in stacks]
        order = list(itertools.chain.from_iterable(stack.lanes for stack in stacks))
        self._place_of = np.argsort(order)  # of each lane in the concatenated columns of all stacks
        self._mine = [s for s, stack in enumerate(stacks) if stack.device.process_index == jax.process_index()]
        self._is_head = head.process_index == jax.process_index()
        self._head = head
        among = exchange.AmongProcesses if jax.process_count() > 1 else exchange.AmongDevices
        self._exchange = among([stack.device for stack in stacks], head)
        self._states: dict[int, TrainState] = {}
        self._programs = {} if programs is None else programs
        self._keys = [
            (stack.device, own.lanes, width)
            for stack, own, width in zip(stacks, self._specs, self._widths, strict=True)
        ]
        self._model_key = (head, *self._widths, "of", *(len(stack.lanes) for stack in stacks), "order", *order)
        self._head_key = (head, len(order))

    # The programs. Columns and their gradients are [1, batch, classes, lanes]; among processes they are padded to the
    # lanes of the largest stack.

    def _forward(self, s: int, size: int) -> Callable:
        """Columns, and what `_backward` needs; of lanes that classify alone, their gradients already and their loss."""
        augmentation = dataclasses.replace(self._augmentation, size=size)
        alone = self._specs[s].classifies_alone.any()

        def forward(params, step, images, labels, soft):
            pixels, _, draws = self._prepare(step, images)
            own = self._specs[s]
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
                    lane_ids=self._stacks[s].lanes,
                )
                return self._padded(s, v), loss

            vjp: Any
            again = own.remat != "none" and not alone
            policy = jax.checkpoint_policies.nothing_saveable if again else save
            saving = jax.checkpoint(outputs, policy=policy, prevent_cse=False)
            (columns, loss), vjp = jax.vjp(saving, params["encoder"])
            vjp.args_res = [None]  # the parameters, which are passed to `backward`
            return columns, (self._lane_by_lane(s, vjp), loss)

        return forward

    def _lane_by_lane(self, s: int, vjp: Any) -> Any:
        """What `backward` needs, split by lane if lanes run in turn (`conv_spectral.lanes_in_turn`)."""
        counts = {group.count for group in self._specs[s].lane_groups}

        def cut(x):
            by_lane = self._stacks[s].device.platform == "cpu" and x.ndim > 2 and x.shape[0] in counts
            return LaneByLane([x[i] for i in range(x.shape[0])]) if by_lane else x

        return jax.tree.map(cut, vjp)

    def _padded(self, s: int, v: Array) -> Array:
        """A stack's outputs [batch, classes, lanes] as its columns."""
        return jnp.pad(v, ((0, 0), (0, 0), (0, self._widths[s] - v.shape[-1])))[None]

    def _backward(self, state, from_forward, dcolumns):
        vjp, loss = from_forward
        vjp = jax.tree.map(whole, vjp, is_leaf=lambda x: isinstance(x, LaneByLane))
        vjp.args_res = [state.params["encoder"]]
        (grads,) = vjp((dcolumns, jnp.ones(())))
        grads = {"encoder": grads}
        return grads, self._vector(loss=loss, squares=optax.tree.norm(grads, squared=True))

    def _update(self, state, grads, total=None):
        """The new state; `total` is the sum of all `_vector`s, needed only for clipping."""
        if total is not None:
            scale = jnp.minimum(1.0, self._clip_norm / jnp.sqrt(total[0, -1]))
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, optimizer_state = self._optimizer.update(grads, state.optimizer, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state)

    def _join(self, columns):
        """Joins the columns of all stacks to class capsules."""
        counts = [len(stack.lanes) for stack in self._stacks]
        v = jnp.concatenate([columns[s][..., :count] for s, count in enumerate(counts)], axis=-1)
        return v.reshape(v.shape[-3:])[..., self._place_of]

    def _cut(self, joined, dv):
        """Splits the class capsules' gradients into those of the columns of all stacks."""
        return jax.linear_transpose(self._join, joined)(dv)[0]

    def _head_step(self, state, v, images, labels, soft):
        pixels, lane_key, _ = self._prepare(state.step, images)
        target = None
        if self._distillation is not None and not self._spec.classifies_alone.all():
            soft = soft_targets(self._distillation, self._augmentation, pixels, soft)
            target = self._distillation.target(labels, soft)

        def loss_fn(decoder, v):
            return head_loss(self._spec, self._weight, decoder, v, pixels, labels, lane_key, target=target)

        with_gradients = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        (loss, metrics), (grads, dv) = with_gradients(state.params["decoder"], v)
        grads = {"decoder": grads}
        return grads, dv, self._vector(loss=loss, squares=optax.tree.norm(grads, squared=True), **metrics)

    def _head_sums(self, params, outputs, images, labels, mask):
        pixels = batches.to_pixels(images)
        sums = evaluate.head_sums(self._spec, self._weight, params["decoder"], outputs, pixels, labels, mask)
        return jnp.concatenate([sums[name].reshape(-1) for name in self._sum_shapes])[None]

    def _vector(self, **metrics) -> Array:
        """Some of the metrics, or a stack's contribution to them, [1, metrics]."""
        return jnp.stack([metrics.get(name, jnp.zeros(())) for name in self._metrics])[None]

    # The methods of a runner.

    def start(self, state: TrainState) -> None:
        """Copies a full state, wherever it is, to the devices."""
        self._shapes = jax.eval_shape(lambda x: x, state)
        encoder = state.params["encoder"]
        for s in self._mine:
            rows = rows_of(self._spec, self._stacks[s].lanes)
            share = self._share({"encoder": {name: encoder[name] for name in rows}}, state, rows)
            self._states[s] = jax.device_put(share, self._stacks[s].device)
        self._statistics: dict[int, dict] = {s: {} for s in self._mine}
        if self._is_head:
            self._head_state = jax.device_put(self._share({"decoder": state.params["decoder"]}, state, {}), self._head)

    def _share(self, params: dict, state: TrainState, rows: Mapping[str, np.ndarray]) -> TrainState:
        """The part of a state for some of the parameters: entire arrays, or the rows of a group."""
        whole = dict(jax.tree_util.tree_leaves_with_path(state))

        def pick(path, _):
            group = group_of(path)
            return np.asarray(whole[path])[rows[group]] if group else np.array(whole[path])  # a copy: it is donated

        mine = TrainState(state.step, params, jax.eval_shape(self._optimizer.init, params))
        return jax.tree_util.tree_map_with_path(pick, mine)

    def compile(self, images: np.ndarray, labels: np.ndarray, soft: Any = (), *, sizes: Sequence[int] = (0,)) -> float:
        """Compiles the step for batches of this shape and each of `sizes`; returns the seconds taken."""
        started = time.monotonic()
        pixels = jax.ShapeDtypeStruct(images.shape, jnp.float32)
        # All lanes, so that every process records the convolution algorithms of all.
        v = jax.eval_shape(lambda e, x: lane_outputs(self._spec, e, x), self._shapes.params["encoder"], pixels)
        columns = [jax.ShapeDtypeStruct((1, *v.shape[:2], width), v.dtype) for width in self._widths]
        total = (jax.ShapeDtypeStruct((1, len(self._metrics)), jnp.float32),) if self._clip_norm else ()
        lowered: dict[tuple, Any] = {}
        for s in self._mine:
            device, state, key = self._stacks[s].device, self._states[s], self._keys[s]
            if all(("forward", *key, size) in self._programs for size in sizes):
                continue
            for size in dict.fromkeys(sizes):
                forward = lower(device, self._forward(s, size), (), state.params, state.step, images, labels, soft)
                backward = lower(device, self._backward, (), state, forward.out_info[1], columns[s])
                lowered |= {("forward", *key, size): forward, ("backward", *key, size): backward}
            lowered["update", *key] = lower(device, self._update, (0,), state, backward.out_info[0], *total)
        if self._is_head and ("join", *self._model_key) not in self._programs:
            joined = self._exchange.joined(columns)
            lowered["join", *self._model_key] = lower(self._head, self._join, (), joined)
            lowered["cut", *self._model_key] = lower(self._head, partial(self._cut, joined), (), v)
        if self._is_head and ("head", *self._head_key) not in self._programs:
            head = lower(self._head, self._head_step, (), self._head_state, v, images, labels, soft)
            update = lower(self._head, self._update, (0,), self._head_state, head.out_info[0], *total)
            lowered |= {("head", *self._head_key): head, ("update", *self._head_key): update}
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda program: program.compile(), lowered.values())
            self._programs |= dict(zip(lowered, compiled, strict=True))
        host.return_unused_memory()
        return time.monotonic() - started

    def place(self, images: np.ndarray, labels: np.ndarray, soft: Any = ()) -> tuple[Any, ...]:
        """Starts copying a batch to all devices; returns the arguments of `step`."""
        batch = (images, labels, soft)
        on_stacks = {s: jax.device_put(batch, self._stacks[s].device) for s in self._mine}
        return on_stacks, jax.device_put(batch, self._head) if self._is_head else ()

    def step(self, *batch: Any, size: int = 0) -> dict[str, Array]:
        """Starts a training step and returns its metrics without waiting for them."""
        on_stacks, head_batch = batch
        run, keys, states = self._programs, self._keys, self._states
        columns, vjps, grads, vectors = {}, {}, {}, {}
        dcolumns = from_head = None
        for s, state in states.items():
            columns[s], vjps[s] = run["forward", *keys[s], size](state.params, state.step, *on_stacks[s])
        joined = self._exchange.gather(columns)
        if self._is_head:
            v = run["join", *self._model_key](joined)
            head_grads, dv, from_head = run["head", *self._head_key](self._head_state, v, *head_batch)
            dcolumns = run["cut", *self._model_key](dv)
        for s, part in self._exchange.spread(dcolumns, columns):
            grads[s], vectors[s] = run["backward", *keys[s], size](states[s], vjps.pop(s), part)
        total = self._exchange.total(vectors, from_head, len(self._metrics))

        def update(key: tuple, s: int, state: TrainState, grads: dict) -> TrainState:
            needed = (self._exchange.copy(total, s),) if self._clip_norm else ()
            return run["update", *key](state, grads, *needed)

        for s in self._mine:
            states[s] = update(keys[s], s, states[s], grads[s])
        if self._is_head:
            self._head_state = update(self._head_key, -1, self._head_state, head_grads)
        return _unpack(self._metrics, self._exchange.copy(total, -1 if self._is_head else self._mine[0]))

    def calibrate(self, batches: Sequence[np.ndarray]) -> dict:
        """Collects the statistics for evaluation of the current parameters, for `scores`, and returns them."""
        if not any(group.kind.normalises for group in self._spec.lane_groups):
            return {}
        shapes = param_shapes(self._spec, calibrated=True)["encoder"]
        whole = {
            name: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), group[STATISTICS])
            for name, group in shapes.items()
            if STATISTICS in group
        }
        by_path = dict(jax.tree_util.tree_leaves_with_path(whole))
        for s, state in self._states.items():
            device, spec = self._stacks[s].device, self._specs[s]

            def of_batch(encoder, images, spec=spec):
                return group_statistics(spec, encoder, to_pixels(images))

            parts = [
                self._run_there(device, "statistics", self._keys[s], of_batch, state.params["encoder"], images)
                for images in (jax.device_put(batch, device) for batch in batches)
            ]
            self._statistics[s] = _join_statistics(parts) if parts[0] else {}
            rows = rows_of(self._spec, self._stacks[s].lanes)
            for path, values in jax.tree_util.tree_leaves_with_path(jax.device_get(self._statistics[s])):
                by_path[path][rows[path[0].key]] = values
        return self._exchange.add_up(whole)

    def scores(self, split: datasets.Split, batch_size: int, flips: bool = False) -> evaluate.Scores:
        """Scores of the parameters last calibrated."""
        sizes = [math.prod(shape) for shape in self._sum_shapes.values()]

        def sums(batch):
            views = []
            for images in evaluate.views(batch[0], flips):
                columns = {}
                for s, state in self._states.items():
                    device = self._stacks[s].device
                    encoder = with_statistics(state.params, self._statistics[s])["encoder"]
                    columns[s] = self._run_there(
                        device,
                        "columns",
                        self._keys[s],
                        self._pixel_columns(s),
                        encoder,
                        jax.device_put(np.ascontiguousarray(images), device),
                    )
                joined = self._exchange.gather(columns)
                if self._is_head:
                    views.append(self._run_there(self._head, "join to score", self._model_key, self._join, joined))
            vector = None
            if self._is_head:
                on_head = jax.device_put(batch, self._head)
                vector = self._run_there(
                    self._head, "sums", self._head_key, self._head_sums, self._head_state.params, views, *on_head
                )
            total = jax.device_get(self._exchange.total({}, vector, sum(sizes)))[0]
            parts = np.split(total, np.cumsum(sizes)[:-1])
            return {
                name: part.reshape(self._sum_shapes[name]) for name, part in zip(self._sum_shapes, parts, strict=True)
            }

        return evaluate.scores_of(split, batch_size, sums)

    def _pixel_columns(self, s: int) -> Callable:
        def columns(encoder, images):
            return self._padded(s, lane_outputs(self._specs[s], encoder, to_pixels(images)))

        return columns

    def _run_there(self, device: jax.Device, name: str, key: tuple, function: Callable, *args) -> Any:
        """Runs a function on a device, and compiles it for the first arguments of their shapes."""
        key = (name, *key, *(x.shape for x in jax.tree.leaves(args)))
        if key not in self._programs:
            self._programs[key] = lower(device, function, (), *args).compile()
        return self._programs[key](*args)

    def fetch(self) -> TrainState:
        """The full state in host memory."""
        whole = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._shapes)
        by_path = dict(jax.tree_util.tree_leaves_with_path(whole))
        if self._is_head:
            for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(self._head_state)):
                by_path[path][...] = leaf
        for s, state in self._states.items():
            rows = rows_of(self._spec, self._stacks[s].lanes)
            for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state)):
                if group_of(path):
                    by_path[path][rows[group_of(path)]] = leaf
        return self._exchange.add_up(whole)


_join_statistics = jax.jit(join_statistics)


@partial(jax.jit, static_argnums=0)
def _unpack(names, total):
    metrics = dict(zip(names, total[0], strict=True))
    return metrics | {"grad_norm": jnp.sqrt(metrics.pop("squares"))}

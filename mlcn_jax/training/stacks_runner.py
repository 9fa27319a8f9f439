"""Unequal lanes over devices: each device computes its own stack of lanes; only columns and gradients are exchanged.

A step: every device computes the columns of its lanes from the batch; one device, the head, joins them to class
capsules, computes the loss, updates the decoder and computes the columns' gradients; every device then updates its
lanes with its part of them. Each device has its own programs, dispatched without waiting for one another, so devices
may differ in kind, and holds only its lanes' parameters and optimizer state. In one process, messages are copied
between devices; several processes gather and scatter them in collectives.

A step takes one message from each stack, its columns, and one to it, their gradients. The loss of lanes that classify
alone and the metrics go with them; the squared gradient norm follows in the messages of the next step. Only
clipping, which needs that norm before the update, takes a sum of its own.
"""

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

from mlcn_jax.allocator import return_unused_memory
from mlcn_jax.data import batches, datasets
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.distributed import exchange, messages
from mlcn_jax.errors import InputError
from mlcn_jax.nn.calibration import group_statistics, join_statistics, trained_shapes, with_statistics
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.model import lane_outputs
from mlcn_jax.nn.resnet import STATISTICS
from mlcn_jax.nn.spec import ModelSpec, rows_of
from mlcn_jax.placement.cost import largest_memory_bytes
from mlcn_jax.training import evaluate
from mlcn_jax.training.stack_programs import GradientNorm, Stack, group_of, lower
from mlcn_jax.training.stack_step import FROM_HEAD, FROM_STACK, METRICS, StackStep
from mlcn_jax.training.step import TrainState

_PLAIN = batches.Augmentation()


def check_independent(spec: ModelSpec, accumulation_steps: int = 1) -> None:
    """Raises InputError if stacks cannot train a model, or not in so many parts of a batch.

    They cannot if lanes that classify alone need one another's outputs for their gradients.
    """
    if spec.couples_lanes:
        raise InputError(
            "stacks of lanes (parallel.plan=stacks, and searches) train lanes that classify alone without waiting for "
            "the others, so these cannot share their gradients: leave model.ensemble_weight at 0 and "
            "model.decoder_gradient at auto, or train with parallel.plan=mesh"
        )
    if accumulation_steps > 1:
        raise InputError(
            f"train.accumulation_steps={accumulation_steps} with parallel.plan=stacks, which computes a batch at "
            "once: leave it at 1 and use model.remat=full, more devices or a smaller batch, or parallel.plan=mesh"
        )


class StacksRunner:
    """A `runner.Runner` for lanes in stacks.

    Args:
      spec, optimizer, reconstruction_weight, seed, augmentation, distillation, accumulation_steps: as for
        `step.make_train_step`; only one part is supported.
      stacks: the lanes of each device; a device of this process may have several.
      head: the device that computes the loss and the decoder.
      exchange_dtype: dtype in which columns and their gradients are sent; float32 if any lane classifies alone.
      clip_norm: the optimizer's; 0 for none.
      programs: compiled programs of other runners, to reuse and to add to. The runners may differ only in their
        lanes.

    Raises:
      InputError: the gradients of lanes that classify alone depend on one another (`spec.ensemble_weight`, or
        `spec.decoder_gradient` is `all`), or `accumulation_steps` is above 1.

    Arguments, results and errors of the methods are those of `runner.Runner`.

    Source: do Rosario 2021 (thesis), chapter 5, for unequal lanes on unequal devices; the messages are this project's.
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
        exchange_dtype: str = "float32",
        clip_norm: float = 0.0,
        programs: dict[tuple, Any] | None = None,
    ):
        self._spec, self._optimizer, self._stacks, self._clip_norm = spec, optimizer, stacks, clip_norm
        alone = spec.classifies_alone
        self._metrics = METRICS if alone.any() else METRICS[1:]
        check_independent(spec, accumulation_steps)
        self._step = StackStep(
            spec,
            optimizer,
            stacks,
            reconstruction_weight=reconstruction_weight,
            seed=seed,
            augmentation=augmentation,
            distillation=distillation,
            exchange_dtype=exchange_dtype,
            clip_norm=clip_norm,
            alike=jax.process_count() > 1,  # as collectives require
        )
        self._mine = [s for s, stack in enumerate(stacks) if stack.device.process_index == jax.process_index()]
        self._is_head = head.process_index == jax.process_index()
        self._head = head
        among = exchange.AmongProcesses if jax.process_count() > 1 else exchange.AmongDevices
        self._exchange = among([stack.device for stack in stacks], head)
        self._states: dict[int, TrainState] = {}
        self._head_state: Any = None  # a `TrainState` in the process of the head
        self._squares: dict[int, Array] = {}
        self._places: dict[int, Array] = {}
        self._norm: GradientNorm | None = None
        self._programs = {} if programs is None else programs
        widths, dtype = self._step.widths, self._step.dtype
        self._keys = [
            (stack.device, own.lanes, width, dtype)
            for stack, own, width in zip(stacks, self._step.specs, widths, strict=True)
        ]
        counts = (len(stack.lanes) for stack in stacks)
        self._model_key = (head, *widths, "of", *counts, "order", *self._step.order, dtype)
        self._head_key = (head, *map(bool, alone))

    def start(self, state: TrainState) -> None:
        """Copies a full state, from host memory or any device, to the devices."""
        self._shapes = jax.eval_shape(lambda x: x, state)
        encoder = state.params["encoder"]
        for s in self._mine:
            rows = rows_of(self._spec, self._stacks[s].lanes)
            share = self._share({"encoder": {name: encoder[name] for name in rows}}, state, rows)
            self._states[s] = jax.device_put(share, self._stacks[s].device)
            self._squares[s] = jax.device_put(np.zeros((1, 1), np.float32), self._stacks[s].device)
            self._places[s] = jax.device_put(np.array(self._stacks[s].lanes, np.int32), self._stacks[s].device)
        self._norm = None
        self._statistics: dict[int, dict] = {s: {} for s in self._mine}
        if self._is_head:
            self._head_state = jax.device_put(self._share({"decoder": state.params["decoder"]}, state, {}), self._head)
            self._head_square = jax.device_put(np.zeros((1, 1), np.float32), self._head)

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
        self._columns = [jax.ShapeDtypeStruct((1, *v.shape[:2], width), v.dtype) for width in self._step.widths]
        to_head, self._to_stacks = (
            [messages.struct(columns.shape, self._step.dtype, count) for columns in self._columns]
            for count in (FROM_STACK, FROM_HEAD)
        )
        square = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        total = (square,) if self._clip_norm else ()
        lowered: dict[tuple, Any] = {}
        for s in self._mine:
            spec, device, state, key = self._step.specs[s], self._stacks[s].device, self._states[s], self._keys[s]
            if all(("forward", *key, size) in self._programs for size in sizes):
                continue
            for size in dict.fromkeys(sizes):
                given = (state.params, state.step, square, self._places[s], images, labels, soft)
                forward = lower(spec, device, self._step.forward(s, size), (), *given)
                go_back = self._step.backward(self._columns[s])
                backward = lower(spec, device, go_back, (), state, forward.out_info[1], self._to_stacks[s])
                lowered |= {("forward", *key, size): forward, ("backward", *key, size): backward}
            lowered["update", *key] = lower(spec, device, self._step.update, (0,), state, backward.out_info[0], *total)
        if self._is_head and ("read", *self._model_key) not in self._programs:
            numbers = jax.ShapeDtypeStruct((FROM_HEAD,), jnp.float32)
            read, cut = (partial(function, self._columns) for function in (self._step.read, self._step.cut))
            lowered["read", *self._model_key] = lower(self._spec, self._head, read, (), self._exchange.joined(to_head))
            lowered["cut", *self._model_key] = lower(
                self._spec, self._head, lambda *given: self._exchange.together(cut(*given)), (), v, numbers
            )
        if self._is_head and ("head", *self._head_key) not in self._programs:
            numbers = jax.ShapeDtypeStruct((FROM_STACK,), jnp.float32)
            arguments = (self._head_state, v, numbers, square, images, labels, soft)
            head = lower(self._spec, self._head, self._step.head_step, (), *arguments)
            update = lower(self._spec, self._head, self._step.update, (0,), self._head_state, head.out_info[0], *total)
            lowered |= {("head", *self._head_key): head, ("update", *self._head_key): update}
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda program: program.compile(), lowered.values())
            self._programs |= dict(zip(lowered, compiled, strict=True))
        return_unused_memory()
        return time.monotonic() - started

    def step_bytes(self) -> dict[jax.Device, int]:
        """Memory of the largest program of a step on each device of this process."""
        of_devices: dict[jax.Device, list[Any]] = {}
        for (_, device, *_), program in self._programs.items():
            of_devices.setdefault(device, []).append(program)
        return {device: largest_memory_bytes(programs) for device, programs in of_devices.items()}

    def place(self, images: np.ndarray, labels: np.ndarray, soft: Any = ()) -> tuple[Any, ...]:
        """Starts copying a batch to all devices; returns the arguments of `step`."""
        batch = (images, labels, soft)
        on_stacks = {s: jax.device_put(batch, self._stacks[s].device) for s in self._mine}
        return on_stacks, jax.device_put(batch, self._head) if self._is_head else ()

    def step(self, *batch: Any, size: int = 0) -> dict[str, Any]:
        """Starts a training step and returns its metrics without waiting for them."""
        on_stacks, head_batch = batch
        run, keys, states, squares = self._programs, self._keys, self._states, self._squares
        sent, vjps, grads, numbers = {}, {}, {}, {}
        back = from_head = head_square = None
        for s, state in states.items():
            given = (state.params, state.step, squares[s], self._places[s], *on_stacks[s])
            sent[s], vjps[s] = run["forward", *keys[s], size](*given)
        received = self._exchange.gather(sent)
        if self._is_head:
            v, from_stacks = run["read", *self._model_key](received)
            arguments = (self._head_state, v, from_stacks, self._head_square, *head_batch)
            head_grads, dv, from_head, head_square = run["head", *self._head_key](*arguments)
            self._head_square = head_square
            back = run["cut", *self._model_key](dv, from_head)
        for s, part in self._exchange.spread(back, self._to_stacks[self._mine[0]]):
            grads[s], squares[s], numbers[s] = run["backward", *keys[s], size](states[s], vjps.pop(s), part)
        here = -1 if self._is_head else self._mine[0]
        add_up = partial(self._exchange.total, dict(squares), head_square, 1)
        total = add_up() if self._clip_norm else None

        def update(key: tuple, s: int, state: TrainState, grads: dict) -> TrainState:
            needed = () if total is None else (self._exchange.copy(total, s),)
            return run["update", *key](state, grads, *needed)

        for s in self._mine:
            states[s] = update(keys[s], s, states[s], grads[s])
        if self._is_head:
            self._head_state = update(self._head_key, -1, self._head_state, head_grads)
        metrics, square_before = _unpack(self._metrics, from_head if self._is_head else numbers[self._mine[0]])
        if self._norm is not None and total is None:
            self._norm.arrived(square_before)
        self._norm = GradientNorm(lambda: self._exchange.copy(add_up(), here))
        if total is not None:
            self._norm.arrived(self._exchange.copy(total, here))
        return {**metrics, "grad_norm": self._norm}

    def wait(self) -> None:
        """Blocks until the last step has been taken."""
        jax.block_until_ready((self._states, self._head_state))

    def calibrate(self, batches: Sequence[np.ndarray]) -> dict:
        """Collects the statistics for evaluation of the current parameters, for `scores`, and returns them."""
        if not self._spec.normalises:
            return {}
        shapes = trained_shapes(self._spec)["encoder"]
        whole = {
            name: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), group[STATISTICS])
            for name, group in shapes.items()
            if STATISTICS in group
        }
        by_path = dict(jax.tree_util.tree_leaves_with_path(whole))
        for s, state in self._states.items():
            device, spec = self._stacks[s].device, self._step.specs[s]

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
        sizes = [math.prod(shape) for shape in self._step.sum_shapes.values()]

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
                    views.append(self._run_there(self._head, "join to score", self._model_key, self._step.join, joined))
            vector = None
            if self._is_head:
                on_head = jax.device_put(batch, self._head)
                vector = self._run_there(
                    self._head, "sums", self._head_key, self._step.head_sums, self._head_state.params, views, *on_head
                )
            total = jax.device_get(self._exchange.total({}, vector, sum(sizes)))[0]
            parts = np.split(total, np.cumsum(sizes)[:-1])
            return {
                name: part.reshape(self._step.sum_shapes[name])
                for name, part in zip(self._step.sum_shapes, parts, strict=True)
            }

        return evaluate.scores_of(split, batch_size, sums)

    def _pixel_columns(self, s: int) -> Callable:
        def columns(encoder, images):
            return self._step.padded(s, lane_outputs(self._step.specs[s], encoder, to_pixels(images)))

        return columns

    def _run_there(self, device: jax.Device, name: str, key: tuple, function: Callable, *args) -> Any:
        """Runs a function on a device, compiling it once for each set of argument shapes."""
        key = (name, *key, *(x.shape for x in jax.tree.leaves(args)))
        if key not in self._programs:
            self._programs[key] = lower(self._spec, device, function, (), *args).compile()
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
def _unpack(names, numbers):
    """The metrics of these names, and the square of the norm of the gradient before, from the head's numbers."""
    metrics = dict(zip(METRICS, numbers, strict=False))
    return {name: metrics[name] for name in names}, numbers[-1]

"""One training step: loss, optimizer and update as pure functions, compiled for one device or a mesh of them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mlcn_jax.allocator import StepBlock, return_unused_memory
from mlcn_jax.data import batches
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn import losses
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.lane_losses import View, outputs_and_loss
from mlcn_jax.nn.model import class_lengths, drop_lanes, join_lanes, joint_margin_loss, lane_cross_entropy, reconstruct
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.accumulate import in_parts

_PLAIN = batches.Augmentation()


@flax.struct.dataclass
class TrainState:
    """Everything a training step changes; its random numbers are derived from the seed and `step`."""

    step: Array
    params: dict
    optimizer: optax.OptState

    @classmethod
    def create(cls, params: dict, optimizer: optax.GradientTransformation) -> "TrainState":
        """The state before the first step."""
        return cls(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_loss(
    spec: ModelSpec,
    reconstruction_weight: float,
    mesh: Mesh | None = None,
    augmentation: batches.Augmentation = _PLAIN,
    distillation: Distillation | None = None,
    accumulation_steps: int = 1,
) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """Returns the function `(params, images, labels, key, draws, soft=()) -> (loss, metrics)`, means over the batch.

    `images` are pixels in [0, 1]; `key` is the random key of lane dropout; `draws` are those of an augmentation per
    lane, else empty; `soft` are the teacher's probabilities if they were computed before. With several
    `accumulation_steps`, they are computed in that many parts (`accumulate.in_parts`). With a mesh, the function is
    that of a device, for `mesh.value_and_grad_over`.
    """

    lane_axis = mesh_lib.lane_axis(mesh)

    def loss_fn(params, images, labels, key, draws, soft=()):
        soft = soft_targets(distillation, augmentation, images, soft)
        outputs, loss = outputs_and_loss(
            spec,
            params["encoder"],
            images,
            labels,
            draws,
            soft,
            **lane_options(augmentation, distillation),
            lane_axis=lane_axis,
        )
        target = labels if isinstance(soft, tuple) or distillation is None else distillation.target(labels, soft)
        rest, metrics = head_loss(
            spec, reconstruction_weight, params["decoder"], outputs, images, labels, key, lane_axis, target
        )
        return loss + rest, metrics

    return in_parts(loss_fn, accumulation_steps)


def head_loss(
    spec: ModelSpec,
    reconstruction_weight: float,
    decoder: dict,
    outputs: Float[Array, "batch classes dim"],
    images: Float[Array, "batch h w channels"],
    labels: Int[Array, " batch"],
    key: Array,
    lane_axis: str = "",
    target: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The part of `make_loss` that follows the outputs of the lanes, and the metrics.

    The loss leaves out that of lanes that classify alone; the cross-entropy of their labels is among the metrics.
    The margin loss takes `target` (`Distillation.target`) instead of the labels, if it is given.
    """
    alone = spec.classifies_alone
    v = join_lanes(spec, outputs)
    decoded = v
    if spec.decoder_gradient == "none":
        decoded = lax.stop_gradient(v)
    elif alone.any() and spec.decoder_gradient == "auto":
        decoded = jnp.where(alone[None, None], lax.stop_gradient(v), v)
    reconstructions = reconstruct(spec, decoder, decoded, labels, lane_axis)
    if spec.lane_dropout:
        v = outputs = drop_lanes(key, v, spec.lane_dropout)
    margin = jnp.mean(joint_margin_loss(spec, outputs, labels if target is None else target))
    reconstruction = jnp.mean(losses.reconstruction_loss(reconstructions, images))
    accuracy = jnp.mean(jnp.argmax(class_lengths(spec, v), axis=-1) == labels)
    metrics = {"margin": margin, "reconstruction": reconstruction, "accuracy": accuracy}
    if alone.any():
        metrics["cross_entropy"] = jnp.mean(lax.stop_gradient(lane_cross_entropy(spec, outputs, labels)))
    return margin + reconstruction_weight * reconstruction, metrics


def make_input(
    spec: ModelSpec, seed: int, augmentation: batches.Augmentation
) -> Callable[..., tuple[Float[Array, "batch h w channels"], Array, batches.Draws]]:
    """Returns `(step, images, places=None) -> (pixels, key, draws)` of uint8 images, for the arguments of `make_loss`.

    Pixels are augmented already unless each lane augments its own, with `draws`: those of all lanes, or of the lanes
    at these `places` of the model.
    """

    def prepare(step, images, places=None):
        augment_key, lane_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
        pixels = batches.to_pixels(images)
        if augmentation.per_lane:
            places = jnp.arange(len(spec.lane_specs)) if places is None else places
            keys, mirrored = _lane_keys(spec, augment_key, step, places)
            return pixels, lane_key, batches.draw_per_lane(keys, mirrored, pixels, augmentation)
        draws = batches.draw(augment_key, pixels, augmentation)
        return batches.augment(pixels, draws, augmentation), lane_key, {}

    return prepare


def _lane_keys(spec: ModelSpec, augment_key: Array, step: Array, places: Array) -> tuple[Array, Array]:
    """The key of each lane's augmentation in a step, and whether it is one that may mirror, of odd seed or place."""
    if spec.lane_seeds:
        seeds = jnp.array(spec.lane_seeds, jnp.uint32)[places]
        return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(seeds), seeds % 2 == 1
    return jax.vmap(lambda place: jax.random.fold_in(augment_key, place))(places), places % 2 == 1


def soft_targets(
    distillation: Distillation | None,
    augmentation: batches.Augmentation,
    images: Float[Array, "batch h w channels"],
    known: Any = (),
) -> Any:
    """The teacher's probabilities [batch, classes] for augmented images, unless they are `known` already.

    Empty without a teacher, and where each lane augments images differently: then it is evaluated for each lane.
    """
    if distillation is None or augmentation.per_lane or not isinstance(known, tuple):
        return known
    return distillation.probabilities(images)


def lane_options(augmentation: batches.Augmentation, distillation: Distillation | None) -> dict[str, Any]:
    """Arguments of `lane_losses.outputs_and_loss`: a teacher sees what its lane sees, but always at full size."""
    full_size = lane_view(dataclasses.replace(augmentation, size=0))
    return {"view": lane_view(augmentation), "distillation": distillation, "seen_by_teacher": full_size}


def lane_view(augmentation: batches.Augmentation) -> View:
    """How a lane that classifies alone sees images in training, for `lane_losses.outputs_and_loss`."""

    def view(images, draws, lane):
        drawn = {name: jnp.take(values, lane, axis=1) for name, values in draws.items()}
        return batches.resize(batches.augment(images, drawn, augmentation), augmentation.size)

    return view


def make_train_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    reconstruction_weight: float,
    seed: int,
    augmentation: batches.Augmentation = _PLAIN,
    mesh: Mesh | None = None,
    distillation: Distillation | None = None,
    accumulation_steps: int = 1,
    exchange_dtype: str = "float32",
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Returns the function `(state, images, labels, soft=()) -> (state, metrics)`, pure and not yet jitted.

    `images` are uint8 [batch, height, width, channels]. Metrics are float32 scalars over the batch: `loss`,
    `margin`, `reconstruction`, `accuracy`, `cross_entropy` if there are lanes that classify alone, and `grad_norm`,
    the gradient's global norm before clipping. The loss is margin + cross-entropy, summed over lanes,
    + reconstruction_weight * reconstruction. Augmentation and lane dropout use a key derived
    from `seed` and `state.step`. With a `distillation`, the teacher classifies the augmented images, unless `soft`
    holds its probabilities. The result is the same over a mesh (`mesh.make_mesh`), from a state and a batch placed by
    `mesh.place_state` and `mesh.place_batch`, up to the rounding of what is sent in `exchange_dtype`, and in several
    `accumulation_steps`: augmentation and lane dropout are drawn once for the entire batch, and the optimizer sees one
    gradient.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    loss_fn = make_loss(spec, reconstruction_weight, mesh, augmentation, distillation, accumulation_steps)
    with_gradient = mesh_lib.value_and_grad_over(mesh, loss_fn, exchange_dtype)
    prepare = make_input(spec, seed, augmentation)

    def train_step(state, images, labels, soft=()):
        pixels, lane_key, draws = prepare(state.step, images)
        (loss, metrics), grads, norm = with_gradient(state.params, pixels, labels, lane_key, draws, soft)
        if spec.lane_seeds:  # rounding of the update must not depend on how many lanes there are
            grads = lax.optimization_barrier(grads)
        norm = optax.tree.norm(grads) if norm is None else norm
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params, norm=norm)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"loss": loss, "grad_norm": norm}
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return train_step


def compile_step(
    spec: ModelSpec, step_fn: Callable, state: TrainState, batch: tuple
) -> tuple[jax.stages.Compiled, float]:
    """The step of a model compiled ahead of time, with its state donated, and the seconds taken.

    The new state has the sharding of `state`.
    """
    options = spec.compiler_options(jax.default_backend())
    started = time.monotonic()
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step_fn, donate_argnums=0, compiler_options=options, out_shardings=(where, None))
    compiled = jitted.lower(state, *batch).compile()
    return_unused_memory()
    return compiled, time.monotonic() - started


def step_block(compiled: jax.stages.Compiled) -> StepBlock:
    """What `prepare` is to be called of before each step; of no effect but on a single CPU device."""
    devices = jax.local_devices()
    memory = compiled.memory_analysis() if len(devices) == 1 and devices[0].platform == "cpu" else None
    return StepBlock(memory.temp_size_in_bytes if memory else 0)

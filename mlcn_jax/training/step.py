"""One training step: loss, optimizer and update as pure functions, compiled for one device or a mesh of them."""

import time
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mlcn_jax import host
from mlcn_jax.data import batches
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.nn import capsules, conv, losses
from mlcn_jax.nn.model import ModelSpec, classification_loss, drop_lanes, encode, reconstruct


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
    spec: ModelSpec, reconstruction_weight: float, mesh: Mesh | None = None
) -> Callable[[dict, Array, Array, Array], tuple[Array, dict[str, Array]]]:
    """Returns the function `(params, images, labels, key) -> (loss, metrics)`, which gives means over the batch.

    `images` are pixels in [0, 1]; `key` is the random key of lane dropout.
    """

    lane_axis = mesh_lib.lane_axis(mesh)

    def loss_fn(params, images, labels, key):
        v = encode(spec, params["encoder"], images, lane_axis)
        return head_loss(spec, reconstruction_weight, params["decoder"], v, images, labels, key, lane_axis)

    return mesh_lib.mean_over(mesh, loss_fn)


def head_loss(
    spec: ModelSpec,
    reconstruction_weight: float,
    decoder: dict,
    v: Float[Array, "batch classes dim"],
    images: Float[Array, "batch h w channels"],
    labels: Int[Array, " batch"],
    key: Array,
    lane_axis: str = "",
) -> tuple[Array, dict[str, Array]]:
    """The part of `make_loss` that follows the class capsules."""
    reconstructions = reconstruct(spec, decoder, v, labels, lane_axis)
    seen = drop_lanes(key, v, spec.lane_dropout) if spec.lane_dropout else v
    margin = jnp.mean(classification_loss(spec, seen, labels))
    reconstruction = jnp.mean(losses.reconstruction_loss(reconstructions, images))
    accuracy = jnp.mean(jnp.argmax(capsules.lengths(seen), axis=-1) == labels)
    loss = margin + reconstruction_weight * reconstruction
    return loss, {"margin": margin, "reconstruction": reconstruction, "accuracy": accuracy}


def make_input(
    seed: int, max_shift: int, flip: bool
) -> Callable[[Array, Array], tuple[Float[Array, "batch h w channels"], Array]]:
    """Returns `(step, images) -> (pixels, key)`: augmented pixels of uint8 images, and the key of lane dropout."""

    def prepare(step, images):
        augment_key, lane_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
        pixels = batches.to_pixels(images)
        if max_shift or flip:
            pixels = batches.augment(augment_key, pixels, max_shift=max_shift, flip=flip)
        return pixels, lane_key

    return prepare


def make_train_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    reconstruction_weight: float,
    seed: int,
    max_shift: int = 0,
    flip: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Array, Array], tuple[TrainState, dict[str, Array]]]:
    """Returns the function `(state, images, labels) -> (state, metrics)`, pure and not yet jitted.

    `images` are uint8 [batch, height, width, channels]. Metrics are float32 scalars over the batch: `loss`,
    `margin`, `reconstruction`, `accuracy`, and `grad_norm`, the gradient's global norm before clipping. The
    loss is margin + reconstruction_weight * reconstruction. Augmentation and lane dropout use a key derived
    from `seed` and `state.step`. Over a mesh (`mesh.make_mesh`) it computes the same from a state and a batch
    placed by `mesh.place_state` and `mesh.place_batch`.
    """
    loss_fn = make_loss(spec, reconstruction_weight, mesh)
    prepare = make_input(seed, max_shift, flip)

    def train_step(state, images, labels):
        pixels, lane_key = prepare(state.step, images)
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, pixels, labels, lane_key)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return train_step


def compile_step(step_fn: Callable, state: TrainState, batch: tuple) -> tuple[Callable, float]:
    """The step compiled ahead of time, with its state donated, and the seconds taken.

    The new state has the sharding of `state`.
    """
    options = conv.compiler_options(jax.default_backend())
    started = time.monotonic()
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step_fn, donate_argnums=0, compiler_options=options, out_shardings=(where, None))
    compiled = jitted.lower(state, *batch).compile()
    host.return_unused_memory()
    return compiled, time.monotonic() - started

"""CapsNet and MLCN with their decoder, built from a `ModelSpec`.

Modules take a `lane_axis`: inside a `shard_map` over that mesh axis, each device holds and computes its shard of the
lanes and of the decoder's units. If it is empty, as everywhere else, nothing is sharded.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules, conv, losses, resnet, tracing
from mlcn_jax.nn.lanes import (
    ConvParams,
    apply_group,
    first_input,
    init_group,
    primary_capsules,
)
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.nn.words import all_gather

_CAPSNET_FILTERS = 256
_CAPSNET_CLASS_DIM = 16


def num_shares(lane_axis: str) -> int:
    """Devices along the axis over which the lanes are sharded; 1 if there is none."""
    return lax.axis_size(lane_axis) if lane_axis else 1


class CapsNetEncoder(nn.Module):
    """Maps images to class capsules of 16 dimensions (Sabour et al. 2017, section 4)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes 16"]:
        spec = self.spec
        n = _CAPSNET_FILTERS
        conv1 = ConvParams((9, 9, images.shape[-1], n), spec.dtype, name="conv1")()
        primary = ConvParams((9, 9, n, n), spec.dtype, name="primary")()
        images = first_input(images, spec.signed_pixels, spec.dtype)
        x = conv.lane_convs(images, *conv1, *primary, algorithm=spec.conv)
        u = primary_capsules(x)
        shape = (u.shape[1], spec.num_classes, u.shape[2], _CAPSNET_CLASS_DIM)
        weights = self.param("capsule_weights", nn.initializers.glorot_uniform(), shape, jnp.float32).astype(spec.dtype)
        prior_bias = None
        if spec.prior_bias:
            prior_bias = self.param("prior_bias", nn.initializers.zeros, shape[:2], jnp.float32)
        return capsules.dynamic_routing(u, weights, spec.num_routing_iters, prior_bias)


class MLCNEncoder(nn.Module):
    """Maps images to the lanes' outputs, of which `join_lanes` makes class capsules, one dimension from each lane.

    Source: do Rosario et al. 2019, section III.
    """

    spec: ModelSpec
    lane_axis: str = ""

    @nn.compact
    def __call__(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes lanes"]:
        settings = self.spec.lane_settings
        shares = num_shares(self.lane_axis)
        columns, first_lane = [], 0
        for whole in self.spec.lane_groups:
            group = dataclasses.replace(whole, count=whole.count // shares)
            if self.is_initializing():
                seeds = self.spec.lane_seeds[first_lane : first_lane + group.count]
                params = self.param(group.name, init_group, group, first_lane, settings, images, seeds)
            else:  # which may have statistics besides
                params = self.get_variable("params", group.name)
            columns.append(apply_group(params, group, settings, images))
            first_lane += group.count
        return gather_lanes(self.spec, columns, self.lane_axis)


def gather_lanes(spec: ModelSpec, columns: Sequence[Float[Array, "batch classes group"]], lane_axis: str) -> Array:
    """The outputs of all lanes, [batch, classes, lanes], from those of each group's lanes on this device.

    Log-probabilities of lanes that classify alone are never rounded on their way.
    """
    outputs = jnp.concatenate(columns, axis=-1)
    if not lane_axis:
        return outputs
    dtype = "" if spec.classifies_alone.any() else tracing.current().exchange_dtype
    outputs = all_gather(outputs, lane_axis, dtype, axis=2)  # [batch, classes, shares, lanes of a share]
    ends = itertools.accumulate(column.shape[-1] for column in columns[:-1])
    parts = jnp.split(outputs, list(ends), axis=-1)
    return jnp.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)


def params_of_lanes(spec: ModelSpec, encoder: Mapping[str, Any]) -> list[Any]:
    """The parameters of each lane, in the order of the columns, from those of all groups, [lanes, ...]."""
    groups = spec.lane_groups
    return [jax.tree.map(lambda a, i=i: a[i], encoder[group.name]) for group in groups for i in range(group.count)]


def join_lanes(spec: ModelSpec, outputs: Float[Array, "batch classes lanes"]) -> Float[Array, "batch classes lanes"]:
    """Class capsules from the lanes' outputs.

    A lane that returns log-probabilities `log p` contributes `exp(log p / 2)`, so that its part of a class capsule's
    squared length is the probability; the others contribute their output itself.
    """
    alone = spec.classifies_alone
    if not alone.any():
        return outputs
    return jnp.where(alone[None, None], jnp.exp(jnp.minimum(outputs, 0.0) / 2), outputs)


def class_lengths(spec: ModelSpec, v: Float[Array, "*shape dim"]) -> Float[Array, "*shape"]:
    """Lengths of class capsules, of which the longest gives the class: `capsules.lengths` with the lanes' weights."""
    return capsules.lengths(v, spec.weights if spec.lane_weights else None)


def class_probabilities(spec: ModelSpec, lengths: Array) -> Array:
    """Probability of each class from `class_lengths`: the length, or its square, at most 1.

    Where all lanes classify alone, probabilities sum to 1 over the classes: the weighted mean of the lanes'
    probabilities.
    """
    return (lengths / spec.certain_length).clip(max=1.0) ** spec.probability_power


class Decoder(nn.Module):
    """Maps masked class capsules to an image with pixels in [0, 1] (Sabour et al. 2017, figure 2)."""

    spec: ModelSpec
    lane_axis: str = ""

    @nn.compact
    def __call__(self, masked: Float[Array, "batch classes dim"]) -> Float[Array, "batch h w channels"]:
        x = masked.reshape(masked.shape[0], -1)
        for i, size in enumerate(self.spec.decoder):
            x = self._layer(f"hidden{i + 1}", size, nn.relu, x)
        x = self._layer("pixels", math.prod(self.spec.image_shape), nn.sigmoid, x)
        return x.reshape(-1, *self.spec.image_shape)

    def _layer(self, name: str, size: int, activation: Callable[[Array], Array], x: Array) -> Array:
        """A dense layer; if its units divide evenly, each device computes a shard of them, then all are gathered."""
        shares = num_shares(self.lane_axis)
        split = shares > 1 and size % shares == 0
        glorot = nn.initializers.glorot_uniform()
        dense = nn.Dense(size // shares if split else size, dtype=self.spec.dtype, kernel_init=glorot, name=name)
        x = activation(dense(x))
        dtype = tracing.current().exchange_dtype
        return all_gather(x, self.lane_axis, dtype, axis=1, tiled=True) if split else x


class CapsuleNetwork(nn.Module):
    """A capsule encoder with its decoder."""

    spec: ModelSpec
    lane_axis: str = ""

    def setup(self) -> None:
        is_capsnet = self.spec.name == "capsnet"
        self.encoder = CapsNetEncoder(self.spec) if is_capsnet else MLCNEncoder(self.spec, self.lane_axis)
        self.decoder = Decoder(self.spec, self.lane_axis)

    def lane_outputs(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes dim"]:
        """What the lanes return (`lanes.apply_group`), before `join_lanes`; the class capsules of CapsNet."""
        return self.encoder(images)

    def encode(self, images: Float[Array, "batch h w channels"]) -> Float[Array, "batch classes dim"]:
        """Class capsules; the length of row k gives the probability of class k (`class_probabilities`)."""
        return join_lanes(self.spec, self.encoder(images))

    def reconstruct(
        self, class_capsules: Float[Array, "batch classes dim"], classes: Int[Array, " batch"]
    ) -> Float[Array, "batch h w channels"]:
        """Images decoded from the capsule of each given class."""
        return self.decoder(capsules.mask_classes(class_capsules, classes))

    def __call__(
        self, images: Float[Array, "batch h w channels"], classes: Int[Array, " batch"] | None = None
    ) -> tuple[Float[Array, "batch classes dim"], Float[Array, "batch h w channels"]]:
        """Class capsules and reconstructions.

        Args:
          images: pixels in [0, 1].
          classes: classes whose capsules to decode, the true ones in training; None takes the longest capsule.
        """
        v = self.encode(images)
        if classes is None:
            classes = jnp.argmax(class_lengths(self.spec, v), axis=-1)
        return v, self.reconstruct(v, classes)


def init_params(spec: ModelSpec, key: Array) -> dict:
    """Initial values of all parameters: `{"encoder": ..., "decoder": ...}`.

    On a CPU the program is compiled with few optimizations, as it runs once: for three small lanes that took 2 s
    instead of 11 s. The values are the same.
    """
    if isinstance(key, jax.core.Tracer):
        return _init(spec, key)
    return conv.compiled_once(_init, static_argnums=0)(spec, key)


def _init(spec: ModelSpec, key: Array) -> dict:
    images = jnp.zeros((1, *spec.image_shape))
    return CapsuleNetwork(spec).init(key, images, jnp.zeros((1,), jnp.int32))["params"]


def param_shapes(spec: ModelSpec) -> dict:
    """Shapes and dtypes of all parameters, as `jax.ShapeDtypeStruct`, without computing any."""
    return jax.tree.map(lambda leaf: leaf, _param_shapes(spec))  # a tree of the caller's own


@functools.lru_cache
def _param_shapes(spec: ModelSpec) -> dict:
    return jax.eval_shape(functools.partial(init_params, spec), jax.eval_shape(lambda: jax.random.key(0)))


def apply_model(
    spec: ModelSpec,
    params: dict,
    images: Float[Array, "batch h w channels"],
    classes: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch classes dim"], Float[Array, "batch h w channels"]]:
    """Class capsules and reconstructions of images, each by itself.

    Args:
      spec: the model.
      params: its parameters; those of residual lanes after `calibrate`.
      images: pixels in [0, 1], in the model's `image_shape`.
      classes: those whose capsules are decoded; None takes the longest capsule of each image.

    Raises:
      InputError: the images have another shape, or are integers; or residual lanes have no statistics.
    """
    is_integer = jnp.issubdtype(images.dtype, jnp.integer)
    if is_integer or images.shape[1:] != spec.image_shape:
        expected = ", ".join(map(str, ("batch", *spec.image_shape)))
        cure = "divide them by 255" if is_integer else "resize them"
        raise InputError(
            f"images are {images.dtype} {list(images.shape)}; expected pixels in [0, 1], as float [{expected}]: {cure}"
        )
    for group in spec.lane_groups:
        if group.kind.normalises and not {resnet.STATISTICS, resnet.FOLDED} & params["encoder"][group.name].keys():
            raise InputError(
                f"{group.name} has no statistics for evaluation, without which an image's answer depends on the others "
                "of its batch: give the parameters that mlcn_jax.calibrate(spec, params, images) returns, with batches "
                "of training images"
            )
    return CapsuleNetwork(spec).apply({"params": params}, images, classes)  # type: ignore[return-value]


def lane_outputs(
    spec: ModelSpec, encoder: dict, images: Float[Array, "batch h w channels"], lane_axis: str = ""
) -> Float[Array, "batch classes dim"]:
    """`CapsuleNetwork.lane_outputs` as a pure function of the encoder's parameters."""
    network = CapsuleNetwork(spec, lane_axis)
    return network.apply({"params": {"encoder": encoder}}, images, method="lane_outputs")  # type: ignore[return-value]


def encode(
    spec: ModelSpec, encoder: dict, images: Float[Array, "batch h w channels"], lane_axis: str = ""
) -> Float[Array, "batch classes dim"]:
    """`CapsuleNetwork.encode` as a pure function of the encoder's parameters."""
    network = CapsuleNetwork(spec, lane_axis)
    return network.apply({"params": {"encoder": encoder}}, images, method="encode")  # type: ignore[return-value]


def reconstruct(
    spec: ModelSpec,
    decoder: dict,
    class_capsules: Float[Array, "batch classes dim"],
    classes: Int[Array, " batch"],
    lane_axis: str = "",
) -> Float[Array, "batch h w channels"]:
    """`CapsuleNetwork.reconstruct` as a pure function of the decoder's parameters."""
    network, variables = CapsuleNetwork(spec, lane_axis), {"params": {"decoder": decoder}}
    return network.apply(variables, class_capsules, classes, method="reconstruct")  # type: ignore[return-value]


def classification_loss(
    spec: ModelSpec, outputs: Float[Array, "batch classes dim"], labels: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    """Loss of each image from the outputs of the lanes: `joint_margin_loss` plus `lane_cross_entropy`."""
    return joint_margin_loss(spec, outputs, labels) + lane_cross_entropy(spec, outputs, labels)


def joint_margin_loss(
    spec: ModelSpec, outputs: Float[Array, "batch classes dim"], labels: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    """Margin loss of each image from the lanes that do not classify alone, joint or per lane (`spec.margin_loss`)."""
    alone = spec.classifies_alone
    if alone.any():
        if alone.all():
            return jnp.zeros(outputs.shape[:1])
        outputs = outputs[..., np.flatnonzero(~alone)]
    if spec.margin_loss == "per_lane":
        return jnp.mean(losses.lane_margin_loss(outputs, labels), axis=0)
    if spec.margin_loss == "per_lane_sum":
        return jnp.sum(losses.lane_margin_loss(outputs, labels), axis=0)
    return losses.margin_loss(capsules.lengths(outputs), labels)


def lane_cross_entropy(
    spec: ModelSpec, outputs: Float[Array, "batch classes lanes"], labels: Int[Array, " batch"]
) -> Float[Array, " batch"]:
    """Cross-entropy of each image, summed over the lanes that classify alone; 0 if there are none.

    With `spec.ensemble_weight` b it is (1 - b) times that sum plus b L times the cross-entropy of the L lanes' mean
    probabilities.
    """
    alone = np.flatnonzero(spec.classifies_alone)
    if not alone.size:
        return jnp.zeros(outputs.shape[:1])
    log_probabilities, smoothing = outputs[..., alone], spec.label_smoothing
    each = jax.vmap(losses.cross_entropy, in_axes=(2, None, None))(log_probabilities, labels, smoothing)
    share = spec.ensemble_weight
    if not share:
        return jnp.sum(each, axis=0)
    together = losses.ensemble_cross_entropy(log_probabilities, labels, smoothing)
    return (1 - share) * jnp.sum(each, axis=0) + share * alone.size * together


def drop_lanes(key: Array, v: Float[Array, "batch classes lanes"], rate: float) -> Float[Array, "batch classes lanes"]:
    """Zeroes each lane's column for the entire batch with probability `rate` and scales the others by 1 / (1 - rate).

    Only the classification loss sees the result; reconstruction sees all lanes.

    Source: do Rosario 2021 (thesis), chapter 4; drawn per batch as in its public code.
    """
    keep = jax.random.bernoulli(key, 1.0 - rate, (v.shape[-1],))
    return v * (keep / (1.0 - rate)).astype(v.dtype)[None, None]


def count_parameters(spec: ModelSpec) -> dict[str, int | list[int]]:
    """Numbers of parameters, without computing any: `total`, `decoder`, and `per_lane` in the order of the lanes.

    >>> count_parameters(ModelSpec("mlcn", (32, 32, 3), 10, lanes="mlcn1:w4*4"))["total"]
    5250816
    """
    params = param_shapes(spec)

    def size(tree) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    per_lane = []
    for group in spec.lane_groups:
        per_lane += [size(params["encoder"][group.name]) // group.count] * group.count
    return {"total": size(params), "decoder": size(params["decoder"]), "per_lane": per_lane}

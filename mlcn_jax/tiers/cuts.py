"""Cuts that divide a tier's lanes: the trusted device (home) computes what is before a cut, the tier the rest.

The value of a cut is one row per image: the pixels themselves, or the flattened activations of all lanes at the cut, in
the order of the lanes. None of this hides an image from someone who has the weights (`experiments/tiers_leak.py`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float

from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn import resnet
from mlcn_jax.nn.cut_points import CUTS, giving, read
from mlcn_jax.nn.lanes import LANE_KINDS, Lane, LaneSpec
from mlcn_jax.nn.model import join_lanes, lane_outputs
from mlcn_jax.nn.spec import ModelSpec

PIXELS, COLUMNS = "pixels", "columns"
_TRUNK = "trunk"
# Modules of a lane that hold each cut point, then its name.
_PATHS: dict[str, tuple[str, ...]] = {
    "conv1": ("conv1",),
    "capsules": ("capsules",),
    "stem": (_TRUNK, "stem"),
    **{f"stage{i}": (_TRUNK, f"stage{i}") for i in range(1, len(resnet.STAGES) + 1)},
}
NAMES = (PIXELS, *_PATHS, COLUMNS)
Weights = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some lanes of a model, divided at a cut.

    Attributes:
      spec: the model with these lanes alone.
      lane_weights: weights of the lanes' squares in the squared lengths of the class capsules.
      cut: one of `NAMES` that all of these lanes have.

    Raises:
      InputError: there is no such cut, or a lane does not have it.
    """

    spec: ModelSpec
    lane_weights: tuple[float, ...]
    cut: str = PIXELS

    def __post_init__(self):
        known = cuts_of(self.spec)
        if self.cut not in known:
            raise InputError(f"--cut={self.cut}: lanes {self.spec.lanes} can be cut at {', '.join(known)}")

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what the tier receives for one image."""
        if self.cut == PIXELS:
            return jax.ShapeDtypeStruct(self.spec.image_shape, jnp.uint8)
        return jax.ShapeDtypeStruct((sum(math.prod(shape) for shape in self._shapes()),), jnp.float32)

    def split_weights(self, weights: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The arrays (`export.flat_weights`, folded) that are needed at home, and those that the tier needs."""
        arrays = {name: array for name, array in weights.items() if not name.endswith(f"/{resnet.FOLDED}")}
        home = {name: array for name, array in arrays.items() if _is_before(self.cut, name.split("/")[1:])}
        return home, {name: array for name, array in arrays.items() if name not in home}

    def before(self, weights: Weights, images: Array) -> Float[Array, "batch size"]:
        """The cut's value, from uint8 images and the arrays needed at home."""
        lanes = self._lanes(weights)
        pixels = to_pixels(images)
        values: list[Array]
        if self.cut == COLUMNS:
            values = [self._lane(spec).apply({"params": params}, pixels) for spec, params in lanes]  # type: ignore[misc]
        else:
            path = _PATHS[self.cut]
            values = []
            for spec, params in lanes:
                params = _with_zeros(params, self._param_shapes(spec))  # for modules after the cut, which XLA drops
                cuts = self._lane(spec).apply({"params": params}, pixels, mutable=[CUTS])[1]
                values.append(read(cuts[CUTS], path))
        return jnp.concatenate([v.astype(jnp.float32).reshape(v.shape[0], -1) for v in values], axis=1)

    def after(self, weights: Weights, rows: Array) -> Float[Array, "batch classes"]:
        """The lanes' part of the squared length of each class capsule, from the cut's value."""
        if self.cut == PIXELS:
            return self._squares(self._outputs_of_pixels(weights, to_pixels(rows)))
        shapes = self._shapes()
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
        parts = jnp.split(rows, ends, axis=1)
        values = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        if self.cut == COLUMNS:
            return self._squares(jnp.stack(values, axis=-1))
        nothing = jnp.zeros((1, *self.spec.image_shape))
        outputs = []
        for (spec, params), value in zip(self._lanes(weights), values, strict=True):
            value = value.astype(self.spec.dtype)
            variables = {"params": params, CUTS: giving(_PATHS[self.cut], value)}
            outputs.append(self._lane(spec).apply(variables, nothing))
        return self._squares(jnp.stack(outputs, axis=-1))  # type: ignore[arg-type]

    def _squares(self, outputs: Float[Array, "batch classes lanes"]) -> Float[Array, "batch classes"]:
        columns = jnp.clip(join_lanes(self.spec, outputs).astype(jnp.float32), -1, 1)  # beyond that is noise
        squares = jnp.square(columns)
        return jnp.sum(squares * jnp.asarray(self.lane_weights, jnp.float32)[None, None], axis=-1)

    def _outputs_of_pixels(self, weights: Weights, pixels: Array) -> Array:
        """The lanes' outputs, computed as in the whole model, so that the sum over tiers has the same rounding."""
        encoder = traverse_util.unflatten_dict(dict(weights), sep="/")
        for group in self.spec.lane_groups:
            if group.kind.normalises:
                encoder[group.name][resnet.FOLDED] = jnp.ones(group.count, bool)
        return lane_outputs(self.spec, encoder, pixels)

    def _lanes(self, weights: Weights) -> list[tuple[LaneSpec, dict]]:
        """Each lane with those of its arrays that are in `weights`, nested."""
        encoder = traverse_util.unflatten_dict(dict(weights), sep="/")
        return [
            (group.spec, jax.tree.map(lambda array, i=i: array[i], encoder.get(group.name, {})))
            for group in self.spec.lane_groups
            for i in range(group.count)
        ]

    def _lane(self, spec: LaneSpec) -> Lane:
        return Lane(spec, dataclasses.replace(self.spec.lane_settings, folded=LANE_KINDS[spec.kind].normalises))

    def _param_shapes(self, spec: LaneSpec) -> dict:
        image = jnp.zeros((1, *self.spec.image_shape))
        return jax.eval_shape(self._lane(spec).init, jax.random.key(0), image)["params"]

    def _shapes(self) -> list[tuple[int, ...]]:
        """The shape of the cut's value in each lane, for one image."""
        if self.cut == COLUMNS:
            return [(self.spec.num_classes,) for _ in self.spec.lane_specs]
        image = jnp.zeros((1, *self.spec.image_shape))
        settings = self.spec.lane_settings

        def value(spec: LaneSpec) -> Array:
            lane = Lane(spec, settings)
            variables = {"params": lane.init(jax.random.key(0), image)["params"]}
            return read(lane.apply(variables, image, mutable=[CUTS])[1][CUTS], _PATHS[self.cut])

        each = {spec: jax.eval_shape(lambda spec=spec: value(spec)).shape[1:] for spec in set(self.spec.lane_specs)}
        return [each[spec] for spec in self.spec.lane_specs]


def cuts_of(spec: ModelSpec) -> tuple[str, ...]:
    """The cuts that all lanes of a model have."""
    kinds = {lane.kind for lane in spec.lane_specs}
    here = [cut for cut in _PATHS if all(cut in _cuts_of_kind(kind) for kind in kinds)]
    return (PIXELS, *here, COLUMNS)


def _cuts_of_kind(kind: str) -> Sequence[str]:
    of_trunk = [cut for cut, path in _PATHS.items() if path[0] == _TRUNK]
    capsules = [] if LANE_KINDS[kind].classifies else ["capsules"]
    return [*(of_trunk if LANE_KINDS[kind].normalises else ["conv1"]), *capsules]


def _with_zeros(params: dict, shapes: dict) -> dict:
    """Nested arrays, with zeros for those that are missing."""
    return {
        name: _with_zeros(params.get(name, {}), shape)
        if isinstance(shape, dict)
        else params.get(name, jnp.zeros(shape.shape, shape.dtype))
        for name, shape in shapes.items()
    }


def _is_before(cut: str, path: Sequence[str]) -> bool:
    """Whether an array of a lane, by its path in it, is needed before a cut."""
    if cut in (PIXELS, COLUMNS):
        return cut == COLUMNS
    if cut == "conv1":
        return path[0] == "conv1"
    if cut == "capsules":
        return path[0] not in ("capsule_weights", "prior_bias")
    if path[0] != _TRUNK:
        return False
    stage = 0 if cut == "stem" else int(cut.removeprefix("stage"))
    return path[1] == resnet.FROZEN or int(path[1].partition("_")[0][-1]) <= stage  # conv2_1, norm2_1

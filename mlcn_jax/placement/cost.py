"""The cost of a computation, derived from the computation itself."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import optax
from jax.extend import core as jex_core
from jaxtyping import Array

from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv, conv_winograd, lanes, model
from mlcn_jax.nn.lane_losses import losses_of_group
from mlcn_jax.nn.model import apply_model, param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.profile import TILES

_FLOAT_BYTES = 4  # parameters, gradients and the optimizer's moments are float32 whatever the compute dtype


@dataclasses.dataclass(frozen=True)
class Layer:
    """One convolution or matrix product of images with parameters, or with each other. Sizes are in values.

    Attributes:
      name: its class, such as `conv 3x3`, `conv 9x9 stride 2` or `dot`.
      after: the class of the layer before it, `images` for the first.
      flops: forward, per image.
      inputs, outputs: per image.
      kernel: parameters; 0 in a product of images with each other.
      family: the lane's kind if that kind normalises, which takes time in each of its layers; otherwise empty.
      convolution: shapes of an image and of the kernel, stride and padding, as for `conv.choose`; None for a product.
    """

    name: str
    after: str
    flops: int
    inputs: int
    outputs: int
    kernel: int
    family: str = ""
    convolution: tuple[tuple[int, ...], tuple[int, ...], int, conv_winograd.Pads] | None = None

    @property
    def places(self) -> int:
        """How often an image uses each parameter: the number of output pixels of a convolution."""
        return self.flops // (2 * self.kernel) if self.kernel else 0

    def speed_class(self, form: str) -> str:
        """Layers of a class have similar speed; a strided one may be fused with the one before (`conv.lane_convs`).

        Args:
          form: as in `LaneCost.forms`.
        """
        name = f"{self.name} after {self.after}" if "stride" in self.name else self.name
        return f"{self.family} {name}{form}".lstrip()


@dataclasses.dataclass(frozen=True)
class LaneCost:
    """The cost of one lane, counted from its plain program, whatever algorithms are used.

    Attributes:
      spec, settings, image_shape: the lane.
      parameters: number of parameters.
      layers: in the order in which they run.
      forward_flops_per_image: FLOPs of a forward pass.
      step_flops_per_image: FLOPs of a forward pass and the gradients of all parameters.
      fixed_step_flops: FLOPs of a step that do not depend on the batch: products of parameters only.
    """

    spec: lanes.LaneSpec
    settings: lanes.LaneSettings
    image_shape: tuple[int, int, int]
    parameters: int
    layers: tuple[Layer, ...]
    forward_flops_per_image: int
    step_flops_per_image: int
    fixed_step_flops: int

    @property
    def activations(self) -> int:
        """Values per image that the layers compute."""
        return sum(layer.outputs for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Parameters and Adam's two moments of each."""
        return 3 * _FLOAT_BYTES * self.parameters

    @property
    def gradient_bytes(self) -> int:
        """The gradient of each parameter."""
        return _FLOAT_BYTES * self.parameters

    def step_flops(self, batch_size: int) -> int:
        """FLOPs of a training step."""
        return self.fixed_step_flops + batch_size * self.step_flops_per_image

    def step_bytes(self, batch_size: int) -> int:
        """The number of bytes that a training step moves if every layer needs both gradients.

        Each layer reads its inputs and kernel and writes its outputs, once forward and twice for the two gradients;
        Adam reads parameters, gradients and moments and writes all except the gradients.
        """
        moved = sum(batch_size * (layer.inputs + layer.outputs) + layer.kernel for layer in self.layers)
        return 3 * self._item_bytes * moved + 7 * _FLOAT_BYTES * self.parameters

    def held_bytes(self, batch_size: int) -> int:
        """Bytes of images, activations, parameters, gradients and moments: a training step without work space."""
        values = math.prod(self.image_shape) + self.activations
        return self._item_bytes * batch_size * values + self.gradient_bytes + self.state_bytes

    def forms(self, platform: str, batch_size: int) -> list[str]:
        """For each layer, how a platform computes it: ` by ` and `conv.training_form`; empty for a product."""
        return [_form(layer.convolution, platform, batch_size, self._item_bytes) for layer in self.layers]

    def memory_features(self, platform: str, batch_size: int) -> dict[str, float]:
        """Features for fitting the memory of a training step on a platform (`fit.fit_bytes`).

        The work space of Winograd's products, the largest of all layers, does not grow with a large batch, which is
        convolved in parts.
        """
        features: dict[str, float] = {
            "step": 1,
            "parameters": self.parameters,
            "images": batch_size * math.prod(self.image_shape),
        }
        for layer, form in zip(self.layers, self.forms(platform, batch_size), strict=True):
            for what, size in (
                ("values", batch_size * (layer.inputs + layer.outputs)),
                ("places", batch_size * layer.places),
                ("kernel", layer.kernel),
            ):
                key = f"{layer.family} {layer.name} after {layer.after}: {what}{form}".lstrip()
                features[key] = features.get(key, 0) + size
            if form == " by winograd" and layer.convolution:
                shape, kernel, _, pads = layer.convolution
                held = conv_winograd.held_values((batch_size, *shape), kernel[-1], pads)
                features[TILES] = max(features.get(TILES, 0), held)
        return features

    @property
    def _item_bytes(self) -> int:
        return jnp.dtype(self.settings.dtype).itemsize


@functools.cache
def _form(convolution: tuple | None, platform: str, batch_size: int, item_bytes: int) -> str:
    if convolution is None:
        return ""
    shape, kernel, stride, pads = convolution
    return f" by {conv.training_form(platform, (batch_size, *shape), kernel, stride, pads, item_bytes)}"


@functools.cache
def lane_cost(spec: lanes.LaneSpec, settings: lanes.LaneSettings, image_shape: tuple[int, int, int]) -> LaneCost:
    """Counts the cost of a lane from its traced program with plain (native) convolutions; nothing is compiled or run.

    No lane kind needs its own formula.
    """
    lane = lanes.Lane(spec, dataclasses.replace(settings, conv_algorithm="native"))
    images = [jax.ShapeDtypeStruct((batch, *image_shape), jnp.float32) for batch in (1, 2)]
    columns = [jax.ShapeDtypeStruct((batch, settings.num_classes), settings.dtype) for batch in (1, 2)]
    params = jax.eval_shape(lambda key, x: lane.init(key, x)["params"], jax.random.key(0), images[0])

    def forward(params, images):
        return lane.apply({"params": params}, images)

    def step(params, images, columns):
        value, vjp = jax.vjp(lambda params: forward(params, images), params)
        return value, vjp(columns.astype(value.dtype))  # log-probabilities are float32 in lanes of any dtype

    # What grows from one image to two belongs to the images, the rest to the step.
    programs = [jax.make_jaxpr(forward)(params, x).jaxpr for x in images]
    forward_flops = [_count(program, [True])[0] for program in programs]
    step_flops = [matmul_flops(step, params, x, g) for x, g in zip(images, columns, strict=True)]
    return LaneCost(
        spec=spec,
        settings=settings,
        image_shape=image_shape,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        layers=tuple(_layers(programs[0], programs[1], spec.kind if lanes.LANE_KINDS[spec.kind].normalises else "")),
        forward_flops_per_image=forward_flops[1] - forward_flops[0],
        step_flops_per_image=step_flops[1] - step_flops[0],
        fixed_step_flops=2 * step_flops[0] - step_flops[1],
    )


def cost_of(spec: ModelSpec, lane: lanes.LaneSpec) -> LaneCost:
    """The cost of a lane with a model's settings and images (`lane_cost`)."""
    return lane_cost(lane, spec.lane_settings, spec.image_shape)


def estimated_parameters(spec: ModelSpec) -> int:
    """Parameters of a model, in constant time for deep lanes: every further layer has as many as the second."""
    if not spec.lane_groups:
        return model.count_parameters(spec)["total"]  # type: ignore[return-value]
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)

    def size(lane: lanes.LaneSpec) -> int:
        shapes = jax.eval_shape(lanes.Lane(lane, spec.lane_settings).init, jax.random.key(0), image)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    total = sum(math.prod(pair) + pair[1] for pair in itertools.pairwise(decoder_widths(spec)))
    for group in spec.lane_groups:
        first, second = (size(dataclasses.replace(group.spec, depth=depth)) for depth in (1, 2))
        total += group.count * (first + (group.spec.depth - 1) * (second - first))
    return total


def decoder_widths(spec: ModelSpec, num_lanes: int | None = None) -> list[int]:
    """Number of values at the input of an MLCN's decoder and at the output of each of its layers.

    `num_lanes` replaces the number of the model's lanes.
    """
    lanes = len(spec.lane_specs) if num_lanes is None else num_lanes
    return [spec.num_classes * lanes, *spec.decoder, math.prod(spec.image_shape)]


def head_bytes(spec: ModelSpec, batch_size: int, num_lanes: int | None = None) -> float:
    """Memory of the decoder's training step, without work space: parameters, gradients, moments and activations.

    `num_lanes` replaces the number of the model's lanes.
    """
    sizes = decoder_widths(spec, num_lanes)
    parameters = sum(before * after + after for before, after in itertools.pairwise(sizes))
    return 4.0 * _FLOAT_BYTES * parameters + _FLOAT_BYTES * batch_size * sum(sizes)


def decoder_step_flops(spec: ModelSpec) -> int:
    """FLOPs per image of a training step of an MLCN's decoder: products, forward and backward."""
    products = [before * after for before, after in itertools.pairwise(decoder_widths(spec))]
    alone = spec.classifies_alone.all() and spec.decoder_gradient == "auto"
    ends_at_capsules = alone or spec.decoder_gradient == "none"
    return 2 * (3 * sum(products) - ends_at_capsules * products[0])


def check_fits_memory(spec: ModelSpec, memory_bytes: int) -> None:
    """Raises InputError if parameters, gradients and moments alone need more memory than available."""
    parameters = estimated_parameters(spec)
    needed = 4 * _FLOAT_BYTES * parameters
    if needed > memory_bytes:
        raise InputError(
            f"model.lanes={spec.lanes}: {parameters:,} parameters, with gradients and moments {needed / 2**30:,.0f} "
            f"GiB, do not fit into the {memory_bytes / 2**30:,.0f} GiB of memory: use fewer or narrower lanes"
        )


def published_cost(spec: lanes.LaneSpec) -> float:
    """Cost of a lane on the fastest device by the published formula, `width^2 * depth`, in arbitrary units.

    Source: do Rosario 2021 (thesis), chapter 5.
    """
    return float(spec.width**2 * spec.depth)


def published_memory_bytes(spec: lanes.LaneSpec) -> float:
    """Memory of a lane by the published formula, `(width^(depth / 2) * 256 + 1832) MiB`.

    Source: do Rosario 2021 (thesis), formula 6.1.
    """
    return (spec.width ** (spec.depth / 2) * 256 + 1832) * 2**20


def make_lane_step(
    group: lanes.LaneGroup, settings: lanes.LaneSettings, optimizer: optax.GradientTransformation
) -> Callable[[tuple, Array, Array], tuple[tuple, Array]]:
    """A training step of some equal lanes, as part of a larger model: timed, and compiled to determine its memory.

    The function `((params, optimizer state), images, gradients of the columns) -> (state, columns)`, pure and not yet
    jitted: forward to the columns [batch, classes, lanes], back from their gradients, update. Lanes that classify alone
    go back from their own losses instead.
    """

    def step(state, images, column_grads):
        params, optimizer_state = state
        if group.kind.classifies:
            own = losses_of_group(group, settings)
            batch = (images, jnp.zeros(len(images), jnp.int32), (), ())
            (columns, _), own_vjp = jax.vjp(lambda params: own(params, jnp.arange(group.count), batch), params)
            (grads,) = own_vjp((column_grads.astype(columns.dtype), jnp.ones(group.count)))
        else:
            columns, vjp = jax.vjp(lambda params: lanes.apply_group(params, group, settings, images), params)
            (grads,) = vjp(column_grads)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), columns

    return step


def compiled_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak memory of a compiled program: arguments, outputs and temporaries, less the outputs that reuse arguments."""
    memory = compiled.memory_analysis()
    assert memory is not None, "the backend does not report its memory"
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def largest_memory_bytes(programs: Iterable[jax.stages.Compiled]) -> int:
    """Peak memory of the compiled program that needs most; 0 where the backend does not report it."""
    return max((compiled_memory_bytes(one) for one in programs if one.memory_analysis() is not None), default=0)


def matmul_flops(fn: Callable, *args) -> int:
    """Floating-point operations in the matrix products and convolutions of `fn(*args)`.

    One multiplication and one addition count as two. Element-wise work (activations, squash, softmax) is left
    out, as is usual. Counted from the traced program, so no layer or lane kind needs its own formula;
    nothing is compiled or run, and `args` may be of `jax.ShapeDtypeStruct`. Unused results, such as
    the images' gradient in a training step, cost nothing, as XLA removes them.
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return _count(jaxpr, [True] * len(jaxpr.outvars))[0]


def forward_flops(spec: ModelSpec) -> int:
    """FLOPs of a forward pass of one image, decoder included, counted from plain (native) convolutions.

    Only one of equal lanes is traced, so many lanes take no longer.
    """
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    if not spec.lane_groups:
        plain = dataclasses.replace(spec, conv="native")
        params = param_shapes(plain)
        return matmul_flops(lambda p, x: apply_model(plain, p, x), params, image)
    total = sum(2 * before * after for before, after in itertools.pairwise(decoder_widths(spec)))
    settings = dataclasses.replace(spec.lane_settings, conv_algorithm="native")
    for group in spec.lane_groups:
        lane = lanes.Lane(group.spec, settings)
        total += group.count * matmul_flops(lane.apply, jax.eval_shape(lane.init, jax.random.key(0), image), image)
    return total


def _count(jaxpr, read: list[bool]) -> tuple[int, list[bool]]:
    """FLOPs of a program if only the marked outputs are used, and which inputs it then uses."""
    total = 0
    needed = {id(v) for v, is_read in zip(jaxpr.outvars, read, strict=True) if is_read}
    for equation in reversed(jaxpr.eqns):
        outputs = [id(v) in needed for v in equation.outvars]
        if not any(outputs):
            continue
        inputs = [True] * len(equation.invars)
        name = equation.primitive.name
        if name in PRODUCT_FLOPS:
            total += PRODUCT_FLOPS[name](equation)
        else:
            inner = list(inner_jaxprs(equation.params))
            is_call = [(len(j.invars), len(j.outvars)) for j in inner] == [(len(inputs), len(outputs))]
            if is_call and name != "scan":
                flops, inputs = _count(inner[0], outputs)
                total += flops
            else:
                repeats = equation.params["length"] if name == "scan" else 1
                total += repeats * sum(_count(j, [True] * len(j.outvars))[0] for j in inner)
        needed |= {id(v) for v, is_read in zip(equation.invars, inputs, strict=True) if is_read}
    return total, [id(v) in needed for v in jaxpr.invars]


def _products(jaxpr) -> Iterator:
    """The products and convolutions of a program, in the order in which they are written."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCT_FLOPS:
            yield equation
        for inner in inner_jaxprs(equation.params):
            yield from _products(inner)


def _layers(program_of_one, program_of_two, family: str) -> Iterator[Layer]:
    """Layers of a forward pass, from its programs for one image and for two.

    A product that does not grow involves parameters only, and is not a layer.
    """
    before = "images"
    for one, two in zip(_products(program_of_one), _products(program_of_two), strict=True):
        flops = [PRODUCT_FLOPS[equation.primitive.name](equation) for equation in (one, two)]
        if flops[0] == flops[1]:
            continue
        sizes = [(a.aval.size, b.aval.size) for a, b in zip(one.invars, two.invars, strict=True)]
        name, convolution = "dot", None
        if one.primitive.name == "conv_general_dilated":
            image, kernel = (value.aval.shape for value in one.invars)  # as in `conv.conv2d`
            stride = max(one.params["window_strides"])
            convolution = (image[1:], kernel, stride, tuple(one.params["padding"]))
            name = f"conv {kernel[0]}x{kernel[1]}" + (f" stride {stride}" if stride > 1 else "")
        yield Layer(
            name=name,
            after=before,
            flops=flops[1] - flops[0],
            inputs=sum(b - a for a, b in sizes),
            outputs=two.outvars[0].aval.size - one.outvars[0].aval.size,
            kernel=sum(a for a, b in sizes if a == b),
            family=family,
            convolution=convolution,
        )
        before = name


def _dot_flops(equation) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
    return 2 * depth * equation.outvars[0].aval.size


def _convolution_flops(equation) -> int:
    """A gradient's convolution, whose operand is dilated and padded with zeros, costs as much as the forward one."""
    image, kernel, out = equation.invars[0].aval, equation.invars[1].aval, equation.outvars[0].aval
    numbers = equation.params["dimension_numbers"]
    axes = zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)
    places = math.prod(min(image.shape[i], out.shape[o]) for i, o in axes)
    batch_and_features = math.prod(out.shape[d] for d in numbers.out_spec[:2])
    return 2 * (kernel.size // kernel.shape[numbers.rhs_spec[0]]) * places * batch_and_features


PRODUCT_FLOPS: dict[str, Callable] = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}


def inner_jaxprs(params: dict):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jex_core.Jaxpr):
                yield item

"""Converts each lane of a trained model to each precision: its function, its weights and their calibration.

Int8 is made by ONNX Runtime's static quantisation of the lane that jax2onnx converts: weights with a scale per output
channel, activations with scales calibrated on training images. Reading it needs ONNX Runtime only.
"""

import contextlib
import dataclasses
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jaxtyping import Array, Float, UInt8

from mlcn_jax import host
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn import resnet, tracing
from mlcn_jax.nn.lanes import apply_lane
from mlcn_jax.nn.model import join_lanes, params_of_lanes
from mlcn_jax.nn.spec import ModelSpec, spec_of
from mlcn_jax.serving.export import flat_weights
from mlcn_jax.serving.onnx import to_onnx
from mlcn_jax.serving.onnx_file import FULL_RANGE, INPUT, open_onnx
from mlcn_jax.serving.parts import ONNX, OUTPUT, Form

if TYPE_CHECKING:
    import onnx

CALIBRATION_BATCH = 64
_PERCENTILES = (100, 99.99, 99.95, 99.9)  # of activations, which 8 bits reach to; with 100, to the largest seen
_QUANTIZED = ["Conv", "MatMul", "Gemm", "Relu"]  # the rest, above all squash and softmax, stays float32
BITS = np.dtype(np.uint16)  # holds the bits of bfloat16, a type that NumPy's files do not have


@dataclasses.dataclass(frozen=True)
class Lane:
    """A lane of a trained model, its index in it, and its parameters without the axis of lanes."""

    spec: ModelSpec
    index: int
    params: dict

    def __str__(self) -> str:
        return f"lane {self.index}, {self.spec.lane_specs[self.index]}"

    def part(self, images: UInt8[Array, "batch h w c"]) -> Float[Array, "batch classes"]:
        """What it adds to the squared length of each class capsule, in float32."""
        return lane_part(self.spec, self.index, self.params, images, "float32")


@dataclasses.dataclass(frozen=True)
class Made:
    """A lane in one form.

    Attributes:
      form: the form.
      num_bytes: bytes of its arrays, or of its ONNX file, which holds the graph too.
      call: a function from uint8 images to the lane's part, ready to run on this machine.
      arrays: its weights for XLA, by name (`stored`).
      onnx: the content of its ONNX file.
    """

    form: Form
    num_bytes: int
    call: Callable[[np.ndarray], Any]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    onnx: bytes = b""


def lanes_of(spec: ModelSpec, encoder: Mapping) -> list[Lane]:
    """The lanes of a model, from its parameters with statistics folded in."""
    return [Lane(spec, i, params) for i, params in enumerate(params_of_lanes(spec, encoder))]


def make(lane: Lane, form: Form, calibration: UInt8[np.ndarray, "n h w c"]) -> Made:
    """A lane in a form, ready to run here; `calibration` are training images, for int8.

    Raises:
      InputError: jax2onnx cannot convert the lane, or its scales are not finite.
    """
    if form.runtime != ONNX:
        return from_arrays(lane.spec, lane.index, form, stored(lane.params, lane.index, form.precision))
    with tempfile.TemporaryDirectory() as folder:
        path = _optimized(lane, Path(folder))
        if form.precision == "int8":
            path = _quantized(lane, path, calibration)
        content = path.read_bytes()
        return Made(form, len(content), open_onnx(path, OUTPUT), onnx=content)


def from_arrays(spec: ModelSpec, lane: int, form: Form, arrays: Mapping[str, np.ndarray]) -> Made:
    """A lane in a form of XLA, from its arrays as an export stores them (`stored`), ready to run here."""
    function = lanes_function(spec, {lane: form.precision})
    on_device = {name: jnp.asarray(array) for name, array in arrays.items()}
    call = jax.jit(
        lambda images: function(on_device, images), compiler_options=spec.compiler_options(jax.default_backend())
    )
    return Made(form, sum(a.nbytes for a in arrays.values()), call, arrays)


def lane_part(
    spec: ModelSpec, lane: int, params: dict, images: UInt8[Array, "batch h w c"], precision: str
) -> Float[Array, "batch classes"]:
    """`Lane.part` as a pure function."""
    one = dataclasses.replace(spec_of(spec, [lane]), compute_dtype=precision, lane_weights=())
    column = apply_lane(params, one.lane_specs[0], one.lane_settings, to_pixels(images))
    v = join_lanes(one, column[..., None])[..., 0].astype(jnp.float32)
    return np.float32(spec.weights[lane]) * jnp.square(v)


def lanes_function(spec: ModelSpec, precisions: Mapping[int, str]) -> Callable[[Mapping[str, Array], Array], Array]:
    """The function from arrays (`stored`) and uint8 images to the sum of the parts of some lanes, by precision."""

    def total(weights: Mapping[str, Array], images: Array) -> Array:
        parts = []
        for lane, precision in precisions.items():
            params = traverse_util.unflatten_dict(dict(weights), sep="/")[str(lane)]
            params = jax.tree.map(
                lambda a, to=precision: lax.bitcast_convert_type(a, jnp.dtype(to)) if a.dtype == BITS else a, params
            )
            parts.append(lane_part(spec, lane, params, images, precision))
        return sum(parts)  # type: ignore[return-value]

    return total


def stored(params: dict, lane: int, precision: str) -> dict[str, np.ndarray]:
    """The arrays of a lane as an export stores them, by name; those in bfloat16 as their bits.

    Whitening stays in float32, in which it is computed (`resnet.Trunk`).
    """
    arrays = {f"{lane}/{name}": array for name, array in flat_weights(params).items()}
    if precision == "float32":
        return arrays
    as_it_is = {name for name, a in arrays.items() if a.dtype == bool or f"/{resnet.FROZEN}/" in name}
    return {n: a if n in as_it_is else a.astype(jnp.dtype(precision)).view(BITS) for n, a in arrays.items()}


def _optimized(lane: Lane, folder: Path) -> Path:
    """The lane as an ONNX file, in which all that depends only on weights is computed beforehand."""
    import onnx
    from onnxruntime.quantization import quant_pre_process

    plain = dataclasses.replace(lane, spec=dataclasses.replace(lane.spec, conv="native"))

    def part(images: Array) -> Array:
        with tracing.using(tracing.Target(platform="onnx")):  # leaves out what is done only for XLA on a CPU
            return plain.part(images)

    converted = to_onnx(part, lane.spec.image_shape, OUTPUT, str(lane))
    onnx.save(converted, folder / "converted.onnx")
    quant_pre_process(folder / "converted.onnx", folder / "optimized.onnx", skip_symbolic_shape=True)
    return folder / "optimized.onnx"


def _quantized(lane: Lane, path: Path, images: UInt8[np.ndarray, "n h w c"]) -> Path:
    """Quantises an ONNX file to int8, as a new file; weights have 7 bits if sums of 8 bits may saturate on this CPU.

    Activations beyond a percentile are cut off, which leaves finer steps for the others: of `_PERCENTILES`, the one is
    taken with which the lane's results for the calibration images have the least mean squared error. The first
    convolution, which is small, stays in float32: whitening above all magnifies small differences of pixels.

    Source: Krishnamoorthi 2018, arXiv 1806.08342, section 3: a scale per output channel for weights; Wu et al. 2020,
    arXiv 2004.09602, section 3.3.1: percentiles.
    """
    import onnx

    batches = [images[i : i + CALIBRATION_BATCH] for i in range(0, len(images), CALIBRATION_BATCH)]
    wanted = _results(path, batches)
    equalised = _equalised(path, batches, str(lane))
    first = next(node.name for node in onnx.load(path).graph.node if node.op_type == "Conv")
    errors: dict[Path, float] = {}
    for percentile in _PERCENTILES:
        found = _quantized_to(equalised, [first], batches, percentile, str(lane))
        errors[found] = float(np.mean(np.square(_results(found, batches) - wanted)))
    return min(errors, key=errors.__getitem__)


def _equalised(path: Path, batches: Sequence[np.ndarray], lane: str) -> Path:
    """Gives all channels of the last convolution one range, by factors that are taken out of its kernels and bias.

    The 8 bits of an output have one scale, while the channels of primary capsules differ tenfold. In float32 the lane
    computes what it did. Source: after Nagel et al. 2019, arXiv 1906.04721, section 4.1, who equalise between layers.
    """
    import onnx

    model = onnx.load(path)
    node = [node for node in model.graph.node if node.op_type == "Conv"][-1]
    (output,) = node.output
    model.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
    onnx.save(model, path.with_name("probed.onnx"))
    call = open_onnx(path.with_name("probed.onnx"), output)
    factors = np.max([np.abs(call(batch)).max(axis=(0, 2, 3)) for batch in batches], axis=0)
    if not np.isfinite(factors).all():
        raise _not_finite(lane, output)
    factors[factors == 0] = 1.0
    model.graph.output.pop()
    assert any(tensor.name == node.input[1] for tensor in model.graph.initializer), "kernels are not computed"
    for tensor in model.graph.initializer:
        if tensor.name in node.input[1:]:
            array = onnx.numpy_helper.to_array(tensor)
            by_channel = factors.reshape(-1, *[1] * (array.ndim - 1))
            tensor.CopyFrom(onnx.numpy_helper.from_array(array / by_channel, tensor.name))
    node.output[0], name = f"{output}_equalised", f"{output}_factors"
    model.graph.initializer.append(onnx.numpy_helper.from_array(factors.reshape(1, -1, 1, 1), name))
    product = onnx.helper.make_node("Mul", [node.output[0], name], [output], name=f"{output}_product")
    model.graph.node.insert([*model.graph.node].index(node) + 1, product)
    onnx.save(model, path.with_name("equalised.onnx"))
    return path.with_name("equalised.onnx")


def _results(path: Path, batches: Sequence[np.ndarray]) -> np.ndarray:
    call = open_onnx(path, OUTPUT)
    return np.concatenate([call(batch) for batch in batches])


def _quantized_to(path: Path, exclude: list[str], batches: Sequence[np.ndarray], percentile: float, lane: str) -> Path:
    """`_quantized` with one percentile."""
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._batches: Iterator[np.ndarray] = iter(())

        def __len__(self) -> int:
            return len(batches)

        def set_range(self, start_index: int, end_index: int) -> None:
            self._batches = iter(batches[start_index:end_index])

        def get_next(self) -> dict | None:
            return next(({INPUT: batch} for batch in self._batches), None)

    found, full_range = path.with_name(f"int8-{percentile:g}.onnx"), host.adds_bytes_exactly()
    methods = quantization.CalibrationMethod
    try:
        # NumPy warns of ranges that are not finite, and percentiles are printed.
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            quantization.quantize_static(
                path,
                found,
                Reader(),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=_QUANTIZED,
                nodes_to_exclude=exclude,
                per_channel=True,
                weight_type=quantization.QuantType.QInt8,
                activation_type=quantization.QuantType.QUInt8,
                reduce_range=not full_range,
                calibrate_method=methods.MinMax if percentile == 100 else methods.Percentile,
                # Ranges are merged after each batch, whose activations alone are held in memory then.
                extra_options={"CalibPercentile": percentile, "CalibStridedMinMax": 1},
            )
    except AssertionError as error:  # raised for ranges that are not finite
        raise _not_finite(lane, str(error)) from error
    quantized = onnx.load(found)
    check_scales(quantized, lane)
    if full_range:
        onnx.helper.set_model_props(quantized, {FULL_RANGE: "true"})
        onnx.save(quantized, found)
    return found


def check_scales(model: "onnx.ModelProto", lane: str) -> None:
    """Raises InputError if a scale of a quantised model is not finite."""
    from onnx import numpy_helper

    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scale") and not np.isfinite(numpy_helper.to_array(tensor)).all():
            raise _not_finite(lane, tensor.name)


def _not_finite(lane: str, what: str) -> InputError:
    return InputError(
        f"{lane}: a scale of its int8 form is not finite ({what}), because the lane's weights or its values on the "
        "calibration images are not finite: train the model again"
    )

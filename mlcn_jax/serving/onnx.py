"""A trained model as ONNX: read from its export and converted.

jax2onnx converts the model's own function, so a new kind of lane needs no change here. It needs an older
orbax-checkpoint than training does, so models are read from what `mlcn_jax export` wrote.
The command is `mlcn_jax onnx`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import lax
from jaxtyping import Array, Float, UInt8

from mlcn_jax.config import RunConfig, unused_fields
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json
from mlcn_jax.launch import program
from mlcn_jax.nn import capsules, tracing
from mlcn_jax.nn.lanes import PUBLISHED_KINDS, JointConvParams, LaneGroup, apply_lane, first_input
from mlcn_jax.nn.model import class_lengths, encode, join_lanes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving.artifact import MANIFEST, MIXED_FORMAT, WEIGHTS, Artifact, check_unchanged, verified_manifest
from mlcn_jax.serving.onnx_file import INPUT
from mlcn_jax.serving.predict import export_is_current
from mlcn_jax.serving.runtime import OUTPUT
from mlcn_jax.settings import DataSettings

if TYPE_CHECKING:
    import onnx


TOLERANCE = 1e-4  # largest difference of lengths
_OPSET = 18  # the oldest that has every operator used, so that older runtimes can read the model too
_PACKAGES = ("onnx", "onnxruntime", "jax2onnx")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """The model in `WORKDIR/export`, as a function of its parameters.

    Attributes:
      artifact: the export, verified.
      spec: the model.
      encoder: its parameters.
      lanes: its lanes as text; `capsnet` if it has none.
      data: data settings of the run that trained it.
      config: the content of its `config.json`.
    """

    artifact: Artifact
    spec: ModelSpec
    encoder: dict
    lanes: str
    data: DataSettings
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def lengths(self, images: UInt8[Array, "batch h w channels"]) -> Float[Array, "batch classes"]:
        """Lengths of the class capsules, computed in float32 whatever type the model was trained with."""
        spec = dataclasses.replace(self.spec, compute_dtype="float32")
        return class_lengths(spec, encode(spec, self.encoder, to_pixels(images)))


def read_export(workdir: Path, data_dir: str = "") -> ExportedModel:
    """Reads `workdir/export`; `data_dir` replaces `data.dir` if the run's images have moved.

    There is a warning if the run has checkpoints that are newer than its export.

    Raises:
      InputError: there is no export, or it is damaged.
    """
    folder = workdir / "export"
    if (workdir / MANIFEST).exists():
        raise InputError(f"{workdir} is an exported model: give the workdir of the run that it was exported from")
    if not folder.is_dir():
        what = "does not hold an exported model" if workdir.is_dir() else "does not exist"
        raise InputError(f"{workdir} {what}: once a run has trained, {program()} export --workdir=WORKDIR exports it")
    if verified_manifest(folder)["format"] == MIXED_FORMAT:
        raise InputError(
            f"{folder} holds lanes in several precisions, as {program()} precision writes them, which cannot be "
            "converted: give the workdir of the run itself"
        )
    artifact = Artifact(folder, "xla")
    if (workdir / "checkpoints").is_dir() and not export_is_current(workdir):
        _log.warning(
            "%s is older than the run's newest checkpoint or its model.json, and is read as it is: run %s export "
            "--workdir=%s for an export of the newer model",
            *(folder, program(), workdir),
        )
    stored = read_json(folder / "config.json")
    with np.load(folder / WEIGHTS, allow_pickle=False) as arrays:
        weights = {name: jnp.asarray(array) for name, array in arrays.items()}
    check_unchanged(folder, artifact.manifest)
    config = RunConfig.from_dict(stored)
    config = config.replace(unused_fields(config))  # older exports could have them
    if data_dir:
        config = config.replace({"data.dir": data_dir})
    return ExportedModel(
        artifact=artifact,
        spec=config.model_spec(artifact.image_shape, len(artifact.class_names)),
        encoder=traverse_util.unflatten_dict(weights, sep="/"),
        lanes=artifact.description["lanes"],
        data=config.data,
        config=stored,
    )


def without_vmap(spec: ModelSpec, encoder: dict) -> Callable[[Array], Array]:
    """`ExportedModel.lengths` with plain convolutions and without vmap.

    jax2onnx writes wrong shapes for batched matrix products, which vmapped lanes use. Equal published lanes are one
    network of grouped convolutions: lane after lane, much of a single image's time in ONNX Runtime is that of small
    operations.
    """
    spec = dataclasses.replace(spec, conv="native", compute_dtype="float32")

    def columns(group: LaneGroup, x: Array) -> Array:
        params, settings = encoder[group.name], spec.lane_settings
        if group.count > 1 and group.spec.kind in PUBLISHED_KINDS and settings.lane_routing == "published":
            return _grouped(params, group, first_input(x, settings.signed_pixels, settings.dtype))
        lanes = (jax.tree.map(lambda array, i=i: array[i], params) for i in range(group.count))
        return jnp.stack([apply_lane(lane, group.spec, settings, x) for lane in lanes], axis=-1)

    def lengths(images: Array) -> Array:
        x = to_pixels(images)
        with tracing.using(tracing.Target(platform="onnx")):  # leaves out what is done only for XLA on a CPU
            if spec.lane_groups:
                v = join_lanes(spec, jnp.concatenate([columns(group, x) for group in spec.lane_groups], axis=-1))
            else:
                v = encode(spec, encoder, x)
            return class_lengths(spec, v)

    return lengths


def _grouped(params: dict, group: LaneGroup, x: Float[Array, "batch h w c"]) -> Float[Array, "batch classes lanes"]:
    """`apply_group` of published lanes as grouped convolutions, the last of which are the products of capsules."""

    def convolve(x: Array, layer: Sequence[Array], stride: int = 1, padding: str = "VALID", groups: int = group.count):
        """With kernels [lanes, height, width, channels in, channels out] and biases [lanes, channels out]."""
        kernel, bias = layer
        kernel = jnp.moveaxis(kernel, 0, -2).reshape(*kernel.shape[1:-1], -1)
        layout = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=layout, feature_group_count=groups
        )
        return y + bias.reshape(1, 1, 1, -1)

    layers = {name: (own["kernel"], own["bias"]) for name, own in params.items() if isinstance(own, dict)}
    if "pointwise" in (own := params["conv1"]):
        _, channels, middle = own["pointwise"].shape
        joint = JointConvParams(channels, middle, own["bias"].shape[-1])
        layers["conv1"] = jax.vmap(lambda own: joint.apply({"params": own}))(own)
    x = jax.nn.relu(convolve(x, layers["conv1"], groups=1))
    for i in range(1, group.spec.depth):
        x = jax.nn.relu(convolve(x, layers[f"deep{i}"], padding="SAME"))
    x = convolve(x, layers["primary"], stride=2)
    x = x.reshape(x.shape[0], -1, group.count, x.shape[-1] // group.count).swapaxes(1, 2)
    weights = params["capsule_weights"]
    u = capsules.squash(x.reshape(*x.shape[:2], *weights.shape[1:-1]))
    flat = weights.reshape(group.count, 1, 1, -1, weights.shape[-1])
    s = convolve(u.reshape(u.shape[0], 1, 1, -1), (flat, jnp.zeros(())))
    return capsules.squash(s.reshape(s.shape[0], group.count, -1)).swapaxes(1, 2)


def to_onnx(
    function: Callable[[Any], Any], image_shape: tuple[int, int, int], output: str, what: str
) -> "onnx.ModelProto":
    """A function of uint8 images [batch, h, w, channels] as ONNX, for any batch.

    Args:
      function: function to convert.
      image_shape: height, width and channels.
      output: name of its output; its input is `INPUT`.
      what: what is converted, for the error message.

    Raises:
      InputError: jax2onnx cannot convert one of its operations.
    """
    import jax2onnx

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns about shapes that it leaves to the runtime
    try:
        return jax2onnx.to_onnx(
            function,
            [jax.ShapeDtypeStruct(("batch", *image_shape), jnp.uint8)],
            model_name="mlcn_jax",
            opset=_OPSET,
            input_names=[INPUT],
            output_names=[output],
        )
    except NotImplementedError as error:
        raise InputError(f"jax2onnx cannot convert {what}: {error}") from error


def convert(model: ExportedModel) -> "onnx.ModelProto":
    """The model as ONNX: uint8 `images` [batch, h, w, channels] to float32 `lengths` [batch, classes].

    Raises:
      InputError: jax2onnx cannot convert an operation of a lane.
    """
    import onnx

    converted = to_onnx(without_vmap(model.spec, model.encoder), model.spec.image_shape, OUTPUT, model.lanes)
    facts = {
        "class_names": model.artifact.class_names,
        "image_shape": model.spec.image_shape,
        "lanes": model.lanes,
        **probability(model.spec),
    }
    onnx.helper.set_model_props(converted, {name: json.dumps(value) for name, value in facts.items()})
    onnx.checker.check_model(converted, full_check=True)
    return converted


def probability(spec: ModelSpec) -> dict[str, float]:
    """What makes lengths probabilities: min(length / certain_length, 1) ** probability_power, as in every export."""
    return {"certain_length": spec.certain_length, "probability_power": spec.probability_power}


def versions() -> dict[str, str]:
    """The versions of the packages that only the conversion to ONNX needs.

    Raises:
      InputError: one is not installed.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)} cannot be imported: in a clone, run `make onnx WORKDIR=...` or `make precision "
            "WORKDIR=...`, which install them into .venv-onnx and use .venv-onnx/bin/python; elsewhere, install them "
            "with pip in a separate environment"
        )
    import onnxruntime  # asked for its version because its package has several names, such as onnxruntime-gpu

    others = {name: importlib.metadata.version(name) for name in _PACKAGES if name != "onnxruntime"}
    return {**others, "onnxruntime": onnxruntime.__version__}

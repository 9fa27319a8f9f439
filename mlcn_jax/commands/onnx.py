"""Converts an exported model to ONNX, and checks it with ONNX Runtime.

    mlcn_jax onnx --workdir=runs/quickstart
    make onnx WORKDIR=runs/quickstart          # in a clone: in an environment of its own, .venv-onnx

Needs jax2onnx, onnx, onnxruntime and the output of `mlcn_jax export`. jax2onnx needs an older orbax-checkpoint than
training does, so install it in a separate environment. Writes to the workdir, or to the folder `--output`,

    onnx/model.onnx    uint8 `images` [batch, height, width, channels] to float32 `lengths` [batch, classes], for any
                       batch size, in float32; the class names are in its metadata
    onnx/model.json    inputs, outputs, versions, and how closely ONNX Runtime matches the model

once ONNX Runtime reproduces the model's lengths to 1e-4, for random images and test images, in batches of several
sizes.
"""

from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments


def define(values: flags.FlagValues) -> None:
    arguments.define_reading(values)
    text = "Folder for the ONNX model; default: WORKDIR/onnx, or onnx-digits for the packaged digits."
    flags.DEFINE_string("output", "", text, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("onnx", __doc__, define, argv)
    workdir = arguments.given_workdir(values)

    from mlcn_jax import host, pretrained
    from mlcn_jax.serving.onnx_export import export

    host.set_up_jax()
    path = export(workdir, values.data_dir, pretrained.output_folder(values.output, workdir, "onnx"))
    print(f"{path} computes the model's lengths; {path.with_suffix('.json')} describes its inputs and outputs")

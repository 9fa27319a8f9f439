"""Converts an exported model to ONNX, and checks it with ONNX Runtime.

    make onnx WORKDIR=runs/quickstart
    .venv-onnx/bin/python -m mlcn_jax onnx --workdir=runs/quickstart

Needs requirements-onnx.txt and the output of `mlcn_jax export`. Writes to the workdir, or to the folder `--output`,

    onnx/model.onnx    uint8 `images` [batch, height, width, channels] to float32 `lengths` [batch, classes], for any
                       batch, in float32; the names of the classes are in its metadata
    onnx/model.json    inputs, outputs, versions, and how closely ONNX Runtime matches the model

once ONNX Runtime gives the model's lengths to 1e-4, for random images and those of the test set, in batches of several
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

    from mlcn_jax import pretrained
    from mlcn_jax.serving.onnx_export import export

    path = export(workdir, values.data_dir, pretrained.output_folder(values.output, workdir, "onnx"))
    print(f"{path} gives the model's lengths; {path.with_suffix('.json')} says what goes in and comes out")

"""Measures each lane of a trained model in float32, bfloat16 and int8, and exports the smallest or the fastest mix.

    make precision WORKDIR=runs/mlcn2
    .venv-onnx/bin/python -m mlcn_jax precision --workdir=runs/mlcn2 --choose=fastest --max_accuracy_drop=0.2

Needs requirements-onnx.txt and the output of `mlcn_jax export`. Int8 is ONNX Runtime's static quantisation: weights
with a scale per channel, activations calibrated on training images. Every lane is computed once in each precision, from
which the accuracy of every mix follows exactly. The mix may lose --max_accuracy_drop points on the validation images,
or, if the run has none, on 5,000 of its training images. Test accuracy is for the record and decides nothing. For the
fastest, the mix whose lanes take the least time one by one, and all lanes in one form, are timed as whole models.

Prints a table of lane by precision: the bytes of its weights, milliseconds of a batch on this machine, and its accuracy
alone. Writes `precision.json` and the folder `export`, which predict, serve and `tiers split --precision` take, to
`WORKDIR/precision`. Reading it needs ONNX Runtime (pip install 'mlcn_jax[onnxruntime]').

With --profiles, a form and a device are also chosen for each lane. The folder `placed` is the export in these forms,
and `tiers.json` has the lanes of each device, for `tiers split`: list the nearest device first.
"""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program


def define(values: flags.FlagValues) -> None:
    arguments.define_reading(values)
    text = "The mix to export: smallest (file of weights) or fastest (on this machine)."
    flags.DEFINE_enum("choose", "smallest", ["smallest", "fastest"], text, flag_values=values)
    text = "Percentage points of accuracy that the mix may lose."
    flags.DEFINE_float("max_accuracy_drop", 0.1, text, flag_values=values)
    text = "Training images that int8 is calibrated on."
    flags.DEFINE_integer("calibration_images", 512, text, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("batch", 64, "Images in a timed call.", lower_bound=1, upper_bound=128, flag_values=values)
    flags.DEFINE_integer("rounds", 10, "Interleaved rounds of timing.", lower_bound=1, flag_values=values)
    text = "Device profiles (profile --forms=LANES), separated by commas: forms and devices are chosen together."
    flags.DEFINE_string("profiles", "", text, flag_values=values)
    text = "Folder for the results; default: WORKDIR/precision, or precision-digits for the packaged digits."
    flags.DEFINE_string("output", "", text, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("precision", __doc__, define, argv)
    workdir = arguments.given_workdir(values)
    drop = values.max_accuracy_drop
    if not (math.isfinite(drop) and drop >= 0):
        raise InputError(f"--max_accuracy_drop={drop} is not a number of percentage points; it must be 0 or more")

    from mlcn_jax import pretrained
    from mlcn_jax.serving.precision.export import PLACED, TIERS, Terms, precision, table

    terms = Terms(values.choose, drop, values.calibration_images, values.batch, values.rounds)
    command = shlex.join(["mlcn_jax", "precision", *argv])
    results = pretrained.output_folder(values.output, workdir, "precision")
    profiles = [Path(name.strip()).expanduser() for name in values.profiles.split(",") if name.strip()]
    about = precision(workdir, results, terms, command, values.data_dir, profiles)
    print(table(about))
    if about["placement"]:
        tiers, placed = (shlex.quote(str(results / name)) for name in (TIERS, PLACED))
        print(
            "with lanes that classify alone, on two devices or more: "
            f"{program()} tiers split {shlex.quote(str(workdir))} --tiers={tiers} --precision={placed}"
        )
    print(f"exported {about['export']}; use it with: {program()} predict {shlex.quote(about['export'])} IMAGE ...")

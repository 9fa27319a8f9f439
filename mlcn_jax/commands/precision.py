"""Measures each lane of a trained model in float32, bfloat16 and int8, and exports the smallest or the fastest mix.

    mlcn_jax precision --workdir=runs/mlcn2 --choose=fastest --max_accuracy_drop=0.2
    make precision WORKDIR=runs/mlcn2          # in a clone: in an environment of its own, .venv-onnx

Needs jax2onnx, onnx, onnxruntime, and a run's workdir with the output of `mlcn_jax export`. jax2onnx needs an older
orbax-checkpoint than training does, so install it in a separate environment. Int8 is ONNX Runtime's static
quantisation: weights with a scale per channel, activations calibrated on training images. Every lane is computed once
in each precision, and the accuracy of every mix follows exactly. The mix may lose --max_accuracy_drop points on the
validation images, or, if the run has none, on 5,000 of its training images. Test accuracy is reported but decides
nothing. For the fastest, the mix of the individually fastest lanes, and all lanes in one form, are timed as whole
models.

Prints a table of lanes and precisions: bytes of the weights, milliseconds per batch on this machine, and the accuracy
of the lane alone. Writes to `WORKDIR/precision`: `precision.json`, and the folder `export`, which predict, serve and
`tiers split --precision` read. Reading it needs ONNX Runtime (pip install 'mlcn_jax[onnxruntime]').

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

    from mlcn_jax import host, pretrained
    from mlcn_jax.serving.precision.export import PLACED, TIERS, Terms, precision, table

    host.set_up_jax()
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

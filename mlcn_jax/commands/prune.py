"""Measures what each lane of a trained model is worth, and removes the least useful ones.

    mlcn_jax prune --workdir=runs/mlcn1,runs/mlcn1_lane_dropout                 # figure 4.6 of the thesis
    mlcn_jax prune --workdir=runs/mlcn1 --keep=4 --output=runs/small            # the 4 best lanes
    mlcn_jax prune --workdir=runs/mlcn1 --max_accuracy_drop=0.5 --output=runs/small

Measures the accuracy with each lane removed alone, then with 1, 2, ... of them removed, the least useful first, and the
speed of the models with fewer lanes. Lanes are ranked, and `--max_accuracy_drop` is judged, on the run's validation
images, or, if it has none, on 5,000 of its training images, which makes a model look better than it is. Test accuracy
is reported but decides nothing. Writes `prune.json` and `prune.png` to the folder `prune` of the (first) workdir.

`--output` is a workdir like any other, with the kept lanes' parameters and optimizer state at the same step:
`evaluate` scores it, and the printed command trains it further. Do so: without the removed lanes, class capsules are
shorter than the margin loss requires, so lengths are no longer probabilities until the model has been trained further
(unless each lane learned to classify alone: `model.margin_loss` `per_lane` or `per_lane_sum`, and residual lanes).
"""

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError


def define(values: flags.FlagValues) -> None:
    several = f"{arguments.WORKDIR} Several (repeat the flag, or separate by commas) are compared."
    flags.DEFINE_multi_string("workdir", [], several, flag_values=values)
    orders = ["alone", "greedy"]
    flags.DEFINE_enum("order", "alone", orders, "alone ranks lanes once, greedy at each removal.", flag_values=values)
    flags.DEFINE_integer("keep", None, "Number of lanes in the smaller model.", flag_values=values)
    text = "Percentage points of accuracy that the smaller model may lose."
    flags.DEFINE_float("max_accuracy_drop", None, text, flag_values=values)
    flags.DEFINE_string("output", "", "New workdir for the smaller model.", flag_values=values)
    text = "Folder for prune.json and prune.png; default: WORKDIR/prune, or prune-digits for the packaged digits."
    flags.DEFINE_string("results", "", text, flag_values=values)
    text = "Interleaved rounds of timing; 0 skips timing."
    flags.DEFINE_integer("rounds", 10, text, lower_bound=0, flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("prune", __doc__, define, argv)
    names = [name for given in values.workdir for name in ([given] if os.path.exists(given) else given.split(","))]
    check_flags(names, values.keep, values.max_accuracy_drop, values.output)

    from mlcn_jax import pretrained

    workdirs = [pretrained.find_workdir(name) for name in names]
    results = pretrained.output_folder(values.results, workdirs[0], "prune")
    output = Path(values.output).expanduser() if values.output else None
    if output and results.resolve().is_relative_to(output.resolve()):
        raise InputError(f"--results={results} is inside --output={output}, which is created at the end")
    from mlcn_jax.analysis.prune_report import measure_and_prune

    measure_and_prune(
        workdirs,
        order=values.order,
        rounds=values.rounds,
        results=results,
        output=output,
        keep=values.keep,
        max_drop=values.max_accuracy_drop,
        data_dir=values.data_dir,
        command=shlex.join(["mlcn_jax", "prune", *argv]),
    )


def check_flags(workdirs: Sequence[str], keep: int | None, max_drop: float | None, output: str) -> None:
    """Raises InputError if the flags contradict each other."""
    if not workdirs or not all(workdirs):
        raise InputError("give --workdir=FOLDER, the workdir of a trained MLCN")
    if keep is not None and max_drop is not None:
        raise InputError("give --keep or --max_accuracy_drop, not both: each decides how many lanes are kept")
    if keep is not None and keep < 1:
        raise InputError(f"--keep={keep}: at least 1 lane must be kept")
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop >= 0):
        raise InputError(f"--max_accuracy_drop={max_drop} is not a number of percentage points; it must be 0 or more")
    if (keep is not None or max_drop is not None) != bool(output):
        raise InputError("a smaller model needs --output=FOLDER and either --keep or --max_accuracy_drop")
    if output and len(workdirs) > 1:
        raise InputError("--output needs a single --workdir: several can only be compared")

"""Joins lanes that were trained apart, or adds some to a trained model, and writes a workdir like any other.

    mlcn_jax join --workdir=runs/lane0,runs/lane1,runs/lane2 --output=runs/joined
    mlcn_jax join --workdir=runs/joined,runs/lane3 --output=runs/four                 # one lane more

The lanes must have learned to classify alone (`resnet`, or `model.margin_loss` of `per_lane_sum` or `per_lane`), on the
same training and validation images; any differences are named. Their columns are computed once. Weights of the lanes
are fitted on the validation images and the decoder is trained on the training images; the lanes stay unchanged. Prints
the accuracy with each added lane and writes it to `joined.json`. Test accuracy is reported but decides nothing.

The result can be evaluated, pruned, exported, served and trained further: it is at step 0 of a run with the settings of
the first workdir. `mlcn_jax prune` removes lanes again.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program


def define(values: flags.FlagValues) -> None:
    text = "Folders of finished runs, separated by commas, in the order in which their lanes are joined."
    flags.DEFINE_multi_string("workdir", [], text, flag_values=values)
    flags.DEFINE_string("output", "", "New workdir for the joined model.", flag_values=values)
    text = "Weights of the lanes: fitted on validation images, or equal."
    flags.DEFINE_enum("weights", "fitted", ["fitted", "equal"], text, flag_values=values)
    text = "Passes over the training images that train the decoder."
    flags.DEFINE_integer("decoder_epochs", 5, text, lower_bound=0, flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the runs' config.data.dir, if not empty.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("join", __doc__, define, argv)
    names = [name for given in values.workdir for name in ([given] if os.path.exists(given) else given.split(","))]
    if not names or not all(names):
        raise InputError("give --workdir=FOLDER,FOLDER of the finished runs whose lanes are to be joined")
    if not values.output:
        raise InputError("--output=FOLDER is needed: the joined model is written there")
    output = Path(values.output).expanduser()

    from mlcn_jax import host
    from mlcn_jax.analysis.join import join

    host.set_up_jax()
    about = join(
        [Path(name).expanduser() for name in names],
        output,
        data_dir=values.data_dir or None,
        weights=values.weights,
        decoder_epochs=values.decoder_epochs,
    )
    print(told(about, output))


def told(about: Mapping[str, Any], output: Path) -> str:
    """The result as text: a table of the lanes, and commands for the next steps."""
    from mlcn_jax.analysis.workdir import train_command
    from mlcn_jax.config import read_stored

    splits = [name for name in ("validation", "test") if f"{name}_accuracy" in about]
    rows = [["lanes", "added", "weight", *(f"{name} {what}" for name in splits for what in ("alone", "so far"))]]
    for count, lane in enumerate(about["lanes"], start=1):
        shares = [lane[f"{name}_accuracy{what}"] for name in splits for what in ("_alone", "")]
        rows.append([str(count), lane["lane"], f"{lane['weight']:.2f}", *(f"{share:.2%}" for share in shares)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    folder = shlex.quote(str(output))
    written = f"written to {output}; evaluate it: {program()} evaluate --workdir={folder}"
    further = train_command(read_stored(output), output, placed=False)  # the sharding may not fit these lanes
    return "\n".join([*table, written, f"train it further: {further}"])

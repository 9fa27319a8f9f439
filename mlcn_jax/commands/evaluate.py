"""Scores a trained model on its test set, prints JSON, and redraws the pictures.

mlcn_jax evaluate --workdir=runs/mlcn2
mlcn_jax evaluate --workdir=digits --output=pictures
mlcn_jax evaluate --workdir=runs/mlcn2 --config.data.dir=FOLDER    # the images have moved
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", arguments.WORKDIR, flag_values=values)
    flags.DEFINE_string("output", "", "Folder for the pictures; if empty, the workdir.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("evaluate", __doc__, define, argv, config="run")
    workdir = arguments.given_workdir(values)
    config = config_of(values, workdir)

    from mlcn_jax import host, pretrained
    from mlcn_jax.analysis.evaluate_workdir import evaluate_workdir
    from mlcn_jax.files import make_folder

    output = Path(values.output).expanduser() if values.output else workdir
    if pretrained.is_pretrained(output):
        output = pretrained.output_folder("", workdir, "evaluate")
    if output != workdir:
        make_folder(output, "output")
    host.keep_compiled_programs()
    print(json.dumps(evaluate_workdir(config, workdir, output), indent=2))

"""Prints as JSON what a configuration builds: lanes, parameters, FLOPs and the cost of each lane. Trains nothing.

mlcn_jax describe --config=capsnet_mnist
mlcn_jax describe --workdir=runs/mlcn2
"""

import json
from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", f"Instead of --config: {arguments.WORKDIR}", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("describe", __doc__, define, argv, config="run")
    config = config_of(values, arguments.given_workdir(values) if values.workdir else None)

    from mlcn_jax.analysis.describe import describe

    print(json.dumps(describe(config), indent=2))

"""Writes the best checkpoint of a workdir as `WORKDIR/export`, which `predict` and `serve` use without training code.

    mlcn_jax export --workdir=runs/mlcn2

The folder also gets a model card, `README.md`: what the model is, its data, its accuracy and how to use it. Before the
export is put in place, it is loaded again and must reproduce the model's lengths on this machine, to 1e-5 (in
float32 on a CPU).
"""

import shlex
from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.launch import program


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Folder of a training run.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("export", __doc__, define, argv)
    workdir = arguments.given_workdir(values)

    from mlcn_jax import host, pretrained
    from mlcn_jax.serving import export

    host.set_up_jax()
    pretrained.check_writable(workdir, "export")
    folder = export.export(workdir)
    print(f"exported {folder}; use it with: {program()} predict {shlex.quote(str(folder))} IMAGE ...")

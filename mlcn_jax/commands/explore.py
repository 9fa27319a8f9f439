"""Serves a local page to try out lanes: choose an image, change lanes or switch them off, and see what happens.

    mlcn_jax explore --workdir=runs/mlcn2
    mlcn_jax explore --workdir=digits

Needs Gradio (`pip install 'mlcn_jax[explorer]'`). The page is served to this machine only and needs no network.
"""

from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments


def define(values: flags.FlagValues) -> None:
    arguments.define_reading(values)
    flags.DEFINE_integer("port", 7860, "Port of the page; 0 picks a free one.", flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("explore", __doc__, define, argv)
    workdir = arguments.given_workdir(values)

    from mlcn_jax import host
    from mlcn_jax.analysis import explorer_page
    from mlcn_jax.analysis.workdir import load_with_data, stored_config

    listener = explorer_page.listen(values.port)
    explorer_page.check_gradio()
    host.set_up_jax()
    trained, dataset = load_with_data(workdir, stored_config(workdir, values.data_dir))
    page = explorer_page.build(explorer_page.Explorer(trained, dataset.test))
    explorer_page.serve(page, listener)

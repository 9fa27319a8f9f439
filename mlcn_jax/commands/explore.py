"""A local page to try what each lane does: choose an image, move lanes or switch them off, and see what changes.

    python -m experiments.lane_explorer --workdir=runs/mlcn2

Needs Gradio (`pip install gradio`). The page is served to this machine alone and needs no network.
"""

from pathlib import Path

from absl import flags

from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch_app

_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a training run.")
_PORT = flags.DEFINE_integer("port", 7860, "Port of the page; 0 takes one that is free.")
_DATA_DIR = flags.DEFINE_string("data_dir", "", "Replaces config.data.dir of the run; empty keeps it.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise InputError(f"unknown argument {argv[1]!r}: flags are written --name=value")
    if not _WORKDIR.value:
        raise InputError("--workdir=FOLDER is needed, the folder of a training run")

    from mlcn_jax import host
    from mlcn_jax.analysis import explain, explorer_page

    listener = explorer_page.listen(_PORT.value)
    explorer_page.check_gradio()
    host.keep_compiled_programs()
    trained, dataset = explain.load_explained(Path(_WORKDIR.value).expanduser(), _DATA_DIR.value)
    page = explorer_page.build(explorer_page.Explorer(trained, dataset.test))
    explorer_page.serve(page, listener)


if __name__ == "__main__":
    launch_app(main)

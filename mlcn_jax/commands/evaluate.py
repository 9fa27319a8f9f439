"""Scores a trained model on its test set or on other images of the same classes, prints JSON, and draws pictures.

    mlcn_jax evaluate --workdir=runs/mlcn2
    mlcn_jax evaluate --workdir=digits --output=pictures
    mlcn_jax evaluate --workdir=runs/mlcn2 --config.data.dir=FOLDER    # the images have moved
    mlcn_jax evaluate --workdir=runs/mlcn2 --config.data.name=folder --config.data.dir=FOLDER --all_images
    mlcn_jax evaluate --workdir=digits --config.data.name=mnist

A folder needs one subfolder of images for each class of the model. They are resized to the model's size. Without
`--all_images`, those in its `test` folder are scored, or a fixed fifth of each class. For images other than the run's,
the pictures go to WORKDIR/evaluate. With more than 10 classes, `test_top5_accuracy` is the fraction of images whose
class is among the five most probable.

Of the fields below, only `data.*`, `train.batch_size` and `train.reconstruction_weight` may be given.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.commands.run_config import config_of
from mlcn_jax.errors import InputError

_SCORING = ("train.batch_size", "train.reconstruction_weight")  # fields that are used, besides those of `data`


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", arguments.WORKDIR, flag_values=values)
    text = "Folder for the pictures; if empty, the workdir, or WORKDIR/evaluate for data other than the run's."
    flags.DEFINE_string("output", "", text, flag_values=values)
    text = "Scores all images, including those that would otherwise be used for training."
    flags.DEFINE_bool("all_images", False, text, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("evaluate", __doc__, define, argv, config="run")
    workdir = arguments.given_workdir(values)
    given = getattr(values["config"], "override_values", {})
    if other := [name for name in given if not name.startswith("data.") and name not in _SCORING]:
        raise InputError(
            f"--config.{other[0]} does not change how a trained model is scored: only --config.data.* and "
            f"{', '.join(f'--config.{name}' for name in _SCORING)} do"
        )
    config = config_of(values, workdir)

    from mlcn_jax.config import read_stored, unused_fields
    from mlcn_jax.settings import DataSettings

    if "data.name" in given:  # what the run's own dataset needs may do nothing with this one
        changes = unused_fields(config)
        if not values["config"].present and config.data.name != read_stored(workdir).data.name:
            own = DataSettings()
            changes |= {f"data.{name}": getattr(own, name) for name in ("dir", "image_size", "test_fraction")}
        config = config.replace({name: value for name, value in changes.items() if name not in given})

    from mlcn_jax import host, pretrained
    from mlcn_jax.analysis.evaluate_workdir import evaluate_workdir
    from mlcn_jax.files import make_folder

    output = Path(values.output).expanduser() if values.output else workdir
    if output == workdir and (values.all_images or config.data != read_stored(workdir).data):
        output = pretrained.output_folder("", workdir, "evaluate")
    if pretrained.is_pretrained(output):
        output = pretrained.output_folder("", workdir, "evaluate")
    if output != workdir:
        make_folder(output, "output")
    host.set_up_jax()
    print(json.dumps(evaluate_workdir(config, workdir, output, all_images=values.all_images), indent=2))

"""Draws what each lane of a trained model encodes: reconstructions, lanes changed one at a time, and a ranking.

    mlcn_jax explain --workdir=runs/mlcn2
    mlcn_jax explain --workdir=digits --images=0,17,42 --output=explained

Writes `reconstructions.png` (test images with their reconstructions), for each of them `image_INDEX.png`
(one row per lane: -0.25 to 0.25 added to its entry of the predicted class's capsule, as in figure 4.3 of the thesis),
and `ranking.json` and `ranking.png` (how much each lane changes reconstructions and lengths; the JSON says how that is
measured). For CapsNet, its 16 dimensions take the place of lanes.
"""

from collections.abc import Sequence

from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError


def define(values: flags.FlagValues) -> None:
    arguments.define_reading(values)
    text = "Folder for pictures and JSON; default: WORKDIR/explain, or explain-digits for the packaged digits."
    flags.DEFINE_string("output", "", text, flag_values=values)
    text = "Indices of test images; if empty, the first correctly classified one of each class, of at most 100 classes."
    flags.DEFINE_string("images", "", text, flag_values=values)
    text = "Number of test images, evenly spaced, used to rank the lanes."
    flags.DEFINE_integer("num_ranked", 500, text, lower_bound=1, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("explain", __doc__, define, argv)
    workdir = arguments.given_workdir(values)
    numbers = read_numbers(values.images)

    from mlcn_jax import host, pretrained
    from mlcn_jax.analysis.explain_report import MOST_IMAGES, explain_run, table

    if len(numbers) > MOST_IMAGES:
        raise InputError(f"--images has {len(numbers)} numbers; at most {MOST_IMAGES} are drawn")
    host.set_up_jax()
    output = pretrained.output_folder(values.output, workdir, "explain")
    results = explain_run(workdir, output, numbers, values.num_ranked, values.data_dir)
    print(table(results["ranking"]))
    print(f"pictures and ranking.json in {output}")


def read_numbers(text: str) -> list[int]:
    """Parses `3,14` as numbers, without duplicates, in the order given."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(","))) if text else []
    except ValueError as error:
        raise InputError(f"--images={text} is not a list of integers such as 0,17,42") from error

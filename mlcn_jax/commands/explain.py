"""What each lane of a trained model encodes: reconstructions, lanes moved one at a time, and which move most.

    mlcn_jax explain --workdir=runs/mlcn2
    mlcn_jax explain --workdir=digits --images=0,17,42 --output=explained

Writes `reconstructions.png` (images of the test set beside their reconstructions), for each of them
`image_INDEX.png` (a row for each lane: -0.25 to 0.25 added to its entry of the predicted class's capsule, as in figure
4.3 of the thesis), and `ranking.json` and `ranking.png` (how much each lane moves reconstructions and lengths; the JSON
says how that is measured). CapsNet's 16 dimensions take the place of lanes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from mlcn_jax.commands import arguments
from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder

_MOST_IMAGES = 100
_TILE_INCHES = 0.6
_TITLES = {
    "pixel_change_per_unit": "pixels,\nper unit added",
    "length_change_per_unit": "length,\nper unit added",
    "pixel_change_without": "pixels,\nwithout it",
    "length_change_without": "lengths,\nwithout it",
}


def define(values: flags.FlagValues) -> None:
    arguments.define_reading(values)
    text = "Folder for pictures and JSON; empty: WORKDIR/explain, or explain-digits for the package's digits."
    flags.DEFINE_string("output", "", text, flag_values=values)
    text = "Numbers of test images; empty: the first correct one of each class."
    flags.DEFINE_string("images", "", text, flag_values=values)
    text = "Test images, evenly spaced, over which lanes are ranked."
    flags.DEFINE_integer("num_ranked", 500, text, lower_bound=1, flag_values=values)


def main(argv: Sequence[str]) -> None:
    values = arguments.parse("explain", __doc__, define, argv)
    workdir = arguments.given_workdir(values)
    numbers = read_numbers(values.images)
    if len(numbers) > _MOST_IMAGES:
        raise InputError(f"--images has {len(numbers)} numbers; at most {_MOST_IMAGES} are drawn")

    from mlcn_jax import host, pretrained

    host.keep_compiled_programs()
    output = pretrained.output_folder(values.output, workdir, "explain")
    results = explain_run(workdir, output, numbers, values.num_ranked, values.data_dir)
    print(table(results["ranking"]))
    print(f"pictures and ranking.json in {output}")


def read_numbers(text: str) -> list[int]:
    """`3,14` as numbers, each once, in the order given."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(","))) if text else []
    except ValueError as error:
        raise InputError(f"--images={text} is no list of whole numbers such as 0,17,42") from error


def explain_run(
    workdir: Path, output: Path, indices: Sequence[int], num_ranked: int, data_dir: str = ""
) -> dict[str, Any]:
    """Writes all pictures and `ranking.json` to `output`; returns what the JSON holds.

    Raises:
      InputError: the workdir, the images, their numbers or the output folder cannot be used.
    """
    from mlcn_jax import host
    from mlcn_jax.analysis import explain
    from mlcn_jax.files import write_json

    trained, dataset = explain.load_run(workdir, data_dir)
    spec, params, test = trained.spec, trained.params, dataset.test
    wrong = [index for index in indices if not 0 <= index < len(test.labels)]
    if wrong:
        raise InputError(f"--images: there is no test image {wrong[0]}; their numbers are 0 to {len(test.labels) - 1}")
    make_folder(output, "output")
    indices = indices or explain.first_correct(spec, params, test)
    if not indices:
        raise InputError("no test image is classified correctly: choose images with --images=0,1,2")

    names, class_names = explain.column_names(spec), dataset.class_names
    offsets = np.array(explain.OFFSETS, np.float32)
    reconstructions, looked_at = [], []
    for index in indices:
        v, predicted = explain.look(spec, params["encoder"], test.images[[index]])
        rows = np.asarray(explain.perturb(spec, params["decoder"], v, predicted, offsets))[:, :, 0]
        row = {
            "index": index,
            "class": class_names[test.labels[index]],
            "predicted": class_names[int(predicted[0])],
        }
        draw_offsets(output / f"image_{index}.png", row, names, explain.OFFSETS, rows)
        reconstructions.append(rows[0, explain.OFFSETS.index(0)])
        looked_at.append(row)
    draw_reconstructions(output / "reconstructions.png", looked_at, test.images[list(indices)], reconstructions)

    ranked = np.unique(np.linspace(0, len(test.labels) - 1, min(num_ranked, len(test.labels))).round().astype(int))
    ranking = explain.rank(spec, params, test.images[ranked])
    draw_ranking(output / "ranking.png", ranking, len(ranked))
    results = {
        "model": spec.lanes or spec.name,
        "step": trained.step,
        "data": {"name": dataset.name, **dataset.provenance},
        "ranking_images": f"{len(ranked)} of {len(test.labels)} test images, evenly spaced",
        "offsets": explain.OFFSETS,
        "measures": explain.MEASURES,
        "ranking": ranking,
        "pictures": looked_at,
        **host.environment(),
    }
    write_json(output / "ranking.json", results)
    return results


def draw_reconstructions(
    path: Path, looked_at: Sequence[dict[str, Any]], originals: np.ndarray, reconstructions: Sequence[np.ndarray]
) -> None:
    """Originals, uint8, each above its reconstruction from the predicted class; one that is wrong is named in red."""
    from matplotlib.figure import Figure

    columns = min(10, len(looked_at))
    num_rows = -(-len(looked_at) // columns)
    figure = Figure(figsize=(max(3.5, 1.15 * columns), 0.3 + 2.5 * num_rows), layout="constrained")
    figure.suptitle("test images, and below each its reconstruction", fontsize=9)
    axes = figure.subplots(2 * num_rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for i, (row, original, reconstruction) in enumerate(zip(looked_at, originals, reconstructions, strict=True)):
        above, below = axes[2 * (i // columns) : 2 * (i // columns) + 2, i % columns]
        above.imshow(original.squeeze(), cmap="gray", vmin=0, vmax=255)
        above.set_title(f"{row['index']}: {row['class']}", fontsize=7)
        below.imshow(reconstruction.squeeze(), cmap="gray", vmin=0, vmax=1)
        below.set_title(row["predicted"], fontsize=7, color="black" if row["class"] == row["predicted"] else "red")
    figure.savefig(path, dpi=110)


def draw_offsets(
    path: Path, row: dict[str, Any], names: Sequence[str], offsets: Sequence[float], reconstructions: np.ndarray
) -> None:
    """Reconstructions [lanes, offsets, h, w, c] of one image in rows of lanes and columns of offsets."""
    from matplotlib.figure import Figure

    num_lanes, num_offsets, height, width, channels = reconstructions.shape
    gap = max(1, height // 14)
    tiles = np.pad(reconstructions, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=1.0)
    sheet = tiles.transpose(0, 2, 1, 3, 4).reshape(num_lanes * (height + gap), num_offsets * (width + gap), channels)
    size = (2.0 + _TILE_INCHES * num_offsets, 0.8 + _TILE_INCHES * num_lanes * height / width)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.imshow(sheet.squeeze(-1) if channels == 1 else sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    labels = [f"{offset:+.2f}" if offset else "0" for offset in offsets]
    axes.set_xticks(np.arange(num_offsets) * (width + gap) + width / 2, labels)
    axes.set_yticks(np.arange(num_lanes) * (height + gap) + height / 2, names)
    axes.tick_params(length=0, labelsize=8)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    what = names[0].split()[0]
    axes.set_title(
        f"test image {row['index']} ({row['class']}): added to one {what} of the capsule of {row['predicted']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")


def draw_ranking(path: Path, ranking: Sequence[dict[str, Any]], num_images: int) -> None:
    """One panel a measure, lanes from the first of the ranking to the last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.4 + 0.25 * len(ranking)), layout="constrained")
    what = ranking[0]["name"].split()[0]
    figure.suptitle(f"mean absolute change that one {what} makes, over {num_images} test images", fontsize=10)
    panels = figure.subplots(1, len(_TITLES), sharey=True)
    for axes, (measure, title) in zip(panels, _TITLES.items(), strict=True):
        axes.barh([row["name"] for row in ranking], [row[measure] for row in ranking], color="C0")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def table(ranking: Sequence[dict[str, Any]]) -> str:
    """The ranking in Markdown."""
    head = ["", *(title.replace("\n", " ") for title in _TITLES.values())]
    lines = [head, ["---"] * len(head)]
    lines += [[row["name"], *(f"{row[measure]:.4f}" for measure in _TITLES)] for row in ranking]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

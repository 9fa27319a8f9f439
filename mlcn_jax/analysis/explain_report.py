"""What each lane of a trained run encodes, as pictures, a ranking and JSON."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlcn_jax import host
from mlcn_jax.analysis import explain
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder, markdown, write_figure, write_json

_log = logging.getLogger(__name__)

MOST_IMAGES = 100  # that are drawn, which takes about a second each
_TILE_INCHES = 0.6
_TITLES = {
    "pixel_change_per_unit": "pixels,\nper unit added",
    "length_change_per_unit": "length,\nper unit added",
    "pixel_change_without": "pixels,\nwithout it",
    "length_change_without": "lengths,\nwithout it",
}


def explain_run(
    workdir: Path, output: Path, indices: Sequence[int], num_ranked: int, data_dir: str = ""
) -> dict[str, Any]:
    """Writes all pictures and `ranking.json` to `output`; returns the content of the JSON.

    Raises:
      InputError: the workdir, the images, their indices or the output folder cannot be used.
    """
    _log.info("loading %s, and the images", workdir)
    trained, dataset = load_with_data(workdir, stored_config(workdir, data_dir))
    spec, params, test = trained.spec, trained.params, dataset.test
    wrong = [index for index in indices if not 0 <= index < len(test.labels)]
    if wrong:
        raise InputError(f"--images: there is no test image {wrong[0]}; they are numbered 0 to {len(test.labels) - 1}")
    make_folder(output, "output")
    indices = indices or explain.first_correct(spec, params, test)[:MOST_IMAGES]
    if not indices:
        raise InputError("no test image is classified correctly: choose images with --images=0,1,2")

    names, class_names = explain.column_names(spec), dataset.class_names
    _log.info("drawing what each %s encodes; images: %d", names[0].split()[0], len(indices))
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
        draw_offsets(output / f"image_{index}.png", row, names, explain.OFFSETS, test.images[index], rows)
        reconstructions.append(rows[0, explain.OFFSETS.index(0)])
        looked_at.append(row)
    draw_reconstructions(output / "reconstructions.png", looked_at, test.images[list(indices)], reconstructions)

    ranked = np.unique(np.linspace(0, len(test.labels) - 1, min(num_ranked, len(test.labels))).round().astype(int))
    _log.info("measuring what each %s changes, on %d test images", names[0].split()[0], len(ranked))
    ranking = explain.rank(spec, params, test.images[ranked])
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
    draw_ranking(output / "ranking.png", ranking, len(ranked))
    return results


def draw_reconstructions(
    path: Path, looked_at: Sequence[dict[str, Any]], originals: np.ndarray, reconstructions: Sequence[np.ndarray]
) -> None:
    """Draws originals, uint8, each above its reconstruction from the predicted class; wrong ones are in red."""
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
        above.set_title(f"{row['index']}: {row['class']}", fontsize=7, parse_math=False)
        below.imshow(reconstruction.squeeze(), cmap="gray", vmin=0, vmax=1)
        color = "black" if row["class"] == row["predicted"] else "red"
        below.set_title(row["predicted"], fontsize=7, color=color, parse_math=False)
    write_figure(figure, path, dpi=110)


def draw_offsets(
    path: Path,
    row: dict[str, Any],
    names: Sequence[str],
    offsets: Sequence[float],
    original: np.ndarray,
    reconstructions: np.ndarray,
) -> None:
    """Draws one image with its reconstruction, and what adding to each lane changes.

    Args:
      path: path of the picture.
      row: `index`, `class` and `predicted` of the image.
      names: names of the lanes.
      offsets: the offsets added, including 0.
      original: uint8 [h, w, c].
      reconstructions: [lanes, offsets, h, w, c], pixels in [0, 1].
    """
    from matplotlib.figure import Figure

    num_lanes, num_offsets, height, width, _ = reconstructions.shape
    plain = reconstructions[0, list(offsets).index(0)]
    each = reconstructions - plain
    changes = np.take_along_axis(each, np.abs(each).argmax(axis=-1, keepdims=True), axis=-1)  # of any color the largest
    limit = max(float(np.abs(changes).max()), 1e-6)
    rows = _TILE_INCHES * num_lanes * height / width
    figure = Figure(figsize=(2.4 + 2 * _TILE_INCHES * num_offsets, 2.6 + rows), layout="constrained")
    what = names[0].split()[0]
    figure.suptitle(
        f"test image {row['index']}, class {row['class']}, predicted {row['predicted']}: in each row, a number is "
        f"added to one {what} of the predicted class's capsule",
        fontsize=10,
        parse_math=False,
    )
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.6, 0.6 + rows))
    above, below = parts
    shown = above.subplots(1, 2)
    for axes, picture, title in zip(shown, (original / 255, plain), ("image", "reconstruction"), strict=True):
        axes.imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    left, right = below.subplots(1, 2, sharey=True)
    _draw_tiles(left, reconstructions, offsets, names, cmap="gray", vmin=0, vmax=1, pad=1.0)
    left.set_title("reconstructions", fontsize=9)
    colors = _draw_tiles(right, changes, offsets, names, cmap="RdBu_r", vmin=-limit, vmax=limit, pad=0.0)
    right.set_title("difference from the reconstruction", fontsize=9)
    below.colorbar(colors, ax=right, fraction=0.03, label="pixel value")
    write_figure(figure, path, dpi=110, bbox_inches="tight")


def _draw_tiles(
    axes: Any, tiles: np.ndarray, offsets: Sequence[float], names: Sequence[str], pad: float, **colors: Any
) -> Any:
    """Draws pictures [lanes, offsets, h, w, c] in rows of lanes and columns of offsets."""
    num_lanes, num_offsets, height, width, channels = tiles.shape
    gap = max(1, height // 14)
    padded = np.pad(tiles, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=pad)
    sheet = padded.transpose(0, 2, 1, 3, 4).reshape(num_lanes * (height + gap), num_offsets * (width + gap), channels)
    drawn = axes.imshow(sheet.squeeze(-1) if channels == 1 else sheet, interpolation="nearest", **colors)
    labels = [f"{offset:+.2f}" if offset else "0" for offset in offsets]
    axes.set_xticks(np.arange(num_offsets) * (width + gap) + width / 2, labels, rotation=45)
    axes.set_yticks(np.arange(num_lanes) * (height + gap) + height / 2, names)
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("added", fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return drawn


def draw_ranking(path: Path, ranking: Sequence[dict[str, Any]], num_images: int) -> None:
    """Draws one panel per measure, lanes in the order of the ranking."""
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
    write_figure(figure, path, dpi=110)


def table(ranking: Sequence[dict[str, Any]]) -> str:
    """The ranking in Markdown."""
    head = ["", *(title.replace("\n", " ") for title in _TITLES.values())]
    return markdown(head, ([row["name"], *(f"{row[measure]:.4f}" for measure in _TITLES)] for row in ranking))

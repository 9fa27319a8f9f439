"""The pictures of `experiments.tiers_tables`: what was measured, and in panels of their own what models predict."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mlcn_jax.files import replacing


def draw_schedules(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Figure 3: seconds against ends, measured; and by both models, in panels of their own."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, name, title in zip(
        axes,
        ("measured", "corrected", "printed"),
        ("measured", "predicted: corrected", "predicted: as printed"),
        strict=True,
    ):
        for schedule in dict.fromkeys(row["schedule"] for row in rows):
            own = [row for row in rows if row["schedule"] == schedule]
            shown = [row[name] if row[name] > 0 else math.nan for row in own]  # equation 6 can be negative
            axis.plot([row["ends"] for row in own], shown, marker="o", label=schedule)
        axis.set(title=title, xlabel="ends", yscale="log")
    axes[0].set(ylabel="seconds for all tasks")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)


def draw_failures(measured: Mapping[int, Mapping[str, float | None]], predicted: Sequence[tuple], path: Path) -> None:
    """Table 5: seconds against dead ends, by what is done about them.

    Args:
      measured: of each number of dead ends, the seconds of each mode; None where a run never ended.
      predicted: dead ends, seconds of the remaining work over the living ends, and those of equation 8.
      path: to write to.
    """
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    own, models = figure.subplots(1, 2, sharey=True)
    for mode in dict.fromkeys(mode for found in measured.values() for mode in found):
        shown = [(dead, found[mode]) for dead, found in measured.items() if found.get(mode) is not None]
        own.plot(*zip(*shown, strict=True), marker="o", label=mode)
    for column, title in ((1, "remaining work over living ends"), (2, "reassign by equation 8")):
        models.plot([row[0] for row in predicted], [row[column] for row in predicted], marker="o", label=title)
    for axis, title in ((own, "measured"), (models, "predicted")):
        axis.set(title=title, xlabel="dead ends", yscale="log")
        axis.legend()
    own.set(ylabel="seconds for all tasks")
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)

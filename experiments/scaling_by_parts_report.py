"""What is told of models over devices that are simulated from measured parts (`scaling_by_parts.py`)."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # one of `scaling_by_parts.summarise`
CAPSNET = "capsnet"  # the sweep of CapsNet, which is the baseline of all others
MODES = ("capsnet-data", "mlcn-data", "mlcn-lane")
_CLEAR = 1.02  # times as large is a difference
_OTHER_END = {"median": "median", "min": "max", "max": "min"}


def deeper_over_wider(rows: Iterable[Row], devices: int) -> dict[str, Any] | None:
    """How many times as much deeper lanes gain from several devices as wider ones whose step takes as long on one.

    The gain is the speed-up of `mlcn-lane` over the model itself on one device. That of wider lanes is interpolated
    between the measured widths, over the logarithm of seconds. `least` and `most` are of the least gain of any round
    over the most, and the other way round. None where no deeper lane lies between two widths.
    """
    mine = [row for row in rows if row["mode"] == "mlcn-lane" and row["over_itself_on_one"]]
    gains = {(row["sweep"], row["at"]): row["over_itself_on_one"] for row in mine if row["devices"] == devices}
    alone = {(row["sweep"], row["at"]): math.log(row["seconds"]["median"]) for row in mine if row["devices"] == 1}
    widths = sorted((key for key in gains if key[0] == "width"), key=alone.__getitem__)
    found = []
    for key, gain in gains.items():
        if key[0] == "depth" and key[1] > 1 and widths and alone[widths[0]] <= alone[key] <= alone[widths[-1]]:
            wider = {
                name: float(np.interp(alone[key], [alone[w] for w in widths], [gains[w][name] for w in widths]))
                for name in gain
            }
            ratios = {name: gain[name] / wider[other] for name, other in _OTHER_END.items()}
            found.append((key[1], ratios))
    if not found:
        return None
    ratio, least, most = (statistics.geometric_mean(ratios[name] for _, ratios in found) for name in _OTHER_END)
    return {"devices": devices, "depths": [at for at, _ in found], "ratio": ratio, "least": least, "most": most}


def sentence(found: Mapping[str, Any] | None) -> str:
    """Whether deeper or wider lanes gain more, beside what the thesis says."""
    if found is None:
        return "Whether wider or deeper lanes gain more was not measured; in the thesis, wider ones do."
    ratio, least, most = (found[name] for name in ("ratio", "least", "most"))
    if ratio > _CLEAR and least > 1:
        verdict = "deeper lanes gain more, the opposite of what the thesis finds"
    elif ratio < 1 / _CLEAR and most < 1:
        verdict = "wider lanes gain more, as in the thesis"
    else:
        verdict = "neither is clearly ahead; in the thesis, wider lanes gain more"
    depths = ", ".join(map(str, found["depths"]))
    return (
        f"Of lanes whose step takes as long on one device, deeper ones gain {ratio:.2f} ({least:.2f} to {most:.2f}) "
        f"times as much from {found['devices']} devices as wider ones (simulated; depths {depths}): {verdict}."
    )


def table(rows: Sequence[Row], devices: Sequence[int]) -> list[list[str]]:
    """A header, and a line for each model and mode; each column says whether it is measured or simulated."""
    several = [n for n in devices if n > 1]
    told = f"{', '.join(map(str, several))} devices, simulated"
    lines = [["lanes", "split", "ms on 1 device, measured", f"over itself on 1: {told}"]]
    lines[0] += ["over CapsNet on 1: 1 device, measured", f"over CapsNet on 1: {told}"]
    lines[0].append(f"over CapsNet's batch split on as many: {told}")
    for lanes, mode in dict.fromkeys((row["lanes"], row["mode"]) for row in rows):
        mine = {row["devices"]: row for row in rows if (row["lanes"], row["mode"]) == (lanes, mode)}

        def cells(name: str, some: Sequence[int], mine: Mapping[int, Row] = mine) -> str:
            return ", ".join(f"{mine[n][name]['median']:.2f}" if n in mine and mine[n][name] else "-" for n in some)

        milliseconds = f"{1000 * mine[1]['seconds']['median']:.0f}" if 1 in mine else "-"
        speedups = [cells("over_itself_on_one", several), cells("over_capsnet_on_one", [1])]
        speedups += [cells(name, several) for name in ("over_capsnet_on_one", "over_capsnet_on_as_many")]
        lines.append([f"`{lanes}`" if lanes else "CapsNet", mode, milliseconds, *speedups])
    return lines


def draw(rows: Sequence[Row], devices: Sequence[int]) -> "Figure":
    """Speed-ups against devices: over CapsNet on one above, over the model itself below, a column for each sweep."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 10), layout="constrained")
    sweeps = ("lanes", "width", "depth")
    grid = figure.subplots(2, len(sweeps), sharex=True, sharey="row")
    for column, sweep in enumerate(sweeps):
        places = sorted({row["at"] for row in rows if row["sweep"] == sweep})
        shown = [(CAPSNET, 0, MODES[0], "k", "s:")]
        for i, at in enumerate(places):
            shown += [(sweep, at, "mlcn-lane", f"C{i}", "o-"), (sweep, at, "mlcn-data", f"C{i}", "^--")]
        for axes, name in zip(grid[:, column], ("over_capsnet_on_one", "over_itself_on_one"), strict=True):
            for what, at, mode, color, style in shown:
                mine = [row for row in rows if (row["sweep"], row["at"], row["mode"]) == (what, at, mode) and row[name]]
                if not mine:
                    continue
                title = mode if what == CAPSNET else f"{mode}, {sweep} {at}"
                x, y = [row["devices"] for row in mine], [row[name]["median"] for row in mine]
                axes.plot(x, y, style, color=color, markerfacecolor="white", label=title)
                if x[0] == 1:
                    axes.plot(1, y[0], style[0], color=color)
                axes.loglog(base=2)
            axes.set_xticks(devices, map(str, devices))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(alpha=0.3)
        grid[0, column].set_title(f"sweep: {sweep}")
        grid[1, column].set_xlabel("devices (full marks: measured; open marks: simulated)")
        if places:
            grid[1, column].legend(fontsize=7)
    grid[0, 0].set_ylabel("times as fast as CapsNet on one device")
    grid[1, 0].set_ylabel("times as fast as the model itself on one device")
    return figure


def largest_difference(rows: Iterable[Row]) -> float:
    """Of a speed-up over the model itself, between two rounds, as a share of the smaller."""
    gains = [row["over_itself_on_one"] for row in rows if row["over_itself_on_one"]]
    return max((gain["max"] / gain["min"] - 1 for gain in gains), default=0.0)

"""What a list of runs gives: means and spreads, tables as Markdown and pictures, and what was run, where and when."""

import logging
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from experiments import RESULTS
from experiments.repeated_runs import Facts, Series
from mlcn_jax import host
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import EXIT_FAILED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOKE = "smoke"  # the scale whose results are in no way worth keeping
_log = logging.getLogger("mlcn_jax.repeated_report")
_CAPTION_POINTS = 8
_COLORS = {"reached": "#d8f0d8", "below": "#f6dcdc"}

Records = Sequence[dict[str, Any]]


def select(records: Records, **facts: Any) -> list[dict[str, Any]]:
    """The records of the runs with these facts."""
    return [record for record in records if facts.items() <= record["facts"].items()]


def spread(records: Records, name: str) -> dict[str, Any] | None:
    """Mean and spread of a measured value over the runs that have it; None where none has."""
    values = [record[name] for record in records if record.get(name) is not None]
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }


def told(records: Records, name: str) -> str:
    """Mean and spread for a table, or why there is none."""
    found, failed = spread(records, name), sum("failed" in record for record in records)
    if found is None:
        return f"failed ({failed})" if failed else "not run"
    text = f"{found['mean']:.2f}, 1 run"
    if found["std"] is not None:
        least, most = found["min"], found["max"]
        text = f"{found['mean']:.2f} ± {found['std']:.2f}, {least:.2f} to {most:.2f}, {found['runs']} runs"
    return text + (f", {failed} failed" if failed else "")


def difference(mean: float, published: float, final: bool) -> str:
    """Points between a mean accuracy and a published one; for runs as long as the published, with a verdict."""
    points = mean - published
    name = "reached" if points >= 0 else "within 0.5" if points >= -0.5 else "below"
    return f"{points:+.2f}" + (f" {name}" if final else "")


def number(value: float | None) -> str:
    """A number for a table, with three digits at least; a dash where there is none."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def titled(title: str, records: Records) -> str:
    """The title `DATA, MODEL` of some runs, with a note where the dataset's bytes are not the official ones."""
    copy = next((f" ({record['data']['copy']})" for record in records if record["data"]["copy"]), "")
    return title.replace(",", copy + ",", 1)


def caption(series: Series, records: Records) -> list[str]:
    """Sentences on what exactly was run, on which images, where, when and how."""
    scale = series.scale
    length = f"epochs: {scale.num_epochs or 'as configured'}"
    length += f", steps: {scale.num_steps}" if scale.num_steps else ""
    lines = [f"Scale `{scale.name}`, {length}. Runs that have ended: {len(records)}."]
    for name, facts in {record["data"]["name"]: record["data"] for record in records}.items():
        train, test = (
            f"{facts[f'{part}_images']:,} of {facts[f'all_{part}_images']:,} {part}" for part in ("train", "test")
        )
        copy = f" ({facts['copy']})" if facts["copy"] else ""
        lines.append(f"{name}{copy}: {train} and {test} images{_held_out(series, records, name)}.")
    for where in dict.fromkeys(place(record) for record in records):
        dates = sorted(record["date"] for record in records if place(record) == where)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        lines.append(f"{len(dates)} of the runs on {where}, {when}.")
    if commits := dict.fromkeys(record["commit"] for record in records if record.get("commit")):
        lines.append(f"Commits, as far as they were recorded: {', '.join(commits)}.")
    lines += [f"`{command}`" for command in dict.fromkeys(record["command"] for record in records)]
    return lines


def _held_out(series: Series, records: Records, name: str) -> str:
    """What to add to a sentence on the images of a dataset: how many are held out, and in which runs if not in all."""
    counts = [series.held_out(record) for record in records if record["data"]["name"] == name]
    text = ""
    for count in sorted(set(counts) - {0}):
        some = "" if counts.count(count) == len(counts) else f"in {counts.count(count)} of {len(counts)} runs, "
        text += f"; {some}{count:,} of the train images are held out for validation"
    return text


def place(record: Mapping[str, Any]) -> str:
    """Where a record was made."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("jax", "python"))
    count = record["cpu_count"]
    cores = f", {count} core{'s' * (count > 1)}" if record["platform"] == "cpu" else ""
    return f"{record['device']}{cores} ({versions})"


def write(
    series: Series,
    name: str,
    summary: dict[str, Any],
    text: str,
    lines: Sequence[str],
    figure: "Figure",
    **more: "Figure",
) -> None:
    """Writes `NAME_SCALE` as JSON, Markdown and PNG to the workdir, and but for the scale `smoke` to the results.

    Each of `more` is one more picture, `NAME_SCALE_WHICH.png`. The JSON holds `summary`, the caption's `lines`, and
    every run without its configuration, which the workdir has. Results that hold a run which is not among these stay
    as they are, with a warning.
    """
    records = series.records()
    runs = [{field: value for field, value in record.items() if field != "config"} for record in records]
    result = {**series.marker, "caption": list(lines), **summary}
    folders = [series.workdir]
    if series.scale.name != SMOKE:
        kept, facts = kept_results(name, series.scale.name), [run["facts"] for run in runs]
        lost = [run["facts"] for run in (read_json(kept)["runs"] if kept.exists() else []) if run["facts"] not in facts]
        if lost:
            _log.warning(
                "%s stays as it is. It has runs of another version, other settings or other images, such as %s. "
                "These results are in %s; move that file away to have them there",
                kept, lost[0], series.workdir,
            )  # fmt: skip
        else:
            folders.append(kept.parent)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}_{series.scale.name}"
        write_json(path.with_suffix(".json"), {**result, "runs": runs})
        path.with_suffix(".md").write_text(text + "\n\n" + "".join(f"- {line}\n" for line in lines))
        for suffix, picture in {"": figure, **{f"_{which}": picture for which, picture in more.items()}}.items():
            picture.savefig(f"{path}{suffix}.png", dpi=120)


def kept_results(name: str, scale: str) -> Path:
    """Where `write` keeps the results of a scale."""
    return RESULTS / f"{name}_{scale}.json"


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> "Figure":
    """A table as a picture over its caption; cells that reach the published value, or do not, are coloured."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    everything = [[cell.replace(", ", "\n") for cell in row] for row in (header, *rows)]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) + 2 for column in zip(*everything, strict=True)
    ]
    heights = [max(cell.count("\n") + 1 for cell in row) + 0.5 for row in everything]
    characters = max(sum(widths), 100)  # across
    below = _wrapped(lines, int(1.1 * characters))
    height = sum(heights) + len(below) + 1.5
    figure = Figure(figsize=(0.08 * characters, 0.17 * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    share = sum(heights) / height
    columns = [width / sum(widths) for width in widths]
    box = Bbox.from_bounds(0, 1 - share, sum(widths) / characters, share)
    table = axes.table(everything, colWidths=columns, cellLoc="left", bbox=box)
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (row, column), cell in table.get_celld().items():
        cell.set_height(heights[row])
        cell.set_linewidth(0.3)
        verdict = everything[row][column].rpartition(" ")[2]
        if verdict in _COLORS:
            cell.set_facecolor(_COLORS[verdict])
    axes.text(0.005, 1 - share - 0.7 / height, "\n".join(below), va="top", fontsize=8, linespacing=1.3)
    return figure


def draw_caption(figure: "Figure", lines: Sequence[str]) -> None:
    """Adds a caption below a figure with a constrained layout, which becomes higher by as much."""
    wrapped = _wrapped(lines, int(15 * figure.get_figwidth()))
    figure.supxlabel("\n".join(wrapped), fontsize=_CAPTION_POINTS, x=0.01, ha="left")
    figure.set_figheight(figure.get_figheight() + 1.4 * _CAPTION_POINTS / 72 * len(wrapped))


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width)]


def carry_out(
    series: Series,
    runs: Sequence[Facts],
    text: Callable[[Records], str],
    report: Callable[[Series], None],
    afterwards: Sequence[Callable[[], None]] = (),
    again: Sequence[Facts] = (),
    first: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """Trains what has not ended yet, with a report after each run, and prints all there is, whatever ends it.

    `first` and `afterwards` are done before and after the runs, and the models of `again` are needed: `Series.train`.

    Returns:
      The exit code.

    Raises:
      InputError, Stopped: as `Series.train`.
    """
    series.records()  # refused before anything is trained
    host.set_up_jax(least_seconds=0.1)

    def report_alone() -> None:
        with filelock.FileLock(host.cache_folder() / "experiments.lock"):  # processes add to the same results
            report(series)

    try:
        series.train(runs, report_alone, afterwards, again, first)
        report_alone()
    finally:
        records = series.records()
        if records:
            print(text(records))
    return EXIT_FAILED if any("failed" in record for record in records) else 0

"""Grids of runs: one workdir per point, resumable, with the points sorted and averaged over seeds at the end."""

import csv
import hashlib
import itertools
import logging
import statistics
from pathlib import Path
from typing import Any

from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Damaged, Diverged, InputError
from mlcn_jax.files import hold, markdown, read_json, write_json
from mlcn_jax.launch import lack_of_memory
from mlcn_jax.training.loop import train

_log = logging.getLogger(__name__)

_SEED = "train.seed"
_SPLITS = ("validation", "test")  # points are ranked by the first of these that was scored
_SCORES = tuple(f"{split}_{score}" for split in _SPLITS for score in ("accuracy", "loss"))
_LONGEST_NAME, _SHORTENED = 255, 150  # bytes of a folder's name
_COLUMNS = (*_SCORES, "images_per_second", "parameters", "steps")


def parse_grid(text: str) -> dict[str, list[str]]:
    """Reads `"train.learning_rate=1e-3,3e-4;train.seed=0,1,2"`; a value that holds a comma goes in double quotes.

    Raises:
      InputError: the text is not such a grid.
    """
    grid = {}
    for part in filter(str.strip, text.split(";")):
        field, equals, values = part.partition("=")
        choices = next(csv.reader([values], skipinitialspace=True), [])
        if not equals or not all(choices) or not choices:
            raise InputError(
                f"--sweep: {part.strip()!r} is not FIELD=VALUE,VALUE with no value empty; separate fields with "
                "semicolons, such as 'train.learning_rate=1e-3,3e-4;train.seed=0,1,2'"
            )
        if field.strip() in grid:
            raise InputError(f"--sweep: {field.strip()} is given twice; give all its values in one list")
        grid[field.strip()] = [value.strip() for value in choices]
        if len(set(grid[field.strip()])) < len(choices):
            raise InputError(f"--sweep: {part.strip()!r} has a value twice; give each once")
    if not grid:
        raise InputError("a sweep needs --sweep='FIELD=VALUE,VALUE;...'")
    return grid


def sweep(config: RunConfig, workdir: Path, text: str) -> list[dict[str, Any]]:
    """Trains every point of the grid and returns one row per point.

    Writes them to `workdir/sweep.json`, with the result of `over_seeds`.

    A point that is finished is not run again. One that fails (its values cannot be used, its loss is not finite, or it
    does not fit the memory) gets a row with its `error`, and the others go on.

    Raises:
      InputError: the grid cannot be read, names a field that does not exist, or the workdir cannot be written to or
        hold checkpoints, or another process is using it.
    """
    grid = parse_grid(text)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs = [config.replace(point) for point in points]  # all are read before the first is run
    if any(each.parallel.processes != 1 for each in configs):
        raise InputError("a sweep runs in one process: leave parallel.processes at 1")
    with hold(workdir):
        rows: list[dict[str, Any]] = []
        before = _rows_before(workdir / "sweep.json")
        for i, (point, point_config) in enumerate(zip(points, configs, strict=True), start=1):
            folder = _folder(workdir, point)
            _log.info("point %d of %d: %s", i, len(points), folder.name)
            rows.append({**point, "workdir": str(folder), **_result(point_config, folder)})
            if "error" in rows[-1]:
                _log.error("point %d failed: %s", i, rows[-1]["error"])
            later = [str(_folder(workdir, point)) for point in points[i:]]
            known = rows + [before[folder] for folder in later if folder in before]
            write_json(
                workdir / "sweep.json",
                {"rows": known, "ranked_by": _ranked_by(known), "seeds": over_seeds(known), **host.environment()},
            )
    return rows


def _result(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What a point's row says of its run: columns of its summary, or the `error` with which it failed."""
    try:
        summary = train(config, folder)
    except (InputError, Diverged, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not lack_of_memory(error):
            raise
        return {"error": lack_of_memory(error) or str(error)}
    return {name: summary[name] for name in _COLUMNS if name in summary}


def _rows_before(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier sweep by their workdir; none if there are none, or if they cannot be read."""
    try:
        return {row["workdir"]: row for row in read_json(path)["rows"]} if path.exists() else {}
    except (Damaged, KeyError, TypeError):  # all rows are made again from the workdirs
        return {}


def _folder(workdir: Path, point: dict[str, str]) -> Path:
    """The workdir of a point; its name has no comma, which other commands would treat as a separator."""
    names = [f"{field}={_safe(value)}" for field, value in point.items()]
    name = "__".join(names)
    if len(name.encode()) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return workdir / f"{name.encode()[:_SHORTENED].decode(errors='ignore')}-{digest}"
    before = workdir / ",".join(names)  # as earlier versions named it
    return before if before.is_dir() else workdir / name


def _safe(value: str) -> str:
    """The value as part of a folder's name; if characters had to be replaced, with a digest that makes it unique."""
    safe = "".join(c if c.isalnum() or c in "._-+" else "_" for c in value)
    return safe if safe == value else f"{safe}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def over_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracies over the seeds of each combination of the other fields; empty unless seeds were swept.

    Each has the other fields, `seeds` that were trained to the end, `failed` ones, and `mean`, `min` and `max` of the
    accuracy that ranks points, None where every seed failed.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows if rows and _SEED in rows[0] else ():
        groups.setdefault(tuple((f, row[f]) for f in _fields(row) if f != _SEED), []).append(row)
    score = _ranked_by(rows)
    return [{**dict(point), **_spread(group, score)} for point, group in groups.items()]


def _spread(rows: list[dict[str, Any]], score: str) -> dict[str, Any]:
    failed = [row[_SEED] for row in rows if "error" in row]
    accuracies = [row[score] for row in rows if score in row]
    numbers = [of(accuracies) if accuracies else None for of in (statistics.fmean, min, max)]
    seeds = [row[_SEED] for row in rows if "error" not in row]
    return {"seeds": seeds, "failed": failed, **dict(zip(("mean", "min", "max"), numbers, strict=True))}


def report(rows: list[dict[str, Any]]) -> str:
    """The result as text: all points, the best first; the best one; and mean and spread over seeds, if swept."""
    parts = [table(rows)]
    best, score = _sorted(rows)[0], _ranked_by(rows)
    if score in best:
        point = " ".join(f"{field}={best[field]}" for field in _fields(best))
        parts.append(f"best: {point}, {score.replace('_', ' ')} {best[score]:.2%}, in {best['workdir']}")
        if score.startswith("test") and set(_fields(best)) != {_SEED}:
            parts.append(
                "the test images chose it, since none were held out: with data.validation_fraction above 0, validation "
                "images would, and its test accuracy would be a fair result"
            )
    groups = sorted(over_seeds(rows), key=lambda group: (group["mean"] is None, -(group["mean"] or 0.0)))
    if groups:
        fields = [field for field in _fields(rows[0]) if field != _SEED]
        lines = []
        for group in groups:
            failed = f" ({len(group['failed'])} failed)" if group["failed"] else ""
            known = group["mean"] is not None
            numbers = [_number(group["mean"]), f"{group['min']:.4g} to {group['max']:.4g}"] if known else ["", ""]
            lines.append([*(group[field] for field in fields), f"{len(group['seeds'])}{failed}", *numbers])
        parts.append("over seeds:\n" + markdown([*fields, "seeds", f"mean {score}", "min to max"], lines))
    return "\n\n".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, the best first; those that failed come last."""
    fields = _fields(rows[0])
    columns = [name for name in _COLUMNS if any(name in row for row in rows)]
    lines = []
    for row in _sorted(rows):
        numbers = [_number(row[name]) if name in row else "" for name in columns]
        if "error" in row:
            numbers = ["failed: " + row["error"].splitlines()[0], *[""] * (len(columns) - 1)]
        lines.append([str(row[f]) for f in fields] + numbers)
    return markdown([*fields, *columns], lines)


def _fields(row: dict[str, Any]) -> list[str]:
    """The fields that were swept."""
    return [name for name in row if name not in (*_COLUMNS, "workdir", "error")]


def _ranked_by(rows: list[dict[str, Any]]) -> str:
    """The score that ranks the rows: validation accuracy, or test accuracy if no images were held out."""
    names = [f"{split}_accuracy" for split in _SPLITS]
    return next((name for name in names if any(name in row for row in rows)), names[-1])


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, the best first; those without the score that ranks them, then those that failed, come last."""
    score = _ranked_by(rows)
    return sorted(rows, key=lambda row: ("error" in row, -row.get(score, 0.0)))


def _number(value: float | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

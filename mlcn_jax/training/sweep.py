"""Grids of runs: one workdir a point, resumable, with one table at the end."""

import csv
import hashlib
import itertools
import logging
from pathlib import Path
from typing import Any

from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.files import write_json
from mlcn_jax.training.loop import train

_log = logging.getLogger(__name__)

_COLUMNS = ("test_accuracy", "test_loss", "images_per_second", "parameters", "steps")


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
                f"--sweep: {part.strip()!r} is not FIELD=VALUE,VALUE; write fields apart by semicolons, such as "
                "'train.learning_rate=1e-3,3e-4;train.seed=0,1,2'"
            )
        if field.strip() in grid:
            raise InputError(f"--sweep: {field.strip()} stands twice; give all its values in one list")
        grid[field.strip()] = [value.strip() for value in choices]
    if not grid:
        raise InputError("a sweep needs --sweep='FIELD=VALUE,VALUE;...'")
    return grid


def sweep(config: RunConfig, workdir: Path, text: str) -> list[dict[str, Any]]:
    """Trains every point of the grid and returns one row a point, also written to `workdir/sweep.json`.

    A point that is finished is not run again. One that fails (its values cannot be used, or its loss is not
    finite) gets a row with its `error`, and the others go on.

    Raises:
      InputError: the grid cannot be read, or names a field that does not exist.
    """
    grid = parse_grid(text)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs = [config.replace(point) for point in points]  # all are read before the first is run
    rows: list[dict[str, Any]] = []
    for i, (point, point_config) in enumerate(zip(points, configs, strict=True), start=1):
        folder = workdir / ",".join(f"{field}={_safe(value)}" for field, value in point.items())
        _log.info("point %d of %d: %s", i, len(points), folder.name)
        row: dict[str, Any] = {**point, "workdir": str(folder)}
        try:
            summary = train(point_config, folder)
            row |= {name: summary[name] for name in _COLUMNS}
        except (InputError, Diverged) as error:
            row["error"] = str(error)
            _log.error("point %d failed: %s", i, error)
        rows.append(row)
        write_json(workdir / "sweep.json", {"rows": rows, **host.environment()})
    return rows


def _safe(value: str) -> str:
    """The value as part of a folder's name; where characters had to be replaced, with a digest that tells it apart."""
    safe = "".join(c if c.isalnum() or c in "._-+" else "_" for c in value)
    return safe if safe == value else f"{safe}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    fields = [name for name in rows[0] if name not in (*_COLUMNS, "workdir", "error")]
    lines = [[*fields, *_COLUMNS], ["---"] * (len(fields) + len(_COLUMNS))]
    for row in rows:
        failed = "failed: " + row["error"].splitlines()[0] if "error" in row else ""
        numbers = [failed, *[""] * (len(_COLUMNS) - 1)] if failed else [_number(row[c]) for c in _COLUMNS]
        lines.append([str(row[f]) for f in fields] + numbers)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

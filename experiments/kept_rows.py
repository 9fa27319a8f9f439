"""Rows of a measurement that goes on, whichever rows are asked for next: the others stay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.files import read_json

Row = Mapping[str, Any]


def kept_rows(path: Path, about: Mapping[str, Any], name: str = "rows") -> list[dict[str, Any]]:
    """The rows under a name in a file of results; none if it says something else than `about`."""
    stored = read_json(path) if path.exists() else {}
    return stored.get(name, []) if is_row(stored, about) else []


def is_row(row: Row, names: Row) -> bool:
    """Whether a row has these values."""
    return all(row.get(name) == value for name, value in names.items())


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any], names: Row) -> list[dict[str, Any]]:
    """The rows with one more, in the place of that which has these values."""
    place = next((i for i, one in enumerate(rows) if is_row(one, names)), len(rows))
    return [*rows[:place], row, *rows[place + 1 :]]

"""Rows of a measurement that goes on, whichever rows are asked for next: the others stay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json

Row = Mapping[str, Any]


def stored_results(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The results in a file, to which others with the same `about` can be added; empty if there is no such file.

    Raises:
      InputError: the file says something else than `about`, so that its results would be lost.
    """
    stored = read_json(path) if path.exists() else {}
    if stored and (rows := differences(stored, about)):
        raise InputError(
            f"{path} holds results that cannot stand beside those asked for:\n"
            + "\n".join(rows)
            + "\nmove it away to begin anew"
        )
    return stored


def is_row(row: Row, names: Row) -> bool:
    """Whether a row has these values."""
    return all(row.get(name) == value for name, value in names.items())


def with_row(rows: Sequence[dict[str, Any]], row: dict[str, Any], names: Row) -> list[dict[str, Any]]:
    """The rows with one more, in the place of that which has these values."""
    place = next((i for i, one in enumerate(rows) if is_row(one, names)), len(rows))
    return [*rows[:place], row, *rows[place + 1 :]]

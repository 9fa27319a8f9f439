"""What the tables of README.md and docs/ are made of, and `MADE`: the function of each place.

`make_tables.py` puts them into the pages. A function reads committed JSON, and returns Markdown with the device, the
versions and the number of runs beside the figures.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.files import markdown

ROOT = Path(__file__).parents[2]


NOT_RUN = "not run"


NAMES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}


MADE: dict[str, Callable[[], str]] = {}


def place(function: Callable[[], str]) -> Callable[[], str]:
    MADE[function.__name__] = function
    return function


def read(path: str) -> dict[str, Any]:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def experiment(name: str) -> dict[str, Any]:
    return read(f"experiments/results/{name}.json")


def has_run(name: str) -> bool:
    """Whether there are results of an experiment."""
    return (ROOT / f"experiments/results/{name}.json").exists()


def largest(name: str) -> dict[str, Any]:
    """The results of an experiment as published, or those of its shorter scale until they are there."""
    return experiment(f"{name}_full" if has_run(f"{name}_full") else f"{name}_cpu")


def benchmark(name: str) -> dict[str, Any]:
    return read(f"benchmarks/results/{name}.json")


def table_of(header: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table under a header of titles with ` | ` between them."""
    return markdown(header.split(" | "), rows)


def measured_on(record: Mapping[str, Any], *more: str) -> str:
    """The line under a table: device, versions, and how often it was measured."""
    cores = record["cpu_count"]
    versions = record["versions"]
    parts = [
        f"{record['device']}, {cores} core{'s' if cores > 1 else ''}",
        f"Python {versions['python']}",
        f"jax {versions['jax']}",
    ]
    if rounds := record.get("rounds"):
        parts.append(f"medians of {rounds} rounds")
    if date := record.get("date"):
        more = (*more, date)
    return f"*{', '.join([*parts, *more])}.*"


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f}"


def data_title(facts: Mapping[str, Any]) -> str:
    """The data set by name, with the copy that was used where it is not the original."""
    name = NAMES.get(facts["name"], facts["name"])
    # Files older than the field `copy` have only one kind of CIFAR-10 that is not the official one.
    copy = facts.get("copy", "JPEG copy" if facts["bytes"] == "not official" else "")
    return f"{name} ({copy})" if copy else name


def row_title(row: str, runs: Iterable[Mapping[str, Any]]) -> str:
    """Such as "CIFAR-10 (JPEG copy), mlcn1 4x4" of `cifar_mlcn1_4x4`."""
    data = next((data_title(run["data"]) for run in runs if run["facts"].get("row") == row), None)
    short, _, model = row.partition("_")
    data = data or {"cifar": "CIFAR-10", "fashion": "Fashion-MNIST"}[short]
    return f"{data}, {'CapsNet' if model == 'capsnet' else model.replace('_', ' ')}"


def accuracy_text(spread: Mapping[str, Any] | None) -> str:
    if not spread:
        return NOT_RUN
    text = f"{spread['mean']:.2f}"
    return text if spread["runs"] == 1 else f"{text} ({spread['min']:.2f} to {spread['max']:.2f})"


def commands_of(runs: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(f"- `{command}`" for command in sorted({run["command"] for run in runs}))


def runs_line(runs: Sequence[Mapping[str, Any]], what: str = "run") -> str:
    """Under a table of runs: on which machines how many of them were made, and when."""
    by_place: dict[tuple, list[Mapping[str, Any]]] = {}
    for run in runs:
        place = run["device"], run["cpu_count"], run["versions"]["python"], run["versions"]["jax"]
        by_place.setdefault(place, []).append(run)
    told = []
    for own in by_place.values():
        dates = sorted({run["date"] for run in own})
        when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
        told.append(measured_on({**own[0], "date": ""}, f"{len(own)} {what}{'s' * (len(own) > 1)}, {when}").strip("*."))
    return f"*{'; '.join(told)}.*"


def verdict(difference: float | None) -> str:
    if difference is None:
        return ""
    verdict = "reached" if difference >= 0 else "within 0.5" if difference >= -0.5 else "below"
    return f", {difference:+.2f}, {verdict}"

"""The fields of a configuration as listed by `--help`, with defaults and meanings from the dataclasses."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from mlcn_jax.errors import did_you_mean

_COLUMN, _WIDTH = 40, 118
_ATTRIBUTE = re.compile(r"  (\w+(?:, \w+)*): (.+)")


def meanings(cls: type) -> dict[str, str]:
    """The meaning of each field, on one line, from the `Attributes:` section of a class's docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].splitlines():
        if begun := _ATTRIBUTE.fullmatch(line):
            names = begun[1].split(", ")
            found |= dict.fromkeys(names, begun[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            break
    return found


def listing(with_search: bool) -> str:
    """All fields, section by section, including those of a search if asked for."""
    from mlcn_jax.config import SECTIONS, RunConfig, flat
    from mlcn_jax.search.settings import SearchSettings

    defaults = {**RunConfig().to_dict(), "search": dataclasses.asdict(SearchSettings())}
    sections = SECTIONS | ({"search": SearchSettings} if with_search else {})
    lines = []
    for section, cls in sections.items():
        lines += ["", f"  {section}: {(cls.__doc__ or '').splitlines()[0]}"]
        known = meanings(cls)
        for field in dataclasses.fields(cls):
            if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
                known |= {f"{field.name}.{name}": text for name, text in meanings(field.type).items()}
        values = flat(defaults[section])
        lines += [entry(f"--config.{section}.{name}", value, known[name]) for name, value in values.items()]
    lines += ["", "  for the entire run:"]
    of_run = meanings(RunConfig)
    of_sections = {*SECTIONS, "search"}
    lines += [entry(f"--config.{name}", defaults[name], of_run[name]) for name in defaults if name not in of_sections]
    return "\n".join(lines)


def entry(flag: str, default: Any, meaning: str) -> str:
    """One or more lines of help: the flag with its default, and its meaning in a second column."""
    shown = "" if default is None else ",".join(map(str, default)) if isinstance(default, list | tuple) else default
    head = f"    {flag}={shown}"
    lines = textwrap.wrap(meaning, _WIDTH - _COLUMN)
    if len(head) + 2 > _COLUMN:
        lines.insert(0, "")
    first, *rest = lines
    return "\n".join([f"{head:<{_COLUMN}}{first}".rstrip(), *(" " * _COLUMN + line for line in rest)])


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the closest known name, if any is close."""
    names = list(known)
    same_end = [one for one in names if one.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"; did you mean {prefix}{same_end[0]}?" if same_end else did_you_mean(name, names, prefix)

"""The exceptions that a user meets, and what their messages are made of."""

from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is expected and how to mend it. `launch.launch` prints it without a
    traceback and exits with code 2.
    """


class Diverged(ArithmeticError):
    """The loss or its gradient is no longer finite."""


class Stopped(Exception):
    """A command was asked to stop (SIGTERM or Ctrl-C) and saved what it had first."""


def differences(
    theirs: Mapping[str, Any],
    mine: Mapping[str, Any],
    names: Iterable[str] | None = None,
    there: str = "there",
    here: str = "now",
) -> list[str]:
    """A line for each name under which two mappings differ, for a message that lists them.

    Args:
      theirs: what was stored, or given elsewhere.
      mine: what is given here.
      names: to compare; None takes those of `mine`.
      there, here: what to call the two.

    >>> differences({"seed": 0, "lanes": 4}, {"seed": 1, "lanes": 4})
    ['  seed: 0 there, 1 now']
    """
    return [
        f"  {name}: {theirs.get(name)!r} {there}, {mine.get(name)!r} {here}"
        for name in (mine if names is None else names)
        if theirs.get(name) != mine.get(name)
    ]

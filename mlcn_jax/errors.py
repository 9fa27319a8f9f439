"""The exceptions a user may see, and helpers for their messages."""

import difflib
import errno
from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is expected and how to fix it. `launch.launch` prints it without a
    traceback and exits with code 2.
    """


class Damaged(InputError):
    """A file was read, and its content is not what was written there."""


class Diverged(ArithmeticError):
    """The loss or its gradient is no longer finite."""


class Stopped(Exception):
    """A command was asked to stop (SIGTERM or Ctrl-C) and saved first what it had computed."""


def is_lack_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error))


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the closest known name, if any."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def differences(
    theirs: Mapping[str, Any],
    mine: Mapping[str, Any],
    names: Iterable[str] | None = None,
    there: str = "there",
    here: str = "now",
) -> list[str]:
    """One line for each name whose values differ between two mappings, for use in a message.

    Args:
      theirs: what was stored, or given elsewhere.
      mine: what is given here.
      names: names to compare; None takes those of `mine`.
      there, here: labels for the two.

    >>> differences({"seed": 0, "lanes": 4}, {"seed": 1, "lanes": 4})
    ['  seed: 0 there, 1 now']
    """
    return [
        f"  {name}: {theirs.get(name)!r} {there}, {mine.get(name)!r} {here}"
        for name in (mine if names is None else names)
        if theirs.get(name) != mine.get(name)
    ]

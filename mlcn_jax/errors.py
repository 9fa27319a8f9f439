"""The exceptions that a user meets."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is expected and how to mend it. `launch.launch` prints it without a
    traceback and exits with code 2.
    """


class Diverged(ArithmeticError):
    """The loss or its gradient is no longer finite."""


class Stopped(Exception):
    """A command was asked to stop (SIGTERM or Ctrl-C) and saved what it had first."""

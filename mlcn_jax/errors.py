"""The one exception for input that cannot be used."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was given, what is expected and how to mend it. `main.py` prints it as one
    line, without a traceback, and exits with code 2.
    """

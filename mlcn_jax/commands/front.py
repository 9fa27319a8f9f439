"""The one front door: `mlcn_jax COMMAND`, `python -m mlcn_jax COMMAND` and `python main.py COMMAND` are the same.

`python main.py --config=FILE --workdir=FOLDER` without a command trains; `--mode` names another of `MODES`.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch

# Each command's module, which is loaded when it is called, and what the list of commands says of it.
COMMANDS = {
    "train": ("commands.train", "trains a model, or goes on with a run that was stopped"),
    "evaluate": ("commands.evaluate", "scores a trained model on its test set"),
    "describe": ("commands.describe", "says what a configuration builds, without training it"),
    "sweep": ("commands.sweep", "trains every point of a grid of settings"),
    "search": ("commands.search", "searches for the lanes that fill given devices and classify best"),
    "profile": ("commands.profile", "measures what this device takes for lanes"),
    "explain": ("commands.explain", "draws what each lane of a trained model encodes"),
    "explore": ("commands.explore", "serves a page on which lanes can be moved and switched off"),
    "prune": ("commands.prune", "says what each lane is worth, and removes the least useful ones"),
    "export": ("commands.export", "makes a trained model ready for predict and serve"),
    "onnx": ("commands.onnx", "converts an exported model to ONNX, and checks it"),
    "predict": ("serving.predict", "classifies pictures with an exported model"),
    "serve": ("serving.server", "answers HTTP requests with an exported model"),
}
MODES = ("train", "evaluate", "describe", "sweep", "export")
_HELP = ("-h", "-help", "--help", "--helpfull")


def main() -> None:
    """Runs the command that the command line names."""
    launch(lambda: run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Runs one command in this process and returns its exit code.

    Args:
      argv: the command and its flags, or flags alone, of which `--mode` may name it.

    Raises:
      InputError: there is no such command, or it cannot use what it was given.
      SystemExit: the command has told how it is used.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in _HELP:
        print(usage())
        return 0
    name = _mode(arguments) if arguments[0].startswith("-") else arguments.pop(0)
    if name not in COMMANDS:
        raise InputError(f"there is no command {name!r}{_nearest(name)}; the commands are {', '.join(COMMANDS)}")
    module = importlib.import_module(f"mlcn_jax.{COMMANDS[name][0]}")
    return module.main(arguments) or 0


def usage() -> str:
    """What `--help` prints."""
    commands = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"{(importlib.import_module('mlcn_jax').__doc__ or '').splitlines()[0]}\n\n"
        f"mlcn_jax COMMAND [--FLAG=VALUE ...]\n\n{commands}\n\n"
        "`mlcn_jax COMMAND --help` tells of one; `mlcn_jax train --help` lists the fields of a configuration.\n"
        "`python -m mlcn_jax COMMAND` and, in a clone, `python main.py COMMAND` are the same; without a command\n"
        f"main.py takes --mode=NAME, one of {', '.join(MODES)}, and trains by default.\n"
        "Exit codes: 0 done, 2 input that cannot be used, 3 failed, 75 stopped after saving: run it again to go on."
    )


def _mode(arguments: list[str]) -> str:
    """Takes `--mode` out of flags that stand without a command."""
    mode = "train"
    for i, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "mode":
            mode = value if equals else "".join(arguments[i + 1 : i + 2])
            del arguments[i : i + (1 if equals else 2)]
            break
    if mode not in MODES:
        raise InputError(f"--mode={mode} is not one of {', '.join(MODES)}{_nearest(mode)}")
    if mode != "sweep" and any(argument.lstrip("-").startswith("sweep=") for argument in arguments):
        raise InputError("--sweep needs --mode=sweep")
    return mode


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {found[0]}?" if found else ""

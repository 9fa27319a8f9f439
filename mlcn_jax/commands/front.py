"""The command line: `mlcn_jax COMMAND`, `python -m mlcn_jax COMMAND` and `python main.py COMMAND` are the same.

`python main.py --config=FILE --workdir=FOLDER` without a command trains; `--mode` names another of `MODES`.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from mlcn_jax.errors import InputError, did_you_mean
from mlcn_jax.launch import launch

# Each command's module, loaded only when it is called, and its line in the list of commands.
COMMANDS = {
    "train": ("commands.train", "trains a model, or resumes a run that was stopped"),
    "evaluate": ("commands.evaluate", "scores a trained model on its test set"),
    "describe": ("commands.describe", "prints what a configuration builds, without training it"),
    "sweep": ("commands.sweep", "trains every point of a grid of settings"),
    "search": ("commands.search", "searches for the lanes that fill given devices and classify best"),
    "cheapest": ("commands.cheapest", "finds the machines that train by a deadline at the least cost"),
    "profile": ("commands.profile", "measures how fast this device trains lanes"),
    "explain": ("commands.explain", "draws what each lane of a trained model encodes"),
    "explore": ("commands.explore", "serves a page on which lanes can be changed and switched off"),
    "prune": ("commands.prune", "measures what each lane is worth, and removes the least useful ones"),
    "join": ("commands.join", "joins lanes that were trained apart into one model"),
    "work": ("commands.work", "trains the lanes of a pool, beside any number of other workers"),
    "rounds": ("commands.rounds", "trains with workers that rarely communicate, in local rounds"),
    "export": ("commands.export", "exports a trained model for predict and serve"),
    "onnx": ("commands.onnx", "converts an exported model to ONNX, and checks it"),
    "precision": ("commands.precision", "measures lanes in float32, bfloat16 and int8, and exports a mix"),
    "predict": ("serving.predict", "classifies pictures with a trained or exported model"),
    "serve": ("serving.server", "answers HTTP requests with a trained or exported model"),
    "tiers": ("commands.tiers", "splits a model's lanes over devices, and answers with them"),
}
MODES = ("train", "evaluate", "describe", "sweep", "export")
_HELP = ("help", "-h", "-help", "--help", "--helpfull")
_VERSION = ("version", "-version", "--version")


def main() -> None:
    """Runs the command that the command line names."""
    launch(lambda: run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Runs one command in this process and returns its exit code.

    Args:
      argv: the command and its flags, or only flags, one of which may be `--mode`.

    Raises:
      InputError: there is no such command, or its input cannot be used.
      SystemExit: the command has printed its help.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in _HELP:
        print(usage())
        return 0
    if arguments[0] in _VERSION:
        print(", ".join(map(_version, ("mlcn_jax", "jax", "flax", "optax"))))
        return 0
    name = _mode(arguments) if arguments[0].startswith("-") else arguments.pop(0)
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS)
        raise InputError(f"there is no command {name!r}{meant}; the commands are {', '.join(COMMANDS)}")
    module = importlib.import_module(f"mlcn_jax.{COMMANDS[name][0]}")
    return module.main(arguments) or 0


def usage() -> str:
    """What `--help` prints."""
    commands = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"{(importlib.import_module('mlcn_jax').__doc__ or '').splitlines()[0]}\n\n"
        f"mlcn_jax COMMAND [--FLAG=VALUE ...]\n\n{commands}\n\n"
        "`mlcn_jax COMMAND --help` describes one; `mlcn_jax train --help` lists the fields of a configuration;\n"
        "`mlcn_jax --version` prints the versions of the main packages.\n"
        "`python -m mlcn_jax COMMAND` and, in a clone, `python main.py COMMAND` are the same; without a command\n"
        f"main.py takes --mode=NAME, one of {', '.join(MODES)}, and trains by default.\n"
        "Exit codes: 0 done, 2 input that cannot be used, 3 failed, 75 stopped after saving: run it again to resume."
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # a clone, or what predicts only
        return f"{package} not installed"


def _mode(arguments: list[str]) -> str:
    """Removes `--mode` from flags given without a command, and returns the command it names."""
    mode = "train"
    for i, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "mode":
            mode = value if equals else "".join(arguments[i + 1 : i + 2])
            del arguments[i : i + (1 if equals else 2)]
            break
    if mode not in MODES:
        raise InputError(f"--mode={mode} is not one of {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    if mode != "sweep" and any(argument.lstrip("-").startswith("sweep=") for argument in arguments):
        raise InputError("--sweep needs --mode=sweep")
    return mode

"""The flags of a command, defined separately for each call: mistakes are reported before anything slow is loaded."""

import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from mlcn_jax.commands.fields import entry, listing, nearest
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program

if TYPE_CHECKING:
    from ml_collections import ConfigDict

# The files of `configs/`: part of the wheel, and next to the package in a clone.
CONFIGS = next(path for path in (Path(__file__).parents[i] / "configs" for i in (1, 2)) if path.is_dir())
WORKDIR = "Folder of a training run, or the name of a packaged model: digits."
_HELP = {"h", "help", "helpfull"}
_FIELD = re.compile(r"--?(?:no)?config\.([^=]+)(=.*)?")
_PLAIN = {
    r"invalid literal for int\(\) with base 10: .*": "it must be an integer",
    r"could not convert string to float: .*": "it must be a number",
    r"\('Non-boolean argument to boolean flag', .*\)": "it must be true or false",
}
Define = Callable[[flags.FlagValues], Any]


def parse(command: str, doc: str | None, define: Define, argv: Sequence[str], config: str = "") -> Any:
    """Parses the flags of one call; with `--help`, prints them all and exits.

    Args:
      command: the command's name.
      doc: the docstring of the command's module.
      define: defines the command's flags, except `--config`, on the `FlagValues` passed to it.
      argv: the arguments.
      config: `run` or `search` if the command takes `--config` and the fields of such a configuration.

    Returns:
      absl's flag values. If `config` is set, `values.config` is None without `--config`, and
      `values["config"].override_values` holds the fields given.

    Raises:
      InputError: a flag or field is unknown, its value cannot be used, or the config file cannot be executed.
    """
    values = flags.FlagValues()
    define(values)
    if any(argument.startswith("-") and argument.lstrip("-") in _HELP for argument in argv):
        print(_help(command, doc, values, config))
        sys.exit(0)
    _check_names(command, values, argv, config)
    try:
        if config:
            argv = _define_config(values, argv, command)
        unread = values([command, *argv])[1:]
    except InputError:
        raise
    except (flags.Error, ValueError, LookupError, TypeError) as error:  # absl and ml_collections raise all of these
        raise InputError(_plain(str(error))) from error
    if unread:  # such as the value of a switch, which absl takes to be true then
        raise InputError(f"{unread[0]!r} belongs to no flag: switches are written --name=true, --name=false or --name")
    return values


def _plain(message: str) -> str:
    """absl's message, without Python's own words for a value of the wrong type."""
    for words, expected in _PLAIN.items():
        message = re.sub(words, expected, message)
    return message


def define_reading(values: flags.FlagValues) -> None:
    """Defines the flags of every command that reads a trained model and its images."""
    flags.DEFINE_string("workdir", "", WORKDIR, flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)


def given_workdir(values: Any) -> Path:
    """The workdir to read; raises InputError if none was given."""
    from mlcn_jax import pretrained

    if not values.workdir:
        raise InputError(f"--workdir=FOLDER is needed: a training run, or one of: {', '.join(pretrained.names())}")
    return pretrained.find_workdir(values.workdir)


def config_file(given: str) -> Path:
    """A config file, or the packaged one of that name: `quickstart`, `quickstart.py` or `configs/quickstart.py`.

    Raises:
      InputError: neither exists.
    """
    path = Path(given).expanduser()
    packaged = CONFIGS / f"{path.name.removesuffix('.py')}.py"
    if path.is_file():
        return path
    if str(path.parent) in (".", "configs") and packaged.is_file():
        return packaged
    names = config_names()
    meant = nearest(path.stem, names)
    raise InputError(
        f"--config={given} is neither a file nor a packaged configuration{meant}; available: {', '.join(names)}"
    )


def config_names() -> list[str]:
    """The names of the packaged configurations."""
    return sorted(file.stem for file in CONFIGS.glob("[!_]*.py"))


def execute(path: Path) -> "ConfigDict":
    """What `get_config()` of a config file returns; raises InputError if the file cannot be executed."""
    from ml_collections import ConfigDict, FrozenConfigDict

    try:
        names = runpy.run_path(str(path))
        if "get_config" not in names:
            raise InputError(f"{path} has no get_config(); --config takes a Python file with get_config()")
        found = names["get_config"]()
    except InputError:
        raise
    except Exception as error:  # it is the user's program
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else f"{path}"
        hint = "" if path.suffix == ".py" else "; --config takes a Python file with get_config()"
        raise InputError(f"{where}: {type(error).__name__}: {str(error).strip()}{hint}") from error
    if not isinstance(found, ConfigDict):
        raise InputError(f"{path}: get_config() returns no ConfigDict: start from mlcn_jax.config.default_config()")
    return found.as_configdict() if isinstance(found, FrozenConfigDict) else found


def _check_names(command: str, values: flags.FlagValues, argv: Sequence[str], config: str) -> None:
    """Raises InputError for an unknown flag or argument, without executing the configuration."""
    known = {*values, *({"config"} if config else ())}
    told = f"{program()} {command} --help lists all"
    may_be_value = False
    for argument in argv:
        is_flag = re.match(r"--?[A-Za-z]", argument)
        if not is_flag and not may_be_value:
            raise InputError(f"unknown argument {argument!r}: flags are written --name=value, and {told}")
        if not is_flag:
            may_be_value = False
            continue
        name, equals, _ = argument.lstrip("-").partition("=")
        field = name.removeprefix("no").startswith("config.")
        if field and not config:
            raise InputError(f"--{name}: the command {command} does not take a configuration: {told}")
        switch = name in known or name.removeprefix("no") in known
        if not field and not switch:
            raise InputError(f"unknown flag --{name}{nearest(name, known, '--') or _as_field(name, config)}; {told}")
        may_be_value = not equals and (field or name == "config" or not (name in values and values[name].boolean))


def _as_field(name: str, config: str) -> str:
    """The end of a message about an unknown flag that may be meant as a config field."""
    known = sorted(_known_fields(), key=lambda field: field.startswith("search."))  # a run has most fields
    return nearest(name, known, "--config.") if config else ""


def _known_fields() -> dict[str, Any]:
    from mlcn_jax.config import flat
    from mlcn_jax.search.settings import default_search

    return flat(default_search().to_dict())


def _define_config(values: flags.FlagValues, argv: Sequence[str], command: str) -> list[str]:
    """Takes `--config` out of `argv` and defines it from the file, with the fields changed in `argv`."""
    rest, given = [], ""
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.lstrip("-") == "config" and name.startswith("-"):
            given = value if equals else next(arguments, "")
            if not given:
                raise InputError("--config is empty: give --config=FILE, or the name of a packaged configuration")
        else:
            rest.append(argument)
    fields = [match[1] for argument in rest if (match := _FIELD.fullmatch(argument))]
    if not given and not fields:
        flags.DEFINE_string("config", None, "", flag_values=values)
        return rest
    from ml_collections import config_flags

    from mlcn_jax.config import default_config

    found = execute(config_file(given or "default"))
    _complete(found, default_config())
    _check_fields(found, fields, command)
    config_flags.DEFINE_config_dict("config", found, flag_values=values, sys_argv=[command, *rest])
    values["config"].present = int(bool(given))
    return rest


def _complete(config: "ConfigDict", defaults: "ConfigDict") -> None:
    """Adds the fields that a file leaves out, so that the command line can change them."""
    with config.unlocked():
        for name, value in defaults.items():
            if name not in config:
                config[name] = value
            elif hasattr(value, "unlocked") and hasattr(config[name], "unlocked"):  # a section
                _complete(config[name], value)


def _check_fields(config: "ConfigDict", fields: Sequence[str], command: str) -> None:
    from mlcn_jax.config import flat

    known, of_search = flat(config.to_dict()), [name for name in _known_fields() if name.startswith("search.")]
    for name in fields:
        if name in of_search and not (name in known and command == "search"):
            raise InputError(
                f"--config.{name} is a field of searches: use {program()} search, with a configuration such as "
                "nas_quickstart"
            )
        if name in known:
            continue
        meant = nearest(name, known, "--config.") or nearest(name, of_search, f"`{program()} search` with --config.")
        raise InputError(f"there is no field --config.{name}{meant}; {program()} {command} --help lists all")


def _help(command: str, doc: str | None, values: flags.FlagValues, config: str) -> str:
    lines = [(doc or "").strip(), "", "Flags, with their defaults:", ""]
    if config:
        name = "nas_quickstart" if config == "search" else "quickstart"
        meaning = f"Python file with get_config(), or the name of a packaged configuration, such as {name}."
        lines.append(entry("--config", None, meaning))
    flag_of = {name: values[name] for name in values if values[name].help not in ("", "(no help available)")}
    lines += [entry(f"--{name}", flag.default, flag.help.partition(";\n")[0]) for name, flag in flag_of.items()]
    if config:
        lines += ["", "Fields of the configuration, with their defaults:", listing(config == "search")]
    if config == "run":
        lines += ["", f"Fields of a search: {program()} search --help"]
    if not config:
        lines += ["", f"Fields of a configuration (--config.*): {program()} train --help"]
    return "\n".join(lines)

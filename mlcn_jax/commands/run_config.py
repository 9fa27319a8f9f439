"""The run that the flags `--config` and `--workdir` refer to."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcn_jax.commands.arguments import config_names
from mlcn_jax.errors import InputError

if TYPE_CHECKING:
    from mlcn_jax.config import RunConfig


def needed_workdir(values: Any) -> Path:
    """The workdir to write; raises InputError if none was given."""
    if not values.workdir:
        raise InputError("--workdir=FOLDER is needed: everything is written there")
    return Path(values.workdir).expanduser()


def config_of(values: Any, workdir: Path | None = None) -> "RunConfig":
    """The configuration of `--config` and the fields given; without `--config`, the one stored in `workdir`.

    Raises:
      InputError: neither is given, or a value is out of range.
    """
    flag = values["config"]
    if not flag.present and workdir is None:
        names = ", ".join(config_names())
        raise InputError(f"--config is missing: give a file or a packaged configuration ({names})")

    from mlcn_jax.config import RunConfig, read_stored

    if flag.present or workdir is None:
        return RunConfig.from_dict(values.config.to_dict())
    return read_stored(workdir).replace(getattr(flag, "override_values", {}))

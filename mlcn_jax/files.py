"""Files that are whole or not there, and the lock on a workdir."""

import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mlcn_jax.errors import InputError


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that the file is either the old one or the new one, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Reads JSON; raises InputError where the file cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): put it back from a copy, or use another workdir") from error


@contextlib.contextmanager
def hold(workdir: Path):
    """Makes `workdir` and holds it for this process.

    Raises:
      InputError: it cannot be written, or another process trains in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / ".lock").open("w")
    except OSError as error:
        raise InputError(
            f"--workdir={workdir} cannot be written ({error.strerror}): give a folder on a disk with free space in "
            "which you may write"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process trains in {workdir}: wait for it, stop it, or give another --workdir"
            ) from error
        yield


def make_folder(path: Path, flag: str) -> None:
    """Makes a folder where there is none; raises InputError, which names the flag, if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror}): give another --{flag}=FOLDER") from error

"""One script for each published figure or claim."""

import tempfile
from pathlib import Path

from mlcn_jax.errors import InputError

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "experiments" / "results"


def make_folder(path: Path, flag: str) -> None:
    """Makes a folder where there is none; raises InputError, which names the flag, if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror}): give another --{flag}=FOLDER") from error

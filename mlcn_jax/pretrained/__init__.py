"""Models that come with the package, so that commands can be tried at once; by name, such as `digits`."""

from pathlib import Path

from mlcn_jax.errors import InputError

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The names of all models that come with the package."""
    return sorted(folder.name for folder in _HERE.iterdir() if (folder / "model.json").is_file())


def is_pretrained(workdir: Path) -> bool:
    """Whether a workdir is one of the package's own, into which nothing is written."""
    return workdir.resolve().parent == _HERE.resolve()


def find_workdir(given: str) -> Path:
    """The workdir that a command reads: a folder, or, if no such folder exists, a pretrained model."""
    folder = Path(given).expanduser()
    return _HERE / given if given in names() and not folder.exists() else folder


def find_export(given: str) -> Path:
    """The exported model that a command reads: a folder, or, as `find_workdir`, that of a pretrained model."""
    workdir = find_workdir(given)
    return workdir / "export" if is_pretrained(workdir) else workdir


def output_folder(given: str, workdir: Path, name: str) -> Path:
    """Where a command writes: the folder given, `WORKDIR/name`, or for a pretrained model `./name-MODEL`."""
    if given:
        return Path(given).expanduser()
    return Path(f"{name}-{workdir.resolve().name}") if is_pretrained(workdir) else workdir / name


def check_writable(workdir: Path, command: str) -> None:
    """Raises InputError for a command that writes into the workdir itself, if it is the package's own."""
    if is_pretrained(workdir):
        raise InputError(
            f"{command} writes into the workdir, and {workdir.resolve().name} comes with the package: copy it "
            f"(cp -r {workdir} FOLDER) and give FOLDER instead"
        )

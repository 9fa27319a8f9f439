"""Atomic writes of files, locks, checks that a workdir can be used, and Markdown tables."""

import contextlib
import errno
import json
import os
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcn_jax.errors import Damaged, InputError

if TYPE_CHECKING:
    import filelock
    from matplotlib.figure import Figure


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name next to `path` to write to; the file replaces `path` when the block ends.

    Whatever happens, even a machine crash, `path` is either the old file or the complete new one. Several processes may
    write it at once: the last one wins.
    """
    partial = path.with_name(f".partial-{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        yield partial
        _to_disk(partial)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    _to_disk(path.parent)


def write_figure(figure: "Figure", path: Path, **options: Any) -> None:
    """Writes a figure with `Figure.savefig`; an older one at `path` stays if that fails."""
    with replacing(path) as partial:
        figure.savefig(partial, **options)


def _to_disk(path: Path) -> None:
    """Flushes to disk what was written: a file's content, or the names in a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.EACCES):  # not all systems can for folders
            raise


def tree_to_disk(folder: Path) -> None:
    """Flushes all files in a folder, and their names, to disk."""
    for path in (*folder.rglob("*"), folder):
        _to_disk(path)


def put_in_place(made: Path, folder: Path, replace: bool = True) -> None:
    """Moves a folder to the name `folder`, in place of an older one, once all of its content is on disk.

    Unless it may `replace`, raises OSError if there is such a folder and it is not empty.

    The older folder is left beside `made`, which should therefore be alone in a temporary folder on the same disk.
    """
    tree_to_disk(made)
    if replace and folder.exists():
        folder.rename(made.with_name("before"))
    made.rename(folder)
    _to_disk(folder.parent)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Writes a file atomically, with `replacing`: it is either the old one or the complete new one."""
    with replacing(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically, with `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file with an object holds; raises as `read_json`, and Damaged if it holds something else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise Damaged(f"{path} is damaged (it holds no object): restore it from a copy, or use another workdir")
    return content


def read_json(path: Path) -> Any:
    """Reads JSON; raises InputError if the file is missing or cannot be read, and Damaged if it is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: restore it from a copy, or use another workdir") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): make it readable, then try again") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}): restore it from a copy, or use another workdir") from error


# Path parts that the checkpoint libraries interpret themselves: tensorstore reads a backslash as a slash, orbax expands
# file name patterns, etils handles `gs:/` and a first folder named after a service. Their paths are UTF-8.
_NOT_IN_PATHS = "\\*?["
_SERVICES = ("gs", "s3", "az", "hf")


def check_workdir(workdir: Path) -> None:
    """Raises InputError if checkpoints in this workdir would be written elsewhere, or could not be found again."""
    path = workdir.absolute()
    wrong = next((f"it has {c!r}" for c in _NOT_IN_PATHS if c in str(path)), "")
    if any(name.endswith("gs:") for name in path.parts):
        wrong = "a folder's name ends in 'gs:'"
    elif path.parts[1:2] and path.parts[1] in _SERVICES:
        wrong = f"/{path.parts[1]} stands for a storage service"
    elif any("\ud800" <= c <= "\udfff" for c in str(path)):
        wrong = "it is not UTF-8"
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(workdir)):
        wrong = "it is an address, and runs are kept in folders of this machine"
    if wrong:
        raise InputError(
            f"the workdir {str(path)!r} cannot hold checkpoints because {wrong}: give a --workdir without it, or move "
            "the folder there first"
        )


def try_lock(path: Path) -> "filelock.BaseFileLock | None":
    """Locks a file, creating it if needed, until it is released or this process ends; None if another process holds it.

    Raises:
      InputError: the file system has no locks.
      OSError: the file cannot be opened for writing, is a folder, or is a link (links are not followed).
    """
    import filelock  # an exported model needs this module without it

    # A file that merely exists, which filelock would take instead, outlives a process that is killed.
    lock = filelock.FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        return None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        raise InputError(
            f"{path} cannot be locked, because its file system has no locks: give a folder on another one, or have it "
            "mounted with them (Lustre: -o flock)"
        ) from error
    return lock


@contextlib.contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Creates `workdir` and locks it for this process.

    Raises:
      InputError: it cannot hold checkpoints, it is not writable or cannot be locked, or another process is using
        it.
    """
    check_workdir(workdir)
    path = workdir / ".lock"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = try_lock(path)
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise InputError(f"{path} is a link or a folder, but must be a regular file: remove it") from error
        raise InputError(
            f"--workdir={workdir} cannot be written to ({error.strerror}): give a folder that you may write to, on a "
            "disk with free space"
        ) from error
    if lock is None:
        raise InputError(f"another process is using {workdir}: wait for it, stop it, or give another --workdir")
    try:
        yield
    finally:
        lock.release()


def make_folder(path: Path, flag: str) -> None:
    """Creates a folder if needed; raises InputError, naming the flag, if it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror}): give another --{flag}=FOLDER") from error


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, from titles and rows of cells."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *rows])


def given_files(option: str, text: str | None) -> list[Path]:
    """The files of an option, separated by commas; none if it is not given.

    Raises:
      InputError: one of the names is empty, as of an unset variable, which must not turn protection off.
    """
    names = [] if text is None else text.split(",")
    if not all(names):
        raise InputError(f"--{option}={text} has an empty file name: give files, or leave the option out")
    return [Path(name).expanduser() for name in names]


def given_file(option: str, text: str | None) -> Path | None:
    """The file of an option that takes one, which can have a comma in its name; an empty name is refused."""
    if not text:
        given_files(option, text)
        return None
    return Path(text).expanduser()

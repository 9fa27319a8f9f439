"""How a command starts and ends: its memory, log lines, and errors as one message."""

import errno
import importlib.util
import io
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlcn_jax.allocator import keep_memory
from mlcn_jax.errors import Diverged, InputError, Stopped, is_lack_of_memory

if TYPE_CHECKING:
    from absl.flags import FlagValues

EXIT_INPUT, EXIT_FAILED, EXIT_STOPPED = 2, 3, 75
_FAILING = {getattr(errno, name) for name in ("EIO", "ENODEV", "ENXIO", "ESTALE")}
NO_ACCESS = {
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "EEXIST", "EISDIR", "ENOTDIR", "ENAMETOOLONG", "ELOOP")
}


def program() -> str:
    """How to call the program on this machine, for messages that show a command: `mlcn_jax` if it is on the PATH."""
    return "mlcn_jax" if shutil.which("mlcn_jax") else f"{shlex.quote(sys.executable)} -m mlcn_jax"


def less_memory() -> str:
    """What needs less memory in training, for messages."""
    return (
        "use model.remat=full, train.accumulation_steps, or a smaller batch or model; "
        f"{program()} describe --memory_gib=N says which of the settings with the same result fit"
    )


def lack_of_memory(error: Exception) -> str:
    """What to tell of an error which says that memory ran out; empty for any other."""
    if is_lack_of_memory(error):
        what = f"not enough memory ({_first_line(error)}): {less_memory()}"
        return f"{what}; the command serve needs less with a smaller --max_batch"
    return ""


def launch(command: Callable[[], int | None]) -> None:
    """Runs `command`, whose result is the exit code.

    An error the user can fix (bad input, a full disk) ends it with one message and an exit code of its own.
    """
    keep_memory()
    sys.unraisablehook = _unraisable
    _silence_absl()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what its encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("mlcn_jax")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    ours.propagate = False  # absl would print it again
    try:
        code, message = command(), ""
    except InputError as error:
        code, message = EXIT_INPUT, f"error: {error}"
    except Diverged as error:
        code, message = EXIT_FAILED, f"error: {error}"
    except Stopped as stopped:
        code, message = EXIT_STOPPED, f"{stopped}; run the same command again to resume"
    except KeyboardInterrupt:
        code, message = 128 + signal.SIGINT, "interrupted"
    except RuntimeError as error:
        if "home directory" in str(error):  # pathlib, of a path such as ~nobody/runs, or of a user without one
            code = EXIT_INPUT
            message = (
                "error: a home directory is unknown: write paths that begin with ~ in full, and, if this user has "
                "none, set MLCN_JAX_CACHE to a folder for downloads and compiled programs"
            )
        elif "Unable to initialize backend" in str(error):
            code = EXIT_INPUT
            given = os.environ.get("JAX_PLATFORMS")
            cure = f"JAX_PLATFORMS is {given!r}: unset it, or name platforms that are there" if given else "repair it"
            message = f"error: {_first_line(error)}; {cure}, or compute on the CPU with JAX_PLATFORMS=cpu"
        elif "Gloo" in str(error):
            code, message = EXIT_STOPPED, f"another process of the run was lost ({_first_line(error)[:100]}...)"
        elif told := lack_of_memory(error):
            code, message = EXIT_INPUT, f"error: {told}"
        else:
            raise
    except MemoryError as error:
        code, message = EXIT_INPUT, f"error: {lack_of_memory(error)}"
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        code = EXIT_INPUT
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"error: {error}: free disk space, then run the same command again"
        elif error.errno in NO_ACCESS:
            message = f"error: {error}: give another file or folder, or make this one accessible"
        elif error.errno in _FAILING:  # what may pass, as on a network's file system
            code, message = EXIT_STOPPED, f"{error}: once the disk or file system works, run the same command again"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            message = f"error: {error}: close other programs, or raise the limit (ulimit -n)"
        elif told := lack_of_memory(error):
            message = f"error: {told}"
        else:
            raise
    # Only here, where no exception holds the arrays and programs of its frames any more: what JAX has not freed when
    # Python ends can corrupt the heap and end the process with another exit code (jax-ml/jax issue 30731).
    if message:
        _exit(code or 0, message)
    if code:
        sys.exit(code)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def launch_script(define: Callable[["FlagValues"], None], main: Callable[["FlagValues"], int | None]) -> None:
    """`launch` for the `main` of a script, called with the parsed flags that `define` declares.

    Programs are computed as in training (`host.compute_in_turn`): of queued ones, which other threads compute, glibc
    maps buffers of over 64 MiB anew in each call.
    """

    def run() -> int | None:
        from mlcn_jax import host

        values = _parse_flags(define, sys.argv)
        host.compute_in_turn()
        return main(values)

    launch(run)


def _parse_flags(define: Callable[["FlagValues"], None], argv: Sequence[str]) -> "FlagValues":
    """The flags of one call; with `--help`, prints all flags and exits."""
    from absl import flags

    values = flags.FlagValues()
    try:
        define(values)
        if any(argument.startswith("-") and argument.lstrip("-") in ("h", "help", "helpfull") for argument in argv[1:]):
            doc, listed = sys.modules["__main__"].__doc__ or "", values.get_help(include_special_flags=False)
            print(doc.strip(), listed, sep="\n")
            sys.exit(0)
        unknown = values(argv)[1:]
    except (AttributeError, KeyError) as error:  # what ml_collections raises for a field that a config does not have
        given = [arg.partition("=")[0] for arg in argv if arg.startswith("--config.")]
        if not given:
            raise
        raise InputError(
            f"{error} is not a field of the configuration ({', '.join(given)}): {program()} search --help lists "
            "all fields"
        ) from error
    except (flags.Error, OSError) as error:
        raise InputError(f"{error}; --help lists all flags") from error
    if unknown:
        raise InputError(f"unknown argument {unknown[0]!r}: flags are written --name=value, and --help lists all")
    return values


def _silence_absl() -> None:
    """Silences absl, through which Orbax logs every file and errors that are reported here anyway."""
    if importlib.util.find_spec("absl"):
        from absl import logging as absl_logging

        absl_logging.set_verbosity(absl_logging.FATAL)


def _exit(code: int, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    jax = sys.modules.get("jax")
    if code in (EXIT_INPUT, EXIT_FAILED) and jax is not None and jax.distributed.is_initialized():
        # jax would wait for the other processes of the run, which may never get here.
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(timeout=1.0)
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _unraisable(failure: "sys.UnraisableHookArgs") -> None:
    """Hides what tensorstore prints after a failed write, which is already reported as an error."""
    if str(failure.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(failure)

"""Opens the database in which a search keeps its trials; its errors become messages that say what to do."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlcn_jax.errors import InputError

if TYPE_CHECKING:
    import optuna

_LOCK_SECONDS = 30.0  # how long SQLite waits for another worker's transaction


def load_packages() -> tuple[Any, Any]:
    """Optuna and SQLAlchemy; raises InputError if they are not installed."""
    try:
        import optuna
        import sqlalchemy
    except ImportError as error:
        raise InputError("a search needs Optuna: pip install 'mlcn_jax[search]'") from error
    return optuna, sqlalchemy


def open_storage(url: str, heartbeat_seconds: int) -> "optuna.storages.RDBStorage":
    """Opens Optuna's storage in a database; raises InputError if that cannot be done.

    Args:
      url: the database, as SQLAlchemy writes it.
      heartbeat_seconds: interval of the workers' heartbeats; after two of them without one, a worker counts as dead.
    """
    optuna, sqlalchemy = load_packages()
    try:
        sqlalchemy.engine.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise _no_address(url) from error
    engine: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite"):
        engine = {"connect_args": {"timeout": _LOCK_SECONDS}}
    try:
        with storage_errors(url), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs=engine,
                heartbeat_interval=heartbeat_seconds,
                grace_period=2 * heartbeat_seconds,
            )
    except ImportError as error:
        raise InputError(
            f"search.storage={shown(url)} needs a driver that is not installed ({error}); for PostgreSQL: "
            "pip install 'psycopg[binary]'"
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"the search's storage {shown(url)} was written by another version of Optuna; {optuna.__version__} is "
            f"installed: {error}"
        ) from error


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turns errors of a storage into an InputError that says what to do; finished models stay in the storage."""
    _, sqlalchemy = load_packages()
    try:
        yield
    except sqlalchemy.exc.ArgumentError as error:
        raise _no_address(url) from error
    except Exception as error:
        cause: BaseException | None = error  # Optuna may raise another error while it handles the storage's
        while cause is not None and not isinstance(cause, sqlalchemy.exc.SQLAlchemyError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, InputError):
            raise
        detail = (str(getattr(cause, "orig", None) or cause).strip().splitlines() or [type(cause).__name__])[0]
        if re.search("no (such )?column|no such table|malformed|not a database", detail):
            raise InputError(
                f"the search's storage {shown(url)} is damaged or belongs to another program ({detail}): restore it "
                "from a backup, or start a new search with another search.storage or --workdir"
            ) from error
        if re.search(r"\b(dead)?lock", detail):  # not a "block" that cannot be read
            hint = "another program has locked it: wait for it or end it, and keep SQLite files off network folders"
        elif "full" in detail:
            hint = "free disk space"
        else:
            hint = "check that the database is running, that its address is right and that you may write there"
        raise InputError(
            f"the search's storage {shown(url)} cannot be used ({detail}): {hint}. Models that have finished are "
            "kept; the same command continues the search"
        ) from error


def _no_address(url: str) -> InputError:
    return InputError(
        f"search.storage={shown(url)} is not the address of a database: give one such as sqlite:////folder/search.db "
        "or postgresql://user:password@host:5432/database"
    )


def shown(url: str) -> str:
    """A database URL without its password; of a text that is no such URL, what may hold none."""
    _, sqlalchemy = load_packages()
    try:
        parsed = sqlalchemy.engine.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return f"{url.partition(':')[0][:12]!r}..." if len(url) > 12 else repr(url)
    return parsed.update_query_dict({"password": "***"} if "password" in parsed.query else {}).render_as_string()

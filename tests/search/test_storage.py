"""Storages of searches: locked, damaged, of another version, failing in the middle, and PostgreSQL."""

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time

import pytest
from made_study import SETTINGS, make_study, planted, run

from mlcn_jax.errors import InputError
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search import storage, study


def test_a_locked_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.2)
    found = make_study(tmp_path)
    holder = sqlite3.connect(tmp_path / "search.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with (
        pytest.raises(InputError, match=r"another program has locked it.*Models that have finished are kept"),
        storage.storage_errors("sqlite:///search.db"),
    ):
        run(found)
    holder.close()
    assert {model.state for model in run(make_study(tmp_path))} == {"complete"}


def test_a_block_that_cannot_be_read_is_no_lock():
    from sqlalchemy.exc import OperationalError

    error = OperationalError("SELECT", {}, Exception('could not read block 12 in file "base/1": Input/output error'))
    with (
        pytest.raises(InputError, match="could not read block 12") as raised,
        storage.storage_errors("postgresql://host/search"),
    ):
        raise error
    assert "locked" not in str(raised.value)


def test_a_storage_that_fails_while_a_model_is_trained(tmp_path):
    holder = sqlite3.connect(tmp_path / "search.db", isolation_level=None)

    def evaluate(lanes):
        if lanes != SETTINGS.baseline:
            holder.execute("DROP TABLE trial_intermediate_values")
        yield from planted(lanes)

    found = make_study(tmp_path)
    refused = pytest.raises(InputError, match=r"is damaged .*no such table: trial_intermediate_values")
    with refused, storage.storage_errors("sqlite:///search.db"):
        run(found, evaluate)


def test_storages_that_cannot_be_used(tmp_path):
    (tmp_path / "search.db").write_text("no database, but text that is long enough to look like one\n" * 100)
    with pytest.raises(InputError, match="damaged or belongs to another program") as caught:
        make_study(tmp_path)
    assert "same command continues" not in str(caught.value)
    for url, message in (
        ("nonsense", "is not the address of a database"),
        ("sqlite:////nowhere/search.db", "cannot be used .*unable to open"),
        ("postgresql://u:secret@127.0.0.1:1/x", "cannot be used|driver that is not installed"),
        ("oddsql://x/y", "is not the address|driver"),
        ("postgresql://u:secret@h:abc/x", "is not the address of a database"),
        ("postgresql//u:secret@h/x", "is not the address of a database"),
        ("postgresql://127.0.0.1:1/x?password=secret", "cannot be used|driver that is not installed"),
    ):
        with pytest.raises(InputError, match=message) as error:
            study.Study(SETTINGS, {}, url, create=True)
        assert "secret" not in str(error.value)


def test_tables_of_another_program(tmp_path):
    connection = sqlite3.connect(tmp_path / "search.db")
    connection.execute("CREATE TABLE version_info (x INTEGER)")
    connection.close()
    with pytest.raises(InputError, match=r"belongs to another program .no such column"):
        make_study(tmp_path)


def test_a_storage_of_another_version(tmp_path):
    make_study(tmp_path)
    connection = sqlite3.connect(tmp_path / "search.db")
    connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match="another version of Optuna"):
        make_study(tmp_path)


@pytest.mark.skipif(not shutil.which("initdb"), reason="needs PostgreSQL's programs")
def test_postgresql_as_storage():
    pytest.importorskip("psycopg")
    user = "postgres" if os.getuid() == 0 else None  # the server refuses to run as root
    with tempfile.TemporaryDirectory() as folder:
        if user:
            try:
                shutil.chown(folder, user)
            except LookupError:
                pytest.skip("PostgreSQL does not run as root, and there is no user for it")
        data = f"{folder}/data"
        start = ["initdb", "-D", data, "-U", "me", "--auth=trust"]
        subprocess.run(start, check=True, capture_output=True, user=user, cwd=folder)
        arguments = ["postgres", "-D", data, "-k", folder, "-c", "listen_addresses="]
        server = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, user=user, cwd=folder)
        try:
            url = f"postgresql://me@/postgres?host={folder}"
            deadline = time.monotonic() + 30
            while True:
                try:
                    found = study.Study(SETTINGS, settings_lib.facts_of(SETTINGS), url, create=True)
                    break
                except InputError:
                    assert time.monotonic() < deadline
                    time.sleep(0.3)
            assert len(run(found)) == 7
            again = study.Study(SETTINGS, settings_lib.facts_of(SETTINGS), url, create=False)
            assert {model.state for model in again.models()} == {"complete"}
        finally:
            server.send_signal(signal.SIGINT)  # does not wait for those who are connected
            server.wait()

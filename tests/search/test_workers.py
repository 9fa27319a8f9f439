"""How many workers of searches run on a machine at once: their locks."""

import errno
import importlib.util
import os
import sys
import types

import pytest

from mlcn_jax import files, host
from mlcn_jax.errors import InputError
from mlcn_jax.search import run
from mlcn_jax.search.settings import SearchSettings


@pytest.fixture
def found(monkeypatch, tmp_path):
    """What `worker_slot` asks a search for, on a machine of one core, with folders of its own."""
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("MLCN_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "cores", lambda: [0])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(run, "_model_bytes", lambda found, mix: 1)
    space = types.SimpleNamespace(draw=lambda rng: None)
    return types.SimpleNamespace(space=space, settings=SearchSettings())


def test_a_second_worker_waits_for_the_first(found, monkeypatch):
    waited = []

    def wait(seconds):
        waited.append(seconds)
        first.__exit__(None, None, None)

    monkeypatch.setattr(run.time, "sleep", wait)
    first = run.worker_slot(found)
    first.__enter__()
    with run.worker_slot(found):
        assert len(waited) == 1


def test_searches_on_different_cores_do_not_wait_for_one_another(found, monkeypatch):
    monkeypatch.setattr(run.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with run.worker_slot(found):
        monkeypatch.setattr(host, "cores", lambda: [1])
        with run.worker_slot(found):
            pass


def test_the_folder_of_locks_belongs_to_this_user_alone(found, tmp_path):
    with run.worker_slot(found):
        (folder,) = (tmp_path / "tmp").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert files.try_lock(next(folder.iterdir())) is None


@pytest.mark.parametrize("planted", ["link", "file", "open folder"])
def test_what_others_plant_in_the_shared_folder_is_left_alone(found, tmp_path, planted):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    name = tmp_path / "tmp" / f"mlcn_jax-{os.getuid()}"
    if planted == "link":
        name.symlink_to(victim)
    elif planted == "file":
        name.write_text("content")
    else:
        name.mkdir()
        name.chmod(0o777)
    with run.worker_slot(found):
        assert list((tmp_path / "cache").glob("workers-*/worker-*.lock"))
    assert not list(victim.iterdir())
    assert planted != "file" or name.read_text() == "content"


def test_links_at_the_names_of_older_locks_are_not_followed(found, tmp_path):
    """Locks of this name in the shared folder were opened, and emptied, by an earlier version."""
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "tmp" / f"mlcn_jax-worker-{os.getuid()}-0-0.lock").symlink_to(precious)
    with run.worker_slot(found):
        assert precious.read_text() == "content"


def test_without_a_folder_of_its_own_a_search_runs_all_the_same(found, tmp_path, caplog):
    (tmp_path / "tmp" / f"mlcn_jax-{os.getuid()}").write_text("")
    (tmp_path / "cache").write_text("")
    with run.worker_slot(found):
        assert "not counted" in caplog.text


def test_an_error_of_the_machine_is_not_taken_for_something_in_the_way(found, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "try_lock", full)
    with pytest.raises(OSError, match="No space left"), run.worker_slot(found):
        pass


def test_a_folder_in_place_of_a_lock_is_reported(found, tmp_path):
    with run.worker_slot(found):
        (lock,) = (tmp_path / "tmp").glob("*/*")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(InputError, match=r"worker-.*remove"), run.worker_slot(found):
        pass


@pytest.mark.parametrize("name", ["storage", "study"])
def test_without_optuna_a_module_loads_and_a_search_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "optuna", None)
    spec = importlib.util.find_spec(f"mlcn_jax.search.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(InputError, match=r"pip install 'mlcn_jax\[search\]'"):
        module.open_storage("sqlite://", 1)

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from mlcn_jax import files
from mlcn_jax.errors import InputError


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"old": 1})

    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_written_leaves_the_one_before(tmp_path):
    class Figure:
        def savefig(self, path, **options):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.png"
    path.write_bytes(b"whole")
    with pytest.raises(OSError, match="No space"):
        files.write_figure(Figure(), path)
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_on_disk_before_and_after_the_name_changes(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda d: (done.append(os.readlink(f"/proc/self/fd/{d}")), fsync(d)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    files.write_atomic(tmp_path / "a", b"content")
    assert done[1:] == ["replace", str(tmp_path)]
    assert os.path.dirname(done[0]) == str(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"content"


def test_a_folder_is_on_disk_before_it_replaces_another(tmp_path, monkeypatch):
    made, folder = tmp_path / "temporary" / "made", tmp_path / "folder"
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "file").write_text("new")
    folder.mkdir()
    (folder / "old").touch()
    done = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda d: (done.append(os.readlink(f"/proc/self/fd/{d}")), fsync(d)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    files.put_in_place(made, folder)
    assert set(done[:3]) == {str(made), str(made / "inner"), str(made / "inner" / "file")}
    assert done[3:] == ["rename", "rename", str(tmp_path)]
    assert (folder / "inner" / "file").read_text() == "new"
    assert not (folder / "old").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(number, tmp_path, monkeypatch):
    import fcntl

    def flock(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(InputError, match=r"/\.lock cannot be locked, because its file system has no locks"),
        files.hold(tmp_path),
    ):
        pass


def test_a_file_is_as_accessible_as_any_other(tmp_path):
    (tmp_path / "usual").write_text("")
    files.write_atomic(tmp_path / "a", "")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_writers_do_not_disturb_each_other(tmp_path):
    texts = [letter * 100_000 for letter in "abcdefgh"]
    writers = [
        threading.Thread(target=lambda t=text: [files.write_atomic(tmp_path / "x", t) for _ in range(5)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "x").read_text() in texts
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_file_is_not_called_damaged(tmp_path):
    with pytest.raises(InputError, match=r"model\.json is missing"):
        files.read_json(tmp_path / "model.json")
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(InputError, match=r"model\.json is damaged"):
        files.read_json(tmp_path / "model.json")


@pytest.mark.parametrize("make", ["folder", "link", "dangling"])
def test_what_is_in_place_of_the_lock_is_told_and_left_alone(tmp_path, make):
    precious = tmp_path / "precious"
    precious.write_text("content")
    workdir = tmp_path / "run"
    workdir.mkdir()
    if make == "folder":
        (workdir / ".lock").mkdir()
    else:
        (workdir / ".lock").symlink_to(precious if make == "link" else tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"\.lock is a link or a folder"), files.hold(workdir):
        pass
    assert precious.read_text() == "content"
    assert not (tmp_path / "nowhere").exists()


def test_a_workdir_is_held_once_and_its_lock_is_not_emptied(tmp_path):
    (tmp_path / ".lock").write_text("what somebody kept there")
    with files.hold(tmp_path), pytest.raises(InputError, match="another process is using"), files.hold(tmp_path):
        pass
    with files.hold(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "what somebody kept there"


@pytest.mark.parametrize(
    "path", ["runs/x b\\n", "runs/a[0]", "a*", "a?b", "gs:/a", "s3://a/b", "/gs/a", "/hf/a", "a\udcff"]
)
def test_a_workdir_that_cannot_hold_checkpoints_is_refused_at_once(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    expected = r"cannot hold checkpoints.*give a --workdir without it"
    with pytest.raises(InputError, match=expected) as caught, files.hold(files.Path(path)):
        pass
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_must_be_new_does_not_replace_another(tmp_path):
    made, folder = tmp_path / "made", tmp_path / "folder"
    made.mkdir()
    folder.mkdir()
    (folder / "finished").touch()
    with pytest.raises(OSError, match="not empty"):
        files.put_in_place(made, folder, replace=False)
    (folder / "finished").unlink()
    files.put_in_place(made, folder, replace=False)
    assert not made.exists()

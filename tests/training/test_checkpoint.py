import errno
import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.path import step as step_lib

from mlcn_jax import pretrained
from mlcn_jax.errors import InputError
from mlcn_jax.training import checkpoint
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.trained import load_trained


def state_of(step):
    noise = jax.random.normal(jax.random.key(0), (300, 40))  # what compression cannot shrink
    params = {"a": noise + step, "b": {"c": jnp.arange(5) + step}}
    return {"params": params, "optimizer": (jnp.float32(step), params)}


LIKE = jax.eval_shape(lambda: state_of(0))


def save_all(folder, accuracies):
    checkpoints = Checkpoints(folder)
    for step, accuracy in accuracies.items():
        checkpoints.save(step, state_of(step), {"note": f"step {step}"}, accuracy)
    checkpoints.wait()
    return checkpoints


def data_files(folder):
    """Files that hold array content."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"]


def test_round_trip(tmp_path):
    checkpoints = save_all(tmp_path, {3: None})
    restored, facts = checkpoints.restore(LIKE)
    assert facts["step"] == 3
    assert facts["note"] == "step 3"
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(3))
    assert jax.tree.structure(restored) == jax.tree.structure(state_of(3))
    only, _ = checkpoints.restore({"params": LIKE["params"]})
    assert list(only) == ["params"]
    checkpoints.close()


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_older_ones_go(tmp_path, monkeypatch):
    """Orbax flushes the arrays alone: a power failure could empty what describes them, in all that are kept."""
    flushed = []

    def flush(folder):
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        there = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
        flushed.append((names >= {"facts/metadata", "params/_METADATA", "optimizer/_METADATA"}, there))

    monkeypatch.setattr(checkpoint, "tree_to_disk", flush)
    save_all(tmp_path, {1: None, 2: None, 3: None, 4: None}).close()
    assert flushed == [(True, []), (True, [1]), (True, [1, 2]), (True, [2, 3])]


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    checkpoints = save_all(tmp_path, {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.6})
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 4, 5]
    assert checkpoints.restore(LIKE)[1]["step"] == 5
    assert checkpoints.restore(LIKE, best=True)[1]["step"] == 2
    checkpoints.close()


def test_the_best_of_each_lane_is_kept_and_a_damaged_one_makes_room_for_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, (model, *lanes) in {1: (0.5, 0.9, 0.1), 2: (0.9, 0.8, 0.3), 3: (0.7, 0.1, 0.2), 4: (0.6, 0, 0)}.items():
        checkpoints.save(step, state_of(step), {}, model, lanes)
    checkpoints.save(5, state_of(5), {})  # of a run that was stopped between its scores
    checkpoints.wait()
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [1, 2, 4, 5]
    checkpoints.close()
    again = Checkpoints(tmp_path)
    assert (again.num_ranked_lanes, again.best_step(), again.best_step(0), again.best_step(1)) == (2, 2, 1, 2)
    for path in data_files(tmp_path / "1" / "params"):
        path.unlink()
    reader = Checkpoints(tmp_path, read_only=True)  # leaves the damaged one where it is
    for checkpoints in (reader, again):
        assert [checkpoints.restore(LIKE, best=True, lane=lane)[1]["step"] for lane in (0, 1)] == [2, 2]
        checkpoints.close()


def test_a_reader_goes_on_with_what_a_training_beside_it_has_left(tmp_path, caplog):
    """The best of its list is removed, when a later one has become the best."""
    writer = save_all(tmp_path, {1: 0.5, 2: 0.9, 3: 0.7})
    reader = Checkpoints(tmp_path, read_only=True)
    for step, accuracy in {4: 0.95, 5: 0.1, 6: 0.2}.items():
        writer.save(step, state_of(step), {}, accuracy)
    writer.close()
    assert not (tmp_path / "2").exists()
    assert reader.restore(LIKE, best=True)[1]["step"] == 4
    assert reader.best_step() == 4
    assert not caplog.messages
    reader.close()


def test_a_checkpoint_that_is_removed_while_a_reader_lists_them_is_left_out(tmp_path, monkeypatch):
    save_all(tmp_path, {1: 0.5, 2: 0.9}).close()
    find_all = step_lib._StandardNameFormat.find_all
    gone = ["1"]

    def removing(self, folder):
        found = list(find_all(self, folder))
        if gone:
            shutil.rmtree(tmp_path / gone.pop())
        return iter(found)

    monkeypatch.setattr(step_lib._StandardNameFormat, "find_all", removing)
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.restore(LIKE, best=True)[1]["step"] == 2
    shutil.copytree(tmp_path / "2", tmp_path / "3")
    shutil.rmtree(tmp_path / "2")
    gone.append("3")
    with pytest.raises(InputError, match="holds no checkpoint"):
        reader.restore(LIKE, best=True)
    reader.close()


def test_a_damaged_description_of_one_checkpoint_leaves_the_others(tmp_path):
    save_all(tmp_path, {1: None, 2: None}).close()
    (tmp_path / "2" / "_CHECKPOINT_METADATA").write_text("[]")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE)[1]["step"] in (1, 2)
    checkpoints.close()


def test_lanes_are_ranked_as_long_as_what_is_scored_ranks_them(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step, model, lanes, expected in ((1, 0.5, (0.9, 0.1), 2), (2, None, (), 2), (3, 0.4, (), 0), (4, None, (), 0)):
        checkpoints.save(step, state_of(step), {}, model, lanes)
        assert checkpoints.num_ranked_lanes == expected
    checkpoints.close()


def test_without_a_ranking_the_newest_is_the_best(tmp_path):
    checkpoints = save_all(tmp_path, {1: None, 2: None, 3: None})
    assert checkpoints.restore(LIKE, best=True)[1]["step"] == 3
    checkpoints.close()


def test_saving_then_donating_saves_what_was_there(tmp_path):
    """A donated buffer is overwritten while the save runs in the background."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    state = jax.tree.map(jnp.copy, {"params": {"a": jnp.ones((2000, 1000))}, "optimizer": {"m": jnp.ones(3)}})
    checkpoints.save(1, state, {})
    overwritten = overwrite(state)
    checkpoints.wait()
    restored, _ = checkpoints.restore(jax.eval_shape(lambda: overwritten))
    assert np.all(restored["params"]["a"] == 1)
    checkpoints.close()


@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_content_that_reads_well_but_is_not_what_was_saved_is_skipped(tmp_path, caplog, part):
    """What the storage layer cannot notice: whole files, of another state."""
    save_all(tmp_path / "a", {1: None, 2: None}).close()
    save_all(tmp_path / "b", {3: None}).close()
    shutil.rmtree(tmp_path / "a" / "2" / part)
    shutil.copytree(tmp_path / "b" / "3" / part, tmp_path / "a" / "2" / part)
    checkpoints = Checkpoints(tmp_path / "a")
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    assert f"SHA-256 of its {part}" in caplog.text
    checkpoints.close()


@pytest.mark.parametrize("change", [("step", 7), ("validation_accuracy", 0.99)])
def test_facts_are_verified(tmp_path, change):
    save_all(tmp_path, {1: 0.5, 2: 0.4}).close()
    path = tmp_path / "2" / "facts" / "metadata"
    stored = json.loads(path.read_text())
    stored["facts"][change[0]] = change[1]
    path.write_text(json.dumps(stored))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE, best=True)[1]["step"] == 1
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


def test_a_damaged_best_makes_room_for_the_next_best(tmp_path):
    save_all(tmp_path, {1: 0.5, 2: 0.9}).close()
    for path in data_files(tmp_path / "2" / "params"):
        path.unlink()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore(LIKE)
    for step, accuracy in {3: 0.4, 4: 0.3, 5: 0.2}.items():
        checkpoints.save(step, state_of(step), {}, accuracy)
    checkpoints.wait()
    assert checkpoints.restore(LIKE, best=True)[1]["step"] == 1
    checkpoints.close()


def test_any_damaged_file_leaves_the_one_before(tmp_path):
    save_all(tmp_path / "whole", {1: None, 2: None}).close()
    for path in sorted((tmp_path / "whole" / "2").rglob("*")):
        if path.is_file():
            shutil.copytree(tmp_path / "whole", tmp_path / "damaged", dirs_exist_ok=True)
            (tmp_path / "damaged" / path.relative_to(tmp_path / "whole")).write_bytes(b"")
            checkpoints = Checkpoints(tmp_path / "damaged")
            restored, facts = checkpoints.restore(LIKE)
            jax.tree.map(np.testing.assert_array_equal, restored, state_of(facts["step"]))
            checkpoints.close()
            shutil.rmtree(tmp_path / "damaged")


@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_a_changed_description_of_the_arrays_is_damage(tmp_path, part):
    """Still well-formed, it makes orbax raise errors that its own bugs could cause, too."""
    save_all(tmp_path, {1: None, 2: None}).close()
    described = tmp_path / "2" / part / "_METADATA"
    described.write_text(described.read_text().replace('"key_type"', '"key_typo"'))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_used(tmp_path, damage, caplog):
    save_all(tmp_path, {1: None, 2: None}).close()
    for path in data_files(tmp_path / "2" / "params"):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "remove":
            path.unlink()
        else:
            path.write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        restored, facts = checkpoints.restore(LIKE)
    assert facts["step"] == 1
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(1))
    assert "step 2 is damaged" in caplog.text
    checkpoints.save(2, state_of(2), {})  # its place is free again
    checkpoints.wait()
    assert checkpoints.restore(LIKE)[1]["step"] == 2
    checkpoints.close()
    for path in data_files(tmp_path / "2" / "params"):  # and may be damaged again
        path.unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


@pytest.mark.parametrize("gone", [["facts"], ["params"], ["facts", "optimizer"], ["facts", "optimizer", "params"]])
@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_whose_removal_was_cut_does_not_stop_the_run(tmp_path, gone, step):
    """A process can be killed while it removes a checkpoint, an older one or one of a round that was lost."""
    save_all(tmp_path, {1: 0.5, 2: 0.5}).close()
    for part in gone:
        shutil.rmtree(tmp_path / str(step) / part)
    checkpoints = Checkpoints(tmp_path)
    restored, facts = checkpoints.restore(LIKE)
    assert facts["step"] == (1 if step == 2 else 2)
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(facts["step"]))
    for later in (3, 4):
        checkpoints.save(later, state_of(later), {}, 0.6)
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["3", "4"]
    checkpoints.close()


def test_if_none_verifies_it_is_an_error_every_time(tmp_path):
    save_all(tmp_path, {1: None, 2: None}).close()
    for path in data_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.exist()
        with pytest.raises(InputError, match=r"no checkpoint in .* is intact"):
            checkpoints.restore(LIKE)
        checkpoints.close()


def test_a_save_cut_short_is_no_checkpoint(tmp_path):
    save_all(tmp_path, {1: None, 2: None}).close()
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


def test_a_failed_write_is_one_clear_error(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(InputError, match=r"no space left on device.*run the same command again"):
        checkpoints.save(1, state_of(1), {})

    def no_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(checkpoints._manager, "save", no_memory)
    with pytest.raises(MemoryError):  # of which `launch` tells, without advice on disks
        checkpoints.save(1, state_of(1), {})
    monkeypatch.undo()
    checkpoints.close()


def test_a_model_of_the_package_is_found_by_its_name_and_its_export_is_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = load_trained("digits")
    assert len(trained.class_names) == 10
    with pytest.raises(InputError, match="export is an exported model: give the workdir of the run that it was"):
        load_trained(pretrained.find_export("digits"))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no trained model"):
        load_trained(str(tmp_path))


def test_checkpoints_without_their_description_say_what_is_missing(tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    with pytest.raises(InputError, match=r"model\.json is missing, though .* has checkpoints.*restore the file"):
        load_trained(str(tmp_path))


def fails_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError("cannot allocate 7 GiB"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"),
        ValueError('PERMISSION_DENIED: Error reading "a/0.0" in OCDBT database: Permission denied'),
        ValueError('UNKNOWN: Error reading "a/0.0" in OCDBT database: Failed to read'),
        ValueError("Error reading \"a/0.0\" in OCDBT database: Failed to read [os_error_code='22']"),
        TypeError("restore() got an unexpected keyword argument 'args'"),  # as after a change in orbax
        AttributeError("module 'orbax.checkpoint' has no attribute 'args'"),
        KeyError("Item facts was not found in the checkpoint"),  # although it is there
    ],
    ids=str,
)
def test_what_does_not_show_damage_leaves_all_checkpoints_as_they_are(tmp_path, monkeypatch, error):
    save_all(tmp_path, {1: None, 2: None}).close()
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "restore", fails_with(error))
        with pytest.raises(InputError, match=r"cannot be read .* does not mean that it is damaged"):
            checkpoints.restore(LIKE)
    assert checkpoints.restore(LIKE)[1]["step"] == 2
    checkpoints.close()
    assert not list(tmp_path.glob("*.damaged*"))


def test_ctrl_c_while_reading_leaves_all_checkpoints_as_they_are(tmp_path, monkeypatch):
    checkpoints = save_all(tmp_path, {1: None})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "restore", fails_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.restore(LIKE)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


@pytest.mark.parametrize("part", ["facts", "params"])
def test_a_folder_without_access_is_not_taken_for_missing(tmp_path, monkeypatch, part):
    """To the storage library its files do not exist; root reads it all the same, so that the denial is made here."""
    save_all(tmp_path, {1: None}).close()
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "1" / part).rename(tmp_path / "hidden")
    (tmp_path / "1" / part).mkdir()
    scandir = os.scandir

    def denied(path):
        if os.fspath(path).endswith(f"1/{part}"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", denied)
        with pytest.raises(InputError, match="Permission denied"):
            checkpoints.restore(LIKE)
    (tmp_path / "1" / part).rmdir()
    (tmp_path / "hidden").rename(tmp_path / "1" / part)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_disk_that_fails_is_not_taken_for_a_folder_without_checkpoints(tmp_path, monkeypatch, read_only):
    """The storage library lists no folder whose state it cannot read."""
    save_all(tmp_path, {1: None, 2: None}).close()
    stat = os.stat

    def fails(path, *args, **kwargs):
        if str(path) == str(tmp_path / "2"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails)
        with pytest.raises(InputError, match="Input/output error"):
            Checkpoints(tmp_path, read_only=read_only)
    checkpoints = Checkpoints(tmp_path, read_only=read_only)
    assert checkpoints.newest_step() == 2
    checkpoints.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_files_without_access_are_not_taken_for_damaged(tmp_path):
    save_all(tmp_path, {1: None}).close()
    for path in data_files(tmp_path / "1"):
        path.chmod(0)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"(?i)permission.denied"):
        checkpoints.restore(LIKE)
    checkpoints.close()
    assert (tmp_path / "1").exists()


def test_facts_that_cannot_be_read_do_not_unrank_the_best(tmp_path, monkeypatch):
    save_all(tmp_path, {1: 0.9, 2: 0.5}).close()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_facts", fails_with(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(InputError, match="Input/output error"):
            Checkpoints(tmp_path)


def test_another_optimizer_is_not_taken_for_damage(tmp_path):
    save_all(tmp_path, {1: None}).close()
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InputError, match="does not match the model of"):
        checkpoints.restore({**LIKE, "optimizer": LIKE["params"]})
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


@pytest.mark.parametrize("name", ["x b\\n", "a[b]c", "gs:", "a*b"])
def test_a_folder_whose_name_the_storage_library_reads_in_its_own_way_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / name / "checkpoints")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["a%20b", "a#b", "s3:b", "~", "a b ", "a\nb", "a]b", "größe", "{x}", 'a"b', "$HOME", "a,b"]
)
def test_other_odd_names_hold_checkpoints(tmp_path, name):
    save_all(tmp_path / name, {1: None}).close()
    checkpoints = Checkpoints(tmp_path / name, read_only=True)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_opening_to_read_only_warns_of_nothing(tmp_path, caplog):
    save_all(tmp_path, {1: None}).close()
    filters = list(logging.getLogger("absl").filters)
    with caplog.at_level(logging.WARNING, logger="absl"):
        Checkpoints(tmp_path, read_only=True).close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert logging.getLogger("absl").filters == filters

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlcn_jax.errors import InputError
from mlcn_jax.training.checkpoint import Checkpoints, load_trained


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


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    checkpoints = save_all(tmp_path, {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.6})
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [2, 4, 5]
    assert checkpoints.restore(LIKE)[1]["step"] == 5
    assert checkpoints.restore(LIKE, best=True)[1]["step"] == 2
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
    assert "step 2 does not verify" in caplog.text
    checkpoints.save(2, state_of(2), {})  # its place is free again
    checkpoints.wait()
    assert checkpoints.restore(LIKE)[1]["step"] == 2
    checkpoints.close()
    for path in data_files(tmp_path / "2" / "params"):  # and may be damaged again
        path.unlink()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(LIKE)[1]["step"] == 1
    checkpoints.close()


def test_if_none_verifies_it_is_an_error_every_time(tmp_path):
    save_all(tmp_path, {1: None, 2: None}).close()
    for path in data_files(tmp_path):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.exist()
        with pytest.raises(InputError, match=r"no checkpoint in .* verifies"):
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
    monkeypatch.undo()
    checkpoints.close()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no trained model"):
        load_trained(str(tmp_path))

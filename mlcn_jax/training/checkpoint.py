"""Checkpoints of a run: saved in the background and verified when read; the newest and the best are kept."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from mlcn_jax.errors import InputError, is_lack_of_memory
from mlcn_jax.files import check_workdir, tree_to_disk

_log = logging.getLogger(__name__)

ROUNDS = "rounds"  # folder of the checkpoints of a run in rounds, in its workdir
_KEEP_NEWEST = 2  # so that one is left if the newest fails its checksum
_ACCURACY, _LANES = "validation_accuracy", "lane_accuracies"
_UNRANKED = -1.0  # below every accuracy
_PARTS = ("params", "optimizer")
_REMOVAL_SECONDS, _REMOVAL_TRIES = 2.0, 20  # to wait for a checkpoint whose removal has begun
_DESCRIPTIONS = "descriptions.json"  # a file of each checkpoint


class Checkpoints:
    """The checkpoints in one folder, one subfolder per step.

    The SHA-256 of every part is stored with it; a checkpoint is valid only if what is read back matches.
    """

    def __init__(self, directory: str | Path, *, read_only: bool = False):
        """Opens `directory`, and creates it if needed unless `read_only`.

        Raises:
          InputError: checkpoints cannot be stored under its name, or it cannot be read.
        """
        check_workdir(Path(directory))
        self._directory = Path(directory).absolute()
        self._read_only = read_only
        if not read_only:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        """Lists the checkpoints, and reads how they rank; raises InputError if one of them cannot be read."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(
                [checkpoint_managers.LatestN(_KEEP_NEWEST), _KeepBest(self)]
            ),
            create=False,
            read_only=self._read_only,
            save_interval_steps=0 if self._read_only else 1,  # orbax sets it so, with a warning
            cleanup_tmp_directories=not self._read_only,
            lightweight_initialize=True,  # a training beside this reader may be removing what is listed
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._to_disk),
            multiprocessing_options=ocp.options.MultiprocessingOptions(  # each process on its own
                primary_host=jax.process_index(),
                active_processes={jax.process_index()},
                barrier_sync_key_prefix=f"process{jax.process_index()}",
            ),
        )
        try:
            with _without_remarks_on_reading() if self._read_only else contextlib.nullcontext():
                self._manager = ocp.CheckpointManager(self._directory, options=options, item_names=(*_PARTS, "facts"))
            self._check_listed()
        except OSError as error:
            raise InputError(
                f"the checkpoints in {self._directory} cannot be read ({error}): fix the cause, then retry"
            ) from error
        self._ranks = {step: self._stored_ranks(step) for step in self._manager.all_steps()}

    def _check_listed(self) -> None:
        """Raises OSError if Orbax did not list a checkpoint: it takes any error for a folder that is not there.

        A reader may also meet one that a training has added since.
        """
        listed = set(self._manager.all_steps())
        for folder in self._directory.iterdir() if self._directory.exists() else ():
            if not folder.name.isdecimal() or int(folder.name) in listed:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed in between
                if stat.S_ISDIR(folder.stat().st_mode) and not self._read_only:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    def _to_disk(self) -> None:
        """Finishes the checkpoint that is about to get its name: Orbax flushes its arrays, not what describes them."""
        for folder in self._directory.glob("*.orbax-checkpoint-tmp*"):
            (folder / _DESCRIPTIONS).write_text(json.dumps(_descriptions(folder)))
            tree_to_disk(folder)

    def exist(self) -> bool:
        """Whether any checkpoint was ever finished here, damaged ones included."""
        return bool(self._manager.all_steps()) or any(self._directory.glob("*.damaged*"))

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`."""
        return step in self._manager.all_steps()

    def lacks_rank(self, step: int) -> bool:
        """Whether the checkpoint of `step`, one of several, has no validation accuracy, as where a run was stopped."""
        return len(self._ranks) > 1 and self._ranks.get(step, (0.0,))[0] == _UNRANKED

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps."""
        for later in [found for found in self._manager.all_steps() if found > step]:
            self._manager.delete(later)
            self._ranks.pop(later, None)

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return max(self._manager.all_steps(), default=0)

    def best_step(self, lane: int | None = None) -> int:
        """The step with the highest validation accuracy, of the model or of a lane; the newest in a tie."""
        return max(self._ranks, key=lambda step: (self._rank(step, lane), step))

    @property
    def num_ranked_lanes(self) -> int:
        """For how many lanes the newest of the checkpoints that are ranked is ranked."""
        ranked = [step for step, (of_model, *_) in self._ranks.items() if of_model > _UNRANKED]
        return len(self._ranks[max(ranked)]) - 1 if ranked else 0

    def _rank(self, step: int, lane: int | None) -> float:
        ranks, place = self._ranks[step], 0 if lane is None else 1 + lane
        return ranks[place] if place < len(ranks) else _UNRANKED

    def save(
        self,
        step: int,
        state: dict[str, Any],
        facts: dict,
        validation_accuracy: float | None = None,
        lane_accuracies: Sequence[float] = (),
    ) -> None:
        """Starts saving `state` and returns; the caller may donate or overwrite its buffers at once.

        Args:
          step: number of training steps done.
          state: the trees `params` and `optimizer`.
          facts: small JSON-serializable facts to store with the state.
          validation_accuracy: ranks the checkpoint; None ranks it below all that have one.
          lane_accuracies: of each lane alone, which rank it for that lane; empty if no lane has a ranking of its own.

        Raises:
          InputError: the previous checkpoint could not be written, for instance because the disk is full.
        """
        copy = {name: jax.tree.map(np.array, jax.device_get(state[name])) for name in _PARTS}
        digests = {name: digest_of(tree) for name, tree in copy.items()}
        structure = {name: _structure(tree) for name, tree in copy.items()}
        facts = {**facts, "step": step, "sha256": digests, "structure": structure, _ACCURACY: validation_accuracy}
        if lane_accuracies:
            facts[_LANES] = list(lane_accuracies)
        items = {name: ocp.args.StandardSave(tree) for name, tree in copy.items()}
        signed = ocp.args.JsonSave({"facts": facts, "sha256": _sha256_of_json(facts)})
        with _write_errors(self._directory):
            self._ranks[step] = _ranks(facts)
            self._manager.save(step, args=ocp.args.Composite(**items, facts=signed), force=True)

    def wait(self) -> None:
        """Blocks until the current save is on disk.

        Raises:
          InputError: it could not be written.
        """
        with _write_errors(self._directory):
            self._manager.wait_until_finished()

    def restore(
        self, like: dict[str, Any], *, best: bool = False, lane: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The newest (or best) state that passes verification, with its facts.

        A damaged checkpoint is skipped with a warning and, unless `read_only`, renamed to `STEP.damaged`; the next one
        is tried. If it cannot be read for another reason, nothing is renamed.

        Args:
          like: the parts wanted, `params`, `optimizer`, both or none, each a tree of arrays or of
            `jax.ShapeDtypeStruct` with the shapes, dtypes and shardings wanted.
          best: tries checkpoints by validation accuracy, highest first (the newest in a tie), unranked ones last.
          lane: with `best`, takes the accuracies of this lane.

        Raises:
          InputError: there is no checkpoint, none is intact, one cannot be read, or it belongs to another model or
            optimizer.
        """
        # Read only, a damaged one that was set aside before is still there.
        steps = sorted((step for step in self._manager.all_steps() if step in self._ranks), reverse=True)
        if best:
            steps.sort(key=lambda step: self._rank(step, lane), reverse=True)
        for step in steps:
            try:
                return self._restore(step, like)
            except Exception as error:  # a damaged file can surface as almost any exception
                if self._is_removed(step):
                    return self.restore(like, best=best, lane=lane)
                self._check_is_damage(step, error)
                _log.warning("checkpoint of step %d is damaged and is skipped: %s", step, _reason(error))
                self._set_aside(step)
        if not self.exist():
            raise InputError(f"{self._directory} holds no checkpoint yet: train until one is saved")
        raise InputError(
            f"no checkpoint in {self._directory} is intact: restore one from a copy, or start again in another "
            "--workdir"
        )

    def _is_removed(self, step: int) -> bool:
        """Whether a training that goes on beside this reader has removed a checkpoint; then all are listed anew."""
        folder = self._directory / str(step)
        for _ in range(_REMOVAL_TRIES if self._read_only else 0):
            if not folder.exists():
                self._reopen()
                return True
            if _is_whole(folder):
                return False
            time.sleep(_REMOVAL_SECONDS / _REMOVAL_TRIES)
        return False

    def _restore(self, step: int, like: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        facts = self._facts(step)
        theirs = facts.get("structure", {})  # earlier versions did not write it
        other = any(theirs.get(name, _structure(tree)) != _structure(tree) for name, tree in like.items())
        items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        try:
            restored = {} if other or not like else self._manager.restore(step, args=ocp.args.Composite(**items))
        except ValueError as error:
            if theirs or "Structure mismatch" not in str(error):
                raise
            other = True
        if other:
            raise InputError(
                f"the checkpoint of step {step} in {self._directory} does not match the model of model.json or the "
                "optimizer of the installed packages: restore what it was trained with, or use another --workdir"
            )
        for name in like:
            found, expected = digest_of(jax.device_get(restored[name])), facts["sha256"][name]
            if found != expected:
                raise _Damaged(f"SHA-256 of its {name} is {found[:12]}..., expected {expected[:12]}...")
        return {name: jax.tree.map(jnp.array, restored[name]) for name in like}, facts

    def _facts(self, step: int) -> dict[str, Any]:
        signed = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
        facts = signed.get("facts") if isinstance(signed, dict) else None
        if not isinstance(facts, dict) or _sha256_of_json(facts) != signed.get("sha256") or facts.get("step") != step:
            raise _Damaged("its facts do not match the SHA-256 stored with them")
        return facts

    def _stored_ranks(self, step: int) -> tuple[float, ...]:
        try:
            return _ranks(self._facts(step))
        except Exception as error:
            self._check_is_damage(step, error)
            return (_UNRANKED,)  # damaged: detected and reported when it is restored

    def _check_is_damage(self, step: int, error: Exception) -> None:
        """Raises InputError unless `error`, raised while reading a checkpoint, shows that its files are damaged.

        It counts only if every file can be read: without access, the storage library reports files as missing.
        """
        if isinstance(error, InputError):
            raise error
        folder = self._directory / str(step)
        try:
            _read_all(folder)
            # Not whole if its removal was cut.
            reason = _reason(error) if _is_whole(folder) and not (_tells_damage(error) or _is_changed(folder)) else ""
        except OSError as unreadable:
            reason = str(unreadable)
        if reason:
            raise InputError(
                f"the checkpoint of step {step} in {self._directory} cannot be read ({reason}), which does not mean "
                "that it is damaged: fix the disk or the permissions, or free memory, then run the same command "
                "again"
            ) from error

    def _set_aside(self, step: int) -> None:
        del self._ranks[step]
        damaged = self._directory / str(step)
        if self._read_only or not damaged.exists():
            return
        names = (self._directory / f"{step}.damaged{suffix}" for suffix in ("", *(f"-{i}" for i in range(1, 1000))))
        damaged.rename(next(name for name in names if not name.exists()))
        self._reopen()

    def _reopen(self) -> None:
        self._manager.close()
        self._open()

    def close(self) -> None:
        """Waits for a save in progress and stops the background threads."""
        with _write_errors(self._directory):
            self._manager.close()


def _is_whole(folder: Path) -> bool:
    return all((folder / part).is_dir() for part in (*_PARTS, "facts"))


class WriteError(InputError):
    """A checkpoint could not be written; `reason` is the first line of the error that says why."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


class _Damaged(Exception):
    """What was read does not match the SHA-256 stored with it."""


def _tells_damage(error: Exception) -> bool:
    """Whether an error can be caused by the content of files only."""
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return True
    status, number = re.match("[A-Z_]+(?=: )", str(error)), re.search(r"os_error_code='(\d+)'", str(error))
    if status and status[0] not in ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION"):
        return False
    if number and int(number[1]) != errno.ENOENT:
        return False
    return isinstance(error, _Damaged | ValueError)


@contextlib.contextmanager
def _without_remarks_on_reading() -> Iterator[None]:
    """Leaves out orbax's warning that a folder which is opened for reading only is opened for reading only."""

    def keep(record: logging.LogRecord) -> bool:
        return "Given directory is read only" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _read_all(folder: Path) -> None:
    """Raises OSError if a file in a folder exists but cannot be read to its end."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for root, _, names in os.walk(folder, onerror=fail):
        for name in names:
            with contextlib.suppress(FileNotFoundError), open(os.path.join(root, name), "rb") as file:
                while file.read(2**24):
                    pass


def _descriptions(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a checkpoint that say how its arrays are stored, by name."""
    return {
        f"{part}/_METADATA": hashlib.sha256((folder / part / "_METADATA").read_bytes()).hexdigest() for part in _PARTS
    }


def _is_changed(folder: Path) -> bool:
    """Whether `_descriptions` are not those with which a checkpoint was saved; earlier versions did not store them."""
    try:
        return json.loads((folder / _DESCRIPTIONS).read_bytes()) != _descriptions(folder)
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def _reason(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Turns a failed write into one clear error."""
    try:
        yield
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        reason = "no space left on device" if "No space left" in str(error) else _reason(error)
        raise WriteError(
            f"a checkpoint could not be written to {directory}: {reason}. Free disk space or fix the permissions, then "
            "run the same command again; it resumes from the newest intact checkpoint",
            reason,
        ) from error


class _KeepBest:
    """Preservation policy: keeps the best checkpoint, however old it is, and the best of each lane that is ranked."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        ranked = [None, *range(self._checkpoints.num_ranked_lanes)]
        best = {self._checkpoints.best_step(lane) for lane in ranked}
        return [checkpoint.step in best for checkpoint in checkpoints]


def _ranks(facts: dict[str, Any]) -> tuple[float, ...]:
    """Accuracies that rank a checkpoint: of the model, then of each lane."""
    return (_UNRANKED if facts[_ACCURACY] is None else facts[_ACCURACY], *facts.get(_LANES, ()))


def _sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _structure(state: Any) -> str:
    """Digest of the names and dtypes of all arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    rows = [f"{jax.tree_util.keystr(path)} {np.dtype(leaf.dtype)}" for path, leaf in leaves]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def digest_of(state: Any) -> str:
    """Digest of the names, dtypes, shapes and bytes of all arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.ndim else array.tobytes())
    return digest.hexdigest()

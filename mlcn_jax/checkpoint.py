"""Checkpoints of a run: saved in the background, verified when read, the newest ones and the best kept."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from mlcn_jax.config import write_json
from mlcn_jax.errors import InputError
from mlcn_jax.model import ModelSpec, init_params

_log = logging.getLogger(__name__)

_KEEP_NEWEST = 2  # so that one is left when the newest fails its checksum
_METRIC = "validation_accuracy"
_UNRANKED = -1.0  # below every accuracy
_PARTS = ("params", "optimizer")


class Checkpoints:
    """The checkpoints in one folder, one subfolder a step.

    The SHA-256 of every part is stored with it; a checkpoint counts only if what is read back has the same.
    """

    def __init__(self, directory: str | Path, *, read_only: bool = False):
        """Opens `directory`, and makes it where needed unless `read_only`."""
        self._directory = Path(directory).absolute()
        self._read_only = read_only
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(_KEEP_NEWEST),
                checkpoint_managers.BestN(get_metric_fn=lambda m: m[_METRIC], n=1),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=lambda metrics: metrics[_METRIC],  # what makes the manager store metrics
            create=not read_only,
            read_only=read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_names=(*_PARTS, "facts"))

    def save(self, step: int, state: dict[str, Any], facts: dict, validation_accuracy: float | None = None) -> None:
        """Starts saving `state` and returns; the caller may donate or overwrite its buffers at once.

        Args:
          step: number of training steps done; one that was saved before is not saved again.
          state: the trees `params` and `optimizer`.
          facts: small JSON-able facts to keep beside the state.
          validation_accuracy: ranks the checkpoint; None leaves it out of the ranking.

        Raises:
          InputError: the checkpoint before this one could not be written, as on a full disk.
        """
        if step in self._manager.all_steps():
            return
        copy = {name: jax.tree.map(np.array, jax.device_get(state[name])) for name in _PARTS}
        digests = {name: _sha256(tree) for name, tree in copy.items()}
        facts = {**facts, "step": step, "sha256": digests, _METRIC: validation_accuracy}
        items = {name: ocp.args.StandardSave(tree) for name, tree in copy.items()}
        metrics = {_METRIC: _UNRANKED if validation_accuracy is None else validation_accuracy}
        with _WriteErrors(self._directory):
            self._manager.save(
                step,
                args=ocp.args.Composite(**items, facts=ocp.args.JsonSave(facts)),
                metrics=metrics,
                force=True,
            )

    def wait(self) -> None:
        """Blocks until what was started is on disk.

        Raises:
          InputError: it could not be written.
        """
        with _WriteErrors(self._directory):
            self._manager.wait_until_finished()

    def exist(self) -> bool:
        """Whether any checkpoint was ever finished here, damaged ones included."""
        return bool(self._manager.all_steps()) or any(self._directory.glob("*.damaged"))

    def restore(self, like: dict[str, Any], *, best: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """The newest (or best) state that verifies, with its facts.

        A checkpoint that does not verify is skipped with a warning and, unless `read_only`, renamed to
        `STEP.damaged`; the next one is tried.

        Args:
          like: the parts wanted, `params`, `optimizer` or both, each a tree of arrays or of
            `jax.ShapeDtypeStruct`s with the shapes, types and shardings wanted.
          best: start from the highest validation accuracy (the newest of equals), then those never ranked.

        Raises:
          InputError: no checkpoint verifies, or there is none.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if best:
            steps.sort(key=lambda step: (self._manager.metrics(step) or {}).get(_METRIC, _UNRANKED), reverse=True)
        for step in steps:
            try:
                return self._restore(step, like)
            except Exception as error:  # a damaged file can surface as almost any exception
                reason = str(error).strip().split("\n")[0][:200]
                _log.warning("checkpoint of step %d does not verify and is skipped: %s", step, reason)
                self._set_aside(step)
        raise InputError(
            f"no checkpoint in {self._directory} verifies ({len(steps)} tried): put one back from a copy, or train "
            "in another --workdir to start afresh"
        )

    def _restore(self, step: int, like: dict[str, Any]) -> tuple[dict[str, Any], dict]:
        items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items, facts=ocp.args.JsonRestore()))
        for name in like:
            found, expected = _sha256(jax.device_get(restored[name])), restored["facts"]["sha256"][name]
            if found != expected:
                raise ValueError(f"SHA-256 of its {name} is {found[:12]}..., expected {expected[:12]}...")
        return {name: jax.tree.map(jnp.array, restored[name]) for name in like}, restored["facts"]

    def _set_aside(self, step: int) -> None:
        damaged = self._directory / str(step)
        if not self._read_only and damaged.exists():
            damaged.rename(self._directory / f"{step}.damaged")
            self._manager.reload()

    def close(self) -> None:
        """Waits for a save under way and frees the background threads."""
        with _WriteErrors(self._directory):
            self._manager.close()


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model: its best parameters and the step at which they were saved."""

    spec: ModelSpec
    class_names: tuple[str, ...]
    params: dict
    step: int


def write_model(workdir: Path, spec: ModelSpec, class_names: Sequence[str]) -> None:
    """Stores in `model.json` what is needed to use the parameters without the data."""
    write_json(workdir / "model.json", {"spec": dataclasses.asdict(spec), "class_names": list(class_names)})


def load_trained(workdir: Path) -> Trained:
    """Reads the best checkpoint of a workdir.

    Raises:
      InputError: the workdir holds no trained model, or no checkpoint of it verifies.
    """
    path = workdir / "model.json"
    if not path.exists():
        raise InputError(f"{workdir} holds no trained model: give the --workdir of a run that saved a checkpoint")
    stored = json.loads(path.read_text())
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored["spec"].items()}
    spec = ModelSpec(**fields)
    like = {"params": jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))}
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    restored, facts = checkpoints.restore(like, best=True)
    checkpoints.close()
    return Trained(spec, tuple(stored["class_names"]), restored["params"], facts["step"])


class _WriteErrors:
    """Turns a failed write into one clear error."""

    def __init__(self, directory: Path):
        self._directory = directory

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception):
            text = str(error).strip()
            reason = "no space left on device" if "No space left" in text else text.splitlines()[0][:200]
            raise InputError(
                f"a checkpoint could not be written to {self._directory}: {reason}. Free disk space or mend the "
                "permissions, then run the same command again; it resumes from the newest checkpoint that verifies"
            ) from error


def _sha256(state: Any) -> str:
    """Digest of names, types, shapes and bytes of all arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.ndim else array.tobytes())
    return digest.hexdigest()

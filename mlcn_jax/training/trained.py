"""Trained models: what `model.json` says of one, and its best parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mlcn_jax import pretrained
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json
from mlcn_jax.nn.calibration import trained_shapes, without_statistics
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.checkpoint import Checkpoints, digest_of


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model: its best parameters (`restore_best`), with the statistics for evaluation, and their step.

    `lane_steps` has the step of each lane if these were chosen one by one, and is empty otherwise.
    """

    spec: ModelSpec
    class_names: tuple[str, ...]
    params: dict
    step: int
    lane_steps: tuple[int, ...] = ()

    @property
    def sha256(self) -> str:
        """Digest of the parameters."""
        return digest_of(self.params)


def describe_model(spec: ModelSpec, class_names: Sequence[str], data_digest: str) -> dict[str, Any]:
    """The content of `model.json`: all that is needed to use the parameters, and the training data's SHA-256."""
    fields = dataclasses.asdict(spec)
    del fields["remat"]  # how it is trained, which may change on resume
    return {
        "spec": {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()},
        "class_names": list(class_names),
        "training_images_sha256": data_digest,
    }


def load_trained(workdir: str | Path) -> Trained:
    """Reads the best checkpoint of a workdir, or of a model that comes with the package, such as `digits`.

    Raises:
      InputError: the workdir holds no trained model, no checkpoint is intact, or none matches `model.json`.
    """
    workdir = pretrained.find_workdir(str(workdir))
    path = workdir / "model.json"
    if (workdir / "manifest.json").exists():
        raise InputError(f"{workdir} is an exported model: give the workdir of the run that it was exported from")
    if not path.exists():
        if any((workdir / "checkpoints").glob("[0-9]*")):
            raise InputError(
                f"{path} is missing, though {workdir} has checkpoints, which cannot be read without it: restore the "
                "file from a copy"
            )
        raise InputError(f"{workdir} holds no trained model: give the workdir of a run that saved a checkpoint")
    stored = read_json(path)
    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored["spec"].items()}
        spec, class_names = ModelSpec(**fields), tuple(stored["class_names"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # an InputError among them
        raise InputError(f"{path} is damaged or of another version ({error}): restore it from a copy") from error
    like = {"params": trained_shapes(spec)}
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    restored, facts = restore_best(checkpoints, spec, like)
    checkpoints.close()
    expected = jax.tree_util.tree_leaves_with_path(like["params"])
    for (where, leaf), found in zip(expected, jax.tree.leaves(restored["params"]), strict=True):
        if leaf.shape != found.shape:  # orbax returns what is stored
            name = jax.tree_util.keystr(where, simple=True, separator="/")
            raise InputError(
                f"{path} does not match {workdir / 'checkpoints'}: it gives {name} the shape {leaf.shape}, but "
                f"{found.shape} is stored: restore the file from a copy"
            )
    return Trained(spec, class_names, restored["params"], facts["step"], tuple(facts.get("lane_steps", ())))


def restore_best(
    checkpoints: Checkpoints, spec: ModelSpec, like: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the checkpoint with the highest validation accuracy, with its facts.

    Where checkpoints are ranked for each lane too, as with `train.lanes_apart`, each lane's rows are those of its own
    best checkpoint, as if it had been trained alone, and `lane_steps` of the facts has the steps. The decoder is that
    of the model's best checkpoint.

    Args:
      checkpoints: of a run.
      spec: its model.
      like: as for `Checkpoints.restore`, which has the errors.
    """
    state, facts = checkpoints.restore(like, best=True)
    if not spec.lane_specs or checkpoints.num_ranked_lanes != len(spec.lane_specs):
        return state, facts
    found = {facts["step"]: state}
    steps = list[int]()
    for lane in range(len(spec.lane_specs)):
        if (step := checkpoints.best_step(lane)) not in found:
            other, of_other = checkpoints.restore(like, best=True, lane=lane)
            step = of_other["step"]  # an earlier one if the best is damaged
            found[step] = other
        steps.append(step)
    trees = [found[step] for step in steps]
    state = jax.tree_util.tree_map_with_path(functools.partial(_own_rows, spec), state, *trees)
    return state, facts | {"lane_steps": steps}


def best_params(checkpoints: Checkpoints, spec: ModelSpec) -> tuple[dict, dict[str, Any]]:
    """The parameters of `restore_best` without statistics, and `best_step` and perhaps `lane_steps` for the summary."""
    restored, facts = restore_best(checkpoints, spec, {"params": trained_shapes(spec)})
    steps = {"lane_steps": facts["lane_steps"]} if "lane_steps" in facts else {}
    return without_statistics(restored["params"]), {"best_step": facts["step"], **steps}


def _own_rows(spec: ModelSpec, path: Sequence[Any], leaf: Array, *of_lanes: Array) -> Array:
    """A leaf of parameters or of an optimizer state, with the row of each lane from that lane's tree."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    if "encoder" not in names:
        return leaf
    group, first = names[names.index("encoder") + 1], 0
    for each in spec.lane_groups:
        if each.name == group:
            return jnp.stack([of_lanes[first + row][row] for row in range(each.count)])
        first += each.count
    raise AssertionError(path)

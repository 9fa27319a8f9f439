"""The starting point of a run: a checkpoint to resume, the weights of another run, or random values."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mlcn_jax import pretrained
from mlcn_jax.config import RunConfig, flat, model_defaults, read_stored
from mlcn_jax.distributed import processes
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_object
from mlcn_jax.nn.calibration import without_statistics
from mlcn_jax.nn.model import count_parameters, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import forward_flops
from mlcn_jax.training.checkpoint import ROUNDS, Checkpoints
from mlcn_jax.training.session import Session, state_shapes, whiten_from
from mlcn_jax.training.step import TrainState
from mlcn_jax.training.teacher import TEACHERS
from mlcn_jax.training.trained import Trained, load_trained

_log = logging.getLogger(__name__)


def check_resumable(session: Session, workdir: Path, mine: dict[str, Any]) -> None:
    """Raises InputError, naming every difference, if the run in a workdir cannot be resumed by this session.

    Args:
      session: this run's session.
      workdir: contains `config.json` and `model.json` of a run.
      mine: the content of `model.json` for this run (`Session.model_facts`).
    """
    stored, theirs = read_stored(workdir), read_object(workdir / "model.json")
    if mine.get(TEACHERS) and mine[TEACHERS] == theirs.get(TEACHERS):  # the same models, which may have moved
        stored = stored.replace({"train.teacher": session.config.train.teacher})
    session.config.check_resumable(stored, workdir)
    if isinstance(theirs.get("spec"), dict):
        older = {k: list(v) if isinstance(v, tuple) else v for k, v in model_defaults().items()}
        # Weights of lanes may have been fitted since (`tiers split`); those of the run are in its configuration.
        now = {"lane_weights": mine["spec"]["lane_weights"]}
        theirs["spec"] = {k: v for k, v in (older | theirs["spec"] | now).items() if k != "remat"}
    theirs = {TEACHERS: mine.get(TEACHERS)} | theirs  # runs that an older version pruned have none
    if rows := differences(theirs, mine):
        changed = " (a teacher changes if it is trained further, and if weights are fitted to its lanes)"
        raise InputError(
            f"{workdir} holds a run on different data or with another teacher:\n"
            + "\n".join(rows)
            + (changed if mine.get(TEACHERS) != theirs.get(TEACHERS) else "")
            + "\nresume it with those it started with, or train in another --workdir (with --config.init_from="
            + f"{workdir} to start from its weights)"
        )


def check_is_no_other(workdir: Path) -> None:
    """Raises InputError if a workdir holds something else than a run, whose files those of a run would replace."""
    if (workdir / "checkpoints").exists() or (workdir / ROUNDS).exists():
        return
    for name, what in (("search.db", "a search"), ("trials.json", "a search"), ("manifest.json", "an exported model")):
        if (workdir / name).exists():
            raise InputError(f"{workdir} holds {what} ({name}), not a run: give another --workdir")
    if (workdir / "config.json").exists():
        try:
            read_stored(workdir)
        except InputError as error:
            raise InputError(f"{error}: if this file is not of a run, give another --workdir") from error


def start_state(session: Session, checkpoints: Checkpoints | None) -> tuple[TrainState, dict[str, str]]:
    """The state to start from, and the convolution algorithms that the run has used so far.

    1. The newest intact checkpoint of this workdir, if `checkpoints` are given.
    2. `config.init_from`: the best parameters of another workdir or packaged model, with a fresh optimizer state.
    3. Random parameters from `config.train.seed`.
    """
    if checkpoints is not None and checkpoints.exist():
        restored, facts = checkpoints.restore(state_shapes(session.spec, session.optimizer))
        _log.info("resuming from step %d", facts["step"])
        params = without_statistics(restored["params"])
        state = TrainState(jnp.asarray(facts["step"], jnp.int32), params, restored["optimizer"])
        return state, dict(facts.get("conv", {}))
    spec, donor = session.spec, session.config.init_from
    params = init_params(spec, jax.random.key(session.config.train.seed))
    if not donor:
        params = whiten_from(spec, params, session.train)
    elif processes.is_first():  # whose state all others take; the donor is not here, either, where a run is resumed
        params = _adapt(params, spec, load_trained(pretrained.find_workdir(donor)))
    return jax.jit(TrainState.create, static_argnums=1)(params, session.optimizer), {}


def _adapt(params: dict, spec: ModelSpec, trained: Trained) -> dict:
    """`trained` parameters where they fit, else those of `params` (arrays that depend on the number of classes)."""

    def shape_of(spec: ModelSpec) -> dict[str, Any]:
        same = ("name", "image_shape", "lane_routing", "prior_bias", "signed_pixels", "decoder")
        return {"lanes": ",".join(map(str, spec.lane_groups)), **{name: getattr(spec, name) for name in same}}

    theirs, mine = shape_of(trained.spec), shape_of(spec)
    if rows := differences(theirs, mine):
        raise InputError(
            "config.init_from names a model that does not match this one:\n"
            + "\n".join(rows)
            + "\ngive the same values (--config.model.lanes and so on), or another --config.init_from"
        )
    fresh = []

    def choose(path, mine, theirs):
        if mine.shape == theirs.shape:
            return theirs
        fresh.append(jax.tree_util.keystr(path, simple=True, separator="/"))
        return mine

    adapted = jax.tree_util.tree_map_with_path(choose, params, without_statistics(trained.params))
    if fresh:
        _log.info("different number of classes: %s are initialized randomly", ", ".join(fresh))
    return adapted


def announce(session: Session, placement: dict[str, Any], workdir: Path, start: int, num_steps: int) -> None:
    """Logs what will be trained and where, and which settings differ from the defaults.

    Args:
      session: the run's session.
      placement: `Plan.about`.
      workdir: the run's workdir.
      start: steps done so far.
      num_steps: steps of the entire run.
    """
    spec, config, counts = session.spec, session.config, count_parameters(session.spec)
    defaults = flat(RunConfig().to_dict())
    changed = [f"{name}={value}" for name, value in flat(config.to_dict()).items() if value != defaults[name]]
    shape = "x".join(map(str, spec.image_shape))
    rows = {
        "images": f"{len(session.train.labels):,} for training, {len(session.validation.labels):,} for validation, "
        f"{len(session.dataset.test.labels):,} for testing; {shape}, {spec.num_classes} classes",
        "model": ", ".join(map(str, spec.lane_groups)) or spec.name,
        "parameters": f"{counts['total']:,}, {counts['decoder']:,} of them in the decoder",
        "work": f"{forward_flops(spec) / 1e6:,.1f} MFLOP per image, forward",
        "steps": f"{start:,} done, {num_steps - start:,} to go, {session.steps_per_epoch:,} per epoch with "
        f"{config.train.batch_size} images each",
        "placement": ", ".join(f"{name} {value}" for name, value in placement.items()),
        "not default": ", ".join(changed) or "nothing",
        "writes to": str(workdir),
    }
    _log.info("training on %s\n%s", session.dataset.name, "\n".join(f"  {n:<13}{v}" for n, v in rows.items()))

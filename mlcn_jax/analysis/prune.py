"""Which lanes a trained model needs, and the smaller model without the others.

Lanes meet only in [batch, classes, lanes]: the class capsules of an entire split are computed once, and to remove lanes
is to drop columns. In the smaller model the removed lanes are not computed at all, and the decoder's first layer loses
the rows that read them. The other lanes are unchanged, so class capsules are shorter than the margin loss requires: the
longest one still gives the class, but lengths are no longer probabilities until the model has been trained further,
which its checkpoint allows like any other. If each lane learned to classify alone (`margin_loss` is `per_lane`
or `per_lane_sum`, and residual lanes), lengths remain probabilities.

Source: do Rosario 2021 (thesis), chapter 4.
"""

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from mlcn_jax.allocator import return_unused_memory
from mlcn_jax.analysis.workdir import stored_config
from mlcn_jax.config import RunConfig
from mlcn_jax.data import batches, datasets
from mlcn_jax.errors import InputError
from mlcn_jax.files import check_workdir, make_folder, put_in_place, write_json
from mlcn_jax.nn.calibration import trained_shapes, without_statistics
from mlcn_jax.nn.model import class_lengths, encode
from mlcn_jax.nn.spec import ModelSpec, rows_of, spec_of
from mlcn_jax.training import evaluate
from mlcn_jax.training.checkpoint import Checkpoints, WriteError
from mlcn_jax.training.optimizer import at_step, optimizer_of
from mlcn_jax.training.session import check_learned, check_remat, open_session, state_shapes
from mlcn_jax.training.teacher import Teacher, stored_digests
from mlcn_jax.training.trained import describe_model, load_trained, restore_best

FILE = "pruned.json"
TIMED_BATCH = 100
_TURN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained run at its best checkpoint, and the images used to judge its lanes.

    Attributes:
      config: the run's configuration; of a run in rounds, that of the same training without them.
      spec: the run's model. Lanes are numbered like the columns of its class capsules, group by group.
      class_names: names in the order of the labels.
      params, optimizer: the state at `step`.
      conv: algorithms of the convolutions so far (`tracing.Target`).
      steps_per_epoch: training steps per epoch.
      training_digest: SHA-256 of the training images.
      dataset: the data's name and provenance.
      ranking: the images that rank lanes, `ranking_from` the "validation" or the "training" split; never test images.
      test: the test set, for the record; it decides nothing.
      teachers: SHA-256 of each model that it learned from (`Teacher.digests`).
    """

    config: RunConfig
    spec: ModelSpec
    class_names: tuple[str, ...]
    params: dict
    optimizer: optax.OptState
    step: int
    conv: dict[str, str]
    steps_per_epoch: int
    training_digest: str
    dataset: dict[str, str]
    ranking: datasets.Split
    ranking_from: str
    test: datasets.Split
    teachers: tuple[str, ...]

    @property
    def lanes(self) -> list[str]:
        """The lanes in the order of their numbers."""
        return [str(lane) for lane in self.spec.lane_specs]

    def scores(self, split: datasets.Split) -> evaluate.Scores:
        """Scores, computed as by the command `evaluate`."""
        evaluator = evaluate.make_evaluator(self.spec, self.config.train.reconstruction_weight)
        return evaluator(self.params, split, self.config.train.part_size)


def load_prunable(workdir: Path, data_dir: str = "") -> Run:
    """Reads a workdir and the images of its run; `data_dir` overrides `data.dir` if they have moved.

    Each worker of a run in rounds has an optimizer state of its own, so such a run gets a new one at its step.

    Raises:
      InputError: there is no trained model, it has no lanes, or the images are not those that it was trained on.
    """
    config = stored_config(workdir, data_dir)
    if config.model["name"] != "mlcn":
        raise InputError(f"{workdir} holds a {config.model['name']}, which has no lanes to remove: give an MLCN")
    trained, session = load_trained(workdir), open_session(config)
    check_learned(workdir, session.dataset, session.train)
    like = state_shapes(trained.spec, session.optimizer)
    if config.train.rounds.steps:
        del like["optimizer"]
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    state, saved = restore_best(checkpoints, trained.spec, like)
    checkpoints.close()
    if "optimizer" not in like:
        state["optimizer"] = at_step(session.optimizer.init(without_statistics(state["params"])), saved["step"])
    ranking, ranking_from = datasets.ranking_images(session.train, session.validation)
    return Run(
        config=config.without_rounds(),
        spec=trained.spec,
        class_names=trained.class_names,
        params=state["params"],
        optimizer=state["optimizer"],
        step=saved["step"],
        conv=dict(saved.get("conv", {})),
        steps_per_epoch=session.steps_per_epoch,
        training_digest=datasets.digest(session.train),
        dataset={"name": session.dataset.name, **session.dataset.provenance},
        ranking=ranking,
        ranking_from=ranking_from,
        test=session.dataset.test,
        teachers=stored_digests(workdir),
    )


def weighted_capsules(run: Run, split: datasets.Split, batch_size: int) -> Float[np.ndarray, "n classes lanes"]:
    """Class capsules of a split, scaled so that the sum of their squares is the squared length (`spec.weights`)."""
    return evaluate.class_capsules(run.spec, run.params, split, batch_size) * np.sqrt(np.float32(run.spec.weights))


def accuracy_without(
    v: Float[np.ndarray, "n classes lanes"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " lanes"]:
    """Accuracy with each lane removed alone."""
    squares = _squares(v)
    total = squares.sum(axis=0)
    return np.array([_accuracy(total - lane, labels) for lane in squares])


def accuracy_curve(
    v: Float[np.ndarray, "n classes lanes"], labels: Int[np.ndarray, " n"], order: Sequence[int]
) -> list[float]:
    """Accuracy without the first 0, 1, ... of the lanes in `order`, down to a single lane."""
    squares = _squares(v)
    total, found = np.zeros_like(squares[0]), []
    for lane in reversed(order):
        total += squares[lane]
        found.append(_accuracy(total, labels))
    return found[::-1]


def _alone(v: np.ndarray, labels: np.ndarray) -> list[int]:
    without = accuracy_without(v, labels)
    return sorted(range(len(without)), key=lambda lane: (v[..., lane].any(), -without[lane], _own(v, labels, lane)))


def _greedy(v: np.ndarray, labels: np.ndarray) -> list[int]:
    squares, order = _squares(v), []
    left = sorted(range(v.shape[-1]), key=lambda lane: _own(v, labels, lane))
    while left:
        total = squares[left].sum(axis=0)
        order.append(max(left, key=lambda lane: (not v[..., lane].any(), _accuracy(total - squares[lane], labels))))
        left.remove(order[-1])
    return order


def _own(v: np.ndarray, labels: np.ndarray, lane: int) -> float:
    return _accuracy(_squares(v[..., [lane]])[0], labels)


# From class capsules and labels to all lanes, least useful first: "alone" by the accuracy with each of them removed
# alone, as in the thesis; "greedy" ranks again after each removal. Among equals, the lane goes first that is less
# accurate by itself, then the one with the lower number. Lanes of weight 0, whose columns are 0, go before all others.
ORDERS: dict[str, Callable[[np.ndarray, np.ndarray], list[int]]] = {"alone": _alone, "greedy": _greedy}


def _squares(v: np.ndarray) -> np.ndarray:
    """Each lane's contribution to the squared lengths, [lanes, n, classes], in float64 so that it can be subtracted."""
    return np.square(np.moveaxis(v, -1, 0), dtype=np.float64)


def _accuracy(squared_lengths: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(np.argmax(squared_lengths, axis=-1) == labels))


def prune_params(spec: ModelSpec, params: dict, kept: Sequence[int]) -> dict:
    """The parameters of `spec_of(spec, kept)`."""
    return _prune_tree(spec, params, kept, trained_shapes(spec_of(spec, kept)))


def prune_run(run: Run, kept: Sequence[int]) -> Run:
    """The run with only the lanes in `kept`, in ascending order, at the same step.

    Adam's moments of the remaining parameters are kept.
    """
    spec = dataclasses.replace(spec_of(run.spec, kept), remat=run.config.model["remat"])  # `model.json` has none
    try:
        check_remat(spec)
    except InputError:  # the lanes that are left hold no activations that it could save
        spec = dataclasses.replace(spec, remat="none")
    shapes = state_shapes(spec, optimizer_of(run.config.train, run.steps_per_epoch))
    return dataclasses.replace(
        run,
        config=run.config.replace(
            {
                "model.lanes": spec.lanes,
                "model.lane_weights": list(spec.lane_weights),
                "model.lane_seeds": list(spec.lane_seeds),
                "model.remat": spec.remat,
            }
        ),
        spec=spec,
        params=_prune_tree(run.spec, run.params, kept, shapes["params"]),
        optimizer=_prune_tree(run.spec, run.optimizer, kept, shapes["optimizer"]),
    )


def _prune_tree(spec: ModelSpec, tree: Any, kept: Sequence[int], like: Any) -> Any:
    """Cuts a tree that contains trees like the parameters, such as an optimizer state, to the shapes of `like`."""
    leaves, rows = dict(jax.tree_util.tree_leaves_with_path(tree)), rows_of(spec, kept)

    def cut(path, wanted) -> Array:
        leaf = leaves[path]
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if "encoder" in names:
            leaf = leaf[rows[names[names.index("encoder") + 1]]]
        elif names[-3:] == ["decoder", "hidden1", "kernel"]:  # its rows are [classes, lanes]
            by_lane = leaf.reshape(spec.num_classes, -1, leaf.shape[-1])
            leaf = by_lane[:, np.array(kept)].reshape(-1, leaf.shape[-1])
        assert leaf.shape == wanted.shape, (path, leaf.shape, wanted.shape)
        return leaf

    return jax.tree_util.tree_map_with_path(cut, like)


def save_run(
    run: Run, output: Path, validation_accuracy: float | None, about: dict[str, Any], name: str = FILE
) -> None:
    """Writes a run as a new workdir, which can be evaluated and resumed.

    The folder appears complete or not at all.

    Args:
      run: the run.
      output: the workdir to create.
      validation_accuracy: ranks the checkpoint among those that further training adds; None without validation images.
      about: facts about how it was made, which go to the file `name`.

    Raises:
      InputError: the folder is in use, or cannot be written.
    """
    check_unused(output)
    facts = {"config_hash": run.config.hash(), "conv": run.conv}
    by_lane = run.config.train.lanes_apart and len(run.lanes) > 1 and validation_accuracy is not None
    of_lanes = run.scores(run.ranking).lane_accuracies if by_lane else ()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
            workdir = Path(folder) / output.name
            with contextlib.closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
                state = {"params": run.params, "optimizer": run.optimizer}
                checkpoints.save(run.step, state, facts, validation_accuracy, of_lanes)
            write_json(workdir / "config.json", run.config.to_dict())
            model = describe_model(run.spec, run.class_names, run.training_digest)
            write_json(workdir / "model.json", model | Teacher(digests=run.teachers).facts())
            write_json(workdir / name, about)
            put_in_place(workdir, output, replace=False)  # another command may have written it since `check_unused`
    except (OSError, WriteError) as error:
        reason = error.reason if isinstance(error, WriteError) else error.strerror
        raise InputError(
            f"--output={output} cannot be written ({reason}): give a new folder that you may write to, on a disk with "
            "free space"
        ) from error


def check_unused(output: Path) -> None:
    """Raises InputError unless `output` is new, or an empty folder, and can be a workdir where it is."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"--output={output} already exists and is not overwritten: give a new folder")
    check_workdir(output)
    make_folder(output.absolute().parent, "output")


def inference_seconds(models: Sequence[tuple[ModelSpec, dict]], rounds: int) -> Float[np.ndarray, "rounds models"]:
    """Seconds from a batch of uint8 images in host memory to their class lengths there; no decoder.

    All models take turns in every round, and each round begins with a different one, so that seconds of one round can
    be compared even if the machine's speed varies. A turn is one untimed call, then calls for `_TURN_SECONDS`.

    Args:
      models: specs with their parameters.
      rounds: 1 or more.
    """
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (TIMED_BATCH, *models[0][0].image_shape), np.uint8)

    def lengths(spec, encoder, images):
        return class_lengths(spec, encode(spec, encoder, batches.to_pixels(images)))

    def seconds(program: Callable, encoder: dict, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            np.asarray(program(encoder, images))
        return (time.perf_counter() - started) / calls

    programs = []
    for spec, params in models:
        options = spec.compiler_options(jax.default_backend())
        program = jax.jit(functools.partial(lengths, spec), compiler_options=options)
        seconds(program, params["encoder"], 2)
        calls = max(1, round(_TURN_SECONDS / seconds(program, params["encoder"], 2)))
        programs.append((program, params["encoder"], calls))
    return_unused_memory()
    result = np.zeros((rounds, len(models)))
    for turn in range(rounds):
        for i in np.roll(np.arange(len(models)), -turn):
            program, encoder, calls = programs[i]
            seconds(program, encoder, 1)
            result[turn, i] = seconds(program, encoder, calls)
    return result

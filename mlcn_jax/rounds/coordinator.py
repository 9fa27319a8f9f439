"""The coordinator of a run in rounds: the outer step on the workers' mean change, checkpoints, scores, the summary.

A round is saved before workers are told of the next one, so a coordinator that was killed repeats at most one round.
"""

import contextlib
import dataclasses
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlcn_jax import host
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.errors import Diverged, InputError, Stopped, differences
from mlcn_jax.files import hold, read_json, write_json
from mlcn_jax.nn import tracing
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.placement.cost import check_fits_memory
from mlcn_jax.rounds import link
from mlcn_jax.rounds.judge import CHECKPOINTS, Judge
from mlcn_jax.rounds.meeting import Meeting
from mlcn_jax.rounds.messages import Join
from mlcn_jax.rounds.vector import Vector, compress, decode, digest, num_bytes, to_vector
from mlcn_jax.settings import RoundSettings
from mlcn_jax.training.accumulate import check_parts
from mlcn_jax.training.checkpoint import ROUNDS, Checkpoints
from mlcn_jax.training.plan import Plan, algorithms_of
from mlcn_jax.training.session import Session, open_session, warn_of_unused
from mlcn_jax.training.start import check_is_no_other, check_resumable, start_state
from mlcn_jax.training.stop_signals import StopSignals

_GRACE_SECONDS = 2.0  # time for calls that are still being answered at the end
DRAWN = "."  # between the identity of a run and its number
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What a round begins with: parameters, the outer optimizer's state, and the quantisation residual so far."""

    round: int
    vector: Vector
    outer: optax.OptState
    residual: Vector


def outer_step(settings: RoundSettings, shared: Shared, changes: Mapping[int, Vector]) -> tuple[Shared, bytes]:
    """The state at the start of the next round, and the bytes with which a worker updates its parameters to it.

    Workers apply the same bytes, so the coordinator's and the workers' new parameters are equal: old plus decoded ones.

    Raises:
      Diverged: the outer step or the new parameters are not finite.

    Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1, lines 10 to 13.
    """
    optimizer = optax.sgd(settings.learning_rate, settings.momentum, nesterov=True)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite raises here
        mean = np.mean(list(changes.values()), axis=0, dtype=np.float32)
        update, outer = optimizer.update(jnp.asarray(mean), shared.outer)
        try:
            content, residual = compress(np.asarray(update), shared.residual, settings.bits)
        except ValueError as error:
            raise Diverged(f"round {shared.round}: the outer step is not finite; earlier rounds are kept") from error
        vector = shared.vector + decode(content, shared.vector.size, settings.bits)
    if not np.isfinite(vector).all():
        raise Diverged(f"round {shared.round}: the parameters are not finite; earlier rounds are kept")
    return Shared(shared.round + 1, vector, jax.device_get(outer), residual), content


def start_outer(settings: RoundSettings, vector: Vector) -> optax.OptState:
    """The outer optimizer's state before the first round."""
    return optax.sgd(settings.learning_rate, settings.momentum, nesterov=True).init(jnp.asarray(vector))


def check_rounds(session: Session) -> int:
    """The number of rounds of a run; raises InputError if its batches cannot be divided among the workers."""
    settings, rounds = session.config.train, session.config.train.rounds
    if not rounds.steps:
        raise InputError("train.rounds.steps is 0: give the number of steps that a worker takes in a round, such as 50")
    if session.config.parallel.processes != 1:
        raise InputError(
            f"parallel.processes is {session.config.parallel.processes}; it must be 1 in rounds, where each worker is "
            "a separate run: give train.rounds.workers instead"
        )
    if settings.obstacle_to_rounds:
        raise InputError(settings.obstacle_to_rounds)
    for field, given in (("train.test_every_epoch", settings.test_every_epoch), ("profile", session.config.profile)):
        if given:
            raise InputError(f"{field} is {given}, but has no effect in rounds: leave it False")
    if settings.batch_size % rounds.workers:
        raise InputError(
            f"train.batch_size={settings.batch_size} cannot be divided among train.rounds.workers={rounds.workers}: "
            "use a multiple"
        )
    share, spec = settings.batch_size // rounds.workers, session.spec
    check_parts(spec, settings.batch_size, 1, settings.accumulation_steps)  # in which the coordinator calibrates
    check_fits_memory(spec, host.total_memory_bytes())
    group = min(spec.norm_group, settings.batch_size)
    if share % group and spec.normalises:
        raise InputError(
            f"model.norm_group={spec.norm_group}: {group} images are normalised together, but a worker's part of a "
            f"batch has {share}: use a divisor of {share} as model.norm_group"
        )
    return -(-session.num_steps // rounds.steps)


def identity(session: Session) -> str:
    """16 hexadecimal digits that identify what all workers of a run have in common: configuration, training images."""
    facts = f"{session.config.hash()} {session.model_facts()['training_images_sha256']}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def name_of_run(session: Session, workdir: Path, own: Checkpoints) -> str:
    """`identity`, and what tells this run from others of the same configuration: a number drawn when it was started.

    It is kept in the workdir from before the first round on. Runs of earlier versions have none, and keep their name.
    """
    path = workdir / ROUNDS / "run.json"
    if not path.exists():
        write_json(path, {"drawn": "" if own.exist() else uuid.uuid4().hex[:16]})
    drawn = read_json(path)["drawn"]
    return f"{identity(session)}{DRAWN}{drawn}" if drawn else identity(session)


def check_worker(session: Session, request: Join) -> None:
    """Checks that a worker computes the same run.

    Raises:
      InputError: its configuration or its training images differ.
    """
    mine = {**session.config.fixed(), "training images": session.model_facts()["training_images_sha256"]}
    theirs = {**request.fields, "training images": request.data}
    names = dict.fromkeys([*mine, *theirs])
    if rows := differences(theirs, mine, names, f"in worker {request.worker}", "in the coordinator"):
        raise InputError("the configurations differ:\n" + "\n".join(rows) + "\nstart all with the same values")


def coordinate(
    config: RunConfig,
    workdir: Path,
    address: str,
    tls: link.Tls = link.Tls(),  # noqa: B008 -- it is frozen
    on_start: Callable[[int], contextlib.AbstractContextManager[Callable[[], None]]] | None = None,
) -> dict[str, Any]:
    """Coordinates a run until its end and returns the summary, which is also written to `workdir/summary.json`.

    A run in the workdir is resumed after its last complete round.

    Args:
      config: the run's configuration, the same in all workers except for what does not affect the result.
      workdir: what `loop.train` writes is written here, and the coordinator's state to `rounds` in it.
      address: HOST:PORT to listen on; port 0 picks a free one.
      tls: certificates.
      on_start: called with the port once it listens; the function that it yields is called regularly while workers
        compute.

    Raises:
      InputError: some input cannot be used.
      Stopped: a signal asked it to stop; the last complete round is saved.
      Diverged: the parameters are no longer finite; earlier rounds are kept.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        stack.enter_context(hold(workdir))
        check_is_no_other(workdir)
        session = open_session(config)
        warn_of_unused(config, session.spec)
        settings, num_rounds = config.train.rounds, check_rounds(session)
        facts = session.model_facts()
        own = _open(session, workdir, facts)
        stack.callback(own.close)
        shared, counted = _start(session, own)
        write_json(workdir / "config.json", config.to_dict())
        if shared.round < num_rounds:
            write_json(workdir / "model.json", facts)  # drops lane weights fitted to earlier parameters
        algorithms = algorithms_of(Plan(), session.spec, config.train.batch_size, {})
        stack.enter_context(tracing.using(tracing.Target(algorithms=tracing.as_pairs(algorithms))))
        step = min(shared.round * settings.steps, session.num_steps)
        judge = Judge(session, workdir, step)
        stack.callback(judge.close)
        if shared.round:
            _score(judge, own, shared, step)  # unless this was done before the coordinator stopped
        meeting = Meeting(settings, name_of_run(session, workdir, own), shared.vector, shared.round, counted)
        trained = shared.round < num_rounds
        if not trained:
            meeting.finish()

        def join(request: Join) -> str:
            check_worker(session, request)
            return meeting.join(request.worker, request.process)

        handlers: dict[str, Callable[..., Any]] = {
            "join": join,
            "fetch": meeting.fetch,
            "push": meeting.push,
            "diverge": meeting.diverge,
        }
        largest = num_bytes(shared.vector.size, settings.bits)
        server, port = link.serve(handlers, address, tls, settings.workers, largest)
        stack.callback(lambda: server.stop(_GRACE_SECONDS).wait())
        watch = stack.enter_context(on_start(port)) if on_start else _no_watch

        def stop_only() -> None:
            stop.check(f"after round {shared.round} of {num_rounds}")

        def check() -> None:
            stop_only()
            watch()

        _log.info("round %d of %d; %d workers may connect to port %d", shared.round, num_rounds, settings.workers, port)
        # Workers that were started here are known to be there, and those that are not cannot hear.
        patience = link.FOUND_SECONDS if on_start else settings.patience_seconds
        try:
            while shared.round < num_rounds:
                started = time.monotonic()
                changes, metrics = meeting.gather(check)
                shared, update = outer_step(settings, shared, changes)
                step = min(shared.round * settings.steps, session.num_steps)
                judge.record(step, metrics, time.monotonic() - started)
                state = {"params": {"vector": shared.vector}, "optimizer": (shared.outer, shared.residual)}
                own.save(shared.round, state, {"config_hash": config.hash(), "counted": meeting.counted})
                own.wait()
                if shared.round < num_rounds:
                    meeting.advance(shared.vector, update)
                _score(judge, own, shared, step)
        except Diverged:
            meeting.finish("diverged")
            with contextlib.suppress(Stopped):
                meeting.wait_until_heard(patience, stop_only)
            raise
        meeting.finish()
        about = {
            "rounds": num_rounds,
            "workers": settings.workers,
            "parameters": shared.vector.size,
            "digest": digest(shared.vector, num_rounds),
        }
        summary = judge.finish(shared.vector, about)
        with contextlib.suppress(Stopped):  # a worker that is not told of the end would retry forever
            meeting.wait_until_heard(patience if trained else link.FOUND_SECONDS, stop_only)
        return summary


def _score(judge: Judge, own: Checkpoints, shared: Shared, step: int) -> None:
    """Scores a round that has been saved; one that turns out to have diverged is not kept, to resume before it."""
    try:
        judge.score(step, shared.vector)
    except Diverged:
        own.delete_after(shared.round - 1)
        raise


def _no_watch() -> None:
    """Nothing to check while workers compute."""


def _open(session: Session, workdir: Path, facts: dict[str, Any]) -> Checkpoints:
    """The coordinator's own checkpoints; raises InputError if the workdir holds a run that cannot be resumed."""
    own = Checkpoints(workdir / ROUNDS)
    with contextlib.ExitStack() as on_error:
        on_error.callback(own.close)
        if own.exist():
            check_resumable(session, workdir, facts)
            if read_stored(workdir).hash() != session.config.hash():
                raise InputError(
                    f"{workdir} holds a run in rounds of another length: give the train.num_epochs and train.num_steps "
                    "that it was started with"
                )
        elif any((workdir / CHECKPOINTS).glob("*")):
            raise InputError(
                f"{workdir} holds an ordinary run: give another --workdir (with --config.init_from={workdir} to start "
                "from its weights)"
            )
        on_error.pop_all()
    return own


def _start(session: Session, own: Checkpoints) -> tuple[Shared, dict[str, str]]:
    """The newest round that was saved, or the start of the run; and `Meeting.counted` at its start."""
    settings = session.config.train.rounds
    if not own.exist():
        vector = to_vector(start_state(session, None)[0].params)
        return Shared(0, vector, jax.device_get(start_outer(settings, vector)), np.zeros_like(vector)), {}
    size = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(session.spec)))
    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    like = {
        "params": {"vector": shape},
        "optimizer": (jax.eval_shape(lambda v: start_outer(settings, v), shape), shape),
    }
    restored, facts = own.restore(like)
    _log.info("resuming after round %d", facts["step"])
    outer, residual = jax.device_get(restored["optimizer"])
    shared = Shared(facts["step"], np.asarray(restored["params"]["vector"]), outer, np.asarray(residual))
    return shared, facts.get("counted", {})  # earlier versions did not write it

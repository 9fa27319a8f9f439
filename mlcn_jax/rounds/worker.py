"""A worker of a run in rounds: takes its part of every batch, and sends how its steps changed the parameters.

Its optimizer state and the quantisation residual are saved before a change is sent: a worker that was killed sends the
same change again, or repeats the round. Whether a change counted is not saved: the coordinator knows, and says so with
the next round.
"""

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlcn_jax.config import RunConfig
from mlcn_jax.data.batches import Batches
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.files import hold
from mlcn_jax.nn import tracing
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.rounds import link
from mlcn_jax.rounds.coordinator import DRAWN, check_rounds, identity
from mlcn_jax.rounds.meeting import METRICS, run_of
from mlcn_jax.rounds.messages import Begin, Change, Divergence, Fetch, Join
from mlcn_jax.rounds.vector import Vector, compress, decode, digest, from_vector, num_bytes, to_vector
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.optimizer import at_step
from mlcn_jax.training.plan import algorithms_of, make_runner
from mlcn_jax.training.room import check_step_fits
from mlcn_jax.training.session import Session, open_session, plan_of, step_options
from mlcn_jax.training.start import start_state
from mlcn_jax.training.step import TrainState
from mlcn_jax.training.stop_signals import StopSignals

_SEEDS_APART = 2**20  # between the seeds of the workers' augmentation and lane dropout
_log = logging.getLogger(__name__)


def work(config: RunConfig, workdir: Path, address: str, worker: int, tls: link.Tls = link.Tls()) -> None:  # noqa: B008
    """Works for the coordinator at an address until the run is over.

    Args:
      config: equal to the coordinator's, except for what does not affect the result.
      workdir: folder in which this worker keeps its state, to resume from.
      address: HOST:PORT of the coordinator.
      worker: its number, from 0.
      tls: certificates.

    Raises:
      InputError: the coordinator refuses this worker, or an input cannot be used.
      Stopped: a signal asked it to stop; at most the current round is repeated.
      Diverged: its parameters or those of the coordinator are no longer finite.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        stack.enter_context(hold(workdir))
        session = open_session(config)
        check_rounds(session)
        if not 0 <= worker < config.train.rounds.workers:
            raise InputError(
                f"--worker={worker} is not one of train.rounds.workers={config.train.rounds.workers}, counted from 0"
            )

        def check() -> None:
            stop.check(f"in worker {worker}")

        client = link.Client(address, tls, check)
        stack.callback(client.close)
        trainer = Trainer(session, worker, workdir)
        stack.callback(trainer.close)
        facts = session.model_facts()
        request = Join(worker, config.fixed(), facts["training_images_sha256"], uuid.uuid4().hex)
        run = client.call("join", request)
        follow(client, trainer, run, worker, check)
        _log.info("the run is over; sent %s and received %s bytes", f"{client.sent:,}", f"{client.received:,}")


def follow(client: Any, trainer: "Trainer", run: str, worker: int, check: Callable[[], None]) -> None:
    """Computes the rounds that a coordinator requests, until there are no more.

    Args:
      client: has `call`, as in `link.Client`.
      trainer: computes rounds.
      run: the run's identity, as the coordinator gave it.
      worker: the number of this worker.
      check: called between steps; may raise.

    Raises:
      Diverged: the run has diverged, here or at the coordinator.
    """
    trainer.enter(run_of(run))
    vector = trainer.start()
    have = digest(vector, 0) if vector.size else ""
    while True:
        begin: Begin = client.call("fetch", Fetch(run, worker, have, trainer.sent))
        if begin.kind == "finished":
            return
        if begin.kind == "diverged":
            raise Diverged("the run has diverged: see the coordinator's message")
        if begin.kind == "wait":
            continue
        if begin.kind == "full":
            vector = decode(begin.content, trainer.size, 32)
        elif begin.kind == "update":
            vector = vector + decode(begin.content, trainer.size, trainer.bits)
        have = digest(vector, begin.round)
        try:
            content, metrics = trainer.change(begin.round, vector, begin.counted, check)
        except Diverged as error:
            with contextlib.suppress(InputError):  # refused, which matters no more
                client.call("diverge", Divergence(run, worker, have, str(error)))
            raise
        receipt = client.call("push", Change(run, worker, begin.round, have, content, metrics))
        if not receipt.counts:
            _log.warning("worker %d was late: %s", worker, receipt.reason)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A worker's state after a round, and the change that it sent.

    Attributes:
      round: the round.
      began: its `vector.digest`.
      optimizer: state of the inner optimizer.
      before, after: the quantisation residual before the change, and after it if it counted.
      content, metrics: the change that was sent, and its metrics.
    """

    round: int
    began: str
    optimizer: optax.OptState
    before: Vector
    after: Vector
    content: bytes
    metrics: dict[str, float]


class Trainer:
    """Computes the rounds of one worker.

    Args:
      session: the session of the run.
      worker: its number, from 0, which selects its part of each batch.
      workdir: folder in which its state is kept; a state that is there is resumed.

    Attributes:
      size: number of parameters.
      bits: bits of each value of a change.

    Raises:
      InputError: the state in the workdir belongs to another run or worker.
    """

    def __init__(self, session: Session, worker: int, workdir: Path):
        self._session, self._worker = session, worker
        settings = session.config.train
        self._rounds, self._share = settings.rounds, settings.batch_size // settings.rounds.workers
        self._like = param_shapes(session.spec)
        self.size, self.bits = sum(leaf.size for leaf in jax.tree.leaves(self._like)), self._rounds.bits
        self._stack = contextlib.ExitStack()
        self._checkpoints = Checkpoints(workdir / "worker")
        self._stack.callback(self._checkpoints.close)
        self._num_saves, self._run = 0, identity(session)
        self._kept = self._read(workdir)
        plan = plan_of(session.config, session.spec, workdir, self._share)
        algorithms = algorithms_of(plan, session.spec, self._share, {})
        self._stack.enter_context(tracing.using(tracing.Target(algorithms=tracing.as_pairs(algorithms))))
        options = step_options(session.config)
        options["seed"] = (options["seed"] + _SEEDS_APART * worker) % 2**32
        self._runner = make_runner(plan, session.spec, session.optimizer, clip_norm=settings.clip_norm, **options)
        self._batches = Batches(
            session.train.images,
            session.train.labels,
            settings.batch_size,
            settings.seed,
            alternate_flips=session.config.data.alternate_flips,
        )
        self._compiled: set[int] = set()

    def _read(self, workdir: Path) -> _Kept | None:
        if not self._checkpoints.exist():
            return None
        optimizer = jax.eval_shape(self._session.optimizer.init, self._like)
        vector = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        content = jax.ShapeDtypeStruct((num_bytes(self.size, self.bits),), jnp.uint8)
        like = {"params": {"before": vector, "after": vector, "content": content}, "optimizer": optimizer}
        _, facts = self._checkpoints.restore({})
        same = facts["run"].partition(DRAWN)[0] == self._run
        if not same or facts["worker"] != self._worker:
            raise InputError(
                f"{workdir} holds the state of worker {facts['worker']} of "
                + ("this run" if same else "another run")
                + f", but this is worker {self._worker}: give another --workdir"
            )
        restored, facts = self._checkpoints.restore(like)
        self._num_saves, self._run = facts["step"], facts["run"]
        before, after, sent = (np.asarray(restored["params"][name]) for name in ("before", "after", "content"))
        about = (facts["round"], facts["began"], restored["optimizer"])
        return _Kept(*about, before, after, sent.tobytes(), facts["metrics"])

    def enter(self, run: str) -> None:
        """Takes part in a run, of which the coordinator gave the name: what it kept of another one is dropped."""
        if self._kept is not None and self._run == run:
            _log.info("worker %d resumes after round %d", self._worker, self._kept.round)
        elif self._kept is not None:
            _log.warning(
                "worker %d has the state of an earlier run of the same configuration: it is dropped", self._worker
            )
            self._kept = None
        self._run = run

    def start(self) -> Vector:
        """The parameters that the run begins with, so that they need not be sent.

        Empty if a file gives them, and if this worker has taken part in a round.
        """
        if self._kept or self._session.config.init_from:
            return np.empty(0, np.float32)
        return to_vector(start_state(self._session, None)[0].params)

    @property
    def sent(self) -> str:
        """The `vector.digest` of the round of its newest change; empty if there is none."""
        return self._kept.began if self._kept else ""

    def change(
        self, round_: int, vector: Vector, counted: bool, check: Callable[[], None]
    ) -> tuple[bytes, dict[str, float]]:
        """How this worker's steps of a round change the parameters, as bytes, and the means of its metrics.

        If called again for the round that it computed last, from the same parameters, it returns the same result.

        Args:
          round_: number of the round, from 0.
          vector: the parameters that the round begins with.
          counted: whether the newest change, that of the round `sent`, counted; if not, its quantisation error is
            dropped.
          check: called between steps; may raise.

        Raises:
          InputError: a step does not fit the memory of the device.
          Diverged: the parameters are no longer finite.
        """
        kept, began = self._kept, digest(vector, round_)
        if kept is not None and kept.began == began:
            return kept.content, kept.metrics
        first = round_ * self._rounds.steps
        last = min(first + self._rounds.steps, self._session.num_steps)
        _log.info("worker %d computes round %d: steps %d to %d", self._worker, round_, first + 1, last)
        params = from_vector(vector, self._like)
        optimizer = kept.optimizer if kept else self._session.optimizer.init(params)
        if (kept.round if kept else -1) != round_ - 1:  # it missed steps: set the counts of its schedules
            optimizer = at_step(optimizer, first)
        self._runner.start(TrainState(jnp.asarray(first, jnp.int32), params, optimizer))
        self._compile(first, last)
        rows = []
        for step in range(first, last):
            check()
            batch = self._runner.place(*self._part(step))
            rows.append(self._runner.step(*batch, size=self._session.image_size(step + 1)))
        state = jax.device_get(self._runner.fetch())
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite raises below
            moved = vector - to_vector(state.params)
        means = {name: float(np.mean([row[name] for row in jax.device_get(rows)])) for name in METRICS}
        if not np.isfinite(moved).all() or not np.isfinite(list(means.values())).all():
            raise Diverged(f"worker {self._worker}, step {last}: parameters or metrics are not finite ({means})")
        before = np.zeros_like(vector) if kept is None else kept.after if counted else kept.before
        try:
            content, after = compress(moved, before, self.bits)
        except ValueError as error:
            raise Diverged(f"worker {self._worker}, step {last}: the change is too large to be sent") from error
        self._kept = _Kept(round_, began, state.optimizer, before, after, content, means)
        self._save()
        return content, means

    def _part(self, step: int) -> tuple[np.ndarray, ...]:
        """This worker's images and labels of a batch."""
        start = self._worker * self._share
        return tuple(each[start : start + self._share] for each in self._batches.at(step))

    def _compile(self, first: int, last: int) -> None:
        sizes = {self._session.image_size(step + 1) for step in range(first, last)}
        if not sizes <= self._compiled:
            _log.info("compiling the training step")
            self._compiled = sizes
            self._runner.compile(*self._part(first), sizes=sorted(sizes))
            check_step_fits(self._runner)

    def _save(self) -> None:
        kept = self._kept
        assert kept is not None
        facts = {"run": self._run, "worker": self._worker, "metrics": kept.metrics}
        facts |= {"round": kept.round, "began": kept.began}
        sent = {"before": kept.before, "after": kept.after, "content": np.frombuffer(kept.content, np.uint8)}
        self._num_saves += 1  # numbers are not those of rounds: a restarted coordinator may repeat a round
        self._checkpoints.save(self._num_saves, {"params": sent, "optimizer": kept.optimizer}, facts)
        self._checkpoints.wait()

    def close(self) -> None:
        """Closes what saves in the background."""
        self._stack.close()

"""Collects the changes of a round: which workers are expected, which changes have arrived, and when a round can end.

Every round counts each worker at most once. A round ends when all expected workers have answered, or when a quorum has
and the first of them has waited long enough. A worker that sent no change is not expected again until it asks for
parameters. Rounds are identified by number and by the parameters that they begin with: a coordinator that fell back to
an earlier checkpoint may reach other parameters in a round of the same number.

The newest process to join with a worker's number is that worker, as when it was killed and started again. An earlier
process that is still alive is refused at its next call: two processes were started with the same number.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.rounds.messages import Begin, Change, Divergence, Fetch, Receipt
from mlcn_jax.rounds.vector import Vector, decode, digest, encode
from mlcn_jax.settings import RoundSettings

METRICS = ("loss", "accuracy")  # sent with a change
_OF_PROCESS = "/"  # between the run and the process in the field `run` of messages
_POLL_SECONDS, _SILENT_SECONDS = 0.5, 5.0
_log = logging.getLogger(__name__)


def run_of(name: str) -> str:
    """The run in the answer to `Join`, without the process."""
    return name.partition(_OF_PROCESS)[0]


class Meeting:
    """The state of a run, shared by the coordinator's loop and the calls of workers; all methods are thread-safe.

    Args:
      settings: settings of the rounds.
      run: identifies the run; messages from another run are refused.
      vector: the parameters that the round begins with.
      round_: the round to begin with.
      counted: the attribute of that name when that round began.
      wait_seconds: how long a call of `fetch` is held while there is nothing to do.
      clock: gives the time in seconds; replaced in tests.

    Attributes:
      counted: the `vector.digest` of the newest round in which each worker counted, by its number as text, as JSON has
        it. It includes a round from the moment that `gather` ends it, so that it can be saved with that round.
    """

    def __init__(
        self,
        settings: RoundSettings,
        run: str,
        vector: Vector,
        round_: int,
        counted: Mapping[str, str],
        wait_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings, self._run, self._wait_seconds, self._clock = settings, run, wait_seconds, clock
        self._vector, self._began, self._round = vector, digest(vector, round_), round_
        self._before, self._update = "", b""  # digest of the round before, and the bytes from its parameters to these
        self._closed = False
        self._end = ""  # how the run ended, as `Begin.kind`
        self.counted = dict(counted)
        self._heard: set[int] = set()
        self._processes: dict[int, str] = {}  # which process is which worker
        self._changes: dict[int, Vector] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._diverged: dict[int, str] = {}  # in the open round, and why
        self._expected = set(range(settings.workers))
        self._first_answer, self._last_call = 0.0, clock()
        self._told = False
        self._condition = threading.Condition()

    def join(self, worker: int, process: str) -> str:
        """Accepts a process as a worker, replacing an earlier one; returns the value of `run` for its messages.

        Args:
          worker: the worker's number.
          process: an identifier drawn at random by the process.

        Raises:
          InputError: there is no such worker.
        """
        run = f"{self._run}{_OF_PROCESS}{process}"
        with self._condition:
            before = self._processes.pop(worker, process)
            self._check(run, worker)
        if before != process:
            _log.info("worker %d was started again", worker)
        return run

    def fetch(self, request: Fetch, is_there: Callable[[], bool] = lambda: True) -> Begin:
        """What a worker is to do next; waits up to `wait_seconds` if there is nothing to do.

        Args:
          request: the worker's request.
          is_there: whether the worker still waits for the answer: one that is gone does not hear of the run's end.

        Raises:
          InputError: the request is from another run, from a worker that does not exist, or from a process that
            another one has replaced.
        """
        self._check(request.run, request.worker)
        with self._condition:
            self._condition.wait_for(lambda: self._has_work(request), self._wait_seconds)
            if self._end:
                if is_there():
                    self._heard.add(request.worker)
                    self._condition.notify_all()
                return Begin(self._round, self._end)
            if not self._has_work(request):
                return Begin(self._round, "wait")
            self._expected.add(request.worker)
            self._diverged.pop(request.worker, None)  # it was started again
            counted = self._did_count(request.worker, request.sent)
            if request.have == self._began:
                return Begin(self._round, "again", counted=counted)
            if request.have == self._before and self._update:
                return Begin(self._round, "update", self._update, counted)
            return Begin(self._round, "full", encode(self._vector, 32), counted)

    def _has_work(self, request: Fetch) -> bool:
        if self._closed and not self._end:
            return False
        return bool(self._end) or request.have != self._began or request.worker not in self._changes

    def _did_count(self, worker: int, began: str) -> bool:
        return self.counted.get(str(worker)) == began

    def push(self, change: Change) -> Receipt:
        """Accepts a worker's change if it is its first in the open round; says whether it counts.

        Raises:
          InputError: it is from another run, from a worker that does not exist, or from a process that another one
            has replaced; or it is damaged.
        """
        self._check(change.run, change.worker)
        if sorted(change.metrics) != sorted(METRICS) or not all(map(math.isfinite, change.metrics.values())):
            raise InputError(
                f"the metrics of worker {change.worker} in round {change.round} are {change.metrics}; they must be "
                f"finite values of {' and '.join(METRICS)}"
            )
        try:
            vector = decode(change.content, self._vector.size, self._settings.bits)
        except ValueError as error:
            raise InputError(f"the change of worker {change.worker} in round {change.round} has {error}") from error
        with self._condition:
            if self._did_count(change.worker, change.began):
                return Receipt(True)  # it was counted, but the worker did not get the answer
            if change.began != self._began:
                return Receipt(False, f"round {change.round} is over or was restarted; round {self._round} is open")
            if change.worker not in self._changes:
                if self._closed or self._end:
                    return Receipt(False, f"round {change.round} has just ended")
                if not self._changes:
                    self._first_answer = self._clock()
                self._changes[change.worker], self._metrics[change.worker] = vector, change.metrics
                self._condition.notify_all()
            return Receipt(True)

    def diverge(self, message: Divergence) -> bool:
        """Notes that a worker's steps diverged; returns whether that was in the open round. It is not waited for.

        Raises:
          InputError: as for `push`.
        """
        self._check(message.run, message.worker)
        with self._condition:
            if message.began != self._began or self._closed or self._end:
                return False
            _log.warning("worker %d has diverged: %s", message.worker, message.reason)
            self._diverged[message.worker] = message.reason
            self._expected.discard(message.worker)
            self._condition.notify_all()
            return True

    def _check(self, run: str, worker: int) -> None:
        name, _, process = run.partition(_OF_PROCESS)
        if name != self._run:
            raise InputError(
                f"worker {worker} is of another run: the run that it joined was started anew, or has another "
                "configuration or other training images; start the worker again"
            )
        if not 0 <= worker < self._settings.workers:
            raise InputError(
                f"there is no worker {worker}: train.rounds.workers is {self._settings.workers}, and numbers start at 0"
            )
        with self._condition:  # a coordinator that was started again does not know who has joined
            self._last_call = self._clock()
            if self._processes.setdefault(worker, process) != process:
                raise InputError(
                    f"another process has joined with --worker={worker} and replaced this one: give each worker a "
                    f"different number, from 0 to {self._settings.workers - 1}"
                )

    def gather(self, check: Callable[[], None]) -> tuple[dict[int, Vector], dict[int, dict[str, float]]]:
        """Waits until the round can end; returns changes and metrics by worker.

        Args:
          check: called now and then while it waits; may raise.

        Raises:
          Diverged: so many workers have diverged that the others are too few for a round.
        """
        with self._condition:
            while not self._can_end():
                if self._settings.workers - len(self._diverged) < self._settings.enough:
                    reasons = "; ".join(self._diverged.values())
                    raise Diverged(f"round {self._round} has diverged in workers: {reasons}; earlier rounds are kept")
                check()
                self._condition.wait(_POLL_SECONDS)
            self._closed = True
            self.counted = self.counted | {str(worker): self._began for worker in self._changes}
            return dict(sorted(self._changes.items())), dict(sorted(self._metrics.items()))

    def _can_end(self) -> bool:
        came, enough = self._changes.keys(), len(self._changes) >= self._settings.enough
        patience = self._settings.patience_seconds
        late = bool(came) and self._clock() - self._first_answer >= patience
        silent = self._clock() - self._last_call >= patience
        if (late or silent or self._expected <= came) and not enough and not self._told:
            self._told = True
            _log.warning(
                "round %d waits: %d of %d workers have answered, and %d are needed (train.rounds.quorum)%s",
                *(self._round, len(came), self._settings.workers, self._settings.enough),
                f"; none has been heard for {patience:g} seconds" if silent else "",
            )
        return enough and (late or self._expected <= came)

    def advance(self, vector: Vector, update: bytes) -> None:
        """Opens the next round with new parameters; `update` holds the change from the previous ones to these."""
        with self._condition:
            if missing := sorted(self._expected - self._changes.keys()):
                _log.warning("round %d ended without worker %s", self._round, ", ".join(map(str, missing)))
            self._expected = set(self._changes)
            self._before, self._update = self._began, update
            self._vector, self._round = vector, self._round + 1
            self._began = digest(vector, self._round)
            self._closed = self._told = False
            self._changes, self._metrics, self._diverged = {}, {}, {}
            self._condition.notify_all()

    def finish(self, kind: str = "finished") -> None:
        """Tells all workers that the run is over: `finished`, or `diverged`."""
        with self._condition:
            self._end = kind
            self._condition.notify_all()

    def wait_until_heard(self, seconds: float, check: Callable[[], None]) -> None:
        """Waits until all workers that answered in the last round, or were to answer, know that the run is over.

        Args:
          seconds: longest time to wait.
          check: called now and then while it waits; may raise.
        """
        end, told = time.monotonic() + seconds, False
        with self._condition:
            came = set(self._changes)
            if self._end == "diverged":  # perhaps while others still compute
                came |= self._expected
            while (missing := (came or self._expected) - self._heard) and time.monotonic() < end:
                check()
                self._condition.wait(_POLL_SECONDS)
                if not told and time.monotonic() > end - seconds + _SILENT_SECONDS:
                    told = True
                    names = ", ".join(map(str, sorted(missing)))
                    _log.info("waiting up to %.0f s for worker %s to learn that the run is over", seconds, names)

"""The messages between workers and their coordinator."""

from typing import Any

import msgspec


class Join(msgspec.Struct):
    """A worker's first message: what it is going to compute.

    Attributes:
      worker: its number, from 0.
      fields: those fields of its configuration that affect the result (`RunConfig.fixed`).
      data: SHA-256 of its training images.
      process: an identifier that each process of a worker draws at random when it starts.
    """

    worker: int
    fields: dict[str, Any]
    data: str
    process: str


class Fetch(msgspec.Struct):
    """A worker asks for the parameters that a round begins with.

    Attributes:
      run: the answer to `Join`, which names the run and the worker's process.
      worker: its number.
      have: `vector.digest` of the newest round whose parameters it has; empty if it has none.
      sent: that of the round of its newest change, which it may have computed before it was started again; empty if
        there is none.
    """

    run: str
    worker: int
    have: str
    sent: str = ""


class Begin(msgspec.Struct):
    """The answer to `Fetch`.

    Attributes:
      round: the round to compute; without meaning if the run is finished or has diverged.
      kind: `full` for parameters, `update` for their change since the previous round, `again` if the worker has these
        parameters and is to send its change, which it may have computed before, `wait` if there is nothing to do yet,
        `finished`, or `diverged`.
      content: bytes of `vector.encode`, in 32 bits for `full` and in the run's bits for `update`.
      counted: whether the change of `Fetch.sent` counted, if a round is to be computed.
    """

    round: int
    kind: str
    content: bytes = b""
    counted: bool = False


class Change(msgspec.Struct):
    """How a worker's steps changed the parameters: before minus after, as bytes of `vector.encode`.

    Attributes:
      run, worker: as in `Fetch`.
      round: the round of these steps.
      began: `vector.digest` of that round.
      content: the bytes.
      metrics: means over the steps, by the names in `meeting.METRICS`.
    """

    run: str
    worker: int
    round: int
    began: str
    content: bytes
    metrics: dict[str, float]


class Divergence(msgspec.Struct):
    """A worker's steps of a round have diverged, and it ends.

    Attributes:
      run, worker: as in `Fetch`.
      began: as in `Change`.
      reason: what is not finite, and in which step.
    """

    run: str
    worker: int
    began: str
    reason: str


class Receipt(msgspec.Struct):
    """The answer to `Change`: whether it is in the open round or counted in an earlier one, and if not, why.

    It counts for good only once the coordinator has saved the round; `Begin.counted` says whether it did.
    """

    counts: bool
    reason: str = ""

"""What workers and their coordinator say to each other."""

from typing import Any

import msgspec


class Join(msgspec.Struct):
    """A worker's first message: what it computes.

    Attributes:
      worker: its number, from 0.
      fields: of its configuration, all that affect the result (`RunConfig.fixed`).
      data: SHA-256 of its training images.
    """

    worker: int
    fields: dict[str, Any]
    data: str


class Fetch(msgspec.Struct):
    """A worker asks for the parameters that a round begins with.

    Attributes:
      run: what `Join` was answered.
      worker: its number.
      have: `vector.digest` of the newest round whose parameters it has; empty for none.
    """

    run: str
    worker: int
    have: str


class Begin(msgspec.Struct):
    """The answer to `Fetch`.

    Attributes:
      round: the round to compute; the number of rounds if the run is finished.
      kind: `full` parameters, the `update` of those of the round before, `again` if the worker's change of this round
        is needed once more, `wait` if there is nothing to do yet, or `finished`.
      content: bytes of `vector.encode`: in 32 bits for `full`, else in those of the run.
    """

    round: int
    kind: str
    content: bytes = b""


class Change(msgspec.Struct):
    """How a worker's steps changed the parameters: before minus after, as bytes of `vector.encode`.

    Attributes:
      run, worker: as of `Fetch`.
      round: the round whose steps these were.
      began: its `vector.digest`.
      content: the bytes.
      metrics: means over the steps.
    """

    run: str
    worker: int
    round: int
    began: str
    content: bytes
    metrics: dict[str, float]


class Receipt(msgspec.Struct):
    """The answer to `Change`: whether it counts, and if not, why."""

    counts: bool
    reason: str = ""

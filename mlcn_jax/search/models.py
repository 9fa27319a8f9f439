"""The models of a search and their results, read from its trials."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlcn_jax.search.space import Mix
from mlcn_jax.search.trials import Score

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

BASELINE = -1  # index of the model that all others are compared with


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the search and its result.

    Attributes:
      index: `BASELINE`, or 0 and up.
      state: `complete`, `stopped early`, `failed`, `running` or `waiting`.
      lanes: all of its lanes, as text; empty before they are chosen.
      mix: the lanes of each device, as indices into the menu.
      origin: how the mix was found: `draw`, `baseline` or the name of a move.
      score: the latest score; None before the first.
      accuracies: validation accuracy after each scored epoch.
      seconds: spent on training, compiling and scoring.
      ended: when it ended, in seconds since 1970; 0 before.
      reason: why it failed; empty if it did not.
    """

    index: int
    state: str
    lanes: str
    mix: Mix
    origin: str
    score: Score | None
    accuracies: tuple[float, ...]
    seconds: float
    ended: float
    reason: str

    @property
    def train_seconds(self) -> float:
        return self.score.train_seconds if self.score else 0.0


def best(models: Sequence[Model]) -> Model | None:
    """The model with the highest accuracy among those trained to the end, excluding the baseline."""
    complete = [model for model in models if model.state == "complete" and model.index != BASELINE]
    return max(complete, key=lambda model: model.accuracies[-1], default=None)


def repeats(models: Sequence[Model]) -> dict[int, int]:
    """Maps each model (not the baseline) whose lanes repeat an earlier one to the index of the first with them."""
    first: dict[str, int] = {}
    drawn = sorted((m.index, m.lanes) for m in models if m.lanes and m.index != BASELINE)
    return {index: first[lanes] for index, lanes in drawn if first.setdefault(lanes, index) != index}


def model_of(trial: "FrozenTrial") -> Model:
    """The model of a trial."""
    names = {"complete": "complete", "pruned": "stopped early", "fail": "failed"}
    accuracies = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
    return model_from(trial.user_attrs, names.get(trial.state.name.lower(), trial.state.name.lower()), accuracies)


def model_from(attrs: Mapping[str, Any], state: str, accuracies: Sequence[float]) -> Model:
    """A model, from the attributes that a search stores with its trial."""
    model, score = attrs.get("model", {}), dict(attrs.get("score", {}))
    seconds, ended = score.pop("seconds", 0.0), score.pop("ended", 0.0)
    return Model(
        index=attrs["index"],
        state=state,
        lanes=model.get("lanes", ""),
        mix=tuple(tuple(lanes) for lanes in model.get("mix", ())),
        origin=model.get("origin", ""),
        score=Score(**score) if score else None,
        accuracies=tuple(accuracies),
        seconds=seconds,
        ended=ended if state != "running" else 0.0,
        reason=attrs.get("reason", ""),
    )

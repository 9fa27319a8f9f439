"""The settings of a search, and which of them determine its results."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from mlcn_jax.config import default_config
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LANE_KINDS, PUBLISHED_KINDS

METHODS = ("random", "evolution", "halving", "tpe", "nsgaii")
COSTS = ("exact", "published")
_FREE_ON_RESUME = {"num_models", "max_training_seconds", "storage", "heartbeat_seconds"}
IMAGES, VALIDATION, PROFILES = "training_images_sha256", "validation_images_sha256", "device_profiles_sha256"
ROUNDING = "parallel.exchange_dtype"
NOT_NOTED = (IMAGES, VALIDATION, PROFILES, ROUNDING)  # by searches that are older than these facts
BEFORE = {"search.costs": "exact"}  # what searches did that are older than these settings


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """What to search for and how.

    Attributes:
      devices: what a training step may use on each device, such as `memory=12GiB flops=0.5x*8`: limits, and the
        number of such devices; x is times the FLOPs of `baseline`; or `profile=gpu.json seconds=0.05`. Without a
        profile, memory counts no work space, with which a step takes two to five times as much.
      costs: what lanes take of it: `exact`, counted from the lanes or measured by profiles, or `published`, by the
        thesis's formulas.
      kinds: lane kinds to choose from, separated by commas.
      max_width: largest width of a lane.
      max_depth: largest depth of a lane.
      baseline: lanes of the model to compare with; the unit x of `devices` is its FLOPs.
      tolerance: share of a device's scarcer resource that may stay unused before its lanes are drawn again; 1 draws
        once, as the thesis does.
      method: random, evolution, halving (asynchronous, of random models), tpe or nsgaii.
      num_models: models to train.
      num_epochs: epochs each model is trained for.
      num_repeats: trainings of each model; its accuracy is their geometric mean.
      num_images: images of the training set to use, including the validation images; 0 uses all.
      min_epochs: with halving, epochs before models are first compared.
      reduction_factor: with halving, one model in this many goes on, for this many times the epochs.
      max_training_seconds: training time of all models together after which no new one is started; 0 is no limit.
      seed: seed of the mixes that are drawn.
      name: name of the search in its storage.
      storage: database, such as postgresql://user:password@host/database; empty is a file in the workdir.
      heartbeat_seconds: a worker that sends no heartbeat for twice this time counts as dead.
    """

    devices: str = "flops=0.25x*4"
    costs: str = "exact"
    kinds: str = "mlcn1,mlcn2"
    max_width: int = 3
    max_depth: int = 3
    baseline: str = "mlcn2:w2d2*4"
    tolerance: float = 0.05
    method: str = "random"
    num_models: int = 8
    num_epochs: int = 4
    num_repeats: int = 1
    num_images: int = 0
    min_epochs: int = 1
    reduction_factor: int = 3
    max_training_seconds: float = 0.0
    seed: int = 0
    name: str = "nas"
    storage: str = ""
    heartbeat_seconds: int = 20

    def __post_init__(self):
        for field, least in (
            *(("max_width", 1), ("max_depth", 1), ("num_models", 1), ("num_epochs", 1), ("num_repeats", 1)),
            *(("num_images", 0), ("min_epochs", 1), ("reduction_factor", 2), ("max_training_seconds", 0), ("seed", 0)),
            ("heartbeat_seconds", 1),
        ):
            value = getattr(self, field)
            if not least <= value < math.inf:  # which nan is not either
                raise InputError(f"search.{field} is {value}; it must be {least} or more, and finite")
        if not 0 < self.tolerance <= 1:
            raise InputError(f"search.tolerance is {self.tolerance}; it must be above 0, and at most 1")
        if self.method not in METHODS:
            raise InputError(f"search.method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.costs not in COSTS:
            raise InputError(f"search.costs is {self.costs!r}; it must be one of {', '.join(COSTS)}")
        if self.method == "halving" and self.min_epochs >= self.num_epochs:
            raise InputError(
                f"search.method is 'halving' with min_epochs={self.min_epochs} and num_epochs={self.num_epochs}, where "
                "no model is ever compared before its last epoch: give fewer min_epochs, or method 'random'"
            )
        unknown = [kind for kind in self.lane_kinds if kind not in LANE_KINDS]
        if unknown or not self.lane_kinds:
            raise InputError(f"search.kinds is {self.kinds!r}; it must be one or more of {', '.join(LANE_KINDS)}")
        try:
            baseline = parse_lanes(self.baseline)
        except InputError as error:
            raise InputError(f"search.baseline: {error}") from error
        others = {*self.lane_kinds, *(group.spec.kind for group in baseline)} - {*PUBLISHED_KINDS}
        if self.costs == "published" and others:
            raise InputError(
                f"search.costs is 'published', whose formulas are for the kinds {' and '.join(PUBLISHED_KINDS)}, but "
                f"search.kinds is {self.kinds!r} and search.baseline {self.baseline!r}: give only those kinds, or "
                "search.costs=exact"
            )

    @property
    def scored_epochs(self) -> tuple[int, ...]:
        """Epochs after which models are compared: the last, and the earlier ones after which `halving` stops some."""
        rungs = [self.min_epochs * self.reduction_factor**k for k in range(self.num_epochs)]
        earlier = [epoch for epoch in rungs if epoch < self.num_epochs] if self.method == "halving" else []
        return (*earlier, self.num_epochs)

    @property
    def lane_kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind.strip() for kind in self.kinds.split(",") if kind.strip()))


def default_search() -> ConfigDict:
    """All fields of a run and of a search with their defaults; the searches in `configs/` start from them."""
    config = default_config()
    config.search = ConfigDict(dataclasses.asdict(SearchSettings()))
    return config


def facts_of(settings: SearchSettings) -> dict[str, Any]:
    """The settings that determine the results, by their full names (`search.NAME`)."""
    values = dataclasses.asdict(settings)
    return {f"search.{name}": value for name, value in values.items() if name not in _FREE_ON_RESUME}

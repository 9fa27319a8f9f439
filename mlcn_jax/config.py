"""The configuration of a run: checked, stored in the workdir, and compared with what is stored there."""

import dataclasses
import difflib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlcn_jax import data
from mlcn_jax.errors import InputError
from mlcn_jax.model import ModelSpec
from mlcn_jax.partition import PARTITIONERS

OPTIMIZERS = ("adam", "adamw")
PLANS = ("mesh", "stacks", "auto")

# What may differ when a run is resumed; anything else would make it another run.
_FREE_ON_RESUME = {
    "data.dir",
    "data.cache_dir",
    "train.num_epochs",
    "train.num_steps",
    "train.checkpoint_every",
    "train.log_every",
    "train.test_every_epoch",
    "parallel.plan",
    "parallel.data",
    "parallel.lane",
    "parallel.partitioner",
    "parallel.profile",
    "parallel.platforms",
    "parallel.processes",
    "parallel.process",
    "parallel.coordinator",
    "parallel.timeout_seconds",
    "profile",
}

# Fields of `model` that what an older version stored lacks, with what it stands for there.
ADDED_TO_MODEL: dict[str, Any] = {"margin_loss": "joint", "signed_pixels": False}


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Which images, and what is done to them; `configs/default.py` describes each field."""

    name: str
    dir: str
    cache_dir: str
    label_kind: str
    image_size: int
    test_fraction: float
    validation_fraction: float
    max_shift: int
    flip: bool

    def __post_init__(self):
        _check(self.max_shift >= 0, "data.max_shift", self.max_shift, "0 pixels or more")

    def shape(self) -> tuple[tuple[int, int, int], int]:
        """Height, width and channels of the images, and the number of classes."""
        if self.name in data.SHAPES:
            image_shape, num_classes = data.SHAPES[self.name]
            return image_shape, 20 if self.name == "cifar100" and self.label_kind == "coarse" else num_classes
        dataset = self.load()
        return dataset.train.images.shape[1:], len(dataset.class_names)

    def load(self) -> data.Dataset:
        """Loads the images; raises InputError where they cannot be used."""
        return data.load(
            self.name,
            directory=self.dir,
            cache_dir=self.cache_dir,
            label_kind=self.label_kind,
            image_size=self.image_size,
            test_fraction=self.test_fraction,
        )


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train; `configs/default.py` describes each field."""

    batch_size: int
    num_epochs: int
    num_steps: int
    optimizer: str
    learning_rate: float
    lr_decay: float
    warmup_epochs: float
    weight_decay: float
    clip_norm: float
    reconstruction_weight: float
    seed: int
    checkpoint_every: int
    log_every: int
    test_every_epoch: bool

    def __post_init__(self):
        for field in ("batch_size", "num_epochs", "log_every"):
            _check(getattr(self, field) >= 1, f"train.{field}", getattr(self, field), "1 or more")
        for field in (
            *("num_steps", "checkpoint_every", "warmup_epochs", "weight_decay", "clip_norm"),
            *("reconstruction_weight", "seed"),
        ):
            _check(getattr(self, field) >= 0, f"train.{field}", getattr(self, field), "0 or more")
        _check(self.seed < 2**32, "train.seed", self.seed, "below 2**32")
        _check(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "above 0")
        _check(0 < self.lr_decay <= 1, "train.lr_decay", self.lr_decay, "in (0, 1]")
        _check(self.optimizer in OPTIMIZERS, "train.optimizer", self.optimizer, " or ".join(OPTIMIZERS))


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """Where to train; `configs/default.py` describes each field. Decides nothing of what is computed."""

    plan: str
    data: int
    lane: int
    partitioner: str
    profile: str
    platforms: str
    processes: int
    process: int
    coordinator: str
    timeout_seconds: int

    def __post_init__(self):
        for field, least in (("data", 1), ("lane", 1), ("processes", 0), ("process", -1), ("timeout_seconds", 1)):
            _check(getattr(self, field) >= least, f"parallel.{field}", getattr(self, field), f"{least} or more")
        _check(self.plan in PLANS, "parallel.plan", self.plan, " or ".join(PLANS))
        _check(self.partitioner in PARTITIONERS, "parallel.partitioner", self.partitioner, " or ".join(PARTITIONERS))
        if self.plan != "mesh":
            _check(self.data == 1, "parallel.data", self.data, f"1 with parallel.plan={self.plan}")
        if self.plan == "auto":
            _check(self.lane == 1, "parallel.lane", self.lane, "1 with parallel.plan=auto, which finds it")
        if self.platforms:
            good = self.plan == "stacks" and self.processes == 1
            _check(good, "parallel.platforms", self.platforms, "empty but with parallel.plan=stacks in one process")
        if self.process >= 0:
            _check(self.process < self.processes, "parallel.process", self.process, f"below {self.processes}")


def check_fields(section: str, cls: type, values: Mapping[str, Any]) -> None:
    """Raises InputError where `values` are not all fields of `cls`, each of its type, that data does not decide."""
    types = {f.name: f.type for f in dataclasses.fields(cls) if f.name not in ("image_shape", "num_classes")}
    for name in sorted(set(types) ^ set(values)):
        what = "is missing" if name in types else "is no field"
        file = "nas_quickstart" if section == "search" else "default"
        raise InputError(f"{section}.{name} {what}; configs/{file}.py lists all fields")
    for name, value in values.items():
        expected = types[name]
        if expected is float:
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        elif expected in (int, str, bool):
            good = type(value) is expected
        else:
            good = all(type(item) is int for item in value)
        expected_name = getattr(expected, "__name__", "numbers")
        _check(good, f"{section}.{name}", value, f"of type {expected_name}")


def _check(good: bool, field: str, value: Any, expected: str) -> None:
    if not good:
        raise InputError(f"{field} is {value!r}; it must be {expected}")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
      data, train, parallel: settings of that part.
      model: the fields of `model.ModelSpec` that the data does not decide.
      init_from: workdir whose best checkpoint gives the start values; empty for random ones.
      profile: whether to write a profiler trace of a few steps.
    """

    data: DataSettings
    model: Mapping[str, Any]
    train: TrainSettings
    parallel: ParallelSettings
    init_from: str
    profile: bool

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Reads the nested dictionary of a config file or of `config.json`.

        Raises:
          InputError: a field is unknown, missing or out of range.
        """
        try:
            model = ADDED_TO_MODEL | dict(values["model"])
            model["decoder"] = tuple(model["decoder"])
            for section, cls_of, given in (
                ("data", DataSettings, values["data"]),
                ("model", ModelSpec, model),
                ("train", TrainSettings, values["train"]),
                ("parallel", ParallelSettings, values["parallel"]),
            ):
                check_fields(section, cls_of, given)
            return cls(
                data=DataSettings(**values["data"]),
                model=model,
                train=TrainSettings(**values["train"]),
                parallel=ParallelSettings(**values["parallel"]),
                init_from=values["init_from"],
                profile=values["profile"],
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the configuration does not have the form of configs/default.py: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The nested dictionary that `from_dict` reads, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def replace(self, changes: Mapping[str, Any]) -> "RunConfig":
        """This configuration with some fields changed, such as `{"train.seed": 1}`; text is read as the field's type.

        Raises:
          InputError: a field does not exist, or a value does not fit it.
        """
        values = self.to_dict()
        for field, value in changes.items():
            *parents, last = field.split(".")
            part: Any = values
            for name in parents:
                part = part.get(name) if isinstance(part, dict) else None
            if not isinstance(part, dict) or last not in part or isinstance(part[last], dict):
                nearest = difflib.get_close_matches(field, flat(values), n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise InputError(f"there is no field {field!r} in configs/default.py{hint}")
            part[last] = _read_as(part[last], value, field) if isinstance(value, str) else value
        return RunConfig.from_dict(values)

    def flat_as_before(self) -> dict[str, Any]:
        """All fields by their full names, without those that an older version had not and that do what it did."""
        added = {f"model.{name}" for name, value in ADDED_TO_MODEL.items() if self.model[name] == value}
        return {name: value for name, value in flat(self.to_dict()).items() if name not in added}

    def hash(self) -> str:
        """SHA-256 of all that decides the result, 16 hexadecimal digits."""
        free = _FREE_ON_RESUME - {"train.num_epochs", "train.num_steps"}
        kept = {k: v for k, v in self.flat_as_before().items() if k not in free}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def model_spec(self, image_shape: tuple[int, int, int], num_classes: int) -> ModelSpec:
        """The model for images of that shape and that many classes."""
        return ModelSpec(image_shape=image_shape, num_classes=num_classes, **self.model)

    def check_resumable(self, stored: "RunConfig", workdir: Path) -> None:
        """Raises InputError naming every field in which this run and the one stored in `workdir` differ."""
        mine, theirs = flat(self.to_dict()), flat(stored.to_dict())
        free = _FREE_ON_RESUME
        if self.train.optimizer == "adamw":  # its rate depends on where the run ends
            free = free - {"train.num_epochs"}
        rows = [
            f"  {field}: {theirs[field]!r} there, {mine[field]!r} now"
            for field in mine
            if field not in free and mine[field] != theirs[field]
        ]
        if rows:
            raise InputError(
                f"{workdir} holds a run with another configuration:\n"
                + "\n".join(rows)
                + "\ngive the same values to resume it, or another --workdir (with --config.init_from="
                + f"{workdir} to start from its weights)"
            )


def _read_as(old: Any, text: str, field: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(old, list):
            return [int(item) for item in text.strip("()").split(",") if item.strip()]
        return type(old)(text)
    except (ValueError, KeyError):
        kind = "a list of int" if isinstance(old, list) else type(old).__name__
        raise InputError(f"{field}: {text!r} is not {kind}") from None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their full names, such as `train.seed`."""
    result = {}
    for key, value in values.items():
        result.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return result


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that the file is either the old one or the new one, whatever happens."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Reads JSON; raises InputError where the file cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): put it back from a copy, or use another workdir") from error


def read_stored(workdir: Path) -> RunConfig:
    """The configuration that a run stored in its workdir.

    Raises:
      InputError: there is none.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise InputError(f"{workdir} holds no run (no config.json): give the --workdir of one that was started")
    try:
        return RunConfig.from_dict(read_json(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error

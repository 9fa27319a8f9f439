"""The configuration of a run: checked, stored in the workdir, and compared with the one stored there."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlcn_jax.errors import InputError, did_you_mean, differences
from mlcn_jax.files import read_json
from mlcn_jax.nn.spec import MODELS, ModelSpec
from mlcn_jax.settings import DataSettings, ParallelSettings, RoundSettings, TrainSettings, check

# Fields that may differ when a run is resumed; a change to any other makes it a different run.
_FREE_ON_RESUME = {
    "data.dir",
    "data.cache_dir",
    "model.remat",
    "train.accumulation_steps",
    "train.num_epochs",
    "train.num_steps",
    "train.checkpoint_every",
    "train.log_every",
    "train.test_every_epoch",
    "train.score_test",
    "train.lanes_apart",
    "train.rounds.patience_seconds",
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

# Fields added after the first version: runs stored earlier lack them, and a run that leaves them at their defaults
# keeps the hash it had before.
_ADDED = (
    *("model.margin_loss", "model.signed_pixels", "model.label_smoothing", "model.ensemble_weight"),
    *("model.decoder_gradient", "model.norm_group", "data.reflect", "data.alternate_flips", "data.cutout"),
    *("data.augment_lanes", "train.momentum", "train.bias_learning_rate", "train.head_learning_rate"),
    *("train.whitening_epochs", "train.score_test", "train.image_sizes", "train.lookahead"),
    *("model.lane_weights", "model.lane_seeds", "data.split_seed", "train.lanes_apart"),
    *("train.teacher", "train.teacher_weight", "train.teacher_temperature"),
    *("model.remat", "train.accumulation_steps", "parallel.exchange_dtype"),
    *(f"train.rounds.{field.name}" for field in dataclasses.fields(RoundSettings)),
)


_FROM_DATA = ("image_shape", "num_classes")  # fields of ModelSpec that are set by the data
_DEFAULT_LANES = "mlcn2:w4*4"


def model_defaults() -> dict[str, Any]:
    """The fields of `ModelSpec` that a configuration has, with their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(ModelSpec) if f.name not in _FROM_DATA}
    return defaults | {"name": MODELS[0], "lanes": _DEFAULT_LANES}


def check_fields(section: str, cls: type, values: Mapping[str, Any]) -> None:
    """Raises InputError if one of `values` is not a field of `cls`, or has the wrong type."""
    types = {f.name: f.type for f in dataclasses.fields(cls) if f.name not in _FROM_DATA}
    for name, value in values.items():
        if name not in types:
            raise InputError(f"there is no field {section}.{name}{did_you_mean(name, types, f'{section}.')}")
        expected = types[name]
        if dataclasses.is_dataclass(expected):
            good = dataclasses.is_dataclass(value)
        elif expected is float:
            good = isinstance(value, int | float) and not isinstance(value, bool)
            check(not good or abs(value) <= sys.float_info.max, f"{section}.{name}", value, "finite")
        elif expected in (int, str, bool):
            good = type(value) is expected
        else:
            kinds = (int, float) if expected == tuple[float, ...] else (int,)
            good = isinstance(value, Iterable) and all(type(item) in kinds for item in value)
            check(good, f"{section}.{name}", value, "a list of numbers" if float in kinds else "a list of integers")
        expected_name = getattr(expected, "__name__", "")
        check(good, f"{section}.{name}", value, f"of type {expected_name}")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A complete run.

    Attributes:
      data, train, parallel: the settings of each part.
      model: the fields of `spec.ModelSpec` that are not set by the data.
      init_from: workdir, or packaged model such as digits, whose best checkpoint gives the initial weights; if empty,
        they are random.
      profile: whether to write a profiler trace of a few steps.
    """

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    model: Mapping[str, Any] = dataclasses.field(default_factory=model_defaults)
    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    parallel: ParallelSettings = dataclasses.field(default_factory=ParallelSettings)
    init_from: str = ""
    profile: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Reads the nested dictionary of a config file or of `config.json`; missing fields take their defaults.

        Raises:
          InputError: a field is unknown or out of range.
        """
        try:
            for name in values:
                if name not in _TOP:
                    raise InputError(f"there is no field {name}{did_you_mean(name, _TOP)}")
            sections: dict[str, Any] = {}
            for section, section_cls in SECTIONS.items():
                given = values.get(section, {})
                check(isinstance(given, Mapping | ConfigDict), section, given, "a group of fields")
                given = dict(given)
                if section == "model":
                    defaults = model_defaults()
                    lists = [name for name, value in defaults.items() if isinstance(value, tuple)]
                    given = defaults | given
                    given |= {name: tuple(given[name]) for name in lists if isinstance(given[name], Iterable)}
                if section == "train":
                    rounds = dict(given.get("rounds", {}))
                    check_fields("train.rounds", RoundSettings, rounds)
                    given["rounds"] = RoundSettings(**rounds)
                check_fields(section, section_cls, given)
                sections[section] = given if section == "model" else section_cls(**given)
            top = {name: values[name] for name in ("init_from", "profile") if name in values}
            for name, value in top.items():
                kind = bool if name == "profile" else str
                check(isinstance(value, kind), name, value, f"of type {kind.__name__}")
            return cls(**sections, **top)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the configuration must be nested as data, model, train, parallel: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The nested dictionary that `from_dict` reads, ready for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def replace(self, changes: Mapping[str, Any]) -> "RunConfig":
        """This configuration with some fields changed, such as `{"train.seed": 1}`; text is read as the field's type.

        Raises:
          InputError: a field does not exist, or a value is not valid for it.
        """
        values = self.to_dict()
        for field, value in changes.items():
            *parents, last = field.split(".")
            part: Any = values
            for name in parents:
                part = part.get(name) if isinstance(part, dict) else None
            if not isinstance(part, dict) or last not in part or isinstance(part[last], dict):
                raise InputError(f"there is no field {field}{did_you_mean(field, flat(values))}")
            part[last] = _read_as(part[last], value, field) if isinstance(value, str) else value
        return RunConfig.from_dict(values)

    def without_rounds(self) -> "RunConfig":
        """This configuration for training without rounds: `train.rounds` has its defaults."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, rounds=RoundSettings()))

    def flat_as_before(self) -> dict[str, Any]:
        """All fields by their full names, without those added later that are left at their defaults."""
        defaults = flat(RunConfig().to_dict())
        values = flat(self.to_dict())
        return {name: value for name, value in values.items() if name not in _ADDED or value != defaults[name]}

    def fixed(self) -> dict[str, Any]:
        """The fields that affect the result, by their full names, without newer ones left at their defaults."""
        free = _FREE_ON_RESUME - {"train.num_epochs", "train.num_steps"}
        return {name: value for name, value in self.flat_as_before().items() if name not in free}

    def hash(self) -> str:
        """SHA-256 of everything that affects the result, 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.fixed(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def split_seed(self) -> int:
        """The seed that selects the validation images."""
        return self.train.seed if self.data.split_seed < 0 else self.data.split_seed

    @property
    def depends_on_length(self) -> bool:
        """Whether steps depend on where the run ends: by the learning rate, Lookahead's weight, or sizes of images."""
        return self.train.optimizer != "adam" or bool(self.train.lookahead or self.train.image_sizes)

    def model_spec(self, image_shape: tuple[int, int, int], num_classes: int) -> ModelSpec:
        """The model for images of this shape and this many classes."""
        return ModelSpec(image_shape=image_shape, num_classes=num_classes, **self.model)

    def check_resumable(self, stored: "RunConfig", workdir: Path) -> None:
        """Raises InputError naming every field in which this run and the one stored in `workdir` differ."""
        mine, theirs = flat(self.to_dict()), flat(stored.to_dict())
        free = _FREE_ON_RESUME
        if self.depends_on_length:
            free = free - {"train.num_epochs"}
        if rows := differences(theirs, mine, [field for field in mine if field not in free]):
            raise InputError(
                f"{workdir} holds a run with a different configuration:\n"
                + "\n".join(rows)
                + "\nuse the same values to resume it, or another --workdir (with --config.init_from="
                + f"{workdir} to start from its weights)"
            )


# The class of each section; its docstring says what each field means.
SECTIONS: dict[str, type] = {
    "data": DataSettings,
    "model": ModelSpec,
    "train": TrainSettings,
    "parallel": ParallelSettings,
}
_TOP = (*SECTIONS, "init_from", "profile", "search")  # fields of a configuration; `search` reads its own


def default_config() -> ConfigDict:
    """All fields of a run at their defaults, for a file in `configs/` to start from."""
    values = RunConfig().to_dict()
    values["model"] |= {name: tuple(value) for name, value in values["model"].items() if isinstance(value, list)}
    return ConfigDict(values)


def _read_as(old: Any, text: str, field: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        if isinstance(old, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(old, list):
            return [_number(item) for item in text.strip("()").split(",") if item.strip()]
        return type(old)(text)
    except (ValueError, KeyError):
        kind = "a list of numbers" if isinstance(old, list) else type(old).__name__
        raise InputError(f"{field}: {text!r} is not {kind}") from None


def _number(text: str) -> int | float:
    return int(text) if text.strip().lstrip("-").isdigit() else float(text)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their full names, such as `train.seed`."""
    result = {}
    for key, value in values.items():
        result.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return result


def read_stored(workdir: Path) -> RunConfig:
    """The configuration stored in a run's workdir.

    Raises:
      InputError: there is none.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise InputError(f"{workdir} holds no run (no config.json): give the --workdir of an existing run")
    stored = read_json(path)
    parallel = stored.get("parallel") if isinstance(stored, dict) else None
    if isinstance(parallel, dict) and parallel.get("processes") in (0, 1):  # older runs could have what does nothing
        stored["parallel"] = {k: v for k, v in parallel.items() if k not in ("process", "coordinator")}
    try:
        config = RunConfig.from_dict(stored)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return config.replace(unused_fields(config))  # likewise


def unused_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of `data` that do nothing with its dataset, and are refused, with the values that they must have."""
    name = config.data.name
    unused = {"data.dir": ""} if name == "digits" else {}
    unused |= {} if name == "cifar100" else {"data.label_kind": DataSettings.label_kind}
    return unused | ({} if name == "folder" else {"data.test_fraction": DataSettings.test_fraction})

"""The configuration of a run: checked, stored in the workdir, and compared with the one stored there."""

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import read_json
from mlcn_jax.nn.model import MODELS, ModelSpec
from mlcn_jax.placement.partition import PARTITIONERS

OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
PLANS = ("mesh", "stacks", "auto")

# Fields that may differ when a run is resumed; a change to any other makes it a different run.
_FREE_ON_RESUME = {
    "data.dir",
    "data.cache_dir",
    "train.num_epochs",
    "train.num_steps",
    "train.checkpoint_every",
    "train.log_every",
    "train.test_every_epoch",
    "train.score_test",
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
    *("train.whitening_epochs", "train.score_test", "train.image_sizes"),
)


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Which images to use, and how to prepare them.

    Attributes:
      name: digits, mnist, fashion_mnist, cifar10, cifar100 or folder.
      dir: folder with the files (archives or unpacked, or one folder per class); if empty, they are downloaded.
      cache_dir: where downloads are kept; if empty, $MLCN_JAX_CACHE or ~/.cache/mlcn_jax.
      label_kind: labels of cifar100: fine (100 classes) or coarse (20).
      image_size: height and width in pixels to which the images of a folder are resized; 0 means 32.
      test_fraction: fraction of a folder's images held out as the test set, if it has none.
      validation_fraction: fraction of the training images held out to choose the best checkpoint.
      max_shift: augmentation: random shifts of up to this many pixels.
      flip: augmentation: random horizontal flips.
      reflect: augmentation: shifts fill with the reflected image instead of zeros.
      alternate_flips: augmentation: every image is mirrored in every second epoch.
      cutout: augmentation: height and width in pixels of a square set to the image's mean; 0 for none.
      augment_lanes: augmentation: each lane sees every image in a way of its own (lanes that classify alone).
    """

    name: str = "digits"
    dir: str = ""
    cache_dir: str = ""
    label_kind: str = "fine"
    image_size: int = 0
    test_fraction: float = 0.2
    validation_fraction: float = 0.0
    max_shift: int = 0
    flip: bool = False
    reflect: bool = False
    alternate_flips: bool = False
    cutout: int = 0
    augment_lanes: bool = False

    def __post_init__(self):
        for field in ("max_shift", "cutout"):
            _check(getattr(self, field) >= 0, f"data.{field}", getattr(self, field), "0 pixels or more")
        if self.flip:
            _check(not self.alternate_flips, "data.alternate_flips", True, "false with data.flip, which also mirrors")

    def augmentation(self) -> Augmentation:
        """The changes of images that a training step makes."""
        return Augmentation(self.max_shift, self.reflect, self.flip, self.cutout, self.augment_lanes)

    def shape(self) -> tuple[tuple[int, int, int], int]:
        """Height, width and channels of the images, and the number of classes."""
        if self.name in datasets.SHAPES:
            image_shape, num_classes = datasets.SHAPES[self.name]
            return image_shape, 20 if self.name == "cifar100" and self.label_kind == "coarse" else num_classes
        dataset = self.load()
        return dataset.train.images.shape[1:], len(dataset.class_names)

    def load(self) -> datasets.Dataset:
        """Loads the images; raises InputError if they cannot be used."""
        return datasets.load(
            self.name,
            directory=self.dir,
            cache_dir=self.cache_dir,
            label_kind=self.label_kind,
            image_size=self.image_size,
            test_fraction=self.test_fraction,
        )


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
      batch_size: images per training step.
      num_epochs: passes over the training images.
      num_steps: ends the run after this many steps, whatever num_epochs is; 0 means no limit.
      optimizer: adam (rate times lr_decay after each epoch), adamw (warm-up, then cosine decay to zero), or, for
        residual lanes, sgd or muon (warm-up, then linear decay to zero).
      learning_rate: initial rate of adam, peak rate of adamw; for sgd and muon that of the convolutions.
      lr_decay: factor applied to adam's learning rate after each epoch.
      warmup_epochs: epochs over which the learning rate rises to its peak (not adam).
      weight_decay: weight decay of adamw; of sgd and muon the share lost in a step, whatever the rate.
      momentum: momentum of sgd and muon.
      bias_learning_rate: peak rate of the normalisation's biases under sgd and muon.
      head_learning_rate: peak rate of the linear head under sgd and muon.
      whitening_epochs: epochs over which the whitening's bias is trained under sgd and muon.
      clip_norm: largest global norm of the gradient; 0 turns clipping off.
      reconstruction_weight: weight of the mean squared error over pixels, relative to the margin loss.
      seed: seeds the initial values, image order, augmentation, lane dropout and validation split.
      checkpoint_every: steps between checkpoints; 0 saves one every epoch.
      image_sizes: sizes at which lanes that classify alone see training images, such as 20:0.35,28:0.7 for 20 pixels
        in the first 35 % of the steps, 28 until 70 %, then the full size; empty for the full size throughout.
      log_every: steps between reports of the metrics.
      test_every_epoch: also scores the test set after each epoch, for the record only.
      score_test: whether the test set is scored at the end; if false, the run never reads it.
    """

    batch_size: int = 100
    num_epochs: int = 20
    num_steps: int = 0
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    lr_decay: float = 0.9
    warmup_epochs: float = 1.0
    weight_decay: float = 1e-4
    momentum: float = 0.85
    bias_learning_rate: float = 26.0
    head_learning_rate: float = 0.43
    whitening_epochs: float = 3.0
    clip_norm: float = 0.0
    reconstruction_weight: float = 0.392
    seed: int = 0
    checkpoint_every: int = 0
    image_sizes: str = ""
    log_every: int = 50
    test_every_epoch: bool = False
    score_test: bool = True

    def __post_init__(self):
        for field in ("batch_size", "num_epochs", "log_every"):
            _check(getattr(self, field) >= 1, f"train.{field}", getattr(self, field), "1 or more")
        for field in (
            *("num_steps", "checkpoint_every", "warmup_epochs", "weight_decay", "clip_norm"),
            *("reconstruction_weight", "seed", "bias_learning_rate", "head_learning_rate", "whitening_epochs"),
        ):
            _check(getattr(self, field) >= 0, f"train.{field}", getattr(self, field), "0 or more")
        _check(self.seed < 2**32, "train.seed", self.seed, "below 2**32")
        _check(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "above 0")
        _check(0 <= self.momentum < 1, "train.momentum", self.momentum, "in [0, 1)")
        self.sizes()
        if self.test_every_epoch:
            _check(self.score_test, "train.score_test", False, "true with train.test_every_epoch")
        _check(0 < self.lr_decay <= 1, "train.lr_decay", self.lr_decay, "in (0, 1]")
        _check(self.optimizer in OPTIMIZERS, "train.optimizer", self.optimizer, " or ".join(OPTIMIZERS))

    def sizes(self) -> tuple[tuple[float, int], ...]:
        """`image_sizes` as pairs: the share of the steps until which a size holds, and the size; 0 is the full one."""
        found = []
        for entry in self.image_sizes.split(",") if self.image_sizes else []:
            match = re.fullmatch(r" *([1-9][0-9]{0,3}):(0?\.[0-9]+) *", entry)
            _check(match is not None, "train.image_sizes", self.image_sizes, "a list such as 20:0.35,28:0.7")
            found.append((float(match[2]), int(match[1])))  # type: ignore[index]
        _check(found == sorted(found), "train.image_sizes", self.image_sizes, "in the order of the steps")
        return (*found, (1.0, 0))


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """Where to train; does not affect what is computed.

    Attributes:
      plan: mesh, stacks (each device has its own lanes), or auto (the fastest according to the device profiles).
      data: devices over which each batch is split.
      lane: devices over which the lanes are split; data * lane devices are used in all.
      partitioner: places lanes under stacks: greedy, karmarkar_karp, exact, random, round_robin or greedy_published.
      profile: files written by the command `profile`, separated by commas; if empty, all devices count as equal.
      platforms: kinds of devices in one process, such as gpu,cpu (stacks only); if empty, jax's default.
      processes: processes of the run, all started here; 0 takes the number from the cluster's environment.
      process: number of the process to start here, if the others are started on other machines; -1 starts all.
      coordinator: HOST:PORT on the machine of process 0, if the run uses several machines.
      timeout_seconds: how long to wait for a process to join, or to be heard from again.
    """

    plan: str = "mesh"
    data: int = 1
    lane: int = 1
    partitioner: str = "greedy"
    profile: str = ""
    platforms: str = ""
    processes: int = 1
    process: int = -1
    coordinator: str = ""
    timeout_seconds: int = 60

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
            _check(good, "parallel.platforms", self.platforms, "empty unless parallel.plan=stacks in one process")
        if self.process >= 0:
            _check(self.process < self.processes, "parallel.process", self.process, f"below {self.processes}")


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
        if expected is float:
            good = isinstance(value, int | float) and not isinstance(value, bool)
            _check(not good or math.isfinite(value), f"{section}.{name}", value, "finite")
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
    """A complete run.

    Attributes:
      data, train, parallel: the settings of each part.
      model: the fields of `model.ModelSpec` that are not set by the data.
      init_from: workdir whose best checkpoint gives the initial weights; if empty, they are random.
      profile: whether to write a profiler trace of a few steps.
    """

    data: DataSettings = DataSettings()
    model: Mapping[str, Any] = dataclasses.field(default_factory=model_defaults)
    train: TrainSettings = TrainSettings()
    parallel: ParallelSettings = ParallelSettings()
    init_from: str = ""
    profile: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Reads the nested dictionary of a config file or of `config.json`; missing fields take their defaults.

        Raises:
          InputError: a field is unknown or out of range.
        """
        try:
            sections: dict[str, Any] = {}
            for section, section_cls in SECTIONS.items():
                given = dict(values.get(section, {}))
                if section == "model":
                    given = model_defaults() | given
                    given["decoder"] = tuple(given["decoder"])
                check_fields(section, section_cls, given)
                sections[section] = given if section == "model" else section_cls(**given)
            top = {name: values[name] for name in ("init_from", "profile") if name in values}
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

    def flat_as_before(self) -> dict[str, Any]:
        """All fields by their full names, without newer ones left at the older version's behaviour."""
        defaults = flat(RunConfig().to_dict())
        values = flat(self.to_dict())
        return {name: value for name, value in values.items() if name not in _ADDED or value != defaults[name]}

    def hash(self) -> str:
        """SHA-256 of everything that affects the result, 16 hexadecimal digits."""
        free = _FREE_ON_RESUME - {"train.num_epochs", "train.num_steps"}
        kept = {k: v for k, v in self.flat_as_before().items() if k not in free}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def model_spec(self, image_shape: tuple[int, int, int], num_classes: int) -> ModelSpec:
        """The model for images of this shape and this many classes."""
        return ModelSpec(image_shape=image_shape, num_classes=num_classes, **self.model)

    def check_resumable(self, stored: "RunConfig", workdir: Path) -> None:
        """Raises InputError naming every field in which this run and the one stored in `workdir` differ."""
        mine, theirs = flat(self.to_dict()), flat(stored.to_dict())
        free = _FREE_ON_RESUME
        if self.train.optimizer != "adam":  # the learning rate depends on where the run ends
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


def default_config() -> ConfigDict:
    """All fields of a run at their defaults, for a file in `configs/` to start from."""
    values = RunConfig().to_dict()
    values["model"]["decoder"] = tuple(values["model"]["decoder"])
    return ConfigDict(values)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the closest known name, if any."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


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


def read_stored(workdir: Path) -> RunConfig:
    """The configuration stored in a run's workdir.

    Raises:
      InputError: there is none.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise InputError(f"{workdir} holds no run (no config.json): give the --workdir of an existing run")
    stored = read_json(path)
    try:
        return RunConfig.from_dict(stored)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error

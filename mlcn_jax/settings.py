"""The settings of a run other than the model's: data, training and placement, with their defaults and meanings."""

import dataclasses
import re
from typing import Any

from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Augmentation
from mlcn_jax.errors import InputError
from mlcn_jax.placement.partition import PARTITIONERS

OPTIMIZERS = ("adam", "adamw", "sgd", "muon")
PLANS = ("mesh", "stacks", "auto")
EXCHANGE_DTYPES = ("float32", "bfloat16")


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
      split_seed: selects the validation images; -1 takes train.seed.
      max_shift: augmentation: random shifts of up to this many pixels.
      flip: augmentation: random horizontal flips.
      reflect: augmentation: shifts fill with the reflected image instead of zeros.
      alternate_flips: augmentation: every image is mirrored in every second epoch.
      cutout: augmentation: height and width in pixels of a square set to the image's mean; 0 for none.
      augment_lanes: augmentation: each lane augments every image differently (all lanes must be resnet); with flip or
        alternate_flips, every second lane, or with model.lane_seeds those of odd seeds, sees it mirrored.
    """

    name: str = "digits"
    dir: str = ""
    cache_dir: str = ""
    label_kind: str = datasets.LABEL_KINDS[0]
    image_size: int = 0
    test_fraction: float = datasets.TEST_FRACTION
    validation_fraction: float = 0.0
    split_seed: int = -1
    max_shift: int = 0
    flip: bool = False
    reflect: bool = False
    alternate_flips: bool = False
    cutout: int = 0
    augment_lanes: bool = False

    def __post_init__(self):
        for field in ("max_shift", "cutout"):
            check(getattr(self, field) >= 0, f"data.{field}", getattr(self, field), "0 pixels or more")
            check(getattr(self, field) <= 10**6, f"data.{field}", getattr(self, field), "at most 1000000 pixels")
        check(-1 <= self.split_seed < 2**32, "data.split_seed", self.split_seed, "-1 or more, and below 2**32")
        if self.flip:
            check(not self.alternate_flips, "data.alternate_flips", True, "false with data.flip, which also mirrors")

    @property
    def mirrors(self) -> bool:
        """Whether images may be mirrored: training mirrors them."""
        return self.flip or self.alternate_flips

    def augmentation(self) -> Augmentation:
        """The changes of images that a training step makes."""
        mirror_lanes = self.augment_lanes and self.mirrors
        moves = (self.max_shift, self.reflect and self.max_shift > 0, self.flip, self.cutout)
        return Augmentation(*moves, per_lane=self.augment_lanes, mirror_lanes=mirror_lanes)

    def shape(self) -> tuple[tuple[int, int, int], int]:
        """Height, width and channels of the images, and the number of classes; InputError as from `load`."""
        if self.name in datasets.SHAPES:
            datasets.check_settings(
                self.name, label_kind=self.label_kind, image_size=self.image_size, test_fraction=self.test_fraction
            )
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
class RoundSettings:
    """Local rounds: each worker takes some steps on its own, then an outer optimizer step combines their changes.

    Attributes:
      steps: training steps that a worker takes in a round; 0 trains without rounds.
      workers: number of workers; each batch is split among them.
      learning_rate: learning rate of the outer step, SGD with Nesterov momentum on the workers' mean change.
      momentum: momentum of the outer step.
      bits: bits per parameter change sent: 8, with error feedback, or 32.
      quorum: minimum number of workers needed to finish a round; 0 means more than half.
      patience_seconds: how long a round waits for the other workers after the first one has answered.
    """

    steps: int = 0
    workers: int = 1
    learning_rate: float = 0.7
    momentum: float = 0.9
    bits: int = 8
    quorum: int = 0
    patience_seconds: float = 600.0

    def __post_init__(self):
        for field, least in (("steps", 0), ("workers", 1)):
            check(getattr(self, field) >= least, f"train.rounds.{field}", getattr(self, field), f"{least} or more")
        check(self.learning_rate > 0, "train.rounds.learning_rate", self.learning_rate, "above 0")
        check(0 <= self.momentum < 1, "train.rounds.momentum", self.momentum, "in [0, 1)")
        check(self.bits in (8, 32), "train.rounds.bits", self.bits, "8 or 32")
        check(0 <= self.quorum <= self.workers, "train.rounds.quorum", self.quorum, f"0 to {self.workers} (workers)")
        check(self.patience_seconds > 0, "train.rounds.patience_seconds", self.patience_seconds, "above 0")

    @property
    def enough(self) -> int:
        """The minimum number of workers needed to finish a round."""
        return self.quorum or self.workers // 2 + 1


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
      batch_size: images per training step.
      accumulation_steps: parts of the batch whose gradients are computed one after the other and averaged before the
        update, to save memory; the result is that of the whole batch, up to rounding.
      num_epochs: passes over the training images.
      num_steps: ends the run after this many steps, if num_epochs has not done so before; 0 means no limit.
      optimizer: adam (rate times lr_decay after each epoch), adamw (warm-up, then cosine decay to zero), or, for
        residual lanes, sgd or muon (warm-up, then linear decay to zero).
      learning_rate: initial rate of adam, peak rate of adamw; for sgd and muon that of the convolutions.
      lr_decay: factor applied to adam's learning rate after each epoch.
      warmup_epochs: epochs over which the learning rate rises to its peak (not adam); the first half of the run if
        it is not longer than that, so that the rate falls, too.
      weight_decay: weight decay of adamw; for sgd and muon, the fraction of a weight that a step at the peak rate adds
        to the momentum, of the head, of the normalisation's biases and, for sgd only, of the convolutions.
      momentum: momentum of the convolutions under sgd and muon; all else has 0.85.
      bias_learning_rate: peak rate of the normalisation's biases under sgd and muon.
      head_learning_rate: peak rate of the linear head under sgd and muon.
      whitening_epochs: epochs over which the rate of the whitening's bias falls to zero under sgd and muon.
      lookahead: weight of Lookahead's slow weights at the end of the run; slow and fast weights are averaged every
        5 steps; 0 turns Lookahead off.
      clip_norm: largest global norm of the gradient; 0 turns clipping off.
      reconstruction_weight: weight of the mean squared error over pixels, relative to the margin loss.
      seed: seeds the initial values, image order, augmentation, lane dropout and validation split (but see
        model.lane_seeds and data.split_seed).
      rounds: local rounds of workers that rarely communicate (`mlcn_jax rounds`).
      lanes_apart: refuses settings under which a lane's training depends on the other lanes; with validation images,
        each lane's result is then its own best checkpoint.
      checkpoint_every: steps between checkpoints; 0 saves one every epoch.
      teacher: workdirs of trained models, separated by commas, whose mean probabilities are learned in addition to
        the labels; empty for none.
      teacher_weight: weight of the teacher in the loss; the labels get the rest.
      teacher_temperature: softmax temperature for the teacher, and for resnet lanes that learn from it.
      image_sizes: sizes at which resnet lanes (all lanes must be resnet) see training images, such as 20:0.35,28:0.7
        for 20 pixels in the first 35 % of the steps, 28 until 70 %, then the full size; empty for the full size
        throughout.
      log_every: steps between reports of the metrics; every checkpoint reports those since the last report, too. In
        rounds, each round is reported instead.
      test_every_epoch: also scores the test set after each epoch, for the record only.
      score_test: whether the test set is scored at the end; if false, the run never classifies it.
    """

    batch_size: int = 100
    accumulation_steps: int = 1
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
    lookahead: float = 0.0
    clip_norm: float = 0.0
    reconstruction_weight: float = 0.392
    seed: int = 0
    checkpoint_every: int = 0
    teacher: str = ""
    teacher_weight: float = 0.9
    teacher_temperature: float = 4.0
    image_sizes: str = ""
    log_every: int = 50
    test_every_epoch: bool = False
    score_test: bool = True
    lanes_apart: bool = False
    rounds: RoundSettings = dataclasses.field(default_factory=RoundSettings)

    def __post_init__(self):
        for field in ("batch_size", "accumulation_steps", "num_epochs", "log_every"):
            check(getattr(self, field) >= 1, f"train.{field}", getattr(self, field), "1 or more")
        for field in (
            *("num_steps", "checkpoint_every", "warmup_epochs", "weight_decay", "clip_norm"),
            *("reconstruction_weight", "seed", "bias_learning_rate", "head_learning_rate", "whitening_epochs"),
        ):
            check(getattr(self, field) >= 0, f"train.{field}", getattr(self, field), "0 or more")
        check(self.seed < 2**32, "train.seed", self.seed, "below 2**32")
        check(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "above 0")
        check(0 <= self.lookahead < 1, "train.lookahead", self.lookahead, "in [0, 1)")
        check(0 <= self.momentum < 1, "train.momentum", self.momentum, "in [0, 1)")
        check(0 < self.teacher_weight <= 1, "train.teacher_weight", self.teacher_weight, "in (0, 1]")
        check(self.teacher_temperature > 0, "train.teacher_temperature", self.teacher_temperature, "above 0")
        self.sizes()
        if self.test_every_epoch:
            check(self.score_test, "train.score_test", False, "true with train.test_every_epoch")
        check(0 < self.lr_decay <= 1, "train.lr_decay", self.lr_decay, "in (0, 1]")
        check(self.optimizer in OPTIMIZERS, "train.optimizer", self.optimizer, " or ".join(OPTIMIZERS))

    @property
    def obstacle_to_rounds(self) -> str:
        """The setting that rules out local rounds, and what to use instead; empty if none does."""
        if self.teacher:
            return f"train.teacher={self.teacher!r} is not possible in rounds: leave it empty"
        if self.lookahead:
            return (
                f"train.lookahead={self.lookahead} is not possible in rounds: its slow weights belong to one worker "
                "and would undo the outer step, which replaces them: leave it at 0"
            )
        return ""

    @property
    def part_size(self) -> int:
        """The images that are computed at a time: those of a part of the batch."""
        return max(1, self.batch_size // self.accumulation_steps)

    def sizes(self) -> tuple[tuple[float, int], ...]:
        """`image_sizes` as pairs: the fraction of the steps up to which a size is used, and the size, 0 if full."""
        found = []
        for entry in self.image_sizes.split(",") if self.image_sizes else []:
            match = re.fullmatch(r" *([1-9][0-9]{0,3}):(0?\.[0-9]+) *", entry)
            check(match is not None, "train.image_sizes", self.image_sizes, "a list such as 20:0.35,28:0.7")
            found.append((float(match[2]), int(match[1])))  # type: ignore[index]
        check(found == sorted(found), "train.image_sizes", self.image_sizes, "in the order of the steps")
        return (*found, (1.0, 0))

    def image_size(self, done: float) -> int:
        """`Augmentation.size` of the step that follows this fraction of a run's steps."""
        return next((size for until, size in self.sizes() if done < until), 0)


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """Where to train; does not affect what is computed, except for the rounding of `exchange_dtype`.

    Attributes:
      plan: mesh, stacks (each device has its own lanes), or auto (the fastest according to the device profiles and
        the measured links between processes).
      data: devices over which each batch is split.
      lane: devices over which the lanes are split; data * lane devices are used in all.
      exchange_dtype: float32, or bfloat16 for half the bytes between devices: columns, activations of the decoder and
        gradients are rounded before they are sent. With any resnet lane, all columns are sent in float32.
      partitioner: places lanes under stacks: greedy, karmarkar_karp, exact, random, round_robin or greedy_published;
        auto tries all but random.
      profile: files written by the command `profile`, separated by commas; if empty, devices that differ are timed for
        a few seconds at the start.
      platforms: kinds of devices in one process, such as gpu,cpu (stacks only); if empty, jax's default.
      processes: processes of the run, all started here; 0 takes the number from the cluster's environment.
      process: number of the process to start here, if the others are started on other machines; -1 starts all.
      coordinator: HOST:PORT on the machine of process 0, if the run uses several machines.
      timeout_seconds: how long to wait for a process to join, or to respond.
    """

    plan: str = "mesh"
    data: int = 1
    lane: int = 1
    exchange_dtype: str = "float32"
    partitioner: str = "greedy"
    profile: str = ""
    platforms: str = ""
    processes: int = 1
    process: int = -1
    coordinator: str = ""
    timeout_seconds: int = 60

    def __post_init__(self):
        for field, least in (("data", 1), ("lane", 1), ("processes", 0), ("process", -1), ("timeout_seconds", 1)):
            check(getattr(self, field) >= least, f"parallel.{field}", getattr(self, field), f"{least} or more")
        check(self.plan in PLANS, "parallel.plan", self.plan, " or ".join(PLANS))
        known = " or ".join(EXCHANGE_DTYPES)
        check(self.exchange_dtype in EXCHANGE_DTYPES, "parallel.exchange_dtype", self.exchange_dtype, known)
        check(self.partitioner in PARTITIONERS, "parallel.partitioner", self.partitioner, " or ".join(PARTITIONERS))
        if self.plan != "mesh":
            check(self.data == 1, "parallel.data", self.data, f"1 with parallel.plan={self.plan}")
        if self.plan == "auto":
            check(self.lane == 1, "parallel.lane", self.lane, "1 with parallel.plan=auto, which chooses it")
        if self.platforms:
            good = self.plan == "stacks" and self.processes == 1
            check(good, "parallel.platforms", self.platforms, "empty unless parallel.plan=stacks in one process")
        if self.processes == 0:
            expected = "-1 with parallel.processes=0, which takes it from the cluster's environment"
            check(self.process < 0, "parallel.process", self.process, expected)
            expected = "empty with parallel.processes=0, which takes it from the cluster's environment"
            check(not self.coordinator, "parallel.coordinator", self.coordinator, expected)
        elif self.process >= 0:
            check(self.process < self.processes, "parallel.process", self.process, f"below {self.processes}")
        if self.processes == 1:
            several = "unless parallel.processes is that of all processes"
            check(self.process < 0, "parallel.process", self.process, f"-1 {several}")
            check(not self.coordinator, "parallel.coordinator", self.coordinator, f"empty {several}")


def check(good: bool, field: str, value: Any, expected: str) -> None:
    """Raises InputError that names a field, its value and what is expected, unless the value is good."""
    if not good:
        raise InputError(f"{field} is {value!r}; it must be {expected}")

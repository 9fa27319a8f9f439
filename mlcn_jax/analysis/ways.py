"""What to train, on which machines and terms, and a way to do it: what `market` compares."""

import dataclasses

from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import rental, simulate
from mlcn_jax.placement.catalog import Offer
from mlcn_jax.placement.interval import Interval
from mlcn_jax.placement.problem import Placement
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.placement.spot import Interruptions
from mlcn_jax.training import splits


@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be trained.

    Attributes:
      spec, batch_size: the model, and images per training step.
      steps: training steps of the whole run.
      save_every: steps between checkpoints, unless machines may be interrupted.
      scored_images: images classified at the end of the run and, if the test set is scored after each epoch, there.
      data_bytes: bytes of images that each machine needs first.
      apart: whether the lanes can be trained without each other.
      validation_images: images classified at every checkpoint; joined lanes get their weights from them.
      split_seed: seed that selects these images.
      messages: how columns and gradients are sent if machines train one run together.
      step_share: the mean FLOPs of a step by those of one at full image size (`train.image_sizes`).
      calibration_images: training images from which every checkpoint collects statistics of normalisation.
    """

    spec: ModelSpec
    batch_size: int
    steps: int
    save_every: int
    scored_images: int
    data_bytes: int
    apart: bool
    validation_images: int = 0
    split_seed: int = 0
    messages: splits.Messages = dataclasses.field(default_factory=splits.Messages)
    step_share: float = 1.0
    calibration_images: int = 0


@dataclasses.dataclass(frozen=True)
class Terms:
    """Assumptions about machines where their catalog does not specify them.

    Attributes:
      startup_seconds: time from requesting a machine to its first step.
      minimum_seconds: minimum billed time.
      checkpoint_seconds: training time lost to saving a checkpoint.
      download_bytes_per_second: rate at which a machine downloads its images.
      interruptions_per_hour: interruption rate of a spot machine; None leaves out those without one in the catalog.
      link: link between machines; with None, no machines train one run together.
      most_machines: maximum number of machines to rent at once.
    """

    startup_seconds: float
    minimum_seconds: float
    checkpoint_seconds: float
    download_bytes_per_second: float
    interruptions_per_hour: float | None
    link: simulate.Link | None
    most_machines: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """An offer with the profile of its devices, and the terms that hold for it."""

    offer: Offer
    profile: DeviceProfile
    profile_file: str
    machine: rental.Machine
    interruptions: Interruptions

    @property
    def devices(self) -> list[DeviceProfile]:
        """A profile for each device, with the memory of the machine if that is less."""
        own = self.offer.memory_bytes / self.offer.devices
        memory = int(min(self.profile.memory_bytes, own))
        return [dataclasses.replace(self.profile, memory_bytes=memory)] * self.offer.devices

    def processes(self, devices: int) -> int:
        """How many processes train on so many of its devices: accelerators share one, CPU devices have one each."""
        return devices if self.profile.platform == "cpu" else 1

    def covers(self, other: "Choice") -> bool:
        """Whether it trains everything that another does, as fast, and is interrupted no more often."""
        return (
            self.profile is other.profile
            and self.offer.devices == other.offer.devices
            and self.offer.memory_bytes >= other.offer.memory_bytes
            and self.interruptions.per_second <= other.interruptions.per_second
        )


@dataclasses.dataclass(frozen=True)
class Way:
    """Machines, how they train the model, and what that takes and costs.

    Attributes:
      kind: mesh, stacks or apart.
      machines: numbers of the choices.
      seconds, cost: expected time and cost from requesting the machines to the end, interruptions included.
      step_seconds: seconds of a training step, the mean over image sizes; of the longest lane if trained apart.
      interval: interval of the run's seconds; None if a profile keeps no residuals.
      save_every: steps between checkpoints.
      interruptions: expected number in the whole run.
      lost_seconds: expected work, and time of saving, that an interruption undoes; of the lane that loses most if
        trained apart.
      data, lane: numbers of devices over which the batch and the lanes are split.
      placement: device of each lane, for stacks.
      lanes: for machines that train apart, how many of each kind of lane each trains.
    """

    kind: str
    machines: tuple[int, ...]
    seconds: float
    cost: float
    step_seconds: float
    interval: Interval | None
    save_every: int
    interruptions: float
    lost_seconds: float
    data: int = 1
    lane: int = 1
    placement: Placement | None = None
    lanes: tuple[tuple[int, ...], ...] = ()

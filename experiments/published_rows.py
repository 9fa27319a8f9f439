"""The rows of the thesis's table 4.1 and the settings that each is trained with.

Source: do Rosario 2021 (thesis), table 4.1.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from mlcn_jax.config import RunConfig

NUM_EPOCHS = 20  # of the thesis


@dataclasses.dataclass(frozen=True)
class Row:
    """A published result.

    Attributes:
      title: of the row.
      config: file in `configs/`.
      lanes: as text; empty for CapsNet.
      accuracy: test accuracy in % after 20 epochs of batch 100.
      seconds: an epoch takes on one P100.
      parameters: as the thesis counts them, with the constant zeros that routing starts from; None where it prints
        those of another row.
    """

    title: str
    config: str
    lanes: str
    accuracy: float
    seconds: int
    parameters: int | None


ROWS = {
    "cifar_capsnet": Row("CIFAR-10, CapsNet", "capsnet_cifar", "", 66.36, 240, 11_769_600),
    "cifar_mlcn1_4x4": Row("CIFAR-10, mlcn1 4x4", "mlcn1_cifar", "mlcn1:w4*4", 63.88, 54, 5_250_816),
    "cifar_mlcn1_32x2": Row("CIFAR-10, mlcn1 32x2", "mlcn1_cifar", "mlcn1:w2*32", 66.56, 205, 14_259_712),
    "cifar_mlcn2_4x4": Row("CIFAR-10, mlcn2 4x4", "mlcn2_cifar", "mlcn2:w4*4", 69.05, 53, None),
    "cifar_mlcn2_32x2": Row("CIFAR-10, mlcn2 32x2", "mlcn2_cifar", "mlcn2:w2*32", 75.18, 204, None),
    "fashion_capsnet": Row("Fashion-MNIST, CapsNet", "capsnet_fashion", "", 91.30, 220, 8_227_088),
    "fashion_mlcn1_2x4": Row("Fashion-MNIST, mlcn1 2x4", "mlcn1_fashion", "mlcn1:w4*2", 91.14, 21, 3_655_376),
    "fashion_mlcn1_8x4": Row("Fashion-MNIST, mlcn1 8x4", "mlcn1_fashion", "mlcn1:w4*8", 90.87, 90, 10_633_232),
    "fashion_mlcn2_2x4": Row("Fashion-MNIST, mlcn2 2x4", "mlcn2_fashion", "mlcn2:w4*2", 91.01, 20, None),
    "fashion_mlcn2_8x4": Row("Fashion-MNIST, mlcn2 8x4", "mlcn2_fashion", "mlcn2:w4*8", 92.63, 92, None),
}

# The configs train as published, but that the start values of routing are zero in the published code, and not trained.
PUBLISHED: dict[str, Any] = {"model.prior_bias": False}
AUGMENTED = {
    "cifar10": {"data.max_shift": 4, "data.flip": True},
    "fashion_mnist": {"data.max_shift": 2, "data.flip": True},
}
_ADAMW = {
    "augmented": True,
    "train.optimizer": "adamw",
    "train.learning_rate": 2e-3,
    "train.warmup_epochs": 1.0,
    "train.weight_decay": 1e-4,
    "train.clip_norm": 1.0,
}
_FLIP_SIGNED = {**_ADAMW, "augmented": False, "data.flip": True, "model.signed_pixels": True}
_SHIFT = {**_ADAMW, "augmented": False, "data.max_shift": 1}

# What is tried, on validation images, for the column `tuned`, and to find out why a row falls short. `augmented` is
# whether images are augmented; all else are fields of the configuration.
CANDIDATES: dict[str, dict[str, Any]] = {
    "published": {"augmented": False},
    "per_class": {"augmented": False, "model.lane_routing": "per_class"},
    "signed_pixels": {"augmented": False, "model.signed_pixels": True},
    "per_lane": {"augmented": False, "model.margin_loss": "per_lane"},
    "light_decoder": {"augmented": False, "train.reconstruction_weight": 0.0392},
    "heavy_decoder": {"augmented": False, "train.reconstruction_weight": 3.92},
    "faster": {"augmented": False, "train.learning_rate": 3e-3},
    "fastest": {"augmented": False, "train.learning_rate": 1e-2},  # as the first version of the authors' code has it
    "augmented": {"augmented": True},
    "adamw": _ADAMW,
    "adamw_slower": {**_ADAMW, "train.learning_rate": 1e-3},
    "adamw_faster": {**_ADAMW, "train.learning_rate": 4e-3},
    "adamw_not_augmented": {**_ADAMW, "augmented": False},
    "adamw_not_augmented_faster": {**_ADAMW, "augmented": False, "train.learning_rate": 4e-3},
    "adamw_not_augmented_per_class": {**_ADAMW, "augmented": False, "model.lane_routing": "per_class"},
    "adamw_flip": {**_ADAMW, "augmented": False, "data.flip": True},
    "adamw_flip_signed": _FLIP_SIGNED,
    "adamw_flip_signed_per_lane": {**_FLIP_SIGNED, "model.margin_loss": "per_lane"},
    "adamw_shift": _SHIFT,
    "adamw_shift_signed": {**_SHIFT, "model.signed_pixels": True},
    "adamw_shift_per_lane": {**_SHIFT, "model.margin_loss": "per_lane"},
    "adamw_decay": {**_ADAMW, "train.weight_decay": 0.05},
    "adamw_light_decoder": {**_ADAMW, "train.reconstruction_weight": 0.0392},
    "adamw_per_class": {**_ADAMW, "model.lane_routing": "per_class"},
}
TUNED = {"cifar10": "adamw_flip_signed", "fashion_mnist": "adamw_shift"}
COLUMNS = ("published", "per_class", "augmented", "signed_pixels", "tuned", "tuned_per_lane")


def columns_of(row: str) -> tuple[str, ...]:
    """The settings with which a row is trained: CapsNet, the baseline, as published only."""
    return COLUMNS if ROWS[row].lanes else COLUMNS[:1]


def changes(data_name: str, column: str) -> dict[str, Any]:
    """The fields in which a column, or a candidate for `tuned`, differs from the published method."""
    if column == "tuned_per_lane":
        return changes(data_name, "tuned") | {"model.margin_loss": "per_lane"}
    settings = dict(CANDIDATES[TUNED[data_name] if column == "tuned" else column])
    return (AUGMENTED[data_name] if settings.pop("augmented") else {}) | settings


def config_named(name: str) -> RunConfig:
    """The run of a file in `configs/`."""
    return RunConfig.from_dict(importlib.import_module(f"configs.{name}").get_config().to_dict())


def configure(config: str, lanes: str, directories: Mapping[str, str]) -> RunConfig:
    """The run of a file in `configs/` with other lanes, as published, on the images in `directories[data name]`."""
    base = config_named(config)
    return base.replace({**PUBLISHED, "model.lanes": lanes, "data.dir": directories[base.data.name]})


def configure_row(row: str, column: str, directories: Mapping[str, str]) -> RunConfig:
    """The run of a row with the settings of a column, or of a candidate for `tuned`."""
    config = configure(ROWS[row].config, ROWS[row].lanes, directories)
    return config.replace(changes(config.data.name, column))

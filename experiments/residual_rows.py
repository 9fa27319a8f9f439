"""The rows of `residual_lanes.py`: models and lengths of training at budgets of operations, and trials of settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A model and how it is trained.

    Attributes:
      budget: that it belongs to, in 1e15 FLOPs of the training steps.
      config: a module of `configs`.
      lanes: of the model.
      epochs: of training.
      changes: further fields in which it differs from the config.
    """

    budget: float
    config: str
    lanes: str
    epochs: int
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def data(self) -> str:
        """The name of the data set."""
        return "fashion_mnist" if "fashion" in self.config else "cifar10"


_TOGETHER = {"data.augment_lanes": False, "train.image_sizes": ""}  # lanes that do not classify alone have neither
ROWS = {
    "cifar_4xw3d2": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 11),
    "fashion_4xw3d2": Row(0.45, "resnet_fashion", "resnet:w3d2*4", 14),
    "cifar_unequal": Row(0.45, "resnet_cifar", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 16),
    "fashion_unequal": Row(0.45, "resnet_fashion", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 21),
    "cifar_wide": Row(0.45, "resnet_cifar", "resnet:w4d2*2,resnet:w2d2*2", 10),
    "cifar_long": Row(5, "resnet_cifar_long", "resnet:w4d3*4", 53),
    "cifar_1xw6d2": Row(0.45, "resnet_cifar", "resnet:w6d2*1", 12),
    "fashion_1xw6d2": Row(0.45, "resnet_fashion", "resnet:w6d2*1", 14),
    "cifar_2xw4d2": Row(0.45, "resnet_cifar", "resnet:w4d2*2", 13),
    "cifar_8xw2d2": Row(0.45, "resnet_cifar", "resnet:w2d2*8", 11),
    "cifar_caps_4xw3d2": Row(0.45, "resnet_cifar", "resnet_caps:w3d2*4", 7, _TOGETHER),
    "cifar_1xw4d2": Row(0.103, "resnet_cifar", "resnet:w4d2*1", 6),
    "cifar_2xw3d2": Row(0.103, "resnet_cifar", "resnet:w3d2*2", 5),
    "cifar_4xw2d2": Row(0.103, "resnet_cifar", "resnet:w2d2*4", 5),
    "cifar_8xw1d2": Row(0.103, "resnet_cifar", "resnet:w1d2*8", 8),
}
GPU_ROWS = {  # hours on a GPU, months on two cores
    "cifar_8xw8d3": Row(42.5, "resnet_cifar_long", "resnet:w8d3*8", 60),
    "fashion_8xw8d3": Row(37.5, "resnet_fashion_long", "resnet:w8d3*8", 60),
}
_SMALL = (0.022, "resnet_cifar", "resnet:w2d2*1", 5)
_FOUR = (0.112, "resnet_cifar", "resnet:w2d2*4", 5)
TRIALS = {
    "trial_cifar_w2": Row(*_SMALL),
    "trial_cifar_w2_no_warmup": Row(*_SMALL, {"train.warmup_epochs": 0.0}),
    "trial_cifar_w2_lookahead": Row(*_SMALL, {"train.warmup_epochs": 0.0, "train.lookahead": 0.77}),
    "trial_cifar_w2_momentum": Row(*_SMALL, {"train.momentum": 0.6}),
    "trial_cifar_w2_rate": Row(*_SMALL, {"train.learning_rate": 0.18}),
    "trial_cifar_w2_lower_rate": Row(*_SMALL, {"train.learning_rate": 0.08}),
    "trial_cifar_w2_large_groups": Row(*_SMALL, {"model.norm_group": 500}),
    "trial_cifar_w2_batch": Row(*_SMALL, {"train.batch_size": 250, "train.learning_rate": 0.08}),
    "trial_cifar_4xw2d2": Row(*_FOUR),
    "trial_cifar_4xw2d2_large_groups": Row(*_FOUR, {"model.norm_group": 500}),
    "trial_cifar_4xw2d2_blend": Row(*_FOUR, {"model.ensemble_weight": 0.5}),
    "trial_cifar_4xw2d2_less_smoothing": Row(*_FOUR, {"model.label_smoothing": 0.1}),
    "trial_cifar_2xw3d2_2xw1d2": Row(0.112, "resnet_cifar", "resnet:w3d2*2,resnet:w1d2*2", 4),
    "trial_cifar_w3": Row(0.11, "resnet_cifar", "resnet:w3d2*1", 10),
    "trial_cifar_w3_longer": Row(0.22, "resnet_cifar", "resnet:w3d2*1", 20),
    "trial_cifar_w4": Row(0.16, "resnet_cifar", "resnet:w4d2*1", 8),
    "trial_cifar_4xw3d2": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 11),
    "trial_cifar_unequal": Row(0.45, "resnet_cifar", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 16),
    "trial_cifar_wide": Row(0.45, "resnet_cifar", "resnet:w4d2*2,resnet:w2d2*2", 10),
    "trial_fashion_w3": Row(0.11, "resnet_fashion", "resnet:w3d2*1", 12),
    "trial_fashion_w3_cutout": Row(0.11, "resnet_fashion", "resnet:w3d2*1", 12, {"data.cutout": 8}),
    "trial_fashion_w3_whole": Row(0.11, "resnet_fashion", "resnet:w3d2*1", 8, {"train.image_sizes": ""}),
}

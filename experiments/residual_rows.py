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
_STRONGER = {"data.cutout": 12, "data.max_shift": 4}  # augmentation, for longer training
_CAPS = _TOGETHER | {"model.lane_routing": "per_class"}  # routes over classes
ROWS = {
    "cifar_4xw3d2": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 11),
    "fashion_4xw3d2": Row(0.45, "resnet_fashion", "resnet:w3d2*4", 14),
    "cifar_unequal": Row(0.45, "resnet_cifar", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 16),
    "fashion_unequal": Row(0.45, "resnet_fashion", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 21),
    "cifar_wide": Row(0.45, "resnet_cifar", "resnet:w4d2*2,resnet:w2d2*2", 10),
    "cifar_long": Row(5, "resnet_cifar_long", "resnet:w6d2*4", 34),
    "cifar_long_4xw4d3": Row(5, "resnet_cifar_long", "resnet:w4d3*4", 53, _STRONGER),
    "cifar_long_1xw12d2": Row(4.7, "resnet_cifar_long", "resnet:w12d2*1", 34),
    "cifar_1xw6d2": Row(0.45, "resnet_cifar", "resnet:w6d2*1", 12),
    "fashion_1xw6d2": Row(0.45, "resnet_fashion", "resnet:w6d2*1", 14),
    "cifar_2xw4d2": Row(0.45, "resnet_cifar", "resnet:w4d2*2", 13),
    "cifar_8xw2d2": Row(0.45, "resnet_cifar", "resnet:w2d2*8", 11),
    "cifar_caps_4xw3d2": Row(0.45, "resnet_cifar", "resnet_caps:w3d2*4", 7, _CAPS),
    "cifar_shared_4xw3d2": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 7, _TOGETHER),
    "cifar_1xw4d2": Row(0.103, "resnet_cifar", "resnet:w4d2*1", 6),
    "cifar_2xw3d2": Row(0.103, "resnet_cifar", "resnet:w3d2*2", 5),
    "cifar_4xw2d2": Row(0.103, "resnet_cifar", "resnet:w2d2*4", 5),
    "cifar_8xw1d2": Row(0.103, "resnet_cifar", "resnet:w1d2*8", 8),
}
GPU_ROWS = {  # hours on a GPU, days on two cores
    "cifar_8xw8d3": Row(42.5, "resnet_cifar_long", "resnet:w8d3*8", 60, _STRONGER),
    "fashion_8xw8d3": Row(37.5, "resnet_fashion_long", "resnet:w8d3*8", 60),
}
_W3 = (0.11, "resnet_cifar", "resnet:w3d2*1")  # one lane of cifar_4xw3d2, for as long as there
_ONE_LONG = (1.25, "resnet_cifar_long")  # one lane of four, which learns what each of them would
_FOUR = (0.11, "resnet_cifar", "resnet:w2d2*4", 5)
_FASHION_W3 = (0.11, "resnet_fashion", "resnet:w3d2*1")
TRIALS = {
    "trial_cifar_w3": Row(*_W3, 11),
    "trial_cifar_w3_momentum": Row(*_W3, 11, {"train.momentum": 0.6}),
    "trial_cifar_w3_more_momentum": Row(*_W3, 11, {"train.momentum": 0.92}),
    "trial_cifar_w3_rate": Row(*_W3, 11, {"train.learning_rate": 0.18}),
    "trial_cifar_w3_sgd": Row(*_W3, 11, {"train.optimizer": "sgd", "train.learning_rate": 0.7}),
    "trial_cifar_w3_sgd_higher_rate": Row(*_W3, 11, {"train.optimizer": "sgd", "train.learning_rate": 2.0}),
    "trial_cifar_w3_lower_rate": Row(*_W3, 11, {"train.learning_rate": 0.08}),
    "trial_cifar_w3_head_rate": Row(*_W3, 11, {"train.head_learning_rate": 0.86}),
    "trial_cifar_w3_bias_rate": Row(*_W3, 11, {"train.bias_learning_rate": 13.0}),
    "trial_cifar_w3_no_warmup": Row(*_W3, 11, {"train.warmup_epochs": 0.0}),
    "trial_cifar_w3_more_warmup": Row(*_W3, 11, {"train.warmup_epochs": 2.5}),
    "trial_cifar_w3_lookahead": Row(*_W3, 11, {"train.lookahead": 0.77}),
    "trial_cifar_w3_batch": Row(*_W3, 11, {"train.batch_size": 250, "train.learning_rate": 0.085}),
    "trial_cifar_w3_large_batch": Row(*_W3, 11, {"train.batch_size": 1000, "train.learning_rate": 0.17}),
    "trial_cifar_w3_large_groups": Row(*_W3, 11, {"model.norm_group": 500}),
    "trial_cifar_w3_smoothing": Row(*_W3, 11, {"model.label_smoothing": 0.1}),
    "trial_cifar_w3_no_smoothing": Row(*_W3, 11, {"model.label_smoothing": 0.0}),
    "trial_cifar_w3_whole": Row(*_W3, 8, {"train.image_sizes": ""}),
    "trial_cifar_w3_small": Row(*_W3, 13, {"train.image_sizes": "16:0.3,24:0.7"}),
    "trial_cifar_w3_deeper": Row(0.11, "resnet_cifar", "resnet:w3d3*1", 8),
    "trial_cifar_4xw2d2": Row(*_FOUR),
    "trial_cifar_4xw2d2_blend": Row(*_FOUR, {"model.ensemble_weight": 0.5}),
    "trial_cifar_4xw2d2_no_smoothing": Row(*_FOUR, {"model.label_smoothing": 0.0}),
    "trial_cifar_4xw2d2_same_view": Row(*_FOUR, {"data.augment_lanes": False}),
    "trial_cifar_4xw3d2": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 11),
    "trial_cifar_4xw3d2_bfloat16": Row(0.45, "resnet_cifar", "resnet:w3d2*4", 11, {"model.compute_dtype": "bfloat16"}),
    "trial_cifar_unequal": Row(0.45, "resnet_cifar", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 16),
    "trial_cifar_wide": Row(0.45, "resnet_cifar", "resnet:w4d2*2,resnet:w2d2*2", 10),
    "trial_cifar_wider": Row(0.45, "resnet_cifar", "resnet:w5d2*2,resnet:w3d2*2", 6),
    "trial_cifar_4xw4d2": Row(0.45, "resnet_cifar", "resnet:w4d2*4", 6),
    "trial_cifar_4xw2d2_long": Row(0.45, "resnet_cifar", "resnet:w2d2*4", 22),
    "trial_cifar_8xw2d2": Row(0.45, "resnet_cifar", "resnet:w2d2*8", 11),
    "trial_cifar_4xw3d3": Row(0.45, "resnet_cifar", "resnet:w3d3*4", 8),
    "trial_cifar_wide_deep": Row(0.45, "resnet_cifar", "resnet:w4d3*2,resnet:w2d3*2", 7),
    "trial_cifar_long_w4d3": Row(*_ONE_LONG, "resnet:w4d3*1", 53, _STRONGER),
    "trial_cifar_long_w6": Row(*_ONE_LONG, "resnet:w6d2*1", 34, _STRONGER),
    "trial_cifar_long_w6_weaker": Row(*_ONE_LONG, "resnet:w6d2*1", 34),
    "trial_cifar_long_w6_shift": Row(*_ONE_LONG, "resnet:w6d2*1", 34, {"data.max_shift": 4}),
    "trial_cifar_long_w6_between": Row(*_ONE_LONG, "resnet:w6d2*1", 34, {"data.cutout": 6, "data.max_shift": 3}),
    "trial_cifar_long_w6_sgd": Row(
        *_ONE_LONG, "resnet:w6d2*1", 34, {"train.optimizer": "sgd", "train.learning_rate": 0.7}
    ),
    "trial_cifar_long_w6_lower_rate": Row(*_ONE_LONG, "resnet:w6d2*1", 34, {"train.learning_rate": 0.06}),
    "trial_cifar_long_w6d3_between": Row(*_ONE_LONG, "resnet:w6d3*1", 24, {"data.cutout": 6, "data.max_shift": 3}),
    "trial_cifar_long_w8": Row(*_ONE_LONG, "resnet:w8d2*1", 19, _STRONGER),
    "trial_cifar_long_w8_weaker": Row(*_ONE_LONG, "resnet:w8d2*1", 19),
    "trial_cifar_long_w8d3": Row(*_ONE_LONG, "resnet:w8d3*1", 14, _STRONGER),
    "trial_fashion_w3": Row(*_FASHION_W3, 14),
    "trial_fashion_w3_cutout": Row(*_FASHION_W3, 14, {"data.cutout": 8}),
    "trial_fashion_w3_whole": Row(*_FASHION_W3, 10, {"train.image_sizes": ""}),
    "trial_fashion_w3_shift": Row(*_FASHION_W3, 14, {"data.max_shift": 1}),
    "trial_fashion_w3_smoothing": Row(*_FASHION_W3, 14, {"model.label_smoothing": 0.1}),
    "trial_fashion_4xw3d2": Row(0.45, "resnet_fashion", "resnet:w3d2*4", 14),
    "trial_fashion_unequal": Row(0.45, "resnet_fashion", "resnet:w3d2*2,resnet:w2d2*1,resnet:w1d2*1", 21),
    "trial_fashion_wide": Row(0.45, "resnet_fashion", "resnet:w4d2*2,resnet:w2d2*2", 12),
    "trial_fashion_4xw4d2": Row(0.45, "resnet_fashion", "resnet:w4d2*4", 8),
}

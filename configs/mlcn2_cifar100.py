"""MLCN with 8 lanes mlcn2 of width 4 on CIFAR-100.

    mlcn_jax train --config=configs/mlcn2_cifar100.py --workdir=runs/mlcn2_cifar100
    ... --config.data.label_kind=coarse    # 20 classes instead of 100

Published row: none.
Measured here: 9,025,304 parameters, 258 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "cifar100"
    config.data.label_kind = "fine"
    config.model.lanes = "mlcn2:w4*8"
    return config

"""MLCN, 4 lanes mlcn2 of width 4, on CIFAR-10.

    mlcn_jax train --config=configs/mlcn2_cifar.py --workdir=runs/mlcn2_cifar

Published (thesis, table 4.1): 69.05 % after 20 epochs, 53 s per epoch on one P100 (mlcn2:w2*32: 75.18 %, 204 s).
Measured here, 20 epochs: 64.12 % on average over 3 seeds, 71.36 % (one seed) with the settings `tuned` of
docs/results/accuracy.md, and 72.92 % (one seed) with those and model.margin_loss=per_lane; 4,691,084 parameters,
129 MFLOP per forward pass.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "cifar10"
    config.model.lanes = "mlcn2:w4*4"
    return config

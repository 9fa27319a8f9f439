"""MLCN, 4 lanes mlcn1 of width 4, on CIFAR-10.

    mlcn_jax train --config=configs/mlcn1_cifar.py --workdir=runs/mlcn1_cifar

Published (thesis, table 4.1): 63.88 % after 20 epochs, 54 s per epoch on one P100 (mlcn1:w2*32: 66.56 %, 205 s).
Measured here, 20 epochs: 61.22 % (mean of three seeds), 72.06 % (one seed) with the settings `tuned` of
docs/results/accuracy.md, and 74.31 % (one seed) with those and model.margin_loss=per_lane; 5,250,816 parameters,
249 MFLOP per forward pass.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "cifar10"
    config.model.lanes = "mlcn1:w4*4"
    return config

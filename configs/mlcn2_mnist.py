"""MLCN, 2 lanes mlcn2 of width 4, on MNIST.

    mlcn_jax train --config=configs/mlcn2_mnist.py --workdir=runs/mlcn2_mnist

Published row: none.
Measured here: 1,801,298 parameters, 31 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "mnist"
    config.model.lanes = "mlcn2:w4*2"
    return config

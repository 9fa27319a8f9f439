"""MLCN, 2 lanes mlcn1 of width 4, on MNIST.

    mlcn_jax train --config=configs/mlcn1_mnist.py --workdir=runs/mlcn1_mnist

Published row: none.
Measured here: 2,060,496 parameters, 59 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "mnist"
    config.model.lanes = "mlcn1:w4*2"
    return config

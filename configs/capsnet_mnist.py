"""CapsNet on MNIST.

    mlcn_jax train --config=configs/capsnet_mnist.py --workdir=runs/capsnet_mnist

Published (Sabour et al. 2017, table 1): 0.25 % test error.
Measured here: 8,227,088 parameters, 408 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "mnist"
    config.model.name = "capsnet"
    config.model.lanes = ""
    config.data.max_shift = 2  # as in the paper
    return config

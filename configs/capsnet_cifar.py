"""CapsNet on CIFAR-10.

    mlcn_jax train --config=configs/capsnet_cifar.py --workdir=runs/capsnet_cifar

Published (thesis, table 4.1): 66.36 % after 20 epochs, 240 s per epoch on one P100.
Measured here: 11,769,600 parameters, 769 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "cifar10"
    config.model.name = "capsnet"
    config.model.lanes = ""
    return config

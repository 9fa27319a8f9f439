"""CapsNet on Fashion-MNIST.

    mlcn_jax train --config=configs/capsnet_fashion.py --workdir=runs/capsnet_fashion

Published (thesis, table 4.1): 91.30 % after 20 epochs, 220 s per epoch on one P100.
Measured here: 8,227,088 parameters, 408 MFLOP per forward pass; not trained to the end yet.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "fashion_mnist"
    config.model.name = "capsnet"
    config.model.lanes = ""
    return config

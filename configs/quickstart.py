"""A small MLCN on scikit-learn's handwritten digits (28x28): no download, one to two minutes.

    make train        # the same as
    mlcn_jax train --config=configs/quickstart.py --workdir=runs/quickstart

Published row: none.
Measured here: 1,604,180 parameters, 19 MFLOP per forward pass; test accuracy in docs/results/accuracy.md.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "digits"
    config.data.max_shift = 1
    config.model.lanes = "mlcn2:w2*4"
    config.train.batch_size = 50
    config.train.num_epochs = 40
    return config

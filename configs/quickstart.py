"""A small MLCN on scikit-learn's handwritten digits (28x28): nothing to download, done in about a minute.

    python main.py --config=configs/quickstart.py --workdir=runs/quickstart

Published row: none. Measured: see the README's first table.
"""

from configs import default


def get_config():
    config = default.get_config()
    config.data.name = "digits"
    config.model.lanes = "mlcn1:w1*4"
    config.train.num_epochs = 15
    return config

"""A search for lanes on scikit-learn's digits: 8 models, no download, a few minutes.

    mlcn_jax search --config=configs/nas_quickstart.py --workdir=runs/nas_quickstart

Published row: none.
"""

from mlcn_jax.search.settings import default_search


def get_config():
    config = default_search()
    config.data.name = "digits"
    config.data.validation_fraction = 0.2
    config.data.max_shift = 1
    config.model.lanes = "mlcn2:w2*4"  # replaced by each model of the search
    config.train.batch_size = 50
    config.train.num_epochs = 40
    return config

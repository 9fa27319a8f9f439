"""Large residual lanes on Fashion-MNIST, for a GPU.

    mlcn_jax train --config=configs/resnet_fashion_long.py --workdir=runs/resnet_fashion_long

60 epochs, 37 PFLOP forward and backward. Its accuracy has not been measured yet.

Source: Jordan 2024, arXiv 2404.00498, for layers, start values and recipe; lanes: this project.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "fashion_mnist"
    config.data.max_shift = 2
    config.data.reflect = True
    config.data.alternate_flips = True
    config.data.cutout = 10
    config.data.augment_lanes = True
    config.model.lanes = "resnet:w8d3*8"
    config.model.label_smoothing = 0.2
    config.train.batch_size = 500
    config.train.num_epochs = 60
    config.train.image_sizes = "20:0.35,24:0.7"
    config.train.optimizer = "muon"
    config.train.learning_rate = 0.12
    config.train.weight_decay = 1e-3
    config.train.checkpoint_every = 20
    return config

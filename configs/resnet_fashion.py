"""Residual lanes on Fashion-MNIST: four lanes that classify alone, together a deep ensemble read as capsules.

    mlcn_jax train --config=configs/resnet_fashion.py --workdir=runs/resnet_fashion

14 epochs, 0.45 PFLOP forward and backward: 94.70 % of the test images, 94.77 % with flips at test time, means of three
seeds (`experiments/results/residual_lanes_full.json`).

Source: Jordan 2024, arXiv 2404.00498, for layers, start values and recipe; lanes: this project.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "fashion_mnist"
    config.data.max_shift = 2
    config.data.reflect = True
    config.data.alternate_flips = True
    config.data.augment_lanes = True
    config.model.lanes = "resnet:w3d2*4"
    config.model.label_smoothing = 0.2
    config.train.batch_size = 500
    config.train.num_epochs = 14
    config.train.image_sizes = "20:0.35,24:0.7"
    config.train.optimizer = "muon"
    config.train.learning_rate = 0.12
    config.train.weight_decay = 1e-3
    config.train.checkpoint_every = 50
    return config

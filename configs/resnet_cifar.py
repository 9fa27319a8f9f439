"""Residual lanes on CIFAR-10: four lanes that classify alone, together a deep ensemble read as capsules.

    mlcn_jax train --config=configs/resnet_cifar.py --workdir=runs/resnet_cifar

11 epochs, 0.44 PFLOP forward and backward: 93.03 % of the test images, 93.11 % with flips at test time, means of three
seeds (`experiments/results/residual_lanes_full.json`).

Source: Jordan 2024, arXiv 2404.00498, for layers, start values and recipe; lanes: this project.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "cifar10"
    config.data.max_shift = 2
    config.data.reflect = True
    config.data.alternate_flips = True
    config.data.augment_lanes = True
    config.model.lanes = "resnet:w3d2*4"
    config.model.label_smoothing = 0.2
    config.train.batch_size = 500
    config.train.num_epochs = 11
    config.train.image_sizes = "20:0.35,28:0.7"
    config.train.optimizer = "muon"
    config.train.learning_rate = 0.12
    config.train.weight_decay = 1e-3
    config.train.checkpoint_every = 50
    return config

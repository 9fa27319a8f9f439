"""Residual lanes on CIFAR-10: four lanes that classify alone, together a deep ensemble read as capsules.

    python main.py --config=configs/resnet_cifar.py --workdir=runs/resnet_cifar

10 epochs, 0.40 PFLOP forward and backward. Not measured yet on the test set; see docs/results.md.

Source: Jordan 2024, arXiv 2404.00498 (airbench), for layers, start values and recipe; the lanes are this project's.
"""

from ml_collections import ConfigDict

from mlcn_jax.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.data.name = "cifar10"
    config.data.max_shift = 2
    config.data.reflect = True
    config.data.alternate_flips = True
    config.data.augment_lanes = True
    config.model.lanes = "resnet:w3d2*4"
    config.model.label_smoothing = 0.2
    config.train.batch_size = 500
    config.train.num_epochs = 10
    config.train.image_sizes = "20:0.35,28:0.7"
    config.train.optimizer = "muon"
    config.train.learning_rate = 0.12
    config.train.weight_decay = 1e-3
    config.train.checkpoint_every = 50
    return config

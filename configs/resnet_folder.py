"""Residual lanes on your own images: a folder with a folder of images for each class.

    mlcn_jax train --config=configs/resnet_folder.py --workdir=runs/mine --config.data.dir=FOLDER

Images are resized to 48 pixels (`data.image_size`). From 40 on other sizes need nothing else; smaller ones, of at least
9, need `--config.train.image_sizes=`, which trains at full size only. Set `data.alternate_flips` to False for images
whose mirror image is not of the same class, such as text. Accuracy depends on the images: trained on 5,000 PNG files of
CIFAR-10, lanes classify 84.6 % of the 10,000 test images (`experiments/results/own_images_full.json`, with all recipes
that were tried).

Source: Jordan 2024, arXiv 2404.00498, for layers, start values and recipe; lanes: this project.
"""

from mlcn_jax.config import default_config


def get_config():
    config = default_config()
    config.data.name = "folder"
    config.data.image_size = 48
    config.data.max_shift = 2
    config.data.reflect = True
    config.data.alternate_flips = True
    config.data.augment_lanes = True
    config.model.lanes = "resnet:w3d2*4"
    config.train.batch_size = 100
    config.train.num_epochs = 10
    config.train.image_sizes = "28:0.35,40:0.7"
    config.train.optimizer = "muon"
    config.train.learning_rate = 0.054
    config.train.weight_decay = 1e-3
    config.train.checkpoint_every = 50
    return config

"""A search for lanes on scikit-learn's digits: 8 models, nothing to download, done in minutes. Has every search field.

    python -m experiments.nas --config=configs/nas_quickstart.py --workdir=runs/nas_quickstart

Published row: none.
"""

from ml_collections import ConfigDict

from configs import default


def get_config():
    config = default.get_config()
    config.data.name = "digits"
    config.data.validation_fraction = 0.2
    config.data.max_shift = 1
    config.model.lanes = "mlcn2:w2*4"  # replaced by each model of the search
    config.train.batch_size = 50
    config.train.num_epochs = 40

    config.search = search = ConfigDict()
    search.devices = "flops=0.25x*4"  # what a training step may take on each; see search.make_space
    search.kinds = "mlcn1,mlcn2"  # of lanes
    search.max_width = 3
    search.max_depth = 3
    search.baseline = "mlcn2:w2d2*4"  # trained to compare with; the x of search.devices
    search.tolerance = 0.05  # a device less full is drawn again; 1 draws once, as published
    search.method = "random"  # random, evolution, halving (asynchronous, of random models), tpe or nsgaii
    search.num_models = 8
    search.num_epochs = 4
    search.num_repeats = 1  # trainings of each model; its accuracy is their geometric mean
    search.num_images = 0  # of the training set, validation images among them; 0 takes all
    search.min_epochs = 1  # of halving: before models are first compared
    search.reduction_factor = 3  # of halving: one model in so many goes on, for so many times the epochs
    search.max_training_seconds = 0.0  # in all, after which no model is begun; 0 has no end
    search.seed = 0
    search.name = "nas"  # of the search in its storage
    search.storage = ""  # database, such as postgresql://user:password@host/database; "" is a file in the workdir
    search.heartbeat_seconds = 20  # a worker not heard of for two is taken to be dead
    return config

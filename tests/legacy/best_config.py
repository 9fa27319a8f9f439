"""Model 2 of a search (random), the best of those that were trained.

    python main.py --config=runs/legacy_search/best_config.py --workdir=FOLDER

Validation accuracy there: 65.00% after 2 epochs of 280 images. Lanes of each device:
    device 0, 100% full: mlcn2:w1d1*2
    device 1, 100% full: mlcn2:w1d1*2
Placed anew over as many: --config.parallel.plan=stacks --config.parallel.lane=2
"""

from configs import default


def get_config():
    config = default.get_config()
    config.data.validation_fraction = 0.3
    config.data.max_shift = 1
    config.model.decoder = (2,)
    config.model.lanes = "mlcn2:w1d1*4"
    config.train.batch_size = 50
    config.train.num_epochs = 40
    return config

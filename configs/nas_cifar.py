"""A search for lanes on CIFAR-10 as large as the thesis's: 8 devices of 12 GiB, 64 models of 4 trainings, 10 epochs.

    mlcn_jax search --config=configs/nas_cifar.py --workdir=runs/nas_cifar
    mlcn_jax search --config=configs/nas_cifar.py --workdir=runs/nas_cifar --worker    # further workers

It differs from the thesis (chapter 6) in what it scores, a tenth of the training images instead of the test images, in
a device's memory, counted from the lanes instead of by formula 6.1, and in that a device left less than 95 % full is
drawn again (not with search.tolerance=1.0). So the thesis's mean model of 62.0 %, and best found 18.6 % better than
before, are not comparable. The thesis does not say whether its FLOPs, 1x to 8x those of 4 lanes of width 2 and depth 4,
are per device or in total. Here they are the total: 4x over 8 devices is 0.5x on each. Sized for a GPU; on a small
machine set --config.search.num_images=2000 --config.search.num_epochs=3 --config.search.num_repeats=1.
"""

from mlcn_jax.search.settings import default_search


def get_config():
    config = default_search()
    config.data.name = "cifar10"
    config.data.validation_fraction = 0.1
    config.data.max_shift = 0
    config.train.batch_size = 100
    config.train.num_epochs = 20
    config.search.devices = "memory=12GiB flops=0.5x*8"
    config.search.max_width = 5
    config.search.max_depth = 5
    config.search.baseline = "mlcn2:w2d4*4"
    config.search.num_models = 64
    config.search.num_epochs = 10
    config.search.num_repeats = 4
    return config

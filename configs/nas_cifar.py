"""A search for lanes on CIFAR-10 as large as the thesis's: 8 devices of 12 GiB, 64 models of 4 trainings, 10 epochs.

    mlcn_jax search --config=configs/nas_cifar.py --workdir=runs/nas_cifar
    mlcn_jax search --config=configs/nas_cifar.py --workdir=runs/nas_cifar --worker    # further workers

It differs from the thesis (chapter 6) in what it scores, a tenth of the training images instead of the test images. So
the thesis's mean model of 62.0 %, and best found 18.6 % better than before, are not comparable. It also counts what
lanes take instead of using the thesis's formulas (unless search.costs=published), draws a device that is left less
than 95 % full again (unless search.tolerance=1.0), and draws a mix again that another model has. Each device has 4
times the FLOPs of 4 lanes of width 2 and depth 4, as mlcn2 here; the thesis does not say whether it means each device
or all together. Largest width and depth are those of its chapter 5. Takes 0.72 EFLOP (experiments/nas_sweeps.py), so it
is for a GPU; on a small machine give --config.search.num_images=2000 --config.search.num_epochs=3
--config.search.num_repeats=1 --config.search.devices=flops=0.1x*8.
"""

from mlcn_jax.search.settings import default_search


def get_config():
    config = default_search()
    config.data.name = "cifar10"
    config.data.validation_fraction = 0.1
    config.data.max_shift = 0
    config.train.batch_size = 100
    config.train.num_epochs = 20
    config.search.devices = "memory=12GiB flops=4x*8"
    config.search.max_width = 5
    config.search.max_depth = 5
    config.search.baseline = "mlcn2:w2d4*4"
    config.search.num_models = 64
    config.search.num_epochs = 10
    config.search.num_repeats = 4
    return config

"""Every field of a run, once. The other configs start from this one and change a few values."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    config.data = data = ConfigDict()
    data.name = "digits"  # digits, mnist, fashion_mnist, cifar10, cifar100 or folder
    data.dir = ""  # folder with the files (archives or unpacked, or one folder per class); "" downloads them
    data.cache_dir = ""  # where downloads are kept; "" is $MLCN_JAX_CACHE or ~/.cache/mlcn_jax
    data.label_kind = "fine"  # of cifar100: fine (100 classes) or coarse (20)
    data.image_size = 0  # pixels to which a folder's images are resized; 0 is 32
    data.test_fraction = 0.2  # of a folder without a test set
    data.validation_fraction = 0.0  # of the training images; the best checkpoint is chosen on them
    data.max_shift = 0  # augmentation: random shifts of up to so many pixels
    data.flip = False  # augmentation: random horizontal flips

    config.model = model = ConfigDict()
    model.name = "mlcn"  # mlcn or capsnet
    model.lanes = "mlcn2:w4*4"  # KIND:wWIDTHdDEPTH*COUNT, joined by commas; "" for capsnet
    model.num_routing_iters = 3
    model.lane_routing = "published"  # or per_class
    model.prior_bias = True  # trainable start values of the routing logits
    model.decoder = (512, 1024)  # hidden layers of the decoder
    model.lane_dropout = 0.0  # chance that a lane is left out of a step's classification loss
    model.margin_loss = "joint"  # or per_lane: each lane learns to classify alone
    model.signed_pixels = False  # the encoder reads pixels in [-1, 1] instead of [0, 1]
    model.compute_dtype = "float32"  # or bfloat16: convolutions and matrix products only
    model.conv = "auto"  # algorithm of the convolutions

    config.train = train = ConfigDict()
    train.batch_size = 100
    train.num_epochs = 20
    train.num_steps = 0  # ends a run after so many steps, whatever the epochs; 0 does not
    train.optimizer = "adam"  # adam: times lr_decay after each epoch; adamw: warm-up, then cosine to zero
    train.learning_rate = 1e-3
    train.lr_decay = 0.9  # of adam
    train.warmup_epochs = 1.0  # of adamw
    train.weight_decay = 1e-4  # of adamw
    train.clip_norm = 0.0  # largest global norm of the gradient; 0 does not clip
    train.reconstruction_weight = 0.392
    train.seed = 0
    train.checkpoint_every = 0  # steps; 0 is every epoch
    train.log_every = 50  # steps
    train.test_every_epoch = False  # also score the test set after each epoch, for the record only

    config.parallel = parallel = ConfigDict()
    parallel.plan = "mesh"  # mesh, stacks (each device its own lanes), or auto: the fastest by the device profiles
    parallel.data = 1  # devices over which each batch is split
    parallel.lane = 1  # devices over which the lanes are split; data times lane devices in all
    parallel.partitioner = "greedy"  # that places the lanes of stacks: partition.PARTITIONERS
    parallel.profile = ""  # files of experiments/profile_device.py, joined by commas; "" takes all devices as equal
    parallel.platforms = ""  # kinds of devices in one process, such as gpu,cpu (stacks only); "" is jax's default
    parallel.processes = 1  # processes of the run, all started here; 0 is as the cluster's environment says
    parallel.process = -1  # number of the one to start here, where the others are started on other machines
    parallel.coordinator = ""  # HOST:PORT on the machine of process 0, where there are others
    parallel.timeout_seconds = 60  # to wait for a process to come, or to be heard of again

    config.init_from = ""  # workdir whose best weights to start from
    config.profile = False  # write a profiler trace of 5 steps
    return config

"""The messages on the page "When something goes wrong", each made by doing what leads to it.

`make_tables.py` puts them into the page. A function does what a user would have done, in an empty folder; what it
raises is the message. So a message on the page is one that the code gives. Messages say how many devices there are and
how a command is called; `make_tables.py` sees to it that these are the same everywhere.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from mlcn_jax import files
from mlcn_jax.commands import front
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.images import read_pixels
from mlcn_jax.distributed import mesh
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.launch import lack_of_memory
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.partition import partition
from mlcn_jax.placement.problem import Problem, uniform_seconds
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.search import space
from mlcn_jax.serving.artifact import MANIFEST, Artifact
from mlcn_jax.training.metrics import StepLog
from mlcn_jax.training.session import open_session
from mlcn_jax.training.sweep import parse_grid
from mlcn_jax.training.teacher import open_teacher
from mlcn_jax.training.trained import load_trained

MADE: dict[str, Callable[[], str]] = {}
_SHAPE = (28, 28, 1)


def _message(function: Callable[[], object]) -> Callable[[], object]:
    def made() -> str:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            try:
                function()
            except (InputError, Diverged) as error:
                return f"```text\n{error}\n```"
        raise AssertionError(f"{function.__name__} led to no message: correct it in {__file__}")

    MADE[function.__name__] = made
    return function


def _write_pictures(folder: str, count: int) -> None:
    Path(folder).mkdir(parents=True)
    for i in range(count):
        Image.new("L", (28, 28), i).save(Path(folder, f"{i}.png"))


@_message
def unknown_field() -> None:
    front.run(["train", "--config=quickstart", "--workdir=runs/a", "--config.train.learning_rat=1e-3"])


@_message
def unknown_command() -> None:
    front.run(["trian"])


@_message
def unknown_flag() -> None:
    front.run(["train", "--work_dir=runs/mlcn2"])


@_message
def no_config() -> None:
    front.run(["train", "--config=my_config.py", "--workdir=runs/mlcn2"])


@_message
def wrong_value() -> None:
    RunConfig().replace({"train.batch_size": "0"})


@_message
def no_teacher() -> None:
    config = RunConfig().replace({"train.teacher": "runs/techer"})
    open_teacher(open_session(config))


@_message
def wrong_lanes() -> None:
    ModelSpec("mlcn", image_shape=_SHAPE, num_classes=10, lanes="mlcn1:w4*4,mlcn3:w2")


@_message
def small_images() -> None:
    ModelSpec("mlcn", image_shape=(16, 16, 1), num_classes=10, lanes="mlcn1:w4*4")


@_message
def unknown_dataset() -> None:
    datasets.load("cifar")


@_message
def no_data_folder() -> None:
    datasets.load("cifar10", directory="data/cifar")


@_message
def missing_files() -> None:
    Path("data").mkdir()
    datasets.load("cifar10", directory="data")


@_message
def one_class() -> None:
    _write_pictures("photos/cat", 2)
    datasets.load("folder", directory="photos")


@_message
def one_image() -> None:
    _write_pictures("photos/cat", 1)
    _write_pictures("photos/dog", 5)
    datasets.load("folder", directory="photos")


@_message
def no_picture() -> None:
    Path("image.png").write_text("this is text")
    read_pixels(Path("image.png"), _SHAPE)


@_message
def other_configuration() -> None:
    stored = RunConfig()
    RunConfig().replace({"model.lanes": "mlcn1:w4*8", "train.seed": 1}).check_resumable(stored, Path("runs/mlcn2"))


@_message
def workdir_in_use() -> None:
    with files.hold(Path("runs/mlcn2")), files.hold(Path("runs/mlcn2")):
        pass


@_message
def no_run() -> None:
    read_stored(Path("runs/nothing"))


@_message
def no_model() -> None:
    load_trained(Path("runs/nothing"))


@_message
def wrong_grid() -> None:
    parse_grid("train.learning_rate")


@_message
def few_devices() -> None:
    mesh.take_devices(2, 4, jax.devices())


@_message
def uneven_lanes() -> None:
    spec = ModelSpec("mlcn", image_shape=_SHAPE, num_classes=10, lanes="mlcn1:w4*6")
    mesh.check_split(spec, batch_size=100, data=1, lane=4)


@_message
def uneven_batch() -> None:
    spec = ModelSpec("mlcn", image_shape=_SHAPE, num_classes=10, lanes="mlcn1:w4*6")
    mesh.check_split(spec, batch_size=100, data=3, lane=1)


@_message
def no_profile() -> None:
    DeviceProfile.load(Path("profile.json"))


@_message
def damaged_profile() -> None:
    Path("profile.json").write_text("{}")
    DeviceProfile.load(Path("profile.json"))


@_message
def machine_without_profile() -> None:
    Path("machines.csv").write_text("machine,price\nworkstation,0.40\n")
    front.run(["cheapest", "--config=quickstart", "--catalog=machines.csv"])


@_message
def machine_without_price() -> None:
    Path("machines.csv").write_text("machine,price\nworkstation,\n")
    front.run(["cheapest", "--config=quickstart", "--catalog=machines.csv"])


@_message
def deadline_is_no_time() -> None:
    front.run(["cheapest", "--config=quickstart", "--catalog=machines.csv", "--deadline=six hours"])


@_message
def no_ortools() -> None:
    with mock.patch.dict(sys.modules, {"ortools": None, "ortools.sat.python": None}):
        partition("exact", Problem(uniform_seconds([5.0, 4.0, 3.0, 3.0, 3.0], [1.0, 1.0])))


@_message
def wrong_devices() -> None:
    _space("memory=12GiB*8")


@_message
def small_devices() -> None:
    _space("flops=0.0001x*2")


def _space(devices: str) -> None:
    spec = ModelSpec("mlcn", image_shape=_SHAPE, num_classes=10, lanes="mlcn1:w1")
    space.make_space(
        devices, spec, 100, kinds=("mlcn1",), max_width=2, max_depth=1, baseline="mlcn1:w1*4", tolerance=0.05
    )


@_message
def no_export() -> None:
    Path("runs/mlcn2").mkdir(parents=True)
    Artifact("runs/mlcn2")


@_message
def altered_export() -> None:
    Path("export").mkdir()
    Path("export", MANIFEST).write_text('{"format": 1, "files": {}, "sha256": ""}')
    Artifact("export")


@_message
def diverged() -> None:
    log = StepLog(mock.Mock(), mock.Mock(), batch_size=100, every=1)
    log.add(12, {"loss": jnp.array(np.nan), "grad_norm": jnp.array(np.inf)})
    log.flush()


@_message
def no_memory() -> None:
    raise InputError(lack_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12884901888 bytes.")))

"""Settings of the whole suite, and a run small enough to train in seconds."""

import asyncio
import importlib.metadata
import json
import os
import selectors
import shutil
import socket
import time
from pathlib import Path

# Before the package is used: compiled programs are shared by the tests and the commands that they start.
REPOSITORY = Path(__file__).parents[1]
os.environ["MLCN_JAX_CACHE"] = str(REPOSITORY / ".pytest_cache" / "mlcn_jax")
# Most of the time of a test is compiling, which takes a third of the time without LLVM's optimisations and with XLA's
# older code for fused loops, which jaxlib 0.11 no longer has. `make test-long` leaves the compiler as users have it.
_OLDER_LOOPS = " --xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib") < "0.11" else ""
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0" + _OLDER_LOOPS)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from made_files import cifar_bytes, idx_files, write_files  # noqa: E402

from mlcn_jax import host  # noqa: E402
from mlcn_jax.allocator import keep_memory  # noqa: E402
from mlcn_jax.config import RunConfig  # noqa: E402
from mlcn_jax.serving import export  # noqa: E402
from mlcn_jax.tiers import split  # noqa: E402
from mlcn_jax.tiers.artifact import TierArtifact  # noqa: E402
from mlcn_jax.training import loop, pictures  # noqa: E402

_LONG_UNTIL = float(os.environ.get("MLCN_JAX_LONG_TESTS_UNTIL", "inf"))  # seconds since the epoch

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
host.set_up_jax(least_seconds=0.0)
keep_memory()


@pytest.hookimpl(tryfirst=True)  # before its fixtures are made
def pytest_runtest_setup(item):
    if item.get_closest_marker("long") and time.time() > _LONG_UNTIL:
        pytest.skip("MLCN_JAX_LONG_TESTS_UNTIL has passed")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def held_port():
    """A port that no other process is given, on which servers can listen, and listen again."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class _Clock(selectors.DefaultSelector):
    """Of an event loop: stands still while anything is done, and then jumps to the next timer."""

    now, turns = 1000.0, 0

    def select(self, timeout=None):
        self.turns += 1
        assert self.turns != 100_000, "it goes on without end"
        events = super().select(timeout and 0)
        self.now += 0 if events else timeout or 0
        return events


def in_no_time(main):
    """Runs a coroutine that waits for nothing but timers, on a clock on which nothing else takes time."""
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("monotonic", "perf_counter"):
            patch.setattr(time, name, lambda: clock.now)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
            return runner.run(main)


_PICTURES = {name: getattr(pictures, name) for name in ("save_confusion", "save_reconstructions")}


@pytest.fixture(scope="session", autouse=True)
def quick_pictures():
    """Runs write empty pictures: to draw them takes longer than 20 tiny steps."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _PICTURES:
            patch.setattr(pictures, name, lambda path, *args: path.touch())
        yield


@pytest.fixture
def real_pictures(monkeypatch):
    """For the tests that look at pictures."""
    for name, function in _PICTURES.items():
        monkeypatch.setattr(pictures, name, function)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The workdir of `tiny`, trained to its end; whoever changes it makes a copy."""
    workdir = tmp_path_factory.mktemp("finished")
    loop.train(RunConfig().replace(TINY), workdir)
    return workdir


@pytest.fixture(scope="session")
def exported(finished, tmp_path_factory):
    """A copy of `finished` with its export, likewise."""
    workdir = shutil.copytree(finished, tmp_path_factory.mktemp("exported") / "run")
    export.export(workdir)
    return workdir


@pytest.fixture(scope="session")
def per_lane(tmp_path_factory):
    """The workdir of a trained model of three lanes."""
    workdir = tmp_path_factory.mktemp("per_lane")
    changes = {"model.margin_loss": "per_lane", "model.lanes": "mlcn1:w1*2,mlcn2:w1", "data.validation_fraction": 0.2}
    loop.train(RunConfig().replace(TINY | changes), workdir)
    (workdir / "tiers.json").write_text(json.dumps(TIERS))
    return workdir


@pytest.fixture(scope="session")
def tiers_folder(per_lane):
    """Its tiers, cut at the pixels."""
    return split.split(per_lane, per_lane / "tiers.json")


@pytest.fixture(scope="session")
def cut_folder(per_lane):
    """Its tiers, cut at the primary capsules."""
    return split.split(per_lane, per_lane / "tiers.json", "capsules", out="tiers-capsules")


@pytest.fixture(scope="session")
def tiers(tiers_folder):
    """The artifacts of these tiers, by name."""
    return {name: TierArtifact(tiers_folder / name) for name in ("end", "edge", "cloud")}


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """Folders of a small Fashion-MNIST and a small CIFAR-10, by name."""
    root = tmp_path_factory.mktemp("data")
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    batch = cifar_bytes(images, np.arange(20)[:, np.newaxis] % 10)
    cifar = {f"data_batch_{i}.bin": batch for i in range(1, 6)} | {"test_batch.bin": batch}
    return {
        "fashion_mnist": str(write_files(root / "fashion", idx_files(num_train=1200, num_test=200, size=28))),
        "cifar10": str(write_files(root / "cifar", cifar)),
    }


@pytest.fixture
def tiny() -> RunConfig:
    """Two small lanes on the digits, 20 steps of 50 images."""
    return RunConfig().replace(TINY)


TINY = {
    "model.lanes": "mlcn1:w1*2",
    "model.decoder": "16,16",
    "train.batch_size": 50,
    "train.num_steps": 20,
    "train.checkpoint_every": 5,
    "train.log_every": 5,
}

TIERS = {
    "tiers": [{"name": "end", "lanes": [1]}, {"name": "edge", "lanes": [0]}, {"name": "cloud"}],
    "groups": {"low": list("01234"), "high": list("56789")},
    "tolerance": 0.05,
}

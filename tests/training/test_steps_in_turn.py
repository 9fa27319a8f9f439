"""Steps on a CPU: one after the other, so that they hold the memory of one."""

import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import optax
import pytest

from mlcn_jax import allocator, host
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.step import TrainState

_STEPS = """
import sys
from mlcn_jax import host
from mlcn_jax.allocator import keep_memory, share_heaps

keep_memory()
share_heaps("")  # or what each heap keeps would count
host.set_up_jax()
import jax, numpy as np, optax
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.step import TrainState

spec, optimizer = ModelSpec("mlcn", (32, 32, 3), 10, lanes="mlcn2:w2*4"), optax.sgd(0.1)
runner = MeshRunner(spec, optimizer, None, reconstruction_weight=0.4, seed=0)
runner.start(jax.device_get(TrainState.create(init_params(spec, jax.random.key(0)), optimizer)))
rng = np.random.default_rng(0)
batch = rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 200, dtype=np.int32)
runner.compile(*batch)

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = resident("VmRSS")
metrics = [runner.step(*runner.place(*batch)) for _ in range(12)]
jax.block_until_ready(metrics)
print(resident("VmHWM") - before, runner._compiled[0].memory_analysis().temp_size_in_bytes)
"""


def test_what_a_cpu_computes_in_turn_is_set_before_it_is_looked_for(monkeypatch):
    """Which device JAX finds decides where programs are cached, and it is then too late."""
    called, backend = [], jax.default_backend
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: called.append("backend") or backend())
    monkeypatch.setattr(host, "compute_in_turn", lambda: called.append("in turn"))
    host.set_up_jax(least_seconds=0.0)  # as in conftest.py
    assert called == ["in turn", "backend"]


@pytest.mark.parametrize(("devices", "queue"), [(-1, False), (1, False), (2, True)])
def test_several_devices_of_a_cpu_keep_their_queues(monkeypatch, devices, queue):
    seen = {}
    monkeypatch.setenv("XLA_FLAGS", "")
    config = mock.Mock(values={"jax_num_cpu_devices": devices}, update=seen.__setitem__)
    monkeypatch.setattr(host, "jax", mock.Mock(config=config))
    host.compute_in_turn()
    assert seen == ({} if queue else {"jax_cpu_enable_async_dispatch": False})


def test_the_block_of_buffers_is_looked_for_before_each_step(monkeypatch):
    called, sizes = [], []
    monkeypatch.setattr(allocator.StepBlock, "prepare", lambda block: called.append("prepare"))
    start = allocator.StepBlock.__init__
    monkeypatch.setattr(allocator.StepBlock, "__init__", lambda block, size: sizes.append(size) or start(block, size))
    spec, optimizer = ModelSpec("mlcn", (18, 18, 1), 2, lanes="mlcn2:w1*1", decoder=(4,)), optax.sgd(0.1)
    runner = MeshRunner(spec, optimizer, None, reconstruction_weight=0.4, seed=0)
    runner.start(TrainState.create(init_params(spec, jax.random.key(0)), optimizer))
    batch = np.zeros((2, 18, 18, 1), np.uint8), np.zeros(2, np.int32)
    runner.compile(*batch)
    step = runner._compiled[0]
    runner._compiled[0] = lambda *given: called.append("step") or step(*given)
    for _ in range(2):
        runner.step(*runner.place(*batch))
    assert called == ["prepare", "step"] * 2
    single = len(jax.local_devices()) == 1
    assert sizes == [step.memory_analysis().temp_size_in_bytes if single else 0]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_steps_that_nobody_waits_for_hold_the_buffers_of_one():
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown, temporary = map(int, done.stdout.split())
    assert temporary > 50 * 2**20  # or it would not show
    assert 0.25 * temporary < grown < 2.5 * temporary

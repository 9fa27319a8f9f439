"""A step that does not fit the memory of its device is said before it is taken."""

import errno
import logging
import re
import sys
import types
import weakref

import jax
import numpy as np
import pytest

from mlcn_jax import host
from mlcn_jax.errors import Diverged, InputError, Stopped
from mlcn_jax.launch import EXIT_INPUT, launch
from mlcn_jax.rounds import worker
from mlcn_jax.training import loop, room
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.session import open_session

ADVICE = r"use model\.remat=full, train\.accumulation_steps, or .* describe --memory_gib=N"


@pytest.mark.parametrize("changes", [{}, {"parallel.plan": "stacks", "parallel.lane": 2}])
def test_a_device_that_states_too_little_memory_is_refused_before_the_first_step(tiny, tmp_path, monkeypatch, changes):
    monkeypatch.setattr(host, "device_memory_bytes", lambda device: 2**20)
    monkeypatch.setattr(MeshRunner, "step", None)
    with pytest.raises(InputError, match=rf"needs 0\.\d\d GiB, but the device has 0\.00 GiB .* {ADVICE}"):
        loop.train(tiny.replace(changes), tmp_path)


def test_a_worker_of_rounds_is_refused_too(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "device_memory_bytes", lambda device: 2**20)
    config = tiny.replace({"train.rounds.steps": 4, "train.rounds.workers": 2})
    trainer = worker.Trainer(open_session(config), 0, tmp_path)
    with pytest.raises(InputError, match="but the device has"):
        trainer.change(0, np.zeros(trainer.size, np.float32), False, lambda: None)
    trainer.close()


def test_more_than_the_memory_of_a_machine_is_warned_of(monkeypatch, caplog):
    runner = types.SimpleNamespace(step_bytes=lambda: {jax.devices()[0]: 3 * 2**30})
    monkeypatch.setattr(host, "machine_memory_bytes", lambda: 4 * 2**30)
    room.check_step_fits(runner)
    assert not caplog.records
    monkeypatch.setattr(host, "machine_memory_bytes", lambda: 2**31)
    room.check_step_fits(runner)
    assert "a training step needs 3.00 GiB, but this machine has 2.00 GiB of memory" in caplog.text
    assert re.search(ADVICE, caplog.text)


def test_each_device_is_compared_with_its_own_memory(monkeypatch):
    gpu, cpu = "gpu", "cpu"
    limits = {gpu: 2**30, cpu: None}
    monkeypatch.setattr(host, "device_memory_bytes", limits.get)
    monkeypatch.setattr(host, "machine_memory_bytes", lambda: 4 * 2**30)
    room.check_step_fits(types.SimpleNamespace(step_bytes=lambda: {gpu: 2**29, cpu: 3 * 2**30}))
    with pytest.raises(InputError, match=r"needs 2\.00 GiB, but the device has 1\.00 GiB"):
        room.check_step_fits(types.SimpleNamespace(step_bytes=lambda: {cpu: 0, gpu: 2**31}))


@pytest.mark.parametrize(("container_gib", "expected"), [(8, 8), (400, 16)])
def test_cores_share_the_memory_of_a_machine_but_not_the_limit_of_a_container(monkeypatch, container_gib, expected):
    for name, value in (("_physical_memory_bytes", 512), ("machine_memory_bytes", container_gib)):
        monkeypatch.setattr(host, name, lambda value=value: value * 2**30)
    monkeypatch.setattr(host, "num_cores", lambda: 2)
    monkeypatch.setattr(host.os, "cpu_count", lambda: 64)
    assert host.usable_memory_bytes() == expected * 2**30


def test_the_cache_can_be_named_where_there_is_no_home(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(host.Path, "home", homeless)
    monkeypatch.setenv("MLCN_JAX_CACHE", str(tmp_path))
    assert host.cache_folder() == tmp_path


@pytest.fixture
def undone(monkeypatch):
    """Undoes what `launch` sets."""
    ours = logging.getLogger("mlcn_jax")
    for of, name in ((ours, "propagate"), (ours, "level"), (sys, "unraisablehook")):
        monkeypatch.setattr(of, name, getattr(of, name))
    monkeypatch.setattr(ours, "handlers", [])


_LACK = (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), MemoryError("4 GiB"), OSError(errno.ENOMEM, "no memory"))


@pytest.mark.parametrize("error", _LACK)
def test_memory_that_runs_out_is_advised_on(capsys, undone, error):
    def command():
        raise error

    with pytest.raises(SystemExit) as ended:
        launch(command)
    assert ended.value.code == EXIT_INPUT
    assert re.search(ADVICE, capsys.readouterr().err)


@pytest.mark.parametrize(
    "error", [Stopped("stopped"), Diverged("nan"), OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "i/o")]
)
def test_what_a_command_held_is_freed_before_its_error_ends_the_process(capsys, undone, error):
    """Arrays and programs that JAX has to free while Python ends can crash it."""
    held = []

    def command():
        array = np.zeros(1)
        held.append(weakref.ref(array))
        raise type(error)(*error.args)

    with pytest.raises(SystemExit) as ended:
        launch(command)
    assert held[0]() is None, f"{ended.value} keeps it"
    assert str(error) in capsys.readouterr().err

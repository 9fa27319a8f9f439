"""The runtime that computes is the one measured to be faster, for the same lengths, on this CPU."""

import errno
import importlib.metadata
import json
import math
import shutil
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.serving import runtime
from mlcn_jax.serving.artifact import Artifact, apply_in_batches
from mlcn_jax.serving.onnx_file import open_onnx
from mlcn_jax.serving.predict import open_model

SHAPE = (4, 4, 1)


class Clock:
    """In place of `time`: only what sleeps takes time, and exactly as much as it says."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runtime, "time", CLOCK)
    monkeypatch.setattr(runtime, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(runtime, "_SPREAD_SECONDS", 0)
    monkeypatch.setattr(runtime, "_ROUND_SECONDS", 0)


def lengths_of(calls: list, name: str, seconds=lambda count: 0.0, error: float = 0.0):
    """A runtime that takes so many seconds and is off by `error`."""

    def compute(images):
        calls.append((name, len(images)))
        CLOCK.sleep(seconds(len(images)))
        return images.mean(axis=(1, 2)).repeat(3, axis=1) + np.float32(1 + error)

    return compute


def images_of(count: int) -> np.ndarray:
    return np.zeros((count, *SHAPE), np.uint8)


def test_each_batch_size_is_measured_once_and_the_faster_runtime_computes(tmp_path):
    calls: list = []
    computes = {
        "xla": lengths_of(calls, "xla", lambda count: 0.002),
        "onnxruntime": lengths_of(calls, "onnxruntime", lambda count: 0.001 * count),
    }
    record = tmp_path / "cache" / "runtimes.json"
    fastest = runtime.Fastest(computes, SHAPE, record, {"cpu": "a"})
    assert fastest.choice(1) == "onnxruntime"
    assert fastest.choice(7) == "xla"
    calls.clear()
    np.testing.assert_array_equal(fastest(images_of(5)), np.ones((5, 3)))
    assert calls == [("xla", 5)]  # 5 to 8 images count as 8
    calls.clear()
    same = runtime.Fastest(computes, SHAPE, record, {"cpu": "a"})
    assert same.milliseconds == fastest.milliseconds
    assert same.choices() == {1: "onnxruntime", 4: "xla", 8: "xla"}
    assert (same.choice(1), same.choice(8), calls) == ("onnxruntime", "xla", [])
    other = runtime.Fastest(computes, SHAPE, record, {"cpu": "b"})
    assert other.milliseconds == {}
    assert other.choice(1) == "onnxruntime"
    assert calls
    assert set(json.loads(record.read_text())["milliseconds"]) == {"1"}


def test_a_runtime_is_timed_when_its_threads_have_spread_over_the_cores(monkeypatch):
    """After a pause, threads that wake up share a core for a while; a runtime in use is not paused."""
    monkeypatch.setattr(runtime, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(runtime, "_SPREAD_SECONDS", 0.1)
    monkeypatch.setattr(runtime, "_ROUND_SECONDS", 0.05)
    begun = last = -math.inf

    def compute(images):
        nonlocal begun, last
        if CLOCK.now - last > 0.04:
            begun = CLOCK.now
        seconds = 0.004 if CLOCK.now - begun < 0.06 else 0.001
        lengths = lengths_of([], "onnxruntime", lambda count: seconds)(images)
        last = CLOCK.now
        return lengths

    computes = {"xla": lengths_of([], "xla", lambda count: 0.002), "onnxruntime": compute}
    assert runtime.Fastest(computes, SHAPE, None, {}).choice(1) == "onnxruntime"


def test_batches_between_powers_of_two_count_as_they_are_for_a_runtime_that_does_not_pad():
    computes = {
        "xla": lengths_of([], "xla", lambda count: 0.0065),
        "onnxruntime": lengths_of([], "onnxruntime", lambda count: 0.001 * count),
    }
    fastest = runtime.Fastest(computes, SHAPE, None, {})
    assert [fastest.choice(count) for count in (4, 5, 7, 8)] == ["onnxruntime", "onnxruntime", "xla", "xla"]


def test_calls_of_xla_between_powers_of_two_add_up():
    computes = {
        "xla": lengths_of([], "xla", lambda count: 0.001 * count),
        "onnxruntime": lengths_of([], "onnxruntime", lambda count: 0.014),
    }
    fastest = runtime.Fastest(computes, SHAPE, None, {})
    assert [fastest.choice(count) for count in (12, 15, 16)] == ["xla", "onnxruntime", "onnxruntime"], "15 are padded"


def test_a_recorded_choice_leaves_no_program_to_compile_during_requests(tmp_path):
    """9 to 12 images are 8 and 1 to 4 for XLA: it needs programs for those, which another runtime computes faster."""
    calls: list = []
    computes = {
        "xla": lengths_of(calls, "xla", lambda count: 0.004),
        "onnxruntime": lengths_of(calls, "onnxruntime", lambda count: 0.001 if count < 8 else 0.02),
    }
    record = tmp_path / "runtimes.json"
    runtime.Fastest(computes, SHAPE, record, {}).warm_up(16)
    calls.clear()
    again = runtime.Fastest(computes, SHAPE, record, {})
    again.warm_up(16)
    assert calls == [("xla", size) for size in (1, 2, 4, 8, 16)]
    assert {again.choice(count) for count in (8, 9, 16)} == {"xla"}


def test_calls_in_sizes_at_which_only_xla_may_compute_are_timed_too():
    computes = {
        "xla": lengths_of([], "xla", lambda count: 0.01),
        "onnxruntime": lambda images: lengths_of([], "", lambda count: 0.015, error=float(len(images) == 8))(images),
    }
    fastest = runtime.Fastest(computes, SHAPE, None, {})
    assert fastest.choice(8) == "xla"
    assert fastest.choice(12) == "onnxruntime", "XLA would take two calls"


@pytest.mark.parametrize("count", [1, 3, 8, 9, 33, 100, 128, 300])
def test_little_is_wasted_on_padding(count):
    calls = []

    def call(rows):
        calls.append(len(rows))
        return rows.sum(axis=1, keepdims=True)

    rows = np.random.default_rng(0).normal(size=(count, 5))
    np.testing.assert_array_equal(apply_in_batches([(1, call)], rows), call(rows))
    *sizes, _ = calls
    assert set(sizes) <= {2**power for power in range(8)}
    assert sum(sizes) - count <= max(1, count // 8)


def test_a_runtime_with_other_lengths_is_not_used_however_fast(tmp_path, caplog):
    calls: list = []
    computes = {
        "xla": lengths_of(calls, "xla", lambda count: 0.002),
        "onnxruntime": lengths_of(calls, "onnxruntime", error=1e-3),
    }
    fastest = runtime.Fastest(computes, SHAPE, None, {})
    assert fastest.choice(2) == "xla"
    assert "onnxruntime is not used: its lengths differ from those of xla by 0.001" in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cpu": "a"}', '{"cpu": "a", "milliseconds": {"x": 1}}'])
def test_a_damaged_record_is_measured_again(tmp_path, content):
    record = tmp_path / "runtimes.json"
    record.write_text(content)
    computes = {"xla": lengths_of([], "xla"), "onnxruntime": lengths_of([], "onnxruntime", lambda count: 0.002)}
    assert runtime.Fastest(computes, SHAPE, record, {"cpu": "a"}).choice(1) == "xla"
    assert json.loads(record.read_text())["cpu"] == "a"


def test_a_converted_model_that_cannot_be_used_is_named(exported, tmp_path, monkeypatch, caplog):
    folder, converted = tmp_path / "export", tmp_path / "onnx" / "model.onnx"
    folder.symlink_to(exported / "export")
    manifest = Artifact(folder).manifest
    xla = lengths_of([], "xla")

    def refused(pattern: str) -> None:
        with pytest.raises(InputError, match=pattern):
            runtime.choose(xla, converted, manifest, SHAPE, required=True)
        caplog.clear()
        assert runtime.choose(xla, converted, manifest, SHAPE, required=False) is xla
        assert "computing with XLA" in caplog.text

    refused(r"model.onnx is missing: .*mlcn_jax onnx --workdir=")
    converted.parent.mkdir()
    converted.write_bytes(b"model")
    refused("model.onnx cannot be read")
    converted.with_suffix(".json").write_text("null")
    refused("its .json holds no object")
    description = {"export": "another", "sha256": host.sha256_of(converted)}
    converted.with_suffix(".json").write_text(json.dumps(description))
    refused("was converted from another export")
    converted.with_suffix(".json").write_text(json.dumps(description | {"export": manifest["sha256"]}))
    converted.write_bytes(b"other")
    refused("was altered or truncated")
    with monkeypatch.context() as failing:
        failing.setattr(runtime.host, "sha256_of", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        refused("model.onnx cannot be read: Input/output error; the converted model may be intact$")
    converted.write_bytes(b"model")
    for checked in ([], {"largest_difference": {"test": None}}):
        about = description | {"export": manifest["sha256"], "checked": checked}
        converted.with_suffix(".json").write_text(json.dumps(about))
        refused("does not say how much lengths differ")
    del about["checked"]
    converted.with_suffix(".json").write_text(json.dumps(about))
    refused("ONNX Runtime .* cannot read")  # what is no model at all
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libstdc++.so.6 is too old')")
    with monkeypatch.context() as broken:
        broken.syspath_prepend(tmp_path)
        broken.delitem(sys.modules, "onnxruntime", raising=False)
        refused(r"cannot be imported \(libstdc\+\+\.so\.6 is too old\)")
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    refused(r"pip install .mlcn_jax\[onnxruntime\]")


def test_a_package_of_onnx_runtime_of_another_name_is_used(tmp_path, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "onnxruntime":  # as where only onnxruntime-gpu is installed
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    own, converted = lengths_of([], "onnxruntime"), tmp_path / "model.onnx"
    converted.with_suffix(".json").write_text('{"sha256": "b"}')
    monkeypatch.setattr(runtime, "_problem", lambda *args: "")
    monkeypatch.setattr(runtime, "open_onnx", lambda path, output, spin: own)
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = runtime.choose(lengths_of([], "xla"), converted, {"sha256": "a"}, SHAPE, required=False)
    assert isinstance(found, runtime.Fastest)
    xla = lengths_of([], "xla")
    assert runtime.choose(xla, converted, {"sha256": "a"}, SHAPE, required=False, dtype="bfloat16") is xla
    with pytest.raises(InputError, match="the export computes in bfloat16 and a converted model in float32"):
        runtime.choose(xla, converted, {"sha256": "a"}, SHAPE, required=True, dtype="bfloat16")


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """What `choose` returns for a slower model that differed so much on test images when it was converted."""
    converted = tmp_path / "model.onnx"
    monkeypatch.setenv("MLCN_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runtime, "_problem", lambda *args: "")
    monkeypatch.setattr(
        runtime, "open_onnx", lambda path, output, spin: lengths_of([], "onnxruntime", lambda count: 0.002)
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    monkeypatch.setitem(sys.modules, "onnxruntime", types.SimpleNamespace(__version__="1"))

    def choose(on_test_images=1e-6):
        about = {"sha256": "b", "checked": {"largest_difference": {"random": 0.0, "test": on_test_images}}}
        converted.with_suffix(".json").write_text(json.dumps(about))
        return runtime.choose(lengths_of([], "xla"), converted, {"sha256": "a"}, SHAPE, required=False)

    return choose


def test_a_model_that_differed_on_test_images_is_not_used(chosen, caplog):
    assert isinstance(chosen(1e-6), runtime.Fastest)
    assert not isinstance(chosen(5e-5), runtime.Fastest)
    assert "its lengths differ from those of xla by 5e-05 on test images" in caplog.text


def test_a_model_that_the_machine_fails_to_read_is_not_used(chosen, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "open_onnx", Mock(side_effect=OSError(errno.EIO, "I/O error")))
    assert not isinstance(chosen(), runtime.Fastest)
    assert "ONNX Runtime cannot be used: [Errno 5] I/O error" in caplog.text


def test_measurements_of_another_cpu_are_kept_apart(chosen, monkeypatch):
    assert chosen().choice(1) == "xla"
    assert chosen().milliseconds
    for name, value in (("cpu_digest", "other"), ("num_threads", 99), ("name_of", "other")):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(runtime.host, name, lambda *args, value=value: value)
            assert not chosen().milliseconds, name
            chosen().choice(1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
        assert not chosen().milliseconds
    assert chosen().milliseconds


def test_without_a_home_directory_measurements_are_not_kept(chosen, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(runtime.host, "cache_folder", no_home)
    assert chosen().choice(1) == "xla"


def test_lengths_of_nothing_but_zeros_are_equal():
    def zeros(images):
        return np.zeros((len(images), 3), np.float32)

    fastest = runtime.Fastest({"xla": zeros, "onnxruntime": zeros}, SHAPE, None, {})
    assert fastest.choice(1) in ("xla", "onnxruntime")
    assert runtime.difference(zeros(images_of(1)), zeros(images_of(1))) == 0


@pytest.fixture
def file(tmp_path):
    """A file that a test lets ONNX Runtime open in its own way."""
    path = tmp_path / "model.onnx"
    path.touch()
    return path


def test_a_lack_of_memory_is_not_taken_for_a_damaged_file(file, monkeypatch):
    def no_memory(path, options, providers):
        raise RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc")

    monkeypatch.setattr(pytest.importorskip("onnxruntime"), "InferenceSession", no_memory)
    with pytest.raises(MemoryError, match="bad_alloc"):
        open_onnx(file, runtime.OUTPUT)


def test_memory_that_runs_out_while_onnx_runtime_computes_is_told_as_such(file, monkeypatch):
    class Session:
        def __init__(self, path, options, providers):
            self.said = "Failed to allocate memory for requested buffer of size 65536000"

        def get_modelmeta(self):
            return types.SimpleNamespace(custom_metadata_map={})

        def run(self, outputs, inputs):
            raise Exception(self.said)  # those of ONNX Runtime have no other base class

    monkeypatch.setattr(pytest.importorskip("onnxruntime"), "InferenceSession", Session)
    compute = open_onnx(file, runtime.OUTPUT)
    with pytest.raises(MemoryError, match=r"ONNX Runtime, .*model.onnx: Failed to allocate memory"):
        compute(np.zeros(1, np.uint8))


def test_an_error_of_the_machine_is_not_taken_for_a_damaged_file(file, monkeypatch):
    pytest.importorskip("onnxruntime")

    def fail(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Too many open files"):
        open_onnx(file, runtime.OUTPUT)


def test_threads_of_onnx_runtime_spin_between_calls_only_if_told(file, monkeypatch):
    opened: list = []

    class Session:
        def __init__(self, path, options, providers):
            try:
                opened.append(options.get_session_config_entry("session.force_spinning_stop"))
            except RuntimeError:  # it was not set
                opened.append("")

        def get_modelmeta(self):
            return types.SimpleNamespace(custom_metadata_map={})

    monkeypatch.setattr(pytest.importorskip("onnxruntime"), "InferenceSession", Session)
    open_onnx(file, runtime.OUTPUT)
    open_onnx(file, runtime.OUTPUT, spin=True)
    assert opened == ["1", ""]


@pytest.mark.parametrize(("error", "used"), [(1e-6, True), (1e-3, False), (float("nan"), False)])
def test_a_required_runtime_must_compute_the_lengths_of_xla(monkeypatch, error, used):
    own, xla = lengths_of([], "onnxruntime", error=error), lengths_of([], "xla")
    monkeypatch.setattr(runtime, "_problem", lambda *args: "")
    monkeypatch.setattr(runtime, "open_onnx", lambda path, output, spin: own)
    if used:
        assert runtime.choose(xla, Path("model.onnx"), {}, SHAPE, required=True) is own
    else:
        with pytest.raises(InputError, match=r"differ from those of xla by .*, 1e-05 is allowed; use runtime xla"):
            runtime.choose(xla, Path("model.onnx"), {}, SHAPE, required=True)
        if np.isfinite(error):  # accelerators round float32 in products
            monkeypatch.setattr("jax.default_backend", lambda: "gpu")
            assert runtime.choose(xla, Path("model.onnx"), {}, SHAPE, required=True) is own


def test_an_unknown_runtime_and_one_without_a_model_are_refused(exported):
    with pytest.raises(InputError, match="runtime 'tensorrt' is unknown: use auto, xla, onnxruntime"):
        Artifact(exported / "export", runtime="tensorrt")
    with pytest.raises(InputError, match=rf"model\.onnx is missing: .* onnx --workdir={exported} converts it"):
        open_model(str(exported / "export"), "onnxruntime")


def test_an_export_of_another_name_is_converted_where_the_command_finds_it(exported, tmp_path):
    folder = shutil.copytree(exported / "export", tmp_path / "digits-v1")
    with pytest.raises(InputError, match=rf"missing: copy {folder} to FOLDER/export, .* onnx --workdir=FOLDER conv"):
        open_model(str(folder), "onnxruntime")

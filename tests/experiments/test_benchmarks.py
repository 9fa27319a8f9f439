"""benchmarks: what is counted and compared; the figures themselves are not tested."""

import functools
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from conftest import REPOSITORY
from flax import traverse_util
from jax import lax

from benchmarks import (
    conv_algorithms,
    convert,
    distillation,
    inference,
    inference_parts,
    lanes_together,
    networks,
    normalisation,
    peers,
    roofline,
    worker,
)
from benchmarks.frameworks import in_artifact, in_mlcn_jax
from mlcn_jax.errors import InputError
from mlcn_jax.launch import EXIT_FAILED
from mlcn_jax.nn import capsules, conv, losses, resnet
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.model import apply_model, class_lengths, encode, init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement.cost import cost_of
from mlcn_jax.serving import export, onnx
from mlcn_jax.training.step import TrainState, make_train_step

TINY = networks.Network("mlcn2", (18, 18, 1), lanes=2, width=1)


def test_shares_of_a_profile_add_up_by_part():
    hlo = """
      %ynn_fusion.3 = f32[10000,256]{1,0} fusion(%a), metadata={op_name="jit(step)/transpose(jvp(x))/encoder/dot"}
      ROOT %multiply.1 = f32[8]{0} multiply(%b, %c), metadata={op_name="jit(step)/adam"}
      %dot.7 = f32[100,512]{1,0} dot(%d, %e), metadata={op_name="jit(step)/jvp(x)/decoder/dot"}
    """
    network = networks.find("mlcn1_4x4_28x28x1")
    parts, kinds = roofline.shares(network, hlo, {"ynn_fusion.3": 6, "multiply.1": 1, "dot.7": 3})
    assert parts == {
        "encoder, backward: map between the convolutions": 0.6,
        "decoder": 0.3,
        "optimizer, losses and the rest": 0.1,
    }
    assert next(iter(kinds)) == "ynn_fusion f32[10000,256], encoder, backward: map between the convolutions"


def test_the_time_of_one_image_is_split_by_what_operations_do():
    hlo = """
      %ynn_fusion.3 = f32[1,256]{1,0} fusion(%a), metadata={op_name="jit(lengths)/encoder/dot_general"}
      %copy.2 = f32[8]{0} copy(%b)
      ROOT %multiply.1 = f32[8]{0} multiply(%b, %c), metadata={op_name="jit(lengths)/encoder/mul"}
    """
    microseconds = {"ynn_fusion.3": 6000, "copy.2": 1000, "multiply.1": 3000}
    parts = inference_parts.parts_of(hlo, microseconds, seconds=0.012, calls=10)
    expected = {"products": 0.6, "layout": 0.1, "element-wise and sums": 0.3, "not in operations": 0.2}
    assert parts == pytest.approx(expected)
    beside_others = inference_parts.parts_of(hlo, microseconds, seconds=0.009, calls=10)
    assert "not in operations" not in beside_others


def test_one_image_is_traced_often_enough(monkeypatch):
    """What no operation takes is left of the time of the very calls that are traced, not of others."""
    monkeypatch.setattr(inference_parts.in_mlcn_jax, "write_export", lambda *args: None)
    export = SimpleNamespace(Program=lambda *args: SimpleNamespace(infer=lambda images: None))
    monkeypatch.setattr(inference_parts, "in_artifact", export)
    traced = []

    def trace(call, hlo, calls):
        traced.append(calls)
        return {}, 3.0 * calls

    monkeypatch.setattr(inference_parts.roofline, "traced", trace)
    found = inference_parts.measure(TINY, 1, 1, lambda: 1.0)
    assert traced[0] >= 50
    assert found["parts_milliseconds"] == {"not in operations": 3000.0}


def test_the_time_of_a_loop_is_that_of_the_operations_in_it():
    hlo = """
      ROOT %tanh.1 = f32[8]{0} tanh(%a), metadata={op_name="jit(step)/while/body/a call(b)"}
      %while.2 = (s32[], f32[8]{0}, /*index=2*/f32[2,3]{1,0:T(8,128)}) while(%tuple.1), condition=%c, body=%b
      %cond.1.clone = f32[8]{0} conditional(%d, %e, %f), branch_computations={%g, %h}
      %call.3 = f32[8]{0} call(%a), to_apply=%outlined
      %call.4 = (s32[], f32[]) call(%a), to_apply=%small, frontend_attributes={xla_cpu_small_call="true"}
    """
    took = {
        "tanh.1": 3.0,
        "while.2": 7.0,
        "cond.1.clone": 20.0,
        "call.3": 4.0,
        "call.4": 1.0,
        "of another program": 2.0,
    }
    events = [{"dur": took[name], "args": {"hlo_op": name}} for name in (*took, "tanh.1")]
    events += [{"dur": 100.0, "args": {"bytes": 3}}, {"dur": 100.0}, {"args": {"hlo_op": "tanh.1"}}]
    assert roofline.by_operation(events, hlo) == {"tanh.1": 6.0, "call.4": 1.0, "of another program": 2.0}


def test_warm_calls_are_traced_and_timed():
    @jax.jit
    def rows(x):
        return jax.lax.scan(lambda total, row: (total + jnp.sum(row @ row), row @ row), 0.0, x)[1]

    x = jnp.ones((16, 64, 64))
    program = rows.lower(x).compile()
    called = []

    def call():
        called.append(1)
        program(x).block_until_ready()

    microseconds, seconds = roofline.traced(call, program.as_text(), calls=3)
    assert len(called) == 4, "the first warms up"
    assert " while(" in program.as_text()
    assert not [name for name in microseconds if name.startswith("while")]
    assert 0 < sum(microseconds.values()) / 1e6 < os.cpu_count() * seconds


@pytest.mark.parametrize("algorithm", ["native", "winograd"])
def test_convolutions_of_stages_are_timed_with_their_pooling(algorithm):
    case = 1, 7, 8, 3, 5, 1, resnet.even((4, 7, 7, 8))
    program, (x, kernels) = conv_algorithms.compile_case(case, 4, algorithm, False, True, False, "float32")
    whole = lax.conv_general_dilated(x[0], kernels[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    pooled = whole[:, :6, :6].reshape(4, 3, 2, 3, 2, 5).max(axis=(2, 4))
    np.testing.assert_allclose(program(x, kernels), pooled, atol=1e-3)


def test_convolutions_of_stages_are_those_of_lanes():
    for title, (size, channels, filters) in conv_algorithms.POOLED.items():
        width = int(title.partition(",")[0].rpartition("w")[2])
        spec = ModelSpec("mlcn", image_shape=(32, 32, 3), num_classes=10, lanes=f"resnet:w{width}d2")
        shapes = [layer.convolution[:2] for layer in cost_of(spec, spec.lane_specs[0]).layers if layer.convolution]
        assert ((size, size, channels), (3, 3, channels, filters)) in [(x[-3:], kernel) for x, kernel in shapes], title


def test_the_error_of_an_algorithm_is_relative_to_the_largest_value(rng):
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 7, 7, 3), (3, 3, 3, 4)))
    exact = conv.conv2d(jnp.asarray(x), jnp.asarray(kernel), padding="SAME", algorithm="native")
    assert conv_algorithms.error(x, kernel, exact) < 1e-6
    wrong = exact.at[0, 0, 0, 0].add(jnp.max(jnp.abs(exact)))
    assert conv_algorithms.error(x, kernel, wrong) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("form", ["jax", "fused"])
def test_normalisation_and_activation_in_every_form_are_those_of_lanes(form, rng):
    values, bias, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 9, 3), (1, 1, 3), (2, 9, 3))
    )
    forms = (normalisation.FORMS[name] for name in (form, "lanes"))
    (found, gradients), (expected, of_lanes) = (
        normalisation.program(f, values, bias, weight)(values, bias, weight) for f in forms
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), gradients, of_lanes)


@pytest.mark.parametrize("count", [2, 3])
def test_lanes_together_are_the_lanes_in_turn(count, rng):
    x, kernels = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 5, 5, 3), (5, 3, 3, 3, 4)))

    def lanes(x, kernels):
        return jax.vmap(functools.partial(conv.conv2d, algorithm="native"), (None, 0))(x, kernels)

    expected = jax.jit(lanes)(x, kernels)
    program = lanes_together.compiled(count, lambda: jax.jit(lanes).lower(x, kernels))
    assert program.as_text().count("stablehlo.convolution") == -(-5 // count)
    np.testing.assert_allclose(program.compile()(x, kernels), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mlcn2", "resnet"])
def test_operations_of_lanes_are_known_by_their_names_in_the_step(kind):
    network = networks.Network(kind, (18, 18, 1), lanes=1, width=1)
    spec, optimizer = in_mlcn_jax.make_spec(network), optax.sgd(0.1)
    state = jax.eval_shape(lambda key: TrainState.create(init_params(spec, key), optimizer), jax.random.key(0))
    step = make_train_step(spec, optimizer, reconstruction_weight=1.0, seed=0)
    batch = np.zeros((2, *network.image_shape), np.uint8), np.zeros(2, np.int32)
    text = jax.jit(step).lower(state, *batch).as_text(debug_info=True)
    parts = {roofline.part_of(network, name, (2, 10)).partition(":")[0] for name in re.findall(r'loc\("(.*?)"', text)}
    assert parts == {"encoder, forward", "encoder, backward", "decoder", "optimizer, losses and the rest"}


@pytest.mark.parametrize(
    ("op_name", "shape", "part"),
    [
        ("jvp(jvp(Lane))/trunk/conv_general_dilated", (500, 31, 31, 32), "forward: convolutions, 31x31"),
        ("jvp(transpose(jvp(Lane)))/trunk/conv_general_dilated", (500, 15, 15, 32), "backward: convolutions, 15x15"),
        ("jvp(transpose(jvp(Lane)))/trunk/conv_general_dilated", (3, 3, 32, 96), "backward: gradients of kernels"),
        ("jvp(transpose(jvp(Lane)))/trunk/conv_general_dilated", (32, 3, 3, 96), "backward: gradients of kernels"),
        ("jvp(jvp(Lane))/trunk/reduce_max", (500, 7, 7, 96), "forward: pooling, 7x7"),
        ("jvp(transpose(jvp(Lane)))/trunk/eq", (500, 15, 2, 15, 2, 64), "backward: pooling, 15x15"),
        ("jvp(Lane)/trunk/while/body/pooling/max", (20, 15, 15, 64), "forward: pooling, 15x15"),
        ("transpose(jvp(Lane))/trunk/while/body/pooling/concatenate", (5, 3, 2, 3, 2, 64), "backward: pooling, 3x3"),
        ("jvp(jvp(Lane))/trunk/tanh", (500, 3, 3, 128), "forward: normalisation and activation, 3x3"),
        ("jvp(jvp(Lane))/head/dot_general", (500, 10), "forward: convolutions, head and statistics"),
    ],
)
def test_operations_of_residual_lanes_are_told_apart_by_their_maps(op_name, shape, part):
    network = networks.find("resnet_8xw2d2_32x32x3")
    assert roofline.part_of(network, f"jit(step)/{op_name}", shape) == f"encoder, {part}"


@pytest.mark.long
def test_our_program_trains_the_network_that_it_is_named_after(rng):
    images = rng.integers(0, 256, (4, *TINY.image_shape), dtype=np.uint8)
    labels = rng.integers(0, networks.NUM_CLASSES, 4, dtype=np.int32)
    weights = in_mlcn_jax.start_weights(TINY)
    program = in_mlcn_jax.Program(TINY, 4, weights, "vmap", "float32")
    v, reconstructions = apply_model(in_mlcn_jax.make_spec(TINY), program.params, images / np.float32(255), labels)
    loss = jnp.mean(losses.margin_loss(capsules.lengths(v), labels))
    loss += networks.RECONSTRUCTION_WEIGHT * jnp.mean(losses.reconstruction_loss(reconstructions, images / 255))
    first, later = (float(program.train(images, labels)) for _ in range(2))
    np.testing.assert_allclose(first, loss, rtol=1e-5)
    assert later < first


@pytest.mark.long
def test_what_infers_is_the_export_of_the_weights_that_the_peers_get(rng, tmp_path):
    network = networks.Network("resnet", (10, 10, 1), lanes=2, width=1, depth=2)
    images = rng.integers(0, 256, (5, *network.image_shape), dtype=np.uint8)
    in_mlcn_jax.prepare(network, tmp_path, "infer", "float32")
    program = in_artifact.Program(network, 5, tmp_path, "xla", "float32")
    lengths = program.infer(images)
    assert program.runtime() == "xla"
    np.testing.assert_allclose(np.square(lengths).sum(axis=1), network.lanes, rtol=1e-5)
    weights = traverse_util.unflatten_dict(dict(np.load(tmp_path / "weights.npz")), sep="/")
    v = encode(in_mlcn_jax.make_spec(network), weights["encoder"], images / np.float32(255))
    np.testing.assert_allclose(lengths, class_lengths(in_mlcn_jax.make_spec(network), v), rtol=1e-4)
    assert onnx.read_export(tmp_path).spec == in_mlcn_jax.make_spec(network)  # as `benchmarks.convert` reads it


def test_a_conversion_that_fails_costs_its_own_network_only(tmp_path, monkeypatch, capsys):
    other = networks.Network("mlcn2", (18, 18, 1), lanes=3, width=1)
    monkeypatch.setattr(networks, "NETWORKS", {network.name: network for network in (TINY, other)})
    monkeypatch.setattr(peers.host, "busy_cores", lambda: None)
    monkeypatch.setattr(peers, "compare", lambda network, batch, *rest: {"title": network.title})
    monkeypatch.setattr(peers, "table", lambda results: "")
    monkeypatch.setattr(in_mlcn_jax, "start_weights", lambda *args, **kwargs: {})
    monkeypatch.setattr(in_mlcn_jax, "start_params", lambda *args, **kwargs: {})

    def write(trained, folder, command):
        assert not (folder / "manifest.json").exists(), "a manifest that lists an older one is of a damaged export"
        (folder / "manifest.json").touch()

    monkeypatch.setattr(export, "write", write)
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f"#!/bin/sh\necho >> {calls}\n[ $(wc -l < {calls}) -gt 2 ] || {{ echo no such >&2; exit 1; }}\n")
    python.chmod(0o755)
    values = flags.FlagValues()
    inference.define(values)
    given = [f"--networks={TINY.name},{other.name}", "--peers=onnxruntime", f"--onnx_python={python}", "--batches=1,8"]
    values(["inference", *given, f"--out={tmp_path / 'out.json'}"])
    assert inference.main(values) == EXIT_FAILED
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results["networks"]) == [f"{other.name}_batch_{batch}" for batch in (1, 8)]
    message = f"{TINY.title} cannot be converted to ONNX: no such"
    assert results["failed"] == {f"{TINY.name}_batch_{batch}": message for batch in (1, 8)}


def test_a_model_is_converted_where_a_conversion_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(convert.onnx, "versions", dict)
    model = SimpleNamespace(artifact=SimpleNamespace(manifest={"sha256": "1"}))
    monkeypatch.setattr(convert.onnx, "read_export", lambda folder: model)
    monkeypatch.setattr(convert.onnx, "convert", lambda model: SimpleNamespace(SerializeToString=lambda: b"model"))
    (tmp_path / "onnx").mkdir()
    convert.main(tmp_path)
    assert (tmp_path / "onnx" / "model.onnx").read_bytes() == b"model"


class Process:
    """A variant that takes so many milliseconds."""

    framework = "torch"

    def __init__(self, variant, milliseconds):
        self.variant, self.milliseconds, self.is_open = variant, milliseconds, True

    def ask(self, do, steps):
        return {"seconds": steps * self.milliseconds / 1000, "probabilities": [0.0]}

    def rest(self):
        pass

    def close(self):
        self.is_open = False


def test_the_fastest_variant_is_found_in_turns_and_the_others_are_closed():
    made, most = [], 0

    def start(variant, milliseconds):
        nonlocal most
        made.append(Process(variant, milliseconds))
        most = max(most, sum(process.is_open for process in made))
        return made[-1]

    cases = {"eager": 4.0, "compiled": 2.0, "eager_nchw": 5.0, "compiled_nchw": 1.0}
    starts = [functools.partial(start, *case) for case in cases.items()]
    process, warm, trials, failed = peers.fastest_variant("infer", starts, lambda warm: None)
    assert (process.variant, warm["milliseconds"], most) == ("compiled_nchw", pytest.approx(1.0), 2)
    assert trials == pytest.approx(cases)
    assert not failed
    assert [process.variant for process in made if process.is_open] == ["compiled_nchw"]


def test_a_variant_that_fails_leaves_its_framework_the_others(capsys):
    made = []

    def start(variant, milliseconds):
        made.append(Process(variant, milliseconds))
        return made[-1]

    def check(warm):
        if warm["milliseconds"] < 2:
            raise InputError("it computes something else")

    starts = [functools.partial(start, *case) for case in {"wrong": 1.0, "eager": 4.0, "compiled": 3.0}.items()]
    process, _, trials, failed = peers.fastest_variant("infer", starts, check)
    assert process.variant == "compiled"
    assert list(trials) == ["eager", "compiled"]
    assert failed == {"wrong": "it computes something else"}
    assert "wrong takes no part: it computes something else" in capsys.readouterr().err
    assert [one.variant for one in made if one.is_open] == ["compiled"]
    with pytest.raises(InputError, match="something else"):
        peers.fastest_variant("infer", starts[:1], check)


def test_a_slower_variant_takes_two_turns_and_one_as_fast_all_of_them(monkeypatch):
    rounds = []
    take_turns = peers.take_turns
    monkeypatch.setattr(peers, "take_turns", lambda *args: rounds.append(args[-1]) or take_turns(*args))
    for milliseconds, taken in ((1.2, [2]), (1.05, [2, 3])):
        rounds.clear()
        found = peers._trials([Process("a", 1.0), Process("b", milliseconds)], "infer", [2, 2])
        assert rounds == taken
        assert [len(own) for own in found] == [sum(taken)] * 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads CPU time from /proc")
def test_the_next_turn_begins_when_a_process_uses_no_cpu_any_more(monkeypatch):
    monkeypatch.setattr(peers, "_REST_SECONDS", 30.0)
    monkeypatch.setattr(peers, "_LOOK_SECONDS", 0.2)  # in which it is given a core even on a busy machine
    spin = (
        "import time\nprint('started', flush=True)\nwhile time.process_time() < 0.4: pass\n"
        "print('done', flush=True)\ntime.sleep(60)"
    )
    process = peers.Process.__new__(peers.Process)
    process._process = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, bufsize=0)
    try:
        assert process._process.stdout.readline() == b"started\n"
        process.rest()
        ready, _, _ = select.select([process._process.stdout], [], [], 0)
        assert ready, "it still computes"
    finally:
        process._process.kill()
        process._process.wait()


def test_what_is_not_a_number_is_not_equal(monkeypatch, tmp_path):
    values = iter([np.ones(4), np.array([1.0, np.nan, np.nan, np.nan])])

    def fastest(do, starts, check):
        process = SimpleNamespace(variant="x", ask=lambda do: {})
        warm = {"milliseconds": 1.0, "first_seconds": 1.0, "values": next(values)}
        check(warm)
        return process, warm, {}, {}

    monkeypatch.setattr(peers, "fastest_variant", fastest)
    with pytest.raises(InputError, match="torch does not compute what mlcn_jax does"):
        peers.compare(TINY, 4, ["torch"], "train", 1, "float32", "python", tmp_path)


def test_peak_memory_is_compared_with_the_smaller_of_pytorchs():
    frameworks = {"mlcn_jax": {"peak_bytes": 300}, "torch": {"peak_bytes": 250, "peak_bytes_by_default": 200}}
    assert peers.peak_over_torch(frameworks) == 1.5
    del frameworks["torch"]["peak_bytes_by_default"]
    assert peers.peak_over_torch(frameworks) == 1.2


def test_ours_is_compared_with_the_peers_and_the_runtime_chosen_with_everything():
    def over(ours, chosen):
        ratios = {"ours_over_theirs": ours, "chosen_over_theirs": chosen}
        return {name: {"median": ratio} for name, ratio in ratios.items() if ratio}

    frameworks = {
        "mlcn_jax": over(None, 0.95),
        "chosen": {},
        "onnxruntime": over(0.5, 1.02),
        "keras": over(1.4, 1.6),
        "torch": over(0.9, 1.1),
    }
    assert peers.ratios(frameworks) == {"ours_over_fastest_peer": 0.9, "chosen_over_fastest": 0.95}
    assert peers.ratios({"torch": over(0.9, None), "mlcn_jax": {}}) == {"ours_over_fastest_peer": 0.9}
    assert peers.ratios({"mlcn_jax": {}}) == {}


def test_a_table_of_inference_has_dashes_for_what_only_training_has():
    ours = {"images_per_second": 1000.0, "peak_bytes": 2**21}
    result = {"title": "tiny", "batch": 8, "frameworks": {"mlcn_jax": ours}, "ours_over_fastest_peer": 0.9}
    assert peers.table([result]).splitlines()[-1] == "| tiny | 8 | 1,000 | 0.90 | - | 2 | - |"


def test_kept_outputs_are_compared_with_computed_ones_on_the_same_images_and_pay_for_their_pass():
    images, labels, soft = (np.zeros(1) for _ in range(3))
    taught = Distillation(lambda images: images, 0.9, 4.0)
    cases = distillation.make_cases(taught, images, labels, soft)
    (kept, kept_batch), (computed, batch) = (cases[f"{name}, images as they are"] for name in ("kept", "computed"))
    assert kept == computed == {"distillation": taught}
    assert (kept_batch[:2], kept_batch[2:]) == (batch, (soft,))
    for name, (options, _) in cases.items():
        way, _, images_are = name.partition(", ")
        if way == "computed":
            assert options == cases[f"labels alone, {images_are}"][0] | {"distillation": taught}
    seconds = {"computed, images as they are": 3.0, "kept, images as they are": 1.0, distillation.PASS: 1.0}
    assert distillation.epochs_until_kept_is_faster(seconds) == 0.5
    assert distillation.epochs_until_kept_is_faster(seconds | {"computed, images as they are": 1.0}) is None


def test_a_peer_that_computes_something_else_is_seen():
    ours = np.array([0.8, 0.7, 0.6, 0.5])
    assert peers._differences(ours, ours, "train") == (0.0, 0.0)
    at_first, later = peers._differences(ours * [1, 1, 1, 1.1], ours, "train")
    assert at_first == 0
    assert later == pytest.approx(0.1)
    assert peers._differences(ours + 0.08, ours, "infer")[0] == pytest.approx(0.1)


def test_peers_may_differ_by_what_products_are_computed_in(monkeypatch):
    assert (peers._slack("float32"), peers._slack("bfloat16")) == (1, 300)
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    assert (peers._slack("float32"), peers._slack("bfloat16")) == (40, 300)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("on_device", [5, None])
def test_memory_is_the_devices_where_it_has_its_own(on_device):
    measured = worker.Worker.__new__(worker.Worker)
    measured.module, measured.imported_bytes = SimpleNamespace(device_peak_bytes=lambda: on_device), 3
    found = measured.memory()
    assert found["peak_bytes"] == (on_device or found["host_peak_bytes"])
    assert found["host_peak_bytes"] > 2**20


def test_a_measurement_on_a_gpu_that_fails_does_not_stop_the_others(tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(
        f"""#!/usr/bin/env bash
        [[ "$*" == *"import jax"* ]] && exit 0
        [ "$1" = -c ] && exec "{sys.executable}" "$@"
        echo "$2" >> "{log}"
        [[ "$*" != *inference* || "$*" != *_4x4_* ]]
        """
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PEERS_PYTHON": str(python), "DTYPES": "float32"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / "benchmarks" / "gpu.sh"), str(tmp_path / "out")],
        env=environment | {"NETWORKS": "mlcn1_4x4_28x28x1,mlcn1_2x4_28x28x1"},
        capture_output=True,
        text=True,
    )
    both = ["benchmarks.train_step", "benchmarks.inference"]
    others = ["benchmarks.conv_algorithms", "benchmarks.remat", *["experiments.residual_lanes"] * 3]
    assert log.read_text().split() == [*both, *both, *others]
    assert done.returncode == 1
    assert done.stderr.count("failed: ") == 1
    assert "failed: benchmarks.inference --peers=torch" in done.stderr


def test_unknown_networks_and_missing_peers_are_named():
    with pytest.raises(InputError, match=r"no network 'mlcn3'.*mlcn1_4x4_28x28x1"):
        networks.find("mlcn3")
    with pytest.raises(InputError, match="make bench"):
        peers.check_peers_python("nowhere/python")


def test_networks_are_chosen_by_name_and_by_set():
    published, residual = (networks.chosen([name]) for name in ("published", "resnet"))
    assert (len(published), [n.batch for n in residual]) == (11, [500] * 3)
    assert networks.chosen(["resnet", "all"]) == [*residual, *published]


def test_networks_of_the_thesis_are_all_there():
    assert set(networks.THESIS_CAPSNET_OVER) <= set(networks.NETWORKS)

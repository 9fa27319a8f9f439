"""benchmarks: what is counted and compared; the figures themselves are not tested."""

import functools
import os
import re
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

from benchmarks import distillation, networks, peers, roofline, single_image, worker
from benchmarks.frameworks import in_artifact, in_mlcn_jax
from mlcn_jax.errors import InputError
from mlcn_jax.nn import capsules, losses
from mlcn_jax.nn.distillation import Distillation
from mlcn_jax.nn.model import apply_model, class_lengths, encode, init_params
from mlcn_jax.serving import onnx
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
    parts = single_image.parts_of(hlo, {"ynn_fusion.3": 6000, "copy.2": 1000, "multiply.1": 3000}, 10)
    assert parts == {"products": 0.6, "layout": 0.1, "element-wise and sums": 0.3}


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
    peers.prepare(network, tmp_path, "infer", "float32")
    program = in_artifact.Program(network, 5, tmp_path, "xla", "float32")
    lengths = program.infer(images)
    assert program.runtime() == "xla"
    np.testing.assert_allclose(np.square(lengths).sum(axis=1), network.lanes, rtol=1e-5)
    weights = traverse_util.unflatten_dict(dict(np.load(tmp_path / "weights.npz")), sep="/")
    v = encode(in_mlcn_jax.make_spec(network), weights["encoder"], images / np.float32(255))
    np.testing.assert_allclose(lengths, class_lengths(in_mlcn_jax.make_spec(network), v), rtol=1e-4)
    assert onnx.read_export(tmp_path).spec == in_mlcn_jax.make_spec(network)  # as `benchmarks.convert` reads it


class Process:
    """A variant that takes so many milliseconds."""

    framework = "torch"

    def __init__(self, variant, milliseconds):
        self.variant, self.milliseconds, self.is_open = variant, milliseconds, True

    def ask(self, do, steps):
        return {"seconds": steps * self.milliseconds / 1000, "probabilities": [0.0]}

    def close(self):
        self.is_open = False


def test_the_fastest_variant_is_found_in_turns_and_the_others_are_closed(monkeypatch):
    monkeypatch.setattr(peers, "_PAUSE_SECONDS", 0)
    made, most = [], 0

    def start(variant, milliseconds):
        nonlocal most
        made.append(Process(variant, milliseconds))
        most = max(most, sum(process.is_open for process in made))
        return made[-1]

    cases = {"eager": 4.0, "compiled": 2.0, "eager_nchw": 5.0, "compiled_nchw": 1.0}
    process, warm, trials = peers.fastest_variant("infer", [functools.partial(start, *case) for case in cases.items()])
    assert (process.variant, warm["milliseconds"], most) == ("compiled_nchw", pytest.approx(1.0), 2)
    assert trials == pytest.approx(cases)
    assert [process.variant for process in made if process.is_open] == ["compiled_nchw"]


def compared(tmp_path, *given):
    values = flags.FlagValues()
    peers.define_flags(values, "train_step")
    values(["train_step", f"--out={tmp_path / 'out.json'}", "--peers=", *given])
    return values


def test_a_comparison_goes_on_and_a_failure_does_not_end_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.host, "busy_cores", lambda: 0.25)
    measured = []

    def measure(values, names, fails=""):
        results = peers.results_so_far(values, "train")
        for name in names:
            with peers.kept(values, results, "networks", name) as missing:
                if missing and name == fails:
                    raise InputError("it ended")
                if missing:
                    measured.append(name)
                    results["networks"][name] = {"title": name}
        return results

    names = ("capsnet_28x28x1", "mlcn1_4x4_28x28x1", "resnet_1xw8d2_32x32x3")
    closed = []
    left = SimpleNamespace(close=lambda: closed.append("left"))
    monkeypatch.setattr(peers.Process, "running", [left])
    results = measure(compared(tmp_path), names, fails="mlcn1_4x4_28x28x1")
    assert closed == ["left"], "a process that was left would keep its memory"
    assert measured == [names[0], names[2]]
    assert results["failed"] == {"mlcn1_4x4_28x28x1": "it ended"}
    assert "it ended" in capsys.readouterr().err
    results = measure(compared(tmp_path), names)
    assert measured == [names[0], names[2], names[1]]
    assert list(results["networks"]) == [names[1], names[0], names[2]], "in the order of NETWORKS"
    assert results["networks"][names[0]]["busy_cores"] == 0.25
    assert results["failed"] == {}
    assert list(measure(compared(tmp_path, "--again"), names[:1])["networks"]) == [names[1], names[0], names[2]]
    assert list(measure(compared(tmp_path, "--rounds=3"), ())["networks"]) == [], "of other rounds than these"
    assert measured[3:] == [names[0]]


def test_what_is_not_a_number_is_not_equal(monkeypatch, tmp_path):
    values = iter([np.ones(4), np.array([1.0, np.nan, np.nan, np.nan])])

    def fastest(do, starts):
        process = SimpleNamespace(variant="x", ask=lambda do: {})
        return process, {"milliseconds": 1.0, "first_seconds": 1.0, "values": next(values)}, {}

    monkeypatch.setattr(peers, "fastest_variant", fastest)
    with pytest.raises(InputError, match="torch does not compute what mlcn_jax does"):
        peers.compare(TINY, 4, ["torch"], "train", 1, "float32", "python", tmp_path)


def test_peak_memory_is_compared_with_the_smaller_of_pytorchs():
    frameworks = {"mlcn_jax": {"peak_bytes": 300}, "torch": {"peak_bytes": 250, "peak_bytes_by_default": 200}}
    assert peers.peak_over_torch(frameworks) == 1.5
    assert peers.peak_over_torch({"mlcn_jax": {"peak_bytes": 300}}) is None


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
    assert log.read_text().split() == [*both, *both, "benchmarks.conv_algorithms", *["experiments.residual_lanes"] * 2]
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

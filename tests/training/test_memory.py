"""Less memory for the same result: lanes computed again in the backward pass, and batches in parts."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_params import made_params

from mlcn_jax.data.batches import Augmentation, Split
from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.errors import InputError
from mlcn_jax.nn import remat
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import evaluate, loop, session, stack_programs, stacks_runner
from mlcn_jax.training.mesh_runner import MeshRunner
from mlcn_jax.training.step import TrainState, compile_step, make_train_step
from mlcn_jax.training.trained import load_trained

JOINT = ModelSpec("mlcn", (18, 19, 2), 3, "mlcn2:w1*2,mlcn1:w1d2*2", decoder=(16, 24), lane_dropout=0.3)
GROUPS = ModelSpec("mlcn", (12, 12, 2), 3, "resnet:w1*2,resnet_caps:w1*2", decoder=(8,), norm_group=4)
COUPLED = dataclasses.replace(GROUPS, ensemble_weight=0.5)
STEP = {"reconstruction_weight": 0.4, "seed": 0, "augmentation": Augmentation(max_shift=2, flip=True)}
PER_LANE = {**STEP, "augmentation": Augmentation(max_shift=2, per_lane=True)}


def make_batch(spec, size=16):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, *spec.image_shape), dtype=np.uint8)
    return images, rng.integers(0, spec.num_classes, size, dtype=np.int32)


def step_of(spec, mesh=None, options=None, **more):
    """A step's metrics and gradients."""
    optimizer = optax.sgd(1.0, momentum=0.9)  # its state is the gradient after one step
    state = mesh_lib.place_state(mesh, TrainState.create(made_params(spec), optimizer))
    step = make_train_step(spec, optimizer, mesh=mesh, **{**(options or STEP), **more})
    batch = mesh_lib.place_batch(mesh, make_batch(spec))
    compiled, _ = compile_step(spec, step, state, batch)
    state, metrics = compiled(state, *batch)
    return jax.device_get((metrics, state.optimizer)), compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def plain(spec, per_lane=False):
    return step_of(spec, options=PER_LANE if per_lane else STEP)


def assert_close(mine, theirs):
    """Within rounding: these gradients change by up to 5.4e-5 if every parameter does by one unit in the last place."""
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (mine, theirs)), strict=True):
        error = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
        assert error < 5e-5, f"{jax.tree_util.keystr(path)}: {error}"


@pytest.mark.long
@pytest.mark.parametrize("spec", [JOINT, pytest.param(COUPLED, marks=pytest.mark.long)], ids=["joint", "coupled"])
def test_lanes_computed_again_have_the_same_gradients(spec):
    found, _ = step_of(dataclasses.replace(spec, remat="full"))
    assert_close(found, plain(spec)[0])


def test_many_lanes_computed_again_need_less_than_half_the_memory():
    spec = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn1:w1*8", decoder=(6,))
    found, less = step_of(dataclasses.replace(spec, remat="full"))
    expected, more = plain(spec)
    assert_close(found, expected)
    assert less < 0.5 * more


def test_what_is_offloaded_are_the_results_of_products():
    """Traced only: a CPU is its own host, and has nowhere to send them."""

    def traced(name):
        def loss(kernels):
            return jnp.sum(remat.scan_lanes(lambda kernel: jnp.sin(jnp.ones((5, 3)) @ kernel), (kernels,), name))

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 3, 4))))

    offloaded = traced("offload")
    assert "MemorySpace.Host" in offloaded
    assert "<host>[2,5,4]" in offloaded, "those of both lanes"
    assert "MemorySpace.Host" not in traced("full")


def test_what_convolutions_give_is_not_computed_again():
    def products(mark):
        def loss(kernels):
            return jnp.sum(
                remat.scan_lanes(lambda kernel: jnp.sin(mark(jnp.ones((5, 3)) @ kernel)), (kernels,), "full")
            )

        return str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 3, 4)))).count("dot_general")

    assert products(remat.held) == products(lambda features: features) - 1


def test_activations_go_only_where_there_is_a_host_memory_beside_the_devices():
    def device(platform, *kinds):
        memories = [SimpleNamespace(kind=kind) for kind in kinds]
        return SimpleNamespace(platform=platform, device_kind="it", addressable_memories=lambda: memories)

    session.check_offload("mesh", device("gpu", "device", "pinned_host"))
    for given, message in (
        (("mesh", jax.devices()[0]), "host's memory, and .* has no other: use model.remat=full"),
        (("mesh", device("cpu", "device", "pinned_host")), "it has no other"),
        (("mesh", device("gpu", "device")), "it cannot reach it"),
        (("stacks", device("gpu", "device", "pinned_host")), "use parallel.plan=mesh"),
    ):
        with pytest.raises(InputError, match=message):
            session.check_offload(*given)


@pytest.mark.parametrize(
    ("spec", "parts", "mesh", "per_lane"),
    [
        (JOINT, 4, None, False),
        (dataclasses.replace(JOINT, remat="full"), 2, (2, 2), False),
        pytest.param(GROUPS, 4, None, True, marks=pytest.mark.long),
        pytest.param(GROUPS, 2, (2, 2), False, marks=pytest.mark.long),
    ],
    ids=["one device", "a mesh", "groups, each lane's augmentation", "groups on a mesh"],
)
def test_a_batch_in_parts_has_the_metrics_and_gradients_of_the_whole(spec, parts, mesh, per_lane):
    """With lane dropout, augmentation, and normalisation of groups of images."""
    expected, whole = plain(dataclasses.replace(spec, remat="none"), per_lane)
    found, in_parts = step_of(
        spec,
        mesh and mesh_lib.make_mesh(*mesh),
        PER_LANE if per_lane else STEP,
        accumulation_steps=parts,
    )
    assert_close(found, expected)
    assert in_parts < whole


@pytest.mark.long
def test_a_stack_keeps_no_activations_of_lanes_that_it_computes_again():
    def steps(remat):
        spec, optimizer = dataclasses.replace(JOINT, remat=remat), optax.sgd(1.0, momentum=0.9)
        stacks = stack_programs.make_stacks(jax.devices(), [1, 0, 0, 1])
        runner = stacks_runner.StacksRunner(spec, optimizer, stacks, jax.devices()[0], **STEP)
        runner.start(jax.device_get(TrainState.create(made_params(spec), optimizer)))
        runner.compile(*make_batch(spec))
        metrics = runner.step(*runner.place(*make_batch(spec)))
        forward = [program for key, program in runner._programs.items() if key[0] == "forward"]
        kept = sum(leaf.size for program in forward for leaf in jax.tree.leaves(program.out_info))
        return jax.device_get(metrics), runner.fetch().optimizer, kept

    *found, less = steps("full")
    *expected, more = steps("none")
    assert_close(found, expected)
    assert less < 0.5 * more


@pytest.mark.long
def test_a_run_goes_on_with_less_memory_as_if_nothing_had_changed(tiny, tmp_path):
    changes = {"model.remat": "full", "train.accumulation_steps": 2}
    loop.train(tiny.replace({"train.num_steps": 2}), tmp_path / "moved")
    loop.train(tiny.replace({"train.num_steps": 4} | changes), tmp_path / "moved")
    loop.train(tiny.replace({"train.num_steps": 4}), tmp_path / "stayed")
    moved, stayed = (load_trained(tmp_path / name).params for name in ("moved", "stayed"))
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(stayed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert tiny.replace(changes).hash() == tiny.hash()


def test_a_run_in_parts_scores_and_calibrates_as_few_images_at_a_time(tiny, tmp_path, monkeypatch):
    sizes = []

    def calibrate(runner, batches):
        sizes.extend(map(len, batches))
        return {}

    def scores(runner, split, batch_size, flips=False):
        sizes.append(batch_size)
        return evaluate.Scores(1.0, np.eye(10, dtype=int))

    def lane_spreads(spec, params, split, batch_size):
        sizes.append(batch_size)
        return []

    monkeypatch.setattr(MeshRunner, "calibrate", calibrate)
    monkeypatch.setattr(MeshRunner, "scores", scores)
    monkeypatch.setattr(evaluate, "lane_spreads", lane_spreads)
    changes = {"train.accumulation_steps": 5, "train.num_steps": 1, "data.validation_fraction": 0.1}
    loop.train(tiny.replace({"data.alternate_flips": True} | changes), tmp_path)
    assert set(sizes) == {10}


def test_images_are_calibrated_on_in_parts_in_the_same_order():
    labels = np.arange(130, dtype=np.int32)
    train = Split(labels.astype(np.uint8)[:, None, None, None], labels)
    whole, parts = (session.calibration_images(train, 20, parts) for parts in (1, 4))
    assert {len(part) for part in parts} == {5}
    np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(whole))


_RESNET = {"model.lanes": "resnet:w1*2", "model.norm_group": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.remat": "some"}, r"model.remat is 'some'; it must be one of none, full"),
        ({"model.remat": "full", "model.name": "capsnet", "model.lanes": ""}, r"CapsNet has no lanes"),
        ({"model.remat": "full", **_RESNET}, r"hold one lane's activations already"),
        ({"model.remat": "offload"}, r"model.remat=offload sends activations to the host's memory, and .* use model"),
        ({"train.accumulation_steps": 0}, r"train.accumulation_steps is 0; it must be 1 or more"),
        ({"train.accumulation_steps": 7}, r"does not divide train.batch_size=16: use a divisor of 16, such as 4"),
        (
            {"train.accumulation_steps": 4, "parallel.data": 8},
            r"each of parallel.data=8 devices has 2: use a divisor of 2",
        ),
        (
            {"train.accumulation_steps": 4, **_RESNET},
            r"norm_group=.*gives parts of 4: use a divisor of 2, the number of",
        ),
        ({"train.accumulation_steps": 2, "parallel.plan": "stacks"}, r"stacks, which computes a batch at once"),
        ({"train.accumulation_steps": 128, "parallel.plan": "stacks"}, r"stacks, which computes a batch at once"),
        (
            {"train.accumulation_steps": 3, "parallel.plan": "stacks", **_RESNET, "model.norm_group": 4},
            r"stacks, which computes a batch at once",
        ),
    ],
)
def test_settings_that_cannot_save_memory_are_refused(tiny, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        loop.train(tiny.replace({"train.batch_size": 16} | changes), tmp_path / "run")

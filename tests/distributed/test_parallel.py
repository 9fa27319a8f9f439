"""A mesh computes what one device does, in every split, and a run goes on in another split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_collectives import collective_bytes, collective_messages
from made_params import made_params

from mlcn_jax.distributed import mesh as mesh_lib
from mlcn_jax.distributed import traffic
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv_winograd
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.settings import TrainSettings
from mlcn_jax.training import loop
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, compile_step, make_loss, make_train_step
from mlcn_jax.training.trained import load_trained

LONG = [pytest.param(*split, marks=pytest.mark.long) for split in ((4, 1), (4, 2), (8, 1))]
SPLITS = [(2, 1), (1, 4), (2, 2), (2, 4), *LONG]
LANES = ModelSpec("mlcn", (18, 19, 2), 3, "mlcn2:w1*4,mlcn1:w1d2*4", decoder=(16, 24), lane_dropout=0.3)
EIGHT = dataclasses.replace(LANES, lanes="mlcn1:w1*8")
CAPSNET = ModelSpec("capsnet", (17, 17, 1), 3, decoder=(8,))


def make_batch(rng, spec, size=8):
    images = rng.integers(0, 256, (size, *spec.image_shape), dtype=np.uint8)
    return images, rng.integers(0, spec.num_classes, size, dtype=np.int32)


def value_and_grad(spec, mesh, params, batch, dtype="float32"):
    with_gradient = jax.jit(mesh_lib.value_and_grad_over(mesh, make_loss(spec, 0.4, mesh), dtype))
    images, labels = mesh_lib.place_batch(mesh, batch)
    results, gradients, norm = with_gradient(
        mesh_lib.place_state(mesh, params), images / 255.0, labels, jax.random.key(1), {}
    )
    if mesh is not None:
        np.testing.assert_allclose(norm, optax.tree.norm(jax.device_get(gradients)), rtol=1e-5)
    return results, gradients


def assert_close(mine, theirs, tolerance=1e-5):
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (mine, theirs)), strict=True):
        error = np.max(np.abs(np.asarray(a) - b)) / max(np.max(np.abs(b)), 1e-30)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


@pytest.fixture(scope="module", params=["mlcn", "capsnet"])
def on_one_device(request):
    spec = LANES if request.param == "mlcn" else CAPSNET
    params = jax.device_get(made_params(spec))
    batch = make_batch(np.random.default_rng(0), spec)
    return spec, params, batch, jax.device_get(value_and_grad(spec, None, params, batch))


@pytest.mark.parametrize(("data", "lane"), SPLITS)
def test_every_split_has_the_loss_and_gradients_of_one_device(on_one_device, data, lane):
    spec, params, batch, expected = on_one_device
    if spec.name == "capsnet" and lane > 1:
        with pytest.raises(InputError, match=r"no lanes to shard over parallel.lane"):
            mesh_lib.check_split(spec, 8, data, lane)
        return
    mesh_lib.check_split(spec, 8, data, lane)
    assert_close(value_and_grad(spec, mesh_lib.make_mesh(data, lane), params, batch), expected)


def test_eight_devices_with_a_lane_each_have_the_loss_and_gradients_of_one():
    params = jax.device_get(made_params(EIGHT))
    batch = make_batch(np.random.default_rng(0), EIGHT)
    expected = jax.device_get(value_and_grad(EIGHT, None, params, batch))
    assert_close(value_and_grad(EIGHT, mesh_lib.make_mesh(1, 8), params, batch), expected)


@pytest.mark.parametrize("conv", ["native", "winograd"])
def test_residual_lanes_convolved_in_parts_have_the_gradients_of_one_device(conv, monkeypatch):
    monkeypatch.setattr(conv_winograd, "_PART_BYTES", 2**18)  # so that the first convolutions take several parts
    spec = ModelSpec("mlcn", (18, 18, 2), 3, "resnet:w1d2*2", norm_group=4, decoder=(8,), conv=conv)
    params = jax.device_get(made_params(spec))
    batch = make_batch(np.random.default_rng(0), spec, 16)
    expected = jax.device_get(value_and_grad(spec, None, params, batch))
    assert_close(value_and_grad(spec, mesh_lib.make_mesh(2, 2), params, batch), expected, 1e-4)


def test_lanes_their_optimizer_state_and_the_decoder_lie_in_shares(rng):
    mesh = mesh_lib.make_mesh(2, 4)
    optimizer = optax.adam(1e-3)
    params = made_params(LANES)
    whole = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    state = mesh_lib.place_state(mesh, whole)
    step = make_train_step(LANES, optimizer, reconstruction_weight=0.4, seed=0, mesh=mesh)
    batch = mesh_lib.place_batch(mesh, make_batch(rng, LANES))
    compiled, _ = compile_step(LANES, step, state, batch)
    state, _ = compiled(state, *batch)
    for tree in (state.params, state.optimizer[0].mu, state.optimizer[0].nu):
        for group, count in (("mlcn2_w1d1", 1), ("mlcn1_w1d2", 1)):
            for leaf in jax.tree.leaves(tree["encoder"][group]):
                assert leaf.addressable_shards[0].data.shape[0] == count
        assert tree["decoder"]["hidden1"]["kernel"].addressable_shards[0].data.shape[1] == 4
        assert tree["decoder"]["pixels"]["bias"].addressable_shards[0].data.shape == (18 * 19 * 2 // 4,)


def test_all_saves_of_a_run_copy_its_state_by_one_program():
    params = made_params(LANES)
    placed = jax.tree.leaves(mesh_lib.place_state(mesh_lib.make_mesh(1, 4), params))
    for _ in range(2):  # over processes, this is what `to_host` takes
        gather = mesh_lib._gather(mesh_lib.make_mesh(1, 4))
        whole = gather(placed)
    assert gather._cache_size() == 1
    for found, given in zip(whole, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found.addressable_data(0), given)


@pytest.mark.long
def test_bfloat16_rounds_gradients_on_their_way():
    params, batch = jax.device_get(made_params(LANES)), make_batch(np.random.default_rng(0), LANES)
    (loss, _), expected = jax.device_get(value_and_grad(LANES, None, params, batch))
    for data, lane in ((2, 1), (2, 2)):
        found = value_and_grad(LANES, mesh_lib.make_mesh(data, lane), params, batch, "bfloat16")
        (mine, _), gradients = jax.device_get(found)
        np.testing.assert_allclose(mine, loss, rtol=1e-6 if lane == 1 else 2e-3)
        assert_close(gradients, expected, 0.05)
        with pytest.raises(AssertionError):
            assert_close(gradients, expected)


@pytest.mark.parametrize(
    ("data", "lane", "decoder", "sums"),
    [(1, 4, (16, 24), 1), (2, 2, (16, 24), 2), (4, 1, (16, 24), 1), (1, 4, (16, 30), 1), (2, 4, (16, 30), 2)],
)
def test_what_crosses_is_what_the_formula_says_in_few_messages(rng, data, lane, decoder, sums):
    """Sums over devices: one for all, however many arrays, and one of shards of lanes if batches are sharded too."""
    spec = dataclasses.replace(LANES, decoder=decoder)
    text = compiled_step(rng, spec, data, lane)
    assert collective_bytes(text) == traffic.exchanged_bytes(spec, 8, data, lane)
    gathers = 1 + sum(size % lane == 0 for size in (*decoder, 18 * 19 * 2)) if lane > 1 else 0
    expected = {"all-gather": gathers, "reduce-scatter": gathers, "all-reduce": sums}
    assert collective_messages(text) == {name: count for name, count in expected.items() if count}
    assert traffic.exchanged_messages(spec, data, lane) == collective_messages(text)


def test_clipping_over_a_mesh_sends_nothing_more(rng):
    """It takes the norm that has been summed for the metrics."""
    text = compiled_step(rng, LANES, 2, 2, clip_norm=1.0)
    assert collective_messages(text) == traffic.exchanged_messages(LANES, 2, 2)


@pytest.mark.parametrize(("ensemble_weight", "scatters"), [(0.0, 0), (0.5, 1)])
def test_columns_of_lanes_that_classify_alone_get_a_gradient_only_from_the_ensemble(rng, ensemble_weight, scatters):
    own = {"norm_group": 4, "ensemble_weight": ensemble_weight, "decoder": (15,)}  # no layer can be divided
    spec = ModelSpec("mlcn", (17, 19, 1), 3, "resnet:w1*4", **own)
    text = compiled_step(rng, spec, 2, 2)
    assert collective_bytes(text) == traffic.exchanged_bytes(spec, 8, 2, 2)
    found = collective_messages(text)
    assert found.get("reduce-scatter", 0) == scatters
    assert found == traffic.exchanged_messages(spec, 2, 2)


def test_half_the_bytes_cross_in_bfloat16(rng):
    """A sum is an all-to-all and a gather, in each of which as many bytes cross as the sum has in bfloat16."""
    spec = dataclasses.replace(LANES, decoder=(16, 24))
    whole, half = (traffic.exchanged_bytes(spec, 8, 2, 2, dtype) for dtype in ("float32", "bfloat16"))
    text = compiled_step(rng, spec, 2, 2, "bfloat16")
    found = collective_bytes(text)
    scalars = 4 * 5
    crossing = half["all-gather"] + half["all-reduce"] - scalars
    assert crossing == (whole["all-gather"] + whole["all-reduce"] - scalars) / 2
    count = 4 + 1  # columns, three layers, gradients
    for name, arrays in (("all-gather", 1), ("all-to-all", 2)):  # an all-to-all has one for each device
        assert crossing <= found[name] <= crossing + 4 * 2 * count, "padding to words and to parts"
        assert collective_messages(text)[name] == arrays * count
    assert (found["all-reduce"], found["reduce-scatter"]) == (scalars, 0)


def compiled_step(rng, spec, data, lane, dtype="float32", clip_norm=0.0):
    mesh = mesh_lib.make_mesh(data, lane)
    optimizer = optimizer_of(TrainSettings(clip_norm=clip_norm), steps_per_epoch=10)
    params = made_params(spec)
    whole = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    state, batch = mesh_lib.place_state(mesh, whole), mesh_lib.place_batch(mesh, make_batch(rng, spec))
    step = make_train_step(spec, optimizer, reconstruction_weight=0.4, seed=0, mesh=mesh, exchange_dtype=dtype)
    compiled, _ = compile_step(spec, step, state, batch)
    return compiled.as_text()


@pytest.mark.long
def test_a_run_goes_on_in_another_split_as_if_it_had_never_moved(tiny, tmp_path):
    whole = loop.train(tiny, tmp_path / "whole")
    moves = tmp_path / "moves"
    for steps, data, lane in ((8, 5, 1), (14, 2, 2), (20, 1, 1)):
        loop.train(tiny.replace({"train.num_steps": steps, "parallel.data": data, "parallel.lane": lane}), moves)
    for a, b in zip(*(jax.tree.leaves(load_trained(w).params) for w in (tmp_path / "whole", moves)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    assert load_trained(moves).step == whole["steps"]


@pytest.mark.parametrize(
    ("data", "lane", "message"),
    [
        (3, 1, r"parallel.data=3 does not divide train.batch_size=50: use parallel.data=2 or a batch of 51"),
        (1, 3, r"parallel.lane=3 does not divide mlcn1:w1d1\*2.*lane=2, other lanes, or parallel.plan=stacks"),
        (25, 2, "needs 50 devices, but jax finds 8"),
    ],
)
def test_a_mesh_that_cannot_be_names_one_that_can(tiny, tmp_path, data, lane, message):
    with pytest.raises(InputError, match=message):
        loop.train(tiny.replace({"parallel.data": data, "parallel.lane": lane}), tmp_path)

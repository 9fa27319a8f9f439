"""Which splits have room on their devices."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_profile import make_profile

from mlcn_jax.analysis import measure_device
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LaneGroup
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, partition, simulate
from mlcn_jax.training import plan, splits
from mlcn_jax.training.step import TrainState, compile_step, make_train_step

EQUAL = ModelSpec("mlcn", (28, 28, 1), 10, "mlcn1:w2*4")
LINK = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}


@pytest.fixture(scope="module")
def profile():
    return make_profile()


def test_a_mesh_whose_lanes_do_not_fit_is_no_candidate(profile):
    lane = profile.lane_bytes(cost.lane_cost(EQUAL.lane_groups[0].spec, EQUAL.lane_settings, EQUAL.image_shape), 100)
    small = dataclasses.replace(profile, memory_bytes=int(lane * 0.9), link=LINK)
    with pytest.raises(InputError, match="and memory for it"):
        splits.candidates(EQUAL, 100, [small], ["greedy"], 1)


def test_devices_of_one_process_share_the_memory_of_their_machine(profile):
    lane = cost.lane_cost(EQUAL.lane_groups[0].spec, EQUAL.lane_settings, EQUAL.image_shape)
    whole = splits.needed_bytes(EQUAL, 4 * [lane], 100, profile, 1)
    cpu = dataclasses.replace(profile, platform="cpu", memory_bytes=int(1.01 * whole), link=LINK)
    found = {}
    for platform in ("cpu", "gpu"):
        devices = [dataclasses.replace(cpu, platform=platform)] * 2
        found[platform] = {(one.data, one.lane) for one in splits.candidates(EQUAL, 100, devices, [], 1)}
    assert found == {"cpu": {(1, 1)}, "gpu": {(1, 1), (2, 1), (1, 2)}}


def test_what_fits_in_parts_is_a_candidate(profile):
    """A run that computes its batches in parts holds the activations of one part, and the gradients' sum."""
    held = dict.fromkeys(profile.lane_bytes_of, 4.0)
    profile = dataclasses.replace(profile, batch_sizes=(10, 100), lane_bytes_of=held, link=LINK)
    lanes = 4 * [cost.lane_cost(EQUAL.lane_groups[0].spec, EQUAL.lane_settings, EQUAL.image_shape)]
    needs = [splits.needed_bytes(EQUAL, lanes, 100, profile, parts) for parts in (1, 4)]
    assert needs[1] < 0.7 * needs[0]
    small = dataclasses.replace(profile, memory_bytes=int(needs[1]))
    with pytest.raises(InputError, match=r"train\.accumulation_steps, or with model\.remat=full"):
        splits.candidates(EQUAL, 100, [small], [], 1)
    assert len(splits.candidates(EQUAL, 100, [small], [], 1, messages=splits.Messages(parts=4))) == 1
    fast = simulate.Cluster(range(2), simulate.Link(0.0, math.inf), simulate.Link(0.0, math.inf))
    one = splits.needed_bytes(EQUAL, lanes[:1], 100, profile, 1)
    assert needs[0] - one == pytest.approx(3 * profile.lane_bytes(lanes[0], 100)), "all go back from a joint loss"
    tight = dataclasses.replace(profile, memory_bytes=int(0.9 * one))
    assert [splits.predict_apart(EQUAL, 100, [tight] * 2, fast, parts) is None for parts in (1, 4)] == [True, False]
    for_one = dataclasses.replace(profile, memory_bytes=int(1.1 * one))  # and not for two at a time
    roomy = dataclasses.replace(profile, memory_bytes=int(100 * one))
    times = [splits.predict_apart(EQUAL, 100, [room] * 2, fast) for room in (for_one, roomy)]
    assert times[0] == times[1]
    unequal = splits.predict_apart(EQUAL, 100, [tight, roomy], fast)
    assert unequal == pytest.approx(2 * times[1]), "all lanes are trained where there is room for them"
    assert [splits.predict_rounds(EQUAL, 200, [small] * 2, fast, parts) is None for parts in (1, 4)] == [True, False]


def test_in_rounds_only_the_link_of_the_first_host_is_shared(profile):
    fast, slow = simulate.Link(0.0, 1e8), simulate.Link(0.0, 1e6)
    profiles, num_bytes = [dataclasses.replace(profile, memory_bytes=2**40)] * 5, cost.estimated_parameters(EQUAL)
    seconds = []
    for other in (simulate.Link(0.0, math.inf), slow, fast):
        cluster = simulate.Cluster(range(5), fast, {0: fast, **dict.fromkeys(range(1, 5), other)})
        seconds.append(splits.predict_rounds(EQUAL, 100, profiles, cluster))
    assert seconds[2] == seconds[0], "the first one's link limits"
    more = 2 * (slow.seconds(num_bytes) - 4 * fast.seconds(num_bytes)) / splits.ROUND_STEPS
    assert seconds[1] - seconds[0] == pytest.approx(more)


@pytest.mark.parametrize(("changes", "in_turn"), [({}, True), ({"ensemble_weight": 0.5}, False)])
def test_of_lanes_with_losses_of_their_own_one_holds_activations(changes, in_turn):
    profile = make_profile("resnet")
    spec = dataclasses.replace(EQUAL, lanes="resnet:w1*4", **changes)
    lanes = 4 * [cost.lane_cost(spec.lane_groups[0].spec, spec.lane_settings, spec.image_shape)]
    one, all_four = (splits.needed_bytes(spec, some, 100, profile, 1) for some in (lanes[:1], lanes))
    held = lanes[0].state_bytes + lanes[0].gradient_bytes
    assert all_four - one == pytest.approx(3 * (held if in_turn else profile.lane_bytes(lanes[0], 100)))


def test_a_step_of_lanes_with_a_joint_loss_needs_no_more_than_is_planned_for():
    """Where a profile knows what one lane takes by itself."""
    images, labels = np.zeros((50, *EQUAL.image_shape), np.uint8), np.zeros(50, np.int32)
    params, optimizer = init_params(EQUAL, jax.random.key(0)), optax.adam(1e-3)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    step = make_train_step(EQUAL, optimizer, reconstruction_weight=0.0005, seed=0)
    whole = cost.compiled_memory_bytes(compile_step(EQUAL, step, state, jax.device_put((images, labels)))[0])
    lab = measure_device.Lab(EQUAL)
    alone = lab.lane_step(LaneGroup(EQUAL.lane_groups[0].spec, 1), 50).bytes
    known = types.SimpleNamespace(lane_bytes=lambda lane, batch_size: alone)
    lanes = 4 * [cost.lane_cost(EQUAL.lane_groups[0].spec, EQUAL.lane_settings, EQUAL.image_shape)]
    assert whole <= splits.needed_bytes(EQUAL, lanes, 50, known, 1) < 1.5 * whole


def test_activations_that_are_recomputed_are_not_planned_for(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    spec = dataclasses.replace(EQUAL, remat="full")
    with pytest.raises(InputError, match=r"model.remat is full.* give parallel\.plan=mesh"):
        plan.make_plan(spec, 100, kind="auto", profile_files=[tmp_path / "profile.json"])


def test_no_split_at_all_is_said(profile):
    small = dataclasses.replace(profile, memory_bytes=10)
    with pytest.raises(InputError, match="neither batch nor lanes can be split over 3 devices"):
        splits.candidates(dataclasses.replace(EQUAL, lanes="mlcn1:w2*2"), 100, [small] * 3, ["greedy"], 3)


def test_memory_that_a_lane_lacks_is_said(profile):
    none = dataclasses.replace(profile, memory_bytes=10)
    problem = splits.placement_problem(EQUAL, 100, [none, none], ["a", "b"])
    with pytest.raises(InputError, match=r"lane 0 \(mlcn1:w2d1\) needs .* more than any device can hold"):
        partition.partition("greedy", problem)

"""Device profiles: fitted, stored, and refused where they do not hold."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from made_profile import lane, make_profile, planted_seconds

from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn import lanes
from mlcn_jax.placement import fit
from mlcn_jax.placement.profile import TILES, DeviceProfile


@pytest.fixture(scope="module")
def profile():
    return make_profile()


def test_planted_seconds_are_found_between_the_fitted_lanes(profile):
    assert profile.crowding == 0.07
    for costs in ([lane("mlcn1", 2, 1)], [lane("mlcn1", 4, 4)], [lane("mlcn1", 3, 3), lane("mlcn1", 1, 1)]):
        for batch_size in (50, 100):
            expected = planted_seconds(costs, batch_size, crowding=0.07)
            assert profile.stack_seconds(costs, batch_size) == pytest.approx(expected, rel=0.02)


def test_fits_are_never_negative_and_memory_never_under():
    features = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 1.0}, {"a": 5.0, "b": 4.0}]
    num_bytes = [10.0, 6.0, 18.0]
    per_feature = fit.fit_bytes(features, num_bytes)
    assert min(per_feature.values()) >= 0
    for sizes, needed in zip(features, num_bytes, strict=True):
        assert sum(per_feature[name] * size for name, size in sizes.items()) >= needed


def test_head_seconds(profile):
    assert profile.head_seconds(num_lanes=7, batch_size=4) == 1.5


def test_small_batches_need_as_much_memory_as_the_smallest_measured(profile):
    assert profile.lane_bytes(lane(), 8) == profile.lane_bytes(lane(), 50) >= 2000


def test_a_profile_is_stored_whole(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert DeviceProfile.load(tmp_path / "profile.json") == profile


def test_a_profile_of_this_device_is_taken(profile):
    profile.check_is_of(jax.devices()[0])


@pytest.mark.parametrize(("field", "value"), [("device", "Abacus"), ("platform", "gpu"), ("cpu_count", 4096)])
def test_a_profile_of_another_device_is_refused(profile, field, value):
    with pytest.raises(InputError, match=rf"{field}: {value!r} in the profile.*\n.*profile \(--cores=N"):
        dataclasses.replace(profile, **{field: value}).check_is_of(jax.devices()[0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"shape": (32, 32, 3)}, r"image_shape: \(28, 28, 1\) in the profile, \(32, 32, 3\) for mlcn1:w2d2"),
        ({"settings": lanes.LaneSettings(100)}, "num_classes: 10 in the profile, 100"),
        ({"settings": lanes.LaneSettings(10, dtype=np.float16)}, "compute_dtype: 'float32' in the profile, 'float16'"),
    ],
)
def test_lanes_that_were_not_measured_are_refused(profile, other, message):
    for predict in (profile.lane_seconds, profile.lane_bytes):
        with pytest.raises(InputError, match=message):
            predict(lane(**other), 100)


def test_a_kind_that_no_profile_measures_is_not_asked_to_be_measured(profile):
    with pytest.raises(
        InputError, match=r"no lanes of kind resnet_caps, only mlcn1, mlcn2, resnet: leave the profile out"
    ):
        profile.lane_seconds(lane("resnet_caps"), 100)


def test_an_unknown_layer_is_named(profile):
    known = {name: curve for name, curve in profile.layer_seconds.items() if not name.startswith("conv 3x3")}
    with pytest.raises(InputError, match="conv 3x3 by winograd: not in the profile, but in mlcn1:w2d2"):
        dataclasses.replace(profile, layer_seconds=known).lane_seconds(lane(), 100)


def test_a_form_that_was_not_measured_counts_as_one_that_was(profile):
    """Profiles measured before forms were told apart have none."""
    wide = lane("mlcn1", 4, 3)
    assert {" by winograd", " by fourier held"} <= set(wide.forms("cpu", 100))
    few = {name: curve for name, curve in profile.layer_seconds.items() if not name.endswith(("winograd", "held"))}
    older = {name.partition(" by ")[0]: curve for name, curve in few.items()}
    found = [dataclasses.replace(profile, layer_seconds=known).lane_seconds(wide, 100) for known in (few, older)]
    assert found[0] == found[1] != profile.lane_seconds(wide, 100)


def test_memory_is_predicted_from_profiles_that_do_not_know_the_work_space_of_winograd(profile):
    wide = lane("mlcn1", 4, 3)
    known = dict.fromkeys(wide.memory_features("cpu", 100), 1.0)
    with_it, without = (
        dataclasses.replace(profile, lane_bytes_of={name: x for name, x in known.items() if name not in left_out})
        for left_out in ((), (TILES,))
    )
    found = [one.lane_bytes(wide, 100) for one in (with_it, without)]
    assert found[0] - found[1] == wide.memory_features("cpu", 100)[TILES] > 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 0}, "format 0, but format 2 is expected"),
        ({"forward_share": "a third"}, "damaged, forward_share: 'a third'"),
        ({"tiny_seconds": -1.0}, "damaged, tiny_seconds: -1.0"),
        ({"layer_seconds": {"dot": [[1.0]]}}, "damaged, layer_seconds: Expected"),
        ({"layer_seconds": {"dot": []}}, "damaged, layer_seconds"),
        ({"link": {"latency_seconds": None}}, "damaged, link"),
        ({"link": {"latency_seconds": 1e-5}}, "damaged, link: bytes_per_second is missing or 0"),
        ({"link": {"latency_seconds": 1e-5, "bytes_per_second": 0.0}}, "link: bytes_per_second is missing or 0"),
        ({"peak": {"flops_per_second": 0.0, "bytes_per_second": 1.0}}, "peak: flops_per_second is missing or 0"),
        ({"sharing": {"devices": 2.0, "slowdown": 1.5}}, "sharing: spread is missing"),
        ({"head_seconds_of": {"step": 1.0}}, "head_seconds_of: lanes is missing"),
        ({"batch_sizes": 50}, "damaged, batch_sizes: 50"),
        ({"colour": "blue"}, "damaged, colour is not a field"),
    ],
)
def test_a_damaged_or_older_profile_is_refused(profile, tmp_path, damage, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_dict() | damage))
    with pytest.raises(InputError, match=message) as refused:
        DeviceProfile.load(path)
    assert str(path) in str(refused.value)
    assert f"{program()} profile" in str(refused.value)


def test_files_that_are_no_profiles_are_refused(profile, tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(InputError, match="cannot be read"):
        DeviceProfile.load(path)
    for text in ("", "[]", json.dumps(profile.to_dict())[:-20]):
        path.write_text(text)
        with pytest.raises(InputError, match=r"not a device profile|is damaged"):
            DeviceProfile.load(path)
    missing = profile.to_dict()
    del missing["link"]
    with pytest.raises(InputError, match="link is missing"):
        DeviceProfile.from_dict(missing)


def test_crowding_stops_at_the_largest_measured_stack(profile):
    most = profile.crowded_images[1]
    double = profile.lane_seconds(lane(), 2 * most) - 2 * profile.lane_seconds(lane(), most)
    assert double == pytest.approx(
        -(profile.step_seconds + profile.parameter_seconds * lane().parameters) * (most**profile.crowding)
    )


def test_profiles_of_format_1_are_read(profile):
    old = profile.to_dict() | {"version": 1}
    for name in ("crowded_images", "residuals", "sharing", "peak", "value_seconds"):
        del old[name]
    found = DeviceProfile.from_dict(old)
    assert (found.crowded_images, found.peak, found.sharing) == (None, None, None)
    assert found.slowdown(8) == 1.0
    with pytest.raises(InputError, match="peak is missing"):
        DeviceProfile.from_dict(
            {**old, "version": 2} | {"crowded_images": None, "residuals": {}, "sharing": None, "value_seconds": {}}
        )


def test_devices_slow_each_other_down_as_far_as_was_measured(profile):
    shared = dataclasses.replace(profile, sharing={"devices": 3, "slowdown": 1.2, "spread": 0.0})
    assert [shared.slowdown(n) for n in (1, 2, 3, 8)] == pytest.approx([1.0, 1.1, 1.2, 1.2])


def test_residuals_are_of_programs_left_out_of_the_fit():
    stacks = [[lane("mlcn1", *size)] for size in ((1, 1), (2, 2), (3, 1), (3, 3), (4, 2), (5, 1), (5, 3))]
    stacks += [[lane("mlcn1", 3, 1)] * 3]
    seconds = [planted_seconds(stack, 50, 0.0) for stack in stacks]
    seconds[4] *= 1.5
    assert fit.fit_lane_seconds(stacks, [50] * len(stacks), seconds, "cpu")["crowding"] == 0, (
        "whatever rounding favours"
    )
    blank = make_profile()

    def predict(fields, costs, batch_size):
        return dataclasses.replace(blank, **fields).stack_seconds(costs, batch_size)

    found = fit.residuals(stacks, [50] * len(stacks), seconds, "cpu", predict)
    assert len(found["stack"]) == 1
    assert max(found["lane"]) == pytest.approx(np.log(1.5), abs=0.05)
    assert len(found["lane"]) < 7  # the smallest and largest of a class are not left out


@pytest.mark.long
def test_residual_lanes_have_classes_and_a_cost_of_values_of_their_own():
    residual = make_profile("resnet")
    assert set(residual.value_seconds) == {"resnet"}
    assert all(name.startswith("resnet ") for name in residual.layer_seconds)
    for costs in ([lane("resnet", 2, 2)], [lane("resnet", 4, 4)], [lane("resnet", 3, 3), lane("resnet", 1, 1)]):
        expected = planted_seconds(costs, 100, crowding=0.07)
        assert residual.stack_seconds(costs, 100) == pytest.approx(expected, rel=0.05)
    with pytest.raises(InputError, match="conv 9x9 by im2col: not in the profile, but in mlcn1:w2d2"):
        residual.lane_seconds(lane(), 100)

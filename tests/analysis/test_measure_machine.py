"""How much the devices of one machine slow each other down, from the seconds of their steps."""

import math
import types

import pytest

from mlcn_jax.analysis import measure_device, measure_machine
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lanes import LaneSettings, LaneSpec
from mlcn_jax.nn.resnet import num_groups
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import log_size


def test_a_profile_is_of_a_dataset_or_of_images_of_ones_own():
    named = measure_device.lab_spec("cifar10", "published", "float32")
    own = measure_device.lab_spec("48x40x3:12", "per_class", "bfloat16")
    assert (named.image_shape, named.num_classes) == ((32, 32, 3), 10)
    assert (own.image_shape, own.num_classes, own.lane_routing) == ((48, 40, 3), 12, "per_class")
    for wrong in ("photos", "48x48:12", "48x48x2:12", "0x48x3:12"):
        with pytest.raises(InputError, match=f"--data={wrong} is not one of .* nor HEIGHTxWIDTHxCHANNELS:CLASSES"):
            measure_device.lab_spec(wrong, "published", "float32")


def test_layers_of_the_recipes_are_like_measured_ones_of_the_same_algorithm():
    """At a batch of 500 more of them are computed by Winograd's products than at 50 and 100."""
    spec = measure_device.lab_spec("cifar10", "published", "float32")

    def sizes(lane, batch_size):
        one = cost.cost_of(spec, lane)
        return [
            (layer.speed_class(form), log_size(layer))
            for layer, form in zip(one.layers, one.forms("cpu", batch_size), strict=True)
        ]

    fitted = measure_device.fitted_lanes(spec.image_shape)
    known = [pair for group, batch_size in fitted for pair in sizes(group.spec, batch_size)]
    for width in (2, 3, 4, 6):
        for name, size in sizes(LaneSpec("resnet", width, 2), 500):
            assert min(abs(size - own) for of, own in known if of == name) < 0.75, (width, name, size)
    assert {batch_size for _, batch_size in measure_device.fitted_lanes((96, 96, 3))} == {50, 100}
    for size in (17, 33, 48, 63, 64):
        for group, batch_size in measure_device.fitted_lanes((size, size, 3)):
            assert not group.kind.normalises or num_groups(batch_size, group_size=LaneSettings.norm_group)


def test_devices_that_wait_for_each_other_are_as_slow_as_the_slowest_in_each_step():
    first, second = [[1.0, 3.0], [5.0, 5.0]], [[2.0, 1.0], [4.0, 7.0]]  # two programs of two steps
    assert measure_machine.slowest([first, second]) == [2.5, 6.0]


def test_sharing_is_over_the_typical_turn_alone_and_spreads_by_turns_and_programs():
    alone = [[1.0, 10.0], [9.0, 10.0], [1.0, 10.0]]  # one turn was disturbed
    found = measure_machine.compare(alone, [[1.0, 10.0], [1.21, 12.1]])
    assert found["slowdown"] == pytest.approx(1.1)
    assert found["spread"] == pytest.approx(math.log(1.1) * math.sqrt(4 / 3))


def test_devices_never_speed_each_other_up():
    assert measure_machine.compare([[2.0]], [[1.0]]) == {"slowdown": 1.0, "spread": 0.0}


def test_a_process_that_ends_after_the_lanes_were_measured_costs_no_profile(monkeypatch, caplog):
    class Ends:
        def __init__(self, *_):
            self.turns = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def measure(self, rounds):
            self.turns += 1
            if self.turns > 1:
                raise InputError("one of the processes ended")

        def found(self):
            return {"slowdown": float(self.turns)}

    monkeypatch.setattr(measure_machine, "Sharing", Ends)
    monkeypatch.setattr(measure_machine, "bind", lambda cores: [0])
    monkeypatch.setattr(measure_machine, "measure_link", lambda cores: None)
    monkeypatch.setattr(measure_machine, "peak", lambda dtype: {})
    values = types.SimpleNamespace(cores=1, data="", lane_routing="", compute_dtype="", rounds=2)
    with measure_machine.measuring(values) as finish:
        assert finish()["sharing"] == {"slowdown": 2.0}
    assert "one of the processes ended; used is what was measured before the lanes" in caplog.text

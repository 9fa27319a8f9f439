"""What a configuration builds, told without tracing every lane."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from made_profile import make_profile

from mlcn_jax.analysis import describe, describe_work
from mlcn_jax.config import RunConfig
from mlcn_jax.distributed import traffic
from mlcn_jax.errors import InputError
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import Lane
from mlcn_jax.nn.model import apply_model, count_parameters, param_shapes
from mlcn_jax.placement import bounds
from mlcn_jax.placement.cost import matmul_flops
from mlcn_jax.placement.simulate import Link


@pytest.mark.parametrize("lanes", ["mlcn1:w1*2,mlcn2:w1d2", "mlcn2:w2*3"])
@pytest.mark.parametrize("routing", ["published", "per_class"])
def test_numbers_are_those_of_the_whole_model(lanes, routing):
    config = RunConfig().replace({"model.lanes": lanes, "model.lane_routing": routing})
    spec = dataclasses.replace(config.model_spec(*config.data.shape()), conv="native")
    params = param_shapes(spec)
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    found, counts = describe.describe(config), count_parameters(spec)
    assert found["forward_flops_per_image"] == matmul_flops(lambda p, x: apply_model(spec, p, x), params, image)
    assert (found["parameters"], found["parameters_decoder"]) == (counts["total"], counts["decoder"])
    assert found["parameters_per_lane"] == counts["per_lane"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train.accumulation_steps": 3}, "train.accumulation_steps=3 does not divide train.batch_size"),
        ({"train.image_sizes": "5:0.5"}, "train.image_sizes is 5:0.5 with model.lanes="),
    ],
)
def test_what_cannot_be_trained_is_not_described(changes, said):
    with pytest.raises(InputError, match=said):
        describe.describe(RunConfig().replace(changes))


def test_many_lanes_are_described_as_fast_as_one(monkeypatch):
    traced = []
    call = Lane.__call__
    monkeypatch.setattr(Lane, "__call__", lambda self, images: (traced.append(1), call(self, images))[1])
    assert len(describe.describe(RunConfig().replace({"model.lanes": "mlcn1:w3*1000"}))["lanes"]) == 1000
    assert len(traced) < 20


@pytest.mark.parametrize("lanes", ["mlcn1:w1*2,mlcn2:w1d2", "resnet:w1*2"])
def test_work_and_depth_are_of_every_part_and_of_the_whole_step(lanes):
    config = RunConfig().replace({"model.lanes": lanes, "train.batch_size": 10})
    found = describe.describe(config, Link(1e-5, 1e9), most_devices=4)["scaling"]
    parts = found["work"]
    whole = parts.pop("all")
    assert set(parts) == {"head", *(str(group.spec) for group in parse_lanes(lanes))}
    assert whole["work"] == sum(part["count"] * part["work"] for part in parts.values())
    deepest = max(part["depth"] for part in parts.values())
    assert deepest <= whole["depth"] <= sum(part["depth"] for part in parts.values()) + 100
    assert whole["least_bytes"] < whole["moved_bytes"]
    low, high = found["brent_unit_operations"][4]
    assert low == max(whole["work"] / 4, whole["depth"])
    assert high == whole["work"] / 4 + whole["depth"]
    assert set(found["communication"]) == {"data", "lane", "stacks", "hybrid"}
    assert set(found["communication"]["lane"]["by_devices"]) <= {2}
    assert "seconds" not in found


def test_a_profile_gives_seconds_and_where_communication_outweighs_computing():
    config = RunConfig().replace({"model.lanes": "mlcn1:w2*16", "data.name": "fashion_mnist"})
    peak = {"flops_per_second": 1e11, "bytes_per_second": 1e10}
    profile = dataclasses.replace(make_profile(), peak=peak)
    found = describe.describe(config, Link(1e-2, 1e8), profile, most_devices=4)["scaling"]
    least, predicted = found["seconds"]["least_by_devices"], found["seconds"]["predicted_on_one_device"]
    assert least[1] == 4 * least[4] < predicted
    data = found["communication"]["data"]
    assert data["best_speedup"] <= predicted / least[1]
    assert data["outweighed_at"] > 1
    assert "communication dominates from" in describe_work.tables(found)
    with pytest.raises(InputError, match="has no peak rates"):
        describe.describe(config, profile=make_profile())


def test_best_speedups_are_of_numbers_that_divide_and_the_head_is_not_divided_by_stacks():
    config = RunConfig().replace({"model.lanes": "mlcn1:w2*6", "data.name": "fashion_mnist", "train.batch_size": 100})
    profile = dataclasses.replace(make_profile(), peak={"flops_per_second": 1e11, "bytes_per_second": 1e10})
    found = describe.describe(config, Link(0.0, 1e15), profile, most_devices=4)["scaling"]
    moved = found["communication"]
    assert (moved["data"]["at_devices"], moved["lane"]["at_devices"]) == (100, 6)
    slow = describe.describe(config, Link(0.5, 1e15), profile, most_devices=4)["scaling"]["communication"]["data"]
    assert slow["at_devices"] in (25, 50), "36 would be best, but does not divide the batch"
    seconds, head = found["seconds"]["predicted_on_one_device"], profile.head_seconds(6, 100)
    assert moved["stacks"]["best_speedup"] == pytest.approx(seconds / (head + (seconds - head) / 6), rel=1e-6)


def test_depth_counts_reductions_over_all_lanes():
    few, many = (
        describe.describe(RunConfig().replace({"model.lanes": f"mlcn1:w1*{count}", "train.batch_size": 10}))
        for count in (1, 32)
    )
    (fewer, head), (more, whole_head) = (
        (found["scaling"]["work"]["all"]["depth"], found["scaling"]["work"]["head"]["depth"]) for found in (few, many)
    )
    assert more - fewer == whole_head - head >= 4


def test_a_hybrid_sums_gradients_over_one_axis_and_gathers_over_the_other():
    config = RunConfig().replace({"model.lanes": "mlcn1:w1*4", "data.name": "fashion_mnist", "train.batch_size": 100})
    link = Link(1e-3, 1e7)
    found = describe.describe(config, link, most_devices=8)["scaling"]
    rows = found["communication"]["hybrid"]["by_devices"]
    assert {n: (row["data"], row["lane"]) for n, row in rows.items()} == {4: (2, 2), 8: (2, 4)}
    spec = config.model_spec(*config.data.shape())
    moved = traffic.exchanged_bytes(spec, 100, 2, 4)
    sums = bounds.communication(2, moved["all-reduce"], link)["ring"]
    assert rows[8]["ring"] == sums + bounds.communication(4, moved["all-gather"], link)["ring"]
    other = traffic.exchanged_bytes(spec, 100, 4, 2)
    worse = bounds.fastest(4, other["all-reduce"], link) + bounds.fastest(2, other["all-gather"], link)
    assert min(rows[8][name] for name in bounds.ALGORITHMS) < worse
    assert "| 2 x 4 | " in describe_work.tables(found)


def test_capsnet_has_work_and_no_parts():
    config = RunConfig().replace({"model.name": "capsnet", "model.lanes": "", "train.batch_size": 2})
    assert set(describe.describe(config, Link(1e-5, 1e9))["scaling"]["work"]) == {"all"}


def test_what_the_work_leaves_out_is_said(caplog):
    settings = {"model.lanes": "resnet:w1d2", "data.name": "fashion_mnist", "train.batch_size": 8}
    describe.describe(RunConfig().replace(settings))
    assert not caplog.messages
    described = describe.describe(RunConfig().replace(settings | {"train.teacher": "x", "train.image_sizes": "16:0.5"}))
    assert described["model"] == "mlcn"
    teacher, sizes = caplog.messages
    assert "train.teacher" in teacher
    assert "train.image_sizes" in sizes

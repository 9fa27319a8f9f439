"""What a configuration builds, told without tracing every lane."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mlcn_jax.analysis import describe
from mlcn_jax.config import RunConfig
from mlcn_jax.nn.lanes import Lane
from mlcn_jax.nn.model import apply_model, count_parameters, init_params
from mlcn_jax.placement.cost import matmul_flops


@pytest.mark.parametrize("lanes", ["mlcn1:w1*2,mlcn2:w1d2", "mlcn2:w2*3"])
@pytest.mark.parametrize("routing", ["published", "per_class"])
def test_numbers_are_those_of_the_whole_model(lanes, routing):
    config = RunConfig().replace({"model.lanes": lanes, "model.lane_routing": routing})
    spec = dataclasses.replace(config.model_spec(*config.data.shape()), conv="native")
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    image = jax.ShapeDtypeStruct((1, *spec.image_shape), jnp.float32)
    found, counts = describe.describe(config), count_parameters(spec)
    assert found["forward_flops_per_image"] == matmul_flops(lambda p, x: apply_model(spec, p, x), params, image)
    assert (found["parameters"], found["parameters_decoder"]) == (counts["total"], counts["decoder"])
    assert found["parameters_per_lane"] == counts["per_lane"]


def test_many_lanes_are_described_as_fast_as_one(monkeypatch):
    traced = []
    call = Lane.__call__
    monkeypatch.setattr(Lane, "__call__", lambda self, images: (traced.append(1), call(self, images))[1])
    assert len(describe.describe(RunConfig().replace({"model.lanes": "mlcn1:w3*1000"}))["lanes"]) == 1000
    assert len(traced) < 20

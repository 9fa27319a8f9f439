import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_params import like, made_params

from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv, lane_list, lanes, model
from mlcn_jax.nn.lanes import Lane, LaneGroup, LaneSettings, LaneSpec
from mlcn_jax.nn.spec import ModelSpec

SETTINGS = LaneSettings(num_classes=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mlcn1:w4*8", [("mlcn1", 4, 1, 8)]),
        ("mlcn1:w2d1*2,mlcn2:w4d3*1", [("mlcn1", 2, 1, 2), ("mlcn2", 4, 3, 1)]),
        (" mlcn2:w1 , mlcn1:w2d2 ", [("mlcn2", 1, 1, 1), ("mlcn1", 2, 2, 1)]),
        ("mlcn1:w2,mlcn2:w2,mlcn1:w2d1*3", [("mlcn1", 2, 1, 4), ("mlcn2", 2, 1, 1)]),
    ],
)
def test_lanes_are_read(text, expected):
    groups = [(g.spec.kind, g.spec.width, g.spec.depth, g.count) for g in lane_list.parse_lanes(text)]
    assert groups == expected


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("mlcn3:w4*8", 1),
        ("mlcn1:4", 7),
        ("mlcn1:w0", 8),
        ("mlcn1:w4d", 10),
        ("mlcn1:w4x8", 9),
        ("mlcn1:w4*2,mlcn2:w4*", 21),
        ("mlcn1:w4*2,", 12),
        ("mlcn1:w4,mlcn22:w1", 10),
        ("", 1),
    ],
)
def test_a_typo_is_pointed_at(text, column):
    with pytest.raises(InputError) as error:
        lane_list.parse_lanes(text)
    lines = str(error.value).splitlines()
    assert f"at character {column}" in lines[0]
    assert lines[1] == f"  {text}"
    assert lines[2].index("^") == 2 + column - 1


@pytest.mark.parametrize(
    "kind", [*lanes.PUBLISHED_KINDS, "resnet", pytest.param("resnet_caps", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("lane_routing", lanes.LANE_ROUTINGS)
def test_a_vmapped_group_equals_a_loop_of_single_lanes(rng, kind, lane_routing):
    images = jnp.array(rng.uniform(size=(2, 19, 18, 2)), jnp.float32)
    settings = LaneSettings(num_classes=3, lane_routing=lane_routing)
    group = LaneGroup(LaneSpec(kind, width=1, depth=2), count=3)
    params = like(jax.eval_shape(lambda: lanes.init_group(jax.random.key(0), group, 5, settings, images)))

    def loop(params):
        single = [jax.tree.map(lambda p, i=i: p[i], params) for i in range(3)]
        return jnp.stack([Lane(group.spec, settings).apply({"params": p}, images) for p in single], axis=-1)

    def total(columns_of):
        return lambda params: jnp.sum(jnp.sin(5 * columns_of(params)))

    def grouped(params):
        return lanes.apply_group(params, group, settings, images)

    np.testing.assert_allclose(jax.jit(grouped)(params), jax.jit(loop)(params), rtol=1e-5, atol=1e-6)
    ours, theirs = jax.jit(jax.grad(total(grouped)))(params), jax.jit(jax.grad(total(loop)))(params)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(b))) + 1e-9)


def test_lanes_do_not_see_each_other(rng):
    """The gradient of lane i's column with respect to lane j's parameters is exactly zero."""
    spec = ModelSpec("mlcn", (18, 18, 1), 3, "mlcn1:w1*2,mlcn2:w1", decoder=(4,))
    images = jnp.array(rng.uniform(size=(2, *spec.image_shape)), jnp.float32)
    params = made_params(spec)
    network = model.CapsuleNetwork(spec)

    def columns(encoder):
        variables = {"params": {**params, "encoder": encoder}}
        return jnp.sum(network.apply(variables, images, method="encode"), axis=(0, 1))

    jacobian = jax.jit(jax.jacrev(columns))(params["encoder"])

    def largest(tree, *index):
        return max(float(jnp.max(jnp.abs(leaf[index]))) for name, leaf in tree.items() if name != "prior_bias")

    flat = {
        k: {"/".join(str(p.key) for p in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(v)}
        for k, v in jacobian.items()
    }
    pair, single = flat["mlcn1_w1d1"], flat["mlcn2_w1d1"]
    assert largest(pair, 0, 0) > 0
    assert largest(pair, 1, 1) > 0
    assert largest(single, 2, 0) > 0
    assert largest(pair, 0, 1) == largest(pair, 1, 0) == 0
    assert largest(pair, 2) == largest(single, 0) == largest(single, 1) == 0


def test_mlcn2_first_layers_equal_two_convolutions(rng):
    x = jnp.array(rng.uniform(size=(2, 12, 11, 3)), jnp.float32)
    layer = lanes.JointConvParams(channels=3, middle=4, features=5)
    params = jax.eval_shape(layer.init, jax.random.key(0))["params"]
    params = {k: jnp.array(rng.normal(size=p.shape), jnp.float32) for k, p in params.items()}

    def two_steps(params, x):
        y = (x * params["depthwise"][None, None, None]) @ params["pointwise"]
        y = y + params["pointwise_bias"][None, None, None]
        y = jax.lax.conv_general_dilated(
            y, params["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + params["bias"][None, None, None]

    def joint(params, x):
        kernel, bias = layer.apply({"params": params})
        return conv.conv2d(x, kernel) + bias[None, None, None]

    np.testing.assert_allclose(jax.jit(joint)(params, x), jax.jit(two_steps)(params, x), rtol=1e-4, atol=1e-3)
    means = (jax.jit(jax.grad(lambda p, f=f: jnp.mean(jnp.sin(f(p, x) / 30)))) for f in (joint, two_steps))
    ours, theirs = (mean(params) for mean in means)
    for name in params:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6)


def test_start_values_do_not_depend_on_grouping():
    images = jnp.zeros((1, 18, 18, 1))
    spec = LaneSpec("mlcn1", 1)
    init = conv.compiled_once(lanes.init_group, static_argnums=(1, 3))
    pair = init(jax.random.key(0), LaneGroup(spec, 2), 3, SETTINGS, images)
    second = init(jax.random.key(0), LaneGroup(spec, 1), 4, SETTINGS, images)
    for a, b in zip(jax.tree.leaves(pair), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a[1], b[0], rtol=1e-6)
    kernels = pair["conv1"]["kernel"]
    assert not np.allclose(kernels[0], kernels[1])


def test_depth_adds_layers_of_the_width_before():
    images = jnp.zeros((1, 20, 20, 1))
    lane = Lane(LaneSpec("mlcn2", width=2, depth=3), SETTINGS)
    params = jax.eval_shape(lane.init, jax.random.key(0), images)["params"]
    assert params["deep1"]["kernel"].shape == params["deep2"]["kernel"].shape == (3, 3, 16, 16)
    assert params["primary"]["kernel"].shape == (9, 9, 16, 32)
    assert "deep3" not in params


def test_a_new_lane_kind_is_one_function_and_one_line(monkeypatch, rng):
    def pooled(images, spec, settings):
        x = nn.avg_pool(images, (4, 4), (4, 4))
        kernel, bias = lanes.ConvParams((3, 3, x.shape[-1], 8 * spec.width), settings.dtype, name="only")()
        return conv.conv2d(x, kernel) + bias[None, None, None]

    monkeypatch.setitem(lanes.LANE_KINDS, "pooled", lanes.LaneKind(pooled, min_size=20))
    spec = ModelSpec("mlcn", (20, 20, 1), 4, "pooled:w3*2,mlcn1:w1", decoder=(4,))
    params = made_params(spec)
    images = jnp.array(rng.uniform(size=(2, 20, 20, 1)), jnp.float32)
    v, reconstructions = jax.jit(model.apply_model, static_argnums=0)(spec, params, images)
    assert v.shape == (2, 4, 3)
    assert reconstructions.shape == images.shape
    assert params["encoder"]["pooled_w3d1"]["capsule_weights"].shape == (2, 3 * 3 * 3, 8, 4)


@pytest.mark.parametrize("text", ["mlcn1:w4*999999999", "mlcn1:w100000", "mlcn1:w1d101", "mlcn1:w" + "9" * 5000])
def test_numbers_beyond_reason_are_refused(text):
    with pytest.raises(InputError, match=r"a (width|depth|count) of \d{3,9}(\.\.\.)? is above"):
        lane_list.parse_lanes(text)


def test_lanes_beyond_reason_are_refused_however_they_are_written():
    with pytest.raises(InputError, match="12,000 lanes; at most 10,000"):
        lane_list.parse_lanes("mlcn1:w1*6000,mlcn1:w2*6000")

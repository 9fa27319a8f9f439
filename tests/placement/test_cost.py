import jax
import jax.numpy as jnp
import optax
import pytest

from mlcn_jax.analysis import describe
from mlcn_jax.errors import InputError
from mlcn_jax.nn import lanes
from mlcn_jax.nn.model import count_parameters
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, fit
from mlcn_jax.placement.profile import TILES


def test_flops_by_hand():
    x = jax.ShapeDtypeStruct((5, 20, 18, 3), jnp.float32)
    kernel = jax.ShapeDtypeStruct((9, 9, 3, 7), jnp.float32)

    def conv_then_product(x, kernel):
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.jit(lambda y: y.reshape(5, -1) @ jnp.ones((6 * 5 * 7, 11)))(y)

    by_hand = 2 * 5 * (6 * 5) * 7 * (9 * 9 * 3) + 2 * 5 * 11 * (6 * 5 * 7)
    assert cost.matmul_flops(conv_then_product, x, kernel) == by_hand


def test_a_loop_counts_every_turn():
    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=4)[0]

    assert cost.matmul_flops(loop, jnp.ones((3, 3))) == 4 * 2 * 27


def test_results_that_nothing_reads_cost_nothing():
    def product(x, y):
        return x @ y, jax.jit(lambda y: y @ y)(y)

    x = jnp.ones((3, 3))
    assert cost.matmul_flops(lambda x, y: product(x, y)[0], x, x) == 2 * 27
    assert cost.matmul_flops(product, x, x) == 2 * 2 * 27


def test_gradients_of_a_convolution_cost_as_much_as_itself():
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, kernel = jnp.ones((2, 13, 13, 3)), jnp.ones((5, 5, 3, 7))
    forward = cost.matmul_flops(conv, x, kernel)
    for wanted in (0, 1):
        grad = jax.grad(lambda *args: jnp.sum(conv(*args) ** 2), argnums=wanted)
        assert cost.matmul_flops(grad, x, kernel) == 2 * forward


def test_vmapped_convolutions_count_each_lane():
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, kernel = jnp.ones((4, 2, 10, 10, 3)), jnp.ones((4, 3, 3, 3, 5))
    by_hand = 4 * 2 * 2 * 64 * 5 * 27
    assert cost.matmul_flops(jax.vmap(conv), x, kernel) == by_hand


def test_description_of_a_mixed_model(tiny):
    config = tiny.replace(
        {"model.lanes": "mlcn1:w2d1*2,mlcn2:w4d3", "data.name": "cifar10", "model.decoder": "512,1024"}
    )
    described = describe.describe(config)
    assert described["lanes"] == ["mlcn1:w2d1", "mlcn1:w2d1", "mlcn2:w4d3"]
    assert described["input_shape"] == [32, 32, 3]
    assert set(described["lane_costs"]) == {"mlcn1:w2d1", "mlcn2:w4d3"}
    assert described["lane_costs"]["mlcn2:w4d3"]["parameters"] == described["parameters_per_lane"][2]
    assert described["lane_costs"]["mlcn2:w4d3"]["published_relative_seconds"] == 4**2 * 3
    assert described["parameters"] == sum(described["parameters_per_lane"]) + described["parameters_decoder"]
    mlcn1_w2 = 2 * (24 * 24 * 81 * 3 * 32 + 8 * 8 * 81 * 32 * 32 + 8 * 8 * 32 * 10)
    # mlcn2 of width 4: the composed first convolution (and the two small products that compose it), two 3x3
    # convolutions, the primary capsules, the class capsules
    composing = 2 * (3 * 16 * 81 * 32 + 16 * 32)
    mlcn2_w4d3 = 2 * (24 * 24 * 32 * (81 * 3 + 2 * 9 * 32) + 8 * 8 * 81 * 32 * 64 + 8 * 8 * 64 * 10) + composing
    decoder = 2 * (30 * 512 + 512 * 1024 + 1024 * 3072)
    assert described["forward_flops_per_image"] == 2 * mlcn1_w2 + mlcn2_w4d3 + decoder


def test_capsnet_counts_its_routing(tiny):
    config = tiny.replace({"model.name": "capsnet", "model.lanes": "", "model.decoder": "512,1024"})
    convolutions = 2 * (400 * 81 * 256 + 36 * 81 * 256 * 256)
    u_hat = 2 * 1152 * 8 * 160  # one product over all pairs of capsules, and another for the first iteration
    decoder = 2 * (160 * 512 + 512 * 1024 + 1024 * 784)
    assert describe.describe(config)["forward_flops_per_image"] == convolutions + 2 * u_hat + decoder


@pytest.mark.parametrize("kind", ["resnet", "mlcn1"])
def test_a_lane_in_bfloat16_costs_as_many_flops(kind):
    found = [
        cost.lane_cost(lanes.LaneSpec(kind, 1), lanes.LaneSettings(10, dtype=dtype), (28, 28, 1))
        for dtype in (jnp.float32, jnp.bfloat16)
    ]
    assert found[0].step_flops(8) == found[1].step_flops(8)
    assert found[1].step_bytes(8) < found[0].step_bytes(8)


def test_costs_of_an_mlcn1_lane_by_hand():
    lane = cost.lane_cost(lanes.LaneSpec("mlcn1", 2, 3), lanes.LaneSettings(10), (28, 28, 1))
    first = 2 * 20 * 20 * 81 * 32
    deep = 2 * 20 * 20 * 9 * 32 * 32
    primary = 2 * 6 * 6 * 81 * 32 * 32
    classes = 2 * 36 * 32 * 10
    assert [layer.flops for layer in lane.layers] == [first, deep, deep, primary, classes]
    assert [layer.name for layer in lane.layers] == [
        *("conv 9x9", "conv 3x3", "conv 3x3"),
        *("conv 9x9 stride 2", "dot"),
    ]
    forms = lane.forms("cpu", 100)
    assert forms == [" by im2col", " by winograd", " by winograd", " by fourier", ""]
    assert lane.layers[3].speed_class(forms[3]) == "conv 9x9 stride 2 after conv 3x3 by fourier"
    assert [layer.places for layer in lane.layers] == [400, 400, 400, 36, 1]
    assert lane.forward_flops_per_image == first + 2 * deep + primary + classes
    # the images need no gradient
    assert lane.step_flops_per_image == 2 * first + 3 * (2 * deep + primary + classes)
    assert lane.fixed_step_flops == 0
    assert lane.parameters == (81 + 1) * 32 + 2 * (9 * 32 + 1) * 32 + (81 * 32 + 1) * 32 + 144 * 8 * 10 + 144
    assert lane.activations == 3 * 400 * 32 + 36 * 32 + 10


def test_costs_of_an_mlcn2_lane_by_hand():
    lane = cost.lane_cost(lanes.LaneSpec("mlcn2", 2, 3), lanes.LaneSettings(10), (32, 32, 3))
    first = 2 * 24 * 24 * 81 * 3 * 16
    deep = 2 * 24 * 24 * 9 * 16 * 16
    primary = 2 * 8 * 8 * 81 * 16 * 32
    classes = 2 * 64 * 32 * 10
    composing = 2 * (3 * 8 * 81 * 16 + 8 * 16)  # the first kernel and bias, once a step, from the separable ones
    assert lane.forward_flops_per_image == first + 2 * deep + primary + classes
    assert lane.step_flops(100) == 100 * (2 * first + 3 * (2 * deep + primary + classes)) + 3 * composing
    separable = 3 + (3 + 1) * 8
    deep_parameters = 2 * (9 * 16 + 1) * 16
    assert lane.parameters == separable + (81 * 8 + 1) * 16 + deep_parameters + (81 * 16 + 1) * 32 + 256 * (8 * 10 + 1)
    assert lane.held_bytes(2) == 4 * (2 * (32 * 32 * 3 + lane.activations) + 4 * lane.parameters)


def test_published_formulas():
    lane = lanes.LaneSpec("mlcn1", 4, 3)
    assert cost.published_cost(lane) == 48.0
    assert cost.published_memory_bytes(lane) == (8 * 256 + 1832) * 2**20


def test_memory_of_a_lane_is_predicted_without_compiling_it():
    settings, shape, batch_size = lanes.LaneSettings(3), (18, 18, 1), 8

    def true_bytes(spec):
        group, optimizer = lanes.LaneGroup(spec, 1), optax.adam(1e-3)
        images = jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32)
        columns = jax.ShapeDtypeStruct((batch_size, 3, 1), jnp.float32)
        params = jax.eval_shape(lambda key, x: lanes.init_group(key, group, 0, settings, x), jax.random.key(0), images)
        state = (params, jax.eval_shape(optimizer.init, params))
        step = jax.jit(cost.make_lane_step(group, settings, optimizer), donate_argnums=0)
        return cost.compiled_memory_bytes(step.lower(state, images, columns).compile())

    def features(spec):
        return cost.lane_cost(spec, settings, shape).memory_features("cpu", batch_size)

    fitted = [
        lanes.LaneSpec("mlcn1", width, depth) for width, depth in ((1, 1), (3, 1), (5, 1), (1, 2), (4, 2), (2, 4))
    ]
    per_feature = fit.fit_bytes([features(spec) for spec in fitted], [true_bytes(spec) for spec in fitted])
    for spec in (lanes.LaneSpec("mlcn1", 2, 1), lanes.LaneSpec("mlcn1", 2, 3)):
        predicted = sum(per_feature[name] * size for name, size in features(spec).items())
        assert 1.0 <= predicted / true_bytes(spec) <= 1.1


def test_the_work_space_of_winograd_does_not_grow_with_the_batch_as_activations_do():
    lane = cost.lane_cost(lanes.LaneSpec("resnet", 3, 2), lanes.LaneSettings(10), (32, 32, 3))
    once, ten_times = (lane.memory_features("cpu", batch) for batch in (500, 5000))
    assert 0 < ten_times[TILES] <= 2 * once[TILES]
    name = "resnet conv 3x3 after conv 3x3: values by winograd"
    assert ten_times[name] == 10 * once[name]
    assert TILES not in lane.memory_features("cpu", 1), "all convolutions are native"


@pytest.mark.parametrize("text", ["mlcn1:w2*3", "mlcn2:w1d3*2,mlcn1:w1d2"])
def test_parameters_are_counted_without_tracing_the_whole(text):
    spec = ModelSpec("mlcn", (28, 28, 1), 10, lanes=text)
    assert cost.estimated_parameters(spec) == count_parameters(spec)["total"]


def test_a_model_beyond_the_memory_is_refused_at_once():
    spec = ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w1000d100*10000")
    with pytest.raises(InputError, match=r"do not fit into the 16 GiB of memory: use fewer or narrower lanes"):
        cost.check_fits_memory(spec, 2**34)
    cost.check_fits_memory(ModelSpec("mlcn", (28, 28, 1), 10, lanes="mlcn1:w4*8"), 2**34)

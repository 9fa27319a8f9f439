import jax
import jax.numpy as jnp

from mlcn_jax import cost


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
    described = cost.describe(config)
    assert described["lanes"] == ["mlcn1:w2d1", "mlcn1:w2d1", "mlcn2:w4d3"]
    assert described["input_shape"] == [32, 32, 3]
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
    assert cost.describe(config)["forward_flops_per_image"] == convolutions + 2 * u_hat + decoder

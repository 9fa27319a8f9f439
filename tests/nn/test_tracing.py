"""What a function computes follows from the target that is given, never from what was traced before it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from mlcn_jax.nn import conv, lanes, tracing

X, KERNEL = jnp.ones((2, 12, 12, 8)), jnp.ones((5, 5, 8, 4))


@jax.jit
def convolve(x, kernel):
    return conv.conv2d(x, kernel, stride=2)


def key(platform):
    with tracing.using(tracing.Target(platform=platform)):
        return conv.key_of(X.shape, KERNEL.shape, 2, "VALID")


def primitives(function, *args):
    """Names of all primitives of a traced function, inner ones too."""
    names = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            names.add(equation.primitive.name)
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return names


def test_one_jitted_function_is_traced_for_each_choice_of_algorithms():
    """The jitted function is the same object, so a cache that did not know of the choice would give the first again."""
    found = {}
    for name in ("native", "im2col", "native"):
        target = tracing.Target(algorithms=tracing.as_pairs({key(tracing.platform()): name}))
        with tracing.using(target):
            found.setdefault(name, []).append(primitives(convolve, X, KERNEL))
            text = convolve.lower(X, KERNEL).as_text()
        assert ("convolution" in text) == (name == "native")
    assert found["native"][0] == found["native"][1] != found["im2col"][0]


def test_one_jitted_function_is_traced_for_each_platform_and_batch():
    def algorithm(**target):
        with tracing.using(tracing.Target(**target)):
            found = tracing.resolve(convolve, X, KERNEL)
        return found.popitem()

    assert algorithm(platform="cpu")[1] == "native"  # the rule for a CPU: no spectra for two images
    assert algorithm(platform="gpu")[1] == "im2col"
    assert algorithm(platform="cpu", batch=100) == (key("cpu").replace("2x12x12x8", "100x12x12x8"), "fourier")
    assert algorithm(platform="cpu")[1] == "native"


def test_what_is_known_stays_and_the_rest_is_found():
    known = {key(tracing.platform()): "im2col", "of another run": "native"}
    assert tracing.resolve(convolve, X, KERNEL, known=known) == known
    (name,) = tracing.resolve(convolve, X, KERNEL).values()
    assert name == conv.choose(tracing.platform(), X.shape, KERNEL.shape, 2, "VALID")


def test_the_algorithms_change_no_result():
    results = []
    for name in ("native", "im2col", "fourier"):
        with tracing.using(tracing.Target(algorithms=tracing.as_pairs({key(tracing.platform()): name}))):
            results.append(np.asarray(convolve(X, KERNEL)))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-4)


def test_lanes_wait_for_each_other_unless_they_may_be_computed_at_once():
    def lengths(images):
        return lanes.lanes_one_by_one(lambda kernel, images: (kernel * images).sum(), jnp.ones((2, 3)), images, 2)

    def at_once(images):
        with tracing.using(tracing.Target(inference=True)):
            return lengths(images)

    waits = "bitcast_convert_type"  # of the first lane's result, on which the second lane's images depend
    assert waits in primitives(lengths, jnp.ones(3))
    assert waits not in primitives(at_once, jnp.ones(3))
    assert lengths(jnp.ones(3)) == at_once(jnp.ones(3))


def test_the_platform_is_that_of_the_default_device():
    for device in (None, jax.devices()[0], "cpu"):
        with jax.default_device(device):
            assert tracing.platform() == "cpu"
    with jax.default_device("gpu"):  # named only, as there is none
        assert tracing.platform() == "gpu"

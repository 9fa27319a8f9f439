"""conv: every algorithm is the convolution, values and gradients, alone and vmapped over lanes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv, conv_spectral, conv_winograd, tracing

# x, kernel, stride, padding
SHAPES = [
    ((2, 12, 12, 1), (9, 9, 1, 4), 1, "VALID"),
    ((3, 20, 20, 4), (9, 9, 4, 8), 2, "VALID"),
    ((1, 19, 17, 3), (9, 9, 3, 2), 2, "VALID"),
    ((2, 7, 10, 2), (3, 3, 2, 5), 1, "SAME"),
    ((2, 7, 10, 2), (3, 3, 2, 5), 1, ((1, 0), (1, 1))),
    ((4, 9, 4, 3), (3, 3, 3, 2), 1, "VALID"),
    ((2, 1, 13, 2), (3, 3, 2, 3), 1, ((2, 3), (0, 0))),
    ((2, 7, 10, 2), (3, 3, 2, 5), 2, "SAME"),
    ((3, 8, 5, 2), (2, 4, 2, 3), 2, "SAME"),
    ((2, 9, 9, 1), (9, 9, 1, 3), 2, "VALID"),
    ((2, 10, 8, 2), (1, 1, 2, 3), 1, "VALID"),
    ((2, 11, 8, 1), (4, 3, 1, 1), 3, "VALID"),
]
FORMS = ("im2col", "fourier")


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def direct(x, kernel, stride, padding, g=None):
    """The definition, tap by tap in float64: y, or for a gradient g of y those of x and kernel."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    taps = kernel.shape[:2]
    pads = padding
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(x.shape[1:3], taps, (stride, stride), padding)
    padded = np.pad(x, ((0, 0), *pads, (0, 0)))
    oh, ow = [(n - k) // stride + 1 for n, k in zip(padded.shape[1:3], taps, strict=True)]
    y, dx, dkernel = (
        np.zeros((len(x), oh, ow, kernel.shape[3])),
        np.zeros(padded.shape),
        np.zeros(kernel.shape),
    )
    for p, q in np.ndindex(*taps):
        seen = np.s_[:, p : p + stride * (oh - 1) + 1 : stride, q : q + stride * (ow - 1) + 1 : stride]
        y += padded[seen] @ kernel[p, q]
        if g is not None:
            dx[seen] += np.asarray(g, np.float64) @ kernel[p, q].T
            dkernel[p, q] = np.einsum("bhwc,bhwo->co", padded[seen], np.asarray(g, np.float64))
    if g is None:
        return y
    (top, _), (left, _) = pads
    return dx[:, top : top + x.shape[1], left : left + x.shape[2]], dkernel


def assert_close(actual, expected, tolerance=1e-5):
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()
    assert error < tolerance


@pytest.mark.parametrize(
    ("algorithm", "x_shape", "kernel_shape", "stride", "padding"),
    [
        (algorithm, *shape)
        for algorithm in conv.ALGORITHMS
        for shape in SHAPES
        if {"winograd": conv_winograd.can_do(shape[1], shape[2]), "kn2row": shape[2] == 1}.get(algorithm, True)
    ],
)
def test_values_and_gradients_are_those_of_the_definition(algorithm, x_shape, kernel_shape, stride, padding):
    x, kernel = draw(0, *x_shape), draw(1, *kernel_shape)

    def run(x, kernel, g):
        conv2d = partial(conv.conv2d, stride=stride, padding=padding, algorithm=algorithm)
        y, pullback = jax.vjp(conv2d, x, kernel)
        return y, pullback(g)

    expected = direct(x, kernel, stride, padding)
    g = draw(2, *expected.shape)
    y, gradients = jax.jit(run)(x, kernel, g)
    assert_close(y, expected)
    for actual, expected in zip(gradients, direct(x, kernel, stride, padding, g), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("batch", "small", "large", "held"),
    [(9, 2**40, 2**41, False), (9, 0, 2**40, True), (9, 0, 0, False), (8, 2**40, 2**41, True), (8, 0, 0, True)],
    ids=["small", "held", "large", "small of few images", "large of few images"],
)
def test_spectra_of_kernels_are_held_or_computed_again(monkeypatch, batch, small, large, held):
    monkeypatch.setattr(conv_spectral, "_SMALL_BYTES", small)
    monkeypatch.setattr(conv_spectral, "_LARGE_BYTES", large)
    x, kernel = draw(0, batch, 13, 12, 8), draw(1, 5, 5, 8, 6)
    y, pullback = jax.vjp(lambda x, kernel: conv.conv2d(x, kernel, stride=2, algorithm="fourier"), x, kernel)
    assert_close(y, direct(x, kernel, 2, "VALID"))
    g = draw(2, *y.shape)
    for actual, expected in zip(pullback(g), direct(x, kernel, 2, "VALID", g), strict=True):
        assert_close(actual, expected)
    size = conv_spectral.spectrum_size(y.shape[1:3], kernel.shape, 2)
    assert any(saved.shape[1:] == (32, 6) and saved.size >= size for saved in jax.tree.leaves(pullback)) == held
    if batch > 8:  # as many as taps
        form = conv.training_form("cpu", x.shape, kernel.shape, 2, "VALID", x.dtype.itemsize)
        assert form == ("fourier held" if held else "fourier")


def test_tiles_in_parts_give_what_the_whole_batch_gives(monkeypatch):
    x, kernel, pads = draw(0, 6, 7, 10, 3), draw(1, 3, 3, 3, 5), ((1, 0), (1, 1))
    whole = conv_winograd.parts_of(x.shape, 5, pads)
    monkeypatch.setattr(conv_winograd, "_PART_BYTES", 4 * 36 * 6 * (3 + 5) * 3)  # of three images
    assert (whole, conv_winograd.parts_of(x.shape, 5, pads)) == (1, 2)
    y, pullback = jax.vjp(lambda x, kernel: conv.conv2d(x, kernel, padding=pads, algorithm="winograd"), x, kernel)
    assert_close(y, direct(x, kernel, 1, pads))
    g = draw(2, *y.shape)
    for actual, expected in zip(pullback(g), direct(x, kernel, 1, pads, g), strict=True):
        assert_close(actual, expected)


def test_parts_of_a_batch_of_tiles_are_not_tiny(monkeypatch):
    monkeypatch.setattr(conv_winograd, "_PART_BYTES", 4 * 36 * 4 * (3 + 5) * 9)  # of nine images
    parts = [conv_winograd.parts_of((n, 8, 8, 3), 5, ((1, 1), (1, 1))) for n in (9, 14, 18, 13, 22)]
    assert parts == [1, 2, 2, 1, 2], "of at least a quarter of nine images"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_tiles_vmapped_over_lanes_equal_a_loop(platform):
    x, kernels, g = draw(0, 2, 7, 7, 3), draw(1, 3, 3, 3, 3, 4), draw(2, 3, 2, 7, 7, 4)

    def loss(x, kernel, g):
        return jnp.sum(conv.conv2d(x, kernel, padding="SAME", algorithm="winograd") * g)

    gradients = jax.grad(loss, argnums=(0, 1))
    with tracing.using(tracing.Target(platform=platform)):
        found = jax.jit(jax.vmap(gradients, in_axes=(None, 0, 0)))(x, kernels, g)
    for i in range(3):
        for actual, expected in zip(found, gradients(x, kernels[i], g[i]), strict=True):
            assert_close(actual[i], expected)


def test_tiles_are_computed_in_float32():
    x, kernel = draw(0, 2, 8, 8, 4, dtype=jnp.bfloat16), draw(1, 3, 3, 4, 8, dtype=jnp.bfloat16)
    y, pullback = jax.vjp(lambda *args: conv.conv2d(*args, algorithm="winograd"), x, kernel)
    g = draw(2, *y.shape, dtype=jnp.bfloat16)
    expected = (direct(x, kernel, 1, "VALID"), *direct(x, kernel, 1, "VALID", g))
    for actual, reference in zip((y, *pullback(g)), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert_close(actual, reference, tolerance=0.004)


@pytest.mark.parametrize("algorithm", FORMS)
@pytest.mark.parametrize(("x_lanes", "platform"), [(None, "cpu"), (3, "cpu"), (3, "gpu")])
def test_vmap_over_lanes_equals_a_loop(algorithm, x_lanes, platform):
    """Lanes run in turn or, as away from the CPU, as a batch dimension of the same products."""
    x = draw(0, *([x_lanes] if x_lanes else []), 2, 14, 14, 3)
    kernels, g = draw(1, 3, 5, 5, 3, 4), draw(2, 3, 2, 5, 5, 4)

    def loss(x, kernel, g):
        return jnp.sum(conv.conv2d(x, kernel, stride=2, algorithm=algorithm) * g)

    x_axis = 0 if x_lanes else None
    value_and_grads = jax.value_and_grad(loss, argnums=(0, 1))
    one_lane = jax.jit(value_and_grads)
    with tracing.using(tracing.Target(platform=platform)):
        values, (dx, dkernels) = jax.jit(jax.vmap(value_and_grads, in_axes=(x_axis, 0, 0)))(x, kernels, g)
    for i in range(3):
        value, (dx_i, dkernel_i) = one_lane(x[i] if x_lanes else x, kernels[i], g[i])
        np.testing.assert_allclose(values[i], value, rtol=1e-4)
        assert_close(dx[i], dx_i)
        assert_close(dkernels[i], dkernel_i)


@pytest.mark.parametrize("algorithm", FORMS)
def test_gradient_of_a_vmapped_call_adds_up_a_shared_image(algorithm):
    x, kernels, g = draw(0, 2, 14, 14, 3), draw(1, 3, 5, 5, 3, 4), draw(2, 3, 2, 5, 5, 4)

    def apply(algorithm, x):
        def one(kernel):
            return conv.conv2d(x, kernel, stride=2, algorithm=algorithm)

        return jnp.sum(jax.vmap(one)(kernels) * g)

    gradient = jax.jit(jax.grad(apply, argnums=1), static_argnums=0)
    actual, expected = (gradient(name, x) for name in (algorithm, "native"))
    assert_close(actual, expected)


@pytest.mark.parametrize("algorithm", FORMS)
def test_lowered_products_contain_no_convolution(algorithm):
    def loss(x, kernels):
        def one(x, kernel):
            return conv.conv2d(x, kernel, stride=2, algorithm=algorithm)

        return jnp.sum(jax.vmap(one)(x, kernels) ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(draw(0, 3, 2, 9, 9, 2), draw(1, 3, 5, 5, 2, 4)).as_text()
    assert "dot_general" in text
    assert "convolution" not in text


@pytest.mark.parametrize("stride", [1, 2])
def test_native_gradients_have_the_layout_that_is_fast_in_loops(stride):
    def loss(x, kernel):
        return jnp.sum(conv.conv2d(x, kernel, stride=stride, algorithm="native") ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(draw(0, 2, 9, 9, 2), draw(1, 5, 5, 2, 4)).as_text()
    layouts = re.findall(r"dim_numbers = (.*?), window", text)
    assert len(layouts) >= 2
    assert set(layouts) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}


@pytest.mark.parametrize("algorithm", ["native", *FORMS])
def test_bfloat16_stays_within_its_rounding(algorithm):
    x, kernel = draw(0, 2, 16, 16, 4, dtype=jnp.bfloat16), draw(1, 9, 9, 4, 8, dtype=jnp.bfloat16)
    y, pullback = jax.vjp(lambda *args: conv.conv2d(*args, stride=2, algorithm=algorithm), x, kernel)
    g = draw(2, *y.shape, dtype=jnp.bfloat16)
    expected = (direct(x, kernel, 2, "VALID"), *direct(x, kernel, 2, "VALID", g))
    for actual, reference in zip((y, *pullback(g)), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert_close(actual, reference, tolerance=0.03)


def lane_reference(x, kernel1, bias1, kernel2, bias2):
    h = jax.nn.relu(conv.conv2d(x, kernel1, algorithm="native") + bias1[None, None, None])
    return conv.conv2d(h, kernel2, stride=2, algorithm="native") + bias2[None, None, None]


@pytest.mark.parametrize(
    ("size", "channels", "batch", "width"),
    [(28, 1, 8, 8), (32, 3, 9, 8), (23, 2, 8, 8), (25, 1, 9, 8), (21, 1, 8, 136), (28, 1, 2, 8)],
)
def test_lane_convs_is_two_convolutions(size, channels, batch, width):
    lanes = 2
    x = draw(0, batch, size, size, channels)
    params = (
        draw(1, lanes, 9, 9, channels, width) / 9,
        draw(2, lanes, width),
        draw(3, lanes, 9, 9, width, width) / 27,
        draw(4, lanes, width),
    )

    def loss(function, x, params):
        y = jax.vmap(function, in_axes=(None, 0, 0, 0, 0))(x, *params)
        return jnp.mean(jnp.sin(y)), y

    grad = jax.jit(jax.grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (dx, dparams), y = grad(conv.lane_convs, x, params)
    (dx_expected, dparams_expected), y_expected = grad(lane_reference, x, params)
    assert_close(y, y_expected)
    assert_close(dx, dx_expected)
    for actual, expected in zip(dparams, dparams_expected, strict=True):
        assert_close(actual, expected, tolerance=2e-5)


def test_an_algorithm_that_cannot_do_the_shape_names_those_that_can():
    with pytest.raises(InputError, match=r"'fourier' cannot .*use native, im2col"):
        conv.conv2d(jnp.zeros((1, 64, 64, 1)), jnp.zeros((3, 3, 1, 1)), algorithm="fourier")


@pytest.mark.parametrize(
    ("size", "kwargs", "message"),
    [
        (3, {"algorithm": "fft"}, "use native, im2col, fourier, winograd, kn2row or auto"),
        (2, {"algorithm": "winograd"}, "use native, im2col, fourier, kn2row or auto"),
        (3, {"padding": "FULL"}, "VALID or SAME"),
        (5, {}, "larger than the image"),
    ],
)
def test_unusable_input_is_refused(size, kwargs, message):
    with pytest.raises(InputError, match=message):
        conv.conv2d(jnp.zeros((1, 4, 4, 1)), jnp.zeros((size, size, 1, 1)), **kwargs)


def test_auto_runs_the_chosen_algorithm():
    x, kernel = draw(0, 2, 20, 20, 8), draw(1, 9, 9, 8, 4)
    name = conv.choose(jax.default_backend(), x.shape, kernel.shape, 2, "VALID")
    forced = conv.conv2d(x, kernel, stride=2, algorithm=name)
    np.testing.assert_array_equal(conv.conv2d(x, kernel, stride=2), forced)


@pytest.mark.parametrize(
    ("backend", "x_shape", "kernel_shape", "stride", "expected"),
    [
        ("cpu", (100, 28, 28, 1), (9, 9, 1, 64), 1, "im2col"),
        ("cpu", (100, 20, 20, 64), (9, 9, 64, 64), 2, "fourier"),
        ("cpu", (1, 20, 20, 64), (9, 9, 64, 64), 2, "native"),
        ("cpu", (100, 20, 20, 64), (3, 3, 64, 64), 1, "winograd"),
        ("cpu", (8, 20, 20, 64), (3, 3, 64, 64), 1, "native"),
        ("cpu", (500, 32, 32, 24), (3, 3, 24, 64), 1, "native"),
        ("cpu", (500, 32, 32, 32), (3, 3, 32, 32), 1, "winograd"),
        ("cpu", (500, 8, 8, 64), (3, 3, 64, 96), 1, "native"),
        ("cpu", (500, 8, 8, 96), (3, 3, 96, 128), 1, "winograd"),
        ("cpu", (100, 128, 128, 64), (9, 9, 64, 64), 2, "native"),
        ("gpu", (100, 20, 20, 64), (9, 9, 64, 64), 2, "im2col"),
        ("gpu", (100, 224, 224, 64), (9, 9, 64, 64), 1, "native"),
    ],
)
def test_choose_follows_what_was_measured(backend, x_shape, kernel_shape, stride, expected):
    assert conv.choose(backend, x_shape, kernel_shape, stride, "VALID") == expected


def test_tiles_of_few_images_are_worth_their_transforms_where_kernels_are_already_transformed():
    shape = (8, 15, 15, 64), (3, 3, 64, 64), 1, "SAME"
    assert [conv.choose("cpu", *shape, constant) for constant in (False, True)] == ["native", "winograd"]
    assert conv.choose("cpu", (1, 15, 15, 64), *shape[1:], True) == "native"
    with tracing.using(tracing.Target(platform="cpu", constant_weights=True)):
        assert conv.chosen(*shape) == "winograd"


@pytest.mark.parametrize(
    ("size", "constant", "forward_only", "expected"),
    [
        (20, False, False, ["fourier", "fourier"]),
        (20, False, True, ["native", "fourier"]),
        (20, True, True, ["fourier", "fourier"]),
        (24, True, True, ["native", "fourier"]),  # its spectrum is too large for XLA to keep
    ],
)
def test_a_kernel_that_is_transformed_in_each_call_needs_more_images(size, constant, forward_only, expected):
    """Unless its gradients need the spectrum, too."""
    found = [
        conv.choose("cpu", (batch, size, size, 256), (9, 9, 256, 256), 2, "VALID", constant, forward_only)
        for batch in (8, 32)
    ]
    assert found == expected


def test_few_pixels_of_many_channels_are_multiplied_tap_by_tap_in_exports():
    shapes = [(1, 7, 7, 192), (32, 3, 3, 512), (1, 8, 8, 192), (1, 7, 7, 96), (8, 7, 7, 192)]
    kernels = [(3, 3, x[-1], 256) for x in shapes]
    found = [conv.choose("cpu", x, kernel, 1, "SAME", True) for x, kernel in zip(shapes, kernels, strict=True)]
    assert found == ["kn2row", "kn2row", "native", "native", "winograd"]
    assert conv.choose("cpu", (1, 3, 3, 512), (3, 3, 512, 512), 1, "SAME") == "native"


def test_a_constant_kernel_is_transformed_when_the_program_is_compiled():
    kernel = np.asarray(draw(1, 3, 3, 64, 64))

    def convolve(x):
        return conv.conv2d(x, kernel, padding="SAME", algorithm="winograd")

    def products_of_kernel(constant):
        with tracing.using(tracing.Target(platform="cpu", constant_weights=constant)):
            text = jax.jit(lambda x: convolve(x)).lower(draw(0, 8, 7, 7, 64)).compile().as_text()
        return text.count("f32[36,4096]")

    assert products_of_kernel(False)
    assert not products_of_kernel(True)


@pytest.mark.parametrize("algorithm", FORMS)
def test_bfloat16_products_add_up_in_float32(algorithm):
    def loss(x, kernel):
        return jnp.sum(conv.conv2d(x, kernel, stride=2, algorithm=algorithm).astype(jnp.float32))

    x, kernel = draw(0, 2, 9, 9, 2, dtype=jnp.bfloat16), draw(1, 5, 5, 2, 4, dtype=jnp.bfloat16)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, kernel).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(line.rstrip().endswith("xf32>") for line in products)


def test_compiler_options_compile_and_are_empty_where_unknown():
    for chains in (False, True):
        options = conv.compiler_options(jax.default_backend(), chains)
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
        assert conv.compiler_options("no such backend", chains) == {}


def test_a_lack_of_memory_is_not_taken_for_an_unknown_option(monkeypatch):
    def fail(function, **options):
        raise MemoryError

    conv.compiler_options.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", fail)
        with pytest.raises(MemoryError):
            conv.compiler_options("cpu", False)
    assert conv.compiler_options("cpu", True)

"""Times the inference of lanes in each form: a precision, and a convolution algorithm or a runtime."""

import dataclasses
import time
from collections.abc import Callable, Container, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mlcn_jax.data.batches import to_pixels
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv
from mlcn_jax.nn.calibration import calibrate, fold_statistics
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.model import init_params
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.serving import onnx
from mlcn_jax.serving.parts import FORMS, ONNX
from mlcn_jax.serving.precision.make import lanes_of, make

BATCH = 64
_TURN_SECONDS = 0.2
_IMAGES = 16  # random ones, for statistics and calibration, which do not affect times


def inference_seconds(spec: ModelSpec, lanes: Sequence[LaneSpec], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds for each image of each lane with random parameters, by form, for `DeviceProfile.form_seconds`.

    Forms of ONNX Runtime are left out on a GPU, and if onnxruntime or jax2onnx is not installed.
    """
    found: dict[str, dict[str, float]] = {}
    for lane in lanes:
        calls = lane_calls(spec, lane)
        seconds = call_seconds(list(calls.values()), spec.image_shape, BATCH, rounds)
        for form, value in zip(calls, seconds.tolist(), strict=True):
            found.setdefault(form, {})[str(lane)] = value / BATCH
    return found


def lane_calls(spec: ModelSpec, lane: LaneSpec, forms: Container[str] | None = None) -> dict[str, Callable]:
    """A lane with random parameters, as functions of uint8 images, by the name of each form available here.

    Only those of `forms`, if given.
    """
    try:
        onnx.versions()
        with_onnx = jax.default_backend() == "cpu"
    except InputError:
        with_onnx = False
    spec = dataclasses.replace(spec, lanes=str(lane), lane_seeds=(), lane_weights=())
    images = np.random.default_rng(0).integers(0, 256, (_IMAGES, *spec.image_shape), np.uint8)
    params = init_params(spec, jax.random.key(0))
    if spec.normalises:
        whole = dataclasses.replace(spec, norm_group=_IMAGES)
        params = calibrate(whole, params, [to_pixels(jnp.asarray(images))])
    encoder, calls = fold_statistics(spec, params)["encoder"], {}
    for form in FORMS:
        if form.runtime == ONNX:
            if with_onnx and (forms is None or f"infer {form}" in forms):
                calls[f"infer {form}"] = make(lanes_of(spec, encoder)[0], form, images).call
            continue
        for algorithm in conv.ALGORITHMS:
            if forms is not None and f"infer {form.precision} {algorithm}" not in forms:
                continue
            own = lanes_of(dataclasses.replace(spec, conv=algorithm), encoder)[0]
            call = make(own, form, images).call
            try:
                jax.eval_shape(call, jax.ShapeDtypeStruct((BATCH, *spec.image_shape), np.uint8))
            except InputError:  # the algorithm cannot do a shape of this lane
                continue
            calls[f"infer {form.precision} {algorithm}"] = call
    return calls


def call_seconds(
    calls: Sequence[Callable], image_shape: tuple[int, ...], batch: int, rounds: int
) -> Float[np.ndarray, " calls"]:
    """Seconds of each call on a batch of uint8 images: the median over rounds in which all take turns."""
    images = np.random.default_rng(0).integers(0, 256, (batch, *image_shape), np.uint8)

    def once(call: Callable, times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            np.asarray(call(images))
        return (time.perf_counter() - started) / times

    counts = []
    for call in calls:
        once(call, 2)
        counts.append(max(1, round(_TURN_SECONDS / once(call, 1))))
    found = np.zeros((rounds, len(calls)))
    for turn in range(rounds):
        for i in np.roll(np.arange(len(calls)), -turn).tolist():
            found[turn, i] = once(calls[i], counts[i])
    return np.median(found, axis=0)

"""Measures how fast this device trains lanes: some are timed, and all others predicted from a fit."""

import dataclasses
import itertools
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlcn_jax import host
from mlcn_jax.allocator import return_unused_memory
from mlcn_jax.config import RunConfig
from mlcn_jax.data import datasets
from mlcn_jax.distributed import links, processes
from mlcn_jax.errors import InputError
from mlcn_jax.nn import conv, lanes
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.model import param_shapes
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost, fit
from mlcn_jax.placement.profile import MEASURED_KINDS, DeviceProfile, head_features
from mlcn_jax.settings import ParallelSettings
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, head_loss, make_train_step

_log = logging.getLogger(__name__)

BATCH_SIZES = (50, 100)
# Measured widths and depths: a designed subset of 1..5 times 1..5.
_SIZES = (
    *((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (3, 2), (4, 2), (5, 2)),
    *((2, 3), (4, 3), (1, 5), (3, 5), (5, 4)),
)
_GROUPS = (
    "mlcn1:w3d1*4, mlcn2:w2d3*4, mlcn1:w1d2*2, mlcn2:w4d1*2, mlcn1:w2d1*8, mlcn2:w1d2*8, resnet:w2d1*4, resnet:w1d2*2"
)
# Measured with so many pixels, too, as in the recipes of residual lanes: then more of their convolutions are computed
# by Winograd's products.
_MANY_PIXELS = 500 * 32 * 32
_LANES_OF_MANY = "resnet:w2d1, resnet:w3d1, resnet:w4d1, resnet:w2d3, resnet:w5d2"
WHOLE_STEPS = (  # lanes and batch size of models whose training steps are measured
    ("mlcn1:w3*4,mlcn2:w2*4", BATCH_SIZES[0]),
    ("mlcn2:w3d2*4", BATCH_SIZES[1]),
    ("mlcn1:w2d3*3,mlcn2:w4*2", BATCH_SIZES[0]),
    ("mlcn1:w4*2,resnet:w1*2", BATCH_SIZES[1]),
)
_FORWARDS = ("mlcn1:w1d1", "mlcn2:w3d2", "mlcn1:w2d3", "resnet:w2d3")
_HEAD_LANES = (2, 16)
_TURN_SECONDS = 0.05
_CLEARED_BYTES = 2**26  # more than the caches of a core hold


class Program:
    """A compiled `(state, *inputs) -> (state, output)` with its current state. `bytes` is its peak memory."""

    def __init__(self, options: dict[str, str], step: Callable, state: Any, *inputs: Any):
        self._compiled = jax.jit(step, donate_argnums=0, compiler_options=options).lower(state, *inputs).compile()
        self.bytes = cost.compiled_memory_bytes(self._compiled)
        self._state, self._inputs = jax.device_put((state, inputs))

    def run(self) -> None:
        """Takes a step and waits for it."""
        self._state, output = self._compiled(self._state, *self._inputs)
        jax.block_until_ready((self._state, output))

    def seconds(self, clear: Callable[[], Any]) -> float:
        """Seconds of a step whose arrays are not in a cache, as in training, where other lanes use the caches.

        Args:
          clear: see `clearing`.
        """
        clear()
        started = time.perf_counter()
        self.run()
        return time.perf_counter() - started


def typical_seconds(programs: Mapping[tuple, Program], rounds: int) -> dict[tuple, float]:
    """Seconds of a step of each program: the median over rounds of the mean within a turn; programs take turns.

    The fastest step would favour short programs, which take more steps in a turn.
    """
    means: dict[tuple, list[float]] = {key: [] for key in programs}
    clear = clearing()
    for number in range(1, rounds + 1):
        _log.info("timing %d programs, round %d of %d", len(programs), number, rounds)
        for key, program in programs.items():
            taken: list[float] = []
            while sum(taken) < _TURN_SECONDS:
                taken.append(program.seconds(clear))
            means[key].append(statistics.mean(taken))
    return {key: statistics.median(own) for key, own in means.items()}


def clearing() -> Callable[[], Any]:
    """A function that clears the caches of the device, for `Program.seconds`."""
    values = jnp.zeros(_CLEARED_BYTES // 4)
    add = jax.jit(lambda values: values + 1).lower(values).compile()
    return lambda: jax.block_until_ready(add(values))


class Lab:
    """Builds programs for one kind of images and lanes, on synthetic data."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec
        self._config = RunConfig()
        self._optimizer = optimizer_of(self._config.train, steps_per_epoch=600)
        self._rng = np.random.default_rng(0)

    def lane_step(self, group: lanes.LaneGroup, batch_size: int) -> Program:
        """A training step of a group of lanes."""
        step = cost.make_lane_step(group, self.spec.lane_settings, self._optimizer)
        columns = jax.ShapeDtypeStruct((batch_size, self.spec.num_classes, group.count), self.spec.dtype)
        return Program(
            self._options(str(group)), step, self._lane_state(group), self._images(batch_size), self._made(columns)
        )

    def lane_forward(self, group: lanes.LaneGroup, batch_size: int) -> Program:
        """The forward pass of a group of lanes alone."""

        def forward(state, images):
            return state, lanes.apply_group(state[0], group, self.spec.lane_settings, images)

        return Program(self._options(str(group)), forward, self._lane_state(group), self._images(batch_size))

    def head_step(self, num_lanes: int, batch_size: int) -> Program:
        """Loss, decoder, their gradients and the decoder's update."""
        spec = dataclasses.replace(self.spec, lanes=f"mlcn1:w1*{num_lanes}")
        weight = self._config.train.reconstruction_weight

        def step(state, v, images, labels):
            decoder, optimizer_state = state

            def loss(decoder, v):
                return head_loss(spec, weight, decoder, v, images, labels, jax.random.key(0))[0]

            grads, dv = jax.grad(loss, argnums=(0, 1))(decoder, v)
            updates, optimizer_state = self._optimizer.update(grads, optimizer_state, decoder)
            return (optax.apply_updates(decoder, updates), optimizer_state), dv

        decoder = param_shapes(spec)["decoder"]
        v = jax.ShapeDtypeStruct((batch_size, spec.num_classes, num_lanes), spec.dtype)
        labels = self._rng.integers(0, spec.num_classes, batch_size, np.int32)
        return Program(
            self._options(spec.lanes), step, self._state(decoder), self._made(v), self._images(batch_size), labels
        )

    def whole_step(self, lanes: str, batch_size: int) -> Program:
        """A training step of a model of some lanes."""
        spec = dataclasses.replace(self.spec, lanes=lanes)
        weight = self._config.train.reconstruction_weight
        step = make_train_step(spec, self._optimizer, reconstruction_weight=weight, seed=0)
        params, moments = self._state(param_shapes(spec))
        images = self._rng.integers(0, 256, (batch_size, *spec.image_shape), np.uint8)
        labels = self._rng.integers(0, spec.num_classes, batch_size, np.int32)
        return Program(
            self._options(lanes), step, TrainState(jnp.zeros((), jnp.int32), params, moments), images, labels
        )

    def _options(self, lanes: str) -> dict[str, str]:
        return dataclasses.replace(self.spec, lanes=lanes).compiler_options(jax.default_backend())

    def _lane_state(self, group: lanes.LaneGroup) -> tuple:
        def init(key, images):
            return lanes.init_group(key, group, 0, self.spec.lane_settings, images)

        return self._state(jax.eval_shape(init, jax.random.key(0), self._images(1)))

    def _state(self, params: Any) -> tuple:
        moments = jax.eval_shape(self._optimizer.init, params)
        return self._made(params), jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), moments)

    def _made(self, shapes: Any) -> Any:
        return jax.tree.map(lambda x: (0.05 * self._rng.standard_normal(x.shape)).astype(x.dtype), shapes)

    def _images(self, batch_size: int) -> np.ndarray:
        return self._rng.random((batch_size, *self.spec.image_shape), np.float32)


def tiny_network() -> Program:
    """A training step of one dense layer from 512 to 512 units on 64 rows: the thesis's measure of a device's speed."""

    def step(kernel, rows):
        loss, gradient = jax.value_and_grad(lambda kernel: jnp.mean(jnp.square(rows @ kernel - rows)))(kernel)
        return kernel - 0.1 * gradient, loss

    rng = np.random.default_rng(0)
    kernel, rows = (rng.standard_normal((size, 512)).astype(np.float32) / 512 for size in (512, 64))
    return Program(conv.compiler_options(jax.default_backend(), chains=True), step, kernel, rows)


def fitted_lanes(image_shape: tuple[int, int, int]) -> list[tuple[lanes.LaneGroup, int]]:
    """The lanes to which a profile is fitted, as groups of one: each at both batch sizes, some at a large one."""
    both = [
        (lanes.LaneGroup(lanes.LaneSpec(kind, width, depth), 1), batch_size)
        for width, depth in _SIZES
        for kind in MEASURED_KINDS
        for batch_size in BATCH_SIZES
    ]
    many = max(*BATCH_SIZES, min(500, _MANY_PIXELS // math.prod(image_shape[:2])))
    whole = lanes.LaneSettings.norm_group
    many -= many % whole if many > whole else 0  # whole groups
    return both + [(group, many) for group in parse_lanes(_LANES_OF_MANY)]


def make_programs(lab: Lab) -> dict[tuple, Program]:
    """The programs timed for a profile, keyed by what they compute, their lanes and their batch size."""
    _log.info("compiling the programs that are timed")
    singles = fitted_lanes(lab.spec.image_shape)
    groups = list(zip(parse_lanes(_GROUPS), itertools.cycle(BATCH_SIZES), strict=False))
    programs: dict[tuple, Program] = {("step", *key): lab.lane_step(*key) for key in singles + groups}
    programs |= {("forward", *key): lab.lane_forward(*key) for key in singles if str(key[0].spec) in _FORWARDS}
    programs |= {("head", *key): lab.head_step(*key) for key in itertools.product(_HEAD_LANES, BATCH_SIZES)}
    programs |= {("whole", *key): lab.whole_step(*key) for key in WHOLE_STEPS}
    programs |= {("tiny",): tiny_network()}
    return_unused_memory()
    return programs


def make_profile(
    lab: Lab,
    programs: Mapping[tuple, Program],
    seconds: Mapping[tuple, float],
    link: dict[str, float] | None,
    sharing: dict[str, float] | None,
    peak: dict[str, float],
) -> DeviceProfile:
    """The profile of this process's device.

    Args:
      lab: the settings of the lanes.
      programs, seconds: those of `make_programs`, and their measurements.
      link, sharing, peak: as in a profile (`measure_machine`).
    """
    keys: dict[str, list] = {}
    for what, *key in programs:
        keys.setdefault(what, []).append(tuple(key))
    singles = [(group, batch_size) for group, batch_size in keys["step"] if group.count == 1]
    here = host.environment()
    platform = here["platform"]
    memory_features = [
        cost.cost_of(lab.spec, group.spec).memory_features(platform, batch_size) for group, batch_size in singles
    ]
    measured = (
        [[cost.cost_of(lab.spec, group.spec)] * group.count for group, _ in keys["step"]],
        [batch_size for _, batch_size in keys["step"]],
        [seconds["step", *key] for key in keys["step"]],
        platform,
    )
    profile = DeviceProfile(
        device=here["device"],
        platform=here["platform"],
        cpu_count=here["cpu_count"],
        jax_version=jax.__version__,
        image_shape=lab.spec.image_shape,
        num_classes=lab.spec.num_classes,
        lane_routing=lab.spec.lane_routing,
        compute_dtype=lab.spec.compute_dtype,
        batch_sizes=BATCH_SIZES,
        tiny_seconds=seconds["tiny",],
        memory_bytes=host.usable_memory_bytes(),
        **fit.fit_lane_seconds(*measured),
        lane_bytes_of=fit.fit_bytes(memory_features, [programs["step", *key].bytes for key in singles]),
        head_seconds_of=fit.fit_seconds(
            [head_features(*key) for key in keys["head"]], [seconds["head", *key] for key in keys["head"]]
        ),
        forward_share=statistics.median(seconds["forward", *key] / seconds["step", *key] for key in keys["forward"]),
        link=link,
        sharing=sharing,
        peak=peak,
        points=[
            {
                "lanes": str(group),
                "batch_size": batch_size,
                "seconds": seconds["step", group, batch_size],
                "bytes": programs["step", group, batch_size].bytes,
            }
            for group, batch_size in keys["step"]
        ],
    )

    def predict(fields: dict[str, Any], costs: Sequence[cost.LaneCost], batch_size: int) -> float:
        return dataclasses.replace(profile, **fields).stack_seconds(costs, batch_size)

    ratios = []
    for given, batch_size in keys["whole"]:
        groups = parse_lanes(given)
        costs = [cost.cost_of(lab.spec, group.spec) for group in groups for _ in range(group.count)]
        rest = seconds["whole", given, batch_size] - profile.head_seconds(len(costs), batch_size)
        ratios.append(rest / profile.stack_seconds(costs, batch_size))
    whole = statistics.geometric_mean(ratios)
    residuals = fit.residuals(*measured, predict) | {"whole": [math.log(ratio / whole) for ratio in ratios]}
    return dataclasses.replace(profile, whole_ratio=whole, residuals=residuals)


def measure_link(cores: Sequence[int]) -> dict[str, float] | None:
    """Latency and bytes per second between two devices of this machine; None if there is only one.

    For CPUs, these are two processes on one of `cores` each, joined as in runs of several processes.
    """
    if jax.default_backend() != "cpu":
        return dataclasses.asdict(links.measure(jax.local_devices()[:2])) if jax.local_device_count() > 1 else None
    if len(cores) < 2:
        return None
    port = processes.free_port()
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlcn_jax",
                "profile",
                f"--link_worker={json.dumps({'process': i, 'port': port, 'core': cores[i]})}",
            ],
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
            text=True,
        )
        for i in range(2)
    ]
    printed, _ = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise InputError("the link could not be measured: one of its two processes failed; see its message above")
    return json.loads(printed.splitlines()[-1])


def link_worker(process: int, port: int, core: int) -> None:
    """Runs one of the two processes of `measure_link`; process 0 prints the result."""
    os.sched_setaffinity(0, [core])
    processes.join(ParallelSettings(processes=2, process=process, coordinator=f"127.0.0.1:{port}"), {})
    found = dataclasses.asdict(links.measure(jax.devices()))
    if processes.is_first():
        print(json.dumps(found), flush=True)


def lab_spec(data: str, lane_routing: str, compute_dtype: str) -> ModelSpec:
    """The model whose settings are measured; its own lanes do not matter.

    Args:
      data: a dataset, or HEIGHTxWIDTHxCHANNELS:CLASSES.
      lane_routing: as in the configuration.
      compute_dtype: as in the configuration.

    Raises:
      InputError: `data` is neither.
    """
    if own := re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([13]):([1-9]\d{0,3})", data):
        height, width, channels, classes = map(int, own.groups())
        shape = (height, width, channels), classes
    elif data in datasets.SHAPES:
        shape = datasets.SHAPES[data]
    else:
        raise InputError(
            f"--data={data} is not one of {', '.join(datasets.SHAPES)}, nor HEIGHTxWIDTHxCHANNELS:CLASSES, such as "
            "48x48x3:12, for images of your own"
        )
    return ModelSpec("mlcn", *shape, lanes="mlcn1:w1", lane_routing=lane_routing, compute_dtype=compute_dtype)


def bind(num_cores: int) -> list[int]:
    """Binds this process to a number of cores (0: all), before jax starts its threads; returns the cores it had.

    Raises:
      InputError: there are fewer.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if num_cores > len(cores):
        raise InputError(
            f"--cores={num_cores}, but this process may use {len(cores)}: give that or fewer, or 0 for all"
        )
    if num_cores:
        os.sched_setaffinity(0, cores[:num_cores])
    return cores


def table(profile: DeviceProfile) -> str:
    """The profile as a Markdown table."""
    link = "none"
    if profile.link:
        latency, rate = 1e6 * profile.link["latency_seconds"], profile.link["bytes_per_second"] / 1e9
        link = f"{latency:.0f} us, {rate:.2f} GB/s"
    rows = [
        ("device", f"{profile.device}, {profile.cpu_count} cores" if profile.platform == "cpu" else profile.device),
        ("tiny network", f"{1000 * profile.tiny_seconds:.2f} ms"),
        ("memory", f"{profile.memory_bytes / 2**30:.1f} GiB"),
        ("link", link),
        ("forward share of a lane's step", f"{profile.forward_share:.2f}"),
        ("each of 4 lanes in one program", f"{4**profile.crowding:.2f} times one alone"),
        ("lanes in a whole training step", f"{profile.whole_ratio:.2f} times a step of the lanes alone"),
    ]
    if profile.sharing:
        count, slower = profile.sharing["devices"], profile.sharing["slowdown"]
        rows.append((f"a step while {count:.0f} compute at once", f"{slower:.2f} times one alone"))
    if profile.peak:
        rates = [profile.peak[name] / 1e9 for name in ("flops_per_second", "bytes_per_second")]
        rows.append(("peak", f"{rates[0]:.0f} GFLOP/s, {rates[1]:.0f} GB/s"))
    for name, values in profile.residuals.items():
        if values:
            error = math.sqrt(statistics.fmean(value * value for value in values))
            rows.append((f"prediction error ({name})", f"{100 * error:.0f} %"))
    return "\n".join(["| measured | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])

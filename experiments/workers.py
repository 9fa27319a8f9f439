"""Processes that take training steps when they are told to, so that settings can take turns in one measurement.

Each belongs to a `Group`, which is one run: as many processes as it has, bound to cores of their own.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from experiments import REPOSITORY
from experiments.quota import Quota
from mlcn_jax import host
from mlcn_jax.allocator import keep_memory, share_heaps
from mlcn_jax.analysis.measure_device import WHOLE_STEPS
from mlcn_jax.config import RunConfig, flat
from mlcn_jax.distributed import links, processes
from mlcn_jax.errors import InputError
from mlcn_jax.launch import program
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.session import plan_of, step_options

_WARM_UP_STEPS = 6  # after which pages of new buffers hardly fault any more
_YARDSTICK_STEPS = 2
_PORTS = itertools.cycle(range(20_000, 30_000))  # in a network namespace, whose connections use those above
_PERIOD_MICROSECONDS = 20_000  # of a quota; with shorter ones the share was off by a tenth


@dataclasses.dataclass(frozen=True)
class Run:
    """What a group measures.

    Attributes:
      changes: of `configs/default.py`; `parallel` as for `main.py`.
      cores: of each process, which are as many.
      devices: of each process.
      device_of: the device of each lane, in stacks; empty for a mesh.
      slowness: of process 1, which is held back: 2 leaves it half of a core.
      alone: whether each process computes the whole model by itself.
      prefixes: of each process's command, such as that of a network namespace; empty for none.
      address: of the first process, for the others.
    """

    changes: Mapping[str, Any]
    cores: Sequence[Sequence[int]]
    devices: int = 1
    device_of: Sequence[int] = ()
    slowness: float = 1.0
    alone: bool = False
    prefixes: Sequence[Sequence[str]] = ()
    address: str = "127.0.0.1"


def config_of(changes: Mapping[str, Any]) -> RunConfig:
    """`configs/default.py` with some fields changed."""
    return RunConfig().replace(changes)


def one_core_profile(path: str) -> DeviceProfile:
    """The profile of one core of this machine; raises InputError for another one."""
    profile = DeviceProfile.load(Path(path))
    cpu = host.environment()["device"]
    if (profile.device, profile.cpu_count) != (cpu, 1):
        raise InputError(
            f"{path} is of {profile.cpu_count} cores of {profile.device}; one core of {cpu} is expected: "
            f"{program()} profile --cores=1 --output={path}"
        )
    if len(os.sched_getaffinity(0)) < 2:
        raise InputError("two processes of one core each are measured, and there is one core")
    return profile


class Group:
    """The processes of a run, which wait until they are told to take steps."""

    def __init__(self, run: Run):
        self._run = run
        coordinator = f"{run.address}:{next(_PORTS) if run.prefixes else processes.free_port()}"
        address = {"parallel.processes": len(run.cores), "parallel.coordinator": coordinator}
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(run.devices)}
        self._processes = []
        for i in range(len(run.cores)):
            mine = {**run.changes, **address, "parallel.process": i} if len(run.cores) > 1 else run.changes
            values = json.dumps({**dataclasses.asdict(run), "changes": mine, "cores": list(run.cores[i])})
            self._processes.append(
                subprocess.Popen(
                    [*(run.prefixes[i] if run.prefixes else ()), sys.executable, "-m", "experiments.workers", values],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=env,
                    text=True,
                    cwd=REPOSITORY,
                )
            )

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [process.pid for process in self._processes]

    def seconds(self, steps: int) -> float:
        """Of one step in the slowest process, the mean of so many; the first call also waits until all are ready."""
        with held_back(self._processes[-1].pid, self._run.slowness):
            return max(self._ask(str(steps)))

    def slowness(self, profile: DeviceProfile, in_turn: bool = False) -> list[float]:
        """How many times as long as in a profile steps take now, in each process, all at once or `in_turn`.

        The geometric mean over the whole steps of which the profile has measured how long they take
        (`DeviceProfile.whole_ratio`); steps of lanes by themselves slow down in another way.
        """
        config = config_of(self._run.changes)
        spec = config.model_spec(*config.data.shape())
        expected = []
        for given, batch in WHOLE_STEPS:
            groups = parse_lanes(given)
            costs = [cost.cost_of(spec, group.spec) for group in groups]
            costs = [one for one, group in zip(costs, groups, strict=True) for _ in range(group.count)]
            expected.append(profile.model_seconds(costs, batch) + profile.head_seconds(len(costs), batch))
        sets = [[process] for process in self._processes] if in_turn else [self._processes]
        taken = [seconds for some in sets for seconds in self._ask("yardstick", some)]
        return [float(np.exp(np.mean(np.log(np.divide(seconds, expected))))) for seconds in taken]

    def link(self) -> dict[str, float]:
        """The link between the first two processes, measured now (`links.measure`)."""
        return self._ask("link")[0]

    def _ask(self, what: str, some: Sequence[subprocess.Popen] = ()) -> list[Any]:
        """What some processes answer, by default all."""
        asked = some or self._processes
        for process in asked:
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        return [self._answer(process) for process in asked]

    def _answer(self, process: subprocess.Popen) -> Any:
        for line in process.stdout:
            if line.startswith("answer "):
                return json.loads(line.partition(" ")[2])
        raise InputError("a process ended before it had measured; its message is above")

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def held_back(pid: int, slowness: float) -> Iterator[None]:
    """Leaves a process, and what it starts, 1 / slowness of a core, by a quota of the kernel.

    Raises:
      InputError: cgroups cannot be written to.
    """
    if slowness == 1.0:
        yield
        return
    quota = Quota(Quota.root() / f"mlcn_held_back_{pid}", 1 / slowness, _PERIOD_MICROSECONDS)
    quota.add(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (Quota.root() / "cgroup.procs").write_text(str(pid))
        quota.remove()


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Binds this thread, and the processes that it starts meanwhile, to a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _work(values: dict[str, Any]) -> None:
    """Answers each line of standard input: a number of steps with a step's mean seconds, `yardstick`, or `link`."""
    os.sched_setaffinity(0, values["cores"])
    config = config_of(values["changes"])
    host.compute_in_turn()
    share_heaps(config.model["lanes"])
    if config.parallel.processes > 1:
        processes.join(config.parallel, flat(config.to_dict()))
    host.set_up_jax(least_seconds=0.1)
    import jax
    import jax.numpy as jnp

    from mlcn_jax.analysis.measure_device import Lab, Program, clearing
    from mlcn_jax.nn.model import init_params
    from mlcn_jax.training import plan, stack_programs, step

    image_shape, num_classes = config.data.shape()
    spec = config.model_spec(image_shape, num_classes)
    optimizer = optimizer_of(config.train, 1000)
    if values["device_of"]:
        laid_out = plan.Plan(
            stacks=stack_programs.make_stacks(jax.devices(), values["device_of"]), head=jax.devices()[0]
        )
    elif values["alone"]:
        laid_out = plan.Plan()
    else:
        laid_out = plan_of(config, spec)
    runner = plan.make_runner(laid_out, spec, optimizer, clip_norm=config.train.clip_norm, **step_options(config))
    params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(0))
    state = step.TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
    runner.start(jax.device_get(state))
    del params, state
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (config.train.batch_size, *image_shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, config.train.batch_size, dtype=np.int32)
    runner.compile(images, labels)
    clear = cache(clearing)

    @cache
    def yardsticks() -> list[Program]:
        programs = [Lab(spec).whole_step(*key) for key in WHOLE_STEPS]
        for one in programs:
            one.run()
        return programs

    def steps(count: int) -> None:
        for _ in range(count):
            runner.step(*runner.place(images, labels))
        runner.wait()  # and no metric is read: stacks would send the last gradient's norm for it by itself

    steps(_WARM_UP_STEPS)
    for line in sys.stdin:
        if line.strip() == "link":
            print("answer", json.dumps(dataclasses.asdict(links.measure(jax.devices()[:2]))), flush=True)
            continue
        if line.strip().isdigit():
            steps(1)  # brings caches and memory back
            started = time.perf_counter()
            steps(int(line))
            answer: Any = (time.perf_counter() - started) / int(line)
        else:
            answer = [
                np.mean([program.seconds(clear()) for _ in range(_YARDSTICK_STEPS)]).item() for program in yardsticks()
            ]
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    keep_memory()
    _work(json.loads(sys.argv[1]))

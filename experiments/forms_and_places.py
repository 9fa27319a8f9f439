"""The form of each lane chosen together with its device, against one after the other: simulated and real devices.

    python -m experiments.forms_and_places                # some minutes; `make precision` once, for .venv-onnx
    python -m experiments.forms_and_places --rounds=0     # the simulated devices alone

One after the other is tried in both orders, forms first and devices first. Simulated: two devices and random lanes,
where the second device is a few times faster in some forms and cannot run others. Real: two processes on a core each,
of which the second has no ONNX Runtime, and compiles for SSE4.2 only, as for an old processor; what forms cost in
accuracy does not count there. Each process times its lanes in every form, alone, training steps with its caches
cleared; forms and devices are chosen from the two tables; both processes then compute what they were given at the same
time, and the makespan is that of the slower one. The ways of choosing take turns in the same processes, so each is also
compared with `together` in the same turn. Writes `experiments/results/forms_and_places.json`.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import REPOSITORY, RESULTS
from experiments.quiet import busy_cores
from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.forms import (
    FormPlacement,
    FormProblem,
    place_devices_first,
    place_forms_first,
    place_together,
)
from mlcn_jax.placement.profile import FORM_BATCH
from mlcn_jax.serving.precision.speeds import BATCH

NAME = "forms_and_places"
LANES = ("mlcn2:w4*2", "mlcn1:w2*2", "resnet:w1d2*2")
TASKS = ("train", "infer")
WAYS: Mapping[str, Callable[[str, FormProblem], FormPlacement]] = {
    "forms first": place_forms_first,
    "devices first": place_devices_first,
    "together": place_together,
}
_BETTER = "the better of both"
_OLD = "--xla_cpu_max_isa=SSE4_2"
_SIMULATED, _LANES, _FORMS = 200, 8, 4
_BATCHES = {"train": FORM_BATCH, "infer": BATCH}  # images, as many as were timed
_TURN_SECONDS = 1.0


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("rounds", 5, "Rounds of timing; 0 simulates only.", lower_bound=0, flag_values=values)
    flags.DEFINE_list("lanes", list(LANES), "Lanes on the real devices.", flag_values=values)
    flags.DEFINE_string("data", "fashion_mnist", "Data set whose image shape lanes take.", flag_values=values)
    text = "Python of the processes, which has requirements-onnx.txt."
    flags.DEFINE_string("onnx_python", ".venv-onnx/bin/python", text, flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / f"{NAME}.json"), "Where to write the results.", flag_values=values)
    text = "Used by the script itself: what one process does, as JSON."
    flags.DEFINE_string("worker", "", text, flag_values=values)


def main(values: flags.FlagValues) -> None:
    if values.worker:
        work(**json.loads(values.worker))
        return
    result: dict[str, Any] = {**simulate(), "lanes": values.lanes, "rounds": values.rounds}
    if values.rounds:
        result["real"] = on_real_devices(values.onnx_python, ",".join(values.lanes), values.data, values.rounds)
    date = host.today()
    write_json(Path(values.output).expanduser(), result | host.environment() | {"date": date})
    print(table(result))


def simulate() -> dict[str, Any]:
    """Makespans of random problems with budgets of losses, one after the other over together, by partitioner and order.

    Also how many of the exact choices were proven to be optimal in the time that they have.
    """
    *orders, together = WAYS
    ratios: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in (*orders, _BETTER)} for name in ("exact", "greedy")
    }
    proven = 0
    for seed in range(_SIMULATED):
        problem = random_problem(seed)
        for name, found in ratios.items():
            placed = {way: place(name, problem) for way, place in WAYS.items()}
            proven += placed[together].optimal
            best = placed[together].makespan_seconds
            each = {way: placed[way].makespan_seconds / best for way in orders}
            for way, ratio in (each | {_BETTER: min(each.values())}).items():
                found[way].append(ratio)
    told = {
        name: {
            way: {"median": statistics.median(own), "min": min(own), "max": max(own), "problems": len(own)}
            for way, own in found.items()
        }
        for name, found in ratios.items()
    }
    return {"simulated": told, "proven_optimal": proven}


def random_problem(seed: int) -> FormProblem:
    """Lanes of different work; each device is faster in some forms, and cannot run a third of the others."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(1, 10, (_LANES, 1, 1))
    speeds = rng.uniform(0.5, 4, (1, _FORMS, 2))
    missing = rng.random((1, _FORMS, 2)) < 1 / 3
    missing[:, 0] = False  # every device has the first form
    seconds = np.where(missing, np.inf, work / speeds)
    losses = rng.uniform(0, 0.2, (_LANES, _FORMS)) * (np.arange(_FORMS) > 0)
    return FormProblem(seconds.tolist(), [f"form {f}" for f in range(_FORMS)], losses=losses.tolist(), most_lost=0.4)


def on_real_devices(python: str, lanes: str, data: str, rounds: int) -> dict[str, Any]:
    """Predicted and measured makespans of both tasks on two processes; InputError while other work keeps cores busy."""
    path = Path(python).expanduser().absolute()  # not resolved: it is a link in its environment
    if not path.exists():
        raise InputError(f"--onnx_python={python} does not exist: `make precision` makes .venv-onnx")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise InputError("two processes need two cores: --rounds=0 simulates only")
    busy = busy_cores()
    asked = {"lanes": lanes, "data": data, "rounds": rounds}
    flags_of = ("", _OLD)
    tables: list[Any] = []
    for core, xla_flags in zip(cores, flags_of, strict=False):  # one after the other: the second core is idle meanwhile
        worker = _start(str(path), core, xla_flags, asked)
        _wait_for([worker])
        tables += _answers([worker], "all")
        _end([worker])
    names = [name for entry in lanes.split(",") for name in _names(entry)]
    found: dict[str, Any] = {"tables": tables}
    for task in TASKS:
        problem = problem_of(tables, names, task)
        placed = {way: place("exact", problem) for way, place in WAYS.items()}
        given = {way: given_to(each, names, problem.forms) for way, each in placed.items()}
        workers = [
            _start(str(path), core, xla_flags, asked | {"given": {way: given[way][device] for way in WAYS}})
            for device, (core, xla_flags) in enumerate(zip(cores, flags_of, strict=False))
        ]
        turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        _wait_for(workers)
        for turn in range(rounds):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                turns[way].append(_answers(workers, way))
        _end(workers)
        found[task] = {
            way: {
                "given": given[way],
                "predicted_seconds": placed[way].makespan_seconds,
                **measured(turns[way], turns["together"]),
            }
            for way in WAYS
        }
    found["busy_cores"] = [busy, busy_cores(must_be_quiet=False)]
    return found


def problem_of(tables: Sequence[Mapping[str, Mapping[str, float]]], names: Sequence[str], task: str) -> FormProblem:
    """Lanes in the forms of a task, from the seconds for an image that each device measured, by form and lane."""
    forms = sorted({form for table in tables for form in table if form.split()[0] == task})
    seconds = [
        [[_BATCHES[task] * table.get(form, {}).get(name, float("inf")) for table in tables] for form in forms]
        for name in names
    ]
    return FormProblem(seconds, forms)


def given_to(placed: FormPlacement, names: Sequence[str], forms: Sequence[str]) -> list[list[list[str]]]:
    """The lanes of each device, each with its form."""
    chosen = list(zip(names, placed.form_of, placed.device_of, strict=True))
    return [[[name, forms[f]] for name, f, d in chosen if d == device] for device in range(len(placed.seconds))]


def measured(turns: Sequence[Sequence[float]], together: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The makespan of a way, from the seconds of each device in each turn: the median of those of the slower one.

    Also its makespan over that of choosing together in the same turn.
    """
    ratios = [max(own) / max(other) for own, other in zip(turns, together, strict=True)]
    return {
        "measured_seconds": statistics.median(max(own) for own in turns),
        "of_each": [statistics.median(own) for own in zip(*turns, strict=True)],
        "over_together": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "turns": turns,
    }


def _names(entry: str) -> list[str]:
    from mlcn_jax.nn.lane_list import parse_lanes

    return [str(group.spec) for group in parse_lanes(entry) for _ in range(group.count)]


def _start(python: str, core: int, xla_flags: str, asked: Mapping[str, Any]) -> subprocess.Popen:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XLA_FLAGS": xla_flags}
    worker = json.dumps({**asked, "core": core})
    command = [python, "-m", f"experiments.{NAME}", f"--worker={worker}"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _wait_for(workers: Sequence[subprocess.Popen]) -> None:
    for worker in workers:
        _line(worker)


def _answers(workers: Sequence[subprocess.Popen], line: str) -> list[Any]:
    """Lets workers that are ready do something together; returns what they say."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{line}\n")
        worker.stdin.flush()
    return [json.loads(_line(worker)) for worker in workers]


def _end(workers: Sequence[subprocess.Popen]) -> None:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def _line(worker: subprocess.Popen) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise InputError(f"a process of this script ended with {worker.wait()}: see above")
    return line


def work(
    core: int, lanes: str, data: str, rounds: int, given: Mapping[str, Sequence[Sequence[str]]] | None = None
) -> None:
    """What one process does: times all lanes in all forms, or, for each line, computes what that way gave it."""
    os.sched_setaffinity(0, {core})
    if _OLD in os.environ.get("XLA_FLAGS", ""):
        sys.modules["jax2onnx"] = None  # type: ignore[assignment]  # as if it were not installed
    from mlcn_jax.analysis.measure_device import lab_spec
    from mlcn_jax.analysis.measure_forms import lane_programs, measure_training
    from mlcn_jax.nn.lane_list import parse_lanes
    from mlcn_jax.serving.precision.speeds import inference_seconds, lane_calls

    spec = lab_spec(data, "published", "float32")
    kinds = [group.spec for group in parse_lanes(lanes)]
    if given is None:
        print("ready", flush=True)
        sys.stdin.readline()
        found = measure_training(spec, kinds, rounds)[0] | inference_seconds(spec, kinds, rounds)
        print(json.dumps(found), flush=True)
        return
    images = np.random.default_rng(0).integers(0, 256, (BATCH, *spec.image_shape), np.uint8)

    @functools.cache
    def step(name: str, form: str) -> Callable[[], Any]:
        kind = parse_lanes(name)[0].spec
        if form.startswith("train"):
            return lane_programs(spec, [kind], FORM_BATCH, forms=[form])[form, name].run
        call = lane_calls(spec, kind, forms=[form])[form]
        return lambda: np.asarray(call(images))

    steps = {way: [step(name, form) for name, form in own] for way, own in given.items()}
    for own in steps.values():
        for run in own:
            run()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(turn_seconds(steps[line.strip()])), flush=True)


def turn_seconds(steps: Sequence[Callable[[], Any]]) -> float:
    """Seconds of all steps, one after the other: the mean over a turn; 0 without any."""
    if not steps:
        return 0.0
    count, started = 0, time.perf_counter()
    while not count or time.perf_counter() - started < _TURN_SECONDS:
        for step in steps:
            step()
        count += 1
    return (time.perf_counter() - started) / count


def table(result: Mapping[str, Any]) -> str:
    """For people."""
    lines = [
        f"simulated, {name}, {way}: takes {found['median']:.2f} times as long as together ({found['min']:.2f} to "
        f"{found['max']:.2f}, {found['problems']} problems)"
        for name, ways in result["simulated"].items()
        for way, found in ways.items()
    ]
    for task in TASKS if "real" in result else ():
        for way, found in result["real"][task].items():
            lines.append(
                f"real, {task}, {way}: {1000 * found['predicted_seconds']:.1f} ms predicted, "
                f"{1000 * found['measured_seconds']:.1f} ms measured, {found['over_together']['median']:.2f} times "
                "together"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    launch_script(define, main)

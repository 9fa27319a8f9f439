"""Step time of CapsNet and MLCN on more and more devices: batches split, lanes split, and both.

    python -m experiments.scaling

Measured on real cores: processes of one core each, as `main.py --config.parallel.processes=N` starts them. Measured
oversubscribed: one process whose devices share all cores, which shows what splitting costs, not what it brings. The two
are never in one line. All settings of a batch size take turns in one run. Speed-ups are over MLCN on one core and over
CapsNet on one core. Writes `experiments/results/scaling.json` and `.png`.
"""

import dataclasses
import functools
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from absl import app, flags

from experiments import REPOSITORY, RESULTS
from mlcn_jax import devices, processes
from mlcn_jax.config import RunConfig, write_json
from mlcn_jax.errors import InputError
from mlcn_jax.launch import launch

_TURN_SECONDS = 1.0
REAL, OVERSUBSCRIBED, WHOLE = "real cores", "oversubscribed", "one process on all cores"

_LANES = flags.DEFINE_string("lanes", "mlcn1:w4*8", "Lanes of MLCN.")
_DATA = flags.DEFINE_string("data", "fashion_mnist", "Dataset whose image shape is taken; images are random.")
_BATCHES = flags.DEFINE_list("batches", ["100", "150", "300", "600"], "Batch sizes.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds in which the settings take turns.", lower_bound=1)
_WORKER = flags.DEFINE_string("worker", "", "Used by the script itself: a setting as JSON.")


@dataclasses.dataclass(frozen=True)
class Setting:
    """`data` times `lane` devices: a process and a core each (`real cores`), or all in one process."""

    mode: str  # capsnet-data, mlcn-data, mlcn-lane or mlcn-hybrid
    data: int
    lane: int
    where: str

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.data * self.lane} devices, {self.where}"


def settings(num_cores: int) -> list[Setting]:
    """The settings that this machine can measure."""
    rows = [Setting(mode, 1, 1, where) for mode in ("capsnet-data", "mlcn-lane") for where in (REAL, WHOLE)]
    for n in (2, 4, 8):
        splits = [("capsnet-data", n, 1), ("mlcn-data", n, 1), ("mlcn-lane", 1, n)]
        splits += [("mlcn-hybrid", 2, n // 2)] if n > 2 else []
        rows += [
            Setting(*split, where)
            for split in splits
            for where in (REAL, OVERSUBSCRIBED)
            if n <= num_cores or where != REAL
        ]
    return rows


class Group:
    """The processes of one setting, which wait until they are told to take steps."""

    def __init__(self, setting: Setting, batch: int):
        self.setting = setting
        num_devices = setting.data * setting.lane
        count = num_devices if setting.where == REAL else 1
        cores = sorted(os.sched_getaffinity(0))
        port = processes.free_port()
        self._processes = []
        for i in range(count):
            values = dataclasses.asdict(setting) | {"batch": batch, "processes": count, "process": i, "port": port}
            values["cores"] = [cores[i]] if setting.where == REAL else cores
            self._processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "experiments.scaling",
                        f"--worker={json.dumps(values)}",
                        f"--lanes={_LANES.value}",
                        f"--data={_DATA.value}",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                    env={**os.environ, "JAX_NUM_CPU_DEVICES": str(1 if setting.where == REAL else num_devices)},
                    text=True,
                    cwd=REPOSITORY,
                )
            )

    def seconds(self, steps: int) -> float:
        """Of one step, as the mean of so many."""
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        for line in self._processes[0].stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise InputError(f"a process of {self.setting.name} ended; its message is above")

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def work(values: dict[str, Any]) -> None:
    """Takes as many training steps as each line of standard input says, and prints their mean seconds."""
    os.sched_setaffinity(0, values["cores"])
    default = runpy.run_path(str(REPOSITORY / "configs" / "default.py"))["get_config"]().to_dict()
    capsnet = values["mode"].startswith("capsnet")
    config = RunConfig.from_dict(default).replace(
        {
            "data.name": _DATA.value,
            "model.name": "capsnet" if capsnet else "mlcn",
            "model.lanes": "" if capsnet else _LANES.value,
            "train.batch_size": values["batch"],
            "parallel.processes": values["processes"],
            "parallel.process": values["process"] if values["processes"] > 1 else -1,
            "parallel.coordinator": f"127.0.0.1:{values['port']}",
        }
    )
    if values["processes"] > 1:
        processes.join(config)
    import jax
    import jax.numpy as jnp

    from mlcn_jax import parallel, train_step
    from mlcn_jax.model import init_params

    image_shape, num_classes = config.data.shape()
    spec = config.model_spec(image_shape, num_classes)
    parallel.check_split(spec, values["batch"], values["data"], values["lane"])
    mesh = parallel.make_mesh(values["data"], values["lane"])
    optimizer = train_step.make_optimizer(config.train, 1000)
    runner = train_step.MeshRunner(spec, optimizer, mesh, reconstruction_weight=0.392, seed=0)
    params = jax.jit(lambda key: init_params(spec, key))(jax.random.key(0))
    state = train_step.TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
    runner.start(jax.device_get(state))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (values["batch"], *image_shape), dtype=np.uint8)
    labels = rng.integers(0, num_classes, values["batch"], dtype=np.int32)
    runner.compile(images, labels)
    for line in sys.stdin:
        float(runner.step(*runner.place(images, labels))["loss"])  # brings caches and memory back
        started = time.perf_counter()
        for _ in range(int(line)):
            metrics = runner.step(*runner.place(images, labels))
        float(metrics["loss"])
        print("seconds", (time.perf_counter() - started) / int(line), flush=True)


def measure(batch: int, rounds: int) -> list[dict[str, Any]]:
    rows = [s for s in settings(len(os.sched_getaffinity(0))) if batch % s.data == 0]
    groups = [Group(setting, batch) for setting in rows]
    steps = [max(2, round(_TURN_SECONDS / group.seconds(2))) for group in groups]
    times = [[group.seconds(n) for group, n in zip(groups, steps, strict=True)] for _ in range(rounds)]
    for group in groups:
        group.close()
    by_setting = {setting: list(seconds) for setting, seconds in zip(rows, zip(*times, strict=True), strict=True)}
    bases = {mode: by_setting[Setting(mode, 1, 1, REAL)] for mode in ("mlcn-lane", "capsnet-data")}
    whole = by_setting[Setting("mlcn-lane", 1, 1, WHOLE)]
    return [
        {
            **dataclasses.asdict(setting),
            "batch": batch,
            "devices": setting.data * setting.lane,
            "milliseconds": 1000 * statistics.median(seconds),
            "over_mlcn_on_one_core": _ratio(bases["mlcn-lane"], seconds),
            "over_capsnet_on_one_core": _ratio(bases["capsnet-data"], seconds),
            "over_mlcn_in_one_process_on_all_cores": _ratio(whole, seconds),
        }
        for setting, seconds in by_setting.items()
    ]


def _ratio(base: list[float], seconds: list[float]) -> dict[str, float]:
    ratios = [b / s for b, s in zip(base, seconds, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def table(rows: list[dict[str, Any]]) -> str:
    ratios = ("over_mlcn_on_one_core", "over_capsnet_on_one_core", "over_mlcn_in_one_process_on_all_cores")
    head = ["mode", "batch", "devices", "where", "ms", *(name.replace("_", " ") for name in ratios)]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        numbers = [f"{row[name]['median']:.2f}" for name in ratios]
        lines.append(
            [row["mode"], str(row["batch"]), str(row["devices"]), row["where"], f"{row['milliseconds']:.0f}", *numbers]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(rows: list[dict[str, Any]]) -> None:
    """One panel a batch size: speed-up over MLCN on one core, a line for each mode and place of measuring."""
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(4.2 * len(batches), 4.5), layout="constrained")
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False, sharey=True)[0], batches, strict=True):
        for i, mode in enumerate(("capsnet-data", "mlcn-data", "mlcn-lane", "mlcn-hybrid")):
            for where, style in ((REAL, "o-"), (OVERSUBSCRIBED, "x:")):
                start = "capsnet-data" if mode == "capsnet-data" else "mlcn-lane"
                alone = (start, 1, REAL) if where == REAL else (start, 1, WHOLE)
                points = [r for r in rows if r["batch"] == batch and (r["mode"], r["devices"], r["where"]) == alone]
                points += [
                    r for r in rows if (r["batch"], r["mode"], r["where"]) == (batch, mode, where) and r["devices"] > 1
                ]
                if len(points) > 1:
                    values = [r["over_mlcn_on_one_core"]["median"] for r in points]
                    axes.plot([r["devices"] for r in points], values, style, color=f"C{i}", label=f"{mode}, {where}")
        axes.set_xticks([1, 2, 4, 8])
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("devices")
    figure.axes[0].set_ylabel("speed-up over MLCN on one core")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(RESULTS / "scaling.png", dpi=120)


def main(argv: list[str]) -> None:
    del argv
    if _WORKER.value:
        work(json.loads(_WORKER.value))
        return
    rows: list[dict[str, Any]] = []
    RESULTS.mkdir(exist_ok=True)
    for batch in map(int, _BATCHES.value):
        rows += measure(batch, _ROUNDS.value)
        about = {"lanes": _LANES.value, "data": _DATA.value, "rounds": _ROUNDS.value, **devices.environment()}
        write_json(RESULTS / "scaling.json", {**about, "rows": rows})
        print(table(rows[-len(settings(len(os.sched_getaffinity(0)))) :]), flush=True)
    draw(rows)


if __name__ == "__main__":
    launch(functools.partial(app.run, main))

"""The report's tables 2, 4 and 5 and its figure 3, with lanes: measured on a test bed, beside what models predict.

    python -m experiments.tiers_tables --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_tables --workdir=runs/mlcn2

Splits the trained model into end, edge and cloud, starts nodes with quotas of cores behind links that are shaped
(`experiments.tiers_bed`), and writes `tiers_tables.json`, `.md` and `.png` to `experiments/results/` after each
measurement. Run again, it goes on with those that are missing. Columns "printed" and "corrected" are predicted, from
single tasks on single devices; all others are measured.

Source: Zhang 2018, End, edge and cloud: heterogeneous distributed deep neural networks.
"""

import asyncio
import dataclasses
import datetime
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import RESULTS
from experiments.tiers_bed import CORES, NodePlan, RunningNode, bed
from experiments.tiers_dispatch import MODES, Device, Failures, Outcome, dispatch
from experiments.tiers_relay import check
from experiments.tiers_tables_report import write_report
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.files import make_folder, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.tiers import schedules, split, wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.cuts import cuts_of

_NAMES = ("end", "edge", "cloud")
_FAILING_TIMEOUT, _TASKS_BEFORE = 0.5, 12  # of table 5
_EDGE_MS, _CLOUD_MS = 10.0, 50.0  # each way


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured: devices of each tier, tasks of so many images, and runs of each."""

    ends: int
    edges: int
    tasks: int
    images: int
    runs: int
    delays: tuple[float, ...]  # seconds there and back, of table 4
    failing_tasks: int
    dead: tuple[int, ...]

    @property
    def cores(self) -> dict[str, float]:
        """Of each node: a cloud is four times as fast as an edge, and that is twice as fast as an end."""
        unit = CORES / (self.ends + 2 * self.edges + 8)
        return {"end": unit, "edge": 2 * unit, "cloud": 8 * unit}


SCALES = {
    "smoke": Scale(2, 1, 6, 4, 1, (0.1,), 8, (0, 1)),
    "full": Scale(8, 4, 200, 50, 5, (0.5, 1.0, 1.5, 2.0), 200, (0, 1, 2, 3, 4, 5, 6)),
}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Of a trained model of at least 3 lanes.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)
    flags.DEFINE_enum("scale", "full", list(SCALES), "How much is measured.", flag_values=values)
    for name, meaning in (("tasks", "All tasks"), ("images", "Images of a task"), ("runs", "Runs of each")):
        flags.DEFINE_integer(name, 0, f"{meaning}; 0 is as many as the scale has.", lower_bound=0, flag_values=values)
    flags.DEFINE_string("results", str(RESULTS), "Folder to write to.", flag_values=values)
    flags.DEFINE_string("name", "tiers_tables", "Of the files.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder = Path(values.results).expanduser()
    make_folder(folder, "results")
    given = {name: values[name].value for name in ("tasks", "images", "runs") if values[name].value}
    if "tasks" in given:
        given["failing_tasks"] = given["tasks"]
    scale = dataclasses.replace(SCALES[values.scale], **given)
    path = folder / f"{values.name}{'' if values.scale == 'full' else f'_{values.scale}'}.json"
    Tables(Path(values.workdir).expanduser(), values.data_dir, scale, path).measure()


class Tables:
    """All measurements, each of which is kept as soon as it is there."""

    def __init__(self, workdir: Path, data_dir: str, scale: Scale, path: Path):
        self.workdir, self.data_dir, self.scale, self.path = workdir, data_dir, scale, path
        trained, dataset = load_with_data(workdir, stored_config(workdir, data_dir))
        self.images, self.spec = dataset.test.images, trained.spec
        about = {"model": trained.spec.lanes, "step": trained.step, "data": dataset.name}
        about |= json.loads(json.dumps(dataclasses.asdict(scale)))
        self.results = read_json(self.path) if self.path.is_file() else {"about": about, "measured": {}}
        if self.results["about"] != about:
            raise SystemExit(f"error: {self.path} is of {self.results['about']}, not {about}: move it away")
        self.results |= {"command": shlex.join(["python", "-m", "experiments.tiers_tables", *sys.argv[1:]])}
        self.results |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **host.environment()}

    def measure(self) -> None:
        """Measures what is missing."""
        self._once("relay", check)
        self._schedules()
        self._failures()
        self._cuts()
        write_report(self.results, self.path)
        print(f"wrote {self.path.with_suffix('.md')}")

    def _once(self, key: str, measure: Callable[[], Any]) -> Any:
        measured = self.results["measured"]
        if key not in measured:
            started = time.perf_counter()
            measured[key] = measure()
            write_json(self.path, self.results)
            print(f"{key}: {json.dumps(measured[key])[:150]}  ({time.perf_counter() - started:.0f} s)", flush=True)
        return measured[key]

    def _missing(self, keys: Sequence[str]) -> bool:
        return any(key not in self.results["measured"] for key in keys)

    def _split(self, cut: str = "pixels") -> dict[str, TierArtifact]:
        lanes = list(range(len(self.spec.lane_specs)))
        wishes = self.path.with_name("tiers_of_tables.json")
        tiers = [{"name": n, "lanes": own} for n, own in zip(_NAMES, (lanes[:1], lanes[1:2], lanes[2:]), strict=True)]
        write_json(wishes, {"tiers": tiers, "tolerance": 0.005})
        folder = self.workdir / f"tiers-{cut}"
        if not folder.exists():
            split.split(self.workdir, wishes, cut, None, self.data_dir, folder.name)
        wishes.unlink()
        return {name: TierArtifact(folder / name) for name in _NAMES}

    def _plans(self, ends: int, edges: int, clouds: int) -> list[NodePlan]:
        folder, cores = self.workdir / "tiers-pixels", self.scale.cores
        delays = {"end": 0.0, "edge": _EDGE_MS, "cloud": _CLOUD_MS}
        names = ["end"] * ends + ["edge"] * edges + ["cloud"] * clouds
        return [NodePlan(folder / name, cores[name], delays[name]) for name in names]

    def _tasks(self, count: int) -> list[np.ndarray]:
        size = self.scale.images
        starts = [i * size % (len(self.images) - size) for i in range(count)]
        return [self.images[start : start + size] for start in starts]

    def _schedules(self) -> None:
        """Table 2 and figure 3: each schedule with 1 to N ends, after single tasks on single devices."""
        scale = self.scale
        keys = {(s, n): f"schedule {s}, {n} ends" for s in schedules.SCHEDULES for n in range(1, scale.ends + 1)}
        if not self._missing(["devices", *keys.values()]):
            return
        tiers = self._split()
        with bed(self._plans(scale.ends, scale.edges, 1), scale.images) as nodes:
            ends, edges, clouds = _devices(nodes, tiers, (scale.ends, scale.edges, 1))
            tasks = self._tasks(scale.tasks)
            devices = self._once("devices", lambda: self._single_tasks(nodes, ends, edges, clouds))
            for (schedule, count), key in keys.items():
                system = self._system(devices, count)
                share = schedules.cloud_share(system)

                def run(schedule: str = schedule, count: int = count, share: float = share) -> dict[str, Any]:
                    runs = [
                        asyncio.run(dispatch(schedule, ends[:count], edges, clouds, tasks, share))
                        for _ in range(scale.runs)
                    ]
                    return _summary(runs)

                self._once(key, run)

    def _single_tasks(self, nodes, ends, edges, clouds) -> dict[str, Any]:
        """Of each tier, alone: seconds of a task, its core seconds, and the seconds that the link takes of it."""
        first = {"end": 0, "edge": len(ends), "cloud": len(ends) + len(edges)}
        found: dict[str, Any] = {}
        tasks = self._tasks(8)
        for name, device in (("end", ends[0]), ("edge", edges[0]), ("cloud", clouds[0])):
            node = nodes[first[name]]
            asyncio.run(dispatch("End", [device], [], [], tasks[:2]))
            before = node.core_seconds()
            outcome = asyncio.run(dispatch("End", [device], [], [], tasks))
            seconds = outcome.seconds / len(tasks)
            link = 2 * node.plan.delay_ms / 1e3
            work = (node.core_seconds() - before) / len(tasks)
            found[name] = {"communication": link, "processing": seconds - link, "work": work}
            found.setdefault("dispatch", outcome.dispatch_seconds / len(tasks))
        return found

    def _system(self, devices: dict[str, Any], ends: int) -> schedules.System:
        counts = {"end": ends, "edge": self.scale.edges, "cloud": 1}
        kinds = {name: schedules.Device(counts[name], **devices[name]) for name in counts}
        return schedules.System(**kinds, tasks=self.scale.tasks, dispatch=devices["dispatch"], cores=CORES)

    def _failures(self) -> None:
        """Table 5: ends that stop answering after some tasks."""
        scale = self.scale
        before = min(_TASKS_BEFORE, scale.failing_tasks // scale.ends // 2)
        keys = {(mode, dead): f"failures {mode}, {dead} dead" for mode in MODES for dead in scale.dead}
        if not self._missing(list(keys.values())):
            return
        tiers = self._split()
        for (mode, dead), key in keys.items():
            if not self._missing([key]):
                continue
            with bed(self._plans(scale.ends, 0, 0), scale.images) as nodes:
                ends = [Device(node.url, tiers["end"]) for node in nodes]
                tasks = self._tasks(scale.failing_tasks)
                asyncio.run(dispatch("End", ends, [], [], tasks[: len(ends)]))

                def run(mode: str = mode, dead: int = dead, nodes=nodes, ends=ends, tasks=tasks) -> dict[str, Any]:
                    runs = []
                    for _ in range(scale.runs):
                        die = Failures(mode, dead, before, _FAILING_TIMEOUT, lambda i: nodes[i].signal(signal.SIGSTOP))
                        runs.append(asyncio.run(dispatch("End", ends, [], [], tasks, 0.0, die)))
                        for node in nodes:
                            node.signal(signal.SIGCONT)
                        time.sleep(1.0)  # for those that were stopped to finish what they had
                    return _summary(runs) | {"tasks_before": before, "timeout": _FAILING_TIMEOUT}

                self._once(key, run)

    def _cuts(self) -> None:
        """Table 4: what a cut costs in time and bytes, for one task on one edge and one on the cloud."""
        scale = self.scale
        cuts = cuts_of(self.spec)
        keys = {(cut, delay): f"cut {cut}, {delay} s" for cut in cuts for delay in scale.delays}
        for cut in cuts:
            if not self._missing([keys[cut, delay] for delay in scale.delays]):
                continue
            tiers = self._split(cut)
            plan = NodePlan(self.workdir / f"tiers-{cut}" / "edge", scale.cores["edge"])
            with bed([plan], scale.images) as nodes:
                for delay in scale.delays:
                    nodes[0].link(delay_ms=1e3 * delay / 2)

                    def run(nodes=nodes, tiers=tiers) -> dict[str, Any]:
                        return self._one_cut(nodes[0], tiers)

                    self._once(keys[cut, delay], run)

    def _one_cut(self, node: RunningNode, tiers: dict[str, TierArtifact]) -> dict[str, Any]:
        images = self._tasks(1)[0]
        home, seconds, sizes = [], [], []
        for _ in range(1 + 3 * self.scale.runs):
            started = time.perf_counter()
            rows = tiers["end"].home("edge", images)
            home.append(time.perf_counter() - started)
            sizes.append(len(wire.pack_request("0" * 32, "0" * 16, rows)) / len(images))
            asyncio.run(dispatch("End", [Device(node.url, tiers["edge"])], [], [], [rows]))
            seconds.append(time.perf_counter() - started)
        return {
            "home_seconds": statistics.median(home[1:]),
            "task_seconds": statistics.median(seconds[1:]),
            "bytes_per_image": sizes[-1],
            "runs": len(seconds) - 1,
        }


def _devices(nodes: Sequence[RunningNode], tiers: dict[str, TierArtifact], counts: Sequence[int]) -> Iterator[list]:
    start = 0
    for name, count in zip(_NAMES, counts, strict=True):
        yield [Device(node.url, tiers[name]) for node in nodes[start : start + count]]
        start += count


def _summary(runs: Sequence[Outcome]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    ended = [each for each in seconds if math.isfinite(each)]
    return {
        "seconds": statistics.median(ended) if len(ended) == len(seconds) else None,  # None: it never ends
        "all_seconds": ended,
        "first_seconds": statistics.median(run.first_seconds for run in runs),
        "dispatch_seconds": statistics.median(run.dispatch_seconds for run in runs),
        "timeouts": max(run.timeouts for run in runs),
        "runs": len(runs),
    }


if __name__ == "__main__":
    launch_script(define, main)

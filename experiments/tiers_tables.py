"""The report's tables 2, 4 and 5 and its figure 3, with lanes: measured on a test bed, beside what models predict.

    python -m experiments.tiers_tables --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_tables --workdir=runs/mlcn2

Splits the trained model into end, edge and cloud, starts nodes with quotas of cores behind links that are shaped
(`experiments.tiers_bed`), and writes `tiers_tables.json`, `.md` and `.png` to `experiments/results/` after each
measurement. Run again, it goes on with those that are missing. Columns "printed" and "corrected" are predicted, from
single tasks on single devices; all others are measured. What leaves the trusted device in table 4 is computed and
packed by a process with the cores of an end.

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

import httpx
import numpy as np
from absl import flags

from experiments import RESULTS
from experiments.tiers_bed import CORES, NodePlan, RunningNode, bed, until_idle
from experiments.tiers_dispatch import MODES, Device, Failures, Outcome, dispatch
from experiments.tiers_home import home
from experiments.tiers_relay import checked
from experiments.tiers_tables_report import write_report
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.files import make_folder, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.tiers import schedules, split, wire
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.cuts import cuts_of
from mlcn_jax.tiers.node import PATH
from mlcn_jax.training.trained import load_trained

_NAMES = ("end", "edge", "cloud")
_FAILING_TIMEOUT, _TASKS_BEFORE = 0.5, 12  # of table 5
_TASKS_OF_TIMEOUT = 2.0  # a time-out is at least as long as so many tasks: those of ends that live must not be given up
_DELAY_MS = {"end": 0.0, "edge": 10.0, "cloud": 50.0}  # each way


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured: devices of each tier, tasks of so many images, and runs of each."""

    ends: int
    edges: int
    tasks: int
    images: int
    runs: int
    delays: tuple[float, ...]  # seconds there and back, of table 4
    rates: tuple[float, ...]  # megabits a second, of table 4; 0 is unlimited, as in the report
    failing_tasks: int
    schedule_runs: int  # of each point of figure 3
    dead: tuple[int, ...]

    @property
    def cores(self) -> dict[str, float]:
        """Of each node: a cloud is four times as fast as an edge, and that is twice as fast as an end."""
        unit = CORES / (self.ends + 2 * self.edges + 8)
        return {"end": unit, "edge": 2 * unit, "cloud": 8 * unit}


SCALES = {
    "smoke": Scale(2, 1, 6, 4, 1, (0.1,), (0.0, 20.0), 8, 1, (0, 1)),
    "full": Scale(8, 4, 200, 50, 5, (0.5, 1.0, 1.5, 2.0), (0.0, 20.0), 200, 3, (0, 1, 2, 3, 4, 5, 6)),
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
    if "runs" in given:
        given["schedule_runs"] = given["runs"]
    scale = dataclasses.replace(SCALES[values.scale], **given)
    path = folder / f"{values.name}{'' if values.scale == 'full' else f'_{values.scale}'}.json"
    Tables(Path(values.workdir).expanduser(), values.data_dir, scale, path).measure()


class Tables:
    """All measurements, each of which is kept as soon as it is there."""

    def __init__(self, workdir: Path, data_dir: str, scale: Scale, path: Path):
        self.workdir, self.data_dir, self.scale, self.path = workdir, data_dir, scale, path
        trained, dataset = load_with_data(workdir, stored_config(workdir, data_dir))
        self.images, self.trained, self.spec = dataset.test.images, trained, trained.spec
        about = {"model": trained.spec.lanes, "step": trained.step, "data": dataset.name}
        about |= json.loads(json.dumps(dataclasses.asdict(scale)))
        self.results = read_json(self.path) if self.path.is_file() else {"about": about, "measured": {}}
        if self.results["about"] != about:
            raise SystemExit(f"error: {self.path} is of {self.results['about']}, not {about}: move it away")
        self.results |= {"command": shlex.join(["python", "-m", "experiments.tiers_tables", *sys.argv[1:]])}
        self.results |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **host.environment()}

    def measure(self) -> None:
        """Measures what is missing."""
        self.results["measured"]["relay"] = checked()
        self._schedules()
        self._tiers_alone()
        self._failures()
        self._cuts()
        write_report(self.results, self.path)
        print(f"wrote {self.path.with_suffix('.md')}")

    def _once(self, key: str, measure: Callable[[], Any]) -> Any:
        measured = self.results["measured"]
        if key not in measured:
            self.results.setdefault("busy_cores", {})[key] = host.busy_cores()
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
        if not split.is_of(folder, self.trained):
            split.split(self.workdir, wishes, cut, None, self.data_dir, folder.name)
            self.trained = load_trained(self.workdir)  # with the weights that were fitted to its lanes, if it had none
        wishes.unlink()
        return {name: TierArtifact(folder / name) for name in _NAMES}

    def _plans(self, ends: int, edges: int, clouds: int) -> list[NodePlan]:
        folder, cores = self.workdir / "tiers-pixels", self.scale.cores
        names = ["end"] * ends + ["edge"] * edges + ["cloud"] * clouds
        return [NodePlan(folder / name, cores[name], _DELAY_MS[name]) for name in names]

    def _tasks(self, count: int) -> list[np.ndarray]:
        size = self.scale.images
        starts = [i * size % (len(self.images) - size) for i in range(count)]
        return [self.images[start : start + size] for start in starts]

    def _schedules(self) -> None:
        """Figure 3: each schedule with 1 to N ends, after single tasks on single devices."""
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
                        for _ in range(scale.schedule_runs)
                    ]
                    return _summary(runs)

                self._once(key, run)

    def _tiers_alone(self) -> None:
        """Table 2: all tasks on each tier's devices, without its delay and with it."""
        scale = self.scale
        counts = {"end": scale.ends, "edge": scale.edges, "cloud": 1}
        for name, count in counts.items():
            keys = {delay: f"tier {name}, {2 * delay:g} ms" for delay in sorted({0.0, _DELAY_MS[name]})}
            if not self._missing(list(keys.values())):
                continue
            tier, tasks = self._split()[name], self._tasks(scale.tasks)
            with bed(self._plans(*(count if own == name else 0 for own in _NAMES)), scale.images) as nodes:
                devices = [Device(node.url, tier) for node in nodes]
                asyncio.run(dispatch("End", devices, [], [], tasks[:count]))
                for delay, key in keys.items():
                    for node in nodes:
                        node.link(delay_ms=delay)

                    def run(nodes=nodes, devices=devices, tasks=tasks) -> dict[str, Any]:
                        before = sum(node.core_seconds() for node in nodes)
                        runs = [asyncio.run(dispatch("End", devices, [], [], tasks)) for _ in range(scale.runs)]
                        used = sum(node.core_seconds() for node in nodes) - before
                        return _summary(runs) | {"devices": len(nodes), "core_seconds": used / len(runs)}

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
        tiers, tasks = self._split(), self._tasks(scale.failing_tasks)
        of_end = self.results["measured"]["devices"]["end"]
        timeout = max(_FAILING_TIMEOUT, _TASKS_OF_TIMEOUT * (of_end["communication"] + of_end["processing"]))
        with bed(self._plans(scale.ends, 0, 0), scale.images) as nodes:
            ends = [Device(node.url, tiers["end"]) for node in nodes]
            asyncio.run(dispatch("End", ends, [], [], tasks[: len(ends)]))
            for (mode, dead), key in keys.items():

                def run(mode: str = mode, dead: int = dead) -> dict[str, Any]:
                    runs = []
                    for _ in range(1 if mode == "none" and dead else scale.runs):  # it never ends: once is enough
                        die = Failures(mode, dead, before, timeout, lambda i: nodes[i].signal(signal.SIGSTOP))
                        runs.append(asyncio.run(dispatch("End", ends, [], [], tasks, 0.0, die)))
                        for node in nodes:
                            node.signal(signal.SIGCONT)
                        until_idle(nodes)
                    return _summary(runs) | {"tasks_before": before, "timeout": timeout}

                self._once(key, run)

    def _cuts(self) -> None:
        """Table 4: what a cut costs in time and bytes, for tasks of one end that go on to one edge."""
        scale = self.scale
        links = [(delay, rate) for rate in scale.rates for delay in scale.delays]
        for cut in cuts_of(self.spec):
            keys = {(delay, rate): _cut_key(cut, delay, rate) for delay, rate in links}
            if not self._missing(list(keys.values())):
                continue
            edge, images = self._split(cut)["edge"], self._tasks(1)[0]
            folder = self.workdir / f"tiers-{cut}"
            plan = NodePlan(folder / "edge", scale.cores["edge"])
            with (
                bed([plan], scale.images) as nodes,
                home(folder / "end", "edge", images, scale.cores["end"]) as at_home,
            ):
                for (delay, rate), key in keys.items():
                    nodes[0].link(delay_ms=1e3 * delay / 2, rate_mbit=rate)

                    def run(url: str = nodes[0].url, edge=edge, at_home=at_home) -> dict[str, Any]:
                        return self._one_cut(url, edge, at_home)

                    self._once(key, run)

    def _one_cut(self, url: str, edge: TierArtifact, at_home: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Medians of tasks one after the other; the connection is open before the first."""
        found, runs = [], 1 + self.scale.runs
        with httpx.Client(timeout=None, trust_env=False) as client:
            client.get(f"{url}/health").raise_for_status()
            for _ in range(runs):
                told = at_home()
                started = time.perf_counter()
                response = client.post(url + PATH, content=told["body"]).raise_for_status()
                away = time.perf_counter() - started
                shape = self.scale.images, len(edge.class_names)
                weight = edge.policy.tier("edge").weight
                asked = wire.digest_of(told["body"])
                wire.unpack_answer(response.content, edge.policy.digest, "edge", asked, shape, weight)
                found.append((told["compute_seconds"] + told["pack_seconds"], away, told["bytes"]))
        at, away, sizes = zip(*found[1:], strict=True)
        return {
            "home_seconds": statistics.median(at),
            "away_seconds": statistics.median(away),
            "task_seconds": statistics.median(a + b for a, b in zip(at, away, strict=True)),
            "bytes_per_image": sizes[-1] / self.scale.images,
            "runs": runs - 1,
        }


def _cut_key(cut: str, delay: float, rate: float) -> str:
    return f"cut {cut}, {delay} s" + (f", {rate:g} Mbit/s" if rate else "")


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

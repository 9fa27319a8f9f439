"""The report's tables 2, 4 and 5 and its figure 3, with lanes: measured on a test bed, beside what models predict.

    python -m experiments.tiers_tables --workdir=runs/mlcn2 --scale=smoke
    python -m experiments.tiers_tables --workdir=runs/mlcn2
    python -m experiments.tiers_tables --workdir=runs/mlcn2 --part=cuts --name=tiers_cuts

Splits the trained model into end, edge and cloud, starts nodes with quotas of cores behind links that are shaped
(`experiments.tiers_bed`), and writes `tiers_tables.json`, `.md`, `.png` (figure 3) and `_failures.png` (table 5) to
`experiments/results/` after each measurement. Run again on the same machine, it goes on with those that are missing. It
measures only while nothing else keeps the machine busy (`--scale=smoke` only warns). Columns "printed" and "corrected"
are predicted, from single tasks on single devices; all others are measured. The trusted device of table 4 is a process
with the cores of an end, which computes, packs and sends to an edge, or with an edge's, which sends to the cloud.

Source: Zhang 2018, End, edge and cloud: heterogeneous distributed deep neural networks.
"""

import asyncio
import dataclasses
import datetime
import itertools
import json
import logging
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import RESULTS, tiers_schedules
from experiments.quiet import busy_cores
from experiments.tiers_bed import CORES, NodePlan, RunningNode, bed, until_idle
from experiments.tiers_dispatch import MODES, Device, Failures, dispatch, summary
from experiments.tiers_home import home, one_cut
from experiments.tiers_relay import checked
from experiments.tiers_setups import DELAY_MS, Setup, with_printed_mapping
from experiments.tiers_tables_report import write_report
from mlcn_jax import host
from mlcn_jax.analysis.workdir import load_with_data, stored_config
from mlcn_jax.errors import InputError
from mlcn_jax.files import make_folder, read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.serving.trained import TrainedModel
from mlcn_jax.tiers import split
from mlcn_jax.tiers.artifact import TierArtifact
from mlcn_jax.tiers.cuts import PIXELS, cuts_of
from mlcn_jax.training.trained import load_trained

_NAMES = ("end", "edge", "cloud")
_PARTS = ("cuts", "failures", "tiers", "schedules")
_TRUSTED = _NAMES[:-1]  # devices of table 4, each of which sends to the next tier
_FAILING_TIMEOUT, _TASKS_BEFORE = 0.5, 12  # of table 5
_TASKS_OF_TIMEOUT = 2.0  # a time-out is at least as long as so many tasks: those of ends that live must not be given up
_REPORT_DELAY_MS = {"end": 0.0, "edge": 250.0, "cloud": 500.0}  # each way, of the report's table 2
_BITS = (32, 8)  # of each value of a cut
_ATTEMPTS = 3  # at a measurement beside which other work began
_log = logging.getLogger("mlcn_jax")


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
    others: tuple[Setup, ...]  # besides those of figure 3, with other edges and delays
    needs_quiet: bool = True  # a busy machine is refused, or else there is a warning

    @property
    def cores(self) -> dict[str, float]:
        """Of each node: a cloud is four times as fast as an edge, and that is twice as fast as an end."""
        unit = CORES / (self.ends + 2 * self.edges + 8)
        return {"end": unit, "edge": 2 * unit, "cloud": 8 * unit}


_OTHERS = (  # where edges or the cloud are slower than the ends
    Setup("End-Edge", 8, 1, 10.0, 50.0),
    Setup("End-Edge", 8, 2, 10.0, 50.0),
    Setup("End-Edge", 8, 4, 100.0, 50.0),
    Setup("End-Edge", 8, 2, 100.0, 50.0),
    Setup("End-Edge", 4, 1, 50.0, 50.0),
    Setup("End-Edge", 8, 3, 200.0, 50.0),
    Setup("End-Cloud", 8, 4, 10.0, 10.0),
    Setup("End-Cloud", 4, 4, 10.0, 25.0),
    Setup("End-Cloud", 8, 4, 10.0, 150.0),
    Setup("Mapping", 8, 1, 10.0, 50.0),
    Setup("Mapping", 8, 2, 100.0, 50.0),
    Setup("Mapping", 8, 2, 10.0, 10.0),
    Setup("Mapping", 6, 4, 200.0, 100.0),
)
SCALES = {
    "smoke": Scale(
        2, 1, 6, 4, 1, (0.1,), (0.0, 20.0), 8, 1, (0, 1), (Setup("End-Edge", 2, 1, 50.0, 50.0),), needs_quiet=False
    ),
    "full": Scale(8, 4, 200, 50, 5, (0.5, 1.0, 1.5, 2.0), (0.0, 20.0), 200, 3, (0, 1, 2, 3, 4, 5, 6), _OTHERS),
}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", "", "Of a trained model of at least 3 lanes.", flag_values=values)
    flags.DEFINE_string("data_dir", "", "Overrides the run's config.data.dir, if not empty.", flag_values=values)
    flags.DEFINE_enum("scale", "full", list(SCALES), "How much is measured.", flag_values=values)
    for name, meaning in (("tasks", "All tasks"), ("images", "Images of a task"), ("runs", "Runs of each")):
        flags.DEFINE_integer(name, 0, f"{meaning}; 0 is as many as the scale has.", lower_bound=0, flag_values=values)
    flags.DEFINE_multi_enum("part", list(_PARTS), list(_PARTS), "What is measured.", flag_values=values)
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
    Tables(Path(values.workdir).expanduser(), values.data_dir, scale, path).measure(values.part)


class Tables:
    """All measurements, each of which is kept as soon as it is there."""

    def __init__(self, workdir: Path, data_dir: str, scale: Scale, path: Path):
        self.workdir, self.data_dir, self.scale, self.path = workdir, data_dir, scale, path
        config = stored_config(workdir, data_dir)
        trained, dataset = load_with_data(workdir, config)
        self.images, self.trained, self.spec = dataset.test.images, trained, trained.spec
        machine = host.environment()
        about = {"model": trained.spec.lanes, "config": config.hash(), "step": trained.step, "data": dataset.name}
        about |= {name: machine[name] for name in ("device", "cpu_count")}
        about |= json.loads(json.dumps(dataclasses.asdict(scale)))
        new = {"about": about, "starts": {}, "made": {}, "measured": {}}
        self.results = read_json(self.path) if self.path.is_file() else new
        if self.results["about"] != about:
            raise SystemExit(f"error: {self.path} is of {self.results['about']}, not {about}: move it away")
        self.time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")  # which names this start
        command = shlex.join(["python", "-m", "experiments.tiers_tables", *sys.argv[1:]])
        self.start = {"command": command, "versions": machine["versions"]}

    def measure(self, parts: Sequence[str] = _PARTS) -> None:
        """Measures what is missing of these parts, what takes longest last.

        Raises:
          InputError: the relay is wrong, or other work keeps the machine busy.
        """
        self.start["relay"] = checked()
        try:
            if set(parts) & {"failures", "schedules"}:
                self._devices()
            measures = (self._cuts, self._failures, self._tiers_alone, self._schedules)
            for name, measure in zip(_PARTS, measures, strict=True):
                if name in parts:
                    measure()
        finally:
            if self.results["measured"]:
                write_report(self.results, self.path)
        print(f"wrote {self.path.with_suffix('.md')}")

    def _once(self, key: str, measure: Callable[[], Any]) -> Any:
        measured = self.results["measured"]
        if key not in measured:
            for left in reversed(range(_ATTEMPTS)):
                before, started = busy_cores(self.scale.needs_quiet), time.perf_counter()
                found = measure()
                seconds = time.perf_counter() - started
                try:
                    after = busy_cores(self.scale.needs_quiet, patience_seconds=0)
                    break
                except InputError as error:
                    if not left:
                        raise
                    _log.warning("%s is measured again: %s", key, error)
            self.results["made"][key] = {"start": self.time, "busy_cores": [before, after]}
            self.results["starts"][self.time] = self.start
            measured[key] = found
            write_json(self.path, self.results)
            write_report(self.results, self.path)
            print(f"{key}: {json.dumps(found)[:150]}  ({seconds:.0f} s)", flush=True)
        return measured[key]

    def _missing(self, keys: Sequence[str]) -> bool:
        return any(key not in self.results["measured"] for key in keys)

    def _split(self, cut: str = "pixels", first: str = "end") -> dict[str, TierArtifact]:
        """The tiers from the first on, which has the lanes of all before it, too."""
        lanes = list(range(len(self.spec.lane_specs)))
        wishes = self.path.with_name("tiers_of_tables.json")
        own = {"end": lanes[:1], "edge": lanes[1:2], "cloud": lanes[2:]}
        if first == "edge":
            own = {"edge": lanes[:2], "cloud": lanes[2:]}
        tiers = [{"name": name, "lanes": which} for name, which in own.items()]
        write_json(wishes, {"tiers": tiers, "tolerance": 0.005})
        folder = self._folder(cut, first)
        if not split.is_of(folder, self.trained):
            split.split(self.workdir, wishes, cut, None, self.data_dir, folder.name)
            self.trained = load_trained(self.workdir)  # with the weights that were fitted to its lanes, if it had none
        wishes.unlink()
        return {name: TierArtifact(folder / name) for name in own}

    def _folder(self, cut: str, first: str = "end") -> Path:
        return self.workdir / f"tiers-{cut}{'' if first == 'end' else f'-from-{first}'}"

    def _plans(self, ends: int, edges: int, clouds: int) -> list[NodePlan]:
        folder, cores = self._folder("pixels"), self.scale.cores
        names = ["end"] * ends + ["edge"] * edges + ["cloud"] * clouds
        return [NodePlan(folder / name, cores[name], DELAY_MS[name]) for name in names]

    def _tasks(self, count: int) -> list[np.ndarray]:
        size = self.scale.images
        starts = [i * size % (len(self.images) - size) for i in range(count)]
        return [self.images[start : start + size] for start in starts]

    def _devices(self) -> None:
        """Single tasks on single devices, from which all else is predicted."""
        counts = (self.scale.ends, self.scale.edges, 1)
        if self._missing(["devices"]):
            tiers = self._split()
            with bed(self._plans(*counts), self.scale.images) as nodes:
                devices = list(itertools.chain(*_devices(nodes, tiers, counts)))
                self._once("devices", lambda: self._single_tasks(nodes, devices))

    def _schedules(self) -> None:
        """Figure 3: each schedule with 1 to N ends; then other setups."""
        scale = self.scale
        counts = range(1, scale.ends + 1)
        of_figure = [
            Setup(schedule, ends, scale.edges, DELAY_MS["edge"], DELAY_MS["cloud"])
            for schedule in tiers_schedules.SCHEDULES
            for ends in counts
        ]
        devices = self.results["measured"]["devices"]
        setups = list(with_printed_mapping([*of_figure, *scale.others], devices, scale.tasks))
        if not self._missing([setup.key for setup in setups]):
            return
        tiers, tasks = self._split(), self._tasks(scale.tasks)
        parts = _parts(tiers, tasks)
        with bed(self._plans(scale.ends, scale.edges, 1), scale.images) as nodes:
            ends, edges, clouds = _devices(nodes, tiers, (scale.ends, scale.edges, 1))
            for setup in setups:
                share = tiers_schedules.cloud_share(setup.system(devices, scale.tasks))

                def run(setup: Setup = setup, share: float = share) -> dict[str, Any]:
                    delays = {"edge": setup.edge_ms, "cloud": setup.cloud_ms}
                    for node in nodes[scale.ends :]:
                        node.link(delay_ms=delays[node.plan.artifact.name])
                    own = ends[: setup.ends], edges[: setup.edges], clouds
                    runs = [
                        asyncio.run(dispatch(setup.schedule, *own, tasks, share)) for _ in range(scale.schedule_runs)
                    ]
                    return {"setup": dataclasses.asdict(setup)} | summary(runs, parts)

                self._once(setup.key, run)

    def _tiers_alone(self) -> None:
        """Table 2: all tasks on each tier's devices, without a delay, with the bed's, and with the report's."""
        scale = self.scale
        counts = {"end": scale.ends, "edge": scale.edges, "cloud": 1}
        for name, count in counts.items():
            delays = sorted({0.0, DELAY_MS[name], _REPORT_DELAY_MS[name]})
            keys = {delay: f"tier {name}, {2 * delay:g} ms" for delay in delays}
            if not self._missing(list(keys.values())):
                continue
            tier, tasks = self._split()[name], self._tasks(scale.tasks)
            parts = _parts({name: tier}, tasks)
            with bed(self._plans(*(count if own == name else 0 for own in _NAMES)), scale.images) as nodes:
                devices = [Device(node.url, tier) for node in nodes]
                asyncio.run(dispatch("End", devices, [], [], tasks[:count]))
                for delay, key in keys.items():
                    for node in nodes:
                        node.link(delay_ms=delay)

                    def run(nodes=nodes, devices=devices, tasks=tasks, parts=parts) -> dict[str, Any]:
                        before = sum(node.core_seconds() for node in nodes)
                        runs = [asyncio.run(dispatch("End", devices, [], [], tasks)) for _ in range(scale.runs)]
                        used = sum(node.core_seconds() for node in nodes) - before
                        return summary(runs, parts) | {"devices": len(nodes), "core_seconds": used / len(runs)}

                    self._once(key, run)

    def _single_tasks(self, nodes: Sequence[RunningNode], devices: Sequence[Device]) -> dict[str, Any]:
        """Each device alone: seconds that its link and it take for a task, and core seconds; means over each tier's."""
        tasks = self._tasks(8)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _NAMES}
        for node, device in zip(nodes, devices, strict=True):
            asyncio.run(dispatch("End", [device], [], [], tasks[:2]))
            before = node.core_seconds()
            outcome = asyncio.run(dispatch("End", [device], [], [], tasks))
            work = node.core_seconds() - before
            of_task = [each / len(tasks) for each in (outcome.seconds, work, outcome.dispatch_seconds)]
            found[device.tier.name].append((of_task[0] - 2 * node.plan.delay_ms / 1e3, *of_task[1:]))
        told: dict[str, Any] = {}
        for name, rows in found.items():
            processing, work, _ = zip(*rows, strict=True)
            told[name] = {"communication": 2 * DELAY_MS[name] / 1e3, "processing": statistics.mean(processing)}
            told[name] |= {"work": statistics.mean(work), "processing_of_each": processing}
        return told | {"dispatch": statistics.mean(row[2] for rows in found.values() for row in rows)}

    def _failures(self) -> None:
        """Table 5: ends that stop answering after some tasks."""
        scale = self.scale
        before = min(_TASKS_BEFORE, scale.failing_tasks // scale.ends // 2)
        keys = {(mode, dead): f"failures {mode}, {dead} dead" for mode in MODES for dead in scale.dead}
        if not self._missing(list(keys.values())):
            return
        tiers, tasks = self._split(), self._tasks(scale.failing_tasks)
        parts = _parts({"end": tiers["end"]}, tasks)
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
                    return summary(runs, parts) | {"tasks_before": before, "timeout": timeout}

                self._once(key, run)

    def _cuts(self) -> None:
        """Table 4: what a cut costs in time and bytes, for tasks of one trusted device that go on to the next tier."""
        scale = self.scale
        for home_name, cut in itertools.product(_TRUSTED, cuts_of(self.spec)):
            away_name = _NAMES[_NAMES.index(home_name) + 1]
            settings = [
                {"home": home_name, "cut": cut, "bits": bits, "delay": delay, "rate": rate}
                for bits in (_BITS if cut != PIXELS else (0,))
                for rate in scale.rates
                for delay in scale.delays
            ]
            keys = [_cut_key(**setting) for setting in settings]
            if not self._missing(keys):
                continue
            tiers, images = self._split(cut, home_name), self._tasks(1)[0]
            folder, both = self._folder(cut, home_name), (home_name, away_name)
            others = [tiers[name].part(tiers[home_name].home(name, images)) for name in tiers if name not in both]
            rest = np.sum([np.zeros((len(images), len(tiers[home_name].class_names)), np.float32), *others], axis=0)
            lengths = TrainedModel(self.workdir).lengths(images)
            with (
                bed([NodePlan(folder / away_name, scale.cores[away_name])], scale.images) as nodes,
                home(folder / home_name, away_name, images, nodes[0].url, scale.cores[home_name]) as at_home,
            ):
                for setting, key in zip(settings, keys, strict=True):
                    nodes[0].link(delay_ms=1e3 * setting["delay"] / 2, rate_mbit=setting["rate"])

                    def run(bits=setting["bits"], at_home=at_home, rest=rest, lengths=lengths) -> dict[str, Any]:
                        return one_cut([at_home(bits) for _ in range(1 + scale.runs)][1:], rest, lengths)

                    self._once(key, lambda run=run, setting=setting: setting | run())


def _cut_key(home: str, cut: str, bits: int, delay: float, rate: float) -> str:
    told = [f"cut {cut} at the {home}", f"{bits} bits" if bits else "", f"{delay} s"]
    told.append(f"{rate:g} Mbit/s" if rate else "")
    return ", ".join(filter(None, told))


def _parts(tiers: Mapping[str, TierArtifact], tasks: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """What the lanes of each tier add to each task, computed here."""
    return {name: [tier.part(task) for task in tasks] for name, tier in tiers.items()}


def _devices(nodes: Sequence[RunningNode], tiers: dict[str, TierArtifact], counts: Sequence[int]) -> Iterator[list]:
    start = 0
    for name, count in zip(_NAMES, counts, strict=True):
        yield [Device(node.url, tiers[name]) for node in nodes[start : start + count]]
        start += count


if __name__ == "__main__":
    launch_script(define, main)

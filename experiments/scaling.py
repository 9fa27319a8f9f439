"""Step time of CapsNet and MLCN on more and more devices: batches split, lanes split, and both.

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.scaling --profile=profile.json

Three kinds of points, never in one line. Measured on real cores: processes of one core each, as `main.py
--config.parallel.processes=N` starts them. Measured oversubscribed: one process whose devices share all cores, which
shows what splitting costs, not what it brings. Simulated: `splits.predict_mesh` of devices like one core of this
machine.
What is measured takes turns with MLCN and CapsNet on one core, and its speed-ups are over them. Two parts: batch sizes,
and on two cores the width, depth and number of lanes. What was measured stays; with `--nomeasure`, only the
simulation is made anew. Writes `experiments/results/scaling.json` and `.png`.
"""

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS, workers
from experiments.kept_rows import is_row, stored_results
from mlcn_jax import host
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training import splits

REAL, OVERSUBSCRIBED, SIMULATED, WHOLE = "real cores", "oversubscribed", "simulated", "one process on all cores"
SWEEPS = {
    "lanes": {n: f"mlcn1:w4*{n}" for n in (2, 4, 8, 16, 32)},
    "width": {n: f"mlcn1:w{n}*8" for n in (1, 2, 4, 6)},
    "depth": {n: f"mlcn1:w2d{n}*8" for n in (1, 2, 3, 5)},
}
_COUNTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Setting:
    """`data` times `lane` devices: a process and a core each (`real cores`), or all in one process."""

    mode: str  # capsnet-data, mlcn-data, mlcn-lane or mlcn-hybrid
    data: int
    lane: int
    where: str
    batch: int
    lanes: str

    @property
    def devices(self) -> int:
        return self.data * self.lane

    def changes(self, data_name: str) -> dict[str, Any]:
        """Of `configs/default.py`."""
        capsnet = self.mode.startswith("capsnet")
        return {
            "data.name": data_name,
            "model.name": "capsnet" if capsnet else "mlcn",
            "model.lanes": "" if capsnet else self.lanes,
            "train.batch_size": self.batch,
            "parallel.data": self.data,
            "parallel.lane": self.lane,
        }

    def divides(self) -> bool:
        """Whether each device gets as many lanes and images."""
        return self.batch % self.data == 0 and all(group.count % self.lane == 0 for group in parse_lanes(self.lanes))

    def run(self, data_name: str) -> workers.Run:
        cores = sorted(os.sched_getaffinity(0))
        if self.where == REAL:
            return workers.Run(self.changes(data_name), [[core] for core in cores[: self.devices]])
        return workers.Run(self.changes(data_name), [cores], devices=self.devices)


def settings(batch: int, lanes: str, num_cores: int) -> list[Setting]:
    """What is looked at for a batch size: all that this machine can measure, and the simulated ones."""
    rows = [Setting("capsnet-data", 1, 1, WHOLE, batch, lanes), Setting("mlcn-lane", 1, 1, WHOLE, batch, lanes)]
    for n in _COUNTS[1:]:
        splits = [("capsnet-data", n, 1), ("mlcn-data", n, 1), ("mlcn-lane", 1, n)]
        splits += [("mlcn-hybrid", 2, n // 2)] if n > 2 else []
        for mode, data, lane in splits:
            for where in (REAL, OVERSUBSCRIBED, SIMULATED):
                possible = n <= num_cores if where == REAL else where == OVERSUBSCRIBED or mode != "capsnet-data"
                setting = Setting(mode, data, lane, where, batch, lanes)
                if possible and setting.divides():
                    rows.append(setting)
    return rows


def bases(batch: int, lanes: str) -> dict[str, Setting]:
    """One core, over which all others are looked at."""
    return {mode: Setting(f"{mode}-data", 1, 1, REAL, batch, lanes) for mode in ("mlcn", "capsnet")}


def measure(rows: Sequence[Setting], over: Mapping[str, Setting], values: flags.FlagValues) -> list[dict[str, Any]]:
    """Each setting's step, and how many times faster it is than the bases, which stay while settings come and go."""
    base_groups = {name: workers.Group(setting.run(values.data)) for name, setting in over.items()}
    results = []
    for setting in rows:
        group = workers.Group(setting.run(values.data))
        groups = {**base_groups, "": group}
        steps = {name: max(2, round(values.turn_seconds / g.seconds(2))) for name, g in groups.items()}
        turns = [{name: g.seconds(steps[name]) for name, g in groups.items()} for _ in range(values.rounds)]
        group.close()
        results.append(
            {
                **dataclasses.asdict(setting),
                "devices": setting.devices,
                "milliseconds": 1000 * statistics.median(turn[""] for turn in turns),
                **{f"over_{name}_on_one_core": spread([turn[name] / turn[""] for turn in turns]) for name in over},
            }
        )
        print(table(results[-1:], head=False), flush=True)
    for group in base_groups.values():
        group.close()
    return results


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def simulate(rows: Sequence[Setting], profile: DeviceProfile, data_name: str) -> list[dict[str, Any]]:
    """Speed-ups of MLCN on devices like that of the profile, over the same on one of them."""

    def seconds(setting: Setting) -> float:
        config = workers.config_of(setting.changes(data_name))
        spec = config.model_spec(*config.data.shape())
        same = [profile] * setting.devices
        step = splits.predict_mesh(spec, setting.batch, setting.data, setting.lane, same, [1.0] * setting.devices)
        return step.total_seconds

    def share(setting: Setting) -> list[float] | None:
        """The interval of a step as parts of its prediction."""
        config = workers.config_of(setting.changes(data_name))
        spec = config.model_spec(*config.data.shape())
        sure = splits.interval(1.0, spec, [profile] * setting.devices)
        return [sure.low_seconds, sure.high_seconds] if sure else None

    results = []
    for setting in rows:
        alone = seconds(dataclasses.replace(setting, data=1, lane=1))
        taken = seconds(setting)
        ratio = {"over_mlcn_on_one_core": spread([alone / taken])}
        results.append(
            {
                **dataclasses.asdict(setting),
                "devices": setting.devices,
                "milliseconds": 1000 * taken,
                "interval": share(setting),
                **ratio,
            }
        )
    return results


def table(rows: Sequence[Mapping[str, Any]], head: bool = True) -> str:
    names = ("over_mlcn_on_one_core", "over_capsnet_on_one_core")
    columns = ["batch", "devices", "mode", "lanes", "where", "ms", *(name.replace("_", " ") for name in names)]
    lines = [columns, ["---"] * len(columns)] if head else []
    for row in rows:
        ratios = [f"{row[name]['median']:.2f}" if name in row else "" for name in names]
        place = [str(row[name]) for name in ("batch", "devices", "mode", "lanes", "where")]
        lines.append([*place, f"{row['milliseconds']:.0f}", *ratios])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Above a panel for each batch size, below one for each sweep; a line for each mode and kind of point."""
    from matplotlib.figure import Figure

    by_batch = results["batches"]
    batches = sorted({row["batch"] for row in by_batch})
    sweeps = [what for what in SWEEPS if results.get(what)]
    figure = Figure(figsize=(14, 8 if sweeps else 4), layout="constrained")
    above, *rest = figure.subfigures(1 + bool(sweeps), 1, squeeze=False)[:, 0]
    for axes, batch in zip(above.subplots(1, len(batches), squeeze=False, sharey=True)[0], batches, strict=True):
        for i, mode in enumerate(("capsnet-data", "mlcn-data", "mlcn-lane", "mlcn-hybrid")):
            for where, style in ((REAL, "o-"), (OVERSUBSCRIBED, "x:"), (SIMULATED, ".--")):
                rows = [r for r in by_batch if (r["batch"], r["mode"], r["where"]) == (batch, mode, where)]
                base = "capsnet" if mode == "capsnet-data" else "mlcn"
                points = [(1, 1.0)] if where != OVERSUBSCRIBED else []
                points += [(r["devices"], r[f"over_{base}_on_one_core"]["median"]) for r in rows]
                if rows:
                    axes.plot(*zip(*points, strict=True), style, color=f"C{i}", label=f"{mode}, {where}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(_COUNTS, map(str, _COUNTS))
        axes.set_yticks(_COUNTS, map(str, _COUNTS))
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("devices")
    above.axes[0].set_ylabel("speed-up over the same model on one core")
    above.axes[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for below in rest:
        panels = below.subplots(1, len(sweeps), squeeze=False, sharey=True)[0]
        for axes, what in zip(panels, sweeps, strict=True):
            _draw_sweep(axes, what, results[what])
        panels[0].set_ylabel("speed-up over one core, batch 100")
        panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(RESULTS / "scaling.png", dpi=110)


def _draw_sweep(axes: Any, what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    at = {lanes: x for x, lanes in SWEEPS[what].items()}
    for n, where, style in ((2, REAL, "o-"), (2, SIMULATED, ".--"), (8, SIMULATED, ".--")):
        same = [row for row in rows if (row["devices"], row["where"]) == (n, where)]
        points = sorted((at[row["lanes"]], row["over_mlcn_on_one_core"]["median"]) for row in same)
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"mlcn-lane, {n} devices, {where}")
    axes.set_xlabel({"lanes": "lanes of width 4", "width": "width of 8 lanes", "depth": "depth of 8 lanes"}[what])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "profile", "", "Profile of one core, to simulate by; without it nothing is simulated.", flag_values=values
    )
    flags.DEFINE_string("lanes", "mlcn1:w4*8", "Lanes of MLCN.", flag_values=values)
    flags.DEFINE_string(
        "data", "fashion_mnist", "Dataset whose image shape is taken; images are random.", flag_values=values
    )
    flags.DEFINE_list("batches", ["100", "150", "300", "600"], "Batch sizes.", flag_values=values)
    flags.DEFINE_integer(
        "rounds", 3, "Rounds in which a setting takes turns with its bases.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_float("turn_seconds", 0.7, "Length of a turn, but at least two steps.", flag_values=values)
    flags.DEFINE_bool("measure", True, "Measure; or simulate only, beside what was measured.", flag_values=values)


def measured_earlier(path: Path) -> dict[str, Any]:
    """The results that a measurement left; raises InputError if there are none."""
    if not path.exists():
        raise InputError(f"{path} does not exist: without --nomeasure it is measured")
    return read_json(path)


def main(values: flags.FlagValues) -> None:
    profile = workers.one_core_profile(values.profile) if values.profile else None
    num_cores = len(os.sched_getaffinity(0))
    parts: dict[str, list[tuple[list[Setting], dict[str, Setting]]]] = {"batches": []}
    for batch in map(int, values.batches):
        parts["batches"].append((settings(batch, values.lanes, num_cores), bases(batch, values.lanes)))
    places = [(2, REAL)] * (num_cores > 1) + [(2, SIMULATED), (8, SIMULATED)]
    for what, sweep in SWEEPS.items():
        parts[what] = [
            (
                [Setting("mlcn-lane", 1, n, where, 100, text) for n, where in places],
                {"mlcn": Setting("mlcn-data", 1, 1, REAL, 100, text)},
            )
            for text in sweep.values()
        ]
    path = RESULTS / "scaling.json"
    about = {"data": values.data, "rounds": values.rounds, **host.environment()}
    earlier = {} if values.measure else measured_earlier(path)
    about |= {name: earlier[name] for name in about if name in earlier}
    path.parent.mkdir(exist_ok=True)
    stored = stored_results(path, about)
    results: dict[str, list[dict[str, Any]]] = {
        name: [row for row in stored.get(name, []) if not profile or row["where"] != SIMULATED] for name in parts
    }
    for name, part in parts.items():
        for rows, over in part:
            new = [s for s in rows if not any(is_row(row, dataclasses.asdict(s)) for row in results[name])]
            to_measure = [s for s in new if s.where != SIMULATED]
            if values.measure and to_measure:
                results[name] += measure(to_measure, over, values)
            if profile:
                simulated = [s for s in new if s.where == SIMULATED]
                results[name] += simulate([s for s in simulated if s.divides()], profile, values.data)
            write_json(path, {**about, "date": earlier.get("date", host.today()), **results})
    draw(results)
    print(table([row for rows in results.values() for row in rows]))


if __name__ == "__main__":
    launch_script(define, main)

"""The simulator against the machine: predicted and measured steps of two processes of one core each.

    mlcn_jax profile --cores=1 --output=profile.json
    python -m experiments.simulator_check --profile=profile.json

Forty-eight configurations, none of which the profile was fitted to: lanes of several kinds and sizes in meshes, split
by batch or by lane, and in stacks, placed greedily or by turns; on equal cores, and with half of a core for the second
process, which imitates a slower device. Predictions and their intervals of 90 % are compared as the profile gives them.
What a shared machine gives changes by the minute, so that beside them stand predictions scaled by what steps of some
models, by themselves on each core, take just before and after over what the profile says of them. A measurement that
was stopped goes on where it was; one that has ended stays, and the next, with another profile, is added to it, since an
interval says something of many hours. Writes `experiments/results/simulator_check.json` and `.png`.
"""

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS, workers
from mlcn_jax import host
from mlcn_jax.analysis import describe_work
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import partition
from mlcn_jax.placement.problem import Placement
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.training import splits

LANES = (
    "mlcn1:w4*8",
    "mlcn1:w2d2*4,mlcn2:w3*4",
    "mlcn2:w4d2*2,mlcn1:w1*6",
    "mlcn1:w5,mlcn1:w3d2*2,mlcn2:w2d3,mlcn2:w4*2",
    "mlcn1:w3*3,mlcn2:w5d2,mlcn1:w1d4*3",
    "mlcn2:w2d2*6,mlcn1:w2*2",
    "resnet:w1d2*4,resnet:w2*2",
    "mlcn1:w2*2,resnet:w2d2*2",
)
SLOWNESS = 2.0
VERSION = 3  # raised with every change after which rows cannot stand beside older ones
_BATCH = 100
_LEVEL = 0.9  # of the intervals
_INSIDE = ("inside", "inside_scaled")  # see `judged`


def configurations() -> list[dict[str, Any]]:
    """Six for each set of lanes: meshes by batch, and by lane or with other batch sizes; stacks, equal and unequal."""
    rows = []
    for lanes in LANES:
        rows.append({"lanes": lanes, "plan": "mesh", "data": 2, "lane": 1, "slowness": 1.0})
        even = all(int(entry.partition("*")[2] or 1) % 2 == 0 for entry in lanes.split(","))
        split = {"data": 1, "lane": 2} if even else {"data": 2, "lane": 1}
        rows.append({"lanes": lanes, "plan": "mesh", **split, "slowness": 1.0 if even else SLOWNESS})
        for slowness in (1.0, SLOWNESS):
            for partitioner in ("greedy", "round_robin"):
                row = {"lanes": lanes, "plan": "stacks", "partitioner": partitioner, "slowness": slowness}
                rows.append({**row, "data": 1, "lane": 2})
    return rows


def changes_of(row: Mapping[str, Any], data: str) -> dict[str, Any]:
    """The fields of a row's configuration that are not at their defaults."""
    changes = {
        "data.name": data,
        "model.lanes": row["lanes"],
        "train.batch_size": _BATCH,
        "parallel.data": row["data"],
        "parallel.lane": row["lane"],
    }
    if "resnet" in row["lanes"]:
        changes["model.norm_group"] = _BATCH // 2  # so that batches can be split in two
    return changes


def planned(row: Mapping[str, Any], profile: DeviceProfile, data: str) -> tuple[RunConfig, ModelSpec, Placement | None]:
    """The configuration of a row, its model, and where lanes are placed in stacks."""
    config = workers.config_of(changes_of(row, data))
    spec = config.model_spec(*config.data.shape())
    if row["plan"] != "stacks":
        return config, spec, None
    problem = splits.placement_problem(spec, _BATCH, [profile] * 2, ["0", "1"], [1.0, row["slowness"]])
    return config, spec, partition.partition(row["partitioner"], problem)


def measure(
    row: Mapping[str, Any],
    profile: DeviceProfile,
    yardstick: workers.Group,
    before: Sequence[float],
    values: flags.FlagValues,
) -> tuple[dict[str, Any], list[float]]:
    """Measured and predicted seconds of a step of one configuration, and how slow the cores are after that.

    Args:
      row: one of `configurations`.
      profile: of one core.
      yardstick: processes that tell how slow the cores are.
      before: how slow they were before this.
      values: flags.
    """
    config, spec, placement = planned(row, profile, values.data)
    profiles, device_of = [profile, profile], placement.device_of if placement else ()
    changes, slowness = changes_of(row, values.data), row["slowness"]
    group = workers.Group(workers.Run(changes, _cores(), device_of=device_of, slowness=slowness))
    steps = max(2, round(values.turn_seconds / group.seconds(2)))
    measured = statistics.median(group.seconds(steps) for _ in range(values.rounds))
    group.close()
    after = yardstick.slowness(profile, in_turn=True)

    def predict(first: float, second: float) -> float:
        slowness = [first, second * row["slowness"]]
        if placement:
            return splits.predict_stacks(spec, _BATCH, placement, profiles, slowness, "ring").total_seconds
        return splits.predict_mesh(spec, _BATCH, row["data"], row["lane"], profiles, slowness).total_seconds

    first, second = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    found = {
        **row,
        "measured_seconds": measured,
        "predicted_seconds": predict(1.0, 1.0),
        "scaled_seconds": predict(first, second),
        "slowness_then": max(first, second),
        "least_seconds": describe_work.scaling(config, spec, None, profile, 2)["seconds"]["least_by_devices"][2],
    }
    return found | judged(found, profile, values.data), after


def judged(row: Mapping[str, Any], profile: DeviceProfile, data: str) -> dict[str, Any]:
    """The interval over the prediction, and whether what was measured lies inside; and over the scaled prediction."""
    _, spec, placement = planned(row, profile, data)
    sure = splits.interval(1.0, spec, [profile] * 2, placement=placement)
    if sure is None:
        return {"interval": None, **dict.fromkeys(_INSIDE)}
    names = ("predicted_seconds", "scaled_seconds")
    inside = [sure.holds(row["measured_seconds"] / row[name]) for name in names]
    return {"interval": [sure.low_seconds, sure.high_seconds], **dict(zip(_INSIDE, inside, strict=True))}


def _cores() -> list[list[int]]:
    """Of two processes: one each."""
    return [[core] for core in sorted(os.sched_getaffinity(0))[:2]]


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of predictions, and how many measured times lie in their interval."""

    def errors(name: str) -> dict[str, float]:
        over = [row[name] / row["measured_seconds"] for row in rows]
        found = [abs(ratio - 1) for ratio in over]
        typical = statistics.median(over)
        return {"mean_error": statistics.mean(found), "largest_error": max(found), "median_over_measured": typical}

    return {
        "configurations": len(rows),
        **errors("predicted_seconds"),
        "scaled": errors("scaled_seconds"),
        "interval_level": _LEVEL,
        **{f"{name}_interval": _share([row[name] for row in rows]) for name in _INSIDE},
        "least_over_measured": max(row["least_seconds"] / row["measured_seconds"] for row in rows),
    }


def planned_over_fastest(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How much longer than the fastest split on equal cores that one takes that `plan.make_plan` picks, by lanes."""
    longer = {}
    for lanes in {row["lanes"]: None for row in rows}:
        equal = [r for r in rows if r["lanes"] == lanes and r["slowness"] == 1]
        measured = [r["measured_seconds"] / r["slowness_then"] for r in equal]
        picked = min(range(len(equal)), key=lambda i: equal[i]["predicted_seconds"])
        longer[lanes] = measured[picked] / min(measured)
    return longer


def _share(inside: Sequence[bool | None]) -> float | None:
    return statistics.mean(map(bool, inside)) if None not in inside else None


def digest(profile: DeviceProfile) -> str:
    """16 hexadecimal digits that identify a profile."""
    return hashlib.sha256(json.dumps(profile.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def stored_checks(path: Path, about: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The measurements that have ended, and the rows of one with the same profile and settings that was stopped.

    Raises:
      InputError: there are some of another version.
    """
    checks = read_json(path)["checks"] if path.exists() else []
    if others := [check for check in checks if check.get("version") != about["version"]]:
        raise InputError(
            f"{path} has {len(others)} checks of another version of this script: move it away to begin anew"
        )
    ended = [check for check in checks if len(check["rows"]) == len(configurations())]
    same = (check for check in checks if all(check.get(name) == value for name, value in about.items()))
    return ended, next((check["rows"] for check in same if check not in ended), [])


def save(path: Path, checks: Sequence[Mapping[str, Any]]) -> None:
    """Writes all measurements, and what holds for them together."""
    write_json(path, {**summarize([row for check in checks for row in check["rows"]]), "checks": checks})


def draw(rows: Sequence[Mapping[str, Any]]) -> None:
    """Predicted against measured, a mark for each kind of configuration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({(row["plan"], row["slowness"]) for row in rows})
    for kind, marker in zip(kinds, "osx^v", strict=False):
        points = [r for r in rows if (r["plan"], r["slowness"]) == kind]
        name = f"{kind[0]}, {'equal cores' if kind[1] == 1 else f'one {kind[1]:g} times slower'}"
        x, y = ([1000 * r[f"{what}_seconds"] for r in points] for what in ("measured", "predicted"))
        axes.plot(x, y, marker, label=name, fillstyle="none")
    ends = [1000 * extreme(row["measured_seconds"] for row in rows) for extreme in (min, max)]
    axes.plot(ends, ends, color="gray", linewidth=1)
    axes.set_xlabel("measured ms a step, two processes of one core")
    axes.set_ylabel("predicted ms")
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / "simulator_check.png", dpi=120)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("profile", "profile.json", "Profile of one core.", flag_values=values)
    flags.DEFINE_string(
        "data", "fashion_mnist", "Dataset whose image shape is taken; images are random.", flag_values=values
    )
    flags.DEFINE_integer("rounds", 5, "Turns of each configuration.", lower_bound=1, flag_values=values)
    flags.DEFINE_float("turn_seconds", 1.0, "Length of a turn, but at least two steps.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    profile = workers.one_core_profile(values.profile)
    path = RESULTS / "simulator_check.json"
    about = {"version": VERSION, "batch": _BATCH, "data": values.data, "rounds": values.rounds}
    about["profile"] = digest(profile)
    checks, rows = stored_checks(path, about)
    small = {"data.name": values.data, "model.lanes": "mlcn1:w1", "train.batch_size": _BATCH}
    yardstick = workers.Group(workers.Run(small, _cores(), alone=True))
    slowness = yardstick.slowness(profile, in_turn=True)
    for row in configurations()[len(rows) :]:
        found, slowness = measure(row, profile, yardstick, slowness, values)
        rows.append(found)
        measured, ratio = 1000 * found["measured_seconds"], found["predicted_seconds"] / found["measured_seconds"]
        print(f"{ratio:.2f}  {measured:4.0f} ms  {row}", flush=True)
        RESULTS.mkdir(exist_ok=True)
        check = {
            **about,
            "date": host.today(),
            **host.environment(),
            **summarize(rows),
            "planned_over_fastest": planned_over_fastest(rows),
        }
        save(path, [*checks, check | {"rows": rows}])
    yardstick.close()
    draw([row for check in checks for row in check["rows"]] + rows)
    print(summarize(rows))


if __name__ == "__main__":
    launch_script(define, main)

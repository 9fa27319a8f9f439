"""How well a device profile predicts seconds and memory of lanes that it was not fitted to.

    python -m experiments.cost_model --cores=1

Measures what `mlcn_jax profile` does and, in the same rounds, every other lane of width and depth 1..5 and some groups
of equal lanes, at both batch sizes; of `resnet` lanes, widths and depths up to 4, and those of `configs/resnet_*.py` at
the batch that they are trained with. A profile is fitted to the former and judged on
the latter; `--profile` judges one that was measured before, and with it how the machine has changed since.
The thesis's formulas stand beside, scaled by the one factor that suits them best. Writes
`experiments/results/cost_model.json` and `.png`, with `--profile` `cost_model_stored.json` and `.png`.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from absl import flags

from experiments import RESULTS
from mlcn_jax import host
from mlcn_jax.analysis import measure_device, measure_machine
from mlcn_jax.commands.profile import define_measuring
from mlcn_jax.files import markdown, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn import lanes
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import DeviceProfile

_LARGEST = 5  # width and depth
_LARGEST_RESIDUAL = 4
_GROUPS = "mlcn1:w2d1*2, mlcn2:w4d1*8, mlcn1:w1d3*4, mlcn2:w3d2*2, resnet:w2d2*2, resnet:w1d1*4"
_RECIPES = "resnet:w2d2, resnet:w3d2, resnet:w4d2, resnet:w6d2"
_RECIPE_BATCH = 500


def held_out(image_shape: tuple[int, int, int]) -> list[lanes.LaneGroup]:
    """All lanes of the grid, as groups of one, that no profile is fitted to."""
    largest = dict.fromkeys(lanes.PUBLISHED_KINDS, _LARGEST) | {"resnet": _LARGEST_RESIDUAL}
    grid = [
        lanes.LaneSpec(kind, width, depth)
        for kind, most in largest.items()
        for width, depth in itertools.product(range(1, most + 1), repeat=2)
    ]
    fitted = {group.spec for group, _ in measure_device.fitted_lanes(image_shape)}
    return [lanes.LaneGroup(lane, 1) for lane in grid if lane not in fitted]


def judge(
    lab: measure_device.Lab,
    profile: DeviceProfile,
    programs: Mapping[tuple, measure_device.Program],
    seconds: Mapping[tuple, float],
) -> list[dict[str, Any]]:
    """Seconds and bytes of each held-out lane and group, measured, predicted and as published."""
    rows = []
    for (_, group, batch_size), program in programs.items():
        one = cost.cost_of(lab.spec, group.spec)
        rows.append(
            {
                "lanes": str(group),
                "batch_size": batch_size,
                "seconds": seconds["held out", group, batch_size],
                "predicted_seconds": profile.stack_seconds([one] * group.count, batch_size),
                "published_cost": cost.published_cost(group.spec) * group.count * batch_size,
                "bytes": program.bytes,
                "predicted_bytes": profile.lane_bytes(one, batch_size) * group.count,
                "published_bytes": cost.published_memory_bytes(group.spec) * group.count,
            }
        )
    return rows


def accuracy(predicted: npt.ArrayLike, measured: npt.ArrayLike) -> dict[str, float]:
    """Pearson's r, relative errors, and the share of them within 10 %."""
    ratio = np.asarray(predicted) / np.asarray(measured)
    errors = np.abs(ratio - 1)
    return {
        "pearson_r": float(np.corrcoef(np.asarray(predicted), np.asarray(measured))[0, 1]),
        "mean_error": float(errors.mean()),
        "largest_error": float(errors.max()),
        "within_10_percent": float(np.mean(errors <= 0.1)),
        "least_ratio": float(ratio.min()),
        "largest_ratio": float(ratio.max()),
    }


def scaled(predicted: npt.ArrayLike, measured: npt.ArrayLike) -> np.ndarray:
    """Predictions times the factor with the least sum of squared relative errors."""
    ratio = np.asarray(predicted) / np.asarray(measured)
    return np.asarray(predicted) * ratio.sum() / np.square(ratio).sum()


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accuracy of ours and of the thesis's formulas, for single lanes and for groups."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    seconds, num_bytes = columns["seconds"], columns["bytes"]
    return {
        "seconds": accuracy(columns["predicted_seconds"], seconds),
        "seconds, thesis, scaled": accuracy(scaled(columns["published_cost"], seconds), seconds),
        "memory": accuracy(columns["predicted_bytes"], num_bytes),
        "memory, thesis, scaled": accuracy(scaled(columns["published_bytes"], num_bytes), num_bytes),
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured: seconds and memory of single lanes, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    seconds, num_bytes = [row["seconds"] for row in rows], [row["bytes"] for row in rows]
    published = scaled([row["published_cost"] for row in rows], seconds)
    published_bytes = scaled([row["published_bytes"] for row in rows], num_bytes)
    panels = (
        ("milliseconds of a training step", 1e3, seconds, [row["predicted_seconds"] for row in rows], published),
        ("MiB of memory", 2**-20, num_bytes, [row["predicted_bytes"] for row in rows], published_bytes),
    )
    for axes, (title, unit, measured, ours, theirs) in zip(figure.subplots(1, 2), panels, strict=True):
        x = unit * np.asarray(measured)
        ends = np.array([x.min() / 1.3, x.max() * 1.3])
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.85", label="within 10 %")
        axes.plot(x, unit * np.asarray(theirs), "x", color="C1", label="thesis's formula, scaled")
        axes.plot(x, unit * np.asarray(ours), "o", color="C0", markersize=4, label="device profile")
        axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title=title)
        axes.legend()
    figure.savefig(path, dpi=120)


def table(summary: dict[str, dict[str, float]]) -> str:
    """The accuracies in Markdown."""
    head = ["predicted", "Pearson r", "mean error", "within 10 %", "least and largest ratio"]
    lines = []
    for name, found in summary.items():
        share, mean = f"{found['within_10_percent']:.0%}", f"{found['mean_error']:.1%}"
        ratios = f"{found['least_ratio']:.3f} to {found['largest_ratio']:.3f}"
        lines.append([name, f"{found['pearson_r']:.4f}", mean, share, ratios])
    return markdown(head, lines)


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("profile", "", "A profile measured before, to be judged; empty fits one.", flag_values=values)
    define_measuring(values)


def main(values: flags.FlagValues) -> None:
    with measure_machine.measuring(values) as finish:
        lab = measure_device.Lab(measure_device.lab_spec(values.data, values.lane_routing, values.compute_dtype))
        fitted = measure_device.make_programs(lab)
        keys = list(
            itertools.product([*held_out(lab.spec.image_shape), *parse_lanes(_GROUPS)], measure_device.BATCH_SIZES)
        )
        keys += [(group, _RECIPE_BATCH) for group in parse_lanes(_RECIPES)]
        others: dict[tuple, measure_device.Program] = {("held out", *key): lab.lane_step(*key) for key in keys}
        seconds = measure_device.typical_seconds({**fitted, **others}, values.rounds)
        machine = finish()
    if values.profile:
        profile = DeviceProfile.load(Path(values.profile))
        profile.check_is_of(jax.devices()[0])
    else:
        profile = measure_device.make_profile(lab, fitted, seconds, **machine)
    rows = judge(lab, profile, others, seconds)
    recipes = [row for row in rows if row["batch_size"] == _RECIPE_BATCH]
    rows = [row for row in rows if row["batch_size"] != _RECIPE_BATCH]
    singles = [row for row in rows if row["lanes"].endswith("*1")]
    groups = [row for row in rows if not row["lanes"].endswith("*1")]
    kinds = list(dict.fromkeys(row["lanes"].partition(":")[0] for row in singles))
    results = {
        "rounds": values.rounds,
        "data": values.data,
        "date": host.today(),
        **host.environment(),
        "lanes": summarize(singles),
        "groups": summarize(groups),
        "recipes": summarize(recipes),
        "by_kind": {kind: summarize([row for row in singles if row["lanes"].startswith(f"{kind}:")]) for kind in kinds},
        "rows": rows + recipes,
        "profile": profile.to_dict(),
    }
    RESULTS.mkdir(exist_ok=True)
    name = "cost_model_stored" if values.profile else "cost_model"
    write_json(RESULTS / f"{name}.json", results)
    draw(singles, RESULTS / f"{name}.png")
    print(f"{len(singles)} held-out lanes, {len(groups)} groups of equal ones")
    print(table(results["lanes"]))
    for kind, found in results["by_kind"].items():
        print(table({f"{kind}: {name}": accuracies for name, accuracies in found.items()}))
    for what in ("groups", "recipes"):
        print(table({f"{what}: {name}": found for name, found in results[what].items()}))


if __name__ == "__main__":
    launch_script(define, main)

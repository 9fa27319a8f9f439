"""Tables of small lanes: 8 bits, distillation, and forms chosen together with devices.

`distilled_lanes` has no results on all images in the repository yet, so no page has a place for it. With the JSON file
comes `@place` here, and in a page of docs/results the place itself, `<!-- made: NAME -->`.
"""

from collections.abc import Mapping
from statistics import mean
from typing import Any

from tables.parts import (
    accuracy_text,
    benchmark,
    commands_of,
    experiment,
    measured_on,
    place,
    row_title,
    runs_line,
    table_of,
)

_PRECISIONS = ("float32", "int8")
_WAYS = ("float32 xla", "float32 onnxruntime", "float32 onnxruntime, one file", "int8 onnxruntime")


@place
def small_lanes() -> str:
    result = experiment("small_lanes_full")
    runs, rows, kernels = result["runs"], [], []
    for row in result["rows"]:
        title, told = row_title(row["row"], runs), row["verdicts"]
        accuracies = [mean(row["accuracy"][name]) for name in _PRECISIONS]
        rows.append(
            [
                title,
                row["machine"],
                row["runs"],
                f"{row['smaller']:.2f}, {told['smaller']}",
                f"{row['smaller_than_export']:.2f}",
                *(f"{value:.2f}" for value in accuracies),
                f"{row['points']:+.2f} ({row['least_points']:+.2f} to {row['most_points']:+.2f}), {told['points']}",
                *(f"{row['milliseconds'][way]:.2f}" for way in _WAYS),
                f"{row['faster']:.2f}, {told['faster']}",
            ]
        )
        for name in _PRECISIONS:
            own = row["operators"][name]
            shares = ", ".join(f"{operator} {100 * share:.0f} %" for operator, share in own["share"].items())
            kernels.append([title, row["machine"], name, f"{own['milliseconds']:.2f}", shares])
    header = (
        "model | on | runs | times smaller | than the float32 export | float32, % | int8, % | points | "
        "float32 in XLA, ms | float32 in ONNX Runtime, ms | the same in one file | int8, ms | times as fast"
    )
    batch = result["rows"][0]["batch"]
    return (
        f"{table_of(header, rows)}\n\n{runs_line(runs)} Milliseconds of {batch} images, whole models in turns.\n\n"
        f"{table_of('model | on | precision | kernels of ONNX Runtime, ms | share of operators', kernels)}\n\n"
        f"{commands_of(runs)}"
    )


def _distilled(*names: str) -> str:
    """The rows of one scale after another."""
    results = [experiment(name) for name in names]
    runs = [run for result in results for run in result["runs"]]
    rows = [
        [
            row["case"] + ("" if row["split"] == "test" else " (validation images)"),
            f"`{row['teacher_lanes']}`",
            f"`{row['lanes']}`",
            f"{row['flops_share']:.3f}",
            f"`{row['setting']}`",
            f"{row['teacher']:.2f}",
            accuracy_text(row["labels"]),
            accuracy_text(row["distilled"]),
            f"{row['gap']:.2f}",
            "-" if row["recovered"] is None else f"{100 * row['recovered']:.0f}",
            row["verdict"],
        ]
        for result in results
        for row in result["rows"]
    ]
    header = (
        "case | teacher | students | FLOPs over the teacher's | setting | teacher, % | labels, % | distilled, % | "
        "gap | recovered, % | target"
    )
    return f"{table_of(header, rows)}\n\n{runs_line(runs)}\n\n{commands_of(runs)}"


def distilled_lanes() -> str:
    return _distilled("distilled_lanes_full")


@place
def distilled_trials() -> str:
    return _distilled("distilled_lanes_trial_full")


@place
def distilled_few() -> str:
    return _distilled("distilled_lanes_few", "distilled_lanes_fewer")


@place
def distillation_steps() -> str:
    result = benchmark("distillation")
    seconds = result["seconds"]
    ways = {"computed": "the teacher in the step", "kept": "kept predictions"}
    rows = []
    for name, value in seconds.items():
        way, _, images = name.partition(", ")
        if way in ways:
            alone = seconds[f"labels alone, {images}"]
            rows.append([ways[way], images, f"{1000 * value:.0f}", f"{value / alone:.2f}"])
    what = f"teacher `{result['teacher']}`, student `{result['lanes']}`, batch {result['batch']}"
    epochs = result["epochs_until_kept_is_faster"]
    kept = "Keeping the teacher's outputs"
    text = f"{kept} saves time in trainings of {epochs:.1f} epochs or more." if epochs else f"{kept} saves no time."
    if epochs:
        text += " With `data.alternate_flips` there are twice as many, so it takes twice as many epochs."
    table = table_of("a step with | images | ms | times a step on labels alone", rows)
    return f"{table}\n\n{text}\n\n{measured_on(result, what)}"


@place
def forms_and_places() -> str:
    result = experiment("forms_and_places")

    def ratio(found: Mapping[str, Any]) -> str:
        return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"

    simulated = [
        [f"`{name}`", way, found["problems"], ratio(found)]
        for name, ways in result["simulated"].items()
        for way, found in ways.items()
    ]
    rows = [
        [
            task,
            way,
            *(f"{1000 * found[name]:.1f}" for name in ("predicted_seconds", "measured_seconds")),
            ratio(found["over_together"]),
        ]
        for task in ("train", "infer")
        if "real" in result
        for way, found in result["real"][task].items()
    ]
    header = "partitioner | one after the other | simulated problems | times as long as together (range)"
    lanes = ", ".join(f"`{lane}`" for lane in result["lanes"])
    of_real = "task | forms and devices chosen | predicted, ms | measured, ms | over together, in a turn"
    return (
        f"{table_of(header, simulated)}\n\n"
        f"{table_of(of_real, rows)}\n\n"
        f"{measured_on(result)} Lanes: {lanes}, on two processes of a core each."
    )

"""Small lanes taught by a larger model, against the same lanes trained on labels alone.

    python -m experiments.distilled_lanes --workdir=runs/distilled --repeats=3
    python -m experiments.distilled_lanes --workdir=runs/distilled --repeats=3 --cases=cifar --cifar_teacher=runs/mine
    python -m experiments.distilled_lanes --workdir=runs/trial --trial --cases=cifar --settings=w0.5t1,w0.9t4plain

For each case the teacher is trained first, once, or taken from the workdir of one trained before. Students are thinner
lanes or, in the cases `of_15`, one lane like each of the teacher's fifteen. They have a tenth of its FLOPs, are trained
for as many epochs on all training images, and read the test set once, when a run ends. With `--scale=few`, teachers and
students are trained on 5,000 of the training images, for 40 epochs, with `--scale=fewer` on 2,500, for 60 epochs. Then
10,000 other images tell the best checkpoint of a run.

The share of the gap that is recovered is (distilled - labels) / (teacher - labels), of mean accuracies; it is judged
over three seeds, where the gap is large enough and FLOPs and epochs are as said. Students of a setting that ends in
`plain` have a teacher trained without label smoothing, which takes from a teacher what it knows of other classes.

With `--trial`, which chooses settings, teachers and students hold 10,000 training images out, are scored on those, and
leave the test set alone; give it a workdir of its own, and no teacher, which may have learned those images. All are
scored after their last step, but a teacher teaches with the parameters that classified these images best. A run that
has ended is not repeated, one that was stopped goes on. Writes `distilled_lanes_SCALE`, for trials
`distilled_lanes_trial_SCALE`, as JSON, Markdown and PNG to the workdir and, but for `smoke`, to `experiments/results/`,
from where it goes on elsewhere; there a teacher is trained again if students are left that need it.

Source: Mueller et al. 2019, arXiv 1906.02629, for teachers without label smoothing.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.published_rows import config_named
from experiments.repeated_report import (
    Records,
    caption,
    carry_out,
    draw_caption,
    kept_results,
    select,
    spread,
    told,
    write,
)
from experiments.repeated_runs import Facts, Request, Scale, Series, asked, chosen, define_flags
from mlcn_jax import host
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.errors import InputError
from mlcn_jax.files import markdown, read_json
from mlcn_jax.launch import launch_script
from mlcn_jax.placement.cost import forward_flops
from mlcn_jax.training.metrics import read_rows
from mlcn_jax.training.trained import load_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 3  # raised with every change after which results cannot stand beside older ones
_HELD_OUT = 10_000
SCALES = {
    "smoke": Scale("smoke", 1, 2, 600, 100),
    "few": Scale("few", 40, num_train=5_000 + _HELD_OUT),
    "fewer": Scale("fewer", 60, num_train=2_500 + _HELD_OUT),
    "full": Scale("full", 0),
}
HEADER = (
    *("", "teacher", "students", "FLOPs", "setting"),
    *("teacher, %", "labels, %", "distilled, %", "gap", "recovered, %", "target"),
)
TARGET, LEAST_GAP = 0.4, 1.5  # share of the gap, where the gap has so many points
MOST_FLOPS, SEEDS = 0.1, 3  # share of the teacher's FLOPs; trainings of each way
LABELS = "labels"
TEACHER, PLAIN = "teacher", "plain_teacher"  # ways; the second without label smoothing
_IMAGES = {"cifar10": 50_000, "fashion_mnist": 60_000}  # for training


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A module of `configs`, the lanes of the teacher, and what it and its students change in the configuration."""

    config: str
    lanes: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def data(self) -> str:
        """The name of the data set."""
        return "fashion_mnist" if "fashion" in self.config else "cifar10"


@dataclasses.dataclass(frozen=True)
class Case:
    """Students of a teacher: its name, their lanes, and what only they change in its configuration."""

    teacher: str
    students: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def data(self) -> str:
        """The name of the data set."""
        return TEACHERS[self.teacher].data


TEACHERS = {
    "cifar10": Teacher("resnet_cifar", "resnet:w3d2*4"),
    "fashion_mnist": Teacher("resnet_fashion", "resnet:w3d2*4"),
    "cifar10_of_15": Teacher("resnet_cifar", "resnet:w1d2*15"),
    "fashion_mnist_of_15": Teacher("resnet_fashion", "resnet:w1d2*15"),
}
# All lanes see the same view of an image, so that the teacher is asked once a step and not once for each lane.
_ONE_VIEW = {"data.augment_lanes": False}
CASES = {
    "cifar": Case("cifar10", "resnet:w1d2*2", _ONE_VIEW),
    "fashion": Case("fashion_mnist", "resnet:w1d2*2", _ONE_VIEW),
    "cifar_of_15": Case("cifar10_of_15", "resnet:w1d2*1", _ONE_VIEW),
    "fashion_of_15": Case("fashion_mnist_of_15", "resnet:w1d2*1", _ONE_VIEW),
    "fashion_capsules": Case(
        "fashion_mnist",
        "mlcn2:w2*4",
        {
            **_ONE_VIEW,
            "model.label_smoothing": 0.0,
            "model.margin_loss": "per_lane",
            "model.signed_pixels": True,
            "train.image_sizes": "",
            "train.optimizer": "adamw",
            "train.learning_rate": 3e-3,
            "train.batch_size": 100,
            "train.checkpoint_every": 0,
        },
    ),
}


def define(values: flags.FlagValues) -> None:
    define_flags(values, SCALES)
    values.set_default("scale", "full")
    flags.DEFINE_list("cases", list(CASES), f"Of {', '.join(CASES)}.", flag_values=values)
    text = "Weight and temperature of the teacher, each trained; with `plain`, it has no label smoothing."
    flags.DEFINE_list("settings", ["w0.9t4"], text, flag_values=values)
    flags.DEFINE_bool("trial", False, "Score images held out of the training images.", flag_values=values)
    for name in ("cifar", "fashion"):
        text = f"Workdir of a trained teacher for {name}; empty trains one."
        flags.DEFINE_string(f"{name}_teacher", "", text, flag_values=values)


def main(values: flags.FlagValues) -> int:
    return run(
        asked(values, "distilled_lanes", SCALES, ("cases", "settings", "trial")),
        cases=values.cases,
        settings=values.settings,
        trial=values.trial,
        teachers={"cifar10": values.cifar_teacher, "fashion_mnist": values.fashion_teacher},
    )


def run(
    request: Request,
    *,
    cases: Sequence[str],
    settings: Sequence[str],
    trial: bool,
    teachers: Mapping[str, str],
) -> int:
    """Trains what has not been trained yet, reports after each run, and returns the exit code."""
    cases = chosen("cases", cases, CASES)
    given = {data: Path(folder).expanduser() for data, folder in teachers.items() if folder}
    few = request.scale.num_train > _HELD_OUT
    if (trial or few) and given:
        holding = "--trial" if trial else f"--scale={request.scale.name}"
        raise InputError(
            f"{holding} holds training images out, which the teacher in {next(iter(given.values()))} may have learned: "
            "leave --cifar_teacher and --fashion_teacher empty, so that teachers are trained without them"
        )
    if given and (plain := [setting for setting in settings if _teacher_of(setting) == PLAIN]):
        raise InputError(
            f"--settings={plain[0]} trains a teacher without label smoothing, and {next(iter(given.values()))} is a "
            f"teacher as it is: give {plain[0].removesuffix('plain')}, or no teacher"
        )
    host.set_up_jax(least_seconds=0.1)  # before anything is loaded
    scored = {data: _test_accuracy(folder) for data, folder in given.items()}  # refused before anything is trained
    needed = [name for name in dict.fromkeys(CASES[case].teacher for case in cases) if TEACHERS[name].data not in given]
    for setting in settings:
        _weight_and_temperature(setting)
    kinds = dict.fromkeys(map(_teacher_of, settings))
    runs: list[dict[str, Any]] = [{"case": name, "way": kind, "seed": 0} for name in needed for kind in kinds]
    ways = (LABELS, *settings)
    runs += [{"case": case, "way": way, "seed": s} for s in range(request.repeats) for case in cases for way in ways]
    teachers_at = {
        (name, kind): given.get(teacher.data, request.workdir / "runs" / name / kind / "seed0")
        for name, teacher in TEACHERS.items()
        for kind in (TEACHER, PLAIN)
    }
    make_config = functools.partial(configure_run, request.directories, teachers_at, request.scale, trial)
    name = "distilled_lanes_trial" if trial else "distilled_lanes"
    kept = kept_results(name, request.scale.name)
    series = Series(request, "distilled_lanes", VERSION, make_config, True, measure, kept)
    reported = functools.partial(report, name, scored)
    texts = functools.partial(text, scored=scored)
    return carry_out(series, runs, texts, reported, again=teachers_needed(series, runs))


def teachers_needed(series: Series, runs: Sequence[Facts]) -> list[Facts]:
    """The teachers of students that have not been trained yet: their models are needed, also where results are kept."""
    ended = [record["facts"] for record in series.records()]
    needed = {
        (CASES[one["case"]].teacher, _teacher_of(one["way"]))
        for one in runs
        if one["way"] not in (TEACHER, PLAIN, LABELS) and one not in ended
    }
    return [one for one in runs if (one["case"], one["way"]) in needed]


def configure_run(
    directories: Mapping[str, str],
    teachers_at: Mapping[tuple[str, str], Path],
    scale: Scale,
    trial: bool,
    case: str,
    way: str,
    seed: int,
) -> RunConfig:
    """The run of a case, or of the teacher of that name; `way` is `labels`, a setting, or a kind of teacher.

    Images are held out for validation in trials and where there are few.
    """
    is_teacher = way in (TEACHER, PLAIN)
    name = case if is_teacher else CASES[case].teacher
    teacher = TEACHERS[name]
    config = config_named(teacher.config)
    changes: dict[str, Any] = {"train.seed": seed, "data.dir": directories[teacher.data], **teacher.changes}
    few = scale.num_train > _HELD_OUT
    if trial or few:
        held_out = _HELD_OUT / (scale.num_train if few else _IMAGES[teacher.data])
        changes |= {"data.validation_fraction": held_out, "data.split_seed": 0, "train.score_test": not trial}
    if is_teacher:
        plain = {"model.label_smoothing": 0.0} if way == PLAIN else {}
        return config.replace(changes | {"model.lanes": teacher.lanes} | plain)
    changes |= {"model.lanes": CASES[case].students, **CASES[case].changes}
    if way != LABELS:
        weight, temperature = _weight_and_temperature(way)
        changes |= {"train.teacher_weight": weight, "train.teacher_temperature": temperature}
        changes["train.teacher"] = str(teachers_at[name, _teacher_of(way)])
    return config.replace(changes)


def _teacher_of(setting: str) -> str:
    return PLAIN if setting.endswith("plain") else TEACHER


def _weight_and_temperature(setting: str) -> tuple[float, float]:
    match = re.fullmatch(r"w([0-9.]+)t([0-9.]+)(plain)?", setting)
    if match is None:
        raise InputError(f"--settings: {setting} is not written as w0.9t4 or w0.9t4plain, weight 0.9 and temperature 4")
    return float(match[1]), float(match[2])


def measure(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """More of a run that has ended: its lanes and their FLOPs, its epochs, and how long it trained."""
    config, spec = read_stored(folder), load_trained(folder).spec
    rate = summary.get("images_per_second")  # which a run in rounds has not
    seconds = summary["steps"] * config.train.batch_size / rate if rate else None
    about = {"lanes": spec.lanes, "flops": forward_flops(spec), "epochs": config.train.num_epochs}
    split = "test" if config.train.score_test else "validation"
    accuracy = summary.get("test_accuracy")
    if split == "validation":  # of the last step, as in a run that has no such images; the summary has the best step's
        accuracy = [row["accuracy"] for row in read_rows(folder / "metrics.jsonl") if row["split"] == split][-1]
    return about | {"split": split, "accuracy": 100 * accuracy, "train_seconds": seconds}


def _test_accuracy(folder: Path) -> dict[str, Any]:
    """What is told of a teacher that was trained before."""
    load_trained(folder)
    summary = read_json(folder / "summary.json")
    if "test_accuracy" not in summary:
        raise InputError(f"{folder} has no test accuracy: give a teacher whose run scored the test set")
    return measure(folder, summary)


def summarise(records: Records, scored: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case and setting of which all three are there: means over seeds, and the share of the gap recovered."""
    rows = []
    settings = dict.fromkeys(record["facts"]["way"] for record in records)
    for name, setting in itertools.product(CASES, [way for way in settings if way not in (LABELS, TEACHER, PLAIN)]):
        case = CASES[name]
        teachers = [r for r in select(records, case=case.teacher, way=_teacher_of(setting)) if "flops" in r]
        teacher = scored.get(case.data) or (teachers[0] if teachers else None)
        ways = [[r for r in select(records, case=name, way=way) if "flops" in r] for way in (LABELS, setting)]
        if teacher is None or not all(ways):
            continue
        labels, distilled = (spread(mine, "accuracy") for mine in ways)
        assert labels is not None
        assert distilled is not None
        gap = teacher["accuracy"] - labels["mean"]
        recovered = (distilled["mean"] - labels["mean"]) / gap if gap > 0 else None
        students = [record for mine in ways for record in mine]
        row = {
            "case": name,
            "setting": setting,
            "split": ways[0][0]["split"],
            "teacher_lanes": teacher["lanes"],
            "lanes": ways[0][0]["lanes"],
            "flops_share": max(record["flops"] for record in students) / teacher["flops"],
            "epochs": sorted({teacher["epochs"], *(record["epochs"] for record in students)}),
            "teacher": teacher["accuracy"],
            "labels": labels,
            "distilled": distilled,
            "gap": gap,
            "recovered": recovered,
            "train_seconds": [spread(mine, "train_seconds") for mine in ways],
        }
        rows.append(row | {"verdict": verdict(row)})
    return rows


def verdict(row: Mapping[str, Any]) -> str:
    """Whether the target is reached, or which of its conditions is not met."""
    seeds = min(row[way]["runs"] for way in ("labels", "distilled"))
    for met, otherwise in (
        (row["flops_share"] <= MOST_FLOPS, "too many FLOPs"),
        (len(row["epochs"]) == 1, "unequal epochs"),
        (row["gap"] >= LEAST_GAP, "small gap"),
        (seeds >= SEEDS, f"{seeds} of {SEEDS} seeds"),
    ):
        if not met:
            return otherwise
    return "reached" if row["recovered"] >= TARGET else "below"


def text(records: Records, scored: Mapping[str, dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = []
    for row in summarise(records, scored):
        recovered = "-" if row["recovered"] is None else f"{100 * row['recovered']:.0f}"
        mine = [select(records, case=row["case"], way=way) for way in (LABELS, row["setting"])]
        lines.append(
            [
                row["case"] + ("" if row["split"] == "test" else " (validation images)"),
                f"`{row['teacher_lanes']}`",
                f"`{row['lanes']}`",
                f"{row['flops_share']:.3f}",
                row["setting"],
                f"{row['teacher']:.2f}",
                *(told(own, "accuracy") for own in mine),
                f"{row['gap']:.2f}",
                recovered,
                row["verdict"],
            ]
        )
    return markdown(HEADER, lines)


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Bars of the mean test accuracies of each case, with the least and the most of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 3 * len(rows)), 4.5), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for i, way in enumerate(("labels", "distilled")):
            found = row[way]
            ends = [[found["mean"] - found["min"]], [found["max"] - found["mean"]]]
            label = way if not place else None
            axes.bar(place + 0.3 * i, found["mean"], 0.28, yerr=ends, color=f"C{i}", label=label, capsize=3)
        axes.bar(place + 0.6, row["teacher"], 0.28, color="0.7", label="teacher" if not place else None)
    axes.set_xticks([place + 0.3 for place in range(len(rows))], [f"{row['case']}, {row['setting']}" for row in rows])
    least = min((row["labels"]["min"] for row in rows), default=0)
    axes.set_ylim(max(0, least - 2), None)
    axes.set_ylabel("accuracy, %")
    if rows:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def report(name: str, scored: Mapping[str, dict[str, Any]], series: Series) -> None:
    """Writes the table and the picture of every run that has ended, under a name."""
    records = series.records()
    rows = summarise(records, scored)
    lines = [
        "FLOPs: of the students, over those of the teacher, for one image forward. Target: at least "
        f"{100 * TARGET:.0f} % of the gap recovered, where it is at least {LEAST_GAP:g} points, over {SEEDS} seeds, "
        f"with {MOST_FLOPS:g} of the FLOPs and as many epochs. `plain`: the teacher has no label smoothing.",
        *caption(series, records),
    ]
    figure = draw(rows)
    draw_caption(figure, lines)
    write(series, name, {"rows": rows}, text(records, scored), lines, figure)


if __name__ == "__main__":
    launch_script(define, main)

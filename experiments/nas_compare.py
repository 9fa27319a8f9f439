"""Search methods at equal training seconds, and unequal against equal lanes at equal FLOPs.

    python -m experiments.nas_compare --workdir=runs/nas_compare --data_dir=FOLDER

On a fixed part of Fashion-MNIST, for each seed: random search with `--num_models` models, which fills devices as the
thesis's does but for what docs/differences.md says; then the other methods with as many training seconds; then every
mix of equal lanes that fills the same devices. Sized for two CPU cores: few images and epochs, so it says which method
finds good mixes for such short trainings. The setting, halving's `search.min_epochs` above all, was chosen on another
seed (10). A search that is finished is not repeated, nor is a mix of equal lanes that has been trained. Writes
`experiments/results/nas_compare.json` and `.png`; the date is that of the newest training.
"""

import dataclasses
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

from absl import flags

from configs import nas_cifar
from experiments import RESULTS
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError, differences
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.search import report, setup
from mlcn_jax.search import run as search_run
from mlcn_jax.search import settings as settings_lib
from mlcn_jax.search.trials import Trainer

_FULL = 0.9  # share of the devices' FLOPs that a mix of equal lanes must take to be compared
_MOST_MODELS = 3  # times as many of any other method; its training seconds end it before


def configure(seed: int, values: flags.FlagValues) -> tuple[RunConfig, settings_lib.SearchSettings]:
    """The small setting, of random search."""
    config = nas_cifar.get_config()
    config.data.name, config.data.dir, config.data.validation_fraction = "fashion_mnist", values.data_dir, 0.75
    config.train.seed = config.search.seed = seed
    config.search.devices, config.search.baseline, config.search.method = "flops=0.5x*2", "mlcn2:w2d2*4", "random"
    config.search.max_width, config.search.max_depth = 4, 3
    config.search.num_models, config.search.num_repeats = values.num_models, 1
    config.train.batch_size = 50
    config.search.num_images, config.search.num_epochs, config.search.min_epochs = 2000, 9, 3
    return setup.read_config(config.to_dict())


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "workdir", "runs/nas_compare", "Folder of the searches, one a method and seed.", flag_values=values
    )
    flags.DEFINE_string("data_dir", "", "config.data.dir of Fashion-MNIST; empty downloads it.", flag_values=values)
    flags.DEFINE_list(
        "methods", ["halving", "evolution", "tpe"], "Methods to compare with random search.", flag_values=values
    )
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of mixes, images, start values and order.", flag_values=values)
    flags.DEFINE_integer("num_models", 64, "Models of the random search.", lower_bound=2, flag_values=values)


def main(values: flags.FlagValues) -> None:
    host.set_up_jax(least_seconds=0.1)
    workdir = Path(values.workdir).expanduser()
    runs: list[dict[str, Any]] = []
    for seed in map(int, values.seeds):
        config, settings = configure(seed, values)
        programs: dict[tuple, Any] = {}
        random_run = search_with("random", seed, config, settings, workdir, programs)
        runs.append(random_run)
        for method in values.methods:
            limited = dataclasses.replace(
                settings,
                method=method,
                num_models=_MOST_MODELS * settings.num_models,
                max_training_seconds=random_run["train_seconds"],
            )
            runs.append(search_with(method, seed, config, limited, workdir, programs))
        runs.append(equal_lanes(seed, config, settings, workdir, programs))
        date = max((run["date"] for run in runs if "date" in run), default=None)  # searches of older versions have none
        result = {"runs": runs, "methods": table(runs), "date": date, **host.environment()}
        write_json(RESULTS / "nas_compare.json", result)
        draw(result, RESULTS / "nas_compare.png")
    print(told(result))


def search_with(
    method: str,
    seed: int,
    config: RunConfig,
    settings: settings_lib.SearchSettings,
    workdir: Path,
    programs: dict[tuple, Any],
) -> dict[str, Any]:
    """One search; its models in the order in which they ended, the last on `date` (UTC)."""
    folder = workdir / f"{method}-{seed}"
    stored, asked = folder / "run.json", {"config_hash": config.hash(), **dataclasses.asdict(settings)}
    if stored.exists():
        run = json.loads(stored.read_text())
        if "asked" not in run and sum(run["models"].values()) == settings.num_models:
            return run  # of an older version, which noted no more
        if rows := differences(run.get("asked", {}), asked):
            raise InputError(
                f"{folder} holds a search of other settings:\n" + "\n".join(rows) + "\ngive another --workdir"
            )
        return run
    summary = search_run.run(config, settings, folder, programs)
    rows = json.loads((folder / "trials.json").read_text())
    baseline = next(row for row in rows if row["model"] == "baseline")
    rows = sorted((row for row in rows if row["ended"] and row["model"] != "baseline"), key=lambda row: row["ended"])
    spent, reached = report.best_so_far(rows)
    run = {
        "method": method,
        "seed": seed,
        "date": datetime.datetime.fromtimestamp(rows[-1]["ended"], datetime.UTC).date().isoformat(),
        "asked": asked,
        "models": summary["models"],
        "train_seconds": spent[-1],
        "session": summary["session"],
        "spent": spent,
        "best_so_far": reached,
        "accuracies": [row["accuracy"] for row in rows if row["state"] == "complete"],
        "step_flops": [row["step_flops"] for row in rows if row["state"] == "complete"],
        "best": summary["best"],
        "baseline": baseline["accuracy"],
    }
    write_json(stored, run)
    return run


def equal_lanes(
    seed: int, config: RunConfig, settings: settings_lib.SearchSettings, workdir: Path, programs: dict[tuple, Any]
) -> dict[str, Any]:
    """Every mix of equal lanes, as many as fit on each device, that takes most of the FLOPs.

    Each is kept once it has been trained, in a file of its own until all have been.
    """
    stored, begun = workdir / f"equal-{seed}.json", workdir / f"equal-{seed}-begun.json"
    if stored.exists():
        return json.loads(stored.read_text())
    trainer = Trainer(config, settings.num_epochs, settings.num_repeats, settings.num_images, programs=programs)
    space = setup.make_space(config, settings)
    points = json.loads(begun.read_text()) if begun.exists() else []
    for lane in range(len(space.menu)):
        counts = [int(bucket.limit * (1 + 1e-9) / bucket.loads[lane]) for bucket in space.buckets]
        mix = tuple((lane,) * count for count in counts)
        fill = statistics.fmean(bucket.fill(own) for bucket, own in zip(space.buckets, mix, strict=True))
        lanes = space.text(mix)
        if fill >= _FULL and all(point["lanes"] != lanes for point in points):
            *_, score = trainer.evaluate(lanes)
            points.append({"lanes": lanes, "accuracy": score.accuracy, "fill": fill})
            write_json(begun, points)
    date = host.today()
    accuracies = [point["accuracy"] for point in points]
    run = {"method": "equal lanes", "seed": seed, "date": date, "points": points, "accuracies": accuracies}
    write_json(stored, run)
    begun.unlink(missing_ok=True)
    return run


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method, means over seeds; how soon it was as good as random search at its end.

    The latter for each seed, against the best of that seed's random search, and for the mean over seeds. `overhead` is
    the mean over the searches whose last session trained a model; there is none if none did.
    """
    seeds = sorted({run["seed"] for run in runs})
    random_runs = [run for run in runs if run["method"] == "random"]
    goal = statistics.fmean(run["best_so_far"][-1] for run in random_runs)
    rows = []
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        row = {
            "method": method,
            "seeds": len(seeds),
            "best": statistics.fmean(max(run["accuracies"]) for run in mine),
            "mean": statistics.fmean(a for run in mine for a in run["accuracies"]),
            "trained_to_the_end": statistics.fmean(len(run["accuracies"]) for run in mine),
        }
        if "spent" in mine[0]:
            shares = [i / 200 for i in range(1, 201)]
            curve = [mean_best(mine, random_runs, share) for share in shares]
            row |= {
                "begun": statistics.fmean(
                    sum(run["models"].values()) - run["models"].get("waiting", 0) for run in mine
                ),
                "test": statistics.fmean(a for run in mine for a in run["best"]["test_accuracies"]),
                "as_good_as_random_after": [reached_after(*pair) for pair in zip(mine, random_runs, strict=True)],
                "mean_as_good_as_random_after": next(
                    (s for s, a in zip(shares, curve, strict=True) if a >= goal), None
                ),
                "curve": curve,
            }
            sessions = [run["session"] for run in mine if run["session"]["evaluate_seconds"]]
            if sessions:
                row["overhead"] = statistics.fmean(s["wall_seconds"] / s["evaluate_seconds"] - 1 for s in sessions)
        rows.append(row)
    return rows


def reached_after(run: dict[str, Any], random_run: dict[str, Any]) -> float | None:
    """Share of the random search's training seconds after which a run was as good as its best; None if it never was."""
    pairs = zip(run["spent"], run["best_so_far"], strict=True)
    total, goal = random_run["spent"][-1], random_run["best_so_far"][-1]
    return next((spent / total for spent, best in pairs if best >= goal), None)


def mean_best(runs: list[dict[str, Any]], random_runs: list[dict[str, Any]], share: float) -> float:
    """Mean over seeds of the best accuracy reached in a share of the random search's training seconds."""
    reached = []
    for run, theirs in zip(runs, random_runs, strict=True):
        pairs = zip(run["spent"], run["best_so_far"], strict=True)
        reached.append(max((best for spent, best in pairs if spent <= share * theirs["spent"][-1]), default=0.0))
    return statistics.fmean(reached)


def told(result: dict[str, Any]) -> str:
    """The rows as Markdown, without the mean of a method that stops the worse models: it would be of those it kept."""
    lines = [
        "| method | models begun | trained to the end | mean | best | its test accuracy | as good as random after, "
        "each seed | their mean | the seeds' mean curve after | overhead |",
        "|" + "---|" * 10,
    ]
    for row in result["methods"]:
        each, after = row.get("as_good_as_random_after", []), row.get("mean_as_good_as_random_after")
        shown = ["never" if share is None else f"{share:.0%}" for share in each]
        cells = [
            row["method"],
            f"{row['begun']:.0f}" if "begun" in row else "",
            f"{row['trained_to_the_end']:.0f}",
            f"{row['mean']:.2%}" if row.get("begun", 0) <= row["trained_to_the_end"] else "-",
            f"{row['best']:.2%}",
            f"{row['test']:.2%}" if "test" in row else "",
            ", ".join(shown),
            f"{statistics.fmean(each):.0%}" if each and None not in each else "",
            f"{after:.0%}" if after else ("never" if each else ""),
            f"{row['overhead']:.1%}" if "overhead" in row else ("-" if each else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Best so far against training seconds, and what equal and unequal lanes reach."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in result["methods"]:
        if "curve" in row:
            shares = [100 * (i + 1) / len(row["curve"]) for i in range(len(row["curve"]))]
            points = [(x, 100 * y) for x, y in zip(shares, row["curve"], strict=True) if y]
            left.step(*zip(*points, strict=True), where="post", label=row["method"])
    left.axvline(50, color="gray", lw=0.8, ls=":")
    left.set(
        xlabel="training seconds, % of those of the random search",
        ylabel="best validation accuracy so far, %",
        title=f"methods, mean of {result['methods'][0]['seeds']} seeds",
        ylim=(min(100 * row["mean"] for row in result["methods"]) - 1, None),
    )
    left.legend()
    groups = {
        "random, unequal": [a for run in result["runs"] if run["method"] == "random" for a in run["accuracies"]],
        "equal": [a for run in result["runs"] if run["method"] == "equal lanes" for a in run["accuracies"]],
    }
    right.boxplot([[100 * a for a in group] for group in groups.values()], tick_labels=list(groups), showmeans=True)
    right.set(
        ylabel="validation accuracy, %", title=f"lanes that take {100 * _FULL:.0f} % of the FLOPs or more, all seeds"
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    launch_script(define, main)

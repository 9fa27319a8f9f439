"""Lanes that come to say the same of every image: when that happens, and what keeps them from it.

    python -m experiments.lane_collapse
    python -m experiments.lane_collapse --row=fashion_mlcn1_8x4 --settings=published,warm_up --steps=1000

Trains a row of table 4.1 from the same start with each of `SETTINGS`, for an epoch by default, and follows how much the
entries of each lane in the class capsules differ between 500 test images. Squash has no gradient in two places: near
zero, where it is s|s|, and far out, where a lane's length is 1. A lane that is pushed to either hardly comes back, and
tells images apart no more (`evaluate.lane_spreads`). Writes `lane_collapse_ROW` as JSON and PNG to
`experiments/results/` after each setting; those that are there already stay, and are not trained again for as many
steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import RESULTS
from experiments.kept_rows import is_row, stored_results, with_row
from experiments.published_rows import ROWS, configure_row
from experiments.repeated_runs import chosen, command, define_data_dirs, directories
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.data import datasets
from mlcn_jax.files import make_folder, write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.nn.model import init_params
from mlcn_jax.training import evaluate
from mlcn_jax.training.optimizer import optimizer_of
from mlcn_jax.training.step import TrainState, make_train_step

# Fields in which each differs from the published method; `scale` multiplies the start values of `capsule_weights`.
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {},
    "larger_start": {"scale": 8.0},
    "slower": {"train.learning_rate": 1e-4},
    "faster": {"train.learning_rate": 3e-3},
    "fastest": {"train.learning_rate": 1e-2},
    "warm_up": {"train.optimizer": "adamw", "train.warmup_epochs": 1.0},
    "light_decoder": {"train.reconstruction_weight": 0.0392},
    "per_class": {"model.lane_routing": "per_class"},
    "per_lane": {"model.margin_loss": "per_lane"},
    "signed_pixels": {"model.signed_pixels": True},
    "lane_dropout": {"model.lane_dropout": 0.1},
    "much_lane_dropout": {"model.lane_dropout": 0.5},
}
_LOOKS = 40


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("row", "cifar_mlcn1_4x4", "Row of table 4.1.", flag_values=values)
    flags.DEFINE_list("settings", list(SETTINGS), "Settings to try.", flag_values=values)
    flags.DEFINE_integer("steps", 0, "Of each training; 0 is an epoch.", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of start values and batches.", flag_values=values)
    define_data_dirs(values)
    flags.DEFINE_string("results", str(RESULTS), "Folder to write to.", flag_values=values)


def main(values: flags.FlagValues) -> None:
    folder = Path(values.results).expanduser()
    given = command("lane_collapse", values, ("row", "settings", "steps", "seed"))
    compare(values.row, values.settings, values.steps, values.seed, directories(values), folder, given)


def compare(
    row: str,
    settings: Sequence[str],
    num_steps: int,
    seed: int,
    directories: Mapping[str, str],
    folder: Path,
    command_line: str,
) -> None:
    """All that the command does.

    Raises:
      InputError: the row, a setting, the images or the folder cannot be used.
    """
    chosen("row", [row], [name for name in ROWS if ROWS[name].lanes])
    settings = chosen("settings", settings, SETTINGS)
    make_folder(folder, "results")
    published = configure_row(row, "published", directories).replace({"train.seed": seed})
    dataset = published.data.load()
    about: dict[str, Any] = {
        "row": row,
        "seed": seed,
        "data": {"name": dataset.name, **dataset.provenance},
        "alive_above": evaluate.ALIVE,
        **host.environment(),
    }
    path = folder / f"lane_collapse_{row}.json"
    runs = stored_results(path, about).get("runs", [])
    date = host.today()
    last_step = num_steps or len(dataset.train.labels) // published.train.batch_size
    for name in settings:
        if any(is_row(run, {"setting": name}) and run["steps"][-1] == last_step for run in runs):
            continue
        changes = {field: value for field, value in SETTINGS[name].items() if field != "scale"}
        found = follow(published.replace(changes), dataset, SETTINGS[name].get("scale", 1.0), num_steps)
        runs = with_row(runs, {"setting": name, "changes": SETTINGS[name], **found}, {"setting": name})
        print(
            f"{name}: {found['alive']} of {len(found['spreads'][-1])} lanes alive after {found['steps'][-1]} steps, "
            f"test accuracy {found['test_accuracy']:.2f} %",
            flush=True,
        )
        write_json(path, {**about, "command": command_line, "date": date, "runs": runs})
        draw(path.with_suffix(".png"), runs, ROWS[row].title)


def follow(config: RunConfig, dataset: datasets.Dataset, scale: float, num_steps: int) -> dict[str, Any]:
    """Trains, and looks at each lane's spread at steps that are close together at first.

    Args:
      config: of the run; its seed decides start values and batches.
      scale: of the start values of `capsule_weights`.
      num_steps: 0 is an epoch.

    Returns:
      `steps` that were looked at, `spreads` [steps][lanes] there, how many lanes are `alive` at the end, and
      `test_accuracy` then, in %.
    """
    settings, spec = config.train, config.model_spec(dataset.test.images.shape[1:], len(dataset.class_names))
    epoch = len(dataset.train.labels) // settings.batch_size
    optimizer = optimizer_of(settings, epoch)
    step = jax.jit(
        make_train_step(spec, optimizer, reconstruction_weight=settings.reconstruction_weight, seed=settings.seed),
        donate_argnums=0,
    )
    params = init_params(spec, jax.random.key(settings.seed))
    params["encoder"] = jax.tree_util.tree_map_with_path(
        lambda path, value: scale * value if "capsule_weights" in jax.tree_util.keystr(path) else value,
        params["encoder"],
    )
    state = TrainState.create(params, optimizer)
    total = num_steps or epoch
    looks = np.unique(np.geomspace(1, total, _LOOKS).astype(int))
    rng = np.random.default_rng(settings.seed)
    spreads = [evaluate.lane_spreads(spec, state.params, dataset.test, settings.batch_size)]
    for i in range(1, total + 1):
        chosen_images = rng.integers(0, len(dataset.train.labels), settings.batch_size)
        state, _ = step(state, dataset.train.images[chosen_images], dataset.train.labels[chosen_images])
        if i in looks:
            spreads.append(evaluate.lane_spreads(spec, state.params, dataset.test, settings.batch_size))
    scores = evaluate.make_evaluator(spec, settings.reconstruction_weight)(state.params, dataset.test, 100)
    return {
        "steps": [0, *looks.tolist()],
        "spreads": spreads,
        "alive": sum(spread > evaluate.ALIVE for spread in spreads[-1]),
        "test_accuracy": 100 * scores.accuracy,
    }


def draw(path: Path, runs: Sequence[dict[str, Any]], title: str) -> None:
    """A panel for each setting, a line for each lane."""
    from matplotlib.figure import Figure

    columns = min(4, len(runs))
    num_rows = -(-len(runs) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * num_rows + 0.5), layout="constrained")
    figure.suptitle(f"{title}: how much each lane's entries differ between 500 test images")
    axes = figure.subplots(num_rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax, run in zip(axes.flat, runs, strict=False):
        ax.plot(run["steps"], np.maximum(run["spreads"], 1e-6))
        ax.axhline(evaluate.ALIVE, color="gray", lw=0.8, ls=":")
        ax.set(xscale="symlog", yscale="log", ylim=(1e-6, 3))
        ax.set_title(f"{run['setting']}: {run['alive']} alive, {run['test_accuracy']:.1f} %", fontsize=9)
    for ax in axes.flat[len(runs) :]:
        ax.set_axis_off()
    for ax in axes[-1]:
        ax.set_xlabel("step")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    launch_script(define, main)

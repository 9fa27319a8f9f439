"""Test accuracy after each epoch, mean over seeds, beside a plain TensorFlow implementation of the same lanes.

    python -m experiments.learning_curves --workdir=runs/learning_curves --seeds=0,1,2 \
        --rows=fashion_mlcn2_2x4,cifar_mlcn2_4x4 --fashion_dir=FOLDER --cifar_dir=FOLDER

Trains as published (Adam 1e-3 times 0.9 per epoch, batch 100, no augmentation, `published` lane routing) and
writes `experiments/results/learning_curves.json` and `.png` after every run. A finished run is not repeated, an
unfinished one is resumed. The test set is scored after each epoch for the record and chooses nothing.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import RESULTS
from experiments.repeated_runs import define_data_dirs, directories
from mlcn_jax import host
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script
from mlcn_jax.training.loop import train
from mlcn_jax.training.metrics import read_rows

# (config, lanes, epochs, test accuracy in % of the TensorFlow implementation after each epoch, one seed)
ROWS: dict[str, tuple[str, str, int, tuple[float, ...]]] = {
    "fashion_mlcn2_2x4": ("mlcn2_fashion", "mlcn2:w4*2", 20, ()),
    "fashion_mlcn1_4x4": ("mlcn1_fashion", "mlcn1:w4*4", 3, (84.62, 86.77, 87.64)),
    "fashion_mlcn2_4x4": ("mlcn2_fashion", "mlcn2:w4*4", 3, (85.21, 87.40, 87.79)),
    "cifar_mlcn1_4x4": ("mlcn1_cifar", "mlcn1:w4*4", 3, (44.15, 47.03, 47.82)),
    "cifar_mlcn2_4x4": ("mlcn2_cifar", "mlcn2:w4*4", 20, (43.86, 49.14, 52.76)),
}


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "workdir", "runs/learning_curves", "Folder of the runs, one a row and seed.", flag_values=values
    )
    flags.DEFINE_list("rows", list(ROWS), "Rows to train.", flag_values=values)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to train each row with.", flag_values=values)
    flags.DEFINE_integer("num_epochs", 0, "At most so many epochs; 0 is the row's own number.", flag_values=values)
    define_data_dirs(values)


def main(values: flags.FlagValues) -> None:
    unknown = [row for row in values.rows if row not in ROWS]
    if unknown:
        raise InputError(f"--rows: {', '.join(unknown)} unknown; there are {', '.join(ROWS)}")
    host.keep_compiled_programs()
    for seed in values.seeds:
        for row in values.rows:
            record(row, int(seed), values)
    draw(read_results())
    print(table(read_results()))


def read_results() -> dict[str, Any]:
    path = RESULTS / "learning_curves.json"
    return json.loads(path.read_text()) if path.exists() else {}


def record(row: str, seed: int, values: flags.FlagValues) -> None:
    """Trains one row with one seed and adds its curve to the results."""
    config_name, lanes, num_epochs, peer = ROWS[row]
    published = importlib.import_module(f"configs.{config_name}").get_config().to_dict()
    config = RunConfig.from_dict(published).replace(
        {
            "model.lanes": lanes,
            "model.prior_bias": False,
            "data.dir": directories(values)["fashion_mnist" if row.startswith("fashion") else "cifar10"],
            "train.num_epochs": min(num_epochs, values.num_epochs or num_epochs),
            "train.seed": seed,
            "train.test_every_epoch": True,
        }
    )
    workdir = Path(values.workdir) / row / f"seed{seed}"
    summary = train(config, workdir)
    curve = [100 * r["accuracy"] for r in read_rows(workdir / "metrics.jsonl") if r["split"] == "test"]
    results = read_results()
    entry = results.setdefault(row, {"lanes": lanes, "tensorflow_accuracy": list(peer), "runs": {}})
    entry["data"] = summary["data"]
    entry["runs"][str(seed)] = {
        "test_accuracy_per_epoch": curve,
        "images_per_second": summary["images_per_second"],
        "steps_timed": summary["steps_this_session"],
        **{name: summary[name] for name in ("device", "cpu_count", "versions", "config_hash")},
    }
    curves = common_epochs(entry)
    entry["num_runs"] = len(curves)
    entry["mean_accuracy_per_epoch"] = curves.mean(axis=0).round(2).tolist()
    entry["spread_per_epoch"] = (curves.max(axis=0) - curves.min(axis=0)).round(2).tolist()
    entry["mean_minus_tensorflow"] = [
        round(mean - theirs, 2) for mean, theirs in zip(entry["mean_accuracy_per_epoch"], peer, strict=False)
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_json(RESULTS / "learning_curves.json", results)


def common_epochs(entry: dict[str, Any]) -> np.ndarray:
    """Test accuracy in %, [runs, epochs], up to the last epoch that every run has."""
    curves = [run["test_accuracy_per_epoch"] for run in entry["runs"].values()]
    return np.array([curve[: min(map(len, curves))] for curve in curves])


def table(results: dict[str, Any]) -> str:
    """The results as the README shows them."""
    lines = ["| data | lanes | seeds | epoch 1 | epoch 2 | epoch 3 | TensorFlow, epochs 1 to 3 | epoch 20, seed 0 |"]
    lines.append("|" + "---|" * 8)
    for entry in results.values():
        copy = " (JPEG copy)" if entry["data"]["bytes"] == "not official" else ""
        means = [f"{value:.2f}" for value in entry["mean_accuracy_per_epoch"][:3]]
        peer = ", ".join(f"{value:.2f}" for value in entry["tensorflow_accuracy"]) or "-"
        first = entry["runs"].get("0", {}).get("test_accuracy_per_epoch", [])
        last = f"{first[19]:.2f}" if len(first) == 20 else "-"
        row = [entry["data"]["name"] + copy, f"`{entry['lanes']}`", str(entry["num_runs"]), *means, peer, last]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    """One panel a dataset: mean curves with the range over seeds, the longest run dotted, TensorFlow's points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (prefix, title) in zip(
        figure.subplots(1, 2), (("fashion", "Fashion-MNIST"), ("cifar", "CIFAR-10")), strict=True
    ):
        rows = [(name, entry) for name, entry in results.items() if name.startswith(prefix)]
        notes = {entry["data"]["bytes"] for _, entry in rows}
        axes.set_title(title + (" (JPEG copy)" if prefix == "cifar" and notes == {"not official"} else ""))
        for i, (_, entry) in enumerate(rows):
            curves = common_epochs(entry)
            longest = max((run["test_accuracy_per_epoch"] for run in entry["runs"].values()), key=len)
            axes.plot(range(1, len(longest) + 1), longest, ":", color=f"C{i}")
            epochs = np.arange(1, curves.shape[1] + 1)
            axes.plot(epochs, curves.mean(axis=0), "o-", color=f"C{i}", label=f"{entry['lanes']}, {len(curves)} seeds")
            axes.fill_between(epochs, curves.min(axis=0), curves.max(axis=0), color=f"C{i}", alpha=0.2)
            peer = entry["tensorflow_accuracy"]
            if peer:
                axes.plot(range(1, len(peer) + 1), peer, "x", color=f"C{i}", label="same, TensorFlow, 1 seed")
        axes.set_xlabel("epoch")
        axes.set_ylabel("test accuracy, %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
    figure.savefig(RESULTS / "learning_curves.png", dpi=120)


if __name__ == "__main__":
    launch_script(define, main)

"""Predicted memory of training steps against the compiler's count, before and after the settings that save memory.

    python -m experiments.memory_plan

Predictions (`mlcn_jax/analysis/fit_memory.py`) for lanes that run one by one come from programs of a few lanes; here
entire steps are compiled, too. For other lanes the entire step is what is predicted. The margin of the predictions was
chosen by the first models, and not by the others. Nothing is trained. Writes `experiments/results/memory_plan.json`.
Rows that are not asked for stay as they are; on another machine, or with other packages or another `VERSION`, the file
begins anew.
"""

from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS
from experiments.kept_rows import stored_results, with_row
from mlcn_jax import host
from mlcn_jax.analysis.fit_memory import compiled_bytes, is_extrapolated, predicted_bytes
from mlcn_jax.config import RunConfig
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

VERSION = 3  # raised with every change after which rows cannot stand beside older ones
_RESNET = {"data.name": "cifar10", "train.batch_size": 250, "train.optimizer": "muon"}
MODELS = ({**_RESNET, "model.lanes": "resnet:w1d2*6"}, {**_RESNET, "model.lanes": "resnet:w2d2*8"})
OTHERS = (
    {**_RESNET, "model.lanes": "resnet:w1d2*5,resnet:w2d1*4"},
    {**_RESNET, "model.lanes": "resnet:w1d1*16"},
    {"data.name": "cifar10", "model.lanes": "resnet_caps:w1d2*6"},
    {"data.name": "fashion_mnist", "model.lanes": "mlcn1:w4*8,resnet_caps:w1d1*8"},
    {"data.name": "fashion_mnist", "model.lanes": "mlcn1:w4*16"},
    {"data.name": "cifar10", "model.lanes": "mlcn1:w2*32"},
)
SAVINGS = ({}, {"model.remat": "full"}, {"train.accumulation_steps": 2})


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("only", [], "numbers of the models to compile, from 0; all if empty", flag_values=values)
    flags.DEFINE_integer("batch", 0, "images per step instead of the models' own", flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "memory_plan.json"), "file to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    path, about = Path(values.output), {"version": VERSION, **host.environment()}
    rows = stored_results(path, about).get("rows", [])
    for number, model in enumerate((*MODELS, *OTHERS)):
        if values.only and str(number) not in values.only:
            continue
        for saving in SAVINGS:
            if "model.remat" in saving and "resnet:" in model["model.lanes"]:
                continue
            changes = model | saving | ({"train.batch_size": values.batch} if values.batch else {})
            row = row_of(changes) | {"chose_the_margin": model in MODELS}
            rows = with_row(rows, row, {"changes": changes})
            print(f"{changes}: {row['compiled_bytes'] / 2**20:.0f} MiB, predicted {row['over']:+.1%}", flush=True)
            write_json(path, {**about, **worst(rows), "rows": rows})


def worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far predictions are off that are not the compiled step's own size: of all models, and of the others."""

    def least_and_most(some: list[dict[str, Any]]) -> list[float] | None:
        found = [row["over"] for row in some if row["is_extrapolated"]]
        return [min(found), max(found)] if found else None

    others = [row for row in rows if not row["chose_the_margin"]]
    return {"least_and_most_over": least_and_most(rows), "of_others": least_and_most(others)}


def row_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Predicted and compiled bytes of a step with some changes of the configuration."""
    config = RunConfig().replace(changes)
    spec = config.model_spec(*config.data.shape())
    found = {"predicted_bytes": predicted_bytes(config, spec), "compiled_bytes": compiled_bytes(config, spec)}
    found |= {"is_extrapolated": is_extrapolated(spec)}
    return {"changes": changes, **found, "over": found["predicted_bytes"] / found["compiled_bytes"] - 1}


if __name__ == "__main__":
    launch_script(define, main)

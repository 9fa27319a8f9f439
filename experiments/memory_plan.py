"""Predicted memory of training steps against the compiler's count, before and after the settings that save memory.

    python -m experiments.memory_plan

Predictions (`mlcn_jax/analysis/fit_memory.py`) come from programs of a few lanes; here entire steps are compiled, too.
The margin of the predictions was chosen by the first five models, and not by the others. Nothing is trained. Writes
`experiments/results/memory_plan.json`. Rows that are not asked for stay as they are; on another machine, or with other
packages or another `VERSION`, the file begins anew.
"""

from pathlib import Path
from typing import Any

from absl import flags

from experiments import RESULTS
from experiments.kept_rows import kept_rows, with_row
from mlcn_jax import host
from mlcn_jax.analysis.fit_memory import compiled_bytes, is_extrapolated, predicted_bytes
from mlcn_jax.config import RunConfig
from mlcn_jax.files import write_json
from mlcn_jax.launch import launch_script

VERSION = 2  # raised with every change after which rows cannot stand beside older ones
MODELS = (
    {"data.name": "fashion_mnist", "model.lanes": "mlcn1:w4*16"},
    {"data.name": "cifar10", "model.lanes": "mlcn1:w2*32"},
    {"data.name": "cifar10", "model.lanes": "mlcn2:w4*8,mlcn1:w2*6"},
    {"data.name": "fashion_mnist", "model.lanes": "mlcn2:w2d2*12", "model.lane_routing": "per_class"},
    {"data.name": "cifar10", "model.lanes": "resnet:w1d2*6", "train.batch_size": 250, "train.optimizer": "muon"},
)
OTHERS = (
    {"data.name": "fashion_mnist", "model.lanes": "mlcn2:w3*10"},
    {"data.name": "cifar10", "model.lanes": "mlcn1:w1d3*24"},
    {"data.name": "cifar10", "model.lanes": "resnet:w2d2*8", "train.batch_size": 250, "train.optimizer": "muon"},
)
SAVINGS = ({}, {"model.remat": "full"}, {"train.accumulation_steps": 2})


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("only", [], "numbers of the models to compile, from 0; all if empty", flag_values=values)
    flags.DEFINE_integer("batch", 0, "images per step instead of the models' own", flag_values=values)
    flags.DEFINE_string("output", str(RESULTS / "memory_plan.json"), "file to write", flag_values=values)


def main(values: flags.FlagValues) -> None:
    path, about = Path(values.output), {"version": VERSION, **host.environment()}
    rows = kept_rows(path, about)
    for number, model in enumerate((*MODELS, *OTHERS)):
        if values.only and str(number) not in values.only:
            continue
        for saving in SAVINGS:
            if "model.remat" in saving and model["model.lanes"].startswith("resnet:"):
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

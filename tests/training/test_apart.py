"""Lanes trained apart: the same parameters and checkpoints as beside other lanes; settings that couple them refused."""

import shutil
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from mlcn_jax.analysis import prune
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data import datasets
from mlcn_jax.data.batches import Batches
from mlcn_jax.errors import InputError
from mlcn_jax.files import read_json, write_json
from mlcn_jax.training.checkpoint import Checkpoints
from mlcn_jax.training.evaluate import make_evaluator
from mlcn_jax.training.loop import train
from mlcn_jax.training.plan import make_runner
from mlcn_jax.training.session import Session, open_session, plan_of, step_options
from mlcn_jax.training.start import start_state
from mlcn_jax.training.trained import load_trained

APART = {
    "train.lanes_apart": True,
    "model.margin_loss": "per_lane_sum",
    "model.decoder_gradient": "none",
    "model.decoder": "8",
    "data.validation_fraction": 0.1,
    "data.split_seed": 5,
    "train.batch_size": 50,
    "train.num_epochs": 1,
}
RESIDUAL = {"data.augment_lanes": True, "data.max_shift": 2, "data.reflect": True, "model.norm_group": 25}


def trained(changes: dict, steps: int = 20) -> tuple[Session, dict]:
    """The session of some changes of `APART`, and the encoder after some steps."""
    session = open_session(RunConfig().replace(APART | changes))
    state, _ = start_state(session, None)
    settings = session.config.train
    plan, options = plan_of(session.config, session.spec), step_options(session.config)
    runner = make_runner(plan, session.spec, session.optimizer, **options)
    runner.start(state)
    batches = Batches(session.train.images, session.train.labels, settings.batch_size, settings.seed)
    runner.compile(*batches.at(0))
    for step in range(steps):
        runner.step(*runner.place(*batches.at(step)))
    return session, runner.fetch().params["encoder"]


@pytest.mark.parametrize(
    ("kind", "others", "changes"),
    [
        ("mlcn1", "mlcn1:w1,mlcn2:w1", {"train.optimizer": "adam", "data.max_shift": 1}),
        ("mlcn2", "mlcn2:w1*2", {"train.optimizer": "adamw", "data.max_shift": 1}),
        ("mlcn2", "mlcn2:w1*2", {"train.optimizer": "adam"}),
        # With the quick compiler options of conftest.py the rounding of these depends on the number of lanes.
        pytest.param("resnet", "resnet:w1*2", {"train.optimizer": "adam"} | RESIDUAL, marks=pytest.mark.long),
        pytest.param(
            *("resnet", "resnet:w1,resnet:w1d2", {"train.optimizer": "sgd", "train.learning_rate": 0.01} | RESIDUAL),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_lane_learns_the_same_alone_and_beside_others(kind, others, changes):
    """It is the last of its group, beside an equal one with another seed, and others."""
    session, together = trained(changes | {"model.lanes": f"{kind}:w1,{others}", "model.lane_seeds": "4,7,9"})
    place = [str(spec) for spec in session.spec.lane_specs].count(f"{kind}:w1d1") - 1
    seed = session.spec.lane_seeds[place]
    _, alone = trained(changes | {"model.lanes": f"{kind}:w1", "model.lane_seeds": str(seed)})
    name = f"{kind}_w1d1"
    assert place > 0
    for mine, theirs in zip(jax.tree.leaves(alone[name]), jax.tree.leaves(together[name]), strict=True):
        np.testing.assert_allclose(mine[0], theirs[place], rtol=0, atol=1e-6)


def test_a_lane_has_its_own_best_checkpoint_as_if_it_were_alone(tmp_path):
    """So early, accuracy goes up and down, and lanes and model are best at different steps."""
    often = {
        "train.optimizer": "adamw",
        "train.learning_rate": 5e-4,
        "train.num_steps": 24,
        "train.checkpoint_every": 2,
    }

    def run(name: str, seeds: Sequence[int]):
        lanes = {"model.lanes": f"mlcn2:w1*{len(seeds)}", "model.lane_seeds": list(seeds)}
        summary = train(RunConfig().replace(APART | often | lanes), tmp_path / name)
        return summary, load_trained(tmp_path / name)

    summary, together = run("together", [4, 7, 9])
    alone = [run(f"alone{seed}", [seed])[1] for seed in (4, 7, 9)]
    assert together.lane_steps == tuple(summary["lane_steps"]) == tuple(one.step for one in alone)
    assert set(together.lane_steps) > {summary["best_step"]}
    name = together.spec.lane_groups[0].name
    for lane, one in enumerate(alone):
        for mine, theirs in zip(*(jax.tree.leaves(t.params["encoder"][name]) for t in (one, together)), strict=True):
            np.testing.assert_allclose(mine[0], theirs[lane], rtol=0, atol=1e-6)
    scores = make_evaluator(together.spec, 0.0)(together.params, open_session(RunConfig()).dataset.test, 50)
    assert scores.accuracy == summary["test_accuracy"]
    prune.save_run(prune.load_prunable(tmp_path / "together"), tmp_path / "copy", summary["validation_accuracy"], {})
    copied = Checkpoints(tmp_path / "copy" / "checkpoints", read_only=True)
    assert copied.num_ranked_lanes == 3, "further training keeps lanes that it makes worse"
    copied.close()
    with pytest.raises(InputError, match=r"alone4 is finished, with train\.lanes_apart=True, by which its best"):
        train(read_stored(tmp_path / "alone4").replace({"train.lanes_apart": False}), tmp_path / "alone4")


def test_how_the_best_checkpoints_of_a_run_were_chosen_is_kept_where_the_test_set_is_scored_later(per_lane, tmp_path):
    workdir = shutil.copytree(per_lane, tmp_path / "run")
    config, summary = read_stored(workdir), read_json(workdir / "summary.json")
    write_json(workdir / "config.json", config.replace({"train.lanes_apart": True}).to_dict())
    write_json(workdir / "summary.json", {k: v for k, v in summary.items() if not k.startswith("test_")})
    with pytest.raises(InputError, match=r"run is finished, with train\.lanes_apart=True, by which its best"):
        train(config, workdir)


@pytest.mark.parametrize(
    ("changes", "field", "cure"),
    [
        ({"model.margin_loss": "joint"}, "model.margin_loss is 'joint'", "give per_lane_sum"),
        ({"model.margin_loss": "per_lane"}, "model.margin_loss is 'per_lane'", "give per_lane_sum"),
        ({"model.decoder_gradient": "auto"}, "model.decoder_gradient is 'auto'", "give none"),
        ({"train.clip_norm": 1.0}, "train.clip_norm is 1.0", "give 0"),
        ({"model.lane_seeds": ""}, r"model.lane_seeds is \[\]", "give 2 seeds"),
        ({"data.split_seed": -1}, "data.split_seed is -1", "give a seed"),
        ({"model.lanes": "resnet:w1*2", "model.ensemble_weight": 0.5}, "model.ensemble_weight is 0.5", "give 0"),
        ({"model.lanes": "resnet:w1*2", "model.decoder_gradient": "all"}, "decoder_gradient is 'all'", "give none"),
    ],
)
def test_settings_that_couple_lanes_are_refused_with_what_to_give(changes, field, cure):
    config = RunConfig().replace(APART | {"model.lanes": "mlcn2:w1*2", "model.lane_seeds": "0,1"} | changes)
    with pytest.raises(InputError, match=f"(?s)lanes_apart is set.*{field}; .*{cure}"):
        open_session(config)


def test_the_split_seed_alone_selects_the_validation_images():
    def digest(changes):
        config = RunConfig().replace({"data.validation_fraction": 0.1, **changes})
        return datasets.digest(open_session(config).validation)

    assert digest({"train.seed": 1, "data.split_seed": 5}) == digest({"train.seed": 2, "data.split_seed": 5})
    assert digest({"train.seed": 1, "data.split_seed": 5}) != digest({"train.seed": 1, "data.split_seed": 6})
    assert digest({"train.seed": 1}) == digest({"train.seed": 0, "data.split_seed": 1})
    assert digest({"train.seed": 1}) != digest({"train.seed": 2})

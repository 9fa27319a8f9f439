"""Memory of a step, told before it is compiled, and the settings that make it fit."""

import json

import pytest

from mlcn_jax.analysis import fit_memory
from mlcn_jax.commands import describe
from mlcn_jax.config import RunConfig
from mlcn_jax.errors import InputError

SMALL = {"data.name": "digits", "model.lanes": "mlcn1:w1*12", "model.decoder": "8", "train.batch_size": 12}


def of(changes):
    config = RunConfig().replace(SMALL | changes)
    return config, config.model_spec(*config.data.shape())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="many lanes"),
        pytest.param({"train.accumulation_steps": 2}, marks=pytest.mark.long, id="in parts"),
        pytest.param({"model.lanes": "mlcn1:w1*5,resnet:w1*5"}, marks=pytest.mark.long, id="two groups"),
    ],
)
def test_few_lanes_tell_the_memory_of_many(changes):
    config, spec = of({"model.lanes": "resnet:w1*6", "model.norm_group": 6} | changes)
    assert fit_memory.is_extrapolated(spec)
    ratio = fit_memory.predicted_bytes(config, spec) / fit_memory.compiled_bytes(config, spec)
    assert 1.0 <= ratio <= 1.1


def test_settings_are_changed_until_a_step_fits():
    config, spec = of({})
    plain = fit_memory.predicted_bytes(config, spec)
    found = fit_memory.fit_memory(config, spec, plain)
    assert (found["fits"], len(found["tried"])) == ({}, 1)
    found = fit_memory.fit_memory(config, spec, plain - 1)
    assert found["fits"] == {"model.remat": "full"}
    assert found["tried"][1]["bytes"] < found["tried"][0]["bytes"] == plain
    RunConfig().replace(SMALL | found["fits"])


def test_a_worker_of_rounds_has_its_part_of_a_batch():
    config, spec = of({"train.rounds.steps": 5, "train.rounds.workers": 2, "model.lanes": "resnet:w1*2"})
    alone, _ = of({"train.batch_size": 6, "model.lanes": "resnet:w1*2"})
    assert fit_memory.predicted_bytes(config, spec) == fit_memory.predicted_bytes(alone, spec)


def test_a_device_that_holds_no_step_is_told_so_after_every_setting():
    config, spec = of({"model.lanes": "resnet:w1*2", "model.norm_group": 6})
    found = fit_memory.fit_memory(config, spec, 1000)
    assert found["fits"] is None
    assert [row["changes"] for row in found["tried"]] == [{}, {"train.accumulation_steps": 2}]  # whole norm groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel.plan": "stacks"}, r"parallel.plan=stacks .* memory is predicted for one device only"),
        ({"parallel.lane": 2}, r"parallel.data=1 and parallel.lane=2 is given, but memory is predicted for one"),
        ({"parallel.data": 3}, r"parallel.data=3 and parallel.lane=1 is given, .* train compares the compiled step"),
        ({"train.rounds.steps": 5, "train.rounds.workers": 5}, "12 cannot be divided among train.rounds.workers=5"),
        ({"train.teacher": "runs/a"}, "memory of a teacher is not predicted"),
        ({"model.remat": "offload"}, "memory of model.remat=offload is not predicted: .* with model.remat=full"),
    ],
)
def test_what_is_not_predicted_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        fit_memory.fit_memory(*of(changes), 10**9)


def test_describe_prints_it(capsys):
    fields = [f"--config.{name}={value}" for name, value in (SMALL | {"model.lanes": "mlcn1:w1*1"}).items()]
    describe.main(["--config=configs/quickstart.py", "--memory_gib=1", *fields])
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["device_bytes"] == 2**30
    assert memory["fits"] == {}
    describe.main(["--config=configs/quickstart.py", "--memory_gib=1", "--tables", *fields])
    tables, _, rest = capsys.readouterr().out.partition("{")
    assert tables.startswith("| part |")
    assert json.loads("{" + rest) == {"memory": memory}

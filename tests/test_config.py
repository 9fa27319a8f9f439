import importlib
import json
import re
from pathlib import Path

import pytest
from made_files import image_folder

from configs import default
from mlcn_jax import config
from mlcn_jax.analysis import describe
from mlcn_jax.config import _ADDED, RunConfig, flat
from mlcn_jax.errors import InputError

CONFIGS = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("[!_]*.py"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_describes_a_model(name, tmp_path):
    config = RunConfig.from_dict(importlib.import_module(f"configs.{name}").get_config().to_dict())
    if config.data.name == "folder":
        config = config.replace({"data.dir": str(image_folder(tmp_path, {"dog": 10, "cat": 10}))})
    described = describe.describe(config)
    assert described["parameters"] > 0
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_configs_asked_for_are_there():
    expected = {f"{m}_{d}" for m in ("capsnet", "mlcn1", "mlcn2") for d in ("mnist", "fashion", "cifar")}
    assert expected | {"default", "quickstart", "mlcn2_cifar100"} <= set(CONFIGS)


def test_changes_are_read_as_the_type_of_their_field(tiny):
    changed = tiny.replace({"train.seed": "3", "data.flip": "true", "model.decoder": "(7, 9)", "train.clip_norm": "1"})
    assert changed.train.seed == 3
    assert changed.data.flip is True
    assert changed.model["decoder"] == (7, 9)
    assert changed.train.clip_norm == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train.learning_rat", "1", "no field train.learning_rat; did you mean train.learning_rate"),
        ("train", "1", "no field train"),
        ("train.seed.x", "1", "no field"),
        ("train.seed", "one", "'one' is not int"),
        ("data.flip", "maybe", "is not bool"),
        ("model.decoder", "a,b", "is not a list of numbers"),
        ("train.batch_size", 0, "train.batch_size is 0; it must be 1 or more"),
        ("train.learning_rate", -1.0, "train.learning_rate is -1.0; it must be above 0"),
        ("train.learning_rate", float("nan"), "train.learning_rate is nan"),
        ("train.lr_decay", 0.0, "train.lr_decay"),
        ("train.seed", -1, "train.seed is -1"),
        ("train.optimizer", "lion", "'lion'; it must be adam or adamw or sgd or muon"),
        ("data.max_shift", -2, "data.max_shift"),
        ("data.cutout", -1, "data.cutout"),
        ("train.momentum", 1.0, "train.momentum"),
        ("train.image_sizes", "20", "train.image_sizes is '20'; it must be a list such as 20:0.35"),
        ("train.image_sizes", "28:0.7,20:0.3", "in the order of the steps"),
        ("parallel.exchange_dtype", "int8", "'int8'; it must be float32 or bfloat16"),
        ("parallel.process", 0, "parallel.process is 0; it must be -1 unless parallel.processes"),
        ("parallel.coordinator", "h:1", "parallel.coordinator is 'h:1'; it must be empty unless parallel.processes"),
    ],
)
def test_bad_changes_are_refused(tiny, field, value, message):
    with pytest.raises(InputError, match=message):
        tiny.replace({field: value})


def test_a_field_that_is_left_out_takes_its_default(tiny):
    values = tiny.to_dict()
    del values["train"]["learning_rate"], values["parallel"]
    assert RunConfig.from_dict(values) == tiny
    assert RunConfig.from_dict({}) == RunConfig.from_dict(default.get_config().to_dict()) == RunConfig()


def test_a_config_that_an_older_version_stored_is_the_same_run(tiny):
    values = tiny.to_dict()
    for field in _ADDED:
        *sections, name = field.split(".")
        part = values
        for section in sections:
            part = part[section]
        del part[name]
    assert RunConfig.from_dict(values) == tiny
    assert tiny.flat_as_before() == flat(values)
    for changes in ({"model.margin_loss": "per_lane"}, {"model.signed_pixels": True}):
        assert tiny.replace(changes).hash() != tiny.hash()


def test_a_workdir_refuses_another_configuration_and_names_every_field(tiny):
    other = tiny.replace({"model.lanes": "mlcn2:w1*2", "train.batch_size": 25, "train.num_epochs": 99})
    with pytest.raises(InputError) as error:
        other.check_resumable(tiny, Path("W"))
    message = str(error.value)
    assert "model.lanes: 'mlcn1:w1*2' there, 'mlcn2:w1*2' now" in message
    assert "train.batch_size: 50 there, 25 now" in message
    assert "num_epochs" not in message


def test_a_longer_run_from_another_folder_may_resume(tiny):
    longer = tiny.replace({"train.num_steps": 40, "data.dir": "elsewhere", "train.checkpoint_every": 7})
    longer.check_resumable(tiny, Path("W"))


@pytest.mark.parametrize("changes", [{"train.lookahead": 0.5}, {"train.image_sizes": "20:0.5"}])
def test_a_run_whose_schedule_depends_on_its_length_may_not_become_longer(tiny, changes):
    run = tiny.replace(changes)
    with pytest.raises(InputError, match=r"train\.num_epochs"):
        run.replace({"train.num_epochs": 99}).check_resumable(run, Path("W"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("init_form", "runs/a", "there is no field init_form; did you mean init_from?"),
        ("trian", {"seed": 1}, "there is no field trian; did you mean train?"),
        ("init_from", 3, "init_from is 3; it must be of type str"),
        ("profile", "yes", "profile is 'yes'; it must be of type bool"),
    ],
)
def test_fields_outside_the_sections_are_checked_too(tiny, name, value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        RunConfig.from_dict({**tiny.to_dict(), name: value})


def test_what_rounds_gradients_is_fixed(tiny):
    rounded = tiny.replace({"parallel.exchange_dtype": "bfloat16"})
    assert rounded.hash() != tiny.hash()
    with pytest.raises(InputError, match=r"parallel\.exchange_dtype"):
        rounded.check_resumable(tiny, Path("W"))


def test_hash_ignores_places_only(tiny):
    assert tiny.replace({"data.dir": "elsewhere"}).hash() == tiny.hash()
    assert tiny.replace({"train.seed": 1}).hash() != tiny.hash()


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("model", "lane", "mlcn1:w1", "no field model.lane; did you mean model.lanes"),
        ("model", "decoder", ["a"], "model.decoder"),
        ("model", "num_routing_iters", None, "model.num_routing_iters is None"),
        ("model", "prior_bias", 1, "of type bool"),
        ("train", "seed", 2**32, "below 2"),
        ("train", "batch_size", 1.5, "of type int"),
        ("train", "clip_norm", 10**400, "train.clip_norm is 1000.*it must be finite"),
        ("data", "max_shift", 2**30, "at most 1000000"),
        ("train", "warmup_epochs", float("inf"), "train.warmup_epochs"),
    ],
)
def test_a_config_file_of_another_form_is_refused(tiny, section, field, value, message):
    values = tiny.to_dict()
    values[section][field] = value
    with pytest.raises(InputError, match=message):
        RunConfig.from_dict(values)


def test_adamw_may_not_change_where_it_ends(tiny):
    stored = tiny.replace({"train.optimizer": "adamw"})
    with pytest.raises(InputError, match=r"train\.num_epochs"):
        stored.replace({"train.num_epochs": 50}).check_resumable(stored, Path("W"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_told_so(value):
    with pytest.raises(InputError, match=r"train\.learning_rate is .*finite"):
        RunConfig().replace({"train.learning_rate": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"processes": 1, "process": 0, "coordinator": "localhost:7000"}},
        {"parallel": {"processes": 0, "process": -1, "coordinator": "localhost:7000"}},
        {"data": {"test_fraction": 0.3}},
        {"data": {"label_kind": "coarse"}},
    ],
)
def test_a_run_that_an_older_version_stored_with_settings_that_do_nothing_may_resume(tiny, tmp_path, changes):
    values = tiny.to_dict()
    for section, fields in changes.items():
        values[section] |= fields
    (tmp_path / "config.json").write_text(json.dumps(values))
    stored = config.read_stored(tmp_path)
    tiny.check_resumable(stored, tmp_path)
    assert stored.hash() == tiny.hash()
    assert stored.parallel.processes == values["parallel"]["processes"]


def test_the_fraction_of_a_folders_test_images_is_kept(tiny, tmp_path):
    values = tiny.replace({"data.name": "folder", "data.test_fraction": 0.3}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert config.read_stored(tmp_path).data.test_fraction == 0.3


def test_a_message_names_a_damaged_config_once(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError) as caught:
        config.read_stored(tmp_path)
    assert str(caught.value).count("config.json") == 1


def test_a_config_dict_is_read_like_a_dictionary():
    assert RunConfig.from_dict(default.get_config()) == RunConfig()


def test_a_group_of_fields_that_is_none_is_named():
    with pytest.raises(InputError, match=r"^model is None; it must be a group of fields$"):
        RunConfig.from_dict({"model": None})

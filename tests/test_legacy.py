"""What an earlier version wrote (`legacy/README.md`) loads, resumes and goes on."""

import importlib.util
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mlcn_jax.analysis.workdir import load_with_data
from mlcn_jax.config import RunConfig, read_stored
from mlcn_jax.data.batches import to_pixels
from mlcn_jax.nn import capsules, lane_list, lanes
from mlcn_jax.nn.model import encode
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.search import run as search_run
from mlcn_jax.search import setup
from mlcn_jax.search.settings import SearchSettings
from mlcn_jax.serving.artifact import Artifact
from mlcn_jax.training import checkpoint, loop
from mlcn_jax.training.trained import load_trained

LEGACY = Path(__file__).parent / "legacy"
EXPECTED = json.loads((LEGACY / "expected.json").read_text())


@pytest.fixture
def workdir(tmp_path):
    return Path(shutil.copytree(LEGACY / "workdir", tmp_path / "workdir"))


def lengths_of(trained, images):
    return capsules.lengths(encode(trained.spec, trained.params["encoder"], to_pixels(images)))


@pytest.mark.long
def test_a_workdir_loads_and_resumes_to_what_it_would_have_become(workdir):
    config = read_stored(workdir)
    assert config.hash() == EXPECTED["workdir"]["config_hash"]
    trained, dataset = load_with_data(workdir, config)
    assert trained.step == 30
    np.testing.assert_allclose(lengths_of(trained, dataset.test.images[:5]), EXPECTED["workdir"]["lengths"], atol=1e-5)

    summary = loop.train(config, workdir)
    after = EXPECTED["resumed"]
    assert summary["steps"] == summary["best_step"] == after["num_steps"]
    trained = load_trained(workdir)
    np.testing.assert_allclose(lengths_of(trained, dataset.test.images[:5]), after["lengths"], atol=1e-4)
    assert summary["test_accuracy"] == pytest.approx(after["evaluate"]["test_accuracy"], abs=1 / 359)
    keeper = checkpoint.Checkpoints(workdir / "checkpoints", read_only=True)
    _, facts = keeper.restore({"params": trained.params}, best=True)
    keeper.close()
    assert facts["conv"] == after["conv"]


def test_an_export_loads_and_gives_the_same_lengths(tmp_path):
    with tarfile.open(LEGACY / "export.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (manifest,) = tmp_path.rglob("manifest.json")
    images = RunConfig().data.load().test.images[:5]
    np.testing.assert_allclose(Artifact(manifest.parent).lengths(images), EXPECTED["export"]["lengths"], atol=1e-5)


def test_a_device_profile_predicts_the_same():
    profile, expected = DeviceProfile.load(LEGACY / "profile.json"), EXPECTED["profile"]
    settings = lanes.LaneSettings(profile.num_classes)
    for text, predicted in expected["predicted"].items():
        (group,) = lane_list.parse_lanes(text)
        one = cost.lane_cost(group.spec, settings, profile.image_shape)
        size = expected["batch_size"]
        found = {
            "lane_seconds": profile.lane_seconds(one, size),
            "stack_of_4_seconds": profile.stack_seconds([one] * 4, size),
            "lane_bytes": profile.lane_bytes(one, size),
        }
        assert found == pytest.approx(predicted)
    assert profile.head_seconds(4, expected["batch_size"]) == pytest.approx(expected["head_seconds_of_4_lanes"])


@pytest.mark.long
def test_a_search_goes_on_where_it_was_stopped(tmp_path):
    shutil.copy(LEGACY / "search" / "search.db", tmp_path)
    words = [word.removeprefix("--config.") for word in (LEGACY / "search" / "command.txt").read_text().split()]
    changes = dict(word.split("=", 1) for word in words if word.split(".")[0] in ("data", "model", "search"))
    config, settings = setup.read_config(quickstart(changes))
    summary = search_run.run(config, settings, tmp_path)
    rows = {str(row["model"]): row for row in json.loads((tmp_path / "trials.json").read_text())}
    assert {name: row["lanes"] for name, row in rows.items()} == EXPECTED["search"]["lanes"]
    assert {name: row["accuracy"] for name, row in rows.items()} == pytest.approx(
        EXPECTED["search"]["accuracies"], abs=0.02
    )
    assert summary["models"] == {"complete": 3}


def quickstart(changes):
    """The values of configs/nas_quickstart.py with some changed, given as text."""
    from configs import nas_quickstart

    values = nas_quickstart.get_config().to_dict()
    search = SearchSettings(**values.pop("search"))
    run = RunConfig.from_dict(values).replace({n: v for n, v in changes.items() if not n.startswith("search.")})
    given = {n.removeprefix("search."): v for n, v in changes.items() if n.startswith("search.")}
    typed = {n: type(getattr(search, n))(v) for n, v in given.items()}
    return {**run.to_dict(), "search": {**vars(search), **typed}}


def test_a_config_that_a_search_wrote_is_read():
    spec = importlib.util.spec_from_file_location("best_config", LEGACY / "best_config.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = RunConfig.from_dict(module.get_config().to_dict())
    assert config.model["lanes"] == EXPECTED["search"]["lanes"]["2"]

"""Lanes that collapse: which stay at zero, and what the comparison of settings writes."""

import json

import numpy as np
import pytest
from made_records import ROW

from experiments import lane_collapse
from mlcn_jax.errors import InputError


@pytest.mark.long
def test_a_lane_at_zero_stays_and_others_do_not(tiny):
    dataset = tiny.data.load()
    dead = lane_collapse.follow(tiny, dataset, 0.0, 4)
    assert dead["steps"] == [0, 1, 2, 3, 4]
    assert not np.any(dead["spreads"])
    assert dead["alive"] == 0
    alive = lane_collapse.follow(tiny, dataset, 30.0, 4)
    assert np.all(np.diff(alive["spreads"], axis=0))
    assert alive["alive"] == 2
    assert 0 <= alive["test_accuracy"] <= 100


def test_lane_collapse_writes_after_each_setting_and_names_what_is_unknown(directories, tmp_path, monkeypatch):
    trained = []

    def follow(config, dataset, scale, num_steps):
        trained.append(config.train.optimizer)
        return {"steps": [0, num_steps], "spreads": [[0.1, 0.2], [0.0, 0.3]], "alive": 1, "test_accuracy": 50.0}

    monkeypatch.setattr(lane_collapse, "follow", follow)
    lane_collapse.compare(ROW, ["published", "warm_up"], 2, 0, directories, tmp_path, "command")
    results = json.loads((tmp_path / f"lane_collapse_{ROW}.json").read_text())
    assert [run["setting"] for run in results["runs"]] == ["published", "warm_up"]
    assert results["command"] == "command"
    assert trained == ["adam", "adamw"]
    assert (tmp_path / f"lane_collapse_{ROW}.png").stat().st_size > 1000
    with pytest.raises(InputError, match="--settings: slow is not one of published"):
        lane_collapse.compare(ROW, ["slow"], 2, 0, directories, tmp_path, "command")
    with pytest.raises(InputError, match="--row: fashion_capsnet is not one of cifar_mlcn1_4x4"):
        lane_collapse.compare("fashion_capsnet", ["published"], 2, 0, directories, tmp_path, "command")

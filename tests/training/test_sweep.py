import json
from pathlib import Path

import pytest

from mlcn_jax import files
from mlcn_jax.errors import InputError
from mlcn_jax.training import sweep


def test_grids_are_read():
    text = ' train.learning_rate=1e-3, 3e-4 ;model.lanes="mlcn1:w1,mlcn2:w1",mlcn1:w2*2;'
    assert sweep.parse_grid(text) == {
        "train.learning_rate": ["1e-3", "3e-4"],
        "model.lanes": ["mlcn1:w1,mlcn2:w1", "mlcn1:w2*2"],
    }


@pytest.mark.parametrize("text", ["", ";", "train.seed", "train.seed=", "train.seed=1,,2", "a=1;a=2", "a=1,2,1"])
def test_bad_grids_are_refused(text):
    with pytest.raises(InputError, match="sweep"):
        sweep.parse_grid(text)


@pytest.mark.long
def test_a_sweep_trains_every_point_once_and_goes_on_after_a_failure(tiny, tmp_path, monkeypatch):
    config = tiny.replace({"train.num_steps": 3, "train.checkpoint_every": 0})
    grid = "train.learning_rate=1e-3,1e30;train.seed=0,1"
    rows = sweep.sweep(config, tmp_path, grid)
    assert [(row["train.learning_rate"], row["train.seed"]) for row in rows] == [
        ("1e-3", "0"),
        ("1e-3", "1"),
        ("1e30", "0"),
        ("1e30", "1"),
    ]
    assert all("error" in row for row in rows[2:])
    assert rows[0]["test_accuracy"] != rows[1]["test_accuracy"] or rows[0]["test_loss"] != rows[1]["test_loss"]
    stored = json.loads((tmp_path / "sweep.json").read_text())
    assert stored["rows"] == rows
    assert stored["seeds"] == sweep.over_seeds(rows)
    lines = sweep.table(rows).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("| train.learning_rate | train.seed | test_accuracy |")
    assert "failed" in lines[4]

    def forbidden(*args):
        raise AssertionError("a finished point was compiled again")

    monkeypatch.setattr("mlcn_jax.training.mesh_runner.compile_step", forbidden)
    again = sweep.sweep(config, tmp_path, "train.learning_rate=1e-3;train.seed=0,1")
    assert again == rows[:2]


def test_a_field_that_does_not_exist_stops_before_the_first_point(tiny, tmp_path):
    with pytest.raises(InputError, match=r"train\.sed"):
        sweep.sweep(tiny, tmp_path, "train.sed=1,2")
    assert not list(tmp_path.iterdir())


def trains_nothing(monkeypatch):
    """Makes a sweep write only the folders of its points."""

    def train(config, folder):
        folder.mkdir(parents=True, exist_ok=True)
        return dict.fromkeys(("test_accuracy", "test_loss", "images_per_second", "parameters", "steps"), 0.0)

    monkeypatch.setattr(sweep, "train", train)


def test_names_too_long_for_a_folder_are_shortened_and_stay_apart(tiny, tmp_path, monkeypatch):
    trains_nothing(monkeypatch)
    folders = [tmp_path / name / ("a" * 150) / "run" for name in "ab"]
    rows = sweep.sweep(tiny, tmp_path, f'init_from="{folders[0]},{folders[0]}","{folders[1]},{folders[0]}"')
    assert len({row["workdir"] for row in rows}) == 2
    assert all(len(Path(row["workdir"]).name.encode()) <= 255 for row in rows)


def test_two_sweeps_of_one_workdir_do_not_write_each_others_rows(tiny, tmp_path, monkeypatch):
    trains_nothing(monkeypatch)
    sweep.sweep(tiny, tmp_path, "train.seed=0,1")
    before = (tmp_path / "sweep.json").read_bytes()
    with files.hold(tmp_path), pytest.raises(InputError, match="another process is using"):
        sweep.sweep(tiny, tmp_path, "train.seed=0,1")
    assert (tmp_path / "sweep.json").read_bytes() == before


def test_a_point_that_does_not_fit_the_memory_fails_alone(tiny, tmp_path, monkeypatch):
    def train(config, folder):
        if config.train.batch_size > 100:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return {"test_accuracy": 0.5}

    monkeypatch.setattr(sweep, "train", train)
    rows = sweep.sweep(tiny, tmp_path / "new" / "sweep", "train.batch_size=999,10")
    assert rows[0]["error"].startswith("not enough memory (RESOURCE_EXHAUSTED: out of memory): use model.remat=full")
    assert rows[1]["test_accuracy"] == 0.5


def test_a_sweep_whose_points_fail_at_once_still_tells_why(tiny, tmp_path):
    (row,) = sweep.sweep(tiny, tmp_path / "new", "train.rounds.steps=50")
    assert "rounds" in row["error"]
    assert (tmp_path / "new" / "sweep.json").exists()


def test_folders_have_no_commas(tiny, tmp_path, monkeypatch):
    trains_nothing(monkeypatch)
    sweep.sweep(tiny, tmp_path, 'train.seed=0,1;model.lanes="mlcn1:w1,mlcn2:w1"')
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert [name.partition("__")[0] for name in names] == ["train.seed=0", "train.seed=1"]
    assert not any("," in name for name in names)


@pytest.mark.parametrize("content", [None, "{", '{"rows": [7]}'])
def test_a_sweep_that_is_stopped_again_keeps_the_rows_of_later_points(tiny, tmp_path, monkeypatch, content):
    trains_nothing(monkeypatch)
    path = tmp_path / "sweep.json"
    rows = sweep.sweep(tiny, tmp_path, "train.seed=0,1,2")
    if content:
        path.write_text(content)
    train = sweep.train

    def stopped(config, folder):
        if config.train.seed == 1:
            raise KeyboardInterrupt
        return train(config, folder)

    monkeypatch.setattr(sweep, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(tiny, tmp_path, "train.seed=0,1,2")
    stored = json.loads(path.read_text())
    assert stored["rows"] == (rows[:1] if content else rows)
    assert len(stored["seeds"][0]["seeds"]) == len(stored["rows"])


def test_points_that_an_earlier_version_named_with_commas_are_found(tiny, tmp_path, monkeypatch):
    trains_nothing(monkeypatch)
    (tmp_path / "train.seed=0,train.batch_size=10").mkdir()
    rows = sweep.sweep(tiny, tmp_path, "train.seed=0,1;train.batch_size=10")
    assert [Path(row["workdir"]).name for row in rows] == [
        "train.seed=0,train.batch_size=10",
        "train.seed=1__train.batch_size=10",
    ]


def test_a_workdir_that_cannot_hold_checkpoints_stops_before_the_first_point(tiny, tmp_path):
    with pytest.raises(InputError, match="cannot hold checkpoints"):
        sweep.sweep(tiny, tmp_path / "a\\b", "train.seed=0")


def point(rate, seed, accuracy=None, **more):
    numbers = {"test_accuracy": accuracy, "test_loss": 0.1, "images_per_second": 9.0, "parameters": 5, "steps": 3}
    fields = {"train.learning_rate": rate, "train.seed": seed, "workdir": f"runs/{rate}-{seed}"}
    return {**fields, **(numbers if accuracy is not None else {"error": "the loss is nan"}), **more}


GRID = [point("1", "0"), point("1", "1", 0.5), point("2", "0", 0.7), point("2", "1", 0.9), point("3", "0")]


def test_points_are_sorted_and_the_best_is_named():
    text = sweep.report(GRID)
    rows = [line.split(" | ")[:2] for line in sweep.table(GRID).splitlines()[2:]]
    assert rows == [["| 2", "1"], ["| 2", "0"], ["| 1", "1"], ["| 1", "0"], ["| 3", "0"]]
    assert "best: train.learning_rate=2 train.seed=1, test accuracy 90.00%, in runs/2-1" in text
    assert "best" not in sweep.report(GRID[:1])  # which failed


def test_points_without_the_score_that_ranks_the_others_come_after_them():
    """Fields that decide whether images are held out or the test set is scored can be swept too."""
    unscored = {name: value for name, value in point("1", "0", 0.5).items() if name != "test_accuracy"}
    held_out = point("2", "0", 0.6, validation_accuracy=0.7)
    text = sweep.report([unscored, point("3", "0", 0.9), held_out])
    assert [line.split(" | ")[0] for line in text.splitlines()[2:5]] == ["| 2", "| 1", "| 3"]
    assert "best: train.learning_rate=2 train.seed=0, validation accuracy 70.00%" in text
    assert "best" not in sweep.report([unscored])
    assert sweep.over_seeds([unscored])[0]["mean"] is None
    assert [group["mean"] for group in sweep.over_seeds([point("1", "0", 0.9), held_out])] == [None, 0.7]


def test_mean_and_spread_over_seeds():
    assert sweep.over_seeds(GRID)[1] == {
        "train.learning_rate": "2",
        "seeds": ["0", "1"],
        "failed": [],
        "mean": pytest.approx(0.8),
        "min": 0.7,
        "max": 0.9,
    }
    assert sweep.report(GRID).splitlines()[-3:] == [
        "| 2 | 2 | 0.8 | 0.7 to 0.9 |",
        "| 1 | 1 (1 failed) | 0.5 | 0.5 to 0.5 |",
        "| 3 | 0 (1 failed) |  |  |",
    ]
    without = [{name: value for name, value in row.items() if name != "train.seed"} for row in GRID]
    assert sweep.over_seeds(without) == []
    assert "over seeds" not in sweep.report(without)

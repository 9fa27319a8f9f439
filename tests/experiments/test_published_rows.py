"""The rows of the published table: the settings they are trained with, and the part of the data they see."""

import json

import pytest
from made_records import ROW

from experiments import batch_size, data_parts, lanes_and_width, published_rows, repeated_report, table_4_1
from experiments import table_4_1_tuning as tuning
from mlcn_jax.data import datasets


@pytest.mark.parametrize(
    ("script", "scale"),
    [(table_4_1, "full"), (tuning, "cpu"), (lanes_and_width, "cpu"), (batch_size, "cpu")],
    ids=["table_4_1", "tuning", "lanes_and_width", "batch_size"],
)
def test_what_is_committed_was_trained_with_the_settings_of_today(script, scale, directories):
    """Also by their hashes, which fields that were added since must leave as they are."""
    path = repeated_report.RESULTS / f"{script.__name__.split('.')[-1]}_{scale}.json"
    results = json.loads(path.read_text())
    assert results["version"] == script.VERSION
    for record in results["runs"]:
        length = {f"train.{name}": results["scale"][name] for name in ("num_epochs", "num_steps")}
        config = script.configure_run(directories, **record["facts"]).replace(length)
        assert config.hash() == record["config_hash"], record["facts"]


@pytest.mark.parametrize("name", published_rows.TUNED)
def test_the_last_column_is_tuned_with_a_loss_for_each_lane(name):
    tuned, per_lane = (published_rows.changes(name, column) for column in ("tuned", "tuned_per_lane"))
    assert per_lane.pop("model.margin_loss") == "per_lane"
    assert per_lane == tuned


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_a_part_holds_images_of_every_class_as_they_are(name, directories, tmp_path, monkeypatch):
    row = ROW if name == "fashion_mnist" else "cifar_mlcn1_4x4"
    settings = published_rows.configure_row(row, "published", directories).data
    whole = settings.load()
    monkeypatch.setitem(data_parts._KNOWN_COPIES, datasets.digest(whole.train), "made copy")
    directory, facts = data_parts.prepare(settings, tmp_path, 50, 10)
    part = datasets.load(name, directory=directory)
    assert facts["copy"] == "made copy"
    assert facts["train_images"] == len(part.train.labels) < len(whole.train.labels)
    assert set(part.train.labels) == set(whole.train.labels)
    known = {image.tobytes(): label for image, label in zip(whole.train.images, whole.train.labels, strict=True)}
    assert [known[image.tobytes()] for image in part.train.images] == part.train.labels.tolist()

"""Residual lanes on a folder of pictures: what is written, trained and told."""

import numpy as np
from made_records import PLACE

from experiments import data_parts, own_images
from experiments.published_rows import config_named
from mlcn_jax.data.datasets import load


def test_pictures_are_the_first_of_each_class_and_loaded_as_a_folder_with_a_test_set(directories, tmp_path):
    cifar = load("cifar10", directory=directories["cifar10"])
    own_images.write_pictures(cifar, tmp_path / "runs" / "pictures", 3, 2)
    found = load("folder", directory=str(tmp_path / "runs" / "pictures"), image_size=32)
    assert sorted(found.class_names) == sorted(cifar.class_names)
    for split, whole, most in ((found.train, cifar.train, 3), (found.test, cifar.test, 2)):
        for label, name in enumerate(found.class_names):
            expected = whole.images[whole.labels == cifar.class_names.index(name)][:most]
            np.testing.assert_array_equal(split.images[split.labels == label], expected)
    settings = own_images.configure_run(tmp_path / "runs" / "pictures", "configured", "test", 0).data
    facts = data_parts.prepare(settings, tmp_path / "data", 0, 0)[1]
    assert (facts["copy"], facts["train_images"], facts["test_images"]) == ("", 30, 20)
    assert str(tmp_path) not in str(facts)


def test_validation_leaves_the_test_images_alone_and_the_test_trains_what_is_configured(tmp_path):
    for recipe in own_images.RECIPES:
        config = own_images.configure_run(tmp_path, recipe, "validation", 0)
        assert (config.train.score_test, config.data.validation_fraction) == (False, 0.2)
    config = own_images.configure_run(tmp_path, "configured", "test", 3)
    given = config_named("resnet_folder")
    assert config == given.replace({"data.dir": str(tmp_path), "train.seed": 3})
    assert config.train.score_test


def test_a_line_has_the_means_of_its_seeds():
    def record(seed, accuracy):
        scores = {"accuracy": accuracy, "accuracy_flips": accuracy + 1, "nll": 0.5, "calibration_error": 0.1}
        run = {"lanes": "resnet:w1*4", "epochs": 10, "flops": 2e14, "parameters": 9, "train_seconds": 120.0}
        data = {"train_images": 5000}
        facts = {"recipe": "batch_500", "part": "validation", "seed": seed}
        return PLACE | scores | run | {"facts": facts, "data": data}

    line = own_images.text([record(0, 60.0), record(1, 64.0)]).splitlines()[-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["batch_500, validation images", "4,000", "500", "10", "0.200"]
    assert cells[5].startswith("62.00")
    assert cells[6].startswith("63.00")
    assert cells[-1] == "2"

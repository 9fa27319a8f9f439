"""Folders of images made here."""

import numpy as np
import pytest
from made_files import (
    image_folder,
    write_image,
)
from PIL import Image

from mlcn_jax.data import datasets, folder
from mlcn_jax.errors import InputError

# ---------------------------------------------------------------- folders of images


def test_folder_holds_out_a_fraction_of_each_class(tmp_path):
    root = image_folder(tmp_path, {"dog": 10, "cat": 20})
    dataset = datasets.load("folder", directory=str(root), image_size=6, test_fraction=0.3)
    assert dataset.class_names == ("cat", "dog")
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), [6, 3])
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), [14, 7])
    assert dataset.provenance["bytes"] == "own"
    originals = {np.asarray(Image.open(path)).tobytes(): path.parent.name for path in root.rglob("*.png")}
    assert len(originals) == 30
    for split in (dataset.train, dataset.test):
        for image, label in zip(split.images, split.labels, strict=True):
            assert originals.pop(image.tobytes()) == dataset.class_names[label]
    assert not originals
    again = datasets.load("folder", directory=str(root), image_size=6, test_fraction=0.3)
    np.testing.assert_array_equal(again.test.images, dataset.test.images)


def test_folder_with_a_test_set(tmp_path):
    image_folder(tmp_path / "train", {"a": 3, "b": 4})
    image_folder(tmp_path / "test", {"b": 2})
    dataset = datasets.load("folder", directory=str(tmp_path), test_fraction=0.0)
    assert (len(dataset.train.labels), dataset.test.labels.tolist()) == (7, [1, 1])
    assert dataset.train.images.shape == (7, 32, 32, 3)
    image_folder(tmp_path / "test", {"c": 1})
    with pytest.raises(InputError, match=r"c is not a class of the training set; its classes are a, b"):
        datasets.load("folder", directory=str(tmp_path))


def test_test_images_that_would_not_be_seen_are_named(tmp_path, caplog):
    image_folder(tmp_path / "train", {"a": 3, "b": 4})
    image_folder(tmp_path / "val", {"a": 1})
    image_folder(tmp_path / "train" / "a", {"more": 2})
    datasets.load("folder", directory=str(tmp_path), test_fraction=0.3)
    assert "has other folders beside train, whose images are not used: val" in caplog.text
    assert "a has folders inside, such as more" in caplog.text
    image_folder(tmp_path / "test", {"a": 2, "b": 2})
    datasets.load("folder", directory=str(tmp_path), test_fraction=0.3)
    assert "data.test_fraction does nothing" in caplog.text
    for name in ("a", "b"):
        for path in (tmp_path / "test" / name).iterdir():
            path.rename(tmp_path / "test" / f"{name}{path.name}")
        (tmp_path / "test" / name).rmdir()
    with pytest.raises(InputError, match=r"test has images but no class folders: expected .*test/CLASS/1\.png"):
        datasets.load("folder", directory=str(tmp_path))


def test_folder_with_a_class_called_train(tmp_path):
    image_folder(tmp_path, {"train": 4, "plane": 4})
    assert datasets.load("folder", directory=str(tmp_path)).class_names == ("plane", "train")


def test_folder_ignores_hidden_and_other_files(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2, ".git": 1})
    (tmp_path / "a" / "._000.png").write_bytes(b"resource fork")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    dataset = datasets.load("folder", directory=str(tmp_path))
    assert dataset.class_names == ("a", "b")
    assert len(dataset.train.labels) + len(dataset.test.labels) == 4


def test_folder_with_a_name_that_is_not_utf8_is_refused_before_it_is_trained_on(tmp_path):
    image_folder(tmp_path, {"a": 2, "caf\udce9": 2})
    with pytest.raises(InputError, match="whose name is not UTF-8: rename it"):
        datasets.load("folder", directory=str(tmp_path))


def test_folder_that_does_not_fit_the_memory_says_what_would(tmp_path, monkeypatch):
    def too_large(*arguments):
        raise MemoryError

    monkeypatch.setattr(folder, "_read_images", too_large)
    with pytest.raises(
        InputError, match=r"the 4 images .* at 64 pixels do not fit .* smaller --config\.data\.image_size"
    ):
        datasets.load("folder", directory=str(image_folder(tmp_path, {"a": 2, "b": 2})), image_size=64)


def test_folder_at_a_size_that_no_picture_can_have_is_told_so(tmp_path):
    with pytest.raises(InputError, match=r"the 4 images .* at 2147483648 pixels do not fit"):
        datasets.load("folder", directory=str(image_folder(tmp_path, {"a": 2, "b": 2})), image_size=2**31)


def test_folder_is_gray_only_if_every_image_is(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2}, channels=1)
    gray = datasets.load("folder", directory=str(tmp_path), image_size=6)
    assert gray.train.images.shape == (2, 6, 6, 1)
    write_image(tmp_path / "a" / "color.JPG", np.full((9, 9, 3), (250, 0, 0), np.uint8))
    mixed = datasets.load("folder", directory=str(tmp_path), image_size=6).train.images
    assert mixed.shape[-1] == 3
    is_gray = (mixed == mixed[..., :1]).all(axis=(1, 2, 3))
    assert is_gray.any()


def test_folder_respects_orientation_and_16_bits(tmp_path):
    array = np.zeros((8, 8, 3), np.uint8)
    array[:4] = 255  # Bright above; orientation 6 says that the camera was turned, so bright is right.
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = np.full((8, 8), 0x8040, np.uint16)
    for i in range(2):
        write_image(tmp_path / "turned" / f"{i}.png", array, exif=exif)
        write_image(tmp_path / "deep" / f"{i}.png", deep)
    dataset = datasets.load("folder", directory=str(tmp_path), image_size=8)
    deep_image, turned = dataset.train.images
    np.testing.assert_array_equal(deep_image, 0x80)
    np.testing.assert_array_equal(turned, np.rot90(array, -1))


def test_folder_with_one_class(tmp_path):
    image_folder(tmp_path, {"only": 5})
    with pytest.raises(InputError, match=r"has too few class folders \(only\); expected at least 2"):
        datasets.load("folder", directory=str(tmp_path))


def test_every_kind_that_predict_reads_is_trained_on_and_others_are_named(tmp_path, caplog):
    image_folder(tmp_path, {"a": 1, "b": 6})
    for suffix in (".webp", ".bmp", ".gif"):
        Image.open(tmp_path / "a" / "000.png").save(tmp_path / "a" / f"again{suffix}", lossless=True)
    (tmp_path / "a" / "notes.txt").write_text("none")
    dataset = datasets.load("folder", directory=str(tmp_path), image_size=6, test_fraction=0.25)
    first = dataset.class_names.index("a")
    assert sum((split.labels == first).sum() for split in (dataset.train, dataset.test)) == 4
    assert "a: 1 of its files are of other kinds and not used, such as notes.txt" in caplog.text


def test_folder_with_an_empty_class(tmp_path):
    image_folder(tmp_path, {"a": 2})
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no images; expected files ending in \.png"):
        datasets.load("folder", directory=str(tmp_path))


def test_images_that_cannot_fit_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    image_folder(tmp_path, {"a": 2, "b": 2})
    monkeypatch.setattr(folder.host, "machine_memory_bytes", lambda: 2 * 4 * 20**2)
    datasets.load("folder", directory=str(tmp_path), image_size=20)
    monkeypatch.setattr(folder, "_read_images", None)
    with pytest.raises(InputError, match=r"the 4 images of .* at 21 pixels do not fit this machine's memory"):
        datasets.load("folder", directory=str(tmp_path), image_size=21)


def test_unreadable_images_are_counted_and_named(tmp_path):
    image_folder(tmp_path, {"a": 6, "b": 2})
    for i in range(4):
        path = tmp_path / "a" / f"{i:03}.png"
        path.write_bytes(path.read_bytes()[:60] if i else b"")
    with pytest.raises(
        InputError, match=r"(?s)4 of 8 images cannot be used.*000\.png: it .*002\.png: it .*\.\.\."
    ) as error:
        datasets.load("folder", directory=str(tmp_path))
    assert "003.png" not in str(error.value)


def test_class_with_too_few_images(tmp_path):
    image_folder(tmp_path, {"many": 5, "rare": 1})
    with pytest.raises(InputError, match="Class 'rare' has 1 image"):
        datasets.load("folder", directory=str(tmp_path))


def test_folder_without_any_test_set(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(InputError, match="no test folder, and test_fraction is 0"):
        datasets.load("folder", directory=str(tmp_path), test_fraction=0.0)


def test_a_picture_with_too_many_pixels_is_told_so(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (40, 40)).save(tmp_path / name / "1.png")
    monkeypatch.setattr("mlcn_jax.data.images.MAX_PIXELS", 100)
    with pytest.raises(InputError, match=r"1\.png: it has more than .*40x40.*make it smaller first"):
        folder.read_folder(tmp_path, 32)

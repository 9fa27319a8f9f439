"""The pictures of a test set."""

import numpy as np
import pytest
from made_params import made_params
from PIL import Image

from mlcn_jax.data.batches import Split
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.training import pictures
from mlcn_jax.training.evaluate import Scores

pytestmark = pytest.mark.usefixtures("real_pictures")


@pytest.mark.parametrize(("class_names", "rotation"), [(("0", "1"), 0), (("cat", "horse"), 90)])
def test_short_names_of_classes_are_upright_in_the_confusion_matrix(tmp_path, monkeypatch, class_names, rotation):
    drawn = []
    monkeypatch.setattr(pictures, "write_figure", lambda figure, path, **how: drawn.append(figure))
    pictures.save_confusion(tmp_path / "confusion.png", Scores(0.1, np.array([[3, 1], [0, 2]])), class_names)
    labels = drawn[0].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == list(class_names)
    assert {label.get_rotation() for label in labels} == {rotation}


def test_names_of_classes_are_drawn_as_they_are(tmp_path, monkeypatch):
    """Two dollar signs would begin and end a formula, which here is none."""
    drawn, names = [], ("$10_$20", "$20_$30")
    monkeypatch.setattr(pictures, "write_figure", lambda figure, path, **how: drawn.append(figure))
    spec = ModelSpec("mlcn", (17, 17, 1), 2, "mlcn1:w1*1", decoder=(4,))
    split = Split(np.zeros((2, 17, 17, 1), np.uint8), np.array([0, 1]))
    pictures.save_confusion(tmp_path / "confusion.png", Scores(0.1, np.array([[3, 1], [0, 2]])), names)
    pictures.save_reconstructions(tmp_path / "reconstructions.png", spec, made_params(spec), split, names)
    for figure in drawn:
        figure.draw_without_rendering()
    assert drawn[0].axes[0].get_xticklabels()[0].get_text() == names[0]


def test_classes_without_test_images_are_left_out_of_the_reconstructions(tmp_path):
    spec = ModelSpec("mlcn", (17, 17, 1), 12, "mlcn1:w1*1", decoder=(4,))
    split = Split(np.zeros((2, 17, 17, 1), np.uint8), np.array([11, 11]))
    names = [str(i) for i in range(12)]
    pictures.save_reconstructions(tmp_path / "reconstructions.png", spec, made_params(spec), split, names)
    assert Image.open(tmp_path / "reconstructions.png").width > 100


def test_the_colour_bar_is_as_tall_as_the_confusion_matrix_and_the_top_is_not_blank(tmp_path):
    pictures.save_confusion(tmp_path / "confusion.png", Scores(0.1, np.array([[3, 1], [0, 2]])), ("0", "1"))
    pixels = np.asarray(Image.open(tmp_path / "confusion.png").convert("RGB")).astype(int)
    colored = np.abs(pixels - pixels.mean(axis=-1, keepdims=True)).max(axis=-1) > 20
    columns = np.flatnonzero(colored.any(axis=0))
    heights = [np.ptp(np.flatnonzero(colored[:, column])) for column in (columns[0] + 5, columns[-1] - 5)]
    assert heights[0] == pytest.approx(heights[1], abs=4)
    assert np.flatnonzero((pixels < 128).any(axis=(1, 2)))[0] < 0.1 * len(pixels)

"""The pictures of a test set."""

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from mlcn_jax.training import pictures
from mlcn_jax.training.evaluate import Scores

pytestmark = pytest.mark.usefixtures("real_pictures")


@pytest.mark.parametrize(("class_names", "rotation"), [(("0", "1"), 0), (("cat", "horse"), 90)])
def test_short_names_of_classes_are_upright_in_the_confusion_matrix(tmp_path, monkeypatch, class_names, rotation):
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path, **how: drawn.append(figure))
    pictures.save_confusion(tmp_path / "confusion.png", Scores(0.1, np.array([[3, 1], [0, 2]])), class_names)
    labels = drawn[0].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == list(class_names)
    assert {label.get_rotation() for label in labels} == {rotation}


def test_the_colour_bar_is_as_tall_as_the_confusion_matrix_and_the_top_is_not_blank(tmp_path):
    pictures.save_confusion(tmp_path / "confusion.png", Scores(0.1, np.array([[3, 1], [0, 2]])), ("0", "1"))
    pixels = np.asarray(Image.open(tmp_path / "confusion.png").convert("RGB")).astype(int)
    colored = np.abs(pixels - pixels.mean(axis=-1, keepdims=True)).max(axis=-1) > 20
    columns = np.flatnonzero(colored.any(axis=0))
    heights = [np.ptp(np.flatnonzero(colored[:, column])) for column in (columns[0] + 5, columns[-1] - 5)]
    assert heights[0] == pytest.approx(heights[1], abs=4)
    assert np.flatnonzero((pixels < 128).any(axis=(1, 2)))[0] < 0.1 * len(pixels)

import contextlib
import importlib.util
import io
import warnings

import numpy as np
import pytest
from made_files import huge_png
from PIL import Image

from mlcn_jax.data import images
from mlcn_jax.errors import InputError


@pytest.fixture
def gradient():
    return np.arange(24 * 30, dtype=np.uint8).reshape(24, 30)


def test_a_picture_of_the_right_size_comes_out_as_it_went_in(tmp_path, gradient):
    path = tmp_path / "a.png"
    Image.fromarray(gradient).save(path)
    np.testing.assert_array_equal(images.read_pixels(path, (24, 30, 1))[..., 0], gradient)
    np.testing.assert_array_equal(images.read_pixels(path.read_bytes(), (24, 30, 3)), gradient[..., None] * [1, 1, 1])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_and_size_is_made_to_fit(tmp_path, gradient, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.fromarray(gradient).convert(mode).save(path)
    for shape in ((18, 18, 1), (20, 40, 3)):
        pixels = images.read_pixels(path, shape)
        assert pixels.shape == shape
        assert pixels.dtype == np.uint8
        assert pixels.std() > 10


def test_sixteen_bits_are_scaled_not_clipped(tmp_path, gradient):
    Image.fromarray(gradient.astype(np.uint16) * 257).save(tmp_path / "a.png")
    np.testing.assert_array_equal(images.read_pixels(tmp_path / "a.png", (24, 30, 1))[..., 0], gradient)


def test_pictures_are_turned_upright(tmp_path, gradient):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.fromarray(gradient).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(images.read_pixels(tmp_path / "a.png", (30, 24, 1))[..., 0], np.rot90(gradient, -1))


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    for size in ((10_000, 10_001), (100_000, 100_000)):
        with pytest.raises(InputError, match="more than 50 megapixels"):
            images.read_pixels(huge_png(*size), (28, 28, 1))


@pytest.mark.parametrize("kind", [{"lossless": True}, {"lossless": False}, {"save_all": True}])
def test_a_webp_whose_header_says_too_much_is_not_opened(monkeypatch, kind):
    file = io.BytesIO()
    more = {"append_images": [Image.new("RGB", (37, 21), "red")]} if "save_all" in kind else {}
    Image.new("RGB", (37, 21)).save(file, "WEBP", **kind, **more)
    assert images.read_pixels(file.getvalue(), (28, 28, 1)).shape == (28, 28, 1)
    monkeypatch.setattr(images, "MAX_PIXELS", 37 * 21)
    assert images.upright(file.getvalue()).size == (37, 21)
    monkeypatch.setattr(images, "MAX_PIXELS", 37 * 21 - 1)
    monkeypatch.setattr(Image, "open", lambda *a, **k: pytest.fail("opened, which takes memory for all pixels"))
    with pytest.raises(InputError, match=r"37x21"):
        images.upright(file.getvalue())


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 2**20)
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(2**21)
    with pytest.raises(InputError, match="has 2 MiB; at most 1 MiB"):
        images.read_pixels(tmp_path / "a.png", (28, 28, 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not an image"),
        (b"PK\x03\x04 a zip archive", "not an image"),
        (b"plain text", "not an image"),
        (huge_png(20, 20)[:40], "cannot be read|not an image"),
    ],
)
def test_what_is_no_picture_is_refused(content, expected):
    with pytest.raises(InputError, match=expected):
        images.read_pixels(content, (28, 28, 1))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        images.read_pixels(tmp_path / "a.png", (28, 28, 1))
    with pytest.raises(InputError, match="not a file"):
        images.read_pixels(tmp_path, (28, 28, 1))
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        images.read_pixels(tmp_path / ("a" * 300), (28, 28, 1))


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path, gradient):
    palette = Image.fromarray(gradient).convert("RGB").quantize(64)
    palette.save(tmp_path / "opaque.png")
    palette.save(tmp_path / "some.png", transparency=bytes(range(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = [np.asarray(images.upright(tmp_path / name)) for name in ("opaque.png", "some.png")]
    np.testing.assert_array_equal(*read)


def test_pillows_warning_is_silenced_once():
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        images.ignore_pillows_warning()
        before = list(warnings.filters)
        images.ignore_pillows_warning()
        assert warnings.filters == before
        with contextlib.suppress(Image.DecompressionBombError):
            Image.open(io.BytesIO(huge_png(10_000, 10_000)))
    assert not shown


def test_loading_the_module_leaves_the_warning_filters_as_they_are():
    spec = importlib.util.find_spec("mlcn_jax.data.images")
    before = list(warnings.filters)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert warnings.filters == before


def test_too_little_memory_is_not_taken_for_a_damaged_picture(monkeypatch):
    def fail(image):
        raise MemoryError

    monkeypatch.setattr(images.ImageOps, "exif_transpose", fail)
    file = io.BytesIO()
    Image.new("L", (3, 3)).save(file, "PNG")
    with pytest.raises(MemoryError):
        images.upright(file.getvalue())

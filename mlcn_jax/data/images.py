"""Reads one picture, a file or its bytes, as the pixels a model takes; rejects large ones before decoding them.

Needs numpy and Pillow only.
"""

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mlcn_jax.errors import InputError

MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def read_pixels(source: Path | bytes, image_shape: tuple[int, int, int]) -> np.ndarray:
    """A picture in the shape of a model's images, as in training.

    Turned upright according to its EXIF orientation, converted to gray or RGB, and resized without keeping its
    proportions. Only the first frame of an animation is used; transparency is ignored.

    Args:
      source: a file, or a file's bytes: PNG, JPEG, WebP, BMP or GIF.
      image_shape: height, width and channels, 1 or 3.

    Returns:
      uint8 [height, width, channels].

    Raises:
      InputError: it is not such a picture, is damaged, or exceeds `MAX_FILE_BYTES` or `MAX_PIXELS`.
    """
    height, width, channels = image_shape
    image = upright(source).convert("L" if channels == 1 else "RGB")
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)).reshape(image_shape)


def upright(source: Path | bytes) -> Image.Image:
    """A picture turned upright by its EXIF orientation, gray if it has no color, else RGB; raises as `read_pixels`."""
    contents = source if isinstance(source, bytes) else _read(source)
    if len(contents) > MAX_FILE_BYTES:
        raise _too_large(len(contents))
    ignore_pillows_warning()
    try:
        _check_pixels(*_webp_size(contents))
        with Image.open(io.BytesIO(contents), formats=FORMATS) as file:
            _check_pixels(file.width, file.height)
            image = ImageOps.exif_transpose(file)
    except Image.DecompressionBombError as error:
        raise InputError(
            f"it has more than {MAX_PIXELS // 10**6} megapixels ({error}): make it smaller first"
        ) from error
    except UnidentifiedImageError as error:
        raise InputError(f"it is not an image: {', '.join(FORMATS)} are supported") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file, above all its EXIF, can surface as almost any exception
        raise InputError(f"it cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow clips to 8 instead of scaling
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image.info.pop("transparency", None)  # of a palette, about which Pillow warns
    return image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")


def ignore_pillows_warning() -> None:
    """Silences Pillow's warning of many pixels: `MAX_PIXELS`, which raises, is below its limit.

    Python's filters belong to the whole process and are not safe to change from several threads: a program that reads
    pictures in threads calls this before it starts them.
    """
    if not any(category is Image.DecompressionBombWarning for _, _, category, _, _ in warnings.filters):
        warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise InputError("it is not a file" if path.exists() else "there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _too_large(path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}") from error


def _too_large(num_bytes: int) -> InputError:
    return InputError(f"it has {num_bytes / 2**20:.0f} MiB; at most {MAX_FILE_BYTES // 2**20} MiB are read")


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise Image.DecompressionBombError(f"{width}x{height}")


def _webp_size(contents: bytes) -> tuple[int, int]:
    """Width and height from the header of a WebP (Pillow allocates memory as soon as it opens one), or zeros.

    Source: RFC 9649, sections 2.5 to 2.7.
    """
    if len(contents) < 30 or contents[:4] != b"RIFF" or contents[8:12] != b"WEBP":
        return 0, 0

    def number(start: int, stop: int) -> int:
        return int.from_bytes(contents[start:stop], "little")

    kind = contents[12:16]
    if kind == b"VP8X":
        return 1 + number(24, 27), 1 + number(27, 30)
    if kind == b"VP8L":
        return 1 + (number(21, 25) & 0x3FFF), 1 + (number(21, 25) >> 14 & 0x3FFF)
    return number(26, 28) & 0x3FFF, number(28, 30) & 0x3FFF

"""Small files of every format that datasets come in, made here."""

import base64
import dataclasses
import gzip
import hashlib
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mlcn_jax.data import sources


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def idx_files(num_train: int = 20, num_test: int = 10, size: int = 5) -> dict[str, bytes]:
    """The four files of a small MNIST."""
    rng = np.random.default_rng(0)
    files = {}
    for part, n in (("train", num_train), ("t10k", num_test)):
        files[f"{part}-images-idx3-ubyte"] = idx_bytes(rng.integers(0, 256, (n, size, size)))
        files[f"{part}-labels-idx1-ubyte"] = idx_bytes(np.arange(n) % 10)
    return files


def write_files(folder: Path, files: dict[str, bytes], zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def cifar_arrays(n: int, num_labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.stack([rng.integers(0, 10 * (i + 1), n) for i in range(num_labels)], axis=1)
    return rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), labels


def cifar_bytes(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Written byte by byte: labels, then the red, the green and the blue plane, each row by row."""
    records = []
    for image, image_labels in zip(images, labels, strict=True):
        planes = [image[:, :, channel].tobytes() for channel in range(3)]
        records.append(bytes(image_labels.tolist()) + b"".join(planes))
    return b"".join(records)


def cifar10_files() -> dict[str, bytes]:
    files = {f"data_batch_{i}.bin": cifar_bytes(*cifar_arrays(4, 1, seed=i)) for i in range(1, 6)}
    return files | {"test_batch.bin": cifar_bytes(*cifar_arrays(3, 1, seed=6))}


def cifar100_files() -> dict[str, bytes]:
    return {"train.bin": cifar_bytes(*cifar_arrays(7, 2)), "test.bin": cifar_bytes(*cifar_arrays(3, 2, 1))}


def tar_bytes(folder: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def make_official(monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes], **changes) -> None:
    """Makes `files` the official content of dataset `name`."""
    sha256 = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    source = dataclasses.replace(sources.SOURCES[name], files=sha256, **changes)
    monkeypatch.setitem(sources.SOURCES, name, source)


def write_image(path: Path, array: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def huge_png(width: int, height: int) -> bytes:
    """A valid header of so many pixels and next to no data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def image_folder(root: Path, counts: dict[str, int], channels: int = 3) -> Path:
    rng = np.random.default_rng(0)
    shape = (6, 6) if channels == 1 else (6, 6, 3)
    for name, count in counts.items():
        for i in range(count):
            write_image(root / name / f"{i:03}.png", rng.integers(0, 256, shape, dtype=np.uint8))
    return root


# Requests with pictures, as clients send them.
JSON = {"Content-Type": "application/json"}
RAW = {"Content-Type": "image/png"}
FORM = {"Content-Type": "multipart/form-data; boundary=XX"}


def form(files):
    parts = [
        b'--XX\r\nContent-Disposition: form-data; name="%d"; filename="a.png"\r\n\r\n%s\r\n' % (i, file)
        for i, file in enumerate(files)
    ]
    return b"".join(parts) + b"--XX--\r\n"


def in_json(files):
    return json.dumps({"images": [base64.b64encode(file).decode() for file in files]})

"""Datasets, batches and augmentation, on files and servers made here, and on real data where it is found."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import itertools
import os
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from mlcn_jax import data, data_files
from mlcn_jax.errors import InputError

# ---------------------------------------------------------------- files made here


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
    source = dataclasses.replace(data_files.SOURCES[name], files=sha256, **changes)
    monkeypatch.setitem(data_files.SOURCES, name, source)


def write_image(path: Path, array: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def image_folder(root: Path, counts: dict[str, int], channels: int = 3) -> Path:
    rng = np.random.default_rng(0)
    shape = (6, 6) if channels == 1 else (6, 6, 3)
    for name, count in counts.items():
        for i in range(count):
            write_image(root / name / f"{i:03}.png", rng.integers(0, 256, shape, dtype=np.uint8))
    return root


# ---------------------------------------------------------------- IDX


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)))
@settings(max_examples=50, deadline=None)
def test_idx_round_trip(array):
    parsed = data_files.parse_idx(idx_bytes(array), "file", array.ndim)
    np.testing.assert_array_equal(parsed, array)
    assert parsed.dtype == np.uint8
    assert parsed.shape == array.shape


@given(content=st.binary(max_size=40), rank=st.sampled_from([1, 3]))
@settings(max_examples=200, deadline=None)
def test_idx_of_any_bytes_parses_or_says_why(content, rank):
    for candidate in (content, struct.pack(">HBB", 0, 8, rank) + content):
        with contextlib.suppress(InputError):
            assert data_files.parse_idx(candidate, "file", rank).ndim == rank


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
def test_mnist_is_found_in_known_places(tmp_path, folder, zipped):
    files = idx_files()
    write_files(tmp_path / folder, files, zipped)
    dataset = data.load("mnist", directory=str(tmp_path))
    assert dataset.train.images.shape == (20, 5, 5, 1)
    assert dataset.test.images.shape == (10, 5, 5, 1)
    assert (dataset.train.images.dtype, dataset.train.labels.dtype) == (np.uint8, np.int32)
    assert dataset.train.images.tobytes() == files["train-images-idx3-ubyte"][16:]
    np.testing.assert_array_equal(dataset.test.labels, np.arange(10))


def test_mnist_with_dots_in_its_names(tmp_path):
    write_files(tmp_path, {name.replace("-idx", ".idx"): content for name, content in idx_files().items()})
    assert len(data.load("mnist", directory=str(tmp_path)).train.labels) == 20


def test_other_bytes_than_the_official_ones_are_used_and_reported(tmp_path, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files)
    write_files(tmp_path, files)
    assert data.load("mnist", directory=str(tmp_path)).provenance["bytes"] == "official"
    other = idx_files(num_test=7)["t10k-images-idx3-ubyte"]
    labels = idx_files(num_test=7)["t10k-labels-idx1-ubyte"]
    write_files(tmp_path, {"t10k-images-idx3-ubyte": other, "t10k-labels-idx1-ubyte": labels})
    dataset = data.load("mnist", directory=str(tmp_path))
    assert dataset.provenance["bytes"] == "not official"
    assert "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte" in dataset.provenance["note"]
    assert "train" not in dataset.provenance["note"]
    assert len(dataset.test.images) == 7


def test_truncated_idx_names_file_and_sizes(tmp_path):
    files = idx_files()
    files["train-images-idx3-ubyte"] = files["train-images-idx3-ubyte"][:-3]
    write_files(tmp_path, files)
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.*20 x 5 x 5.*516 bytes.*has 513"):
        data.load("mnist", directory=str(tmp_path))


def test_idx_with_trailing_bytes(tmp_path):
    with pytest.raises(InputError, match=r"labels.*11 bytes are expected, but it has 12"):
        data_files.parse_idx(idx_bytes(np.zeros(3)) + b"\0", "labels", 1)


def test_another_kind_of_file_is_not_idx(tmp_path):
    write_files(tmp_path, idx_files() | {"train-labels-idx1-ubyte": b"<html>Not found</html>"})
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte.*not an IDX file.*expected 0x00000801"):
        data.load("mnist", directory=str(tmp_path))


@pytest.mark.parametrize("damage", ["truncate", "flip", "plain"])
def test_damaged_gzip_names_file_and_sizes(tmp_path, damage):
    write_files(tmp_path, idx_files(), zipped=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-6] ^= 0xFF  # In the checksum at the end.
    else:
        content = bytearray(b"not gzip at all")
    path.write_bytes(content)
    message = rf"t10k-images-idx3-ubyte\.gz \({len(content):,} bytes\) is truncated.*at least 7,840,016"
    with pytest.raises(InputError, match=message):
        data.load("mnist", directory=str(tmp_path))


def test_labels_out_of_range(tmp_path):
    labels = np.arange(20) % 10
    labels[[4, 9]] = 37, 200
    write_files(tmp_path, idx_files() | {"train-labels-idx1-ubyte": idx_bytes(labels)})
    with pytest.raises(InputError, match=r"training set has 2 labels out.*position 4, is 37; expected 0 to 9"):
        data.load("mnist", directory=str(tmp_path))


def test_images_and_labels_of_different_number(tmp_path):
    write_files(tmp_path, idx_files() | {"t10k-labels-idx1-ubyte": idx_bytes(np.zeros(9))})
    with pytest.raises(InputError, match="test set has 10 images but 9 labels"):
        data.load("mnist", directory=str(tmp_path))


def test_images_of_different_size_in_the_splits(tmp_path):
    write_files(tmp_path, idx_files() | {"t10k-images-idx3-ubyte": idx_bytes(np.zeros((10, 6, 5)))})
    with pytest.raises(InputError, match=r"\(5, 5, 1\), but test images \(6, 5, 1\)"):
        data.load("mnist", directory=str(tmp_path))


def test_no_images(tmp_path):
    write_files(tmp_path, idx_files(num_test=0))
    with pytest.raises(InputError, match="test set has no images"):
        data.load("mnist", directory=str(tmp_path))


def test_missing_files_are_named(tmp_path):
    files = idx_files()
    del files["t10k-labels-idx1-ubyte"]
    write_files(tmp_path / "mnist", files)
    with pytest.raises(InputError, match=r"lack t10k-labels-idx1-ubyte\. Put.*--config\.data\.dir="):
        data.load("mnist", directory=str(tmp_path))


# ---------------------------------------------------------------- CIFAR


@pytest.mark.parametrize("layout", ["folder", "itself", "archive"])
def test_cifar10(tmp_path, layout):
    files = cifar10_files()
    if layout == "archive":
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_bytes("cifar-10-batches-bin", files))
    else:
        write_files(tmp_path / ("cifar-10-batches-bin" if layout == "folder" else "."), files)
    dataset = data.load("cifar10", directory=str(tmp_path))
    expected = [cifar_arrays(4, 1, seed=i) for i in range(1, 6)]
    np.testing.assert_array_equal(dataset.train.images, np.concatenate([images for images, _ in expected]))
    np.testing.assert_array_equal(dataset.train.labels, np.concatenate([labels[:, 0] for _, labels in expected]))
    np.testing.assert_array_equal(dataset.test.images, cifar_arrays(3, 1, seed=6)[0])
    assert dataset.train.images.flags.c_contiguous
    assert dataset.train.labels.dtype == np.int32
    assert dataset.class_names[3] == "cat"
    assert dataset.provenance["bytes"] == "not official"


def test_cifar100_fine_and_coarse(tmp_path):
    write_files(tmp_path / "cifar-100-binary", cifar100_files())
    images, labels = cifar_arrays(7, 2)
    fine = data.load("cifar100", directory=str(tmp_path))
    coarse = data.load("cifar100", directory=str(tmp_path), label_kind="coarse")
    np.testing.assert_array_equal(coarse.train.labels, labels[:, 0])
    np.testing.assert_array_equal(fine.train.labels, labels[:, 1])
    np.testing.assert_array_equal(fine.train.images, images)
    assert (len(fine.class_names), len(coarse.class_names)) == (100, 20)
    assert "Not checked" in fine.provenance["note"]
    with pytest.raises(InputError, match=r"'medium'; expected 'fine' or 'coarse'"):
        data.load("cifar100", directory=str(tmp_path), label_kind="medium")


def test_cifar100_archive_is_checked_as_a_whole(tmp_path, monkeypatch):
    content = tar_bytes("cifar-100-binary", cifar100_files())
    archive = tmp_path / "cifar-100-binary.tar.gz"
    archive.write_bytes(content)
    assert data.load("cifar100", directory=str(tmp_path)).provenance == {
        "bytes": "not official",
        "note": "The SHA-256 of cifar-100-binary.tar.gz is not the official one.",
    }
    sha256 = hashlib.sha256(content).hexdigest()
    source = dataclasses.replace(data_files.SOURCES["cifar100"], archive_sha256=sha256)
    monkeypatch.setitem(data_files.SOURCES, "cifar100", source)
    assert data.load("cifar100", directory=str(tmp_path)).provenance["bytes"] == "official"


def test_only_expected_regular_members_are_read_and_nothing_is_written(tmp_path):
    buffer = io.BytesIO(tar_bytes("cifar-100-binary", {"train.bin": cifar100_files()["train.bin"]}))
    plain = io.BytesIO(gzip.decompress(buffer.getvalue()))
    with tarfile.open(fileobj=plain, mode="a:") as archive:
        link = tarfile.TarInfo("cifar-100-binary/test.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "train.bin"
        archive.addfile(link)
        escape = tarfile.TarInfo("../escaped.txt")
        escape.size = 4
        archive.addfile(escape, io.BytesIO(b"evil"))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "cifar-100-binary.tar.gz").write_bytes(gzip.compress(plain.getvalue()))
    with pytest.raises(InputError, match=r"no regular member test\.bin"):
        data.load("cifar100", directory=str(folder))
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "cifar-100-binary.tar.gz"]


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.999])
def test_truncated_archive(tmp_path, keep):
    content = tar_bytes("cifar-10-batches-bin", cifar10_files())
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content[: int(keep * len(content))])
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz .*truncated or corrupted.*184,380,000"):
        data.load("cifar10", directory=str(tmp_path))


def test_cifar_of_incomplete_records(tmp_path):
    files = cifar10_files()
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:-1]
    write_files(tmp_path, files)
    with pytest.raises(InputError, match=r"data_batch_3\.bin.*has 12,291 bytes.*records of 3,073"):
        data.load("cifar10", directory=str(tmp_path))


def test_class_names():
    names = data_files.DIGITS, data_files.FASHION_MNIST, data_files.CIFAR10
    assert [len(set(each)) for each in names] == [10, 10, 10]
    assert len(set(data_files.CIFAR100_FINE)) == len(data_files.CIFAR100_FINE) == 100
    assert len(set(data_files.CIFAR100_COARSE)) == len(data_files.CIFAR100_COARSE) == 20
    assert list(data_files.CIFAR100_FINE) == sorted(data_files.CIFAR100_FINE)
    assert list(data_files.CIFAR100_COARSE) == sorted(data_files.CIFAR100_COARSE)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fashion-mnist", {}, r"'fashion-mnist'; known are mnist, .*folder\. Did you mean 'fashion_mnist'\?"),
        ("zzz", {}, r"'zzz'; known are mnist, [^?]*$"),
        ("digits", {"test_fraction": 1.0}, r"test_fraction is 1\.0; expected at least 0 and less than 1"),
        ("digits", {"test_fraction": -0.1}, r"test_fraction is -0\.1"),
        ("digits", {"test_fraction": float("nan")}, r"test_fraction is nan"),
        ("digits", {"image_size": 32}, r"image_size is 32; expected 0"),
        ("folder", {"image_size": -1}, r"image_size is -1"),
        ("folder", {}, r"'folder' needs --config\.data\.dir"),
        ("mnist", {"directory": "no/such/folder"}, r"--config\.data\.dir=no/such/folder is not an existing"),
    ],
)
def test_bad_arguments(name, options, message):
    with pytest.raises(InputError, match=message):
        data.load(name, **options)


# ---------------------------------------------------------------- downloads


@dataclasses.dataclass
class Server:
    folder: Path
    url: str
    requests: list[str]


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """Serves `tmp_path/served` on the loopback interface and keeps a list of what was asked for."""
    requests: list[str] = []
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def send_header(self, keyword, value):
            if keyword == "Content-Length" and self.path.startswith("/short/"):
                value = str(int(value) + 100)
            super().send_header(keyword, value)

        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Server(folder, f"http://127.0.0.1:{httpd.server_port}/", requests)
        httpd.shutdown()
        thread.join()


def test_download_once_then_use_the_cache(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(server.url,))
    write_files(server.folder, files, zipped=True)
    cache = tmp_path / "cache"
    first = data.load("mnist", cache_dir=str(cache))
    assert len(server.requests) == 4
    second = data.load("mnist", cache_dir=str(cache))
    assert len(server.requests) == 4
    np.testing.assert_array_equal(first.train.images, second.train.images)
    assert first.provenance["bytes"] == second.provenance["bytes"] == "official"
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(f"{name}.gz" for name in files)
    assert len(data.load("mnist", directory=str(cache)).train.labels) == 20  # The cache is a data directory.


def test_download_of_an_archive_into_the_folder_named_by_the_environment(tmp_path, server, monkeypatch):
    content = tar_bytes("cifar-10-batches-bin", cifar10_files())
    make_official(monkeypatch, "cifar10", cifar10_files(), base_urls=(server.url,))
    (server.folder / "cifar-10-binary.tar.gz").write_bytes(content)
    monkeypatch.setenv("MLCN_JAX_CACHE", str(tmp_path / "cache"))
    assert data.load("cifar10").provenance["bytes"] == "official"
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["cifar10", "cifar-10-binary.tar.gz"]


def test_wrong_bytes_of_one_mirror_are_fetched_from_the_next(tmp_path, server, monkeypatch):
    files = idx_files()
    urls = (f"{server.url}bad/", f"{server.url}good/")
    make_official(monkeypatch, "mnist", files, base_urls=urls)
    write_files(server.folder / "bad", idx_files(num_train=30), zipped=True)
    write_files(server.folder / "good", files, zipped=True)
    dataset = data.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert dataset.provenance["bytes"] == "official"
    assert len(dataset.train.labels) == 20
    assert "/good/train-images-idx3-ubyte.gz" in server.requests


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bad", r"train-images-idx3-ubyte is not the official one"),
        ("cut", r"truncated or corrupted"),
        ("missing", r"404"),
        ("short", r"connection closed after [\d,]+ of [\d,]+ bytes"),
    ],
)
def test_failed_download_says_why_and_leaves_nothing(tmp_path, server, monkeypatch, fault, message):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(f"{server.url}{fault}/",))
    if fault == "bad":
        write_files(server.folder / fault, idx_files(num_train=30), zipped=True)
    elif fault != "missing":
        write_files(server.folder / fault, files, zipped=True)
    if fault == "cut":
        path = server.folder / fault / "train-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=message) as error:
        data.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert "--config.data.dir=" in str(error.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_without_network_the_files_to_provide_are_named(tmp_path, monkeypatch):
    source = dataclasses.replace(data_files.SOURCES["cifar10"], base_urls=("http://127.0.0.1:9/",))
    monkeypatch.setitem(data_files.SOURCES, "cifar10", source)
    message = r"cifar10: .*data_batch_1\.bin.*cifar-10-binary\.tar\.gz, into a folder.*--config\.data\.dir="
    with pytest.raises(InputError, match=message):
        data.load("cifar10", cache_dir=str(tmp_path))


def test_leftovers_and_damage_in_the_cache_are_downloaded_again(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(server.url,))
    write_files(server.folder, files, zipped=True)
    cache = write_files(tmp_path / "cache" / "mnist", files, zipped=True)
    images, labels = cache / "train-images-idx3-ubyte.gz", cache / "train-labels-idx1-ubyte.gz"
    images.write_bytes(images.read_bytes()[:100])
    labels.rename(cache / f"partial-0123456789ab-{labels.name}")
    other = cache / "t10k-labels-idx1-ubyte.gz"
    other.write_bytes(gzip.compress(idx_bytes(np.zeros(10))))  # Well-formed, but not the official bytes.
    assert data.load("mnist", cache_dir=str(tmp_path / "cache")).provenance["bytes"] == "official"
    assert sorted(server.requests) == sorted(f"/{path.name}" for path in (images, labels, other))


# ---------------------------------------------------------------- digits


def test_digits():
    dataset = data.load("digits")
    assert dataset.provenance["bytes"] == "embedded"
    assert dataset.train.images.shape[1:] == (28, 28, 1)
    assert len(dataset.train.labels) + len(dataset.test.labels) == 1797
    assert dataset.train.images.max() == 255
    train, test = np.bincount(dataset.train.labels), np.bincount(dataset.test.labels)
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.005)
    np.testing.assert_array_equal(data.load("digits").test.images, dataset.test.images)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        data.load("digits")


# ---------------------------------------------------------------- folders of images


def test_folder_holds_out_a_fraction_of_each_class(tmp_path):
    root = image_folder(tmp_path, {"dog": 10, "cat": 20})
    dataset = data.load("folder", directory=str(root), image_size=6, test_fraction=0.3)
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
    again = data.load("folder", directory=str(root), image_size=6, test_fraction=0.3)
    np.testing.assert_array_equal(again.test.images, dataset.test.images)


def test_folder_with_a_test_set(tmp_path):
    image_folder(tmp_path / "train", {"a": 3, "b": 4})
    image_folder(tmp_path / "test", {"b": 2})
    dataset = data.load("folder", directory=str(tmp_path), test_fraction=0.0)
    assert (len(dataset.train.labels), dataset.test.labels.tolist()) == (7, [1, 1])
    assert dataset.train.images.shape == (7, 32, 32, 3)
    image_folder(tmp_path / "test", {"c": 1})
    with pytest.raises(InputError, match=r"c is not a class of the training set; its classes are a, b"):
        data.load("folder", directory=str(tmp_path))


def test_folder_with_a_class_called_train(tmp_path):
    image_folder(tmp_path, {"train": 4, "plane": 4})
    assert data.load("folder", directory=str(tmp_path)).class_names == ("plane", "train")


def test_folder_ignores_hidden_and_other_files(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2, ".git": 1})
    (tmp_path / "a" / "._000.png").write_bytes(b"resource fork")
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    dataset = data.load("folder", directory=str(tmp_path))
    assert dataset.class_names == ("a", "b")
    assert len(dataset.train.labels) + len(dataset.test.labels) == 4


def test_folder_is_gray_only_if_every_image_is(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2}, channels=1)
    gray = data.load("folder", directory=str(tmp_path), image_size=6)
    assert gray.train.images.shape == (2, 6, 6, 1)
    write_image(tmp_path / "a" / "color.JPG", np.full((9, 9, 3), (250, 0, 0), np.uint8))
    mixed = data.load("folder", directory=str(tmp_path), image_size=6).train.images
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
    dataset = data.load("folder", directory=str(tmp_path), image_size=8)
    deep_image, turned = dataset.train.images
    np.testing.assert_array_equal(deep_image, 0x80)
    np.testing.assert_array_equal(turned, np.rot90(array, -1))


def test_folder_with_one_class(tmp_path):
    image_folder(tmp_path, {"only": 5})
    with pytest.raises(InputError, match=r"has 1 class folders \(only\); expected at least 2"):
        data.load("folder", directory=str(tmp_path))


def test_folder_with_an_empty_class(tmp_path):
    image_folder(tmp_path, {"a": 2})
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty has no images; expected files ending in \.png"):
        data.load("folder", directory=str(tmp_path))


def test_unreadable_images_are_counted_and_named(tmp_path):
    image_folder(tmp_path, {"a": 6, "b": 2})
    for i in range(4):
        path = tmp_path / "a" / f"{i:03}.png"
        path.write_bytes(path.read_bytes()[:60] if i else b"")
    with pytest.raises(InputError, match=r"4 of 8 images cannot be read: .*000\.png, .*002\.png, \.\.\.") as error:
        data.load("folder", directory=str(tmp_path))
    assert "003.png" not in str(error.value)


def test_class_with_too_few_images(tmp_path):
    image_folder(tmp_path, {"many": 5, "rare": 1})
    with pytest.raises(InputError, match="Class 'rare' has 1 image"):
        data.load("folder", directory=str(tmp_path))


def test_folder_without_any_test_set(tmp_path):
    image_folder(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(InputError, match="no test folder, and test_fraction is 0"):
        data.load("folder", directory=str(tmp_path), test_fraction=0.0)


# ---------------------------------------------------------------- splits and batches


def numbered(n: int, num_classes: int = 4) -> data.Split:
    """A split whose image i has the value i in every pixel."""
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 2, 3, 1)).copy()
    return data.Split(images, (np.arange(n) % num_classes).astype(np.int32))


def numbers(images: np.ndarray) -> list[int]:
    return images[:, 0, 0, 0].tolist()


@given(n=st.integers(8, 200), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_validation_split_is_a_stratified_partition(n, fraction, seed):
    split = numbered(n)
    train, validation = data.split_validation(split, fraction, seed)
    assert sorted(numbers(train.images) + numbers(validation.images)) == list(range(n))
    for part in (train, validation):
        assert numbers(part.images) == sorted(numbers(part.images))
        np.testing.assert_array_equal(part.labels, np.array(numbers(part.images)) % 4)
        assert set(part.labels.tolist()) == {0, 1, 2, 3}
    for label, total in enumerate(np.bincount(split.labels)):
        held_out = np.sum(validation.labels == label)
        assert held_out == np.clip(round(fraction * total), 1, total - 1)


def test_validation_split_is_drawn_by_its_seed():
    split = numbered(200)
    first, again, other = (numbers(data.split_validation(split, 0.25, seed)[1].images) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_validation_split_of_nothing():
    train, validation = data.split_validation(numbered(9), 0.0, 0)
    assert (len(train.labels), validation.images.shape) == (9, (0, 2, 3, 1))


@pytest.mark.parametrize("fraction", [1.0, -0.5, 2.0])
def test_validation_fraction_out_of_range(fraction):
    with pytest.raises(InputError, match=rf"validation_fraction is {fraction}; expected at least 0"):
        data.split_validation(numbered(9), fraction, 0)


def test_validation_of_a_class_with_one_image():
    with pytest.raises(InputError, match="Class '3' has 1 image"):
        data.split_validation(numbered(4 + 3), 0.5, 0)


def test_steps_per_epoch():
    assert [data.steps_per_epoch(10, batch_size) for batch_size in (1, 3, 5, 6, 10)] == [10, 3, 2, 1, 1]
    for batch_size in (11, 0, -1):
        with pytest.raises(InputError, match=rf"batch size is {batch_size}; expected 1 to 10"):
            data.steps_per_epoch(10, batch_size)


def test_a_batch_is_a_function_of_seed_and_step():
    split = numbered(50)
    long_running = data.Batches(split.images, split.labels, 8, seed=3)
    history = [long_running.at(step) for step in range(20)]
    for step in (19, 0, 7, 6, 13):  # Any order, forth and back over the epochs' borders.
        fresh = data.Batches(split.images, split.labels, 8, seed=3)
        for images, labels in (fresh.at(step), long_running.at(step)):
            np.testing.assert_array_equal(images, history[step][0])
            np.testing.assert_array_equal(labels, history[step][1])
    other = data.Batches(split.images, split.labels, 8, seed=4)
    assert any(numbers(other.at(step)[0]) != numbers(history[step][0]) for step in range(6))


def test_every_image_once_an_epoch_in_a_fresh_order_with_its_label():
    split = numbered(40)
    batches = data.Batches(split.images, split.labels, 8, seed=0)
    epochs = []
    for epoch in range(3):
        parts = [batches.at(epoch * 5 + i) for i in range(5)]
        for images, labels in parts:
            assert images.shape == (8, 2, 3, 1)
            assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
            np.testing.assert_array_equal(labels, np.array(numbers(images)) % 4)
        epochs.append([number for images, _ in parts for number in numbers(images)])
        assert sorted(epochs[-1]) == list(range(40))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(40))


def test_the_incomplete_batch_is_dropped_not_always_the_same_images():
    split = numbered(11)
    batches = data.Batches(split.images, split.labels, 4, seed=0)
    assert batches.steps_per_epoch == 2
    seen = [{*numbers(batches.at(2 * e)[0]), *numbers(batches.at(2 * e + 1)[0])} for e in range(20)]
    assert all(len(epoch) == 8 for epoch in seen)
    assert set().union(*seen) == set(range(11))
    with pytest.raises(InputError, match="batch size is 12"):
        data.Batches(split.images, split.labels, 12, seed=0)


@pytest.mark.parametrize(("n", "batch_size"), [(10, 4), (8, 4), (3, 4), (5, 1), (0, 2)])
def test_padded_batches_cover_everything_once(n, batch_size):
    split = numbered(n)
    seen_images, seen_labels = [], []
    for images, labels, mask in data.padded_batches(split, batch_size):
        assert images.shape == (batch_size, 2, 3, 1)
        assert (labels.shape, mask.shape) == ((batch_size,), (batch_size,))
        assert (images.dtype, labels.dtype, mask.dtype) == (np.uint8, np.int32, np.float32)
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert mask.any()
        seen_images += numbers(images[mask == 1])
        seen_labels += labels[mask == 1].tolist()
        assert not images[mask == 0].any()
    assert seen_images == list(range(n))
    assert seen_labels == split.labels.tolist()


def test_padded_batches_of_no_size():
    with pytest.raises(InputError, match="batch size is 0"):
        next(data.padded_batches(numbered(3), 0))


# ---------------------------------------------------------------- augmentation


def shifted(image: np.ndarray, down: int, right: int, mirrored: bool) -> np.ndarray:
    """The image moved and then mirrored, pixel by pixel."""
    height, width, _ = image.shape
    result = np.zeros_like(image)
    for y, x in itertools.product(range(height), range(width)):
        if 0 <= y - down < height and 0 <= x - right < width:
            result[y, width - 1 - x if mirrored else x] = image[y - down, x - right]
    return result


@pytest.mark.parametrize(("max_shift", "flip"), [(0, False), (0, True), (1, False), (2, True)])
def test_augment_is_one_of_the_allowed_moves_each_about_as_often(max_shift, flip):
    rng = np.random.default_rng(0)
    image = rng.uniform(0.1, 1, (5, 4, 2)).astype(np.float32)
    shifts = range(-max_shift, max_shift + 1)
    moves = list(itertools.product(shifts, shifts, [False, True] if flip else [False]))
    candidates = np.stack([shifted(image, *move) for move in moves])
    repeats = 40 * len(moves)
    images = np.repeat(image[None], repeats, axis=0)
    augment = jax.jit(data.augment, static_argnames=("max_shift", "flip"))
    result = np.asarray(augment(jax.random.key(0), images, max_shift=max_shift, flip=flip))
    assert result.dtype == np.float32
    equal = (result[:, None] == candidates[None]).all(axis=(2, 3, 4))
    np.testing.assert_array_equal(equal.sum(axis=1), 1)  # Each is exactly one of the allowed moves ...
    counts = equal.sum(axis=0)
    assert counts.min() >= 15  # ... and none of them is rare: 40 are expected.
    assert counts.max() <= 70


def test_augment_is_drawn_by_its_key_and_treats_each_image_by_itself():
    images = jax.random.uniform(jax.random.key(0), (16, 6, 6, 1))
    first, again, other = (
        np.asarray(data.augment(jax.random.key(seed), images, max_shift=2, flip=True)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    blank = images.at[3].set(0)
    changed = np.asarray(data.augment(jax.random.key(1), blank, max_shift=2, flip=True)) != first
    assert changed[3].any()
    assert not np.delete(changed, 3, axis=0).any()


# ---------------------------------------------------------------- real files


def real_folder(pattern: str) -> str:
    """The folder above real files, in $MLCN_JAX_TEST_DATA or `shared/data` beside the checkout; or skips."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("MLCN_JAX_TEST_DATA") or beside)
    found = sorted(root.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in $MLCN_JAX_TEST_DATA, nor in ../shared/data")
    return str(found[0].parent)


def test_real_fashion_mnist():
    dataset = data.load("fashion_mnist", directory=real_folder("fashion_mnist/train-images-idx3-ubyte*"))
    assert dataset.provenance["bytes"] == "official"
    assert dataset.train.images.shape == (60000, 28, 28, 1)
    assert dataset.test.images.shape == (10000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), 6000)
    np.testing.assert_array_equal(dataset.train.labels[:4], [9, 0, 0, 3])


def test_real_cifar10():
    dataset = data.load("cifar10", directory=real_folder("**/cifar-10-batches-bin"))
    assert dataset.train.images.shape == (50000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), 5000)
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), 1000)
    assert dataset.provenance["bytes"] in ("official", "not official")
    planes = dataset.train.images[:1000].astype(np.float32)
    # Natural images are smooth: were planes or axes mixed up, neighbours would differ as strangers do.
    assert np.abs(np.diff(planes, axis=2)).mean() < 0.5 * np.abs(planes - planes[:, :, ::-1]).mean()

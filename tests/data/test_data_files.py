"""Files of datasets: parsing, checksums and downloads, on files and servers made here."""

import contextlib
import dataclasses
import errno
import functools
import gzip
import hashlib
import http.server
import io
import os
import ssl
import struct
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_files import (
    cifar10_files,
    cifar100_files,
    cifar_arrays,
    idx_bytes,
    idx_files,
    make_official,
    tar_bytes,
    write_files,
)

from mlcn_jax.data import datasets, sources
from mlcn_jax.errors import InputError

# ---------------------------------------------------------------- IDX


@given(array=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)))
@settings(max_examples=50, deadline=None)
def test_idx_round_trip(array):
    parsed = sources.parse_idx(idx_bytes(array), "file", array.ndim)
    np.testing.assert_array_equal(parsed, array)
    assert parsed.dtype == np.uint8
    assert parsed.shape == array.shape


@given(content=st.binary(max_size=40), rank=st.sampled_from([1, 3]))
@settings(max_examples=200, deadline=None)
def test_idx_of_any_bytes_parses_or_says_why(content, rank):
    for candidate in (content, struct.pack(">HBB", 0, 8, rank) + content):
        with contextlib.suppress(InputError):
            assert sources.parse_idx(candidate, "file", rank).ndim == rank


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
def test_mnist_is_found_in_known_places(tmp_path, folder, zipped):
    files = idx_files()
    write_files(tmp_path / folder, files, zipped)
    dataset = datasets.load("mnist", directory=str(tmp_path))
    assert dataset.train.images.shape == (20, 5, 5, 1)
    assert dataset.test.images.shape == (10, 5, 5, 1)
    assert (dataset.train.images.dtype, dataset.train.labels.dtype) == (np.uint8, np.int32)
    assert dataset.train.images.tobytes() == files["train-images-idx3-ubyte"][16:]
    np.testing.assert_array_equal(dataset.test.labels, np.arange(10))


def test_mnist_with_dots_in_its_names(tmp_path):
    write_files(tmp_path, {name.replace("-idx", ".idx"): content for name, content in idx_files().items()})
    assert len(datasets.load("mnist", directory=str(tmp_path)).train.labels) == 20


def test_other_bytes_than_the_official_ones_are_used_and_reported(tmp_path, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files)
    write_files(tmp_path, files)
    assert datasets.load("mnist", directory=str(tmp_path)).provenance["bytes"] == "official"
    other = idx_files(num_test=7)["t10k-images-idx3-ubyte"]
    labels = idx_files(num_test=7)["t10k-labels-idx1-ubyte"]
    write_files(tmp_path, {"t10k-images-idx3-ubyte": other, "t10k-labels-idx1-ubyte": labels})
    dataset = datasets.load("mnist", directory=str(tmp_path))
    assert dataset.provenance["bytes"] == "not official"
    assert "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte" in dataset.provenance["note"]
    assert "train" not in dataset.provenance["note"]
    assert len(dataset.test.images) == 7


def test_truncated_idx_names_file_and_sizes(tmp_path):
    files = idx_files()
    files["train-images-idx3-ubyte"] = files["train-images-idx3-ubyte"][:-3]
    write_files(tmp_path, files)
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.*20 x 5 x 5.*516 bytes.*has 513"):
        datasets.load("mnist", directory=str(tmp_path))


def test_an_empty_idx_of_a_size_that_nothing_has_is_damaged():
    with pytest.raises(InputError, match="its header says 0 x 4294967295 x 4294967295"):
        sources.parse_idx(struct.pack(">HBB3I", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), "file", 3)


def test_idx_with_trailing_bytes(tmp_path):
    with pytest.raises(InputError, match=r"labels.*11 bytes are expected, but it has 12"):
        sources.parse_idx(idx_bytes(np.zeros(3)) + b"\0", "labels", 1)


def test_another_kind_of_file_is_not_idx(tmp_path):
    write_files(tmp_path, idx_files() | {"train-labels-idx1-ubyte": b"<html>Not found</html>"})
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte.*not an IDX file.*expected 0x00000801"):
        datasets.load("mnist", directory=str(tmp_path))


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
        datasets.load("mnist", directory=str(tmp_path))


def test_labels_out_of_range(tmp_path):
    labels = np.arange(20) % 10
    labels[[4, 9]] = 37, 200
    write_files(tmp_path, idx_files() | {"train-labels-idx1-ubyte": idx_bytes(labels)})
    with pytest.raises(InputError, match=r"training set has 2 labels out.*position 4, is 37; expected 0 to 9"):
        datasets.load("mnist", directory=str(tmp_path))


def test_images_and_labels_of_different_number(tmp_path):
    write_files(tmp_path, idx_files() | {"t10k-labels-idx1-ubyte": idx_bytes(np.zeros(9))})
    with pytest.raises(InputError, match="test set has 10 images but 9 labels"):
        datasets.load("mnist", directory=str(tmp_path))


def test_images_of_different_size_in_the_splits(tmp_path):
    write_files(tmp_path, idx_files() | {"t10k-images-idx3-ubyte": idx_bytes(np.zeros((10, 6, 5)))})
    with pytest.raises(InputError, match=r"\(5, 5, 1\), but test images \(6, 5, 1\)"):
        datasets.load("mnist", directory=str(tmp_path))


def test_no_images(tmp_path):
    write_files(tmp_path, idx_files(num_test=0))
    with pytest.raises(InputError, match="test set has no images"):
        datasets.load("mnist", directory=str(tmp_path))


def test_missing_files_are_named(tmp_path):
    files = idx_files()
    del files["t10k-labels-idx1-ubyte"]
    write_files(tmp_path / "mnist", files)
    with pytest.raises(InputError, match=r"lack t10k-labels-idx1-ubyte\. Put.*--config\.data\.dir="):
        datasets.load("mnist", directory=str(tmp_path))


# ---------------------------------------------------------------- CIFAR


@pytest.mark.parametrize("layout", ["folder", "itself", "archive"])
def test_cifar10(tmp_path, layout):
    files = cifar10_files()
    if layout == "archive":
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_bytes("cifar-10-batches-bin", files))
    else:
        write_files(tmp_path / ("cifar-10-batches-bin" if layout == "folder" else "."), files)
    dataset = datasets.load("cifar10", directory=str(tmp_path))
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
    fine = datasets.load("cifar100", directory=str(tmp_path))
    coarse = datasets.load("cifar100", directory=str(tmp_path), label_kind="coarse")
    np.testing.assert_array_equal(coarse.train.labels, labels[:, 0])
    np.testing.assert_array_equal(fine.train.labels, labels[:, 1])
    np.testing.assert_array_equal(fine.train.images, images)
    assert (len(fine.class_names), len(coarse.class_names)) == (100, 20)
    assert "Not checked" in fine.provenance["note"]
    with pytest.raises(InputError, match=r"'medium'; expected 'fine', or, for the dataset 'cifar100', 'coarse'"):
        datasets.load("cifar100", directory=str(tmp_path), label_kind="medium")


def test_cifar100_archive_is_checked_as_a_whole(tmp_path, monkeypatch):
    content = tar_bytes("cifar-100-binary", cifar100_files())
    archive = tmp_path / "cifar-100-binary.tar.gz"
    archive.write_bytes(content)
    assert datasets.load("cifar100", directory=str(tmp_path)).provenance == {
        "bytes": "not official",
        "note": "The SHA-256 of cifar-100-binary.tar.gz is not the official one.",
    }
    sha256 = hashlib.sha256(content).hexdigest()
    source = dataclasses.replace(sources.SOURCES["cifar100"], archive_sha256=sha256)
    monkeypatch.setitem(sources.SOURCES, "cifar100", source)
    assert datasets.load("cifar100", directory=str(tmp_path)).provenance["bytes"] == "official"


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
        datasets.load("cifar100", directory=str(folder))
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "cifar-100-binary.tar.gz"]


@pytest.mark.parametrize("damage", [0.3, 0.6, 0.9, 0.999, "cut at the end", "another checksum", "huge member"])
def test_truncated_archive(tmp_path, damage):
    content = tar_bytes("cifar-10-batches-bin", cifar10_files())
    if damage == "another checksum":  # at the end of what gzip wrote, before its length
        content = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
    elif damage == "huge member":
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.size = 2**70
        content = gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    else:
        content = content[: -4 if damage == "cut at the end" else int(damage * len(content))]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz .*truncated or corrupted.*184,380,000"):
        datasets.load("cifar10", directory=str(tmp_path))


def test_cifar_of_incomplete_records(tmp_path):
    files = cifar10_files()
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:-1]
    write_files(tmp_path, files)
    with pytest.raises(InputError, match=r"data_batch_3\.bin.*has 12,291 bytes.*records of 3,073"):
        datasets.load("cifar10", directory=str(tmp_path))


def test_class_names():
    names = sources.DIGITS, sources.FASHION_MNIST, sources.CIFAR10
    assert [len(set(each)) for each in names] == [10, 10, 10]
    assert len(set(sources.CIFAR100_FINE)) == len(sources.CIFAR100_FINE) == 100
    assert len(set(sources.CIFAR100_COARSE)) == len(sources.CIFAR100_COARSE) == 20
    assert list(sources.CIFAR100_FINE) == sorted(sources.CIFAR100_FINE)
    assert list(sources.CIFAR100_COARSE) == sorted(sources.CIFAR100_COARSE)


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
    first = datasets.load("mnist", cache_dir=str(cache))
    assert len(server.requests) == 4
    second = datasets.load("mnist", cache_dir=str(cache))
    assert len(server.requests) == 4
    np.testing.assert_array_equal(first.train.images, second.train.images)
    assert first.provenance["bytes"] == second.provenance["bytes"] == "official"
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(f"{name}.gz" for name in files)
    assert len(datasets.load("mnist", directory=str(cache)).train.labels) == 20  # The cache is a data directory.


def test_a_file_of_the_cache_that_is_damaged_is_not_called_missing(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(server.url,))
    write_files(tmp_path / "mnist", files, zipped=True)
    (first, *_) = sorted((tmp_path / "mnist").iterdir())
    first.write_bytes(b"damaged")
    with pytest.raises(InputError, match=rf"{first.name} in .*mnist is not the official file and could not be down"):
        datasets.load("mnist", cache_dir=str(tmp_path))


def test_download_of_an_archive_into_the_folder_named_by_the_environment(tmp_path, server, monkeypatch):
    content = tar_bytes("cifar-10-batches-bin", cifar10_files())
    make_official(monkeypatch, "cifar10", cifar10_files(), base_urls=(server.url,))
    (server.folder / "cifar-10-binary.tar.gz").write_bytes(content)
    monkeypatch.setenv("MLCN_JAX_CACHE", str(tmp_path / "cache"))
    assert datasets.load("cifar10").provenance["bytes"] == "official"
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["cifar10", "cifar-10-binary.tar.gz"]


def test_wrong_bytes_of_one_mirror_are_fetched_from_the_next(tmp_path, server, monkeypatch):
    files = idx_files()
    urls = (f"{server.url}bad/", f"{server.url}good/")
    make_official(monkeypatch, "mnist", files, base_urls=urls)
    write_files(server.folder / "bad", idx_files(num_train=30), zipped=True)
    write_files(server.folder / "good", files, zipped=True)
    dataset = datasets.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert dataset.provenance["bytes"] == "official"
    assert len(dataset.train.labels) == 20
    assert "/good/train-images-idx3-ubyte.gz" in server.requests


def test_a_broken_tls_connection_is_not_taken_for_a_disk_that_cannot_be_written(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(f"{server.url}bad/", f"{server.url}good/"))
    write_files(server.folder / "good", files, zipped=True)

    def stream(url, path):
        if "/bad/" in url:
            raise ssl.SSLError(errno.EPERM, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]")  # 1 is OpenSSL's, too
        unbroken(url, path)

    unbroken = sources._stream
    monkeypatch.setattr(sources, "_stream", stream)
    assert len(datasets.load("mnist", cache_dir=str(tmp_path / "cache")).train.labels) == 20


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
        datasets.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert "--config.data.dir=" in str(error.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_not_called_a_failed_download(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(f"{server.url}one/", f"{server.url}two/"))
    for mirror in ("one", "two"):
        write_files(server.folder / mirror, files, zipped=True)
    with monkeypatch.context() as patch:

        def read_only(path, **options):
            raise OSError(errno.EROFS, "Read-only file system")

        patch.setattr(Path, "mkdir", read_only)
        message = r"cannot be written to \(Read-only file system\).*another --config\.data\.cache_dir"
        with pytest.raises(InputError, match=message):
            datasets.load("mnist", cache_dir=str(tmp_path))

    def full(url, path):
        server.requests.append(url)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources, "_stream", full)
    with pytest.raises(InputError, match=r"cannot be written to \(No space left on device\)"):
        datasets.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert len(server.requests) == 1, "the other mirror would not help"


def test_without_network_the_files_to_provide_are_named(tmp_path, monkeypatch):
    source = dataclasses.replace(sources.SOURCES["cifar10"], base_urls=("http://127.0.0.1:9/",))
    monkeypatch.setitem(sources.SOURCES, "cifar10", source)
    message = r"cifar10: .*data_batch_1\.bin.*cifar-10-binary\.tar\.gz, into a folder.*--config\.data\.dir="
    with pytest.raises(InputError, match=message):
        datasets.load("cifar10", cache_dir=str(tmp_path))


def test_a_file_of_the_cache_that_cannot_be_read_is_not_taken_for_missing(tmp_path, server):
    path = tmp_path / "cache" / "mnist" / "train-images-idx3-ubyte.gz"
    path.mkdir(parents=True)
    with pytest.raises(InputError, match=r"gz cannot be read \(Is a directory\): make it readable"):
        datasets.load("mnist", cache_dir=str(tmp_path / "cache"))


def test_a_disk_that_fails_is_not_taken_for_damage_in_the_cache(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(server.url,))
    write_files(tmp_path / "cache" / "mnist", files, zipped=True)

    class Failing(io.BytesIO):
        def read(self, *args):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda path, mode: Failing())
    with pytest.raises(InputError, match=r"cannot be read \(Input/output error\)"):
        datasets.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert not server.requests


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
    assert datasets.load("mnist", cache_dir=str(tmp_path / "cache")).provenance["bytes"] == "official"
    assert sorted(server.requests) == sorted(f"/{path.name}" for path in (images, labels, other))


def test_downloads_are_on_disk_before_they_have_their_names(tmp_path, server, monkeypatch):
    files = idx_files()
    make_official(monkeypatch, "mnist", files, base_urls=(server.url,))
    write_files(server.folder, files, zipped=True)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), fsync(descriptor))
    )
    datasets.load("mnist", cache_dir=str(tmp_path / "cache"))
    assert {path.stat().st_size for path in (tmp_path / "cache" / "mnist").iterdir()} <= set(synced)

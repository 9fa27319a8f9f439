"""The official data files: where they are, how they are checked, and their contents.

MNIST and Fashion-MNIST are IDX files, plain or gzipped; CIFAR-10 and CIFAR-100 are records of fixed
size in a `.tar.gz` or unpacked from one. Archives are read in memory: nothing is ever unpacked to disk, and
only regular members of an archive with expected names are read.
"""

import contextlib
import dataclasses
import errno
import gzip
import hashlib
import http.client
import io
import math
import ssl
import struct
import tarfile
import urllib.request
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import UInt8
from tqdm import tqdm

from mlcn_jax.errors import InputError
from mlcn_jax.files import replacing
from mlcn_jax.host import cache_folder, sha256_of

_BLOCK_BYTES = 1 << 20
_MOST_VALUES = 2**40  # of a header whose other axes are empty
_TIMEOUT_SECONDS = 30.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)  # of no connection
# Decompressed sizes of the official files, for messages about damaged archives.
_OFFICIAL_BYTES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
    **{f"data_batch_{i}.bin": 30_730_000 for i in range(1, 6)},
    "test_batch.bin": 30_730_000,
    "train.bin": 153_700_000,
    "test.bin": 30_740_000,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the official files of a dataset come from and how they are recognised.

    `base_urls` are mirrors, tried in order. They serve the files one by one as `NAME.gz`, or all in the
    `.tar.gz` named `archive`. `files` maps each to the SHA-256 of its decompressed content; if those are
    not known (empty), `archive_sha256` is that of the archive itself. `folders` are the subfolders of a data
    directory in which the files may be.
    """

    base_urls: tuple[str, ...]
    folders: tuple[str, ...]
    files: Mapping[str, str]
    archive: str = ""
    archive_sha256: str = ""

    @property
    def remote(self) -> dict[str, tuple[str, ...]]:
        """The files to download into the cache, each with the dataset files it contains."""
        if self.archive:
            return {self.archive: tuple(self.files)}
        return {f"{file}.gz": (file,) for file in self.files}


SOURCES: dict[str, Source] = {
    "mnist": Source(
        base_urls=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        folders=("mnist", "MNIST/raw", "MNIST"),
        files={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion_mnist": Source(
        base_urls=(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        folders=("fashion_mnist", "FashionMNIST/raw", "fashion-mnist"),
        files={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    "cifar10": Source(
        base_urls=("https://www.cs.toronto.edu/~kriz/",),
        folders=("cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"),
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        archive="cifar-10-binary.tar.gz",
    ),
    # Independent sources agree on the archive's checksum, but only one gives those of the unpacked files; so
    # unpacked files are accepted, and reported as not checked.
    "cifar100": Source(
        base_urls=("https://www.cs.toronto.edu/~kriz/",),
        folders=("cifar-100-binary", "cifar100", "cifar100/cifar-100-binary"),
        files={"train.bin": "", "test.bin": ""},
        archive="cifar-100-binary.tar.gz",
        archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
}


def read_files(name: str, directory: str, cache_dir: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the decompressed content of every file of dataset `name`, and its provenance.

    Args:
      name: a key of `SOURCES`.
      directory: folder with the files, as archives or unpacked, directly or in one of `Source.folders`; used
        as they are. If empty, downloads what the cache lacks, and uses only files with the official checksum.
      cache_dir: folder for downloads; if empty, `$MLCN_JAX_CACHE`, else `~/.cache/mlcn_jax`.

    Returns:
      File name to content, and two entries of provenance. `bytes` is "official" or "not official", `note` one sentence.

    Raises:
      InputError: files are missing or damaged, or could not be downloaded.
    """
    source = SOURCES[name]
    if directory:
        contents, difference = _from_directory(name, source, Path(directory).expanduser())
    else:
        folder = (Path(cache_dir).expanduser() if cache_dir else cache_folder()) / name
        contents, difference = {}, ""
        for remote in source.remote:
            contents |= _cached(source, folder / remote) or _download(name, source, folder / remote)
    if difference:
        return contents, {"bytes": "not official", "note": difference}
    return contents, {
        "bytes": "official",
        "note": "The SHA-256 of the files, or of their archive, is the official one.",
    }


def _from_directory(name: str, source: Source, root: Path) -> tuple[dict[str, bytes], str]:
    """The content of the user's files, and how it differs from the official one."""
    most: dict[str, Path] = {}
    for folder in (root, *(root / folder for folder in source.folders)):
        found = {file: path for file in source.files for path in _spellings(folder, file) if path.is_file()}
        if len(found) == len(source.files):
            contents = {file: _read(path, (file,))[file] for file, path in found.items()}
            return contents, _difference(source, contents, None)
        if source.archive and (archive := folder / source.archive).is_file():
            contents = _read(archive, source.remote[source.archive])
            return contents, _difference(source, contents, archive)
        most = max(most, found, key=len)
    missing = [file for file in source.files if file not in most]
    raise InputError(
        f"{name}: {root} and its subfolders {', '.join(source.folders)} lack {', '.join(missing)}. "
        f"{_what_to_provide(source)}"
    )


def _spellings(folder: Path, file: str) -> tuple[Path, ...]:
    """Where `file` may be in `folder`; the last that exists is used. MNIST's also go by `*.idx3-ubyte`."""
    return folder / f"{file}.gz", folder / file.replace("-idx", ".idx"), folder / file


def _what_to_provide(source: Source) -> str:
    or_else = f"or their archive {source.archive}" if source.archive else "as they are or gzipped (NAME.gz)"
    return f"Put {', '.join(source.files)}, {or_else}, into a folder and pass it as --config.data.dir=FOLDER."


def _difference(source: Source, contents: Mapping[str, bytes], archive: Path | None) -> str:
    """One sentence on how `contents`, some files of `source`, is not the official one; empty if it is."""
    if source.archive_sha256:
        if archive is None:
            return f"Not checked: only {source.archive} has a known SHA-256, and these files are unpacked."
        same = sha256_of(archive) == source.archive_sha256
        return "" if same else f"The SHA-256 of {source.archive} is not the official one."
    sha256 = {file: hashlib.sha256(data).hexdigest() for file, data in contents.items()}
    different = [file for file in sha256 if sha256[file] != source.files[file]]
    return f"The SHA-256 of {', '.join(different)} is not the official one." if different else ""


def _read(path: Path, files: tuple[str, ...]) -> dict[str, bytes]:
    """The decompressed content of `files` in `path`: one plain or gzipped file, or a `.tar.gz` with all.

    Raises:
      InputError: `path` cannot be read, is damaged, or is an archive that lacks a file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if ".gz" not in path.suffixes:
        return dict.fromkeys(files, data)
    contents: dict[str, bytes] = {}
    with gzip.open(io.BytesIO(data)) as stream:
        try:
            if ".tar" not in path.suffixes:
                return {file: stream.read() for file in files}
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    content = archive.extractfile(member) if member.isreg() and name in files else None
                    if content is not None:
                        contents[name] = content.read()
            _read_checksum(stream)
        except (OSError, EOFError, ValueError, OverflowError, zlib.error, tarfile.TarError) as error:
            expected_bytes = sum(_OFFICIAL_BYTES[file] for file in files)
            raise InputError(
                f"{path} ({len(data):,} bytes) is truncated or corrupted: {stream.tell():,} bytes could be "
                f"decompressed, at least {expected_bytes:,} are expected ({error}). "
                "Replace it with a complete copy."
            ) from error
    if missing := [name for name in files if name not in contents]:
        raise InputError(f"{path} has no regular member {', '.join(missing)}. Is it the binary version?")
    return contents


def _read_checksum(stream: gzip.GzipFile) -> None:
    """Reads the rest of a gzipped file, at whose end is its checksum; what may follow that is ignored, as by gunzip."""
    try:
        while stream.read(_BLOCK_BYTES):
            pass
    except gzip.BadGzipFile as error:
        if "Not a gzipped file" not in str(error):
            raise


def _cached(source: Source, path: Path) -> dict[str, bytes] | None:
    """The content of a file in the cache, or None if it is missing or no longer matches the official checksum.

    Raises:
      InputError: this process may not read it, or the disk fails.
    """
    try:
        with path.open("rb") as file:  # so that what fails below is the file's content
            while file.read(2**24):
                pass
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}): make it readable, or give another --config.data.cache_dir"
        ) from error
    with contextlib.suppress(InputError):
        contents = _read(path, source.remote[path.name])
        if not _difference(source, contents, path):
            return contents
    return None


def _download(name: str, source: Source, path: Path) -> dict[str, bytes]:
    """Downloads `path.name` from the first mirror that serves the official bytes, and returns its content.

    The bytes go to a temporary file, which is renamed to `path` once they are checked: an interrupted
    download is never mistaken for a complete one, and several processes may download at once.
    """
    problems = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(_cannot_write(path, error)) from error
    for base_url in source.base_urls:
        try:
            with replacing(path) as partial:
                _stream(base_url + path.name, partial)
                contents = _read(partial, source.remote[path.name])
                if difference := _difference(source, contents, partial):
                    raise InputError(difference)
            return contents
        except (OSError, http.client.HTTPException, InputError) as error:
            # An ssl.SSLError has OpenSSL's numbers.
            if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in _DISK_ERRORS:
                raise InputError(_cannot_write(path, error)) from error
            problems.append(f"{base_url}{path.name}: {error}")
    state = f"in {path.parent} is not the official file" if path.exists() else f"is not in {path.parent}"
    raise InputError(
        f"{name}: {path.name} {state} and could not be downloaded ({'; '.join(problems)}). {_what_to_provide(source)}"
    )


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"{path.parent} cannot be written to ({error.strerror}), so {path.name} was not downloaded: make room there or "
        "make it writable, or give another --config.data.cache_dir"
    )


def _stream(url: str, path: Path) -> None:
    """Writes what `url` serves to `path`, with a progress bar on a terminal."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0)) or None
        with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1], disable=None) as progress:
            while block := response.read(_BLOCK_BYTES):
                file.write(block)
                progress.update(len(block))
    if total and path.stat().st_size != total:
        raise OSError(f"the connection closed after {path.stat().st_size:,} of {total:,} bytes")


def parse_idx(data: bytes, name: str, rank: int) -> UInt8[np.ndarray, "..."]:
    """Parses an IDX file of unsigned bytes: a big-endian magic number, one length per axis, then the values.

    Args:
      data: content of the file, decompressed.
      name: what to call the file in messages.
      rank: number of axes expected: 3 for images, 1 for labels.

    Raises:
      InputError: it is another kind of file, or its size does not match its header.
    """
    magic = 0x0800 + rank
    found = int.from_bytes(data[:4], "big")
    if len(data) < 4 * (1 + rank) or found != magic:
        raise InputError(
            f"{name} ({len(data):,} bytes) is not an IDX file of unsigned bytes with {rank} axes: "
            f"its magic number is {found:#010x}, expected {magic:#010x}."
        )
    shape = struct.unpack_from(f">{rank}I", data, 4)
    expected_bytes = 4 * (1 + rank) + math.prod(shape)
    if math.prod(n or 1 for n in shape) > _MOST_VALUES:
        raise InputError(f"{name} is corrupted: its header says {' x '.join(map(str, shape))}. Replace it.")
    if len(data) != expected_bytes:
        raise InputError(
            f"{name} is truncated or corrupted: its header says {' x '.join(map(str, shape))}, so "
            f"{expected_bytes:,} bytes are expected, but it has {len(data):,}. Replace it with a complete copy."
        )
    return np.frombuffer(data, np.uint8, offset=4 * (1 + rank)).reshape(shape)


def parse_cifar(
    data: bytes, name: str, label_bytes: int, label_index: int
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], UInt8[np.ndarray, " n"]]:
    """Parses CIFAR records: `label_bytes` labels, then 32x32 red, green and blue planes of one byte per pixel.

    Args:
      data: content of the file, decompressed.
      name: what to call the file in messages.
      label_bytes: labels per record: 1 in CIFAR-10, 2 (coarse, fine) in CIFAR-100.
      label_index: which of them to return.

    Raises:
      InputError: the size is not a multiple of the record size, or is 0.
    """
    record_bytes = label_bytes + 3 * 32 * 32
    if not data or len(data) % record_bytes:
        raise InputError(
            f"{name} is truncated or corrupted: it has {len(data):,} bytes, expected one or more records of "
            f"{record_bytes:,} bytes each. Replace it with a complete copy."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, record_bytes)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, records[:, label_index]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


# Class names, in the order of the labels.
DIGITS = _names("0, 1, 2, 3, 4, 5, 6, 7, 8, 9")
FASHION_MNIST = _names("T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot")
CIFAR10 = _names("airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck")
CIFAR100_COARSE = _names(
    """aquatic_mammals, fish, flowers, food_containers, fruit_and_vegetables, household_electrical_devices,
    household_furniture, insects, large_carnivores, large_man-made_outdoor_things,
    large_natural_outdoor_scenes, large_omnivores_and_herbivores, medium_mammals, non-insect_invertebrates,
    people, reptiles, small_mammals, trees, vehicles_1, vehicles_2"""
)
CIFAR100_FINE = _names(
    """apple, aquarium_fish, baby, bear, beaver, bed, bee, beetle, bicycle, bottle, bowl, boy, bridge, bus,
    butterfly, camel, can, castle, caterpillar, cattle, chair, chimpanzee, clock, cloud, cockroach, couch,
    crab, crocodile, cup, dinosaur, dolphin, elephant, flatfish, forest, fox, girl, hamster, house, kangaroo,
    keyboard, lamp, lawn_mower, leopard, lion, lizard, lobster, man, maple_tree, motorcycle, mountain, mouse,
    mushroom, oak_tree, orange, orchid, otter, palm_tree, pear, pickup_truck, pine_tree, plain, plate, poppy,
    porcupine, possum, rabbit, raccoon, ray, road, rocket, rose, sea, seal, shark, shrew, skunk, skyscraper,
    snail, snake, spider, squirrel, streetcar, sunflower, sweet_pepper, table, tank, telephone, television,
    tiger, tractor, train, trout, tulip, turtle, wardrobe, whale, willow_tree, wolf, woman, worm"""
)

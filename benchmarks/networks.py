"""The networks that are compared, in terms that every framework understands. Needs no framework itself."""

import dataclasses
from collections.abc import Sequence

from mlcn_jax.errors import InputError

BATCH = 100
RESNET_BATCH = 500  # normalised together
NUM_CLASSES = 10
LEARNING_RATE = 1e-3
EPSILON = 1e-12  # of Adam; small, because Keras adds it elsewhere than the others
RECONSTRUCTION_WEIGHT = 0.392


@dataclasses.dataclass(frozen=True)
class Network:
    """A row of the comparison.

    Attributes:
      kind: `capsnet`, `mlcn1`, `mlcn2` or `resnet`.
      image_shape: height, width, channels.
      lanes, width: of MLCN; 0 for CapsNet.
      depth: of `resnet` lanes.
    """

    kind: str
    image_shape: tuple[int, int, int]
    lanes: int = 0
    width: int = 0
    depth: int = 1

    @property
    def _lanes_name(self) -> str:
        return f"{self.lanes}x{self.width}" if self.depth == 1 else f"{self.lanes}xw{self.width}d{self.depth}"

    @property
    def name(self) -> str:
        size = "x".join(map(str, self.image_shape))
        return f"{self.kind}_{self._lanes_name}_{size}" if self.lanes else f"{self.kind}_{size}"

    @property
    def title(self) -> str:
        """As tables name it."""
        kind = "CapsNet" if self.kind == "capsnet" else f"{self.kind} {self._lanes_name}"
        return f"{kind}, {'x'.join(map(str, self.image_shape))}"

    @property
    def lanes_text(self) -> str:
        """The lanes as `mlcn_jax.nn.lane_list.parse_lanes` reads them."""
        return f"{self.kind}:w{self.width}d{self.depth}*{self.lanes}" if self.lanes else ""

    @property
    def batch(self) -> int:
        """Images of a training step."""
        return RESNET_BATCH if self.kind == "resnet" else BATCH


FASHION, CIFAR = (28, 28, 1), (32, 32, 3)

_ALL = (
    Network("mlcn1", FASHION, 4, 4),
    Network("mlcn1", CIFAR, 4, 4),
    Network("mlcn1", CIFAR, 32, 2),
    Network("mlcn2", CIFAR, 4, 4),
    Network("capsnet", FASHION),
    Network("resnet", CIFAR, 1, 8, 2),
    Network("resnet", CIFAR, 4, 4, 2),
    Network("resnet", CIFAR, 8, 2, 2),
    Network("capsnet", CIFAR),
    Network("mlcn2", CIFAR, 32, 2),
    Network("mlcn1", FASHION, 2, 4),
    Network("mlcn1", FASHION, 8, 4),
    Network("mlcn2", FASHION, 2, 4),
    Network("mlcn2", FASHION, 8, 4),
)
NETWORKS = {network.name: network for network in _ALL}
SETS = {  # as --networks takes them; the published ones are the rows of the thesis's table 4.1 and mlcn1 4x4, 28x28x1
    "all": _ALL,
    "published": tuple(network for network in _ALL if network.kind != "resnet"),
    "resnet": tuple(network for network in _ALL if network.kind == "resnet"),
}

# Seconds per epoch of CapsNet over those of each MLCN on one P100 (do Rosario 2021, thesis, table 4.1).
THESIS_CAPSNET_OVER = {
    "mlcn1_4x4_32x32x3": 240 / 54,
    "mlcn1_32x2_32x32x3": 240 / 205,
    "mlcn2_4x4_32x32x3": 240 / 53,
    "mlcn2_32x2_32x32x3": 240 / 204,
    "mlcn1_2x4_28x28x1": 220 / 21,
    "mlcn1_8x4_28x28x1": 220 / 90,
    "mlcn2_2x4_28x28x1": 220 / 20,
    "mlcn2_8x4_28x28x1": 220 / 92,
}


def chosen(names: Sequence[str]) -> list[Network]:
    """The networks of these names and sets, each once; raises InputError as `find` does."""
    return list(dict.fromkeys(network for name in names for network in SETS.get(name) or (find(name),)))


def find(name: str) -> Network:
    """The network of that name; raises InputError, which names all, where there is none."""
    if name not in NETWORKS:
        raise InputError(f"there is no network {name!r}: there are {', '.join([*SETS, *NETWORKS])}")
    return NETWORKS[name]

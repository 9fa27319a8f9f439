"""Bounds for any schedule and any link: Brent's, and the cost of summing an array over devices.

L is the latency of a message in seconds, G the seconds of a byte, P the number of devices, m the bytes of the array.
A gather of an array and the scatter of its gradient are the two halves of such a sum, and cost as much together.

Butterfly's and Rabenseifner's algorithms need a power of two: of other numbers of devices, each beyond the last such
power sends its array to another one before, and gets the sum from it afterwards.

Source: Brent 1974 (Journal of the ACM 21(2)); Ben-Nun and Hoefler 2019 (ACM Computing Surveys 52(4)), section 2.5,
for the formulas of communication; Thakur et al. 2005 (IJHPCA 19(1)), section 4, for other numbers than powers of two.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from mlcn_jax.placement.simulate import Link


def _tree(devices: int, num_bytes: float, latency: float, per_byte: float) -> float:
    return 2 * math.ceil(math.log2(devices)) * (latency + num_bytes * per_byte)


def _butterfly(devices: int, num_bytes: float, latency: float, per_byte: float) -> float:
    return (math.floor(math.log2(devices)) + _extra(devices)) * (latency + num_bytes * per_byte)


def _ring(devices: int, num_bytes: float, latency: float, per_byte: float) -> float:
    return 2 * (devices - 1) * (latency + num_bytes * per_byte / devices)


def _rabenseifner(devices: int, num_bytes: float, latency: float, per_byte: float) -> float:
    rounds = math.floor(math.log2(devices))
    halved = 2 * latency * rounds + 2 * num_bytes * per_byte * (1 - 0.5**rounds)
    return halved + _extra(devices) * (latency + num_bytes * per_byte)


def _extra(devices: int) -> int:
    """Messages of an entire array that precede and follow the algorithms for powers of two."""
    return 0 if devices & (devices - 1) == 0 else 2


ALGORITHMS: dict[str, Callable[[int, float, float, float], float]] = {
    "tree": _tree,
    "butterfly": _butterfly,
    "ring": _ring,
    "rabenseifner": _rabenseifner,
}


def communication(devices: int, num_bytes: float, link: Link) -> dict[str, float]:
    """Seconds to sum an array over devices, by algorithm, and the two lower bounds, of latency and of bytes.

    Args:
      devices: P, 1 or more.
      num_bytes: m.
      link: between any two of them.
    """
    latency, per_byte = link.latency_seconds, 1 / link.bytes_per_second
    if not num_bytes:
        latency = 0.0
    found = {name: formula(devices, num_bytes, latency, per_byte) for name, formula in ALGORITHMS.items()}
    return found | {
        "least_latency": latency * math.ceil(math.log2(devices)),
        "least_bytes": 2 * num_bytes * per_byte * (devices - 1) / devices,
    }


def fastest(devices: int, num_bytes: float, link: Link) -> float:
    """Seconds of the fastest of `ALGORITHMS`."""
    found = communication(devices, num_bytes, link)
    return min(found[name] for name in ALGORITHMS)


def brent(work: float, depth: float, devices: int) -> tuple[float, float]:
    """Least and most unit operations in turn on p devices: max(W / p, D) and W / p + D."""
    return max(work / devices, depth), work / devices + depth


@dataclasses.dataclass(frozen=True)
class Limit:
    """How far a split can scale.

    Attributes:
      outweighed_at: the least number of devices at which communication takes as long as computing; None if that does
        not happen.
      best_speedup, at_devices: the largest speed-up over one device, and the number of devices that gives it.
    """

    outweighed_at: int | None
    best_speedup: float
    at_devices: int


def limit(seconds: float, num_bytes: Mapping[int, float], link: Link, undivided_seconds: float = 0.0) -> Limit:
    """How far a split can scale if computing divides evenly and communication takes the fastest algorithm.

    Args:
      seconds: of a step on one device.
      num_bytes: the bytes that a step sums over the devices, for every number of devices above 1 that is possible.
      link: between any two devices.
      undivided_seconds: the part of `seconds` that one device computes for all.
    """
    outweighed, best = None, (1.0, 1)
    for devices, size in sorted(num_bytes.items()):
        talking = fastest(devices, size, link)
        computing = undivided_seconds + (seconds - undivided_seconds) / devices
        if outweighed is None and talking >= computing:
            outweighed = devices
        speedup = seconds / (computing + talking)
        if speedup > best[0]:
            best = (speedup, devices)
    return Limit(outweighed, *best)


def least_seconds(
    product_flops: float, least_bytes: float, flops_per_second: float, bytes_per_second: float, devices: int = 1
) -> float:
    """Seconds below which no split over equal devices can be: products at the peak rate, bytes at the bandwidth."""
    return max(product_flops / flops_per_second, least_bytes / bytes_per_second) / devices

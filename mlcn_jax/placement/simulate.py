"""Predicts a training step on devices that are not available, from its work, messages and links. Pure Python.

A message of m bytes takes latency + m / bandwidth; a device sends one and receives one at a time. A step has six
phases, and no device begins one before all have finished the previous one: forward, gather of the class capsules, head
(loss, decoder, their gradients), spread of the class capsules' gradients, backward with the update, reduction of
gradients. So communication never overlaps with computation: an upper bound if it does in a real step.

Source: Thakur, Rabenseifner, Gropp 2005 (Int. J. High Performance Computing Applications 19(1), pages 49-66) for the
costs of collectives.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from mlcn_jax.errors import InputError
from mlcn_jax.placement.problem import Placement

ALGORITHMS = ("ring", "tree")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")
EXCHANGES = ("direct", *ALGORITHMS)


@dataclasses.dataclass(frozen=True)
class Link:
    """The speed of messages; an infinite `bytes_per_second` leaves only the latency.

    Raises:
      InputError: the latency is negative or the bandwidth is not above 0.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self):
        if not 0 <= self.latency_seconds < math.inf:
            raise InputError(f"latency_seconds is {self.latency_seconds}: give 0 or more, such as 2e-5")
        if not self.bytes_per_second > 0:
            raise InputError(f"bytes_per_second is {self.bytes_per_second}: give more than 0, such as 1e10")

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message; 0 if there is nothing to send."""
        return self.latency_seconds + num_bytes / self.bytes_per_second if num_bytes else 0.0


Links = Link | Mapping[int | str, Link]  # one for all hosts, or each host's
Sharing = Mapping[int | str, int]  # how many messages share the link of each host


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and the links between them, which may differ from host to host.

    Attributes:
      hosts: the host of each device, by number or name.
      within: the link between any two devices of a host, not shared.
      between: the link of a host to all others, shared by all simultaneous messages that leave the host. A message
        between two hosts takes the longer latency and the lower bandwidth of their links.
      machines: the machine of each device, if hosts are processes; if empty, each host is a machine.

    Raises:
      InputError: there is no device, or a host has no link.
    """

    hosts: Sequence[int | str]
    within: Links
    between: Links
    machines: Sequence[int | str] = ()

    def __post_init__(self):
        object.__setattr__(self, "machines", tuple(self.machines) or tuple(self.hosts))
        if len(self.machines) != len(self.hosts):
            raise InputError(f"machines has {len(self.machines)} entries for {len(self.hosts)} devices")
        if not self.hosts:
            raise InputError("the cluster has no devices: give the host of each, such as hosts=(0, 0, 1, 1)")
        for field in ("within", "between"):
            links = getattr(self, field)
            missing = [] if isinstance(links, Link) else [host for host in self.hosts if host not in links]
            if missing:
                raise InputError(f"{field} has no link for host {missing[0]}: give one link, or one for each host")

    @property
    def num_devices(self) -> int:
        return len(self.hosts)

    def inside(self, host: int | str) -> Link:
        """The link between two devices of a host."""
        return self.within if isinstance(self.within, Link) else self.within[host]

    def outward(self, host: int | str) -> Link:
        """The link of a host to all others."""
        return self.between if isinstance(self.between, Link) else self.between[host]

    def link(self, first: int | str, second: int | str, sharing: Sharing = MappingProxyType({})) -> Link:
        """The link between devices of two hosts, or of one; `sharing` messages share a host's link, by default 1."""
        if first == second:
            return self.inside(first)
        ends = {host: self.outward(host) for host in (first, second)}
        latency = max(link.latency_seconds for link in ends.values())
        return Link(latency, min(link.bytes_per_second / sharing.get(host, 1) for host, link in ends.items()))


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The phases of a simulated step, and the time each device computes in it."""

    forward_seconds: float
    gather_seconds: float
    head_seconds: float
    spread_seconds: float
    backward_seconds: float
    reduce_seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def communication_seconds(self) -> float:
        return self.gather_seconds + self.spread_seconds + self.reduce_seconds

    @property
    def total_seconds(self) -> float:
        return self.forward_seconds + self.head_seconds + self.backward_seconds + self.communication_seconds

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The fraction of the step in which each device is idle."""
        return tuple(1 - busy / self.total_seconds for busy in self.busy_seconds)


def collective_seconds(
    kind: str, num_bytes: float, cluster: Cluster, groups: Sequence[Sequence[int]] = (), *, algorithm: str = "ring"
) -> float:
    """Seconds of one collective in each group of devices, all groups at once.

    With n devices on one host, latency a, and t for the time of all bytes on the link:

        ring, all-gather, reduce-scatter    (n-1) a + (n-1)/n t
        ring, all-reduce                  2 (n-1) a + 2 (n-1)/n t
        tree, all-gather, reduce-scatter  2 ceil(log2 n) a + ((n-1)/n + ceil(log2 n)) t
        tree, all-reduce                  2 ceil(log2 n) (a + t)

    A tree is two binomial trees: to one device (gather or reduce), and from there to all (broadcast or scatter). Over
    several hosts, a ring leaves each host once, and each of its rounds takes as long as its slowest link. A tree joins
    the devices of each host, then the hosts. Groups that leave the same host share its link.

    Args:
      kind: one of `COLLECTIVES`.
      num_bytes: bytes of the full array: the output of a gather, the input of a scatter or a reduction.
      cluster: the devices.
      groups: the devices of each group, by number; if empty, one group of all.
      algorithm: one of `ALGORITHMS`.

    Raises:
      InputError: a name is unknown, the bytes are negative, or a group does not match the cluster.
    """
    _check_name("collective", kind, COLLECTIVES)
    _check_name("algorithm", algorithm, ALGORITHMS)
    _check_numbers("num_bytes", [num_bytes])
    groups = groups or [range(cluster.num_devices)]
    _check_devices((device for group in groups for device in group), cluster)
    if any(not group or len(set(group)) < len(group) for group in groups):
        raise InputError("a group is empty or names a device twice: give each of its devices once")
    on_hosts = [Counter(cluster.hosts[device] for device in group) for group in groups]
    sharing = Counter(host for counts in on_hosts if len(counts) > 1 for host in counts)
    of_group = _ring_seconds if algorithm == "ring" else _tree_seconds
    # Groups distributed over alike hosts in the same way take the same time.
    layouts = {}
    for counts in on_hosts:
        layout = sorted(counts.items(), key=lambda entry: -entry[1])
        alike = tuple((n, cluster.inside(host), cluster.outward(host), sharing[host]) for host, n in layout)
        layouts[alike] = layout
    return max(of_group(kind, num_bytes, layout, cluster, sharing) for layout in layouts.values())


Layout = Sequence[tuple[int | str, int]]  # the hosts of a group, and how many of its devices each has, most first


def _ring_seconds(kind: str, num_bytes: float, layout: Layout, cluster: Cluster, sharing: Sharing) -> float:
    """Seconds for one group: every round takes as long as the slowest link between neighbours."""
    hosts = [host for host, _ in layout]
    size = sum(count for _, count in layout)
    links = [cluster.inside(host) for host, count in layout if count > 1]
    if len(hosts) > 1:
        links += [cluster.link(a, b, sharing) for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True)]
    rounds = (size - 1) * (2 if kind == "all-reduce" else 1)
    return rounds * max((link.seconds(num_bytes / size) for link in links), default=0.0)


def _tree_seconds(kind: str, num_bytes: float, layout: Layout, cluster: Cluster, sharing: Sharing) -> float:
    """As `_ring_seconds`; the host with most devices comes first: it is ready last, so none waits."""

    def to_one(share: float) -> float:
        """From all devices to the first; from there to all takes as long. `share` is 0 if messages do not grow."""
        starts = []
        for host, count in layout:
            link = cluster.inside(host)
            # What the first device of a binomial tree receives: the k-th message from a subtree of up to 2^k devices.
            subtrees = [min(2**k, count - 2**k) for k in range((count - 1).bit_length())]
            ready = sum(link.seconds(n * share or num_bytes) for n in subtrees)
            starts.append((ready, host, count * share or num_bytes))
        return _meet(starts, cluster, sharing, grows=share > 0)[0]

    back = to_one(0.0)
    return 2 * back if kind == "all-reduce" else to_one(num_bytes / sum(count for _, count in layout)) + back


def _meet(
    starts: Sequence[tuple[float, int | str, float]], cluster: Cluster, sharing: Sharing, grows: bool
) -> tuple[float, int | str, float]:
    """Time at which the root of a binomial tree has received every message, the root, and the bytes it holds.

    `starts`: for each host, the time at which it can send, the host, and the bytes to send; the first is the root.
    """
    if len(starts) == 1:
        return starts[0]
    half = 1 << (len(starts) - 1).bit_length() - 1
    ready, host, held = _meet(starts[:half], cluster, sharing, grows)
    other_ready, other, sent = _meet(starts[half:], cluster, sharing, grows)
    arrived = max(ready, other_ready) + cluster.link(host, other, sharing).seconds(sent)
    return arrived, host, held + sent * grows


def simulate_mesh(
    data: int,
    lane: int,
    cluster: Cluster,
    *,
    lane_seconds: Sequence[float],
    head_seconds: Sequence[float],
    forward_share: float,
    exchanged: Mapping[str, float],
    num_collectives: Mapping[str, int] | None = None,
    algorithm: str = "ring",
) -> StepTime:
    """A step over a mesh (`mesh_runner.MeshRunner`), in which every device has an equal share of the work.

    Devices are numbered as `mesh.make_mesh` takes them: device d * lane + l has share d of the batch, share l of
    the lanes. Class capsules and the decoder's activations are gathered, and their gradients scattered, over the lane
    axis. Gradients are reduced over the data axis, or, if that is 1, those of unsharded arrays over the lane axis.

    Args:
      data, lane: the sizes of the mesh.
      cluster: its devices.
      lane_seconds: each device's time for its shard of the lanes and of the batch, forward, backward and update.
      head_seconds: each device's time for its shard of loss and decoder, forward, backward and update.
      forward_share: the fraction of `lane_seconds` that is forward.
      exchanged: bytes by collective, as `traffic.exchanged_bytes` counts them.
      num_collectives: number of collectives of each kind over which its bytes are divided; by default 1.
      algorithm: one of `ALGORITHMS`.

    Raises:
      InputError: lengths are inconsistent, a number is out of range or a name is unknown.
    """
    if min(data, lane) < 1 or data * lane != cluster.num_devices:
        raise InputError(
            f"a mesh of data={data} times lane={lane} does not match the cluster's {cluster.num_devices} devices: give "
            "two numbers with that product"
        )
    counts = dict.fromkeys(COLLECTIVES, 1) | dict(num_collectives or {})
    for kind in {*exchanged, *counts}:
        _check_name("collective", kind, COLLECTIVES)
    if min(counts.values()) < 1:
        raise InputError(f"num_collectives holds {min(counts.values())}: give 1 or more")
    _check_numbers("lane_seconds", lane_seconds, cluster.num_devices)
    _check_numbers("head_seconds", head_seconds, cluster.num_devices)
    over_lanes = [range(d * lane, (d + 1) * lane) for d in range(data)]
    over_data = [range(start, data * lane, lane) for start in range(lane)]

    def seconds(kind: str, groups: Sequence[Sequence[int]]) -> float:
        one = exchanged.get(kind, 0.0) / counts[kind]
        return counts[kind] * collective_seconds(kind, one, cluster, groups, algorithm=algorithm)

    return _step(
        forward_share,
        lane_seconds,
        head_seconds,
        gather=seconds("all-gather", over_lanes),
        spread=seconds("reduce-scatter", over_lanes),
        reduce=seconds("all-reduce", over_data if data > 1 else over_lanes),
    )


def simulate_stacks(
    placement: Placement,
    cluster: Cluster,
    *,
    column_bytes: float,
    head_seconds: float,
    forward_share: float,
    head: int = 0,
    total_bytes: float = 0.0,
    exchange: str = "direct",
) -> StepTime:
    """A step of lanes placed one by one (`stacks_runner.StacksRunner`), with loss and decoder on one device, the head.

    Only columns and their gradients are exchanged. `direct`: one message after another, to and from the head, of the
    size that a device's lanes need. `ring`, `tree`: an all-gather and a reduce-scatter among the devices with lanes and
    the head, in which every device counts as having as many lanes as the one with most.

    Args:
      placement: the device of each lane, and the seconds of each device for its lanes, forward, backward and update;
        the placement's base must not include the head's work.
      cluster: the devices.
      column_bytes: bytes of one lane's column: 4 * batch * classes for float32.
      head_seconds: the head's time for loss, decoder and their gradients, while the others wait.
      forward_share: the fraction of the placement's seconds that is forward.
      head: number of the device that is the head.
      total_bytes: bytes that are summed over the devices before the update, as clipping needs; 0 for none.
      exchange: one of `EXCHANGES`.

    Raises:
      InputError: lengths are inconsistent, a number is out of range or a name is unknown.
    """
    _check_name("exchange", exchange, EXCHANGES)
    _check_devices([head, *placement.device_of], cluster)
    _check_numbers("placement.seconds", placement.seconds, cluster.num_devices)
    _check_numbers("column_bytes", [column_bytes])
    _check_numbers("head_seconds", [head_seconds])
    counts = Counter(placement.device_of)
    if exchange == "direct":
        others = [(cluster.link(cluster.hosts[head], cluster.hosts[d]), n) for d, n in counts.items() if d != head]
        gather = spread = sum(link.seconds(column_bytes * n) for link, n in others)
        reduce = 2 * sum(link.seconds(total_bytes) for link, _ in others)
    else:
        group = sorted({head, *counts})
        num_bytes = column_bytes * max(counts.values()) * len(group)
        gather = collective_seconds("all-gather", num_bytes, cluster, [group], algorithm=exchange)
        spread = collective_seconds("reduce-scatter", num_bytes, cluster, [group], algorithm=exchange)
        reduce = collective_seconds("all-reduce", total_bytes, cluster, [group], algorithm=exchange)
    on_head = [head_seconds if d == head else 0.0 for d in range(cluster.num_devices)]
    return _step(forward_share, placement.seconds, on_head, gather=gather, spread=spread, reduce=reduce)


def _step(
    forward_share: float,
    lane_seconds: Sequence[float],
    head_seconds: Sequence[float],
    *,
    gather: float,
    spread: float,
    reduce: float,
) -> StepTime:
    """The step from each device's computation and the times of the communication phases."""
    if not 0 <= forward_share <= 1:
        raise InputError(f"forward_share is {forward_share}: give a share from 0 to 1, such as 0.33")
    if not max(lane_seconds) > 0:
        raise InputError("no device has anything to compute: give at least one of them lane seconds above 0")
    most = max(lane_seconds)
    busy = tuple(lane + head for lane, head in zip(lane_seconds, head_seconds, strict=True))
    return StepTime(forward_share * most, gather, max(head_seconds), spread, (1 - forward_share) * most, reduce, busy)


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise InputError(f"{what} {name!r} is unknown: use one of {', '.join(known)}")


def _check_numbers(field: str, values: Sequence[float], count: int = 1) -> None:
    if len(values) != count:
        raise InputError(f"{field} has {len(values)} entries for {count} devices: give one for each")
    for value in values:
        if not 0 <= value < math.inf:
            raise InputError(f"{field} holds {value}: numbers must be finite and 0 or more")


def _check_devices(devices: Iterable[int], cluster: Cluster) -> None:
    for device in devices:
        if not 0 <= device < cluster.num_devices:
            raise InputError(
                f"device {device} is not in the cluster: its {cluster.num_devices} devices are numbered from 0"
            )

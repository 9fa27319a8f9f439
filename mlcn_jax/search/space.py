"""Lane mixes that fill devices: which lanes fit where, random and weighted draws, and small changes.

A device is a bucket with limits on memory and work (FLOPs or seconds of a training step). A mix gives each device its
lanes, as indices into the space's menu of lanes. Drawing mixes is pure Python.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcn_jax.errors import InputError
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.nn.spec import ModelSpec
from mlcn_jax.placement import cost
from mlcn_jax.placement.profile import DeviceProfile
from mlcn_jax.search.budget import FORM, Bucket, amount, parse_device, read_number

Mix = tuple[tuple[int, ...], ...]

MOVES = ("swap", "widen", "deepen", "move", "add", "remove")
_MOST_LANES = 10_000  # on all devices; a model may have as many of a kind
_REDRAWS = 10  # of a device that ends less full than the tolerance requires
_MOVE_TRIES = 100  # of a mutation, before a new mix is drawn
_NEWCOMERS = 0.1  # when a mutated mix is filled up: share of the new lanes that are drawn from the whole menu


class NoLaneFits(InputError):
    """No device has room for any lane."""


class Space:
    """All mixes of lanes that fit the given devices.

    Args:
      menu: the lanes to choose from.
      buckets: the devices.
      tolerance: share of a device's scarcer resource that may stay unused, and by which the fullest device may exceed
        the mean of all; devices stay emptier than that only if no lane is small enough.

    Raises:
      NoLaneFits: no lane fits any device; the message names the smallest.
    """

    def __init__(self, menu: Sequence[LaneSpec], buckets: Sequence[Bucket], tolerance: float = 0.05):
        self.menu, self.buckets, self.tolerance = tuple(menu), tuple(buckets), tolerance
        self._place_of = {lane: i for i, lane in enumerate(self.menu)}
        if not any(bucket.fits([i]) for bucket in buckets for i in range(len(menu))):
            smallest = min(range(len(menu)), key=buckets[0].loads.__getitem__)
            rows = [
                f"  {bucket.name} has {amount(bucket.limit, bucket.unit)} and {amount(bucket.memory_bytes, 'bytes')}, "
                + f"it needs {amount(bucket.loads[smallest], bucket.unit)} and "
                + amount(bucket.lane_bytes[smallest], "bytes")
                for bucket in buckets
            ]
            raise NoLaneFits(
                f"search.devices: not even the smallest lane, {menu[smallest]}, fits any device:\n"
                + "\n".join(rows)
                + "\ngive larger budgets or a smaller batch (the decoder has its share of the first device)"
            )

    def draw(self, rng: random.Random, start: Mix = (), weights: Sequence[float] = ()) -> Mix:
        """A maximal mix: picks a device that is not full and a lane that fits it, until no lane fits anywhere.

        Lanes are drawn uniformly among those that still fit. A device that ends less full than the tolerance requires
        is emptied and drawn again, up to `_REDRAWS` times, and its fullest draw is kept. With a tolerance of 1 nothing
        is drawn again, as in the thesis.

        Args:
          rng: the random generator.
          start: lanes to begin with, for each device; empty for none.
          weights: relative probability of each lane of the menu; empty for equal ones.

        Source: do Rosario 2021 (thesis), chapter 6.
        """
        begin = start or ((),) * len(self.buckets)
        lanes = [list(own) for own in begin]
        best: list[list[int]] = [[] for _ in lanes]
        left = [_REDRAWS] * len(lanes)
        room = [bucket.room(own) for bucket, own in zip(self.buckets, lanes, strict=True)]
        unfilled = list(range(len(lanes)))
        while unfilled:
            d = unfilled[int(rng.random() * len(unfilled))]
            bucket, (load, free) = self.buckets[d], room[d]
            lane = bucket.draw(len(lanes[d]), load, free, rng, weights)
            if lane is not None:
                lanes[d].append(lane)
                room[d] = load + bucket.loads[lane], free - bucket.lane_bytes[lane]
                continue
            best[d] = max(best[d], lanes[d], key=bucket.fill)
            if bucket.fill(best[d]) >= 1 - self.tolerance or not left[d] or len(lanes[d]) == len(begin[d]):
                unfilled.remove(d)
                continue
            left[d] -= 1
            lanes[d] = list(begin[d])
            room[d] = bucket.room(lanes[d])
        return tuple(tuple(sorted(own)) for own in best)

    def mutate(self, rng: random.Random, mix: Mix) -> tuple[Mix, str]:
        """A different mix, one move away and filled up again, and the name of the move (`MOVES`).

        Equal lanes are swapped for others, widened or deepened by one, or removed all at once, since changing one of
        dozens would make no visible difference; a single lane is added, or moved to another device. Lanes drawn at
        random are removed to make room. The freed space is filled with lanes the mix already has and, now and then,
        others from the menu. If no move changes the mix, a new one is drawn ("draw").
        """
        for _ in range(_MOVE_TRIES):
            move, lanes = rng.choice(MOVES), [list(own) for own in mix]
            if self._apply(move, lanes, rng):
                kept = list(itertools.chain.from_iterable(lanes))
                weights = [_NEWCOMERS / len(self.menu)] * len(self.menu)
                for lane in kept:
                    weights[lane] += (1 - _NEWCOMERS) / len(kept)
                found = self.draw(rng, start=tuple(map(tuple, lanes)), weights=weights)
                if self.text(found) != self.text(mix) and self.imbalance(found) <= max(
                    self.tolerance, self.imbalance(mix)
                ):
                    return found, move
        return self.draw(rng), "draw"

    def _apply(self, move: str, lanes: list[list[int]], rng: random.Random) -> bool:
        """Makes a move, and room for it, in `lanes`; returns whether that was possible."""
        d = rng.choice([d for d, own in enumerate(lanes) if own])
        old = rng.choice(lanes[d])
        any_lane = rng.randrange(len(self.menu))
        if move == "add":
            return self._put(any_lane, lanes, d, rng)
        if move == "move":
            lanes[d].remove(old)
            others = [e for e in range(len(lanes)) if e != d]
            return bool(others) and self._put(old, lanes, rng.choice(others), rng)
        spec, new = self.menu[old], any_lane if move == "swap" else None
        if move in ("widen", "deepen"):
            larger = (spec.width + 1, spec.depth) if move == "widen" else (spec.width, spec.depth + 1)
            new = self._place_of.get(LaneSpec(spec.kind, *larger))
            if new is None:
                return False
        made = move == "remove"
        for e, own in enumerate(lanes):
            lanes[e] = [lane for lane in own if lane != old]
            if new is not None:
                for _ in range(own.count(old)):
                    made |= self._put(new, lanes, e, rng)
        return made and new != old

    def _put(self, new: int, lanes: list[list[int]], d: int, rng: random.Random) -> bool:
        """Adds a lane to device `d`, removing other kinds of lanes to make room; returns whether it then fits."""
        while not self.buckets[d].fits([*lanes[d], new]):
            others = [i for i, lane in enumerate(lanes[d]) if lane != new]
            if not others:
                return False
            lanes[d].pop(rng.choice(others))
        lanes[d].append(new)
        return True

    def imbalance(self, mix: Mix) -> float:
        """How much fuller the fullest device is than the mean of all that hold lanes, as a fraction of that mean."""
        fills = [bucket.fill(lanes) for bucket, lanes in zip(self.buckets, mix, strict=True) if lanes]
        return max(fills) / (sum(fills) / len(fills)) - 1

    def memory_bytes(self, mix: Mix) -> float:
        """Memory of the lanes of all devices together."""
        return sum(bucket.lane_bytes[lane] for bucket, own in zip(self.buckets, mix, strict=True) for lane in own)

    def report(self, mix: Mix) -> list[dict[str, float | str | None]]:
        """For each device: its name, its lanes, their load and memory, the limits of both, and how full it is."""
        return [
            {
                "device": bucket.name,
                "lanes": self.text((lanes,)),
                bucket.unit: bucket.load(lanes),
                f"{bucket.unit}_limit": bucket.limit,
                "memory_bytes": sum(bucket.lane_bytes[lane] for lane in lanes),
                "memory_limit_bytes": bucket.memory_bytes if math.isfinite(bucket.memory_bytes) else None,
                "fill": bucket.fill(lanes),
            }
            for bucket, lanes in zip(self.buckets, mix, strict=True)
        ]

    def text(self, mix: Mix) -> str:
        """The lanes of all devices in the form of `model.lanes`, in the order of the menu."""
        counts = [0] * len(self.menu)
        for lane in itertools.chain.from_iterable(mix):
            counts[lane] += 1
        return ",".join(f"{lane}*{count}" for lane, count in zip(self.menu, counts, strict=True) if count)

    def taste(self, kinds: Mapping[str, float], width: float, depth: float, spread: float) -> list[float]:
        """Weights of the menu for `draw`, which fall with the distance from a width and a depth.

        Args:
          kinds: weights of kinds, 0 or more; a kind that is not there has 1.
          width, depth: the width and the depth with the highest weight.
          spread: standard deviation of the weights in width and depth, above 0.
        """
        return [
            1e-12
            + kinds.get(lane.kind, 1.0)
            * math.exp(-((lane.width - width) ** 2 + (lane.depth - depth) ** 2) / (2 * spread**2))
            for lane in self.menu
        ]


def make_space(
    devices: str,
    spec: ModelSpec,
    batch_size: int,
    *,
    kinds: Sequence[str],
    max_width: int,
    max_depth: int,
    baseline: str,
    tolerance: float,
    costs: str = "exact",
) -> Space:
    """The space of mixes for the devices that a text describes.

    The text has one entry per device, separated by commas. An entry consists of words `NAME=VALUE`, and `*COUNT` for
    that many equal devices. Its compute limit is either `flops` of a training step: a number with K, M, G or T, or with
    x for multiples of the baseline's; or `seconds` of a training step together with the device's `profile`, a file.
    `memory`, such as 12GiB, is optional: the default is the profile's, or no limit without one. The first device also
    holds the decoder, whose memory is set aside.

    With published costs, lanes take what the thesis's formulas say, whatever their kind, the images and the batch:
    memory by its formula 6.1 (`cost.published_memory_bytes`), its constant part for every lane; and, for lack of a
    formula of a lane's FLOPs, its cost of a lane in chapter 5, `width^2 * depth` (`cost.published_cost` on the
    fastest device). `flops` is then a multiple of the baseline's cost, and no memory is set aside for the decoder.

    Args:
      devices: the text, such as "memory=12GiB flops=0.5x*8".
      spec: a model with the right images, classes and decoder; its lanes do not matter.
      batch_size: of a training step.
      kinds, max_width, max_depth: the lanes to choose from.
      baseline: lanes, as text, whose FLOPs are the unit x.
      tolerance: see `Space`.
      costs: `exact` or `published`.

    Raises:
      InputError: the text cannot be read, describes no device, or is not in multiples of the baseline with published
        costs; `NoLaneFits` if there is no room for any lane.

    Source: do Rosario 2021 (thesis), chapters 5 and 6.
    """
    published = costs == "published"
    menu = [LaneSpec(k, w, d) for k in kinds for w in range(1, max_width + 1) for d in range(1, max_depth + 1)]

    def load_of(lane: LaneSpec) -> float:
        return cost.published_cost(lane) if published else float(cost.cost_of(spec, lane).step_flops(batch_size))

    def bytes_of(lane: LaneSpec) -> float:
        if published:
            return cost.published_memory_bytes(lane)
        return float(cost.cost_of(spec, lane).held_bytes(batch_size))

    unit = sum(group.count * load_of(group.spec) for group in parse_lanes(baseline))
    buckets: list[Bucket] = []
    for values, count in _entries(devices):
        if len(buckets) + count > _MOST_LANES:
            raise InputError(
                f"search.devices={devices!r} describes {len(buckets) + count:,} devices or more, and models of at most "
                f"{_MOST_LANES:,} lanes are tried: give fewer devices"
            )
        if published and not values.get("flops", "").endswith("x"):
            raise InputError(
                f"search.devices={devices!r}: search.costs is 'published', whose formulas give neither FLOPs nor "
                "seconds: give each device's flops= as a multiple of the baseline's, such as 'memory=12GiB flops=4x*8'"
            )
        profile = DeviceProfile.load(_profile_of(values)) if "profile" in values else None
        if profile is None:
            limit = read_number(values["flops"], "flops", unit)
            loads = [load_of(lane) for lane in menu]
            lane_bytes = [bytes_of(lane) for lane in menu]
        else:
            limit = read_number(values["seconds"], "seconds", unit)
            loads = [profile.model_seconds([cost.cost_of(spec, lane)], batch_size) for lane in menu]
            lane_bytes = [profile.lane_bytes(cost.cost_of(spec, lane), batch_size) for lane in menu]
        memory = read_number(values["memory"], "memory", unit) if "memory" in values else None
        bucket = Bucket(
            name=profile.device if profile else "device",
            unit="seconds" if profile else "cost" if published else "flops",
            limit=limit,
            memory_bytes=memory or (profile.memory_bytes if profile else math.inf),
            loads=tuple(loads),
            lane_bytes=tuple(lane_bytes),
            crowding=profile.crowding if profile else 0.0,
            crowded_lanes=_crowded_lanes(profile, batch_size),
        )
        buckets += [dataclasses.replace(bucket, name=f"{bucket.name} {len(buckets) + i}") for i in range(count)]
    if not buckets:
        raise InputError(f"search.devices={devices!r} describes no device: give one or more, {FORM}")
    rooms = [min(b.limit / min(b.loads), b.memory_bytes / min(b.lane_bytes)) for b in buckets]
    if sum(rooms) > _MOST_LANES:
        raise InputError(
            f"search.devices={devices!r} has room for {sum(rooms):,.0f} lanes, and at most {_MOST_LANES:,} are tried: "
            "give smaller limits"
        )
    if published:
        return Space(menu, buckets, tolerance)
    free = max(0.0, buckets[0].memory_bytes - cost.head_bytes(spec, batch_size, max(1, sum(map(int, rooms)))))
    buckets[0] = dataclasses.replace(buckets[0], memory_bytes=free)
    return Space(menu, buckets, tolerance)


def profiles_of(devices: str) -> list[Path]:
    """The device profiles that a text for `make_space` names."""
    return [_profile_of(values) for values, _ in _entries(devices) if "profile" in values]


def _entries(devices: str) -> list[tuple[dict[str, str], int]]:
    return [parse_device(entry) for entry in devices.split(",") if entry.strip()]


def _profile_of(values: dict[str, str]) -> Path:
    return Path(values["profile"]).expanduser()


def _crowded_lanes(profile: DeviceProfile | None, batch_size: int) -> tuple[float, float]:
    if profile is None or profile.crowded_images is None:
        return 1.0, math.inf
    low, high = profile.crowded_images
    return low / batch_size, high / batch_size

"""A pool of lanes: a shared folder in which workers train the lanes that `lanes.toml` names, and join them.

A worker claims the next unclaimed lane with a lock that the operating system releases when the worker ends, however it
ends. The lane's workdir is an ordinary run, so the next worker to claim it resumes from its newest checkpoint. Workers
exchange nothing: the folder must be on a file system with locks that hold between the machines.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import platform
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlcn_jax import pretrained
from mlcn_jax.analysis.join import join, settings_in_common
from mlcn_jax.config import RunConfig, flat
from mlcn_jax.errors import Diverged, InputError, differences, is_lack_of_memory
from mlcn_jax.files import make_folder, read_json, try_lock, write_json
from mlcn_jax.nn.lane_list import parse_lanes
from mlcn_jax.nn.lanes import LaneSpec
from mlcn_jax.placement.cost import forward_flops
from mlcn_jax.settings import DataSettings, check
from mlcn_jax.training import loop
from mlcn_jax.training.apart import check_lanes_apart

_log = logging.getLogger(__name__)

FILE = "lanes.toml"
HISTORY = "workers.jsonl"
_JOINED = "joined-"  # and the number of lanes: the name of a claim
_POLL_SECONDS = 5.0
_Process = tuple[str, int]  # its host, and its number there


# What the file may hold: the type of a value, [type] for a list of one or more, and its description in messages.
_Keys = Mapping[str, tuple[Any, str]]
_SET = (dict, "a table of fields of the configuration, such as [set] with train.num_epochs = 15")
_KEYS: _Keys = {
    "config": (str, 'text: a packaged configuration such as "resnet_cifar", or a file'),
    "join_at": ([int], "a list of numbers of lanes, such as [4, 8]"),
    "set": _SET,
    "lanes": ([dict], 'tables such as [[lanes]] with kind = "resnet:w2d2" and seeds = [0, 1]'),
}
_LANE_KEYS: _Keys = {
    "kind": (str, 'text for one lane, such as "resnet:w2d2"'),
    "seeds": ([int], "a list of integers, 0 or more, such as [0, 1]"),
    "set": _SET,
}
_OWN = {"model.lanes", "model.lane_seeds", "train.lanes_apart"}  # fields that kind and seeds decide


@dataclasses.dataclass(frozen=True)
class PoolLane:
    """A lane to train: its name, its workdir of that name, the configuration of its run, and its work.

    `flops` are epochs times the FLOPs of one image's forward pass: they rank lanes that train on the same images.
    """

    name: str
    workdir: Path
    config: RunConfig
    flops: int

    @property
    def is_finished(self) -> bool:
        """Whether its run has ended, with this configuration."""
        return _read(self.workdir / "summary.json").get("config_hash") == self.config.hash()

    @property
    def failure(self) -> str:
        """Why its training failed; empty if it did not."""
        return _read(self.workdir / "failed.json").get("reason", "")

    @property
    def is_begun(self) -> bool:
        """Whether a worker has saved a checkpoint of it."""
        return any((self.workdir / "checkpoints").glob("[0-9]*"))


def _read(path: Path) -> dict[str, Any]:
    """A JSON file; {} if there is none, since other workers and users may remove it at any moment."""
    try:
        return read_json(path)
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise


@dataclasses.dataclass(frozen=True)
class Pool:
    """The lanes to train, in the order of the columns of joined models, and how many must be finished for each model.

    Without such numbers, one model is joined of all finished lanes when none is left to train.
    """

    folder: Path
    lanes: tuple[PoolLane, ...]
    join_at: tuple[int, ...]

    def joined(self, count: int) -> Path:
        """The workdir of the model of `count` lanes."""
        return self.folder / "joined" / str(count)

    def made_of(self, count: int) -> Path:
        """The file with the lanes of the model of `count` lanes, and the hashes of their configurations."""
        return self.folder / "joined" / f"{count}.json"


def read_pool(folder: Path, config_of: Callable[[str], RunConfig], changes: Mapping[str, Any] | None = None) -> Pool:
    """Reads `lanes.toml` of a folder.

    Args:
      folder: the folder of the pool.
      config_of: returns the configuration for a name or a file.
      changes: fields of the configuration that are set on this machine, such as `data.dir`.

    Raises:
      InputError: the file is missing or invalid, or the lanes of a run would depend on one another.
    """
    path = folder / FILE
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing: create it, with a config and [[lanes]] tables of kind and seeds, the lanes to train "
            '(see "Train lanes apart and join them" in the docs)'
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    _check_keys(path, given, _KEYS, {"config", "lanes"})
    with _named(path):
        config = config_of(given["config"]).replace(_changes(given))
    lanes: dict[tuple[LaneSpec, int], PoolLane] = {}
    first: dict[str, Any] = {}  # settings that all lanes must have
    shape_of = functools.cache(DataSettings.shape)  # it reads all images of a folder
    for entry in given["lanes"]:
        _check_keys(path, entry, _LANE_KEYS, {"kind", "seeds"})
        kind = entry["kind"]
        with _named(path):
            own, (group, *more) = config.replace(_changes(entry)), parse_lanes(kind)
        check(not more and group.count == 1, f"{path}: kind", kind, _LANE_KEYS["kind"][1])
        for seed in entry["seeds"]:
            run = own.replace({"model.lanes": kind, "model.lane_seeds": [seed], "train.lanes_apart": True})
            run = run.replace(dict(changes or {}))
            _check_places(path, run)
            check(
                run.parallel.processes == 1,
                f"{path}: parallel.processes",
                run.parallel.processes,
                "1: workers share no lane",
            )
            check(
                run.train.rounds.steps == 0,
                f"{path}: train.rounds.steps",
                run.train.rounds.steps,
                "0: workers share no lane",
            )
            share = run.data.validation_fraction
            expected = "above 0, as the weights of joined lanes are fitted on these images"
            check(share > 0, f"{path}: data.validation_fraction", share, expected)
            shape = shape_of(run.data)
            with _named(path):
                spec = run.model_spec(*shape)
                check_lanes_apart(run, spec)
            settings = settings_in_common(run)
            first = first or settings
            if rows := differences(first, settings, there="for the first lane", here=f"for {kind} with seed {seed}"):
                raise InputError(
                    f"{path}: lanes with different settings cannot be joined:\n" + "\n".join(rows) + "\nset these for "
                    "all lanes, in the table [set]"
                )
            if (group.spec, seed) in lanes:
                raise InputError(f"{path} names {group.spec} with seed {seed} twice: give each lane a seed of its own")
            name = kind.partition("*")[0].strip().replace(":", "_") + f"-s{seed}"
            flops = run.train.num_epochs * forward_flops(spec)
            lanes[group.spec, seed] = PoolLane(name, folder / "lanes" / name, run, flops)
    join_at = given.get("join_at", [])
    good = all(1 <= count <= len(lanes) for count in join_at)
    check(good, f"{path}: join_at", join_at, f"a list of numbers of lanes from 1 to {len(lanes)}")
    return Pool(folder, tuple(lanes.values()), tuple(join_at))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Names the file in errors of what it holds."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in a table `set`; raises InputError for those that the pool itself sets."""
    changes = flat(given.get("set", {}))
    if own := sorted(_OWN.intersection(changes)):
        raise InputError(f"set has {', '.join(own)}, which kind and seeds give: leave it out")
    return changes


def _check_places(path: Path, run: RunConfig) -> None:
    """Raises InputError if a worker that starts in another folder would read another model.

    Paths are part of a run, and so of whether a lane is finished: they cannot differ between machines.
    """
    for field, names in (("train.teacher", run.train.teacher.split(",")), ("init_from", [run.init_from])):
        for name in filter(None, map(str.strip, names)):
            same = name in pretrained.names() or Path(name).expanduser().is_absolute()
            check(same, f"{path}: {field}", name, "an absolute path, the same on all machines, or a packaged model")


def _check_keys(path: Path, given: Mapping[str, Any], known: _Keys, needed: set[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise InputError(f"{path} has unknown keys {', '.join(unknown)}; it may have {', '.join(sorted(known))}")
    if missing := sorted(needed - set(given)):
        raise InputError(f"{path} lacks {', '.join(missing)}")
    for name, value in given.items():
        kind, expected = known[name]
        check(_is_of(kind, value), f"{path}: {name}", value, expected)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value has a type of `_KEYS`; numbers must be 0 or more, and booleans are not numbers."""
    if isinstance(kind, list):
        return isinstance(value, list) and bool(value) and all(_is_of(kind[0], one) for one in value)
    return type(value) is kind and (kind is not int or value >= 0)


def work(
    pool: Pool,
    *,
    train: Callable[[RunConfig, Path], Any] = loop.train,
    join_lanes: Callable[..., Any] = join,
    poll_seconds: float = _POLL_SECONDS,
) -> dict[str, str]:
    """Trains lanes until none is left, and joins a model whenever enough are finished.

    While other workers train the remaining lanes, it waits, so that it can resume a lane if its worker dies. Returns
    the reasons for lanes that failed and for models that no worker has joined, by the names of their claims.

    Args:
      pool: the pool.
      train, join_lanes: functions that train a run in a workdir, and join workdirs (`join.join`).
      poll_seconds: how long to wait before looking again.

    Raises:
      InputError: this machine cannot train lanes that are left, or a joined model is of other lanes than the pool's.
      Stopped: a signal arrived; a checkpoint was saved.
    """
    _check_joined(pool)
    make_folder(pool.folder / "claims", "pool")
    cannot: dict[str, str] = {}
    while True:
        did = _join_next(pool, join_lanes, cannot) or _train_next(pool, train, cannot)
        failed = {lane.name: lane.failure for lane in pool.lanes if lane.failure}
        left = [lane for lane in pool.lanes if lane.name not in failed and not lane.is_finished]
        due = [f"{_JOINED}{count}" for count in _joins_due(pool)]
        if not did and not left and all(name in cannot for name in due):
            return failed | {name: cannot[name] for name in due}
        if not did and left and all(lane.name in cannot for lane in left):
            raise InputError(
                f"{len(left)} lanes are left that this machine cannot train; {left[0].name}: {cannot[left[0].name]}"
            )
        if not did:
            time.sleep(poll_seconds)


def _check_joined(pool: Pool) -> None:
    """Raises InputError if lanes of a joined model are not, or no longer, lanes of the pool."""
    hashes = {lane.name: lane.config.hash() for lane in pool.lanes}
    for made_of in sorted((pool.folder / "joined").glob("*.json")):  # of more lanes than there are now, too
        joined = made_of.with_suffix("")
        lanes = _read(made_of) if joined.name.isdigit() and joined.exists() else {}
        if others := [name for name, hashed in lanes.items() if hashes.get(name) != hashed]:
            raise InputError(
                f"{joined} was joined of lanes that {FILE} no longer has, or has with another "
                f"configuration: {', '.join(others)}. Move or remove that folder, and models that are due are joined "
                "of the lanes of now; or restore the lanes"
            )


def _train_next(pool: Pool, train: Callable[[RunConfig, Path], Any], cannot: dict[str, str]) -> bool:
    """Trains an unclaimed lane, begun ones first, then the largest; returns whether there was one.

    The largest first, so that no slow machine starts one when the others are almost done.
    """
    for lane in sorted(pool.lanes, key=lambda lane: (not lane.is_begun, -lane.flops)):
        if lane.name in cannot or lane.failure or lane.is_finished:
            continue
        lock = try_lock(pool.folder / "claims" / lane.name)
        if lock is None:
            continue
        try:
            if not lane.is_finished and not lane.failure:  # this may have changed since it was checked above
                done = sum(one.is_finished for one in pool.lanes)
                _log.info("%d of %d lanes are finished; taking %s", done, len(pool.lanes), lane.name)
                _train(lane, train, cannot)
                return True
        finally:
            lock.release()
    return False


def _train(lane: PoolLane, train: Callable[[RunConfig, Path], Any], cannot: dict[str, str]) -> None:
    _note(lane, "taken")
    try:
        with _left_to_others("train", lane.name, cannot):
            train(lane.config, lane.workdir)
            _note(lane, "finished")
    except Diverged as error:
        write_json(lane.workdir / "failed.json", {"reason": str(error)})
        _log.error("%s failed: %s", lane.name, error)
    finally:
        _note(lane, "left")


@contextlib.contextmanager
def _left_to_others(what: str, name: str, cannot: dict[str, str]) -> Iterator[None]:
    """Records why this machine cannot do something that another one may be able to do."""
    try:
        yield
    except (InputError, MemoryError, RuntimeError) as error:
        if not isinstance(error, InputError) and not is_lack_of_memory(error):
            raise
        cannot[name] = str(error) or type(error).__name__
        _log.error("this machine cannot %s %s and leaves it to others: %s", what, name, error)


def _joins_due(pool: Pool) -> list[int]:
    """Numbers of lanes of the models to join: enough lanes are finished, but the model does not exist yet."""
    left = [lane for lane in pool.lanes if not lane.is_finished]
    finished = len(pool.lanes) - len(left)
    in_the_end = [] if any(not lane.failure for lane in left) else [finished]
    due = [count for count in pool.join_at or in_the_end if 0 < count <= finished]
    return [count for count in due if not pool.joined(count).exists()]


def _join_next(pool: Pool, join_lanes: Callable[..., Any], cannot: dict[str, str]) -> bool:
    """Joins a model that is due and unclaimed; returns whether there was one."""
    for count in _joins_due(pool):
        name = f"{_JOINED}{count}"
        lock = None if name in cannot else try_lock(pool.folder / "claims" / name)
        if lock is None:
            continue
        try:
            if not pool.joined(count).exists():
                lanes = [lane for lane in pool.lanes if lane.is_finished][:count]
                _log.info("joining %d lanes to %s", count, pool.joined(count))
                pool.made_of(count).parent.mkdir(exist_ok=True)
                write_json(pool.made_of(count), {lane.name: lane.config.hash() for lane in lanes})
                with _left_to_others("join", name, cannot):
                    here = lanes[0].config.data.dir  # other machines may have the images elsewhere
                    join_lanes([lane.workdir for lane in lanes], pool.joined(count), data_dir=here)
                return True
        finally:
            lock.release()
    return False


def _note(lane: PoolLane, event: str) -> None:
    """Adds a line to the lane's history: what happened, in which process, and when, in seconds since 1970."""
    lane.workdir.mkdir(parents=True, exist_ok=True)
    line = {"event": event, "time": time.time(), "host": platform.node(), "process": os.getpid()}
    with open(lane.workdir / HISTORY, "a") as file:
        file.write(json.dumps(line) + "\n")


def overlaps(history: Path, killed: Mapping[_Process, float]) -> list[tuple[_Process, _Process]]:
    """Pairs of processes that had a lane at the same time, according to its history.

    Args:
      history: the lane's `workers.jsonl`.
      killed: when processes were killed, by their hosts and numbers, in seconds since 1970.
    """
    having = set[_Process]()
    found = []
    for event in map(json.loads, history.read_text().splitlines()):
        process = event["host"], event["process"]
        if event["event"] == "taken":
            found += [(other, process) for other in having if killed.get(other, float("inf")) > event["time"]]
            having.add(process)
        elif event["event"] == "left":
            having.discard(process)
    return found

"""A pool of lanes: a shared folder in which workers train the lanes that `lanes.toml` names, and join them.

A worker takes the next lane that nobody trains, by a lock that the operating system releases when the worker ends,
however it ends. The lane's workdir is a run like any other, so that whoever takes it next resumes from its newest
checkpoint. Workers exchange nothing: the folder must be on a file system whose locks hold between the machines.
"""

import dataclasses
import json
import logging
import os
import platform
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcn_jax.analysis.join import join
from mlcn_jax.config import RunConfig, flat
from mlcn_jax.errors import Diverged, InputError
from mlcn_jax.files import make_folder, read_json, try_lock, write_json
from mlcn_jax.placement.cost import forward_flops
from mlcn_jax.training import loop
from mlcn_jax.training.apart import check_lanes_apart

_log = logging.getLogger(__name__)

FILE = "lanes.toml"
HISTORY = "workers.jsonl"
_KEYS = {"config", "join_at", "set", "lanes"}
_LANE_KEYS = {"kind", "seeds", "set"}
_POLL_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class PoolLane:
    """A lane that is wanted: its name, which is that of its workdir, the run that trains it, and the work of that."""

    name: str
    workdir: Path
    config: RunConfig
    flops: int

    @property
    def is_finished(self) -> bool:
        """Whether its run has ended, with this configuration."""
        path = self.workdir / "summary.json"
        return path.exists() and read_json(path).get("config_hash") == self.config.hash()

    @property
    def failure(self) -> str:
        """Why its training failed; empty if it did not."""
        path = self.workdir / "failed.json"
        return read_json(path)["reason"] if path.exists() else ""

    @property
    def is_begun(self) -> bool:
        """Whether a worker has saved a checkpoint of it."""
        return any((self.workdir / "checkpoints").glob("[0-9]*"))


@dataclasses.dataclass(frozen=True)
class Pool:
    """The lanes wanted, in the order of the columns of joined models, and after how many of them one is joined."""

    folder: Path
    lanes: tuple[PoolLane, ...]
    join_at: tuple[int, ...]

    def joined(self, count: int) -> Path:
        """The workdir of the model of `count` lanes."""
        return self.folder / "joined" / str(count)


def read_pool(folder: Path, config_of: Callable[[str], RunConfig], changes: Mapping[str, Any] | None = None) -> Pool:
    """Reads `lanes.toml` of a folder.

    Args:
      folder: the pool's.
      config_of: the configuration that a name or a file stands for.
      changes: fields of the configuration that are set on this machine, such as `data.dir`.

    Raises:
      InputError: the file is missing or not as it must be, or the lanes of a run would depend on one another.
    """
    path = folder / FILE
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing: it names the lanes that are wanted (docs/howto/lanes_apart.md)"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    _check_keys(path, given, _KEYS, {"config", "lanes"})
    tables = given["lanes"]
    if not isinstance(tables, list) or not all(
        isinstance(e, dict) and isinstance(e.get("seeds"), list) for e in tables
    ):
        raise InputError(f'{path}: lanes must be tables such as [[lanes]] with kind = "resnet:w2d2" and seeds = [0, 1]')
    config = config_of(str(given["config"])).replace(flat(given.get("set", {})))
    lanes: dict[str, PoolLane] = {}
    for entry in tables:
        _check_keys(path, entry, _LANE_KEYS, {"kind", "seeds"})
        own = config.replace(flat(entry.get("set", {})))
        for seed in entry["seeds"]:
            run = own.replace(
                {"model.lanes": str(entry["kind"]), "model.lane_seeds": [seed], "train.lanes_apart": True}
            )
            run = run.replace(dict(changes or {}))
            spec = run.model_spec(*run.data.shape())
            check_lanes_apart(run, spec)
            name = f"{entry['kind'].replace(':', '_')}-s{seed}"
            if name in lanes:
                raise InputError(
                    f"{path} names {entry['kind']} with seed {seed} twice: give each lane a seed of its own"
                )
            lanes[name] = PoolLane(name, folder / "lanes" / name, run, run.train.num_epochs * forward_flops(spec))
    join_at = tuple(given.get("join_at", [len(lanes)]))
    if not all(type(count) is int and 1 <= count <= len(lanes) for count in join_at):
        raise InputError(f"{path}: join_at is {list(join_at)}; it must list numbers of lanes from 1 to {len(lanes)}")
    return Pool(folder, tuple(lanes.values()), join_at)


def _check_keys(path: Path, given: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise InputError(f"{path} has {', '.join(unknown)}; it may have {', '.join(sorted(known))}")
    if missing := sorted(needed - set(given)):
        raise InputError(f"{path} lacks {', '.join(missing)}")


def work(
    pool: Pool,
    *,
    train: Callable[[RunConfig, Path], Any] = loop.train,
    join_lanes: Callable[[Sequence[Path], Path], Any] = join,
    poll_seconds: float = _POLL_SECONDS,
) -> dict[str, str]:
    """Trains lanes until none is left, joins when enough have come, and returns the lanes that failed, with reasons.

    While other workers train what is left, it waits, to resume a lane whose worker dies.

    Args:
      pool: the pool.
      train, join_lanes: what trains a run in a workdir, and joins workdirs.
      poll_seconds: how long to wait before it looks again.

    Raises:
      InputError: this machine cannot train lanes that are left.
      Stopped: a signal arrived; a checkpoint was saved.
    """
    make_folder(pool.folder / "claims", "pool")
    cannot: dict[str, str] = {}
    while True:
        did = _join_next(pool, join_lanes) or _train_next(pool, train, cannot)
        failed = {lane.name: lane.failure for lane in pool.lanes if lane.failure}
        left = [lane for lane in pool.lanes if lane.name not in failed and not lane.is_finished]
        if not did and not left and not _joins_due(pool):
            return failed
        if not did and left and all(lane.name in cannot for lane in left):
            raise InputError(
                f"{len(left)} lanes are left that this machine cannot train; {left[0].name}: {cannot[left[0].name]}"
            )
        if not did:
            time.sleep(poll_seconds)


def _train_next(pool: Pool, train: Callable[[RunConfig, Path], Any], cannot: dict[str, str]) -> bool:
    """Trains a lane that nobody trains, begun ones first, then the largest; returns whether there was one.

    The largest first, so that no slow machine begins one when the others are about to end.
    """
    for lane in sorted(pool.lanes, key=lambda lane: (not lane.is_begun, -lane.flops)):
        if lane.name in cannot or lane.failure or lane.is_finished:
            continue
        lock = try_lock(pool.folder / "claims" / lane.name)
        if lock is None:
            continue
        try:
            if not lane.is_finished and not lane.failure:  # as it may be since it was looked at
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
        train(lane.config, lane.workdir)
        _note(lane, "finished")
    except Diverged as error:
        write_json(lane.workdir / "failed.json", {"reason": str(error)})
        _log.error("%s failed: %s", lane.name, error)
    except (InputError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cannot[lane.name] = str(error) or type(error).__name__
        _log.error("this machine cannot train %s, which is left to others: %s", lane.name, error)
    finally:
        _note(lane, "left")


def _joins_due(pool: Pool) -> list[int]:
    finished = sum(lane.is_finished for lane in pool.lanes)
    return [count for count in pool.join_at if count <= finished and not pool.joined(count).exists()]


def _join_next(pool: Pool, join_lanes: Callable[[Sequence[Path], Path], Any]) -> bool:
    """Joins a model that is due and that nobody joins; whether there is one."""
    for count in _joins_due(pool):
        lock = try_lock(pool.folder / "claims" / f"joined-{count}")
        if lock is None:
            continue
        try:
            if not pool.joined(count).exists():
                workdirs = [lane.workdir for lane in pool.lanes if lane.is_finished][:count]
                _log.info("joining %d lanes to %s", count, pool.joined(count))
                join_lanes(workdirs, pool.joined(count))
                return True
        finally:
            lock.release()
    return False


def _note(lane: PoolLane, event: str) -> None:
    """Adds a line to the lane's history: who did what, and when in seconds since 1970."""
    lane.workdir.mkdir(parents=True, exist_ok=True)
    line = {"event": event, "time": time.time(), "host": platform.node(), "process": os.getpid()}
    with open(lane.workdir / HISTORY, "a") as file:
        file.write(json.dumps(line) + "\n")


def overlaps(history: Path, killed: Mapping[int, float]) -> list[tuple[int, int]]:
    """Pairs of processes that had a lane at the same time, according to its history.

    Args:
      history: the lane's `workers.jsonl`.
      killed: when processes were killed, by their numbers, in seconds since 1970.
    """
    since: dict[int, float] = {}
    found = []
    for event in map(json.loads, history.read_text().splitlines()):
        process = event["process"]
        if event["event"] == "taken":
            found += [(other, process) for other in since if killed.get(other, float("inf")) > event["time"]]
            since[process] = event["time"]
        elif event["event"] == "left":
            since.pop(process, None)
    return found

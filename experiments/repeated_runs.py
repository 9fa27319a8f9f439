"""A list of trainings or timings for a table or figure: each run once and resumed where it stopped, one JSON a run."""

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from experiments import data_parts
from experiments.published_rows import NUM_EPOCHS
from mlcn_jax import files, host
from mlcn_jax.config import RunConfig, flat
from mlcn_jax.errors import Diverged, InputError, Stopped, differences, is_lack_of_memory
from mlcn_jax.files import read_json, write_json
from mlcn_jax.training import loop
from mlcn_jax.training.metrics import read_rows

_log = logging.getLogger("mlcn_jax.repeated_runs")

Facts = Mapping[str, Any]
_AGAIN_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much of what was published is run.

    Attributes:
      name: of the scale.
      num_epochs: of each run; 0 leaves them as configured.
      num_steps: at most, of each run; 0 is no limit.
      num_train, num_test: images, a fixed part of each class; 0 takes all.
    """

    name: str
    num_epochs: int
    num_steps: int = 0
    num_train: int = 0
    num_test: int = 0


def scales(smoke_steps: int, smoke_images: int = 600, cpu_images: int = 0) -> dict[str, Scale]:
    """Those of a script: 100 test images belong to the training images of `smoke`, and all to those of `cpu`."""
    smoke = Scale("smoke", 1, smoke_steps, smoke_images, num_test=100)
    return {"smoke": smoke, "cpu": Scale("cpu", 3, num_train=cpu_images), "full": Scale("full", NUM_EPOCHS)}


@dataclasses.dataclass(frozen=True)
class Request:
    """What any script of this kind is asked for.

    Attributes:
      workdir: folder of the runs.
      scale: how much of what was published is run.
      repeats: trainings of each, seeds 0, 1, ...
      minutes: after which it stops; 0 has no end.
      directories: the folder of each dataset; empty where it is to be downloaded.
      command: the command line, without folders, for the record.
    """

    workdir: Path
    scale: Scale
    repeats: int
    minutes: float
    directories: Mapping[str, str]
    command: str


@functools.cache
def commit() -> str:
    """The commit of the code in this process, with `+` if files differ from it; empty where there is no Git."""
    here = Path(__file__).parent
    try:
        ask = functools.partial(subprocess.run, cwd=here, check=True, capture_output=True, text=True)
        found = ask(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = ask(["git", "status", "--porcelain", "--untracked-files=no", "--", "*.py"]).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found + "+" * bool(changed)


class Series:
    """The runs of one script in one workdir.

    A run is told apart by its facts, such as its row and its seed: `configure(**facts)` gives its configuration, whose
    length the scale decides.

    Args:
      request: whose workdir holds runs of one scale.
      script, version: what may go on with the runs in the workdir: the same script, in the same version.
      configure: makes a configuration of a run's facts.
      keep_models: whether the checkpoints of a run stay when it has ended.
      measure: more for the record of a run, from its folder and its summary.
      kept: results that are kept with the code: runs in them with the settings of now have ended, and need not be in
        `workdir`; those on another copy of the images have not. None if there are none.
      instead: gives what a run measures, from its configuration and its facts, where nothing is trained and no images
        are needed; None to train.

    Attributes:
      marker: script, version and scale, kept in `workdir/runs.json`.

    Raises:
      InputError: the workdir holds runs of something else.
    """

    def __init__(
        self,
        request: Request,
        script: str,
        version: int,
        configure: Callable[..., RunConfig],
        keep_models: bool,
        measure: Callable[[Path, dict[str, Any]], dict[str, Any]] | None = None,
        kept: Path | None = None,
        instead: Callable[[RunConfig, Facts], dict[str, Any]] | None = None,
    ):
        self.request, self.workdir, self.scale = request, request.workdir, request.scale
        self._configure, self._keep_models, self._measure = configure, keep_models, measure
        self._kept, self._instead = kept, instead
        self._data: dict[str, tuple[str, dict[str, Any]]] = {}
        self.marker = {"script": script, "version": version, "scale": dataclasses.asdict(self.scale)}
        path = self.workdir / "runs.json"
        if path.exists() and (stored := read_json(path)) != self.marker:
            mine, theirs = flat(self.marker), flat(stored)
            raise InputError(
                f"{self.workdir} holds runs of another script, another version of it or another scale:\n"
                + "\n".join(differences(theirs, mine, mine | theirs))
                + "\ntheir results cannot stand beside these: give another --workdir"
            )

    def records(self) -> list[dict[str, Any]]:
        """What is known of every run that has ended.

        Raises:
          InputError: one was made with other settings than its facts stand for now.
        """
        found = [(path, read_json(path)) for path in sorted(self.workdir.glob("runs/**/run.json"))]
        for path, record in found:
            self._check(path, record)
        mine = [record for _, record in found]
        here = [record["facts"] for record in mine]
        return [record for record in self.kept_records() if record["facts"] not in here] + mine

    def kept_records(self) -> list[dict[str, Any]]:
        """Those in the results kept with the code that were made with the settings of now."""
        if self._kept is None or not self._kept.exists():
            return []
        stored = read_json(self._kept)
        if any(stored.get(name) != value for name, value in self.marker.items()):
            return []
        return [record for record in stored["runs"] if not record["data"]["copy"] and self._is_of_now(record)]

    def _is_of_now(self, record: Mapping[str, Any]) -> bool:
        try:
            return record["config_hash"] in self._hashes(self._config(record["facts"]))
        except KeyError:  # a row that there is no more
            return False

    def train(
        self,
        runs: Sequence[Facts],
        done: Callable[[], None],
        afterwards: Sequence[Callable[[], None]] = (),
        again: Sequence[Facts] = (),
        first: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Trains every run that has not ended yet, in the order given, then does what is to be done `afterwards`.

        `done` is called after each run, and after each thing done afterwards. The models of `again` are needed: kept
        results do not count for these. `first` is done before the first run, within the minutes of the request, and
        is given a check to call between its parts: it raises Stopped when the minutes are over.

        A run that diverges or finds too little device memory ends with the reason in its record.

        When the minutes of the request are over, the run in progress saves a checkpoint and nothing more is begun.

        Args:
          runs: facts of each.

        Raises:
          InputError: a run cannot be trained, or another process trains in the workdir.
          Stopped: a signal came, or the minutes are over.
        """
        with files.hold(self.workdir), _Limit(self.request.minutes) as limit:
            write_json(self.workdir / "runs.json", self.marker)
            ended = [r["facts"] for r in self.records() if r["facts"] not in again or self._is_here(r["facts"])]
            waiting = [facts for facts in runs if facts not in ended]
            if first:
                left = f"{len(runs) - len(waiting)} of {len(runs)} runs have ended"
                with limit.telling(left):
                    first(functools.partial(limit.check, left))
            for i, facts in enumerate(waiting):
                left = f"{len(runs) - len(waiting) + i} of {len(runs)} runs have ended"
                with limit.telling(left):
                    _log.info("%s; next is %s", left, self._folder(facts).relative_to(self.workdir))
                    record = self._train(facts)
                self._folder(facts).mkdir(parents=True, exist_ok=True)
                write_json(self._folder(facts) / "run.json", record)
                if not self._keep_models:
                    shutil.rmtree(self._folder(facts) / "checkpoints", ignore_errors=True)
                done()
            for do in afterwards:
                limit.check(f"{len(runs)} of {len(runs)} runs have ended")
                do()
                done()

    def _train(self, facts: Facts) -> dict[str, Any]:
        config, folder = self._config(facts), self._folder(facts)
        record: dict[str, Any] = {
            "facts": dict(facts),
            "command": self.request.command,
            "config_hash": self._hashes(config)[0],
        }
        record["config"] = config.replace({"data.dir": "", "data.cache_dir": ""}).to_dict()
        if self._instead is None:
            directory, record["data"] = self._images(config)
            config = config.replace({"data.dir": directory})
        record |= host.environment() | {"commit": commit()}
        try:
            found = self._instead(config, facts) if self._instead else loop.train(config, folder)
        except (Diverged, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_lack_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # which may hold what there was no memory for
            record["failed"] = str(error).splitlines()[0]
            _log.error("%s failed: %s; remove its folder to try it again", folder, record["failed"])
        else:
            record |= found if self._instead else self._of_training(found, config, folder, record["data"])
        return record | {"date": host.today()}

    def _images(self, config: RunConfig) -> tuple[str, dict[str, Any]]:
        """The folder of a run's images, and facts about them."""
        name, scale = config.data.name, self.scale
        if name not in self._data:
            self._data[name] = data_parts.prepare(config.data, self.workdir / "data", scale.num_train, scale.num_test)
        return self._data[name]

    def _of_training(
        self, summary: dict[str, Any], config: RunConfig, folder: Path, data_facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What a training gives."""
        found = _measured(summary, folder, config.data.validation_fraction > 0)
        if found["images_per_second"]:
            found["seconds_per_epoch"] = data_facts["all_train_images"] / found["images_per_second"]
        return found | (self._measure(folder, summary) if self._measure else {})

    def _config(self, facts: Facts) -> RunConfig:
        config = self._configure(**facts)
        epochs = self.scale.num_epochs or config.train.num_epochs
        return config.replace({"train.num_epochs": epochs, "train.num_steps": self.scale.num_steps})

    def _hashes(self, config: RunConfig) -> tuple[str, str]:
        """Of the settings: without the workdir in which a teacher may be, and with it, as older versions noted it."""
        teacher, plain = Path(config.train.teacher), config
        if config.train.teacher and teacher.is_relative_to(self.workdir):
            plain = config.replace({"train.teacher": str(teacher.relative_to(self.workdir))})
        return plain.hash(), config.hash()

    def held_out(self, record: Mapping[str, Any]) -> int:
        """How many of the training images of a run are held out for validation."""
        return round(self._config(record["facts"]).data.validation_fraction * record["data"]["train_images"])

    def _is_here(self, facts: Facts) -> bool:
        return (self._folder(facts) / "run.json").exists()

    def _folder(self, facts: Facts) -> Path:
        names = (value if isinstance(value, str) else f"{name}{value}" for name, value in facts.items())
        return self.workdir.joinpath("runs", *names)

    def _check(self, path: Path, record: dict[str, Any]) -> None:
        config, stored = self._config(record["facts"]), RunConfig.from_dict(record["config"])
        if record["config_hash"] in self._hashes(config):
            return
        mine, theirs = flat(config.to_dict()), flat(stored.to_dict())
        fields = [field for field in mine if stored.replace({field: mine[field]}).hash() != stored.hash()]
        raise InputError(
            f"{path} is of a run with other settings:\n"
            + "\n".join(differences(theirs, mine, fields))
            + f"\nremove {path.parent} to train it again, or give another --workdir"
        )


def _measured(summary: dict[str, Any], folder: Path, validated: bool) -> dict[str, Any]:
    """What the run of a summary gives; the test accuracy is left out where runs are compared on validation images.

    `validation_accuracy` is that after the last epoch, `best_validation_accuracy` that of the checkpoint that is kept,
    whose test accuracy a script may add.
    """
    split, rate = "validation" if validated else "test", summary["images_per_second"]
    curve = [round(100 * row["accuracy"], 4) for row in read_rows(folder / "metrics.jsonl") if row["split"] == split]
    found = {
        f"{split}_accuracy": curve[-1] if validated else round(100 * summary["test_accuracy"], 4),
        f"{split}_accuracy_per_epoch": curve,
        "lane_spreads": summary.get("lane_spreads", []),  # an older version wrote none
        "parameters": summary["parameters"],
        "steps": summary["steps"],
        "steps_timed": summary["steps_this_session"],
        "images_per_second": rate,
        "compile_seconds": summary["compile_seconds"],
    }
    if "validation_accuracy" in summary:
        found["best_validation_accuracy"] = round(100 * summary["validation_accuracy"], 4)
    return found


class _Limit:
    """Asks the run in progress to stop, as SIGTERM does, after so many minutes; notes SIGTERM between runs.

    What is noted is sent again until a run or a check takes it: a run may just have been beginning.
    """

    def __init__(self, minutes: float):
        self._minutes, self._over, self._asked = minutes, False, False
        self._timers: list[threading.Timer] = []

    def __enter__(self):
        self._before = signal.signal(signal.SIGTERM, self._note)
        if self._minutes:
            self._later(60 * self._minutes, self._end)
        return self

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _note(self, number, frame):
        self._asked = True
        self._later(_AGAIN_SECONDS, self._ask)

    def _end(self):
        self._over = True
        self._ask()

    def _ask(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def check(self, left: str) -> None:
        """Raises Stopped if the minutes are over or SIGTERM came between runs."""
        if self._over:
            raise Stopped(f"the {self._minutes:g} minutes are over; {left}")
        if self._asked:
            raise Stopped(f"stopped by SIGTERM; {left}")

    @contextlib.contextmanager
    def telling(self, left: str) -> Iterator[None]:
        """Checks before something is done; when that is stopped, the message says why, and what is left."""
        self.check(left)
        try:
            yield
        except Stopped as stopped:
            self.check(left)
            raise Stopped(f"{stopped}; {left}") from None

    def __exit__(self, *error):
        while self._timers:  # to which the last signal may add
            timer = self._timers.pop()
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGTERM, self._before)


def chosen(flag: str, given: Sequence[str], known: Collection[str]) -> list[str]:
    """`given`, each once; raises InputError where one is not known."""
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise InputError(f"--{flag}: {', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return list(dict.fromkeys(given))


def define_flags(values: flags.FlagValues, known: Collection[str]) -> None:
    """The flags that every script has; the scale is one of those known, by default `cpu`."""
    flags.DEFINE_string("workdir", "", "Folder of the runs.", flag_values=values)
    flags.DEFINE_string("scale", "cpu", f"One of {', '.join(known)}.", flag_values=values)
    text = "Trainings of each, seeds 0, 1, ..."
    flags.DEFINE_integer("repeats", 1, text, lower_bound=1, flag_values=values)
    text = "Stop after so many, with a checkpoint; 0 goes on."
    flags.DEFINE_float("minutes", 0.0, text, lower_bound=0.0, flag_values=values)
    define_data_dirs(values)


def define_data_dirs(values: flags.FlagValues) -> None:
    """The flags that `directories` reads."""
    for name, title in (("fashion", "Fashion-MNIST"), ("cifar", "CIFAR-10")):
        text = f"config.data.dir of {title}; empty downloads it."
        flags.DEFINE_string(f"{name}_dir", "", text, flag_values=values)


def directories(values: flags.FlagValues) -> dict[str, str]:
    """The folder of each dataset; empty where it is to be downloaded."""
    return {"fashion_mnist": values.fashion_dir, "cifar10": values.cifar_dir}


def asked(values: flags.FlagValues, script: str, known: Mapping[str, Scale], others: Sequence[str]) -> Request:
    """The flags that every script has, for its `run`; folders, the user's own, are not in the command.

    Args:
      values: what was given.
      script: its name.
      known: the scales that it has.
      others: names of flags that only it has.

    Raises:
      InputError: there is no workdir, or no such scale.
    """
    if not values.workdir:
        raise InputError("give --workdir=FOLDER, and every other flag as --name=value")
    (scale,) = chosen("scale", [values.scale], known)
    return Request(
        Path(values.workdir).expanduser(),
        known[scale],
        values.repeats,
        values.minutes,
        directories(values),
        command(f"{script} --workdir=FOLDER", values, ("scale", "repeats", *others)),
    )


def command(script: str, values: flags.FlagValues, names: Sequence[str]) -> str:
    """The command line of a script, with those of some flags that were given."""
    given = [values[name].serialize() for name in names if values[name].present]
    return " ".join([f"python -m experiments.{script}", *given])

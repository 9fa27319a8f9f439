"""Metrics recorded during training: `metrics.jsonl`, TensorBoard, a progress bar or log lines."""

import collections
import contextlib
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar
from tqdm import tqdm

from mlcn_jax.errors import Diverged
from mlcn_jax.files import write_atomic

_FLUSH_SECONDS = 60  # how far TensorBoard may lag behind the rows that are written
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and the same numbers to TensorBoard.

    Opening it for a run that resumes at `step` drops the rows after that step, and an incomplete last row, so
    that every step appears once.
    """

    def __init__(self, workdir: Path, step: int):
        self._path = workdir / "metrics.jsonl"
        rows = [row for row in read_rows(self._path) if row["step"] <= step]
        write_atomic(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = self._path.open("a")
        folder = workdir.absolute() / "tensorboard"  # a relative one may look like the address of a storage service
        folder.mkdir(exist_ok=True)
        # Not a SummaryWriter, which writes in a thread: when that fails, training would wait for it forever.
        self._tensorboard = EventsWriter(str(folder / "events"), f".{step}")  # two may be opened in one second
        self._flush_at = time.monotonic() + _FLUSH_SECONDS
        self._event(step + 1, session_log=SessionLog(status=SessionLog.START))  # hides what came after `step` before

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Records `values` of `split` (train, validation or test) after `step` training steps."""
        self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._event(step, summary=scalar(f"{split}/{name}", value))
        if time.monotonic() > self._flush_at:
            self._flush_tensorboard()

    def _event(self, step: int, **content: Any) -> None:
        self._tensorboard.write_event(Event(wall_time=time.time(), step=step, **content))

    def _flush_tensorboard(self) -> None:
        self._tensorboard.flush()
        self._flush_at = time.monotonic() + _FLUSH_SECONDS

    def to_disk(self) -> None:
        """Flushes the rows to disk; due before a checkpoint, from which a resumed run goes on."""
        os.fsync(self._file.fileno())
        self._flush_tensorboard()

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def read_rows(path: Path) -> list[dict]:
    """Rows of a `metrics.jsonl`; none if the file does not exist. Damaged rows are skipped."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


class Progress:
    """Images per second, loss, accuracy and time left: a bar on a terminal, otherwise log lines."""

    def __init__(self, step: int, num_steps: int, steps_per_epoch: int):
        self._num_steps = num_steps
        self.steps_per_epoch = steps_per_epoch
        self._start_step, self._start_seconds = step, time.monotonic()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True) if terminal else None

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, values: dict[str, float]) -> None:
        """Shows the newest `loss`, `accuracy` and `images_per_second`."""
        rate = f"{values['images_per_second']:.0f} images/s"
        shown = f"loss {values['loss']:.4f}  accuracy {values['accuracy']:.2%}  {rate}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown)
            return
        seconds_per_step = (time.monotonic() - self._start_seconds) / max(1, step - self._start_step)
        left = int(seconds_per_step * (self._num_steps - step))
        epoch = (step - 1) // self.steps_per_epoch + 1
        clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        _log.info("epoch %d  step %d/%d  %s  %s left", epoch, step, self._num_steps, shown, clock)

    def say(self, message: str) -> None:
        """Prints a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.write(message, file=sys.stderr)
        else:
            _log.info("%s", message)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class StepLog:
    """Collects and reports the metrics of steps, two steps late so as never to wait for the device.

    Not one step late: the norm of the gradient may come with the messages of the next step (`stacks_runner`).
    """

    def __init__(self, writer: MetricsWriter, progress: Progress, batch_size: int, every: int):
        self._writer, self._progress = writer, progress
        self._batch_size, self._every = batch_size, every
        self._pending: collections.deque[tuple[int, dict[str, Array]]] = collections.deque()
        self._window: list[dict[str, float]] = []
        self._step = 0
        self._reported = False
        self._seconds = 0.0  # spent on the steps read so far, without pauses
        self._window_seconds = 0.0
        self._input_seconds = 0.0
        self._mark = time.monotonic()

    def add(self, step: int, metrics: dict[str, Array]) -> None:
        """Takes the metrics of a step just dispatched; reads those of the step before the previous one."""
        self._pending.append((step, metrics))
        if len(self._pending) > 2:
            self._read(*self._pending.popleft())

    def flush(self) -> None:
        """Waits for the newest step and reads all metrics."""
        while self._pending:
            self._read(*self._pending.popleft())

    def _read(self, step: int, metrics: dict[str, Array]) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.monotonic()
        self._seconds += now - self._mark
        self._window_seconds += now - self._mark
        self._mark = now
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise Diverged(
                f"step {step}: the loss is {values['loss']} and the norm of its gradient {values['grad_norm']}; "
                "earlier checkpoints are kept. Try a smaller --config.train.learning_rate or a "
                "--config.train.clip_norm in another --workdir, with --config.init_from to keep the trained weights"
            )
        self._step = step
        self._window.append(values)
        self._progress.advance(step)
        if step % self._every == 0:
            self._report(step)

    def finish(self) -> None:
        """Reports the steps since the last report."""
        self.flush()
        if self._window:
            self._report(self._step)

    def _report(self, step: int) -> None:
        mean = {name: sum(v[name] for v in self._window) / len(self._window) for name in self._window[0]}
        rate = mean["images_per_second"] = self._batch_size * len(self._window) / self._window_seconds
        if not self._reported:
            self._progress.say(f"one epoch takes {self._progress.steps_per_epoch * self._batch_size / rate:,.1f} s")
            self._reported = True
        self._window, self._window_seconds = [], 0.0
        self._writer.write(step, "train", mean)
        self._progress.report(step, mean)

    @contextlib.contextmanager
    def paused(self):
        """Reports every step dispatched, then excludes the time that the block takes.

        So rows end where checkpoints do, and a run that was killed and resumed has the rows of one that was not. A run
        that was asked to stop has one more, which ends at the checkpoint saved then.
        """
        self.finish()
        yield
        self._mark = time.monotonic()

    @contextlib.contextmanager
    def timing_input(self):
        """Adds the block's time to the time spent preparing batches."""
        started = time.monotonic()
        yield
        self._input_seconds += time.monotonic() - started

    @property
    def input_share(self) -> float:
        """Time spent preparing batches over the time of the steps.

        Below 1 it is hidden behind the previous step, except where steps are computed in turn (`host.compute_in_turn`).
        """
        return self._input_seconds / self._seconds if self._seconds else 0.0

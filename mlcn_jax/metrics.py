"""What is written while training: `metrics.jsonl`, TensorBoard events, and a progress bar or log lines."""

import json
import logging
import sys
import time
from pathlib import Path

import tensorboardX
from tqdm import tqdm

_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends rows to `metrics.jsonl` and the same numbers to TensorBoard.

    Opening it for a run that resumes at `step` drops the rows after that step, and a half-written last row, so
    that every step stands once.
    """

    def __init__(self, workdir: Path, step: int):
        self._path = workdir / "metrics.jsonl"
        rows = [row for row in read_rows(self._path) if row["step"] <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(self._path)
        self._file = self._path.open("a")
        self._tensorboard = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Records `values` of `split` (train, validation or test) after `step` training steps."""
        self._file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def read_rows(path: Path) -> list[dict]:
    """Rows of a `metrics.jsonl`; none where there is no file. A half-written last row is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Progress:
    """Images per second, loss, accuracy and time left: a bar on a terminal, log lines elsewhere."""

    def __init__(self, step: int, num_steps: int, steps_per_epoch: int):
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
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
        epoch = (step - 1) // self._steps_per_epoch + 1
        clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        _log.info("epoch %d  step %d/%d  %s  %s left", epoch, step, self._num_steps, shown, clock)

    def say(self, message: str) -> None:
        """A line that does not disturb the bar."""
        if self._bar is not None:
            self._bar.write(message, file=sys.stderr)
        else:
            _log.info("%s", message)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

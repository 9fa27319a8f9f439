"""How SIGTERM and Ctrl-C stop training or a search: the first one gracefully, a second one at once."""

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence

import jax

from mlcn_jax.distributed import processes
from mlcn_jax.errors import Stopped

_log = logging.getLogger(__name__)

_CLEANUP_SECONDS = 1.0  # for a KeyboardInterrupt to run its `finally` blocks


class SignalWatch:
    """Reports at once that a signal has arrived, and ends the process at the second one.

    Python's own handlers run only once a compilation returns, which can take minutes. This watch does not replace
    them: it is a thread that reads the numbers of the signals, which Python writes to a file descriptor as they arrive.

    Args:
      signals: those to watch; with none, nothing is watched.
    """

    def __init__(self, signals: Sequence[signal.Signals]):
        self._signals = frozenset(signals)
        self.ignored = 0  # signals still to come that do not count, because the process sends them to itself

    def __enter__(self):
        if self._signals:
            arrived, self._arriving = os.pipe()
            os.set_blocking(self._arriving, False)
            self._fd_before = signal.set_wakeup_fd(self._arriving, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()
        return self

    def _watch(self, arrived: int) -> None:
        with open(arrived, "rb", buffering=0) as numbers:
            count = 0
            while number := numbers.read(1):
                if number[0] not in self._signals:
                    continue
                if self.ignored:
                    self.ignored -= 1
                    continue
                count += 1
                if count == 1:
                    _log.info(
                        "%s: stopping once the current step or compilation has ended; a second signal ends at once",
                        signal.Signals(number[0]).name,
                    )
                else:
                    time.sleep(_CLEANUP_SECONDS)
                    os._exit(128 + number[0])

    def __exit__(self, *error):
        if self._signals:
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._arriving)


class StopSignals:
    """Records the first SIGTERM or Ctrl-C during training in `requested`; a second one ends the process at once."""

    requested = ""

    def __enter__(self):
        one_process = jax.process_count() == 1
        signals = (signal.SIGTERM, signal.SIGINT) if one_process else ()
        self._before = {s: signal.signal(s, self._note) for s in signals}
        self._watch = SignalWatch(signals)
        self._watch.__enter__()
        return self

    def due(self, step: int) -> bool:
        """Whether to stop after this step; the same in all processes of a run."""
        if jax.process_count() > 1 and processes.asked_to_stop(step):
            self.requested = "SIGTERM"
        return bool(self.requested)

    def _note(self, number, frame):
        self.requested = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self, when: str) -> None:
        """Raises Stopped if a signal has arrived."""
        if self.requested:
            raise Stopped(f"stopped by {self.requested} {when}")

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._watch.__exit__(*error)

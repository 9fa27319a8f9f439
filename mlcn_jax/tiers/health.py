"""A gateway's view of a node: how long it takes, when to give up on an answer, and whether to send requests at all."""

import random
import time

_FIRST_SECONDS = 1.0  # assumed before the first answer
_LEAST_SECONDS = 0.02  # no answer counts as late before this: shorter delays are noise of a busy machine
_LEAST_TIMEOUT, _MOST_TIMEOUT = 0.25, 60.0
_PATIENCES = 4.0  # an answer is abandoned after this many times the time after which it is late
_LEAST_SPREAD = 0.01
_GAIN, _SPREAD_GAIN, _SPREADS = 1 / 8, 1 / 4, 4.0
_MORE = 1.25  # before any answer: asks again only if there is this many times the longest wait so far
_FAILURES = 3  # failures in a row, after which a node is not asked for a while
_FIRST_PAUSE, _MOST_PAUSE = 0.5, 30.0


class Times:
    """An adaptive time-out from the smoothed time plus four times its smoothed deviation, doubled after each time-out.

    Source: RFC 6298.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self._least = 0.0  # before the first answer: a time in which none came
        self._spread = 0.0
        self._backoff = 1.0

    @property
    def expected(self) -> float:
        """Seconds that the next answer is expected to take."""
        return self.expected_from(_FIRST_SECONDS)

    def expected_from(self, first: float) -> float:
        """The same, where `first` is assumed before the first answer."""
        return (self.mean if self.mean is not None else max(first, self._least)) * self._backoff

    def may_take(self, seconds: float) -> bool:
        """Whether the next answer may come within `seconds`, as far as is known."""
        return self._least * _MORE <= seconds if self.mean is None else self.expected <= seconds

    @property
    def most(self) -> float:
        """Seconds that few answers take longer than; 0 before the first."""
        return 0.0 if self.mean is None else self.mean + _SPREADS * self._spread

    @property
    def late(self) -> float:
        """Seconds after which an answer is late: something else should be tried as well."""
        if self.mean is None:
            return _FIRST_SECONDS * self._backoff
        return max(self.most, self.mean + _LEAST_SPREAD, _LEAST_SECONDS) * self._backoff

    @property
    def timeout(self) -> float:
        """Seconds after which an answer is abandoned."""
        return min(max(_PATIENCES * self.late, _LEAST_TIMEOUT), _MOST_TIMEOUT)

    def took(self, seconds: float) -> None:
        """Learns from an answer."""
        self._backoff = 1.0
        if self.mean is None:
            self.mean, self._spread = seconds, seconds / 2
        else:
            self._spread += _SPREAD_GAIN * (abs(seconds - self.mean) - self._spread)
            self.mean += _GAIN * (seconds - self.mean)

    def takes_more_than(self, seconds: float) -> None:
        """Learns that no answer came within `seconds`; used only before the first answer."""
        if self.mean is None:
            self._least = max(self._least, seconds)

    def timed_out(self) -> None:
        """Learns that no answer came in time."""
        self._backoff = min(2 * self._backoff, _MOST_TIMEOUT / _LEAST_TIMEOUT)


class Breaker:
    """A circuit breaker: after failures in a row, a node is not asked for a pause, then tried with one request.

    If that fails too, the pause doubles.

    Attributes:
      reason: the last failure; empty while all is well.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.reason = ""
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._opened = 0.0
        self._probe: object | None = None  # the request that tries the node, while it is under way
        self._surely = False
        self._rng = rng or random.Random()

    @property
    def is_open(self) -> bool:
        """Whether the node must not be asked now."""
        waits = self._probe is not None or time.monotonic() < self._opened + self._pause
        return self._failures >= _FAILURES and waits

    def asked(self) -> object | None:
        """Records that a request is sent; returns its mark if it is the one that tries a node that had failed."""
        if self._failures < _FAILURES:
            return None
        self._probe = object()
        return self._probe

    def worked(self) -> None:
        """Records a usable answer."""
        self.reason, self._failures, self._pause, self._probe = "", 0, _FIRST_PAUSE, None

    def failed(self, reason: str, probe: object | None = None, *, surely: bool = False) -> None:
        """Records a failed request, with the mark that `asked` gave it.

        `surely` if the next would fail too, as after an answer from another model.
        """
        self.reason = reason
        was_open = self._failures >= _FAILURES
        if was_open and (probe is None or probe is not self._probe):  # sent before: it tells nothing of the node now
            self._surely = self._surely or surely
            return
        self._probe, self._surely = None, surely
        self._failures = _FAILURES if surely else self._failures + 1
        if self._failures >= _FAILURES:
            if was_open:
                self._pause = min(2 * self._pause, _MOST_PAUSE)
            self._opened = time.monotonic() + self._rng.uniform(0, self._pause / 10)

    def ended(self, probe: object | None = None) -> None:
        """Records that a request has ended, in whatever way, with the mark that `asked` gave it."""
        if probe is self._probe:
            self._probe = None

    def seen(self) -> None:
        """Records that the node is healthy: it may be tried at once, unless it failed `surely`."""
        if not self._surely:
            self._opened = -self._pause

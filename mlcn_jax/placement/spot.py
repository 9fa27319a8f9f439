"""Expected time of a run that may be interrupted, and the best interval between its checkpoints.

Interruptions are a Poisson process; after one the machines start again and continue from the newest checkpoint.

Source: Daly 2006 (Future Generation Computer Systems 22(3), pages 303-312), equation 13 for the time; the interval that
minimises it exactly is from setting its derivative to 0.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Interruptions:
    """What an interruption costs.

    Attributes:
      per_second: rate at which runs are interrupted; 0 for machines that are never interrupted.
      restart_seconds: from an interruption to the next step.
      checkpoint_seconds: training time lost to saving a checkpoint.
    """

    per_second: float
    restart_seconds: float
    checkpoint_seconds: float

    def best_interval(self) -> float:
        """Seconds of work between checkpoints for which the expected time is least; infinite without interruptions.

        With a checkpoint that costs nothing, 0: every step would be saved.
        """
        if not self.per_second:
            return math.inf
        from scipy import special

        costs = self.per_second * self.checkpoint_seconds
        if costs < 1e-12:  # below which the function is rounded to nothing; to first order, as Young 1974 has it
            return math.sqrt(2 * costs) / self.per_second
        return float(1 + special.lambertw(-math.exp(-costs - 1)).real) / self.per_second

    def expected_seconds(self, work_seconds: float, interval_seconds: float) -> float:
        """Expected time of a run, including checkpoints and repeated work, but not the first start.

        Args:
          work_seconds: time of training without any checkpoint.
          interval_seconds: work between checkpoints, above 0.

        Returns:
          Infinity if runs are interrupted so often that they get nowhere.
        """
        segments = work_seconds / interval_seconds
        if not self.per_second:
            return work_seconds + segments * self.checkpoint_seconds
        rate = self.per_second
        try:
            attempt = math.expm1(rate * (interval_seconds + self.checkpoint_seconds))
            return math.exp(rate * self.restart_seconds) * attempt * segments / rate
        except OverflowError:
            return math.inf

    def lost_seconds(self, interval_seconds: float) -> float:
        """Expected work, including time spent on saving, that an interruption undoes."""
        segment = interval_seconds + self.checkpoint_seconds
        if not self.per_second:
            return 0.0
        try:
            return 1 / self.per_second - segment / math.expm1(self.per_second * segment)
        except OverflowError:
            return 1 / self.per_second

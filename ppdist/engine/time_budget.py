"""Time budget of a run: when it has to end."""

import os
import time
from collections.abc import Callable

from ppdist.common.job import STARTED_VARIABLE
from ppdist.common.process import boot_seconds

_MARGIN = 1.2  # the last evaluation and checkpoint may take this many times as long as before
# Time reserved for pictures and trackers, after the last checkpoint.
_REST_SECONDS, _REST_SHARE = 60.0, 0.1


class TimeBudget:
    """The wall time that a started command may take (`train.hours`).

    It counts from the start of fleetrun, across all of its restarts; without fleetrun, from the
    creation of this object.
    """

    def __init__(self, hours: float, clock: Callable[[], float] = boot_seconds) -> None:
        """Args: clock: returns seconds, counted from the same moment as STARTED_VARIABLE."""
        self.hours = hours
        self._clock = clock
        self._began = float(os.environ.get(STARTED_VARIABLE) or clock())

    def __str__(self) -> str:
        last = time.strftime("%F %H:%M", time.localtime(time.time() + self.left()))
        return (
            f"train.hours: {self.hours:g}: the run ends before {last} with an evaluation and a "
            "checkpoint, however far it is"
        )

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return self._clock() - self._began

    def left(self) -> float:
        """Returns the seconds until the end, below 0 after it."""
        return 3600 * self.hours - self.elapsed()

    def is_over(self, closing_seconds: float) -> bool:
        """Returns True if the run has to stop now to finish in time.

        Args: closing_seconds: time needed for a last step, an evaluation and a checkpoint.
        """
        total_seconds = 3600 * self.hours
        rest = min(_REST_SECONDS, _REST_SHARE * total_seconds)
        return self.elapsed() + _MARGIN * closing_seconds + rest >= total_seconds

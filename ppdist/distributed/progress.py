"""Progress of long work: signs of life, and lines in the log."""

import logging
import time

from ppdist.common.eta import duration
from ppdist.distributed.store import alive

_REPORT_SECONDS = 15.0


class Progress:
    """The progress of work that consists of many similar parts.

    Other ranks wait for this rank as long as it keeps finishing parts: see `store.alive`.
    """

    def __init__(self, logger: logging.Logger, work: str, total: float, unit: str = "images"):
        """Starts the clock.

        Args: work: its name, for the log; total: its number of parts, counted in `unit`.
        """
        self._logger, self._work, self._total, self._unit = logger, work, total, unit
        self._done = 0.0
        self._began = self._reported = time.monotonic()

    def add(self, count: float = 1) -> None:
        """Counts finished parts, gives a sign of life, and sometimes logs the progress."""
        alive()
        self._done += count
        now = time.monotonic()
        if now - self._reported < _REPORT_SECONDS:
            return
        self._reported = now
        rate = self._done / (now - self._began)
        left = max(0.0, self._total - self._done) / rate if rate else 0.0
        self._logger.info(
            "%s: %.0f of %.0f %s, %.3g a second, ETA %s",
            self._work, self._done, self._total, self._unit, rate, duration(left),
        )  # fmt: skip

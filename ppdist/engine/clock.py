"""Clocks: where the seconds of a step go."""

import time
from typing import NamedTuple

from ppdist.distributed import device, heartbeat


class StepSeconds(NamedTuple):
    """Seconds that a step took on this rank.

    Attributes:
        wall: from the beginning to the end of the step.
        compute: `wall` without the time spent waiting for other ranks in collectives.
        data: the part of `wall` spent waiting for images.
    """

    wall: float
    compute: float
    data: float


class Clock:
    """A clock that records the wall-clock seconds of each part of a step.

    On an accelerator, the times are meaningful only with `synchronize`.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Adds the time since the previous lap to the part with this name."""
        if self.synchronize:
            device.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class Stopwatch:
    """A stopwatch that measures a step, from construction until `stop`."""

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), heartbeat.waited_seconds()

    def stop(self, data_seconds: float) -> StepSeconds:
        """Ends the measurement of a step.

        Args: data_seconds: time spent waiting for images.
        """
        wall = time.perf_counter() - self._began
        return StepSeconds(wall, wall - (heartbeat.waited_seconds() - self._waited), data_seconds)

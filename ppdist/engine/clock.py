"""Clocks: where the seconds of a step go."""

import time
from typing import NamedTuple

from ppdist.distributed import device, heartbeat


class StepSeconds(NamedTuple):
    """Where the time of a step went, on this rank.

    Attributes:
        wall: from the beginning to the end of the step.
        compute: all of it but the waiting for other ranks in collectives.
        data: of it, waiting for images.
    """

    wall: float
    compute: float
    data: float


class Clock:
    """Wall seconds of the parts of a step.

    On an accelerator they are meaningful only with `synchronize`.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Books the time since the previous lap under a name."""
        if self.synchronize:
            device.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class Stopwatch:
    """Measures a step's time, from construction until `stop`."""

    def __init__(self) -> None:
        self._began, self._waited = time.perf_counter(), heartbeat.waited_seconds()

    def stop(self, data_seconds: float) -> StepSeconds:
        """Ends the step's time measurement.

        Args: data_seconds: spent waiting for images.
        """
        wall = time.perf_counter() - self._began
        return StepSeconds(wall, wall - (heartbeat.waited_seconds() - self._waited), data_seconds)

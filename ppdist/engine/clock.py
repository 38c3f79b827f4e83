"""Clock: wall seconds of the parts of a step."""

import time

from ppdist.distributed import device


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

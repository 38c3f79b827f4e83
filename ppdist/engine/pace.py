"""Which ranks keep the others waiting: how long each takes for its own part of a step."""

import time
from statistics import median, median_low

import paddle

from ppdist import dist, pulse

_WINDOW = 15  # steps of one comparison
_SLOW = 1.43  # times what others take: a score of 0.7


class Pace:
    """Compares the ranks every 15 steps and names those that are slow in two comparisons in a row.

    A rank's own part of a step is all of it but the time that it waits in collectives.  On a GPU it
    is that of the host alone (images, launching kernels): a slow card is not seen.
    """

    def __init__(self) -> None:
        self._own: list[float] = []  # seconds of each step since the last comparison
        self._began = self._waited = 0.0
        self._slow, self._named = set[int](), set[int]()

    def begin(self) -> None:
        """Called before a step, after whatever is done between steps."""
        self._began, self._waited = time.perf_counter(), pulse.waited_seconds()

    def end(self) -> str:
        """Called after the step, by every rank.

        Returns: a warning, the same on every rank, each rank once; most times nothing.
        """
        waited = pulse.waited_seconds() - self._waited
        self._own.append(time.perf_counter() - self._began - waited)
        if len(self._own) < _WINDOW or dist.world_size() == 1:
            return ""
        own, self._own = median(self._own), []
        seconds_W = dist.all_gather(paddle.to_tensor([own], dtype="float32")).numpy().ravel()
        return self._judge([float(each) for each in seconds_W])

    def _judge(self, seconds_W: list[float]) -> str:
        usual = max(median_low(seconds_W), 1e-9)
        before = self._slow
        self._slow = {rank for rank, own in enumerate(seconds_W) if own / usual > _SLOW}
        found = sorted((self._slow & before) - self._named)
        if not found:
            return ""
        self._named |= set(found)
        longest = max(seconds_W[rank] for rank in found)
        return (
            f"slow: {dist.ranks_named(found, dist.addresses())}, whose own part of a step takes "
            f"{longest:.3g} s, {longest / usual:.1f} times that of the others ({usual:.3g} s), "
            f"which wait for it; look for another program on its processors, heat, or slow storage"
        )

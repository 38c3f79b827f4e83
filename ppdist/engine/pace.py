"""Which ranks keep the others waiting: how long each takes for its own part of a step."""

from statistics import median, median_low

import paddle

from ppdist import dist, pulse
from ppdist.engine.records import Stopwatch
from ppdist.engine.step import StepResult

_WINDOW = 15  # steps of one comparison
_SLOW = 1.43  # times what others take: a score of 0.7


class Pace:
    """Compares the ranks every 15 steps and names those that are slow in two comparisons in a row.

    A rank's own part of a step is all of it but the time that it waits in collectives.  On a GPU it
    is that of the host alone (images, launching kernels): a slow card is not seen.
    """

    def __init__(self) -> None:
        self._own: list[float] = []  # seconds of each step since the last comparison
        self._slow, self._named = set[int](), set[int]()

    def add(self, result: StepResult, data_seconds: float, watch: Stopwatch) -> str:
        """A step that was made; every rank calls it.  Tells fleetrun, too, what it came to.

        Args: data_seconds: of the step, waiting for images.
        Returns: a warning, the same on every rank, each rank once; most times nothing.
        """
        pulse.made(
            loss=result.losses["loss"],
            images=result.images,
            bad=not result.applied and not result.searching,
            step_seconds=watch.wall,
            own_seconds=watch.own,
            data_seconds=data_seconds,
        )
        self._own.append(watch.own)
        if len(self._own) < _WINDOW or dist.world_size() == 1:
            return ""
        usual, self._own = median(self._own), []
        seconds_W = dist.all_gather(paddle.to_tensor([usual], dtype="float32")).numpy().ravel()
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

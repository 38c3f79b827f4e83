"""How long the rest of a run takes, and where the seconds so far went.

    left = steps * step + epochs * what their first step takes longer
           + evaluations * evaluation + saves * save          (each of what is still to come)

Every part is measured as the run goes: an average over everything since the start would be wrong
until the first evaluation was seen, and again after each.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median

EVALUATION, SAVING, IMAGES, TRAINING = "evaluation", "saving", "waiting for images", "training"
_KEPT = 2000  # steps whose seconds are remembered; the later half counts
_FEWEST = 50  # unless the run is younger, so many count
_LAST = 3  # evaluations, saves, first steps of epochs: they change as the model learns
_STALL = 10.0  # a step that takes more times the median than this met something that passes
# Until the first evaluation an image of it is taken to cost this part of one of training.  Seen on
# CPUs, YOLOv5 n and s and PP-YOLOE s: 0.2 to 2.4 in the first evaluation (an untrained model scores
# everything everywhere), mostly 0.6 in later ones.
_EVALUATION_COST = 0.5


class Meter:
    """Books the wall seconds of one process, each to one part, and reckons with them."""

    def __init__(
        self,
        total_steps: int,
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: clock: seconds from any point in time."""
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._clock = clock
        self._began = clock()
        self._every = {EVALUATION: 0, SAVING: 0}  # optimizer steps; 0: never
        self._evaluation_steps = 0.0  # what one evaluation is taken to cost before it was seen
        self._remembered: float | None = None
        self._seconds: dict[str, float] = {}
        self._within: list[str] = []  # parts that are running, the innermost last
        self._switched = self._began
        self._last: tuple[int, float] | None = None  # the last step, and seconds outside of others
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._first_steps: deque[float] = deque(maxlen=_LAST)
        self._parts = {part: deque[float](maxlen=_LAST) for part in self._every}
        self._done_at = dict.fromkeys(self._every, 0)  # the step after which it last was done

    def expect(
        self, evaluate_every: int, save_every: int, evaluation_images: int, images_per_step: int
    ) -> None:
        """What comes between steps.

        Args:
            evaluate_every, save_every: optimizer steps; 0: never.  Both also come at the end.
            evaluation_images: in one evaluation.
            images_per_step: of all ranks.
        """
        self._every = {EVALUATION: evaluate_every, SAVING: save_every}
        self._evaluation_steps = _EVALUATION_COST * evaluation_images / max(1, images_per_step)

    def remember(self, evaluation_seconds: float) -> None:
        """What an evaluation took before the run was resumed; it counts until one is seen."""
        self._remembered = evaluation_seconds

    @contextmanager
    def spending(self, part: str, step: int) -> Iterator[None]:
        """Around a part that comes between steps; one may stand within another.

        Args: step: optimizer steps done.
        """
        before = self._book().get(part, 0.0)
        self._within.append(part)
        try:
            yield
        finally:
            seconds = self._book()
            self._within.pop()
            self._parts[part].append(seconds[part] - before)
            self._done_at[part] = step

    def stepped(self, step: int, waited: float) -> None:
        """A step was made.

        Args:
            step: optimizer steps done.
            waited: seconds of it in which there were no images.
        """
        self._book()
        self._seconds[IMAGES] = self._seconds.get(IMAGES, 0.0) + waited
        outside = self._clock() - self._began - sum(map(self._seconds.get, self._every, (0.0, 0.0)))
        if self._last is not None and step == self._last[0] + 1:
            first = (step - 1) % self._steps_per_epoch == 0
            kind = self._first_steps if first and self._steps_per_epoch > 1 else self._steps
            kind.append(outside - self._last[1])
        self._last = step, outside

    def left(self, step: int) -> float | None:
        """Seconds until the end; None: too few steps were made to say.

        Args: step: optimizer steps done.
        """
        if not self._steps:
            return None
        each = self._step_seconds()
        seconds = (self._total_steps - step) * each
        if self._first_steps:
            begun = math.ceil(step / self._steps_per_epoch)
            epochs = math.ceil(self._total_steps / self._steps_per_epoch) - begun
            seconds += epochs * max(0.0, fmean(self._first_steps) - each)
        for part, taken in self._parts.items():
            unseen = self._unseen_evaluation(each) if part == EVALUATION else 0.0
            seconds += self._times(part, step) * (fmean(taken) if taken else unseen)
        return seconds

    def seconds(self) -> dict[str, float]:
        """Wall seconds since the start by part; `training` is what no other part took."""
        booked = dict(self._book())
        return {TRAINING: self._clock() - self._began - sum(booked.values()), **booked}

    def _unseen_evaluation(self, step_seconds: float) -> float:
        if self._remembered is not None:
            return self._remembered
        return self._evaluation_steps * step_seconds

    def _step_seconds(self) -> float:
        recent = list(self._steps)[-max(_FEWEST, len(self._steps) // 2) :]
        most = _STALL * median(recent)
        return fmean(min(each, most) for each in recent)

    def _times(self, part: str, step: int) -> int:
        """How often a part still comes, at this step included if it was not done yet."""
        every = self._every[part]
        if not every:
            return 0
        since = max(step - 1, self._done_at[part])
        if since >= self._total_steps:
            return 0
        return math.ceil(self._total_steps / every) - since // every

    def _book(self) -> dict[str, float]:
        """Books the seconds since the last time to the part that was running."""
        now = self._clock()
        if self._within:
            part = self._within[-1]
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._switched
        self._switched = now
        return self._seconds


def duration(seconds: float) -> str:
    """`1d 2h`, `2h 05m`, `4m 07s` or `9s`."""
    whole = round(max(0.0, seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"

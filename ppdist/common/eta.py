"""Time left of a run, and where its time went."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median

EVALUATION, SAVING, IMAGES, TRAINING = "evaluation", "saving", "waiting for images", "training"
PLOTTING, START_AND_END = "plots", "start and end"
_KEPT_STEPS = 2000  # steps whose seconds are remembered; the later half counts
_FEWEST_STEPS = 50  # at least so many count, once the run has made them
_LAST_PARTS = 3  # newest evaluations and saves that count: they change as the model learns
_STALL = 10.0  # a step of more than so many medians was disturbed, and counts as so many
# Cost of an evaluated image in trained images, until the first evaluation was measured.  Seen on
# CPUs, YOLOv5 n and s and PP-YOLOE s: 0.2 to 2.4 in the first evaluation (an untrained model scores
# everything everywhere), mostly 0.6 in later ones.
_EVALUATION_COST = 0.5


class ETA:
    """The estimated time of arrival: wall seconds of one process by part, and the time left.

        left = steps * step + evaluations * evaluation + saves * save    (of those still to come)

    Every part is measured separately: an average over everything since the start would be wrong
    until the first evaluation, and again after each.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the clock.

        Args: clock: returns seconds from any point in time.
        """
        self._total_steps = total_steps
        self._clock = clock
        self._began = clock()
        self._every = {EVALUATION: 0, SAVING: 0}  # optimizer steps; 0: never
        # Assumed cost of an evaluation, in steps, before one was measured.
        self._evaluation_steps = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._between = 0.0  # seconds of evaluations, saves and plots so far
        self._steps_began = 0.0  # seconds outside of these, before the first step
        # (last step, seconds from the start to its end, excluding evaluations, saves and plots)
        self._last: tuple[int, float] | None = None
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._parts: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_PARTS))
        self._done_at = dict.fromkeys(self._every, 0)  # step after which each part was last done

    def expect(
        self, evaluate_every: int, save_every: int, evaluation_images: int, images_per_step: int
    ) -> None:
        """Sets the intervals of evaluations and saves, and the numbers of images.

        Args:
            evaluate_every, save_every: optimizer steps; 0: never.  Both also come at the end.
            evaluation_images: number of images in one evaluation.
            images_per_step: number of images per step, over all ranks.
        """
        self._every = {EVALUATION: evaluate_every, SAVING: save_every}
        self._evaluation_steps = _EVALUATION_COST * evaluation_images / max(1, images_per_step)

    def remember(self, evaluation_seconds: float) -> None:
        """Records the duration of an evaluation from before the run was resumed."""
        self._parts[EVALUATION].append(evaluation_seconds)

    def begin_steps(self) -> None:
        """Marks where the first step of this process begins."""
        self._steps_began = self._clock() - self._began - self._between

    @contextmanager
    def spending(self, part: str, step: int) -> Iterator[None]:
        """Measures the block as a part between steps; parts may be nested.

        Args: step: optimizer steps done.
        """
        began, between_before = self._clock(), self._between
        try:
            yield
        finally:
            part_seconds = self._clock() - began - (self._between - between_before)
            self._between += part_seconds
            self._seconds[part] += part_seconds
            self._parts[part].append(part_seconds)
            self._done_at[part] = step

    def record_step(self, step: int, waited: float) -> None:
        """Records a finished step.

        Args:
            step: optimizer steps done.
            waited: seconds of the step spent waiting for images.
        """
        self._seconds[IMAGES] += waited
        outside = self._clock() - self._began - self._between
        # After a rollback or a skipped step the time since the last step is not that of one step.
        if self._last is not None and step == self._last[0] + 1:
            self._steps.append(outside - self._last[1])
        self._last = step, outside

    def seconds_left(self, step: int) -> float | None:
        """Estimates the seconds until the end of the run; None if no step was timed yet.

        Args: step: optimizer steps done.
        """
        if not self._steps:
            return None
        step_seconds = self._step_seconds()
        seconds = (self._total_steps - step) * step_seconds
        for part, every in self._every.items():
            # Count those that remain, including this step's if it has not been done yet.
            since = max(step - 1, self._done_at[part])
            if every and since < self._total_steps:
                assumed = self._evaluation_steps * step_seconds if part == EVALUATION else 0.0
                count = math.ceil(self._total_steps / every) - since // every
                seconds += count * fmean(self._parts[part] or [assumed])
        return seconds

    def closing_seconds(self) -> float:
        """Estimates the longest time in seconds that steps, an evaluation and a save may take."""
        step_seconds = self._step_seconds() if self._steps else 0.0
        seconds = 2 * step_seconds + max(self._parts[SAVING], default=0.0)
        if self._every[EVALUATION]:
            # A first evaluation takes up to five times the assumed cost, see _EVALUATION_COST.
            seconds += max(
                self._parts[EVALUATION], default=5 * self._evaluation_steps * step_seconds
            )
        return seconds

    def seconds(self) -> dict[str, float]:
        """Returns the wall seconds by part; `start and end` is the rest."""
        total = self._clock() - self._began
        steps = self._last[1] - self._steps_began if self._last is not None else 0.0
        parts = {TRAINING: steps - self._seconds.get(IMAGES, 0.0), **self._seconds}
        return {**parts, START_AND_END: total - sum(parts.values())}

    def _step_seconds(self) -> float:
        recent = list(self._steps)[-max(_FEWEST_STEPS, len(self._steps) // 2) :]
        longest = _STALL * median(recent)
        return fmean(min(seconds, longest) for seconds in recent)


def duration(seconds: float) -> str:
    """Formats seconds as `1d 2h`, `2h 05m`, `4m 07s` or `9s`."""
    total_seconds = round(max(0.0, seconds))
    minutes, hours, days = total_seconds // 60, total_seconds // 3600, total_seconds // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {total_seconds % 60:02d}s" if minutes else f"{total_seconds}s"

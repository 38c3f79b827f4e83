"""Sums over steps for the means of epochs and records; checkpoints hold them."""

import math
import resource
import time
from collections.abc import Mapping

from pydantic import BaseModel, Field

from ppdist.distributed import device
from ppdist.engine.callbacks import Callback, TrainingRun
from ppdist.engine.clock import StepSeconds
from ppdist.engine.step_policy import StepResult

_GIB = 1 << 30


class StepSums(BaseModel):
    """Sums over the steps since the last report, in float64.

    Attributes:
        after: the step before the first one that is summed.
        steps: number of steps in the sums.
        applied: number of these steps whose losses are included in `losses`.
        losses, gradient_norm: sums; None if some value was not finite.
        images: number of images of all ranks.
        wall_seconds, data_seconds: as in StepSeconds, on the rank that saved.
        seconds: wall time since `after`, including evaluations and saving between the steps.
        lr: learning rate of the last step.
        reported: the step after which means were reported although more steps belong to them; 0
            if there is none.  A run ended at this step, and was extended later.
        partial: whether steps are missing, because a checkpoint had no sums, or sums for epochs of
            a different length.
    """

    after: int = Field(default=0, ge=0)
    steps: int = Field(default=0, ge=0)
    applied: int = Field(default=0, ge=0)
    losses: dict[str, float | None] = {}
    gradient_norm: float | None = 0.0
    images: int = 0
    wall_seconds: float = 0.0
    data_seconds: float = 0.0
    seconds: float = 0.0
    lr: float = 0.0
    reported: int = 0
    partial: bool = False

    @classmethod
    def resumed(cls, saved: "StepSums | None", step: int, every: int) -> "StepSums":
        """Returns the sums with which a run continues after `step`.

        Args:
            saved: the sums in its checkpoint; None if it has none.
            every: steps that share one mean: those of an epoch, or between two records.
        """
        first = step - step % every
        # Sums that began at another step belong to epochs, or records, of a different length.
        if saved is not None and saved.after == first:
            return saved.model_copy(deep=True)
        return cls(after=step, partial=step != first)

    def add(
        self, result: StepResult, seconds: StepSeconds, lr: float, *, losses: bool = True
    ) -> None:
        """Adds a step.

        Args: losses: whether to add its losses, which may not be finite.
        """
        self.steps += 1
        self.images += result.images
        self.wall_seconds += seconds.wall
        self.data_seconds += seconds.data
        self.gradient_norm = _add_finite(self.gradient_norm, result.gradient_norm)
        self.lr = lr
        if losses:
            self.applied += 1
            for name, value in result.losses.items():
                self.losses[name] = _add_finite(self.losses.get(name, 0.0), value)

    def mean_losses(self) -> dict[str, float]:
        """Returns the mean of each loss, by name; NaN if a value was not finite."""
        return {name: mean(total, self.applied) for name, total in self.losses.items()}

    @property
    def images_per_second(self) -> float:
        """Returns the images of all ranks per second of the steps' wall time."""
        return self.images / max(self.wall_seconds, 1e-9)


def mean(total: float | None, count: int) -> float:
    """Divides a sum by its count; returns NaN for None, which means that a value was not finite."""
    return math.nan if total is None else total / count


def _add_finite(total: float | None, value: float) -> float | None:
    return None if total is None or not math.isfinite(total + value) else total + value


class EpochMeans(Callback):
    """A callback that collects an epoch's numbers: step means, evaluation results, speed."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self.restore(None, 0)

    def restore(self, saved: StepSums | None, step: int) -> None:
        """Continues the sums from the checkpoint of this step; None if it has none."""
        self._sums = StepSums.resumed(saved, step, self._steps_per_epoch)
        self._metrics: Mapping[str, float] = {}
        self._began = time.monotonic() - self._sums.seconds

    def sums(self) -> StepSums:
        """Returns a copy of the sums so far, for a checkpoint."""
        seconds = time.monotonic() - self._began
        return self._sums.model_copy(update={"seconds": seconds}, deep=True)

    def on_train_begin(self, run: TrainingRun) -> None:
        self._total_steps = run.total_steps

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        self._sums.add(result, seconds, lr, losses=result.applied)

    def on_evaluate_end(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        if self.ends(step):
            self._metrics = metrics

    def ends(self, step: int) -> bool:
        """Returns True if an epoch, or the run, ends with this step and is not reported yet."""
        is_end = step % self._steps_per_epoch == 0 or step == self._total_steps
        return is_end and self._sums.applied > 0 and self._sums.reported != step

    def take(self, step: int) -> tuple[int, dict[str, float]]:
        """Returns the number (from 1) and the results of the epoch ending at this step.

        Resets the sums, unless the run ends in the middle of an epoch.
        """
        sums = self._sums
        numbers = {
            **sums.mean_losses(),
            "lr": sums.lr,
            "images_per_second": sums.images_per_second,
            "data_share": sums.data_seconds / max(sums.wall_seconds, 1e-9),
            "seconds": time.monotonic() - self._began,
            "memory_gib": _measure_memory(),
            **self._metrics,
            **({"partial": True} if sums.partial else {}),
        }
        self._metrics, sums.reported = {}, step
        if step % self._steps_per_epoch == 0:  # else the run ends, and an extended one completes it
            self._sums, self._began = StepSums(after=step), time.monotonic()
        return -(-step // self._steps_per_epoch), numbers


def _measure_memory() -> float:
    """Returns the peak memory of this process in GiB; on an accelerator, the card's memory."""
    if device.on_accelerator():
        return device.peak_allocated_bytes() / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB

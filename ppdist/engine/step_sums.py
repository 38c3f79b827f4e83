"""Sums over steps for the means of epochs and records; checkpoints hold them."""

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from ppdist.engine.callbacks import StepSeconds
    from ppdist.engine.step_policy import StepResult


class StepSums(BaseModel):
    """Sums over the steps since a report, in float64.

    Attributes:
        after: the step before the first one that is summed.
        steps: how many are summed.
        applied: how many of them have their losses in `losses`.
        losses, gradient_norm: sums; None: some value was not finite.
        images: of all ranks.
        wall_seconds, data_seconds: as in StepSeconds, of the rank that saved.
        seconds: wall time since `after`, including what came between the steps.
        lr: of the last step.
        reported: the step after which means were reported although more steps belong to them; 0:
            none.  A run ended there, and was extended.
        partial: steps are missing: a checkpoint had no sums, or sums of epochs of another length.
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
        """Returns the sums with which a run goes on after `step`.

        Args:
            saved: those of its checkpoint; None: it has none.
            every: how many steps have a mean together.
        """
        first = step - step % every
        if saved is not None and saved.after == first:
            return saved.model_copy(deep=True)
        return cls(after=step, partial=step != first)

    def add(
        self, result: "StepResult", seconds: "StepSeconds", lr: float, *, losses: bool = True
    ) -> None:
        """Adds a step.

        Args: losses: False: leave out its losses, which may not be finite.
        """
        self.steps += 1
        self.images += result.images
        self.wall_seconds += seconds.wall
        self.data_seconds += seconds.data
        self.gradient_norm = _plus(self.gradient_norm, result.gradient_norm)
        self.lr = lr
        if losses:
            self.applied += 1
            for name, value in result.losses.items():
                self.losses[name] = _plus(self.losses.get(name, 0.0), value)

    def mean_losses(self) -> dict[str, float]:
        """Returns the mean of each loss by its name; NaN if a value was not finite."""
        return {name: mean(total, self.applied) for name, total in self.losses.items()}

    @property
    def images_per_second(self) -> float:
        """Images of all ranks per second of the steps' wall time."""
        return self.images / max(self.wall_seconds, 1e-9)


def mean(total: float | None, count: int) -> float:
    """Divides a sum by its count; NaN for None, a sum with a value that was not finite."""
    return math.nan if total is None else total / count


def _plus(total: float | None, value: float) -> float | None:
    return None if total is None or not math.isfinite(total + value) else total + value

"""Sums over steps, saved with a run, for the means of epochs."""

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from ppdist.engine.callbacks import StepSeconds
    from ppdist.engine.train_step import StepResult


class StepSums(BaseModel):
    """Sums over the steps since one of them, in float64.

    Attributes:
        after: the step before the first of them.
        steps: computed; `applied` of them changed the weights.
        losses, gradient_norm: None: some value was not finite.
        images: of all ranks.
        wall_seconds, data_seconds: as in StepSeconds, of the rank that saved.
        seconds: on its clock, with what came between the steps.
        lr: of the last step.
        reported: the step after which means were reported although more steps belong to them; 0:
            none.  A run ended there, and was extended.
        partial: steps are missing, because a checkpoint came without sums, or of other epochs.
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
        """Sums of a run that goes on after a step.

        Args:
            saved: None: the checkpoint has none.
            every: steps of which means are made together.
        """
        first = step - step % every
        if saved is not None and saved.after == first:
            return saved.model_copy(deep=True)
        return cls(after=step, partial=step != first)

    def add(
        self, result: "StepResult", seconds: "StepSeconds", lr: float, *, losses: bool = True
    ) -> None:
        """Adds a step.  Args: losses: False: without its losses, which may not be finite."""
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
        """Means by name; NaN where a value was not finite."""
        return {name: mean(total, self.applied) for name, total in self.losses.items()}

    @property
    def images_per_second(self) -> float:
        """Of all ranks, while they made steps."""
        return self.images / max(self.wall_seconds, 1e-9)


def mean(total: float | None, count: int) -> float:
    """A mean; NaN where a value was not finite."""
    return math.nan if total is None else total / count


def _plus(total: float | None, value: float) -> float | None:
    return None if total is None or not math.isfinite(total + value) else total + value

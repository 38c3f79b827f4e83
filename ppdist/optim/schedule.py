"""Learning rate as a function of the optimizer step: warm-up and decay.

Everything here is plain arithmetic in O(1) per step, so resuming needs only the step number.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from ppdist.config import Section


class ScheduleConfig(Section):
    """How the learning rate moves over a run."""

    name: Literal["cosine", "flat_cosine", "linear", "step"] = Field(
        default="cosine", description="Shape of the decay after warm-up."
    )
    warmup_epochs: float = Field(
        default=5.0, ge=0, description="Linear warm-up at the reference batch size, in epochs."
    )
    warmup_compensation: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: a total batch above the reference warms up over more images "
        "(at most 4 epochs, or warmup_epochs); none: warmup_epochs as written.",
    )
    warmup_least_steps: int = Field(
        default=0, ge=0, description="Shortest warm-up in optimizer steps, however few the images."
    )
    warmup_bias_lr: float | None = Field(
        default=None,
        ge=0,
        description="Learning rate of biases at the start of warm-up, at the reference batch size, "
        "from where it moves to that of the other weights; null: like all others, from 0.",
    )
    warmup_momentum: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Momentum at the start of warm-up, from where it moves to optimizer.momentum; "
        "null: constant.",
    )
    final_factor: float = Field(
        default=0.01, ge=0, le=1, description="Last learning rate / scaled learning rate."
    )
    flat_fraction: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="flat_cosine: part of the steps after warm-up, before the decay.",
    )
    step_epochs: tuple[float, ...] = Field(
        default=(),
        description="step: epochs at which the rate is multiplied by step_factor; they move with "
        "train.epochs_compensation.",
    )
    step_factor: float = Field(default=0.1, gt=0, lt=1, description="step: the multiplier.")


class Rates(NamedTuple):
    """What one optimizer step uses."""

    lr: float
    bias_lr: float  # of biases
    momentum: float

    def scaled(self, factor: float) -> "Rates":
        """With other learning rates; momentum stays."""
        return Rates(self.lr * factor, self.bias_lr * factor, self.momentum)


@dataclass(frozen=True)
class Schedule:
    """lr(step) for steps 0 .. total_steps - 1; linear warm-up from 0, then the named decay."""

    config: ScheduleConfig
    peak_lr: float
    momentum: float
    bias_start_lr: float  # scaled like peak_lr
    warmup_steps: int
    total_steps: int
    steps_per_epoch: float  # as step_epochs counts them

    def rates(self, step: int) -> Rates:
        """Everything a step needs; biases and momentum differ in warm-up only."""
        lr, warm = self(step), min(1.0, (step + 1) / max(1, self.warmup_steps))
        start = self.config.warmup_momentum
        momentum = self.momentum if start is None else start + (self.momentum - start) * warm
        if self.config.warmup_bias_lr is None or warm == 1.0:
            return Rates(lr, lr, momentum)
        bias_lr = self.bias_start_lr + (self.peak_lr - self.bias_start_lr) * warm
        return Rates(lr, bias_lr, momentum)

    def __call__(self, step: int) -> float:
        """Learning rate of one optimizer step (0-based)."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.peak_lr * self._decay(min(progress, 1.0), step)

    def _decay(self, progress: float, step: int) -> float:
        config = self.config
        if config.name == "step":
            passed = sum(step >= epoch * self.steps_per_epoch for epoch in config.step_epochs)
            return config.step_factor**passed
        if config.name == "linear":
            return 1 - (1 - config.final_factor) * progress
        if config.name == "flat_cosine":
            progress = max(0.0, progress - config.flat_fraction) / (1 - config.flat_fraction)
        return config.final_factor + (1 - config.final_factor) * (
            0.5 * (1 + math.cos(math.pi * progress))
        )

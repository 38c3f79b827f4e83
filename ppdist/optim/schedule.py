"""Learning rate as a function of the optimizer step: warm-up and decay.

Everything here is plain arithmetic in O(1) per step, so resuming needs only the step number.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ppdist.config.optimizer import ScheduleConfig


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

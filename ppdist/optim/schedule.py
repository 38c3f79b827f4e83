"""Learning rate as a function of the optimizer step: scaling with the batch, warm-up, decay.

Everything here is plain arithmetic in O(1) per step, so resuming needs only the step number.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from ppdist.config import Section

# Below this many reference steps a warm-up protects nothing: MLPerf's Mask R-CNN entries use
# 500 to 2300 steps (mlcommons training results 3.0 to 4.1).
_LEAST_REFERENCE_STEPS = 500
_MOST_EPOCHS = 4.0


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
        "(facts in `warmup_images`); none: warmup_epochs as written.",
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
        default=0.5, ge=0, lt=1, description="flat_cosine: part of the run before the decay."
    )
    step_epochs: tuple[float, ...] = Field(
        default=(), description="step: epochs at which the rate is multiplied by step_factor."
    )
    step_factor: float = Field(default=0.1, gt=0, lt=1, description="step: the multiplier.")


def scaled_lr(lr: float, total_batch: int, reference_batch: int, rule: str) -> float:
    """Learning rate for a total batch, from one tuned at a reference batch.

        kappa = total_batch / reference_batch
        linear: lr * kappa        (SGD; Goyal et al. 2017, arXiv:1706.02677, section 2.1)
        sqrt:   lr * sqrt(kappa)  (Adam; Malladi et al. 2022, arXiv:2205.10287)
        none:   lr

    Paddle's Momentum is v = m v + g, w -= lr v: the rate stands outside v, so no momentum
    correction is needed when it changes (Goyal et al., section 3, remark 2).
    """
    kappa = total_batch / reference_batch
    return lr * {"linear": kappa, "sqrt": math.sqrt(kappa), "none": 1.0}[rule]


def warmup_images(
    epochs: float, dataset_size: int, total_batch: int, reference_batch: int, compensation: str
) -> float:
    """Images over which the learning rate warms up.

        ref = epochs * dataset_size
        kappa = total_batch / reference_batch
        kappa <= 1 or compensation none:  ref
        otherwise:  min(max(ref, 500 * reference_batch) * sqrt(kappa), max(ref, 4 epochs))

    A larger batch takes a larger rate and fewer steps per epoch, so a warm-up constant in epochs
    gets too few steps.  The form follows published runs: MLPerf Mask R-CNN entries went from
    4k to 460k warm-up images (0.03 to 3.9 epochs) between batch 8 and 256
    (mlcommons/training_results v3.0 to v4.1); the cap is their longest.
    """
    reference = epochs * dataset_size
    kappa = total_batch / reference_batch
    if compensation == "none" or kappa <= 1 or epochs == 0:
        return reference
    grown = max(reference, _LEAST_REFERENCE_STEPS * reference_batch) * math.sqrt(kappa)
    return min(grown, max(reference, _MOST_EPOCHS * dataset_size))


class Rates(NamedTuple):
    """What one optimizer step uses."""

    lr: float
    bias_lr: float  # of biases
    momentum: float


@dataclass(frozen=True)
class Schedule:
    """lr(step) for steps 0 .. total_steps - 1; linear warm-up from 0, then the named decay."""

    config: ScheduleConfig
    peak_lr: float
    momentum: float
    bias_start_lr: float  # scaled like peak_lr
    warmup_steps: int
    total_steps: int
    steps_per_epoch: int

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

"""Learning rate by optimizer step, and its scaling with the batch.

Plain arithmetic in O(1) per step, so resuming needs only the step number.  If the total batch
differs from the reference batch, for which a configuration's values were tuned, learning rate,
decay, warm-up and length are scaled by:

    kappa = total batch / reference batch
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ppdist.config.optimizer import ScheduleConfig

# The shortest warm-up of MLPerf's Mask R-CNN entries (mlcommons training results 3.0 to 4.1: 500 to
# 2300 steps); a shorter one protects little.
LEAST_WARMUP_STEPS = 500
# Largest growth of a warm-up by a larger batch, as a share of the run.  The longest published:
# MLPerf's Mask R-CNN at 32 times the batch, from 0.03 to 3.9 of 17.1 epochs, is 0.23 of the run.
MOST_WARMUP_GROWTH = 0.2
_FLAT = 0.5  # of the steps after warm-up: DEIM's flat_cosine


class LearningRates(NamedTuple):
    """Learning rates and momentum of one optimizer step."""

    lr: float
    bias_lr: float  # of biases
    momentum: float

    def scaled(self, factor: float) -> "LearningRates":
        """Scales the learning rates but not the momentum."""
        return LearningRates(self.lr * factor, self.bias_lr * factor, self.momentum)


@dataclass(frozen=True)
class LRScheduler:
    """Learning rate by step: linear warm-up, then the named decay.

    Steps are 0 .. total_steps - 1; warm-up starts from 0.
    """

    config: ScheduleConfig
    peak_lr: float
    momentum: float
    bias_start_lr: float  # scaled like peak_lr
    warmup_steps: int
    total_steps: int
    steps_per_epoch: float  # as step_epochs counts them

    def rates(self, step: int) -> LearningRates:
        """Returns the rates of a step; bias rate and momentum differ only during warm-up."""
        lr, progress = self(step), min(1.0, (step + 1) / max(1, self.warmup_steps))
        start = self.config.warmup_momentum
        momentum = self.momentum if start is None else start + (self.momentum - start) * progress
        if self.config.warmup_bias_lr is None or progress == 1.0:
            return LearningRates(lr, lr, momentum)
        bias_lr = self.bias_start_lr + (self.peak_lr - self.bias_start_lr) * progress
        return LearningRates(lr, bias_lr, momentum)

    def __call__(self, step: int) -> float:
        """Returns the learning rate of one optimizer step (0-based)."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        config, steps = self.config, max(1, self.total_steps - self.warmup_steps)
        progress = min((step - self.warmup_steps) / steps, 1.0)
        if config.name == "step":
            passed = sum(step >= epoch * self.steps_per_epoch for epoch in config.step_epochs)
            return self.peak_lr * config.step_factor**passed
        if config.name == "linear":
            return self.peak_lr * (1 - (1 - config.final_factor) * progress)
        if config.name == "flat_cosine":
            progress = max(0.0, progress - _FLAT) / (1 - _FLAT)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_lr * (config.final_factor + (1 - config.final_factor) * cosine)


def effective_batch_ratio(
    total_batch: int, reference_batch: int, noise_scale: float | None
) -> float:
    """Computes the progress per step, in steps at the reference batch.

        kappa_eff = kappa * (1 + r) / (1 + kappa * r),   r = reference_batch / noise_scale

    A gradient of B images allows the step eps(B) = eps_max / (1 + B_noise / B); this is
    eps(total) / eps(reference).  It is about kappa for batches far below the noise scale and never
    exceeds 1 + 1 / r.  Without a noise scale it is kappa.
    Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.6.

    Args:
        noise_scale: B_noise in images; None: infinite.
    """
    kappa = total_batch / reference_batch
    if noise_scale is None:
        return kappa
    r = reference_batch / noise_scale
    return kappa * (1 + r) / (1 + kappa * r)


def rate_factor(effective: float, rule: str) -> float:
    """Computes learning rate / learning rate at the reference batch.

        linear: kappa_eff        (SGD; Goyal et al. 2017, arXiv:1706.02677, section 2.1)
        sqrt:   sqrt(kappa_eff)  (Adam; Malladi et al. 2022, arXiv:2205.10287)
        none:   1

    SGD's momentum is not scaled: Goyal et al. keep 0.9 up to batches of 8192 images, because the
    rule scales lr / (1 - momentum), a gradient's total contribution to all updates.  Their momentum
    correction (section 3, remark 2) is for the form v = m v + lr g.  Paddle uses v = m v + g,
    w -= lr v: the rate is outside v, so a change of it needs no correction.

    Args:
        effective: result of `effective_batch_ratio`.
    """
    return {"linear": effective, "sqrt": math.sqrt(effective), "none": 1.0}[rule]


def decay_factor(kappa: float, lr_factor: float) -> float:
    """Computes weight decay / weight decay at the reference batch.

        kappa / lr_factor

    One step shrinks a weight by lr * decay, an epoch by lr * decay * steps, and a batch kappa times
    as large takes kappa times fewer steps, so this keeps lr * decay per image constant.  It is 1
    for the linear rule and sqrt(kappa) for the square-root rule.
    Source: Wang and Aitchison 2024, arXiv:2405.13698 (1 / (lr * decay), in epochs, is constant);
    for L2 with batch norm van Laarhoven 2017, arXiv:1706.05350 (only lr * decay matters).
    """
    return kappa / lr_factor


def warmup_images(
    epochs: float,
    run_epochs: float,
    dataset_size: int,
    total_batch: int,
    reference_batch: int,
    compensation: str,
    beta2: float | None = None,
) -> float:
    """Computes the number of images over which the learning rate warms up.

        ref = epochs * dataset_size
        kappa <= 1 or compensation none:  ref
        otherwise:  ref * kappa ** p, at most ref + a fifth of the run

    A larger batch uses a larger rate and fewer steps per epoch, so a warm-up of fixed epochs has
    too few steps.  p is 1/2, and up to 1 (as many steps as at the reference) where that would
    be below 500 reference steps * sqrt(kappa), or with Adam below 2 / (1 - beta2) steps.

    The formula follows published runs: MLPerf Mask R-CNN entries went from 4k to 460k warm-up
    images (0.03 to 3.9 epochs, of 12.7 to 17.1) between batch 8 and 256 (mlcommons/training_results
    v3.0 to v4.1); the cap is their longest growth as a share of the run, rounded down.  It counts
    from the recipe's own warm-up, so that a recipe with a long one grows, too.  Goyal et al. 2017
    (arXiv:1706.02677) keep 5 of 90 epochs at all batches; such a run never meets the cap.  Adam: Ma
    and Yarats 2019, arXiv:1910.04209.

    Args:
        epochs: length of warm-up at the reference batch.
        run_epochs: length of the run.
        beta2: Adam's, as this run uses it; None for an optimizer without a second moment.
    """
    reference = epochs * dataset_size
    kappa = total_batch / reference_batch
    if compensation == "none" or kappa <= 1 or epochs == 0:
        return reference
    # Images that LEAST_WARMUP_STEPS reference steps * sqrt(kappa) take.
    needed = LEAST_WARMUP_STEPS * reference_batch * math.sqrt(kappa)
    if beta2 is not None:
        needed = max(needed, 2 / (1 - beta2) * total_batch)
    extended = min(max(needed, reference * math.sqrt(kappa)), reference * kappa)
    return min(extended, reference + MOST_WARMUP_GROWTH * run_epochs * dataset_size)


def epochs_factor(total_batch: int, reference_batch: int, noise_scale: float) -> float:
    """Computes epochs to the same loss / epochs at the reference batch.

        E(B) = E_min * (1 + B / B_c):   (1 + total / B_c) / (1 + reference / B_c)

    A configuration's epochs are its author's choice, so a smaller batch does not reduce them.
    Source: McCandlish et al. 2018, arXiv:1812.06162, equation 2.11 (B_c = E_min / S_min is about
    the noise scale).  MLPerf's RetinaNet (mlcommons/logging, training 4.1.0, rcps_ssd.json) follows
    it from batch 256 to 2560 with B_c near 1800: 4.0 to 8.6 epochs; Mask R-CNN (3.1.0) went from
    14.0 to 17.1 between batch 128 and 256, which is a B_c near 450.
    """
    factor = (1 + total_batch / noise_scale) / (1 + reference_batch / noise_scale)
    return max(1.0, factor)

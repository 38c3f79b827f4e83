"""The `train` section: length, batch and numerics of a run."""

from typing import Literal

from pydantic import Field

from ppdist.config import Section
from ppdist.engine.precision import AmpConfig
from ppdist.optim.ema import EMAConfig


class TrainConfig(Section):
    """Length, batch and numerics of training."""

    epochs: float = Field(default=300, gt=0, description="Passes over the training set.")
    max_steps: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this many optimizer steps; the schedule still spans epochs.",
    )
    epochs_compensation: Literal["auto", "none"] = Field(
        default="none",
        description="auto: a total batch above the reference trains for more epochs, by "
        "optimizer.noise_scale, and all phases counted in epochs grow alike; none: epochs as "
        "written.",
    )
    batch_size_per_card: int = Field(default=8, gt=0, description="Images per rank and micro-step.")
    accumulate_steps: int = Field(
        default=1, gt=0, description="Micro-steps whose gradients make one optimizer step."
    )
    multi_scale: tuple[tuple[int, int], ...] = Field(
        default=(),
        description="Training sizes [[H, W], ...] in pixels, multiples of the largest stride; one "
        "is drawn per step for all ranks. Empty: model.image_size.",
    )
    amp: AmpConfig = Field(default=AmpConfig(), description="Automatic mixed precision.")
    sync_bn: bool = Field(
        default=False, description="Batch-norm statistics over all ranks instead of each its own."
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="Largest L2 norm of the whole gradient; null: no clipping."
    )
    bad_steps_limit: int = Field(
        default=3,
        gt=0,
        description="After so many steps in a row whose loss or gradient was not finite, the run "
        "goes back to the weights it had when it was last saved, with half the learning rate; "
        "three times at most.",
    )
    ema: EMAConfig = Field(default=EMAConfig(), description="Averaged weights.")
    cpu_convolutions: Literal["auto", "plain"] = Field(
        default="auto",
        description="On CPU only. auto: oneDNN convolutions when they pass a self-check against "
        "eager at start-up; plain: Paddle's eager ones.",
    )

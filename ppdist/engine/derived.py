"""Every number a run derives from its configuration, its data and its ranks, and why."""

import math
from dataclasses import dataclass

from ppdist.errors import ConfigError
from ppdist.optim.ema import Decay, EMAConfig
from ppdist.optim.optimizer import OptimizerConfig
from ppdist.optim.schedule import Schedule, ScheduleConfig, scaled_lr, warmup_images


@dataclass(frozen=True)
class Derived:
    """What rank 0 prints as a table at start."""

    world: int
    batch_size_per_card: int
    accumulate_steps: int
    dataset_size: int
    steps_per_epoch: int
    schedule_steps: int
    total_steps: int
    reference_batch: int
    ema_decay: Decay
    schedule: Schedule
    optimizer: OptimizerConfig

    @property
    def total_batch(self) -> int:
        """Images per optimizer step over all ranks and micro-steps."""
        return self.world * self.batch_size_per_card * self.accumulate_steps

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, why) for the table."""
        kappa = self.total_batch / self.reference_batch
        lr, rule = self.optimizer.lr, self.optimizer.lr_scaling
        warm = self.schedule.warmup_steps
        ratio = f"(batch {self.total_batch} / reference {self.reference_batch} = {kappa:g})"
        decay, ramp = self.schedule.config, self.ema_decay.ramp_steps
        return [
            ("ranks", f"{self.world}", "processes that fleetrun started"),
            (
                "total batch",
                f"{self.total_batch}",
                f"{self.world} ranks x {self.batch_size_per_card} images x "
                f"{self.accumulate_steps} micro-steps",
            ),
            ("learning rate", f"{self.schedule.peak_lr:g}", f"{lr:g}, {rule} scaling {ratio}"),
            (
                "warm-up",
                f"{warm} steps",
                f"{decay.warmup_epochs:g} epochs at the reference batch, compensation "
                f"{decay.warmup_compensation}{self._warmup_bounds()}: {warm * self.total_batch} "
                f"images ({warm / self.steps_per_epoch:.2f} epochs)",
            ),
            (
                "EMA decay",
                f"{self.ema_decay.limit:.6g}",
                f"decay ** {kappa:g} {ratio}, ramp "
                + (f"of {ramp / kappa:g} steps" if ramp else "(1 + t) / (10 + t)"),
            ),
            (
                "steps per epoch",
                f"{self.steps_per_epoch}",
                f"{self.dataset_size} images / {self.total_batch}, the last step smaller",
            ),
            (
                "steps",
                f"{self.total_steps}",
                f"{self.total_steps / self.steps_per_epoch:.1f} epochs; {decay.name} schedule "
                f"over {self.schedule_steps} steps",
            ),
        ]

    def _warmup_bounds(self) -> str:
        """Which bound of the warm-up decided, in words."""
        warm, least = self.schedule.warmup_steps, self.schedule.config.warmup_least_steps
        if warm == self.schedule_steps // 2:
            return ", at most half the run"
        return f", at least {least} steps" if warm == least > 0 else ""


def derive(
    *,
    world: int,
    dataset_size: int,
    batch_size_per_card: int,
    accumulate_steps: int,
    epochs: float,
    max_steps: int | None,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    ema: EMAConfig,
) -> Derived:
    """Turns epochs and reference values into steps and rates; the only place that does.

    Raises: ConfigError: a run without a single step.
    """
    total_batch = world * batch_size_per_card * accumulate_steps
    reference = optimizer.reference_batch_size or total_batch
    steps_per_epoch = math.ceil(dataset_size / total_batch)
    schedule_steps = round(epochs * steps_per_epoch)
    if schedule_steps < 1:
        raise ConfigError(f"train.epochs: {epochs:g} epochs of {steps_per_epoch} steps are no step")
    warm = warmup_images(
        schedule.warmup_epochs, dataset_size, total_batch, reference, schedule.warmup_compensation
    )
    # Counted in steps of this run's epochs, whose last step may be smaller than the others.
    warmup_steps = max(round(warm / dataset_size * steps_per_epoch), schedule.warmup_least_steps)
    rule = optimizer.lr_scaling
    peak = scaled_lr(optimizer.lr, total_batch, reference, rule)
    bias_start = scaled_lr(schedule.warmup_bias_lr or 0.0, total_batch, reference, rule)
    return Derived(
        world=world,
        batch_size_per_card=batch_size_per_card,
        accumulate_steps=accumulate_steps,
        dataset_size=dataset_size,
        steps_per_epoch=steps_per_epoch,
        schedule_steps=schedule_steps,
        total_steps=min(schedule_steps, max_steps or schedule_steps),
        reference_batch=reference,
        ema_decay=Decay(ema.decay, total_batch / reference, ema.ramp_steps),
        schedule=Schedule(
            config=schedule,
            peak_lr=peak,
            momentum=optimizer.momentum,
            bias_start_lr=bias_start,
            warmup_steps=min(warmup_steps, schedule_steps // 2),
            total_steps=schedule_steps,
            steps_per_epoch=steps_per_epoch,
        ),
        optimizer=optimizer,
    )

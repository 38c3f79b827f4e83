"""Schedule setup: numbers that follow from config, data and ranks.

`set_up_schedule` turns epochs and reference values into steps and rates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ppdist.common.errors import ConfigError
from ppdist.config.augment import AugmentConfig
from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.train import EMAConfig, MicroBatches
from ppdist.optim.ema import Decay, Restart
from ppdist.optim.lr_scheduler import (
    MOST_WARMUP_GROWTH,
    LRScheduler,
    decay_factor,
    effective_batch_ratio,
    epochs_factor,
    rate_factor,
    warmup_images,
)


class Fact(NamedTuple):
    """A number of the schedule, for the table and for metrics.jsonl."""

    key: str
    value: Any  # as JSON holds it
    name: str
    shown: str
    reason: str


@dataclass(frozen=True)
class ScheduleSetup:
    """The schedule of a run, which rank 0 logs as a table."""

    world: int
    batches: MicroBatches
    dataset_size: int
    steps_per_epoch: int
    schedule_steps: int
    total_steps: int
    reference_batch: int
    epochs: float  # as configured
    epoch_scale: float  # epochs of this run / epochs as configured
    phase_scale: float  # epoch_scale x train.phases_factor: phases in epochs / as configured
    ema_decay: Decay
    ema_restart: Restart | None
    lr_scheduler: LRScheduler
    written_warmup: int  # its warm-up steps if schedule.warmup_compensation is none
    compensated_warmup: int  # and if it is auto
    optimizer: OptimizerConfig  # as configured
    scaled: OptimizerConfig  # for the total batch of this run

    @property
    def total_batch(self) -> int:
        """Returns the images per optimizer step over all ranks and micro-batches."""
        return self.batches.total_batch

    @property
    def batch_size_per_card(self) -> int:
        """Returns the most images in one pass of a rank, if the ranks have equal shares."""
        return self.batches.per_rank(self.world)

    @property
    def step_images(self) -> int:
        """Returns the images of a full step: the total batch, or the set if that is smaller."""
        return min(self.total_batch, self.dataset_size)

    @property
    def batch_ratio(self) -> float:
        """Returns images per step / reference batch."""
        return self.step_images / self.reference_batch

    @property
    def steps_per_written_epoch(self) -> float:
        """Returns the optimizer steps of an epoch as configured.

        Phases of the loss and drops of the learning rate are counted in these epochs.
        """
        return self.steps_per_epoch * self.phase_scale

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns (name, value, reason) rows for the table."""
        return [(fact.name, fact.shown, fact.reason) for fact in self.facts()]

    def record(self) -> dict[str, dict[str, Any]]:
        """Returns the values and reasons of all numbers, by key, for metrics.jsonl."""
        return {fact.key: {"value": fact.value, "why": fact.reason} for fact in self.facts()}

    def facts(self) -> Iterator[Fact]:
        """Yields every number, in table order.

        The keys are those of metrics.jsonl.
        """
        reason = (
            "processes that fleetrun started"
            if self.world > 1
            else "one process, no launcher needed"
        )
        yield Fact("ranks", self.world, "ranks", f"{self.world}", reason)
        reason = self.batches.describe(self.world)
        yield Fact("total_batch", self.total_batch, "total batch", f"{self.total_batch}", reason)
        given = self.optimizer.reference_batch_size is not None
        is_small_set = self.step_images < self.total_batch
        images = (
            f"all {self.step_images} images" if is_small_set else f"total batch {self.total_batch}"
        )
        reason = f"{images} / optimizer.reference_batch_size "
        reason += f"{self.reference_batch}" if given else "null: nothing is scaled"
        yield Fact("kappa", self.batch_ratio, "batch / reference", f"{self.batch_ratio:g}", reason)
        yield from self._list_optimizer_facts()
        yield from self._list_length_facts()

    def _list_optimizer_facts(self) -> Iterator[Fact]:
        configured, scaled, ratio = self.optimizer, self.scaled, self.batch_ratio
        reason = f"{configured.lr:g}, {configured.lr_scaling} scaling by {ratio:g}"
        if configured.noise_scale is not None:
            effective = effective_batch_ratio(
                self.step_images, self.reference_batch, configured.noise_scale
            )
            reason += (
                f", which counts as {effective:g} at a noise scale of {configured.noise_scale:g}"
            )
        yield Fact("lr", scaled.lr, "learning rate", f"{scaled.lr:g}", reason)
        reason = f"{configured.weight_decay:g}"
        if scaled.weight_decay != configured.weight_decay:
            factor = scaled.weight_decay / configured.weight_decay
            reason += f" x {factor:g}: learning rate x decay per image stays the same"
        else:
            reason += ", as written"
        decay = scaled.weight_decay
        yield Fact("weight_decay", decay, "weight decay", f"{decay:g}", reason)
        if configured.name == "momentum":
            reason = "as written: a larger batch only changes the rate"
            yield Fact("momentum", scaled.momentum, "momentum", f"{scaled.momentum:g}", reason)
        else:
            betas = [float(f"{beta:.6g}") for beta in scaled.betas]
            shown = f"{betas[0]:g}, {betas[1]:g}; epsilon {scaled.epsilon:.3g}"
            yield Fact("betas", betas, "betas", shown, "as written")

    def _list_length_facts(self) -> Iterator[Fact]:
        schedule = self.lr_scheduler.config
        warm, growth = self.lr_scheduler.warmup_steps, ""
        phase_factor = self.phase_scale / self.epoch_scale
        if warm > self.written_warmup:
            growth = f" ({warm / max(1, self.written_warmup):.3g} x as many images)"
        bound = f", {self.warmup_bound}" if self.warmup_bound else ""
        # Images are counted by epochs, because the last step of an epoch may be smaller.
        full_epochs, rest_steps = divmod(warm, self.steps_per_epoch)
        reason = (
            f"{counted(schedule.warmup_epochs * phase_factor, 'epoch')} at the reference batch, "
            f"compensation {schedule.warmup_compensation}{growth}{bound}: "
            f"{counted(full_epochs * self.dataset_size + rest_steps * self.total_batch, 'image')} "
            f"({warm / self.steps_per_epoch:.2f} epochs)"
        )
        yield Fact("warmup_steps", warm, "warm-up", counted(warm, "step"), reason)
        start = self.schedule_steps if self.ema_restart is None else self.ema_restart.step
        limit = self.ema_decay.limit
        reason = self._explain_ema(self.ema_decay, start)
        yield Fact("ema_decay", limit, "EMA decay", f"{limit:.6g}", reason)
        if self.ema_restart is not None:
            reason = "strong augmentation ends; from there on decay "
            reason += self._explain_ema(self.ema_restart.decay, self.schedule_steps - start)
            yield Fact("ema_restart", start, "EMA restart", f"before step {start + 1}", reason)
        steps, key = self.steps_per_epoch, "steps_per_epoch"
        reason = f"{counted(self.dataset_size, 'image')} / {self.total_batch}"
        if steps > 1 and self.dataset_size % self.total_batch:
            reason += ", the last step smaller"
        yield Fact(key, steps, "steps per epoch", f"{steps}", reason)
        epochs = round(self.total_steps / self.steps_per_epoch, 1)
        reason = f"{counted(epochs, 'epoch')}; {schedule.name} schedule "
        reason += f"over {counted(self.schedule_steps, 'step')}"
        if self.epoch_scale > 1:
            reason += (
                f", {self.epoch_scale:.4g} x the {self.epochs:g} epochs configured, as are all "
                f"phases in epochs (train.epochs_compensation)"
            )
        if phase_factor != 1:
            reason += (
                f"; phases in epochs are {self.phase_scale:.4g} x as long as configured "
                f"(train.phases_for_epochs)"
            )
        yield Fact("steps", self.total_steps, "steps", f"{self.total_steps}", reason)

    @property
    def warmup_bound(self) -> str:
        """Names the rule that bounds warm-up; "" if none does."""
        schedule, warm = self.lr_scheduler.config, self.lr_scheduler.warmup_steps
        if warm == self.schedule_steps // 2 and (warm or schedule.warmup_epochs):
            return "cut to half the run"
        if warm == schedule.warmup_least_steps > 0:
            return f"at least {counted(warm, 'step')}"
        epochs = schedule.warmup_epochs * self.phase_scale / self.epoch_scale
        max_epochs = epochs + MOST_WARMUP_GROWTH * self.schedule_steps / self.steps_per_epoch
        if warm > self.written_warmup and warm >= round(max_epochs * self.steps_per_epoch):
            return f"cut to {MOST_WARMUP_GROWTH:.0%} of the run beyond that"
        return ""

    def interval(self, epochs: float) -> int:
        """Converts an interval in epochs to steps, at least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def step_of_last(self, epochs: int) -> int:
        """Returns the step (from 0) at which the last `epochs` epochs of the run begin."""
        return _step_of_last(epochs, self.schedule_steps, self.steps_per_epoch)

    def _explain_ema(self, decay: Decay, updates: int) -> str:
        reason = f"{decay.decay:g} ** {self.batch_ratio:g}, ramp "
        ramp = decay.ramp_steps
        reason += f"of {ramp / self.batch_ratio:g} steps" if ramp else "(1 + t) / (10 + t)"
        return f"{reason}: {decay(max(1, updates)):.4g} at the end"


def counted(number: float, what: str, plural: str = "s") -> str:
    """Formats a number with its noun: `1 step`, `2 steps`."""
    return f"{number:g} {what}{plural * (number != 1)}"


def set_up_schedule(
    *,
    world: int,
    dataset_size: int,
    batches: MicroBatches,
    epochs: float,
    epochs_compensation: str,
    max_steps: int | None,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    ema: EMAConfig,
    augment: AugmentConfig,
    phases_factor: float = 1.0,
) -> ScheduleSetup:
    """Turns epochs and reference values into steps and rates; no other code does this.

    Args:
        augment: as configured.
        phases_factor: `epochs` / the epochs that warm-up and other phases were configured for.
    Raises: ConfigError: the run has not a single step, or betas cannot be adapted to the batch.
    """
    # The set may be smaller than the batch: everything is scaled to the actual images per step.
    total_batch = min(batches.total_batch, dataset_size)
    reference = optimizer.reference_batch_size or total_batch
    steps_per_epoch = math.ceil(dataset_size / total_batch)
    noise_scale = optimizer.noise_scale if epochs_compensation == "auto" else None
    epoch_scale = _epoch_scale(epochs, total_batch, reference, noise_scale)
    schedule_steps = round(epochs * epoch_scale * steps_per_epoch)
    if schedule_steps < 1:
        raise ConfigError(
            f"{epochs:g} epochs of {steps_per_epoch} steps are less than one step",
            code="epochs_without_step",
            where="train.epochs",
        )
    scaled = _scale_optimizer(optimizer, total_batch, reference)
    warmup = schedule.warmup_epochs * phases_factor
    beta2 = scaled.betas[1] if scaled.name == "adamw" else None

    def warmup_steps(compensation: str) -> int:
        images = warmup_images(
            warmup, epochs * epoch_scale, dataset_size, total_batch, reference, compensation, beta2
        )
        # Counted in steps of this run's epochs; the last step of an epoch may be smaller.
        steps = round(images / dataset_size * steps_per_epoch)
        return min(max(steps, schedule.warmup_least_steps), schedule_steps // 2)

    kappa, phase_scale = total_batch / reference, epoch_scale * phases_factor
    restart = None
    if ema.restart_decay is not None:
        last = augment.with_epoch_scale(phase_scale).last_stage_epochs
        first = _step_of_last(last, schedule_steps, steps_per_epoch)
        restart = Restart(first, Decay(ema.restart_decay, kappa, ema.ramp_steps))
    return ScheduleSetup(
        world=world,
        batches=batches,
        dataset_size=dataset_size,
        steps_per_epoch=steps_per_epoch,
        schedule_steps=schedule_steps,
        total_steps=min(schedule_steps, max_steps or schedule_steps),
        reference_batch=reference,
        epochs=epochs,
        epoch_scale=epoch_scale,
        phase_scale=phase_scale,
        ema_decay=Decay(ema.decay, kappa, ema.ramp_steps),
        ema_restart=restart,
        lr_scheduler=LRScheduler(
            config=schedule,
            peak_lr=scaled.lr,
            momentum=optimizer.momentum,
            bias_start_lr=(schedule.warmup_bias_lr or 0.0) * scaled.lr / optimizer.lr,
            warmup_steps=warmup_steps(schedule.warmup_compensation),
            total_steps=schedule_steps,
            steps_per_epoch=steps_per_epoch * phase_scale,
        ),
        written_warmup=warmup_steps("none"),
        compensated_warmup=warmup_steps("auto"),
        optimizer=optimizer,
        scaled=scaled,
    )


def _step_of_last(epochs: int, steps: int, steps_per_epoch: int) -> int:
    """Returns the step (from 0) at which the last `epochs` epochs of a schedule begin."""
    return max(0, math.ceil(steps / steps_per_epoch) - epochs) * steps_per_epoch


def _epoch_scale(epochs: float, total: int, reference: int, noise_scale: float | None) -> float:
    """Computes epochs of this run / epochs configured; 1 without a noise scale."""
    factor = 1.0 if noise_scale is None else epochs_factor(total, reference, noise_scale)
    # Rounded up to whole epochs, so that the longer run sees every image equally often.  A run of
    # less than one epoch never does, and rounding would lengthen it to a whole epoch.
    if factor == 1.0 or epochs < 1:
        return factor
    return math.ceil(epochs * factor - 1e-9) / epochs


def _scale_optimizer(
    config: OptimizerConfig, total_batch: int, reference_batch: int
) -> OptimizerConfig:
    """Scales an optimizer's learning rate and weight decay to a total batch.

    With `lr_scaling: none` the weight decay is kept, too: both were set for this batch by hand.
    """
    ratio = total_batch / reference_batch
    effective = effective_batch_ratio(total_batch, reference_batch, config.noise_scale)
    factor = rate_factor(effective, config.lr_scaling)
    decay = config.weight_decay
    if config.lr_scaling != "none":
        decay *= decay_factor(ratio, factor)
    return config.model_copy(update={"lr": config.lr * factor, "weight_decay": decay})


def extension_note(schedule: ScheduleSetup, before_steps: int, step: int) -> str:
    """Describes the schedule of an extended run in one log line.

    Args:
        before_steps: length of its previous schedule, in steps.
        step: optimizer steps done so far.
    """
    rate = schedule.lr_scheduler
    warmup = round(rate.warmup_steps * before_steps / schedule.schedule_steps)
    previous = replace(rate, total_steps=before_steps, warmup_steps=warmup)
    last = previous(min(step, before_steps) - 1)
    done_epochs = step / schedule.steps_per_epoch
    all_epochs = schedule.schedule_steps / schedule.steps_per_epoch
    return (
        f"continuing from epoch {done_epochs:g} to {all_epochs:g} on a schedule over all "
        f"{all_epochs:g} epochs: the learning rate, which had ended at {last:.2g}, is "
        f"{rate(step):.2g} now and {rate(schedule.schedule_steps - 1):.2g} at the end"
    )

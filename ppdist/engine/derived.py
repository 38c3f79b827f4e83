"""Every number a run derives from its configuration, its data and its ranks, and why."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.train import EMAConfig
from ppdist.errors import ConfigError
from ppdist.optim.ema import Decay
from ppdist.optim.scaling import (
    adam_moments,
    decay_factor,
    effective_kappa,
    epochs_factor,
    rate_factor,
    warmup_images,
)
from ppdist.optim.schedule import Schedule


class Fact(NamedTuple):
    """One derived value: a row of the table, an entry of metrics.jsonl."""

    key: str
    value: Any  # as JSON holds it
    name: str
    shown: str
    why: str


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
    epochs: float  # as the configuration writes them
    stretch: float  # epochs of this run / epochs as written
    phases_stretch: float  # stretch x train.phases_factor: of phases in epochs / as written
    ema_decay: Decay
    schedule: Schedule
    compensated_warmup: int  # its warm-up steps if schedule.warmup_compensation is auto
    optimizer: OptimizerConfig  # as the configuration writes it
    scaled: OptimizerConfig  # for the total batch of this run

    @property
    def total_batch(self) -> int:
        """Images per optimizer step over all ranks and micro-steps."""
        return self.world * self.batch_size_per_card * self.accumulate_steps

    @property
    def kappa(self) -> float:
        """Total batch / reference batch."""
        return self.total_batch / self.reference_batch

    @property
    def steps_per_written_epoch(self) -> float:
        """Optimizer steps for what the configuration counts in epochs of its own length: phases of
        the loss, drops of the rate.  More than `steps_per_epoch` where the run was lengthened,
        other than that too where they were written for a run of another length."""
        return self.steps_per_epoch * self.phases_stretch

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, why) for the table."""
        return [(fact.name, fact.shown, fact.why) for fact in self.facts()]

    def record(self) -> dict[str, dict[str, Any]]:
        """Value and why of everything, by key, for metrics.jsonl."""
        return {fact.key: {"value": fact.value, "why": fact.why} for fact in self.facts()}

    def facts(self) -> Iterator[Fact]:
        """Everything derived, in the order of the table."""
        yield Fact("ranks", self.world, "ranks", f"{self.world}", "processes that fleetrun started")
        yield Fact(
            "total_batch",
            self.total_batch,
            "total batch",
            f"{self.total_batch}",
            f"{self.world} ranks x {self.batch_size_per_card} images x "
            f"{self.accumulate_steps} micro-steps",
        )
        given = self.optimizer.reference_batch_size is not None
        yield Fact(
            "kappa",
            self.kappa,
            "batch / reference",
            f"{self.kappa:g}",
            f"total batch {self.total_batch} / optimizer.reference_batch_size "
            + (f"{self.reference_batch}" if given else "null: nothing is scaled"),
        )
        yield from self._of_optimizer()
        yield from self._of_length()

    def _of_optimizer(self) -> Iterator[Fact]:
        before, after, kappa = self.optimizer, self.scaled, self.kappa
        why = f"{before.lr:g}, {before.lr_scaling} scaling by {kappa:g}"
        if before.noise_scale is not None:
            effective = effective_kappa(self.total_batch, self.reference_batch, before.noise_scale)
            why += f", which counts as {effective:g} at a noise scale of {before.noise_scale:g}"
        yield Fact("lr", after.lr, "learning rate", f"{after.lr:g}", why)
        why = f"{before.weight_decay:g}"
        if after.weight_decay != before.weight_decay:
            factor = after.weight_decay / before.weight_decay
            why += f" x {factor:g}: learning rate x decay per image stays the same"
        else:
            why += f", scaling {before.weight_decay_scaling}"
        decay = after.weight_decay
        yield Fact("weight_decay", decay, "weight decay", f"{decay:g}", why)
        if before.name == "momentum":
            why = "as written: a larger batch changes the rate alone"
            yield Fact("momentum", after.momentum, "momentum", f"{after.momentum:g}", why)
        else:
            betas = [float(f"{beta:.6g}") for beta in after.betas]
            shown = f"{betas[0]:g}, {betas[1]:g}; epsilon {after.epsilon:.3g}"
            why = f"{before.betas[0]:g}, {before.betas[1]:g}, scaling {before.betas_scaling}"
            if before.betas_scaling == "auto":
                why += f": 1 - beta x {kappa:g}, epsilon {before.epsilon:g} / sqrt({kappa:g})"
            yield Fact("betas", betas, "betas", shown, why)

    def _of_length(self) -> Iterator[Fact]:
        schedule, ramp = self.schedule.config, self.ema_decay.ramp_steps
        warm = self.schedule.warmup_steps
        written = self.phases_stretch / self.stretch
        yield Fact(
            "warmup_steps",
            warm,
            "warm-up",
            f"{warm} steps",
            f"{schedule.warmup_epochs * written:g} epochs at the reference batch, compensation "
            f"{schedule.warmup_compensation}{self._warmup_bounds()}: {self._images(warm)} "
            f"images ({warm / self.steps_per_epoch:.2f} epochs)",
        )
        yield Fact(
            "ema_decay",
            self.ema_decay.limit,
            "EMA decay",
            f"{self.ema_decay.limit:.6g}",
            f"{self.ema_decay.decay:g} ** {self.kappa:g}, ramp "
            + (f"of {ramp / self.kappa:g} steps" if ramp else "(1 + t) / (10 + t)")
            + f": {self.ema_decay(self.schedule_steps):.4g} at the end",
        )
        yield Fact(
            "steps_per_epoch",
            self.steps_per_epoch,
            "steps per epoch",
            f"{self.steps_per_epoch}",
            f"{self.dataset_size} images / {self.total_batch}, the last step smaller",
        )
        why = f"{self.total_steps / self.steps_per_epoch:.1f} epochs; {schedule.name} schedule "
        why += f"over {self.schedule_steps} steps"
        if self.stretch > 1:
            why += (
                f", {self.stretch:.4g} x the {self.epochs:g} epochs written, and so for all phases "
                f"in epochs (train.epochs_compensation)"
            )
        if written != 1:
            why += (
                f"; phases in epochs are {self.phases_stretch:.4g} x as long as written "
                f"(train.phases_for_epochs)"
            )
        yield Fact("steps", self.total_steps, "steps", f"{self.total_steps}", why)

    def _images(self, steps: int) -> int:
        """Images of the first steps; the last of every epoch may have fewer than the others."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.dataset_size + rest * self.total_batch

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
    epochs_compensation: str,
    max_steps: int | None,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    ema: EMAConfig,
    phases_factor: float = 1.0,
) -> Derived:
    """Turns epochs and reference values into steps and rates; the only place that does.

    Args: phases_factor: `epochs` / those that warm-up and other phases were written for.
    Raises: ConfigError: a run without a single step; betas that cannot follow the batch.
    """
    total_batch = world * batch_size_per_card * accumulate_steps
    reference = optimizer.reference_batch_size or total_batch
    steps_per_epoch = math.ceil(dataset_size / total_batch)
    lengthens = epochs_compensation == "auto"
    stretch = _stretch(epochs, total_batch, reference, optimizer.noise_scale if lengthens else None)
    schedule_steps = round(epochs * stretch * steps_per_epoch)
    if schedule_steps < 1:
        raise ConfigError(
            f"{epochs:g} epochs of {steps_per_epoch} steps are no step",
            code="epochs_without_step",
            where="train.epochs",
        )
    scaled = _scaled(optimizer, total_batch, reference)
    warmup = schedule.warmup_epochs * phases_factor

    def warmup_steps(compensation: str) -> int:
        steps = _warmup_steps(warmup, compensation, scaled, dataset_size, total_batch, reference)
        return min(max(steps, schedule.warmup_least_steps), schedule_steps // 2)

    return Derived(
        world=world,
        batch_size_per_card=batch_size_per_card,
        accumulate_steps=accumulate_steps,
        dataset_size=dataset_size,
        steps_per_epoch=steps_per_epoch,
        schedule_steps=schedule_steps,
        total_steps=min(schedule_steps, max_steps or schedule_steps),
        reference_batch=reference,
        epochs=epochs,
        stretch=stretch,
        phases_stretch=stretch * phases_factor,
        ema_decay=Decay(ema.decay, total_batch / reference, ema.ramp_steps),
        schedule=Schedule(
            config=schedule,
            peak_lr=scaled.lr,
            momentum=optimizer.momentum,
            bias_start_lr=(schedule.warmup_bias_lr or 0.0) * scaled.lr / optimizer.lr,
            warmup_steps=warmup_steps(schedule.warmup_compensation),
            total_steps=schedule_steps,
            steps_per_epoch=steps_per_epoch * stretch * phases_factor,
        ),
        compensated_warmup=warmup_steps("auto"),
        optimizer=optimizer,
        scaled=scaled,
    )


def _stretch(epochs: float, total: int, reference: int, noise_scale: float | None) -> float:
    """Epochs of this run / epochs as written; 1 without a noise scale."""
    factor = 1.0 if noise_scale is None else epochs_factor(total, reference, noise_scale)
    # Up to whole epochs, so that the longer run too sees every image equally often; a run of less
    # than one does not, and would jump to it.
    if factor == 1.0 or epochs < 1:
        return factor
    return math.ceil(epochs * factor - 1e-9) / epochs


def _warmup_steps(
    epochs: float,
    compensation: str,
    scaled: OptimizerConfig,
    dataset_size: int,
    total: int,
    reference: int,
) -> int:
    beta2 = scaled.betas[1] if scaled.name == "adamw" else None
    images = warmup_images(epochs, dataset_size, total, reference, compensation, beta2)
    # Counted in steps of this run's epochs, whose last step may be smaller than the others.
    return round(images / dataset_size * math.ceil(dataset_size / total))


def _scaled(config: OptimizerConfig, total_batch: int, reference_batch: int) -> OptimizerConfig:
    """The optimizer for a total batch.  With lr_scaling none its decay stays too: whoever sets the
    rate for a batch by hand has set what goes with it."""
    kappa = total_batch / reference_batch
    effective = effective_kappa(total_batch, reference_batch, config.noise_scale)
    factor = rate_factor(effective, config.lr_scaling)
    decay = config.weight_decay
    if config.weight_decay_scaling == "auto" and config.lr_scaling != "none":
        decay *= decay_factor(kappa, factor)
    betas, epsilon = config.betas, config.epsilon
    if config.name == "adamw" and config.betas_scaling == "auto":
        betas, epsilon = adam_moments(betas, epsilon, kappa)
    return config.model_copy(
        update={
            "lr": config.lr * factor,
            "weight_decay": decay,
            "betas": betas,
            "epsilon": epsilon,
        }
    )

"""Schedule setup: numbers that follow from config, data and ranks.

`set_up_schedule` turns epochs and reference values into steps and rates; `advice` warns where
published runs lost accuracy on many cards; `describe_run` writes what a run was beside its results.
"""

import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from ppdist.common.child import output_of
from ppdist.common.errors import ConfigError
from ppdist.common.files import digest_of_text, replace_file
from ppdist.config.augment import AugmentConfig
from ppdist.config.model import ModelConfig
from ppdist.config.optimizer import OptimizerConfig, ScheduleConfig
from ppdist.config.parse import flattened
from ppdist.config.section import Section
from ppdist.config.train import EMAConfig, MicroBatches
from ppdist.distributed import comm, device
from ppdist.engine.preflight import digests_of_code, versions
from ppdist.optim.ema import Decay, Restart
from ppdist.optim.lr_scheduler import (
    LEAST_WARMUP_STEPS,
    MOST_WARMUP_GROWTH,
    LRScheduler,
    decay_factor,
    effective_batch_ratio,
    epochs_factor,
    rate_factor,
    warmup_images,
)

# Of `advice`:
_LARGE_BATCH = 256  # where AGVM and MMYOLO, below, see detectors lose
_MUCH_LARGER = 4.0  # times the reference: one machine to four in PaddleDetection's table
# Images per card, for batch norm of its own.  That few on each of eight cards is the YOLOv5
# recipe, where SyncBN is optional; it matters with fewer, and on more cards (its pull request 401).
_FEW_IMAGES, _FEW_CARDS = 8, 8
_UNSTABLE_WITHOUT_SYNC = 32  # the smallest total batch at which MegDet saw training fail
_NOISE_SCALE = 450  # to try first: that of Mask R-CNN, by MLPerf's epochs
_MORE = "docs/distributed.md"


class Fact(NamedTuple):
    """A number of the schedule, for the table and for metrics.jsonl."""

    key: str
    value: Any  # as JSON holds it
    name: str
    shown: str
    why: str


@dataclass(frozen=True)
class ScheduleSetup:
    """Schedule of a run, which rank 0 logs as a table."""

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
        """Images per optimizer step over all ranks and micro-batches."""
        return self.batches.total_batch

    @property
    def batch_size_per_card(self) -> int:
        """Most images of a pass on a rank where ranks share evenly."""
        return self.batches.per_rank(self.world)

    @property
    def step_images(self) -> int:
        """Images of a full step: the total batch or a smaller set."""
        return min(self.total_batch, self.dataset_size)

    @property
    def batch_ratio(self) -> float:
        """Images of a step / reference batch."""
        return self.step_images / self.reference_batch

    @property
    def steps_per_written_epoch(self) -> float:
        """Optimizer steps of an epoch as configured.

        Phases of the loss and drops of the learning rate are counted in these.
        """
        return self.steps_per_epoch * self.phase_scale

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, why) for the table."""
        return [(fact.name, fact.shown, fact.why) for fact in self.facts()]

    def record(self) -> dict[str, dict[str, Any]]:
        """Values and reasons of everything, by key, for metrics.jsonl."""
        return {fact.key: {"value": fact.value, "why": fact.why} for fact in self.facts()}

    def facts(self) -> Iterator[Fact]:
        """Yields every number, in table order.

        The keys are those of metrics.jsonl.
        """
        why = (
            "processes that fleetrun started"
            if self.world > 1
            else "one process, no launcher needed"
        )
        yield Fact("ranks", self.world, "ranks", f"{self.world}", why)
        why = self.batches.told(self.world)
        yield Fact("total_batch", self.total_batch, "total batch", f"{self.total_batch}", why)
        given = self.optimizer.reference_batch_size is not None
        whole = self.step_images < self.total_batch
        images = f"all {self.step_images} images" if whole else f"total batch {self.total_batch}"
        why = f"{images} / optimizer.reference_batch_size "
        why += f"{self.reference_batch}" if given else "null: nothing is scaled"
        yield Fact("kappa", self.batch_ratio, "batch / reference", f"{self.batch_ratio:g}", why)
        yield from self._of_optimizer()
        yield from self._of_length()

    def _of_optimizer(self) -> Iterator[Fact]:
        before, after, ratio = self.optimizer, self.scaled, self.batch_ratio
        why = f"{before.lr:g}, {before.lr_scaling} scaling by {ratio:g}"
        if before.noise_scale is not None:
            effective = effective_batch_ratio(
                self.step_images, self.reference_batch, before.noise_scale
            )
            why += f", which counts as {effective:g} at a noise scale of {before.noise_scale:g}"
        yield Fact("lr", after.lr, "learning rate", f"{after.lr:g}", why)
        why = f"{before.weight_decay:g}"
        if after.weight_decay != before.weight_decay:
            factor = after.weight_decay / before.weight_decay
            why += f" x {factor:g}: learning rate x decay per image stays the same"
        else:
            why += ", as written"
        decay = after.weight_decay
        yield Fact("weight_decay", decay, "weight decay", f"{decay:g}", why)
        if before.name == "momentum":
            why = "as written: a larger batch only changes the rate"
            yield Fact("momentum", after.momentum, "momentum", f"{after.momentum:g}", why)
        else:
            betas = [float(f"{beta:.6g}") for beta in after.betas]
            shown = f"{betas[0]:g}, {betas[1]:g}; epsilon {after.epsilon:.3g}"
            yield Fact("betas", betas, "betas", shown, "as written")

    def _of_length(self) -> Iterator[Fact]:
        schedule = self.lr_scheduler.config
        warm, growth = self.lr_scheduler.warmup_steps, ""
        written = self.phase_scale / self.epoch_scale
        if warm > self.written_warmup:
            growth = f" ({warm / max(1, self.written_warmup):.3g} x as many images)"
        bound = f", {self.warmup_bound}" if self.warmup_bound else ""
        full, rest = divmod(warm, self.steps_per_epoch)  # the last step of an epoch may be smaller
        why = (
            f"{counted(schedule.warmup_epochs * written, 'epoch')} at the reference batch, "
            f"compensation {schedule.warmup_compensation}{growth}{bound}: "
            f"{counted(full * self.dataset_size + rest * self.total_batch, 'image')} "
            f"({warm / self.steps_per_epoch:.2f} epochs)"
        )
        yield Fact("warmup_steps", warm, "warm-up", counted(warm, "step"), why)
        start = self.schedule_steps if self.ema_restart is None else self.ema_restart.step
        limit = self.ema_decay.limit
        why = self._of_ema(self.ema_decay, start)
        yield Fact("ema_decay", limit, "EMA decay", f"{limit:.6g}", why)
        if self.ema_restart is not None:
            why = "strong augmentation ends; from there on decay "
            why += self._of_ema(self.ema_restart.decay, self.schedule_steps - start)
            yield Fact("ema_restart", start, "EMA restart", f"before step {start + 1}", why)
        steps, key = self.steps_per_epoch, "steps_per_epoch"
        why = f"{counted(self.dataset_size, 'image')} / {self.total_batch}"
        if steps > 1 and self.dataset_size % self.total_batch:
            why += ", the last step smaller"
        yield Fact(key, steps, "steps per epoch", f"{steps}", why)
        epochs = round(self.total_steps / self.steps_per_epoch, 1)
        why = f"{counted(epochs, 'epoch')}; {schedule.name} schedule "
        why += f"over {counted(self.schedule_steps, 'step')}"
        if self.epoch_scale > 1:
            why += (
                f", {self.epoch_scale:.4g} x the {self.epochs:g} epochs configured, as are all "
                f"phases in epochs (train.epochs_compensation)"
            )
        if written != 1:
            why += (
                f"; phases in epochs are {self.phase_scale:.4g} x as long as configured "
                f"(train.phases_for_epochs)"
            )
        yield Fact("steps", self.total_steps, "steps", f"{self.total_steps}", why)

    @property
    def warmup_bound(self) -> str:
        """Names the rule that bounds warm-up; "": none does."""
        schedule, warm = self.lr_scheduler.config, self.lr_scheduler.warmup_steps
        if warm == self.schedule_steps // 2 and (warm or schedule.warmup_epochs):
            return "cut to half the run"
        if warm == schedule.warmup_least_steps > 0:
            return f"at least {counted(warm, 'step')}"
        epochs = schedule.warmup_epochs * self.phase_scale / self.epoch_scale
        most = epochs + MOST_WARMUP_GROWTH * self.schedule_steps / self.steps_per_epoch
        if warm > self.written_warmup and warm >= round(most * self.steps_per_epoch):
            return f"cut to {MOST_WARMUP_GROWTH:.0%} of the run beyond that"
        return ""

    def interval(self, epochs: float) -> int:
        """Steps between what happens every so many epochs, one at least."""
        return max(1, round(epochs * self.steps_per_epoch))

    def step_of_last(self, epochs: int) -> int:
        """The first step of the run's last so many epochs."""
        return _step_of_last(epochs, self.schedule_steps, self.steps_per_epoch)

    def _of_ema(self, decay: Decay, updates: int) -> str:
        why = f"{decay.decay:g} ** {self.batch_ratio:g}, ramp "
        ramp = decay.ramp_steps
        why += f"of {ramp / self.batch_ratio:g} steps" if ramp else "(1 + t) / (10 + t)"
        return f"{why}: {decay(max(1, updates)):.4g} at the end"


def counted(number: float, what: str, plural: str = "s") -> str:
    """Number with its noun: `1 step`, `2 steps`."""
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
    """Turns epochs and reference values into steps and rates.

    Nothing else does.

    Args:
        augment: as configured.
        phases_factor: `epochs` / those that warm-up and other phases were configured for.
    Raises: ConfigError: a run without a single step; betas that cannot follow the batch.
    """
    # What a step has, and so what everything is scaled for; a set may be smaller than the batch.
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
    scaled = _scaled(optimizer, total_batch, reference)
    warmup = schedule.warmup_epochs * phases_factor
    beta2 = scaled.betas[1] if scaled.name == "adamw" else None

    def warmup_steps(compensation: str) -> int:
        images = warmup_images(
            warmup, epochs * epoch_scale, dataset_size, total_batch, reference, compensation, beta2
        )
        # Counted in steps of this run's epochs, whose last step may be smaller than the others.
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
    """The first step of the last so many epochs of a schedule."""
    return max(0, math.ceil(steps / steps_per_epoch) - epochs) * steps_per_epoch


def _epoch_scale(epochs: float, total: int, reference: int, noise_scale: float | None) -> float:
    """Epochs of this run / epochs configured; 1 without a noise scale."""
    factor = 1.0 if noise_scale is None else epochs_factor(total, reference, noise_scale)
    # Up to whole epochs, so that the longer run too sees every image equally often; a run of less
    # than one does not, and would jump to it.
    if factor == 1.0 or epochs < 1:
        return factor
    return math.ceil(epochs * factor - 1e-9) / epochs


def _scaled(config: OptimizerConfig, total_batch: int, reference_batch: int) -> OptimizerConfig:
    """The optimizer for a total batch.

    With lr_scaling: none the weight decay stays, too: both were set for this batch by hand.
    """
    ratio = total_batch / reference_batch
    effective = effective_batch_ratio(total_batch, reference_batch, config.noise_scale)
    factor = rate_factor(effective, config.lr_scaling)
    decay = config.weight_decay
    if config.lr_scaling != "none":
        decay *= decay_factor(ratio, factor)
    return config.model_copy(update={"lr": config.lr * factor, "weight_decay": decay})


def advice(config: Any, schedule: ScheduleSetup) -> Iterator[str]:
    """Warnings where published runs like this lost accuracy, with remedies.

    docs/distributed.md (What the advice rests on) gives the source of each.  Evidence from
    detectors does not count for classifiers.

    Args: config: an ExperimentConfig.
    """
    detects, written = config.model.task == "detect", schedule.optimizer
    world, batch, total = schedule.world, schedule.batch_size_per_card, schedule.total_batch
    ratio, noise, rate = schedule.batch_ratio, written.noise_scale, schedule.scaled.lr
    if world > 1 and written.reference_batch_size is None:
        yield (
            f"optimizer.reference_batch_size: null on {world} ranks: the learning rate stays "
            f"{written.lr:g}, and nothing else adapts to the total batch of {total}; set it to the "
            f"total batch that your values were tuned for: {total // world} if that was one card, "
            f"{total} if it was this many ({_MORE})"
        )
    if ratio > 1 and written.lr_scaling == "none":
        rule = "sqrt" if written.name == "adamw" else "linear"
        yield (
            f"optimizer.lr_scaling: none with {ratio:g} times the reference batch: the rate is too "
            f"low for so many images a step; set optimizer.lr_scaling={rule} ({_MORE})"
        )
    elif ratio > 1 and detects and total >= _LARGE_BATCH and noise is None:
        yield (
            f"total batch {total}: the learning rate becomes {rate:g}, and detectors lose mAP with "
            f"so many images a step; use fewer images a step, or limit the rate with "
            f"optimizer.noise_scale={_NOISE_SCALE} ({_MORE})"
        )
    warmup, longer = schedule.lr_scheduler.warmup_steps, schedule.compensated_warmup
    if ratio >= _MUCH_LARGER and longer > warmup:
        yield (
            f"schedule.warmup_compensation: none with {ratio:g} times the reference batch: large "
            f"batches need a longer warm-up; set schedule.warmup_compensation=auto for "
            f"{longer} steps instead of {warmup} ({_MORE})"
        )
    if detects and ratio >= _MUCH_LARGER and schedule.epoch_scale == 1:
        yield (
            f"{ratio:g} times the reference batch in {counted(schedule.epochs, 'epoch')}: large "
            f"batches need more epochs for the same mAP; raise train.epochs, or set "
            f"optimizer.noise_scale={_NOISE_SCALE} train.epochs_compensation=auto ({_MORE})"
        )
    if noise is not None and total > noise / 2:
        yield (
            f"total batch {total} is more than half of optimizer.noise_scale {noise:g}: the same "
            f"accuracy needs {1 + total / noise:.2f} times as many images as with small batches; "
            f"use fewer images a step, or more epochs ({_MORE})"
        )
    # Weights that have learned score after one epoch: 0.92 mAP50 in 9 steps of a set of one class.
    if schedule.schedule_steps < LEAST_WARMUP_STEPS and config.model.pretrained is None:
        yield (
            f"{counted(schedule.schedule_steps, 'optimizer step')} "
            f"{'is' if schedule.schedule_steps == 1 else 'are'} too few from random weights; start "
            f"from pretrained weights (--weights, model.pretrained), or raise train.epochs"
        )
    pieces = schedule.batches.images if schedule.batches.spread else schedule.batches.count
    if world > 1 and config.distributed.shares is not None and pieces <= world:
        batch_key = "train.batch_size_per_card"
        remedy = f"a larger {batch_key}"
        if not schedule.batches.spread:
            remedy = f"train.total_batch, and a smaller {batch_key}"
        yield (
            f"distributed.shares has no effect, as {world} ranks share "
            f"{schedule.batches.told(1)}; set {remedy} ({_MORE})"
        )
    few = batch < _FEW_IMAGES or (batch == _FEW_IMAGES and world > _FEW_CARDS)
    unstable = world > 1 and total >= _UNSTABLE_WITHOUT_SYNC and few
    if detects and unstable and not config.train.sync_bn:
        yield (
            f"train.sync_bn: false with {batch} images per card and a total batch of {total}: "
            f"trainings of this kind fail or lose mAP; set train.sync_bn=true ({_MORE})"
        )


def hyper_parameters(
    model: ModelConfig, seed: int, schedule: ScheduleSetup
) -> dict[str, float | str]:
    """Values for VisualDL's hyperparameters page, which compares runs.

    `settings` has all.  VisualDL takes no more than these seven and three metrics: with eleven
    columns its view of parallel coordinates hangs (release 2.5.3, 1,440 pixels wide).
    """
    height, width = model.image_size
    keys = type(model).model_fields  # a plugin's model may come in one size
    return {
        "model": " ".join(str(getattr(model, key)) for key in ("name", "size") if key in keys),
        "image_size": f"{height} x {width}",
        "total_batch": schedule.total_batch,
        "lr": schedule.scaled.lr,
        "weight_decay": schedule.scaled.weight_decay,
        "epochs": schedule.total_steps / schedule.steps_per_epoch,
        "seed": seed,
    }


def settings(config: Section) -> dict[str, str]:
    """Every key as -o takes it, one line per section."""
    texts: dict[str, list[str]] = {}
    for key, value in flattened(config).items():
        section = key.partition(".")[0] if "." in key else "run"
        shown = value if isinstance(value, str) else json.dumps(value)
        texts.setdefault(section, []).append(f"{key}={shown}")
    return {section: ",  ".join(lines) for section, lines in texts.items()}


def describe_run(output_dir: Path, config_yaml: str, command: list[str]) -> None:
    """Writes config.yml and environment.json; rank 0 only.

    Raises: ConfigError: nothing can be written there.
    """
    environment = {
        "command": command,
        **versions(),
        "cuda": paddle.version.cuda(),
        "python": sys.version.split()[0],
        "code": digest_of_text(json.dumps(digests_of_code())),  # also outside git
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "ranks": comm.world_size(),
        "device": device.kind(),
        "cards_on_this_host": device.card_count(),
        "git_commit": _git_commit(),
    }
    text = json.dumps(environment, indent=1)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(output_dir / "config.yml", config_yaml.encode())
        replace_file(output_dir / "environment.json", text.encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write to {output_dir}: {error}",
            code="folder_unwritable",
            where="output_dir",
        ) from error


def _git_commit() -> str | None:
    """Commit of the checkout this package runs from; None outside git."""
    try:
        said = output_of(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], 10)
    except OSError:
        return None
    return said[1].strip() or None if said is not None else None


def extension_note(schedule: ScheduleSetup, before_steps: int, step: int) -> str:
    """A line about the schedule of an extended run.

    Args:
        before_steps: of the schedule it had.
        step: optimizer steps made.
    """
    rate = schedule.lr_scheduler
    warmup = round(rate.warmup_steps * before_steps / schedule.schedule_steps)
    before = replace(rate, total_steps=before_steps, warmup_steps=warmup)
    last = before(min(step, before_steps) - 1)
    made, planned = (each / schedule.steps_per_epoch for each in (step, schedule.schedule_steps))
    return (
        f"continuing from epoch {made:g} to {planned:g} on a schedule over all {planned:g} epochs: "
        f"the learning rate, which had ended at {last:.2g}, is {rate(step):.2g} now and "
        f"{rate(schedule.schedule_steps - 1):.2g} at the end"
    )

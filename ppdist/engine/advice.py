"""Advice: warnings where published runs lost accuracy on many cards."""

from collections.abc import Iterator

from ppdist.config.experiment import ExperimentConfig
from ppdist.engine.schedule_setup import ScheduleSetup, counted
from ppdist.optim.lr_scheduler import LEAST_WARMUP_STEPS

_LARGE_BATCH = 256  # images per step from which AGVM and MMYOLO report losses of mAP
_MUCH_LARGER = 4.0  # times the reference: one machine to four in PaddleDetection's table
# Images per card at which batch norm no longer needs statistics from other ranks.  Eight images on
# each of eight cards is the YOLOv5 recipe, where SyncBN is optional; with fewer images, or on
# more cards, it matters (YOLOv5's pull request 401).
_FEW_IMAGES, _FEW_CARDS = 8, 8
_UNSTABLE_WITHOUT_SYNC = 32  # the smallest total batch at which MegDet saw training fail
_NOISE_SCALE = 450  # a first guess: Mask R-CNN's, derived from MLPerf's epochs
_MORE = "docs/distributed.md"


def advice(config: ExperimentConfig, schedule: ScheduleSetup) -> Iterator[str]:
    """Yields warnings where published runs like this one lost accuracy, with remedies.

    docs/distributed.md (What the advice rests on) gives the source of each.  Evidence from
    detectors does not count for classifiers.
    """
    detects, optimizer = config.model.task == "detect", schedule.optimizer
    world, batch, total = schedule.world, schedule.batch_size_per_card, schedule.total_batch
    ratio, noise, rate = schedule.batch_ratio, optimizer.noise_scale, schedule.scaled.lr
    if world > 1 and optimizer.reference_batch_size is None:
        yield (
            f"optimizer.reference_batch_size: null on {world} ranks: the learning rate stays "
            f"{optimizer.lr:g}, and nothing else adapts to the total batch of {total}; set it to "
            f"the total batch that your values were tuned for: {total // world} if that was one "
            f"card, {total} if it was this many ({_MORE})"
        )
    if ratio > 1 and optimizer.lr_scaling == "none":
        rule = "sqrt" if optimizer.name == "adamw" else "linear"
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
    # Pretrained weights already score after one epoch: 0.92 mAP50 in 9 steps on a one-class set.
    if schedule.schedule_steps < LEAST_WARMUP_STEPS and config.model.pretrained is None:
        yield (
            f"{counted(schedule.schedule_steps, 'optimizer step')} "
            f"{'is' if schedule.schedule_steps == 1 else 'are'} too few from random weights; start "
            f"from pretrained weights (--weights, model.pretrained), or train longer "
            f"({'train.epochs' if config.train.steps is None else 'train.steps'})"
        )
    pieces = schedule.batches.images if schedule.batches.spread else schedule.batches.count
    if world > 1 and config.distributed.shares is not None and pieces <= world:
        batch_key = "train.batch_size_per_card"
        remedy = f"a larger {batch_key}"
        if not schedule.batches.spread:
            remedy = f"train.total_batch, and a smaller {batch_key}"
        yield (
            f"distributed.shares has no effect, as {world} ranks share "
            f"{schedule.batches.describe(1)}; set {remedy} ({_MORE})"
        )
    has_few_images = batch < _FEW_IMAGES or (batch == _FEW_IMAGES and world > _FEW_CARDS)
    unstable = world > 1 and total >= _UNSTABLE_WITHOUT_SYNC and has_few_images
    if detects and unstable and not config.train.sync_bn:
        yield (
            f"train.sync_bn: false with {batch} images per card and a total batch of {total}: "
            f"trainings of this kind fail or lose mAP; set train.sync_bn=true ({_MORE})"
        )

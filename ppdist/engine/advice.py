"""Where published runs lost accuracy on many cards: what a run has in common with them, said at
start, with what to do.  A warning stops nothing."""

from collections.abc import Iterator
from typing import Any

from ppdist.engine.derived import Derived
from ppdist.optim.scaling import LEAST_WARMUP_STEPS

_LARGE_BATCH = 256  # where AGVM and MMYOLO, below, see detectors lose
_MUCH_LARGER = 4.0  # times the reference: one machine to four in PaddleDetection's table
# Images per card, for batch norm of its own.  That few on each of eight cards is the YOLOv5
# recipe, where SyncBN is optional; it matters with fewer, and on more cards (its pull request 401).
_FEW_IMAGES, _FEW_CARDS = 8, 8
_UNSTABLE_WITHOUT_SYNC = 32  # the smallest total batch at which MegDet saw training fail
_YOLOV5_BATCH = 64  # the nominal batch of YOLOv5's trainer


def advice(config: Any, derived: Derived) -> Iterator[str]:
    """What the literature warns of in this run, in the user's words.

    Evidence from detectors is kept from classifiers: those lost nothing up to batches of 8192
    (Goyal et al. 2017, arXiv:1706.02677).

    Args:
        config: an ExperimentConfig.
    """
    detects = not config.data.classifies
    yield from _of_reference(derived)
    yield from _of_rate(derived, config.model.name, detects)
    yield from _of_length(derived, detects)
    total, batch = derived.total_batch, derived.batch_size_per_card
    if (
        detects
        and derived.world > 1
        and total >= _UNSTABLE_WITHOUT_SYNC
        and (batch < _FEW_IMAGES or (batch == _FEW_IMAGES and derived.world > _FEW_CARDS))
        and not config.train.sync_bn
    ):
        yield (
            f"train.sync_bn: false with {batch} images per card and a total batch of {total}: set "
            f"it to true (MegDet, arXiv:1711.07240: without it a batch of 32 failed at times and "
            f"128 always; ultralytics/yolov5 pull request 401: it pays at 8 per card and below)"
        )


def _of_reference(derived: Derived) -> Iterator[str]:
    if derived.world > 1 and derived.optimizer.reference_batch_size is None:
        yield (
            f"optimizer.reference_batch_size: null on {derived.world} ranks: the rate stays "
            f"{derived.optimizer.lr:g} on any number of them, and nothing else follows the total "
            f"batch of {derived.total_batch} either: set it to the total batch that your values "
            f"were tuned for, such as {derived.total_batch // derived.world} if on one card (Goyal "
            f"et al. 2017, arXiv:1706.02677, section 2.1), or to {derived.total_batch} if they are "
            f"meant for this run"
        )


def _of_rate(derived: Derived, model: str, detects: bool) -> Iterator[str]:
    total, kappa, written = derived.total_batch, derived.kappa, derived.optimizer
    if kappa <= 1:
        return
    if written.lr_scaling == "none":
        rule = "sqrt" if written.name == "adamw" else "linear"
        yield (
            f"optimizer.lr_scaling: none with {kappa:g} times the reference batch: set it to "
            f"{rule} (PaddleDetection's DistributedTraining_en.md: PP-YOLOE-s fell from 42.7 to "
            f"42.1 mAP from 8 to 32 cards at an unchanged rate)"
        )
    elif detects and total >= _LARGE_BATCH and written.noise_scale is None:
        yield (
            f"total batch {total}: {written.lr_scaling} scaling without a limit gives a rate of "
            f"{derived.scaled.lr:g}: set optimizer.noise_scale (by MLPerf's epochs 450 for Mask "
            f"R-CNN, 1800 for RetinaNet), or use fewer images per step (AGVM, arXiv:2210.11078: "
            f"Faster R-CNN 37.1 mAP at batch 32, 36.7 at 256, 36.2 at 512; MMYOLO's YOLOX lost at "
            f"256 with the linear rule)"
        )
    elif (
        model == "yolov5"
        and total > _YOLOV5_BATCH
        and written.lr_scaling == "linear"
        and written.noise_scale is None
    ):
        yield (
            f"total batch {total}: the rate is {derived.scaled.lr:g}, linear without a limit, as "
            f"YOLOv5's own trainer has it above {_YOLOV5_BATCH} without a word, its loss being a "
            f"sum over the batch (ultralytics/yolov5 train.py); optimizer.noise_scale or "
            f"lr_scaling: sqrt hold it back"
        )


def _of_length(derived: Derived, detects: bool) -> Iterator[str]:
    total, kappa, noise = derived.total_batch, derived.kappa, derived.optimizer.noise_scale
    warmup = derived.schedule.warmup_steps
    if kappa >= _MUCH_LARGER and derived.compensated_warmup > warmup:
        yield (
            f"schedule.warmup_compensation: none with {kappa:g} times the reference batch: set it "
            f"to auto for {derived.compensated_warmup} steps instead of {warmup} (MLPerf's Mask "
            f"R-CNN: 0.03 epochs of warm-up at batch 8, 3.9 at 256)"
        )
    if detects and kappa >= _MUCH_LARGER and derived.stretch == 1:
        yield (
            f"{kappa:g} times the reference batch in {derived.epochs:g} epochs: set "
            f"optimizer.noise_scale and train.epochs_compensation: auto for more of them (MLPerf's "
            f"Mask R-CNN: 14.0 epochs at batch 128, 17.1 at 256; PaddleDetection's "
            f"DistributedTraining_en.md advises the same)"
        )
    if noise is not None and total > noise / 2:
        extra = total / noise
        yield (
            f"total batch {total} is more than half of optimizer.noise_scale {noise:g}: the same "
            f"accuracy takes {1 + extra:.2f} times the images that small batches need "
            f"(arXiv:1812.06162, equation 2.11): use fewer images per step, or count on the epochs"
        )
    if derived.schedule_steps < LEAST_WARMUP_STEPS:
        yield (
            f"{derived.schedule_steps} optimizer steps in all: fewer than published detectors "
            f"warm up for (MLPerf's Mask R-CNN: {LEAST_WARMUP_STEPS} and more): raise "
            f"train.epochs, or use fewer images per step"
        )

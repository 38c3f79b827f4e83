"""Checks between keys of a configuration, and warnings about it.

Each part has been checked by itself; a key that would be ignored without a word is an error too.
"""

import math
from collections.abc import Iterator
from typing import Any

from ppdist.config.augment import COMBINES
from ppdist.config.evaluate import CLASSIFICATION_METRICS, COCO_DETECTIONS, DETECTION_METRICS


def cross_key_errors(config: Any) -> Iterator[str]:
    """Messages for `CrossKeyErrors`, each beginning with its key.

    Args: config: an ExperimentConfig.
    """
    name, task = config.model.name, config.model.task
    if config.data.task != task:
        has, learns = ("boxes", "classes") if task == "classify" else ("classes", "boxes")
        yield (
            f"data.format: {config.data.format} has {has} of images, model.name: {name} learns "
            f"{learns}; choose the other model or the other format"
        )
    if config.loss.name != name:
        yield (
            f"loss.name: {config.loss.name} is the loss of another model than model.name: {name}; "
            f"leave loss.name out"
        )
    known = CLASSIFICATION_METRICS if task == "classify" else DETECTION_METRICS
    metrics = {"evaluate.metric": (config.evaluate.metric, known)}
    if config.early_stopping is not None:
        more = ("val_loss",) if task == "classify" else ("f1", "val_loss")
        metrics["early_stopping.metric"] = config.early_stopping.metric, (*known, *more)
    for key, (metric, measured) in metrics.items():
        if metric not in (None, *measured):
            yield (
                f"{key}: {metric} is not measured for model.name: {name}; expected one of "
                f"{', '.join(measured)}"
            )
    yield from _between_ranks(config)
    yield from _of_teacher(config)
    yield from _ignored(config)


def _between_ranks(config: Any) -> Iterator[str]:
    ranks, train = config.distributed, config.train
    low_precision = train.amp.enabled and train.amp.level == "O2"
    ways = {
        "distributed.gradient_dtype": (ranks.gradient_dtype, "float32"),
        "distributed.gradient_rank": (ranks.gradient_rank, None),
        "distributed.topk_fraction": (ranks.topk_fraction, None),
        "distributed.sync_every": (ranks.sync_every, None),
    }
    taken = [f"{key}: {value}" for key, (value, default) in ways.items() if value != default]
    if len(taken) > 1:
        yield f"{taken[0]} and {taken[1]} both reduce communication; choose one"
    if ranks.sync_every is not None:
        apart = f"distributed.sync_every: {ranks.sync_every} lets the ranks' weights differ"
        if ranks.shard_optimizer:
            yield f"{apart}, distributed.shard_optimizer: true needs them equal; choose one"
        if ranks.shares is not None:
            yield f"{apart} by what each took, distributed.shares: changes that; choose one"
        if train.sync_bn:
            yield (
                f"{apart} to communicate less, train.sync_bn: true communicates in every layer; "
                f"set train.sync_bn: false"
            )
    for key, given in {
        "distributed.sync_every": ranks.sync_every is not None,
        "distributed.shard_optimizer": ranks.shard_optimizer,
    }.items():
        if given and low_precision:
            yield (
                f"{key}: needs float32 weights, which train.amp.level: O2 keeps in the optimizer; "
                f"set train.amp.level: O1"
            )


def _of_teacher(config: Any) -> Iterator[str]:
    distill, model = config.distill, config.model
    if distill is not None and model.task == "classify":
        yield "distill: teaches detectors, not classifiers; leave it out"


def _ignored(config: Any) -> Iterator[str]:
    augment, train = config.data.augment, config.train
    if train.ema.restart_decay is not None and not augment.last_stage_epochs:
        yield (
            f"train.ema.restart_decay: {train.ema.restart_decay:g} takes effect where strong "
            f"augmentation ends; set data.augment.plain_epochs or close_mosaic_epochs, or leave it "
            f"out"
        )
    if train.total_batch is not None and train.accumulate_steps > 1:
        yield (
            f"train.accumulate_steps: {train.accumulate_steps} follows from train.total_batch: "
            f"{train.total_batch}; leave one of them out"
        )
    if config.model.task == "classify":
        of_boxes = {
            "data.augment.mosaic": augment.mosaic,
            "data.augment.mosaic_whole": augment.mosaic_whole,
            "data.augment.mixup": augment.mixup,
            "data.augment.cutmix": augment.cutmix,
            "data.augment.copy_paste": augment.copy_paste,
            "data.augment.combine_epochs": augment.combine_epochs is not None,
            "data.augment.affine": augment.affine.moves,
            "data.augment.close_mosaic_epochs": augment.close_mosaic_epochs,
            "data.sampling.name: difficulty": config.data.sampling.name == "difficulty",
            "evaluate.max_detections": config.evaluate.max_detections != COCO_DETECTIONS,
            "evaluate.rectangular": config.evaluate.rectangular,
            "data.resize": config.data.resize != "stretch",
            "nms": config.nms != type(config.nms)(),
        }
        for key, given in of_boxes.items():
            if given:
                yield f"{key}: has no effect for a classifier; leave it out"
    if config.evaluate.rectangular and config.data.resize != "letterbox":
        yield "evaluate.rectangular: true: needs data.resize: letterbox, which keeps the shape"
    if config.evaluate.rectangular_pad and not config.evaluate.rectangular:
        yield "evaluate.rectangular_pad: has no effect without evaluate.rectangular: true"
    yield from _of_scaling(config)
    yield from _of_suppression(config)
    if config.optimizer.name == "adamw":
        of_momentum = {
            "optimizer.nesterov": config.optimizer.nesterov,
            "schedule.warmup_momentum": config.schedule.warmup_momentum,
        }
        for key, given in of_momentum.items():
            if given not in (None, False):
                off = "false" if given is True else "null"
                yield f"{key}: has no effect with optimizer.name: adamw; set it to {off}"


def _of_suppression(config: Any) -> Iterator[str]:
    for key in ("iou_threshold", "candidates"):
        default = type(config.nms).model_fields[key].default
        given = getattr(config.nms, key) not in (default, None)
        if given and config.model.task == "detect" and not config.model.needs_nms:
            yield (
                f"nms.{key}: has no effect: this {config.model.name} needs no suppression; leave "
                "it out"
            )


def _of_scaling(config: Any) -> Iterator[str]:
    optimizer, lengthens = config.optimizer, config.train.epochs_compensation == "auto"
    if lengthens and optimizer.noise_scale is None:
        yield (
            "train.epochs_compensation: auto needs optimizer.noise_scale, which determines the "
            "number of extra epochs; if you do not know yours, set it to 450"
        )
    if optimizer.noise_scale is not None and optimizer.lr_scaling == "none" and not lengthens:
        yield (
            "optimizer.noise_scale: has no effect with optimizer.lr_scaling: none without "
            "train.epochs_compensation: auto; set one of the three differently"
        )
    if optimizer.noise_scale is not None and optimizer.reference_batch_size is None:
        yield (
            "optimizer.noise_scale: needs optimizer.reference_batch_size, the total batch that "
            "the values were tuned for"
        )


def config_warnings(config: Any, begins: bool) -> Iterator[str]:
    """What a configuration does that its author may not expect.

    Args: begins: the weights are fresh or those of model.pretrained, not of a checkpoint.
    """
    if begins and not config.model.pretrained:
        remedy = "set model.pretrained to a weight file or the output_dir of a run"
        if config.train.freeze is not None:
            yield f"train.freeze freezes randomly initialised layers; {remedy}"
        if config.optimizer.layer_decay is not None:
            yield (
                f"optimizer.layer_decay: {config.optimizer.layer_decay:g} slows down the layers "
                f"near the image, which are randomly initialised; {remedy}"
            )
    sizes, own = config.train.multi_scale, config.model.image_size
    areas = [height * width for height, width in sizes]
    if areas and not min(areas) <= own[0] * own[1] <= max(areas):
        least, most = (
            "{}x{}".format(*of(sizes, key=lambda size: size[0] * size[1])) for of in (min, max)
        )
        yield (
            f"train.multi_scale trains on images of {least} to {most} pixels, model.image_size: "
            f"{own[0]}x{own[1]} evaluates on others; set train.multi_scale to sizes around it, or "
            "to []"
        )
    yield from _of_augmentation(config)


def _of_augmentation(config: Any) -> Iterator[str]:
    epochs, written = math.ceil(config.train.epochs), config.data.augment
    if written.mosaic_whole and not written.mosaic:
        yield (
            "data.augment.mosaic_whole: true has no effect without data.augment.mosaic, the chance "
            "of a mosaic"
        )
    window = written.combine_epochs
    if window == (0, 1) and isinstance(window[1], int) and epochs > 1:
        yield (
            "data.augment.combine_epochs: [0, 1] means the first epoch only; for the whole run "
            "write [0.0, 1.0] or null"
        )
    augment = written.with_epoch_scale(config.train.phases_factor)
    by_epoch = [augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
    for name in COMBINES:
        chance = getattr(augment, name)
        if chance and not any(getattr(one, name) for one in by_epoch):
            yield (
                f"data.augment.{name}: {chance:g} never acts: combine_epochs, close_mosaic_epochs "
                f"and plain_epochs leave none of the {epochs} epochs to it"
            )

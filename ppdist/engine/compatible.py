"""What parts of a configuration ask of each other, and a sentence about each that does not fit.

Each part has been checked by itself; a key that would be ignored without a word is a misfit too.
"""

import math
from collections.abc import Iterator
from typing import Any

from ppdist.data.augment.config import COMBINES
from ppdist.engine.classification import ClassificationEvaluator
from ppdist.engine.evaluator import Evaluator


def misfits(config: Any) -> Iterator[str]:
    """Everything that does not fit, in the user's words; `config` is an ExperimentConfig."""
    name, classifies = config.model.name, config.data.classifies
    if classifies != (name == "yolov5_cls"):
        has, learns = ("classes", "boxes") if classifies else ("boxes", "classes")
        yield (
            f"data.format: {config.data.format} has {has} of images, model.name: {name} learns "
            f"{learns}; choose the other model or the other format"
        )
    if config.loss.name != name:
        yield (
            f"loss.name: {config.loss.name} is the loss of another model than model.name: {name}; "
            f"leave loss.name out"
        )
    metric = config.evaluate.metric
    known = ClassificationEvaluator.headline if classifies else Evaluator.headline
    if metric not in (None, *known):
        yield (
            f"evaluate.metric: {metric} is not measured for model.name: {name}; expected one of "
            f"{', '.join(known)}"
        )
    yield from _ignored(config)


def _ignored(config: Any) -> Iterator[str]:
    augment = config.data.augment
    if config.data.classifies:
        of_boxes = {
            "data.augment.mosaic": augment.mosaic,
            "data.augment.mixup": augment.mixup,
            "data.augment.cutmix": augment.cutmix,
            "data.augment.copy_paste": augment.copy_paste,
            "data.augment.combine_epochs": augment.combine_epochs is not None,
            "data.augment.affine": augment.affine.moves,
            "data.augment.close_mosaic_epochs": augment.close_mosaic_epochs,
            "data.sampling.name: difficulty": config.data.sampling.name == "difficulty",
            "evaluate.rectangular": config.evaluate.rectangular,
            "data.resize": config.data.resize != "stretch",
            "nms": config.nms != type(config.nms)(),
        }
        for key, given in of_boxes.items():
            if given:
                yield f"{key}: means nothing to a classifier; leave it out"
    if config.evaluate.rectangular and config.data.resize != "letterbox":
        yield "evaluate.rectangular: true: needs data.resize: letterbox, which keeps the shape"
    if config.optimizer.name == "adamw":
        of_momentum = {
            "optimizer.nesterov": config.optimizer.nesterov,
            "schedule.warmup_momentum": config.schedule.warmup_momentum is not None,
        }
        for key, given in of_momentum.items():
            if given:
                yield f"{key}: means nothing to optimizer.name: adamw; set it to false or null"


def surprises(config: Any) -> Iterator[str]:
    """What a configuration does that its author may not expect; the run goes on all the same."""
    augment, epochs = config.data.augment, math.ceil(config.train.epochs)
    by_epoch = [augment.in_epoch(epoch, epochs) for epoch in range(epochs)]
    for name in COMBINES:
        chance = getattr(augment, name)
        if chance and not any(getattr(one, name) for one in by_epoch):
            yield (
                f"data.augment.{name}: {chance:g} never acts: combine_epochs, close_mosaic_epochs "
                f"and plain_epochs leave none of the {epochs} epochs to it"
            )

"""Findings where data and configuration do not suit each other, before the first step.

Training, its dry run, evaluation, `ppdist data check` and the verdict at the end show these lines.
"""

import numpy as np

from ppdist.config.experiment import ExperimentConfig
from ppdist.data.checks.statistics import collect_objects, describe_crowding
from ppdist.data.types import DetectionSet, Records
from ppdist.metrics.findings import BEYOND_QUERIES, DETR_FROM_SCRATCH, TINY_OBJECTS, Finding
from ppdist.models.model_card import fitting_weights

# From the 205 images of BCCD, a D-FINE with random weights learns almost nothing in as many epochs
# as a YOLOv5 needs (docs/dev/few_images.md); the published D-FINE models were trained for 72 to 230
# epochs on COCO's 118,000 images.
_FEW_IMAGES = 8000
_CELL = 8.0  # input pixels, the finest stride of the detectors here
_TINY_SHARE = 0.25  # of the objects: more below a cell is worth a warning
_SHARE_LEFT = 0.1  # of the objects may stay below it at the size that is advised
_MOST_FACTOR = 2.0  # times the input: beyond that tiles cost less
_STEP = 32  # input sizes are multiples of it


def findings_of(
    config: ExperimentConfig, train: DetectionSet | None, val: DetectionSet | None
) -> list[Finding]:
    """Finds settings that do not suit the data, the most harmful first.

    Args: train, val: the splits that are read; None if a split is not read.
    Returns: one sentence each, with its code and the remedy; [] for classifiers.
    """
    if config.model.task == "classify":
        return []
    findings: list[Finding] = []
    queries = getattr(config.model, "queries", None)  # most objects of an image; None: no limit
    from_scratch = queries is not None and not config.model.pretrained
    if from_scratch and train is not None and len(train.records) < _FEW_IMAGES:
        name = next(iter(fitting_weights(config.model)), "FILE")
        text = (
            f"a DETR learns next to nothing of {len(train.records)} images from random weights: "
            f"start with --weights {name} (with -c: -o model.pretrained={name})"
        )
        findings.append(Finding(DETR_FROM_SCRATCH, text))
    if train is not None:
        findings += _find_tiny_objects(config, train)
    for split, dataset in (("train", train), ("val", val)):
        if queries is not None and dataset is not None:
            findings += _find_crowded_images(queries, split, dataset)
    scored = val or train
    if scored is not None:
        limits = config.evaluate.max_detections, config.suppression.keep
        findings += [
            Finding("objects_crowded", line) for line in describe_crowding(scored, *limits)
        ]
    return findings


def _find_tiny_objects(config: ExperimentConfig, train: DetectionSet) -> list[Finding]:
    """Warns if many objects are smaller than one cell of the finest feature map."""
    size = config.model.image_size
    objects = collect_objects(train, size, config.data.resize)
    usable_M = ~objects.crowd_M & (objects.sizes_N2[objects.image_M] > 0).all(1)
    side_M = objects.input_M2[usable_M].min(1, initial=np.inf)
    share = float((side_M < _CELL).mean()) if len(side_M) else 0.0
    if share < _TINY_SHARE:
        return []
    factor = _CELL / max(float(np.quantile(side_M, _SHARE_LEFT)), 1e-3)
    text = (
        f"{share:.0%} of the training objects are under {_CELL:g} pixels wide or high in the "
        f"{size[0]}x{size[1]} input: "
    )
    if factor <= _MOST_FACTOR:
        sides = [int(np.ceil(side * factor / _STEP) * _STEP) for side in size]
        square = sides[0] == sides[1]
        words = f"{sides[0]}" if square else f"{sides[0]} {sides[1]}"
        value = f"{sides[0]}" if square else f"[{sides[0]},{sides[1]}]"
        text += f"use --image-size {words} (with -c: `-o model.image_size={value}`)"
    else:
        side_M2 = objects.boxes_M4[usable_M, 2:] - objects.boxes_M4[usable_M, :2]
        tile = int(min(size) * np.quantile(side_M2.min(1), _SHARE_LEFT) / _CELL)
        text += (
            f"train on tiles of at most {max(tile, _STEP)} pixels, cut from the images, and "
            "predict with --slice of as many"
        )
    return [Finding(TINY_OBJECTS, text)]


def _find_crowded_images(queries: int, split: str, dataset: DetectionSet) -> list[Finding]:
    """Warns if images contain more objects than the model can detect."""
    records = Records.of(dataset.records)
    count_N = np.bincount(records.image_O[~records.crowd_O], minlength=len(records))
    if not (count_N > queries).any():
        return []
    largest = int(count_N.max())
    text = (
        f"{split}: {int((count_N > queries).sum())} of {len(count_N)} images show up to {largest} "
        f"objects, and the model finds {queries} at most: set "
        f"-o model.queries={-(-largest // 100) * 100}"
    )
    return [Finding(BEYOND_QUERIES, text)]

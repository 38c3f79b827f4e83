"""Outputs and objects of a few small images for the losses of boxes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from ppdist.config.loss import PPYOLOELossConfig, RTDETRLossConfig
from ppdist.losses.base import LossOutput
from ppdist.losses.ppyoloe import PPYOLOELoss
from ppdist.losses.rtdetr import RTDETRLoss
from ppdist.losses.yolov5 import Gains, YOLOv5Loss
from ppdist.models.outputs import (
    BINS,
    Denoised,
    PPYOLOEOutputs,
    Refined,
    RTDETROutputs,
    YOLOv5Outputs,
)

CLASSES, STATIC = 3, 10
ATSS, TAL = 0, STATIC  # a step of each phase


def learned(channels: Sequence[int], shapes: Sequence[tuple], seed: int, scale: float) -> list:
    """Per number of channels a map of each shape (images, height, width)."""
    paddle.seed(seed)
    maps = [tuple(paddle.randn([n, c, h, w]) * scale for n, h, w in shapes) for c in channels]
    for x in sum(maps, ()):
        x.stop_gradient = False
    return maps


def random_outputs(
    images: int = 2, seed: int = 0, features: int = 0, scale: float = 1.0
) -> PPYOLOEOutputs:
    shapes = [(images, 2, 3), (images, 4, 6), (images, 8, 12)]  # a 64 x 96 image
    maps = learned((CLASSES, 68, *([features] * (features > 0))), shapes, seed, scale)
    return PPYOLOEOutputs(*maps[:2], features=sum(maps[2:], ()))


def truth(real: tuple[int, ...] = (5, 2), boxes: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    size = rng.uniform(10, 50, (len(real), boxes, 2))
    low = rng.uniform(0, np.array([96, 64]) - size)
    mask = (np.arange(boxes) < np.array(real)[:, None]).astype("float32")
    box = np.concatenate([low, low + size], -1) * mask[..., None]
    labels = rng.integers(0, CLASSES, mask.shape) * mask
    return [box.astype("float32"), labels.astype("int64"), mask]


def ppyoloe_loss(config: PPYOLOELossConfig | None = None) -> PPYOLOELoss:
    config = config or PPYOLOELossConfig()
    return PPYOLOELoss(config, num_classes=CLASSES, static_steps=STATIC)


def with_auxiliary(images: int = 2, same: bool = False) -> PPYOLOEOutputs:
    main = random_outputs(images)
    auxiliary = random_outputs(images, seed=0 if same else 5)
    return PPYOLOEOutputs(*main[:2], *auxiliary[:2])


# --- YOLOv5 ---

YOLO_SIZE, YOLO_STRIDES = (64, 96), (8, 16, 32)
PIXELS = [
    [[10, 13], [16, 30], [33, 23]],
    [[30, 61], [62, 45], [59, 30]],
    [[60, 50], [9, 60], [70, 60]],
]
ANCHORS_LA2 = np.array(PIXELS, "float32") / np.array(YOLO_STRIDES, "float32")[:, None, None]
GAINS = Gains(box=0.05, object=0.7, classes=0.3)


def yolov5_loss(label_smoothing: float = 0.0) -> YOLOv5Loss:
    return YOLOv5Loss(
        GAINS,
        num_classes=CLASSES,
        strides=YOLO_STRIDES,
        anchors_LA2=paddle.to_tensor(ANCHORS_LA2),
        threshold=4.0,
        label_smoothing=label_smoothing,
    )


def yolov5_outputs(
    images: int = 3, seed: int = 0, features: int = 0, scale: float = 1.0
) -> YOLOv5Outputs:
    shapes = [(images, YOLO_SIZE[0] // each, YOLO_SIZE[1] // each) for each in YOLO_STRIDES]
    channels = (3 * (5 + CLASSES), *([features] * (features > 0)))
    return YOLOv5Outputs(*learned(channels, shapes, seed, scale))


# --- RT-DETR and D-FINE ---

QUERIES, SIZE = 12, (96, 128)
REAL = (3, 0, 5, 1)  # boxes of four images
SCALE_1 = paddle.to_tensor([4.0])


def detr_loss(family: str = "dfine", **keys: Any) -> RTDETRLoss:
    of_bins = {"up_1": paddle.to_tensor([0.5]), "reg_scale_1": SCALE_1} if family == "dfine" else {}
    return RTDETRLoss(RTDETRLossConfig.model_validate(keys), **of_bins)


def refined(queries: int, in_bins: bool) -> Refined:
    boxes = paddle.uniform([len(REAL), queries, 4], min=0.2, max=0.6)
    logits = paddle.randn([len(REAL), queries, CLASSES])
    corners = paddle.randn([len(REAL), queries, 4, BINS]) if in_bins else None
    for x in (logits, boxes, corners):
        if x is not None:
            x.stop_gradient = False
    return Refined(logits, boxes, corners, boxes.detach() + 0.02 if in_bins else None)


def detr_outputs(family: str, seed: int = 0) -> RTDETROutputs:
    """Three layers; groups of denoising queries as many as each image has room for."""
    paddle.seed(seed)
    in_bins = family == "dfine"
    groups = [max(1, 6 // max(1, real)) for real in REAL]
    most = max(2 * real * each for real, each in zip(REAL, groups))
    positive, negative, target = np.zeros([3, len(REAL), most])
    for image, (real, each) in enumerate(zip(REAL, groups)):
        used = 2 * real * each
        positive[image, :used] = np.tile(np.repeat([1, 0], real), each)
        negative[image, :used] = 1 - positive[image, :used]
        target[image, :used] = np.tile(np.arange(real), 2 * each)
    denoised = Denoised(
        tuple(refined(most, in_bins) for _ in range(3)),
        refined(most, False) if in_bins else None,
        paddle.to_tensor(target, "int64"),
        *(paddle.to_tensor(x, "float32") for x in (positive, negative, groups)),
    )
    layers = tuple(refined(QUERIES, in_bins) for _ in range(3))
    size = paddle.to_tensor(SIZE[::-1] * 2, "float32")
    preliminary = refined(QUERIES, False) if in_bins else None
    return RTDETROutputs(layers, refined(QUERIES, False), size, preliminary, denoised)


def replaced(outputs: Any, **changes: Any) -> Any:
    """A copy of a named tuple with other fields."""
    fields = dict(zip(type(outputs).__annotations__, outputs, strict=True))
    return type(outputs)(**fields | changes)


def mapped(outputs: Any, change: Any) -> Any:
    """The same outputs with every tensor but the size changed."""
    if isinstance(outputs, paddle.Tensor):
        return change(outputs)
    if isinstance(outputs, RTDETROutputs):
        return replaced(type(outputs)(*(mapped(x, change) for x in outputs)), size_4=outputs.size_4)
    if isinstance(outputs, tuple):
        each = [mapped(x, change) for x in outputs]
        return tuple(each) if type(outputs) is tuple else type(outputs)(*each)
    return outputs


def numbers(output: LossOutput) -> dict[str, float]:
    return {"total": float(output.total)} | {k: float(x) for k, x in output.parts.items()}

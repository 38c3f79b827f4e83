"""Boxes: conversion, clipping, area and the IoU family.

A box is (x1, y1, x2, y2), top left and bottom right, in any one unit (pixels unless a function
says otherwise), stored in the last axis.  Everything here works on Paddle tensors of any float
dtype, keeps the graph, and never copies to the host.
"""

import paddle
from paddle import Tensor


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """(x1, y1, x2, y2) to (centre x, centre y, width, height); same unit, any leading axes."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return paddle.concat([(low + high) * 0.5, high - low], axis=-1)


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """(centre x, centre y, width, height) to (x1, y1, x2, y2); same unit, any leading axes."""
    centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
    return paddle.concat([centre - half, centre + half], axis=-1)


def xywh_to_xyxy(boxes: Tensor) -> Tensor:
    """COCO's (left, top, width, height) to (x1, y1, x2, y2)."""
    low = boxes[..., :2]
    return paddle.concat([low, low + boxes[..., 2:]], axis=-1)


def xyxy_to_xywh(boxes: Tensor) -> Tensor:
    """(x1, y1, x2, y2) to COCO's (left, top, width, height)."""
    low = boxes[..., :2]
    return paddle.concat([low, boxes[..., 2:] - low], axis=-1)


def clip(boxes: Tensor, height: float, width: float) -> Tensor:
    """Boxes cut to an image of `height` x `width` (the boxes' unit); outside ones get area 0."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return paddle.stack(
        [x1.clip(0, width), y1.clip(0, height), x2.clip(0, width), y2.clip(0, height)], axis=-1
    )


def area(boxes: Tensor) -> Tensor:
    """Area [...] of boxes [..., 4]; 0 where a side is negative."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return (x2 - x1).clip(min=0) * (y2 - y1).clip(min=0)


def pairwise_iou(a_BM4: Tensor, b_BN4: Tensor, eps: float = 1e-9) -> Tensor:
    """IoU [B, M, N] of every box of `a` with every box of `b` of the same image.

    One plane of [B, M, N] per coordinate, never [B, M, N, 2]: at most four are alive at once.
    `eps` keeps the quotient finite for boxes without area (their IoU is 0).
    """
    ax1, ay1, ax2, ay2 = a_BM4.unsqueeze(2).unbind(-1)
    bx1, by1, bx2, by2 = b_BN4.unsqueeze(1).unbind(-1)
    width = (paddle.minimum(ax2, bx2) - paddle.maximum(ax1, bx1)).clip(min=0)
    height = (paddle.minimum(ay2, by2) - paddle.maximum(ay1, by1)).clip(min=0)
    overlap = width * height
    union = area(a_BM4).unsqueeze(2) + area(b_BN4).unsqueeze(1) - overlap
    return overlap / (union + eps)


def aligned_iou(a: Tensor, b: Tensor, eps: float = 1e-9) -> Tensor:
    """IoU [...] of box pairs [..., 4] and [..., 4] (broadcast against one another)."""
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    width = (paddle.minimum(ax2, bx2) - paddle.maximum(ax1, bx1)).clip(min=0)
    height = (paddle.minimum(ay2, by2) - paddle.maximum(ay1, by1)).clip(min=0)
    overlap = width * height
    return overlap / (area(a) + area(b) - overlap + eps)


def aligned_giou(a: Tensor, b: Tensor, eps: float = 1e-10) -> Tensor:
    """Generalized IoU [...] in (-1, 1] of box pairs [..., 4] and [..., 4].

        GIoU = IoU - (enclosing - union) / enclosing

    Differentiable; finite for boxes without area.  Sides may be negative (a prediction of an
    untrained head): areas are then signed, as in the reference implementations, which keeps a
    gradient that pulls the sides apart.
    Source: Rezatofighi et al. 2019, arXiv:1902.09630, Algorithm 1.
    """
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    width = (paddle.minimum(ax2, bx2) - paddle.maximum(ax1, bx1)).clip(min=0)
    height = (paddle.minimum(ay2, by2) - paddle.maximum(ay1, by1)).clip(min=0)
    overlap = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - overlap + eps
    span_x = paddle.maximum(ax2, bx2) - paddle.minimum(ax1, bx1)
    span_y = paddle.maximum(ay2, by2) - paddle.minimum(ay1, by1)
    enclosing = span_x * span_y + eps
    return overlap / union - (enclosing - union) / enclosing

"""Boxes: conversion, area and the IoU family.

A box is (x1, y1, x2, y2), top left and bottom right, in any one unit (pixels unless a function
says otherwise), stored in the last axis.  All functions take Paddle tensors of any float dtype,
keep the graph, and never copy to the host. `eps` keeps quotients finite for boxes without area.
"""

import math

import paddle
from paddle import Tensor


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Converts centre and size to corners, in the same unit."""
    centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
    return paddle.concat([centre - half, centre + half], axis=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Converts corners to centre and size, in the same unit."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return paddle.concat([(low + high) * 0.5, high - low], axis=-1)


def area(boxes: Tensor) -> Tensor:
    """Computes the area [...] of boxes [..., 4]; 0 where a side is negative."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return (x2 - x1).clip(min=0) * (y2 - y1).clip(min=0)


def _overlap(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Computes the area that two boxes share.

    Args: a, b: x1, y1, x2, y2 of the boxes.
    """
    width = (paddle.minimum(a[2], b[2]) - paddle.maximum(a[0], b[0])).clip(min=0)
    height = (paddle.minimum(a[3], b[3]) - paddle.maximum(a[1], b[1])).clip(min=0)
    return width * height


def aligned_iou(a: Tensor, b: Tensor) -> Tensor:
    """Computes the IoU [...] of box pairs [..., 4]; broadcasts; 0 for boxes without area."""
    eps = 1e-9
    overlap = _overlap(a.unbind(-1), b.unbind(-1))
    return overlap / (area(a) + area(b) - overlap + eps)


def pairwise_iou(a_BM4: Tensor, b_BN4: Tensor) -> Tensor:
    """Computes the IoU [B, M, N] of all pairs of boxes of each image.

    It uses one tensor [B, M, N] per coordinate, never [B, M, N, 2], at most four at a time.
    """
    return aligned_iou(a_BM4.unsqueeze(2), b_BN4.unsqueeze(1))


def aligned_giou(a: Tensor, b: Tensor) -> Tensor:
    """Computes the generalized IoU [...] in (-1, 1] of box pairs [..., 4].

        GIoU = IoU - (enclosing - union) / enclosing

    It is differentiable, and finite for boxes without area.  Sides may be negative (a prediction of
    an untrained head): then areas are signed, as in the reference implementations, which keeps a
    gradient that pulls the sides apart.
    Source: Rezatofighi et al. 2019, arXiv:1902.09630, Algorithm 1.
    """
    eps = 1e-10
    ax1, ay1, ax2, ay2 = corners_a = a.unbind(-1)
    bx1, by1, bx2, by2 = corners_b = b.unbind(-1)
    overlap = _overlap(corners_a, corners_b)
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - overlap + eps
    span_x = paddle.maximum(ax2, bx2) - paddle.minimum(ax1, bx1)
    span_y = paddle.maximum(ay2, by2) - paddle.minimum(ay1, by1)
    enclosing = span_x * span_y + eps
    return overlap / union - (enclosing - union) / enclosing


def aligned_ciou(a: Tensor, b: Tensor) -> Tensor:
    """Computes the complete IoU [...] in (-2, 1] of box pairs [..., 4].

        CIoU = IoU - centre distance^2 / enclosing diagonal^2 - v^2 / (1 - IoU + v)
        v    = 4 / pi^2 * (atan(w_b / h_b) - atan(w_a / h_a))^2

    It is differentiable, except that the factor v / (1 - IoU + v) of v is a constant, as in the
    paper, and finite for boxes without area.
    Source: Zheng et al. 2020, arXiv:1911.08287, section 3.3.
    """
    eps = 1e-7
    ax1, ay1, ax2, ay2 = corners_a = a.unbind(-1)
    bx1, by1, bx2, by2 = corners_b = b.unbind(-1)
    overlap = _overlap(corners_a, corners_b)
    width_a, height_a, width_b, height_b = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    iou = overlap / (width_a * height_a + width_b * height_b - overlap + eps)
    span_x = paddle.maximum(ax2, bx2) - paddle.minimum(ax1, bx1)
    span_y = paddle.maximum(ay2, by2) - paddle.minimum(ay1, by1)
    offset_x, offset_y = (bx1 + bx2 - ax1 - ax2) * 0.5, (by1 + by2 - ay1 - ay2) * 0.5
    distance = (offset_x * offset_x + offset_y * offset_y) / (
        span_x * span_x + span_y * span_y + eps
    )
    angle_a = paddle.atan(width_a / height_a.clip(min=eps))
    angle_b = paddle.atan(width_b / height_b.clip(min=eps))
    angle = (angle_b - angle_a) * (2 / math.pi)
    v = angle * angle
    v_factor = v.detach() / (1.0 + eps - iou.detach() + v.detach())
    return iou - distance - v_factor * v

"""Boxes: conversion, area and the IoU family.

A box is (x1, y1, x2, y2), top left and bottom right, in any one unit (pixels unless a function
says otherwise), stored in the last axis.  Everything here works on Paddle tensors of any float
dtype, keeps the graph, and never copies to the host.
`eps` keeps quotients finite for boxes without area.
"""

import math

import paddle
from paddle import Tensor


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Centre and size to corners, in the same unit."""
    centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
    return paddle.concat([centre - half, centre + half], axis=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Corners to centre and size, in the same unit."""
    low, high = boxes[..., :2], boxes[..., 2:]
    return paddle.concat([(low + high) * 0.5, high - low], axis=-1)


def area(boxes: Tensor) -> Tensor:
    """Area [...] of boxes [..., 4]; 0 where a side is negative."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return (x2 - x1).clip(min=0) * (y2 - y1).clip(min=0)


def _overlap(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Area that two boxes share.

    Args: each box as its planes x1, y1, x2, y2.
    """
    width = (paddle.minimum(a[2], b[2]) - paddle.maximum(a[0], b[0])).clip(min=0)
    height = (paddle.minimum(a[3], b[3]) - paddle.maximum(a[1], b[1])).clip(min=0)
    return width * height


def aligned_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU [...] of box pairs [..., 4], broadcast.

    0 for boxes without area.
    """
    eps = 1e-9
    overlap = _overlap(a.unbind(-1), b.unbind(-1))
    return overlap / (area(a) + area(b) - overlap + eps)


def pairwise_iou(a_BM4: Tensor, b_BN4: Tensor) -> Tensor:
    """IoU [B, M, N] of all boxes of each image.

    One plane of [B, M, N] per coordinate, never [B, M, N, 2]: at most four are alive at once.
    """
    return aligned_iou(a_BM4.unsqueeze(2), b_BN4.unsqueeze(1))


def aligned_giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalized IoU [...] in (-1, 1] of box pairs [..., 4].

        GIoU = IoU - (enclosing - union) / enclosing

    Differentiable; finite for boxes without area.  Sides may be negative (a prediction of an
    untrained head): areas are then signed, as in the reference implementations, which keeps a
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
    """Complete IoU [...] in (-2, 1] of box pairs [..., 4].

        CIoU = IoU - centre distance^2 / enclosing diagonal^2 - v^2 / (1 - IoU + v)
        v    = 4 / pi^2 * (atan(w_b / h_b) - atan(w_a / h_a))^2

    Differentiable, except that the factor v / (1 - IoU + v) of v is taken as a constant, as the
    paper does; finite for boxes without area.
    Source: Zheng et al. 2020, arXiv:1911.08287, section 3.3.
    """
    eps = 1e-7
    ax1, ay1, ax2, ay2 = corners_a = a.unbind(-1)
    bx1, by1, bx2, by2 = corners_b = b.unbind(-1)
    overlap = _overlap(corners_a, corners_b)
    wide_a, high_a, wide_b, high_b = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    iou = overlap / (wide_a * high_a + wide_b * high_b - overlap + eps)
    span_x = paddle.maximum(ax2, bx2) - paddle.minimum(ax1, bx1)
    span_y = paddle.maximum(ay2, by2) - paddle.minimum(ay1, by1)
    apart_x, apart_y = (bx1 + bx2 - ax1 - ax2) * 0.5, (by1 + by2 - ay1 - ay2) * 0.5
    distance = (apart_x * apart_x + apart_y * apart_y) / (span_x * span_x + span_y * span_y + eps)
    angle_a = paddle.atan(wide_a / high_a.clip(min=eps))
    angle_b = paddle.atan(wide_b / high_b.clip(min=eps))
    turned = (angle_b - angle_a) * (2 / math.pi)
    v = turned * turned
    share = v.detach() / (1.0 + eps - iou.detach() + v.detach())
    return iou - distance - share * v

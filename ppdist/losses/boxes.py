"""Boxes: conversion, area and the IoU family.

A box is (x1, y1, x2, y2), top left and bottom right, in any one unit (pixels unless a function
says otherwise), stored in the last axis.  Everything here works on Paddle tensors of any float
dtype, keeps the graph, and never copies to the host.
"""

import math

import paddle
from paddle import Tensor


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """(centre x, centre y, width, height) to (x1, y1, x2, y2); same unit, any leading axes."""
    centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
    return paddle.concat([centre - half, centre + half], axis=-1)


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


def aligned_ciou(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    """Complete IoU [...] in (-2, 1] of box pairs [..., 4] and [..., 4]; sides are not negative.

        CIoU = IoU - centre distance^2 / enclosing diagonal^2 - v^2 / (1 - IoU + v)
        v    = 4 / pi^2 * (atan(w_b / h_b) - atan(w_a / h_a))^2

    Differentiable, except that the factor v / (1 - IoU + v) of v is taken as a constant, as the
    paper does; finite for boxes without area.
    Source: Zheng et al. 2020, arXiv:1911.08287, section 3.3.
    """
    ax1, ay1, ax2, ay2 = a.unbind(-1)
    bx1, by1, bx2, by2 = b.unbind(-1)
    width = (paddle.minimum(ax2, bx2) - paddle.maximum(ax1, bx1)).clip(min=0)
    height = (paddle.minimum(ay2, by2) - paddle.maximum(ay1, by1)).clip(min=0)
    wide_a, high_a, wide_b, high_b = ax2 - ax1, ay2 - ay1, bx2 - bx1, by2 - by1
    overlap = width * height
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

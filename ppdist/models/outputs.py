"""Raw outputs of the detectors, and computations on them shared by losses and models.

    YOLOv5     a grid of anchors a level           -> YOLOv5Outputs
    PP-YOLOE   distributions of sides a cell       -> PPYOLOEOutputs, decode_boxes
    RT-DETR    queries of each decoder layer       -> RTDETROutputs, weighting (D-FINE)

Losses import this module rather than a model.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

REG_MAX = 32
BINS = REG_MAX + 1  # R of D-FINE's distribution over the moves of a side


def anchor_points(features: tuple[Tensor, ...], strides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns cell centres points_N2 (x, y) and stride_N1 of all levels, float32 pixels.

    They are computed once per set of level sizes; in a static graph, from the sizes at run time.
    """
    if paddle.in_dynamic_mode():
        sizes = tuple((int(f.shape[2]), int(f.shape[3])) for f in features)
        return _fixed_points(sizes, strides, str(features[0].place))
    points, stride = [], []
    for feature, step in zip(features, strides):
        shape = paddle.shape(feature)
        y = (paddle.arange(0, shape[2], dtype="float32") + 0.5) * step
        x = (paddle.arange(0, shape[3], dtype="float32") + 0.5) * step
        grid_y, grid_x = paddle.meshgrid(y, x)
        level = paddle.stack([grid_x.flatten(), grid_y.flatten()], axis=1)
        points.append(level)
        stride.append(paddle.full_like(level[:, :1], float(step)))
    return paddle.concat(points), paddle.concat(stride)


@lru_cache(maxsize=64)
def _fixed_points(
    sizes: tuple[tuple[int, int], ...], strides: tuple[int, ...], place: str
) -> tuple[Tensor, Tensor]:
    """Computes `anchor_points` for levels of known sizes (height, width)."""
    points, stride = [], []
    for (height, width), step in zip(sizes, strides):
        y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        points.append((np.stack([x.ravel(), y.ravel()], axis=1) + 0.5) * step)
        stride.append(np.full((height * width, 1), step))
    return (
        paddle.to_tensor(np.concatenate(points).astype("float32")),
        paddle.to_tensor(np.concatenate(stride).astype("float32")),
    )


class YOLOv5Outputs(NamedTuple):
    """Raw outputs of YOLOv5, the same in training and evaluation.

    logits: [B, A * (5 + C), H, W] per level, strides rising; channel a * (5 + C) + k, with k:
        x, y, w, h, objectness, classes.
    features: of the neck, see `Detector.distillation`; empty without.
    """

    logits: tuple[Tensor, ...]
    features: tuple[Tensor, ...] = ()


class PPYOLOEOutputs(NamedTuple):
    """Raw outputs of PP-YOLOE per level, strides falling (32, 16, 8).

    With a one-to-one head, the first two are its outputs whenever no gradients are computed.

    class_logits: [B, C, H, W] each; reg_dist: [B, 4 * BINS, H, W] each, logits of distributions,
        channel side * BINS + bin, sides left, top, right, bottom.
    aux_class_logits, aux_reg_dist: the same from the auxiliary head; empty without such a head, and
        whenever no gradients are computed.
    one_class_logits, one_reg_dist: the same from the one-to-one head.
    features: of the neck, see `Detector.distillation`; empty without.
    """

    class_logits: tuple[Tensor, ...]
    reg_dist: tuple[Tensor, ...]
    aux_class_logits: tuple[Tensor, ...] = ()
    aux_reg_dist: tuple[Tensor, ...] = ()
    one_class_logits: tuple[Tensor, ...] = ()
    one_reg_dist: tuple[Tensor, ...] = ()
    features: tuple[Tensor, ...] = ()


def decode_boxes(reg_dist_BN4R: Tensor, points_N2: Tensor, stride_N1: Tensor) -> Tensor:
    """Decodes distributions over sides (logits) to boxes [B, N, 4], xyxy.

    Boxes are in pixels, like the points.

        side = stride * sum_r(r * softmax(logits)_r), measured outwards from the point.
    """
    # A column, not a vector: then ONNX Runtime computes one product instead of N small ones.
    bins_R1 = paddle.arange(reg_dist_BN4R.shape[-1], dtype=reg_dist_BN4R.dtype).unsqueeze(1)
    sides_BN4 = F.softmax(reg_dist_BN4R, axis=-1).matmul(bins_R1).squeeze(-1) * stride_N1
    return paddle.concat([points_N2 - sides_BN4[:, :, :2], points_N2 + sides_BN4[:, :, 2:]], -1)


class Refined(NamedTuple):
    """Logits and boxes of queries after one decoder layer, or after the encoder.

    logits_BQC: class logits.
    boxes_BQ4: centre x, centre y, width, height as fractions (0..1) of the input size.
    corners_BQ4R: D-FINE: logits of the distributions over the moves of the four sides, order left,
        top, right, bottom; None elsewhere.
    reference_BQ4: D-FINE: the boxes that these distributions move (cx, cy, w, h in 0..1, detached);
        None elsewhere.
    """

    logits_BQC: Tensor
    boxes_BQ4: Tensor
    corners_BQ4R: Tensor | None = None
    reference_BQ4: Tensor | None = None


class Denoised(NamedTuple):
    """Outputs of the denoising queries, and the box that each query stands for.

    layers, preliminary: as in `RTDETROutputs`, with D queries instead of Q.
    target_BD: int64, row of the image's boxes; meaningless where unused.
    positive_BD: float32, 1 where the query has to find its target.
    negative_BD: float32, 1 where the query has to find nothing.  If both are 0, the query is not
        used.
    groups_B: float32, number of denoising groups of each image, at least 1.
    """

    layers: tuple[Refined, ...]
    preliminary: Refined | None
    target_BD: Tensor
    positive_BD: Tensor
    negative_BD: Tensor
    groups_B: Tensor


class RTDETROutputs(NamedTuple):
    """Raw outputs of RT-DETR and D-FINE.

    layers: outputs of the decoder layers; the last one predicts.
    encoder: outputs of query selection.
    size_4: float32, width, height, width, height of the input in pixels.
    preliminary: D-FINE: the first layer's boxes before distributions refine them, and its logits.
    denoised: present in training with targets and `model.denoising`.
    features: of the neck, see `Detector.distillation`; empty without.
    """

    layers: tuple[Refined, ...]
    encoder: Refined
    size_4: Tensor
    preliminary: Refined | None = None
    denoised: Denoised | None = None
    features: tuple[Tensor, ...] = ()


def weighting(up_1: Tensor, reg_scale_1: Tensor) -> Tensor:
    """Computes W, the distance by which each bin moves a side, [R]: fine around 0, coarse far off.

        W(n) = sign(m) * ((a + 1)**(2 |m| / (N - 2)) - 1),  m = n - N / 2,  a = up * reg_scale
        W(0) = -2 a,  W(N) = 2 a

    The unit is the size of the box / reg_scale; N = REG_MAX.
    Source: arXiv:2410.13842, eq. 2.
    """
    limit = up_1.abs() * reg_scale_1.abs()
    step_R = paddle.arange(BINS, dtype="float32") - REG_MAX // 2
    exponent_R = step_R.abs() * (2 / (REG_MAX - 2))
    size_R = paddle.exp(exponent_R * paddle.log(limit + 1)) - 1
    ends_R = (step_R.abs() == REG_MAX // 2).astype("float32")
    return paddle.sign(step_R) * (size_R * (1 - ends_R) + 2 * limit * ends_R)

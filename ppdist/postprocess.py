"""Scores and boxes of all predictions -> the few that stay."""

import paddle
from paddle import Tensor
from pydantic import Field

from ppdist.config import Section


class NMSConfig(Section):
    """Class-wise non-maximum suppression."""

    score_threshold: float = Field(
        default=0.01, ge=0, le=1, description="predictions below this score are dropped"
    )
    iou_threshold: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="of two boxes of one class that overlap more than this, the better stays",
    )
    candidates: int = Field(
        default=1000, ge=1, description="best boxes per class and image that enter the suppression"
    )
    keep: int = Field(default=300, ge=1, description="best boxes per image that leave it")
    multi_label: bool = Field(
        default=True,
        description="true: a prediction counts for every class that scores; false: for its best "
        "class only",
    )


def multiclass_nms(scores_BNC: Tensor, boxes_BN4: Tensor, nms: NMSConfig) -> tuple[Tensor, Tensor]:
    """Non-maximum suppression within each class, eager and in a static graph.

    Args:
        scores_BNC: 0..1, float32.
        boxes_BN4: xyxy, float32, any unit; not clipped here.

    Returns:
        rows_R6: float32 [class, score, x1, y1, x2, y2] of all images one after the other; within
            an image class by class, each by falling score.  R = 0 when nothing passes.
        count_B: int32, how many of the rows belong to each image; at most nms.keep.
    """
    if not nms.multi_label:
        scores_BNC = _best_class_only(scores_BNC)
    rows_R6, _, count_B = paddle._C_ops.multiclass_nms3(
        boxes_BN4,
        scores_BNC.transpose([0, 2, 1]),
        None,  # rois_num: all images have the same N
        nms.score_threshold,
        nms.candidates,
        nms.keep,
        nms.iou_threshold,
        True,  # a box [0, 1] is one unit wide, not two pixels
        1.0,  # eta: the threshold does not adapt
        -1,  # no class is background
    )
    return rows_R6, count_B


def _best_class_only(scores_BNC: Tensor) -> Tensor:
    """Zero, which passes no threshold, for all but the largest class (the first of equals)."""
    best_BN1 = scores_BNC.argmax(axis=2, keepdim=True)
    classes_C = paddle.arange(scores_BNC.shape[2], dtype=best_BN1.dtype)
    return paddle.where(classes_C == best_BN1, scores_BNC, paddle.zeros_like(scores_BNC))

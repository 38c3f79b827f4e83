"""Non-maximum suppression, eager and in a static graph."""

import paddle
from paddle import Tensor

from ppdist.config.evaluate import NMSConfig
from ppdist.distributed import paddle_api


def multiclass_nms(scores_BNC: Tensor, boxes_BN4: Tensor, nms: NMSConfig) -> tuple[Tensor, Tensor]:
    """Non-maximum suppression within each class.

    Eager and in a static graph; without an iou_threshold the best of all pairs of prediction and
    class.

    Args:
        scores_BNC: 0..1, float32.
        boxes_BN4: xyxy, float32, any unit; not clipped here.

    Returns:
        rows_R6: float32 [class, score, x1, y1, x2, y2] of all images one after the other; within
            an image class by class, each by falling score; without suppression by falling score
            alone.  R = 0 when nothing passes.
        count_B: int32, how many of the rows belong to each image; at most nms.keep.
    """
    if not nms.multi_label:
        scores_BNC = _best_class_only(scores_BNC)
    if nms.iou_threshold is None:
        return _best(scores_BNC, boxes_BN4, nms.score_threshold, nms.keep)
    return paddle_api.multiclass_nms3(
        boxes_BN4,
        scores_BNC.transpose([0, 2, 1]),
        score_threshold=nms.score_threshold,
        pre_nms_topk=nms.candidates,
        max_detections=nms.keep,
        iou_threshold=nms.iou_threshold,
    )


def _best(
    scores_BNC: Tensor, boxes_BN4: Tensor, score_threshold: float, keep: int
) -> tuple[Tensor, Tensor]:
    """The `keep` best of each image above the threshold.

    By falling score: rows_R6, count_B.
    """
    classes = scores_BNC.shape[2]
    # Of a small image there are fewer than `keep`, and how many a static graph does not know:
    # zeros, which pass no threshold, make them enough.
    nothing_BK = paddle.zeros_like(scores_BNC[:, 0, 0:1]).tile([1, keep])
    flat_BX = paddle.concat([scores_BNC.flatten(1), nothing_BK], axis=1)
    score_BK, index_BK = paddle.topk(flat_BX, keep, axis=1)
    passes_BK = score_BK > score_threshold
    index_BK = paddle.where(passes_BK, index_BK, paddle.zeros_like(index_BK))
    place_BK4 = (index_BK // classes).unsqueeze(2).tile([1, 1, 4])
    box_BK4 = paddle.take_along_axis(boxes_BN4, place_BK4, axis=1, broadcast=False)
    label_BK = (index_BK % classes).astype(scores_BNC.dtype)
    rows_BK6 = paddle.concat([label_BK.unsqueeze(2), score_BK.unsqueeze(2), box_BK4], axis=2)
    place_R = paddle.nonzero(passes_BK.flatten()).flatten()
    rows_R6 = paddle.gather(rows_BK6.reshape([-1, 6]), place_R)
    return rows_R6, passes_BK.astype("int32").sum(1).astype("int32")


def _best_class_only(scores_BNC: Tensor) -> Tensor:
    """Zero for all but the largest class.

    Zero passes no threshold. Of equal classes the first stays.
    """
    best_BN1 = scores_BNC.argmax(axis=2, keepdim=True)
    classes_C = paddle.arange(scores_BNC.shape[2], dtype=best_BN1.dtype)
    return paddle.where(classes_C == best_BN1, scores_BNC, paddle.zeros_like(scores_BNC))

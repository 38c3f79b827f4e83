"""Non-maximum suppression, eager and in a static graph."""

import numpy as np
import paddle
from paddle import Tensor

from ppdist.config.evaluate import NMSConfig
from ppdist.distributed import paddle_api
from ppdist.runtime.predictor import suppress


def multiclass_nms(scores_BNC: Tensor, boxes_BN4: Tensor, nms: NMSConfig) -> tuple[Tensor, Tensor]:
    """Suppresses overlapping boxes, in eager mode and in a static graph.

    A box suppresses boxes of its class or, if `class_agnostic`, of all classes.  Without an
    iou_threshold it selects the best pairs of prediction and class.

    Args:
        scores_BNC: 0..1, float32.
        boxes_BN4: xyxy, float32, any unit; not clipped here.

    Returns:
        rows_R6: float32 [class, score, x1, y1, x2, y2] of all images one after the other.  Within
            an image they are sorted by class, then by falling score; agnostic or without
            suppression by falling score only.  R = 0 if nothing passes.
        count_B: int32, number of rows of each image; at most nms.keep.
    """
    is_on_cpu = paddle.in_dynamic_mode() and scores_BNC.place.is_cpu_place()
    if is_on_cpu and nms.iou_threshold is not None:
        return _suppress_on_cpu(scores_BNC, boxes_BN4, nms)
    is_agnostic = nms.class_agnostic and nms.iou_threshold is not None
    if not nms.multi_label and not is_agnostic:
        scores_BNC = _keep_best_class(scores_BNC)
    if nms.iou_threshold is None:
        return _select_best(scores_BNC, boxes_BN4, nms.score_threshold, nms.keep)
    entering_BNC = scores_BNC.max(axis=2, keepdim=True) if is_agnostic else scores_BNC
    rows_R6, index_R, count_B = paddle_api.multiclass_nms3(
        boxes_BN4,
        entering_BNC.transpose([0, 2, 1]),
        score_threshold=nms.score_threshold,
        pre_nms_topk=nms.candidates,
        max_detections=nms.keep,
        iou_threshold=nms.iou_threshold,
    )
    if is_agnostic:
        # NMS saw a single class; the true classes are those of the predictions that remain.
        label_R = paddle.gather(scores_BNC.argmax(axis=2).flatten(), index_R)
        label_R1 = label_R.astype(rows_R6.dtype).unsqueeze(1)
        rows_R6 = paddle.concat([label_R1, rows_R6[:, 1:]], axis=1)
    return rows_R6, count_B


def _suppress_on_cpu(
    scores_BNC: Tensor, boxes_BN4: Tensor, nms: NMSConfig
) -> tuple[Tensor, Tensor]:
    """Suppresses in NumPy, which ends as soon as `keep` boxes stay.

    Paddle's operator compares all candidates: of a net that has learned nothing yet it took 130 ms
    an image, twice as long as the net.
    """
    settings, rows = nms.model_dump(), []
    for scores_NC, boxes_N4 in zip(scores_BNC.numpy(), boxes_BN4.numpy()):
        best_first_K6 = suppress(scores_NC, boxes_N4, settings)
        if not nms.class_agnostic:
            best_first_K6 = best_first_K6[np.argsort(best_first_K6[:, 0], kind="stable")]
        rows.append(best_first_K6)
    count_B = np.array([len(rows_K6) for rows_K6 in rows], np.int32)
    return paddle.to_tensor(np.concatenate(rows)), paddle.to_tensor(count_B)


def _select_best(
    scores_BNC: Tensor, boxes_BN4: Tensor, score_threshold: float, keep: int
) -> tuple[Tensor, Tensor]:
    """Selects the `keep` best rows of each image above the threshold.

    Returns: rows_R6, sorted by falling score; count_B.
    """
    classes = scores_BNC.shape[2]
    # A small image may have fewer than `keep` pairs, and a static graph does not know their number.
    # Zeros, which pass no threshold, make up the rest.
    padding_BK = paddle.zeros_like(scores_BNC[:, 0, 0:1]).tile([1, keep])
    flat_BX = paddle.concat([scores_BNC.flatten(1), padding_BK], axis=1)
    score_BK, index_BK = paddle.topk(flat_BX, keep, axis=1)
    passes_BK = score_BK > score_threshold
    index_BK = paddle.where(passes_BK, index_BK, paddle.zeros_like(index_BK))
    place_BK4 = (index_BK // classes).unsqueeze(2).tile([1, 1, 4])
    box_BK4 = paddle.take_along_axis(boxes_BN4, place_BK4, axis=1, broadcast=False)
    label_BK = (index_BK % classes).astype(scores_BNC.dtype)
    rows_BK6 = paddle.concat([label_BK.unsqueeze(2), score_BK.unsqueeze(2), box_BK4], axis=2)
    # The number of rows depends on values, as in multiclass_nms3, so this waits for the device.
    place_R = paddle.nonzero(passes_BK.flatten()).flatten()
    rows_R6 = paddle.gather(rows_BK6.reshape([-1, 6]), place_R)
    return rows_R6, passes_BK.astype("int32").sum(1).astype("int32")


def _keep_best_class(scores_BNC: Tensor) -> Tensor:
    """Sets all but the largest score of a prediction to 0, which passes no threshold.

    In a tie, the first score stays.
    """
    best_BN1 = scores_BNC.argmax(axis=2, keepdim=True)
    classes_C = paddle.arange(scores_BNC.shape[2], dtype=best_BN1.dtype)
    return paddle.where(classes_C == best_BN1, scores_BNC, paddle.zeros_like(scores_BNC))

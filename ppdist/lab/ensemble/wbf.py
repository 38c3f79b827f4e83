"""Weighted boxes fusion in numpy."""

import numpy as np

from ppdist.data.boxes import box_iou

IOU = 0.55  # the threshold of the paper
# Suppression within a view uses an IoU this much below that of wbf's clusters: otherwise several
# boxes of one view join an object's cluster and lower its score.  Measured on one under-trained
# model: see the table in docs/dev/ensembling.md.
VIEW_MARGIN = 0.1


def view_iou(iou: float, configured: float | None) -> float:
    """Returns the IoU of the suppression within a view, below that of the fusion's clusters.

    Args:
        iou: IoU of the fusion.
        configured: the suppression IoU of the configuration; None if it has no suppression.  Even a
            model that needs none predicts extra boxes of low score on an object, which would join
            its cluster.
    """
    highest = max(0.0, round(iou - VIEW_MARGIN, 6))
    return highest if configured is None else min(configured, highest)


def weighted_fusion(
    boxes_R4: np.ndarray, scores_R: np.ndarray, members: int, iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Fuses the boxes of one class: boxes that overlap become their weighted mean.

    Boxes are processed in order of decreasing score.  Each joins the cluster whose running mean
    overlaps it most, if the IoU is above `iou`; otherwise it starts a new cluster.  For a cluster
    of T boxes b_i, with N members:

        box   = sum(score_i b_i) / sum(score_i)
        score = mean(score_i) * min(T, N) / N

    so boxes found by few members score lower.

    Args:
        boxes_R4: float64, xyxy, in any one unit; R may be 0.
        scores_R: float64, 0..1.
        members: number of members, including those that found nothing.
        iou: the threshold of the paper (0.55 there).
    Returns: boxes_K4 and scores_K, float64, best first, ties in input order.
    Source: Solovyev, Wang, Gabruseva 2021, arXiv:1910.13302, section 3.
    """
    order_R = np.argsort(-scores_R, kind="stable")
    scores_R, boxes_R4 = scores_R[order_R], boxes_R4[order_R]
    sums_K4 = np.zeros_like(boxes_R4)
    mean_K4 = np.zeros_like(boxes_R4)
    mass_K, boxes_K = np.zeros(len(boxes_R4)), np.zeros(len(boxes_R4))
    count = 0
    for box, score in zip(boxes_R4, scores_R):
        overlap_K = box_iou(box[None], mean_K4[:count])[0]
        best = int(overlap_K.argmax()) if count else 0
        if not count or overlap_K[best] <= iou:
            best, count = count, count + 1
        mass_K[best] += score
        # The cluster keeps sums, so that its mean follows every box without a second pass.
        boxes_K[best] += 1
        sums_K4[best] += score * box
        # A cluster whose scores are all 0 has no weighted mean: use the box.
        mean_K4[best] = sums_K4[best] / mass_K[best] if mass_K[best] > 0 else box
    boxes_K = boxes_K[:count]
    scores_K = mass_K[:count] / boxes_K * np.minimum(boxes_K, members) / members
    order_K = np.argsort(-scores_K, kind="stable")
    return mean_K4[:count][order_K], scores_K[order_K]

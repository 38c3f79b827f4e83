"""Weighted boxes fusion, in numpy."""

import numpy as np

from ppdist.data.boxes import box_iou

IOU = 0.55  # of the paper
# Suppression within a view uses an IoU this much below that of wbf's clusters: else several boxes
# of one view join an object's cluster and lower its score.  Measured on one under-trained model:
# see the table in docs/dev/ensembling.md.
VIEW_MARGIN = 0.1


def view_iou(iou: float, written: float | None) -> float:
    """IoU of the suppression within a view.

    Args:
        iou: of the fusion.
        written: what the configuration says; None: there is no suppression.  Of a model that needs
            none an object has further boxes of low scores, too, which would join its cluster.
    """
    most = max(0.0, round(iou - VIEW_MARGIN, 6))
    return most if written is None else min(written, most)


def weighted_fusion(
    boxes_R4: np.ndarray, scores_R: np.ndarray, members: int, iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted boxes fusion of one class: boxes that overlap become their mean.

    Boxes are taken by falling score.  Each joins the cluster whose running mean overlaps it most,
    if by more than `iou`, else starts one.  For a cluster of T boxes b_i, of N members:

        box   = sum(score_i b_i) / sum(score_i)
        score = mean(score_i) * min(T, N) / N

    so boxes that few members found score lower.

    Args:
        boxes_R4: float64, xyxy, any one unit; R may be 0.
        scores_R: float64, 0..1.
        members: all there are, whether they found something or not.
        iou: the paper's threshold (0.55 there).
    Returns: boxes_K4 and scores_K, float64, best first, ties in input order.
    Source: Solovyev, Wang, Gabruseva 2021, arXiv:1910.13302, section 3.
    """
    order_R = np.argsort(-scores_R, kind="stable")
    scores_R, boxes_R4 = scores_R[order_R], boxes_R4[order_R]
    sums_K4 = np.zeros_like(boxes_R4)
    mean_K4 = np.zeros_like(boxes_R4)
    mass_K, found_K = np.zeros(len(boxes_R4)), np.zeros(len(boxes_R4))
    count = 0
    for box, score in zip(boxes_R4, scores_R):
        overlap_K = box_iou(box[None], mean_K4[:count])[0]
        best = int(overlap_K.argmax()) if count else 0
        if not count or overlap_K[best] <= iou:
            best, count = count, count + 1
        mass_K[best] += score
        found_K[best] += 1
        sums_K4[best] += score * box
        # A cluster whose scores are all 0 has no weighted mean: use the box.
        mean_K4[best] = sums_K4[best] / mass_K[best] if mass_K[best] > 0 else box
    found_K = found_K[:count]
    scores_K = mass_K[:count] / found_K * np.minimum(found_K, members) / members
    order_K = np.argsort(-scores_K, kind="stable")
    return mean_K4[:count][order_K], scores_K[order_K]

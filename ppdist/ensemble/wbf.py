"""Box fusion in numpy: WBF and its relatives, class by class.

Each function takes boxes_R4 (xyxy, any one unit), their scores_R in 0..1, and weight_R in (0, 1],
the weight of the member that found each box; float64.  Each returns boxes_K4 and scores_K, best
first, ties in input order.  R may be 0.
"""

import functools
from collections.abc import Callable

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.data.boxes import box_iou

METHODS = ("wbf", "nms", "soft-nms-linear", "soft-nms-gaussian")
IOU = {"wbf": 0.55, "nms": 0.7, "soft-nms-linear": 0.3}  # of the papers; nms: nms.iou_threshold's
SIGMA = 0.5
# Suppression within a view uses an IoU this much below that of wbf's clusters: else several boxes
# of one view join an object's cluster and lower its score.  Measured on one under-trained model:
# see the table in docs/dev/ensembling.md.
VIEW_MARGIN = 0.1

LEAST_SCORE = 0.001  # soft-NMS drops boxes below it, as in the paper's experiments
Boxes = tuple[np.ndarray, np.ndarray]
FuseClass = Callable[[np.ndarray, np.ndarray, np.ndarray, float], Boxes]  # see fuse_class


def fuse_class(method: str, iou: float | None, sigma: float | None) -> FuseClass:
    """Returns the function that fuses the boxes of a class.

    Args: method: of METHODS.  iou, sigma: its setting; None: the default.
    Raises: ConfigError: a setting of another method, or an invalid one.
    """
    if method == "soft-nms-gaussian":
        if iou is not None:
            raise ConfigError(
                "has no effect with soft-nms-gaussian",
                code="options_conflict",
                where="--iou",
                fix="give --sigma",
            )
        sigma = SIGMA if sigma is None else sigma
        if not 0 < sigma < float("inf"):
            raise ConfigError(
                "expected a number above 0", code="option_invalid", where=f"--sigma {sigma:g}"
            )
        keeps = functools.partial(gaussian, sigma=sigma)
        return functools.partial(soft_suppression, keeps=keeps)
    if sigma is not None:
        raise ConfigError(
            "--sigma is for soft-nms-gaussian", code="options_conflict", fix=f"{method} takes --iou"
        )
    iou = IOU[method] if iou is None else iou
    if method == "soft-nms-linear":
        keeps = functools.partial(linear, iou=iou)
        return functools.partial(soft_suppression, keeps=keeps)
    kind = weighted_fusion if method == "wbf" else hard_suppression
    return functools.partial(kind, iou=iou)


def view_iou(
    method: str, iou: float | None, asked: float | None, written: float | None
) -> float | None:
    """IoU of the suppression within a view; None: as the configuration says.

    Args:
        iou: of the fusion; None: the default.
        asked: set by the user; takes precedence.
        written: what the configuration says; None: there is no suppression.  Of a model that needs
            none an object has further boxes of low scores, too, which would join its cluster.
    """
    if asked is not None or method != "wbf":
        return asked
    most = max(0.0, round((IOU[method] if iou is None else iou) - VIEW_MARGIN, 6))
    return most if written is None else min(written, most)


def weighted_fusion(
    boxes_R4: np.ndarray, scores_R: np.ndarray, weight_R: np.ndarray, total: float, iou: float
) -> Boxes:
    """Weighted boxes fusion: boxes that overlap become their mean.

    Boxes are taken by falling weight x score.  Each joins the cluster whose running mean overlaps
    it most, if by more than `iou`, else starts one.  For a cluster of boxes b_i with weights w_i:

        box   = sum(w_i score_i b_i) / sum(w_i score_i)
        score = sum(w_i score_i) / sum(w_i) * min(sum(w_i), total) / total

    so boxes that few members found score lower.  With equal weights this is the paper's
    mean(score_i) * min(T, N) / N; with others its implementation divides by T in place of
    sum(w_i), which is the same unless one member has several boxes in a cluster, where it can
    exceed 1.

    Args:
        total: sum of the weights of all members, whether they found something or not.
        iou: the paper's threshold (0.55 there).
    Source: Solovyev, Wang, Gabruseva 2021, arXiv:1910.13302, section 3.
    """
    order_R = np.argsort(-(scores_R * weight_R), kind="stable")
    mass_R = (scores_R * weight_R)[order_R]
    weight_R, boxes_R4 = weight_R[order_R], boxes_R4[order_R]
    sums_K4 = np.zeros_like(boxes_R4)
    mean_K4 = np.zeros_like(boxes_R4)
    mass_K, weight_K = np.zeros(len(boxes_R4)), np.zeros(len(boxes_R4))
    count = 0
    for box, mass, weight in zip(boxes_R4, mass_R, weight_R):
        overlap_K = box_iou(box[None], mean_K4[:count])[0]
        best = int(overlap_K.argmax()) if count else 0
        if not count or overlap_K[best] <= iou:
            best, count = count, count + 1
        mass_K[best] += mass
        weight_K[best] += weight
        sums_K4[best] += mass * box
        # A cluster whose scores are all 0 has no weighted mean: use the box.
        mean_K4[best] = sums_K4[best] / mass_K[best] if mass_K[best] > 0 else box
    found_K = weight_K[:count]
    scores_K = mass_K[:count] / found_K * np.minimum(found_K, total) / total
    return _best_first(mean_K4[:count], scores_K)


def hard_suppression(
    boxes_R4: np.ndarray, scores_R: np.ndarray, weight_R: np.ndarray, total: float, iou: float
) -> Boxes:
    """Non-maximum suppression over the boxes of all members.

    Keeps the best box unchanged and removes boxes that overlap it by more than `iou`.  Boxes are
    ranked by weight x score; the largest weight is 1.

    Args: total: unused; the best box stays however few members found it.
    """
    boxes_R4, scores_R = _best_first(boxes_R4, scores_R * weight_R)
    left_R = np.ones(len(boxes_R4), bool)
    for place in range(len(boxes_R4)):
        if left_R[place]:
            after = slice(place + 1, None)
            overlap_R = box_iou(boxes_R4[place : place + 1], boxes_R4[after])[0]
            left_R[after] &= overlap_R <= iou
    return boxes_R4[left_R], scores_R[left_R]


def soft_suppression(
    boxes_R4: np.ndarray,
    scores_R: np.ndarray,
    weight_R: np.ndarray,
    total: float,
    keeps: Callable[[np.ndarray], np.ndarray],
) -> Boxes:
    """Soft-NMS: repeatedly lowers the scores of boxes that overlap better ones.

    Takes the best box (weight x score), multiplies the scores of all others by `keeps` of their
    overlap with it, and repeats with those that are at least LEAST_SCORE.

    Args:
        keeps: IoU -> factor; `linear` or `gaussian`.
        total: unused.
    Source: Bodla, Singh, Chellappa, Davis 2017, arXiv:1704.04503, figure 2.
    """
    left_R4, score_R = boxes_R4, scores_R * weight_R
    taken: list[np.ndarray] = []
    scores: list[float] = []
    while True:
        sure_R = score_R >= LEAST_SCORE
        left_R4, score_R = left_R4[sure_R], score_R[sure_R]
        if not len(score_R):
            break
        best = int(score_R.argmax())
        taken.append(left_R4[best])
        scores.append(float(score_R[best]))
        others_R = np.arange(len(score_R)) != best
        box = left_R4[best]
        left_R4, score_R = left_R4[others_R], score_R[others_R]
        score_R = score_R * keeps(box_iou(box[None], left_R4)[0])
    return np.array(taken).reshape(-1, 4), np.array(scores)


def linear(overlap_R: np.ndarray, iou: float) -> np.ndarray:
    """Factor 1 - IoU if IoU >= `iou`, else 1.

    The paper's `iou` is 0.3.  Source: arXiv:1704.04503, section 3.
    """
    return np.where(overlap_R >= iou, 1 - overlap_R, 1.0)


def gaussian(overlap_R: np.ndarray, sigma: float) -> np.ndarray:
    """exp(-IoU^2 / sigma) (the paper's sigma is 0.5); arXiv:1704.04503, equation 3."""
    return np.exp(-(overlap_R**2) / sigma)


def _best_first(boxes_K4: np.ndarray, scores_K: np.ndarray) -> Boxes:
    order_K = np.argsort(-scores_K, kind="stable")
    return boxes_K4[order_K], scores_K[order_K]

"""Precision, recall and F1 by confidence, average precision by recall, and calibration.

All from who found what at one IoU (`ppdist.metrics.matching`).  C classes, T confidences,
R recalls.  A detection on a crowd counts nowhere.
"""

import warnings
from typing import Any, NamedTuple

import numpy as np

from ppdist.metrics.matching import CROWD, Found, Truth

CONFIDENCE_T = np.arange(1001) / 1000
RECALL_R = np.linspace(0.0, 1.0, 101)  # as COCO
_BINS = 10


class Counts(NamedTuple):
    """Detections of at least CONFIDENCE_T that found an object and that found none, int64 [C, T],
    and how many objects there are, int64 [C]."""

    right_CT: np.ndarray
    wrong_CT: np.ndarray
    objects_C: np.ndarray

    @property
    def precision_CT(self) -> np.ndarray:
        """NaN where nothing is that sure."""
        return _part(self.right_CT, self.right_CT + self.wrong_CT)

    @property
    def recall_CT(self) -> np.ndarray:
        """NaN for a class without objects."""
        return _part(self.right_CT, np.broadcast_to(self.objects_C[:, None], self.right_CT.shape))

    @property
    def f1_CT(self) -> np.ndarray:
        """2 right / (objects + detections), which is the harmonic mean of precision and recall;
        NaN for a class without objects."""
        objects_C1 = self.objects_C[:, None]
        both_CT = np.where(objects_C1 > 0, objects_C1 + self.right_CT + self.wrong_CT, 0)
        return _part(2 * self.right_CT, both_CT)


def _part(some: np.ndarray, of_all: np.ndarray) -> np.ndarray:
    return np.divide(some, of_all, out=np.full(some.shape, np.nan), where=of_all > 0)


def count_by_confidence(truth: Truth, found: Found, match_F: np.ndarray, classes: int) -> Counts:
    """
    Args:
        match_F: what `match_as_coco` gave.
    """
    steps = len(CONFIDENCE_T)
    reached_F = np.searchsorted(CONFIDENCE_T, found.score_F, side="right") - 1
    place_F = found.label_F * steps + reached_F.clip(0)

    def reaching(chosen_F: np.ndarray) -> np.ndarray:
        counts = np.bincount(place_F[chosen_F], minlength=classes * steps)
        return counts.reshape(classes, steps)[:, ::-1].cumsum(axis=1)[:, ::-1]

    right_F, crowd_F = match_F >= 0, match_F == CROWD
    return Counts(reaching(right_F), reaching(~right_F & ~crowd_F), objects_of(truth, classes))


def objects_of(truth: Truth, classes: int) -> np.ndarray:
    """Objects of each class, crowds left out; int64 [C]."""
    return np.bincount(truth.label_G[~truth.crowd_G], minlength=classes)


def mean_of_measured(values_CX: np.ndarray) -> np.ndarray:
    """Mean over classes of what is a number; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's "Mean of empty slice"
        return np.nanmean(values_CX, axis=0)


def best_step(counts: Counts) -> int | None:
    """Position in CONFIDENCE_T where the mean F1 of all classes that have objects is largest, the
    middle one of several; None: there is no object."""
    if not counts.objects_C.any():
        return None
    f1_T = mean_of_measured(counts.f1_CT)
    best = np.flatnonzero(f1_T == f1_T.max())
    return int(best[len(best) // 2])


def at_best_confidence(counts: Counts) -> dict[str, float]:
    """Means over classes with objects, at the confidence where the mean F1 is largest.

    Precision is the mean of the classes of which something was found, 0 where nothing was.
    Returns: precision, recall, f1, confidence, each -1 where the set has no object.
    """
    step = best_step(counts)
    if step is None:
        return dict.fromkeys(("precision", "recall", "f1", "confidence"), -1.0)
    some_C = counts.objects_C > 0
    precision = float(mean_of_measured(counts.precision_CT[some_C, step]))
    return {
        "precision": precision if np.isfinite(precision) else 0.0,
        "recall": float(mean_of_measured(counts.recall_CT[some_C, step])),
        "f1": float(mean_of_measured(counts.f1_CT[some_C, step])),
        "confidence": float(CONFIDENCE_T[step]),
    }


def precision_recall(right_F: np.ndarray, objects: int) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall of the 1, 2, ... surest detections of one class.

    Args:
        right_F: bool, whether each found an object, the surest first.
    """
    hits_F = right_F.cumsum()
    return hits_F / np.arange(1, len(right_F) + 1), hits_F / objects


def coco_average_precision(right_F: np.ndarray, objects: int) -> float:
    """Mean over RECALL_R of the best precision at that recall or more; NaN without objects."""
    if not objects:
        return float("nan")
    precision_F, recall_F = precision_recall(right_F, objects)
    envelope_F = np.append(_envelope(precision_F), 0.0)
    return float(envelope_F[np.searchsorted(recall_F, RECALL_R, side="left")].mean())


def voc_average_precision(right_F: np.ndarray, objects: int) -> tuple[float, float]:
    """Average precision of one class as VOC 2007 has it, the mean of the best precision at 11
    recalls, and as VOC has since 2010, the area under the best precision; NaN without objects.

    Source: VOCdevkit, VOCcode/VOCevaldet.m and VOCap.m.
    """
    if not objects:
        return float("nan"), float("nan")
    precision_F, recall_F = precision_recall(right_F, objects)
    envelope_F = np.append(_envelope(precision_F), 0.0)
    eleven = envelope_F[np.searchsorted(recall_F, np.arange(11) / 10, side="left")].mean()
    area = (np.diff(recall_F, prepend=0.0) * envelope_F[:-1]).sum()
    return float(eleven), float(area)


def _envelope(precision_F: np.ndarray) -> np.ndarray:
    """The best precision from each recall on."""
    return np.maximum.accumulate(precision_F[::-1])[::-1]


def right_by_class(label_F: np.ndarray, match_F: np.ndarray, classes: int) -> list[np.ndarray]:
    """Of each class, whether each detection found an object, crowds left out; bool, surest first.

    Args:
        label_F, match_F: of detections in the order of `Found`.
    """
    counted_F = match_F != CROWD
    label_F, match_F = label_F[counted_F], match_F[counted_F]
    order_F = np.argsort(label_F, kind="stable")
    ends = np.cumsum(np.bincount(label_F, minlength=classes))
    return np.split(match_F[order_F] >= 0, ends[:-1])


def calibration(found: Found, match_F: np.ndarray) -> dict[str, Any]:
    """How often detections of a confidence are right, in ten bins of equal width.

    Returns: `edges` of the bins; of each its mean `confidence`, its `precision` (None in an empty
        bin) and its `count`; `expected_error`: the mean over detections of the difference between
        confidence and precision of their bin, None without detections.
    Source: Guo et al. 2017, arXiv:1706.04599, over detections instead of images.
    """
    counted_F = match_F != CROWD
    score_F, right_F = found.score_F[counted_F], match_F[counted_F] >= 0
    bin_F = np.minimum((score_F * _BINS).astype(np.int64), _BINS - 1).clip(0)
    count_B = np.bincount(bin_F, minlength=_BINS)
    confidence_B = _part(np.bincount(bin_F, score_F, minlength=_BINS), count_B)
    precision_B = _part(np.bincount(bin_F, right_F, minlength=_BINS), count_B)
    off_B = np.nan_to_num(np.abs(confidence_B - precision_B)) * count_B
    return {
        "edges": np.arange(_BINS + 1) / _BINS,
        "confidence": confidence_B,
        "precision": precision_B,
        "count": count_B,
        "expected_error": float(off_B.sum() / len(score_F)) if len(score_F) else None,
    }

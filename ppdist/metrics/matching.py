"""Matches detections with objects, by COCO's and VOC's rules.

From that follow precision, recall and F1 by confidence, and average precision by recall, at one
IoU.  Arrays are flat over a whole set; a detection on a crowd counts nowhere.

G objects, F detections, P pairs of a detection and an object, N images, C classes, T confidences, R
recalls.
"""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.types import DetectionSet
from ppdist.runtime.predictor import USUAL_THRESHOLD

IOU = 0.5  # of the operating point: from this overlap on a detection is in the right place
NEAR = 0.1  # pairs that overlap less are dropped
NOBODY = -1
CROWD = -2
CONFIDENCE_T = np.arange(1001) / 1000
RECALL_R = np.linspace(0.0, 1.0, 101)  # COCO's recalls
_PAIRS_AT_ONCE = 1 << 21  # bounds the memory of a set with crowded images


class GroundTruth(NamedTuple):
    """The objects of a set, image after image.

    image_G: int64 place of the image in the order of ids.  label_G: int64.  box_G4: float64 x, y,
    width, height in pixels of the original image.  crowd_G: bool, a region or a VOC object called
    difficult; hitting it counts neither way.  area_G: float64.  order_N: position of each
    image in the records.
    """

    image_G: np.ndarray
    label_G: np.ndarray
    box_G4: np.ndarray
    crowd_G: np.ndarray
    area_G: np.ndarray
    order_N: np.ndarray


class Detections(NamedTuple):
    """The detections of a set, by falling score.

    Detections with equal scores are in the order of their images.

    image_F: int64 place of the image; label_F: int64; score_F: float64; box_F4: as
    `GroundTruth.box_G4`.
    """

    image_F: np.ndarray
    label_F: np.ndarray
    score_F: np.ndarray
    box_F4: np.ndarray


class Pairs(NamedTuple):
    """The overlapping pairs of a detection and an object of one image.

    A pair overlaps by NEAR or more; the classes may differ.

    detection_P, object_P: int64 positions in `Detections` and `GroundTruth`, rising.  iou_P:
    float64 intersection over union.  overlap_P: the same, but for a crowd the part of the detection
    that lies on it, as COCO has it.
    """

    detection_P: np.ndarray
    object_P: np.ndarray
    iou_P: np.ndarray
    overlap_P: np.ndarray

    def of(self, is_chosen_P: np.ndarray) -> "Pairs":
        return Pairs(*(values[is_chosen_P] for values in self))


def collect_objects(dataset: DetectionSet) -> GroundTruth:
    """Collects all objects of a set, its images by ascending id.

    Objects of images that cannot be read are left out.
    """
    ids_N = np.array([record.image_id for record in dataset.records], np.int64)
    order_N = np.argsort(ids_N, kind="stable")
    records = [dataset.records[index] for index in order_N]
    counts_N = [len(record.labels_M) for record in records]
    corners_G4 = _concatenate([record.boxes_M4 for record in records], np.float64, (0, 4))
    truth = GroundTruth(
        np.repeat(np.arange(len(records)), counts_N),
        _concatenate([record.labels_M for record in records], np.int64, (0,)),
        _to_xywh(corners_G4),
        _concatenate([record.crowd_M for record in records], bool, (0,)),
        _concatenate([record.area_M for record in records], np.float64, (0,)),
        order_N,
    )
    if not dataset.unreadable:
        return truth
    # Images keep their positions, because detections refer to them by position.
    kept_G = ~np.isin(order_N, [*dataset.unreadable])[truth.image_G]
    names = (name for name in truth._fields if name != "order_N")
    return truth._replace(**{name: getattr(truth, name)[kept_G] for name in names})


def select_detections(
    truth: GroundTruth, detections_R7: np.ndarray, max_detections: int = COCO_DETECTIONS
) -> Detections:
    """Selects the detections that count: finite, the best-scoring of each class and image.

    Args:
        detections_R7: rows (position in dataset.records, class, score, x1, y1, x2, y2).
        max_detections: largest number of detections per class and image.
    """
    rows_R7 = detections_R7[np.isfinite(detections_R7).all(axis=1)].astype(np.float64)
    place_N = np.argsort(truth.order_N)
    image_F, label_F = place_N[rows_R7[:, 0].astype(np.int64)], rows_R7[:, 1].astype(np.int64)
    order_F = np.lexsort((image_F, -rows_R7[:, 2]))
    image_F, label_F, rows_R7 = image_F[order_F], label_F[order_F], rows_R7[order_F]
    kept_F = _rank_within(image_F, label_F) < max_detections
    return Detections(
        image_F[kept_F], label_F[kept_F], rows_R7[kept_F, 2], _to_xywh(rows_R7[kept_F, 3:])
    )


def _concatenate(parts: list[np.ndarray], dtype: type, empty: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.zeros(empty, dtype), *parts]).astype(dtype)


def _to_xywh(corners_X4: np.ndarray) -> np.ndarray:
    """Converts corners to corner and sides, rounded to 1/1000 pixel.

    Files hold two decimals or fewer, so the rounding gives their values back.  Without it the
    noise of float32 corners would decide IoUs that lie exactly on a threshold: on COCO's own
    example it moves mAP by 2e-4.
    """
    xy_X2 = corners_X4[:, :2]
    return np.concatenate([xy_X2, corners_X4[:, 2:] - xy_X2], axis=1).round(3)


def _rank_within(image_F: np.ndarray, label_F: np.ndarray) -> np.ndarray:
    """Ranks each detection within its class and image."""
    group_F = image_F * (1 + label_F.max(initial=0)) + label_F
    order_F = np.argsort(group_F, kind="stable")
    sorted_F = group_F[order_F]
    place_F = np.arange(len(group_F))
    rank_F = np.empty(len(group_F), np.int64)
    rank_F[order_F] = place_F - np.searchsorted(sorted_F, sorted_F)
    return rank_F


def find_overlaps(truth: GroundTruth, detections: Detections) -> Pairs:
    """Finds every pair in one image that overlaps by NEAR or more."""
    images = len(truth.order_N)
    begin_N = np.searchsorted(truth.image_G, np.arange(images))
    count_N = np.bincount(truth.image_G, minlength=images)
    begin_F, count_F = begin_N[detections.image_F], count_N[detections.image_F]
    parts = [Pairs(*(np.zeros(0, kind) for kind in (np.int64, np.int64, float, float)))]
    for chunk in _chunks(count_F):
        detection_P = np.repeat(np.arange(chunk.start, chunk.stop), count_F[chunk])
        ends_F = np.cumsum(count_F[chunk])
        within_P = np.arange(len(detection_P)) - np.repeat(ends_F - count_F[chunk], count_F[chunk])
        object_P = np.repeat(begin_F[chunk], count_F[chunk]) + within_P
        iou_P, overlap_P = _measure_overlap(truth, detections, detection_P, object_P)
        near_P = overlap_P >= NEAR
        parts.append(Pairs(detection_P, object_P, iou_P, overlap_P).of(near_P))
    return Pairs(*(np.concatenate(values) for values in zip(*parts)))


def _chunks(count_F: np.ndarray) -> Iterator[slice]:
    """Splits the detections into runs with about _PAIRS_AT_ONCE pairs."""
    before_F = np.cumsum(count_F) - count_F
    begin = 0
    while begin < len(count_F):
        end = int(np.searchsorted(before_F, before_F[begin] + _PAIRS_AT_ONCE))
        yield slice(begin, max(end, begin + 1))
        begin = max(end, begin + 1)


def _measure_overlap(
    truth: GroundTruth, detections: Detections, detection_P: np.ndarray, object_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes iou_P and overlap_P, in the order of operations of pycocotools' bbIou."""
    x_P, y_P, width_P, height_P = detections.box_F4[detection_P].T
    true_x_P, true_y_P, true_width_P, true_height_P = truth.box_G4[object_P].T
    shared_x_P = np.minimum(x_P + width_P, true_x_P + true_width_P) - np.maximum(x_P, true_x_P)
    shared_y_P = np.minimum(y_P + height_P, true_y_P + true_height_P) - np.maximum(y_P, true_y_P)
    shared_P = np.maximum(shared_x_P, 0) * np.maximum(shared_y_P, 0)
    area_P = width_P * height_P
    union_P = area_P + true_width_P * true_height_P - shared_P
    iou_P = np.divide(shared_P, union_P, out=np.zeros_like(shared_P), where=union_P > 0)
    on_object_P = np.divide(shared_P, area_P, out=np.zeros_like(shared_P), where=area_P > 0)
    return iou_P, np.where(truth.crowd_G[object_P], on_object_P, iou_P)


def match_as_coco(
    truth: GroundTruth, detections: Detections, pairs: Pairs, threshold: float
) -> np.ndarray:
    """Finds the object of each detection by COCO's rules, int64 [F].

    CROWD: the detection lies on a crowd region; NOBODY: it lies on nothing.

    By falling score, each detection takes the object of its class that it overlaps most, by
    `threshold` or more, among the objects not yet taken; if there is none, a crowd region, which
    several detections can share.

    Source: github.com/cocodataset/cocoapi, PythonAPI/pycocotools/cocoeval.py, evaluateImg.
    """
    same_P = detections.label_F[pairs.detection_P] == truth.label_G[pairs.object_P]
    pairs = pairs.of(same_P & (pairs.overlap_P >= min(threshold, 1 - 1e-10)))
    # A detection chooses the last of its pairs: no crowd, most overlap, in a tie the last object.
    order_P = np.lexsort(
        (pairs.object_P, pairs.overlap_P, ~truth.crowd_G[pairs.object_P], pairs.detection_P)
    )
    pairs = pairs.of(order_P)
    match_F = np.full(len(detections.score_F), NOBODY)
    is_taken_G = np.zeros(len(truth.label_G), bool)
    for turn_P in _turns(detections, pairs.detection_P):
        free_P = turn_P[~is_taken_G[pairs.object_P[turn_P]]]
        detection_P = pairs.detection_P[free_P]
        last_P = np.append(detection_P[1:] != detection_P[:-1], True)[: len(detection_P)]
        chosen_P = free_P[last_P]
        object_P = pairs.object_P[chosen_P]
        crowd_P = truth.crowd_G[object_P]
        match_F[pairs.detection_P[chosen_P]] = np.where(crowd_P, CROWD, object_P)
        is_taken_G[object_P[~crowd_P]] = True
    return match_F


def _turns(detections: Detections, detection_P: np.ndarray) -> Iterator[np.ndarray]:
    """Yields positions in P, turn by turn.

    In one turn each class of each image has one detection, so no two want the same object.
    """
    paired_F = np.unique(detection_P)
    turn_F = np.zeros(len(detections.score_F), np.int64)
    turn_F[paired_F] = _rank_within(detections.image_F[paired_F], detections.label_F[paired_F])
    order_P = np.argsort(turn_F[detection_P], kind="stable")
    ends = np.cumsum(np.bincount(turn_F[detection_P]))
    yield from np.split(order_P, ends[:-1]) if len(detection_P) else ()


def match_as_voc(truth: GroundTruth, detections: Detections, pairs: Pairs) -> np.ndarray:
    """Finds the object of each detection, as `match_as_coco`, by PASCAL VOC's rules at IoU 0.5.

    Each detection is assigned to the object of its class that it overlaps most, taken or not; of
    the detections assigned to an object, the one with the highest score has found it.  Detections
    assigned to a difficult object (`crowd_G`) count neither way.  Corners are edges here, where the
    devkit has the last pixel and adds one to each side.

    Source: VOCdevkit, VOCcode/VOCevaldet.m.
    """
    same_P = detections.label_F[pairs.detection_P] == truth.label_G[pairs.object_P]
    pairs = pairs.of(same_P & (pairs.iou_P > 0))
    detection_F, object_F, iou_F = most_overlapped(pairs, pairs.iou_P)
    hit_F = iou_F >= 0.5
    detection_F, object_F = detection_F[hit_F], object_F[hit_F]
    match_F = np.full(len(detections.score_F), NOBODY)
    _, first = np.unique(object_F, return_index=True)  # detection_F rises, so the highest score
    match_F[detection_F[first]] = object_F[first]
    match_F[detection_F[truth.crowd_G[object_F]]] = CROWD
    return match_F


def most_overlapped(pairs: Pairs, by_P: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the detections with a pair, and the object that each overlaps most.

    In a tie, the first object is chosen.
    """
    order_P = np.lexsort((-by_P, pairs.detection_P))
    detection_F, first = np.unique(pairs.detection_P[order_P], return_index=True)
    return detection_F, pairs.object_P[order_P[first]], by_P[order_P[first]]


class Counts(NamedTuple):
    """The number of detections by class and confidence, and of objects by class.

    right_CT, wrong_CT: int64, detections of at least CONFIDENCE_T that found an object, and that
    found none.  objects_C: int64.
    """

    right_CT: np.ndarray
    wrong_CT: np.ndarray
    objects_C: np.ndarray

    @property
    def precision_CT(self) -> np.ndarray:
        """Returns the precision; NaN where no detection reaches the confidence."""
        return _divide(self.right_CT, self.right_CT + self.wrong_CT)

    @property
    def recall_CT(self) -> np.ndarray:
        """Returns the recall; NaN for a class without objects."""
        return _divide(self.right_CT, np.broadcast_to(self.objects_C[:, None], self.right_CT.shape))

    @property
    def f1_CT(self) -> np.ndarray:
        """Returns F1 by class and confidence.

        2 right / (objects + detections); NaN for a class without objects.
        """
        objects_C1 = self.objects_C[:, None]
        total_CT = np.where(objects_C1 > 0, objects_C1 + self.right_CT + self.wrong_CT, 0)
        return _divide(2 * self.right_CT, total_CT)


def _divide(part: np.ndarray, whole_X: np.ndarray) -> np.ndarray:
    return np.divide(part, whole_X, out=np.full(part.shape, np.nan), where=whole_X > 0)


def count_by_confidence(
    truth: GroundTruth, detections: Detections, match_F: np.ndarray, classes: int
) -> Counts:
    """Counts right and wrong detections of each class at or above each confidence.

    Args:
        match_F: result of `match_as_coco`.
    """
    steps = len(CONFIDENCE_T)
    step_F = np.searchsorted(CONFIDENCE_T, detections.score_F, side="right") - 1
    place_F = detections.label_F * steps + step_F.clip(0)

    def count_reaching(chosen_F: np.ndarray) -> np.ndarray:
        counts = np.bincount(place_F[chosen_F], minlength=classes * steps)
        return counts.reshape(classes, steps)[:, ::-1].cumsum(axis=1)[:, ::-1]

    right_F, crowd_F = match_F >= 0, match_F == CROWD
    return Counts(
        count_reaching(right_F), count_reaching(~right_F & ~crowd_F), count_objects(truth, classes)
    )


def count_objects(truth: GroundTruth, classes: int) -> np.ndarray:
    """Counts the objects of each class, crowds left out; int64 [C]."""
    return np.bincount(truth.label_G[~truth.crowd_G], minlength=classes)


def find_best_step(counts: Counts) -> int | None:
    """Returns the position in CONFIDENCE_T of the largest mean F1.

    In a tie, returns the middle one; None if there is no object.
    """
    if not counts.objects_C.any():
        return None
    f1_T = mean_of_measured(counts.f1_CT)
    best = np.flatnonzero(f1_T == f1_T.max())
    return int(best[len(best) // 2])


def compute_operating_points(counts: Counts) -> dict[str, float]:
    """Computes precision, recall and F1 at the best F1, and at confidence 0.25.

    Means over classes with objects.

    Precision is the mean of the classes of which something was found, 0 where nothing was.
    Returns: OPERATING_POINTS, each -1 where the set has no object.
    """
    step = find_best_step(counts)
    if step is None:
        return dict.fromkeys(OPERATING_POINTS, -1.0)
    measured_C = counts.objects_C > 0

    def mean_at(step: int, values_CT: np.ndarray) -> float:
        # Only classes with a detection have a precision; none at all counts as 0.
        mean = float(mean_of_measured(values_CT[measured_C, step]))
        return mean if np.isfinite(mean) else 0.0

    usual_at = default_step()
    return {
        "precision": mean_at(step, counts.precision_CT),
        "recall": mean_at(step, counts.recall_CT),
        "f1": mean_at(step, counts.f1_CT),
        "best_f1_threshold": float(CONFIDENCE_T[step]),
        "precision_at_25": mean_at(usual_at, counts.precision_CT),
        "recall_at_25": mean_at(usual_at, counts.recall_CT),
    }


# Means at the confidence with the best mean F1, that confidence, and means at 0.25.
OPERATING_POINTS = (
    "precision", "recall", "f1", "best_f1_threshold", "precision_at_25", "recall_at_25",
)  # fmt: skip


def default_step() -> int:
    """Returns the position in CONFIDENCE_T of USUAL_THRESHOLD."""
    return int(np.searchsorted(CONFIDENCE_T, USUAL_THRESHOLD))


def mean_of_measured(values_CX: np.ndarray) -> np.ndarray:
    """Averages the values that are not NaN over classes; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's "Mean of empty slice"
        return np.nanmean(values_CX, axis=0)


def right_by_class(label_F: np.ndarray, match_F: np.ndarray, classes: int) -> list[np.ndarray]:
    """Splits the detections by class: True for each that is right.

    Args:
        label_F, match_F: of detections in the order of `Detections`.
    """
    counted_F = match_F != CROWD
    label_F, match_F = label_F[counted_F], match_F[counted_F]
    order_F = np.argsort(label_F, kind="stable")
    ends = np.cumsum(np.bincount(label_F, minlength=classes))
    return np.split(match_F[order_F] >= 0, ends[:-1])


def coco_average_precision(right_F: np.ndarray, objects: int) -> float:
    """Computes COCO's average precision of a class; NaN without objects."""
    if not objects:
        return float("nan")
    envelope_F, recall_F = _best_precision(right_F, objects)
    return float(envelope_F[np.searchsorted(recall_F, RECALL_R, side="left")].mean())


def voc_average_precision(right_F: np.ndarray, objects: int) -> tuple[float, float]:
    """Computes average precision by VOC 2007 and by VOC 2010.

    These are the mean of the best precision at 11 recalls, and the area under the best precision;
    NaN without objects.

    Source: VOCdevkit, VOCcode/VOCevaldet.m and VOCap.m.
    """
    if not objects:
        return float("nan"), float("nan")
    envelope_F, recall_F = _best_precision(right_F, objects)
    eleven = envelope_F[np.searchsorted(recall_F, np.arange(11) / 10, side="left")].mean()
    area = (np.diff(recall_F, prepend=0.0) * envelope_F[:-1]).sum()
    return float(eleven), float(area)


def _best_precision(right_F: np.ndarray, objects: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the best precision from each recall of a class on.

    Args:
        right_F: bool, whether each detection found an object, the surest first.
    Returns: precision [F + 1], 0 after the last; the recalls [F].
    """
    hits_F = right_F.cumsum()
    precision_F = hits_F / np.arange(1, len(right_F) + 1)
    envelope_F = np.maximum.accumulate(precision_F[::-1])[::-1]
    return np.append(envelope_F, 0.0), hits_F / objects

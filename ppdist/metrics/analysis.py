"""Analyses the errors of an evaluation: evaluation.json and its text.

A detector's errors are typed (TIDE): what each type costs, and which class is taken for which.  One
operating point runs through it: `IOU`, and the confidence at which the mean F1 is largest.
docs/evaluation.md describes the file.

F detections, G objects, C classes.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.process import printable
from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.types import DetectionSet
from ppdist.metrics.classification import BEST, Ranking, compute_accuracy
from ppdist.metrics.coco import CocoArrays, coco_arrays, fitness
from ppdist.metrics.matching import (
    CONFIDENCE_T,
    CROWD,
    IOU,
    NOBODY,
    RECALL_R,
    Counts,
    Detections,
    GroundTruth,
    Pairs,
    coco_average_precision,
    collect_objects,
    compute_operating_points,
    count_by_confidence,
    count_objects,
    default_step,
    find_best_step,
    find_overlaps,
    match_as_coco,
    match_as_voc,
    mean_of_measured,
    most_overlapped,
    right_by_class,
    select_detections,
    voc_average_precision,
)
from ppdist.metrics.scored import count_duplicates, scored_images

MAX_MATRIX_ROWS = 200  # largest confusion matrix, in rows, that is written cell by cell
_MOST_CELLS = 20_000
MISSED, EXTRA = "(missed)", "(extra)"  # names of the last column and row of the matrix
MAX_CURVES = 100  # classes with curves at most; a larger set has them of its commonest classes
_CURVES_OF_MANY = 20
_EVERY = 10  # of CONFIDENCE_T's steps is kept: 0.01 is fine enough for a curve
_IMAGES = 12  # listed as worst, and as best
_BOXES = 100  # true and predicted boxes listed for such an image
_DIGITS = 4
_NAME = 24  # characters of a class name in a table


class Kind(IntEnum):
    """The error type of a detection.

    LOCALISATION: on an object of its class, but overlapping it by less than 0.5 (at least 0.1).
    CLASS: on an object of another class, by 0.5 or more.  DUPLICATE: on an object of its class
    that a detection with a higher score found.  BACKGROUND: none of these.  Detections with both
    the wrong location and the wrong class (`Both` in the paper) count here, too, because only
    removing them fixes the error.
    IGNORED: on a crowd region.
    """

    CORRECT = 0
    LOCALISATION = 1
    CLASS = 2
    DUPLICATE = 3
    BACKGROUND = 4
    IGNORED = 5


class Matches(NamedTuple):
    """The matches of detections and objects at IoU 0.5, at the operating point.

    match_F: object that each detection found (`match_as_coco`).  kind_F: `Kind` of each detection.
    about_F: object that each detection is about, found or not; NOBODY: none.  confident_F: True
    where the score reaches the confidence threshold.
    """

    truth: GroundTruth
    detections: Detections
    match_F: np.ndarray
    kind_F: np.ndarray
    about_F: np.ndarray
    confident_F: np.ndarray


def analyse(
    dataset: DetectionSet,
    results: np.ndarray | Ranking,
    step: int | None = None,
    max_detections: int = COCO_DETECTIONS,
) -> dict[str, Any]:
    """Computes the content of evaluation.json; plain JSON.

    Args:
        dataset, max_detections: as in `ppdist.metrics.coco.evaluate_boxes`.
        results: detections_R7 as there, or the ranking of a classifier.
        step: number of steps for which the model was trained; None: unknown.
    """
    if isinstance(results, Ranking):
        return _analyse_classes(dataset, results, step)
    return _analyse_boxes(dataset, results, step, max_detections)


def _analyse_boxes(
    dataset: DetectionSet, detections_R7: np.ndarray, step: int | None, max_detections: int
) -> dict[str, Any]:
    classes = len(dataset.class_names)
    truth = collect_objects(dataset)
    detections = select_detections(truth, detections_R7, max_detections)
    pairs = find_overlaps(truth, detections)
    match_F = match_as_coco(truth, detections, pairs, IOU)
    kind_F, about_F = classify_errors(truth, detections, pairs, match_F)
    counts = count_by_confidence(truth, detections, match_F, classes)
    best = find_best_step(counts)
    # A set without objects has no best F1; 0.5 is as good as any.
    confidence = CONFIDENCE_T[len(CONFIDENCE_T) // 2 if best is None else best]
    confident_F = detections.score_F >= confidence
    matches = Matches(truth, detections, match_F, kind_F, about_F, confident_F)
    arrays = coco_arrays(truth, detections, classes, max_detections)
    voc_rights = right_by_class(detections.label_F, match_as_voc(truth, detections, pairs), classes)
    voc_C2 = np.array([*map(voc_average_precision, voc_rights, counts.objects_C.tolist())]).reshape(
        -1, 2
    )
    coco = arrays.summary()
    voc_2 = mean_of_measured(voc_C2)
    content = {
        "step": step,
        **scored_images(dataset),
        "duplicate_boxes": count_duplicates(dataset),
        "class_names": list(dataset.class_names),
        "metrics": {
            **{name: _or_none(value) for name, value in coco.items()},
            "fitness": _or_none(fitness(coco)),
            **{name: _or_none(value) for name, value in compute_operating_points(counts).items()},
            "VOC_11_point": voc_2[0],
            "VOC_area": voc_2[1],
        },
        "per_class": _per_class(dataset, truth, arrays, counts, voc_C2),
        "curves": _rounded(_curves(arrays, counts)),
        "confusion": {
            "iou": IOU,
            "confidence": confidence,
            **confusion_table(
                *confusion_pairs(truth, detections, kind_F, about_F, confident_F, classes),
                classes + 1,
            ),
        },
        "errors": {
            "counts": count_kinds(truth, kind_F, about_F, confident_F),
            "AP50_gain": compute_gains(truth, detections, kind_F, about_F, classes),
        },
        **_worst_and_best(dataset, matches),
    }
    return to_json_types(content)


def _analyse_classes(dataset: DetectionSet, ranking: Ranking, step: int | None) -> dict[str, Any]:
    """Computes the content of a classifier's evaluation.json; plain JSON.

    Returns: `metrics`; `per_class`: images, their top1 and top5, precision (fraction of the images
        predicted as the class that belong to it); `confusion`, see `confusion_table`; images where
        the model gave no number are not in it.
    """
    classes = len(dataset.class_names)
    labels_N = np.array([dataset.records[int(i)].labels_M[0] for i in ranking.index_N], np.int64)
    # An image whose probabilities are not finite has no predicted class.
    ranked_N = ranking.place_N < max(classes, BEST)
    true_K, called_K = labels_N[ranked_N], ranking.labels_NK[ranked_N, 0]

    def share_by_class(part_X: np.ndarray, total_X: np.ndarray) -> list[float | None]:
        """Divides each class's count in `part_X` by that in `total_X`; None where that is 0."""
        part_C, total_C = (np.bincount(label_X, minlength=classes) for label_X in (part_X, total_X))
        return [float(part / total) if total else None for part, total in zip(part_C, total_C)]

    columns = {
        "name": dataset.class_names,
        "images": np.bincount(labels_N, minlength=classes).tolist(),
        "top1": share_by_class(labels_N[ranking.place_N < 1], labels_N),
        "top5": share_by_class(labels_N[ranking.place_N < BEST], labels_N),
        "precision": share_by_class(true_K[true_K == called_K], called_K),
    }
    return {
        "step": step,
        **scored_images(dataset),
        "class_names": list(dataset.class_names),
        "metrics": compute_accuracy(ranking),
        "per_class": [dict(zip(columns, row)) for row in zip(*columns.values())],
        "confusion": confusion_table(true_K, called_K, classes),
    }


def classify_errors(
    truth: GroundTruth, detections: Detections, pairs: Pairs, match_F: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the error type of each detection and the object it is about; int64 [F].

    Args:
        match_F: result of `match_as_coco` at IOU.

    Source: Bolya et al. 2020 (TIDE), arXiv:2008.08115, section 2.2, tried in the order of its
        reference implementation: localisation, class, duplicate.
    """
    # Detections on a crowd are marked IGNORED last, whatever else they overlap.
    pairs = pairs.of(~truth.crowd_G[pairs.object_P])
    same_P = detections.label_F[pairs.detection_P] == truth.label_G[pairs.object_P]
    kind_F = np.full(len(match_F), int(Kind.BACKGROUND))
    about_F = np.full(len(match_F), NOBODY)
    same_class_F, same_object_F, same_iou_F = most_overlapped(pairs.of(same_P), pairs.iou_P[same_P])
    other_F, other_object_F, other_iou_F = most_overlapped(pairs.of(~same_P), pairs.iou_P[~same_P])
    for kind, is_kind_F, detection_F, object_F in (  # the last type that fits stays
        (Kind.DUPLICATE, same_iou_F >= IOU, same_class_F, same_object_F),
        (Kind.CLASS, other_iou_F >= IOU, other_F, other_object_F),
        (Kind.LOCALISATION, same_iou_F < IOU, same_class_F, same_object_F),
    ):
        kind_F[detection_F[is_kind_F]] = kind
        about_F[detection_F[is_kind_F]] = object_F[is_kind_F]
    right_F = match_F >= 0
    kind_F[right_F], about_F[right_F] = Kind.CORRECT, match_F[right_F]
    kind_F[match_F == CROWD], about_F[match_F == CROWD] = Kind.IGNORED, NOBODY
    return kind_F, about_F


def find_missed(truth: GroundTruth, kind_F: np.ndarray, about_F: np.ndarray) -> np.ndarray:
    """Finds the objects that no detection is about; bool [G]."""
    is_seen_G = truth.crowd_G.copy()
    is_seen_G[about_F[about_F >= 0]] = True
    return ~is_seen_G


def count_kinds(
    truth: GroundTruth, kind_F: np.ndarray, about_F: np.ndarray, confident_F: np.ndarray
) -> dict[str, int]:
    """Counts the detections of each error type, and the missed objects.

    Args: confident_F: bool, True for the detections that count.
    """
    count = np.bincount(kind_F[confident_F], minlength=len(Kind))
    counts = {kind.name.lower(): int(count[kind]) for kind in Kind if kind != Kind.IGNORED}
    return {
        **counts,
        "missed": int(find_missed(truth, kind_F[confident_F], about_F[confident_F]).sum()),
    }


def compute_gains(
    truth: GroundTruth,
    detections: Detections,
    kind_F: np.ndarray,
    about_F: np.ndarray,
    classes: int,
) -> dict[str, float | None]:
    """Computes the gain in mAP50 if one error type were fixed and all others left as they are.

    All detections count, however unsure.  A wrong place or class is corrected where no detection
    found the object; of several about one object only the highest-scoring one is corrected, and the
    others are left out.  Duplicates and background are left out; missed objects are not asked for.

    Returns: None for each type where the set has no object.
    Source: as `classify_errors`, section 2.3, and its reference implementation (tidecv 1.0.1), with
        COCO's recalls, which it takes a last digit differently.
    """
    objects_C = count_objects(truth, classes)
    match_F = np.where(kind_F == Kind.CORRECT, about_F, NOBODY)
    match_F[kind_F == Kind.IGNORED] = CROWD

    def mean_precision(
        label_F: np.ndarray, match_F: np.ndarray, objects_C: np.ndarray = objects_C
    ) -> float:
        rights = right_by_class(label_F, match_F, classes)
        values = [coco_average_precision(right, n) for right, n in zip(rights, objects_C.tolist())]
        return float(mean_of_measured(np.array([values]).T)[0])

    # For each object not found, the highest-scoring detection of wrong location or class is fixed.
    found_G = np.zeros(len(truth.label_G), bool)
    found_G[about_F[kind_F == Kind.CORRECT]] = True
    wrong_F = np.flatnonzero((kind_F == Kind.LOCALISATION) | (kind_F == Kind.CLASS))
    wrong_F = wrong_F[~found_G[about_F[wrong_F]]]
    mendable_F = wrong_F[np.unique(about_F[wrong_F], return_index=True)[1]]

    def mended_precision(kind: Kind) -> float:
        """Returns mAP50 with one type fixed.  CROWD also marks detections to ignore."""
        new_match_F, label_F = np.where(kind_F == kind, CROWD, match_F), detections.label_F.copy()
        put_right_F = mendable_F[kind_F[mendable_F] == kind]
        new_match_F[put_right_F] = about_F[put_right_F]
        label_F[put_right_F] = truth.label_G[about_F[put_right_F]]
        return mean_precision(label_F, new_match_F)

    wrong = (Kind.LOCALISATION, Kind.CLASS, Kind.DUPLICATE, Kind.BACKGROUND)
    if not objects_C.any():
        return dict.fromkeys((*(kind.name.lower() for kind in wrong), "missed"))
    before = mean_precision(detections.label_F, match_F)
    gains: dict[str, float | None] = {
        kind.name.lower(): mended_precision(kind) - before for kind in wrong
    }
    asked_for = ~find_missed(truth, kind_F, about_F) & ~truth.crowd_G
    fewer_C = np.bincount(truth.label_G[asked_for], minlength=classes)
    gains["missed"] = mean_precision(detections.label_F, match_F, fewer_C) - before
    return gains


def confusion_pairs(
    truth: GroundTruth, detections: Detections, kind_F: np.ndarray, about_F: np.ndarray,
    confident_F: np.ndarray, classes: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Pairs the true and the detected class of objects and detections, each counted once.

    An object gets the class of its correct detection, else of the highest-scoring detection of a
    wrong class, else background: it is missed.  A detection that gives no
    object its class has the true class background: it is extra.  Types are those of
    `classify_errors`.

    Args: confident_F: bool, True for the detections that count.
    Returns: int64 [K], [K].
    """
    label_F, kind_F, about_F = (
        detections.label_F[confident_F],
        kind_F[confident_F],
        about_F[confident_F],
    )
    # Detections are sorted by score, and a stable sort puts the correct ones before them.
    naming_F = np.flatnonzero((kind_F == Kind.CORRECT) | (kind_F == Kind.CLASS))
    naming_F = naming_F[np.argsort(kind_F[naming_F] == Kind.CLASS, kind="stable")]
    naming_F = naming_F[np.unique(about_F[naming_F], return_index=True)[1]]
    true_F = np.full(len(kind_F), classes)
    true_F[naming_F] = truth.label_G[about_F[naming_F]]
    missed_G = ~truth.crowd_G
    missed_G[about_F[naming_F]] = False
    counted_F, missed_K = kind_F != Kind.IGNORED, truth.label_G[missed_G]
    true_K = np.append(true_F[counted_F], missed_K)
    return true_K, np.append(label_F[counted_F], np.full(len(missed_K), classes))


def confusion_table(true_K: np.ndarray, called_K: np.ndarray, size: int) -> dict[str, Any]:
    """Counts how often each true class was predicted as which class.

    Args:
        true_K, called_K: classes in [0, size).
    Returns: `counts`, int [size][size], rows are true; or, of more than MAX_MATRIX_ROWS rows,
        because the whole grows with their square: `cells`, (true, called, count) of the 20,000
        largest, the largest first, and `true_counts`, int [size], the sums of whole rows.
    """
    cells, counts = np.unique(true_K * size + called_K, return_counts=True)
    if size <= MAX_MATRIX_ROWS:
        matrix = np.zeros(size * size, np.int64)
        matrix[cells] = counts
        return {"counts": matrix.reshape(size, size).tolist()}
    largest = np.argsort(-counts, kind="stable")[:_MOST_CELLS]
    rows = np.stack([cells[largest] // size, cells[largest] % size, counts[largest]], axis=1)
    return {"cells": rows.tolist(), "true_counts": np.bincount(true_K, minlength=size).tolist()}


def counts_objects_twice(evaluation: Mapping[str, Any]) -> bool:
    """Returns True if rows of the confusion matrix exceed their objects, as in earlier versions."""
    table, rows = evaluation.get("confusion") or {}, evaluation.get("per_class") or ()
    sums = table.get("true_counts") or [sum(row) for row in table.get("counts") or ()]
    return any(total > (row.get("objects") or total) for row, total in zip(rows, sums))


def _per_class(
    dataset: DetectionSet,
    truth: GroundTruth,
    arrays: CocoArrays,
    counts: Counts,
    voc_C2: np.ndarray,
) -> list[dict[str, Any]]:
    """Builds a row for each class.

    All numbers of a class without objects are None; so is precision if nothing was detected.
    """
    classes = len(dataset.class_names)
    counted_G = ~truth.crowd_G
    # A cell stands for a class in an image, so that an image counts once for each of its classes.
    cells = np.unique(truth.image_G[counted_G] * classes + truth.label_G[counted_G])
    images_C = np.bincount(cells % classes, minlength=classes) if classes else cells
    step, usual_at = find_best_step(counts) or 0, default_step()
    at_points = {  # each is computed for all confidences at once
        "precision": counts.precision_CT[:, step],
        "recall": counts.recall_CT[:, step],
        "f1": counts.f1_CT[:, step],
        "precision_at_25": counts.precision_CT[:, usual_at],
        "recall_at_25": counts.recall_CT[:, usual_at],
    }
    rows = []
    for label, name in enumerate(dataset.class_names):
        row: dict[str, Any] = {"name": name, "objects": counts.objects_C[label]}
        row["images"] = images_C[label]
        row |= {key: _or_none(value) for key, value in arrays.of_class(label).items()}
        row |= dict(zip(("VOC_11_point", "VOC_area"), voc_C2[label]))
        row |= dict.fromkeys(at_points)
        if counts.objects_C[label] > 0:
            row |= {key: value_C[label] for key, value_C in at_points.items()}
        rows.append(row)
    return rows


def _curves(arrays: CocoArrays, counts: Counts) -> dict[str, Any]:
    """Computes curves by confidence and, interpolated as COCO does, by recall.

    `curve_classes` lists the classes of the rows.  The means are over all classes that have
    objects.
    """
    classes = len(counts.objects_C)
    class_indices = np.arange(classes)
    if classes > MAX_CURVES:
        class_indices = np.sort(np.argsort(-counts.objects_C, kind="stable")[:_CURVES_OF_MANY])
    precision_CR = arrays.precision_TRCAM[0, :, :, 0, -1].T
    # COCO's -1 would pull the means down; NaN is left out of them.
    precision_CR = np.where(precision_CR > -1, precision_CR, np.nan)
    measured_C = counts.objects_C > 0
    by_confidence = {
        "precision": counts.precision_CT[:, ::_EVERY],
        "recall": counts.recall_CT[:, ::_EVERY],
        "f1": counts.f1_CT[:, ::_EVERY],
    }
    return {
        "curve_classes": class_indices,
        "confidence_T": CONFIDENCE_T[::_EVERY],
        **{f"{name}_CT": values[class_indices] for name, values in by_confidence.items()},
        **{
            f"mean_{name}_T": mean_of_measured(values[measured_C])
            for name, values in by_confidence.items()
        },
        "recall_R": RECALL_R,
        "precision_CR": precision_CR[class_indices],
        "mean_precision_R": mean_of_measured(precision_CR[measured_C]),
    }


def _worst_and_best(dataset: DetectionSet, matches: Matches) -> dict[str, list[dict[str, Any]]]:
    """Lists the images with the most and with the fewest errors.

    In a tie, images with fewer (worst) or more (best) objects found come first.  Images with
    neither objects nor confident detections are in neither list.
    """
    truth, detections = matches.truth, matches.detections
    images = len(truth.order_N)

    def per_image(image_X: np.ndarray) -> np.ndarray:
        return np.bincount(image_X, minlength=images)

    objects_N = per_image(truth.image_G[~truth.crowd_G])
    right_N = per_image(detections.image_F[matches.confident_F & (matches.match_F >= 0)])
    wrong_N = per_image(detections.image_F[matches.confident_F & (matches.match_F == NOBODY)])
    mistakes_N = objects_N - right_N + wrong_N
    listed_N = np.flatnonzero((objects_N > 0) | (wrong_N > 0))
    # `lexsort` takes its last key first: most mistakes, then fewest objects found.
    by_mistakes_N = listed_N[np.lexsort((right_N[listed_N], -mistakes_N[listed_N]))]

    def entry(place: int) -> dict[str, Any]:
        return {
            "file": dataset.records[truth.order_N[place]].path,
            "objects": objects_N[place],
            "found": right_N[place],
            "missed": objects_N[place] - right_N[place],
            "wrong": wrong_N[place],
            **_boxes(matches, place),
        }

    # A small set is divided, so that no image is among the worst and among the best.
    count = len(by_mistakes_N) // 2 if len(by_mistakes_N) < 2 * _IMAGES else _IMAGES
    worst = by_mistakes_N[: max(count, min(1, len(by_mistakes_N)))]
    best = by_mistakes_N[::-1][:count]
    return {"worst": [entry(n) for n in worst], "best": [entry(n) for n in best]}


def _boxes(matches: Matches, place: int) -> dict[str, list]:
    """Lists the boxes of one image, in original pixels.

    Returns: `true`, rows of class, x1, y1, x2, y2 and whether it was found; `predicted`, rows of
        class, score, x1, y1, x2, y2 and what the detection is, a name of `Kind` in lower case.
    """
    truth, detections = matches.truth, matches.detections
    is_found_G = np.zeros(len(truth.label_G), bool)
    is_found_G[matches.match_F[matches.confident_F & (matches.match_F >= 0)]] = True
    first, last = np.searchsorted(truth.image_G, [place, place + 1])
    objects = [g for g in range(first, last) if not truth.crowd_G[g]][:_BOXES]
    listed = np.flatnonzero(matches.confident_F & (detections.image_F == place))
    listed = listed[matches.match_F[listed] != CROWD][:_BOXES]
    return {
        "true": [
            [int(truth.label_G[g]), *_corners(truth.box_G4[g]), bool(is_found_G[g])]
            for g in objects
        ],
        "predicted": [
            [
                int(detections.label_F[f]),
                round(float(detections.score_F[f]), _DIGITS),
                *_corners(detections.box_F4[f]),
                Kind(int(matches.kind_F[f])).name.lower(),
            ]
            for f in listed
        ],
    }


def _corners(box_4: np.ndarray) -> list[float]:
    x, y, width, height = box_4.tolist()
    return [round(value, 1) for value in (x, y, x + width, y + height)]


def _rounded(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.round(_DIGITS) if isinstance(value, np.ndarray) else value
        for key, value in content.items()
    }


def _or_none(value: float) -> float | None:
    """Returns None for -1, which means that there was nothing to measure."""
    return None if value < 0 else value


def to_json_types(content: Any) -> Any:
    """Converts to JSON types: arrays to lists, NaN and infinity to None."""
    if isinstance(content, dict):
        return {key: to_json_types(value) for key, value in content.items()}
    if isinstance(content, np.ndarray | list | tuple):
        values = content.tolist() if isinstance(content, np.ndarray) else content
        return [to_json_types(value) for value in values]
    if isinstance(content, np.generic):
        content = content.item()
    return None if isinstance(content, float) and not np.isfinite(content) else content


# Key of `per_class` -> heading, in the order of a table's columns.
CLASS_HEADINGS = {
    "objects": "objects", "images": "images",
    "top1": "top1", "top5": "top5",
    "precision": "P", "recall": "R", "f1": "F1",
    "precision_at_25": "P at .25", "recall_at_25": "R at .25",
    "AP50": "AP50", "AP": "AP", "AP75": "AP75",
    "AP_small": "small", "AP_medium": "medium", "AP_large": "large", "AR100": "AR100",
    "VOC_11_point": "VOC 11", "VOC_area": "VOC area",
}  # fmt: skip
# Keys of a table of 80 columns -> the metric that is their mean.
_NARROW = {
    "images": "", "objects": "",
    "top1": "top1", "top5": "top5",
    "precision": "precision", "recall": "recall",
    "precision_at_25": "precision_at_25", "recall_at_25": "recall_at_25",
    "AP50": "mAP50", "AP": "mAP",
}  # fmt: skip


def class_table(evaluation: Mapping[str, Any], max_classes: int | None = None) -> str:
    """Formats images, objects, P, R and AP by class.

    Args:
        evaluation: content of evaluation.json, of a detector or classifier.
        max_classes: number of classes to show, the weakest ones if there are more; None: all.
    """
    metrics, rows = evaluation["metrics"], evaluation["per_class"]
    keys = [key for key in _NARROW if any(key in row for row in rows)]
    score = "AP" if "AP" in keys else "top1"
    shown_rows = [row for row in rows if row.get(score) is not None] if max_classes else rows
    left_out = len(rows) - len(shown_rows)
    if max_classes and len(shown_rows) > max_classes:
        left_out += len(shown_rows) - max_classes
        shown_rows = sorted(shown_rows, key=lambda row: row[score])[:max_classes]
    means = {key: metrics.get(name) for key, name in _NARROW.items()} | {
        "objects": sum(row.get("objects") or 0 for row in rows),
        "images": evaluation["images"],
    }
    lines = [
        (row["name"], [_format_cell(row.get(key), 3) for key in keys])
        for row in ({"name": "all", **means}, *shown_rows)
    ]
    text = _table("class", lines, [CLASS_HEADINGS[key] for key in keys])
    if left_out:
        noun = "class" if left_out == 1 else "classes"
        text += f"{left_out} more {noun} not shown; these are the weakest with objects\n"
    threshold = metrics.get("best_f1_threshold")
    if threshold is not None and metrics.get("f1"):
        text += f"P and R at IoU 0.5: confidence {threshold:.3f} (best mean F1) and 0.25\n"
    return text


def _table(head: str, rows: Any, columns: Sequence[str] = ("value",)) -> str:
    """Formats a table.

    Args: rows: (name, value or values).
    """
    lines = [(head, *columns)]
    for name, values in rows:
        several = values if isinstance(values, list | tuple) else [values]
        lines.append((printable(str(name)).replace("\n", " ")[:_NAME], *map(_format_cell, several)))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], ""])


def _format_cell(value: float | str | None, digits: int = _DIGITS) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)

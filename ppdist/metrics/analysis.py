"""What an evaluation says besides its headline: evaluation.json (described in docs/evaluation.md).

One operating point runs through it: IoU 0.5, and the confidence at which the mean F1 is largest.
"""

from typing import Any, NamedTuple

import numpy as np

from ppdist.data.sample import DetectionSet
from ppdist.metrics.coco import CocoArrays, coco_arrays
from ppdist.metrics.confusion import confusion_table
from ppdist.metrics.curves import (
    CONFIDENCE_T,
    RECALL_R,
    Counts,
    at_best_confidence,
    best_step,
    calibration,
    count_by_confidence,
    mean_of_measured,
    objects_of,
    right_by_class,
    voc_average_precision,
)
from ppdist.metrics.matching import (
    CROWD,
    NOBODY,
    Found,
    Truth,
    found_of,
    match_as_coco,
    match_as_voc,
    overlaps,
    truth_of,
)
from ppdist.metrics.mistakes import IOU, Kind, confused, count_kinds, gains, kinds_of

MAX_CURVES = 100  # classes; of a set with more, those with the most objects have curves
_CURVES_OF_MANY = 20
_EVERY = 10  # of CONFIDENCE_T: steps of 0.01 are enough for a curve
_IMAGES = 12  # worst and best
_BOXES = 100  # true and predicted ones listed of such an image
_DIGITS = 4


class Matched(NamedTuple):
    """Who found what at IoU 0.5, and which detections are sure enough for the operating point."""

    truth: Truth
    found: Found
    match_F: np.ndarray
    kind_F: np.ndarray
    about_F: np.ndarray
    sure_F: np.ndarray


def analyse(
    dataset: DetectionSet, detections_R7: np.ndarray, step: int | None = None
) -> dict[str, Any]:
    """The content of evaluation.json, on one rank alone; plain JSON, None for what has no value.

    Args:
        dataset, detections_R7: as in `ppdist.metrics.coco.evaluate_boxes`.
        step: how many steps the model was trained; None: unknown.
    """
    classes = len(dataset.class_names)
    truth = truth_of(dataset)
    found = found_of(truth, detections_R7)
    pairs = overlaps(truth, found)
    match_F = match_as_coco(truth, found, pairs, IOU)
    kind_F, about_F = kinds_of(truth, found, pairs, match_F)
    counts = count_by_confidence(truth, found, match_F, classes)
    best = best_step(counts)
    confidence = CONFIDENCE_T[len(CONFIDENCE_T) // 2 if best is None else best]
    sure_F = found.score_F >= confidence
    matched = Matched(truth, found, match_F, kind_F, about_F, sure_F)
    arrays = coco_arrays(truth, found, classes)
    voc_C2 = _voc(truth, found, match_as_voc(truth, found, pairs), classes)
    coco = arrays.summary()
    voc_2 = mean_of_measured(voc_C2)
    content = {
        "step": step,
        "images": len(dataset.records),
        "class_names": list(dataset.class_names),
        "metrics": {
            **{name: _or_none(value) for name, value in coco.items()},
            "fitness": _or_none(0.1 * coco["mAP50"] + 0.9 * coco["mAP"]),
            **{name: _or_none(value) for name, value in at_best_confidence(counts).items()},
            "VOC_11_point": voc_2[0],
            "VOC_area": voc_2[1],
        },
        "per_class": _per_class(dataset, truth, arrays, counts, voc_C2),
        "curves": _rounded(_curves(arrays, counts)),
        "confusion": {
            "iou": IOU,
            "confidence": confidence,
            **confusion_table(
                *confused(truth, found, pairs, match_F, sure_F, classes), classes + 1
            ),
        },
        "calibration": _rounded(calibration(found, match_F)),
        "errors": {
            "counts": count_kinds(truth, kind_F, about_F, sure_F),
            "AP50_gain": gains(truth, found, kind_F, about_F, classes),
        },
        **_worst_and_best(dataset, matched),
    }
    return plain(content)


def plain(content: Any) -> Any:
    """The same of what JSON has: lists for arrays, None for what is not a number."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, np.ndarray | list | tuple):
        values = content.tolist() if isinstance(content, np.ndarray) else content
        return [plain(value) for value in values]
    if isinstance(content, np.generic):
        content = content.item()
    return None if isinstance(content, float) and not np.isfinite(content) else content


def _rounded(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.round(_DIGITS) if isinstance(value, np.ndarray) else value
        for key, value in content.items()
    }


def _or_none(value: float) -> float | None:
    """-1 stands for nothing to measure."""
    return None if value < 0 else value


def _voc(truth: Truth, found: Found, match_F: np.ndarray, classes: int) -> np.ndarray:
    """Average precision of each class, 11 points and area; [C, 2], NaN without objects."""
    rights = right_by_class(found.label_F, match_F, classes)
    objects = objects_of(truth, classes).tolist()
    values = [voc_average_precision(right_F, count) for right_F, count in zip(rights, objects)]
    return np.array(values).reshape(-1, 2)


def _per_class(
    dataset: DetectionSet, truth: Truth, arrays: CocoArrays, counts: Counts, voc_C2: np.ndarray
) -> list[dict[str, Any]]:
    """Of a class without objects all numbers are None, precision also where nothing was found."""
    classes = len(dataset.class_names)
    real_G = ~truth.crowd_G
    cells = np.unique(truth.image_G[real_G] * classes + truth.label_G[real_G])
    images_C = np.bincount(cells % classes, minlength=classes) if classes else cells
    step = best_step(counts)
    at_best = {}  # each is computed for all confidences at once
    if step is not None:
        at_best = {
            "precision": counts.precision_CT[:, step],
            "recall": counts.recall_CT[:, step],
            "f1": counts.f1_CT[:, step],
        }
    rows = []
    for label, name in enumerate(dataset.class_names):
        row: dict[str, Any] = {"name": name, "objects": counts.objects_C[label]}
        row["images"] = images_C[label]
        row |= {key: _or_none(value) for key, value in arrays.of_class(label).items()}
        row |= dict(zip(("VOC_11_point", "VOC_area"), voc_C2[label]))
        row |= dict.fromkeys(("precision", "recall", "f1"))
        if counts.objects_C[label] > 0:
            row |= {key: value_C[label] for key, value_C in at_best.items()}
        rows.append(row)
    return rows


def _curves(arrays: CocoArrays, counts: Counts) -> dict[str, Any]:
    """By confidence and, interpolated as COCO does, by recall; `curve_classes` says which rows
    there are.  The means are over all classes that have objects."""
    classes = len(counts.objects_C)
    chosen = np.arange(classes)
    if classes > MAX_CURVES:
        chosen = np.sort(np.argsort(-counts.objects_C, kind="stable")[:_CURVES_OF_MANY])
    precision_CR = arrays.precision_TRCAM[0, :, :, 0, -1].T
    precision_CR = np.where(precision_CR > -1, precision_CR, np.nan)
    some_C = counts.objects_C > 0
    by_confidence = {
        "precision": counts.precision_CT[:, ::_EVERY],
        "recall": counts.recall_CT[:, ::_EVERY],
        "f1": counts.f1_CT[:, ::_EVERY],
    }
    return {
        "curve_classes": chosen,
        "confidence_T": CONFIDENCE_T[::_EVERY],
        **{f"{name}_CT": values[chosen] for name, values in by_confidence.items()},
        **{
            f"mean_{name}_T": mean_of_measured(values[some_C])
            for name, values in by_confidence.items()
        },
        "recall_R": RECALL_R,
        "precision_CR": precision_CR[chosen],
        "mean_precision_R": mean_of_measured(precision_CR[some_C]),
    }


def _worst_and_best(dataset: DetectionSet, matched: Matched) -> dict[str, list[dict[str, Any]]]:
    """Images with the most and with the fewest mistakes (missed objects and wrong detections); of
    equals those with fewer, or more, objects found come first.  Images with neither objects nor
    sure detections are in no list."""
    truth, found = matched.truth, matched.found
    images = len(truth.order_N)

    def per_image(image_X: np.ndarray) -> np.ndarray:
        return np.bincount(image_X, minlength=images)

    objects_N = per_image(truth.image_G[~truth.crowd_G])
    right_N = per_image(found.image_F[matched.sure_F & (matched.match_F >= 0)])
    wrong_N = per_image(found.image_F[matched.sure_F & (matched.match_F == NOBODY)])
    mistakes_N = objects_N - right_N + wrong_N
    some_N = np.flatnonzero((objects_N > 0) | (wrong_N > 0))
    by_mistakes_N = some_N[np.lexsort((right_N[some_N], -mistakes_N[some_N]))]

    def entry(place: int) -> dict[str, Any]:
        return {
            "file": dataset.records[truth.order_N[place]].path,
            "objects": objects_N[place],
            "found": right_N[place],
            "missed": objects_N[place] - right_N[place],
            "wrong": wrong_N[place],
            **_boxes(matched, place),
        }

    some = len(by_mistakes_N) // 2 if len(by_mistakes_N) < 2 * _IMAGES else _IMAGES
    worst = by_mistakes_N[: max(some, min(1, len(by_mistakes_N)))]
    best = by_mistakes_N[::-1][:some]
    return {"worst": [entry(n) for n in worst], "best": [entry(n) for n in best]}


def _boxes(matched: Matched, place: int) -> dict[str, list]:
    """What is on one image, for whoever draws it, pixels of the original image: `true`, rows of
    class, x1, y1, x2, y2 and whether it was found; `predicted`, rows of class, score, x1, y1, x2,
    y2 and what the detection is, a name of `Kind` in lower case."""
    truth, found = matched.truth, matched.found
    surely_G = np.zeros(len(truth.label_G), bool)
    surely_G[matched.match_F[matched.sure_F & (matched.match_F >= 0)]] = True
    first, last = np.searchsorted(truth.image_G, [place, place + 1])
    things = [g for g in range(first, last) if not truth.crowd_G[g]][:_BOXES]
    seen = np.flatnonzero(matched.sure_F & (found.image_F == place))
    seen = seen[matched.match_F[seen] != CROWD][:_BOXES]
    return {
        "true": [
            [int(truth.label_G[g]), *_corners(truth.box_G4[g]), bool(surely_G[g])] for g in things
        ],
        "predicted": [
            [
                int(found.label_F[f]),
                round(float(found.score_F[f]), _DIGITS),
                *_corners(found.box_F4[f]),
                Kind(int(matched.kind_F[f])).name.lower(),
            ]
            for f in seen
        ],
    }


def _corners(box_4: np.ndarray) -> list[float]:
    x, y, width, height = box_4.tolist()
    return [round(value, 1) for value in (x, y, x + width, y + height)]

"""Error analysis of an evaluation: evaluation.json and its text.

Of a detector: error types of detections (TIDE), what each type costs, and which class is taken for
which.  One operating point runs through it: `IOU`, and the confidence at which the mean F1 is
largest.  docs/evaluation.md describes the file.

F detections, G objects, C classes.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.process import printable
from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.types import DetectionSet
from ppdist.metrics.classification import BEST, Ranking, accuracy
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
    best_step,
    coco_average_precision,
    count_by_confidence,
    found_of,
    match_as_coco,
    match_as_voc,
    mean_of_measured,
    most_overlapped,
    objects_of,
    operating_points,
    overlaps,
    right_by_class,
    truth_of,
    usual_step,
    voc_average_precision,
)
from ppdist.metrics.scored import count_duplicates, scored_images

MOST_WHOLE = 200  # rows of a matrix that is written field by field
_MOST_CELLS = 20_000
MAX_CURVES = 100  # classes; of a set with more, those with the most objects have curves
_CURVES_OF_MANY = 20
_EVERY = 10  # of CONFIDENCE_T: steps of 0.01 are enough for a curve
_IMAGES = 12  # worst and best
_BOXES = 100  # true and predicted ones listed of such an image
_DIGITS = 4
_NAME = 24  # characters of a class name


class Kind(IntEnum):
    """What a detection is.

    LOCALISATION: on an object of its class, but overlapping it by less than 0.5 (at least 0.1).
    CLASS: on an object of another class, by 0.5 or more.  DUPLICATE: on an object of its class
    that a surer one found.  BACKGROUND: none of these; off its place and of the wrong class at
    once (`Both` in the paper) is here, too, because only leaving it out mends it.  IGNORED: on a
    crowd.
    """

    CORRECT = 0
    LOCALISATION = 1
    CLASS = 2
    DUPLICATE = 3
    BACKGROUND = 4
    IGNORED = 5


class Matched(NamedTuple):
    """Who found what at IoU 0.5, at the operating point."""

    truth: GroundTruth
    found: Detections
    match_F: np.ndarray
    kind_F: np.ndarray
    about_F: np.ndarray
    sure_F: np.ndarray


def analyse(
    dataset: DetectionSet,
    results: np.ndarray | Ranking,
    step: int | None = None,
    most: int = COCO_DETECTIONS,
) -> dict[str, Any]:
    """Content of evaluation.json; plain JSON.

    Args:
        dataset, most: as in `ppdist.metrics.coco.evaluate_boxes`.
        results: detections_R7 as there, or the ranking of a classifier.
        step: how many steps the model was trained; None: unknown.
    """
    if isinstance(results, Ranking):
        return _analyse_classes(dataset, results, step)
    return _analyse_boxes(dataset, results, step, most)


def _analyse_boxes(
    dataset: DetectionSet, detections_R7: np.ndarray, step: int | None, most: int
) -> dict[str, Any]:
    classes = len(dataset.class_names)
    truth = truth_of(dataset)
    found = found_of(truth, detections_R7, most)
    pairs = overlaps(truth, found)
    match_F = match_as_coco(truth, found, pairs, IOU)
    kind_F, about_F = kinds_of(truth, found, pairs, match_F)
    counts = count_by_confidence(truth, found, match_F, classes)
    best = best_step(counts)
    confidence = CONFIDENCE_T[len(CONFIDENCE_T) // 2 if best is None else best]
    sure_F = found.score_F >= confidence
    matched = Matched(truth, found, match_F, kind_F, about_F, sure_F)
    arrays = coco_arrays(truth, found, classes, most)
    voc_rights = right_by_class(found.label_F, match_as_voc(truth, found, pairs), classes)
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
            **{name: _or_none(value) for name, value in operating_points(counts).items()},
            "VOC_11_point": voc_2[0],
            "VOC_area": voc_2[1],
        },
        "per_class": _per_class(dataset, truth, arrays, counts, voc_C2),
        "curves": _rounded(_curves(arrays, counts)),
        "confusion": {
            "iou": IOU,
            "confidence": confidence,
            **confusion_table(
                *confused(truth, found, kind_F, about_F, sure_F, classes), classes + 1
            ),
        },
        "errors": {
            "counts": count_kinds(truth, kind_F, about_F, sure_F),
            "AP50_gain": gains(truth, found, kind_F, about_F, classes),
        },
        **_worst_and_best(dataset, matched),
    }
    return plain(content)


def _analyse_classes(dataset: DetectionSet, ranking: Ranking, step: int | None) -> dict[str, Any]:
    """Content of a classifier's evaluation.json; plain JSON.

    Returns: `metrics`; `per_class`: images, top1 and top5 of them, precision (part of the images
        called so that are); `confusion`, see `confusion_table`; images where the model gave no
        number are not in it.
    """
    classes = len(dataset.class_names)
    labels_N = np.array([dataset.records[int(i)].labels_M[0] for i in ranking.index_N], np.int64)
    known_N = ranking.place_N < max(classes, BEST)
    true_K, called_K = labels_N[known_N], ranking.labels_NK[known_N, 0]

    def part(chosen_X: np.ndarray, of_X: np.ndarray) -> list[float | None]:
        """Of each class, how many of those `of_X` are chosen."""
        some_C, all_C = (np.bincount(each, minlength=classes) for each in (chosen_X, of_X))
        return [float(some / many) if many else None for some, many in zip(some_C, all_C)]

    columns = {
        "name": dataset.class_names,
        "images": np.bincount(labels_N, minlength=classes).tolist(),
        "top1": part(labels_N[ranking.place_N < 1], labels_N),
        "top5": part(labels_N[ranking.place_N < BEST], labels_N),
        "precision": part(true_K[true_K == called_K], called_K),
    }
    return {
        "step": step,
        **scored_images(dataset),
        "class_names": list(dataset.class_names),
        "metrics": accuracy(ranking),
        "per_class": [dict(zip(columns, row)) for row in zip(*columns.values())],
        "confusion": confusion_table(true_K, called_K, classes),
    }


def kinds_of(
    truth: GroundTruth, found: Detections, pairs: Pairs, match_F: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each detection and its object; int64 [F].

    Args:
        match_F: what `match_as_coco` gave at IOU.

    Source: Bolya et al. 2020 (TIDE), arXiv:2008.08115, section 2.2, tried in the order of its
        reference implementation: localisation, class, duplicate.
    """
    pairs = pairs.of(~truth.crowd_G[pairs.object_P])
    same_P = found.label_F[pairs.found_P] == truth.label_G[pairs.object_P]
    kind_F = np.full(len(match_F), int(Kind.BACKGROUND))
    about_F = np.full(len(match_F), NOBODY)
    own_F, own_object_F, own_iou_F = most_overlapped(pairs.of(same_P), pairs.iou_P[same_P])
    other_F, other_object_F, other_iou_F = most_overlapped(pairs.of(~same_P), pairs.iou_P[~same_P])
    for kind, chosen_F, some_F, object_F in (  # the last that fits stays
        (Kind.DUPLICATE, own_iou_F >= IOU, own_F, own_object_F),
        (Kind.CLASS, other_iou_F >= IOU, other_F, other_object_F),
        (Kind.LOCALISATION, own_iou_F < IOU, own_F, own_object_F),
    ):
        kind_F[some_F[chosen_F]] = kind
        about_F[some_F[chosen_F]] = object_F[chosen_F]
    right_F = match_F >= 0
    kind_F[right_F], about_F[right_F] = Kind.CORRECT, match_F[right_F]
    kind_F[match_F == CROWD], about_F[match_F == CROWD] = Kind.IGNORED, NOBODY
    return kind_F, about_F


def missed(truth: GroundTruth, kind_F: np.ndarray, about_F: np.ndarray) -> np.ndarray:
    """Objects that no detection is about; bool [G]."""
    seen_G = truth.crowd_G.copy()
    seen_G[about_F[about_F >= 0]] = True
    return ~seen_G


def count_kinds(
    truth: GroundTruth, kind_F: np.ndarray, about_F: np.ndarray, sure_F: np.ndarray
) -> dict[str, int]:
    """Detections of each kind, and missed objects.

    Args: sure_F: bool, those that count.
    """
    count = np.bincount(kind_F[sure_F], minlength=len(Kind))
    counts = {kind.name.lower(): int(count[kind]) for kind in Kind if kind != Kind.IGNORED}
    return {**counts, "missed": int(missed(truth, kind_F[sure_F], about_F[sure_F]).sum())}


def gains(
    truth: GroundTruth, found: Detections, kind_F: np.ndarray, about_F: np.ndarray, classes: int
) -> dict[str, float | None]:
    """Gain of mAP50 with one error type mended.

    All others are left.

    All detections count, however unsure.  A wrong place or class is corrected where no detection
    found the object, of several about one object that of the surest; the others of the kind are
    left out.  Duplicates and background are left out; missed objects are not asked for.

    Returns: None for each where the set has no object.
    Source: as `kinds_of`, section 2.3, and its reference implementation (tidecv 1.0.1), with
        COCO's recalls, which it takes a last digit differently.
    """
    objects_C = objects_of(truth, classes)
    match_F = np.where(kind_F == Kind.CORRECT, about_F, NOBODY)
    match_F[kind_F == Kind.IGNORED] = CROWD

    def mean_precision(
        label_F: np.ndarray, match_F: np.ndarray, objects_C: np.ndarray = objects_C
    ) -> float:
        rights = right_by_class(label_F, match_F, classes)
        values = [coco_average_precision(right, n) for right, n in zip(rights, objects_C.tolist())]
        return float(mean_of_measured(np.array([values]).T)[0])

    # The surest detection to mend for each object not found: of a wrong place or class.
    found_G = np.zeros(len(truth.label_G), bool)
    found_G[about_F[kind_F == Kind.CORRECT]] = True
    wrong_F = np.flatnonzero((kind_F == Kind.LOCALISATION) | (kind_F == Kind.CLASS))
    wrong_F = wrong_F[~found_G[about_F[wrong_F]]]
    mendable_F = wrong_F[np.unique(about_F[wrong_F], return_index=True)[1]]

    def mended(kind: Kind) -> float:
        """CROWD also marks ignored ones: neither counts."""
        new_match_F, label_F = np.where(kind_F == kind, CROWD, match_F), found.label_F.copy()
        put_right_F = mendable_F[kind_F[mendable_F] == kind]
        new_match_F[put_right_F] = about_F[put_right_F]
        label_F[put_right_F] = truth.label_G[about_F[put_right_F]]
        return mean_precision(label_F, new_match_F)

    wrong = (Kind.LOCALISATION, Kind.CLASS, Kind.DUPLICATE, Kind.BACKGROUND)
    if not objects_C.any():
        return dict.fromkeys((*(kind.name.lower() for kind in wrong), "missed"))
    before = mean_precision(found.label_F, match_F)
    gained: dict[str, float | None] = {kind.name.lower(): mended(kind) - before for kind in wrong}
    asked_for = ~missed(truth, kind_F, about_F) & ~truth.crowd_G
    fewer_C = np.bincount(truth.label_G[asked_for], minlength=classes)
    gained["missed"] = mean_precision(found.label_F, match_F, fewer_C) - before
    return gained


def confused(
    truth: GroundTruth, found: Detections, kind_F: np.ndarray, about_F: np.ndarray,
    sure_F: np.ndarray, classes: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """True and detected class of detections and objects.

    By the kinds of `kinds_of`, so that matrix and error types agree: a detection that is correct,
    or of a wrong class, has the true class of its object, any other the background's.  So has as
    detected an object with neither.

    Args: sure_F: bool, which detections count.
    Returns: int64 [K], [K].
    """
    label_F, kind_F, about_F = found.label_F[sure_F], kind_F[sure_F], about_F[sure_F]
    on_object_F = (kind_F == Kind.CORRECT) | (kind_F == Kind.CLASS)
    true_F = np.full(len(kind_F), classes)
    true_F[on_object_F] = truth.label_G[about_F[on_object_F]]
    left_G = ~truth.crowd_G
    left_G[about_F[on_object_F]] = False
    counted_F, left_K = kind_F != Kind.IGNORED, truth.label_G[left_G]
    true_K = np.append(true_F[counted_F], left_K)
    return true_K, np.append(label_F[counted_F], np.full(len(left_K), classes))


def confusion_table(true_K: np.ndarray, called_K: np.ndarray, size: int) -> dict[str, Any]:
    """Counts what was called what.

    Args:
        true_K, called_K: classes in [0, size).
    Returns: `counts`, int [size][size], rows are true; or, of more than MOST_WHOLE rows, because
        the whole grows with their square: `cells`, (true, called, count) of the 20,000 largest,
        the largest first, and `true_counts`, int [size], the sums of whole rows.
    """
    cells, counts = np.unique(true_K * size + called_K, return_counts=True)
    if size <= MOST_WHOLE:
        whole = np.zeros(size * size, np.int64)
        whole[cells] = counts
        return {"counts": whole.reshape(size, size).tolist()}
    largest = np.argsort(-counts, kind="stable")[:_MOST_CELLS]
    rows = np.stack([cells[largest] // size, cells[largest] % size, counts[largest]], axis=1)
    return {"cells": rows.tolist(), "true_counts": np.bincount(true_K, minlength=size).tolist()}


def _per_class(
    dataset: DetectionSet,
    truth: GroundTruth,
    arrays: CocoArrays,
    counts: Counts,
    voc_C2: np.ndarray,
) -> list[dict[str, Any]]:
    """One row for each class.

    Of a class without objects all numbers are None, precision also where nothing was found.
    """
    classes = len(dataset.class_names)
    real_G = ~truth.crowd_G
    cells = np.unique(truth.image_G[real_G] * classes + truth.label_G[real_G])
    images_C = np.bincount(cells % classes, minlength=classes) if classes else cells
    step, usual = best_step(counts) or 0, usual_step()
    at_points = {  # each is computed for all confidences at once
        "precision": counts.precision_CT[:, step],
        "recall": counts.recall_CT[:, step],
        "f1": counts.f1_CT[:, step],
        "precision_at_25": counts.precision_CT[:, usual],
        "recall_at_25": counts.recall_CT[:, usual],
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
    """Curves by confidence and, interpolated as COCO does, by recall.

    `curve_classes` says which rows there are.  The means are over all classes that have objects.
    """
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
    """Images with the most and with the fewest errors.

    Of equals those with fewer, or more, objects found come first.  Images with neither objects nor
    sure detections are in no list.
    """
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
    """What is on one image, in original pixels.

    Returns: `true`, rows of class, x1, y1, x2, y2 and whether it was found; `predicted`, rows of
        class, score, x1, y1, x2, y2 and what the detection is, a name of `Kind` in lower case.
    """
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


def _rounded(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.round(_DIGITS) if isinstance(value, np.ndarray) else value
        for key, value in content.items()
    }


def _or_none(value: float) -> float | None:
    """-1 means nothing to measure."""
    return None if value < 0 else value


def plain(content: Any) -> Any:
    """Converts to JSON types: arrays to lists, NaN and infinity to None."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, np.ndarray | list | tuple):
        values = content.tolist() if isinstance(content, np.ndarray) else content
        return [plain(value) for value in values]
    if isinstance(content, np.generic):
        content = content.item()
    return None if isinstance(content, float) and not np.isfinite(content) else content


# Of a class: key of `per_class` -> heading, in the order in which tables have them.
CLASS_HEADINGS = {
    "objects": "objects", "images": "images",
    "top1": "top1", "top5": "top5",
    "precision": "P", "recall": "R", "f1": "F1",
    "precision_at_25": "P at .25", "recall_at_25": "R at .25",
    "AP50": "AP50", "AP": "AP", "AP75": "AP75",
    "AP_small": "small", "AP_medium": "medium", "AP_large": "large", "AR100": "AR100",
    "VOC_11_point": "VOC 11", "VOC_area": "VOC area",
}  # fmt: skip
# Those of a table of 80 columns, and the metric that is their mean.
_NARROW = {
    "images": "", "objects": "",
    "top1": "top1", "top5": "top5",
    "precision": "precision", "recall": "recall",
    "precision_at_25": "precision_at_25", "recall_at_25": "recall_at_25",
    "AP50": "mAP50", "AP": "mAP",
}  # fmt: skip


def class_table(evaluation: Mapping[str, Any], most: int | None = None) -> str:
    """Images, objects, P, R and AP by class.

    Args:
        evaluation: content of evaluation.json, of a detector or classifier.
        most: classes to show, the weakest of more; None: all of them.
    """
    metrics, rows = evaluation["metrics"], evaluation["per_class"]
    keys = [key for key in _NARROW if any(key in row for row in rows)]
    score = "AP" if "AP" in keys else "top1"
    shown = [row for row in rows if row.get(score) is not None] if most else rows
    left_out = len(rows) - len(shown)
    if most and len(shown) > most:
        left_out += len(shown) - most
        shown = sorted(shown, key=lambda row: row[score])[:most]
    everything = {key: metrics.get(name) for key, name in _NARROW.items()} | {
        "objects": sum(row.get("objects") or 0 for row in rows),
        "images": evaluation["images"],
    }
    lines = [
        (row["name"], [_shown(row.get(key), 3) for key in keys])
        for row in ({"name": "all", **everything}, *shown)
    ]
    text = _table("class", lines, [CLASS_HEADINGS[key] for key in keys])
    if left_out:
        more = "class" if left_out == 1 else "classes"
        text += f"{left_out} more {more} not shown; these are the weakest with objects\n"
    threshold = metrics.get("best_f1_threshold")
    if threshold is not None and metrics.get("f1"):
        text += f"P and R at IoU 0.5: confidence {threshold:.3f} (best mean F1) and 0.25\n"
    return text


def _table(head: str, rows: Any, columns: Sequence[str] = ("value",)) -> str:
    """Args: rows: (name, value or values)."""
    lines = [(head, *columns)]
    for name, values in rows:
        several = values if isinstance(values, list | tuple) else [values]
        lines.append((printable(str(name)).replace("\n", " ")[:_NAME], *map(_shown, several)))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))])
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], ""])


def _shown(value: float | str | None, digits: int = _DIGITS) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)

"""Computes mean average precision as COCO defines it.

pycocotools computes the numbers.  Where hotcoco is installed (extra `fast`), it computes the same
in Rust, many times faster (docs/dev/performance.md); the tests require both to agree to 1e-9.
"""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.files import write_whole
from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.types import DetectionSet
from ppdist.metrics.matching import (
    IOU,
    OPERATING_POINTS,
    Detections,
    GroundTruth,
    collect_objects,
    compute_operating_points,
    count_by_confidence,
    find_overlaps,
    match_as_coco,
    select_detections,
)

# The order of COCOeval.stats.
METRICS = (
    "mAP",
    "mAP50",
    "mAP75",
    "mAP_small",
    "mAP_medium",
    "mAP_large",
    "AR1",
    "AR10",
    "AR100",
    "AR_small",
    "AR_medium",
    "AR_large",
)
SIZES = ("small", "medium", "large")


class CocoArrays(NamedTuple):
    """The precision and recall whose means are COCO's numbers.

    -1 where there is nothing to measure.

    precision_TRCAM: 10 IoUs (0.50:0.05:0.95), 101 recalls, class, area (all, small, medium,
    large), at most 1, 10, 100 detections of an image, or more where the evaluation counts more.
    recall_TCAM: the highest recall.
    """

    precision_TRCAM: np.ndarray
    recall_TCAM: np.ndarray

    def summary(self) -> dict[str, float]:
        """Returns the 12 numbers of METRICS."""
        precision_TRCAM, recall_TCAM = self
        numbers = [
            measured_mean(precision_TRCAM[:, :, :, 0, -1]),
            measured_mean(precision_TRCAM[0, :, :, 0, -1]),
            measured_mean(precision_TRCAM[5, :, :, 0, -1]),
            *(measured_mean(precision_TRCAM[:, :, :, area, -1]) for area in (1, 2, 3)),
            *(measured_mean(recall_TCAM[:, :, 0, limit]) for limit in (0, 1, 2)),
            *(measured_mean(recall_TCAM[:, :, area, -1]) for area in (1, 2, 3)),
        ]
        return dict(zip(METRICS, numbers))

    def of_class(self, label: int) -> dict[str, float]:
        """Returns AP and AR100 of one class, over IoUs and by size."""
        precision_TRA = self.precision_TRCAM[:, :, label, :, -1]
        return {
            "AP": measured_mean(precision_TRA[:, :, 0]),
            "AP50": measured_mean(precision_TRA[0, :, 0]),
            "AP75": measured_mean(precision_TRA[5, :, 0]),
            **{
                f"AP_{size}": measured_mean(precision_TRA[:, :, area])
                for area, size in enumerate(SIZES, start=1)
            },
            "AR100": measured_mean(self.recall_TCAM[:, label, 0, 2]),
        }


def measured_mean(values: np.ndarray) -> float:
    """Returns the mean of the values that are not -1; -1 if there is none."""
    measured = values[values > -1]
    return float(measured.mean()) if measured.size else -1.0


def coco_arrays(
    truth: GroundTruth, detections: Detections, classes: int, max_detections: int = COCO_DETECTIONS
) -> CocoArrays:
    """Computes precision and recall by IoU, class and size.

    Args: max_detections: largest number of detections per class and image.
    """
    compute = by_hotcoco if importlib.util.find_spec("hotcoco") else by_pycocotools
    return compute(truth, detections, classes, max_detections)


def by_hotcoco(
    truth: GroundTruth, detections: Detections, classes: int, max_detections: int
) -> CocoArrays:
    """Computes `coco_arrays` with hotcoco."""
    from hotcoco import COCO, COCOeval

    images, categories = _images_and_categories(truth, classes)
    objects = COCO.from_arrays(
        images, categories, truth.image_G, truth.label_G, truth.box_G4,
        area=truth.area_G, iscrowd=truth.crowd_G.astype(np.int64),
    )  # fmt: skip
    columns = [
        detections.image_F[:, None],
        detections.box_F4,
        detections.score_F[:, None],
        detections.label_F[:, None],
    ]
    results = objects.load_res(np.concatenate(columns, axis=1))
    return _accumulate(COCOeval(objects, results, "bbox"), max_detections)


def by_pycocotools(
    truth: GroundTruth, detections: Detections, classes: int, max_detections: int
) -> CocoArrays:
    """Computes `coco_arrays` with pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its timings
        evaluation = COCOeval(*make_datasets(COCO, truth, detections, classes), "bbox")
        return _accumulate(evaluation, max_detections)


def _accumulate(evaluation: Any, max_detections: int) -> CocoArrays:
    evaluation.params.maxDets = sorted({1, 10, COCO_DETECTIONS, max_detections})
    evaluation.evaluate()
    evaluation.accumulate()
    return CocoArrays(evaluation.eval["precision"], evaluation.eval["recall"])


def make_datasets(
    coco: Any, truth: GroundTruth, detections: Detections, classes: int, **options: Any
) -> list[Any]:
    """Builds the objects and detections for packages with pycocotools' interface.

    Args: coco: the package's class COCO.  options: its arguments.
    """
    objects = _annotations(truth.image_G, truth.label_G, truth.box_G4)
    results = _annotations(detections.image_F, detections.label_F, detections.box_F4)
    for annotation, area, crowd in zip(objects, truth.area_G.tolist(), truth.crowd_G.tolist()):
        annotation |= {"area": area, "iscrowd": int(crowd)}
    areas_F = detections.box_F4[:, 2] * detections.box_F4[:, 3]
    for annotation, area, score in zip(results, areas_F.tolist(), detections.score_F.tolist()):
        annotation |= {"area": area, "iscrowd": 0, "score": score}
    images, categories = _images_and_categories(truth, classes)
    indexed = []
    for annotations in (objects, results):
        coco_set = coco(**options)
        coco_set.dataset = {"images": images, "categories": categories, "annotations": annotations}
        coco_set.createIndex()
        indexed.append(coco_set)
    return indexed


def _annotations(
    image_X: np.ndarray, label_X: np.ndarray, box_X4: np.ndarray
) -> list[dict[str, Any]]:
    """Builds the annotations of a COCO file.

    Ids start at 1, because pycocotools treats a match with object 0 as no match.
    """
    rows = zip(image_X.tolist(), label_X.tolist(), box_X4.tolist())
    return [
        {"id": number, "image_id": image, "category_id": label, "bbox": box}
        for number, (image, label, box) in enumerate(rows, start=1)
    ]


def _images_and_categories(
    truth: GroundTruth, classes: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Builds the images and categories of a COCO file."""
    images = [{"id": image} for image in range(len(truth.order_N))]
    return images, [{"id": label, "name": str(label)} for label in range(classes)]


def evaluate_boxes(
    dataset: DetectionSet, detections_R7: np.ndarray, max_detections: int = COCO_DETECTIONS
) -> dict[str, float]:
    """Computes COCO's box metrics of one set of detections.

    Average precision over IoU 0.50:0.05:0.95 with at most `max_detections` per image and class;
    small, medium and large split at 32x32 and 96x96 pixels of annotation area (`area_M`, which for
    COCO files is the polygon's); a detection that hits a crowd region counts neither way.

    Args:
        dataset: the ground truth; every one of its images counts, with detections or without.
        detections_R7: rows (position in dataset.records, class in [0, C), score, x1, y1, x2, y2),
            pixels of the original image; R may be 0.  Rows that are not finite (a model that
            diverged) are left out.

    Returns: the 12 numbers of METRICS; precision, recall and F1 at IoU 0.5, means over classes, at
        the confidence that makes that mean F1 largest, that confidence (`best_f1_threshold`), and
        precision and recall at 0.25; `AP/<class name>` for each class; all in [0, 1].  mAP, mAP50
        and mAP75 of no detections are 0.  A number that has no object to measure (no small object
        in the set, a class without objects) is -1, as in pycocotools.
    Source: github.com/cocodataset/cocoapi, PythonAPI/pycocotools/cocoeval.py.
    """
    truth = collect_objects(dataset)
    detections = select_detections(truth, detections_R7, max_detections)
    classes = len(dataset.class_names)
    arrays = coco_arrays(truth, detections, classes, max_detections)
    match_F = match_as_coco(truth, detections, find_overlaps(truth, detections), IOU)
    points = compute_operating_points(count_by_confidence(truth, detections, match_F, classes))
    per_class = {
        f"AP/{name}": arrays.of_class(label)["AP"] for label, name in enumerate(dataset.class_names)
    }
    return {**arrays.summary(), **points, **per_class}


def metric_names(class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of what `evaluate_boxes` computes, in its order."""
    return (*METRICS, *OPERATING_POINTS, *(f"AP/{name}" for name in class_names))


def fitness(metrics: Mapping[str, float]) -> float:
    """Computes one number to choose a checkpoint by, from `CocoArrays.summary`."""
    return 0.1 * metrics["mAP50"] + 0.9 * metrics["mAP"]


def write_detections(path: Path, dataset: DetectionSet, detections_R7: np.ndarray) -> None:
    """Writes detections as a COCO result file: image_id, category_id, bbox xywh, score.

    Ids are those of the annotation file (`image_id`, `category_ids`), so any COCO tool can score
    it; coordinates are original pixels, rounded to 1/1000; scores are not rounded, because ties
    would change the order and so the precision.  Rows of a diverged model (not finite, say) are
    left out, as `evaluate_boxes` does.  The file appears whole or not at all.

    Args:
        detections_R7: as in `evaluate_boxes`.
    """
    finite_R7 = detections_R7[(np.abs(detections_R7) < _LARGEST).all(1)]
    texts = [_rows_as_json(dataset, part) for part in _parts(finite_R7)]
    write_whole(path, b"[" + b", ".join(texts) + b"]")


_ROWS = 1 << 16  # written at once: 10 MB
_LARGEST = 1e12  # pixels; larger ones, of a diverged model, count as not finite


def _parts(rows_RK: np.ndarray) -> Iterator[np.ndarray]:
    return (rows_RK[start : start + _ROWS] for start in range(0, len(rows_RK), _ROWS))


def _rows_as_json(dataset: DetectionSet, rows_R7: np.ndarray) -> bytes:
    """Formats detections as JSON, without a dictionary for each row.

    It builds rows of bytes, padded with zero bytes; JSON has no zero bytes, so all are removed
    last.
    """
    scores = rows_R7[:, 2].astype("S")  # the fewest digits that read back as the same
    rows_R7 = rows_R7.astype(np.float64)
    records = dataset.records
    x_R, y_R = rows_R7[:, 3], rows_R7[:, 4]
    numbers = [x_R, y_R, rows_R7[:, 5] - x_R, rows_R7[:, 6] - y_R]
    bbox: list[bytes | np.ndarray] = []
    for values_R in numbers:
        bbox += [b", ", *_decimal(values_R, 3)]
    columns: list[bytes | np.ndarray] = [
        b'{"image_id": ', _look_up(lambda place: records[place].image_id, rows_R7[:, 0]),
        b', "category_id": ', _look_up(dataset.category_ids.__getitem__, rows_R7[:, 1]),
        b', "bbox": [', *bbox[1:],
        b'], "score": ', scores, b"}, ",
    ]  # fmt: skip
    # Every column becomes bytes of one width, so that numpy joins all rows at once.
    wide = [
        np.broadcast_to(np.frombuffer(column, np.uint8), (len(rows_R7), len(column)))
        if isinstance(column, bytes)
        else column.view(np.uint8).reshape(len(rows_R7), -1)
        for column in columns
    ]
    text_RW = np.concatenate(wide, axis=1)
    return text_RW[text_RW != 0].tobytes()[:-2]


def _look_up(value_of: Callable[[int], int], places_R: np.ndarray) -> np.ndarray:
    """Returns the number for each of these positions, as bytes [R]."""
    unique_places, index_R = np.unique(places_R.astype(np.int64), return_inverse=True)
    return np.array([b"%d" % value_of(place) for place in unique_places.tolist()])[index_R]


def _decimal(values_R: np.ndarray, places: int) -> tuple[np.ndarray, ...]:
    """Formats rounded numbers as bytes [R]: sign, whole part, fraction.

    The digits are those of Python's `round`: the product of a float32 is exact.
    """
    units = 10**places
    rounded_R = np.rint(np.abs(values_R) * units).astype(np.int64)
    whole_R, fraction_R = np.divmod(rounded_R, units)
    unique_parts, index_R = np.unique(whole_R, return_inverse=True)
    signs = np.array([b"", b"-"])
    return (
        signs[np.signbit(values_R).astype(np.int64)],
        unique_parts.astype("S")[index_R],
        _fractions(places)[fraction_R],
    )


@cache
def _fractions(places: int) -> np.ndarray:
    """Lists `.0`, `.001`, ... `.999` as Python writes them after the whole part."""
    texts = [f"{rest:0{places}}".rstrip("0") or "0" for rest in range(10**places)]
    return np.array([f".{text}".encode() for text in texts])

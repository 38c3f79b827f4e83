"""Mean average precision as COCO defines it.

The numbers are those of pycocotools (the tests hold both together); faster-coco-eval computes
them from the same rules in C++, 3 to 20 times faster.
"""

from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

from ppdist.data.sample import DetectionSet
from ppdist.files import write_json

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


def evaluate_boxes(dataset: DetectionSet, detections_R7: np.ndarray) -> dict[str, float]:
    """COCO box metrics of one set of detections.

    Average precision over IoU 0.50:0.05:0.95 with at most 100 detections per image and class;
    small, medium and large split at 32x32 and 96x96 pixels of annotation area (`area_M`, which
    for COCO files is the polygon's); a detection that hits a crowd region counts neither way.

    Args:
        dataset: the ground truth; every one of its images counts, with detections or without.
        detections_R7: rows (position in dataset.records, class in [0, C), score, x1, y1, x2, y2),
            pixels of the original image; R may be 0.  Rows that are not finite (a model that
            diverged) are left out.

    Returns: the 12 numbers of METRICS, then `AP/<class name>` for each class, all in [0, 1].
        mAP, mAP50 and mAP75 of no detections are 0.  A number that has no object to measure
        (no small object in the set, a class without objects) is -1, as in pycocotools.
    Source: github.com/cocodataset/cocoapi, PythonAPI/pycocotools/cocoeval.py.
    """
    place_N = _places(dataset)
    images = [{"id": place} for place in range(len(place_N))]
    categories = [{"id": index, "name": name} for index, name in enumerate(dataset.class_names)]
    truth = _indexed(images, categories, _truth_annotations(dataset, place_N))
    found = _indexed(images, categories, _detected_annotations(detections_R7, place_N))
    evaluation = COCOeval_faster(truth, found, "bbox", print_function=_silent)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    result = {name: float(value) for name, value in zip(METRICS, evaluation.stats)}
    precision_TRCAM = evaluation.eval["precision"]  # IoU, recall, class, area range, max detections
    for index, name in enumerate(dataset.class_names):
        precision_TR = precision_TRCAM[:, :, index, 0, -1]
        measured = precision_TR[precision_TR > -1]
        result[f"AP/{name}"] = float(measured.mean()) if measured.size else -1.0
    return result


def write_detections(path: Path, dataset: DetectionSet, detections_R7: np.ndarray) -> None:
    """Writes detections as a COCO result file: image_id, category_id, bbox xywh, score.

    Ids are those of the annotation file (`image_id`, `category_ids`), so any COCO tool can score
    it; coordinates are original pixels, rounded to 1/1000.  The file appears whole or not at all.

    Args:
        detections_R7: as in `evaluate_boxes`.
    """
    results = [
        {
            "image_id": dataset.records[int(index)].image_id,
            "category_id": dataset.category_ids[int(label)],
            "bbox": _xywh(box),
            "score": round(score, 5),
        }
        for index, label, score, *box in detections_R7.tolist()
    ]
    write_json(path, results)


def _places(dataset: DetectionSet) -> list[int]:
    """Of each record, its place in the order of image ids.

    Detections of equal score are ranked in that order, so it is part of the metric.
    """
    ids_N = np.array([record.image_id for record in dataset.records], np.int64)
    return np.argsort(np.argsort(ids_N, kind="stable")).tolist()


def _truth_annotations(dataset: DetectionSet, place_N: list[int]) -> list[dict[str, Any]]:
    annotations: list[dict[str, Any]] = []
    for place, record in zip(place_N, dataset.records):
        for box, label, crowd, area in zip(
            record.boxes_M4.astype(np.float64).tolist(),
            record.labels_M.tolist(),
            record.crowd_M.tolist(),
            record.area_M.tolist(),
        ):
            annotations.append(_annotation(place, label, box, area=area, iscrowd=int(crowd)))
    return _numbered(annotations)


def _detected_annotations(detections_R7: np.ndarray, place_N: list[int]) -> list[dict[str, Any]]:
    finite_R7 = detections_R7[np.isfinite(detections_R7).all(axis=1)].astype(np.float64)
    annotations = []
    for index, label, score, *box in finite_R7.tolist():
        _, _, width, height = _xywh(box)
        area = width * height
        annotations.append(
            _annotation(place_N[int(index)], int(label), box, area=area, iscrowd=0, score=score)
        )
    return _numbered(annotations)


def _annotation(image: int, label: int, box: list[float], **fields: float) -> dict[str, Any]:
    return {"image_id": image, "category_id": label, "bbox": _xywh(box), **fields}


def _xywh(box: list[float]) -> list[float]:
    """Corner and sides, rounded to 1/1000 pixel.

    Files hold two decimals or fewer, so the rounding gives their values back.  Without it the
    noise of float32 corners decides about IoUs that lie exactly on a threshold: on COCO's own
    example it moves mAP by 2e-4.
    """
    x1, y1, x2, y2 = box
    return [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]


def _numbered(annotations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids start at 1: pycocotools takes a match with object 0 for no match."""
    for number, annotation in enumerate(annotations, start=1):
        annotation["id"] = number
    return annotations


def _indexed(
    images: list[dict[str, int]],
    categories: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
) -> COCO:
    coco = COCO(print_function=_silent)
    coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
    coco.createIndex()
    return coco


def _silent(*_: object, **__: object) -> None:
    pass

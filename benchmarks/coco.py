"""Measures the seconds of computing COCO's numbers on a generated set, by us and other packages.

pycocotools defines the numbers; hotcoco and faster-coco-eval are measured where they are installed.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.types import DetectionSet, ImageRecord
from ppdist.metrics.analysis import analyse
from ppdist.metrics.coco import (
    METRICS,
    by_hotcoco,
    by_pycocotools,
    evaluate_boxes,
    make_datasets,
)
from ppdist.metrics.matching import Detections, GroundTruth, collect_objects, select_detections

_OBJECTS = 7.3  # of an image on average, as in COCO's val2017
_SIDE = 640  # pixels of an image


def measure_coco(*, images: int, detections: int, classes: int, repeats: int) -> dict[str, Any]:
    """Times every package on one set, interleaved; seconds are medians.

    Returns: `packages`: for each the time from flat arrays to the 12 numbers, how many times faster
        that is than pycocotools, and the largest difference from its numbers; `ours`: the time of a
        whole evaluation, and of evaluation.json.
    """
    dataset, rows_R7 = generate_set(images=images, detections=detections, classes=classes, seed=0)
    truth = collect_objects(dataset)
    detected = select_detections(truth, rows_R7)
    own_packages = {"pycocotools": by_pycocotools}
    if importlib.util.find_spec("hotcoco"):
        own_packages["hotcoco"] = by_hotcoco
    packages: dict[str, Callable[[], Sequence[float]]] = {
        name: lambda compute=compute: list(
            compute(truth, detected, classes, COCO_DETECTIONS).summary().values()
        )
        for name, compute in own_packages.items()
    }
    if importlib.util.find_spec("faster_coco_eval"):
        packages["faster-coco-eval"] = lambda: _run_faster_coco_eval(truth, detected, classes)
    timings: dict[str, list[Spent]] = {name: [] for name in packages}
    numbers: dict[str, np.ndarray] = {}
    for _ in range(repeats):
        for name, compute in packages.items():
            spent, result = _timed(compute)
            timings[name].append(spent)
            numbers[name] = np.array(result)
    reference = numbers["pycocotools"]
    medians = {name: Spent(*(median(part) for part in zip(*timings[name]))) for name in packages}
    report = {
        name: {
            **spent._asdict(),
            "times_faster": medians["pycocotools"].seconds / spent.seconds,
            "times_less_cpu": medians["pycocotools"].cpu_seconds / spent.cpu_seconds,
            "largest_difference": float(np.abs(numbers[name] - reference).max()),
        }
        for name, spent in medians.items()
    }
    return {
        "images": images,
        "detections": len(rows_R7),
        "objects": len(truth.label_G),
        "classes": classes,
        "repeats": repeats,
        "metrics": dict(zip(METRICS, reference.tolist())),
        "packages": report,
        "ours": {
            "evaluation": _timed(lambda: evaluate_boxes(dataset, rows_R7))[0]._asdict(),
            "evaluation.json": _timed(lambda: analyse(dataset, rows_R7))[0]._asdict(),
        },
    }


class Spent(NamedTuple):
    """The wall time and the CPU time of all threads; other programs change the latter less."""

    seconds: float
    cpu_seconds: float


def _timed(work: Callable[[], Any]) -> tuple[Spent, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu), result


def generate_set(
    *, images: int, detections: int, classes: int, seed: int
) -> tuple[DetectionSet, np.ndarray]:
    """Generates objects of all sizes, frequent and rare classes, some crowds; about half of an
    image's detections lie near an object.

    Returns: the set (no image is on disk), and float32 [images * detections, 7] rows as in
        `ppdist.metrics.coco.evaluate_boxes`.
    """
    rng = np.random.default_rng(seed)
    frequency_C = 1 / np.arange(1, classes + 1)
    frequency_C /= frequency_C.sum()
    records, rows = [], []
    for index in range(images):
        boxes_M4 = _boxes(rng, rng.poisson(_OBJECTS))
        labels_M = rng.choice(classes, len(boxes_M4), p=frequency_C)
        sides_M2 = boxes_M4[:, 2:] - boxes_M4[:, :2]
        records.append(
            ImageRecord(
                path=f"/images/{index}.jpg",
                image_id=index + 1,
                width=_SIDE,
                height=_SIDE,
                boxes_M4=boxes_M4.astype(np.float32),
                labels_M=labels_M,
                crowd_M=rng.random(len(boxes_M4)) < 0.01,
                area_M=(sides_M2.prod(axis=1) * rng.uniform(0.4, 1, len(boxes_M4))).round(2),
            )
        )
        boxes_D4 = _boxes(rng, detections)
        labels_D = rng.choice(classes, detections, p=frequency_C)
        if len(boxes_M4):
            near_D = rng.random(detections) < 0.5
            object_D = rng.integers(len(boxes_M4), size=detections)
            moved_D4 = rng.normal(0, 0.08, (detections, 4)) * np.tile(sides_M2[object_D], 2)
            moved_D4 += boxes_M4[object_D]
            moved_D4[:, 2:] = np.maximum(moved_D4[:, 2:], moved_D4[:, :2] + 1)
            boxes_D4[near_D] = moved_D4[near_D].round(2)
            right_D = near_D & (rng.random(detections) < 0.9)
            labels_D[right_D] = labels_M[object_D[right_D]]
        scores_D = rng.random(detections) ** 3
        columns = [np.full((detections, 1), index), labels_D[:, None], scores_D[:, None], boxes_D4]
        rows.append(np.concatenate(columns, axis=1))
    names = tuple(f"class {label}" for label in range(classes))
    dataset = DetectionSet(tuple(records), names, tuple(range(classes)), "made up")
    return dataset, np.concatenate(rows).astype(np.float32)


def _boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    """Generates boxes, xyxy in pixels [count, 4], with two decimals."""
    corner_X2 = rng.uniform(0, 400, (count, 2))
    sides_X2 = np.exp(rng.normal(4, 1, (count, 2))).clip(4, 240)
    return np.concatenate([corner_X2, corner_X2 + sides_X2], axis=1).round(2)


def _run_faster_coco_eval(
    truth: GroundTruth, detections: Detections, classes: int
) -> Sequence[float]:
    from faster_coco_eval import COCO, COCOeval_faster

    silent = {"print_function": lambda *_, **__: None}
    sets = make_datasets(COCO, truth, detections, classes, **silent)
    evaluation = COCOeval_faster(*sets, "bbox", **silent)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats

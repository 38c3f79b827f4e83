"""evaluate_boxes against pycocotools, and hotcoco against it."""

import contextlib
import importlib.util
import io
import json

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ppdist.data.types import DetectionSet
from ppdist.metrics import coco
from ppdist.metrics.analysis import analyse
from ppdist.metrics.coco import (
    METRICS,
    by_hotcoco,
    by_pycocotools,
    evaluate_boxes,
    metric_names,
    write_detections,
)
from ppdist.metrics.matching import OPERATING_POINTS, collect_objects, select_detections
from tests.unit.metrics.cases import NAMES, detection_set, odd_case, random_case, record


def read_by_hand(path) -> DetectionSet:
    """A COCO file without images on disk, as the reader would give it."""
    content = json.loads(path.read_text())
    ids = [c["id"] for c in content["categories"]]
    records = []
    for image in content["images"]:
        own = [a for a in content["annotations"] if a["image_id"] == image["id"]]
        boxes_M4 = np.array([a["bbox"] for a in own], np.float64).reshape(-1, 4)
        boxes_M4[:, 2:] += boxes_M4[:, :2]
        labels = [ids.index(a["category_id"]) for a in own]
        areas = [a["area"] for a in own]
        crowds = [a["iscrowd"] for a in own]
        records.append(record(image["id"], boxes_M4, labels, crowds, areas))
    names = tuple(c["name"] for c in content["categories"])
    return detection_set(*records, names=names, category_ids=tuple(ids))


def rows_of(results, dataset) -> np.ndarray:
    """A COCO result list as detections [R, 7]."""
    position = {record.image_id: index for index, record in enumerate(dataset.records)}
    rows = []
    for result in results:
        x, y, width, height = result["bbox"]
        label = dataset.category_ids.index(result["category_id"])
        place = position[result["image_id"]]
        rows.append([place, label, result["score"], x, y, x + width, y + height])
    return np.array(rows).reshape(-1, 7)


def reference(dataset, detections_R7) -> tuple[np.ndarray, np.ndarray]:
    """Its 12 numbers and its AP of each class, through files' dictionaries made anew."""
    truth = [
        {"image_id": index, "category_id": int(label), "bbox": xywh(box), "area": float(area)}
        | {"iscrowd": int(crowd)}
        for index, r in enumerate(dataset.records)
        for box, label, crowd, area in zip(r.boxes_M4, r.labels_M, r.crowd_M, r.area_M)
    ]
    found = [
        {"image_id": int(i), "category_id": int(c), "bbox": xywh(box), "score": s, "iscrowd": 0}
        | {"area": float((box[2] - box[0]) * (box[3] - box[1]))}
        for i, c, s, *box in detections_R7.tolist()
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        pair = []
        for annotations in (truth, found):
            part = COCO()
            numbered = [{**a, "id": n} for n, a in enumerate(annotations, 1)]
            part.dataset = {
                "images": [{"id": n} for n in range(len(dataset.records))],
                "categories": [{"id": n} for n in range(len(dataset.class_names))],
                "annotations": numbered,
            }
            part.createIndex()
            pair.append(part)
        evaluation = COCOeval(*pair, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision_TRC = evaluation.eval["precision"][:, :, :, 0, -1]
    classes = [
        precision_TRC[:, :, c][precision_TRC[:, :, c] > -1] for c in range(precision_TRC.shape[2])
    ]
    return evaluation.stats, np.array([c.mean() if c.size else -1.0 for c in classes])


def xywh(box) -> list[float]:
    """As a file holds it: two decimals."""
    x1, y1, x2, y2 = (float(v) for v in box)
    return [round(v, 2) for v in (x1, y1, x2 - x1, y2 - y1)]


def numbers(result) -> list[float]:
    return [result[name] for name in METRICS]


def test_coco_reference_set_gives_published_metrics(shared_dir):
    folder = shared_dir / "data" / "coco_eval"
    dataset = read_by_hand(folder / "instances_val2014_100.json")
    results = json.loads((folder / "instances_val2014_fakebbox100_results.json").read_text())
    expected = json.loads((folder / "expected.json").read_text())["stats"]
    result = evaluate_boxes(dataset, rows_of(results, dataset))
    np.testing.assert_allclose(numbers(result), expected, rtol=0, atol=1e-9)
    as_float32 = evaluate_boxes(dataset, rows_of(results, dataset).astype(np.float32))
    np.testing.assert_allclose(numbers(as_float32), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tied_scores", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_sets_with_crowds_agree_with_pycocotools(seed, tied_scores):
    dataset, detections_R7 = random_case(seed, tied_scores=tied_scores)
    result = evaluate_boxes(dataset, detections_R7)
    stats, per_class = reference(dataset, detections_R7)
    np.testing.assert_allclose(numbers(result), stats, rtol=0, atol=1e-9)
    ours = [result[f"AP/{name}"] for name in NAMES]
    np.testing.assert_allclose(ours, per_class, rtol=0, atol=1e-9)
    assert 0 < result["mAP"] < 1 and result["AP/bird"] == -1.0


def crowded(count: int) -> DetectionSet:
    """An image with a grid of objects of one class."""
    number_M = np.arange(count)
    corner_M2 = np.stack([number_M % 20, number_M // 20], axis=1) * 30.0
    boxes_M4 = np.concatenate([corner_M2, corner_M2 + 20], axis=1)
    return detection_set(record(1, boxes_M4, [0] * count))


@pytest.mark.parametrize(("most", "expected"), [(100, 26 / 101), (300, 76 / 101), (400, 1.0)])
def test_detections_up_to_the_limit_count(most, expected):
    dataset = crowded(400)
    boxes_M4, score_M = dataset.records[0].boxes_M4, np.linspace(1, 0.1, 400)
    rows_R7 = np.concatenate([np.zeros((400, 2)), score_M[:, None], boxes_M4], axis=1)
    result = evaluate_boxes(dataset, rows_R7, most)
    assert result["mAP"] == pytest.approx(expected)
    recalls = [result[name] for name in ("AR1", "AR10", "AR100")]
    assert recalls == pytest.approx([0.0025, 0.025, 0.25])
    assert result["AR_small"] == pytest.approx(most / 400)
    content = analyse(dataset, rows_R7, max_detections=most)
    assert content["metrics"]["mAP"] == result["mAP"]


@pytest.mark.parametrize("seed", range(40))
def test_both_engines_agree_on_odd_sets(seed):
    dataset, rows_R7, classes = odd_case(seed)
    truth, most = collect_objects(dataset), 100 if seed % 4 else 150
    found = select_detections(truth, rows_R7, most)
    ours, theirs = (
        compute(truth, found, classes, most) for compute in (by_hotcoco, by_pycocotools)
    )
    np.testing.assert_allclose(ours.precision_TRCAM, theirs.precision_TRCAM, rtol=0, atol=1e-9)
    np.testing.assert_allclose(ours.recall_TCAM, theirs.recall_TCAM, rtol=0, atol=1e-9)
    assert ours.summary() == pytest.approx(theirs.summary(), abs=1e-9)


def test_without_hotcoco_pycocotools_serves(monkeypatch, capsys):
    dataset, rows_R7 = random_case(4, images=6)
    expected = evaluate_boxes(dataset, rows_R7)
    monkeypatch.setattr(coco, "by_hotcoco", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert evaluate_boxes(dataset, rows_R7) == pytest.approx(expected, abs=1e-9)
    assert capsys.readouterr().out == ""


def test_metrics_keep_their_names_and_order():
    dataset, detections_R7 = random_case(5, images=3)
    result = evaluate_boxes(dataset, detections_R7)
    assert tuple(result) == metric_names(NAMES)
    assert set(METRICS) | set(OPERATING_POINTS) | {"AP/cat"} <= set(result)


def test_a_set_without_any_object_has_nothing_to_measure():
    dataset = detection_set(record(1, [], []), record(2, [[0, 0, 9, 9]], [0], crowd=[True]))
    result = evaluate_boxes(dataset, np.array([[0, 0, 0.9, 0, 0, 9, 9]]))
    assert set(result.values()) == {-1.0}


def test_no_detection_at_all_is_a_metric_of_zero(capsys):
    dataset = detection_set(record(1, [[10, 10, 60, 60]], [0]), record(2, [], []))
    result = evaluate_boxes(dataset, np.zeros((0, 7), np.float32))
    assert result["mAP"] == result["mAP50"] == result["AR100"] == result["AP/cat"] == 0.0
    assert result["precision"] == result["recall"] == result["f1"] == 0.0
    assert result["mAP_large"] == result["AP/dog"] == -1.0, "nothing to measure"
    assert all(type(value) is float for value in result.values())
    assert capsys.readouterr().out == ""


def test_perfect_detections_score_one():
    boxes = [[10, 10, 60, 60], [100, 100, 300, 300]]
    dataset = detection_set(record(1, boxes, [0, 2]), record(2, [], []))
    rows = np.array([[0, 0, 0.9, *boxes[0]], [0, 2, 0.8, *boxes[1]]], np.float32)
    result = evaluate_boxes(dataset, rows)
    ours = [result[name] for name in ("mAP", "mAP50", "AP/cat", "precision", "recall", "f1")]
    assert ours == pytest.approx([1.0] * 6, abs=1e-12)
    assert result["best_f1_threshold"] == pytest.approx(0.4, abs=0.01), "the middle of the best"


def test_size_classes_follow_annotation_area_not_box():
    box = [0, 0, 50, 50]  # 2500 pixels: medium by its box, small by its polygon
    dataset = detection_set(record(1, [box], [0], area=[900.0]))
    result = evaluate_boxes(dataset, np.array([[0, 0, 0.9, *box]]))
    assert result["mAP_small"] == pytest.approx(1.0) and result["mAP_medium"] == -1.0


def test_rows_of_a_diverged_model_are_left_out():
    box = [10, 10, 60, 60]
    dataset = detection_set(record(1, [box], [0]))
    rows = np.array([[0, 0, 0.5, *box], [0, 0, np.nan, *box], [0, 0, 0.9, np.inf, 0, 9, 9]])
    assert evaluate_boxes(dataset, rows)["mAP"] == pytest.approx(1.0)


def test_written_detections_have_the_digits_of_python(tmp_path):
    dataset = detection_set(record(42, [[0, 0, 9, 9]], [1]), record(7, [[0, 0, 9, 9]], [0]))
    rng = np.random.default_rng(0)
    rows_R7 = rng.uniform(0, 700, (300, 7)).astype(np.float32)
    rows_R7[:, :2], rows_R7[:, 2] = rng.integers(0, 2, (300, 2)), rng.uniform(0.001, 1, 300)
    rows_R7[:3, 2:5] = [[1.0, 0.0625, -0.25], [0.5, -0.0, 12.0], [0.00001, 0.0005, 0.0015]]
    expected = [
        {
            "image_id": dataset.records[int(index)].image_id,
            "category_id": dataset.category_ids[int(label)],
            "bbox": [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)],
            "score": float(str(np.float32(score))),
        }
        for index, label, score, x1, y1, x2, y2 in rows_R7.tolist()
    ]
    diverged = np.float32([[0, 0, np.nan, 1, 1, 2, 2], [0, 0, 0.5, 1, 1, np.inf, 2]])
    write_detections(tmp_path / "found.json", dataset, np.concatenate([rows_R7, diverged]))
    text = (tmp_path / "found.json").read_text()
    assert text == json.dumps(expected)
    write_detections(tmp_path / "none.json", dataset, rows_R7[:0])
    assert json.loads((tmp_path / "none.json").read_text()) == []

"""evaluation.json: its numbers agree with each other, and it is always plain JSON."""

import json
import re
import time

import numpy as np
import pytest

from benchmarks.coco import generate_set
from ppdist.metrics.analysis import MAX_CURVES, analyse, class_table, to_json_types
from ppdist.metrics.coco import METRICS, evaluate_boxes
from ppdist.metrics.matching import OPERATING_POINTS, Counts
from tests.unit.metrics.cases import NAMES, detection_set, odd_case, random_case, record


def standing(value: float) -> float | None:
    return None if value < 0 else value


def analysed(dataset, rows_R7, step=None):
    """What is read back from the file; JSON has no NaN."""
    return json.loads(json.dumps(analyse(dataset, rows_R7, step), allow_nan=False))


def test_the_numbers_are_those_of_the_evaluation():
    dataset, rows_R7 = random_case(0)
    content, metrics = analysed(dataset, rows_R7, step=7), evaluate_boxes(dataset, rows_R7)
    assert content["step"] == 7 and content["images"] == 40
    assert content["class_names"] == list(NAMES)
    for name in (*METRICS, *OPERATING_POINTS):
        assert content["metrics"][name] == standing(metrics[name]), name
    for row in content["per_class"]:
        assert row["AP"] == standing(metrics[f"AP/{row['name']}"])
    fitness = 0.1 * metrics["mAP50"] + 0.9 * metrics["mAP"]
    assert content["metrics"]["fitness"] == pytest.approx(fitness)


def test_the_parts_agree_with_each_other():
    dataset, rows_R7 = random_case(3)
    content = analysed(dataset, rows_R7)
    metrics, rows = content["metrics"], content["per_class"][:2]  # nothing is a bird
    for name in ("AP50", "AP75", "AP_small", "AR100", "VOC_area", "VOC_11_point", "f1", "recall"):
        overall = {"AP50": "mAP50", "AP75": "mAP75", "AP_small": "mAP_small"}.get(name, name)
        assert np.mean([row[name] for row in rows]) == pytest.approx(metrics[overall]), name
    confusion, errors = content["confusion"], content["errors"]["counts"]
    assert confusion["confidence"] == metrics["best_f1_threshold"] and confusion["iou"] == 0.5
    counts = np.array(confusion["counts"])
    assert errors["correct"] == np.trace(counts)
    assert sum(errors.values()) - errors["missed"] == counts[:, :3].sum()
    for label, row in enumerate(rows):
        assert row["objects"] <= counts[label].sum()
        assert row["recall"] == pytest.approx(counts[label, label] / row["objects"])
        assert row["precision"] == pytest.approx(counts[label, label] / counts[:, label].sum())
    everything = [entry["found"] for entry in (*content["worst"], *content["best"])]
    assert 0 < sum(everything) <= errors["correct"]


def test_a_class_without_objects_has_nothing_to_measure():
    row = analysed(*random_case(3))["per_class"][2]
    assert (row.pop("name"), row.pop("objects"), row.pop("images")) == ("bird", 0, 0)
    assert set(row.values()) == {None}


@pytest.mark.parametrize("seed", range(30))
def test_odd_sets_and_no_detections_are_plain_json_too(seed):
    dataset, rows_R7, classes = odd_case(seed)
    for rows in (rows_R7, rows_R7[:0], rows_R7[:1]):
        content = analysed(dataset, rows)
        assert len(content["per_class"]) == classes
        assert np.array(content["confusion"]["counts"]).shape == (classes + 1, classes + 1)
        assert class_table(content).count("class 0") == 1


def test_all_class_curves_computed_only_once(monkeypatch):
    asked = []
    for name in ("precision_CT", "recall_CT", "f1_CT"):
        computed = getattr(Counts, name).fget
        monkeypatch.setattr(
            Counts, name, property(lambda counts, c=computed: asked.append(1) or c(counts))
        )
    times = []
    for classes in (10, 90):
        asked.clear()
        analyse(*generate_set(images=10, detections=10, classes=classes, seed=0))
        times.append(len(asked))
    assert times[0] == times[1] > 0


def test_an_empty_set_says_so():
    content = analysed(detection_set(record(1, [], [])), np.zeros((0, 7)))
    assert set(content["metrics"].values()) == {None}
    assert content["worst"] == content["best"] == []


def test_worst_and_best_images_first_with_contents():
    box, elsewhere = [10, 10, 60, 60], [300, 300, 400, 400]
    dataset = detection_set(
        record(1, [box], [0]), record(2, [box, elsewhere], [0, 1]), record(3, [box], [1]),
        record(4, [], []),
    )  # fmt: skip
    rows = [[0, 0, 0.9, *box], [1, 0, 0.8, *box], [1, 1, 0.7, *elsewhere], [2, 2, 0.9, *elsewhere]]
    content = analysed(dataset, np.array(rows))
    worst, best = content["worst"][0], content["best"][0]
    assert worst == {
        "file": "/images/3.jpg", "objects": 1, "found": 0, "missed": 1, "wrong": 1,
        "true": [[1, *box, False]], "predicted": [[2, 0.9, *elsewhere, "background"]],
    }  # fmt: skip
    assert (best["file"], best["objects"], best["missed"]) == ("/images/2.jpg", 2, 0)
    files = [entry["file"] for entry in (*content["worst"], *content["best"])]
    assert len(set(files)) == len(files) and "/images/4.jpg" not in files


def test_many_classes_draw_frequent_and_mean_curves():
    classes = MAX_CURVES + 50
    dataset, rows_R7 = generate_set(images=60, detections=20, classes=classes, seed=0)
    content = analysed(dataset, rows_R7)
    curves = content["curves"]
    assert len(curves["curve_classes"]) == len(curves["precision_CT"]) == 20
    objects = [row["objects"] for row in content["per_class"]]
    least = min(objects[label] for label in curves["curve_classes"])
    assert least >= sorted(objects)[-20]
    assert len(curves["mean_f1_T"]) == len(curves["confidence_T"]) == 101
    assert len(curves["mean_precision_R"]) == len(curves["recall_R"]) == 101
    mean = np.mean(curves["mean_precision_R"])
    assert mean == pytest.approx(content["metrics"]["mAP50"], abs=1e-3)
    assert len(json.dumps(curves)) < 100_000


def test_what_is_no_number_becomes_none():
    content = {"a": np.array([[1.5, np.nan]]), "b": (np.int64(3), float("inf")), "c": np.bool_(1)}
    assert to_json_types(content) == {"a": [[1.5, None]], "b": [3, None], "c": True}


def test_a_class_of_two_lines_has_one_row():
    content = analysed(*random_case(0, images=4))
    content["per_class"][0]["name"] = "a cat\nwith two lines\x1b[31m and colours"
    text = class_table(content)
    assert "\x1b" not in text and "a cat with two lines" in text


@pytest.mark.slow
def test_coco_sized_set_analysed_in_15_cpu_seconds():
    dataset, rows_R7 = generate_set(images=5000, detections=100, classes=80, seed=0)
    began = time.process_time()
    analyse(dataset, rows_R7)
    assert time.process_time() - began < 15


def test_class_table_has_all_classes_and_each_within_80_columns():
    content = analysed(*random_case(3))
    lines = class_table(content).splitlines()
    assert re.split(r"  +", lines[0]) == [
        *("class", "images", "objects", "P", "R", "P at .25", "R at .25", "AP50", "AP")
    ]
    assert [line.split()[0] for line in lines[2:6]] == ["all", *NAMES]
    assert lines[2].split()[-1] == f"{content['metrics']['mAP']:.3f}"
    assert lines[5].split()[2:] == ["0", *"------"], "a class without objects"
    assert max(map(len, lines)) <= 80


def test_class_table_of_many_classes_shows_the_weakest():
    content = analysed(*random_case(3))
    weakest = min(content["per_class"][:2], key=lambda row: row["AP"])
    lines = class_table(content, max_classes=1).splitlines()
    assert lines[3].split()[0] == weakest["name"] and lines[4].startswith("2 more classes")
    assert class_table(content, max_classes=2).splitlines()[5].startswith("1 more class not")

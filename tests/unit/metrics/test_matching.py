"""Who found what, against pycocotools' own matches and a plain loop by VOC's rules."""

import contextlib
import io

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ppdist.metrics import matching
from ppdist.metrics.coco import make_datasets
from ppdist.metrics.matching import (
    CROWD,
    NOBODY,
    collect_objects,
    find_overlaps,
    match_as_coco,
    match_as_voc,
    select_detections,
)
from tests.unit.metrics.cases import detection_set, odd_case, random_case, record

EVERYWHERE = [0, 1e10]


def matches_of_pycocotools(truth, found, classes) -> np.ndarray:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(*make_datasets(COCO, truth, found, classes), "bbox")
        evaluation.evaluate()
    match_F = np.full(len(found.score_F), NOBODY)
    for image in evaluation.evalImgs:
        if image is not None and image["aRng"] == EVERYWHERE:
            rows = zip(image["dtIds"], image["dtMatches"][0], image["dtIgnore"][0])
            for detection, thing, ignored in rows:
                if thing:  # ids start at 1
                    match_F[detection - 1] = CROWD if ignored else int(thing) - 1
    return match_F


@pytest.mark.parametrize("seed", range(40))
def test_detections_match_as_in_pycocotools(seed):
    dataset, rows_R7, classes = odd_case(seed)
    truth = collect_objects(dataset)
    found = select_detections(truth, rows_R7)
    ours = match_as_coco(truth, found, find_overlaps(truth, found), 0.5)
    assert ours.tolist() == matches_of_pycocotools(truth, found, classes).tolist()


def test_only_100_surest_per_class_and_image_count():
    dataset = detection_set(record(1, [], []), record(2, [], []))
    rows = np.zeros((330, 7))
    rows[:150, :3] = [[0, 0, score] for score in np.linspace(0, 1, 150)]
    rows[150:300, :2], rows[300:, :2] = [1, 0], [0, 1]
    found = select_detections(collect_objects(dataset), rows)
    groups, counts = np.unique(np.stack([found.image_F, found.label_F]), axis=1, return_counts=True)
    assert dict(zip(zip(*groups.tolist()), counts.tolist())) == {
        (0, 0): 100, (0, 1): 30, (1, 0): 100,
    }  # fmt: skip
    assert found.score_F.max() == 1 and (np.diff(found.score_F) <= 0).all()


def test_pairs_are_the_same_in_many_chunks_as_in_one(monkeypatch):
    dataset, rows_R7 = random_case(3, images=6)
    truth = collect_objects(dataset)
    found = select_detections(truth, rows_R7)
    at_once = find_overlaps(truth, found)
    monkeypatch.setattr(matching, "_PAIRS_AT_ONCE", 7)
    for ours, want in zip(find_overlaps(truth, found), at_once):
        assert np.array_equal(ours, want)
    assert len(at_once.detection_P) > 100


def by_voc_devkit(truth, found) -> np.ndarray:
    """VOCevaldet.m, line by line; but our corners are edges, where its are pixels."""
    match_F, detected = np.full(len(found.score_F), NOBODY), set()
    for f, (image, label, (x, y, width, height)) in enumerate(
        zip(found.image_F, found.label_F, found.box_F4)
    ):
        best, best_g = -np.inf, None
        for g in np.flatnonzero((truth.image_G == image) & (truth.label_G == label)):
            gx, gy, gw, gh = truth.box_G4[g]
            iw = min(x + width, gx + gw) - max(x, gx)
            ih = min(y + height, gy + gh) - max(y, gy)
            if iw > 0 and ih > 0:
                overlap = iw * ih / (width * height + gw * gh - iw * ih)
                if overlap > best:
                    best, best_g = overlap, g
        if best >= 0.5:
            if truth.crowd_G[best_g]:
                match_F[f] = CROWD
            elif best_g not in detected:
                match_F[f] = best_g
                detected.add(best_g)
    return match_F


@pytest.mark.parametrize("seed", range(20))
def test_voc_matching_equals_plain_loop(seed):
    dataset, rows_R7, _ = odd_case(seed)
    truth = collect_objects(dataset)
    found = select_detections(truth, rows_R7)
    ours = match_as_voc(truth, found, find_overlaps(truth, found))
    assert ours.tolist() == by_voc_devkit(truth, found).tolist()


def test_voc_and_coco_differ_when_best_object_taken():
    # Both detections overlap the first object most; COCO gives the second one the other object.
    boxes = [[0, 0, 100, 100], [0, 0, 100, 60]]
    dataset = detection_set(record(1, boxes, [0, 0]))
    truth = collect_objects(dataset)
    found = select_detections(
        truth, np.array([[0, 0, 0.9, 0, 0, 100, 99], [0, 0, 0.8, 0, 0, 100, 90]])
    )
    pairs = find_overlaps(truth, found)
    assert match_as_coco(truth, found, pairs, 0.5).tolist() == [0, 1]
    assert match_as_voc(truth, found, pairs).tolist() == [0, NOBODY]

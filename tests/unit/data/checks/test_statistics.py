"""Counts of a split against numbers worked out by hand."""

import json

import numpy as np
import pytest

from ppdist.data.checks.statistics import (
    class_rows,
    collect_objects,
    count_per_class,
    describe_crowding,
    overview_lines,
    summarize,
)
from ppdist.data.types import DetectionSet, ImageRecord


def record(
    image_id: int, size: tuple[int, int], boxes: list, labels: list[int], crowd: list[bool]
) -> ImageRecord:
    boxes_M4 = np.array(boxes, np.float32).reshape(-1, 4)
    return ImageRecord(
        f"/made/{image_id}.jpg",
        image_id,
        *size,
        boxes_M4,
        np.array(labels, np.int64),
        np.array(crowd, bool),
        (boxes_M4[:, 2:] - boxes_M4[:, :2]).prod(1),
    )


@pytest.fixture
def small_set() -> DetectionSet:
    records = (
        record(1, (200, 100), [[0, 0, 20, 10], [90, 40, 110, 60]], [0, 1], [False, False]),
        record(2, (100, 100), [[10, 10, 30, 50], [20, 20, 90, 90]], [0, 2], [False, True]),
        record(3, (100, 100), [], [], []),
    )
    names = ("cat", "dog", "[b]odd")
    return DetectionSet(records, names, (1, 2, 7), "set.json", ("set.json: 2 boxes clipped",))


def test_each_object_is_row_with_size_in_input(small_set):
    objects = collect_objects(small_set, (50, 100), "stretch")
    assert objects.image_M.tolist() == [0, 0, 1, 1]
    assert objects.labels_M.tolist() == [0, 1, 0, 2]
    assert objects.per_image_N.tolist() == [2, 2, 0]
    # 200x100 to 100x50 halves both sides; 100x100 to 100x50 halves the height alone.
    assert objects.input_M2.tolist() == [[10, 5], [10, 10], [20, 20], [70, 35]]
    assert objects.centres_M2.tolist() == [[0.05, 0.05], [0.5, 0.5], [0.2, 0.3], [0.55, 0.55]]
    assert objects.shapes_M.tolist() == [2, 1, 0.5, 1]


def test_letterboxed_inputs_keep_the_shape_of_the_boxes(small_set):
    objects = collect_objects(small_set, (50, 100), "letterbox")
    assert objects.input_M2.tolist() == [[10, 5], [10, 10], [10, 20], [35, 35]]


def test_crowds_are_counted_apart(small_set):
    objects = collect_objects(small_set, (100, 100), "stretch")
    objects_C, images_C = count_per_class(objects, 3)
    assert objects_C.tolist() == [2, 1, 0] and images_C.tolist() == [2, 1, 0]
    counts = summarize(small_set, objects)
    assert counts["objects"] == 3 and counts["crowds"] == 1


def test_the_summary_has_what_was_counted_by_hand(small_set):
    counts = summarize(small_set, collect_objects(small_set, (50, 100), "stretch"))
    assert counts["image_sizes"] == [[100, 100, 2], [200, 100, 1]]
    assert counts["images_without_objects"] == 1
    assert counts["most_objects_in_an_image"] == 2
    assert counts["objects_per_image"]["mean"] == pytest.approx(4 / 3)
    assert counts["small_medium_large"] == [3, 0, 0]  # 200, 400 and 800 square pixels
    assert counts["side_in_input"]["p50"] == pytest.approx(10)
    assert counts["shorter_side_in_input_below_8"] == 1
    assert counts["at_the_border"] == 1
    assert counts["centres_in_ninths"] == [[2, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert counts["notes"] == ["2 boxes clipped"]
    assert counts["classes"][1] == {
        "id": 2, "name": "dog", "images": 1, "objects": 1, "median_side_in_input": 10.0,
    }  # fmt: skip
    assert counts["classes"][2]["median_side_in_input"] is None
    assert json.loads(json.dumps(counts)) == counts


def test_overviews_of_any_two_splits_have_same_lines(small_set):
    empty = DetectionSet((record(1, (50, 40), [], [], []),), ("cat",), (1,), "set.json")
    lines = [
        [
            what
            for what, _ in overview_lines(
                summarize(some, collect_objects(some, (50, 50), "stretch"))
            )
        ]
        for some in (small_set, empty)
    ]
    assert lines[0] == lines[1]


def test_class_only_images_have_no_box_statistics():
    unknown = record(1, (0, 0), [[0, 0, 0, 0]], [1], [False])
    dataset = DetectionSet((unknown, unknown), ("cat", "dog"), (0, 1), "folder")
    counts = summarize(dataset, collect_objects(dataset, (50, 50), "stretch"), boxes=False)
    assert "objects" not in counts
    assert counts["classes"] == [
        {"id": 0, "name": "cat", "images": 0},
        {"id": 1, "name": "dog", "images": 2},
    ]
    assert [row[0] for row in overview_lines(counts)] == ["images", "classes"]
    assert class_rows([counts], 10) == [["0", "cat", "0"], ["1", "dog", "2"]]


def test_many_classes_list_only_common_and_rare():
    classes = [{"id": n, "name": f"c{n}", "images": n, "objects": n} for n in range(30)]
    rows = class_rows([{"classes": classes}, {"classes": classes}], 4)
    assert [row[1] for row in rows] == ["c29", "c28", "...", "c1", "c0"]
    assert all(len(row) == 6 for row in rows)


@pytest.mark.parametrize(
    ("counts", "limit", "keep", "said"),
    [
        ([(100, 100)], 100, 300, []),
        ([(101, 5), (230, 10)], 100, 300, ["2 of 2 images", "evaluate.max_detections: 300"]),
        ([(230, 0)], 300, 300, ["published figures count 100"]),
        ([(90, 90)], 100, 150, ["up to 180, but only 150 boxes", "nms.keep: 200"]),
        ([(400, 200)], 300, 300, ["evaluate.max_detections: 400", "nms.keep: 600", "published"]),
    ],
)
def test_images_with_more_objects_than_count_are_said(counts, limit, keep, said):
    """counts: of each image, objects of either class."""
    records = []
    for number, (first, second) in enumerate(counts):
        labels = [0] * first + [1] * second + [0] * 500  # these last ones are crowds
        crowd = [False] * (first + second) + [True] * 500
        records.append(record(number, (64, 48), [[0, 0, 9, 9]] * len(labels), labels, crowd))
    dataset = DetectionSet(records, ("cat", "dog"), (1, 2), "set.json")
    text = "\n".join(describe_crowding(dataset, limit, keep))
    assert all(part in text for part in said) and bool(text) == bool(said)

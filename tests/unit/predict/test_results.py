"""Results as files: COCO, YOLO, VOC, tables and crops."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.predict.detections import Detections
from ppdist.predict.results import Objects, Pictures, folder_name, own_results, round_down
from ppdist.predict.sources import Frame
from tests.unit.export.tiny import tiny_spec

IMAGE = np.zeros((120, 60, 3), np.uint8)


def found_in(image_HW3: np.ndarray, source: str) -> Detections:
    return Detections(
        np.array([[10, 45, 30, 90], [0, 0, 9.25, 9]], np.float32),
        np.array([0.5, 0.25], np.float32), np.array([1, 0]),
        ("red", "green", "blue"), image_HW3, source, (1, 2, 3),
    )  # fmt: skip


def test_every_format_holds_the_same_objects(tmp_path: Path) -> None:
    formats = ("yolo", "voc", "csv", "crops")
    results = Objects(tmp_path, tiny_spec(), Pictures(tmp_path, {"a.jpg": "a.jpg"}), formats)
    for name in ("a.jpg", "a.png", "deep/film.mp4"):
        index = 3 if name.endswith("mp4") else None
        results.add(Frame(name, index, IMAGE, 25), found_in(IMAGE, name))
    results.write()
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")}
    assert written == {
        "detections.json", "detections.csv", "a.jpg", "labels/classes.txt",
        "labels/a.txt", "labels/a.png.txt", "labels/deep/film.mp4_3.txt",
        "annotations/a.xml", "annotations/a.png.xml", "annotations/deep/film.mp4_3.xml",
        *(f"crops/{kind}/{name}_{at}.jpg" for kind, at in (("green", 0), ("red", 1))
          for name in ("a.jpg", "a.png", "deep/film.mp4_3")),
    }  # fmt: skip
    one = results.content()["annotations"][0]
    assert (one["bbox"], one["area"], one["category_id"]) == ([10, 45, 20, 45], 900, 2)
    with (tmp_path / "detections.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(rows[0][key]) for key in ("x1", "y1", "x2", "y2")] == [10, 45, 30, 90]
    assert rows[4]["frame"] == "3" and rows[4]["class"] == "green"
    assert rows[0]["track_id"] == ""
    assert results.total().startswith("6 objects in 3")
    assert own_results(tmp_path) == {
        "a.jpg", "detections.json", "detections.csv", "labels", "annotations", "crops"
    }  # fmt: skip


def test_a_later_run_owns_what_the_first_has_written(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg"):
        results = Objects(tmp_path, tiny_spec(), Pictures(tmp_path, {name: name}))
        results.add(Frame(name, None, IMAGE), found_in(IMAGE, name))
        results.write()
    assert results.total().startswith("2 objects in 1")
    assert own_results(tmp_path) == {"a.jpg", "b.jpg", "detections.json"}
    for text in ("", "[]", '{"info": []}', '{"info": {"description": "COCO 2017"}}'):
        (tmp_path / "detections.json").write_text(text)
        assert own_results(tmp_path) == set()


def test_a_table_has_the_tracks(tmp_path: Path) -> None:
    results = Objects(tmp_path, tiny_spec(), Pictures(tmp_path, {}), ("csv",))
    found = replace(found_in(IMAGE, "film.mp4"), track_ids=np.array([7, -1]))
    results.add(Frame("film.mp4", 0, IMAGE, 25), found)
    results.write()
    with (tmp_path / "detections.csv").open(encoding="utf-8") as file:
        assert [row["track_id"] for row in csv.DictReader(file)] == ["7", ""]


def test_the_line_counts_by_class(tmp_path: Path) -> None:
    results = Objects(tmp_path, tiny_spec(), Pictures(tmp_path, {}))
    seen = list(found_in(IMAGE, "a"))
    assert results.summary([seen]) == "1 green, 1 red" and results.summary([[]]) == ""
    assert results.summary([seen, [], seen[:1]]).endswith("in 3 frames")
    tracked = list(replace(found_in(IMAGE, "a"), track_ids=np.array([0, 1])))
    assert "through 2 frames" in results.summary([tracked, tracked])


def test_where_nothing_is_found_a_line_says_what_to_try(tmp_path: Path) -> None:
    results = Objects(tmp_path, tiny_spec(), Pictures(tmp_path, {}))
    nothing = replace(found_in(IMAGE, "a"), boxes_xyxy=np.zeros((0, 4)), scores=np.zeros(0),
                      class_ids=np.zeros(0, int))  # fmt: skip
    assert "lower score" in results.hint(0.41)
    for name, score in (("a.jpg", 0.07), ("b.jpg", 0.123), ("c.jpg", 0.01)):
        results.record_highest(Frame(name, None, IMAGE), np.array([[0, score, 0, 0, 1, 1]]))
        results.add(Frame(name, None, IMAGE), nothing)
    hint = results.hint(0.41)
    assert "0.12 in b.jpg" in hint and hint.endswith("--threshold 0.1")
    results.add(Frame("d.jpg", None, IMAGE), found_in(IMAGE, "d.jpg"))
    assert results.hint(0.41) == ""
    assert "nothing in 3" in results.total()


@pytest.mark.parametrize(("score", "tried"), [(0.99, 0.9), (0.4, 0.4), (0.0034, 0.003), (1.0, 1)])
def test_the_threshold_to_try_is_not_above_the_score(score: float, tried: float) -> None:
    assert round_down(score) == tried


@pytest.mark.parametrize("name", ["../../etc", "/a", "..", "", "a\0b", "a/b"])
def test_a_class_leads_to_no_other_folder(name: str) -> None:
    assert Path(folder_name(name, 3)).parts in (
        ("______etc",),
        ("_a",),
        ("__",),
        ("class 3",),
        ("a_b",),
    )

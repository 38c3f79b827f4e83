"""Detections in Python: words, formats, other libraries."""

import json
import sys
import types
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.image import decode_image, read_image
from ppdist.predict.detections import Detections, write_picture
from tests.errors import raises

NAMES = ("person", "bus", "\u4eba & <x>\x07")


@pytest.fixture
def found() -> Detections:
    boxes = [[10, 20, 50, 60], [0.25, 0, 100, 40], [1, 2, 3, 4]]
    return Detections(
        np.array(boxes, np.float32), np.array([0.9, 0.5, 0.25], np.float32), np.array([0, 2, 0]),
        NAMES, np.full((80, 100, 3), 90, np.uint8), "a/bus.jpg", (7, 8, 9),
    )  # fmt: skip


def test_words_and_items(found: Detections) -> None:
    assert str(found) == "2 person, 1 \u4eba & <x>\x07" and len(found) == 3
    assert repr(found).startswith("<Detections a/bus.jpg: 2 person")
    first = next(iter(found))
    assert first.box_xyxy == (10, 20, 50, 60) and (first.class_id, first.name) == (0, "person")
    nothing = Detections(
        np.zeros((0, 4), np.float32), np.zeros(0), np.zeros(0, int), NAMES, found.image
    )
    assert str(nothing) == "nothing" and not nothing and nothing.to_coco() == []
    assert (nothing.plot() == 90).all() and nothing.to_yolo() == ""


def test_objects_have_places_and_a_table(found: Detections) -> None:
    assert found[0] == next(iter(found)) and found[-1].box_xyxy == (1, 2, 3, 4)
    assert [one.name for one in found[:2]] == [one.name for one in found][:2]
    assert found[found.scores < 0.4].scores.tolist() == [0.25] and len(found[5:]) == 0
    with pytest.raises(IndexError):
        found[3]
    first, *others = found.summary()
    assert first == {"name": "person", "class_id": 0, "score": 0.9, "box_xyxy": [10, 20, 50, 60]}
    assert len(others) == 2 and json.loads(json.dumps(first)) == first
    with raises("foreign_option"):
        found[0].boxes  # noqa: B018
    with pytest.raises(AttributeError):
        found[0].nothing  # noqa: B018


def test_coco_yolo_and_voc_say_the_same_box(found: Detections) -> None:
    first = found.to_coco(5)[0]
    assert first == {"image_id": 5, "category_id": 7, "bbox": [10, 20, 40, 40], "score": 0.9}
    label, x, y, width, height = found.to_yolo().splitlines()[0].split()
    assert (label, *map(float, (x, y, width, height))) == ("0", 0.3, 0.5, 0.4, 0.5)
    assert found.to_yolo(scores=True).split()[5] == "0.9"
    root = ElementTree.fromstring(found.to_voc())
    corners = [each.text for each in root.find("object/bndbox")]
    assert corners == ["10", "20", "50", "60"]
    assert root.findall("object/name")[1].text == "\u4eba & <x>?"
    assert (root.findtext("filename"), root.findtext("size/width")) == ("bus.jpg", "100")


@pytest.mark.parametrize(
    ("form", "rounding"), [("coco", 0.005 + 0.005), ("voc", 0.5), ("yolo", 1.5e-6 * 800)]
)
def test_what_is_written_reads_back_equal_to_a_rounding(tmp_path, form, rounding):
    """Boxes of many kinds, some at the borders of the image or thinner than a pixel."""
    height, width = 600, 800
    rng = np.random.RandomState(0)
    corner_N2 = rng.uniform(0, 1, (200, 2)) * (width - 1, height - 1)
    side_N2 = np.exp(rng.uniform(np.log(1.0), np.log(width), (200, 2)))
    boxes_N4 = np.concatenate([corner_N2, corner_N2 + side_N2], axis=1)
    boxes_N4 = boxes_N4.clip(0, [width, height, width, height]).astype(np.float32)
    labels_N = rng.randint(0, 3, 200)
    names = ("c", "a", "b")
    image_HW3 = np.zeros((height, width, 3), np.uint8)
    found = Detections(boxes_N4, np.linspace(1, 0, 200), labels_N, names, image_HW3, "x.jpg")
    write_picture(tmp_path / "images" / "x.jpg", image_HW3)
    file = tmp_path / {"coco": "set.json", "voc": "x.xml", "yolo": "labels/x.txt"}[form]
    if form == "coco":
        categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
        entry = {"id": 1, "file_name": "x.jpg", "width": width, "height": height}
        content = {"images": [entry], "annotations": found.to_coco(), "categories": categories}
        file.write_text(json.dumps(content))
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(found.to_voc() if form == "voc" else found.to_yolo())
    part = SplitConfig(annotations={"coco": "set.json", "voc": ".", "yolo": "labels"}[form])
    data = DataConfig(format=form, root=str(tmp_path), train=part, val=part, class_names=names)
    (record,) = read_split(data, "train").records
    assert record.labels_M.tolist() == labels_N.tolist()
    assert np.abs(record.boxes_M4 - boxes_N4).max() <= rounding + 1e-4


def test_a_saved_picture_has_the_boxes(found: Detections, tmp_path: Path) -> None:
    saved = read_image(found.save(tmp_path / "new" / "a.png"))
    assert np.array_equal(saved, found.plot()) and (saved != 90).any()
    with raises("picture_format"):
        found.save(tmp_path / "a.xyz")


def test_json_says_each_object(found: Detections) -> None:
    content = json.loads(found.to_json())
    assert (content["source"], content["width"], content["height"]) == ("a/bus.jpg", 100, 80)
    assert content["objects"][0] == {
        "name": "person", "class_id": 0, "score": 0.9, "box_xyxy": [10, 20, 50, 60],
    }  # fmt: skip
    followed = replace(found, track_ids=np.array([4, -1, 5]))
    tracks = [each.get("track_id") for each in json.loads(followed.to_json())["objects"]]
    assert tracks == [4, None, 5]


def test_show_displays_in_a_notebook_and_else_names_a_file(
    found: Detections, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert np.array_equal(decode_image(found._repr_png_(), "cell"), found.plot())
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    found.show()
    file = Path(capsys.readouterr().out.rpartition(": ")[2].strip())
    assert np.array_equal(read_image(file), found.plot())
    file.unlink()
    shown: list[object] = []
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    fake = types.ModuleType("IPython.display")
    fake.display = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    found.show()
    assert shown == [found]


def test_supervision_takes_them(found: Detections) -> None:
    pytest.importorskip("supervision", reason="needs supervision")
    theirs = found.to_supervision()
    assert np.array_equal(theirs.xyxy, found.boxes_xyxy) and len(theirs) == 3
    assert list(theirs["class_name"]) == [one.name for one in found]


def test_pandas_takes_them(found: Detections) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    table = found.to_pandas()
    assert list(table["name"]) == [one.name for one in found] and table["x2"][0] == 50


def test_without_pandas_the_summary_is_the_way(
    found: Detections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises("package_missing", "pandas", "summary()"):
        found.to_df()

"""COCO read in pieces gives what `read_coco` gives, bit by bit, or leaves the file to it."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.data.datasets import build, coco_stream
from ppdist.data.datasets.annotations import Strictly, settle
from ppdist.data.datasets.coco import read_coco
from ppdist.data.datasets.coco_stream import NotRead, read_coco_columns
from ppdist.data.types import DetectionSet, Records
from tests.unit.data.corpus import mutated
from tests.unit.data.sets import bccd, coco_config, coco_content

BAD_BOXES = ("clip", "drop", "error")
# What may stand in place of a number or a text.
_ODD = [
    *(None, True, False, 0, -1, 3.0, 2.5, 1e308, 2**53 + 1, 2**63, 10**25, 10**305, "1", "", "x"),
    *([], [1, 2], {}, float("nan"), float("inf"), -0.0, 1e-46, 1e300, "a/b.jpg", "../x.jpg", "ü"),
]


def outcome(file: Path, policy: str, *, fast: bool) -> tuple[object, ...]:
    """Everything that is found, or the error.  fast: the slow reader reads what it refuses."""
    complain = Strictly()
    try:
        raw = None
        if fast:
            with suppress(NotRead):
                raw = read_coco_columns(file.parent / "images", file, complain)
        if raw is None:
            raw = read_coco(file.parent / "images", file, complain, everything=False)
        return content(settle(raw, policy, notes=complain.report(raw)))
    except DataError as error:
        return error.code, error.what, error.where, error.fix


def content(dataset: DetectionSet) -> tuple[object, ...]:
    records = Records.of(dataset.records)
    arrays = {
        name: (array.dtype.str, array.shape, array.tobytes())
        for name, array in records.arrays.items()
    }
    said = dataset.notes, dataset.class_names, dataset.category_ids, dataset.source
    return arrays, *said


def made_up(rng: np.random.RandomState) -> dict:
    """A set with boxes of all kinds, warnings, and an odd value here and there."""
    content = coco_content([f"{number:03d}.jpg" for number in range(12)], boxes=4)
    for entry in content["annotations"]:
        if rng.rand() < 0.5:
            entry["bbox"] = np.round(rng.uniform(-30, 90, 4), rng.randint(4)).tolist()
        if rng.rand() < 0.3:
            entry |= {"area": rng.rand() * 100, "iscrowd": int(rng.rand() < 0.5)}
        if rng.rand() < 0.2:
            entry["segmentation"] = [np.round(rng.rand(8) * 60, 2).tolist(), [{"x": [{}]}]]
        if rng.rand() < 0.05:
            entry["id"] = 1
    rng.shuffle(content["annotations"])
    for _ in range(rng.randint(3)):
        part = content[("annotations", "annotations", "images", "categories")[rng.randint(4)]]
        entry = part[rng.randint(len(part))]
        key = [*entry][rng.randint(len(entry))]
        if key == "bbox" and rng.rand() < 0.8:
            entry[key][rng.randint(4)] = _ODD[rng.randint(len(_ODD))]
        elif rng.rand() < 0.2:
            del entry[key]
        else:
            entry[key] = _ODD[rng.randint(len(_ODD))]
    keys = [*content, "info"]
    rng.shuffle(keys)
    return {key: content.get(key, {"year": [2017]}) for key in keys}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a few hundred bytes has several pieces."""
    monkeypatch.setattr(coco_stream, "_PIECE", 300)


@pytest.mark.parametrize("policy", BAD_BOXES)
def test_nasty_sets_read_in_pieces_give_the_same(tmp_path, policy, small_pieces):
    file = tmp_path / "set.json"
    kinds = set()
    for seed in range(40):
        rng = np.random.RandomState(seed)
        indent = (None, 1)[rng.randint(2)]
        file.write_text(json.dumps(made_up(rng), indent=indent, ensure_ascii=bool(seed % 2)))
        found = outcome(file, policy, fast=True)
        assert found == outcome(file, policy, fast=False), seed
        kinds.add(found[0] if isinstance(found[0], str) else len(found[1]))
    assert len(kinds) > 4, kinds  # errors, and sets with and without notes


def test_damaged_files_read_in_pieces_give_the_same(tmp_path, small_pieces):
    file = tmp_path / "set.json"
    original = json.dumps(made_up(np.random.RandomState(7))).encode()
    tokens = (
        b"NaN",
        b"null",
        b"-1",
        b"[]",
        b"{}",
        b"1e999",
        b"\xff",
        b'"id"',
        b"\xef\xbb\xbf",
        b"}",
    )
    for seed in range(120):
        file.write_bytes(mutated(original, np.random.RandomState(seed), tokens))
        assert outcome(file, "clip", fast=True) == outcome(file, "clip", fast=False), seed


@pytest.mark.parametrize(
    "text",
    [
        '{"images": [], "annotations": [], "categories": []}',
        '\ufeff {"images":[],"annotations":[],"categories":[]} \n',
        '{"images": [], "annotations": [], "categories": [], "images": []}',
        '{"images": [], "annotations": [], "categories": []} x',
        '{"images": [], "annotations": [], "categories": [],}',
        '{"images": [], "annotations": [{},], "categories": []}',
        '{"a": 12, "images": [], "annotations": [ ], "categories": [], "info": {"a": [1, {}]}}',
        '{"images": {}, "annotations": [], "categories": []}',
        "",
        "{}",
        "[]",
    ],
)
def test_short_files_are_read_or_refused_alike(tmp_path, text):
    file = tmp_path / "set.json"
    file.write_text(text)
    assert outcome(file, "clip", fast=True) == outcome(file, "clip", fast=False)


def test_file_without_errors_needs_one_reader(tmp_path, shared_dir, monkeypatch):
    """Also with boxes to clip, ids twice and areas that are none."""
    monkeypatch.setattr(build, "read_coco", None)
    monkeypatch.setattr(build, "check_files", lambda dataset: None)
    content_ = coco_content([f"{number}.jpg" for number in range(6)], boxes=4)
    (tmp_path / "images").mkdir()
    content_["annotations"][1] |= {"bbox": [-5, -5, 90, 90], "id": 1, "area": "large"}
    content_["annotations"][2] |= {"bbox": [1, 1, 0, 5]}
    (tmp_path / "set.json").write_text(json.dumps(content_))
    assert len(build.read_split(coco_config(tmp_path), "train", 3).notes) == 3
    assert len(build.read_split(bccd(shared_dir), "train", 3).records) == 205


def test_plain_names_are_taken_as_others_are(tmp_path):
    names = ["a.jpg", "b/c.jpg", "a b.jpg", "d..jpg", "x/./y.jpg", "x//z.jpg", "é.jpg", ".h.jpg"]
    (tmp_path / "set.json").write_text(json.dumps(coco_content(names)))
    found, expected = (outcome(tmp_path / "set.json", "clip", fast=fast) for fast in (True, False))
    assert found == expected
    for names in (["../a.jpg"], ["/a.jpg"], ["a/../../b.jpg"], ["."], ["a\\b.jpg"], ["a\0"], [""]):
        (tmp_path / "set.json").write_text(json.dumps(coco_content(names)))
        found, expected = (
            outcome(tmp_path / "set.json", "clip", fast=fast) for fast in (True, False)
        )
        assert found == expected, names

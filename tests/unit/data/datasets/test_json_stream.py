"""COCO read in pieces: the same whatever the pieces are, and where an error stands."""

import json
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.data.datasets import coco, json_stream
from ppdist.data.datasets.annotations import Strictly, quietly, to_detection_set
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.coco import read_coco, read_coco_columns
from ppdist.data.types import DetectionSet, RawColumns, Records
from tests.errors import raises
from tests.unit.data.corpus import mutated
from tests.unit.data.sets import bccd, coco_content

BAD_BOXES = ("clip", "drop", "error")
# What may stand in place of a number or a text.
_ODD = [
    *(None, True, False, 0, -1, 3.0, 2.5, 1e308, 2**53 + 1, 2**63, 10**25, 10**305, "1", "", "x"),
    *([], [1, 2], {}, float("nan"), float("inf"), -0.0, 1e-46, 1e300, "a/b.jpg", "../x.jpg", "ü"),
]


def outcome(file: Path, policy: str, *, one_by_one: bool = False) -> tuple[object, ...]:
    """Everything that is found, or the error.  one_by_one: no piece becomes columns at once."""
    complain = Strictly()
    with ExitStack() as changed:
        if one_by_one:
            changed.enter_context(patch.object(coco, "_usual_objects", refused))
            changed.enter_context(patch.object(coco, "_OF_IMAGE", refused))
        try:
            raw = read_coco_columns(file.parent / "images", file, complain)
            return content(to_detection_set(raw, policy, notes=complain.report(raw)))
        except DataError as error:
            return error.code, error.what, error.where, error.fix


def refused(entries: object) -> None:
    raise TypeError


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


@pytest.mark.parametrize("policy", BAD_BOXES)
def test_nasty_sets_give_the_same_in_pieces_and_one_by_one(tmp_path, policy, monkeypatch):
    file = tmp_path / "set.json"
    kinds = set()
    for seed in range(40):
        rng = np.random.RandomState(seed)
        indent = (None, 1)[rng.randint(2)]
        file.write_text(json.dumps(made_up(rng), indent=indent, ensure_ascii=bool(seed % 2)))
        whole = outcome(file, policy, one_by_one=True)
        with monkeypatch.context() as small:
            small.setattr(json_stream, "_PIECE", 300)
            assert outcome(file, policy) == whole, seed
        kinds.add(whole[0] if isinstance(whole[0], str) else len(whole[1]))
    assert len(kinds) > 4, kinds  # errors, and sets with and without notes


def test_sets_and_columns_are_one(tmp_path):
    file = tmp_path / "set.json"
    for seed in range(20):
        file.write_text(json.dumps(made_up(np.random.RandomState(seed))))
        said, found = ([], []), []
        for read, issues in zip((read_coco, read_coco_columns), said):
            options = {} if read is read_coco else {"masks": True}
            with suppress(DataError):
                found.append(read(tmp_path / "images", file, issues.append, **options))
        assert said[0] == said[1], seed
        if found:
            raw, columns = found
            assert [str(image.path) for image in raw.images] == columns.paths
            again = RawColumns.of(raw, masks=True)
            by_image = columns.image_O.argsort(kind="stable")
            for name in ("boxes_O4", "labels_O", "crowd_O", "area_O"):
                np.testing.assert_array_equal(
                    getattr(columns, name)[by_image], getattr(again, name)
                )


def test_damaged_files_are_refused_in_words(tmp_path, monkeypatch):
    """In pieces as in one, and never by anything but a DataError."""
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
        whole = outcome(file, "clip")
        with monkeypatch.context() as small:
            small.setattr(json_stream, "_PIECE", 300)
            assert outcome(file, "clip") == whole, seed


NOTHING = '"images": [], "annotations": [], "categories": []'


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (f"{{{NOTHING}}}", "not_json", ""),
        (f'\ufeff {{"a": 12, {NOTHING}, "info": {{"a": [1, {{}}]}}}} \n', "not_json", ""),
        (f'{{{NOTHING}, "images": []}}', "not_coco", "it has 'images' twice"),
        (f"{{{NOTHING}}} x", "not_json", "Extra data: line 1 column 53"),
        (f"{{{NOTHING},}}", "not_json", "Expecting property name enclosed in double quotes"),
        ('{"images":\n [{"a": 1},], "b": 1}', "not_json", "line 2 column 12"),
        ('{"images":\n [{"a": 1}\n {"b"}]}', "not_json", "',' delimiter: line 3 column 2"),
        ('{"images": [{"a": "b', "not_json", "Unterminated string starting at: line 1 column 19"),
        ('{"images": [{"a": 1}', "not_json", "Expecting ',' delimiter: line 1 column 21"),
        ('{"images": {}, "annotations": []}', "not_coco", "it has no list 'images'"),
        ("", "not_json", "Expecting an object: line 1 column 1"),
        ("{}", "not_coco", "it has: nothing"),
        ("[]", "not_coco", "found a list"),
        ('{"a": ' + "[" * 100000, "not_json", "nested too deeply"),
    ],
)
@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_place_of_what_is_wrong_is_named(tmp_path, text, code, words, piece, monkeypatch):
    monkeypatch.setattr(json_stream, "_PIECE", piece)
    file = tmp_path / "set.json"
    file.write_text(text)
    if not words:
        assert read_coco_columns(tmp_path, file, quietly).paths == []
        return
    with raises(code) as caught:
        read_coco_columns(tmp_path, file, quietly)
    assert words in caught.value.what


def test_other_encodings_and_line_ends_are_read_and_said(tmp_path):
    file, issues = tmp_path / "set.json", []
    content = coco_content(["000.jpg"], boxes=1)
    content["categories"][0]["name"] = "红"
    file.write_bytes(json.dumps(content, ensure_ascii=False, indent=1).encode("gb18030"))
    assert read_coco_columns(tmp_path, file, issues.append).class_names[0] == "红"
    assert [issue.code for issue in issues] == ["encoding"]
    file.write_bytes(json.dumps(content, indent=1).replace("\n", "\r\n").encode())
    read_coco_columns(tmp_path, file, issues.append)
    assert [issue.code for issue in issues] == ["encoding", "line_ends"]
    file.write_bytes(json.dumps(content).encode("utf-16"))
    with raises("not_json") as caught:
        read_coco_columns(tmp_path, file, quietly)
    assert "UTF-16" in caught.value.what


def test_real_set_takes_the_short_way(shared_dir, monkeypatch):
    monkeypatch.setattr(coco._File, "_object", None)
    monkeypatch.setattr(coco._File, "_unusual_image", None)
    assert len(read_split(bccd(shared_dir), "train", 3).records) == 205


def test_plain_names_are_taken_as_others_are(tmp_path, monkeypatch):
    names = ["a.jpg", "b/c.jpg", "a b.jpg", "d..jpg", "x/./y.jpg", "x//z.jpg", "é.jpg", ".h.jpg"]
    bad = ["../a.jpg"], ["/a.jpg"], ["a/../../b.jpg"], ["."], ["a\\b.jpg"], ["a\0"], [""]
    for some in (names, *bad):
        (tmp_path / "set.json").write_text(json.dumps(coco_content(some)))
        found = outcome(tmp_path / "set.json", "clip")
        with monkeypatch.context() as changed:
            changed.setattr(coco, "_PLAIN_NAME", re.compile("(?!)"))
            assert outcome(tmp_path / "set.json", "clip") == found, some


def test_a_number_of_thousands_of_digits_is_no_id(tmp_path):
    content = json.dumps(coco_content(["000.jpg"]) | {"categories": [{"id": "@", "name": "x"}]})
    file = tmp_path / "a.json"
    file.write_text(content.replace('"@"', "1" * 5000))
    with raises("bad_category_id"):
        read_coco(tmp_path, file, quietly)

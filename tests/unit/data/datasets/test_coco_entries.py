"""COCO's entries by schema and key by key: the same, and where an error stands."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import IssueLog, find_image, ignore_issue, to_detection_set
from ppdist.data.datasets.coco import read_coco, read_coco_columns
from ppdist.data.types import DetectionSet, RawColumns, Records
from tests.errors import raises
from tests.unit.data.sets import coco_content

BAD_BOXES = ("clip", "drop", "error")
# What may stand in place of a number or a text.
_ODD = [
    *(None, True, False, 0, -1, 3.0, 2.5, 1e308, 2**53 + 1, 2**63, 10**25, 10**305, "1", "", "x"),
    *([], [1, 2], {}, float("nan"), float("inf"), -0.0, 1e-46, 1e300, "a/b.jpg", "../x.jpg", "ü"),
]


def outcome(file: Path, policy: str) -> tuple[object, ...]:
    """Everything that is found, or the error."""
    complain = IssueLog()
    try:
        raw = read_coco_columns(file.parent / "images", file, complain)
        return content(to_detection_set(raw, policy, notes=complain.report(raw)))
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


@pytest.mark.parametrize("policy", BAD_BOXES)
def test_nasty_sets_give_the_same_by_schema_and_key_by_key(tmp_path, policy):
    """Python's parser, which NaN needs, gives entries for which there is no schema."""
    file = tmp_path / "set.json"
    kinds = set()
    for seed in range(40):
        rng = np.random.RandomState(seed)
        indent = (None, 1)[rng.randint(2)]
        made = made_up(rng)
        file.write_text(json.dumps(made, indent=indent, ensure_ascii=bool(seed % 2)))
        by_schema = outcome(file, policy)
        file.write_text(json.dumps({**made, "info": np.nan}))
        assert outcome(file, policy) == by_schema, seed
        kinds.add(by_schema[0] if isinstance(by_schema[0], str) else len(by_schema[1]))
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


NOTHING = '"images": [], "annotations": [], "categories": []'


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (f"{{{NOTHING}}}", "not_json", ""),
        (f'\ufeff {{"a": 12, {NOTHING}, "info": {{"a": [1, {{}}]}}}} \n', "not_json", ""),
        (f'{{{NOTHING}, "images": []}}', "not_coco", "it has 'images' twice"),
        (f"{{{NOTHING}}} x", "not_json", "Extra data: line 1 column 53"),
        (f"{{{NOTHING},}}", "not_json", "Expecting property name enclosed in double quotes"),
        ('{"images":\n [{"a": 1},], "b": 1}', "not_json", "line 2 column 1"),
        ('{"images":\n [{"a": 1}\n {"b"}]}', "not_json", "',' delimiter: line 3 column 2"),
        ('{"images": [{"a": "b', "not_json", "Unterminated string starting at: line 1 column 19"),
        ('{"images": [{"a": 1}', "not_json", "Expecting ',' delimiter: line 1 column 21"),
        ('{"images": {}, "annotations": []}', "not_coco", "it has no list 'images'"),
        ("", "not_json", "Expecting value: line 1 column 1"),
        ("{}", "not_coco", "it has: nothing"),
        ("[]", "not_coco", "found a list"),
        ('{"a": ' + "[" * 100000, "not_json", "nested too deeply"),
    ],
)
def test_place_of_what_is_wrong_is_named(tmp_path, text, code, words):
    file = tmp_path / "set.json"
    file.write_text(text)
    if not words:
        assert read_coco_columns(tmp_path, file, ignore_issue).paths == []
        return
    with raises(code) as caught:
        read_coco_columns(tmp_path, file, ignore_issue)
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
    with raises("not_utf8"):
        read_coco_columns(tmp_path, file, ignore_issue)


def test_plain_names_are_taken_as_others_are(tmp_path):
    file, folder = tmp_path / "set.json", tmp_path / "images"
    names = ["a.jpg", "b/c.jpg", "a b.jpg", "d..jpg", "x/./y.jpg", "x//z.jpg", "é.jpg", ".h.jpg"]
    file.write_text(json.dumps(coco_content(names)))
    expected = [str(find_image(folder, name, str(file), ignore_issue)) for name in names]
    assert read_coco_columns(folder, file, ignore_issue).paths == expected
    for name in ("../a.jpg", "/a.jpg", "a/../../b.jpg", ".", "a\0", "\ud800.jpg", ""):
        file.write_text(json.dumps(coco_content([name])))
        assert outcome(file, "clip")[0] == "path_outside", name


def test_a_number_of_thousands_of_digits_is_no_id(tmp_path):
    content = json.dumps(coco_content(["000.jpg"]) | {"categories": [{"id": "@", "name": "x"}]})
    file = tmp_path / "a.json"
    file.write_text(content.replace('"@"', "1" * 5000))
    with raises("bad_category_id"):
        read_coco(tmp_path, file, ignore_issue)

"""Damaged files of every kind: none crashes us, none hangs, none gives a traceback."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig
from ppdist.data.checks.images import ImageFile, check_images
from ppdist.data.checks.validate import validate
from ppdist.data.datasets.annotations import to_detection_set
from ppdist.data.datasets.build import read_raw, read_split
from tests.unit.data.corpus import config, mutated, write_clean_coco, write_picture

# Files of each of five kinds.
_MUTATIONS = pytest.mark.parametrize("count", [80, pytest.param(400, marks=pytest.mark.slow)])
_TOKENS = {
    "json": (b"NaN", b"null", b"-1", b"[]", b"{}", b'""', b"1e999", b"9" * 25, b"\xff", b'"id"'),
    "xml": (b"<", b"/>", b"&x;", b"<object>", b"NaN", b"-5", b"1e999", b"\x00", b"\xff", b"<size>"),
    "txt": (b"nan", b"inf", b"-1", b"\n", b" ", b"1e999", b"7", b"\x00", b"\xff", b"\xa0"),
}


def put(file: Path, content: bytes) -> None:
    """In a new file: to empty one that is there costs 4 ms, forty times as much."""
    file.unlink()
    file.write_bytes(content)


@_MUTATIONS
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_damaged_images_never_kill_or_hang_decoder(tmp_path, suffix, count):
    kinds = {
        "jpg": (("RGB", {}), ("L", {"progressive": True}), ("CMYK", {})),
        "png": (("RGB", {}), ("P", {}), ("LA", {}), ("RGBA", {}), ("1", {})),
    }[suffix]
    originals = [
        write_picture(tmp_path / f"original{number}.{suffix}", number, mode, **options).read_bytes()
        for number, (mode, options) in enumerate(kinds)
    ]
    files = []
    for seed in range(count):
        rng = np.random.RandomState(seed)
        file = tmp_path / f"{seed}.{suffix}"
        file.write_bytes(mutated(originals[seed % len(originals)], rng))
        files.append(ImageFile(str(file), None))
    checks = check_images(files, workers=2, timeout=10.0)
    kinds_found = {found.problem.code for found in checks if found.problem}
    assert len(checks) == count
    assert kinds_found <= {"image_truncated", "image_unreadable", "image_empty"}
    assert "image_truncated" in kinds_found and "image_unreadable" in kinds_found


def _write_voc(root: Path) -> tuple[DataConfig, Path]:
    (root / "Annotations").mkdir()
    write_picture(root / "images" / "0.jpg", 0)
    things = "".join(
        f"<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin>"
        "<xmax>20</xmax><ymax>30</ymax></bndbox></object>"
        for name in ("cat", "dog")
    )
    file = root / "Annotations" / "0.xml"
    file.write_text(
        "<annotation><filename>0.jpg</filename><size><width>64</width><height>48</height>"
        f"<depth>3</depth></size>{things}</annotation>"
    )
    for split in ("train", "val"):
        (root / f"{split}.txt").write_text("0\n")
    return config(root, "voc", "train.txt", "val.txt", class_names=("cat", "dog")), file


def _write_yolo(root: Path) -> tuple[DataConfig, Path]:
    write_picture(root / "images" / "0.jpg", 0)
    (root / "labels").mkdir()
    file = root / "labels" / "0.txt"
    file.write_text("0 0.5 0.5 0.25 0.25\n1 0.1 0.1 0.3 0.1 0.3 0.4 0.1 0.4\n1 0.2 0.2 0.1 0.1\n")
    for split in ("train", "val"):
        (root / f"{split}.txt").write_text("./images/0.jpg\n")
    return config(root, "yolo", "train.txt", "val.txt", class_names=("cat", "dog")), file


def _write_json(root: Path) -> tuple[DataConfig, Path]:
    settings = write_clean_coco(root)
    file = root / "train.json"
    content = json.loads(file.read_text())
    for entry in content["annotations"]:
        entry |= {"segmentation": [[1, 2, 9, 2, 9, 9]], "iscrowd": 0, "area": 400}
    file.write_text(json.dumps(content))
    return settings, file


@_MUTATIONS
@pytest.mark.parametrize(
    "suffix, write", [("json", _write_json), ("xml", _write_voc), ("txt", _write_yolo)]
)
def test_damaged_annotations_give_issues_or_message(tmp_path, suffix, write, count):
    settings, file = write(tmp_path)
    original = file.read_bytes()
    outcomes = {"read": 0, "found": 0, "refused": 0}
    for seed in range(count):
        put(file, mutated(original, np.random.RandomState(seed), _TOKENS[suffix]))
        issues = []
        try:
            raw = read_raw(settings, "train", issues.append)
            to_detection_set(raw, "clip", masks=True)
            outcomes["found" if issues else "read"] += 1
        except DataError as error:
            assert str(file) in str(error) or str(tmp_path) in str(error)
            outcomes["refused"] += 1
        try:
            read_split(settings, "train", masks=True)
        except DataError:
            continue
    assert sum(outcomes.values()) == count, outcomes
    assert outcomes["read"] > 5 or count < 400, outcomes  # few are as good as before
    assert outcomes["found"] + outcomes["refused"] > count / 4, outcomes


@pytest.mark.parametrize(
    "write, suffix", [(_write_json, "json"), (_write_voc, "xml"), (_write_yolo, "txt")]
)
def test_validate_reports_on_damaged_annotations(tmp_path, write, suffix, checked_here):
    settings, file = write(tmp_path)
    original = file.read_bytes()
    for seed in range(24):
        put(file, mutated(original, np.random.RandomState(seed), _TOKENS[suffix]))
        try:
            json.dumps(validate(settings, decode=False, workers=1).as_json())
        except DataError as error:
            assert str(tmp_path) in str(error)

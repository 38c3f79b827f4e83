"""Annotations of strangers: small on disk and endless in memory, or names that lead elsewhere."""

import os
from pathlib import Path

import pytest
import yaml

from ppdist.data.datasets.annotations import find_class_names, ignore_issue, read_text
from ppdist.data.datasets.convert import convert
from ppdist.data.datasets.voc import read_voc
from ppdist.data.types import Issue, RawImage, RawObject, RawSet
from tests.errors import raises


def laughs(levels: int, each: int = 10) -> str:
    lines = ["a0: &a0 [" + "x, " * each + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + f"*a{level - 1}, " * each + "]")
    return "\n".join(lines) + "\n"


def test_expanding_yaml_names_no_classes(tmp_path: Path) -> None:
    file = tmp_path / "data.yaml"
    for text in (
        laughs(12) + "names: [*a11]\n",
        laughs(12) + "names: {0: *a11}\n",
        "names: " + "[" * 5000 + "]" * 5000,
        "a: &a {k: v}\nb: &b {<<: [*a, *a]}\nnames: [*b]\n",
        "names: [[a, b], {c: d}]\n",
    ):
        file.write_text(text)
        assert find_class_names(tmp_path, ()) == ()
    file.write_text(yaml.safe_dump({"names": {0: "cat", 1: 7, 2: True}}))
    assert find_class_names(tmp_path, ()) == ("cat", "7", "True")


VOC = "<annotation><size><width>9</width><height>9</height></size>{}</annotation>"


def test_pipes_and_devices_are_no_annotations(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    assert find_class_names(tmp_path, ()) == ()  # other files may lie there
    for name in ("pipe.yaml", "zero.yaml"):
        with raises("file_unreadable", str(name)):
            read_text(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE a [<!ENTITY b "' + "b" * 30 + '">]>' + VOC.format("<x>&b;</x>"),
        '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>' + VOC.format("<x>&b;</x>"),
        '<!DOCTYPE a [<!ENTITY % b SYSTEM "http://127.0.0.1:9/x"> %b;]>' + VOC.format(""),
        VOC.format("<x>" * 100_000 + "</x>" * 100_000),
        VOC.format('<x type="json">' + "[" * 100_000 + "</x>"),
        VOC.format('<x type="json">' + "9" * 100_000 + "</x>"),
    ],
)
def test_xml_entities_or_nesting_is_one_short_issue(text: str, tmp_path: Path) -> None:
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text(text)
    (tmp_path / "list.txt").write_text("a\n")
    found: list[Issue] = []
    read_voc(tmp_path, tmp_path, tmp_path / "list.txt", ("x",), found.append)
    (finding,) = found
    assert finding.code == "annotation_unreadable"
    assert len(finding.text) < 500 and "/etc" not in finding.text


def test_a_size_that_no_number_holds_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text(VOC.format("").replace("9", "9" * 100_000))
    (tmp_path / "list.txt").write_text("a\n")
    (image,) = read_voc(tmp_path, tmp_path, tmp_path / "list.txt", ("x",), ignore_issue).images
    assert (image.width, image.height, image.size_known) == (1, 1, False)


@pytest.mark.parametrize(
    "name", [".. /" * 4 + "a.jpg", "\u2003../" * 4 + "a.jpg", " . /a.jpg", " .. "]
)
@pytest.mark.parametrize("form", ["coco", "yolo"])
def test_no_name_leads_a_conversion_out_of_its_folder(form, name: str, tmp_path: Path) -> None:
    """Blanks around dots are part of a name, and go when the name is made fit for all formats."""
    images, out = tmp_path / "in" / "images", tmp_path / "deep" / "er" / "out"
    images.mkdir(parents=True)
    paths = [images / name, images / "b.jpg"]
    things = [RawObject((0.0, 0.0, 4.0, 4.0), 0, "here")]
    raw = RawSet(
        [RawImage(p, k, 9, 9, things, "here") for k, p in enumerate(paths)], ("c",), (1,), "s"
    )
    before = set(tmp_path.rglob("*"))
    convert(raw, form, out, images="copy", split="train")
    made = set(tmp_path.rglob("*")) - before
    assert made and all(out == path or out in path.parents or path in out.parents for path in made)
    assert not any(".." in path.relative_to(out).parts for path in made if out in path.parents)

"""What a data.yaml or a folder is taken for, and what is said where that is not plain."""

import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import find_image, ignore_issue
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.layout import Layout, find_layout
from ppdist.data.types import Issue
from tests.errors import raises
from tests.unit.data.sets import voc_xml

NAMES = ("cat", "dog")


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def write(root: Path, name: str, text: str) -> None:
    touch(root, name)
    (root / name).write_text(text)


def write_image(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 48)).save(file)


def coco(root: Path, name: str, *images: str) -> None:
    content = {
        "images": [{"id": n, "file_name": image} for n, image in enumerate(images)],
        "annotations": [],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}],
    }
    write(root, name, json.dumps(content))


def xml(root: Path, *names: str) -> None:
    for name in names:
        write(root, name, voc_xml("x", [(each, (1, 2, 30, 40)) for each in NAMES]))


def places(layout: Layout) -> tuple[object, ...]:
    return tuple(
        None if part is None else (part.images, part.annotations)
        for part in (layout.train, layout.val)
    )


def refused(source: Path, code: str) -> str:
    with raises(code) as caught:
        find_layout(str(source))
    return str(caught.value)


# --- data.yaml ---


@pytest.mark.parametrize(
    ("text", "train", "val"),
    [
        # Roboflow: a relative path that means the folder beside the file.
        ("train: ../train/images\nval: ../valid/images", "train/images", "valid/images"),
        ("path: .\ntrain: [train/images, more/images]\nval: valid/images",
         ("train/images", "more/images"), "valid/images"),
        ("path: {root}\ntrain: train\nvalid: valid", "train", "valid"),
    ],
)  # fmt: skip
def test_data_yaml_names_folders(tmp_path, text, train, val):
    touch(tmp_path, "train/images/a.jpg", "train/images/b.png", "valid/images/c.jpg")
    touch(tmp_path, "more/images/d.jpg")
    text = f"{text.replace('{root}', str(tmp_path))}\nnc: 2\nnames: [cat, dog]\n"
    write(tmp_path, "data.yaml", text)
    for source in (tmp_path / "data.yaml", tmp_path):
        layout = find_layout(str(source))
        assert layout.format == "yolo" and layout.root == tmp_path
        assert places(layout) == ((train, ""), (val, ""))
        assert layout.class_names == NAMES and layout.name == tmp_path.name
        assert layout.images == (3 if isinstance(train, tuple) else 2)


def test_data_yaml_elsewhere_lists_and_names_by_number(tmp_path):
    touch(tmp_path, "set/images/a.jpg")
    write(tmp_path, "set/train.txt", "./images/a.jpg\n./images/b.jpg\n")
    write(tmp_path, "yamls/pets.yaml", "path: ../set\ntrain: train.txt\nnames: {0: cat, 1: 010}\n")
    layout = find_layout(str(tmp_path / "yamls" / "pets.yaml"))
    assert (layout.root, layout.name, layout.images) == (tmp_path / "set", "pets", 2)
    assert places(layout) == ((".", "train.txt"), None) and layout.class_names == ("cat", "010")


def test_data_yaml_outside_its_path_has_root_above_all(tmp_path):
    touch(tmp_path, "a/images/train/a.jpg", "a/images/val/b.jpg", "yamls/none")
    base = tmp_path / "a" / "images"
    write(tmp_path, "yamls/d.yaml", f"train: {base}/train\nval: {base}/val\nnames: [cat]\n")
    layout = find_layout(str(tmp_path / "yamls" / "d.yaml"))
    assert layout.root == tmp_path / "a"  # so that labels/ are found beside images/
    assert places(layout) == (("images/train", ""), ("images/val", ""))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("train: t\nnc: 3\nnames: [cat, dog]", "class_count_differs", ":2:5: nc is 3, but names"),
        ("train: t\nnames: {0: cat, 2: dog}", "bad_class_numbers", "the numbers 0 to 1 as keys"),
        ("train: t\nnames: cat", "bad_data_yaml", 'names: found "cat" (text), expected a list'),
        ("train: t\nnames: [cat, cat]", "class_name_duplicate", "class 'cat' is listed twice"),
        ("train: 3\nnames: [cat]", "bad_data_yaml", "train: found 3, expected a folder"),
        ("val: t\nnames: [cat]", "split_missing", "names no training images"),
        ("train: gone\nnames: [cat]", "split_missing", "gone: does not exist"),
        ("train: [t, t.txt]\nnames: [cat]", "bad_data_yaml", "folders (t) and lists (t.txt)"),
        ("model: {name: yolov5}", "data_kind_unknown", "to use a configuration, write `-c "),
        ("train: t\nnames: [cat]\ntrain: t", "duplicate_key", "given twice"),
        ("train: gone\nnames: [cat]\ndownload: https://x.org/a.zip", "download_refused",
         'download it yourself: "https://x.org/a.zip"'),
    ],
)  # fmt: skip
def test_data_yaml_that_cannot_be_used_is_told(tmp_path, text, code, said):
    touch(tmp_path, "t/a.jpg", "t.txt")
    write(tmp_path, "d.yaml", text)
    assert said in refused(tmp_path / "d.yaml", code)


def test_download_is_not_run_where_images_are(tmp_path):
    touch(tmp_path, "t/a.jpg")
    text = "train: t\nnc: 1\ndownload: |\n  import os\n"
    write(tmp_path, "d.yaml", text)
    layout = find_layout(str(tmp_path / "d.yaml"))
    assert layout.class_names == ("class_0",)
    assert [what.partition(":")[0] for what, _ in layout.notes] == ["names", "download", "1 image"]


# --- folders ---


@pytest.mark.parametrize(
    ("files", "train", "val"),
    [
        ({"annotations/instances_train2017.json": "train2017/a.jpg",
          "annotations/instances_val2017.json": "val2017/b.jpg",
          "annotations/captions_val2017.json": "val2017/b.jpg"},
         ("train2017", "annotations/instances_train2017.json"),
         ("val2017", "annotations/instances_val2017.json")),
        ({"annotations/train.json": "images/train/a.jpg",
          "annotations/val.json": "images/val/b.jpg"},
         ("images/train", "annotations/train.json"), ("images/val", "annotations/val.json")),
        ({"train/_annotations.coco.json": "train/a.jpg",
          "valid/_annotations.coco.json": "valid/b.jpg",
          "test/_annotations.coco.json": "test/c.jpg"},
         ("train", "train/_annotations.coco.json"), ("valid", "valid/_annotations.coco.json")),
        ({"annotations/instances_default.json": "images/a.jpg"},
         ("images", "annotations/instances_default.json"), None),
    ],
)  # fmt: skip
def test_coco_folder(tmp_path, files, train, val):
    for file, image in files.items():
        touch(tmp_path / "top", image)
        coco(tmp_path / "top", file, Path(image).name)
    layout = find_layout(str(tmp_path))  # the folder in it is what an archive made
    assert (layout.format, layout.root, layout.name) == ("coco", tmp_path / "top", "top")
    assert places(layout) == (train, val)
    assert layout.class_names == NAMES and layout.images == 1
    tests = any(what.startswith("test split") for what, _ in layout.notes)
    assert tests == any("test" in file for file in files)


def test_split_called_test_is_of_the_section(tmp_path):
    touch(tmp_path, "t/images/a.jpg", "test/images/b.jpg", "test/labels/b.txt")
    text = "train: t/images\ntest: {}\nnames: [cat, dog]\n"
    write(tmp_path, "data.yaml", text.format("test/images"))
    layout = find_layout(str(tmp_path))
    assert layout.test is not None and layout.section()["test"]["images"] == "test/images"
    config = DataConfig(**{"val": layout.section()["train"]} | layout.section())
    assert [Path(each.path).name for each in read_raw(config, "test", ignore_issue).images] == [
        "b.jpg"
    ]
    write(tmp_path, "data.yaml", text.format("gone"))
    layout = find_layout(str(tmp_path))
    assert layout.test is None and "gone: does not exist" in layout.notes[0][0]


def test_coco_folder_that_is_not_plain_is_told(tmp_path):
    coco(tmp_path, "annotations/train.json", "a.jpg")
    refused(tmp_path, "image_missing")
    coco(tmp_path, "annotations/train_small.json", "a.jpg")
    told = refused(tmp_path, "split_ambiguous")
    assert "train split: annotations/train.json, annotations/train_small.json" in told


@pytest.mark.parametrize(
    ("annotations", "images", "train", "val"),
    [
        (["Annotations/a.xml", "Annotations/b.xml"], ["JPEGImages/a.jpg", "JPEGImages/b.jpg"],
         ("JPEGImages", "Annotations"), None),
        (["train/a.xml", "valid/b.xml"], ["train/a.jpg", "valid/b.jpg"],
         ("train", "train"), ("valid", "valid")),
        (["labels/train/a.xml", "labels/val/a.xml"], ["images/train/a.jpg", "images/val/a.jpg"],
         ("images/train", "labels/train"), ("images/val", "labels/val")),
        (["a.xml", "b.xml"], ["a.jpg", "b.jpg"], (".", "."), None),
    ],
)  # fmt: skip
def test_voc_folder_without_lists(tmp_path, annotations, images, train, val):
    xml(tmp_path, *annotations)
    touch(tmp_path, *images)
    layout = find_layout(str(tmp_path))
    assert layout.format == "voc" and places(layout) == (train, val)
    assert layout.class_names == NAMES and layout.images == (1 if val else 2)
    assert layout.notes == ()
    touch(tmp_path, f"{train[0]}/unlabelled.jpg")
    assert len(find_layout(str(tmp_path)).notes) == (0 if val else 1)


def test_voc_folder_with_lists(tmp_path):
    xml(tmp_path, "Annotations/a.xml", "Annotations/b.xml")
    touch(tmp_path, "JPEGImages/a.jpg", "JPEGImages/b.jpg")
    for split, stem in {"train": "a", "val": "b"}.items():
        write(tmp_path, f"ImageSets/Main/{split}.txt", f"{stem}\n")
    layout = find_layout(str(tmp_path))
    lists = [("JPEGImages", f"ImageSets/Main/{split}.txt") for split in ("train", "val")]
    assert places(layout) == tuple(lists) and layout.images == 1
    (tmp_path / "VOC2007").mkdir()
    for name in ("Annotations", "ImageSets", "JPEGImages"):
        (tmp_path / name).rename(tmp_path / "VOC2007" / name)
    touch(tmp_path, "README", "VOC2012/readme")
    assert find_layout(str(tmp_path)).root == tmp_path / "VOC2007"
    touch(tmp_path, "VOC2012/ImageSets/x")
    assert "split: VOC2007, VOC2012" in refused(tmp_path, "split_ambiguous")
    (tmp_path / "VOC2007" / "Annotations").rename(tmp_path / "VOC2007" / "xml")
    tmp_path = tmp_path / "VOC2007"
    refused(tmp_path, "annotation_file_missing")


@pytest.mark.parametrize(
    ("files", "train", "val"),
    [
        (["images/train/a.jpg", "images/val/b.jpg", "labels/train/a.txt"],
         ("images/train", ""), ("images/val", "")),
        (["train/images/a.jpg", "valid/images/b.jpg", "train/labels/a.txt"],
         ("train", ""), ("valid", "")),
        (["images/a.jpg", "labels/a.txt"], ("images", ""), None),
        (["a.jpg", "a.txt"], (".", ""), None),
    ],
)  # fmt: skip
def test_yolo_folder_without_yaml(tmp_path, files, train, val):
    touch(tmp_path, *files)
    if not (tmp_path / "a.jpg").exists():
        refused(tmp_path, "class_names_missing")
    write(tmp_path, "classes.txt", "cat\ndog\n")
    layout = find_layout(str(tmp_path))
    assert layout.format == "yolo" and places(layout) == (train, val)
    assert layout.class_names == NAMES and layout.images == 1


BOX = "0 0.5 0.5 0.25 0.5\n"


def images_of(layout: Layout, split: str = "train") -> dict[str, int]:
    """Objects of each image, whose path is relative to root."""
    section = layout.section()
    config = DataConfig(**{"val": section["train"]} | section)
    raw = read_raw(config, split, ignore_issue)
    return {os.path.relpath(each.path, layout.root): len(each.objects) for each in raw.images}


@pytest.mark.parametrize(
    ("texts", "images"),
    [
        # CVAT, "YOLO 1.1".
        ({"obj.names": "cat\ndog\n", "obj.data": "classes = 2\ntrain = data/train.txt\n",
          "train.txt": "data/obj_train_data/a.jpg\n", "obj_train_data/a.txt": BOX},
         "obj_train_data/a.jpg"),
        # Darknet's folders.
        ({"data/obj.names": "cat\ndog\n", "data/train.txt": "data/obj/a.jpg\n",
          "data/obj/a.txt": BOX, "cfg/yolo.cfg": ""}, "data/obj/a.jpg"),
        # PaddleX's names of lists, Windows' separators, suffixes in capitals.
        ({"labels.txt": "0 cat\n1 dog\n", "train_list.txt": "images\\a.JPG\n",
          "labels/a.TXT": BOX}, "images/a.JPG"),
        # FiftyOne, and a list that no split is called after.
        ({"obj.names": "cat\ndog\n", "images.txt": "data/a.jpg\n", "data/a.txt": BOX},
         "data/a.jpg"),
        ({"classes.names": "cat\ndog\n", "训练集/a.txt": BOX}, "训练集/a.jpg"),
        ({"Labels/classes.txt": "cat\ndog\n", "Labels/a.txt": BOX}, "Images/a.jpg"),
        ({"images/train/classes.txt": "cat\ndog\n", "images/train/a.txt": BOX},
         "images/train/a.jpg"),
    ],
)  # fmt: skip
def test_yolo_folders_of_other_tools(tmp_path, texts, images):
    for name, text in texts.items():
        write(tmp_path, name, text)
    touch(tmp_path, images)
    layout = find_layout(str(tmp_path))
    assert layout.format == "yolo" and layout.class_names == NAMES
    assert images_of(layout) == images_of(layout, "val") == {images: 1}
    assert [what.partition(":")[0] for what, _ in layout.notes] == ["1 image"]


def test_darknets_file_says_which_list_validates(tmp_path):
    write(tmp_path, "obj.names", "cat\ndog\n")
    write(tmp_path, "obj.data", "train = data/train.txt\nvalid = data/test.txt\n")
    for split, name in {"train": "a", "test": "b"}.items():
        touch(tmp_path, f"obj/{name}.jpg")
        write(tmp_path, f"obj/{name}.txt", BOX)
        write(tmp_path, f"{split}.txt", f"data/obj/{name}.jpg\n")
    layout = find_layout(str(tmp_path))
    assert places(layout) == ((".", "train.txt"), (".", "test.txt")) and layout.test is None


@pytest.mark.parametrize("name", ["eval", "dev", "validate", "valid", "Validation", "验证集"])
def test_folders_and_lists_that_validate(tmp_path, name):
    touch(tmp_path, "train/a.jpg", f"{name}/b.jpg")
    for text in ("train/a.txt", f"{name}/b.txt"):
        write(tmp_path, text, BOX)
    write(tmp_path, "classes.txt", "cat\ndog\n")
    assert places(find_layout(str(tmp_path))) == (("train", ""), (name, ""))
    write(tmp_path, "train_list.txt", "train/a.jpg\n")
    write(tmp_path, f"{name}_list.txt", f"{name}/b.jpg\n")
    lists = ((".", "train_list.txt"), (".", f"{name}_list.txt"))
    assert places(find_layout(str(tmp_path))) == lists


def test_a_list_of_everything_gives_way_to_folders_of_splits(tmp_path):
    touch(tmp_path, "images/train/a.jpg", "images/val/b.jpg")
    write(tmp_path, "labels/train/a.txt", BOX)
    write(tmp_path, "classes.txt", "cat\ndog\n")
    write(tmp_path, "images.txt", "images/train/a.jpg\nimages/val/b.jpg\n")
    assert places(find_layout(str(tmp_path))) == (("images/train", ""), ("images/val", ""))


def test_no_image_of_trainval_validates(tmp_path):
    xml(tmp_path, "Annotations/a.xml", "Annotations/b.xml")
    touch(tmp_path, "JPEGImages/a.jpg", "JPEGImages/b.jpg")
    main = "ImageSets/Main/"
    write(tmp_path, f"{main}trainval.txt", "a\nb\n")
    write(tmp_path, f"{main}val.txt", "b\n")
    layout = find_layout(str(tmp_path))
    assert places(layout) == (("JPEGImages", f"{main}trainval.txt"), None)
    assert any("val.txt" in what and "trainval.txt" in why for what, why in layout.notes)


def test_data_yaml_of_windows_and_with_its_path_in_images(tmp_path):
    touch(tmp_path, "set/images/train/a.jpg")
    write(tmp_path, "set/labels/train/a.txt", BOX)
    for text in (
        "train: set\\images\\train",
        "path: set\\images\ntrain: train",
        "path: set/images\ntrain: train",
    ):
        write(tmp_path, "d.yaml", f"{text}\nnames: [cat, dog]\n")
        layout = find_layout(str(tmp_path / "d.yaml"))
        assert [*images_of(layout).values()] == [1]


def test_class_lists_that_contradict_a_data_file_are_told(tmp_path):
    touch(tmp_path, "images/train/a.jpg")
    write(tmp_path, "labels/train/a.txt", BOX)
    write(tmp_path, "data.yaml", "train: images/train\nnames: [cat, dog]\n")
    write(tmp_path, "labels/train/classes.txt", "cat\n")
    assert find_layout(str(tmp_path)).class_names == NAMES
    write(tmp_path, "labels/train/classes.txt", "dog\ncat\n")
    said = refused(tmp_path, "class_names_ambiguous")
    assert f"{tmp_path / 'data.yaml'}, {tmp_path / 'labels/train/classes.txt'}" in said
    (tmp_path / "data.yaml").unlink()
    write(tmp_path, "labels/train/obj.names", "cat\ndog\n")
    assert "classes.txt: dog, cat;" in refused(tmp_path, "class_names_ambiguous")


@pytest.mark.parametrize(
    ("image", "names"),
    [
        ("images/a.jpg", "images\\a.jpg"),
        ("images/a.jpg", "..\\..\\label-studio\\media\\upload\\4\\a.jpg"),
        ("data/a.jpg", "a.jpg"),
        ("train/images/a.jpg", "a.jpg"),
        ("deep/er/a.jpg", "/home/somebody/set/a.jpg"),
    ],
)
def test_coco_images_are_found_where_other_tools_put_them(tmp_path, image, names):
    touch(tmp_path, image)
    coco(tmp_path, "result.json", names)
    layout = find_layout(str(tmp_path))
    assert [*images_of(layout)] == [image]


@pytest.mark.parametrize("encoded", ["image", "label"])
@pytest.mark.parametrize("form", ["coco", "voc", "yolo", "list"])
def test_percent_encoded_names_are_found_and_said(tmp_path, form, encoded):
    """Label Studio encodes the names that it writes, and not those of the images."""
    plain, quoted = "my photo (1)", "my%20photo%20%281%29"
    image, label = (quoted, plain) if encoded == "image" else (plain, quoted)
    write_image(tmp_path / "images" / f"{image}.jpg")
    write(tmp_path, "classes.txt", "cat\ndog\n")
    if form == "coco":
        coco(tmp_path, "result.json", f"/data/upload/4/{label}.jpg")
        content = json.loads((tmp_path / "result.json").read_text())
        content["annotations"] = [{"id": 1, "image_id": 0, "category_id": 3, "bbox": [1, 2, 9, 9]}]
        write(tmp_path, "result.json", json.dumps(content))
    elif form == "voc":
        xml(tmp_path, f"Annotations/{label}.xml")
    else:
        write(tmp_path, f"labels/{label}.txt", BOX)
    if form == "list":
        write(tmp_path, "train.txt", f"data/obj/{label}.jpg\n")
    layout = find_layout(str(tmp_path))
    section = layout.section()
    config = DataConfig(**{"val": section["train"]} | section)
    issues: list[Issue] = []
    (raw,) = read_raw(config, "train", issues.append).images
    assert raw.path == tmp_path / "images" / f"{image}.jpg" and raw.objects
    codes = {issue.code for issue in issues} & {"image_elsewhere", "label_encoded"}
    assert codes and "label_without_image" not in {issue.code for issue in issues}


TWINS = ("100%", "a%20b", "a b")


@pytest.mark.parametrize("unlabelled", [None, *TWINS])
@pytest.mark.parametrize("form", ["folder", "list", "yolo"])
def test_a_label_belongs_to_the_image_of_its_exact_name(tmp_path, form, unlabelled):
    write(tmp_path, "classes.txt", "cat\ndog\n")
    for stem in TWINS:
        write_image(tmp_path / "images" / f"{stem}.jpg")
    labelled = [stem for stem in TWINS if stem != unlabelled]
    for stem in labelled:
        if form == "yolo":
            write(tmp_path, f"labels/{stem}.txt", BOX)
        else:
            xml(tmp_path, f"Annotations/{stem}.xml")
    parts = {"images": "images"}
    if form != "yolo":
        parts["annotations"] = "Annotations" if form == "folder" else "train.txt"
    write(tmp_path, "train.txt", "".join(f"{stem}\n" for stem in TWINS))
    config = DataConfig(
        format="yolo" if form == "yolo" else "voc", root=str(tmp_path), train=parts, val=parts
    )
    issues: list[Issue] = []
    images = read_raw(config, "train", issues.append).images
    assert {image.path.stem: Path(image.where).stem for image in images if image.objects} == {
        stem: stem for stem in labelled
    }
    usual = {"annotation_missing"} if form == "list" else {"label_missing"}
    usual = usual if unlabelled and form != "folder" else set()
    assert {issue.code for issue in issues} == usual


@pytest.mark.parametrize("name", ["a%20b.jpg", "a b.jpg"])
def test_a_name_in_a_subfolder_is_the_exact_one_first(tmp_path, name):
    touch(tmp_path, "s/a%20b.jpg", "t/a b.jpg", "u/c.jpg", "v/c.jpg", "w/%63.jpg")
    found = find_image(tmp_path, f"C:\\upload\\{name}", "set.json", ignore_issue)
    assert found is not None and found.name == name
    several = find_image(tmp_path, "C:\\upload\\c.jpg", "set.json", ignore_issue)
    assert several is None or not several.exists()  # a decoded one would be no better


def test_a_percent_encoded_name_leads_nowhere_else(tmp_path):
    touch(tmp_path, "secret.jpg", "images/a.jpg")
    for name in ("..%2Fsecret.jpg", "%2e%2e/secret.jpg", "a%00.jpg"):
        found = find_image(tmp_path / "images", name, "set.json", ignore_issue)
        assert found is None or not found.exists()


def test_what_no_split_has_is_named(tmp_path):
    touch(tmp_path, "images/train/a.jpg", "images/val/b.jpg", "images/extra/c.jpg")
    for text in ("labels/train/a.txt", "labels/val/b.txt"):
        write(tmp_path, text, BOX)
    xml(tmp_path, "xml/a.xml")
    (tmp_path / "xml").rename(tmp_path / "labels" / "xml")
    write(tmp_path, "classes.txt", "cat\ndog\n")
    coco(tmp_path, "annotations/train.json", "a.jpg")
    coco(tmp_path, "annotations/val.json", "b.jpg")
    coco(tmp_path, "annotations/old.json", "a.jpg")
    said = [what for what, _ in find_layout(str(tmp_path)).notes]
    unused = ("annotations/old.json", "images/extra", "labels/train/a.txt", "labels/xml/a.xml")
    assert [name in what for name, what in zip(unused, said, strict=True)] == [True] * 4
    write(tmp_path, "data.yaml", "train: images/train\nval: images/val\nnames: [cat, dog]\n")
    said = [what for what, _ in find_layout(str(tmp_path)).notes]
    assert any("annotations/old.json" in what for what in said)


@pytest.mark.parametrize(
    ("xml_files", "text_files", "data_yaml", "outcome"),
    [
        # Two forms of one set: XML where nothing says otherwise.
        (["a.xml", "b.xml"], ["a.txt", "b.txt"], False, "voc"),
        (["a.xml", "b.xml"], ["labels/a.txt", "labels/b.txt"], False, "voc"),
        (["a.xml", "b.xml"], ["a.txt"], False, "voc"),
        (["a.xml"], ["a.txt", "b.txt"], True, "yolo"),
        # An image that only the other labels would be lost, or background.
        (["a.xml"], ["b.txt"], False, "split_ambiguous"),
        (["Annotations/a.xml"], ["labels/a.txt", "labels/b.txt"], False, "split_ambiguous"),
        (["a.xml", "b.xml"], ["a.txt"], True, "split_ambiguous"),
    ],
)
def test_labels_of_two_formats_are_refused_where_they_share_the_images(
    tmp_path, xml_files, text_files, data_yaml, outcome
):
    touch(tmp_path, "a.jpg", "b.jpg")
    write(tmp_path, "classes.txt", "cat\ndog\n")
    write(tmp_path, "b.note.txt", "a note of somebody\n")
    xml(tmp_path, *xml_files)
    for file in text_files:
        write(tmp_path, file, BOX)
    if data_yaml:
        write(tmp_path, "data.yaml", "train: .\nnames: [cat, dog]\n")
    if outcome == "split_ambiguous":
        assert "first b.jpg" in refused(tmp_path, outcome)
    else:
        layout = find_layout(str(tmp_path))
        assert layout.format == outcome and layout.images == 2
        assert any("labels" in what and "not used" in what for what, _ in layout.notes)


def test_images_without_objects_may_have_a_label_of_one_format_alone(tmp_path):
    touch(tmp_path, "a.jpg", "b.jpg", "b.txt")  # background in YOLO's form
    xml(tmp_path, "a.xml")
    write(tmp_path, "a.txt", BOX)
    assert find_layout(str(tmp_path)).format == "voc"
    write(tmp_path, "b.txt", "a note of somebody\n")
    assert find_layout(str(tmp_path)).format == "voc"


def test_other_splits_may_have_labels_of_another_format(tmp_path):
    touch(tmp_path, "train/a.jpg", "val/a.jpg", "val/b.jpg", "train/b.jpg")
    xml(tmp_path, "train/a.xml", "train/b.xml")
    write(tmp_path, "val/a.txt", BOX)
    assert find_layout(str(tmp_path)).format == "voc"


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("/content/pets-3/images/train", "/content/pets-3/images/val"),
        ("C:\\Users\\me\\pets\\images\\train", "C:\\Users\\me\\pets\\images\\val"),
        ("pets/images/train", "datasets/pets/images/val"),
        ("/content/training data/images/train", "../../input/images/val"),
    ],
)
def test_paths_of_another_machine_in_a_data_file_are_matched_by_their_ends(tmp_path, train, val):
    touch(tmp_path, "images/train/a.jpg", "images/val/b.jpg")
    write(tmp_path, "data.yaml", f"train: {train}\nval: {val}\nnames: [cat, dog]\n")
    layout = find_layout(str(tmp_path / "data.yaml"))
    assert places(layout) == (("images/train", ""), ("images/val", ""))
    assert (f"{train}: not there") in [what for what, _ in layout.notes]


def test_no_split_stands_for_another_by_the_end_of_its_path(tmp_path):
    touch(tmp_path, "images/a.jpg", "train/images/a.jpg")
    text = "train: train/images\nval: /content/pets/valid/images\nnames: [cat]\n"
    write(tmp_path, "data.yaml", text)
    refused(tmp_path, "split_missing")


@pytest.mark.parametrize("suffix", [".jpg", ".JPG", ".xml"])
def test_voc_lists_may_have_suffixes(tmp_path, suffix):
    touch(tmp_path, *(f"JPEGImages/{stem}.jpg" for stem in ("a.b", "c", "d.jpg")))  # d.jpg.jpg
    xml(tmp_path, *(f"Annotations/{stem}.xml" for stem in ("a.b", "c", "d.jpg")))
    write(tmp_path, "ImageSets/Main/train.txt", f"a.b{suffix}\nd.jpg\n")
    write(tmp_path, "ImageSets/Main/val.txt", f"c{suffix} 1\n")
    layout = find_layout(str(tmp_path))
    assert (layout.format, layout.images) == ("voc", 2)
    assert [*images_of(layout)] == ["JPEGImages/a.b.jpg", "JPEGImages/d.jpg.jpg"]


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("<annotation>\n<folder>a & b</folder></annotation>", "annotation_unreadable",
         ["a.xml:2", "line 2", "1 more"]),
        ("<annotation><object><name>cat</name><robndbox><cx>1</cx></robndbox></object></annotation>",
         "annotation_line", ["a.xml: object 1", "<robndbox>"]),
        ("<annotation><object><bndbox/></object></annotation>", "annotation_line", ["<name>"]),
        ("<annotation></annotation>", "objects_missing", ["none of its 2 XML files"]),
    ],
)  # fmt: skip
def test_xml_that_gives_no_object_is_named_with_its_cause(tmp_path, text, code, facts):
    for stem in "ab":
        touch(tmp_path, f"{stem}.jpg")
        write(tmp_path, f"{stem}.xml", text)
    said = refused(tmp_path, code)
    assert all(fact in said for fact in facts)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("a.json", '{"version": "5.4", "shapes": [{"label": "cat", "points": []}]}', "labelme"),
        ("all.xml", "<annotations><image id='0'><box label='cat'/></image></annotations>", "CVAT"),
        ("ann/a.json", '{"objects": [{"classTitle": "cat"}]}', "Supervisely"),
        ("e.json", '[{"annotations": [{"type": "rectanglelabels"}]}]', "Label Studio"),
        ("via.json", '{"a": {"regions": [{"shape_attributes": {}}]}}', "VGG"),
        ("a.csv", "filename,class,xmin,ymin,xmax,ymax\n", "CSV"),
        ("annotations/a.txt", "684,8,273,116,0,0,0,0\n406,119,265,70,1,4,0,1\n", "VisDrone"),
        ("label_2/a.txt", f"Car 0.00 0 -1.57{' 5.00' * 11}\n", "KITTI"),
        ("label_2/a.txt", f"DontCare -1 -1 -10 1.5 2 3 4{' -1000' * 7}\n", "KITTI"),
        ("labels/det_20/det_train.json", '[{"name": "a.jpg", "labels": [{"box2d": {}}]}]', "BDD"),
        ("boxes.csv", "ImageID,Source,LabelName,Confidence,XMin,XMax\n", "OpenImages"),
        ("via.csv", "filename,region_shape_attributes,region_attributes\n", "VGG"),
        ("train/_annotations.txt", "a.jpg 1,2,30,40,0 5,6,9,9,1\n", "YOLOv4"),
        ("a.json", '{"info": {}, "categories": {"label": {"labels": [{"name": "cat", "parent": ""}]'
         '}}, "items": []}', "Datumaro"),
        ("samples.json", '{"samples": [{"ground_truth": {"_cls": "Detections"}}]}', "FiftyOne"),
        ("labels.json", '{"classes": [], "labels": {"a": [{"label": "c", "bounding_box": []}]}}',
         "FiftyOne"),
        ("labelTxt/a.txt", "imagesource:GoogleEarth\ngsd:0.1\n", "DOTA"),
        ("labelTxt/a.txt", "1.0 2 3 2 3.0 4 1 4 small-vehicle 0\n", "DOTA"),
        ("wider_face_train_bbx_gt.txt", "0--P/a.jpg\n1\n449 330 122 149 0 0 0 0 0 0\n", "WIDER"),
        ("annotation_train.odgt", '{"ID": "a", "gtboxes": [{"tag": "person"}]}\n', "CrowdHuman"),
        ("train.tfrecord-00000-of-00010", "", "TFRecord"),
    ],
)  # fmt: skip
def test_annotations_of_tools_that_are_not_read_are_named(tmp_path, file, text, said):
    touch(tmp_path, "a.jpg")
    write(tmp_path, file, text)
    told = refused(tmp_path, "format_not_read")
    assert said in told and ("convert" in told or "COCO" in told)


def test_labels_of_darknet_are_read_with_its_list_of_classes(tmp_path):
    touch(tmp_path, "train/a.jpg")
    write(tmp_path, "train/a.txt", BOX)
    write(tmp_path, "train/_darknet.labels", "cat\ndog\n")
    layout = find_layout(str(tmp_path))
    assert (layout.format, layout.class_names) == ("yolo", NAMES)


def test_images_of_lvis_are_found_by_their_addresses(tmp_path):
    """It has no file_name, and its validation images lie in train2017 and in val2017."""
    for split, folder in (("train", "train2017"), ("val", "train2017"), ("val", "val2017")):
        touch(tmp_path, f"{folder}/00000{len(split)}.jpg")
    for split, folders in (("train", ["train2017"]), ("val", ["train2017", "val2017"])):
        address = "http://images.cocodataset.org/{}/00000{}.jpg"
        images = [
            {"id": n, "coco_url": address.format(folder, len(split)), "width": 64, "height": 48}
            for n, folder in enumerate(folders)
        ]
        objects = [{"id": 1, "image_id": 0, "category_id": 3, "bbox": [1, 2, 30, 40], "area": 9}]
        categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
        content = {"images": images, "annotations": objects, "categories": categories}
        write(tmp_path, f"annotations/lvis_v1_{split}.json", json.dumps(content))
    layout = find_layout(str(tmp_path))
    assert images_of(layout) == {"train2017/000005.jpg": 1}
    raw = read_raw(DataConfig(**layout.section()), "val", ignore_issue)
    names = [str(image.path.relative_to(tmp_path)) for image in raw.images]
    assert names == ["train2017/000003.jpg", "val2017/000003.jpg"]


def test_images_alone_are_told_with_the_forms_that_are_read(tmp_path):
    touch(tmp_path, "a.jpg", "b.jpg")
    write(tmp_path, "README.roboflow.txt", "Exported by a tool.\n")
    assert "2 images" in refused(tmp_path, "labels_missing")


def test_names_of_folders_that_no_configuration_can_hold(tmp_path, monkeypatch):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    touch(folder, "images/a.jpg")
    write(folder, "labels/a.txt", BOX)
    write(folder, "classes.txt", "cat\ndog\n")
    assert "not UTF-8" in refused(folder, "bad_file_name")
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert "PYTHONUTF8=1" in refused(folder, "locale_not_utf8")


def test_pairs_of_a_list_may_have_blanks(tmp_path):
    xml(tmp_path, "annotations/road 0.xml")
    touch(tmp_path, "images/road 0.png")
    write(tmp_path, "train.txt", "./images/road 0.png ./annotations/road 0.xml\n")
    assert images_of(find_layout(str(tmp_path))) == {"images/road 0.png": 2}


def test_list_of_images_with_something_behind_is_told(tmp_path):
    touch(tmp_path, "images/a.jpg")
    write(tmp_path, "labels/a.txt", BOX)
    write(tmp_path, "train_list.txt", "images/a.jpg 3\n")
    assert "images/a.jpg 3" in refused(tmp_path, "format_not_read")


def test_a_damaged_data_file_is_told(tmp_path):
    touch(tmp_path, "images/a.jpg")
    write(tmp_path, "labels/a.txt", BOX)
    write(tmp_path, "classes.txt", "cat\ndog\n")
    write(tmp_path, "other.yaml", "names: [cat\n")
    assert find_layout(str(tmp_path)).format == "yolo"
    write(tmp_path, "data.yaml", "names: [cat\n")
    refused(tmp_path, "not_yaml")


def test_several_data_files_are_told(tmp_path):
    for name in ("a.yaml", "b.yml"):
        write(tmp_path, name, "train: images\nnames: [cat]\n")
    said = refused(tmp_path, "split_ambiguous")
    assert "a.yaml, b.yml" in said and f"such as {tmp_path / 'a.yaml'}" in said


def test_name_beside_a_wrong_one_is_told(tmp_path):
    touch(tmp_path, "pets/data.yaml")
    assert f"did you mean {tmp_path}/pets?" in refused(tmp_path / "pest", "data_not_found")
    assert "data.yaml?" in refused(tmp_path / "pets" / "data.yml", "data_not_found")


def test_what_is_no_data_set_is_told(tmp_path):
    refused(tmp_path / "gone", "data_not_found")
    for name in ("coco.yaml", "coco128.yaml", "VOC.yaml"):
        assert "comes with ultralytics" in refused(tmp_path / name, "data_not_found")
    touch(tmp_path, "set.zip")
    assert "unpack it" in refused(tmp_path / "set.zip", "data_not_found")
    (tmp_path / "set.zip").unlink()
    touch(tmp_path, "notes.md", "one/x.md", "two/x.md")
    write(tmp_path, "some.yaml", "- no mapping\n")
    assert "notes.md, one, some.yaml, two" in refused(tmp_path, "data_kind_unknown")


def classes_below(root: Path, *folders: str) -> None:
    for folder in folders:
        touch(
            root, *(f"{folder}/{name}/{number}.jpg" for name in ("cat", "dog") for number in "12")
        )


@pytest.mark.parametrize(
    ("folders", "train", "val"),
    [
        (("train", "val", "test"), "train", "val"),
        (("Training", "valid"), "Training", "valid"),
        (("train",), "train", None),
        ((".",), ".", None),
        (("flowers",), ".", None),  # a folder around them
    ],
)
def test_folders_of_classes_are_found_for_a_classifier(tmp_path, folders, train, val):
    classes_below(tmp_path, *folders)
    layout = find_layout(str(tmp_path), "classify")
    assert (layout.format, layout.class_names, layout.images) == ("folder", ("cat", "dog"), 4)
    assert layout.train.images == train
    assert (layout.val.images if layout.val else None) == val
    config = DataConfig(**layout.section() | ({} if val else {"val": {"images": train}}))
    assert len(read_raw(config, "train", ignore_issue).images) == (4 if val else 3)
    assert "classifier" in refused(tmp_path, "labels_missing")  # of a detector, which says so


def test_a_set_of_boxes_has_no_folders_of_classes(tmp_path):
    touch(tmp_path, "train/images/a.jpg", "train/labels/b.jpg", "val/images/a.jpg")
    for place in (tmp_path, tmp_path / "train", tmp_path / "none"):
        with raises("class_folders_missing"):
            find_layout(str(place), "classify")

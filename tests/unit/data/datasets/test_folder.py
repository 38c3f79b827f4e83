"""Folders and CSV files of classified images to one contract, and the words for what is wrong."""

from pathlib import Path

import pytest

from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.folder import read_csv, read_folder
from tests.errors import raises


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def table(root: Path, text: str, name: str = "train.csv") -> Path:
    file = root / name
    file.write_text(text, encoding="utf-8")
    return file


def folder_config(root: Path, **changes) -> DataConfig:
    train, val = SplitConfig(images="train"), SplitConfig(images="val")
    return DataConfig(format="folder", root=str(root), train=train, val=val, **changes)


def pairs(dataset) -> list[tuple[str, str]]:
    return [
        (Path(record.path).name, dataset.class_names[record.labels_M[0]])
        for record in dataset.records
    ]


def test_image_folder_is_its_class_at_any_depth(tmp_path):
    write(tmp_path, "train/dog/b.JPG", "train/dog/a.png", "train/dog/deep/er/c.webp",
          "train/cat/x.jpeg", "train/.cache/y.jpg")  # fmt: skip
    found = read_folder(tmp_path, tmp_path / "train", ())
    assert found.class_names == ("cat", "dog") and found.category_ids == (0, 1)
    assert pairs(found) == [
        ("x.jpeg", "cat"),
        ("a.png", "dog"),
        ("b.JPG", "dog"),
        ("c.webp", "dog"),
    ]
    assert [record.image_id for record in found.records] == [1, 2, 3, 4]
    assert all(Path(record.path).is_absolute() for record in found.records)


def test_non_image_files_are_skipped_and_counted(tmp_path):
    write(tmp_path, "train/cat/x.jpg", "train/cat/Thumbs.db", "train/cat/y.txt", "train/cat/z.txt",
          "train/readme.md", "val/cat/x.jpg")  # fmt: skip
    found = read_split(folder_config(tmp_path), "train", 1)
    (note,) = found.notes
    assert note.startswith(f"{tmp_path}/train: 3 files") and "(2 .txt, 1 .db)" in note


def test_hidden_and_macos_files_are_ignored(tmp_path):
    write(tmp_path, "train/cat/a.png", "train/cat/._a.png", "train/cat/.DS_Store",
          "train/cat/.hid/a.png", "train/__MACOSX/a.png", "train/cat/__MACOSX/a.png")  # fmt: skip
    found = read_folder(tmp_path, tmp_path / "train", ())
    assert pairs(found) == [("a.png", "cat")] and found.class_names == ("cat",)
    assert found.notes == ()


def test_folder_links_are_followed_once_cycle_free(tmp_path):
    write(tmp_path, "train/cat/a.jpg", "train/dog/b.jpg", "store/more/c.jpg", "store/birds/d.jpg")
    (tmp_path / "train/bird").symlink_to(tmp_path / "store/birds")
    (tmp_path / "train/cat/more").symlink_to(tmp_path / "store/more")
    (tmp_path / "train/cat/once again").symlink_to(tmp_path / "store/more")
    (tmp_path / "train/cat/itself").symlink_to(tmp_path / "train/cat")
    (tmp_path / "train/cat/all").symlink_to(tmp_path / "train")
    (tmp_path / "store/more/back").symlink_to(tmp_path / "train/cat")
    found = read_split(folder_config(tmp_path), "train", 3)
    expected = [("d.jpg", "bird"), ("a.jpg", "cat"), ("c.jpg", "cat"), ("b.jpg", "dog")]
    assert pairs(found) == expected


def test_validation_classes_have_the_numbers_of_training(tmp_path):
    write(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "train/c/1.jpg", "val/c/1.jpg", "val/b/1.jpg")
    found = read_split(folder_config(tmp_path), "val", 3)
    assert found.class_names == ("a", "b", "c")
    assert [record.labels_M.tolist() for record in found.records] == [[1], [2]]


def test_class_names_of_the_config_give_the_order(tmp_path):
    write(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg")
    config = folder_config(tmp_path, class_names=("b", "a", "never seen"))
    found = read_split(config, "train", 3)
    assert found.class_names == ("b", "a", "never seen")
    assert [record.labels_M.tolist() for record in found.records] == [[1], [0]]


def test_a_validation_folder_that_is_no_class_is_named(tmp_path):
    write(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/B/1.jpg")
    with raises("class_unknown", str(tmp_path), "/val: 1"):
        read_split(folder_config(tmp_path), "val")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train/1.jpg"], "{}/train: contains no folders; expected one per class, such as "
                          "{}/train/cat/1.jpg"),
        (["train/cat/1.txt"], "{}/train: lists no image"),
        (["1.jpg"], "data.train.images: {}/train is not a folder"),
    ],
)  # fmt: skip
def test_a_folder_without_classified_images_is_an_error(tmp_path, files, message):
    write(tmp_path, *files)
    with pytest.raises(DataError) as error:
        read_split(folder_config(tmp_path), "train")
    assert str(error.value).startswith(message.format(tmp_path, tmp_path))


def csv_config(root: Path, **changes) -> DataConfig:
    train, val = SplitConfig(annotations="train.csv"), SplitConfig(annotations="val.csv")
    return DataConfig(format="csv", root=str(root), train=train, val=val, **changes)


@pytest.mark.parametrize(
    "text",
    [
        "b.jpg,dog\nsub/a.jpg,cat\n",
        "path,label\nb.jpg,dog\n\nsub/a.jpg,cat\n",
        'Label,Photographer,PATH\r\ndog,"Doe, J.",b.jpg\r\ncat, ,  sub/a.jpg\r\n',
        "\ufeffb.jpg , dog\nsub/a.jpg,1\nb.jpg,dog\n",
    ],
    ids=["plain", "header", "other columns", "numbers among names"],
)
def test_lines_give_a_path_and_a_class_in_their_order(tmp_path, text):
    write(tmp_path, "images/b.jpg", "images/sub/a.jpg")
    names = ("dog", "cat") if ",1" in text else ()
    found = read_csv(tmp_path, tmp_path / "images", table(tmp_path, text), names)
    assert pairs(found)[:2] == [("b.jpg", "dog"), ("a.jpg", "cat")]
    assert found.records[1].path == str(tmp_path / "images" / "sub" / "a.jpg")
    assert found.class_names == (names or ("cat", "dog"))


def test_labels_that_are_all_numbers_are_class_numbers(tmp_path):
    write(tmp_path, "images/a.jpg", "images/b.jpg")
    table(tmp_path, "a.jpg,2\nb.jpg,10\n")
    table(tmp_path, "b.jpg,7\n", "val.csv")
    assert read_split(csv_config(tmp_path), "train", 11).class_names == tuple(map(str, range(11)))
    assert read_split(csv_config(tmp_path), "val", 11).records[0].labels_M.tolist() == [7]


def test_numeric_class_name_is_found_by_name(tmp_path):
    found = read_csv(
        tmp_path, tmp_path, table(tmp_path, "a.jpg,7\nb.jpg,9\nc.jpg,1\n"), ("9", "8", "7")
    )
    assert [record.labels_M.tolist() for record in found.records] == [[2], [0], [1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jpg,cat\nb.jpg\n", "{}:2: 'b.jpg': expected `path,label`"),
        ("a.jpg,cat,1\n", "{}:1: 'a.jpg,cat,1': expected `path,label`"),
        ("a.jpg,\n", "{}:1: 'a.jpg,': expected `path,label`"),
        ("id,path,label\n1,a.jpg\n", "{}:2: '1,a.jpg': expected 3 columns, as the header has"),
        ("image,class\na.jpg,cat\n", "{}:1: 'image,class': a header without the columns "
         "`path` and `label`; rename its columns, or remove the line"),
        ("id,image,class\n1,a.jpg,cat\n", "{}:1: 'id,image,class': a header without the "
         "columns `path` and `label`; rename its columns, or remove the line"),
        ("a.jpg;cat\n", "{}:1: 'a.jpg;cat': expected `path,label` with a comma between, found a "
         "semicolon"),
        ("path\tlabel\na.jpg\tcat\n", "{}:1: 'path\\tlabel': expected `path,label` with a comma "
         "between, found a tab"),
        ("../a.jpg,cat\n", "{}:1: file name '../a.jpg' leads out of {root}/images"),
        ("a.jpg,99999999999\n", "{}: label 99999999999 is too large for a class index "
         "(indices start at 0); if labels are names made of digits, list them in "
         "data.class_names"),
    ],
)  # fmt: skip
def test_a_line_of_another_form_is_named_with_its_number(tmp_path, text, message):
    write(tmp_path, "images/a.jpg")
    file = table(tmp_path, text)
    with pytest.raises(DataError) as error:
        read_split(csv_config(tmp_path), "train")
    assert str(error.value) == message.format(file, root=tmp_path)


def test_unknown_label_is_named_with_known_classes(tmp_path):
    write(tmp_path, "images/a.jpg")
    table(tmp_path, "a.jpg,cat\na.jpg,dog\n")
    file = table(tmp_path, "a.jpg,mouse\n", "val.csv")
    with raises("class_unknown", str(file), ":1", "'mouse'"):
        read_split(csv_config(tmp_path), "val")


def test_labels_counted_from_1_get_zero_based_hint(tmp_path):
    write(tmp_path, "images/a.jpg")
    file = table(tmp_path, "a.jpg,1\na.jpg,2\n")
    with raises("num_classes_differ", str(file), "(0, 1, 2)"):
        read_split(csv_config(tmp_path), "train", 2)
    with raises("class_unknown", "1 (numbers start at"):
        read_split(csv_config(tmp_path, class_names=("cat", "dog")), "train", 2)


def test_a_format_that_needs_annotations_says_so(tmp_path):
    write(tmp_path, "images/a.jpg")
    config = DataConfig(format="csv", root=str(tmp_path), train=SplitConfig(), val=SplitConfig())
    with raises("missing_key", "data.train.annotations"):
        read_split(config, "train")

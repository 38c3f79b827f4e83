"""Dataset layout: format, splits and classes of a folder or data.yaml.

data.yaml of ultralytics and Roboflow    path, train, val: a folder, several, or a .txt list
COCO folder                              annotations/*.json, or train/_annotations.coco.json
VOC folder                               XML anywhere, with or without ImageSets
YOLO folder                              images/, labels/ and classes.txt
folders of classes, for a classifier     train/CLASS/, val/CLASS/, or CLASS/
"""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ppdist.common.addresses import is_remote
from ppdist.common.errors import ConfigError, DataError
from ppdist.common.machine import suggest_path
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.migration import SETS_BY_NAME, is_data_yaml
from ppdist.config.section import Task
from ppdist.config.yaml import Node, Reader, describe_value, problems_error
from ppdist.data.datasets.annotations import (
    KINDS,
    SPLIT_WORDS,
    abbreviate,
    files_below,
    find_class_names,
    find_image,
    folders_below,
    forget_folder_listings,
    guess_split,
    guess_split_of_path,
    ignore_issue,
    is_ignored,
    read_lines,
)
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.coco import read_index
from ppdist.data.datasets.folder import read_folder
from ppdist.data.datasets.voc import xml_files
from ppdist.data.datasets.yolo import is_label, label_folder, nearest_class_list
from ppdist.data.image import is_image_name
from ppdist.data.types import Issue

# Names of folders inside a set, not of folders that contain a set.
_PARTS = (
    "annotations",
    "images",
    "labels",
    "jpegimages",
    "imagesets",
)
_DEEPEST = 4  # nested folders, each the only entry of its parent
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z")
VAL_FRACTION = 0.2  # of a set without a validation split
_KINDS = (
    "expected a data.yaml (ultralytics, Roboflow), or a folder with COCO's JSON, Pascal VOC's XML, "
    "or YOLO's images/ and labels/"
)
_BY_HAND = "say which in a configuration: copy configs/examples/my_data.yml (docs/data.md)"


@dataclass(frozen=True)
class Layout:
    """The layout of a data set, as detected.

    root: absolute; the paths of the splits are relative to it.
    train, val, test: None if there is no such split.
    images: number of training images, including those split off for validation later.
    notes: (what, why) pairs for choices that may surprise the user.
    """

    name: str
    format: Literal["coco", "voc", "yolo", "folder"]
    root: Path
    train: SplitConfig
    val: SplitConfig | None
    class_names: tuple[str, ...]
    images: int
    test: SplitConfig | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def section(self) -> dict[str, Any]:
        """Returns the keys of `data` that describe this layout, as in a configuration."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {
            "format": self.format,
            "root": str(self.root),
            **{key: part.model_dump(include={"images", "annotations"}, mode="json")
               for key, part in splits.items() if part is not None},
            **({"val_fraction": VAL_FRACTION} if self.val is None else {}),
            "class_names": list(self.class_names),
        }  # fmt: skip


def is_layout(path: str | Path) -> bool:
    """Returns True if a path is a data set, not a configuration."""
    path = Path(path)
    return path.is_dir() or (path.is_file() and is_data_yaml(Reader().read_alone(str(path))))


def find_layout(source: str, task: Task = "detect") -> Layout:
    """Detects the layout of a data set from its files.

    Args:
        source: a data.yaml or a folder.
        task: task of the model; for `classify`, looks only for folders of classes.
    Raises: DataError: no readable data set, or an ambiguous one.  ConfigError: malformed YAML.
    """
    if is_remote(source):
        message = (
            "a layout cannot be found out in an object store: name the files in a configuration"
        )
        fix = (
            "copy configs/examples/my_data.yml and set data.root to the address, with format: coco "
            "(docs/data.md, Object stores)"
        )
        raise DataError(message, code="data_not_found", where=source, fix=fix)
    forget_folder_listings()
    try:
        if task == "classify":
            layout = _detect_class_folders(Path(source))
        else:
            layout = _detect_layout(Path(source), source)
        _require_utf8_paths(layout)
        return layout
    except OSError as error:
        raise DataError(
            error.strerror or str(error), code="folder_unreadable", where=str(error.filename)
        ) from error


def _require_utf8_paths(layout: Layout) -> None:
    """Checks that a UTF-8 configuration can contain the paths of the set.

    Raises: DataError: it cannot.
    """
    for text in (str(layout.root), json.dumps(layout.section(), ensure_ascii=False)):
        if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
            shown = os.fsencode(layout.root).decode(errors="replace")
            if sys.getfilesystemencoding() != "utf-8":
                raise DataError(
                    "this terminal's locale is not UTF-8, but the name of a folder or file is",
                    code="locale_not_utf8",
                    where=shown,
                    fix="run `export LC_ALL=C.UTF-8 PYTHONUTF8=1`, then the command again",
                )
            raise DataError(
                "a folder or file name is not UTF-8, so a configuration cannot hold it",
                code="bad_file_name",
                where=shown,
                fix="rename it, or link it: `ln -s FOLDER data`",
            )


def _detect_layout(path: Path, source: str) -> Layout:
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        layout = _read_data_yaml_layout(path)
        is_in_root = layout.root == Path(os.path.abspath(path)).parent
        if not is_in_root:
            return layout
        kinds = _label_kinds(layout.root)
        _check_one_format(layout, kinds)
        unused = _find_unused(layout, kinds)
        return replace(layout, notes=(*layout.notes, *unused))
    if not path.is_dir():
        message = f"is neither a folder nor a data.yaml (looked in {Path.cwd()})"
        packed = path.is_file() and path.suffix.lower() in _ARCHIVES
        fix = "unpack it, then give the folder" if packed else _KINDS
        if path.stem.lower() in SETS_BY_NAME:
            fix = (
                f"{path.name} comes with ultralytics, which fetches its images; ppdist fetches "
                "none: `ppdist train FOLDER --model yolov5n` takes the folder that has them"
            )
        fix = suggest_path(path) or fix
        raise DataError(message, code="data_not_found", where=source, fix=fix)
    for folder in _unwrap_folders(path):
        files = [file for file in sorted(folder.glob("*.y*ml")) if _holds_data(file)]
        if len(files) > 1:
            message = f"holds several data files: {', '.join(file.name for file in files)}"
            fix = f"give the one that you mean, such as {files[0]}"
            raise DataError(message, code="split_ambiguous", where=str(folder), fix=fix)
        if files:
            return _detect_layout(files[0], str(files[0]))
        for reader in (_detect_coco, _detect_voc, _detect_yolo):
            found_layout = reader(folder)
            if found_layout is not None:
                kinds = _label_kinds(found_layout.root)
                _check_one_format(found_layout, kinds)
                unused = _find_unused(found_layout, kinds)
                return replace(found_layout, notes=(*found_layout.notes, *unused))
    below = [*files_below(path)]
    _refuse_foreign(below, source)
    images = sum(map(_is_image, below))
    if images:
        message, fix = f"has {images} images but no labels", _KINDS
        if any(map(_find_class_folders, _unwrap_folders(path))):
            message += ", in folders that may be classes"
            fix = f"for one class an image choose a classifier: --model yolov5s_cls; else {_KINDS}"
        raise DataError(message, code="labels_missing", where=source, fix=fix)
    names = sorted(entry.name for entry in path.iterdir())[:8]
    message = f"holds no annotations in a known format (it has: {', '.join(names) or 'nothing'})"
    raise DataError(message, code="data_kind_unknown", where=source, fix=_KINDS)


# --- folders of classes ---------------------------------------------------------------------------


def _detect_class_folders(path: Path) -> Layout:
    """Finds the folders of classes in train/ and val/ of a folder, or in the folder itself.

    Raises: DataError: there are none.
    """
    for folder in _unwrap_folders(path) if path.is_dir() else ():
        images_of_split = _find_class_folders(folder)
        if images_of_split:
            train_set = read_folder(folder, folder / images_of_split["train"], ())
            train, val, test = (
                SplitConfig(images=images_of_split[split]) if split in images_of_split else None
                for split in _SPLITS
            )
            assert train is not None
            return Layout(
                name=_folder_name(folder),
                format="folder",
                root=Path(os.path.abspath(folder)),
                train=train,
                val=val,
                test=test,
                class_names=train_set.class_names,
                images=len(train_set.records),
                notes=(
                    *(("folders of classes", note) for note in train_set.notes),
                    *_test_note(test is not None),
                ),
            )
    raise DataError(
        "has no folders of images, one for each class",
        code="class_folders_missing",
        where=str(path),
        fix="expected train/CLASS/1.jpg and val/CLASS/2.jpg, or CLASS/1.jpg, with two classes or "
        "more; for boxes choose a detector: --model yolov5s",
    )


def _find_class_folders(folder: Path) -> dict[str, str]:
    """Finds the folders that hold folders of classes, by split; {}: there are none."""
    splits = {
        split: _require_one(places, split, folder)
        for split, places in _split_folders(folder).items()
    }
    if "train" in splits:
        holds_classes = all(map(_holds_class_folders, splits.values()))
        return {split: place.name for split, place in splits.items()} if holds_classes else {}
    return {"train": "."} if not splits and _holds_class_folders(folder) else {}


def _holds_class_folders(folder: Path) -> bool:
    """Returns True if at least two folders have images, and none is named like a part of a set."""
    below = [entry for entry in folder.iterdir() if entry.is_dir() and not is_ignored(entry.name)]
    if any(entry.name.lower() in _PARTS for entry in below):
        return False
    return sum(map(_holds_images, below)) >= 2


# --- unused files beside the labels, and formats that are not read --------------------------------


def _label_kinds(root: Path) -> dict[str, str]:
    """Finds an example file of each format with labels below a folder: format -> file."""
    file_by_kind: dict[str, str] = {}
    tried: Counter[str] = Counter()  # by suffix; text files may be captions, JSON files anything
    for file in files_below(root):
        suffix = os.path.splitext(file)[1].lower()
        kind, is_kind = _LABEL_KINDS.get(suffix, ("", None))
        if is_kind is None or kind in file_by_kind or tried[suffix] == _MAX_TRIED:
            continue
        tried[suffix] += 1
        if is_kind(Path(file)):
            file_by_kind[kind] = file
    return file_by_kind


def _is_coco(file: Path) -> bool:
    beginning = _read_beginning(file)
    marks = (('"images"', '"file_name"'), ('"annotations"', '"bbox"'))
    return beginning.lstrip()[:1] == "{" and any(
        all(mark in beginning for mark in pair) for pair in marks
    )


_LABEL_KINDS: dict[str, tuple[str, Callable[[Path], bool]]] = {
    ".xml": ("voc", Path.is_file),
    ".txt": ("yolo", is_label),
    ".json": ("coco", _is_coco),
}


def _check_one_format(layout: Layout, kinds: Mapping[str, str]) -> None:
    """Checks that the labels of the chosen format cover all labelled images of a split.

    XML and text files of the same images are two forms of one set, and only one is read.

    Args: kinds: result of `_label_kinds`.
    Raises: DataError: some images of a split are labelled in XML and others only in text files.
    """
    if layout.format == "coco" or not kinds.keys() >= {"voc", "yolo"}:
        return
    labels_by_format: dict[str, dict[tuple[str, str], str]] = {"voc": {}, "yolo": {}}
    for file in files_below(layout.root):
        kind, _ = _LABEL_KINDS.get(os.path.splitext(file)[1].lower(), ("", None))
        if kind in labels_by_format:
            labels_by_format[kind][_split_and_stem(file, layout.root)] = file
    chosen = labels_by_format.pop(layout.format)
    ((other_format, labels),) = labels_by_format.items()
    for part in (layout.train, layout.val, layout.test):
        ignored: list[tuple[str, str]] = []
        for image in () if part is None else _images_of_split(layout, part):
            split, stem = _split_and_stem(image, layout.root)
            places = (split, stem), ("", stem)
            label = next((labels[place] for place in places if place in labels), None)
            if label and chosen.keys().isdisjoint(places) and _has_objects(Path(label)):
                ignored.append((image, label))
        if ignored:
            image, label = (_relative_path(Path(file), layout.root) for file in ignored[0])
            raise DataError(
                f"has both {_FORMAT_NAMES[layout.format]} and {_FORMAT_NAMES[other_format]} "
                f"labels, of different images: {len(ignored)} images of a split have only the "
                f"latter, first {image} with {label}",
                code="split_ambiguous",
                where=str(layout.root),
                fix="move the images and labels of one format to another folder",
            )


def _images_of_split(layout: Layout, part: SplitConfig) -> Iterator[str]:
    """Yields the paths of the images that a split may have.

    Images of a Pascal VOC list are left out, because all of them need an XML file.
    """
    lists = [layout.root / name for name in part.annotation_files]
    if any(map(Path.is_file, lists)):
        for listing in lists if layout.format == "yolo" else ():
            lines = read_lines(listing, ignore_issue)
            yield from (str(layout.root / line.replace("\\", "/")) for line in lines)
        return
    for folder in part.image_folders:
        yield from filter(_is_image, files_below(layout.root / folder))


def _split_and_stem(file: str, root: Path) -> tuple[str, str]:
    """Returns the split that a file's folders indicate, and its name without suffix."""
    inside = os.path.relpath(file, root)
    return guess_split_of_path(inside), os.path.splitext(os.path.basename(inside))[0]


def _has_objects(label: Path) -> bool:
    """Returns True if an XML or text file labels an object."""
    if label.suffix.lower() == ".xml":
        return b"<object" in label.read_bytes()
    return label.stat().st_size > 0 and is_label(label)


def _find_unused(layout: Layout, kinds: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (what, why) for images and labels that are in no split, or in two.

    Args: kinds: result of `_label_kinds`.
    """
    root = layout.root
    if layout.images == 1 and layout.val is None:
        yield "1 image: used for training and validation", "its score says nothing about others"
    names: set[str] = set()  # of images, without their suffix
    folders: list[str] = []
    for part in (layout.train, layout.val, layout.test):
        files = [] if part is None else [root / name for name in part.annotation_files]
        if part is not None and not any(map(Path.is_file, files)):
            folders += [os.path.join(root, name, "") for name in part.image_folders]
        for listing in filter(Path.is_file, files):
            if layout.format == "coco":
                lines = read_index(listing)[0]
            else:
                lines = [line.partition(".xml")[0] for line in read_lines(listing, ignore_issue)]
            names.update(re.split(r"[/\\]", os.path.splitext(line)[0])[-1] for line in lines)
    normal = [os.path.normpath(folder) + os.sep for folder in folders]
    left = Counter(
        _relative_path(Path(file).parent, root)
        for file in filter(_is_image, files_below(root))
        if not any(file.startswith(folder) for folder in normal)
        and os.path.splitext(os.path.basename(file))[0] not in names
    )
    if left:
        message = f"{left.total()} images in {abbreviate([*left], 3)}: not used"
        yield message, "they are in no split"
    for listing in (root / name for name in layout.train.annotation_files):
        held = listing.with_name(re.sub("(?i)trainval", "val", listing.name))
        if layout.val is None and held != listing and held.is_file():
            yield f"{held.name}: not used", f"its images are in {listing.name}, too"
    for kind, file in kinds.items():
        if kind != layout.format:
            message = (
                f"{_FORMAT_NAMES[kind]} labels ({_relative_path(Path(file), root)}, ...): not used"
            )
            yield message, f"the {_FORMAT_NAMES[layout.format]} labels are used"


_FORMAT_NAMES = {"coco": "COCO", "voc": "Pascal VOC", "yolo": "YOLO"}
_CONVERT = "convert it: `ppdist data convert {} --to coco --out DIR`"
_EXPORT = "export it as COCO from that tool"
_TO_COCO = "write it as COCO's JSON (docs/data.md)"
_FIFTYONE = "export it from FiftyOne with dataset_type=fiftyone.types.COCODetectionDataset"
_NUMBER = r"-?\d+(\.\d+)?"
# Name, suffix, texts near the beginning of all such files (or a pattern at it), and the remedy.
_FOREIGN: tuple[tuple[str, str, tuple[str, ...] | re.Pattern[str], str], ...] = (
    ("labelme", ".json", ('"shapes"', '"label"'), _CONVERT),
    ("labelme", ".json", ('"shapes"', '"flags"'), _CONVERT),  # for an image without objects
    ("CVAT", ".xml", ("<annotations", "<image "), _CONVERT),
    ("a CVAT video", ".xml", ("<annotations", "<track "), "export it as COCO, or as images"),
    ("Supervisely", ".json", ('"classTitle"',), _EXPORT),
    ("VGG Image Annotator", ".json", ('"shape_attributes"',), _EXPORT),
    ("Datumaro", ".json", ('"dm_format_version"',), _EXPORT),
    ("Label Studio", ".json", ("rectanglelabels",), _EXPORT),
    ("Label Studio", ".json", ('"original_width"',), _EXPORT),
    ("CreateML", ".json", ('"coordinates"',), _EXPORT),
    ("Datumaro", ".json", ('"categories"', '"items"', '"parent"'), _EXPORT),
    ("FiftyOne", ".json", ('"samples"', '"_cls"'), _FIFTYONE),
    ("FiftyOne", ".json", ('"labels"', '"label"', '"bounding_box"'), _FIFTYONE),
    ("BDD100K", ".json", ('"box2d"',), _CONVERT),
    ("CrowdHuman", ".odgt", ('"gtboxes"',), _TO_COCO),
    ("OpenImages", ".csv", ("ImageID", "LabelName", "XMin"), _TO_COCO),
    ("VGG Image Annotator", ".csv", ("region_shape_attributes",), _EXPORT),
    ("boxes as CSV", ".csv", ("xmin", "ymax"), _TO_COCO),
    ("TFRecord", ".tfrecord", (), _EXPORT),
    ("TFRecord", ".tfrec", (), _EXPORT),
    ("VisDrone", ".txt", re.compile(r"-?\d+(,-?\d+){7},?\s*$", re.MULTILINE), _CONVERT),
    ("KITTI", ".txt", re.compile(rf"[A-Za-z]\w*( {_NUMBER}){{14,15}}\s*$", re.MULTILINE), _CONVERT),
    ("DOTA", ".txt", re.compile(rf"imagesource:|gsd:|({_NUMBER} ){{8}}[A-Za-z][\w-]* \d\s*$", re.M),
     "its boxes are turned: write the upright ones as COCO's JSON (docs/data.md)"),
    ("WIDER FACE", ".txt", re.compile(r"\S+/\S+\.jpg\s*\n\d+\s*\n(\d+ ){9}\d+"), _TO_COCO),
    ("YOLOv4 (one file for all images)", ".txt", re.compile(r"\S.*\.\w+ \d+(,\d+){4}( |$)", re.M),
     "export it as YOLOv5 or COCO, as Roboflow does, with each image"),
)  # fmt: skip
_BEGINNING_BYTES = 1 << 16
_MAX_TRIED = 20  # files of a suffix


def detect_foreign_tool(file: str | Path) -> tuple[str, str]:
    """Returns the tool that wrote an annotation file, and the remedy; "", "" if not recognised."""
    kinds = [kind for kind in _FOREIGN if kind[1] == _kind_suffix(file)]
    beginning = _read_beginning(file).lstrip("\ufeff \r\n") if kinds else ""
    for name, _, marks, way in kinds:
        if isinstance(marks, re.Pattern):
            fits = marks.match(beginning) is not None
        else:
            fits = all(mark in beginning for mark in marks)
        if fits:
            return name, way
    return "", ""


def _kind_suffix(file: str | Path) -> str:
    """Returns the suffix in lower case; .tfrecord for the shard `a.tfrecord-00000-of-00010`."""
    return os.path.splitext(file)[1].lower().partition("-")[0]


def _read_beginning(file: str | Path) -> str:
    with open(file, "rb") as content:
        return content.read(_BEGINNING_BYTES).decode(errors="replace")


def _refuse_foreign(files: Sequence[str], source: str) -> None:
    """Rejects annotations in formats that cannot be read.

    Raises: DataError: there are such annotations.
    """
    for suffix in dict.fromkeys(kind[1] for kind in _FOREIGN):
        of_kind = [file for file in files if _kind_suffix(file) == suffix]
        for file in of_kind[:_MAX_TRIED]:
            name, way = detect_foreign_tool(file)
            if name:
                raise DataError(
                    f"holds annotations of {name}, which cannot be used for training directly",
                    code="format_not_read",
                    where=file,
                    fix=way.format(shlex.quote(source)),
                )


def _unwrap_folders(path: Path) -> Iterator[Path]:
    """Yields a folder and its only subfolders, without those that merely wrap another."""
    for _ in range(_DEEPEST):
        entries = [entry for entry in path.iterdir() if not is_ignored(entry.name)]
        below = [entry for entry in entries if entry.is_dir()]
        inner = below[0] if len(below) == 1 else None
        # A folder that names a part or a split belongs to the set and wraps nothing.
        if inner is not None and (inner.name.lower() in _PARTS or guess_split(inner.name)):
            inner = None
        if inner is None or len(entries) > 1:
            yield path
        if inner is None:
            return
        path = inner


def _holds_data(file: Path) -> bool:
    try:
        return is_data_yaml(Reader().read_alone(str(file)))
    except ConfigError:
        if file.stem.lower() in ("data", "dataset"):
            raise
        return False  # some other file that happens to be here


def _folder_name(folder: Path) -> str:
    return Path(os.path.abspath(folder)).name


# --- splits by names of files and folders ---------------------------------------------------------

_SPLITS = ("train", "val", "test")
_LIST_NAME = re.compile(
    rf"({'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))})集?(20\d\d)?[_-]?(list)?"
)
# Names that tools give to the only list of a set.
_WHOLE_SET = (
    "images",
    "image_list",
    "list",
    "all",
)


def _find_lists(folder: Path) -> dict[str, Path]:
    """Finds the image lists of a folder by split, without those of a single class."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        stem = file.stem.lower()
        named = _LIST_NAME.fullmatch(stem)
        if file.suffix.lower() != ".txt" or not (named or stem in _WHOLE_SET):
            continue
        if read_lines(file, ignore_issue):
            by_split.setdefault(SPLIT_WORDS[named[1]] if named else "", []).append(file)
    if "train" not in by_split and "" in by_split:
        by_split["train"] = by_split.pop("")
    # `trainval.txt` is train.txt and val.txt in one; it is used if there is no train.txt.
    combined = [file for file in by_split.get("train", []) if "trainval" in file.stem.lower()]
    if len(by_split.get("train", [])) > len(combined):
        by_split["train"] = [file for file in by_split["train"] if file not in combined]
    elif combined and _have_common_images(combined[0], by_split.get("val", ())):
        del by_split["val"]  # it would score images that were learned
    return {
        split: _require_one(by_split[split], split, folder)
        for split in _SPLITS
        if split in by_split
    }


def _have_common_images(listing: Path, further: Sequence[Path]) -> bool:
    lines = {*read_lines(listing, ignore_issue)}
    return any(not lines.isdisjoint(read_lines(file, ignore_issue)) for file in further)


def _split_folders(folder: Path) -> dict[str, list[Path]]:
    """Finds the subfolders whose names indicate a split, by split."""
    result: dict[str, list[Path]] = {}
    below = sorted(folder.iterdir()) if folder.is_dir() else []
    for entry in below:
        if entry.is_dir() and guess_split(entry.name):
            result.setdefault(guess_split(entry.name), []).append(entry)
    return result


def _require_one(candidates: Sequence[Path], split: str, folder: Path) -> Path:
    if len(candidates) > 1:
        shown = ", ".join(str(path.relative_to(folder)) for path in candidates)
        message = f"several may be its {split} split: {shown}"
        raise DataError(message, code="split_ambiguous", where=str(folder), fix=_BY_HAND)
    return candidates[0]


def _test_note(present: bool) -> tuple[tuple[str, str], ...]:
    reason = "later: `ppdist eval -w RUN --split test`"
    return (("test split: not used in training", reason),) if present else ()


def _relative_path(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)


def _is_image(path: str) -> bool:
    return is_image_name(os.path.basename(path))


def _holds_images(folder: Path) -> bool:
    return folder.is_dir() and any(map(_is_image, files_below(folder)))


# --- data.yaml ------------------------------------------------------------------------------------

_SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def _read_data_yaml_layout(file: Path) -> Layout:
    reader = Reader()
    tree = reader.read_alone(str(file))
    if reader.problems:
        raise problems_error(reader.problems)
    keys = tree.value
    assert isinstance(keys, dict)  # read_alone
    if not is_data_yaml(tree) and "train" not in keys:
        message = (
            f"is not a data file: it has neither train nor names (it has: {', '.join([*keys][:8])})"
        )
        fix = f"to use a configuration, write `-c {file}`"
        raise DataError(message, code="data_kind_unknown", where=str(file), fix=fix)
    names, notes = _read_names(file, keys)
    if "kpt_shape" in keys:
        notes.append(
            ("kpt_shape: only the boxes of the objects are used", "key points are not learned")
        )
    base = Path(os.path.abspath(file)).parent
    given = keys.get("path")
    if given is not None and isinstance(given.value, str):
        base = Path(os.path.normpath(base / given.value.replace("\\", "/")))
        if not base.is_dir():
            notes.append((f"path {given.value}: not there", f"taken: the folder of {file.name}"))
            base = Path(os.path.abspath(file)).parent
    places = {
        split: [_locate_split(base, entry, keys, notes) for entry in _split_entries(keys, split)]
        for split in ("train", "val")
    }
    if not places["train"]:
        message = "names no training images"
        fix = "add `train: FOLDER` (or a list of folders, or a .txt file of image paths)"
        raise DataError(message, code="split_missing", where=str(file), fix=fix)
    places["test"] = _locate_test(base, keys, notes)
    root = _common_root(base, [place for split in places.values() for place in split])
    train, val, test = (_make_yolo_split(root, places[split], file) for split in _SPLITS)
    assert train is not None
    _require_same_numbers(file, names, root, places["train"] + places["val"])
    if "download" in keys:
        notes.append(("download: not run", "nothing in a data file is, and the images are there"))
    stem = file.stem if file.stem.lower() not in ("data", "dataset") else _folder_name(base)
    notes += _test_note(test is not None)
    return Layout(
        name=stem,
        format="yolo",
        root=root,
        train=train,
        val=val,
        test=test,
        class_names=names,
        images=sum(map(_count_images, places["train"])),
        notes=tuple(dict.fromkeys(notes)),
    )


def _split_entries(keys: Mapping[str, Node], split: str) -> list[Node]:
    node = next((keys[key] for key in _SPLIT_KEYS[split] if key in keys), None)
    if node is None or node.value is None or node.value == "":
        return []
    entries = node.value if isinstance(node.value, list) else [node]
    for entry in entries:
        if not isinstance(entry.value, str):
            value = describe_value(entry)
            message = f"{split}: found {value}, expected a folder, or a .txt file, or several"
            raise DataError(message, code="bad_data_yaml", where=str(entry.place))
    return entries


def _locate_split(
    base: Path, entry: Node, keys: Mapping[str, Node], notes: list[tuple[str, str]]
) -> Path:
    """Finds the folder or list that an entry of a data file refers to."""
    text = str(entry.value)
    forward = text.replace("\\", "/")
    # Roboflow's `../train/images` means train/images beside the file.
    bare = re.sub(r"^(\.\./)+", "", forward)
    spellings = dict.fromkeys((text, forward, bare))
    tried = [Path(os.path.normpath(base / spelling)) for spelling in spellings]
    for path in tried:
        if path.exists():
            if bare != forward and path == tried[-1]:
                notes.append((f"{text}: read as {bare}", "as Roboflow means it"))
            return path
    if end := _find_by_path_end(base, forward):
        notes.append((f"{text}: not there", f"using {end}, to which the end of the path leads"))
        return end
    if "download" in keys:
        raise DataError(
            f"does not exist (from `{text}`), and `download` is not run: ppdist neither fetches "
            f"data nor runs what a data file says",
            code="download_refused",
            where=str(tried[0]),
            fix=f"download it yourself: {describe_value(keys['download'])}, then set `path`",
        )
    raise DataError(
        f"{' and '.join(dict.fromkeys(map(str, tried)))}: does not exist",
        code="split_missing",
        where=str(entry.place),
        fix="`path` is relative to the data file; train and val are relative to `path`; "
        "without val, a fifth of train is used for validation",
    )


def _find_by_path_end(base: Path, name: str) -> Path | None:
    """Finds the longest trailing part of another machine's path that exists below `base`.

    It includes the last component that names a split, so that no split replaces another.
    """
    parts = [part for part in name.split("/") if part not in ("", os.curdir, os.pardir)]
    split_positions = [position for position, part in enumerate(parts) if guess_split(part)]
    last = split_positions[-1] if split_positions else len(parts) - 1
    ends = (base.joinpath(*parts[begin:]) for begin in range(last + 1))
    return next((path for path in ends if path.exists()), None)


def _locate_test(base: Path, keys: Mapping[str, Node], notes: list[tuple[str, str]]) -> list[Path]:
    """Locates the test split as `_locate_split` does, but a missing one is only a note."""
    try:
        return [_locate_split(base, entry, keys, notes) for entry in _split_entries(keys, "test")]
    except DataError as error:
        notes.append((f"test split: {error.what}", "not used"))
        return []


def _read_names(
    file: Path, keys: Mapping[str, Node]
) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    node, count = keys.get("names"), keys.get("nc")
    number = count.value if count is not None else None
    if count is not None and (type(number) is not int or number < 1):
        message = f"nc: found {describe_value(count)}, expected the number of classes"
        raise DataError(message, code="bad_data_yaml", where=str(count.place))
    if node is None:
        if not isinstance(number, int):
            raise DataError("has no names of classes", code="class_names_missing", where=str(file))
        note = ("names: class_0, class_1, ...", "the file only gives nc")
        return tuple(f"class_{label}" for label in range(number)), [note]
    if isinstance(node.value, dict):
        items = {key: name for key, name in node.value.items() if key.isdecimal()}
        ordered = [items.get(str(label)) for label in range(len(node.value))]
        if None in ordered:
            message = f"names: expected the numbers 0 to {len(node.value) - 1} as keys"
            raise DataError(message, code="bad_class_numbers", where=str(node.place))
        entries = [name for name in ordered if name is not None]
    elif isinstance(node.value, list):
        entries = node.value
    else:
        message = f"names: found {describe_value(node)}, expected a list of names"
        raise DataError(message, code="bad_data_yaml", where=str(node.place))
    wrong = next((entry for entry in entries if isinstance(entry.value, list | dict)), None)
    if wrong is not None or not entries:
        message = f"names: found {describe_value(wrong or node)}, expected a name for each class"
        raise DataError(message, code="bad_data_yaml", where=str((wrong or node).place))
    if isinstance(number, int) and number != len(entries):
        assert count is not None
        raise DataError(
            f"nc is {number}, but names has {len(entries)}",
            code="class_count_differs",
            where=str(count.place),
            fix="correct the one that is wrong, or remove nc",
        )
    return find_class_names(file.parent, tuple(entry.text for entry in entries)), []


def _require_same_numbers(
    file: Path, names: tuple[str, ...], root: Path, places: Sequence[Path]
) -> None:
    """Checks that class lists beside the labels use the same numbers.

    Raises: DataError: a list uses other numbers.
    """
    for place in places:
        folder = place if place.is_dir() else place.parent
        class_list = nearest_class_list(root, (label_folder(folder, root), folder))
        if class_list is not None and any(a != b for a, b in zip(names, class_list[1])):
            raise DataError(
                f"give different class names ({abbreviate(names, 5)}; "
                f"{abbreviate(class_list[1], 5)})",
                code="class_names_ambiguous",
                where=f"{file}, {class_list[0]}",
                fix="correct the wrong one, or remove the list",
            )


def _common_root(base: Path, places: Sequence[Path]) -> Path:
    """Returns data.root: a folder above all `places` and above their `images` folders."""
    root = base
    if not all(place.is_relative_to(base) for place in places):
        root = Path(os.path.commonpath([place.parent for place in places]))
    for place in places:
        # Labels are found by the path below root, so root must not be inside `images`.
        lowered = [part.lower() for part in place.parts]
        if "images" in lowered:
            last = len(lowered) - 1 - lowered[::-1].index("images")
            if last < len(root.parts):
                root = Path(*root.parts[:last])
    return root


def _make_yolo_split(root: Path, places: Sequence[Path], file: Path) -> SplitConfig | None:
    if not places:
        return None
    lists = [_relative_path(place, root) for place in places if place.is_file()]
    folders = [_relative_path(place, root) for place in places if place.is_dir()]
    if lists and folders:
        message = f"folders ({folders[0]}) and lists ({lists[0]}) in one split"
        fix = "name only folders, or only .txt files"
        raise DataError(message, code="bad_data_yaml", where=str(file), fix=fix)
    images: str | tuple[str, ...] = folders[0] if len(folders) == 1 else tuple(folders)
    annotations: str | tuple[str, ...] = lists[0] if len(lists) == 1 else tuple(lists)
    return SplitConfig(images=images or ".", annotations=annotations or "")


def _count_images(place: Path) -> int:
    if place.is_file():
        return len(read_lines(place, ignore_issue))
    return sum(map(_is_image, files_below(place)))


# --- COCO -----------------------------------------------------------------------------------------

_OTHER_TASKS = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")


def _detect_coco(root: Path) -> Layout | None:
    files = [*root.glob("*.[jJ][sS][oO][nN]"), *root.glob("*/*.[jJ][sS][oO][nN]")]
    boxes = [file for file in sorted(files) if not file.name.startswith((*_OTHER_TASKS, "."))]
    index_of: dict[Path, tuple[list[str], tuple[str, ...]]] = {}
    by_split: dict[str, list[Path]] = {}
    for file in boxes:
        split = guess_split(file.stem) or guess_split(str(file.parent.relative_to(root)))
        try:
            index_of[file] = read_index(file)
        except DataError as error:
            if error.code in ("not_coco", "not_json", "not_utf8") or split == "test":
                continue  # another kind of JSON
            raise
        by_split.setdefault(split, []).append(file)
    if not by_split.keys() - {"test"}:
        return None
    if "" in by_split and "train" not in by_split:  # the only file of a set may have any name
        by_split["train"] = by_split.pop("")
    if "train" not in by_split:
        message = f"no file of training images; found {', '.join(map(str, index_of))}"
        raise DataError(message, code="split_missing", where=str(root), fix=_BY_HAND)
    chosen = {
        split: _require_one(by_split[split], split, root) for split in _SPLITS if split in by_split
    }
    absolute = Path(os.path.abspath(root))
    parts = {
        split: SplitConfig(
            images=_relative_path(_find_image_folder(root, file, index_of[file][0]), root),
            annotations=_relative_path(file, root),
        )
        for split, file in chosen.items()
    }
    names_of_images, names = index_of[chosen["train"]]
    left = [_relative_path(file, root) for file in index_of if file not in chosen.values()]
    unused = ((f"{abbreviate(left, 3)}: not used", "its name matches no split"),) if left else ()
    return Layout(
        name=_folder_name(root),
        format="coco",
        root=absolute,
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        class_names=names,
        images=len(names_of_images),
        notes=(*_test_note("test" in parts), *unused),
    )


def _find_image_folder(root: Path, file: Path, names: Sequence[str]) -> Path:
    """Finds the folder that the `file_name`s of a COCO file are relative to."""
    stem = file.stem.removeprefix("instances_")
    split = guess_split(stem) or guess_split(file.parent.name)
    candidates = [
        *(file.parent, root / stem, root / "images" / stem, root / split),
        *(root / "images" / split, root / "images", root / "JPEGImages", root),
    ]
    # Only a few names, spread over the set, as it may have a million of them.
    sample = names[:: max(1, len(names) // 5)][:5]
    if not sample:
        raise DataError("lists no image", code="no_images", where=str(file))
    folders = [Path(folder) for folder in folders_below(root)]
    # Folders of the split first: train/ and val/ may have images with the same names.
    folders.sort(key=lambda path: guess_split(_relative_path(path, root)) not in (split, ""))
    for folder in dict.fromkeys((*candidates, *folders)):
        if folder.is_dir() and all((folder / name).is_file() for name in sample):
            return folder
    # No folder has exactly these paths: try other spellings, and trailing parts of the paths.
    forget_folder_listings()
    for folder in dict.fromkeys((*candidates, *folders)):
        images = [find_image(folder, name, str(file), ignore_issue) for name in sample]
        if folder.is_dir() and all(image is not None and image.is_file() for image in images):
            return folder
    existing = [path for path in dict.fromkeys(candidates) if path.is_dir()]
    tried = ", ".join(_relative_path(path, root) for path in existing)
    raise DataError(
        f"its images are in none of the folders {tried} of {root}, first {sample[0]}",
        code="image_missing",
        where=str(file),
        fix="put them there, or name their folder in a configuration (docs/data.md)",
    )


# --- Pascal VOC -----------------------------------------------------------------------------------


def _detect_voc(root: Path) -> Layout | None:
    root = Path(os.path.abspath(root))
    first = next(xml_files(root), None)
    if first is None:
        return None
    _refuse_foreign([first], str(root))
    inner = [path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/ImageSets")]
    if inner and not (root / "ImageSets").is_dir():
        return _detect_voc(_require_one(sorted(inner), "train", root))
    lists = _find_voc_lists(root)
    if lists:
        images = _first_image_folder(root, [root / "JPEGImages", root / "images", root])
        parts = {
            split: SplitConfig(
                images=_relative_path(images, root), annotations=_relative_path(file, root)
            )
            for split, file in lists.items()
        }
    else:
        parts = _find_voc_folders(root, Path(first).parent)
    config = DataConfig(
        format="voc", root=str(root), train=parts["train"], val=parts.get("val", parts["train"])
    )
    issues: list[Issue] = []
    raw = read_raw(config, "train", issues.append)
    if not raw.class_names:
        for issue in issues:
            if KINDS[issue.code].severity == "error":
                more = f" (and {len(issues) - 1} more)" if issues[1:] else ""
                fix = "correct these files, or export them anew with <bndbox>"
                raise DataError(f"{issue.what}{more}", code=issue.code, where=issue.where, fix=fix)
        raise DataError(
            f"none of its {len(raw.images)} XML files has an object",
            code="objects_missing",
            where=str(root),
        )
    notes = _test_note("test" in parts)
    unlabelled = _count_images(root / config.train.image_folders[0]) - len(raw.images)
    if not lists and "val" not in parts and unlabelled > 0:
        reason = "they have no labels; an XML file without objects makes one background"
        notes += ((f"{unlabelled} images without an XML file: not used", reason),)
    return Layout(
        name=_folder_name(root),
        format="voc",
        root=root,
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        class_names=raw.class_names,
        images=len(raw.images),
        notes=notes,
    )


def _find_voc_lists(root: Path) -> dict[str, Path]:
    """Finds, by split, the lists of images whose lines lead to XML files."""
    for folder in (root / "ImageSets" / "Main", root / "ImageSets", root):
        found_lists = _find_lists(folder)
        if "train" not in found_lists:
            continue
        line = read_lines(found_lists["train"], ignore_issue)[0]
        if line.lower().endswith(".xml") or (root / "Annotations").is_dir():
            return found_lists
        if not _is_image(line):  # otherwise it is a list for YOLO
            raise DataError(
                "lists images whose XML files are expected in Annotations/, which is not there",
                code="annotation_file_missing",
                where=str(found_lists["train"]),
                fix=f"call the folder of the XML files {root / 'Annotations'}",
            )
    return {}


def _find_voc_folders(root: Path, first: Path) -> dict[str, SplitConfig]:
    """Finds the splits of a Pascal VOC set by folder names."""
    for top in dict.fromkeys((root, first, first.parent)):
        if not top.is_relative_to(root):
            continue
        folders = {
            split: [path for path in candidates if next(xml_files(path), None)]
            for split, candidates in _split_folders(top).items()
        }
        if folders.get("train"):
            chosen = {s: _require_one(folders[s], s, root) for s in _SPLITS if folders.get(s)}
            parts = {}
            for split, folder in chosen.items():
                name = folder.name
                near = [folder, root / "images" / name, root / "JPEGImages" / name, root / name]
                images = _first_image_folder(root, [*near, root / "images", root])
                parts[split] = SplitConfig(
                    images=_relative_path(images, root), annotations=_relative_path(folder, root)
                )
            return parts
    holding = {Path(file).parent for file in xml_files(root)}
    folder = Path(os.path.commonpath(holding))
    images = _first_image_folder(root, [folder, root / "JPEGImages", root / "images", root])
    part = SplitConfig(
        images=_relative_path(images, root), annotations=_relative_path(folder, root)
    )
    return {"train": part}


def _first_image_folder(root: Path, folders: Sequence[Path]) -> Path:
    images = next((folder for folder in folders if _holds_images(folder)), None)
    if images is None:
        raise DataError("has annotations but no image", code="no_images", where=str(root))
    return images


# --- YOLO without a data.yaml ---------------------------------------------------------------------


def _detect_yolo(root: Path) -> Layout | None:
    root = Path(os.path.abspath(root))
    lists, folders = _find_yolo_lists(root), _find_yolo_folders(root)
    splits = lists or folders
    if lists and lists["train"][0].stem.lower() in _WHOLE_SET and "val" in folders:
        splits = folders  # folders of splits are better than one list of everything
    if not splits:
        return None
    train, val, test = (_make_yolo_split(root, splits.get(s, []), root) for s in _SPLITS)
    assert train is not None
    holding = [root / "labels", root / "data", root]
    holding += [place for place in splits["train"] if place.is_dir()]
    label_folders = [folder for folder in holding if folder.is_dir()]
    label_files = (file for folder in label_folders for file in files_below(folder))
    first_label = next((file for file in label_files if is_label(Path(file))), None)
    if first_label is None:
        return None
    _refuse_foreign([first_label], str(root))
    chosen = [place for place in splits["train"] if place.is_dir()]
    class_list = nearest_class_list(root, [*(label_folder(path, root) for path in chosen), *chosen])
    further = (find_class_names(folder, ()) for folder in label_folders)
    names = class_list[1] if class_list else next(filter(None, further), ())
    if not names:
        raise DataError(
            "YOLO labels do not name their classes",
            code="class_names_missing",
            where=str(root),
            fix=f"write them, one a line, to {root / 'classes.txt'}",
        )
    return Layout(
        name=root.name,
        format="yolo",
        root=root,
        train=train,
        val=val,
        test=test,
        class_names=names,
        images=sum(map(_count_images, splits["train"])),
        notes=_test_note(test is not None),
    )


def _find_yolo_lists(root: Path) -> dict[str, list[Path]]:
    """Finds, by split, the lists of images whose lines contain only an image path."""
    for folder in (root, root / "data", root / "ImageSets" / "Main"):
        found_lists = _find_lists(folder)
        if "train" not in found_lists:
            continue
        line = read_lines(found_lists["train"], ignore_issue)[0]
        if _is_image(line.replace("\\", "/")):
            valid = _find_darknet_valid(folder)
            if valid is not None and valid != found_lists["train"]:
                found_lists = {"train": found_lists["train"], "val": valid}
            return {split: [file] for split, file in found_lists.items()}
        words = line.split()
        if len(words) > 1 and _is_image(words[0]):  # `IMAGE XML` is Pascal VOC
            raise DataError(
                f"has more than an image on a line: {line[:80]!r}; expected only images, with "
                f"their labels beside them or in labels/",
                code="format_not_read",
                where=str(found_lists["train"]),
                fix="remove the second column; for classes of whole images set data.format: csv "
                "in a configuration (docs/data.md)",
            )
    return {}


def _find_darknet_valid(folder: Path) -> Path | None:
    """Finds the list that an `obj.data` file beside the lists names as `valid`."""
    for file in sorted(folder.glob("*.data")):
        names = re.findall(
            r"^\s*valid\s*=\s*(\S+)", "\n".join(read_lines(file, ignore_issue)), re.MULTILINE
        )
        for path in (folder / Path(name.replace("\\", "/")).name for name in names):
            if path.is_file() and read_lines(path, ignore_issue):
                return path
    return None


def _find_yolo_folders(root: Path) -> dict[str, list[Path]]:
    """Finds the folders of images by split, or else the only one."""
    below = [entry for entry in sorted(root.iterdir()) if entry.is_dir()]
    image_folders = [path for path in below if path.name.lower() in ("images", "data")]
    for top in (*image_folders, root):
        folders = {
            split: [path for path in candidates if _holds_images(path)]
            for split, candidates in _split_folders(top).items()
        }
        if folders.get("train"):
            return {s: [_require_one(folders[s], s, root)] for s in _SPLITS if folders.get(s)}
    only = next((path for path in image_folders if _holds_images(path)), root)
    return {"train": [only]} if _holds_images(only) else {}

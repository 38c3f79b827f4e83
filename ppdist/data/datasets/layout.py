"""Dataset layout: format, splits and classes of a folder or data.yaml.

data.yaml of ultralytics and Roboflow    path, train, val: a folder, several, or a .txt list
COCO folder                              annotations/*.json, or train/_annotations.coco.json
VOC folder                               XML anywhere, with or without ImageSets
YOLO folder                              images/, labels/ and classes.txt
"""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ppdist.common.addresses import is_remote
from ppdist.common.errors import ConfigError, DataError
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.config.migration import is_data_yaml
from ppdist.config.yaml import Node, Reader, describe_value, problems_error
from ppdist.data.datasets.annotations import (
    KINDS,
    SPLIT_WORDS,
    class_names,
    files_below,
    find_image,
    folders_below,
    is_no_data,
    listed,
    look_anew,
    quietly,
    read_list,
    split_of,
    split_of_folders,
)
from ppdist.data.datasets.build import read_raw
from ppdist.data.datasets.coco import read_index
from ppdist.data.datasets.voc import xml_files
from ppdist.data.datasets.yolo import is_label, label_folder, own_names
from ppdist.data.image import is_image_name
from ppdist.data.types import Issue

_PARTS = ("annotations", "images", "labels", "jpegimages", "imagesets")  # of a set, not around one
_DEEPEST = 4  # folders in one another, each alone
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z")
VAL_FRACTION = 0.2  # of a set without a validation split
_KINDS = (
    "expected a data.yaml (ultralytics, Roboflow), or a folder with COCO's JSON, Pascal VOC's XML, "
    "or YOLO's images/ and labels/"
)
_BY_HAND = "say which in a configuration: copy configs/examples/my_data.yml (docs/data.md)"


@dataclass(frozen=True)
class Layout:
    """A set as it was found.

    root: absolute; the paths of the splits are relative to it.  None: there is no such split.
    images: of train, those of a later validation split too.
    notes: (what, why) of what its owner may not expect.
    """

    name: str
    format: Literal["coco", "voc", "yolo"]
    root: Path
    train: SplitConfig
    val: SplitConfig | None
    class_names: tuple[str, ...]
    images: int
    test: SplitConfig | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def section(self) -> dict[str, Any]:
        """Keys of `data` that describe this layout, as a configuration has them."""
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {
            "format": self.format,
            "root": str(self.root),
            **{key: each.model_dump(include={"images", "annotations"}, mode="json")
               for key, each in splits.items() if each is not None},
            **({"val_fraction": VAL_FRACTION} if self.val is None else {}),
            "class_names": list(self.class_names),
        }  # fmt: skip


# Names without .yaml of the data files in the package of ultralytics.
_OF_ULTRALYTICS = (
    *("coco", "coco8", "coco128", "voc", "objects365", "lvis", "visdrone", "xview", "sku-110k"),
    *("argoverse", "globalwheat2020", "open-images-v7"),
)


def is_layout(path: str | Path) -> bool:
    """Whether a path is a data set, not a configuration."""
    path = Path(path)
    return path.is_dir() or (path.is_file() and is_data_yaml(Reader().read_alone(str(path))))


def find_layout(source: str) -> Layout:
    """Determines what a path is by its files alone.

    Args: source: a data.yaml or a folder.
    Raises: DataError: no data set that can be read, or not plainly one; ConfigError: not YAML.
    """
    if is_remote(source):
        what = "a layout cannot be found out in an object store: name the files in a configuration"
        fix = (
            "copy configs/examples/my_data.yml and set data.root to the address, with format: coco "
            "(docs/data.md, Object stores)"
        )
        raise DataError(what, code="data_not_found", where=source, fix=fix)
    look_anew()
    try:
        layout = _found(Path(source), source)
        _check_names_of_folders(layout)
        return layout
    except OSError as error:
        raise DataError(
            error.strerror or str(error), code="folder_unreadable", where=str(error.filename)
        ) from error


def _check_names_of_folders(layout: Layout) -> None:
    """Checks that a UTF-8 configuration can say where the files are.

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


def _found(path: Path, source: str) -> Layout:
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        layout = _of_yaml(path)
        own = layout.root == Path(os.path.abspath(path)).parent
        if not own:
            return layout
        kinds = _label_kinds(layout.root)
        _check_one_format(layout, kinds)
        unused = _unused(layout, kinds)
        return replace(layout, notes=(*layout.notes, *unused))
    if not path.is_dir():
        beside = [each.name for each in path.parent.glob("*")] if not path.exists() else []
        near = get_close_matches(path.name, beside, 1)
        what = f"is neither a folder nor a data.yaml (looked in {Path.cwd()})"
        packed = path.is_file() and path.suffix.lower() in _ARCHIVES
        fix = "unpack it, then give the folder" if packed else _KINDS
        if path.stem.lower() in _OF_ULTRALYTICS:
            fix = (
                f"{path.name} comes with ultralytics, which fetches its images; ppdist fetches "
                "none: `ppdist train FOLDER --model yolov5n` takes the folder that has them"
            )
        fix = f"did you mean {path.with_name(near[0])}?" if near else fix
        raise DataError(what, code="data_not_found", where=source, fix=fix)
    for folder in _nested(path):
        files = [each for each in sorted(folder.glob("*.y*ml")) if _holds_data(each)]
        if len(files) > 1:
            what = f"holds several data files: {', '.join(each.name for each in files)}"
            fix = f"give the one that you mean, such as {files[0]}"
            raise DataError(what, code="split_ambiguous", where=str(folder), fix=fix)
        if files:
            return _found(files[0], str(files[0]))
        for reader in (_of_coco, _of_voc, _of_yolo):
            found_layout = reader(folder)
            if found_layout is not None:
                kinds = _label_kinds(found_layout.root)
                _check_one_format(found_layout, kinds)
                unused = _unused(found_layout, kinds)
                return replace(found_layout, notes=(*found_layout.notes, *unused))
    below = [*files_below(path)]
    _refuse_foreign(below, source)
    images = sum(map(_is_image, below))
    if images:
        what = f"has {images} images but no labels"
        raise DataError(what, code="labels_missing", where=source, fix=_KINDS)
    seen = sorted(each.name for each in path.iterdir())[:8]
    what = f"holds no annotations in a known format (it has: {', '.join(seen) or 'nothing'})"
    raise DataError(what, code="data_kind_unknown", where=source, fix=_KINDS)


# --- what is beside the labels that are read, and what is not read --------------------------------


def _label_kinds(root: Path) -> dict[str, str]:
    """A file of each format that has labels below a folder."""
    found: dict[str, str] = {}
    looked_at: Counter[str] = Counter()  # texts may be captions, JSON anything
    for file in files_below(root):
        suffix = os.path.splitext(file)[1].lower()
        kind, is_kind = _LABEL_KINDS.get(suffix, ("", None))
        if is_kind is None or kind in found or looked_at[suffix] == _LOOKED_AT:
            continue
        looked_at[suffix] += 1
        if is_kind(Path(file)):
            found[kind] = file
    return found


def _is_coco(file: Path) -> bool:
    beginning = _beginning(file)
    marks = (('"images"', '"file_name"'), ('"annotations"', '"bbox"'))
    return beginning.lstrip()[:1] == "{" and any(
        all(mark in beginning for mark in each) for each in marks
    )


_LABEL_KINDS: dict[str, tuple[str, Callable[[Path], bool]]] = {
    ".xml": ("voc", Path.is_file),
    ".txt": ("yolo", is_label),
    ".json": ("coco", _is_coco),
}


def _check_one_format(layout: Layout, kinds: Mapping[str, str]) -> None:
    """Checks that the labels of the chosen format have all objects of a split.

    XML and text files of the same images are two forms of one set, of which one is read.

    Args: kinds: those of `_label_kinds`.
    Raises: DataError: some images of a split are labelled in XML and others in text files alone.
    """
    if layout.format == "coco" or not kinds.keys() >= {"voc", "yolo"}:
        return
    of_format: dict[str, dict[tuple[str, str], str]] = {"voc": {}, "yolo": {}}
    for file in files_below(layout.root):
        kind, _ = _LABEL_KINDS.get(os.path.splitext(file)[1].lower(), ("", None))
        if kind in of_format:
            of_format[kind][_split_and_stem(file, layout.root)] = file
    chosen = of_format.pop(layout.format)
    ((other, labels),) = of_format.items()
    for part in (layout.train, layout.val, layout.test):
        ignored: list[tuple[str, str]] = []
        for image in () if part is None else _images_of_split(layout, part):
            split, stem = _split_and_stem(image, layout.root)
            places = (split, stem), ("", stem)
            label = next((labels[place] for place in places if place in labels), None)
            if label and chosen.keys().isdisjoint(places) and _has_objects(Path(label)):
                ignored.append((image, label))
        if ignored:
            image, label = ignored[0]
            raise DataError(
                f"has both {_FORMAT_NAMES[layout.format]} and {_FORMAT_NAMES[other]} labels, of "
                f"different images: {len(ignored)} images of a split have only the latter, first "
                f"{_relative(Path(image), layout.root)} with {_relative(Path(label), layout.root)}",
                code="split_ambiguous",
                where=str(layout.root),
                fix="move the images and labels of one format to another folder",
            )


def _images_of_split(layout: Layout, part: SplitConfig) -> Iterator[str]:
    """Yields the paths of the images that a split may have.

    Images of a Pascal VOC list are left out, because all of them need an XML file.
    """
    lists = [layout.root / each for each in part.annotation_files]
    if any(map(Path.is_file, lists)):
        for listing in lists if layout.format == "yolo" else ():
            lines = read_list(listing, quietly)
            yield from (str(layout.root / line.replace("\\", "/")) for line in lines)
        return
    for folder in part.image_folders:
        yield from filter(_is_image, files_below(layout.root / folder))


def _split_and_stem(file: str, root: Path) -> tuple[str, str]:
    """Returns the split that a file's folders indicate, and its name without suffix."""
    inside = os.path.relpath(file, root)
    return split_of_folders(inside), os.path.splitext(os.path.basename(inside))[0]


def _has_objects(label: Path) -> bool:
    """Returns True if an XML or text file labels an object."""
    if label.suffix.lower() == ".xml":
        return b"<object" in label.read_bytes()
    return label.stat().st_size > 0 and is_label(label)


def _unused(layout: Layout, kinds: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Images and labels in no split, or in two: (what, why).

    Args: kinds: those of `_label_kinds`.
    """
    root = layout.root
    if layout.images == 1 and layout.val is None:
        yield "1 image: used for training and validation", "its score says nothing about others"
    names: set[str] = set()  # of images, without their suffix
    folders: list[str] = []
    for part in (layout.train, layout.val, layout.test):
        files = [] if part is None else [root / each for each in part.annotation_files]
        if part is not None and not any(map(Path.is_file, files)):
            folders += [os.path.join(root, each, "") for each in part.image_folders]
        for listing in filter(Path.is_file, files):
            if layout.format == "coco":
                lines = read_index(listing)[0]
            else:
                lines = [line.partition(".xml")[0] for line in read_list(listing, quietly)]
            names.update(re.split(r"[/\\]", os.path.splitext(line)[0])[-1] for line in lines)
    normal = [os.path.normpath(each) + os.sep for each in folders]
    left = Counter(
        _relative(Path(file).parent, root)
        for file in filter(_is_image, files_below(root))
        if not any(file.startswith(each) for each in normal)
        and os.path.splitext(os.path.basename(file))[0] not in names
    )
    if left:
        what = f"{left.total()} images in {listed([*left], 3)}: not used"
        yield what, "they are in no split"
    for listing in (root / each for each in layout.train.annotation_files):
        held = listing.with_name(re.sub("(?i)trainval", "val", listing.name))
        if layout.val is None and held != listing and held.is_file():
            yield f"{held.name}: not used", f"its images are in {listing.name}, too"
    for kind, file in kinds.items():
        if kind != layout.format:
            what = f"{_FORMAT_NAMES[kind]} labels ({_relative(Path(file), root)}, ...): not used"
            yield what, f"the {_FORMAT_NAMES[layout.format]} labels are used"


_FORMAT_NAMES = {"coco": "COCO", "voc": "Pascal VOC", "yolo": "YOLO"}
_CONVERT = "convert it: `ppdist data convert {} --to coco --out DIR`"
_EXPORT = "export it as COCO from that tool"
_TO_COCO = "write it as COCO's JSON (docs/data.md)"
_FIFTYONE = "export it from FiftyOne with dataset_type=fiftyone.types.COCODetectionDataset"
_NUMBER = r"-?\d+(\.\d+)?"
# Name, suffix, what all of its files have near their beginning (a pattern: at it), and the way out.
_FOREIGN: tuple[tuple[str, str, tuple[str, ...] | re.Pattern[str], str], ...] = (
    ("labelme", ".json", ('"shapes"', '"label"'), _CONVERT),
    ("labelme", ".json", ('"shapes"', '"flags"'), _CONVERT),  # of an image without objects
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
_LOOKED_AT = 20  # files of a kind


def foreign_kind(file: str | Path) -> tuple[str, str]:
    """Tool that wrote an annotation file, and the remedy, or ""."""
    kinds = [kind for kind in _FOREIGN if kind[1] == _kind_suffix(file)]
    beginning = _beginning(file).lstrip("\ufeff \r\n") if kinds else ""
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


def _beginning(file: str | Path) -> str:
    with open(file, "rb") as content:
        return content.read(_BEGINNING_BYTES).decode(errors="replace")


def _refuse_foreign(files: Sequence[str], source: str) -> None:
    """Rejects annotations of tools that are not read.

    Raises: DataError: there are some.
    """
    for suffix in dict.fromkeys(each[1] for each in _FOREIGN):
        of_kind = [file for file in files if _kind_suffix(file) == suffix]
        for file in of_kind[:_LOOKED_AT]:
            name, way = foreign_kind(file)
            if name:
                raise DataError(
                    f"holds annotations of {name}, which cannot be used for training directly",
                    code="format_not_read",
                    where=file,
                    fix=way.format(shlex.quote(source)),
                )


def _nested(path: Path) -> Iterator[Path]:
    """Yields a folder without archive wrappers, then its only subfolder, recursively."""
    for _ in range(_DEEPEST):
        entries = [each for each in path.iterdir() if not is_no_data(each.name)]
        below = [each for each in entries if each.is_dir()]
        inner = below[0] if len(below) == 1 else None
        if inner is not None and (inner.name.lower() in _PARTS or split_of(inner.name)):
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
        return False  # some other file that happens to lie here


def _named(folder: Path) -> str:
    return Path(os.path.abspath(folder)).name


# --- the split that a name speaks of --------------------------------------------------------------

_SPLITS = ("train", "val", "test")
_LIST_NAME = re.compile(
    rf"({'|'.join(sorted(SPLIT_WORDS, key=len, reverse=True))})集?(20\d\d)?[_-]?(list)?"
)
_WHOLE_SET = ("images", "image_list", "list", "all")  # as tools call the only list of a set


def _lists(folder: Path) -> dict[str, Path]:
    """Image lists of a folder by split, without those of one class."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        stem = file.stem.lower()
        named = _LIST_NAME.fullmatch(stem)
        if file.suffix.lower() != ".txt" or not (named or stem in _WHOLE_SET):
            continue
        if read_list(file, quietly):
            by_split.setdefault(SPLIT_WORDS[named[1]] if named else "", []).append(file)
    if "train" not in by_split and "" in by_split:
        by_split["train"] = by_split.pop("")
    # `trainval.txt` is train.txt and val.txt in one, and the list where they are not.
    both = [file for file in by_split.get("train", []) if "trainval" in file.stem.lower()]
    if len(by_split.get("train", [])) > len(both):
        by_split["train"] = [file for file in by_split["train"] if file not in both]
    elif both and _overlap(both[0], by_split.get("val", ())):
        del by_split["val"]  # its score would be of images that were learned
    return {split: _one(by_split[split], split, folder) for split in _SPLITS if split in by_split}


def _overlap(listing: Path, others: Sequence[Path]) -> bool:
    lines = {*read_list(listing, quietly)}
    return any(not lines.isdisjoint(read_list(other, quietly)) for other in others)


def _split_folders(folder: Path) -> dict[str, list[Path]]:
    """The folders in a folder whose names say a split, by split."""
    result: dict[str, list[Path]] = {}
    below = sorted(folder.iterdir()) if folder.is_dir() else []
    for each in below:
        if each.is_dir() and split_of(each.name):
            result.setdefault(split_of(each.name), []).append(each)
    return result


def _one(candidates: Sequence[Path], split: str, folder: Path) -> Path:
    if len(candidates) > 1:
        shown = ", ".join(str(each.relative_to(folder)) for each in candidates)
        what = f"several may be its {split} split: {shown}"
        raise DataError(what, code="split_ambiguous", where=str(folder), fix=_BY_HAND)
    return candidates[0]


def _tests_note(present: bool) -> tuple[tuple[str, str], ...]:
    reason = "evaluate it later: `ppdist eval -w RUN --split test`"
    return (("test split: not used in training", reason),) if present else ()


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)


def _is_image(path: str) -> bool:
    return is_image_name(os.path.basename(path))


def _holds_images(folder: Path) -> bool:
    return folder.is_dir() and any(map(_is_image, files_below(folder)))


# --- data.yaml ------------------------------------------------------------------------------------

_SPLIT_KEYS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


def _of_yaml(file: Path) -> Layout:
    reader = Reader()
    tree = reader.read_alone(str(file))
    if reader.problems:
        raise problems_error(reader.problems)
    keys = tree.value
    assert isinstance(keys, dict)  # read_alone
    if not is_data_yaml(tree) and "train" not in keys:
        what = (
            f"is not a data file: it has neither train nor names (it has: {', '.join([*keys][:8])})"
        )
        fix = f"to use a configuration, write `-c {file}`"
        raise DataError(what, code="data_kind_unknown", where=str(file), fix=fix)
    names, notes = _names(file, keys)
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
        split: [_place(base, entry, keys, notes) for entry in _entries(keys, split)]
        for split in ("train", "val")
    }
    if not places["train"]:
        what = "names no training images"
        fix = "add `train: FOLDER` (or a list of folders, or a .txt file of image paths)"
        raise DataError(what, code="split_missing", where=str(file), fix=fix)
    places["test"] = _test_places(base, keys, notes)
    root = _root_of(base, [place for split in places.values() for place in split])
    train, val, test = (_yolo_split(root, places[split], file) for split in _SPLITS)
    assert train is not None
    _check_names(file, names, root, places["train"] + places["val"])
    if "download" in keys:
        notes.append(("download: not run", "nothing in a data file is, and the images are there"))
    stem = file.stem if file.stem.lower() not in ("data", "dataset") else _named(base)
    notes += _tests_note(test is not None)
    return Layout(
        name=stem,
        format="yolo",
        root=root,
        train=train,
        val=val,
        test=test,
        class_names=names,
        images=sum(map(_count, places["train"])),
        notes=tuple(dict.fromkeys(notes)),
    )


def _entries(keys: Mapping[str, Node], split: str) -> list[Node]:
    node = next((keys[key] for key in _SPLIT_KEYS[split] if key in keys), None)
    if node is None or node.value is None or node.value == "":
        return []
    entries = node.value if isinstance(node.value, list) else [node]
    for entry in entries:
        if not isinstance(entry.value, str):
            value = describe_value(entry)
            what = f"{split}: found {value}, expected a folder, or a .txt file, or several"
            raise DataError(what, code="bad_data_yaml", where=str(entry.place))
    return entries


def _place(base: Path, entry: Node, keys: Mapping[str, Node], notes: list[tuple[str, str]]) -> Path:
    """The folder or list that an entry means."""
    text = str(entry.value)
    forward = text.replace("\\", "/")
    # Roboflow's `../train/images` means train/images beside the file.
    bare = re.sub(r"^(\.\./)+", "", forward)
    tried = [Path(os.path.normpath(base / each)) for each in dict.fromkeys((text, forward, bare))]
    for path in tried:
        if path.exists():
            if bare != forward and path == tried[-1]:
                notes.append((f"{text}: read as {bare}", "as Roboflow means it"))
            return path
    if end := _split_by_its_end(base, forward):
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


def _split_by_its_end(base: Path, name: str) -> Path | None:
    """Finds the longest end of another machine's path that exists below `base`.

    It keeps the last part that names a split, so that no split stands for another.
    """
    parts = [part for part in name.split("/") if part not in ("", os.curdir, os.pardir)]
    of_split = [place for place, part in enumerate(parts) if split_of(part)]
    last = of_split[-1] if of_split else len(parts) - 1
    ends = (base.joinpath(*parts[begin:]) for begin in range(last + 1))
    return next((path for path in ends if path.exists()), None)


def _test_places(base: Path, keys: Mapping[str, Node], notes: list[tuple[str, str]]) -> list[Path]:
    """As `_place`, but training needs none of them."""
    try:
        return [_place(base, entry, keys, notes) for entry in _entries(keys, "test")]
    except DataError as error:
        notes.append((f"test split: {error.what}", "not used"))
        return []


def _names(file: Path, keys: Mapping[str, Node]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    node, count = keys.get("names"), keys.get("nc")
    number = count.value if count is not None else None
    if count is not None and (type(number) is not int or number < 1):
        what = f"nc: found {describe_value(count)}, expected the number of classes"
        raise DataError(what, code="bad_data_yaml", where=str(count.place))
    if node is None:
        if not isinstance(number, int):
            raise DataError("has no names of classes", code="class_names_missing", where=str(file))
        note = ("names: class_0, class_1, ...", "the file only gives nc")
        return tuple(f"class_{label}" for label in range(number)), [note]
    if isinstance(node.value, dict):
        items = {key: each for key, each in node.value.items() if key.isdecimal()}
        ordered = [items.get(str(label)) for label in range(len(node.value))]
        if None in ordered:
            what = f"names: expected the numbers 0 to {len(node.value) - 1} as keys"
            raise DataError(what, code="bad_class_numbers", where=str(node.place))
        entries = [each for each in ordered if each is not None]
    elif isinstance(node.value, list):
        entries = node.value
    else:
        what = f"names: found {describe_value(node)}, expected a list of names"
        raise DataError(what, code="bad_data_yaml", where=str(node.place))
    wrong = next((each for each in entries if isinstance(each.value, list | dict)), None)
    if wrong is not None or not entries:
        what = f"names: found {describe_value(wrong or node)}, expected a name for each class"
        raise DataError(what, code="bad_data_yaml", where=str((wrong or node).place))
    if isinstance(number, int) and number != len(entries):
        assert count is not None
        raise DataError(
            f"nc is {number}, but names has {len(entries)}",
            code="class_count_differs",
            where=str(count.place),
            fix="correct the one that is wrong, or remove nc",
        )
    return class_names(file.parent, tuple(each.text for each in entries)), []


def _check_names(file: Path, names: tuple[str, ...], root: Path, places: Sequence[Path]) -> None:
    """Checks that class lists beside the labels number classes alike.

    Raises: DataError: one numbers them in another way.
    """
    for place in places:
        folder = place if place.is_dir() else place.parent
        found = own_names(root, (label_folder(folder, root), folder))
        if found is not None and any(a != b for a, b in zip(names, found[1])):
            raise DataError(
                f"give different class names ({listed(names, 5)}; {listed(found[1], 5)})",
                code="class_names_ambiguous",
                where=f"{file}, {found[0]}",
                fix="correct the wrong one, or remove the list",
            )


def _root_of(base: Path, places: Sequence[Path]) -> Path:
    """data.root: above all places and above `images` folders with labels beside."""
    root = base
    if not all(place.is_relative_to(base) for place in places):
        root = Path(os.path.commonpath([place.parent for place in places]))
    for place in places:
        small = [part.lower() for part in place.parts]
        if "images" in small:
            last = len(small) - 1 - small[::-1].index("images")
            if last < len(root.parts):
                root = Path(*root.parts[:last])
    return root


def _yolo_split(root: Path, places: Sequence[Path], file: Path) -> SplitConfig | None:
    if not places:
        return None
    lists = [_relative(place, root) for place in places if place.is_file()]
    folders = [_relative(place, root) for place in places if place.is_dir()]
    if lists and folders:
        what = f"folders ({folders[0]}) and lists ({lists[0]}) in one split"
        fix = "name only folders, or only .txt files"
        raise DataError(what, code="bad_data_yaml", where=str(file), fix=fix)
    images: str | tuple[str, ...] = folders[0] if len(folders) == 1 else tuple(folders)
    listed: str | tuple[str, ...] = lists[0] if len(lists) == 1 else tuple(lists)
    return SplitConfig(images=images or ".", annotations=listed or "")


def _count(place: Path) -> int:
    if place.is_file():
        return len(read_list(place, quietly))
    return sum(map(_is_image, files_below(place)))


# --- COCO -----------------------------------------------------------------------------------------

_OTHER_TASKS = ("captions", "person_keypoints", "panoptic", "stuff", "image_info")


def _of_coco(root: Path) -> Layout | None:
    files = [*root.glob("*.[jJ][sS][oO][nN]"), *root.glob("*/*.[jJ][sS][oO][nN]")]
    boxes = [file for file in sorted(files) if not file.name.startswith((*_OTHER_TASKS, "."))]
    index_of: dict[Path, tuple[list[str], tuple[str, ...]]] = {}
    by_split: dict[str, list[Path]] = {}
    for file in boxes:
        split = split_of(file.stem) or split_of(str(file.parent.relative_to(root)))
        try:
            index_of[file] = read_index(file)
        except DataError as error:
            if error.code in ("not_coco", "not_json", "not_utf8") or split == "test":
                continue  # some other JSON
            raise
        by_split.setdefault(split, []).append(file)
    if not by_split.keys() - {"test"}:
        return None
    if "" in by_split and "train" not in by_split:  # as tools call the only file of a set
        by_split["train"] = by_split.pop("")
    if "train" not in by_split:
        what = f"no file of training images; found {', '.join(map(str, index_of))}"
        raise DataError(what, code="split_missing", where=str(root), fix=_BY_HAND)
    chosen = {split: _one(by_split[split], split, root) for split in _SPLITS if split in by_split}
    absolute = Path(os.path.abspath(root))
    parts = {
        split: SplitConfig(
            images=_relative(_images_of(root, file, index_of[file][0]), root),
            annotations=_relative(file, root),
        )
        for split, file in chosen.items()
    }
    names_of_images, names = index_of[chosen["train"]]
    left = [_relative(file, root) for file in index_of if file not in chosen.values()]
    unused = ((f"{listed(left, 3)}: not used", "its name matches no split"),) if left else ()
    return Layout(
        name=_named(root),
        format="coco",
        root=absolute,
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        class_names=names,
        images=len(names_of_images),
        notes=(*_tests_note("test" in parts), *unused),
    )


def _images_of(root: Path, file: Path, names: Sequence[str]) -> Path:
    """The folder that a COCO file's `file_name`s are relative to."""
    stem = file.stem.removeprefix("instances_")
    split = split_of(stem) or split_of(file.parent.name)
    candidates = [
        *(file.parent, root / stem, root / "images" / stem, root / split),
        *(root / "images" / split, root / "images", root / "JPEGImages", root),
    ]
    some = names[:: max(1, len(names) // 5)][:5]
    if not some:
        raise DataError("lists no image", code="no_images", where=str(file))
    others = [Path(each) for each in folders_below(root)]
    # Those of the split first: train/ and val/ may have images of the same names.
    others.sort(key=lambda each: split_of(_relative(each, root)) not in (split, ""))
    for folder in dict.fromkeys((*candidates, *others)):
        if folder.is_dir() and all((folder / name).is_file() for name in some):
            return folder
    look_anew()
    for folder in dict.fromkeys((*candidates, *others)):
        images = [find_image(folder, name, str(file), quietly) for name in some]
        if folder.is_dir() and all(image is not None and image.is_file() for image in images):
            return folder
    tried = ", ".join(_relative(each, root) for each in dict.fromkeys(candidates) if each.is_dir())
    raise DataError(
        f"its images are in none of the folders {tried} of {root}, first {some[0]}",
        code="image_missing",
        where=str(file),
        fix="put them there, or name their folder in a configuration (docs/data.md)",
    )


# --- Pascal VOC -----------------------------------------------------------------------------------


def _of_voc(root: Path) -> Layout | None:
    root = Path(os.path.abspath(root))
    first = next(xml_files(root), None)
    if first is None:
        return None
    _refuse_foreign([first], str(root))
    inner = [each.parent for depth in ("*", "*/*") for each in root.glob(f"{depth}/ImageSets")]
    if inner and not (root / "ImageSets").is_dir():
        return _of_voc(_one(sorted(inner), "train", root))
    lists = _voc_lists(root)
    if lists:
        images = _first_with_images(root, [root / "JPEGImages", root / "images", root])
        parts = {
            split: SplitConfig(images=_relative(images, root), annotations=_relative(file, root))
            for split, file in lists.items()
        }
    else:
        parts = _voc_folders(root, Path(first).parent)
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
    notes = _tests_note("test" in parts)
    unlabelled = _count(root / config.train.image_folders[0]) - len(raw.images)
    if not lists and "val" not in parts and unlabelled > 0:
        why = "they have no labels; an XML file without objects makes one background"
        notes += ((f"{unlabelled} images without an XML file: not used", why),)
    return Layout(
        name=_named(root),
        format="voc",
        root=root,
        train=parts["train"],
        val=parts.get("val"),
        test=parts.get("test"),
        class_names=raw.class_names,
        images=len(raw.images),
        notes=notes,
    )


def _voc_lists(root: Path) -> dict[str, Path]:
    """Lists of images by split, where their lines lead to XML files."""
    for folder in (root / "ImageSets" / "Main", root / "ImageSets", root):
        found_lists = _lists(folder)
        if "train" not in found_lists:
            continue
        line = read_list(found_lists["train"], quietly)[0]
        if line.lower().endswith(".xml") or (root / "Annotations").is_dir():
            return found_lists
        if not _is_image(line):  # else a list for YOLO
            raise DataError(
                "lists images whose XML files are expected in Annotations/, which is not there",
                code="annotation_file_missing",
                where=str(found_lists["train"]),
                fix=f"call the folder of the XML files {root / 'Annotations'}",
            )
    return {}


def _voc_folders(root: Path, first: Path) -> dict[str, SplitConfig]:
    """Splits by the names of folders."""
    for top in dict.fromkeys((root, first, first.parent)):
        if not top.is_relative_to(root):
            continue
        folders = {
            split: [each for each in found_folders if next(xml_files(each), None)]
            for split, found_folders in _split_folders(top).items()
        }
        if folders.get("train"):
            chosen = {s: _one(folders[s], s, root) for s in _SPLITS if folders.get(s)}
            parts = {}
            for split, folder in chosen.items():
                name = folder.name
                near = [folder, root / "images" / name, root / "JPEGImages" / name, root / name]
                images = _first_with_images(root, [*near, root / "images", root])
                parts[split] = SplitConfig(
                    images=_relative(images, root), annotations=_relative(folder, root)
                )
            return parts
    holding = {Path(file).parent for file in xml_files(root)}
    folder = Path(os.path.commonpath(holding))
    images = _first_with_images(root, [folder, root / "JPEGImages", root / "images", root])
    part = SplitConfig(images=_relative(images, root), annotations=_relative(folder, root))
    return {"train": part}


def _first_with_images(root: Path, folders: Sequence[Path]) -> Path:
    images = next((each for each in folders if _holds_images(each)), None)
    if images is None:
        raise DataError("has annotations but no image", code="no_images", where=str(root))
    return images


# --- YOLO without a data.yaml ---------------------------------------------------------------------


def _of_yolo(root: Path) -> Layout | None:
    root = Path(os.path.abspath(root))
    lists, folders = _yolo_lists(root), _yolo_folders(root)
    splits = lists or folders
    if lists and lists["train"][0].stem.lower() in _WHOLE_SET and "val" in folders:
        splits = folders  # they say more than a list of everything
    if not splits:
        return None
    train, val, test = (_yolo_split(root, splits.get(s, []), root) for s in _SPLITS)
    assert train is not None
    holding = [root / "labels", root / "data", root]
    holding += [place for place in splits["train"] if place.is_dir()]
    label_files = (file for each in holding if each.is_dir() for file in files_below(each))
    first_label = next((file for file in label_files if is_label(Path(file))), None)
    if first_label is None:
        return None
    _refuse_foreign([first_label], str(root))
    chosen = [place for place in splits["train"] if place.is_dir()]
    own = own_names(root, [*(label_folder(each, root) for each in chosen), *chosen])
    further = (class_names(each, ()) for each in holding if each.is_dir())
    names = own[1] if own else next(filter(None, further), ())
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
        images=sum(map(_count, splits["train"])),
        notes=_tests_note(test is not None),
    )


def _yolo_lists(root: Path) -> dict[str, list[Path]]:
    """Lists of images by split, where their lines are images alone."""
    for folder in (root, root / "data", root / "ImageSets" / "Main"):
        found_lists = _lists(folder)
        if "train" not in found_lists:
            continue
        line = read_list(found_lists["train"], quietly)[0]
        if _is_image(line.replace("\\", "/")):
            valid = _darknet_valid(folder)
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


def _darknet_valid(folder: Path) -> Path | None:
    """List that an `obj.data` beside the lists calls `valid`."""
    for file in sorted(folder.glob("*.data")):
        said = re.findall(
            r"^\s*valid\s*=\s*(\S+)", "\n".join(read_list(file, quietly)), re.MULTILINE
        )
        for path in (folder / Path(each.replace("\\", "/")).name for each in said):
            if path.is_file() and read_list(path, quietly):
                return path
    return None


def _yolo_folders(root: Path) -> dict[str, list[Path]]:
    """Folders of images by split, else the only one."""
    below = [each for each in sorted(root.iterdir()) if each.is_dir()]
    of_images = [each for each in below if each.name.lower() in ("images", "data")]
    for top in (*of_images, root):
        folders = {
            split: [each for each in found_folders if _holds_images(each)]
            for split, found_folders in _split_folders(top).items()
        }
        if folders.get("train"):
            return {s: [_one(folders[s], s, root)] for s in _SPLITS if folders.get(s)}
    only = next((each for each in of_images if _holds_images(each)), root)
    return {"train": [only]} if _holds_images(only) else {}

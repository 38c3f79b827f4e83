"""COCO detection JSON (cocodataset.org/#format-data).

    file -> its bytes -> `msgspec.Raw` of each entry -> schema -> columns
                                  does not fit the schema -> a dictionary, checked key by key

A usual entry takes a microsecond; outlines are skipped if they are not needed.  An unusual entry is
parsed on its own, so that a message can name it.
"""

import json
import logging
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from ppdist.common.addresses import is_remote
from ppdist.common.errors import DataError
from ppdist.common.opener import DISK, Opener
from ppdist.data.datasets.annotations import (
    LARGEST_AREA,
    Malformed,
    Size,
    abbreviate,
    file_exists,
    find_image,
    ignore_issue,
    join_inside,
    outline_extent,
    parse_area,
    parse_outlines,
    read_utf8,
    resolve_size,
    write_text,
)
from ppdist.data.types import Box, Complain, Issue, RawColumns, RawImage, RawObject, RawSet
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
REQUIRED_KEYS = {
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
_IMAGE_KEYS = {"id", "file_name", "width", "height"}
_OBJECT_KEYS = {"image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"}
_NOTHING: Mapping[str, Any] = {}


class GivenClasses(NamedTuple):
    """Class names from a source other than the file itself.

    source: where they are from, for messages: data.class_names, or the file of the training split.
    """

    names: tuple[str, ...] = ()
    source: str = ""


FILE_CLASSES = GivenClasses()  # those of the file itself


class Categories(NamedTuple):
    """The categories of a file as classes.

    name_of: all categories, by id.  label_of: id -> class, of the categories that are classes.
    names, ids: class names and category ids; a result file uses the ids.  given_classes: see
        `map_categories`.
    """

    name_of: Mapping[int, str]
    label_of: Mapping[int, int]
    names: tuple[str, ...]
    ids: tuple[int, ...]
    given_classes: GivenClasses


def read_coco(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    given_classes: GivenClasses = FILE_CLASSES,
    opener: Opener = DISK,
) -> RawSet:
    """Reads the images of a COCO file in order, with everything that conversion keeps.

    Class numbers follow category ids, or `given_classes`.  A missing box is computed from the
    outline or mask.  A file without `annotations` lists images to be annotated.  `extra` of an
    object contains its id, masks that are not polygons (RLE), and unknown keys; `extra` of the set
    contains info and licenses; that of a class, its supercategory and the like.

    Args:
        images: folder that `file_name` is relative to.
        annotations: the JSON file.
        opener: opens the images.
    Raises: DataError: the file is not COCO.
    """
    return (
        _CocoFile(images, annotations, "everything", complain, opener).read(given_classes).as_set()
    )


def read_coco_columns(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    given_classes: GivenClasses = FILE_CLASSES,
    masks: bool = False,
    opener: Opener = DISK,
) -> RawColumns:
    """Reads a COCO file as `read_coco` does, in columns, with only what training needs.

    Args: masks: also reads outlines.
    """
    keep: _Keep = "outlines" if masks else "boxes"
    return _CocoFile(images, annotations, keep, complain, opener).read(given_classes).columns()


def read_index(annotations: Path) -> tuple[list[str], tuple[str, ...]]:
    """Reads the names of images and classes, without the objects.

    Raises: DataError: the file is not COCO.
    """
    parts = _read_parts(annotations, ignore_issue)
    images = [_name_from_url(_decode_value(entry)) for entry in parts["images"]]
    names = [str(entry.get("file_name", "")) for entry in images if isinstance(entry, dict)]
    categories = [*map(_decode_value, parts["categories"])]
    used = partial(_used_categories, parts["annotations"])
    return names, map_categories(categories, used, annotations, ignore_issue).names


# --- the file as JSON -----------------------------------------------------------------------------

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_MOST_DIGITS = 4000


def _read_parts(file: Path, complain: Complain, optional: str = "") -> dict[str, Any]:
    """Reads the top level of a file.

    Args: optional: a list that may be absent.
    Returns: key -> value; for the lists in REQUIRED_KEYS, lists of entries for `_decode_value`.
    Raises: DataError: the file is not COCO.
    """
    content = read_utf8(file, complain)
    try:
        parts: dict[str, Any] = _decode_object(content)
    except (msgspec.DecodeError, RecursionError):
        parts = _parse_with_json(file, content)
    # The text may also be a key inside an entry, so only the slow check is certain.
    if any(content.count(b'"%b"' % key.encode()) > 1 for key in REQUIRED_KEYS):
        _require_once(file, content)
    for key in REQUIRED_KEYS:
        if key == optional and key not in parts and "categories" in parts:
            parts[key] = []
        if isinstance(parts.get(key), msgspec.Raw):
            with suppress(msgspec.ValidationError):  # not a list
                parts[key] = _decode_list(parts[key])
        if not isinstance(parts.get(key), list):
            has = ", ".join([*parts][:8]) or "nothing"
            raise _not_coco_error(file, f"it has no list {key!r} (it has: {has})")
    return parts


def _parse_with_json(file: Path, content: bytes) -> dict[str, Any]:
    """Parses JSON that msgspec rejects (NaN, infinity, lone surrogates), in ten times its memory.

    Raises: DataError: it is not a JSON object.
    """
    try:
        parts = json.loads(content.decode(), parse_int=_parse_int)
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg}: line {error.lineno} column {error.colno}"
        raise DataError(message, code="not_json", where=str(file)) from error
    except RecursionError as error:
        raise DataError("not JSON: nested too deeply", code="not_json", where=str(file)) from error
    if not isinstance(parts, dict):
        raise _not_coco_error(file, f"expected an object, found a {type(parts).__name__}")
    return parts


def _require_once(file: Path, content: bytes) -> None:
    """Rejects a file with two lists of the same name, as parsers would keep only the last."""
    keys = json.loads(  # parse_int: Python refuses int of more than 4300 digits
        content, parse_int=float, object_pairs_hook=lambda pairs: [key for key, _ in pairs]
    )
    twice = [key for key in REQUIRED_KEYS if keys.count(key) > 1]
    if twice:
        raise _not_coco_error(file, f"it has {twice[0]!r} twice")


def _decode_value(entry: Any) -> Any:
    """Decodes an entry or another value to Python objects."""
    if not isinstance(entry, msgspec.Raw):
        return entry
    try:
        return msgspec.json.decode(entry)
    except msgspec.DecodeError:  # a number that no float holds
        return json.loads(bytes(entry), parse_int=_parse_int)


def _parse_int(digits: str) -> int | float:
    """Parses an integer; one of more than 4000 digits, which Python rejects, becomes infinity."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _not_coco_error(file: Path, reason: str) -> DataError:
    return DataError(f"not COCO detection JSON: {reason}", code="not_coco", where=str(file))


# --- images and objects ---------------------------------------------------------------------------

_Int64 = Annotated[int, msgspec.Meta(ge=1 - 2**63, le=2**63 - 1)]  # as `parse_int64`
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Area = Annotated[float, msgspec.Meta(gt=-LARGEST_AREA, lt=LARGEST_AREA)]


class _Image(msgspec.Struct, gc=False):
    """An image in the usual form."""

    id: _Int64
    file_name: str
    height: _Side
    width: _Side


# gc=False: millions of these objects are short-lived, and none is part of a reference cycle.
class _Annotation(msgspec.Struct, gc=False):
    """An annotation in the usual form."""

    image_id: _Int64
    category_id: _Int64
    bbox: tuple[float, float, float, float]
    id: _Int64 | None = None
    iscrowd: bool | int | None = None
    area: _Area | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")


_decode_image = msgspec.json.Decoder(_Image).decode
_decode_annotation = msgspec.json.Decoder(_Annotation).decode
# Errors raised by an entry that is unusual, or already decoded.
_UNUSUAL = (msgspec.DecodeError, TypeError, KeyError, RecursionError)
_PLAIN_NAME = re.compile(r"(?:[^./\\\0:][^/\\\0:]*/)*[^./\\\0:][^/\\\0:]*")
_PROGRESS_STEP = 10_000  # entries between two signs of progress
_UNUSED = -1  # position of a listed image that cannot be used

_Keep = Literal["boxes", "outlines", "everything"]


class _Object(msgspec.Struct, gc=False):
    """A usable object.

    position: position of its image, or _UNUSED.  identity: its id; other_id: an id that is not an
        integer.
    outline: its `segmentation`.  extra: other keys.
    """

    position: int
    label: int
    box: Box
    crowd: bool
    area: float | None
    identity: int | None
    outline: Any
    other_id: Any = None
    extra: Mapping[str, Any] | None = None


class _CocoFile:
    """The usable images and objects of a COCO file, in columns; reports the others.

    Attributes: extra, class_extras: see RawSet.
    """

    def __init__(
        self, folder: Path, file: Path, keep: _Keep, complain: Complain, opener: Opener
    ) -> None:
        self._folder, self._file, self._keep = folder, file, keep
        self._complain, self._opener = complain, opener
        self._classes: Categories
        self.extra: Mapping[str, Any] = {}
        self.class_extras: tuple[Mapping[str, Any], ...] = ()
        self._path_prefix = ""  # the path before a plain name
        self._position_of: dict[int, int] = {}  # id -> position of the image, or _UNUSED
        self._paths: list[str] = []
        # Arrays take 8 bytes per number; lists would need an object for each.
        self._image_ids, self._sizes, self._numbers = array("q"), array("q"), array("q")
        self._size_known = array("b")
        self._image_extras: list[Mapping[str, Any]] = []
        self._lost: Counter[int] = Counter()  # by position
        self._positions, self._labels, self._crowds = array("q"), array("q"), array("b")
        self._boxes, self._areas = array("d"), array("d")
        # Ids, or object numbers for objects without an id.  Ids that are not integers are rare.
        self._ids, self._has_id = array("q"), array("b")
        self._odd_ids: dict[int, Any] = {}
        self._outlines: list[tuple[np.ndarray, ...]] = []
        self._extras: list[Mapping[str, Any]] = []

    def read(self, given_classes: GivenClasses) -> "_CocoFile":
        """Reads the whole file."""
        parts = _read_parts(self._file, self._complain, "annotations")
        categories, annotations = [*map(_decode_value, parts["categories"])], parts["annotations"]
        used = partial(_used_categories, annotations)
        self._classes = map_categories(categories, used, self._file, self._complain, given_classes)
        self.add_images(parts["images"])
        self.add_objects(annotations)
        if self._keep == "everything":
            self.extra = {
                key: _decode_value(parts[key]) for key in parts if key not in REQUIRED_KEYS
            }
            self.class_extras = _collect_class_extras(categories, self._classes)
        return self

    def add_images(self, entries: Sequence[Any]) -> None:
        """Adds the images; if several have the same id, only the first."""
        first: dict[int, int] = {}  # entry number by id
        paths: set[str] = set()
        for number, entry in enumerate(entries):
            try:
                image = _decode_image(entry)
            except _UNUSUAL:
                row = self._parse_unusual_image(entry, number)
                if row is None:
                    continue
                identity, path, size = row
            else:
                identity, path = image.id, self._find_path(image.file_name)
                size = Size(image.width, image.height, True)
            if (before := first.setdefault(identity, number)) != number:
                message = f"images[{number}] has the same id as images[{before}]: {identity}"
                self._complain(Issue("image_id_duplicate", message, where=str(self._file)))
                continue
            self._position_of[identity] = len(self._paths) if path else _UNUSED
            if not path:
                continue
            where = f"{self._file}: images[{number}]"
            if path in paths:
                message = f"{Path(path).name} is listed a second time"
                self._complain(Issue("image_listed_twice", message, path, where))
            paths.add(path)
            self._paths.append(path)
            self._image_ids.append(identity)
            self._sizes.extend((size.height, size.width))
            self._size_known.append(size.is_known)
            if self._keep == "everything":
                self._numbers.append(number)
                self._image_extras.append(_extra_keys(_decode_value(entry), _IMAGE_KEYS))

    def _find_path(self, name: str) -> str:
        """Finds the path of an image; "": not found, with an issue."""
        if name.isascii() and _PLAIN_NAME.fullmatch(name):
            # A plain name cannot lead out of the folder, so only the first one is checked.
            if not self._path_prefix:
                path = str(join_inside(self._folder, name, str(self._file)))
                self._path_prefix = path.removesuffix(name)
            path = self._path_prefix + name
            if is_remote(path) or file_exists(path):
                return path
        image = find_image(self._folder, name, str(self._file), self._complain)
        return "" if image is None else str(image)

    def _parse_unusual_image(self, entry: Any, number: int) -> tuple[int, str, Size] | None:
        """Parses id, path and size of an image, key by key; None without an id."""
        entry = _name_from_url(_decode_value(entry))
        where = f"{self._file}: images[{number}]"
        identity, path, size = None, "", Size(1, 1, False)
        try:
            _check_keys("images", number, entry, self._file)
            identity = parse_int64(entry["id"])
            if identity is None:
                message = f"id {entry['id']!r}{_text_note(entry['id'])}: expected a whole number"
                raise Malformed(Issue("annotation_line", message, where=where))
            name = entry["file_name"]
            if not isinstance(name, str):
                message = f"file_name {name!r}: expected a name"
                raise Malformed(Issue("annotation_line", message, where=where))
            path = self._find_path(name)
            if path:
                sides = entry.get("width"), entry.get("height")
                width, height = map(parse_int64, sides)
                annotated = f"width {sides[0]!r:.20}, height {sides[1]!r:.20}"
                size = resolve_size(
                    Path(path), width, height, annotated, where, self._complain, self._opener
                )
        except Malformed as error:
            self._complain(error.issue)
        return None if identity is None else (identity, path, size)

    def add_objects(self, entries: Sequence[Any]) -> None:
        """Adds the objects of the images."""
        # The progress steps tell the waiting ranks that this one is alive.
        progress = Progress(_LOGGER, f"reading {self._file}", len(entries), "objects")
        for number, entry in enumerate(entries):
            if number % _PROGRESS_STEP == 0:
                progress.add(_PROGRESS_STEP if number else 0)
            annotation = None if self._keep == "everything" else self._parse_usual(entry)
            annotation = annotation or self._parse_unusual(entry, number)
            if annotation is None or annotation.position == _UNUSED:
                continue
            if annotation.other_id is not None:
                self._odd_ids[len(self._ids)] = annotation.other_id
            self._ids.append(number if annotation.identity is None else annotation.identity)
            self._has_id.append(annotation.identity is not None)
            self._positions.append(annotation.position)
            self._labels.append(annotation.label)
            self._boxes.extend(annotation.box)
            self._crowds.append(annotation.crowd)
            self._areas.append(math.nan if annotation.area is None else annotation.area)
            if self._keep != "boxes":
                self._add_outline(annotation)
        rows = np.flatnonzero(np.asarray(self._has_id))
        for row in rows[_repeated_positions(np.asarray(self._ids)[rows])].tolist():
            message = "an annotation before it has the same id"
            path = self._paths[self._positions[row]]
            self._complain(
                Issue("annotation_id_duplicate", message, path, self._describe_object(row))
            )

    def _parse_usual(self, entry: Any) -> _Object | None:
        """Parses an annotation that fits the schema and has a known image and class; else None."""
        try:
            annotation = _decode_annotation(entry)
            position, label = (
                self._position_of[annotation.image_id],
                self._classes.label_of[annotation.category_id],
            )
        except _UNUSUAL:
            return None
        x, y, width, height = annotation.bbox
        if not (x or y or width or height):  # the outline may have a box
            return None
        return _Object(
            position,
            label,
            (x, y, x + width, y + height),
            bool(annotation.iscrowd),
            annotation.area,
            annotation.id,
            annotation.segmentation,
        )

    def _parse_unusual(self, entry: Any, number: int) -> _Object | None:
        """Parses an annotation key by key; None, with an issue, if it cannot be used."""
        entry = _decode_value(entry)
        fields: Mapping[str, Any] = entry if isinstance(entry, dict) else _NOTHING
        image_id, category_id = fields.get("image_id"), fields.get("category_id")
        image, category = parse_int64(image_id), parse_int64(category_id)
        position = None if image is None else self._position_of.get(image)
        label = None if category is None else self._classes.label_of.get(category)
        path = "" if position is None or position == _UNUSED else self._paths[position]
        name = f"{self._file}: annotation {fields.get('id', f'number {number}')}"
        where = f"{name} of image {Path(path).name!r}" if path else name
        try:
            _check_keys("annotations", number, entry, self._file)
            if position is None:
                message = f"image_id {image_id} is not among the file's images"
                if isinstance(image_id, str):
                    message = (
                        f"image_id {image_id!r}{_text_note(image_id)}: expected a whole number"
                    )
                raise Malformed(Issue("image_unknown", message, where=where))
            if label is None:
                message = _describe_unknown_class(category_id, category, self._classes)
                raise Malformed(Issue("class_unknown", message, path, name))
            box = _parse_box(fields)
            if isinstance(box, str):
                raise Malformed(Issue("annotation_line", box, path, where))
        except Malformed as error:
            self._complain(error.issue)
            self._lost[_UNUSED if position is None else position] += 1
            return None
        area = parse_area(fields.get("area"))
        if area is None and fields.get("area") is not None and path:
            message = f"area {fields['area']!r:.80}: expected a number"
            self._complain(Issue("area_invalid", message, path, where))
        identity = parse_int64(fields.get("id"))
        return _Object(
            position,
            label,
            box,
            is_crowd(fields.get("iscrowd")),
            area,
            identity,
            fields.get("segmentation"),
            fields.get("id") if identity is None else None,
            _extra_keys(fields, _OBJECT_KEYS) if self._keep == "everything" else None,
        )

    def _add_outline(self, annotation: _Object) -> None:
        """Adds the outline and further keys of the last object."""
        given = _decode_value(annotation.outline)
        is_mask = isinstance(given, dict)
        outlines = () if is_mask else parse_outlines([] if given is None else given)
        if outlines is None:
            message = "segmentation: expected lists of x1, y1, x2, y2, ..."
            where = self._describe_object(len(self._ids) - 1)
            self._complain(
                Issue("outline_malformed", message, self._paths[annotation.position], where)
            )
        self._outlines.append(outlines or ())
        extra = annotation.extra or _NOTHING
        self._extras.append({**extra, "segmentation": given} if is_mask else extra)

    def _describe_object(self, row: int) -> str:
        """Describes an object for messages."""
        usual = self._ids[row] if self._has_id[row] else f"number {self._ids[row]}"
        name = Path(self._paths[self._positions[row]]).name
        return f"{self._file}: annotation {self._odd_ids.get(row, usual)} of image {name!r}"

    def columns(self) -> RawColumns:
        """Returns the columns; nothing may be added afterwards."""
        return RawColumns(
            paths=self._paths,
            image_ids_N=np.asarray(self._image_ids),
            sizes_N2=np.asarray(self._sizes).reshape(-1, 2),
            size_known_N=np.asarray(self._size_known).astype(bool),
            image_O=np.asarray(self._positions),
            boxes_O4=np.asarray(self._boxes).reshape(-1, 4),
            labels_O=np.asarray(self._labels),
            crowd_O=np.asarray(self._crowds).astype(bool),
            area_O=np.asarray(self._areas),
            where=self._describe_object,
            outlines=None if self._keep == "boxes" else self._outlines,
            class_names=self._classes.names,
            category_ids=self._classes.ids,
            source=str(self._file),
        )

    def as_set(self) -> RawSet:
        """Returns the set, with a Python object for each image and box."""
        columns = self.columns()
        images = [
            RawImage(
                path=Path(path),
                image_id=self._image_ids[position],
                width=self._sizes[2 * position + 1],
                height=self._sizes[2 * position],
                objects=[],
                where=f"{self._file}: images[{self._numbers[position]}]",
                extra=self._image_extras[position],
                size_known=bool(self._size_known[position]),
                lost=self._lost[position],
            )
            for position, path in enumerate(self._paths)
        ]
        for row, box in enumerate(columns.boxes_O4.tolist()):
            annotation = RawObject(
                box=tuple(box),
                label=self._labels[row],
                where=self._describe_object(row),
                crowd=bool(self._crowds[row]),
                area=None if math.isnan(self._areas[row]) else self._areas[row],
                polygons=self._outlines[row],
                extra=self._extras[row],
            )
            images[self._positions[row]].objects.append(annotation)
        return RawSet(
            images,
            columns.class_names,
            columns.category_ids,
            columns.source,
            extra=self.extra,
            class_extras=self.class_extras,
        )


def _repeated_positions(ids_N: np.ndarray) -> np.ndarray:
    """Returns the positions of ids that have occurred before."""
    if (ids_N[1:] > ids_N[:-1]).all():
        return np.zeros(0, np.int64)
    _, first = np.unique(ids_N, return_index=True)
    return np.setdiff1d(np.arange(len(ids_N)), first)


def _name_from_url(entry: Any) -> Any:
    """Names an image without `file_name` after the end of its URL, as LVIS intends."""
    url = entry.get("coco_url") if isinstance(entry, dict) and "file_name" not in entry else None
    if not isinstance(url, str) or not url:
        return entry
    return entry | {"file_name": "/".join(url.split("/")[-2:])}


def _check_keys(part: str, number: int, entry: Any, file: Path) -> None:
    missing = [
        key for key in REQUIRED_KEYS[part] if not isinstance(entry, dict) or key not in entry
    ]
    if missing:
        entry = str(entry)[:120]
        message = f"not COCO detection JSON: {part}[{number}] has no {missing[0]!r}: {entry}"
        raise Malformed(Issue("annotation_line", message, where=str(file)))


# --- classes --------------------------------------------------------------------------------------


def _used_categories(annotations: Sequence[Any]) -> Collection[int | None]:
    """Returns the ids of the categories that have objects."""
    entries = filter(lambda value: isinstance(value, dict), map(_decode_value, annotations))
    return {parse_int64(entry.get("category_id")) for entry in entries}


def map_categories(
    entries: Sequence[Any],
    used: Callable[[], Collection[int | None]],
    file: Path,
    complain: Complain,
    given_classes: GivenClasses = FILE_CLASSES,
) -> Categories:
    """Maps categories to classes: merges equal names, and drops a category that only groups others.

    Args:
        used: finds the ids that annotations use; called only for the few files that need it.
        given_classes: the classes, to which categories are mapped by name; without them, all names
            in the order of their ids.
    Raises: DataError: an entry is malformed.
    """
    name_of = _names_by_id(entries, file)
    group_id = _find_group(entries, used)
    of_classes = {i: name for i, name in name_of.items() if i != group_id}
    # A category that is listed as a class does not only group others.
    if group_id is not None and name_of[group_id] in {*given_classes.names} - {
        *of_classes.values()
    }:
        of_classes = name_of
    elif group_id is not None:
        message = (
            f"category {group_id} {name_of[group_id]!r} has no objects and groups the others: "
        )
        complain(Issue("class_group", f"{message}not a class", where=str(file)))
    id_of_name: dict[str, int] = {}  # the first id of a name
    for identity, name in of_classes.items():
        if name in id_of_name:
            message = (
                f"categories {id_of_name[name]} and {identity} are both called {name!r}: one class"
            )
            complain(Issue("class_names_same", message, where=str(file)))
        id_of_name.setdefault(name, identity)
    names = given_classes.names or tuple(id_of_name)
    number_of = {name: label for label, name in enumerate(names)}
    label_of = {i: number_of[name] for i, name in of_classes.items() if name in number_of}
    if given_classes.names:
        if given_classes.names != tuple(id_of_name):
            source = given_classes.source
            message = (
                f"categories are {abbreviate([*id_of_name])}; mapped by name to those of {source}"
            )
            complain(Issue("class_list_differs", message, where=str(file)))
    elif [*label_of] not in ([*range(len(names))], [*range(1, len(names) + 1)]):
        mapping = abbreviate([f"{i} {name_of[i]} -> {label}" for i, label in label_of.items()])
        message = f"category ids are not 1 to {len(names)}: mapped to classes {mapping}"
        complain(Issue("class_ids_gap", message, where=str(file)))
    next_id = max(name_of, default=0) + 1
    ids = []
    for name in names:  # a class missing from the file needs an id in results, too
        ids.append(id_of_name.get(name, next_id))
        next_id += name not in id_of_name
    return Categories(name_of, label_of, names, tuple(ids), given_classes)


def _find_group(
    entries: Sequence[Mapping[str, Any]], used: Callable[[], Collection[int | None]]
) -> int | None:
    """Returns the id of the unused category that is the supercategory of all others, or None."""
    child_counts = Counter(str(entry.get("supercategory")) for entry in entries)
    for entry in entries:
        name = str(entry["name"])
        children = child_counts[name] - (str(entry.get("supercategory")) == name)
        if 0 < children == len(entries) - 1 and parse_int64(entry["id"]) not in used():
            return parse_int64(entry["id"])
    return None


def _names_by_id(entries: Sequence[Any], file: Path) -> dict[int, str]:
    """Returns class names by id, in the order of ids.

    Raises: DataError: an entry is malformed.
    """
    name_by_id: dict[int, str] = {}
    for number, entry in enumerate(entries):
        try:
            _check_keys("categories", number, entry, file)
        except Malformed as error:
            raise DataError(error.issue.what, code="not_coco", where=str(file)) from error
        identity = parse_int64(entry["id"])
        if identity is None:
            raise DataError(
                f"id {entry['id']!r}{_text_note(entry['id'])}: expected a whole number",
                code="bad_category_id",
                where=f"{file}: categories[{number}]",
            )
        if identity in name_by_id:
            raise DataError(
                "two entries of 'categories' have the same id",
                code="category_id_duplicate",
                where=str(file),
            )
        name_by_id[identity] = str(entry["name"])
    return dict(sorted(name_by_id.items()))


def _describe_unknown_class(given: Any, category: int | None, categories: Categories) -> str:
    name, given_classes = categories.name_of.get(category or 0), categories.given_classes
    if category is not None and name is not None:
        expected = abbreviate(given_classes.names)
        return f"class {name!r} is not a class of {given_classes.source} ({expected})"
    listing = abbreviate([f"{i} {name}" for i, name in categories.name_of.items()])
    if isinstance(given, str):
        return f"category_id {given!r}{_text_note(given)}: expected a whole number ({listing})"
    return f"category_id {given} is not among the file's categories ({listing})"


def is_crowd(value: Any) -> bool:
    """Returns True if the value of `iscrowd` means a crowd."""
    if isinstance(value, str):  # some tools write numbers as text
        return value.strip().lower() not in ("", "0", "0.0", "false")
    return bool(value)


def _extra_keys(entry: Mapping[str, Any], known_keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in known_keys}


def _collect_class_extras(
    entries: Sequence[Mapping[str, Any]], categories: Categories
) -> tuple[Mapping[str, Any], ...]:
    """Collects further keys of the classes, in their order; () if no class has any."""
    extras_by_id = {
        parse_int64(entry["id"]): _extra_keys(entry, REQUIRED_KEYS["categories"])
        for entry in entries
    }
    extras = tuple(extras_by_id.get(identity, {}) for identity in categories.ids)
    return extras if any(extras) else ()


def _text_note(value: Any) -> str:
    """Returns " is text" for a string, as messages show numbers in strings without quotes."""
    return " is text" if isinstance(value, str) else ""


def parse_int64(value: Any) -> int | None:
    """Returns a value such as 3 or 3.0 as a 64-bit int; None if it is not an integer."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


EMPTY_BOXES: tuple[Any, ...] = (None, [], [0, 0, 0, 0])  # for which the outline decides


def _parse_box(entry: Mapping[str, Any]) -> Box | str:
    """Parses the box of an annotation, or returns what is wrong with it."""
    bbox, segmentation = entry.get("bbox"), entry.get("segmentation")
    if bbox in EMPTY_BOXES and (segmentation or bbox != EMPTY_BOXES[-1]):
        box = (
            _mask_extent(segmentation)
            if isinstance(segmentation, dict)
            else outline_extent(segmentation)
        )
        return (
            box
            or f"bbox {bbox!r}, and no outline or mask to take a box from: {str(segmentation)[:80]}"
        )
    if not isinstance(bbox, list) or len(bbox) != 4:
        return f"bbox {bbox!r}: expected [x, y, width, height]"
    try:
        x, y, width, height = (float(value) for value in bbox)
    except (TypeError, ValueError, OverflowError):
        return f"bbox {bbox!r}: expected four numbers"
    return x, y, x + width, y + height


def _mask_extent(mask: Mapping[str, Any]) -> Box | None:
    """Computes the box of a column-major run-length mask; None if empty or malformed.

    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleToBbox.
    """
    try:
        height, width = mask["size"]
        counts = mask["counts"]
        runs = np.array(_decode_runs(counts) if isinstance(counts, str) else counts, np.int64)
        ends = runs.cumsum()
        if height < 1 or (runs < 0).any() or ends[-1] != height * width:
            return None
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    # Runs alternate, beginning outside the mask.
    first, last = (ends - runs)[1::2], ends[1::2] - 1  # pixels of the runs inside the mask
    first, last = first[last >= first], last[last >= first]
    if not len(first):
        return None
    crosses_column = (first // height != last // height).any()  # a run continues in the next column
    top, bottom = (
        (0, height) if crosses_column else ((first % height).min(), (last % height).max() + 1)
    )
    return float(first[0] // height), float(top), float(last[-1] // height + 1), float(bottom)


def _decode_runs(text: str) -> list[int]:
    """Decodes the run lengths of a compressed mask.

    Raises: IndexError, ValueError: it is malformed.
    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleFrString.
    """
    runs: list[int] = []
    position = 0
    while position < len(text):
        run, bits, continues = 0, 0, True
        while continues:
            digit = ord(text[position]) - 48
            if not 0 <= digit < 64 or bits > 60:
                raise ValueError("not a mask")
            run |= (digit & 31) << bits
            continues, position, bits = bool(digit & 32), position + 1, bits + 5
            if not continues and digit & 16:
                run -= 1 << bits
        runs.append(run + (runs[-2] if len(runs) > 2 else 0))
    return runs


def write_coco(file: Path, content: Mapping[str, Any]) -> None:
    """Writes the content of `coco_content` to a file.

    Raises: UserError: the file cannot be written, or exists already.
    """
    write_text(file, json.dumps(content, ensure_ascii=False, allow_nan=False))


def coco_content(raw: RawSet, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Builds the content of a COCO file, for `json`; `read_coco` reads the same set from it.

    Args:
        names: image names, relative to their folder.
    Returns: the content; a line for each kind of property that COCO cannot represent.
    """
    used = {
        identity
        for image in raw.images
        for annotation in image.objects
        if (identity := parse_int64(annotation.extra.get("id"))) is not None
    }
    next_id = max(used, default=0) + 1
    renumbered = 0
    annotations = []
    for image in raw.images:
        for annotation in image.objects:
            identity = parse_int64(annotation.extra.get("id"))
            if identity in used:
                used.discard(identity)
            else:  # no id, or that of an earlier object
                renumbered += "id" in annotation.extra
                identity, next_id = next_id, next_id + 1
            annotations.append(
                _make_annotation(annotation, identity, image.image_id, raw.category_ids)
            )
    class_extras = raw.class_extras or [_NOTHING] * len(raw.class_names)
    content = {
        **raw.extra,
        "images": [
            {
                **image.extra,
                "id": image.image_id,
                "file_name": name,
                "width": image.width,
                "height": image.height,
            }
            for image, name in zip(raw.images, names)
        ],
        "annotations": annotations,
        "categories": [
            {**extra, "id": identity, "name": name}
            for extra, identity, name in zip(class_extras, raw.category_ids, raw.class_names)
        ],
    }
    lines = [f"{renumbered} objects: another has their id, numbered anew"] if renumbered else []
    return content, lines


def _make_annotation(
    annotation: RawObject, identity: int | None, image_id: int, category_ids: Sequence[int]
) -> dict[str, Any]:
    bbox = _format_bbox(annotation.box)
    entry: dict[str, Any] = {
        **annotation.extra,
        "id": identity,
        "image_id": image_id,
        "category_id": category_ids[annotation.label],
        "bbox": bbox,
        "iscrowd": int(annotation.crowd),
        # pycocotools needs an area; 0 is read back as no area, too.
        "area": bbox[2] * bbox[3] if annotation.area is None else _shorten(annotation.area),
    }
    if annotation.polygons:
        outlines = [part_K2.reshape(-1).tolist() for part_K2 in annotation.polygons]
        entry["segmentation"] = [[_shorten(value) for value in outline] for outline in outlines]
    return entry


def _format_bbox(box: Box) -> list[float]:
    """Formats a box as COCO's [x, y, w, h] with the shortest sides that give exact edges."""
    x1, y1, x2, y2 = box
    return [_shorten(value) for value in (x1, y1, _shortest_side(x1, x2), _shortest_side(y1, y2))]


def _shortest_side(low: float, high: float) -> float:
    """Finds the shortest number that gives exactly `high` when added to `low`."""
    side = high - low
    candidates = [round(side, digits) for digits in range(17)]
    candidates += [math.nextafter(side, math.inf), math.nextafter(side, -math.inf)]
    return next((short for short in candidates if low + short == high), side)


def _shorten(value: float) -> float:
    """Converts an integral number to int, which has no decimal point."""
    return int(value) if value.is_integer() else value

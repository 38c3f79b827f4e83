"""COCO detection JSON (cocodataset.org/#format-data).

    file -> its bytes -> `msgspec.Raw` of each entry -> schema -> columns
                                  does not fit the schema -> a dictionary, looked at key by key

An entry costs a microsecond as long as it is as almost all are; outlines are passed over where
nobody wants them.  One that is not is read on its own, so that a message can name it.
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
    area_in,
    extent_of,
    find_image,
    inside_folder,
    is_there,
    listed,
    outlines_in,
    quietly,
    read_utf8,
    size_of,
    write_text,
)
from ppdist.data.types import Box, Complain, Issue, RawColumns, RawImage, RawObject, RawSet
from ppdist.distributed.progress import Progress

_LOGGER = logging.getLogger("ppdist.data")
NEEDED = {
    "images": ("id", "file_name"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
_IMAGE_KEYS = {"id", "file_name", "width", "height"}
_OBJECT_KEYS = {"image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"}
_NOTHING: Mapping[str, Any] = {}


class KnownClasses(NamedTuple):
    """Class names that come from elsewhere than the file itself.

    source: what does, for messages: data.class_names, or the file of the training split.
    """

    names: tuple[str, ...] = ()
    source: str = ""


OWN_CLASSES = KnownClasses()  # the file itself says them


class Categories(NamedTuple):
    """The categories of a file as classes.

    name_of: all of them, by id.  label_of: id -> class, of those that are one.  names, ids: of the
    classes; what a result file calls each of them.  known: see `classes_of`.
    """

    name_of: Mapping[int, str]
    label_of: Mapping[int, int]
    names: tuple[str, ...]
    ids: tuple[int, ...]
    known: KnownClasses


def read_coco(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    known: KnownClasses = OWN_CLASSES,
    opener: Opener = DISK,
) -> RawSet:
    """Images of a COCO file in order, with everything conversion keeps.

    Class numbers follow category ids, or `known`.  A box that is not given is that of the outline
    or mask.  A file without `annotations` is one of images to be annotated.  `extra` of an object
    holds its id, masks that are not polygons (RLE), and unknown keys; that of the set, info and
    licenses; that of a class, its supercategory and the like.

    Args:
        images: folder that `file_name` is relative to.
        annotations: the JSON file.
        opener: of the images.
    Raises: DataError: the file as a whole is not COCO.
    """
    return _File(images, annotations, "everything", complain, opener).read(known).as_set()


def read_coco_columns(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    known: KnownClasses = OWN_CLASSES,
    masks: bool = False,
    opener: Opener = DISK,
) -> RawColumns:
    """As `read_coco`, in columns, with only what training needs.

    Args: masks: outlines, too.
    """
    keep: _Keep = "outlines" if masks else "boxes"
    return _File(images, annotations, keep, complain, opener).read(known).columns()


def read_index(annotations: Path) -> tuple[list[str], tuple[str, ...]]:
    """Names of the images and of the classes, without the objects.

    Raises: DataError: the file as a whole is not COCO.
    """
    parts = _parts(annotations, quietly)
    images = [_with_name(_value(entry)) for entry in parts["images"]]
    names = [str(entry.get("file_name", "")) for entry in images if isinstance(entry, dict)]
    categories = [*map(_value, parts["categories"])]
    used = partial(_used_categories, parts["annotations"])
    return names, classes_of(categories, used, annotations, quietly).names


# --- the file as JSON -----------------------------------------------------------------------------

_raws_by_key = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode
_MOST_DIGITS = 4000


def _parts(file: Path, complain: Complain, optional: str = "") -> dict[str, Any]:
    """Reads what a file has at its top level.

    Args: optional: a list that may be absent.
    Returns: key -> value, of the lists of NEEDED a list of entries, each for `_value`.
    Raises: DataError: the file as a whole is not COCO.
    """
    content = read_utf8(file, complain)
    try:
        parts: dict[str, Any] = _raws_by_key(content)
    except (msgspec.DecodeError, RecursionError):
        parts = _parsed_by_python(file, content)
    if any(content.count(b'"%b"' % key.encode()) > 1 for key in NEEDED):
        _require_once(file, content)
    for key in NEEDED:
        if key == optional and key not in parts and "categories" in parts:
            parts[key] = []
        if isinstance(parts.get(key), msgspec.Raw):
            with suppress(msgspec.ValidationError):  # no list
                parts[key] = _raws(parts[key])
        if not isinstance(parts.get(key), list):
            has = ", ".join([*parts][:8]) or "nothing"
            raise _not_coco(file, f"it has no list {key!r} (it has: {has})")
    return parts


def _parsed_by_python(file: Path, content: bytes) -> dict[str, Any]:
    """Parses what msgspec refuses: NaN, infinity, half a surrogate pair.

    It takes ten times the memory.
    Raises: DataError: it is no JSON object.
    """
    try:
        parts = json.loads(content.decode(), parse_int=_whole)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg}: line {error.lineno} column {error.colno}"
        raise DataError(what, code="not_json", where=str(file)) from error
    except RecursionError as error:
        raise DataError("not JSON: nested too deeply", code="not_json", where=str(file)) from error
    if not isinstance(parts, dict):
        raise _not_coco(file, f"expected an object, found a {type(parts).__name__}")
    return parts


def _require_once(file: Path, content: bytes) -> None:
    """Refuses a file with two lists of one name, of which parsers take the last."""
    keys = json.loads(  # parse_int: Python refuses int of more than 4300 digits
        content, parse_int=float, object_pairs_hook=lambda pairs: [key for key, _ in pairs]
    )
    twice = [key for key in NEEDED if keys.count(key) > 1]
    if twice:
        raise _not_coco(file, f"it has {twice[0]!r} twice")


def _value(entry: Any) -> Any:
    """An entry or other value as a Python object."""
    if not isinstance(entry, msgspec.Raw):
        return entry
    try:
        return msgspec.json.decode(entry)
    except msgspec.DecodeError:  # a number that no float holds
        return json.loads(bytes(entry), parse_int=_whole)


def _whole(digits: str) -> int | float:
    """An integer; infinite beyond 4000 digits, because Python refuses more than 4300."""
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _not_coco(file: Path, why: str) -> DataError:
    return DataError(f"not COCO detection JSON: {why}", code="not_coco", where=str(file))


# --- images and objects ---------------------------------------------------------------------------

_Whole = Annotated[int, msgspec.Meta(ge=1 - 2**63, le=2**63 - 1)]  # as `whole_number`
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_Area = Annotated[float, msgspec.Meta(gt=-LARGEST_AREA, lt=LARGEST_AREA)]


class _Image(msgspec.Struct, gc=False):
    """An image as nearly all files have it."""

    id: _Whole
    file_name: str
    height: _Side
    width: _Side


class _Annotation(msgspec.Struct, gc=False):
    """An object as nearly all files have it."""

    image_id: _Whole
    category_id: _Whole
    bbox: tuple[float, float, float, float]
    id: _Whole | None = None
    iscrowd: bool | int | None = None
    area: _Area | None = None
    segmentation: msgspec.Raw = msgspec.Raw(b"null")


_image = msgspec.json.Decoder(_Image).decode
_annotation = msgspec.json.Decoder(_Annotation).decode
# What an entry raises that is not as nearly all are, or a Python object already.
_UNUSUAL = (msgspec.DecodeError, TypeError, KeyError, RecursionError)
_PLAIN_NAME = re.compile(r"(?:[^./\\\0:][^/\\\0:]*/)*[^./\\\0:][^/\\\0:]*")
_AT_ONCE = 10_000  # entries between two signs of life
_UNUSED = -1  # position of an image that is listed and cannot be used

_Keep = Literal["boxes", "outlines", "everything"]


class _Object(msgspec.Struct, gc=False):
    """A good object.

    place: position of its image, or _UNUSED.  identity: its id; other_id: one that is no whole
    number.  outline: its `segmentation`.  extra: other keys.
    """

    place: int
    label: int
    box: Box
    crowd: bool
    area: float | None
    identity: int | None
    outline: Any
    other_id: Any = None
    extra: Mapping[str, Any] | None = None


class _File:
    """Good images and objects of a COCO file, in columns; it complains of the others.

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
        self._inside = ""  # what is in front of a plain name
        self._place_of: dict[int, int] = {}  # id -> position of the image, or _UNUSED
        self._paths: list[str] = []
        self._image_ids, self._sizes, self._numbers = array("q"), array("q"), array("q")
        self._size_known = array("b")
        self._image_extras: list[Mapping[str, Any]] = []
        self._lost: Counter[int] = Counter()  # by position
        self._places, self._labels, self._crowds = array("q"), array("q"), array("b")
        self._boxes, self._areas = array("d"), array("d")
        # Ids; of an object without one, its number.  Other ids than int are few.
        self._ids, self._has_id = array("q"), array("b")
        self._odd_ids: dict[int, Any] = {}
        self._outlines: list[tuple[np.ndarray, ...]] = []
        self._extras: list[Mapping[str, Any]] = []

    def read(self, known: KnownClasses) -> "_File":
        """Reads all of the file."""
        parts = _parts(self._file, self._complain, "annotations")
        categories, annotations = [*map(_value, parts["categories"])], parts["annotations"]
        used = partial(_used_categories, annotations)
        self._classes = classes_of(categories, used, self._file, self._complain, known)
        self.add_images(parts["images"])
        self.add_objects(annotations)
        if self._keep == "everything":
            self.extra = {key: _value(parts[key]) for key in parts if key not in NEEDED}
            self.class_extras = _class_extras(categories, self._classes)
        return self

    def add_images(self, entries: Sequence[Any]) -> None:
        """Adds the images; two of them with one id are the first."""
        first: dict[int, int] = {}  # number of the entry, by id
        paths: set[str] = set()
        for number, entry in enumerate(entries):
            try:
                image = _image(entry)
            except _UNUSUAL:
                row = self._unusual_image(entry, number)
                if row is None:
                    continue
                identity, path, size = row
            else:
                identity, path = image.id, self._path(image.file_name)
                size = Size(image.width, image.height, True)
            if (before := first.setdefault(identity, number)) != number:
                what = f"images[{number}] has the same id as images[{before}]: {identity}"
                self._complain(Issue("image_id_duplicate", what, where=str(self._file)))
                continue
            self._place_of[identity] = len(self._paths) if path else _UNUSED
            if not path:
                continue
            where = f"{self._file}: images[{number}]"
            if path in paths:
                what = f"{Path(path).name} is listed a second time"
                self._complain(Issue("image_listed_twice", what, path, where))
            paths.add(path)
            self._paths.append(path)
            self._image_ids.append(identity)
            self._sizes.extend((size.height, size.width))
            self._size_known.append(size.known)
            if self._keep == "everything":
                self._numbers.append(number)
                self._image_extras.append(_further(_value(entry), _IMAGE_KEYS))

    def _path(self, name: str) -> str:
        """Path of an image; "": not found, which it reports."""
        if name.isascii() and _PLAIN_NAME.fullmatch(name):
            if not self._inside:
                path = str(inside_folder(self._folder, name, str(self._file)))
                self._inside = path.removesuffix(name)
            path = self._inside + name
            if is_remote(path) or is_there(path):
                return path
        image = find_image(self._folder, name, str(self._file), self._complain)
        return "" if image is None else str(image)

    def _unusual_image(self, entry: Any, number: int) -> tuple[int, str, Size] | None:
        """Id, path and size of an image, looked at key by key; None without an id."""
        entry = _with_name(_value(entry))
        where = f"{self._file}: images[{number}]"
        identity, path, size = None, "", Size(1, 1, False)
        try:
            _check_keys("images", number, entry, self._file)
            identity = whole_number(entry["id"])
            if identity is None:
                what = f"id {entry['id']!r}{_as_text(entry['id'])}: expected a whole number"
                raise Malformed(Issue("annotation_line", what, where=where))
            name = entry["file_name"]
            if not isinstance(name, str):
                what = f"file_name {name!r}: expected a name"
                raise Malformed(Issue("annotation_line", what, where=where))
            path = self._path(name)
            if path:
                sides = entry.get("width"), entry.get("height")
                width, height = map(whole_number, sides)
                typed = f"width {sides[0]!r:.20}, height {sides[1]!r:.20}"
                size = size_of(
                    Path(path), width, height, typed, where, self._complain, self._opener
                )
        except Malformed as wrong:
            self._complain(wrong.issue)
        return None if identity is None else (identity, path, size)

    def add_objects(self, entries: Sequence[Any]) -> None:
        """Adds the objects of the images."""
        progress = Progress(_LOGGER, f"reading {self._file}", len(entries), "objects")
        for number, entry in enumerate(entries):
            if number % _AT_ONCE == 0:
                progress.add(_AT_ONCE if number else 0)
            thing = None if self._keep == "everything" else self._usual_object(entry)
            thing = thing or self._unusual_object(entry, number)
            if thing is None or thing.place == _UNUSED:
                continue
            if thing.other_id is not None:
                self._odd_ids[len(self._ids)] = thing.other_id
            self._ids.append(number if thing.identity is None else thing.identity)
            self._has_id.append(thing.identity is not None)
            self._places.append(thing.place)
            self._labels.append(thing.label)
            self._boxes.extend(thing.box)
            self._crowds.append(thing.crowd)
            self._areas.append(math.nan if thing.area is None else thing.area)
            if self._keep != "boxes":
                self._add_outline(thing)
        rows = np.flatnonzero(np.asarray(self._has_id))
        for row in rows[_repeated(np.asarray(self._ids)[rows])].tolist():
            what = "an annotation before it has the same id"
            path = self._paths[self._places[row]]
            self._complain(Issue("annotation_id_duplicate", what, path, self._where(row)))

    def _usual_object(self, entry: Any) -> _Object | None:
        """An annotation that fits the schema, of an image and a class of the file; else None."""
        try:
            thing = _annotation(entry)
            place, label = self._place_of[thing.image_id], self._classes.label_of[thing.category_id]
        except _UNUSUAL:
            return None
        x, y, width, height = thing.bbox
        if not (x or y or width or height):  # the outline may tell
            return None
        return _Object(
            place,
            label,
            (x, y, x + width, y + height),
            bool(thing.iscrowd),
            thing.area,
            thing.id,
            thing.segmentation,
        )

    def _unusual_object(self, entry: Any, number: int) -> _Object | None:
        """An annotation, looked at key by key; None, with an issue: it cannot be used."""
        entry = _value(entry)
        given: Mapping[str, Any] = entry if isinstance(entry, dict) else _NOTHING
        image_id, category_id = given.get("image_id"), given.get("category_id")
        image, category = whole_number(image_id), whole_number(category_id)
        place = None if image is None else self._place_of.get(image)
        label = None if category is None else self._classes.label_of.get(category)
        path = "" if place is None or place == _UNUSED else self._paths[place]
        name = f"{self._file}: annotation {given.get('id', f'number {number}')}"
        where = f"{name} of image {Path(path).name!r}" if path else name
        try:
            _check_keys("annotations", number, entry, self._file)
            if place is None:
                what = f"image_id {image_id} is not among the file's images"
                if isinstance(image_id, str):
                    what = f"image_id {image_id!r}{_as_text(image_id)}: expected a whole number"
                raise Malformed(Issue("image_unknown", what, where=where))
            if label is None:
                what = _unknown_class(category_id, category, self._classes)
                raise Malformed(Issue("class_unknown", what, path, name))
            box = _box(given)
            if isinstance(box, str):
                raise Malformed(Issue("annotation_line", box, path, where))
        except Malformed as wrong:
            self._complain(wrong.issue)
            self._lost[_UNUSED if place is None else place] += 1
            return None
        area = area_in(given.get("area"))
        if area is None and given.get("area") is not None and path:
            what = f"area {given['area']!r:.80}: expected a number"
            self._complain(Issue("area_invalid", what, path, where))
        identity = whole_number(given.get("id"))
        return _Object(
            place,
            label,
            box,
            is_crowd(given.get("iscrowd")),
            area,
            identity,
            given.get("segmentation"),
            given.get("id") if identity is None else None,
            _further(given, _OBJECT_KEYS) if self._keep == "everything" else None,
        )

    def _add_outline(self, thing: _Object) -> None:
        """Adds outline and further keys of the last object."""
        given = _value(thing.outline)
        is_mask = isinstance(given, dict)
        outlines = () if is_mask else outlines_in([] if given is None else given)
        if outlines is None:
            what = "segmentation: expected lists of x1, y1, x2, y2, ..."
            where = self._where(len(self._ids) - 1)
            self._complain(Issue("outline_malformed", what, self._paths[thing.place], where))
        self._outlines.append(outlines or ())
        extra = thing.extra or _NOTHING
        self._extras.append({**extra, "segmentation": given} if is_mask else extra)

    def _where(self, row: int) -> str:
        """Names an object."""
        usual = self._ids[row] if self._has_id[row] else f"number {self._ids[row]}"
        name = Path(self._paths[self._places[row]]).name
        return f"{self._file}: annotation {self._odd_ids.get(row, usual)} of image {name!r}"

    def columns(self) -> RawColumns:
        """Everything in columns; nothing may be added after."""
        return RawColumns(
            paths=self._paths,
            image_ids_N=np.asarray(self._image_ids),
            sizes_N2=np.asarray(self._sizes).reshape(-1, 2),
            size_known_N=np.asarray(self._size_known).astype(bool),
            image_O=np.asarray(self._places),
            boxes_O4=np.asarray(self._boxes).reshape(-1, 4),
            labels_O=np.asarray(self._labels),
            crowd_O=np.asarray(self._crowds).astype(bool),
            area_O=np.asarray(self._areas),
            where=self._where,
            outlines=None if self._keep == "boxes" else self._outlines,
            class_names=self._classes.names,
            category_ids=self._classes.ids,
            source=str(self._file),
        )

    def as_set(self) -> RawSet:
        """Set with a Python object for each image and box."""
        columns = self.columns()
        images = [
            RawImage(
                path=Path(path),
                image_id=self._image_ids[place],
                width=self._sizes[2 * place + 1],
                height=self._sizes[2 * place],
                objects=[],
                where=f"{self._file}: images[{self._numbers[place]}]",
                extra=self._image_extras[place],
                size_known=bool(self._size_known[place]),
                lost=self._lost[place],
            )
            for place, path in enumerate(self._paths)
        ]
        for row, box in enumerate(columns.boxes_O4.tolist()):
            thing = RawObject(
                box=tuple(box),
                label=self._labels[row],
                where=self._where(row),
                crowd=bool(self._crowds[row]),
                area=None if math.isnan(self._areas[row]) else self._areas[row],
                polygons=self._outlines[row],
                extra=self._extras[row],
            )
            images[self._places[row]].objects.append(thing)
        return RawSet(
            images,
            columns.class_names,
            columns.category_ids,
            columns.source,
            extra=self.extra,
            class_extras=self.class_extras,
        )


def _repeated(ids_N: np.ndarray) -> np.ndarray:
    """Positions of ids that are there before."""
    if (ids_N[1:] > ids_N[:-1]).all():
        return np.zeros(0, np.int64)
    _, first = np.unique(ids_N, return_index=True)
    return np.setdiff1d(np.arange(len(ids_N)), first)


def _with_name(entry: Any) -> Any:
    """Names an image without `file_name` by the end of its address, as LVIS means it."""
    url = entry.get("coco_url") if isinstance(entry, dict) and "file_name" not in entry else None
    if not isinstance(url, str) or not url:
        return entry
    return entry | {"file_name": "/".join(url.split("/")[-2:])}


def _check_keys(part: str, number: int, entry: Any, file: Path) -> None:
    missing = [key for key in NEEDED[part] if not isinstance(entry, dict) or key not in entry]
    if missing:
        entry = str(entry)[:120]
        what = f"not COCO detection JSON: {part}[{number}] has no {missing[0]!r}: {entry}"
        raise Malformed(Issue("annotation_line", what, where=str(file)))


# --- classes --------------------------------------------------------------------------------------


def _used_categories(annotations: Sequence[Any]) -> Collection[int | None]:
    """Returns the ids of the categories that have objects."""
    entries = filter(lambda value: isinstance(value, dict), map(_value, annotations))
    return {whole_number(entry.get("category_id")) for entry in entries}


def classes_of(
    entries: Sequence[Any],
    used: Callable[[], Collection[int | None]],
    file: Path,
    complain: Complain,
    known: KnownClasses = OWN_CLASSES,
) -> Categories:
    """Maps categories to classes: merges equal names, drops a mere group.

    Args:
        used: finds the ids that annotations have, which few files need.
        known: the classes; categories are those of the same name.  Without it, all names in the
            order of their ids.
    Raises: DataError: an entry is malformed.
    """
    name_of = _names_by_id(entries, file)
    group = _group(entries, used)
    of_classes = {i: name for i, name in name_of.items() if i != group}
    if group is not None and name_of[group] in {*known.names} - {*of_classes.values()}:
        of_classes = name_of
    elif group is not None:
        what = f"category {group} {name_of[group]!r} has no objects and groups the others: "
        complain(Issue("class_group", f"{what}not a class", where=str(file)))
    own: dict[str, int] = {}  # the first id of each name
    for identity, name in of_classes.items():
        if name in own:
            what = f"categories {own[name]} and {identity} are both called {name!r}: one class"
            complain(Issue("class_names_same", what, where=str(file)))
        own.setdefault(name, identity)
    names = known.names or tuple(own)
    number_of = {name: label for label, name in enumerate(names)}
    label_of = {i: number_of[name] for i, name in of_classes.items() if name in number_of}
    if known.names:
        if known.names != tuple(own):
            what = f"categories are {listed([*own])}; mapped by name to those of {known.source}"
            complain(Issue("class_list_differs", what, where=str(file)))
    elif [*label_of] not in ([*range(len(names))], [*range(1, len(names) + 1)]):
        shown = listed([f"{i} {name_of[i]} -> {label}" for i, label in label_of.items()])
        what = f"category ids are not 1 to {len(names)}: mapped to classes {shown}"
        complain(Issue("class_ids_gap", what, where=str(file)))
    free = max(name_of, default=0) + 1
    ids = []
    for name in names:  # one missing from the file still has its own id in results
        ids.append(own.get(name, free))
        free += name not in own
    return Categories(name_of, label_of, names, tuple(ids), known)


def _group(
    entries: Sequence[Mapping[str, Any]], used: Callable[[], Collection[int | None]]
) -> int | None:
    """Returns the id of the unused category that is the supercategory of all others, or None."""
    child_counts = Counter(str(entry.get("supercategory")) for entry in entries)
    for entry in entries:
        name = str(entry["name"])
        children = child_counts[name] - (str(entry.get("supercategory")) == name)
        if 0 < children == len(entries) - 1 and whole_number(entry["id"]) not in used():
            return whole_number(entry["id"])
    return None


def _names_by_id(entries: Sequence[Any], file: Path) -> dict[int, str]:
    """Class names by id, in the order of ids.

    Raises: DataError: an entry is malformed.
    """
    found: dict[int, str] = {}
    for number, entry in enumerate(entries):
        try:
            _check_keys("categories", number, entry, file)
        except Malformed as wrong:
            raise DataError(wrong.issue.what, code="not_coco", where=str(file)) from wrong
        identity = whole_number(entry["id"])
        if identity is None:
            raise DataError(
                f"id {entry['id']!r}{_as_text(entry['id'])}: expected a whole number",
                code="bad_category_id",
                where=f"{file}: categories[{number}]",
            )
        if identity in found:
            raise DataError(
                "two entries of 'categories' have the same id",
                code="category_id_duplicate",
                where=str(file),
            )
        found[identity] = str(entry["name"])
    return dict(sorted(found.items()))


def _unknown_class(given: Any, category: int | None, categories: Categories) -> str:
    name, known = categories.name_of.get(category or 0), categories.known
    if category is not None and name is not None:
        return f"class {name!r} is not a class of {known.source} ({listed(known.names)})"
    shown = listed([f"{i} {name}" for i, name in categories.name_of.items()])
    if isinstance(given, str):
        return f"category_id {given!r}{_as_text(given)}: expected a whole number ({shown})"
    return f"category_id {given} is not among the file's categories ({shown})"


def is_crowd(value: Any) -> bool:
    """What `iscrowd` says."""
    if isinstance(value, str):  # some tools write numbers as text
        return value.strip().lower() not in ("", "0", "0.0", "false")
    return bool(value)


def _further(entry: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in known}


def _class_extras(
    entries: Sequence[Mapping[str, Any]], categories: Categories
) -> tuple[Mapping[str, Any], ...]:
    """In the order of the classes; none where no class has any."""
    of_id = {whole_number(each["id"]): _further(each, NEEDED["categories"]) for each in entries}
    extras = tuple(of_id.get(identity, {}) for identity in categories.ids)
    return extras if any(extras) else ()


def _as_text(value: Any) -> str:
    """ " is text" for a value in quotes, which messages would hide."""
    return " is text" if isinstance(value, str) else ""


def whole_number(value: Any) -> int | None:
    """Value as an int of 64 bits, also from 3.0; else None."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**63 else None


NO_BOXES: tuple[Any, ...] = (None, [], [0, 0, 0, 0])  # of which the outline has the last word


def _box(entry: Mapping[str, Any]) -> Box | str:
    """The box of an annotation, or what is wrong with it."""
    bbox, outline = entry.get("bbox"), entry.get("segmentation")
    if bbox in NO_BOXES and (outline or bbox != NO_BOXES[-1]):
        box = _mask_extent(outline) if isinstance(outline, dict) else extent_of(outline)
        return (
            box or f"bbox {bbox!r}, and no outline or mask to take a box from: {str(outline)[:80]}"
        )
    if not isinstance(bbox, list) or len(bbox) != 4:
        return f"bbox {bbox!r}: expected [x, y, width, height]"
    try:
        x, y, width, height = (float(value) for value in bbox)
    except (TypeError, ValueError, OverflowError):
        return f"bbox {bbox!r}: expected four numbers"
    return x, y, x + width, y + height


def _mask_extent(mask: Mapping[str, Any]) -> Box | None:
    """Box of a run-length mask, columns first; None: empty or malformed.

    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleToBbox.
    """
    try:
        height, width = mask["size"]
        counts = mask["counts"]
        runs = np.array(_runs_of(counts) if isinstance(counts, str) else counts, np.int64)
        ends = runs.cumsum()
        if height < 1 or (runs < 0).any() or ends[-1] != height * width:
            return None
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return None
    first, last = (ends - runs)[1::2], ends[1::2] - 1  # pixels of the mask's own runs
    first, last = first[last >= first], last[last >= first]
    if not len(first):
        return None
    whole = (first // height != last // height).any()  # a run goes on in the next column
    top, bottom = (0, height) if whole else ((first % height).min(), (last % height).max() + 1)
    return float(first[0] // height), float(top), float(last[-1] // height + 1), float(bottom)


def _runs_of(text: str) -> list[int]:
    """Lengths of the runs that a compressed mask says.

    Raises: IndexError, ValueError: it is none.
    Source: github.com/cocodataset/cocoapi, common/maskApi.c, rleFrString.
    """
    runs: list[int] = []
    place = 0
    while place < len(text):
        run, bits, more = 0, 0, True
        while more:
            digit = ord(text[place]) - 48
            if not 0 <= digit < 64 or bits > 60:
                raise ValueError("not a mask")
            run |= (digit & 31) << bits
            more, place, bits = bool(digit & 32), place + 1, bits + 5
            if not more and digit & 16:
                run -= 1 << bits
        runs.append(run + (runs[-2] if len(runs) > 2 else 0))
    return runs


def write_coco(file: Path, content: Mapping[str, Any]) -> None:
    """Writes what `coco_content` gave.

    Raises: UserError: the file cannot be written, or is there already.
    """
    write_text(file, json.dumps(content, ensure_ascii=False, allow_nan=False))


def coco_content(raw: RawSet, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """A COCO file that `read_coco` reads as the same set, for `json`.

    Args:
        names: of the images, relative to their folder.
    Returns: the content; what COCO could not hold, a line for each kind.
    """
    used = {
        identity
        for image in raw.images
        for thing in image.objects
        if (identity := whole_number(thing.extra.get("id"))) is not None
    }
    free = max(used, default=0) + 1
    renumbered = 0
    annotations = []
    for image in raw.images:
        for thing in image.objects:
            identity = whole_number(thing.extra.get("id"))
            if identity in used:
                used.discard(identity)
            else:  # none, or that of an object before
                renumbered += "id" in thing.extra
                identity, free = free, free + 1
            annotations.append(_entry(thing, identity, image.image_id, raw.category_ids))
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


def _entry(
    thing: RawObject, identity: int | None, image_id: int, category_ids: Sequence[int]
) -> dict[str, Any]:
    bbox = _bbox(thing.box)
    entry: dict[str, Any] = {
        **thing.extra,
        "id": identity,
        "image_id": image_id,
        "category_id": category_ids[thing.label],
        "bbox": bbox,
        "iscrowd": int(thing.crowd),
        # pycocotools needs an area; read back, 0 would count as none as well.
        "area": bbox[2] * bbox[3] if thing.area is None else _short(thing.area),
    }
    if thing.polygons:
        outlines = [part_K2.reshape(-1).tolist() for part_K2 in thing.polygons]
        entry["segmentation"] = [[_short(value) for value in outline] for outline in outlines]
    return entry


def _bbox(box: Box) -> list[float]:
    """COCO's [x, y, w, h] in shortest form, right edge exact."""
    x1, y1, x2, y2 = box
    return [_short(value) for value in (x1, y1, _side(x1, x2), _side(y1, y2))]


def _side(low: float, high: float) -> float:
    """Shortest number that gives exactly `high` when added to `low`."""
    side = high - low
    candidates = [round(side, digits) for digits in range(17)]
    candidates += [math.nextafter(side, math.inf), math.nextafter(side, -math.inf)]
    return next((short for short in candidates if low + short == high), side)


def _short(value: float) -> float:
    """Number; a whole one becomes an int, without a decimal point."""
    return int(value) if value.is_integer() else value

"""COCO detection JSON (cocodataset.org/#format-data)."""

import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import (
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
    read_text,
    size_of,
    write_text,
)
from ppdist.data.datasets.json_stream import NotJson, scanning
from ppdist.data.types import Box, Complain, Issue, RawColumns, RawImage, RawObject, RawSet
from ppdist.storage import files as storage

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
    images: Path, annotations: Path, complain: Complain, *, known: KnownClasses = OWN_CLASSES
) -> RawSet:
    """Images of a COCO file in order, with everything conversion keeps.

    Class numbers follow category ids, or `known`.  A box that is not given is that of the outline
    or mask.  A file without `annotations` is one of images to be annotated.  `extra` of an object
    holds its id, masks that are not polygons (RLE), and unknown keys; that of the set, info and
    licenses; that of a class, its supercategory and the like.

    Args:
        images: folder that `file_name` is relative to.
        annotations: the JSON file.
    Raises: DataError: the file as a whole is not COCO.
    """
    return _read(images, annotations, complain, known, "everything").as_set()


def read_coco_columns(
    images: Path,
    annotations: Path,
    complain: Complain,
    *,
    known: KnownClasses = OWN_CLASSES,
    masks: bool = False,
) -> RawColumns:
    """As `read_coco`, in columns, with only what training needs.

    Args: masks: outlines, too.
    """
    return _read(images, annotations, complain, known, "outlines" if masks else "boxes").columns


def read_index(annotations: Path) -> tuple[list[str], tuple[str, ...]]:
    """Names of the images and of the classes, without the objects.

    Raises: DataError: the file as a whole is not COCO.
    """
    names: list[str] = []
    used: set[float] = set()

    def take(key: str, entries: Sequence[Any]) -> None:
        if key == "images":
            entries = [_with_name(entry) for entry in entries]
            names.extend(str(e.get("file_name", "")) for e in entries if isinstance(e, dict))
        elif key == "annotations":
            given = (e.get("category_id") for e in entries if isinstance(e, dict))
            used.update(each for each in given if isinstance(each, int | float))

    for text in _texts(annotations, quietly):
        names.clear()
        used.clear()
        with suppress(UnicodeDecodeError):
            content = _scan(annotations, text, quietly, take)
            break
    whole = {*map(whole_number, used)}
    return names, classes_of(content["categories"], whole, annotations, quietly).names


def _texts(file: Path, complain: Complain) -> Iterator[BinaryIO | None]:
    """None, the file itself; then, if not UTF-8, its guessed text.

    Raises: DataError: its encoding is none that is read.
    """
    yield None
    yield io.BytesIO(read_text(file, complain).encode("utf-8"))


def _scan(
    file: Path,
    text: BinaryIO | None,
    complain: Complain,
    take: Callable[[str, Sequence[Any]], object],
    optional: str = "",
    further: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    """Passes the images and annotations of a file on, in pieces.

    Args:
        text: read in place of the file.
        take: gets the key and some next entries.
        optional: a list that may be absent.
        further: gets everything outside the three lists.
    Returns: the three lists; of those that were passed on, empty ones.
    Raises: DataError: the file as a whole is not COCO.  UnicodeDecodeError: not UTF-8.
    """
    found: dict[str, list[Any]] = {}
    kinds: dict[str, bool] = {}  # of each key, whether it has a list
    previous = ""
    try:
        with scanning(file, text) as scanner:
            for key, value, is_list in scanner.items():
                if key in NEEDED and key in kinds and key != previous:
                    raise _not_coco(file, f"it has {key!r} twice")
                kinds[key], previous = is_list, key
                if key in NEEDED and is_list:
                    found.setdefault(key, [])
                    if key == "categories":
                        found[key] += value
                    elif value:
                        take(key, value)
                elif further is not None:
                    further[key] = [*further.get(key, ()), *value] if is_list else value
            if scanner.windows:
                complain(Issue("line_ends", "lines end as on Windows", where=str(file)))
    except NotJson as error:
        found_kind = _kind_of_another(file) if not kinds else ""
        if found_kind:
            raise _not_coco(file, f"expected an object, found a {found_kind}") from error
        raise DataError(f"not JSON: {error}", code="not_json", where=str(file)) from error
    except RecursionError as error:
        raise DataError("not JSON: nested too deeply", code="not_json", where=str(file)) from error
    except OSError as error:
        what = error.strerror or str(error)
        raise DataError(what, code="file_unreadable", where=str(file)) from error
    for part in NEEDED:
        if part == optional and part not in kinds and "categories" in found:
            found[part] = []
        if part not in found:
            has = ", ".join([*kinds][:8]) or "nothing"
            raise _not_coco(file, f"it has no list {part!r} (it has: {has})")
    return found


def _kind_of_another(file: Path) -> str:
    """What JSON file this is that begins with no object; "": none."""
    try:
        content = json.loads(read_text(file, quietly))
    except (ValueError, RecursionError):
        return ""
    return "" if isinstance(content, dict) else type(content).__name__


def _not_coco(file: Path, why: str) -> DataError:
    return DataError(f"not COCO detection JSON: {why}", code="not_coco", where=str(file))


_Keep = Literal["boxes", "outlines", "everything"]


def _read(
    folder: Path, file: Path, complain: Complain, known: KnownClasses, keep: _Keep
) -> "_File":
    for text in _texts(file, complain):
        found = _File(folder, file, keep)
        with suppress(UnicodeDecodeError):
            content = _scan(file, text, complain, found.take, "annotations", found.further)
            break
    found.finish(content["categories"], known, complain)
    return found


@dataclass
class _Odd:
    """An annotation that is not as others are.

    image_id, category_id: as given.  keys: it lacks some.  box: what is wrong with it.
    """

    image_id: Any
    category_id: Any
    keys: Issue | None = None
    box: str = ""


class _File:
    """Columns of images and objects of a COCO file, piece by piece.

    A piece whose entries look like almost all others becomes columns at once.  Otherwise its
    entries are looked at one by one, and what is wrong with one is noted until all images and
    classes are known.

    Attributes: columns: of what is good, once all is read.  further: what else the file has.
    """

    columns: RawColumns

    def __init__(self, folder: Path, file: Path, keep: _Keep) -> None:
        self._folder, self._file, self._keep = folder, file, keep
        self._inside = ""  # what is in front of a plain name
        self.further: dict[str, Any] = {}
        self._image_columns: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self._image_count = 0
        self._paths: list[str] = []  # "": left out
        self._image_extras: list[Mapping[str, Any]] = []
        self._image_issues: list[tuple[int, Issue]] = []  # by number
        self._object_columns: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self._count = 0
        self._used: set[int | None] = set()  # ids of categories
        # By number, of few objects: ids that are not int, and the problem.
        self._texts: dict[int, Any] = {}
        self._odd: dict[int, _Odd] = {}
        self._odd_areas: dict[int, str] = {}
        self._odd_outlines: list[int] = []
        self._outlines: list[tuple[np.ndarray, ...]] = []
        self._extras: list[Mapping[str, Any]] = []

    def take(self, key: str, entries: Sequence[Any]) -> None:
        """Adds the next entries of the images or annotations."""
        if key == "images":
            numbered = enumerate(entries, self._image_count)
            found = [row for number, entry in numbered if (row := self._image(entry, number))]
            self._image_count += len(entries)
            _add(self._image_columns, _columns_of(_IMAGE_COLUMNS, found))
            return
        try:
            columns = _usual_objects(entries)
            self._used.update(np.unique(columns["category_ids"]).tolist())
        except _UNUSUAL:
            rows = [self._object(entry, n) for n, entry in enumerate(entries, self._count)]
            columns = _columns_of(_OBJECT_COLUMNS, rows)
        _add(self._object_columns, columns)
        if self._keep != "boxes":
            for number, entry in enumerate(entries, self._count):
                self._keep_more(number, entry if isinstance(entry, dict) else {})
        self._count += len(entries)

    def _path(self, name: str, number: int) -> str:
        """Path of an image; "": not found, which it reports."""
        if name.isascii() and _PLAIN_NAME.fullmatch(name):
            if not self._inside:
                path = str(inside_folder(self._folder, name, str(self._file)))
                self._inside = path.removesuffix(name)
            path = self._inside + name
            if storage.is_remote(path) or is_there(path):
                return path
        found = find_image(
            self._folder, name, str(self._file), lambda i: self._image_issues.append((number, i))
        )
        return "" if found is None else str(found)

    def _image(self, entry: Any, number: int) -> tuple[Any, ...] | None:
        """Row of _IMAGE_COLUMNS; None without an id, which it reports."""
        try:
            identity, name, height, width = _OF_IMAGE(entry)
        except (KeyError, TypeError):
            return self._unusual_image(entry, number)
        if (
            {type(identity), type(height), type(width)} != {int}
            or type(name) is not str
            or not (0 < height < 2**31 and 0 < width < 2**31 and abs(identity) < 2**63)
        ):
            return self._unusual_image(entry, number)
        self._paths.append(self._path(name, number))
        if self._keep == "everything":
            self._image_extras.append(_further(entry, _IMAGE_KEYS))
        return identity, height, width, True, number

    def _unusual_image(self, entry: Any, number: int) -> tuple[Any, ...] | None:
        """As `_image`; what is wrong with it is noted."""

        def complain(issue: Issue) -> None:
            self._image_issues.append((number, issue))

        entry = _with_name(entry)
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
            path = self._path(name, number)
            if path:
                sides = entry.get("width"), entry.get("height")
                width, height = map(whole_number, sides)
                said = f"width {sides[0]!r:.20}, height {sides[1]!r:.20}"
                size = size_of(Path(path), width, height, said, where, complain)
        except Malformed as wrong:
            complain(wrong.issue)
        if identity is None:
            return None
        self._paths.append(path)
        if self._keep == "everything":
            self._image_extras.append(_further(entry, _IMAGE_KEYS))
        return identity, size.height, size.width, size.known, number

    def _object(self, entry: Any, number: int) -> tuple[Any, ...]:
        """A row of _OBJECT_COLUMNS; what is wrong with it is noted."""
        known: dict[str, Any] = entry if isinstance(entry, dict) else {}
        odd = _Odd(known.get("image_id"), known.get("category_id"))
        try:
            _check_keys("annotations", number, entry, self._file)
        except Malformed as wrong:
            odd.keys = wrong.issue
        image_id, category_id = whole_number(odd.image_id), whole_number(odd.category_id)
        box = _box(known)
        if isinstance(box, str):
            odd.box, box = box, (0.0, 0.0, 0.0, 0.0)
        if odd.keys or odd.box or image_id is None or category_id is None:
            self._odd[number] = odd
        self._used.add(category_id)
        identity, given = whole_number(known.get("id")), known.get("area")
        if "id" in known and type(known["id"]) is not int:
            self._texts[number] = known["id"]
        area = area_in(given)
        if given is not None and area is None:
            self._odd_areas[number] = f"area {given!r:.80}: expected a number"
        crowd = is_crowd(known.get("iscrowd"))
        ids = image_id or 0, category_id or 0, identity or 0
        return *ids, identity is not None, box, math.nan if area is None else area, crowd

    def _keep_more(self, number: int, entry: Mapping[str, Any]) -> None:
        """Keeps the outline, and what else an annotation has."""
        given = entry.get("segmentation")
        is_mask = isinstance(given, dict)
        outlines = () if is_mask else outlines_in([] if given is None else given)
        if outlines is None:
            self._odd_outlines.append(number)
        self._outlines.append(outlines or ())
        if self._keep == "everything":
            extra = _further(entry, _OBJECT_KEYS)
            self._extras.append(extra | {"segmentation": given} if is_mask else extra)

    def finish(self, categories: Sequence[Any], known: KnownClasses, complain: Complain) -> None:
        """Says what is wrong, and makes the columns of what is good.

        Raises: DataError: a category is malformed.
        """
        file = self._file
        classes = classes_of(categories, self._used, file, complain, known)
        images = _whole(self._image_columns, _IMAGE_COLUMNS)
        objects = _whole(self._object_columns, _OBJECT_COLUMNS)

        first_N = np.ones(len(self._paths), bool)  # of those with one id the first
        for at, before in _repeats(images["ids"]):
            first_N[at] = False
            number, earlier = (int(images["numbers"][each]) for each in (at, before))
            what = f"images[{number}] has the same id as images[{earlier}]: {images['ids'][at]}"
            self._image_issues.append((number, Issue("image_id_duplicate", what, where=str(file))))
        for _, issue in sorted(self._image_issues, key=itemgetter(0)):
            complain(issue)

        image_O = _positions(images["ids"], np.flatnonzero(first_N), objects["image_ids"])
        labels = {identity: label for identity, label in classes.label_of.items()}
        ids_K, label_K = np.array([*labels], np.int64), np.array([*labels.values()], np.int64)
        class_O = _positions(ids_K, np.arange(len(ids_K)), objects["category_ids"])
        for number, odd in self._odd.items():  # 0 replaces what is no number
            if whole_number(odd.image_id) is None:
                image_O[number] = -1
            if whole_number(odd.category_id) is None:
                class_O[number] = -1
        good_N = first_N & np.array([path != "" for path in self._paths], bool)
        shown_O = np.array([False]) if not len(good_N) else good_N[image_O]
        shown_O = (image_O >= 0) & shown_O  # in an image that is used

        def path_of(number: int) -> str:
            return self._paths[image_O[number]] if shown_O[number] else ""

        def where(number: int, of_image: bool = True) -> str:
            usual = objects["ids"][number] if objects["has_id"][number] else f"number {number}"
            text = f"{file}: annotation {self._texts.get(number, usual)}"
            name = Path(path_of(number)).name if of_image else ""
            return f"{text} of image {name!r}" if name else text

        def malformed(number: int) -> Issue:
            odd = self._odd.get(number)
            given = (
                (int(objects["image_ids"][number]), int(objects["category_ids"][number]))
                if odd is None
                else (odd.image_id, odd.category_id)
            )
            if odd is not None and odd.keys is not None:
                return odd.keys
            if image_O[number] < 0:
                what = f"image_id {given[0]} is not among the file's images"
                if isinstance(given[0], str):
                    what = f"image_id {given[0]!r}{_as_text(given[0])}: expected a whole number"
                return Issue("image_unknown", what, where=where(number))
            if class_O[number] < 0:
                what = _unknown_class(given[1], whole_number(given[1]), classes)
                return Issue("class_unknown", what, path_of(number), where(number, of_image=False))
            return Issue("annotation_line", odd.box if odd else "", path_of(number), where(number))

        bad_O = (image_O < 0) | (class_O < 0)
        bad_O[[*self._odd]] = True
        issues = [(number, malformed(number)) for number in np.flatnonzero(bad_O).tolist()]
        whole_O = np.flatnonzero(objects["has_id"] & ~bad_O)
        what = "an annotation before it has the same id"
        for at, _ in _repeats(objects["ids"][whole_O]):
            number = int(whole_O[at])
            issues.append(
                (number, Issue("annotation_id_duplicate", what, path_of(number), where(number)))
            )
        kept_O = shown_O & ~bad_O
        wrong = [*(("area_invalid", *each) for each in self._odd_areas.items())]
        what = "segmentation: expected lists of x1, y1, x2, y2, ..."
        wrong += [("outline_malformed", number, what) for number in self._odd_outlines]
        for code, number, what in wrong:
            if kept_O[number]:
                issues.append((number, Issue(code, what, path_of(number), where(number))))
        for _, issue in sorted(issues, key=itemgetter(0)):
            complain(issue)

        numbers = np.flatnonzero(kept_O)
        kept_N = np.flatnonzero(good_N)
        self._good_N, self._kept_O = kept_N, numbers
        self._lost_N = np.bincount(image_O[bad_O & shown_O], minlength=len(good_N))[kept_N]
        paths = [self._paths[at] for at in kept_N.tolist()]
        seen: set[str] = set()
        for path, number in zip(paths, images["numbers"][kept_N].tolist()):
            if path in seen:
                what = f"{Path(path).name} is listed a second time"
                complain(Issue("image_listed_twice", what, path, f"{file}: images[{number}]"))
            seen.add(path)
        whole = len(numbers) == self._count
        columns = objects if whole else {name: each[numbers] for name, each in objects.items()}
        place_N = np.cumsum(good_N) - 1
        self._numbers_N = images["numbers"][kept_N]
        self.columns = RawColumns(
            paths=paths,
            image_ids_N=images["ids"][kept_N],
            sizes_N2=np.stack([images["heights"], images["widths"]], axis=1)[kept_N],
            size_known_N=images["size_known"][kept_N],
            image_O=place_N[image_O[numbers]],
            boxes_O4=columns["boxes"],
            labels_O=label_K[class_O[numbers]],
            crowd_O=columns["crowds"],
            area_O=columns["areas"],
            where=lambda number: where(int(numbers[number])),
            outlines=[self._outlines[n] for n in numbers.tolist()] if self._outlines else None,
            class_names=classes.names,
            category_ids=classes.ids,
            source=str(file),
        )
        self._class_extras = _class_extras(categories, classes)

    def as_set(self) -> RawSet:
        """Set with a Python object for each image and box."""
        columns = self.columns
        identities, sizes = columns.image_ids_N.tolist(), columns.sizes_N2.tolist()
        lost, known = self._lost_N.tolist(), columns.size_known_N.tolist()
        images = [
            RawImage(
                path=Path(path),
                image_id=identities[place],
                width=sizes[place][1],
                height=sizes[place][0],
                objects=[],
                where=f"{self._file}: images[{self._numbers_N[place]}]",
                extra=self._image_extras[at],
                size_known=known[place],
                lost=lost[place],
            )
            for place, (path, at) in enumerate(zip(columns.paths, self._good_N.tolist()))
        ]
        boxes, areas = columns.boxes_O4.tolist(), columns.area_O.tolist()
        labels, crowds = columns.labels_O.tolist(), columns.crowd_O.tolist()
        for place, number in enumerate(self._kept_O.tolist()):
            thing = RawObject(
                box=tuple(boxes[place]),
                label=labels[place],
                where=columns.where(place),
                crowd=crowds[place],
                area=None if math.isnan(areas[place]) else areas[place],
                polygons=self._outlines[number],
                extra=self._extras[number],
            )
            images[columns.image_O[place]].objects.append(thing)
        return RawSet(
            images,
            columns.class_names,
            columns.category_ids,
            columns.source,
            extra=self.further,
            class_extras=self._class_extras,
        )


# --- columns --------------------------------------------------------------------------------------

# What an entry that is not as others are raises; DataError is a ValueError.
_UNUSUAL = (ValueError, KeyError, TypeError, OverflowError)
_OF_IMAGE = itemgetter("id", "file_name", "height", "width")
_NEEDED_OF_OBJECT = itemgetter("image_id", "category_id", "bbox")
_FURTHER = ("iscrowd", "area", "id")
_OF_OBJECT = itemgetter("image_id", "category_id", "bbox", *_FURTHER)
_PLAIN_NAME = re.compile(r"(?:[^./\\\0:][^/\\\0:]*/)*[^./\\\0:][^/\\\0:]*")
_NUMBERS = {int, float}
_TRUSTED_AREA = 1e299  # below it a float says as well as its whole number what area_in finds
_LEAST = np.iinfo(np.int64).min  # `whole_number` takes none whose sign cannot be changed
_IMAGE_COLUMNS = {
    "ids": np.zeros(0, np.int64),
    "heights": np.zeros(0, np.int64),
    "widths": np.zeros(0, np.int64),
    "size_known": np.zeros(0, bool),
    "numbers": np.zeros(0, np.int64),
}
_OBJECT_COLUMNS = {
    "image_ids": np.zeros(0, np.int64),
    "category_ids": np.zeros(0, np.int64),
    "ids": np.zeros(0, np.int64),
    "has_id": np.zeros(0, bool),
    "boxes": np.zeros((0, 4)),
    "areas": np.zeros(0),
    "crowds": np.zeros(0, bool),
}


def _usual_objects(entries: Sequence[Any]) -> dict[str, np.ndarray]:
    """Columns of objects.

    Raises: _UNUSUAL.
    """
    count = len(entries)
    try:
        image_ids, category_ids, boxes, crowds, areas, ids = zip(*map(_OF_OBJECT, entries))
    except KeyError:  # of those that an annotation may lack
        image_ids, category_ids, boxes = zip(*map(_NEEDED_OF_OBJECT, entries))
        crowds, areas, ids = (tuple(each.get(key) for each in entries) for key in _FURTHER)
    has_id = {*map(type, ids)} == {int}
    if not has_id and any("id" in entry for entry in entries):
        raise TypeError("expected ids of all or none")
    if str in map(type, crowds):
        raise TypeError("expected 0 or 1")
    return {
        "image_ids": _whole_numbers(image_ids),
        "category_ids": _whole_numbers(category_ids),
        "ids": _whole_numbers(ids) if has_id else np.zeros(count, np.int64),
        "has_id": np.full(count, has_id),
        "boxes": _boxes(boxes),
        "areas": _areas(areas),
        "crowds": np.fromiter(map(bool, crowds), bool, count),
    }


def _areas(areas: Sequence[Any]) -> np.ndarray:
    """Areas, float64, NaN for none.

    Raises: _UNUSUAL: `area_in` must look at each.
    """
    kinds = {*map(type, areas)}
    if kinds == {type(None)}:
        return np.full(len(areas), np.nan)
    if not kinds <= _NUMBERS:
        raise TypeError("expected numbers")
    area_P = np.fromiter(areas, np.float64, len(areas))
    if not (np.abs(area_P) < _TRUSTED_AREA).all():
        raise ValueError("expected finite numbers")
    return area_P


def _boxes(boxes: Sequence[Any]) -> np.ndarray:
    """Boxes, [P, 4] float64, xyxy.

    Raises: _UNUSUAL: not four numbers.
    """
    if {*map(type, boxes)} != {list} or {*map(len, boxes)} != {4}:
        raise ValueError("expected lists of four")
    numbers = [*chain.from_iterable(boxes)]
    if not {*map(type, numbers)} <= _NUMBERS:
        numbers = [float(number) for number in numbers]
    boxes_P4 = np.fromiter(numbers, np.float64, len(numbers)).reshape(-1, 4)
    if not boxes_P4.any(axis=1).all():
        raise ValueError("a box that the outline may tell")
    boxes_P4[:, 2:] += boxes_P4[:, :2]
    return boxes_P4


def _whole_numbers(values: Sequence[Any]) -> np.ndarray:
    """Values as int64.

    Raises: _UNUSUAL: one is none, see `whole_number`.
    """
    if {*map(type, values)} != {int}:
        values = [whole_number(value) for value in values]
        if None in values:
            raise ValueError("expected whole numbers")
    numbers = np.fromiter(values, np.int64, len(values))
    if (numbers == _LEAST).any():
        raise OverflowError
    return numbers


def _columns_of(
    kinds: Mapping[str, np.ndarray], rows: Sequence[Sequence[Any]]
) -> dict[str, np.ndarray]:
    """The columns of rows."""
    columns = zip(*rows) if rows else [()] * len(kinds)
    return {
        name: np.array(column, empty.dtype).reshape(-1, *empty.shape[1:])
        for (name, empty), column in zip(kinds.items(), columns)
    }


def _add(columns: dict[str, list[np.ndarray]], piece: Mapping[str, np.ndarray]) -> None:
    for name, column in piece.items():
        columns[name].append(column)


def _whole(
    columns: dict[str, list[np.ndarray]], kinds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Whole columns, whose pieces are given up."""
    return {name: np.concatenate([empty, *columns.pop(name, [])]) for name, empty in kinds.items()}


def _positions(known_N: np.ndarray, places_K: np.ndarray, wanted_O: np.ndarray) -> np.ndarray:
    """Position in `known_N` of each wanted value; -1: absent.

    Args: places_K: only these positions of known_N count; they hold no value twice.
    """
    if not len(places_K):
        return np.full(len(wanted_O), -1)
    order_K = places_K[known_N[places_K].argsort()]
    sorted_K = known_N[order_K]
    place_O = np.minimum(np.searchsorted(sorted_K, wanted_O), len(sorted_K) - 1)
    return np.where(sorted_K[place_O] == wanted_O, order_K[place_O], -1)


def _repeats(ids_N: np.ndarray) -> list[tuple[int, int]]:
    """(position, that of the first) of each id that was there before."""
    if (ids_N[1:] > ids_N[:-1]).all():
        return []
    order = ids_N.argsort(kind="stable")
    starts = np.flatnonzero(np.r_[True, ids_N[order[1:]] != ids_N[order[:-1]]])
    first = np.repeat(order[starts], np.diff(np.r_[starts, len(order)]))
    again = order != first
    return sorted(zip(order[again].tolist(), first[again].tolist()))


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


def classes_of(
    entries: Sequence[Any],
    used: Collection[int | None],
    file: Path,
    complain: Complain,
    known: KnownClasses = OWN_CLASSES,
) -> Categories:
    """Maps categories to classes: merges equal names, drops a mere group.

    Args:
        used: ids that annotations have.
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


def _group(entries: Sequence[Mapping[str, Any]], used: Collection[int | None]) -> int | None:
    """Returns the id of the unused category that is the supercategory of all others, or None."""
    child_counts = Counter(str(entry.get("supercategory")) for entry in entries)
    for entry in entries:
        name = str(entry["name"])
        children = child_counts[name] - (str(entry.get("supercategory")) == name)
        if 0 < children == len(entries) - 1 and whole_number(entry["id"]) not in used:
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

"""COCO JSON for training: read in pieces, into flat columns.

`read_coco` needs 4 GB and half a minute for COCO's training set, most of it for outlines that
training without masks has no use for.  Here the file passes through a buffer of a megabyte, and
each piece becomes arrays at once.

This reader says only what is no error.  Whatever it does not understand, it leaves to `read_coco`,
which knows the words: a file with errors pays for both.
"""

import codecs
import gc
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from ppdist.data.datasets.annotations import (
    MOST_TEXT,
    area_in,
    find_image,
    inside_folder,
    is_there,
    quietly,
)
from ppdist.data.datasets.coco import (
    NEEDED,
    OWN_CLASSES,
    Categories,
    KnownClasses,
    classes_of,
    index_of,
    is_crowd,
    whole_number,
)
from ppdist.data.types import Complain, Issue, RawColumns
from ppdist.distributed.progress import Progress
from ppdist.storage import files as storage
from ppdist.storage.files import open_file

_LOGGER = logging.getLogger("ppdist.data")
_PIECE = 1 << 20  # bytes that are parsed at a time
_LONGEST = 1 << 28  # bytes of one element of a list, or of a value that is no list
_SPACE = re.compile(rb"[ \t\n\r]*")
_BLANKS = re.compile(r"[ \t\n\r]*")
_BOM = b"\xef\xbb\xbf"


class NotRead(Exception):
    """The file is for `read_coco`: it has an error, or is as few are."""


def read_coco_columns(
    images: Path, annotations: Path, complain: Complain, *, known: KnownClasses = OWN_CLASSES
) -> RawColumns:
    """What `read_coco` reads, without outlines and `extra`.

    Raises: NotRead: nothing was complained of.
    """
    issues: list[Issue] = []
    try:
        with _scanning(annotations) as scanner:
            listed, objects, categories = _Images(images, annotations), _Objects(), []
            for key, entries in scanner.lists():
                if key == "annotations":
                    objects.add(entries, scanner.again)
                elif key == "images":
                    listed.add(entries)
                elif key == "categories":
                    categories += scanner.again() if scanner.again else entries
            if not scanner.seen.issuperset(NEEDED):
                raise NotRead
            classes = classes_of(categories, objects.used, annotations, issues.append, known)
            columns = _columns(listed, objects, classes, annotations, issues)
    except _NOT_READ as error:
        raise NotRead from error
    for issue in issues:
        complain(issue)
    return columns


def read_index(annotations: Path) -> tuple[list[str], tuple[str, ...]]:
    """File names of the images and names of the classes, without the objects.

    Raises: DataError: the file as a whole is not COCO.
    """
    try:
        with _scanning(annotations) as scanner:
            names: list[str] = []
            categories: list[Any] = []
            used: set[int | None] = set()
            for key, entries in scanner.lists():
                if key == "images":
                    names += [str(entry["file_name"]) for entry in entries]
                elif key == "annotations":
                    used.update(whole_number(entry["category_id"]) for entry in entries)
                elif key == "categories":
                    categories += scanner.again() if scanner.again else entries
            if not scanner.seen.issuperset(NEEDED):
                raise NotRead
            return names, classes_of(categories, used, annotations, quietly).names
    except (NotRead, *_NOT_READ):
        return index_of(annotations)


# What an error in a file raises; DataError is a ValueError.
_NOT_READ = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


@contextmanager
def _scanning(annotations: Path) -> Iterator["_Scanner"]:
    """Reads a file without collection of garbage.

    Millions of dicts come and go, none of them in a circle: nothing to look for.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        with open_file(annotations) as file:
            megabytes = file.seek(0, os.SEEK_END) / 1e6
            file.seek(0)
            progress = Progress(_LOGGER, f"reading {annotations}", megabytes, "MB")
            yield _Scanner(file, progress)
    finally:
        if was:
            gc.enable()


class _Scanner:
    """A JSON object in a file, whose values at the top are mostly long lists."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._held = b""  # what was read and not used yet
        self._ended = False
        self._size = 0
        self._decode = json.JSONDecoder().raw_decode
        self.seen: set[str] = set()  # keys of lists
        self.again: Callable[[], list[Any]] | None = None

    def lists(self) -> Iterator[tuple[str, list[Any]]]:
        """(key, some next elements) of each list at the top; an empty one gives none.

        `again`, meanwhile: gives the same elements as Python's own parser has them, which orjson
        has not where whole numbers take more than 64 bits; None: they are from there.
        Raises: ValueError: the file is no JSON object, or has a key twice.
        """
        self._more(_PIECE)
        self._held = self._held.removeprefix(_BOM)
        self._expect(b"{")
        seen: set[str] = set()
        if self._next() == b"}":
            self._expect(b"}")
        else:
            while True:
                key = self._value()
                if not isinstance(key, str) or key in seen:
                    raise ValueError(f"key {key!r:.80}")
                seen.add(key)
                self._expect(b":")
                if self._next() == b"[":
                    self._expect(b"[")
                    self.seen.add(key)
                    for entries in self._elements():
                        yield key, entries
                else:
                    self._value()
                if self._next() == b"}":
                    break
                self._expect(b",")
            self._expect(b"}")
        if self._next():
            raise ValueError("something follows the object")

    def _more(self, count: int) -> None:
        """Holds so many bytes, or all that are left."""
        parts, held = [self._held], len(self._held)
        while held < count and not self._ended:
            block = self._file.read(max(_PIECE, count - held))
            self._ended = not block
            self._size += len(block)
            self._progress.add(len(block) / 1e6)
            if self._size > MOST_TEXT:
                raise ValueError("too large")
            parts.append(block)
            held += len(block)
        if len(parts) > 1:
            self._held = b"".join(parts)

    def _next(self) -> bytes:
        """The next byte that is no blank, without taking it; b"": the end."""
        while True:
            self._held = self._held[_SPACE.match(self._held).end() :]  # type: ignore[union-attr]
            if self._held or self._ended:
                return self._held[:1]
            self._more(_PIECE)

    def _expect(self, mark: bytes) -> None:
        if self._next() != mark:
            raise ValueError(f"expected {mark!r}")
        self._held = self._held[1:]

    def _value(self) -> Any:
        """Takes a value that is no list of the top: a key, `info`."""
        self._next()
        wanted = 1 << 12
        while True:
            self._more(wanted)
            text = _whole_characters(self._held[:wanted])
            try:
                value, end = self._decode(text)
                # A number may go on behind what is held.
                done = _BLANKS.match(text, end).end() < len(text)  # type: ignore[union-attr]
            except ValueError:
                done = False
            if done:
                self._held = self._held[len(text[:end].encode()) :]
                return value
            if wanted > len(self._held):
                raise ValueError("not a value")
            wanted *= 4
            if wanted > _LONGEST:
                raise ValueError("too long a value")

    def _elements(self) -> Iterator[list[Any]]:
        """The elements of the list whose bracket was taken, some at a time."""
        if self._next() == b"]":
            self._expect(b"]")
            return
        wanted = _PIECE
        while True:
            self._more(wanted)
            # Most elements end so.  That it is the end of one, and of none inside, is sure where
            # the piece is a list with a bracket on either side.
            cut = self._held.rfind(b"},", 0, wanted) + 1
            piece = b"[%b]" % self._held[:cut]
            entries = None
            if cut:
                with suppress(ValueError):
                    entries = orjson.loads(piece)
            if entries is not None:
                self._held = self._held[cut + 1 :]
                wanted = _PIECE
                self.again = partial(json.loads, piece)
                yield entries
                continue
            self.again = None
            entries, used, ended = self._one_by_one(_whole_characters(self._held[:wanted]))
            if used:
                self._held = self._held[used:]
                wanted = _PIECE
                yield entries
                if ended:
                    return
            elif wanted > len(self._held) or wanted > _LONGEST:
                raise ValueError("not an element")
            else:
                wanted *= 4

    def _one_by_one(self, text: str) -> tuple[list[Any], int, bool]:
        """The elements that a text begins with, its bytes that they take, whether the list ends."""
        entries, place, used = [], 0, 0
        while True:
            place = _BLANKS.match(text, place).end()  # type: ignore[union-attr]
            try:
                entry, place = self._decode(text, place)
            except ValueError:  # cut off, or wrong: then the next piece does not begin well either
                break
            place = _BLANKS.match(text, place).end()  # type: ignore[union-attr]
            mark = text[place : place + 1]
            if mark not in ("", ",", "]"):
                raise ValueError("expected a comma")
            if not mark:
                break
            place += 1
            entries.append(entry)
            used = place
            if mark == "]":
                return entries, len(text[:used].encode()), True
        return entries, len(text[:used].encode()), False


def _whole_characters(content: bytes) -> str:
    """The text, without what was cut off from its last character.  Raises: ValueError: no UTF-8."""
    return codecs.getincrementaldecoder("utf-8")().decode(content)


class _Images:
    """Columns of the images, piece after piece."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self._file = file
        self._inside = ""  # what is in front of a plain name
        self.paths: list[str] = []
        self.ids: list[np.ndarray] = []
        self.heights: list[np.ndarray] = []
        self.widths: list[np.ndarray] = []

    def add(self, entries: Sequence[Any]) -> None:
        """Raises: KeyError, TypeError, ValueError, OverflowError: an entry is malformed."""
        ids, names, widths, heights = zip(*map(_OF_IMAGE, entries))
        if {*map(type, names)} != {str}:
            raise TypeError("expected names")
        self.ids.append(_whole_numbers(ids))
        self.widths.append(_whole_numbers(widths))
        self.heights.append(_whole_numbers(heights))
        self.paths += map(self._path, names)

    def _path(self, name: str) -> str:
        if name.isascii() and _PLAIN_NAME.fullmatch(name):
            if not self._inside:
                path = str(inside_folder(self._folder, name, str(self._file)))
                self._inside = path.removesuffix(name)
            path = self._inside + name
            if storage.is_remote(path) or is_there(path):
                return path
        return str(find_image(self._folder, name, str(self._file), _refuse))


_OF_IMAGE = itemgetter("id", "file_name", "width", "height")
_NEEDED_OF_OBJECT = itemgetter("image_id", "category_id", "bbox")
_FURTHER = ("iscrowd", "area", "id")
_OF_OBJECT = itemgetter("image_id", "category_id", "bbox", *_FURTHER)
_PLAIN_NAME = re.compile(r"(?:[^./\\\0:][^/\\\0:]*/)*[^./\\\0:][^/\\\0:]*")
_NUMBERS = {int, float}
_TRUSTED_AREA = 1e299  # below it a float says as well as its whole number what area_in finds


def _refuse(issue: Issue) -> None:
    raise NotRead(issue.text)


class _Objects:
    """Columns of the annotations, piece after piece."""

    def __init__(self) -> None:
        self.count = 0
        self.columns: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self.used: set[int] = set()  # ids of categories
        self.texts: dict[int, str] = {}  # of an id that is no int, by the object's number
        self.odd_areas: dict[int, str] = {}

    def add(self, entries: Sequence[Any], again: Callable[[], list[Any]] | None) -> None:
        """Args: again: see `_Scanner.lists`.

        Raises: KeyError, TypeError, ValueError, OverflowError: an annotation is malformed.
        """
        try:
            image_ids, category_ids, boxes, crowds, areas, ids = zip(*map(_OF_OBJECT, entries))
        except KeyError:  # of those that an annotation may lack
            image_ids, category_ids, boxes = zip(*map(_NEEDED_OF_OBJECT, entries))
            crowds, areas, ids = (tuple(each.get(key) for each in entries) for key in _FURTHER)
        area_P = _usual_areas(areas)
        usual = {*map(type, chain(image_ids, category_ids, ids))} <= {int, type(None)}
        if again is not None and (area_P is None or not usual):
            self.add(again(), None)
            return
        first, count = self.count, len(entries)
        crowd_of = is_crowd if str in map(type, crowds) else bool
        if {*map(type, ids)} == {int}:
            id_P, has_id_P = _whole_numbers(ids), np.ones(count, bool)
        else:
            known = [whole_number(identity) for identity in ids]
            id_P = np.fromiter((identity or 0 for identity in known), np.int64, count)
            has_id_P = np.fromiter((identity is not None for identity in known), bool, count)
            for place, entry in enumerate(entries):
                if "id" in entry and type(entry["id"]) is not int:
                    self.texts[first + place] = str(entry["id"])
        if area_P is None:
            found = [area_in(area) for area in areas]
            area_P = np.array(found, np.float64)
            for place, (area, taken) in enumerate(zip(areas, found)):
                if area is not None and taken is None:
                    self.odd_areas[first + place] = f"area {area!r:.80}: expected a number"
        columns = {
            "image_ids": _whole_numbers(image_ids),
            "category_ids": _whole_numbers(category_ids),
            "boxes": _boxes(boxes),
            "crowds": np.fromiter(map(crowd_of, crowds), bool, count),
            "areas": area_P,
            "ids": id_P,
            "has_id": has_id_P,
        }
        for name, column in columns.items():
            self.columns[name].append(column)
        self.used.update(np.unique(columns["category_ids"]).tolist())
        self.count += count

    def take(self, name: str, empty: np.ndarray) -> np.ndarray:
        """A whole column, whose pieces are given up.  Args: empty: what comes of no pieces."""
        return np.concatenate([empty, *self.columns.pop(name, [])])


def _usual_areas(areas: Sequence[Any]) -> np.ndarray | None:
    """float64, NaN for none; None: `area_in` must look at each."""
    kinds = {*map(type, areas)}
    if kinds == {type(None)}:
        return np.full(len(areas), np.nan)
    if not kinds <= _NUMBERS:
        return None
    try:
        area_P = np.fromiter(areas, np.float64, len(areas))
    except OverflowError:
        return None
    return area_P if (np.abs(area_P) < _TRUSTED_AREA).all() else None


def _boxes(boxes: Sequence[Any]) -> np.ndarray:
    """[P, 4] float64, xyxy.  Raises: TypeError, ValueError, OverflowError: not four numbers."""
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
    """int64.  Raises: TypeError, ValueError, OverflowError: one is none, see `whole_number`."""
    if {*map(type, values)} != {int}:
        values = [whole_number(value) for value in values]
        if None in values:
            raise ValueError("expected whole numbers")
    numbers = np.fromiter(values, np.int64, len(values))
    if (numbers == _LEAST).any():
        raise OverflowError
    return numbers


_LEAST = np.iinfo(np.int64).min  # `whole_number` takes none whose sign cannot be changed
_NO_INTS, _NO_FLOATS, _NO_BOOLS = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)


def _columns(
    images: _Images, objects: _Objects, classes: Categories, file: Path, issues: list[Issue]
) -> RawColumns:
    """Args: issues: get what is to be complained of.

    Raises: ValueError: an object of no image or class, an image id twice, no size.
    """
    paths = images.paths
    image_ids_N = np.concatenate([_NO_INTS, *images.ids])
    sizes = [np.concatenate([_NO_INTS, *each]) for each in (images.heights, images.widths)]
    sizes_N2 = np.stack(sizes, axis=1)
    if not ((sizes_N2 > 0) & (sizes_N2 < 2**31)).all():
        raise ValueError("expected sizes in pixels")
    if len(np.unique(image_ids_N)) < len(image_ids_N):
        raise ValueError("an image id twice")
    image_O = _places(image_ids_N, objects.take("image_ids", _NO_INTS))
    ids_K, label_K = (np.array([*each], np.int64) for each in zip(*classes.label_of.items()))
    labels_O = label_K[_places(ids_K, objects.take("category_ids", _NO_INTS))]
    ids_O, has_id_O = objects.take("ids", _NO_INTS), objects.take("has_id", _NO_BOOLS)

    def path_of(number: int) -> str:
        return paths[int(image_O[number])]

    def where(number: int) -> str:
        usual = str(ids_O[number]) if has_id_O[number] else f"number {number}"
        identity = objects.texts.get(number, usual)
        return f"{file}: annotation {identity} of image {Path(path_of(number)).name!r}"

    twice = {*_repeated(ids_O, np.flatnonzero(has_id_O))}
    for number in sorted(twice.union(objects.odd_areas)):
        path, place = path_of(number), where(number)
        if number in twice:
            what = "an annotation before it has the same id"
            issues.append(Issue("annotation_id_duplicate", what, path, place))
        if number in objects.odd_areas:
            issues.append(Issue("area_invalid", objects.odd_areas[number], path, place))
    seen: set[str] = set()
    for number, path in enumerate(paths) if len({*paths}) < len(paths) else ():
        if path in seen:
            what = f"{Path(path).name} is listed a second time"
            issues.append(Issue("image_listed_twice", what, path, f"{file}: images[{number}]"))
        seen.add(path)
    return RawColumns(
        paths=paths,
        image_ids_N=image_ids_N,
        sizes_N2=sizes_N2,
        size_known_N=np.ones(len(paths), bool),
        image_O=image_O,
        boxes_O4=objects.take("boxes", np.zeros((0, 4))),
        labels_O=labels_O,
        crowd_O=objects.take("crowds", _NO_BOOLS),
        area_O=objects.take("areas", _NO_FLOATS),
        where=where,
        outlines=None,
        class_names=classes.names,
        category_ids=classes.ids,
        source=str(file),
    )


def _places(known_K: np.ndarray, wanted_O: np.ndarray) -> np.ndarray:
    """Where each stands in `known_K`, which has none twice.  Raises: ValueError: one does not."""
    if not len(known_K):
        if len(wanted_O):
            raise ValueError("an unknown id")
        return wanted_O
    order_K = known_K.argsort()
    sorted_K = known_K[order_K]
    place_O = np.minimum(np.searchsorted(sorted_K, wanted_O), len(sorted_K) - 1)
    if (sorted_K[place_O] != wanted_O).any():
        raise ValueError("an unknown id")
    return order_K[place_O]


def _repeated(ids_O: np.ndarray, numbers: np.ndarray) -> list[int]:
    """Those of some objects that have the id of one before them."""
    ids = ids_O[numbers]
    if (ids[1:] > ids[:-1]).all():
        return []
    order = ids.argsort(kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    found: list[int] = numbers[order[1:][again]].tolist()
    return found

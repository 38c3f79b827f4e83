"""What the readers of all formats share: text, safe file names, good boxes, one record."""

import logging
import math
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.data.check.findings import KINDS
from ppdist.data.formats.raw import Box, Complain, Finding, RawImage, RawSet
from ppdist.data.records import Records
from ppdist.data.sample import DetectionSet, ImageRecord
from ppdist.errors import DataError
from ppdist.files import writing

_LOGGER = logging.getLogger("ppdist.data")
_ROUNDING = 1.0  # pixels by which a box may stick out without a word: formats round and count
_LARGEST_AREA = 1e300  # JSON has whole numbers that no float can hold
_SAID = {  # of a bad box: to who asked to stop there, and where they are counted
    "box_not_finite": ("is not finite", "not finite"),
    "box_swapped": ("has its corners the wrong way round", "corners swapped"),
    "box_no_area": ("has no area", "without area"),
    "box_outside": ("lies outside the {}x{} image", "outside the image"),
    "box_sticking_out": ("sticks out of the {}x{} image", "sticking out"),
}
_XML_ENCODING = re.compile(rb"""<\?xml[^>]{1,60}encoding=["']([\w.-]{1,20})["']""")


class Strictly:
    """Training's `Complain`: an error stops it, warnings become one line for each kind."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def __call__(self, finding: Finding) -> None:
        """Raises: DataError: the finding is an error."""
        severity = KINDS[finding.code].severity
        if severity == "error":
            raise DataError(finding.what, code=finding.code, where=finding.where)
        if severity == "warning":
            self._first.setdefault(finding.code, finding.text)
            self._counts[finding.code] += 1

    def report(self) -> tuple[str, ...]:
        """Logs the lines and returns them; nothing where nothing was found."""
        lines = []
        for kind, text in self._first.items():
            more = self._counts[kind] - 1
            lines.append(f"{text} (and {more} more: {KINDS[kind].meaning})" if more else text)
            _LOGGER.warning(lines[-1])
        return tuple(lines)


def settle(
    raw: RawSet, bad_boxes: str, *, masks: bool = False, notes: tuple[str, ...] = ()
) -> DetectionSet:
    """What training uses of what the files say: good boxes in float32.

    Args:
        bad_boxes: see BoxPolicy.
        masks: keep the outlines of objects, float32 as they are, also where a box was cut.
        notes: what reading the files put right.
    Raises: DataError: a bad box where the policy is `error`.
    """
    policy = BoxPolicy(bad_boxes, raw.source)
    records = Records.of(_records(raw.images, policy, masks))
    return DetectionSet(
        records, raw.class_names, raw.category_ids, raw.source, (*notes, *policy.report())
    )


def _records(images: Sequence[RawImage], policy: "BoxPolicy", masks: bool) -> Iterator[ImageRecord]:
    for image in images:
        boxes, labels, crowd, areas, polygons = [], [], [], [], []
        for thing in image.objects:
            box = policy.apply(thing.box, image.width, image.height, thing.where)
            if box is None:
                continue
            boxes.append(box)
            labels.append(thing.label)
            crowd.append(thing.crowd)
            # Files that leave the area open write none, 0, or what their swapped corners gave.
            known = thing.area is not None and 0 < thing.area < math.inf
            areas.append(thing.area if known else (box[2] - box[0]) * (box[3] - box[1]))
            if masks:
                polygons.append(tuple(part_K2.astype(np.float32) for part_K2 in thing.polygons))
        yield ImageRecord(
            path=os.path.abspath(image.path),
            image_id=image.image_id,
            width=image.width,
            height=image.height,
            boxes_M4=np.array(boxes, np.float32).reshape(-1, 4),
            labels_M=np.array(labels, np.int64),
            crowd_M=np.array(crowd, bool),
            area_M=np.array(areas, np.float32),
            polygons_M=tuple(polygons),
        )


def box_problem(box: Box, width: int, height: int) -> str | None:
    """The kind (see findings.KINDS) of what is wrong with a box, x1 y1 x2 y2 in pixels, or None.

    Sticking out by up to a pixel is not wrong: formats round, and count from 0 or 1.  A box has an
    area if it still has one as float32, which is what training makes of it.
    """
    if not all(map(math.isfinite, box)):
        return "box_not_finite"
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        return "box_swapped"
    if not _has_area(box):
        return "box_no_area"
    cut = cut_box(box, width, height)
    if not _has_area(cut):
        return "box_outside"
    if max(abs(given - kept) for given, kept in zip(box, cut)) > _ROUNDING:
        return "box_sticking_out"
    return None


def _has_area(box: Box) -> bool:
    x1, y1, x2, y2 = array("f", box)
    return x2 > x1 and y2 > y1


def cut_box(box: Box, width: int, height: int) -> Box:
    """The part of a box that is inside its image."""
    return (
        min(max(box[0], 0.0), width),
        min(max(box[1], 0.0), height),
        min(max(box[2], 0.0), width),
        min(max(box[3], 0.0), height),
    )


def box_in_order(box: Box) -> Box:
    """The same corners with x1 <= x2 and y1 <= y2."""
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


class BoxPolicy:
    """Applies `data.bad_boxes` to every box of a split and says once what it did.

    `clip` puts swapped corners in order, cuts at the border and drops what has no area then;
    `drop` drops every bad box; `error` stops at the first.  What sticks out by less than a pixel
    is cut off silently.  What is bad: see box_problem.
    """

    def __init__(self, policy: str, source: str) -> None:
        self._policy = policy
        self._source = source
        self._boxes = 0
        self._counts: Counter[str] = Counter()

    def apply(self, box: Box, width: int, height: int, where: str) -> Box | None:
        """The box (x1, y1, x2, y2) to use, in pixels inside the image, or None to drop it.

        Args:
            where: names the annotation in an error.
        Raises: DataError: the box is bad and the policy is `error`.
        """
        self._boxes += 1
        problem = box_problem(box, width, height)
        if problem is not None and self._policy == "error":
            x1, y1, x2, y2 = box
            raise DataError(
                f"box (x={x1:g}, y={y1:g}, w={x2 - x1:g}, h={y2 - y1:g}) "
                f"{_SAID[problem][0].format(width, height)}",
                code=problem,
                where=where,
                fix="fix the file, or set data.bad_boxes: clip",
            )
        clips = self._policy == "clip"
        if clips and problem == "box_swapped":
            self._count("put in order", problem)
            box = box_in_order(box)
            problem = box_problem(box, width, height)
        if clips and problem == "box_sticking_out":
            self._count("clipped", problem)
        elif problem is not None:
            self._count("dropped", problem)
            return None
        return cut_box(box, width, height)

    def _count(self, done: str, problem: str) -> None:
        self._counts[f"{done} ({_SAID[problem][1]})"] += 1

    def report(self) -> tuple[str, ...]:
        """Logs one line for the whole split and returns it; nothing where all boxes were good."""
        if not self._counts:
            return ()
        done = ", ".join(f"{count} {what}" for what, count in sorted(self._counts.items()))
        line = f"{self._source}: {done} of {self._boxes} boxes (data.bad_boxes: {self._policy})"
        _LOGGER.warning(line)
        return (line,)


def outlines_in(value: Any) -> tuple[np.ndarray, ...] | None:
    """[[x1, y1, x2, y2, ...], ...] as float64 [K, 2] each; None: it is something else."""
    if not isinstance(value, list):
        return None
    try:
        parts = [np.array(outline, np.float64).reshape(-1, 2) for outline in value]
    except (ValueError, TypeError, OverflowError):
        return None
    good = all(np.isfinite(part_K2).all() for part_K2 in parts)
    return tuple(part_K2 for part_K2 in parts if len(part_K2)) if good else None


def area_in(value: Any) -> float | None:
    """An area as files have it; None: it is no finite number."""
    good = isinstance(value, int | float) and abs(value) < _LARGEST_AREA
    return float(value) if good else None


def find_repeats(images: Sequence[RawImage], complain: Complain) -> None:
    """Complains of every image that is listed a second time."""
    seen: set[Path] = set()
    for image in images:
        if image.path in seen:
            what = f"{image.path.name} is listed a second time"
            complain(Finding("image_listed_twice", what, str(image.path), image.where))
        seen.add(image.path)


def inside_folder(folder: Path, name: str, where: str) -> Path:
    """folder / name.

    Symbolic links in the folder are followed: they are the user's, the names are the file's.

    Raises: DataError: the name leads out of the folder, or no file can be called so.
    """
    try:
        usable = "\0" not in name and bool(os.fsencode(name))
    except UnicodeEncodeError:  # half a surrogate pair, from a damaged JSON file
        usable = False
    if not usable:
        raise DataError(f"{name!r} cannot be a file name", code="bad_file_name", where=where)
    path = os.path.normpath(os.path.join(folder, name))
    if not path.startswith(os.path.join(os.path.normpath(folder), "")):
        raise DataError(
            f"file name {name!r} leads out of {folder}", code="path_outside", where=where
        )
    return Path(path)


def find_image(folder: Path, name: str, where: str, complain: Complain) -> Path | None:
    """The image that an annotation file calls `name`; None, and a finding, if it is outside.

    Where there is no such file, it may be there in other bytes: names that came out of an archive
    made on a Chinese Windows are GBK on disk, macOS takes letters and accents apart, and Windows
    separates folders by a backslash.
    """
    try:
        path = inside_folder(folder, name, where)
        if (name.isascii() and "\\" not in name) or os.path.isfile(path):
            return path
        for other in _other_spellings(name):
            elsewhere = inside_folder(folder, other, where)
            if os.path.isfile(elsewhere):
                return elsewhere
    except DataError as error:
        complain(Finding("path_outside", error.what, where=error.where))
        return None
    return path


def _other_spellings(name: str) -> Iterator[str]:
    for spelt in dict.fromkeys((name, name.replace("\\", "/"))):
        for form in ("NFC", "NFD"):
            yield unicodedata.normalize(form, spelt)
        try:
            yield os.fsdecode(spelt.encode("gb18030"))
        except UnicodeEncodeError:  # the bytes of the disk already
            continue


def read_text(path: Path, complain: Complain | None = None) -> str:
    """The text of an annotation file: UTF-8 with or without a mark, else GBK (and its finding).

    Args:
        complain: gets `encoding` and `line_ends`; without it only UTF-8 is read.
    Raises: DataError: absent, unreadable, or in another encoding.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            error.strerror or str(error), code="file_unreadable", where=str(path)
        ) from error
    if complain is not None and b"\r\n" in content:
        complain(Finding("line_ends", "lines end as on Windows", where=str(path)))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if complain is None:
            raise DataError(f"not UTF-8 text: {error}", code="not_utf8", where=str(path)) from error
        problem = error
    declared = _XML_ENCODING.match(content)
    for encoding in ([declared[1].decode()] if declared else []) + ["gb18030"]:
        try:
            text = content.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        shown = "GBK" if encoding == "gb18030" else encoding
        complain(Finding("encoding", f"not UTF-8 text: read as {shown}", where=str(path)))
        return text
    raise DataError(
        f"neither UTF-8 nor GBK text: {problem}",
        code="not_utf8",
        where=str(path),
        fix="save it as UTF-8",
    )


def write_text(path: Path, text: str) -> None:
    """Writes a new UTF-8 file, and the folders above it.

    Half a surrogate pair, which UTF-8 cannot hold, becomes \\udNNN: in JSON that is the same.

    Raises: UserError: it cannot be written, or is there already.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)

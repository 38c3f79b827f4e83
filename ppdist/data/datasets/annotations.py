"""The parts that all annotation formats share: kinds of issues, boxes, files, class names.

readers (coco, voc, yolo) -> RawSet, `complain` of KINDS -> to_detection_set -> DetectionSet
"""

import codecs
import contextlib
import logging
import math
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
import yaml

from ppdist.common.addresses import absolute, is_in_shard, is_remote
from ppdist.common.errors import DataError
from ppdist.common.files import read_file, writing
from ppdist.common.opener import DISK, Opener
from ppdist.data.datasets.plausibility import find_first_equal
from ppdist.data.image import image_size, is_image_name
from ppdist.data.types import (
    Box,
    Complain,
    DetectionSet,
    Issue,
    RawColumns,
    RawImage,
    RawSet,
    Records,
    cumulative_ends,
    pack_outlines,
    pack_paths,
)
from ppdist.runtime.decoder import IMAGE_SUFFIXES, UNREAD_SUFFIXES

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """A kind of issue.

    severity: error: training stops or loses images; warning: something is corrected or left out;
    note: handled, for information only.  training, evaluation, fix: what training, evaluation and
    `data check --fix` do about it; evaluation "": the same as training.
    """

    severity: Severity
    meaning: str
    training: str
    fix: str
    evaluation: str = ""


_STOPS = "stops with this message"
_REPLACED = "another image in its place, of which one in a thousand may be"
_NOT_SCORED = "left out of the score"
_BAD_BOX = "left out (data.bad_boxes)"
_LEFT_OUT = "left out"
_AS_IT_IS = "as it is"
_NOT_FIXED = "nothing is written"


KINDS: dict[str, Kind] = {
    # Annotation files.
    "annotation_missing": Kind("error", "a listed image has no annotation file", _STOPS, _LEFT_OUT),
    "annotation_unreadable": Kind(
        "error", "the annotation file of one image is malformed", _STOPS, "the image is left out"
    ),
    "annotation_line": Kind("error", "one line or object is malformed", _STOPS, _LEFT_OUT),
    "encoding": Kind("warning", "text is not UTF-8", "read in its encoding", "written as UTF-8"),
    "line_ends": Kind("note", "lines end as on Windows", "read all the same", "written with \\n"),
    "class_unknown": Kind("error", "an object of an undeclared class", _STOPS, _LEFT_OUT),
    "class_ids_gap": Kind(
        "note", "category ids are not 1, 2, 3, ...", "mapped to 0, 1, 2, ...", _AS_IT_IS
    ),
    "classes_differ": Kind(
        "error", "training and validation have different classes", _STOPS, _NOT_FIXED
    ),
    "class_names_alike": Kind(
        "warning", "names that differ only in case or spaces", "two classes", _AS_IT_IS
    ),
    "class_count_differs": Kind(
        "warning", "`nc` is not the number of `names`", "the names count", "only the names"
    ),
    "objects_missing": Kind("error", "a split without any object", _STOPS, _NOT_FIXED),
    "splits_same": Kind(
        "warning",
        "training and validation are the same set",
        "scores say nothing about new images",
        _AS_IT_IS,
    ),
    "class_group": Kind(
        "warning", "a category without objects that groups others", "not a class", "not a class"
    ),
    "class_names_same": Kind(
        "warning", "two categories with the same name", "merged into one class", "merged"
    ),
    "class_list_differs": Kind(
        "note",
        "categories or their order differ from the training split",
        "mapped by name",
        "those of the training split",
    ),
    "class_unused": Kind("note", "a class without an object", "cannot be learned", _AS_IT_IS),
    "image_unknown": Kind("error", "an object of an image that is not listed", _STOPS, _LEFT_OUT),
    "image_id_duplicate": Kind("error", "two images with one id", _STOPS, "the first is kept"),
    "annotation_id_duplicate": Kind(
        "warning", "two objects with one id", "both are used", "numbered anew"
    ),
    "image_listed_twice": Kind(
        "warning", "an image listed more than once", "used as often", "once, with all its objects"
    ),
    "outline_malformed": Kind(
        "warning", "an outline that is not a list of points", "only its box is used", "only its box"
    ),
    "shape_unread": Kind("warning", "a labelme or CVAT shape without a box", "not used", _LEFT_OUT),
    "area_invalid": Kind("warning", "an area that is not a number", "that of the box", _LEFT_OUT),
    "label_columns": Kind(
        "warning", "more columns than a box has", "the first four numbers are the box", "the box"
    ),
    "label_missing": Kind(
        "warning", "an image without a label file", "used as background", "an empty label file"
    ),
    "label_encoded": Kind(
        "warning",
        "the name of a label file is percent-encoded and that of its image is not, or the reverse",
        "used with this image",
        "named as its image",
    ),
    "label_without_image": Kind(
        "warning", "a label file without an image", "not used, nor are its objects", _LEFT_OUT
    ),
    "label_shared": Kind(
        "warning",
        "images that differ only in suffix share a label file",
        "both are used with its objects",
        "each gets its own",
    ),
    "size_missing": Kind(
        "warning", "no valid image size is annotated", "the size of the file is used", "written"
    ),
    "image_elsewhere": Kind(
        "warning",
        "an image is not at its annotated path",
        "the only file of that name is used",
        "its actual path is written",
    ),
    "path_outside": Kind("error", "a file name leads out of its folder", _STOPS, _LEFT_OUT),
    # Boxes.
    "box_not_finite": Kind("warning", "a box with NaN or infinity", _BAD_BOX, _LEFT_OUT),
    "box_no_area": Kind("warning", "a box of no width or height", _BAD_BOX, _LEFT_OUT),
    "box_swapped": Kind(
        "warning", "corners the wrong way round", "put in order (data.bad_boxes)", "put in order"
    ),
    "box_outside": Kind("warning", "a box quite outside its image", _BAD_BOX, _LEFT_OUT),
    "box_sticking_out": Kind(
        "warning", "a box leaves its image by over a pixel", "cut (data.bad_boxes)", "cut"
    ),
    "box_duplicate": Kind(
        "warning",
        "the same object twice",
        "counts once (data.duplicate_boxes)",
        "the first is kept",
    ),
    # Images.
    "image_missing": Kind("error", "a listed image does not exist", _STOPS, _LEFT_OUT),
    "image_empty": Kind("error", "an empty file", _REPLACED, _LEFT_OUT, _NOT_SCORED),
    "image_unreadable": Kind(
        "error", "not an image, or damaged", _REPLACED, _LEFT_OUT, _NOT_SCORED
    ),
    "image_truncated": Kind(
        "error", "the end of the file is missing", _REPLACED, _LEFT_OUT, _NOT_SCORED
    ),
    "pixel_kind": Kind(
        "error",
        "unsupported pixel type, such as float or five channels",
        _REPLACED,
        _LEFT_OUT,
        _NOT_SCORED,
    ),
    "image_crashes_decoder": Kind(
        "error", "decoding it crashes the process", _REPLACED, _LEFT_OUT, _NOT_SCORED
    ),
    "image_hangs_decoder": Kind(
        "error", "decoding it never finishes", _REPLACED, _LEFT_OUT, _NOT_SCORED
    ),
    "size_mismatch": Kind(
        "error", "its size differs from its annotation", _REPLACED, _LEFT_OUT, _NOT_SCORED
    ),
    "wrong_extension": Kind(
        "note", "a file named as another format", "read as what it is", _AS_IT_IS
    ),
    "exif_orientation": Kind(
        "note",
        "a camera's note says to turn it",
        "turned, unless its annotation has the size of the image not turned",
        _AS_IT_IS,
    ),
    "grey": Kind("note", "an image without colour", "three equal channels", _AS_IT_IS),
    "alpha": Kind("note", "an image with transparency", "transparency ignored", _AS_IT_IS),
    "sixteen_bit": Kind("note", "16 bits per channel", "the upper 8 bits", _AS_IT_IS),
    "dark_sixteen_bit": Kind(
        "warning",
        "16 bits per channel, 14 or fewer used: scale them so that white is near 65535",
        "the upper 8 bits, which are nearly black",
        _AS_IT_IS,
    ),
    "cmyk": Kind("note", "an image for print (CMYK)", "turned into RGB", _AS_IT_IS),
    "image_duplicate": Kind(
        "warning", "two files of one split have the same content", "both are used", "once"
    ),
    "image_no_boxes": Kind("note", "an image without an object", "background", _AS_IT_IS),
    "image_objects_lost": Kind(
        "error",
        "an image of which no annotated object can be used",
        "the image is left out, as it is not background",
        "the image is left out",
    ),
    "image_kind_unread": Kind(
        "warning", "an image of a kind that is not read", "not used, nor its label", _LEFT_OUT
    ),
    "image_unlisted": Kind("note", "an image on disk that no split lists", "not used", _LEFT_OUT),
    "leakage": Kind(
        "warning",
        "the same content in training and validation",
        "used in both: scores are too good",
        "left out of training",
    ),
}


_LOGGER = logging.getLogger("ppdist.data")
CLEAN_COPY = "`ppdist data check DATA --fix DIR` writes a copy of the set without it"
_FEW_SHARE = 0.1  # share of wrong entries up to which leaving them out is the remedy
_IMAGE_KINDS = {  # kinds that concern an image, not its objects
    *("annotation_missing", "annotation_unreadable", "image_id_duplicate", "image_missing"),
    "path_outside",
}


@dataclass
class IssueLog:
    """The `Complain` of training: errors stop it, warnings are logged by kind.

    Errors stop training once a split is read; each kind of warning becomes one line.
    """

    _first: dict[str, Issue] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, issue: Issue) -> None:
        self._first.setdefault(issue.code, issue)
        self._counts[issue.code] += 1

    def has_kind(self, code: str) -> bool:
        """Returns True if there was an issue of this kind."""
        return code in self._counts

    def report(self, *read: RawSet | RawColumns | DetectionSet) -> tuple[str, ...]:
        """Logs the warnings and returns their lines; empty without issues.

        Args: read: the usable part of the split; errors count as few or many relative to its size.
        Raises: DataError: there was an error; the message is about the first one.
        """
        for kind, issue in self._first.items():
            if KINDS[kind].severity == "error":
                images, objects = map(sum, zip((0, 0), *map(_count_entries, read)))
                fix = issue.fix or _suggest_fix(
                    kind, self._counts[kind], images if kind in _IMAGE_KINDS else objects
                )
                remaining = 0 if issue.fix else self._counts[kind] - 1  # its fix concerns the set
                more = f" (and {remaining} more)" if remaining else ""
                raise DataError(f"{issue.what}{more}", code=kind, where=issue.where, fix=fix)
        lines = []
        for kind, issue in self._first.items():
            if KINDS[kind].severity == "warning":
                remaining = self._counts[kind] - 1
                suffix = f" (and {remaining} more: {KINDS[kind].meaning})" if remaining else ""
                lines.append(f"{issue.text}{suffix}")
                _LOGGER.warning(lines[-1])
        return tuple(lines)


def _count_entries(read: RawSet | RawColumns | DetectionSet) -> tuple[int, int]:
    """Counts images and objects."""
    if isinstance(read, RawSet):
        return len(read.images), sum(len(image.objects) for image in read.images)
    if isinstance(read, RawColumns):
        return len(read.paths), len(read.labels_O)
    return len(read.records), len(Records.of(read.records).labels_O)


def _suggest_fix(kind: str, wrong: int, good: int) -> str:
    """Suggests how to fix wrong entries: leave them out if they are few, else find the cause."""
    if KINDS[kind].fix == _NOT_FIXED:
        return ""
    if good and wrong <= max(2, _FEW_SHARE * good):
        return CLEAN_COPY
    if wrong + good == 1:
        return ""
    noun = "images" if kind in _IMAGE_KINDS else "objects"
    share = f"all {wrong}" if not good else f"{wrong} of {wrong + good}"
    return f"this affects {share} {noun}: check how they were written or exported"


def ignore_issue(issue: Issue) -> None:
    """Ignores an issue that was reported before or does not matter; a `Complain`."""


class Malformed(Exception):
    """An error in a part of a file; the reader reports an issue and leaves that part out."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.text)
        self.issue = issue


def abbreviate(names: Sequence[str], limit: int = 10) -> str:
    """Joins names as `a, b, ...`; if there are many, only the first ones."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def to_detection_set(
    raw: RawSet | RawColumns,
    bad_boxes: str,
    *,
    duplicates: str = "once",
    masks: bool = False,
    notes: tuple[str, ...] = (),
    all_images: bool = False,
) -> DetectionSet:
    """Converts annotations to the set that training uses: good boxes in float32.

    An image whose boxes are all dropped is left out: learning it as background would be wrong.

    Args:
        bad_boxes: see BoxPolicy.
        duplicates: `data.duplicate_boxes`.
        masks: keeps the outlines of objects, float32, unchanged even if a box was clipped.
        notes: lines about corrections made while reading the files, which precede those made here.
        all_images: keeps all images.
    Raises: DataError: a box is bad and the policy is `error`, or images have boxes but none is
        good.
    """
    columns = RawColumns.of(raw, masks=masks) if isinstance(raw, RawSet) else raw
    policy = BoxPolicy(bad_boxes, columns.source)
    count = len(columns.paths)
    # A stable sort, so that the objects of an image keep their order in the file.
    by_image_O = columns.image_O.argsort(kind="stable")
    repeats_N = np.zeros(count, np.int64)
    if duplicates == "once":
        first_O = find_first_equal(columns) == np.arange(len(by_image_O))
        by_image_O = by_image_O[first_O[by_image_O]]
        repeats_N = np.bincount(columns.image_O[~first_O], minlength=count)
    good = _select_objects(columns, policy, by_image_O)
    annotated_N = np.bincount(columns.image_O, minlength=count)
    counts_N = np.bincount(columns.image_O[good.numbers_O], minlength=count)
    lost_N = (annotated_N > 0) & (counts_N == 0) & columns.size_known_N
    lost = [] if all_images else [columns.paths[index] for index in np.flatnonzero(lost_N).tolist()]
    kept_N = ~lost_N if lost else np.ones(count, bool)
    paths = columns.paths if not lost else [p for p, keep in zip(columns.paths, kept_N) if keep]
    arrays = {
        **pack_paths(absolute_paths(paths)),
        "image_ids_N": columns.image_ids_N[kept_N],
        "sizes_N2": columns.sizes_N2[kept_N],
        "counts_N": counts_N[kept_N],
        "object_ends": cumulative_ends(counts_N[kept_N]),
        "boxes_O4": good.boxes_O4,
        "labels_O": columns.labels_O[good.numbers_O],
        "crowd_O": columns.crowd_O[good.numbers_O],
        "area_O": good.area_O,
    }
    if masks and columns.outlines is not None:
        outlines = [
            tuple(part_K2.astype(np.float32) for part_K2 in columns.outlines[number])
            for number in good.numbers_O.tolist()
        ]
        arrays |= pack_outlines(outlines) if outlines else {}
    if lost and len(lost) == count:
        raise DataError(
            f"no usable box in its {count} images: {policy.done}, first {lost[0]}",
            code="objects_missing",
            where=columns.source,
            fix="check how the boxes were written or exported",
        )
    notes += (_repeats_line(columns, repeats_N),) if repeats_N.any() else ()
    notes += policy.report()
    notes += (_lost_line(columns, lost, int((annotated_N == 0).sum())),) if lost else ()
    repeats_N = repeats_N[kept_N]
    repeated = np.flatnonzero(repeats_N)
    return DetectionSet(
        Records.of_arrays(arrays),
        columns.class_names,
        columns.category_ids,
        columns.source,
        notes,
        duplicates=dict(zip(repeated.tolist(), repeats_N[repeated].tolist())),
    )


def absolute_paths(paths: Iterable[str]) -> list[str]:
    """Makes paths absolute.

    Resolves each folder only once, as even a million images are in few folders.
    """
    absolute_folders: dict[str, str] = {}
    result = []
    for path in paths:
        folder, _, name = path.rpartition(os.sep)
        if not folder or name in ("", os.curdir, os.pardir):
            result.append(absolute(path))
        else:
            if folder not in absolute_folders:
                absolute_folders[folder] = os.path.join(absolute(folder), "")
            result.append(absolute_folders[folder] + name)
    return result


def _repeats_line(columns: RawColumns, repeats_N: np.ndarray) -> str:
    """Describes how many boxes repeat another one."""
    images = np.flatnonzero(repeats_N)
    return (
        f"{columns.source}: {repeats_N.sum()} duplicates among {len(columns.image_O)} boxes count "
        f"once (data.duplicate_boxes): same image, class and box, in {len(images)} images, first "
        f"{columns.paths[images[0]]}"
    )


def _lost_line(columns: RawColumns, lost: Sequence[str], background: int) -> str:
    """Describes which images have no good box."""
    return (
        f"{columns.source}: {len(lost)} of {len(columns.paths)} images are left out, because none "
        f"of their boxes can be used: {abbreviate(lost, 3)} ({background} images are annotated to "
        f"show no object, and stay as background)"
    )


class _UsableObjects(NamedTuple):
    """The objects of a split that training can use.

    numbers_O: object numbers, image after image; boxes_O4, area_O: float32.
    """

    numbers_O: np.ndarray
    boxes_O4: np.ndarray
    area_O: np.ndarray


_CHUNK = 1 << 18  # objects at a time: keeps temporary arrays small beside those of the set


def _select_objects(
    columns: RawColumns, policy: "BoxPolicy", by_image_O: np.ndarray
) -> _UsableObjects:
    """Selects the usable objects of a split, with corrected boxes.

    Args: by_image_O: the numbers of all objects, image after image.
    """
    parts = [_UsableObjects(by_image_O[:0], np.zeros((0, 4), np.float32), np.zeros(0, np.float32))]
    # An image of unknown size has no border; `data.bad_images` handles such images.
    sizes_N2 = np.where(columns.size_known_N[:, None], columns.sizes_N2, 2**31)
    for begin in range(0, len(by_image_O), _CHUNK):
        numbers_P = by_image_O[begin : begin + _CHUNK]
        sizes_P2 = sizes_N2[columns.image_O[numbers_P]]
        boxes_P4, used_P = policy.apply(
            columns.boxes_O4[numbers_P], sizes_P2, numbers_P, columns.where
        )
        numbers_P = numbers_P[used_P]
        area_P, sides_P2 = columns.area_O[numbers_P], boxes_P4[:, 2:] - boxes_P4[:, :2]
        # Without an annotated area the value is missing, 0, or was computed from swapped corners.
        known_P = (area_P > 0) & (area_P < math.inf)
        area_P = np.where(known_P, area_P, sides_P2[:, 0] * sides_P2[:, 1])
        parts.append(_UsableObjects(numbers_P, _float32(boxes_P4), _float32(area_P)))
    return _UsableObjects(*(np.concatenate(column) for column in zip(*parts)))


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite
        return values.astype(np.float32)


_BOX_TEXTS = {  # texts about a bad box: in an error, and in the summary of a split
    "box_not_finite": ("is not finite", "not finite"),
    "box_swapped": ("has its corners the wrong way round", "corners swapped"),
    "box_no_area": ("has no area", "without area"),
    "box_outside": ("lies outside the {}x{} image", "outside the image"),
    "box_sticking_out": ("sticks out of the {}x{} image", "sticking out"),
}


@dataclass
class BoxPolicy:
    """A policy for bad boxes, `data.bad_boxes`, applied to a split and reported once.

    `clip` puts swapped corners in order, clips boxes at the border and drops those without an area
    after that; `drop` drops every bad box; `error` stops at the first.  Boxes that stick out by
    less than a pixel are clipped silently.  See `box_problem` for what counts as bad.
    """

    policy: str
    source: str
    _boxes: int = 0
    _counts: Counter[str] = field(default_factory=Counter)

    def apply(
        self,
        boxes_P4: np.ndarray,
        sizes_P2: np.ndarray,
        numbers_P: np.ndarray,
        where: Callable[[int], str],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Applies the policy; returns the usable boxes and a mask that selects them.

        Args:
            boxes_P4: float64 x1 y1 x2 y2, pixels.
            sizes_P2: (height, width) of their images, pixels.
            numbers_P: object numbers.
            where: returns where an object is annotated, by its number, for error messages.
        Returns: boxes [U, 4] float64, inside their images; mask [P] bool.
        Raises: DataError: a box is bad and the policy is `error`.
        """
        self._boxes += len(boxes_P4)
        problem_P = box_problems(boxes_P4, sizes_P2)
        bad = np.flatnonzero(problem_P)
        if not len(bad):
            return clip_boxes(boxes_P4, sizes_P2), problem_P == 0
        if self.policy == "error":
            first = int(bad[0])
            x1, y1, x2, y2 = boxes_P4[first].tolist()
            height, width = sizes_P2[first].tolist()
            problem = _PROBLEMS[problem_P[first]]
            raise DataError(
                f"{describe_box((x1, y1, x2, y2))} {_BOX_TEXTS[problem][0].format(width, height)}",
                code=problem,
                where=where(int(numbers_P[first])),
                fix="fix the file, or set data.bad_boxes: clip",
            )
        if self.policy == "clip":
            boxes_P4 = boxes_P4.copy()
            swapped = bad[problem_P[bad] == _PROBLEMS.index("box_swapped")]
            self._count("put in order", "box_swapped", len(swapped))
            boxes_P4[swapped] = order_boxes(boxes_P4[swapped])
            problem_P[swapped] = box_problems(boxes_P4[swapped], sizes_P2[swapped])
            out_P = problem_P == _PROBLEMS.index("box_sticking_out")
            self._count("clipped", "box_sticking_out", int(out_P.sum()))
            problem_P[out_P] = 0
        for number, count in enumerate(np.bincount(problem_P).tolist()):
            if number:
                self._count("dropped", _PROBLEMS[number], count)
        used_P = problem_P == 0
        return clip_boxes(boxes_P4[used_P], sizes_P2[used_P]), used_P

    def _count(self, action: str, problem: str, boxes: int) -> None:
        if boxes:
            self._counts[f"{action} ({_BOX_TEXTS[problem][1]})"] += boxes

    @property
    def done(self) -> str:
        """Describes how many boxes were changed or dropped, and how."""
        done = ", ".join(f"{count} {action}" for action, count in sorted(self._counts.items()))
        return f"{done} of {self._boxes} boxes"

    def report(self) -> tuple[str, ...]:
        """Returns one line about the split; no line if every box could be used unchanged."""
        if not self._counts:
            return ()
        return (f"{self.source}: {self.done} (data.bad_boxes: {self.policy})",)


_ROUNDING = 1.0  # pixels by which a box may stick out unreported: formats round and count


def box_problem(box: Box, width: int, height: int) -> str | None:
    """Returns the kind (see KINDS) of the problem of a box, or None.

    A box may stick out by up to a pixel: formats round coordinates, and count them from 0 or 1.  A
    box has an area if it still has one as float32, the type that training uses.
    """
    if not all(map(math.isfinite, box)):
        return "box_not_finite"
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        return "box_swapped"
    if not _has_area(box):
        return "box_no_area"
    cut = clip_box(box, width, height)
    if not _has_area(cut):
        return "box_outside"
    if max(abs(before - after) for before, after in zip(box, cut)) > _ROUNDING:
        return "box_sticking_out"
    return None


_PROBLEMS = ("", *_BOX_TEXTS)  # 0: none; a box has the first problem that applies


def box_problems(boxes_P4: np.ndarray, sizes_P2: np.ndarray) -> np.ndarray:
    """Applies `box_problem` to many boxes: [P] int64, positions in _PROBLEMS.

    Args: see `BoxPolicy.apply`.
    """
    with np.errstate(invalid="ignore"):
        cut_P4 = clip_boxes(boxes_P4, sizes_P2)
        wrong_5P = (
            ~np.isfinite(boxes_P4).all(axis=1),
            (boxes_P4[:, 2:] < boxes_P4[:, :2]).any(axis=1),
            ~_have_area(boxes_P4),
            ~_have_area(cut_P4),
            (np.abs(boxes_P4 - cut_P4) > _ROUNDING).any(axis=1),
        )
    return np.select(wrong_5P, range(1, len(_PROBLEMS)), 0)


def _have_area(boxes_P4: np.ndarray) -> np.ndarray:
    boxes_P4 = _float32(boxes_P4)
    return np.all(boxes_P4[:, 2:] > boxes_P4[:, :2], axis=1)


def clip_boxes(boxes_P4: np.ndarray, sizes_P2: np.ndarray) -> np.ndarray:
    """Applies `clip_box` to many boxes.

    Args: see `BoxPolicy.apply`.
    """
    limit_P4 = sizes_P2[:, [1, 0, 1, 0]]
    # Gives exactly the results of min and max, even in the sign of 0.
    low_P4 = np.where(boxes_P4 < 0, 0.0, boxes_P4)
    return np.where(limit_P4 < low_P4, limit_P4, low_P4)


def order_boxes(boxes_P4: np.ndarray) -> np.ndarray:
    """Applies `order_box` to many boxes."""
    first_P2, last_P2 = boxes_P4[:, :2], boxes_P4[:, 2:]
    low_P2 = np.where(last_P2 < first_P2, last_P2, first_P2)
    return np.concatenate([low_P2, np.where(last_P2 > first_P2, last_P2, first_P2)], axis=1)


def describe_box(box: Box) -> str:
    """Formats a box for messages."""
    x1, y1, x2, y2 = box
    return f"box (x={x1:g}, y={y1:g}, w={x2 - x1:g}, h={y2 - y1:g})"


def _has_area(box: Box) -> bool:
    x1, y1, x2, y2 = array("f", box)
    return x2 > x1 and y2 > y1


def clip_box(box: Box, width: int, height: int) -> Box:
    """Returns the part of a box that is inside its image."""
    return (
        min(max(box[0], 0.0), width),
        min(max(box[1], 0.0), height),
        min(max(box[2], 0.0), width),
        min(max(box[3], 0.0), height),
    )


def order_box(box: Box) -> Box:
    """Returns the box with x1 <= x2 and y1 <= y2."""
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def parse_outlines(value: Any) -> tuple[np.ndarray, ...] | None:
    """Parses outlines from lists of numbers; None if the value is something else.

    Converts each list of [[x1, y1, x2, y2, x3, y3, ...], ...] to float64 [K, 2].  Parts of fewer
    than three points, which have no area, are left out if other parts have one.
    """
    if not isinstance(value, list):
        return None
    try:
        parts = [np.array(outline, np.float64) for outline in value if outline != []]
    except (ValueError, TypeError, OverflowError):
        return None
    if any(part.ndim != 1 or len(part) % 2 or not np.isfinite(part).all() for part in parts):
        return None
    outlines = tuple(part.reshape(-1, 2) for part in parts if len(part) >= 6)
    return outlines if outlines or not parts else None


def outline_extent(value: Any) -> Box | None:
    """Returns the box around outlines as files store them; None if absent or malformed."""
    outlines = parse_outlines(value)
    if not outlines:
        return None
    points_K2 = np.concatenate(outlines)
    (x1, y1), (x2, y2) = points_K2.min(0).tolist(), points_K2.max(0).tolist()
    return x1, y1, x2, y2


class Size(NamedTuple):
    """The size of an image in pixels.

    is_known: False: the size is unknown, given as 1x1.
    """

    width: int
    height: int
    is_known: bool


def resolve_size(
    path: Path,
    width: int | None,
    height: int | None,
    annotated: str,
    where: str,
    complain: Complain,
    opener: Opener = DISK,
) -> Size:
    """Returns the annotated size of an image, or else reports an issue and reads its file's size.

    Args:
        width, height: as annotated; None: missing, or not a number.
        annotated: the text of the annotated size, for the issue.
    """
    if width and height and 0 < width < 2**31 and 0 < height < 2**31:
        return Size(width, height, True)
    file_size = read_size(path, opener)
    if file_size.is_known:
        message = f"{annotated}: using the size of the image, {file_size.width}x{file_size.height}"
        complain(Issue("size_missing", message, str(path), where))
    return file_size


def read_size(path: Path, opener: Opener = DISK) -> Size:
    """Reads the size from the header of an image file.

    Returns: 1x1 with `is_known` False for a file that is missing or unreadable: the check of the
        whole split lists all missing files at once, and `data.bad_images` decides about unreadable
        ones.
    """
    size = image_size(path, opener)
    return Size(1, 1, False) if size is None else Size(*size, True)


LARGEST_AREA = 1e300  # JSON allows integers that no float can hold


def parse_area(value: Any) -> float | None:
    """Parses an area read from a file; None if it is not a finite number."""
    good = isinstance(value, int | float) and abs(value) < LARGEST_AREA
    return float(value) if good else None


def report_repeated_images(images: Sequence[RawImage], complain: Complain) -> None:
    """Reports an issue for every image that is listed more than once."""
    seen: set[Path] = set()
    for image in images:
        if image.path in seen:
            message = f"{image.path.name} is listed a second time"
            complain(Issue("image_listed_twice", message, str(image.path), image.where))
        seen.add(image.path)


def join_inside(folder: Path, name: str, where: str) -> Path:
    """Joins a folder and a name that must not lead out of it.

    Follows symbolic links in the folder: the user made those, while names come from a file.

    Raises: DataError: the name leads out of the folder, or is not a possible file name.
    """
    try:
        is_valid = "\0" not in name and bool(os.fsencode(name))
    except UnicodeEncodeError:  # half a surrogate pair, from a damaged JSON file
        is_valid = False
    if not is_valid:
        raise DataError(f"{name!r} cannot be a file name", code="bad_file_name", where=where)
    path = os.path.normpath(name if is_remote(name) else os.path.join(folder, name))
    # With a separator at the end, so that `images2` is not inside `images`.
    if not path.startswith(os.path.join(os.path.normpath(folder), "")):
        raise DataError(
            f"file name {name!r} leads out of {folder}", code="path_outside", where=where
        )
    return Path(path)


SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainval", "训练"), "train"),
    **dict.fromkeys(("val", "valid", "validate", "validation", "minival"), "val"),
    **dict.fromkeys(("eval", "evaluation", "dev", "验证"), "val"),
    **dict.fromkeys(("test", "testing", "测试"), "test"),
}


def guess_split(name: str) -> str:
    """Guesses the split from a name like `instances_train2017`; "" if the name indicates none."""
    words = re.findall("[a-z]+|训练|验证|测试", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")


def guess_split_of_path(path: str) -> str:
    """Guesses the split from the deepest folder of a path that indicates one; "": none."""
    deepest_first = reversed(Path(path).parent.parts)
    return next(filter(None, map(guess_split, deepest_first)), "")


def find_image(folder: Path, name: str, where: str, complain: Complain) -> Path | None:
    """Finds the image that an annotation file calls `name`.

    A name is relative to the folder, or an absolute path of an image.  If there is no such file,
    tries in turn:

    - the name in another encoding: names from an archive made on a Chinese Windows are GBK on disk,
      on a Western one Windows-1252; macOS separates letters and accents, and Windows separates
      folders by a backslash.
    - the name with percent-encoding added or removed, as by Label Studio.
    - the trailing part of the path, because tools write paths of their own machines and folders
      (`data/obj_train_data/a.jpg`, `..\\..\\upload\\a.jpg`).
    - the only file below the folder with the same file name.

    The last three report an issue.  An image of another split is never taken: a missing training
    image is not the validation image of the same name.

    Returns: the path found; the expected path if no such file exists; None, with an issue, if the
        name leads out of the folder or is not a possible file name.
    """
    path, outside = None, None
    try:
        path = join_inside(folder, name, where)
    except DataError as error:
        outside = Issue("path_outside", error.what, where=error.where)
        if error.code != "path_outside":
            complain(outside)
            return None
        if os.path.isabs(name) and is_image_name(os.path.basename(name)) and os.path.isfile(name):
            return Path(os.path.normpath(name))
    if path is not None and (is_remote(path) or file_exists(path)):
        return path
    forward = name.replace("\\", "/")
    # No issue for these: the name is right, and only its encoding or separators differ.
    for spelling in (*_other_spellings(name), *_other_spellings(forward)):
        candidate = Path(os.path.normpath(os.path.join(folder, spelling)))
        if candidate.is_relative_to(os.path.normpath(folder)) and file_exists(candidate):
            return candidate
    elsewhere = find_encoded(folder, forward) or _find_by_path_end(str(folder), forward)
    if elsewhere and not _is_other_split(os.path.relpath(elsewhere, folder), forward, where):
        expected = os.path.normpath(os.path.join(folder, forward))
        if elsewhere.casefold() != expected.casefold():  # differing only in case is expected
            message = f"{name}: not found; using {elsewhere}"
            complain(Issue("image_elsewhere", message, elsewhere, where))
        return Path(elsewhere)
    if outside is not None:
        complain(outside)
    return path


def _other_spellings(name: str) -> Iterator[str]:
    yield name
    if name.isascii():
        return
    for form in ("NFC", "NFD"):
        yield unicodedata.normalize(form, name)
    for encoding in ("gb18030", "cp1252"):
        try:
            yield os.fsdecode(name.encode(encoding))
        except UnicodeEncodeError:  # already the bytes on disk, or not in this encoding
            continue


def find_encoded(folder: str | os.PathLike[str], name: str) -> str:
    """Finds the file below a folder whose name differs in percent-encoding; "": none.

    Either the name of the file or `name` may be encoded.
    """
    for form in dict.fromkeys((name, unquote(name))):
        path = os.path.normpath(os.path.join(folder, form))
        if not _is_below(path, os.path.normpath(folder)):  # %2F is a slash
            continue
        if form != name and file_exists(path):
            return path
        place, last = os.path.split(path)
        if last in (encoded := _encoded_names(place)):
            return os.path.join(place, encoded[last])
    return ""


@lru_cache(maxsize=64)
def _encoded_names(folder: str) -> dict[str, str]:
    """Maps the decoded form of percent-encoded names in a folder to these names."""
    return {unquote(name): name for name in sorted(_list_names(folder)) if "%" in name}


def has_image(folder: str | os.PathLike[str], stem: str) -> bool:
    """Returns True if a folder has an image of exactly this name, with any suffix.

    A label file of this name belongs to that image, not to one that differs in percent-encoding.
    """
    suffixes = (form for suffix in IMAGE_SUFFIXES for form in (suffix, suffix.upper()))
    return any(file_exists(os.path.join(folder, f"{stem}{suffix}")) for suffix in suffixes)


def _find_by_path_end(folder: str, name: str) -> str:
    """Finds the file at the longest trailing part of a path that exists below a folder, or "".

    Tries the path unchanged, then percent-decoded; finally takes the only file with the same file
    name.
    """
    for form in dict.fromkeys((name, unquote(name))):
        parts = [part for part in form.split("/") if part not in ("", os.curdir, os.pardir)]
        # The whole path was tried before, and `_unique_files` handles the file name alone.
        for begin in range(1, len(parts) - 1):
            path = os.path.join(folder, *parts[begin:])
            if file_exists(path):
                return path
        if parts and (last := parts[-1].casefold()) in (only := _unique_files(folder)):
            return only[last]
    return ""


def _is_other_split(path: str, name: str, where: str) -> bool:
    """Returns True if a file's folders indicate another split than the requested one.

    The requested split is known from the name that was looked for and the list that contains it.
    """
    listing = Path(where)
    # An XML file has the name of its image, which says nothing about the split.
    is_list = listing.suffix.lower() in (".txt", ".json")
    requested = {guess_split_of_path(name), guess_split(listing.stem) if is_list else ""} - {""}
    return bool(requested) and guess_split_of_path(path) not in {*requested, ""}


def file_exists(path: str | os.PathLike[str]) -> bool:
    """Returns True if a file is in its folder; lists a folder only once until
    `forget_folder_listings`.
    """
    place, name = os.path.split(path)
    return name in _list_names(place or os.curdir) or is_in_shard(path)


@lru_cache(maxsize=1 << 16)
def _list_names(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except (OSError, ValueError):  # ValueError: NUL in a name; reading it will report the cause
        return frozenset()


@lru_cache(maxsize=4)
def _unique_files(folder: str) -> dict[str, str]:
    """Maps lower-case names to the only file with that name; "" if there are several."""
    exact: dict[str, str] = {}
    decoded: dict[str, str] = {}
    for file in files_below(folder):
        name = os.path.basename(file)
        for files, form in ((exact, name.casefold()), (decoded, unquote(name).casefold())):
            files[form] = "" if form in files else file
    return decoded | exact


def forget_folder_listings() -> None:
    """Forgets cached folder listings, since files may have changed."""
    _list_names.cache_clear()
    _encoded_names.cache_clear()
    _unique_files.cache_clear()


def files_below(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the absolute paths of all files below a folder, in the order of their names.

    Leaves out hidden files and folders, and those that macOS adds to archives (`__MACOSX`).
    Follows links but never in circles: a linked folder counts once, and only if it is neither
    inside `folder`, where it is found by its own name, nor above it.
    """
    for place, files in _folders_below(folder):
        for file in files:
            yield f"{place}{os.sep}{file}"


def folders_below(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the absolute paths of the folders that `files_below` searches, `folder` included."""
    return [place for place, _ in _folders_below(folder)]


def _folders_below(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the folders below a folder, each with the names of its files."""
    start, top = os.path.abspath(folder), os.path.realpath(folder)
    seen: set[str] = set()
    for place, below, files in os.walk(start, followlinks=True):
        real = os.path.realpath(place)
        expected = os.path.join(top, os.path.relpath(place, start))
        # Links may lead in circles, or to a folder that is found by its own name.
        if real in seen or _is_below(top, real) or (_is_below(real, top) and real != expected):
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not is_ignored(name))
        yield place, [file for file in sorted(files) if not is_ignored(file)]


def is_ignored(name: str) -> bool:
    """Returns True if the name of a file or folder shows that it is not data."""
    return name.startswith(".") or name == "__MACOSX"


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, "")) and path != folder


# Windows-1252: the letters of Western European names, and all other printable characters.  Text has
# neither control characters nor \u00ff, which is half of the byte order mark of UTF-16.
_ACCENTED = re.compile(
    "[\\s!-~\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00fe\u0152\u0153\u0160\u0161\u0178\u017d\u017e]*"
)
_PRINTED = re.compile("[\\s!-~\u00a1-\u00fe\u0152-\u2122]*")


def _decodes(content: bytes, encoding: str, allowed: re.Pattern[str] | None = None) -> bool:
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return allowed is None or allowed.fullmatch(text) is not None


# Tried in this order.  Nearly all bytes are valid Windows-1252, and an accent before a letter is
# valid GBK; but common Chinese characters are GB2312, which a single accent between letters is not.
_GUESSES: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("gb18030", lambda content: _decodes(content, "gb2312")),
    ("cp1252", lambda content: _decodes(content, "cp1252", _ACCENTED)),
    ("gb18030", lambda content: _decodes(content, "gb18030")),
    ("cp1252", lambda content: _decodes(content, "cp1252", _PRINTED)),
)
_ENCODING_NAMES = {"gb18030": "GBK", "cp1252": "Windows-1252"}


def guess_encoding(content: bytes) -> str | None:
    """Guesses the encoding of text that is not UTF-8; None if no encoding fits."""
    return next((encoding for encoding, fits in _GUESSES if fits(content)), None)


def find_unsupported(path: str | Path) -> str:
    """Finds a file with the name of a missing image but an unsupported suffix; "": none."""
    base = os.path.splitext(path)[0]
    files = (base + spelling for suffix in UNREAD_SUFFIXES for spelling in (suffix, suffix.upper()))
    return next(filter(os.path.isfile, files), "")


MOST_TEXT = 1 << 34  # 16 GiB; the JSON file of two million images has six
_PIECE = 1 << 18  # bytes that are decoded at a time
_XML_ENCODING = re.compile(rb"""<\?xml[^>]{1,60}encoding=["']([\w.-]{1,20})["']""")


def read_text(path: Path, complain: Complain | None = None) -> str:
    """Reads an annotation file, as UTF-8 or in another encoding.

    An encoding other than UTF-8 is declared in the file or guessed, and reported as an issue.
    UTF-8 may begin with a byte order mark.

    Args: complain: receives `encoding` and `line_ends` issues; without it only UTF-8 is accepted.
    Raises: DataError: the file is missing, unreadable, or in an encoding that is not accepted.
    """
    content = _read_content(path, complain)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if complain is None:
            raise DataError(f"not UTF-8 text: {error}", code="not_utf8", where=str(path)) from error
        return _decode_guessed(path, content, complain, error)


def read_utf8(path: Path, complain: Complain) -> bytes:
    """Reads an annotation file as `read_text` does, but returns UTF-8 bytes.

    Holds only one copy of a UTF-8 file, which may be large, in memory.
    """
    content = _read_content(path, complain)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for begin in range(0, len(content), _PIECE):
            decoder.decode(content[begin : begin + _PIECE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return _decode_guessed(path, content, complain, error).encode()
    return content.removeprefix(codecs.BOM_UTF8)


def _read_content(path: Path, complain: Complain | None) -> bytes:
    try:
        content = read_file(path, MOST_TEXT)
    except OSError as error:
        raise DataError(
            error.strerror or str(error), code="file_unreadable", where=str(path)
        ) from error
    # A search for two bytes takes twenty times as long as one for a single byte.
    if complain is not None and b"\r" in content and b"\r\n" in content:
        complain(Issue("line_ends", "lines end as on Windows", where=str(path)))
    return content


def _decode_guessed(
    path: Path, content: bytes, complain: Complain, problem: UnicodeDecodeError
) -> str:
    """Decodes text that is not UTF-8.  Raises: DataError: no encoding fits."""
    declared = _XML_ENCODING.match(content)
    if declared:
        encoding = declared[1].decode()
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            text = content.decode(encoding)
            message = f"not UTF-8 text: read as {encoding}, as it declares"
            complain(Issue("encoding", message, where=str(path)))
            return text
    guessed = guess_encoding(content)
    if guessed is not None:
        message = f"not UTF-8 text: read as {_ENCODING_NAMES[guessed]}, a guess"
        complain(Issue("encoding", message, where=str(path)))
        return content.decode(guessed)
    raise DataError(
        f"neither UTF-8 nor GBK nor Windows-1252 text: {problem}",
        code="not_utf8",
        where=str(path),
        fix="save it as UTF-8",
    )


def read_text_of_image(path: Path, complain: Complain) -> str:
    """Reads a file that annotates one image as `read_text` does.

    Raises: Malformed: it cannot be read.
    """
    try:
        return read_text(path, complain)
    except DataError as error:
        message = f"{error.what}; {error.fix}" if error.fix else error.what
        raise Malformed(Issue("annotation_unreadable", message, where=error.where)) from error


def read_lines(path: Path, complain: Complain | None = None) -> list[str]:
    """Reads the non-empty lines of a file, without surrounding whitespace."""
    text = read_text(path, complain)
    return [line.strip() for line in text.splitlines() if line.strip()]


def write_text(path: Path, text: str) -> None:
    """Writes a new UTF-8 file, and the folders above it.

    A lone surrogate, which UTF-8 cannot represent, becomes \\udNNN, which is the same in JSON.

    Raises: UserError: the file cannot be written, or exists already.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": the user's files are never overwritten.
        with open(path, "x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)


_NAME_FILES = ("label_list.txt", "classes.txt", "labels.txt", "_darknet.labels")
_NUMBERED = re.compile(r"(\d+)[\s:,=]+(.+)")


def is_class_list(name: str) -> bool:
    """Returns True if a file is named like a list of classes: `classes.txt`, `obj.names`."""
    return name.lower() in _NAME_FILES or name.lower().endswith(".names")


def read_class_lists(folder: Path, complain: Complain | None = None) -> dict[Path, tuple[str, ...]]:
    """Reads the lists of classes in a folder: file -> class names.

    A line of a list is a name, or `number name`.

    Raises: DataError: a list is not text, or the lists differ.
    """
    names_by_file = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_class_list(file.name) and not file.name.startswith(".") and file.is_file():
            lines = read_lines(file, complain)
            numbered = [_NUMBERED.fullmatch(line) for line in lines]
            numbers = [int(match[1]) for match in numbered if match]
            if numbers == [*range(len(lines))]:
                lines = [match[2] for match in numbered if match]
            # Other tools use such names for lists of images.
            if lines and not any(is_image_name(word) for line in lines for word in line.split()):
                names_by_file[file] = _require_distinct(tuple(lines), str(file))
    return _require_equal(names_by_file)


def _require_equal(names_by_file: dict[Path, tuple[str, ...]]) -> dict[Path, tuple[str, ...]]:
    """Returns the class names of files after checking that all files have the same ones.

    Raises: DataError: files name the classes differently.
    """
    if len(set(names_by_file.values())) > 1:
        details = "; ".join(
            f"{file.name}: {abbreviate(names, 5)}" for file, names in names_by_file.items()
        )
        raise DataError(
            f"give different class names ({details})",
            code="class_names_ambiguous",
            where=", ".join(map(str, names_by_file)),
            fix="remove the wrong file, or set data.class_names",
        )
    return names_by_file


def find_class_names(
    root: Path, configured: tuple[str, ...], complain: Complain | None = None
) -> tuple[str, ...]:
    """Finds the class names, in the order of their numbers; () if there are none.

    They come from data.class_names, or else from the lists in root (see `read_class_lists`) and the
    `names` of YAML files there (the data file of ultralytics).

    Raises: DataError: a name is listed twice, a file is malformed, or files differ.
    """
    if configured:
        return _require_distinct(configured, "data.class_names")
    names_by_file = read_class_lists(root, complain)
    for file in sorted(root.glob("*.y*ml")):
        if names := _yaml_names(file, complain):
            names_by_file[file] = _require_distinct(names, str(file))
    return next(iter(_require_equal(names_by_file).values()), ())


def read_class_names(file: Path) -> tuple[str, ...]:
    """Reads class names from a file with one per line.

    Raises: DataError: the file is missing or not UTF-8 text, or a name is listed twice.
    """
    return _require_distinct(tuple(read_lines(file)), str(file))


def report_similar_names(names: Sequence[str], source: str, complain: Complain) -> None:
    """Reports issues for class names that probably mean the same class."""
    first_of: dict[str, str] = {}
    for name in names:
        key = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        first = first_of.setdefault(key, name)
        if first != name:
            message = f"classes {first!r} and {name!r} differ only in case or spaces"
            complain(Issue("class_names_alike", message, where=source))


def _require_distinct(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"class {twice[0]!r} is listed twice", code="class_name_duplicate", where=source
        )
    return names


_MOST_YAML_BYTES = 1 << 24  # of a file with class names; reading takes 2 s for 1 MB
_MOST_YAML_NODES = 200_000


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader that rejects aliases: ten lines of them can expand beyond any memory."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Counted while nodes are created, before they fill the memory.
        self.composed += 1
        if self.composed > _MOST_YAML_NODES:
            raise yaml.YAMLError("too many nodes")
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _read_data_yaml(file: Path, complain: Complain | None) -> dict[Any, Any]:
    """Reads a YAML data file; {} for other files."""
    if not file.is_file() or file.stat().st_size > _MOST_YAML_BYTES:
        return {}
    try:
        content = yaml.load(read_text(file, complain), Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        return {}
    return content if isinstance(content, dict) else {}


def read_keypoint_shape(root: Path) -> tuple[int, int] | None:
    """Reads `kpt_shape` from the data files in root: number of points, numbers per point."""
    for file in sorted(root.glob("*.y*ml")):
        match _read_data_yaml(file, ignore_issue).get("kpt_shape"):
            case [int(points), int(numbers)]:
                return points, numbers
    return None


def _yaml_names(file: Path, complain: Complain | None) -> tuple[str, ...]:
    content = _read_data_yaml(file, complain)
    names = content.get("names")
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise DataError(
                f"expected the numbers 0 to {len(names) - 1} as keys",
                code="bad_class_numbers",
                where=f"{file}: names",
            )
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or any(isinstance(name, list | dict) for name in names):
        return ()
    count = content.get("nc", len(names))
    if complain is not None and count != len(names):
        message = f"nc is {count!r:.20}, but names has {len(names)}: the names count"
        complain(Issue("class_count_differs", message, where=str(file)))
    return tuple(map(str, names))

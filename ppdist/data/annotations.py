"""What the readers of all formats share: safe file names, good boxes, one record."""

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ppdist.data.sample import ImageRecord
from ppdist.errors import DataError

_LOGGER = logging.getLogger("ppdist.data")
_ROUNDING = 1.0  # pixels by which a box may stick out without a word: formats round and count
Box = tuple[float, float, float, float]


class BoxPolicy:
    """Applies `data.bad_boxes` to every box of a file and says once what it did.

    A box is bad when it has no area, is not finite, or sticks out of its image by more than a
    pixel (less is cut off silently).  `clip` cuts at the border and drops what has no area then;
    `drop` drops every bad box; `error` stops at the first.
    """

    def __init__(self, policy: str, source: Path) -> None:
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
        x1, y1, x2, y2 = box
        cut = (
            min(max(x1, 0.0), width),
            min(max(y1, 0.0), height),
            min(max(x2, 0.0), width),
            min(max(y2, 0.0), height),
        )
        if not all(map(math.isfinite, box)):
            problem, kind = "is not finite", "not finite"
        elif x2 <= x1 or y2 <= y1:
            problem, kind = "has no area", "without area"
        elif cut[2] <= cut[0] or cut[3] <= cut[1]:
            problem, kind = f"lies outside the {width}x{height} image", "outside the image"
        elif max(abs(given - kept) for given, kept in zip(box, cut)) > _ROUNDING:
            problem, kind = f"sticks out of the {width}x{height} image", "sticking out"
        else:
            return cut
        if self._policy == "error":
            raise DataError(
                f"{where}: box (x={x1:g}, y={y1:g}, w={x2 - x1:g}, h={y2 - y1:g}) {problem}; "
                f"fix the file, or set data.bad_boxes: clip"
            )
        clip = self._policy == "clip" and kind == "sticking out"
        self._counts[f"{'clipped' if clip else 'dropped'} ({kind})"] += 1
        return cut if clip else None

    def report(self) -> tuple[str, ...]:
        """Logs one line for the whole file and returns it; nothing where all boxes were good."""
        if not self._counts:
            return ()
        done = ", ".join(f"{count} {what}" for what, count in sorted(self._counts.items()))
        line = f"{self._source}: {done} of {self._boxes} boxes (data.bad_boxes: {self._policy})"
        _LOGGER.warning(line)
        return (line,)


def inside_folder(folder: Path, name: str, where: str) -> Path:
    """folder / name.

    Symbolic links in the folder are followed: they are the user's, the names are the file's.

    Raises: DataError: the name leads out of the folder.
    """
    path = os.path.normpath(os.path.join(folder, name))
    if not path.startswith(os.path.join(os.path.normpath(folder), "")):
        raise DataError(f"{where}: file name {name!r} leads out of {folder}")
    return Path(path)


def read_text(path: Path) -> str:
    """The text of an annotation file.  Raises: DataError: absent, unreadable, or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error


def record(
    path: Path,
    image_id: int,
    size: tuple[int, int],
    boxes: Sequence[Box],
    labels: Sequence[int],
    crowd: Sequence[bool] | None = None,
    area: Sequence[float] | None = None,
) -> ImageRecord:
    """An ImageRecord from lists; size is (width, height); area defaults to that of the boxes."""
    boxes_M4 = np.array(boxes, np.float32).reshape(-1, 4)
    sides_M2 = boxes_M4[:, 2:] - boxes_M4[:, :2]
    return ImageRecord(
        path=os.path.abspath(path),
        image_id=image_id,
        width=size[0],
        height=size[1],
        boxes_M4=boxes_M4,
        labels_M=np.array(labels, np.int64),
        crowd_M=np.array(crowd if crowd is not None else [False] * len(labels), bool),
        area_M=np.array(area if area is not None else sides_M2.prod(1), np.float32),
    )

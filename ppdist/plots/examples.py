"""The worst and the best images of an evaluation, each with its verdict."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ppdist.data.images import read_image
from ppdist.drawing import Colour, caption, grid, outline
from ppdist.errors import DataError
from ppdist.lettering import readable

_MOST = 12  # images
_ACROSS = 4
_WIDTH = 474  # pixels of one, so that four with their gaps are as wide as a screen
_MOST_HEIGHT = 2 * _WIDTH
# Okabe & Ito 2008, as in drawing.py: bluish green, vermilion, sky blue.
_FOUND, _MISSED, _WRONG = (0, 158, 115), (213, 94, 0), (86, 180, 233)


def mosaic(
    entries: Sequence[Mapping[str, Any]], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    """Images in rows, below each what was found; uint8 RGB.  None: none of them can be read.

    Found objects are outlined in green, missed ones in vermilion, wrong detections in blue.

    Args:
        entries: `worst` or `best` of evaluation.json.
        folders: where the files are; what lies elsewhere is not shown, because who made the file
            that names it may be a stranger.
    """
    tiles = [_tile(entry, class_names, folders) for entry in entries[:_MOST]]
    shown = [tile for tile in tiles if tile is not None]
    if not shown:
        return None
    picture = grid(shown, across=min(_ACROSS, len(shown)))
    return caption(picture, "green: found; red: missed; blue: wrong, with its score")


def _tile(
    entry: Mapping[str, Any], class_names: Sequence[str], folders: Sequence[Path]
) -> np.ndarray | None:
    image_HW3 = _read(str(entry["file"]), folders)
    if image_HW3 is None:
        return None
    height, width = image_HW3.shape[:2]
    scale = min(_WIDTH / width, _MOST_HEIGHT / height)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    image_HW3 = cv2.resize(
        image_HW3, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    _verdicts(image_HW3, entry, class_names, scale)
    beside = (0, 0, 0, max(0, _WIDTH - size[0]))  # of a narrow one, so that there is room to write
    image_HW3 = cv2.copyMakeBorder(image_HW3, *beside, cv2.BORDER_CONSTANT, value=(255, 255, 255))
    counts = (f"{what} {entry[what]}" for what in ("objects", "found", "missed", "wrong"))
    named = caption(image_HW3, ", ".join(counts))
    return caption(named, readable(Path(str(entry["file"])).name, 0))


def _verdicts(
    image_HW3: np.ndarray, entry: Mapping[str, Any], class_names: Sequence[str], scale: float
) -> None:
    """Outlines what an entry lists: `true` and `predicted`, see ppdist.metrics.analysis."""

    def draw(box_4: Sequence[float], colour: Colour, label: int, score: float | None) -> None:
        name = readable(str(class_names[label]), label)
        text = name if score is None else f"{name} {score:.2f}"
        outline(image_HW3, scale * np.array(box_4, np.float64), text, colour)

    for label, *box_4, found in entry.get("true") or ():
        draw(box_4, _FOUND if found else _MISSED, label, None)
    for label, score, *box_4, kind in entry.get("predicted") or ():
        if kind != "correct":
            draw(box_4, _WRONG, label, score)


def _read(file: str, folders: Sequence[Path]) -> np.ndarray | None:
    """The first that can be read and lies in one of the folders; links in them are followed."""
    allowed = [Path(os.path.abspath(folder)) for folder in folders]
    for folder in (Path(), *folders):
        path = Path(os.path.abspath(folder / file))  # without `..`
        try:
            if any(path.is_relative_to(each) for each in allowed):
                return read_image(path)
        except (DataError, OSError, ValueError):  # a name with a zero in it is a ValueError
            continue
    return None

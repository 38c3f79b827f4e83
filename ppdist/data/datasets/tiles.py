"""Large images cut into overlapping square tiles, with their labels.

    RawSet -> slice_set -> RawSet of tiles -> convert.convert -> files

A tile is cut when its file is read, through the opener of the set; so the writers of `data convert`
can be used, and memory holds only one large image.
"""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import cv2
import numpy as np

from ppdist.common.opener import DISK, Opener
from ppdist.data.datasets.convert import match_file_sizes
from ppdist.data.image import read_image
from ppdist.data.types import RawImage, RawObject, RawSet, keyed_generator
from ppdist.runtime.decoder import FORMATS, format_of

_QUALITY = 95  # of JPEG


class Place(NamedTuple):
    """The position of a tile in its image, in pixels."""

    source: Path
    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True)
class TileOpener(Opener):
    """An opener of tiles that do not exist as files; it keeps the last image."""

    places: dict[str, Place]
    of_images: Opener = DISK
    last: dict[Path, np.ndarray] = field(default_factory=dict)

    def open(self, path: str | Path) -> BinaryIO:
        """Cuts a tile and opens it as an image file."""
        place = self.places[str(path)]
        if place.source not in self.last:
            self.last.clear()
            self.last[place.source] = read_image(place.source, opener=self.of_images)
        tile_HW3 = self.last[place.source][place.top : place.bottom, place.left : place.right]
        options = [cv2.IMWRITE_JPEG_QUALITY, _QUALITY] if _is_jpeg(place.source) else []
        bgr_HW3 = cv2.cvtColor(tile_HW3, cv2.COLOR_RGB2BGR)
        return io.BytesIO(cv2.imencode(Path(path).suffix, bgr_HW3, options)[1].tobytes())

    def read(self, path: str | Path, most_bytes: int) -> bytes:
        """Returns the bytes of a tile's image file."""
        return self.open(path).read()


def slice_set(
    raw: RawSet, size: int, overlap: float, *, visible: float, empty: float, seed: int
) -> tuple[RawSet, list[str]]:
    """Cuts the images of a split into tiles, with the objects that are visible in each.

    The last tile of a row or column is moved inside; an image no larger than a tile becomes a
    single tile.  Boxes are cut at the edges.

    Args:
        size: side of a tile, pixels.
        overlap: overlap of neighbours, as a fraction of their side, from 0 to below 1.
        visible: an object is left out of a tile if less than this fraction of its area is visible
            there; a tile that has only such objects is left out, as it is not background.
        empty: fraction of the tiles without any object that is kept, chosen at random.
        seed: seed of that choice.
    Returns: the tiles, and a line for each kind of loss.
    """
    lines: list[str] = []
    raw = match_file_sizes(raw, lines)
    images: list[RawImage] = []
    places: dict[str, Place] = {}
    lost: Counter[str] = Counter()
    for number, image in enumerate(raw.images):
        if not image.size_known:
            lost["images: of unknown size, left out"] += 1
            continue
        random = keyed_generator(seed, number)
        for left, top in slice_corners(image.height, image.width, size, overlap):
            right, bottom = min(left + size, image.width), min(top + size, image.height)
            place = Place(image.path, left, top, right, bottom)
            objects, is_background = _cut_objects(image.objects, place, visible)
            keeps_empty = random.random() < empty
            if not objects and not (is_background and keeps_empty):
                kind = "without an object" if is_background else "with slivers of objects alone"
                lost[f"tiles: {kind}, left out"] += 1
                continue
            path = _tile_path(place, places)
            places[str(path)] = place
            images.append(
                RawImage(path, len(images) + 1, right - left, bottom - top, objects, image.where)
            )
    if any(an_object.polygons for image in raw.images for an_object in image.objects):
        lines.append("outlines: left out, boxes stay")
    lines += [f"{count} {kind}" for kind, count in lost.items()]
    return replace(raw, images=images, opener=TileOpener(places, raw.opener)), lines


def slice_corners(height: int, width: int, size: int, overlap: float) -> list[tuple[int, int]]:
    """Lists the left and top of the slices; the last ones are moved inside."""
    step = max(1, round(size * (1 - overlap)))

    def starts(side: int) -> list[int]:
        last = max(0, side - size)
        return [*range(0, last, step), last]

    return [(left, top) for top in starts(height) for left in starts(width)]


def _cut_objects(
    objects: Sequence[RawObject], place: Place, visible: float
) -> tuple[list[RawObject], bool]:
    """Returns the objects that are visible in a tile, in its pixels, and whether it shows none at
    all, not even a sliver.
    """
    seen: list[RawObject] = []
    is_background = True
    for an_object in objects:
        x1, y1, x2, y2 = an_object.box
        left, right = max(x1, place.left), min(x2, place.right)
        top, bottom = max(y1, place.top), min(y2, place.bottom)
        if not math.isfinite(x1 + y1 + x2 + y2) or right <= left or bottom <= top:
            continue
        is_background = False
        if (right - left) * (bottom - top) >= visible * (x2 - x1) * (y2 - y1):
            left, right = float(left - place.left), float(right - place.left)
            box = (left, float(top - place.top), right, float(bottom - place.top))
            cut = replace(an_object, box=box, area=None, polygons=(), extra={})
            seen.append(cut)
    return seen, is_background


def _tile_path(place: Place, places: Mapping[str, Place]) -> Path:
    """Returns the path of a tile, beside its image: NAME_LEFT_TOP.jpg or .png.

    NAME has the suffix of the image if another image's tile is called so, as of a.bmp and a.png.
    """
    suffix = format_of(place.source.suffix) if _is_jpeg(place.source) else ".png"
    name = place.source.stem
    while True:
        path = place.source.with_name(f"{name}_{place.left}_{place.top}{suffix}")
        if places.get(str(path), place) == place:  # an image may be listed twice
            return path
        name = place.source.name if name == place.source.stem else f"{name}_"


def _is_jpeg(path: Path) -> bool:
    return path.suffix.lower() in FORMATS["JPEG"]

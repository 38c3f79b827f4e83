"""What annotation files say, before anything is put right.

    file -> reader(complain) -> RawSet -> (data.bad_boxes) -> DetectionSet, for training
                                       -> a file of another format, for conversion
                                       -> a report, for a check

A reader hands everything odd to `complain` as a Finding.  Training lets that raise, so it stops at
the first; a check collects them all, and the reader goes on without the part it complained of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong, or worth knowing.

    code: a key of `ppdist.data.check.findings.KINDS`, and that of the error where training stops;
    what: a sentence for the user; image: path of the image it is about, "" where there is none;
    where: file, line or annotation.
    """

    code: str
    what: str
    image: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        """`where: what`."""
        return f"{self.where}: {self.what}" if self.where else self.what


Complain = Callable[[Finding], None]


@dataclass(slots=True)
class RawObject:
    """One annotated object.

    box: x1 y1 x2 y2, pixels of the upright original, float64 as the file has them: not clipped, not
    ordered, perhaps not finite.  label in [0, C).  where: file, line or number, for messages.
    area: square pixels as the file has it.  polygons: each float64 [K, 2], x y, same pixels.
    extra: what else the file says of it, for a lossless conversion.
    """

    box: Box
    label: int
    where: str
    crowd: bool = False
    area: float | None = None
    polygons: tuple[np.ndarray, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RawImage:
    """One listed image; the size in pixels is what its annotation says (YOLO: what its file is).

    size_known: False where a YOLO image is absent or unreadable: 1x1 stands for its size.
    """

    path: Path
    image_id: int
    width: int
    height: int
    objects: list[RawObject]
    where: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    size_known: bool = True


@dataclass(slots=True)
class RawSet:
    """A split as its files say it; category_ids and source as in DetectionSet.

    extra, class_extras: what else the file says of the whole set and of each class (none: empty).
    """

    images: list[RawImage]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    class_extras: tuple[Mapping[str, Any], ...] = ()

"""The detections of one image, for Python and for files.

detections = detector("bus.jpg")
str(detections)                                    "4 person, 1 bus"
detections.boxes_xyxy, .scores, .class_ids, .names
detections.show(), .plot(), .save("out.jpg")       with its boxes drawn; a notebook shows them
len(detections), detections[0], detections[:3]     its objects, best first
detections.summary(), .to_df()                     as a table
detections.to_json(), .to_coco(), .to_yolo(), .to_voc()   as the formats have them
detections.to_supervision()                        as other libraries take them
"""

import io
import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import cv2
import numpy as np
from PIL import Image, ImageShow

from ppdist.common.errors import ConfigError, DataError
from ppdist.common.files import make_parent, replace_file, writing
from ppdist.config.migration import refuse_name
from ppdist.runtime.decoder import format_of
from ppdist.viz.draw import PALETTE, draw_boxes, draw_labelled, readable

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # variables that a desktop sets


class Detection(NamedTuple):
    """A detected object.

    box_xyxy: in pixels of the image.  score: 0..1.  name: name of its class.  track_id: id of the
    object in all frames of a video; None if it is not tracked.
    """

    box_xyxy: tuple[float, float, float, float]
    score: float
    class_id: int
    name: str
    track_id: int | None = None


def _explain_object(detection: Detection, name: str) -> Any:
    """Says what to write if an object is asked for an attribute of the image's results."""
    refuse_name("Detections", name)
    raise AttributeError(f"'Detection' object has no attribute {name!r}")


Detection.__getattr__ = _explain_object  # type: ignore[attr-defined]  # no field, so not in its body


@dataclass(frozen=True, eq=False, repr=False)
class Detections:
    """The detections of one image, best first.

    `len(detections)` counts them.  `detections[0]`, and each that a loop gives, has `box_xyxy`,
    `score`, `class_id`, `name` and `track_id`.  A slice or a mask gives Detections:
    `detections[detections.scores > 0.5]`.  `print` shows "4 person, 1 bus".

    Attributes:
        boxes_xyxy: float32 [N, 4], left, top, right, bottom in pixels of the image, inside it.
        scores: float32 [N], 0..1.
        class_ids: int64 [N], from 0.
        names: of class 0, 1, ...: `names[class_ids[i]]`.
        image: uint8 RGB [H, W, 3], upright.
        source: the file, address or position that the image came from; "" where unknown.
        category_ids: COCO category ids of class 0, 1, ...
        frame: frame number in a video, from 0; None for an image.
        track_ids: int64 [N], -1: not tracked yet; None: no tracking.
    """

    boxes_xyxy: np.ndarray
    scores: np.ndarray
    class_ids: np.ndarray
    names: tuple[str, ...]
    image: np.ndarray
    source: str = ""
    category_ids: tuple[int, ...] = field(default=())
    frame: int | None = None
    track_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Detection]:
        ids = [-1] * len(self) if self.track_ids is None else self.track_ids.tolist()
        tracks = (None if track < 0 else track for track in ids)
        rows = zip(self.boxes_xyxy.tolist(), self.scores.tolist(), self.class_ids.tolist(), tracks)
        for (x1, y1, x2, y2), score, label, track in rows:
            yield Detection((x1, y1, x2, y2), score, label, self.names[label], track)

    @overload
    def __getitem__(self, index: int) -> Detection: ...

    @overload
    def __getitem__(self, index: slice | np.ndarray) -> "Detections": ...

    def __getitem__(self, index: Any) -> Any:
        """Returns an object by its index, best first; for a slice or a mask [N], Detections."""
        if isinstance(index, int | np.integer):
            return list(self)[index]
        tracks = None if self.track_ids is None else self.track_ids[index]
        return replace(
            self,
            boxes_xyxy=self.boxes_xyxy[index],
            scores=self.scores[index],
            class_ids=self.class_ids[index],
            track_ids=tracks,
        )

    if not TYPE_CHECKING:  # a type checker says itself that there is no such name

        def __getattr__(self, name: str) -> Any:
            refuse_name("Detections", name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __str__(self) -> str:
        """Returns a summary such as "4 person, 1 bus"; the most common class first."""
        return summarize_names(self.names[label] for label in self.class_ids.tolist())

    def __repr__(self) -> str:
        source_text = f" {self.source}" if self.source else ""
        frame_text = "" if self.frame is None else f" frame {self.frame}"
        return f"<Detections{source_text}{frame_text}: {self}>"

    def plot(self) -> np.ndarray:
        """Returns the image with its boxes drawn, uint8 RGB; a small one is enlarged."""
        if self.track_ids is not None:
            return draw_tracks(self)
        return draw_boxes(self.image, self.boxes_xyxy, self.class_ids, self.names, self.scores)

    def save(self, path: str | Path) -> Path:
        """Writes `plot()` to a file in the format of its suffix.

        Raises: DataError: OpenCV writes no such format; UserError: it cannot be written.
        """
        path = Path(path)
        write_picture(path, self.plot())
        return path

    def show(self) -> None:
        """Shows `plot()` below a notebook's cell, or in the desktop's viewer.

        If there is neither, it is written to a file, whose name is printed.
        """
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)
            return
        picture = Image.fromarray(self.plot())
        if _has_desktop() and ImageShow.show(picture):
            return
        with tempfile.NamedTemporaryFile(prefix="ppdist-", suffix=".png", delete=False) as file:
            picture.save(file, "PNG")
        print(f"{self}: {file.name}")

    def _repr_png_(self) -> bytes:
        """Returns the PNG that a notebook shows."""
        content = io.BytesIO()
        Image.fromarray(self.plot()).save(content, "PNG")
        return content.getvalue()

    def summary(self) -> list[dict[str, Any]]:
        """Returns a dictionary for each object, best first: `name`, `class_id`, `score`, `box_xyxy`
        in pixels, and `track_id` where it is followed; numbers are Python's, ready for JSON.
        """
        return [
            {
                "name": detection.name,
                "class_id": detection.class_id,
                "score": short_score(detection.score),
                "box_xyxy": [round(value, 2) for value in detection.box_xyxy],
                **({} if detection.track_id is None else {"track_id": detection.track_id}),
            }
            for detection in self
        ]

    def to_json(self) -> str:
        """Returns JSON: `source`, `width`, `height` and `objects`, those of `summary()`."""
        height, width = self.image.shape[:2]
        objects = self.summary()
        content = {"source": self.source, "width": width, "height": height, "objects": objects}
        return json.dumps(content)

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Returns COCO results: `category_id`, `bbox` [left, top, width, height] in pixels,
        `score`.
        """
        ids = self.category_ids or tuple(range(1, len(self.names) + 1))
        entries = []
        for detection in self:
            x1, y1, x2, y2 = detection.box_xyxy
            box = [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)]
            entry = {"image_id": image_id, "category_id": ids[detection.class_id], "bbox": box}
            entry |= {"score": short_score(detection.score)}
            if detection.track_id is not None:
                entry["track_id"] = detection.track_id
            entries.append(entry)
        return entries

    def to_yolo(self, scores: bool = False) -> str:
        """Returns a YOLO label file: `class x_centre y_centre width height` per line, 0..1.

        Args: scores: adds a sixth column, which training labels do not have.
        """
        height, width = self.image.shape[:2]
        lines = []
        for detection in self:
            x1, y1, x2, y2 = detection.box_xyxy
            centre = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height
            sides = (x2 - x1) / width, (y2 - y1) / height
            columns = [f"{part:.6f}" for part in (*centre, *sides)]
            columns += [str(short_score(detection.score))] if scores else []
            lines.append(f"{detection.class_id} {' '.join(columns)}\n")
        return "".join(lines)

    def to_voc(self) -> str:
        """Returns Pascal VOC XML with corners rounded to whole pixels, and the `score` of each box.

        Corners are edges, as `data.format: voc` reads them.
        """
        height, width, depth = self.image.shape
        root = ElementTree.Element("annotation")
        ElementTree.SubElement(root, "filename").text = _xml_text(Path(self.source).name)
        size = ElementTree.SubElement(root, "size")
        for tag, value in (("width", width), ("height", height), ("depth", depth)):
            ElementTree.SubElement(size, tag).text = str(value)
        for detection in self:
            element = ElementTree.SubElement(root, "object")
            ElementTree.SubElement(element, "name").text = _xml_text(detection.name)
            ElementTree.SubElement(element, "score").text = str(short_score(detection.score))
            box = ElementTree.SubElement(element, "bndbox")
            x1, y1, x2, y2 = detection.box_xyxy
            left, top = min(round(x1), width - 1), min(round(y1), height - 1)
            # Rounding may leave a box without area: each side keeps at least one pixel.
            corners = left, top, max(left + 1, round(x2)), max(top + 1, round(y2))
            for tag, corner in zip(("xmin", "ymin", "xmax", "ymax"), corners):
                ElementTree.SubElement(box, tag).text = str(corner)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def to_supervision(self) -> Any:
        """Returns `supervision.Detections`.

        Raises: ConfigError: that package is not installed.
        """
        try:
            import supervision
        except ImportError as error:
            raise _missing_package("supervision") from error
        return supervision.Detections(
            xyxy=self.boxes_xyxy,
            confidence=self.scores,
            class_id=self.class_ids,
            tracker_id=self.track_ids,
            data={"class_name": np.array([detection.name for detection in self], dtype=str)},
        )

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame`: x1, y1, x2, y2, score, class_id, name per object.

        Raises: ConfigError: that package is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise _missing_package(
                "pandas", ", or use summary(), which needs no package"
            ) from error
        columns: dict[str, Any] = dict(zip(("x1", "y1", "x2", "y2"), self.boxes_xyxy.T))
        columns |= {"score": self.scores, "class_id": self.class_ids}
        columns["name"] = [detection.name for detection in self]
        if self.track_ids is not None:
            columns["track_id"] = self.track_ids
        return pandas.DataFrame(columns)

    to_df = to_pandas  # the name in other libraries


def _has_desktop() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(variable) for variable in _DISPLAYS)


def short_score(score: float) -> float:
    """Rounds a score to the fewest digits that keep its float32."""
    return float(str(np.float32(score)))


def summarize_names(names: Iterable[str]) -> str:
    """Counts names as in "4 person, 1 bus"; "nothing" if there are none."""
    return ", ".join(f"{n} {name}" for name, n in Counter(names).most_common()) or "nothing"


def write_picture(path: Path, image_HW3: np.ndarray) -> None:
    """Writes a uint8 RGB image in the format of the suffix.

    Raises: DataError: OpenCV writes no such format; UserError: it cannot be written.
    """
    make_parent(path)
    try:
        # cv2.imwrite crashes on a name that is not UTF-8.
        image_bgr = cv2.cvtColor(image_HW3, cv2.COLOR_RGB2BGR)
        encoded, content = cv2.imencode(format_of(path.suffix), image_bgr)
    except cv2.error:
        encoded = False
    if not encoded:
        raise DataError("this format cannot hold the image", code="picture_format", where=str(path))
    with writing(path):
        replace_file(path, content.tobytes())


def draw_tracks(detections: Detections) -> np.ndarray:
    """Draws boxes labelled `person #3`, each object in a colour of its own."""
    objects = list(detections)[::-1]  # drawn last, so that the surest is on top
    boxes_N4 = detections.boxes_xyxy[::-1]
    texts, colours = [], []
    for detection in objects:
        track = "" if detection.track_id is None else f" #{detection.track_id}"
        texts.append(f"{readable(detection.name, detection.class_id)}{track} {detection.score:.2f}")
        colour_index = detection.class_id if detection.track_id is None else detection.track_id
        colours.append(PALETTE[colour_index % len(PALETTE)])
    return draw_labelled(detections.image, boxes_N4, texts, colours)


def _xml_text(text: str) -> str:
    """Replaces the characters that XML cannot hold with question marks."""
    return "".join(
        letter if letter >= " " and not "\ud800" <= letter < "\ue000" else "?" for letter in text
    )


def _missing_package(package: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"needs the package {package}, which is not installed",
        code="package_missing",
        fix=f"pip install {package}{instead}",
    )

"""Annotations of labelme, CVAT, VisDrone, KITTI and BDD100K, for `data convert` alone.

    folder -> detect_tool -> read_foreign -> RawSet of each split

Boxes, polygons, circles, ellipses and masks become boxes, and polygons outlines; points and lines
have no box.  The split of an image is the name of its subset (CVAT), folder (labelme, VisDrone,
KITTI) or file (BDD100K).
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from ppdist.common.errors import DataError
from ppdist.data.datasets.annotations import (
    Malformed,
    files_below,
    find_image,
    folders_below,
    guess_split,
    outline_extent,
    read_size,
    read_text,
    resolve_size,
)
from ppdist.data.datasets.coco import parse_int64
from ppdist.data.datasets.layout import detect_foreign_tool
from ppdist.data.datasets.plausibility import check_boxes
from ppdist.data.types import Box, Complain, Issue, RawColumns, RawImage, RawObject, RawSet

_NOT_OF_TOOL = (Malformed, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_IGNORED = "__ignore__"
_NO_CLASS = (_IGNORED, "_background_")  # names in labelme's label lists that are not classes
_IMAGES_OF = {"annotations": "images", "labels": "images", "label_2": "image_2"}  # folders
_IMAGE_SUFFIXES = (".jpg", ".png", ".jpeg")
# github.com/VisDrone/VisDrone2018-DET-toolkit: 0 are ignored regions, 11 is no class of its own.
_VISDRONE = {
    0: _IGNORED, 1: "pedestrian", 2: "people", 3: "bicycle", 4: "car", 5: "van", 6: "truck",
    7: "tricycle", 8: "awning-tricycle", 9: "bus", 10: "motor", 11: _IGNORED,
}  # fmt: skip


class _Shape(NamedTuple):
    """A shape in a tool's file.

    box: None if it has none.  group: shared by the shapes of one object; None if the shape is an
        object on its own.
    """

    name: str
    box: Box | None
    outlines: tuple[np.ndarray, ...]
    where: str
    group: Any = None


class _AnnotatedImage(NamedTuple):
    """An image as annotated by a tool.

    path: None if it is outside the folder, which is reported as an issue.
    sides: width and height in pixels as annotated; None if not annotated.
    """

    path: Path | None
    sides: tuple[Any, Any] | None
    subset: str
    shapes: Sequence[_Shape]
    where: str


def detect_tool(folder: Path) -> str:
    """Detects the tool or public data set whose annotations a folder contains; "": none of
    these.
    """
    return next((tool for _, tool in _find_tool_files(folder)), "")


def read_foreign(folder: Path, complain: Complain) -> dict[str, RawSet]:
    """Reads the splits of a folder that `detect_tool` recognises; all is train unless each image
    names its split.

    Raises: DataError: there is no object; see also `check_boxes`.
    """
    names: dict[str, None] = {}
    annotated_images: list[_AnnotatedImage] = []
    for file, tool in _find_tool_files(folder):
        try:
            annotated_images += _READERS[tool](file, folder, names, complain)
        except _NOT_OF_TOOL as error:
            message = f"not an annotation of {tool}: {error}"
            complain(Issue("annotation_unreadable", message, where=str(file)))
    used = {shape.name for annotated in annotated_images for shape in annotated.shapes}
    class_names = tuple(names) or tuple(sorted(used - {*_NO_CLASS}))
    if not used.intersection(class_names):
        raise DataError("no image has an object", code="objects_missing", where=str(folder))
    splits = [guess_split(annotated.subset) for annotated in annotated_images]
    images: defaultdict[str, list[RawImage]] = defaultdict(list)
    for annotated, split in zip(annotated_images, splits):
        if annotated.path is not None:
            name = split if all(splits) else "train"
            images[name].append(
                _make_image(annotated, len(images[name]) + 1, class_names, complain)
            )
    ids = tuple(range(1, len(class_names) + 1))
    splits_read = {
        n: RawSet(images_of_split, class_names, ids, str(folder))
        for n, images_of_split in images.items()
    }
    for raw in splits_read.values():
        check_boxes(RawColumns.of(raw, masks=False), "")
    return splits_read


def _find_tool_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields the annotation files below a folder, each with its tool."""
    empty, of_lines = list[Path](), ""
    for file in map(Path, files_below(folder)):
        tool, _ = detect_foreign_tool(file)
        if tool in _READERS:
            yield file, tool
            of_lines = tool if file.suffix.lower() == ".txt" else of_lines
        elif file.suffix.lower() == ".txt" and not file.stat().st_size:
            empty.append(file)
    if of_lines:  # empty files are those of images without objects
        yield from ((file, of_lines) for file in empty)


def _make_image(
    source: _AnnotatedImage, number: int, class_names: Sequence[str], complain: Complain
) -> RawImage:
    assert source.path is not None
    if source.sides is None:
        size = read_size(source.path)
    else:
        annotated = "width {!r:.20}, height {!r:.20}".format(*source.sides)
        width, height = map(parse_int64, source.sides)
        size = resolve_size(source.path, width, height, annotated, source.where, complain)
    objects: dict[Any, RawObject] = {}
    for place, shape in enumerate(source.shapes):
        if shape.name in _NO_CLASS:
            continue
        problem = "has no box: a point, a line or a malformed shape" if shape.box is None else ""
        if problem or shape.name not in class_names:
            message = problem or f"class {shape.name!r} is not one of {', '.join(class_names)}"
            code = "shape_unread" if problem else "class_unknown"
            complain(Issue(code, message, str(source.path), shape.where))
            continue
        assert shape.box is not None
        key = place if shape.group is None else (shape.name, shape.group)
        previous = objects.get(key)
        annotation = RawObject(
            shape.box, class_names.index(shape.name), shape.where, polygons=shape.outlines
        )
        objects[key] = annotation if previous is None else _merge_objects(previous, annotation)
    annotations = [*objects.values()]
    # An image whose shapes cannot be used is not background.
    lost = len(source.shapes) if source.shapes and not annotations else 0
    return RawImage(
        source.path, number, size.width, size.height, annotations, source.where,
        size_known=size.is_known, lost=lost,
    )  # fmt: skip


def _merge_objects(first: RawObject, second: RawObject) -> RawObject:
    (x1, y1, x2, y2), (left, top, right, bottom) = first.box, second.box
    box = min(x1, left), min(y1, top), max(x2, right), max(y2, bottom)
    return RawObject(box, first.label, first.where, polygons=first.polygons + second.polygons)


def _read_labelme(
    file: Path, folder: Path, names: dict[str, None], complain: Complain
) -> Iterator[_AnnotatedImage]:
    """Yields the image of a labelme file.

    Raises: Malformed, ValueError, KeyError, TypeError: the file is of another kind.
    """
    content = json.loads(read_text(file, complain))
    name = str(content.get("imagePath") or f"{file.stem}.jpg")
    inside = os.path.relpath(file.parent, folder)
    path = find_image(folder, os.path.normpath(os.path.join(inside, name)), str(file), complain)
    shapes = []
    for number, shape in enumerate(content["shapes"], start=1):
        points_K2 = np.array(shape["points"], np.float64).reshape(-1, 2)
        kind = shape.get("shape_type") or "polygon"
        box: Box | None = None
        if kind in ("rectangle", "mask"):
            (x1, y1), (x2, y2) = points_K2.min(0).tolist(), points_K2.max(0).tolist()
            box = x1, y1, x2, y2
        elif kind == "circle":
            (x, y), edge = points_K2.tolist()
            radius = math.dist((x, y), edge)
            box = x - radius, y - radius, x + radius, y + radius
        elif kind == "polygon":
            box = outline_extent([points_K2.reshape(-1).tolist()])
        polygons = (points_K2,) if box and kind == "polygon" else ()
        where = f"{file}: shape {number}"
        shapes.append(_Shape(str(shape["label"]), box, polygons, where, shape.get("group_id")))
    sides = content.get("imageWidth"), content.get("imageHeight")
    yield _AnnotatedImage(path, sides, file.parent.name, shapes, str(file))


def _read_cvat(
    file: Path, folder: Path, names: dict[str, None], complain: Complain
) -> Iterator[_AnnotatedImage]:
    """Yields the images of a file in the format "CVAT for images 1.1".

    Args: names: receives the classes that the annotation task in the file declares.
    Raises: Malformed, ValueError, KeyError, TypeError: the file is of another kind.
    """
    text = read_text(file, complain)
    # A few entities can expand to gigabytes.
    if "<!ENTITY" in text:
        raise ValueError("it defines XML entities")
    try:
        tree = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(error) from error
    names |= dict.fromkeys((entry.findtext("name") or "").strip() for entry in tree.iter("label"))
    names.pop("", None)
    for image in tree.iter("image"):
        where = f"{file}: image {image.get('name')!r}"
        name, subset = image.attrib["name"], image.get("subset") or ""
        images = file.parent / "images"
        places = [
            candidate for candidate in (images / subset, images) if (candidate / name).is_file()
        ]
        path = find_image([*places, folder][0], name, where, complain)
        shapes = [
            _Shape(
                shape.attrib["label"], *_parse_cvat_shape(shape), f"{where}: {shape.tag} {number}"
            )
            for number, shape in enumerate(image, start=1)
            if shape.tag != "tag"  # it describes the whole image
        ]
        sides = int(image.get("width") or 0), int(image.get("height") or 0)
        yield _AnnotatedImage(path, sides, subset, shapes, where)


def _parse_cvat_shape(shape: ElementTree.Element) -> tuple[Box | None, tuple[np.ndarray, ...]]:
    """Parses the box and outlines of a shape; a rotated box becomes the box around its corners."""

    def numbers(*keys: str) -> list[float]:
        return [float(shape.attrib[key]) for key in keys]

    if shape.tag == "polygon":
        pairs = [point.split(",") for point in shape.attrib["points"].split(";")]
        outline = [float(value) for pair in pairs for value in pair]
        box = outline_extent([outline])
        return box, (np.array(outline).reshape(-1, 2),) if box else ()
    if shape.tag == "mask":
        left, top, width, height = numbers("left", "top", "width", "height")
        return (left, top, left + width, top + height), ()
    if shape.tag not in ("box", "ellipse"):
        return None, ()
    angle = math.radians(float(shape.get("rotation") or 0))
    cos, sin = abs(math.cos(angle)), abs(math.sin(angle))
    if shape.tag == "box":
        x1, y1, x2, y2 = numbers("xtl", "ytl", "xbr", "ybr")
        if not angle:
            return (x1, y1, x2, y2), ()
        x, y, rx, ry = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2
        half_x, half_y = rx * cos + ry * sin, rx * sin + ry * cos
    else:
        x, y, rx, ry = numbers("cx", "cy", "rx", "ry")
        half_x, half_y = math.hypot(rx * cos, ry * sin), math.hypot(rx * sin, ry * cos)
    return (x - half_x, y - half_y, x + half_x, y + half_y), ()


def _read_visdrone(
    file: Path, folder: Path, names: dict[str, None], complain: Complain
) -> Iterator[_AnnotatedImage]:
    """Yields the image of a VisDrone-DET file.

    A line is left,top,width,height,score,class,truncation,occlusion.

    Raises: ValueError, KeyError: the file is of another kind.
    """
    names |= dict.fromkeys(name for name in _VISDRONE.values() if name != _IGNORED)
    shapes = []
    for where, line in _read_lines(file, complain):
        left, top, width, height, _, label, *_ = map(int, line.rstrip(",").split(","))
        box = float(left), float(top), float(left + width), float(top + height)
        shapes.append(_Shape(_VISDRONE[label], box, (), where))
    yield _find_image_beside(file, folder, shapes, complain)


def _read_kitti(
    file: Path, folder: Path, names: dict[str, None], complain: Complain
) -> Iterator[_AnnotatedImage]:
    """Yields the image of a KITTI file.

    A line is a class, three numbers, x1 y1 x2 y2, and a box in three dimensions.

    Raises: ValueError: the file is of another kind.
    """
    shapes = []
    for where, line in _read_lines(file, complain):
        name, _, _, _, *numbers = line.split()
        x1, y1, x2, y2 = map(float, numbers[:4])
        name = _IGNORED if name == "DontCare" else name
        shapes.append(_Shape(name, (x1, y1, x2, y2), (), where))
    yield _find_image_beside(file, folder, shapes, complain)


def _read_lines(file: Path, complain: Complain) -> Iterator[tuple[str, str]]:
    """Yields the location, `file:line`, and the text of each non-empty line."""
    for number, line in enumerate(read_text(file, complain).splitlines(), start=1):
        if line.strip():
            yield f"{file}:{number}", line.strip()


def _find_image_beside(
    file: Path, folder: Path, shapes: Sequence[_Shape], complain: Complain
) -> _AnnotatedImage:
    """Finds the image of a text file: annotations/train/a.txt belongs to images/train/a.jpg."""
    inside = Path(os.path.relpath(file.parent, folder))
    place = folder.joinpath(*(_IMAGES_OF.get(part, part) for part in inside.parts))
    names = [f"{file.stem}{suffix}" for suffix in _IMAGE_SUFFIXES]
    name = next((name for name in names if (place / name).is_file()), names[0])
    path = find_image(place, name, str(file), complain)
    return _AnnotatedImage(path, None, str(inside), shapes, str(file))


def _read_bdd100k(
    file: Path, folder: Path, names: dict[str, None], complain: Complain
) -> Iterator[_AnnotatedImage]:
    """Yields the images of a BDD100K (Scalabel) file.

    Lanes and areas have no box and are left out.

    Raises: one of _NOT_OF_TOOL: the file is of another kind.
    """
    content = json.loads(read_text(file, complain))
    frames = content if isinstance(content, list) else content["frames"]
    split = guess_split(file.stem)
    holding = [place for place in folders_below(folder) if _has_file(place, frames[0]["name"])]
    of_split = [place for place in holding if guess_split(os.path.relpath(place, folder)) == split]
    place = Path([*of_split, *holding, str(folder)][0])
    for frame in frames:
        where = f"{file}: image {frame['name']!r}"
        shapes = []
        for number, label in enumerate(frame.get("labels") or (), start=1):
            if label.get("box2d"):
                x1, y1, x2, y2 = (float(label["box2d"][key]) for key in ("x1", "y1", "x2", "y2"))
                shape_where = f"{where}: label {number}"
                shapes.append(_Shape(str(label["category"]), (x1, y1, x2, y2), (), shape_where))
        path = find_image(place, frame["name"], where, complain)
        yield _AnnotatedImage(path, None, split, shapes, where)


def _has_file(place: str, name: str) -> bool:
    return os.path.isfile(os.path.join(place, name))


_READERS: dict[str, Callable[..., Iterator[_AnnotatedImage]]] = {
    "labelme": _read_labelme,
    "CVAT": _read_cvat,
    "VisDrone": _read_visdrone,
    "KITTI": _read_kitti,
    "BDD100K": _read_bdd100k,
}
